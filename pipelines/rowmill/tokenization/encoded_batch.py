"""Batches of encoded texts as arrays: which tokens train, what each token is, and the columns of `tokenized_examples`.

What belongs here: from character or byte ranges to token masks and spans, for a whole batch at once; one
example as views into its batch; examples as columns. What does not: where the ranges come from (`masking/`),
how rows become texts (`text_examples.py`).

    pieces   ···[  u  ]···[ a ]··      bytes of own text, per text of the batch
    spans    t  u      t   a    t      tokens: `template` from 0, then one span per piece and per gap behind it
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, Ints, Tokens, Weights
from rowmill.schema.conversation import Conversation
from rowmill.schema.examples import SPAN_KINDS, make_example_schema
from rowmill.schema.rows import ContentSpan, MaskedConversation, Rejected, Span
from rowmill.tokenization.alignment import (
    FlatSpans,
    compute_token_weights,
    find_degenerate_texts,
    find_token_at,
    find_trained_tokens,
)
from rowmill.tokenization.control_tokens import ControlStrings, contains_added_token
from rowmill.tokenization.encoder import EncodedTexts, Encoder, compute_byte_positions, rejoin_pieces

TEMPLATE_KIND = SPAN_KINDS.index("template")
_KIND_NUMBERS = {kind: number for number, kind in enumerate(SPAN_KINDS)}

SAMPLE_EVERY = 100
"""One text in so many is encoded again by the reference tokenizer, in every batch the first unless it is very long."""

SAMPLE_CHARS = 1 << 18
"""Longer texts are not compared: the reference holds 500 bytes per token, which is 1.4 GB for 10 MB of text."""


# ── Ranges of a batch ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class FlatContentSpans:
    """Own text over a batch: piece j is bytes `[starts[j], ends[j])` of its text, ascending within a text.

    `counts` int64[N] says how many pieces each text has; `kinds` index `examples.KINDS`.
    """

    counts: Ints
    starts: Ints
    ends: Ints
    messages: Ints
    kinds: Ints


def flatten_content_spans(masked: Sequence[MaskedConversation], to_bytes: "Sequence[Ints | None]") -> FlatContentSpans:
    """Return the pieces of masked texts; `to_bytes[i]` maps characters of text i to bytes, None: they are equal."""
    counts = np.fromiter((len(one.pieces) for one in masked), np.int64, len(masked))
    flat = np.array(
        [(p.start, p.end, p.message, _KIND_NUMBERS[p.kind]) for one in masked for p in one.pieces], np.int64
    ).reshape(-1, 4)
    firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    for i, at in enumerate(to_bytes):
        if at is not None:
            flat[firsts[i] : firsts[i + 1], :2] = at[flat[firsts[i] : firsts[i + 1], :2]]
    return FlatContentSpans(counts, flat[:, 0], flat[:, 1], flat[:, 2], flat[:, 3])


NO_TEXT_BEHIND = 1 << 62
"""Where the own text behind a range begins if there is none; added to a text's place it is still an int64."""


def flatten_trained_spans(masked: Sequence[MaskedConversation], to_bytes: "Sequence[Ints | None]") -> FlatSpans:
    """Return the trained ranges of masked texts, each with the own text of other messages beside it."""
    rows: list[tuple[int, int, int, int, int]] = []
    for i, one in enumerate(masked):
        at = to_bytes[i]
        for span in one.trained:
            before, behind = _find_neighbours(one, span)
            if at is None:
                rows.append((i, span.start, span.end, before, behind))
            else:
                known = int(at[behind]) if behind < NO_TEXT_BEHIND else behind
                rows.append((i, int(at[span.start]), int(at[span.end]), int(at[before]), known))
    flat = np.array(rows, np.int64).reshape(-1, 5)
    return FlatSpans(
        *(np.ascontiguousarray(flat[:, column]) for column in range(5)), weights=_collect_span_weights(masked)
    )


def _collect_span_weights(masked: Sequence[MaskedConversation]) -> Weights | None:
    if not any(one.weights for one in masked):
        return None
    return np.array([one.weights.get(span.message, 1.0) for one in masked for span in one.trained], np.float32)


