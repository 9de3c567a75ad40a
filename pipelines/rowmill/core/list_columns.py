"""Arrow list columns from offsets and flat values, as every stage stores tokens."""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Integers


def make_list_array(offsets: Integers, values: NDArray[Any] | pa.Array) -> pa.ListArray:
    """Return an Arrow list column: row i is `values[offsets[i]:offsets[i + 1]]`."""
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))
