"""Batches of encoded texts as arrays: which tokens train, and the kind of each token.

pieces   ···[  u  ]···[ a ]··      bytes of own text, per text of the batch
spans    t  u      t   a    t      tokens: `template` from 0, then one span per piece and per gap after it
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, Ints, Tokens, Weights, compute_offsets, count_true
from rowmill.schema.examples import SPAN_KINDS
from rowmill.schema.rows import ContentSpan, MaskedConversation, Rejected, Span
from rowmill.tokenization.alignment import (
    BatchPositions,
    FlatSpans,
    compute_token_weights,
    find_degenerate_texts,
    find_token_at,
    find_trained_tokens,
    locate_in_batch,
)
from rowmill.tokenization.encoded_texts import EncodedTexts, compute_byte_positions

TEMPLATE_KIND = SPAN_KINDS.index("template")


_KIND_NUMBERS = {kind: number for number, kind in enumerate(SPAN_KINDS)}


# ── Ranges of a batch ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class FlatContentSpans:
    """The own text of a batch of rows: piece j is bytes `[starts[j], ends[j])` of its text, ascending in each text.

    `counts` int64[N]: the number of pieces per text; `kinds` index `SPAN_KINDS`.
    """

    counts: Ints
    starts: Ints
    ends: Ints
    messages: Ints
    kinds: Ints


def flatten_content_spans(masked: Sequence[MaskedConversation], to_bytes: "Sequence[Ints | None]") -> FlatContentSpans:
    """Return the pieces of masked texts; `to_bytes[i]` maps characters of text i to bytes; None if it is ASCII."""
    counts = np.fromiter((len(one.pieces) for one in masked), np.int64, len(masked))
    flat = np.array(
        [(p.start, p.end, p.message, _KIND_NUMBERS[p.kind]) for one in masked for p in one.pieces], np.int64
    ).reshape(-1, 4)
    firsts = compute_offsets(counts)
    for i, at in enumerate(to_bytes):
        if at is not None:
            flat[firsts[i] : firsts[i + 1], :2] = at[flat[firsts[i] : firsts[i + 1], :2]]
    return FlatContentSpans(counts, flat[:, 0], flat[:, 1], flat[:, 2], flat[:, 3])


NO_TEXT_BEHIND = 1 << 62
"""The start of the next own text after a range if there is none; added to a text's base it is still an int64."""


def flatten_trained_spans(masked: Sequence[MaskedConversation], to_bytes: "Sequence[Ints | None]") -> FlatSpans:
    """Return the trained ranges of masked texts, with the bounds of the neighboring foreign text."""
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
    """Return the end of the last foreign text before a trained range, and the start of the next one.

    Foreign is the text of other messages, and text of the same message that does not train, such as reasoning that
    truncation cut.
    """
    pieces = one.pieces
    at = bisect_left(pieces, trained.start, key=_get_start)
    before = next((p.end for p in reversed(pieces[:at]) if _is_foreign(p, trained, one)), 0)
    behind = next((p.start for p in pieces[at:] if p.start >= trained.end and _is_foreign(p, trained, one)), None)
    return before, NO_TEXT_BEHIND if behind is None else behind


def _is_foreign(piece: ContentSpan, trained: Span, one: MaskedConversation) -> bool:
    if piece.message != trained.message:
        return True
    return not any(span.start < piece.end and piece.start < span.end for span in one.trained)


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
    boundary_tokens: int

    @property
    def lengths(self) -> Ints:
        """Tokens per text."""
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
    """Find the tokens of byte ranges for all texts of a batch."""
    positions = locate_in_batch(encoded)
    mask, boundary_tokens = find_trained_tokens(encoded, positions, trained)
    starts, messages, kinds, offsets = _find_token_spans(pieces, encoded, positions)
    return EncodedBatch(
        ids=encoded.ids,
        mask=mask,
        weights=None if trained.weights is None else compute_token_weights(positions, trained, mask),
        offsets=encoded.offsets,
        span_starts=starts,
        span_messages=messages,
        span_kinds=kinds,
        span_offsets=offsets,
        trained=count_true(mask, encoded.offsets),
        bad=find_degenerate_texts(encoded),
        boundary_tokens=boundary_tokens,
    )


def make_masked_batch(masked: Sequence[MaskedConversation], encoded: EncodedTexts) -> EncodedBatch:
    """Find the tokens of masked texts."""
    to_bytes = [None if one.text.isascii() else compute_byte_positions(one.text) for one in masked]
    return make_batch(encoded, flatten_content_spans(masked, to_bytes), flatten_trained_spans(masked, to_bytes))