def _find_neighbours(one: MaskedConversation, trained: Span) -> tuple[int, int]:
    """Return where other messages' own text ends before a trained range, and where it begins behind it."""
    pieces = one.pieces
    at = bisect_left(pieces, trained.start, key=_get_start)
    before = next((p.end for p in reversed(pieces[:at]) if p.message != trained.message), 0)
    behind = next((p.start for p in pieces[at:] if p.message != trained.message and p.start >= trained.end), None)
    return before, NO_TEXT_BEHIND if behind is None else behind


def _get_start(piece: ContentSpan) -> int:
    return piece.start


# ── Tokens of a batch ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """Encoded texts with masks and spans, flat: `[offsets[i], offsets[i + 1])` are text i's tokens.

    `[span_offsets[i], span_offsets[i + 1])` are its spans, whose starts count from its first token. `trained`
    int64[N] counts targets; `bad` are texts whose tokens have empty or backward offsets. `weights` float32 are
    null where every target weighs 1.
    """

    ids: Tokens
    mask: Bools
    weights: Weights | None
    offsets: Ints
    span_starts: Ints
    span_messages: Ints
    span_kinds: NDArray[np.int8]
    span_offsets: Ints
    trained: Ints
    bad: Bools
    straddles: int

    @property
    def lengths(self) -> Ints:
        """The tokens of each text."""
        return np.diff(self.offsets)

    def example(self, i: int) -> "Example":
        """Return one text as views into the arrays."""
        own = slice(int(self.span_offsets[i]), int(self.span_offsets[i + 1]))
        left, right = int(self.offsets[i]), int(self.offsets[i + 1])
        return Example(
            ids=self.ids[left:right],
            mask=self.mask[left:right],
            weights=None if self.weights is None else self.weights[left:right],
            span_starts=self.span_starts[own],
            span_messages=self.span_messages[own],
            span_kinds=self.span_kinds[own],
            original_tokens=right - left,
            original_trained=int(self.trained[i]),
        )


def make_batch(encoded: EncodedTexts, pieces: FlatContentSpans, trained: FlatSpans) -> EncodedBatch:
    """Find the tokens of byte ranges, for all texts of a batch at once."""
    mask, straddles = find_trained_tokens(encoded, trained)
    starts, messages, kinds, offsets = _find_token_spans(pieces, encoded)
    sums = np.concatenate((np.zeros(1, np.int64), np.cumsum(mask)))[encoded.offsets]
    return EncodedBatch(
        ids=encoded.ids,
        mask=mask,
        weights=None if trained.weights is None else compute_token_weights(encoded, trained, mask),
        offsets=encoded.offsets,
        span_starts=starts,
        span_messages=messages,
        span_kinds=kinds,
        span_offsets=offsets,
        trained=np.diff(sums),
        bad=find_degenerate_texts(encoded),
        straddles=straddles,
    )


def make_masked_batch(masked: Sequence[MaskedConversation], encoded: EncodedTexts) -> EncodedBatch:
    """Find the tokens of masked texts."""
    to_bytes = [None if one.text.isascii() else compute_byte_positions(one.text) for one in masked]
    return make_batch(encoded, flatten_content_spans(masked, to_bytes), flatten_trained_spans(masked, to_bytes))


def list_examples(batch: EncodedBatch) -> "list[Example | Rejected]":
    """Return each text of a batch as an example, or why it cannot be one."""
    bad = Rejected("offsets_degenerate", "tokens with empty or backward offsets")
    return [bad if batch.bad[i] else batch.example(i) for i in range(len(batch.bad))]


def _find_token_spans(pieces: FlatContentSpans, encoded: EncodedTexts) -> "tuple[Ints, Ints, NDArray[np.int8], Ints]":
    """Return the starts, messages, kinds and text offsets of all token spans of a batch; empty ones left out."""
    counts = pieces.counts
    texts = np.repeat(np.arange(len(counts)), counts)
    places = np.stack((pieces.starts, pieces.ends), axis=1).ravel()
    tokens = find_token_at(encoded, np.repeat(texts, 2), places)
    # A token that reaches from one message's own text into another's is nobody's: it ends the first piece early.
    follows = (texts[1:] == texts[:-1]) & (pieces.messages[1:] != pieces.messages[:-1])
    last = np.maximum(tokens[1:-1:2] - 1, 0)
    shared = follows & (encoded.ends[last] > pieces.starts[1:]) & (encoded.starts[last] < pieces.ends[:-1])
    tokens[1:-1:2] -= shared
    # Entry 0 of each text is its beginning; every piece adds where it starts and where it ends.
    entry_offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(2 * counts + 1)))
    is_first = np.zeros(int(entry_offsets[-1]), bool)
    is_first[entry_offsets[:-1]] = True
    starts = np.empty(len(is_first), np.int64)
    starts[is_first] = encoded.offsets[:-1]
    starts[~is_first] = tokens
    kinds, messages = np.full(len(is_first), TEMPLATE_KIND, np.int8), np.full(len(is_first), -1, np.int64)
    opens = np.flatnonzero(~is_first)[::2]
    kinds[opens], messages[opens] = pieces.kinds, pieces.messages
    ends = np.append(starts[1:], 0)
    ends[entry_offsets[1:] - 1] = encoded.offsets[1:]
    kept = ends > starts
    offsets = np.append(0, np.cumsum(kept, dtype=np.int64))[entry_offsets]
    relative = starts - np.repeat(encoded.offsets[:-1], 2 * counts + 1)
    return relative[kept], messages[kept], kinds[kept], offsets


# ── One example ────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Example:
    """One example of one row: views into its batch's arrays, and what truncation removed.

    `span_starts` int64[J] with `span_messages` and `span_kinds` tell what each token is. `weights` float32[T] is
    null where every target weighs 1.
    """

    ids: Tokens
    mask: Bools
    span_starts: Ints
    span_messages: Ints
    span_kinds: NDArray[np.int8]
    original_tokens: int
    original_trained: int
    messages_removed: int = 0
    exchanges_removed: int = 0
    reasoning_removed: int = 0
    tokens_cut: int = 0
    exchanges_trained: int = 0
    reasoning_trained: int = 0
    cut_trained: int = 0
    domain: str | None = None
    """The example's own, where a class of one's own names it; else its row's."""
    weights: Weights | None = None

    def cut(self, start: int, stop: int) -> "Example":
        """Keep tokens `[start, stop)`; what is removed is counted as cut. The new first token is no target."""
        inside = (self.span_starts < stop) & (np.append(self.span_starts[1:], len(self.ids)) > start)
        mask, weights = self._select_targets(slice(start, stop))
        return replace(
            self,
            ids=self.ids[start:stop],
            mask=mask,
            weights=weights,
            span_starts=np.maximum(self.span_starts[inside] - start, 0),
            span_messages=self.span_messages[inside],
            span_kinds=self.span_kinds[inside],
            tokens_cut=self.tokens_cut + len(self.ids) - (stop - start),
            cut_trained=self.cut_trained + int(self.mask.sum()) - int(mask.sum()),
        )

    def keep(self, kept: Bools) -> "Example":
        """Keep the marked tokens; spans shrink, and what goes is counted as cut. The new first token is no target."""
        before = np.concatenate(([0], np.cumsum(kept)))
        starts = before[self.span_starts]
        ends = before[np.append(self.span_starts[1:], len(kept))]
        nonempty = ends > starts
        mask, weights = self._select_targets(kept)
        return replace(
            self,
            ids=self.ids[kept],
            mask=mask,
            weights=weights,
            span_starts=starts[nonempty],
            span_messages=self.span_messages[nonempty],
            span_kinds=self.span_kinds[nonempty],
            tokens_cut=self.tokens_cut + int((~kept).sum()),
            cut_trained=self.cut_trained + int(self.mask.sum()) - int(mask.sum()),
        )

    def _select_targets(self, kept: "slice | Bools") -> tuple[Bools, Weights | None]:
        """Return mask and weights of some tokens; the first of them follows nothing and is no target."""
        mask = self.mask[kept].copy()
        mask[:1] = False
        return mask, None if self.weights is None else np.where(mask, self.weights[kept], np.float32(0))


