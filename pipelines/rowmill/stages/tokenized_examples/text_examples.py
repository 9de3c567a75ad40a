"""Canonical rows → tokenized examples: rendering, masking, truncation and tokenization.

What belongs here: the order of those steps for one batch of rows of each kind, and the resulting examples. What does
not: any step's work, or files (`text_parts.py`).

    conversation   render ─► mask ─► encode ─► too long? truncate, and again ─► Example
    pair           encode input, encode output as its continuation ─► BOS input sep output EOS
    text           encode ─► BOS text EOS ─► too long? windows, or the first tokens

Tokens are handled in columns; there is a Python object per message, never per token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.conversation.masking import Masker, MaskRules
from rowmill.conversation.rendering.options import RendererSpec
from rowmill.conversation.rendering.renderer import Renderer
from rowmill.conversation.template_contract import find_mismatched_prompts, list_template_warnings
from rowmill.conversation.truncation import ConversationTruncator, OverlongPolicy, TruncatedConversation
from rowmill.core.arrays import Ints, Tokens
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json, from_json, from_json_column, to_json
from rowmill.formats.built_examples import BuiltExample, check_built_example
from rowmill.formats.custom import BuildContext
from rowmill.formats.kind import TokenBuilder
from rowmill.formats.reasoning import inline_reasoning, limit_reasoning
from rowmill.recipe.dataset import Dataset
from rowmill.schema.conversation import Conversation
from rowmill.schema.examples import SPAN_KINDS, WEIGHT_COLUMN, ExampleTokens
from rowmill.schema.rows import MaskedConversation, Message, Rejected, RowKind, Span
from rowmill.stages.tokenized_examples.fast_path import BatchedChatPath
from rowmill.stages.tokenized_examples.prompt_parity import begins_with, choose_rows, print_prompt
from rowmill.tokenization.concatenation import (
    TokenColumn,
    concat_token_columns,
    count_straddling,
    make_constant_column,
    omit_existing_token,
    split_at_byte,
)
from rowmill.tokenization.control_tokens import ControlStrings, has_changed_placeholder, restore_control_strings
from rowmill.tokenization.encoded_batch import TEMPLATE_KIND, Example
from rowmill.tokenization.encoder import Encoder
from rowmill.tokenization.example_columns import ExampleColumns, concat_columns, make_columns, sort_by_row
from rowmill.tokenization.example_encoding import (
    TokenizationCounts,
    encode_and_compare,
    encode_continuations_and_compare,
    make_examples,
)
from rowmill.tokenization.token_truncation import cut_pair, prepend_bos, split_into_windows, truncate_tokens

BATCH_CHARS = 1 << 20
"""Characters of rows per batch: enough for the columnar steps, little for memory (some 60 MB)."""

RowOutcome = list[Example] | Rejected
"""The outcome of one row: its examples in order, or its reject."""


@dataclass(frozen=True, slots=True)
class PreparedExamples:
    """The outcome of a part's rows: examples in `EXAMPLE_SCHEMA`, in row order, and rejects by row.

    `places` int64[E] are the rows of the examples; `verified` counts examples whose token mask agrees with their spans
    (`batches.Columns.verified`).
    """

    examples: pa.Table
    places: Ints
    rejected: list[tuple[int, Rejected]]
    verified: int

    def outcomes(self, rows: int) -> "list[list[ExampleTokens] | Rejected]":
        """Return the ids and masks of each row's examples, or its reject."""
        bounds = np.asarray(self.examples.column("input_ids").combine_chunks().offsets)
        ids, mask = self._flatten_column("input_ids"), self._flatten_column("loss_mask")
        weights = self._flatten_column(WEIGHT_COLUMN) if WEIGHT_COLUMN in self.examples.column_names else None
        found: list[list[ExampleTokens] | Rejected] = [[] for _ in range(rows)]
        for place, rejected in self.rejected:
            found[place] = rejected
        for j, place in enumerate(self.places.tolist()):
            held = found[place]
            if not isinstance(held, Rejected):
                own = slice(int(bounds[j] - bounds[0]), int(bounds[j + 1] - bounds[0]))
                held.append(ExampleTokens(ids[own], mask[own], None if weights is None else weights[own]))
        return found

    def _flatten_column(self, name: str) -> "NDArray[Any]":
        return self.examples.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)


