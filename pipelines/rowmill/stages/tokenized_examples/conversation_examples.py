"""Examples of conversations, prompts and preference pairs, row by row.

conversation   render ─► mask ─► judge a share ─► encode ─► too long? truncate, and again ─► Example
prompt         render with the generation prompt ─► encode ─► too long? drop ─► Example, none of it trained
preference     paired     P chosen │ P rejected     one example: `side_lengths` 19 19, `prompt_length` 12
               unpaired   P chosen                  an example of its own, `sides` 1
                          P rejected                another, `sides` 0
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any, ClassVar, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.checks.mask_judge import IndependentMaskJudge, JinjaTemplate, MaskDefect, TransformersTemplate
from rowmill.conversation.frame_learning import learn_frames_once
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import DroppedKind, Loss, MaskRules, RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_contract import observe_template_once
from rowmill.conversation.truncation import ConversationTruncator, OverlongPolicy, Truncation
from rowmill.core.arrays import Bools
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json, from_json_columns, to_json
from rowmill.core.storage import digest_json
from rowmill.executors import open_in_workers
from rowmill.kinds.preference import PairCounts
from rowmill.kinds.shared.reasoning import inline_reasoning, limit_reasoning
from rowmill.recipe.recipe import Dataset
from rowmill.schema.counts import CountSet
from rowmill.schema.rows import (
    CANONICAL_FLAGS,
    REASONING_KEY,
    Conversation,
    MaskedConversation,
    Message,
    Rejected,
    RowKind,
)
from rowmill.tokenization.control_tokens import ControlStrings, has_changed_placeholder, restore_control_strings
from rowmill.tokenization.encoded_batch import Example, PartTally, make_examples
from rowmill.tokenization.stored_tokenizers import keep_latest
from rowmill.tokenization.token_truncation import prepend_bos, truncate_tokens
from rowmill.tokenization.tokenizer import Encoder

# Compiling a template, comparing its engines and learning its frames takes 0.6 s. A forked worker has all of it from
# the calling process, which needs it for the first records; a worker of the fork server opens it itself.

_MAX_RENDERERS = 8
"""Templates that a process keeps open, as many as it keeps example builders."""

_RENDERERS: dict[str, Renderer] = {}

_SHARED_TEMPLATES: dict[str, tuple[RendererSpec, frozenset[str]]] = {}
"""Templates that are opened before a fork, with the model's roles. The names of calls go to a fork server through its
environment, where a template's text is too long; so there the name means nothing and nothing is opened."""


def open_renderer(spec: RendererSpec) -> Renderer:
    """Return this process's renderer of a template; the latest are kept."""
    return keep_latest(_RENDERERS, repr(spec), _MAX_RENDERERS, lambda: Renderer(spec))


def share_template(spec: RendererSpec, roles: frozenset[str]) -> None:
    """Have a template opened before workers are forked; `roles` are the model's roles."""
    name = digest_json(repr(spec), sorted(roles))
    if name not in _SHARED_TEMPLATES and len(_SHARED_TEMPLATES) < _MAX_RENDERERS:
        _SHARED_TEMPLATES[name] = spec, roles
        open_in_workers(open_shared_template, name)


def open_shared_template(name: str) -> None:
    """Open a template of `share_template` and its judge's, observe it and learn the frames of rows without values."""
    if name in _SHARED_TEMPLATES:
        spec, roles = _SHARED_TEMPLATES[name]
        renderer = open_renderer(spec)
        renderer.open_tracer()
        observe_template_once(renderer)
        learn_frames_once(renderer, roles, {})
        MaskJudge(renderer, roles, remembers=True).open()


RowOutcome = list[Example] | Rejected
"""The outcome of one row: its examples in order, or its reject."""


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The most tokens of an example, and the options for longer ones; `sliced`: packing slices them."""

    tokens: int
    options: Truncation
    sliced: bool

    @classmethod
    def of_dataset(cls, dataset: Dataset, tokens: int) -> "LengthLimit":
        """Return the limit of a dataset's examples."""
        return cls(tokens, dataset.truncation, dataset.keeps_overlong)

    def get_policy(self, kind: RowKind) -> OverlongPolicy:
        """Return what happens to a longer example of a kind of rows."""
        return self.options.policy(kind, sliced=self.sliced)

    def keeps_all(self, kind: RowKind) -> bool:
        """Return whether examples of any length stay as they are; with `raise`, the stage fails after its last part."""
        return self.get_policy(kind) in ("keep", "raise")

    def apply_policy(self, example: Example, kind: RowKind, counts: PartTally) -> RowOutcome | None:
        """Return the outcome of an example that is not shortened; None if it is."""
        if len(example.ids) <= self.tokens or self.keeps_all(kind):
            return [example]
        if self.get_policy(kind) == "drop":
            why = Rejected("overlong", f"{len(example.ids)} tokens, at most {self.tokens}")
            return reject_for_length(example, why, counts)
        return None