# ── Examples as columns ────────────────────────────────────────────────────────────────────────────


_REMOVED_COLUMNS = ("messages_removed", "exchanges_removed", "reasoning_removed", "tokens_cut",
            "exchanges_trained", "reasoning_trained", "cut_trained")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExampleColumns:
    """Examples of a part, flat: example j is number `ks[j]` of row `rows[j]`.

    `removed` has a column for each name in `_REMOVED_COLUMNS`; those absent are zero.
    """

    rows: Ints
    ks: Ints
    lengths: Ints
    ids: Tokens
    mask: Bools
    span_counts: Ints
    span_starts: Ints
    span_messages: Ints
    span_kinds: NDArray[np.int8]
    original_tokens: Ints
    original_trained: Ints
    removed: "dict[str, Ints]"
    domains: "tuple[str | None, ...]" = ()
    """Examples' own domains, where a class of one's own names them; empty: all have their rows'."""
    weights: Weights | None = None
    """The loss weight of every token; null: every target weighs 1."""

    @property
    def token_weights(self) -> Weights:
        """The loss weight of every token, 0 where it does not train."""
        return self.mask.astype(np.float32) if self.weights is None else self.weights

    def table(self, row_ids: pa.Array, splits: pa.Array, domains: pa.Array, *, weighted: bool) -> pa.Table:
        """Return the examples as `make_example_schema` says; example k of a row is called `row_id#k`."""
        rows = pa.array(self.rows)
        names = row_ids.take(rows)
        numbers = pa.array(self.ks).cast(pa.string()) if self.ks.any() else pa.scalar("0")
        trained, template = _sum_by_example(self.mask, self.lengths), self._count_template_tokens()
        zeros = pa.array(np.zeros(len(self.rows), np.int32))
        removed = [pa.array(self.removed[name].astype(np.int32)) if name in self.removed else zeros
                   for name in _REMOVED_COLUMNS]  # fmt: skip
        return pa.Table.from_arrays(
            [
                pc.binary_join_element_wise(names, numbers, "#"),
                pa.ListArray.from_arrays(pa.array(np.arange(len(self.rows) + 1, dtype=np.int32)), names),
                splits.take(rows),
                pc.coalesce(pa.array(self.domains, pa.string()), domains.take(rows))
                if self.domains
                else domains.take(rows),
                _make_list_array(self.lengths, self.ids),
                _make_list_array(self.lengths, self.mask),
                _make_list_array(self.span_counts, self.span_starts.astype(np.int32)),
                _make_list_array(self.span_counts, self.span_messages.astype(np.int32)),
                _make_list_array(self.span_counts, self.span_kinds),
                pa.array(self.original_tokens.astype(np.int32)),
                pa.array(self.lengths.astype(np.int32)),
                pa.array(trained.astype(np.int32)),
                pa.array((self.lengths - trained - template).astype(np.int32)),
                pa.array(template.astype(np.int32)),
                *removed[:4],
                pa.array((self.original_trained - trained).astype(np.int32)),
                *removed[4:],
                *([_make_list_array(self.lengths, self.token_weights)] if weighted else []),
            ],
            schema=make_example_schema(weighted=weighted),
        )

    def verified(self) -> int:
        """Count examples whose token mask agrees with what their tokens are.

        The own text of a message trains as a whole or not at all, but for an example's first token. A mask moved by
        one token breaks this.
        """
        begins = np.repeat(np.cumsum(self.lengths) - self.lengths, self.span_counts)
        starts = self.span_starts + begins
        sizes = np.diff(np.append(starts, len(self.mask)))
        counted = np.concatenate((np.zeros(1, np.int64), np.cumsum(self.mask)))
        trained = counted[starts + sizes] - counted[starts]
        sizes = sizes - ((self.span_starts == 0) & (sizes > 0))
        partly = (trained > 0) & (trained < sizes) & (self.span_kinds != TEMPLATE_KIND)
        examples = np.repeat(np.arange(len(self.rows)), self.span_counts)
        return len(self.rows) - len(np.unique(examples[partly]))

    def _count_template_tokens(self) -> Ints:
        """Count per example the untrained tokens that the template wrote."""
        # Each example's first span begins with it, so over all examples a span ends where the next one begins.
        begins = self.span_starts + np.repeat(np.cumsum(self.lengths) - self.lengths, self.span_counts)
        sizes = np.diff(np.append(begins, len(self.mask)))
        return _sum_by_example(np.repeat(self.span_kinds == TEMPLATE_KIND, sizes) & ~self.mask, self.lengths)