def _get_place(rejected: tuple[int, Rejected]) -> int:
    return rejected[0]


# ── Rows of a part ─────────────────────────────────────────────────────────────────────────────────


def decode_conversations(table: pa.Table) -> list[Conversation]:
    """Decode the conversations of a table of canonical rows."""
    messages, tools, kwargs = (
        from_json_column(table.column(name)) for name in ("messages", "tools", "template_kwargs")
    )
    hashes = table.column("content_hash").to_pylist()
    return [
        Conversation(m, t, {} if k is None else k, h)
        for m, t, k, h in zip(messages, tools, kwargs, hashes, strict=True)
    ]


def hide_control_strings(one: Conversation, control: ControlStrings) -> "tuple[Conversation, dict[str, str]]":
    """Return the conversation with placeholders for control strings, and the string of each placeholder."""
    value = [one.messages, one.tools, one.kwargs]
    hidden, placeholders = control.hide(value, to_json(value))
    messages, tools, kwargs = cast("list[Any]", hidden)
    return Conversation(messages, tools, kwargs, one.row_hash), placeholders


def show_control_strings(
    masked: MaskedConversation, placeholders: dict[str, str]
) -> "tuple[MaskedConversation, list[tuple[int, int]]]":
    """Restore control strings in a masked text; return it and their positions."""
    if not placeholders:
        return masked, []
    text, ranges = restore_control_strings(masked.text, placeholders)
    return replace(masked, text=text), ranges


def cut_batches(sizes: Sequence[int], limit: int) -> Iterator[slice]:
    """Cut rows into consecutive batches of about `limit` characters."""
    begin, held = 0, 0
    for i, size in enumerate(sizes):
        held += size
        if held >= limit:
            yield slice(begin, i + 1)
            begin, held = i + 1, 0
    if begin < len(sizes):
        yield slice(begin, len(sizes))


