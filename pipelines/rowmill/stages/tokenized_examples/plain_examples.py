"""Examples of rows without a template: texts, pairs, preferences, token ids, and what a user's class builds.

pair        encode input, encode output as its continuation ─► BOS input sep output EOS
text        encode ─► BOS text EOS ─► too long? windows, or the first tokens
preference  prompt "The sea is"  chosen " calm."  rejected " loud."   ─► ids of each prompt + answer + EOS
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Bools, Ints, Numbers, Tokens, split_lists
from rowmill.core.errors import ConfigError
from rowmill.core.json import from_json, from_json_columns
from rowmill.kinds.base import BuildContext, TokenBuilder
from rowmill.kinds.python import check_built_example
from rowmill.kinds.tokens import TokenIdCounts
from rowmill.recipe.recipe import Dataset
from rowmill.schema.counts import CountSet
from rowmill.schema.examples import SPAN_KINDS, RolloutFields
from rowmill.schema.rows import Rejected, RowKind
from rowmill.stages.tokenized_examples.conversation_examples import (
    CHOSEN,
    REJECTED,
    LengthLimit,
    RowOutcome,
    finish_sides,
    reject_for_length,
    require_all,
)
from rowmill.tokenization.control_tokens import ControlStrings, EdgeStrings, Ranges, contains_added_token
from rowmill.tokenization.encoded_batch import TEMPLATE_KIND, Example, PartTally, encode_texts
from rowmill.tokenization.token_truncation import (
    TokenColumn,
    concat_token_columns,
    cut_pair,
    make_constant_column,
    omit_existing_token,
    split_at_byte,
    split_into_windows,
    truncate_tokens,
)
from rowmill.tokenization.tokenizer import EncodedTexts, Encoder


@dataclass(frozen=True, slots=True)
class _ControlledTexts:
    """Texts of a batch whose control strings were treated: by place, ranges that stay ordinary text, and rejects.

    `controlled` are the rows with such strings that are not rejected.
    """

    texts: Sequence[str]
    ordinary: Mapping[int, Ranges]
    rejected: Mapping[int, Rejected]
    controlled: AbstractSet[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _EncodedTexts:
    """Encoded texts of a batch as a column of tokens, and by its place the reject of each that cannot be encoded."""

    tokens: EncodedTexts
    rejected: Mapping[int, Rejected]


class PlainTextExampleBuilder:
    """Builds the examples of a dataset's pairs and documents."""

    def __init__(self, encoder: Encoder, dataset: Dataset, limit: LengthLimit) -> None:
        """Find the tokenizer's control strings; a text without a template may begin with BOS and end with EOS."""
        self.encoder = encoder
        self.dataset = dataset
        self.limit = limit
        card = encoder.card
        self._control = ControlStrings(card, "")
        self._policy = dataset.template.control_tokens
        self._begin, self._end = card.token(card.bos_id) or "", card.token(card.eos_id) or ""

    def build_pairs(self, rows: pa.Table, counts: PartTally) -> list[RowOutcome]:
        """Build one example of each row's input and output."""
        texts, outputs = (rows.column(name).to_pylist() for name in ("text", "output"))
        loss = self.dataset.loss
        trains = (
            loss.mask.get("prompt", loss.mask_default) == "train",
            loss.mask.get("response", loss.mask_default) == "train",
        )
        if loss.trains_everything:
            trains = True, True
        elif not loss.mask and loss.mask_default == "mask":
            trains = False, True
        separator = self.dataset.format.get_token_options().separate_with
        joint = separator if isinstance(separator, str) else ""
        columns, sizes, rejected = self._make_pair_columns(
            texts, outputs, range(len(texts)), counts, trains=trains, joint=joint
        )
        has_bos = columns[0].kind == TEMPLATE_KIND
        limit, side = self.limit.tokens, self.limit.options.truncate_side
        return [
            rejected.get(place)
            or self.limit.apply_policy(one, "pair", counts)
            or [cut_pair(one, limit, side, int(size), int(has_bos))]
            for place, (one, size) in enumerate(zip(concat_token_columns(columns), sizes, strict=True))
        ]

    def encode_sides(
        self, prompts: Sequence[str], answers: Sequence[str], rows: Sequence[int], counts: PartTally
    ) -> list[Example | Rejected]:
        """Return the example of each prompt with an answer, of any length; `rows[i]` is the row of answer i."""
        if not prompts:
            return []
        columns, _, rejected = self._make_pair_columns(prompts, answers, rows, counts, trains=(False, True))
        return [rejected.get(place) or one for place, one in enumerate(concat_token_columns(columns))]

    def _make_pair_columns(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        rows: Sequence[int],
        counts: PartTally,
        *,
        trains: tuple[bool, bool],
        joint: str = "",
    ) -> tuple[list[TokenColumn], Ints, Mapping[int, Rejected]]:
        """Return the tokens of pairs in columns, the number of those of each input, and the rejects by place.

        `joint` is the text between input and output; a BOS of the input's own is not counted among its tokens, since
        it is the pair's.
        """
        card, separator = self.encoder.card, self.dataset.format.get_token_options().separate_with
        prompt, answer = SPAN_KINDS.index("prompt"), SPAN_KINDS.index("assistant")
        trains_input, trains_output = trains
        asked = self._find_control(inputs, "prompt", rows, counts, EdgeStrings(begin=self._begin))
        answered = self._find_control(outputs, "response", rows, counts, EdgeStrings(end=self._end))
        counts.controlled_rows += len(asked.controlled | answered.controlled)
        joined = replace(asked, texts=[text + joint for text in asked.texts]) if joint else asked
        given, answers = self._encode_sides(joined, answered, counts, trains=trains)
        bos = self._make_edge_column("add_bos", card.bos_id, card.adds_bos, len(inputs), trains=False)
        eos = self._make_edge_column("add_eos", card.eos_id, card.eos_id is not None, len(inputs), trains=trains_output)
        sizes = np.diff(given.tokens.offsets)
        if bos:
            bos = [omit_existing_token(bos[0], given.tokens, 0)]
            sizes = sizes - (np.diff(bos[0].offsets) == 0)
        if eos:
            eos = [omit_existing_token(eos[0], answers.tokens, -1)]
        between = (
            [make_constant_column(separator, len(inputs), kind=prompt, trains=trains_input)]
            if isinstance(separator, int)
            else []
        )
        columns = [
            *bos,
            TokenColumn(given.tokens.ids, given.tokens.offsets, prompt, trains_input),
            *between,
            TokenColumn(answers.tokens.ids, answers.tokens.offsets, answer, trains_output),
            *eos,
        ]
        return columns, sizes, {**given.rejected, **answers.rejected}

    def _encode_sides(
        self,
        given: _ControlledTexts,
        answers: _ControlledTexts,
        counts: PartTally,
        *,
        trains: tuple[bool, bool],
    ) -> tuple[_EncodedTexts, _EncodedTexts]:
        """Encode inputs and outputs: apart, or as one text cut between them."""
        if self.dataset.loss.boundary != "whole":
            return self._encode(given, counts), self._encode(answers, counts, continuation=True)
        texts = [a + b for a, b in zip(given.texts, answers.texts, strict=True)]
        ranges = {place: [*own] for place, own in given.ordinary.items()}
        for place, own in answers.ordinary.items():
            shift = len(given.texts[place])
            ranges.setdefault(place, []).extend((start + shift, end + shift) for start, end in own)
        if self._policy != "allow":
            # A string of which each side has a piece was in neither text.
            for place, own in self._control.find_ranges(texts).items():
                edge = len(given.texts[place])
                across = [one for one in own if one[0] < edge < one[1]]
                ranges[place] = sorted([*ranges.get(place, []), *across])
        whole = self._encode(_ControlledTexts(texts, ranges, {**given.rejected, **answers.rejected}), counts)
        edges = np.array([len(text.encode()) for text in given.texts], np.int64)
        trains_input, trains_output = trains
        first, second, across = split_at_byte(whole.tokens, edges, boundary_tokens_first=trains_output)
        counts.boundary_tokens += across
        counts.untrained_boundary_tokens += across if trains_input != trains_output else 0
        return _EncodedTexts(first, whole.rejected), _EncodedTexts(second, {})

    def build_documents(self, rows: pa.Table, counts: PartTally) -> list[RowOutcome]:
        """Build the examples of each row's text: one, or a window each if it is too long and split."""
        card, texts = self.encoder.card, rows.column("text").to_pylist()
        edges = EdgeStrings(self._begin, self._end)
        found = self._find_control(texts, "text", range(len(texts)), counts, edges)
        counts.controlled_rows += len(found.controlled)
        encoded = self._encode(found, counts)
        tokens, rejected = encoded.tokens, encoded.rejected
        bos = self._make_edge_column("add_bos", card.bos_id, card.bos_id is not None, len(texts), trains=False)
        eos = self._make_edge_column("add_eos", card.eos_id, card.eos_id is not None, len(texts), trains=True)
        columns = [
            *(omit_existing_token(one, tokens, 0) for one in bos),
            TokenColumn(tokens.ids, tokens.offsets, SPAN_KINDS.index("record"), trains=True),
            *(omit_existing_token(one, tokens, -1) for one in eos),
        ]
        limit, splits = self.limit.tokens, self.limit.get_policy("text") == "split"
        return [
            rejected.get(place)
            or self.limit.apply_policy(one, "text", counts)
            or (split_into_windows(one, limit) if splits else [one.cut(0, limit)])
            for place, one in enumerate(concat_token_columns(columns))
        ]

    def _find_control(
        self,
        texts: Sequence[str],
        name: str,
        rows: Sequence[int],
        counts: PartTally,
        edges: EdgeStrings,
    ) -> _ControlledTexts:
        """Find the control strings of texts, treat them as the recipe says, and count them under a name.

        `rows[i]` is the row of text i. A text that a row has several times, one after another, is counted once.
        """
        found = self._control.find_ranges(texts)
        if not found:
            return _ControlledTexts(texts, {}, {})
        changed, ordinary, rejected = list(texts), dict[int, Ranges](), dict[int, Rejected]()
        controlled = set[int]()
        for place in found:
            text = changed[place] = edges.cut_repeats(texts[place])
            ranges = found[place] if text is texts[place] else self._control.find_ranges([text]).get(0, [])
            ranges = edges.exclude(text, ranges)
            if not ranges:
                continue
            if self._policy == "reject":
                rejected[place] = Rejected("control_token_in_content", "the row's text holds a control string")
                continue
            if self._policy == "as_text":
                ordinary[place] = ranges
            if place and rows[place - 1] == rows[place] and texts[place - 1] == texts[place]:
                continue
            controlled.add(rows[place])
            counts.control_strings.update(f"{name} {text[start:end]}" for start, end in ranges)
        return _ControlledTexts(changed, ordinary, rejected, controlled)

    def _encode(self, given: _ControlledTexts, counts: PartTally, *, continuation: bool = False) -> _EncodedTexts:
        """Encode texts, with their ordinary ranges as text; a text whose ranges cannot be text is rejected."""
        ordinary = [given.ordinary.get(place, ()) for place in range(len(given.texts))] if given.ordinary else ()
        encoded = encode_texts(self.encoder, given.texts, ordinary, counts, continuation=continuation)
        rejected = dict(given.rejected)
        for place, ranges in given.ordinary.items():
            if contains_added_token(self.encoder, encoded.get_text(place), given.texts[place], ranges):
                rejected[place] = Rejected(
                    "control_token_in_content", "the tokenizer makes a control token of ordinary text"
                )
        return _EncodedTexts(encoded, rejected)

    def _make_edge_column(
        self, option: Literal["add_bos", "add_eos"], token_id: int | None, by_itself: bool, count: int, *, trains: bool
    ) -> list[TokenColumn]:
        """Return the column of a BOS or EOS, or none: `auto` adds the token if the tokenizer has it."""
        options = self.dataset.format.get_token_options()
        wanted = options.add_bos if option == "add_bos" else options.add_eos
        if wanted is False or (wanted == "auto" and not by_itself):
            return []
        if token_id is None:
            raise ConfigError(
                f"format.{option}: true, but the tokenizer has no such token; expected auto or false; set auto"
            )
        return [make_constant_column(token_id, count, kind=TEMPLATE_KIND, trains=trains)]


