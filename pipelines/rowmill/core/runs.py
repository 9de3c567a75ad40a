"""Runs of flat arrays, such as the tokens of examples, joined in any order.

    values a b c d e f     starts 4 0, lengths 2 3 ─► e f a b c

NumPy copies value by value, along an index of eight bytes for each. Arrow copies whole runs where they are texts, and
does not look at what the bytes are; decision 37 has the times.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Integers, Ints, expand_ranges

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
        return _join_texts(values, self.borders, self.places)


def _join_texts(values: NDArray[Any], borders: Ints, places: Ints) -> NDArray[Any]:
    """Take texts out of the bytes of an array, cut at `borders`."""
    width = values.dtype.itemsize
    offsets = pa.py_buffer(borders * width)
    texts = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(borders) - 1, [None, offsets, pa.py_buffer(np.ascontiguousarray(values).view(np.uint8))]
    )
    joined = texts.take(pa.array(places))
    size = np.frombuffer(joined.buffers()[1], np.int64)[len(places)]
    return np.frombuffer(joined.buffers()[2], values.dtype, count=int(size) // width)