def reject_for_length(example: Example, rejected: Rejected, counts: PartTally) -> Rejected:
    """Count the tokens of an example that is rejected for its length; all of them were encoded already."""
    counts.dropped_tokens += len(example.ids)
    counts.dropped_trained += int(example.mask.sum())
    return rejected


# ── Judge a share of the rows by code that shares nothing with rendering and masking ──


LARGEST_HALF = (1 << 64) - 1
"""The largest value of half a hash, as little-endian uint64; a row is in a share up to that share of it."""


def is_judged(row_hash: bytes, share: float) -> bool:
    """Return whether a row is in the share that is judged, which its hash alone determines."""
    return share > 0 and int.from_bytes(row_hash[-8:].ljust(8, b"\0"), "little") <= min(
        int(share * 2.0**64), LARGEST_HALF
    )


class MaskJudge:
    """Judges masks of one template in which every message of the model is supervised."""

    def __init__(
        self, renderer: Renderer, roles: frozenset[str] = frozenset({"assistant"}), *, remembers: bool = False
    ) -> None:
        """Judge by the template of a renderer: as a `JinjaTemplate` if it `remembers`, or by transformers' function."""
        self._renderer = renderer
        self._roles = roles
        self._remembers = remembers
        self._judges: dict[str, IndependentMaskJudge] = {}

    def open(self) -> None:
        """Compile the template of rows without values."""
        self._get_judge({}).template.open()

    def judge(self, conversation: Conversation, masked: MaskedConversation) -> list[MaskDefect] | None:
        """Return the defects of a conversation's mask; None if the owners of its text cannot be proven."""
        adaptation = self._renderer.adaptation
        messages, tools = adaptation.messages(conversation.messages), adaptation.tools(conversation.tools)
        trained = [(span.start, span.end) for span in masked.trained]
        return self._get_judge(conversation.kwargs).judge(messages, tools, masked.text, trained)

    def render_prompt(self, conversation: Conversation) -> str | None:
        """Return what transformers would render to ask for an answer; None if the template refuses it."""
        adaptation = self._renderer.adaptation
        messages, tools = adaptation.messages(conversation.messages), adaptation.tools(conversation.tools)
        return self._get_judge(conversation.kwargs).template.render(messages, tools, add_generation_prompt=True)

    def _get_judge(self, kwargs: Mapping[str, Json]) -> IndependentMaskJudge:
        key = to_json(dict(kwargs))
        if key not in self._judges:
            spec = self._renderer.spec
            values = {**spec.template_kwargs, **kwargs}
            kind = JinjaTemplate if self._remembers else TransformersTemplate
            template = kind(spec.text, spec.special_tokens, values, spec.now)
            self._judges[key] = IndependentMaskJudge(template, self._roles, by_blocks=self._renderer.has_blocks)
        return self._judges[key]


class RowJudge:
    """Judges the chosen rows of one dataset by code that shares nothing with rendering and masking.

    `checks/mask_judge.py` renders a row as transformers does and finds characters that train, or do not train, by
    mistake. It judges masks in which every message of the model is supervised, so a chosen row is masked once more with
    the default loss, unless its mask is that already. Which rows are chosen depends on their hashes and
    `template.verify_render` alone.
    """

    def __init__(self, renderer: Renderer, rules: MaskRules, loss: Loss, share: float) -> None:
        """Judge the given share of the rows of a template, 0–1; `rules` and `loss` are those of the rows' masks."""
        self.share = share
        counted = dict.fromkeys(get_args(DroppedKind), "count")
        self._has_default_loss = loss == Loss()
        self._masker = Masker(renderer, Loss(), MaskRules(rules.assistant_roles, on_dropped=counted))
        self._judge = MaskJudge(renderer, rules.assistant_roles, remembers=True)

    def reject(self, conversation: Conversation, made: MaskedConversation | None = None) -> Rejected | None:
        """Return the reject of a row whose text or mask is wrong; None too for a row that is not chosen.

        `made` is the mask that was made of the whole row, if there is one.
        """
        if not is_judged(conversation.row_hash, self.share):
            return None
        unflagged = [{k: v for k, v in one.items() if k not in CANONICAL_FLAGS} for one in conversation.messages]
        # What the template drops may be a reason not to train other messages.
        if made is None or made.dropped or not self._has_default_loss or unflagged != conversation.messages:
            conversation = replace(conversation, messages=unflagged)
            masked = self._masker.mask(conversation)
            if isinstance(masked, Rejected):
                return None
            made = masked
        for defect in self._judge.judge(conversation, made) or ():
            if defect.kind == "text_differs":
                return Rejected("render_mismatch", f"character {defect.start}: {defect.text[:40]!r} by rowmill")
            return Rejected("mask_judged_wrong", f"message {defect.message}: {defect.kind} {defect.text[:40]!r}")
        return None

    def reject_prompt(self, conversation: Conversation, prompt: str) -> Rejected | None:
        """Return the reject of a chosen row whose prompt is not what transformers would render."""
        if not is_judged(conversation.row_hash, self.share) or self._judge.render_prompt(conversation) == prompt:
            return None
        return Rejected("render_mismatch", f"prompt {prompt[-40:]!r} by rowmill")