class ExampleBuilder:
    """Builds examples from one dataset's rows; opened once per process.

    More than 250 lines, because all kinds of rows share the limit, its policies and the counts, and a conversation that
    is too long goes through rendering, masking and encoding again.
    """

    def __init__(
        self, encoder: Encoder, dataset: Dataset, spec: RendererSpec | None, limit: int, *, base: Path = Path()
    ) -> None:
        """Open the renderer and the masker, if the dataset's kind has a template; `base` is the project's folder."""
        self._base = base
        self._build_tokens: TokenBuilder | None = None
        self._encoder = encoder
        self._dataset = dataset
        self._token_options = dataset.format.get_token_options()
        self._limit = limit
        self._printer = None if spec is None else Renderer(spec)
        self._masker = (
            None if self._printer is None else Masker(self._printer, dataset.loss, _build_mask_rules(dataset))
        )
        self._control = None if spec is None else ControlStrings(encoder.card, spec.text)
        self._cuts_apart = dataset.loss.boundary == "split"
        self._chat_bos = _resolve_chat_bos(encoder, dataset)
        self._chats = self._open_chat_path()

    def _open_chat_path(self) -> BatchedChatPath | None:
        """Open the fast path of plain chats; rows over the limit leave it again, unless they are kept as they are."""
        if self._masker is None or self._control is None or self._cuts_apart or self._chat_bos is not None:
            return None
        as_it_is = self._get_overlong_policy("conversation") in ("keep", "raise")
        return BatchedChatPath(
            self._masker,
            self._encoder,
            self._control,
            limit=None if as_it_is else self._limit,
            share=self._dataset.template.verify_render,
        )

    def _describe_template(self) -> dict[str, Any]:
        if self._printer is None:
            return {}
        contract = self._printer.contract
        return {
            "warnings": list_template_warnings(contract, finish=self._dataset.loss.finish),
            "prompts": find_mismatched_prompts(contract),
            "dated": contract.date_dependent,
        }

    @property
    def printer(self) -> Renderer | None:
        """The renderer, for inspecting its output."""
        return self._printer

    def prepare(self, table: pa.Table, counts: TokenizationCounts) -> PreparedExamples:
        """Build examples from canonical rows; a row's outcome does not depend on other rows."""
        made: list[ExampleColumns] = []
        rejected: list[tuple[int, Rejected]] = []
        counts.template = self._describe_template()
        kinds = table.column("kind").to_numpy(zero_copy_only=False)
        ways = (("conversation", self._build_conversations), ("pair", self._build_pairs), ("text", self._build_texts))
        for kind, prepare in (*ways, ("record", self._build_own_examples)):
            places = np.flatnonzero(kinds == kind)
            rows = table if len(places) == table.num_rows else table.take(pa.array(places))
            for part in cut_batches(_count_row_bytes(rows), BATCH_CHARS):
                some, own = rows.slice(part.start, part.stop - part.start), places[part]
                if kind == "conversation":
                    some, own = self._build_plain_chats(some, own, counts, made)
                held: list[tuple[int, int, Example]] = []
                for place, outcome in zip(own.tolist(), prepare(some, counts), strict=True):
                    settled = _require_targets(outcome, counts)
                    if isinstance(settled, Rejected):
                        rejected.append((place, settled))
                    else:
                        held.extend((place, k, one) for k, one in enumerate(settled))
                made += [make_columns(held)] if held else []
        columns = concat_columns(made or [make_columns([])])
        names = (table.column(name).combine_chunks() for name in ("row_id", "split", "domain"))
        return PreparedExamples(
            examples=sort_by_row(columns.table(*names, weighted=self._dataset.loss.weights), columns),
            places=np.sort(columns.rows),
            rejected=sorted(rejected, key=_get_place),
            verified=columns.verified(),
        )

    def compare_prompts(self, table: pa.Table, counts: TokenizationCounts) -> None:
        """Encode the generation prompts of some conversations alone, as a server does, and compare."""
        if self._masker is None or self._printer is None or self._control is None:
            return
        rows = table.filter(pc.equal(table.column("kind"), "conversation"))
        # A control string in a row's text is encoded differently on purpose; `control_strings` counts such rows.
        rows = rows.filter(pa.array(~self._control.find_rows(rows)))
        chosen = choose_rows(rows.column("content_hash").to_pylist(), self._dataset.template.verify_render)
        rows = rows.take(pa.array(chosen, pa.int64()))
        names: list[str] = rows.column("row_id").to_pylist()
        printed = (
            print_prompt(row_id, self._inline_reasoning(self._limit_reasoning(one)), self._printer, self._masker)
            for row_id, one in zip(names, decode_conversations(rows), strict=True)
        )
        pairs = [one for one in printed if one is not None]
        # Counted separately, because these rows were already counted.
        examples = self._encode_masked([one.masked for one in pairs], [[]] * len(pairs), TokenizationCounts())
        prompts = self._encode_prompts([one.prompt for one in pairs])
        for one, example, prompt in zip(pairs, examples, prompts, strict=True):
            if not isinstance(example, Rejected):
                counts.prompts_compared += 1
                counts.prompts_that_differ += [] if begins_with(example.ids, prompt) else [one.row_id]

    def _encode_prompts(self, prompts: Sequence[str]) -> list[Tokens]:
        encoded, bos = encode_and_compare(self._encoder, prompts, TokenizationCounts()), self._chat_bos
        each = np.split(encoded.ids, encoded.offsets[1:-1]) if prompts else []
        if bos is None:
            return each
        first = np.array([bos], encoded.ids.dtype)
        return [ids if len(ids) and int(ids[0]) == bos else np.concatenate((first, ids)) for ids in each]

    # ── conversations ──

    def _build_plain_chats(
        self, rows: pa.Table, places: Ints, counts: TokenizationCounts, made: list[ExampleColumns]
    ) -> tuple[pa.Table, Ints]:
        """Build plain chats as a batch; return the other rows, which take the reference path."""
        columns = None if self._chats is None else self._chats.take(rows, places, counts)
        if columns is None:
            return rows, places
        made.append(columns)
        left = ~np.isin(places, columns.rows)
        return rows.filter(pa.array(left)), places[left]

    def _build_conversations(self, rows: pa.Table, counts: TokenizationCounts) -> list[RowOutcome]:
        if self._masker is None:
            return [
                Rejected("template_error", "neither the tokenizer nor the recipe has a chat template")
            ] * rows.num_rows
        assert self._control is not None
        decoded = decode_conversations(rows)
        controlled = self._control.find_rows(rows)
        drafts: list[_RenderedCandidate] = []
        outcomes: list[RowOutcome] = [[] for _ in decoded]
        for place, conversation in enumerate(decoded):
            made = self._render_candidates(place, conversation, bool(controlled[place]), counts)
            if isinstance(made, Rejected):
                outcomes[place] = made
            else:
                drafts.extend(made)
        for draft, example in zip(drafts, self._encode_candidates(drafts, counts), strict=True):
            held = outcomes[draft.place]
            if isinstance(held, Rejected):
                continue
            made = self._fit_to_limit(draft, example, counts) if not isinstance(example, Rejected) else example
            outcomes[draft.place] = made if isinstance(made, Rejected) else [*held, *made]
        return outcomes

    def _render_candidates(
        self, place: int, conversation: Conversation, controlled: bool, counts: TokenizationCounts
    ) -> "list[_RenderedCandidate] | Rejected":
        assert self._masker is not None
        assert self._control is not None
        placeholders: dict[str, str] = {}
        before = conversation
        policy = self._dataset.template.control_tokens
        if controlled and policy != "allow":
            if policy == "reject":
                return Rejected("control_token_in_content", "the row's text holds a control string")
            try:
                conversation, placeholders = hide_control_strings(conversation, self._control)
            except ConfigError as error:
                # The control token has one character and the row uses every letter and digit: no placeholder is free.
                return Rejected("control_token_in_content", str(error))
        if controlled:
            counts.add_control_strings(self._control, before)
        conversation = self._limit_reasoning(conversation)
        drafts: list[_RenderedCandidate] = []
        for one, only in self._masker.split_turns(conversation):
            masked = self._masker.mask(self._inline_reasoning(one), only=only)
            if isinstance(masked, Rejected):
                return masked
            if has_changed_placeholder(masked.text, placeholders):
                return Rejected("control_token_in_content", "the template changes the stand-in of a control string")
            counts.add_dropped(masked.dropped)
            masked, ordinary = show_control_strings(masked, placeholders)
            drafts.append(_RenderedCandidate(place, one, only, placeholders, masked, ordinary))
        return drafts

    def _limit_reasoning(self, conversation: Conversation) -> Conversation:
        limit = self._dataset.reasoning.think_max_tokens
        if not limit:
            return conversation
        return replace(conversation, messages=limit_reasoning(conversation.messages, limit, self._cut_reasoning))

    def _inline_reasoning(self, conversation: Conversation) -> Conversation:
        """Return the template's input: with `think_mode: inline`, reasoning is at the start of the content."""
        options = self._dataset.reasoning
        if options.think_mode != "inline":
            return conversation
        return replace(conversation, messages=inline_reasoning(conversation.messages, options.think_tags[0]))

    def _encode_candidates(
        self, drafts: "Sequence[_RenderedCandidate]", counts: TokenizationCounts
    ) -> "list[Example | Rejected]":
        return self._encode_masked([d.masked for d in drafts], [d.ordinary for d in drafts], counts)

    def _encode_masked(
        self,
        masked: Sequence[MaskedConversation],
        ordinary: Sequence[list[tuple[int, int]]],
        counts: TokenizationCounts,
    ) -> "list[Example | Rejected]":
        made = make_examples(masked, ordinary, self._encoder, counts, split=self._cuts_apart)
        bos = self._chat_bos
        return made if bos is None else [one if isinstance(one, Rejected) else prepend_bos(one, bos) for one in made]

    def _fit_to_limit(self, draft: "_RenderedCandidate", example: Example, counts: TokenizationCounts) -> RowOutcome:
        """Apply the overlong policy to one example."""
        settled = self._apply_overlong_policy(example, "conversation", counts)
        if settled is not None:
            return settled
        splits = self._dataset.truncation.overlong == "split"
        shortened = self._truncate_candidate(draft, example, counts, split=splits)
        if isinstance(shortened, Rejected):
            return _reject_for_length(example, shortened, counts)
        if splits:
            counts.dropped_trained += max(0, example.original_trained - sum(one.original_trained for one in shortened))
        return shortened

    def _apply_overlong_policy(self, example: Example, kind: RowKind, counts: TokenizationCounts) -> RowOutcome | None:
        """Return the outcome of an example that is not shortened; None if it is."""
        policy = self._get_overlong_policy(kind)
        if len(example.ids) <= self._limit or policy in ("keep", "raise"):
            return [example]
        if policy == "drop":
            return _reject_for_length(
                example, Rejected("overlong", f"{len(example.ids)} tokens, at most {self._limit}"), counts
            )
        return None

    def _get_overlong_policy(self, kind: RowKind) -> OverlongPolicy:
        return self._dataset.truncation.policy(kind, sliced=self._dataset.keeps_overlong)

    def _truncate_candidate(
        self, draft: "_RenderedCandidate", original: Example, counts: TokenizationCounts, *, split: bool
    ) -> RowOutcome:
        assert self._masker is not None
        supervised = frozenset(self._masker.supervised(draft.conversation.messages))
        chosen = supervised if draft.only is None else supervised & draft.only
        flags = [i in chosen for i in range(len(draft.conversation.messages))]
        truncater = ConversationTruncator(
            limit=self._limit,
            measure=lambda messages, tools: self._count_rendered_tokens(draft, messages, tools),
            cut_reasoning=self._cut_reasoning,
            assistant_roles=_build_mask_rules(self._dataset).assistant_roles,
            token_cut=self._dataset.truncation.token_cut,
        )
        messages, tools = draft.conversation.messages, draft.conversation.tools
        shortened = truncater.split(messages, tools, flags) if split else truncater.truncate(messages, tools, flags)
        if isinstance(shortened, Rejected):
            return shortened
        pieces = shortened if isinstance(shortened, list) else [shortened]
        made: list[Example] = []
        for piece in pieces:
            example = self._rerender_piece(draft, piece, chosen, counts)
            if isinstance(example, Rejected):
                return example
            counts.dropped_tokens += piece.tokens_left_out
            made.append(self._attribute_removed_tokens(draft, example, None if split else original, piece, chosen))
        return made

    def _rerender_piece(
        self,
        draft: "_RenderedCandidate",
        piece: TruncatedConversation,
        chosen: frozenset[int],
        counts: TokenizationCounts,
    ) -> Example | Rejected:
        """Render and mask a shortened conversation, and cut tokens if structure was not enough."""
        example = self._rerender(draft, piece.messages, piece.kept, chosen, counts, piece.reasoning_context)
        if isinstance(example, Rejected) or len(example.ids) <= self._limit:
            return example
        return truncate_tokens(example, self._limit, self._dataset.truncation.truncate_side, self._encoder.card.bos_id)

    def _rerender(
        self,
        draft: "_RenderedCandidate",
        messages: Sequence[Message],
        kept: Sequence[int],
        chosen: frozenset[int],
        counts: TokenizationCounts,
        reasoning_context: Sequence[int] = (),
    ) -> Example | Rejected:
        """Render and mask some of a conversation's messages; `kept[i]` is the original index of `messages[i]`."""
        assert self._masker is not None
        conversation = replace(draft.conversation, messages=list(messages))
        only = frozenset(new for new, old in enumerate(kept) if old in chosen)
        masked = self._masker.mask(self._inline_reasoning(conversation), only=only)
        if isinstance(masked, Rejected):
            return masked
        masked = _mask_cut_reasoning(masked, frozenset(reasoning_context))
        masked, ordinary = show_control_strings(masked, draft.placeholders)
        return self._encode_masked([masked], [ordinary], counts)[0]

    def _attribute_removed_tokens(
        self,
        draft: "_RenderedCandidate",
        example: Example,
        original: Example | None,
        piece: TruncatedConversation,
        chosen: frozenset[int],
    ) -> Example:
        """Attribute the removed tokens to the stages of truncation, so that original = tokens + removed.

        Without `original`, the example is one of several pieces, and its own length before shortening counts.
        """
        left = int(example.mask.sum()) + example.cut_trained
        after_exchanges = left
        if piece.reasoning_removed or piece.reasoning_context:
            after_exchanges = self._count_trained_tokens(draft, piece.kept, chosen, otherwise=left)
        tokens, trained = piece.original_tokens, after_exchanges
        if original is not None:
            tokens, trained = len(original.ids), original.original_trained
        elif piece.messages_removed:
            trained = self._count_trained_tokens(draft, piece.whole, chosen, otherwise=after_exchanges)
        return replace(
            example,
            original_tokens=tokens,
            original_trained=trained,
            messages_removed=piece.messages_removed,
            exchanges_removed=tokens - len(example.ids) - example.tokens_cut - piece.reasoning_removed,
            reasoning_removed=piece.reasoning_removed,
            exchanges_trained=trained - after_exchanges,
            reasoning_trained=after_exchanges - left,
        )

    def _count_trained_tokens(
        self, draft: "_RenderedCandidate", kept: Sequence[int], chosen: frozenset[int], *, otherwise: int
    ) -> int:
        """Count the trained tokens of some of a conversation's messages, `otherwise` if they have no mask."""
        messages = [draft.conversation.messages[i] for i in kept]
        example = self._rerender(draft, messages, kept, chosen, TokenizationCounts())
        return otherwise if isinstance(example, Rejected) else int(example.mask.sum())

    def _count_rendered_tokens(
        self, draft: "_RenderedCandidate", messages: Sequence[Message], tools: "Sequence[Json] | None"
    ) -> int | None:
        assert self._printer is not None
        assert self._masker is not None
        shown = self._inline_reasoning(replace(draft.conversation, messages=messages, tools=tools))
        if self._cuts_apart:
            # The cut of a text is known only with its mask.
            masked = self._masker.mask(shown)
            if isinstance(masked, MaskedConversation):
                masked, ordinary = show_control_strings(masked, draft.placeholders)
                example = self._encode_masked([masked], [ordinary], TokenizationCounts())[0]
                return None if isinstance(example, Rejected) else len(example.ids)
        printed = self._printer.render(shown.messages, tools, draft.conversation.kwargs)
        if isinstance(printed, Rejected):
            return None
        text, ranges = restore_control_strings(printed.text, draft.placeholders)
        encoded = self._encoder.encode_around(text, ranges) if ranges else self._encoder.encode([text])
        has_bos = self._chat_bos is None or (len(encoded.ids) > 0 and int(encoded.ids[0]) == self._chat_bos)
        return len(encoded.ids) + (not has_bos)

    def _cut_reasoning(self, text: str, max_tokens: int) -> str:
        encoded = self._encoder.encode([text])
        if len(encoded.ids) <= max_tokens:
            return text
        if max_tokens <= 0:
            return ""
        return text.encode()[: int(encoded.ends[max_tokens - 1])].decode(errors="ignore")

    # ── pairs and documents ──

    def _build_pairs(self, rows: pa.Table, counts: TokenizationCounts) -> list[RowOutcome]:
        count, card, separator = rows.num_rows, self._encoder.card, self._token_options.separate_with
        joint = separator if isinstance(separator, str) else ""
        inputs: list[str] = [text + joint for text in rows.column("text").to_pylist()]
        outputs: list[str] = rows.column("output").to_pylist()
        prompt, answer = SPAN_KINDS.index("prompt"), SPAN_KINDS.index("assistant")
        trains_input, trains_output = _resolve_pair_loss(self._dataset)
        streams = [*self._make_edge_column("add_bos", card.bos_id, card.adds_bos, count, trains=False)]
        if self._dataset.loss.boundary == "whole":
            encoded = encode_and_compare(self._encoder, [a + b for a, b in zip(inputs, outputs, strict=True)], counts)
            edges = np.array([len(text.encode()) for text in inputs], np.int64)
            given, answers = split_at_byte(encoded, edges, straddlers_first=trains_output)
            counts.straddles += count_straddling(encoded, edges)
        else:
            given = encode_and_compare(self._encoder, inputs, counts)
            answers = encode_continuations_and_compare(self._encoder, outputs, counts)
        streams.append(TokenColumn(given.ids, given.offsets, prompt, trains_input))
        if isinstance(separator, int):
            streams.append(make_constant_column(separator, count, kind=prompt, trains=trains_input))
        streams.append(TokenColumn(answers.ids, answers.offsets, answer, trains_output))
        streams += self._make_edge_column("add_eos", card.eos_id, card.eos_id is not None, count, trains=trains_output)
        first = 1 if streams[0].kind == TEMPLATE_KIND else 0
        sizes = np.diff(given.offsets)
        return [
            self._fit_pair(one, int(sizes[i]), first, counts) for i, one in enumerate(concat_token_columns(streams))
        ]

    def _fit_pair(self, example: Example, input_tokens: int, first: int, counts: TokenizationCounts) -> RowOutcome:
        settled = self._apply_overlong_policy(example, "pair", counts)
        if settled is not None:
            return settled
        return [cut_pair(example, self._limit, self._dataset.truncation.truncate_side, input_tokens, first)]

    def _build_texts(self, rows: pa.Table, counts: TokenizationCounts) -> list[RowOutcome]:
        card, texts = self._encoder.card, rows.column("text").to_pylist()
        encoded = encode_and_compare(self._encoder, texts, counts)
        streams = [
            *self._make_edge_column("add_bos", card.bos_id, card.bos_id is not None, len(texts), trains=False),
            TokenColumn(encoded.ids, encoded.offsets, SPAN_KINDS.index("record"), trains=True),
            *self._make_edge_column("add_eos", card.eos_id, card.eos_id is not None, len(texts), trains=True),
        ]
        if streams[0].kind == TEMPLATE_KIND:
            streams[0] = omit_existing_token(streams[0], encoded, 0)
        if streams[-1].kind == TEMPLATE_KIND:
            streams[-1] = omit_existing_token(streams[-1], encoded, -1)
        return [self._fit_text(one, counts) for one in concat_token_columns(streams)]

    def _fit_text(self, example: Example, counts: TokenizationCounts) -> RowOutcome:
        settled = self._apply_overlong_policy(example, "text", counts)
        if settled is not None:
            return settled
        return (
            split_into_windows(example, self._limit)
            if self._get_overlong_policy("text") == "split"
            else [example.cut(0, self._limit)]
        )

    # ── tokens that the kind builds itself ──

    def _build_own_examples(self, rows: pa.Table, counts: TokenizationCounts) -> list[RowOutcome]:
        records = rows.column("record").to_pylist()
        if self._build_tokens is None and records:
            context = BuildContext(self._encoder.to_transformers, self._dataset, self._limit)
            self._build_tokens = self._dataset.format.open_example_builder(context, self._base)
        if self._build_tokens is None:
            why = Rejected("bad_example", f"a {self._dataset.format.get_name()} dataset builds no tokens of records")
            return [why] * len(records)
        vocab_size = self._encoder.card.vocab_size
        return [
            self._fit_built_example(check_built_example(self._build_tokens(from_json(text)), vocab_size), counts)
            for text in records
        ]

    def _fit_built_example(self, built: BuiltExample | Rejected, counts: TokenizationCounts) -> RowOutcome:
        """Apply the overlong policy to an example without structure."""
        if isinstance(built, Rejected):
            return built
        # Only the mask is known, so there is a span for each run of trained or untrained tokens. The first token is
        # never a target and belongs to the run after it.
        starts = np.append(0, np.flatnonzero(np.diff(built.mask[1:])) + 2)
        trains = built.mask[np.minimum(np.maximum(starts, 1), len(built.mask) - 1)]
        example = Example(
            ids=built.ids,
            mask=built.mask,
            span_starts=starts,
            span_messages=np.full(len(starts), -1, np.int64),
            span_kinds=np.where(trains, SPAN_KINDS.index("record"), SPAN_KINDS.index("prompt")).astype(np.int8),
            original_tokens=len(built.ids),
            original_trained=int(built.mask.sum()),
            domain=built.domain,
        )
        settled = self._apply_overlong_policy(example, "record", counts)
        if settled is not None:
            return settled
        if self._get_overlong_policy("record") == "split":
            return split_into_windows(example, self._limit)
        options = self._dataset.truncation
        if options.token_cut == "reject":  # noqa: S105  (tokens of text)
            why = Rejected("overlong_after_structure", f"{len(example.ids)} tokens, at most {self._limit}")
            return _reject_for_length(example, why, counts)
        return [truncate_tokens(example, self._limit, options.truncate_side, self._encoder.card.bos_id)]

    def _make_edge_column(
        self, option: Literal["add_bos", "add_eos"], token_id: int | None, by_itself: bool, count: int, *, trains: bool
    ) -> list[TokenColumn]:
        """Return the stream of a BOS or EOS, or none: `auto` adds the token if the tokenizer has it."""
        wanted = self._token_options.add_bos if option == "add_bos" else self._token_options.add_eos
        if wanted is False or (wanted == "auto" and not by_itself):
            return []
        if token_id is None:
            raise ConfigError(
                f"format.{option}: true, but the tokenizer has no such token; expected auto or false; set auto"
            )
        return [make_constant_column(token_id, count, kind=TEMPLATE_KIND, trains=trains)]


