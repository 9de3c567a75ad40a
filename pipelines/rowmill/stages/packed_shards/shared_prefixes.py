"""Which examples begin with the same tokens, and where each may be cut: between two messages of a conversation.

    spans    template │ user 0 │ template │ assistant 1 │ template │ user 2 │ …
    cuts     . . . .  .          . . . . .               . . . .  .              not within a message

A cut between two messages may be anywhere in what the template prints there, so that an example that ends after an
answer is a prefix of one that goes on. Examples are sorted by their bytes, in which equal beginnings are neighbors.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, Ints, Tokens, compute_offsets, expand_ranges
from rowmill.packing.prefix_trees import SortedPieces
from rowmill.schema.examples import SPAN_KINDS

SPAN_COLUMNS = ("span_starts", "span_messages", "span_kinds")

COMPARED_TOKENS = 1 << 20
"""Tokens of neighbors that are compared at a time."""

_CUT_BIT = np.int32(1 << 30)
"""Set in the code of a token after which its example may be cut; ids are below it."""

_TEMPLATE = SPAN_KINDS.index("template")


def find_cuts(examples: pa.Table) -> Bools:
    """Return for each token of conversations, joined, whether a message does not go on after it: bool[T]."""
    starts, messages, kinds = (_flatten(examples, name) for name in SPAN_COLUMNS)
    spans = compute_offsets(examples.column("span_starts").combine_chunks().value_lengths().to_numpy())
    tokens = compute_offsets(examples.column("tokens").to_numpy())
    per_example = np.diff(spans)
    begins = starts + np.repeat(tokens[:-1], per_example)
    lengths = np.diff(begins, append=tokens[-1])
    examples_of, numbers = np.repeat(np.arange(len(per_example)), per_example), np.arange(len(starts))
    is_own = (kinds != _TEMPLATE) & (lengths > 0)
    # The nearest span with text of the row, up to each span and from it on; in the same example or not.
    last = np.maximum.accumulate(np.where(is_own, numbers, -1))
    following = np.minimum.accumulate(np.where(is_own, numbers, len(numbers))[::-1])[::-1]

    def is_cut(before: Ints, after: Ints, at: Ints) -> Bools:
        """Return whether text of two messages, or of none on a side, is at the spans around a place of `at`."""
        inside = (before >= 0) & (after < len(numbers))
        before, after = np.where(inside, before, 0), np.where(inside, after, 0)
        same = (examples_of[before] == examples_of[at]) & (examples_of[after] == examples_of[at])
        return ~(inside & same & (messages[before] == messages[after]))

    cuts = np.repeat(~is_own & is_cut(last, following, numbers), lengths)
    own = numbers[is_own]
    after_own = np.append(following[1:], len(numbers))[own]
    cuts[begins[own] + lengths[own] - 1] = is_cut(own, after_own, own)
    cuts[tokens[1:] - 1] = True
    return cuts


def sort_by_tokens(ids: Tokens, cuts: Bools | None, offsets: Ints, *, min_shared: int) -> SortedPieces:
    """Sort pieces by their tokens, and return how many of these each shares with the next: 0, or at least `min_shared`.

    `offsets` int64[P + 1] cut `ids` int32[T] into pieces. With `cuts` bool[T], pieces share tokens as far as these and
    the places at which they may be cut are equal, up to such a place.
    """
    codes = np.ascontiguousarray(ids, np.int32)
    if cuts is not None:
        codes = codes | np.where(cuts, _CUT_BIT, np.int32(0))
        codes[offsets[1:] - 1] |= _CUT_BIT
    content = pa.py_buffer(codes.view(np.uint8))
    pieces = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(4 * offsets), content]
    )
    order: Ints = pc.array_sort_indices(pieces).to_numpy().astype(np.int64)
    lengths = np.diff(offsets)[order]
    most, begins = np.minimum(lengths[:-1], lengths[1:]), offsets[order]
    shared = np.zeros(len(most), np.int64)
    active, known, width = np.flatnonzero(most >= min_shared), 0, min_shared
    while len(active):
        # Twice as many tokens each time, of the pairs that have not differed: a pair costs what it has in common.
        counts = np.minimum(most[active] - known, width)
        found = np.concatenate(
            [
                _find_differences(codes, begins[some] + known, begins[some + 1] + known, counts_of)
                for some, counts_of in _divide(active, counts)
            ]
        )
        shared[active] = known + found
        active = active[(found == width) & (most[active] > known + width)]
        known, width = known + width, 2 * width
    if cuts is not None:
        places, firsts = np.flatnonzero(codes & _CUT_BIT), begins[:-1]
        nearest = np.searchsorted(places, firsts + shared) - 1
        # Of the first piece, none may be before; of others, the end of the piece before.
        shared = np.where((shared > 0) & (nearest >= 0), np.maximum(places[nearest] + 1 - firsts, 0), 0)
    return SortedPieces(order, np.where(shared < min_shared, 0, shared))


def _divide(pairs: Ints, counts: Ints) -> "list[tuple[Ints, Ints]]":
    """Divide pairs into runs of about `COMPARED_TOKENS`."""
    borders = np.searchsorted(np.cumsum(counts), np.arange(COMPARED_TOKENS, int(counts.sum()), COMPARED_TOKENS))
    return [
        (some, of_some)
        for some, of_some in zip(np.split(pairs, borders), np.split(counts, borders), strict=True)
        if len(some)
    ]


def _find_differences(codes: Tokens, firsts: Ints, others: Ints, counts: Ints) -> Ints:
    """Return the place of the first difference of each pair of runs, or the length of the runs; none is empty."""
    differs = codes[expand_ranges(firsts, counts)] != codes[expand_ranges(others, counts)]
    begins = np.cumsum(counts) - counts
    places = expand_ranges(np.zeros(len(counts), np.int64), counts)
    return np.minimum.reduceat(np.where(differs, places, np.repeat(counts, counts)), begins)


def _flatten(table: pa.Table, name: str) -> "NDArray[Any]":
    return table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