def decode_conversations(table: pa.Table) -> list[Conversation]:
    """Decode the conversations of a table of canonical rows."""
    columns = from_json_columns(table, "messages", "tools", "template_kwargs", shared={"tools"})
    hashes = table.column("content_hash").to_pylist()
    tagged = pc.greater(table.column("extracted_think_from_content"), 0).to_pylist()
    return [
        Conversation(m, t, {} if k is None else k, h, had_think_tags=tags)
        for m, t, k, h, tags in zip(*columns, hashes, tagged, strict=True)
    ]


def hide_control_strings(one: Conversation, control: ControlStrings) -> "tuple[Conversation, dict[str, str]]":
    """Return the conversation with placeholders for control strings, and the string of each placeholder."""
    value = [one.messages, one.tools, one.kwargs]
    hidden, placeholders = control.hide(value, to_json(value))
    messages, tools, kwargs = cast("list[Any]", hidden)
    return replace(one, messages=messages, tools=tools, kwargs=kwargs), placeholders


def show_control_strings(
    masked: MaskedConversation, placeholders: dict[str, str]
) -> "tuple[MaskedConversation, list[tuple[int, int]]]":
    """Restore control strings in a masked text; return it and their positions."""
    if not placeholders:
        return masked, []
    text, ranges = restore_control_strings(masked.text, placeholders)
    return replace(masked, text=text), ranges