# ── Rows whose kind builds their tokens itself ──


@dataclass(slots=True)
class CustomExampleBuilder:
    """Builds examples with the kind's own builder, which is opened at the first row; `base` is the project's folder."""

    encoder: Encoder
    dataset: Dataset
    limit: LengthLimit
    base: Path
    _build_tokens: TokenBuilder | None = field(default=None, init=False)

    def build(self, rows: pa.Table, counts: PartTally) -> list[RowOutcome]:
        """Build the examples of each row's record."""
        records = rows.column("record").to_pylist()
        if self._build_tokens is None and records:
            context = BuildContext(self.encoder.to_transformers, self.dataset, self.limit.tokens)
            self._build_tokens = self.dataset.format.open_example_builder(context, self.base)
        if self._build_tokens is None:
            why = Rejected("bad_example", f"a {self.dataset.format.get_name()} dataset builds no tokens of records")
            return [why] * len(records)
        card, outcomes = self.encoder.card, list[RowOutcome]()
        for text in records:
            built = check_built_example(self._build_tokens(from_json(text)), card.vocab_size)
            if isinstance(built, Rejected):
                outcomes.append(built)
                continue
            example = make_unstructured_example(built.ids, built.mask, built.domain)
            outcomes.append(fit_unstructured(example, "record", self.limit, card.bos_id, counts))
        return outcomes


