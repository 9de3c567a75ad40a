"""Arrays of numbers, and Arrow columns of them; runs of flat arrays, such as the tokens of examples, in any order.

    values a b c d e f     starts 4 0, lengths 2 3 ─► e f a b c

`to_numpy` of an Arrow array imports pandas, where it is installed: 0.3 s of a training process that reads batches.
These functions do not. NumPy copies runs value by value, along an index of eight bytes for each; Arrow copies whole
runs where they are texts, and does not look at what the bytes are; decision 36 has the times.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
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

Numbers: TypeAlias = NDArray[Any]
"""Numbers of each token: [T], or [T, size] if each token has a fixed number of them."""

NumT = TypeVar("NumT", bound=np.number[Any])

LARGEST_INT32 = (1 << 31) - 1


def find_distinct(numbers: NDArray[NumT]) -> NDArray[NumT]:
    """Return the distinct numbers of an array of any shape, ascending; none of them may be NaN.

    `np.unique` has hashed integers since NumPy 2.3: of a million distinct ones it takes 1.2 s, sorting 0.02 s.
    """
    ordered = np.sort(numbers, axis=None)
    return ordered[mark_changes(ordered)]


def are_among(numbers: NDArray[NumT], distinct: NDArray[NumT]) -> Bools:
    """Return which numbers occur among others, which are distinct and ascending.

    `np.isin` looks for the distinct ones itself, the slow way, unless their range is small enough for a table.
    """
    if not len(distinct):
        return np.zeros(numbers.shape, np.bool_)
    places = np.searchsorted(distinct, numbers)
    places[places == len(distinct)] = 0
    return distinct[places] == numbers


def group_equal(values: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each distinct value with the places that have it, both ascending: one sort, however many there are."""
    order = np.argsort(values, kind="stable")
    distinct, begins = np.unique(values[order], return_index=True)
    return zip(distinct.tolist(), np.split(order, begins[1:]) if len(order) else (), strict=True)


def mark_changes(*columns: NDArray[Any]) -> Bools:
    """Return which lines of some columns differ from the line before: 5 5 7 ─► 1 0 1."""
    is_new = np.zeros(len(columns[0]), np.bool_)
    is_new[:1] = True
    for column in columns:
        is_new[1:] |= column[1:] != column[:-1]
    return is_new


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


def make_position_ids(span_lengths: Integers) -> Tokens:
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


# ── Numbers of Arrow arrays as NumPy arrays, without pandas ──


def view_numbers(array: pa.Array | pa.ChunkedArray) -> NDArray[Any]:
    """Return the numbers of an array without nulls: read-only, not copied unless the array has several chunks.

    Fixed-size lists become the rows of an array of two dimensions.
    """
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    if pa.types.is_fixed_size_list(array.type):
        # `flatten` imports `pyarrow.compute`.
        size = array.type.list_size
        return np.from_dlpack(array.values.slice(array.offset * size, len(array) * size)).reshape(-1, size)
    return np.from_dlpack(array)


def fill_null_numbers(array: pa.Array, null: float) -> NDArray[Any]:
    """Return the numbers of an array, with one number in place of nulls."""
    if not array.null_count:
        return view_numbers(array)
    validity, values = array.buffers()
    numbers = view_numbers(pa.Array.from_buffers(array.type, len(array), [None, values], offset=array.offset))
    bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
    is_valid = bits[array.offset : array.offset + len(array)] == 1
    return np.where(is_valid, numbers, np.array(null, numbers.dtype))


# ── Arrow list columns from offsets and flat values, as every stage stores tokens ──


def make_array(values: Sequence[str] | Ints) -> pa.Array:
    """Return texts as an Arrow array, or integers of 64 bits without copying them.

    `pa.array` imports pandas as well, and so does comparing a column with a value of Python in place of one of these.
    """
    if isinstance(values, np.ndarray):
        return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])
    encoded = [text.encode() for text in values]
    offsets = compute_offsets([len(text) for text in encoded]).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def make_list_array(offsets: Integers, values: NDArray[Any] | pa.Array) -> pa.ListArray:
    """Return an Arrow list column: row i is `values[offsets[i]:offsets[i + 1]]`.

    Of an array [T, size], each value is a list of that size.
    """
    if isinstance(values, np.ndarray) and values.ndim == 2:
        values = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