def make_columns(made: "Sequence[tuple[int, int, Example]]") -> ExampleColumns:
    """Return examples as columns; each comes with its row's place and its number among that row's."""
    examples = [one for _, _, one in made]
    return ExampleColumns(
        rows=np.array([row for row, _, _ in made], np.int64),
        ks=np.array([k for _, k, _ in made], np.int64),
        lengths=np.array([len(one.ids) for one in examples], np.int64),
        ids=_concat_arrays([one.ids for one in examples], np.int32),
        mask=_concat_arrays([one.mask for one in examples], np.bool_),
        span_counts=np.array([len(one.span_starts) for one in examples], np.int64),
        span_starts=_concat_arrays([one.span_starts for one in examples], np.int64),
        span_messages=_concat_arrays([one.span_messages for one in examples], np.int64),
        span_kinds=_concat_arrays([one.span_kinds for one in examples], np.int8),
        original_tokens=np.array([one.original_tokens for one in examples], np.int64),
        original_trained=np.array([one.original_trained for one in examples], np.int64),
        removed={name: np.array([getattr(one, name) for one in examples], np.int64) for name in _REMOVED_COLUMNS},
        domains=tuple(one.domain for one in examples) if any(one.domain for one in examples) else (),
        weights=_concat_weights([(one.mask, one.weights) for one in examples]),
    )