@dataclass(frozen=True, slots=True)
class _RenderedCandidate:
    """A conversation that becomes one example, with its mask; `place` is its row's in the batch."""

    place: int
    conversation: Conversation
    only: frozenset[int] | None
    placeholders: dict[str, str]
    masked: MaskedConversation
    ordinary: list[tuple[int, int]]


def _build_mask_rules(dataset: Dataset) -> MaskRules:
    template = dataset.template
    return MaskRules(
        assistant_roles=dataset.format.get_token_options().assistant_roles,
        spans=template.spans,
        on_dropped={str(kind): policy for kind, policy in template.on_dropped.items()},
        verify_render=template.verify_render,
        turns=template.turns,
    )


def _resolve_chat_bos(encoder: Encoder, dataset: Dataset) -> int | None:
    """Return the BOS to put before chats, only if the recipe sets it; otherwise the template decides."""
    if dataset.format.get_token_options().add_bos is not True:
        return None
    if encoder.card.bos_id is None:
        raise ConfigError("format.add_bos: true, but the tokenizer has no BOS; expected auto or false; set auto")
    return encoder.card.bos_id


def _resolve_pair_loss(dataset: Dataset) -> tuple[bool, bool]:
    """Return whether a pair's input and output are trained."""
    loss = dataset.loss
    if loss.trains_everything:
        return True, True
    if not loss.mask and loss.mask_default == "mask":
        return False, True
    return (
        loss.mask.get("prompt", loss.mask_default) == "train",
        loss.mask.get("response", loss.mask_default) == "train",
    )