def fit_unstructured(
    example: Example, kind: RowKind, limit: LengthLimit, bos_id: int | None, counts: PartTally
) -> RowOutcome:
    """Apply the overlong policy to an example without structure."""
    settled = limit.apply_policy(example, kind, counts)
    if settled is not None:
        return settled
    if limit.get_policy(kind) == "split":
        return split_into_windows(example, limit.tokens)
    if limit.options.token_cut == "reject":  # noqa: S105  (tokens of text)
        why = Rejected("overlong_after_structure", f"{len(example.ids)} tokens, at most {limit.tokens}")
        return reject_for_length(example, why, counts)
    return [truncate_tokens(example, limit.tokens, limit.options.truncate_side, bos_id)]


def make_unstructured_example(ids: Tokens, mask: Bools, domain: str | None = None) -> Example:
    """Return an example of which only ids and mask are known: it has a span for each run of trained or other tokens."""
    # The first token is never a target and belongs to the run after it.
    starts = np.append(0, np.flatnonzero(np.diff(mask[1:])) + 2)
    trains = mask[np.minimum(np.maximum(starts, 1), len(mask) - 1)]
    return Example(
        ids=ids,
        mask=mask,
        span_starts=starts,
        span_messages=np.full(len(starts), -1, np.int64),
        span_kinds=np.where(trains, SPAN_KINDS.index("record"), SPAN_KINDS.index("prompt")).astype(np.int8),
        original_tokens=len(ids),
        original_trained=int(mask.sum()),
        domain=domain,
    )