@dataclass(frozen=True, slots=True)
class ConversationSteps:
    """Renders, masks and encodes the conversations of one dataset."""

    encoder: Encoder
    dataset: Dataset
    renderer: Renderer
    masker: Masker
    judge: RowJudge
    control: ControlStrings
    prints_no_reasoning: bool
    """Whether the template has no place for reasoning, not even that of the last answer."""
    cuts_apart: bool
    """Whether spans are encoded apart; only the mask shows where."""
    bos: int | None
    """The BOS to put before chats, only if the recipe sets it; otherwise the template decides."""

    @classmethod
    def open(cls, encoder: Encoder, dataset: Dataset, spec: RendererSpec) -> "ConversationSteps":
        """Open the renderer and the masker."""
        renderer = open_renderer(spec)
        template = dataset.template
        rules = MaskRules(
            assistant_roles=dataset.format.get_token_options().assistant_roles,
            spans=template.spans,
            on_dropped={str(kind): policy for kind, policy in template.on_dropped.items()},
            turns=template.turns,
        )
        masker = Masker(renderer, dataset.loss, rules)
        judge = RowJudge(renderer, rules, dataset.loss, dataset.template.verify_render)
        control = ControlStrings(encoder.card, spec.text)
        prints_none = observe_template_once(renderer).reasoning == "none"
        bos = None
        if dataset.format.get_token_options().add_bos is True:
            bos = encoder.card.bos_id
            if bos is None:
                raise ConfigError(
                    "format.add_bos: true, but the tokenizer has no BOS; expected auto or false; set auto"
                )
        is_split = dataset.loss.boundary == "split"
        return cls(encoder, dataset, renderer, masker, judge, control, prints_none, is_split, bos)

    def hide_control(
        self, conversation: Conversation, counts: PartTally
    ) -> tuple[Conversation, dict[str, str]] | Rejected:
        """Treat the control strings of a conversation that has some as the recipe says, and count them.

        Returns the conversation with placeholders for them, and the string of each placeholder.
        """
        policy, hidden = self.dataset.template.control_tokens, (conversation, dict[str, str]())
        if policy == "reject":
            return Rejected("control_token_in_content", "the row's text holds a control string")
        if policy != "allow":
            try:
                hidden = hide_control_strings(conversation, self.control)
            except ConfigError as error:
                # The control token has one character and the row uses every letter and digit: no placeholder is free.
                return Rejected("control_token_in_content", str(error))
        counts.controlled_rows += 1
        one = conversation
        counts.control_strings.update(self.control.count_occurrences(one.messages, one.tools, one.kwargs))
        return hidden

    def limit_reasoning(self, conversation: Conversation) -> Conversation:
        """Cut each message's reasoning at `think_max_tokens`."""
        limit = self.dataset.reasoning.think_max_tokens
        if not limit:
            return conversation
        return replace(conversation, messages=limit_reasoning(conversation.messages, limit, self.cut_text))

    def inline_reasoning(self, conversation: Conversation) -> Conversation:
        """Return the template's input: with `think_mode: inline`, reasoning is at the start of the content.

        With `auto`, reasoning goes back into the tags that it came in where the template would print none of it.
        """
        options = self.dataset.reasoning
        goes_back = options.think_mode == "auto" and conversation.had_think_tags and self.prints_no_reasoning
        if options.think_mode != "inline" and not goes_back:
            return conversation
        return replace(conversation, messages=inline_reasoning(conversation.messages, options.think_tags[0]))

    def loses_reasoning(self, conversation: Conversation, masked: MaskedConversation) -> bool:
        """Return whether an answer trains without its reasoning, because the template prints none."""
        return self.prints_no_reasoning and any(
            conversation.messages[span.message].get(REASONING_KEY) for span in masked.trained
        )

    def encode_masked(
        self,
        masked: Sequence[MaskedConversation],
        ordinary: Sequence[list[tuple[int, int]]],
        counts: PartTally,
    ) -> list[Example | Rejected]:
        """Encode masked texts; in the character ranges `ordinary[i]` of text i control strings are text."""
        made = make_examples(masked, ordinary, self.encoder, counts, split=self.cuts_apart)
        bos = self.bos
        return made if bos is None else [one if isinstance(one, Rejected) else prepend_bos(one, bos) for one in made]

    def count_rendered_tokens(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        tools: Sequence[Json] | None,
        placeholders: dict[str, str],
    ) -> int | None:
        """Count the tokens of a conversation with other messages and tools; None if it does not render."""
        shown = self.inline_reasoning(replace(conversation, messages=messages, tools=tools))
        if self.cuts_apart or any("part_weights" in message for message in messages):
            masked = self.masker.mask(shown)
            if isinstance(masked, MaskedConversation):
                masked, ordinary = show_control_strings(masked, placeholders)
                example = self.encode_masked([masked], [ordinary], PartTally())[0]
                return None if isinstance(example, Rejected) else len(example.ids)
        printed = self.renderer.render(shown.messages, tools, conversation.kwargs)
        if isinstance(printed, Rejected):
            return None
        text, ranges = restore_control_strings(printed.text, placeholders)
        encoded = self.encoder.encode_pieces([text], [ranges])
        has_bos = self.bos is None or (len(encoded.ids) > 0 and int(encoded.ids[0]) == self.bos)
        return len(encoded.ids) + (not has_bos)

    def cut_text(self, text: str, max_tokens: int) -> str:
        """Return the start of a text that has at most so many tokens."""
        encoded = self.encoder.encode([text])
        if len(encoded.ids) <= max_tokens:
            return text
        if max_tokens <= 0:
            return ""
        return text.encode()[: int(encoded.ends[max_tokens - 1])].decode(errors="ignore")


# ── Rows to candidates, and candidates to examples that fit the limit ─────────────────────────────────


CHOSEN, REJECTED = 1, 0
"""Values of `sides`: the chosen or good answer, the rejected or bad one."""


@dataclass(frozen=True, slots=True)
class PreferenceConversation(Conversation):
    """A prompt and its answers, one after another; `sides` are `CHOSEN` or `REJECTED`, `lengths` count messages."""

    sides: Sequence[int] = ()
    lengths: Sequence[int] = ()
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class RenderedCandidate:
    """A conversation that becomes an example, or one side of it, with its mask.

    `only` these messages train, None: all that the options choose. `placeholders` stand for control strings, which are
    text in the character ranges `ordinary`.
    """

    conversation: Conversation
    only: frozenset[int] | None
    placeholders: dict[str, str]
    masked: MaskedConversation
    ordinary: list[tuple[int, int]]