def _count_row_bytes(rows: pa.Table) -> list[int]:
    lengths = np.zeros(rows.num_rows, np.int64)
    for name in ("messages", "tools", "text", "output", "record"):
        lengths += pc.fill_null(pc.binary_length(rows.column(name)), 0).to_numpy()
    return cast("list[int]", lengths.tolist())


def _reject_for_length(example: Example, why: Rejected, counts: TokenizationCounts) -> Rejected:
    """Count the tokens of an example that is rejected for its length; all of them were encoded already."""
    counts.dropped_tokens += len(example.ids)
    counts.dropped_trained += int(example.mask.sum())
    return why


def _require_targets(outcome: RowOutcome, counts: TokenizationCounts) -> RowOutcome:
    """Reject a row none of whose examples has a trained token; drop its examples that have none."""
    if isinstance(outcome, Rejected):
        return outcome
    trained = [one for one in outcome if one.mask.any()]
    untrained = [one for one in outcome if not one.mask.any()]
    counts.dropped_tokens += sum(one.original_tokens for one in untrained)
    counts.dropped_trained += sum(one.original_trained for one in untrained)
    return trained or Rejected("no_loss_tokens", "no trained token is left")


def _mask_cut_reasoning(masked: MaskedConversation, messages: frozenset[int]) -> MaskedConversation:
    """Remove the loss from truncated reasoning: it stays as context, but the model must not learn to stop there."""
    cut = [p for p in masked.pieces if p.kind == "reasoning" and p.message in messages]
    if not cut:
        return masked
    trained = list(masked.trained)
    for piece in cut:
        trained = [part for span in trained for part in _subtract_range(span, piece.start, piece.end)]
    return replace(masked, trained=tuple(trained))


def _subtract_range(span: Span, start: int, end: int) -> Iterator[Span]:
    if end <= span.start or span.end <= start:
        yield span
        return
    if span.start < start:
        yield replace(span, end=start)
    if end < span.end:
        yield replace(span, start=end)
