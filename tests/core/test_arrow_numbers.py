"""Numbers of Arrow arrays are those of `to_numpy`, and reading them imports no pandas."""

import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.arrays import fill_null_numbers, view_numbers

TYPES = [pa.int8(), pa.int32(), pa.int64(), pa.float32()]

PROGRAM = """
import sys
import pyarrow as pa
from rowmill.core.arrays import fill_null_numbers, view_numbers
validity, numbers = pa.py_buffer(bytes([0b101])), pa.py_buffer(bytes([1, 2, 3]))
array = pa.Array.from_buffers(pa.int8(), 3, [validity, numbers])
print(fill_null_numbers(array, -1).tolist(), view_numbers(array.slice(2)).tolist(), "pandas" in sys.modules)
"""


@given(
    numbers=st.lists(st.none() | st.integers(-9, 99)), begin=st.integers(0, 20), kind=st.sampled_from(TYPES), null=...
)
def test_nulls_are_replaced_and_other_numbers_stay(
    numbers: list[int | None], begin: int, kind: pa.DataType, null: bool
) -> None:
    filler = math.nan if null and pa.types.is_floating(kind) else -1
    array = pa.array(numbers, kind).slice(begin)
    filled = fill_null_numbers(array, filler)
    expected = [filler if one is None else one for one in numbers[begin:]]
    np.testing.assert_array_equal(filled, np.array(expected, kind.to_pandas_dtype()))
    assert filled.dtype == kind.to_pandas_dtype()


@given(chunks=st.lists(st.lists(st.integers(-9, 99))), kind=st.sampled_from(TYPES))
def test_numbers_of_chunks_are_joined(chunks: list[list[int]], kind: pa.DataType) -> None:
    numbers = view_numbers(pa.chunked_array(chunks, kind))

    assert numbers.tolist() == [one for chunk in chunks for one in chunk]
    assert numbers.dtype == kind.to_pandas_dtype()


def test_numbers_are_read_without_pandas() -> None:
    made = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)

    assert made.stdout.split() == "[1, -1, 3] [3] False".split()
