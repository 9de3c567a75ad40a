"""Names of the NumPy array types that the engine passes around.

What belongs here: aliases of array types. What does not: functions on arrays, schemas of files (`rowmill.schema`).
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
"""Lengths, offsets, positions and row numbers."""

Tokens: TypeAlias = NDArray[np.int32]
"""Token ids, as shards store them."""

Bools: TypeAlias = NDArray[np.bool_]
"""Masks."""

Weights: TypeAlias = NDArray[np.float32]
"""Loss weights, one per token."""