def list_examples(batch: EncodedBatch) -> "list[Example | Rejected]":
    """Return each text of a batch as an example, or its reject."""
    bad = Rejected("offsets_degenerate", "tokens with empty or backward offsets")
    return [bad if batch.bad[i] else batch.example(i) for i in range(len(batch.bad))]


def _find_token_spans(
    pieces: FlatContentSpans, encoded: EncodedTexts, positions: BatchPositions
) -> "tuple[Ints, Ints, NDArray[np.int8], Ints]":
    """Return the starts, messages, kinds and text offsets of all non-empty token spans of a batch."""
    counts = pieces.counts
    texts = np.repeat(np.arange(len(counts)), counts)
    places = np.stack((pieces.starts, pieces.ends), axis=1).ravel()
    tokens = find_token_at(encoded, positions, np.repeat(texts, 2), places)
    # A token that reaches from one message's text into another's belongs to neither, so the first piece ends before it.
    follows = (texts[1:] == texts[:-1]) & (pieces.messages[1:] != pieces.messages[:-1])
    last = np.maximum(tokens[1:-1:2] - 1, 0)
    shared = follows & (encoded.ends[last] > pieces.starts[1:]) & (encoded.starts[last] < pieces.ends[:-1])
    tokens[1:-1:2] -= shared
    # Entry 0 of each text is its start; every piece adds its own start and end.
    entry_offsets = compute_offsets(2 * counts + 1)
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
    offsets = compute_offsets(kept)[entry_offsets]
    relative = starts - np.repeat(encoded.offsets[:-1], 2 * counts + 1)
    return relative[kept], messages[kept], kinds[kept], offsets


# ── One example ────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Example:
    """One example of one row: views into its batch's arrays, and the counts of what truncation removed.

    `span_starts` int64[J] with `span_messages` and `span_kinds` give the kind of each token. `weights` float32[T] is
    None if every target has weight 1.
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
    """The example's domain, if a custom class sets it; else its row's domain applies."""
    weights: Weights | None = None
    token_fields: Mapping[str, Weights] = field(default_factory=dict[str, Weights])
    """Further numbers of each token by name, float32[T]: what the row's options declare."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values of the columns that only examples of its kind of rows have (`rows.EXAMPLE_COLUMNS`)."""

    def cut(self, start: int, stop: int) -> "Example":
        """Keep tokens `[start, stop)`; removed tokens count as cut, and the new first token is not a target."""
        inside = (self.span_starts < stop) & (np.append(self.span_starts[1:], len(self.ids)) > start)
        mask, weights = self._select_targets(slice(start, stop))
        return replace(
            self,
            ids=self.ids[start:stop],
            mask=mask,
            weights=weights,
            token_fields={name: values[start:stop] for name, values in self.token_fields.items()},
            span_starts=np.maximum(self.span_starts[inside] - start, 0),
            span_messages=self.span_messages[inside],
            span_kinds=self.span_kinds[inside],
            tokens_cut=self.tokens_cut + len(self.ids) - (stop - start),
            cut_trained=self.cut_trained + int(self.mask.sum()) - int(mask.sum()),
        )

    def keep(self, kept: Bools) -> "Example":
        """Keep the marked tokens; removed tokens count as cut, and the new first token is not a target."""
        before = compute_offsets(kept)
        starts = before[self.span_starts]
        ends = before[np.append(self.span_starts[1:], len(kept))]
        nonempty = ends > starts
        mask, weights = self._select_targets(kept)
        return replace(
            self,
            ids=self.ids[kept],
            mask=mask,
            weights=weights,
            token_fields={name: values[kept] for name, values in self.token_fields.items()},
            span_starts=starts[nonempty],
            span_messages=self.span_messages[nonempty],
            span_kinds=self.span_kinds[nonempty],
            tokens_cut=self.tokens_cut + int((~kept).sum()),
            cut_trained=self.cut_trained + int(self.mask.sum()) - int(mask.sum()),
        )

    def _select_targets(self, kept: "slice | Bools") -> tuple[Bools, Weights | None]:
        """Return mask and weights of some tokens; the first of them is not a target, because no token precedes it."""
        mask = self.mask[kept].copy()
        mask[:1] = False
        return mask, None if self.weights is None else np.where(mask, self.weights[kept], np.float32(0))
