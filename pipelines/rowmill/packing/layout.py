"""Lay out planned sequences: segments, attention spans, positions, labels.

plan      s0: examples 0 2   s1: example 1          lengths 3 2 │ 4
position_ids  0 1 2 0 1 │ 0 1 2 3
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, Integers
from rowmill.schema.examples import IGNORED_LABEL

# ── The plan ──


@dataclass(frozen=True, slots=True, eq=False)
class SequencePlan:
    """The tokens of every sequence, and the examples that they come from.

    Sequence s has segments `[sequence_offsets[s], sequence_offsets[s + 1])`; segment k is tokens
    `[ranges[k, 0], ranges[k, 0] + ranges[k, 1])` of example `examples[k]`. Segments are sorted by example number,
    sequences by their first example.

    sequence_offsets int64[S + 1] · examples int64[K] · ranges int32[K, 2] (start, length in tokens)

    If examples share prefixes, a segment is a stretch of an example that others may share, `examples[k]` the first of
    them; segments are depth first, trees sorted by their lowest example.
    """

    sequence_offsets: NDArray[np.int64]
    examples: NDArray[np.int64]
    ranges: NDArray[np.int32]
    trees: "PlannedTrees | None" = None

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return len(self.sequence_offsets) - 1

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens of each sequence, int64[S]."""
        before = np.concatenate([[0], np.cumsum(self.ranges[:, 1], dtype=np.int64)])
        return np.diff(before[self.sequence_offsets])

    @property
    def whole(self) -> "SequencePlan":
        """The same sequences with a segment for each example, which shares no token."""
        return self if self.trees is None else self.trees.leaves

    def select(self, first: int, end: int) -> "SequencePlan":
        """Return the sequences `[first, end)`."""
        offsets = self.sequence_offsets[first : end + 1]
        begin, last = int(offsets[0]), int(offsets[-1])
        trees = None if self.trees is None else self.trees.select(first, end, slice(begin, last))
        return SequencePlan(offsets - begin, self.examples[begin:last], self.ranges[begin:last], trees)

    def renumber(self, numbers: NDArray[np.int64]) -> "SequencePlan":
        """Return the plan with example `numbers[i]` in the place of example i."""
        trees = None if self.trees is None else replace(self.trees, leaves=self.trees.leaves.renumber(numbers))
        return replace(self, examples=numbers[self.examples], trees=trees)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTrees:
    """Where K segments continue others, and where the examples of the same sequences, the leaves, end.

    `parents` int32[K] are segments of the same sequence, -1 for none. `leaves` has a segment for each of M examples, or
    piece of one, and its own order of them; `ends` int32[M] are the segments that they end with, within their sequence.
    """

    parents: NDArray[np.int32]
    leaves: SequencePlan
    ends: NDArray[np.int32]

    def select(self, first: int, end: int, segments: slice) -> "PlannedTrees":
        """Return those of the sequences `[first, end)`, which have these segments."""
        offsets = self.leaves.sequence_offsets
        return PlannedTrees(
            self.parents[segments], self.leaves.select(first, end), self.ends[offsets[first] : offsets[end]]
        )


# ── Arrays of planned sequences ──


def attention_spans(
    plan: SequencePlan, *, block_cross_document_attention: bool
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return span lengths int32[Q] (`seq_lengths` of all sequences, concatenated) and their offsets int64[S + 1].

    With blocked attention every segment is a span, with open attention every sequence. Padding is not included.
    """
    if block_cross_document_attention:
        return plan.ranges[:, 1].copy(), plan.sequence_offsets
    return plan.tokens.astype(np.int32), np.arange(plan.sequences + 1, dtype=np.int64)


def count_padding(plan: SequencePlan, multiple: int, *, block_cross_document_attention: bool) -> NDArray[np.int32]:
    """Return the pad tokens after each segment, int32[K], that make its attention span a multiple of `multiple`.

    Multiple of 4, lengths 3 5 ─► 1 3; with open attention, where only the sequence counts, 0 0.
    """
    if block_cross_document_attention:
        return -plan.ranges[:, 1] % np.int32(multiple)
    padding = np.zeros(len(plan.ranges), np.int32)
    padding[plan.sequence_offsets[1:] - 1] = -plan.tokens % multiple
    return padding


def round_up(lengths: Integers, multiple: int) -> NDArray[np.int64]:
    """Return lengths rounded up to multiples: multiple of 4, lengths 3 5 8 ─► 4 8 8."""
    return -(-lengths.astype(np.int64) // multiple) * multiple


def measure_padded_room(lengths: Integers, seq_len: int, multiple: int) -> tuple[Integers, int]:
    """Return the room that segments take in sequences of some length, and what a sequence holds, padding included.

    For estimates: a length that is no multiple holds as many whole multiples as fit, or one.

    Multiple of 4, lengths 3 5 6 in 10 ─► 4 8 8 in 8
    """
    capacity = max(seq_len // multiple, 1) * multiple
    # Without padding no copy of eight bytes a length is made.
    return np.minimum(lengths if multiple == 1 else round_up(lengths, multiple), capacity), capacity


def position_ids(span_lengths: Integers) -> NDArray[np.int32]:
    """Count from 0 within each span: lengths 3 2 ─► 0 1 2 0 1."""
    lengths = span_lengths[span_lengths > 0].astype(np.int32)
    if not len(lengths):
        return np.empty(0, np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    # One more than the position before, but at a span's beginning back to 0.
    positions = np.ones(int(ends[-1]), np.int32)
    positions[0] = 0
    positions[ends[:-1]] -= lengths[:-1]
    return np.cumsum(positions, dtype=np.int32, out=positions)


def mark_targets(loss_mask: Bools, span_lengths: Integers) -> Bools:
    """Return which positions are targets: those of the mask except the first position of each span.

    This defines the loss: position i predicts i + 1 iff both are in one attention span and `loss_mask[i + 1]`.
    Masks 0 1 1 | 1 1 ─► 0 1 1 0 1.
    """
    predicted = loss_mask.copy()
    ends = np.cumsum(span_lengths, dtype=np.int64)
    predicted[ends - span_lengths] = False
    return predicted


def make_labels(
    input_ids: NDArray[np.int32], loss_mask: Bools, span_lengths: Integers, *, ignore_token_id: int | None
) -> NDArray[np.int32]:
    """Return unshifted labels: the token if it is a target, else -100; `ignore_token_id` is never a target."""
    predicted = mark_targets(loss_mask, span_lengths)
    if ignore_token_id is not None:
        predicted &= input_ids != ignore_token_id
    return np.where(predicted, input_ids, np.int32(IGNORED_LABEL))
