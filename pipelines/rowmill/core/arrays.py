"""NumPy array types that the engine passes around, offsets, and index ranges."""

from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints: TypeAlias = NDArray[np.int64]
"""Lengths, offsets, positions and row numbers."""

Tokens: TypeAlias = NDArray[np.int32]
"""Token ids, as shards store them."""

Bools: TypeAlias = NDArray[np.bool_]
"""Masks."""

Weights: TypeAlias = NDArray[np.float32]
"""Loss weights, one per token."""

Integers: TypeAlias = NDArray[np.integer[Any]]
"""Integers of any width."""

NumT = TypeVar("NumT", bound=np.number[Any])

LARGEST_INT32 = (1 << 31) - 1


def find_distinct(numbers: NDArray[NumT]) -> NDArray[NumT]:
    """Return the distinct numbers of an array of any shape, ascending; none of them may be NaN.

    `np.unique` has hashed integers since NumPy 2.3: of a million distinct ones it takes 1.2 s, sorting 0.02 s.
    """
    ordered = np.sort(numbers, axis=None)
    is_new = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return ordered[is_new]


def are_among(numbers: NDArray[NumT], distinct: NDArray[NumT]) -> Bools:
    """Return which numbers occur among others, which are distinct and ascending.

    `np.isin` looks for the distinct ones itself, the slow way, unless their range is small enough for a table.
    """
    if not len(distinct):
        return np.zeros(numbers.shape, np.bool_)
    places = np.searchsorted(distinct, numbers)
    places[places == len(distinct)] = 0
    return distinct[places] == numbers


def compute_offsets(lengths: ArrayLike) -> Ints:
    """Return where each of several consecutive runs begins, and where the last one ends.

    lengths 2 3 ─► 0 2 5
    """
    runs = np.asarray(lengths)
    # Summed in place: joining a zero and the sums would copy one number per token.
    offsets = np.empty(len(runs) + 1, np.int64)
    offsets[0] = 0
    np.cumsum(runs, dtype=np.int64, out=offsets[1:])
    return offsets


def count_true(flags: Bools, offsets: Ints) -> Ints:
    """Count the true flags of each run `[offsets[i], offsets[i + 1])`; the last run ends with the flags.

    flags 1 0 1 1, offsets 0 2 2 4 ─► 1 0 2
    """
    counts = np.zeros(len(offsets) - 1, np.int64)
    # Of an empty run, `reduceat` would return the flag behind it.
    nonempty = offsets[1:] > offsets[:-1]
    if nonempty.any():
        counts[nonempty] = np.add.reduceat(flags, offsets[:-1][nonempty], dtype=np.int64)
    return counts


def narrow_integers(numbers: Integers) -> Integers:
    """Return numbers from 0 on in 32 bits if all of them fit, else as they are."""
    return numbers.astype(np.int32) if numbers.max(initial=0) <= LARGEST_INT32 else numbers


def sum_by_span(values: Integers, segment_offsets: Ints, span_offsets: Ints) -> Tokens:
    """Sum one value per segment over attention spans: a span is a segment, or with open attention a whole sequence.

    `segment_offsets` and `span_offsets` int64[S + 1] cut segments and spans into sequences.

    values 1 3 2 of sequences with 2 and 1 segments ─► 1 3 2, or with open attention 4 2
    """
    segments = np.diff(segment_offsets)
    is_open = np.repeat(np.diff(span_offsets) < segments, segments)
    within = np.arange(len(values)) - np.repeat(segment_offsets[:-1] - segment_offsets[0], segments)
    spans = np.repeat(span_offsets[:-1] - span_offsets[0], segments) + np.where(is_open, 0, within)
    count = int(span_offsets[-1] - span_offsets[0])
    return np.bincount(spans, weights=values, minlength=count).astype(np.int32)


def expand_ranges(starts: Integers, lengths: Integers) -> Ints:
    """Join the ranges `[starts[i], starts[i] + lengths[i])` into one index array, to gather tokens once.

    starts 7 0, lengths 2 3 ─► 7 8 0 1 2
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total, dtype=np.int64)