# ── Rows that are token ids already: kept exactly, and held against the tokenizer ──


COMPARED_ROWS = 64
"""Rows of a batch whose text is encoded again: enough to notice another tokenizer."""


class TokenExampleBuilder:
    """Builds the examples of one dataset's ids; ids must be below `vocab_size`.

    Of `fields`, the values of a token stay beside it.
    """

    def __init__(
        self, encoder: Encoder, limit: LengthLimit, vocab_size: int, fields: RolloutFields | None = None
    ) -> None:
        self._fields = fields or RolloutFields()
        self._encoder = encoder
        self._limit = limit
        self._vocab_size = vocab_size

    def build(self, rows: pa.Table, counts: PartTally) -> list[RowOutcome]:
        """Build the example of each row."""
        ids, masks = (split_lists(rows.column(name)) for name in ("input_ids", "loss_mask"))
        fields = {name: split_lists(rows.column(name)) for name in self._fields.per_token}
        outcomes = [
            self._build_row(own, mask, {name: values[place] for name, values in fields.items()}, counts)
            for place, (own, mask) in enumerate(zip(ids, masks, strict=True))
        ]
        self._compare([own for own, made in zip(ids, outcomes, strict=True) if not isinstance(made, Rejected)], counts)
        return outcomes

    def _build_row(self, ids: Tokens, mask: Bools, fields: Mapping[str, Numbers], counts: PartTally) -> RowOutcome:
        if int(ids.max()) >= self._vocab_size:
            return Rejected("bad_tokens", f"id {int(ids.max())} is unknown; ids are 0 to {self._vocab_size - 1}")
        for name in self._fields.of_token_ids:
            highest = int(fields[name].max())
            if highest >= self._vocab_size:
                return Rejected("bad_field", f"{name} holds {highest}; ids are 0 to {self._vocab_size - 1}")
        example = replace(make_unstructured_example(ids, mask), token_fields=fields)
        return fit_unstructured(example, "tokens", self._limit, self._encoder.card.bos_id, counts)

    def _compare(self, ids: Sequence[Tokens], counts: PartTally) -> None:
        """Count ids that the tokenizer has no token for, and of some rows whether their text has the same ids."""
        if not ids:
            return
        every = np.concatenate(ids)
        known = np.zeros(self._vocab_size, np.bool_)
        known[self._token_ids[self._token_ids < self._vocab_size]] = True
        chosen = ids[:COMPARED_ROWS]
        encoded = self._encoder.encode([self._encoder.decode(one.tolist()) for one in chosen])
        again = np.split(encoded.ids, encoded.offsets[1:-1])
        counts.of_kind += CountSet.of(
            TokenIdCounts(
                token_ids_read=len(every),
                ids_without_token=int((~known[every]).sum()),
                retokenized_rows=len(chosen),
                equally_tokenized_rows=sum(map(np.array_equal, chosen, again)),
            )
        )

    @cached_property
    def _token_ids(self) -> Tokens:
        vocabulary: dict[str, int] = self._encoder.reference.get_vocab(with_added_tokens=True)
        return np.fromiter(vocabulary.values(), np.int32, len(vocabulary))