class ConversationExampleBuilder:
    """Builds the examples of one dataset's conversations; its subclasses those of prompts and preferences."""

    kind: ClassVar[RowKind] = "conversation"
    judges_masks: ClassVar[bool] = True
    """Whether a share of the rows is judged after they are masked; prompts and sides are judged while they are."""

    def __init__(self, steps: ConversationSteps, limit: LengthLimit) -> None:
        self._steps = steps
        self._limit = limit

    def build(self, rows: pa.Table, counts: PartTally) -> list[RowOutcome]:
        """Build the examples of each row; the texts of all rows are encoded at once."""
        decoded, has_control = self._decode(rows)
        rendered: list[list[RenderedCandidate] | Rejected] = []
        masked: list[MaskedConversation] = []
        ordinary: list[list[tuple[int, int]]] = []
        for conversation, is_hidden in zip(decoded, has_control.tolist(), strict=True):
            hidden = (conversation, dict[str, str]())
            if is_hidden:
                hidden = self._steps.hide_control(conversation, counts)
            if isinstance(hidden, Rejected):
                rendered.append(hidden)
                continue
            shortened = hidden[0]
            if self._steps.dataset.reasoning.think_max_tokens:
                shortened = self._steps.limit_reasoning(shortened)
            candidates = self._render(self._split(shortened), hidden[1], counts)
            if self.judges_masks and not isinstance(candidates, Rejected):
                # A row that is split, or has stand-ins of control strings, is masked once more to be judged.
                is_whole = len(candidates) == 1 and candidates[0].only is None and not hidden[1]
                made = candidates[0].masked if is_whole else None
                candidates = self._steps.judge.reject(self._steps.inline_reasoning(shortened), made) or candidates
            rendered.append(candidates)
            for one in () if isinstance(candidates, Rejected) else candidates:
                masked.append(one.masked)
                ordinary.append(one.ordinary)
        encoded = iter(self._steps.encode_masked(masked, ordinary, counts))
        outcomes: list[RowOutcome] = []
        for row in rendered:
            if isinstance(row, Rejected):
                outcomes.append(row)
                continue
            outcome = self._finish_row(row, list(islice(encoded, len(row))), counts)
            outcomes.append(outcome)
            for example in () if isinstance(outcome, Rejected) else outcome:
                counts.untrained_boundary_tokens += example.withheld
        return outcomes

    def _decode(self, rows: pa.Table) -> tuple[Sequence[Conversation], Bools]:
        """Decode each row as one conversation, and return which of them have control strings: bool[N]."""
        return decode_conversations(rows), self._steps.control.find_rows(rows)

    def _split(self, conversation: Conversation) -> Sequence[tuple[Conversation, frozenset[int] | None]]:
        """Cut a conversation into those that become examples, each with the messages that may train (None: all)."""
        return self._steps.masker.split_turns(conversation)

    def _mask(self, shown: Conversation, *, only: frozenset[int] | None) -> MaskedConversation | Rejected:
        """Render and mask a conversation; `only` these messages may train (None: all)."""
        return self._steps.masker.mask(shown, only=only)

    def _render(
        self,
        conversations: Sequence[tuple[Conversation, frozenset[int] | None]],
        placeholders: dict[str, str],
        counts: PartTally,
    ) -> list[RenderedCandidate] | Rejected:
        """Render and mask conversations with the messages of each that may train."""
        candidates: list[RenderedCandidate] = []
        loses_reasoning = False
        for one, only in conversations:
            masked = self._mask(self._steps.inline_reasoning(one), only=only)
            if isinstance(masked, Rejected):
                return masked
            ordinary: list[tuple[int, int]] = []
            if placeholders:
                masked, ordinary = show_control_strings(masked, placeholders)
                if has_changed_placeholder(masked.text, placeholders):
                    return Rejected("control_token_in_content", "the template changes the stand-in of a control string")
            counts.dropped.update(masked.dropped)
            if "reasoning" in masked.dropped:
                loses_reasoning = loses_reasoning or self._steps.loses_reasoning(one, masked)
            candidates.append(RenderedCandidate(one, only, placeholders, masked, ordinary))
        counts.rows_losing_reasoning += loses_reasoning
        return candidates

    def _finish_row(
        self,
        candidates: Sequence[RenderedCandidate],
        examples: Sequence[Example | Rejected],
        counts: PartTally,
    ) -> RowOutcome:
        """Apply the overlong policy to each example of a row."""
        fitted: list[Example] = []
        for candidate, example in zip(candidates, examples, strict=True):
            if isinstance(example, Rejected):
                return example
            outcome = self._limit.apply_policy(example, self.kind, counts)
            outcome = outcome or self._truncate(candidate, example, counts)
            if isinstance(outcome, Rejected):
                return outcome
            fitted += outcome
        return fitted

    def _truncate(self, candidate: RenderedCandidate, original: Example, counts: PartTally) -> RowOutcome:
        """Shorten a conversation or split it, render and mask what is left, and cut tokens if that is not enough."""
        conversation, masker = candidate.conversation, self._steps.masker
        supervised = frozenset(masker.supervised(conversation.messages))
        chosen = supervised if candidate.only is None else supervised & candidate.only
        flags = [i in chosen for i in range(len(conversation.messages))]
        truncator = ConversationTruncator(
            limit=self._limit.tokens,
            measure=lambda messages, tools: self._steps.count_rendered_tokens(
                conversation, messages, tools, candidate.placeholders
            ),
            cut_reasoning=self._steps.cut_text,
            assistant_roles=self._steps.dataset.format.get_token_options().assistant_roles,
            token_cut=self._limit.options.token_cut,
        )
        splits = self._limit.options.overlong == "split"
        shorten = truncator.split if splits else truncator.truncate
        shortened = shorten(conversation.messages, conversation.tools, flags)
        if isinstance(shortened, Rejected):
            return reject_for_length(original, shortened, counts)
        made: list[Example] = []
        for piece in shortened if isinstance(shortened, list) else [shortened]:
            example = self._rerender(candidate, piece.messages, piece.kept, chosen, counts, piece.reasoning_context)
            if isinstance(example, Rejected):
                return reject_for_length(original, example, counts)
            if len(example.ids) > self._limit.tokens:
                bos = self._steps.encoder.card.bos_id
                example = truncate_tokens(example, self._limit.tokens, self._limit.options.truncate_side, bos)
            counts.dropped_tokens += piece.tokens_left_out
            whole = None if splits else original
            left = int(example.mask.sum()) + example.cut_trained
            after_exchanges = left
            if piece.reasoning_removed or piece.reasoning_context:
                after_exchanges = self._count_trained_tokens(candidate, piece.kept, chosen, otherwise=left)
            tokens, trained = piece.original_tokens, after_exchanges
            if whole is not None:
                tokens, trained = len(whole.ids), whole.original_trained
            elif piece.messages_removed:
                trained = self._count_trained_tokens(candidate, piece.whole, chosen, otherwise=after_exchanges)
            made.append(
                replace(
                    example,
                    original_tokens=tokens,
                    original_trained=trained,
                    messages_removed=piece.messages_removed,
                    exchanges_removed=tokens - len(example.ids) - example.tokens_cut - piece.reasoning_removed,
                    reasoning_removed=piece.reasoning_removed,
                    exchanges_trained=trained - after_exchanges,
                    reasoning_trained=after_exchanges - left,
                )
            )
        if splits:
            counts.dropped_trained += max(0, original.original_trained - sum(one.original_trained for one in made))
        return made

    def _rerender(
        self,
        candidate: RenderedCandidate,
        messages: Sequence[Message],
        kept: Sequence[int],
        chosen: frozenset[int],
        counts: PartTally,
        reasoning_context: Sequence[int] = (),
    ) -> Example | Rejected:
        """Render and mask some of a conversation's messages; `kept[i]` is the original index of `messages[i]`."""
        conversation = replace(candidate.conversation, messages=list(messages))
        only = frozenset(new for new, old in enumerate(kept) if old in chosen)
        masked = self._mask(self._steps.inline_reasoning(conversation), only=only)
        if isinstance(masked, Rejected):
            return masked
        # Truncated reasoning stays as context, but the model must not learn to stop there.
        trained = masked.trained
        for start, end, message, kind in masked.pieces:
            if kind == "reasoning" and message in reasoning_context:
                sides = (
                    (span._replace(end=min(span.end, start)), span._replace(start=max(span.start, end)))
                    for span in trained
                )
                trained = tuple(side for both in sides for side in both if side.start < side.end)
        masked = replace(masked, trained=trained)
        masked, ordinary = show_control_strings(masked, candidate.placeholders)
        return self._steps.encode_masked([masked], [ordinary], counts)[0]

    def _count_trained_tokens(
        self, candidate: RenderedCandidate, kept: Sequence[int], chosen: frozenset[int], *, otherwise: int
    ) -> int:
        """Count the trained tokens of some of a conversation's messages, `otherwise` if they have no mask."""
        messages = [candidate.conversation.messages[i] for i in kept]
        example = self._rerender(candidate, messages, kept, chosen, PartTally())
        return otherwise if isinstance(example, Rejected) else int(example.mask.sum())


