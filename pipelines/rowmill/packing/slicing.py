"""Cut, split or drop the examples that are longer than a sequence, from their lengths."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, Integers, expand_ranges
from rowmill.core.errors import ContextOverflowError
from rowmill.packing.options import SliceStrategy

# --- too-long examples ---


@dataclass(frozen=True, slots=True, eq=False)
class ExampleSlices:
    """Pieces of examples, in example order.

    Piece p is tokens `[starts[p], starts[p] + lengths[p])` of example `examples[p]`; `dropped` are the numbers of
    examples that were dropped because they are too long.
    """

    examples: NDArray[np.int64]
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    dropped: NDArray[np.int64]


def keep_examples_whole(lengths: Integers) -> ExampleSlices:
    """Return every example as one piece, of any length."""
    require_positive(lengths)
    count = len(lengths)
    return ExampleSlices(
        examples=np.arange(count, dtype=np.int64),
        starts=np.zeros(count, dtype=np.int32),
        lengths=lengths.astype(np.int32),
        dropped=np.empty(0, dtype=np.int64),
    )


def slice_too_long(
    lengths: Integers, limit: int, strategy: SliceStrategy, *, name_of: Callable[[int], str], remedies: str
) -> ExampleSlices:
    """Cut, split or drop the examples of more than `limit` tokens; the others stay whole.

    Raises
    ------
    ContextOverflowError
        With `error`; names the first example that is too long (`name_of` its number), its length, the limit, and the
        `remedies`.

    """
    pieces = keep_examples_whole(lengths)
    long = np.flatnonzero(lengths > limit)
    if not long.size:
        return pieces
    match strategy:
        case "error":
            first = int(long[0])
            raise ContextOverflowError(
                f"{name_of(first)} has {int(lengths[first])} tokens "
                f"({long.size} {'example is' if long.size == 1 else 'examples are'} too long); "
                f"at most {limit} fit a sequence; {remedies}"
            )
        case "drop":
            return _select_pieces(pieces, lengths <= limit, dropped=long)
        case "keep_start" | "keep_end":
            kept = np.minimum(pieces.lengths, np.int32(limit))
            starts = pieces.lengths - kept if strategy == "keep_end" else pieces.starts
            return ExampleSlices(pieces.examples, starts, kept, pieces.dropped)
        case "split":
            return _split_pieces(pieces, limit)


def keep_pieces(slices: ExampleSlices, kept: Bools) -> ExampleSlices:
    """Return the pieces for which `kept` is true, with `dropped` unchanged."""
    return _select_pieces(slices, kept, dropped=slices.dropped)


def count_piece_targets(slices: ExampleSlices, loss_mask: Bools, offsets: Integers) -> NDArray[np.int64]:
    """Count the targets of each piece as a separate span, whose first token is not a target.

    `loss_mask`: the masks of all examples, concatenated; example e is `[offsets[e], offsets[e + 1])`. The caller
    rejects a piece without targets as `no_loss_tokens`.
    """
    before = np.concatenate([[0], np.cumsum(loss_mask, dtype=np.int64)])
    begin = offsets[slices.examples] + slices.starts
    return before[begin + slices.lengths] - before[begin + 1]


def _select_pieces(slices: ExampleSlices, kept: Bools, *, dropped: NDArray[np.int64]) -> ExampleSlices:
    return ExampleSlices(slices.examples[kept], slices.starts[kept], slices.lengths[kept], dropped)


def _split_pieces(pieces: ExampleSlices, limit: int) -> ExampleSlices:
    counts = -(-pieces.lengths // limit)
    number = expand_ranges(np.zeros_like(counts), counts)
    starts = (number * limit).astype(np.int32)
    lengths = np.minimum(np.repeat(pieces.lengths, counts) - starts, np.int32(limit))
    return ExampleSlices(np.repeat(pieces.examples, counts), starts, lengths, pieces.dropped)


def require_positive(lengths: Integers) -> None:
    """Raise ValueError if an example is empty, which is a defect of the caller."""
    if len(lengths) and int(lengths.min()) < 1:
        raise ValueError(f"example {int(lengths.argmin())} has {int(lengths.min())} tokens; a segment is never empty")