class RawPreferenceExampleBuilder:
    """Builds the examples of one dataset's preferences of plain text."""

    def __init__(self, texts: PlainTextExampleBuilder, limit: LengthLimit) -> None:
        self._texts = texts
        self._limit = limit
        self._is_paired = texts.dataset.format.count_sides() > 1

    def build(self, rows: pa.Table, counts: PartTally) -> list[RowOutcome]:
        """Build the examples of each row: one of both sides, or one of each."""
        asked, *columns = from_json_columns(rows, "messages", "chosen", "rejected")
        prompts = [messages[0]["content"] for messages in asked]
        margins = rows.column("margin").to_pylist()
        answers = [
            {side: messages[0]["content"] for side, messages in zip((CHOSEN, REJECTED), own, strict=True) if messages}
            for own in zip(*columns, strict=True)
        ]
        encoded = iter(
            self._texts.encode_sides(
                [prompt for prompt, own in zip(prompts, answers, strict=True) for _ in own],
                [answer for own in answers for answer in own.values()],
                [place for place, own in enumerate(answers) for _ in own],
                counts,
            )
        )
        outcomes: list[RowOutcome] = []
        for own, margin in zip(answers, margins, strict=True):
            parts = require_all(list(islice(encoded, len(own))))
            outcomes.append(
                parts
                if isinstance(parts, Rejected)
                else finish_sides(parts, [*own], margin, self._limit, counts, is_paired=self._is_paired)
            )
        return outcomes