# ── Prompts: the ids that a trainer sends to generation, of which none is trained ──────────────────────


class PromptExampleBuilder(ConversationExampleBuilder):
    """Builds the examples of one dataset's prompts; nothing shortens one, since the kind refuses such policies."""

    kind = "prompt"
    judges_masks = False

    def _split(self, conversation: Conversation) -> Sequence[tuple[Conversation, frozenset[int]]]:
        return [(conversation, frozenset())]

    def _mask(self, shown: Conversation, *, only: frozenset[int] | None) -> MaskedConversation | Rejected:
        del only
        masked = self._steps.masker.render_prompt(shown)
        return masked if isinstance(masked, Rejected) else self._steps.judge.reject_prompt(shown, masked.text) or masked


# ── Preferences: a prompt with each of its answers as tokens, both sides in one example or one in each ───


class PreferenceExampleBuilder(ConversationExampleBuilder):
    """Builds the examples of one dataset's preferences: one of both sides, or one of each."""

    kind = "preference"
    judges_masks = False

    def _decode(self, rows: pa.Table) -> tuple[Sequence[Conversation], Bools]:
        prompts, has_control = super()._decode(rows)
        for name in ("chosen", "rejected"):
            texts = rows.set_column(rows.schema.get_field_index("messages"), "messages", rows.column(name))
            has_control |= self._steps.control.find_rows(texts)
        answers = zip(*from_json_columns(rows, "chosen", "rejected"), strict=True)
        decoded: list[PreferenceConversation] = []
        for prompt, texts, margin in zip(prompts, answers, rows.column("margin").to_pylist(), strict=True):
            sides = {side: text for side, text in zip((CHOSEN, REJECTED), texts, strict=True) if text is not None}
            messages = [*prompt.messages, *chain(*sides.values())]
            values = {field.name: getattr(prompt, field.name) for field in fields(prompt)} | {"messages": messages}
            decoded.append(
                PreferenceConversation(**values, sides=[*sides], lengths=[*map(len, sides.values())], margin=margin)
            )
        return decoded, has_control

    def _split(self, conversation: Conversation) -> Sequence[tuple[Conversation, frozenset[int]]]:
        assert isinstance(conversation, PreferenceConversation)
        messages = conversation.messages
        edges = np.cumsum([len(messages) - sum(conversation.lengths), *conversation.lengths]).tolist()
        prompt = messages[: edges[0]]
        return [_join_side(conversation, prompt, messages[begin:end]) for begin, end in pairwise(edges)]

    def _mask(self, shown: Conversation, *, only: frozenset[int] | None) -> MaskedConversation | Rejected:
        return self._steps.judge.reject(shown) or self._steps.masker.mask(shown, only=only)

    def _finish_row(
        self,
        candidates: Sequence[RenderedCandidate],
        examples: Sequence[Example | Rejected],
        counts: PartTally,
    ) -> RowOutcome:
        row, parts = candidates[0].conversation, require_all(examples)
        assert isinstance(row, PreferenceConversation)
        if isinstance(parts, Rejected):
            return parts
        paired = self._steps.dataset.format.count_sides() > 1
        shorten = partial(self._remove_exchanges, row, candidates)
        return finish_sides(parts, row.sides, row.margin, self._limit, counts, shorten, is_paired=paired)

    def _remove_exchanges(
        self, first: PreferenceConversation, candidates: Sequence[RenderedCandidate], parts: Sequence[Example]
    ) -> list[Example] | Rejected:
        """Remove exchanges of the prompt until the longest side fits, or as few as possible are left."""
        begin = len(first.messages) - first.lengths[0]
        prompt = first.messages[:begin]

        def encode(some: Sequence[RenderedCandidate], kept: Sequence[Message]) -> list[Example] | Rejected:
            counts = PartTally()
            joined = [_join_side(first, kept, one.conversation.messages[begin:]) for one in some]
            rendered = self._render(joined, candidates[0].placeholders, counts)
            if isinstance(rendered, Rejected):
                return rendered
            masked, ordinary = [one.masked for one in rendered], [one.ordinary for one in rendered]
            return require_all(self._steps.encode_masked(masked, ordinary, counts))

        def measure(messages: Sequence[Message], tools: object) -> int | None:
            del tools
            made = encode([candidates[longest]], messages)
            return None if isinstance(made, Rejected) else len(made[0].ids)

        longest = max(range(len(parts)), key=lambda i: len(parts[i].ids))
        truncator = ConversationTruncator(
            limit=self._limit.tokens,
            measure=measure,
            cut_reasoning=self._steps.cut_text,
            assistant_roles=self._steps.dataset.format.get_token_options().assistant_roles,
        )
        kept = truncator.remove_exchanges(prompt, first.tools, len(prompt) - 1)
        shorter = encode(candidates, [prompt[i] for i in kept])
        if isinstance(shorter, Rejected):
            return shorter
        return [
            replace(
                one,
                original_tokens=len(whole.ids),
                original_trained=int(whole.mask.sum()),
                messages_removed=len(prompt) - len(kept),
                exchanges_removed=len(whole.ids) - len(one.ids),
                exchanges_trained=int(whole.mask.sum()) - int(one.mask.sum()),
            )
            for one, whole in zip(shorter, parts, strict=True)
        ]


