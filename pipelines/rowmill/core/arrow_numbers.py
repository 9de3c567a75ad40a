"""Numbers of Arrow arrays as NumPy arrays, without pandas.

`to_numpy` of an Arrow array imports pandas, where it is installed, when a process first calls it: 0.3 s of processor
time. These functions do not, so a training process that reads batches, in which nothing may be kept out, does without.
"""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def view_numbers(array: pa.Array | pa.ChunkedArray) -> NDArray[Any]:
    """Return the numbers of an array without nulls: read-only, not copied unless the array has several chunks."""
    return np.from_dlpack(array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array)


def fill_null_numbers(array: pa.Array, null: float) -> NDArray[Any]:
    """Return the numbers of an array, with one number in place of nulls."""
    if not array.null_count:
        return view_numbers(array)
    validity, values = array.buffers()
    numbers = view_numbers(pa.Array.from_buffers(array.type, len(array), [None, values], offset=array.offset))
    bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
    is_valid = bits[array.offset : array.offset + len(array)] == 1
    return np.where(is_valid, numbers, np.array(null, numbers.dtype))