def make_batch_columns(batch: EncodedBatch, rows: Ints, kept: Bools) -> ExampleColumns:
    """Return the kept texts of a batch as columns, text i being the one example of row `rows[i]`."""
    if not kept.all():
        return make_columns([(int(rows[i]), 0, batch.example(i)) for i in np.flatnonzero(kept).tolist()])
    return ExampleColumns(
        rows=rows,
        ks=np.zeros(len(rows), np.int64),
        lengths=batch.lengths,
        ids=batch.ids,
        mask=batch.mask,
        weights=batch.weights,
        span_counts=np.diff(batch.span_offsets),
        span_starts=batch.span_starts,
        span_messages=batch.span_messages,
        span_kinds=batch.span_kinds,
        original_tokens=batch.lengths,
        original_trained=batch.trained,
        removed={},
    )


def concat_columns(several: Sequence[ExampleColumns]) -> ExampleColumns:
    """Return columns end to end; there is at least one."""
    if len(several) == 1:
        return several[0]
    removed = {name for one in several for name in one.removed}
    none = {id(one): np.zeros(len(one.rows), np.int64) for one in several}
    names = [name for name in ExampleColumns.__slots__ if name not in ("removed", "domains", "weights")]
    parts: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one in several]) for name in names}
    taken = {name: np.concatenate([one.removed.get(name, none[id(one)]) for one in several]) for name in removed}
    own = any(one.domains for one in several)
    domains = tuple(name for one in several for name in one.domains or [None] * len(one.rows)) if own else ()
    weights = _concat_weights([(one.mask, one.weights) for one in several])
    return ExampleColumns(**parts, removed=taken, domains=domains, weights=weights)


def sort_by_row(table: pa.Table, columns: ExampleColumns) -> pa.Table:
    """Return a table made of columns in the order of its rows and of their examples."""
    order = np.lexsort((columns.ks, columns.rows))
    return table if (np.diff(order) == 1).all() else table.take(pa.array(order))


def _concat_weights(several: "Sequence[tuple[Bools, Weights | None]]") -> Weights | None:
    """Return weights end to end, each given with its mask; null if all of them are."""
    if all(weights is None for _, weights in several):
        return None
    return np.concatenate([mask.astype(np.float32) if weights is None else weights for mask, weights in several])


def _concat_arrays(arrays: "Sequence[NDArray[Any]]", dtype: Any) -> "NDArray[Any]":
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)


def _make_list_array(lengths: Ints, values: "NDArray[Any]") -> pa.ListArray:
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _sum_by_example(flags: Bools, lengths: Ints) -> Ints:
    ends = np.cumsum(lengths)
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(flags)))
    return before[ends] - before[ends - lengths]


def count_outside_vocabulary(table: pa.Table, vocab_size: int) -> int:
    """Count the token ids of a part's examples that no embedding row would serve."""
    ids = table.column("input_ids").combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return int(((ids < 0) | (ids >= vocab_size)).sum())