def _join_side(
    conversation: Conversation, prompt: Sequence[Message], answer: Sequence[Message]
) -> tuple[Conversation, frozenset[int]]:
    """Return a side as a conversation, with the messages that may train."""
    joined = replace(conversation, messages=[*prompt, *answer])
    return joined, frozenset(range(len(prompt), len(joined.messages)))


def require_all(parts: Sequence[Example | Rejected]) -> list[Example] | Rejected:
    """Return the examples of all parts of a row, or the first reject."""
    examples = [part for part in parts if not isinstance(part, Rejected)]
    return examples if len(examples) == len(parts) else next(part for part in parts if isinstance(part, Rejected))


def finish_sides(
    parts: list[Example],
    sides: Sequence[int],
    margin: float | None,
    limit: LengthLimit,
    counts: PartTally,
    shorten: Callable[[Sequence[Example]], list[Example] | Rejected] | None = None,
    *,
    is_paired: bool,
) -> RowOutcome:
    """Return the examples of a row's sides: one of both, or one of each.

    The overlong policy applies to both together: `shorten` removes what a prompt can spare, then answers are cut on the
    right.
    """
    tokens, fitted = max(len(part.ids) for part in parts), parts
    if tokens > limit.tokens and not limit.keeps_all("preference"):
        fitted = _shorten_sides(parts, limit, shorten, tokens)
    if isinstance(fitted, Rejected):
        counts.dropped_tokens += sum(len(part.ids) for part in parts)
        counts.dropped_trained += sum(int(part.mask.sum()) for part in parts)
        return fitted
    prompt = measure_prompt(fitted)
    if isinstance(prompt, Rejected):
        return prompt
    if is_paired:
        counts.of_kind += CountSet.of(PairCounts(pairs=1, longer_chosen=int(len(fitted[0].ids) > len(fitted[1].ids))))
        return [_join_sides(fitted, sides, margin, prompt)]
    return [_describe(one, [one], [kind], prompt, None) for one, kind in zip(fitted, sides, strict=True)]