def make_column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return one value of an Arrow type per row; those of lists of fixed-size lists are arrays [T, size]."""
    if pa.types.is_list(kind) and pa.types.is_fixed_size_list(kind.value_type):
        joined = np.concatenate([make_zeros(0, kind.value_type), *values])
        return make_list_array(compute_offsets([len(rows) for rows in values]), joined)
    return pa.array(values, kind)


def flatten_lists(column: pa.ListArray | pa.ChunkedArray) -> NDArray[Any]:
    """Return the values of all rows of a list column, joined: [T], or [T, size] of fixed-size lists."""
    values = (column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column).flatten()
    if pa.types.is_fixed_size_list(values.type):
        return view_numbers(values)
    return values.to_numpy(zero_copy_only=False)


def read_lists(column: pa.ListArray | pa.ChunkedArray) -> tuple[NDArray[Any], Ints]:
    """Return the values of all rows of a list column, joined, and where each row begins: int64[R + 1]."""
    lists = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return flatten_lists(lists), compute_offsets(lists.value_lengths().to_numpy(zero_copy_only=False))


def split_lists(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of each row of a list column."""
    lists = column.combine_chunks()
    offsets = np.asarray(lists.offsets)
    return np.split(flatten_lists(lists), offsets[1:-1] - offsets[0]) if len(lists) else []


def make_zeros(count: int, kind: pa.DataType) -> Numbers:
    """Return zeros for some tokens: numbers of an Arrow type, or fixed-size lists of numbers."""
    if pa.types.is_fixed_size_list(kind):
        return np.zeros((count, kind.list_size), kind.value_type.to_pandas_dtype())
    return np.zeros(count, kind.to_pandas_dtype())


# ── Runs of flat arrays, such as the tokens of examples, joined in any order ──


_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """K runs: run k is `[starts[k], starts[k] + lengths[k])` of an array.

    `borders` int64[2 K] are where the runs begin and end, ascending, and run k begins at `borders[places[k]]`; None if
    runs overlap.
    """

    starts: Ints
    lengths: Ints
    borders: Ints | None
    places: Ints

    @classmethod
    def of(cls, starts: Integers, lengths: Integers) -> "Runs":
        """Find out how some runs follow each other."""
        starts, lengths = starts.astype(np.int64), lengths.astype(np.int64)
        # An empty run ends where another one begins, so it comes first.
        order = np.lexsort((lengths, starts))
        borders = np.stack((starts[order], starts[order] + lengths[order]), axis=1).ravel()
        places = np.empty(len(starts), np.int64)
        places[order] = np.arange(0, len(borders), 2)
        return cls(starts, lengths, borders if (np.diff(borders) >= 0).all() else None, places)

    def take(self, values: NDArray[_T]) -> NDArray[_T]:
        """Return the values of all runs, joined. The result may be part of `values`: do not write to it."""
        ends = self.starts + self.lengths
        if not len(ends):
            return values[:0]
        if np.array_equal(self.starts[1:], ends[:-1]):
            return values[self.starts[0] : ends[-1]]
        if self.borders is None:
            return values[expand_ranges(self.starts, self.lengths)]
        # Texts are taken out of the bytes of the array, cut at `borders`.
        width = values.dtype.itemsize * math.prod(values.shape[1:])
        offsets = pa.py_buffer(self.borders * width)
        content = pa.py_buffer(np.ascontiguousarray(values).ravel().view(np.uint8))
        texts = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(self.borders) - 1, [None, offsets, content])
        joined = texts.take(pa.array(self.places))
        size = np.frombuffer(joined.buffers()[1], np.int64)[len(self.places)]
        flat = np.frombuffer(joined.buffers()[2], values.dtype, count=int(size) // values.dtype.itemsize)
        return flat.reshape(-1, *values.shape[1:])


# ── Format counts, shares, durations and sizes for people, in a terminal, on a page and in a log ──


NO_NUMBER = "–"
"""Shown in place of a missing number."""


def format_percent(part: float, whole: float = 1.0) -> str:
    """Format a share: `38.1 %`; a dash if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else NO_NUMBER


def format_count(count: int, one: str, many: str = "") -> str:
    """Format a count with its noun: `1 row`, `1,342 rows`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def format_seconds(seconds: float) -> str:
    """Format a duration: `0.4 s`, `2 min 05 s`, `3 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_time(at: str) -> str:
    """Format an ISO time in UTC, to the minute: `2026-11-26 02:03 UTC`."""
    return f"{at[:16].replace('T', ' ')} UTC"


def format_size(size_bytes: float) -> str:
    """Format a size in bytes: `1.2 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "bytes" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def join_facts(facts: Iterable[str]) -> str:
    """Join facts on one line, without the empty ones."""
    return " · ".join(fact for fact in facts if fact)