# ── Encoding a batch ───────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class TokenizationCounts:
    """What is counted while rows are prepared, beside the examples themselves; sums over parts are checks' facts."""

    dropped: dict[str, int] = field(default_factory=dict[str, int])
    control_strings: dict[str, int] = field(default_factory=dict[str, int])
    """Occurrences of control tokens in rows' own text, by role and string: `user <|im_end|>`."""
    controlled_rows: int = 0
    template: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the template's contract says that a trainer should know."""
    usual_way: int = 0
    altered: int = 0
    """Texts whose ids decode to other text, because the tokenizer normalises."""
    lane_differences: int = 0
    straddles: int = 0
    prompts_compared: int = 0
    """Rows whose generation prompt was encoded alone and held against the row's ids."""
    prompts_that_differ: list[str] = field(default_factory=list[str])
    """Ids of those of them whose ids do not begin with the prompt's."""
    dropped_tokens: int = 0
    """Tokens of rows that were encoded and then rejected: too long, or without a target."""
    dropped_trained: int = 0
    """Those of them that were to be trained on."""

    def add_control_strings(self, control: ControlStrings, one: Conversation) -> None:
        """Count control tokens in a row's own text, by role and string."""
        self.controlled_rows += 1
        for name, count in control.count_occurrences(one.messages, one.tools, one.kwargs).items():
            self.control_strings[name] = self.control_strings.get(name, 0) + count

    def add_dropped(self, dropped: dict[str, int]) -> None:
        """Count own text that the template did not print."""
        for kind, count in dropped.items():
            self.dropped[kind] = self.dropped.get(kind, 0) + count


def encode_and_compare(encoder: Encoder, texts: Sequence[str], counts: TokenizationCounts) -> EncodedTexts:
    """Encode a batch and compare a sample with the reference; on any difference all of it goes the usual way."""
    encoded = encoder.encode(texts)
    counts.usual_way += encoded.usual
    counts.altered += encoded.altered
    sample = [i for i in range(0, len(texts), SAMPLE_EVERY) if len(texts[i]) <= SAMPLE_CHARS]
    if encoded.usual == len(texts) or encoder.matches_reference(texts, encoded, sample):
        return encoded
    counts.lane_differences += 1
    return encoder.without_fast_path().encode(texts)


def make_examples(
    masked: Sequence[MaskedConversation],
    ordinary: Sequence[list[tuple[int, int]]],
    encoder: Encoder,
    counts: TokenizationCounts,
    *,
    split: bool = False,
) -> "list[Example | Rejected]":
    """Encode masked texts in one batch and find the tokens of their spans.

    `ordinary[i]` are ranges of text i that must not become control tokens. With `split` a text is cut where it
    begins to train, and the pieces are encoded apart, so that a prompt's ids are those of the prompt alone.
    """
    plain = [i for i, ranges in enumerate(ordinary) if not ranges]
    encoded = _encode_masked([masked[i] for i in plain], encoder, counts, split=split)
    batch = make_masked_batch([masked[i] for i in plain], encoded)
    counts.straddles += batch.straddles
    made: dict[int, Example | Rejected] = dict(zip(plain, list_examples(batch), strict=True))
    for i, ranges in enumerate(ordinary):
        if ranges:
            cuts = _find_trained_starts(masked[i]) if split else ()
            around = encoder.encode_around(masked[i].text, ranges, cuts)
            alone = make_masked_batch([masked[i]], around)
            counts.straddles += alone.straddles
            made[i] = list_examples(alone)[0]
            if contains_added_token(encoder.card, around, masked[i].text, ranges):
                made[i] = Rejected("control_token_in_content", "the tokenizer makes a control token of ordinary text")
    return [made[i] for i in range(len(masked))]


def _encode_masked(
    masked: Sequence[MaskedConversation], encoder: Encoder, counts: TokenizationCounts, *, split: bool
) -> EncodedTexts:
    if not split:
        return encode_and_compare(encoder, [one.text for one in masked], counts)
    bounds = [[0, *_find_trained_starts(one), len(one.text)] for one in masked]
    pieces = [one.text[a:b] for one, at in zip(masked, bounds, strict=True) for a, b in pairwise(at)]
    sizes = np.array([len(at) - 1 for at in bounds], np.int64)
    encoded = encode_and_compare(encoder, pieces, counts)
    later = np.setdiff1d(np.arange(len(pieces)), np.cumsum(sizes) - sizes)
    return rejoin_pieces(encoder.reencode_continuations(encoded, pieces, later), pieces, sizes)


def _find_trained_starts(one: MaskedConversation) -> list[int]:
    """Return the characters, other than the first, at which training begins after text that does not train."""
    ends = {span.end for span in one.trained}
    return [span.start for span in one.trained if span.start and span.start not in ends]