def _shorten_sides(
    parts: list[Example],
    limit: LengthLimit,
    shorten: Callable[[Sequence[Example]], list[Example] | Rejected] | None,
    tokens: int,
) -> list[Example] | Rejected:
    if limit.get_policy("preference") == "drop":
        return Rejected("overlong", f"{tokens} tokens, at most {limit.tokens}")
    shorter = parts if shorten is None else shorten(parts)
    if isinstance(shorter, Rejected):
        return shorter
    tokens = max(len(one.ids) for one in shorter)
    if tokens <= limit.tokens:
        return shorter
    if limit.options.token_cut == "reject":  # noqa: S105  (tokens of text)
        what = "of plain text" if shorten is None else "after the prompt's exchanges were removed"
        return Rejected("overlong_after_structure", f"{tokens} tokens {what}, at most {limit.tokens}")
    prompt = measure_prompt(shorter)
    if isinstance(prompt, Rejected):
        return prompt
    if prompt >= limit.tokens:
        return Rejected("overlong_prompt", f"the prompt has {prompt} tokens, at most {limit.tokens}")
    return [side.cut(0, limit.tokens) if len(side.ids) > limit.tokens else side for side in shorter]


def measure_prompt(sides: Sequence[Example]) -> int | Rejected:
    """Return the tokens before the first trained one, which all sides must share."""
    if not all(side.mask.any() for side in sides):
        return Rejected("no_loss_tokens", "no trained token is left of a side")
    lengths = [int(np.argmax(side.mask)) for side in sides]
    first = sides[0].ids[: lengths[0]]
    if any(not np.array_equal(one.ids[:length], first) for one, length in zip(sides, lengths, strict=True)):
        return Rejected("prompt_differs", f"the prompts before the answers have {' and '.join(map(str, lengths))} ids")
    return lengths[0]


def _join_sides(sides: Sequence[Example], kinds: Sequence[int], margin: float | None, prompt: int) -> Example:
    starts = np.cumsum([0, *(len(side.ids) for side in sides)])
    joined = Example(
        ids=np.concatenate([side.ids for side in sides]),
        mask=np.concatenate([side.mask for side in sides]),
        span_starts=np.concatenate([one.span_starts + at for one, at in zip(sides, starts, strict=False)]),
        span_messages=np.concatenate([side.span_messages for side in sides]),
        span_kinds=np.concatenate([side.span_kinds for side in sides]),
        original_tokens=sum(side.original_tokens for side in sides),
        original_trained=sum(side.original_trained for side in sides),
        withheld=sum(side.withheld for side in sides),
        messages_removed=sides[0].messages_removed,
        exchanges_removed=sum(side.exchanges_removed for side in sides),
        tokens_cut=sum(side.tokens_cut for side in sides),
        exchanges_trained=sum(side.exchanges_trained for side in sides),
        cut_trained=sum(side.cut_trained for side in sides),
    )
    return _describe(joined, sides, kinds, prompt, margin)


def _describe(
    example: Example, parts: Sequence[Example], sides: Sequence[int], prompt: int, margin: float | None
) -> Example:
    columns = {
        "sides": list(sides),
        "side_lengths": [len(part.ids) for part in parts],
        "prompt_length": prompt,
        "margin": margin,
    }
    return replace(example, columns=columns)
