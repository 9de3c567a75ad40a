"""Reading the fields that rows of token ids carry: numbers placed at their tokens, and values of the row.

    ids        5 6 7 8 9      of which the response is 7 8 9, and 7 and 9 are trained

    5 values   all tokens     a b c d e
    3 values   the response   0 0 a b c
    2 values   the trained    0 0 a 0 b

The three sets contain each other, so a number of values says which of them is meant.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rowmill.core.arrays import Bools, Weights
from rowmill.core.config import describe_type
from rowmill.core.json import Json
from rowmill.formats.built_examples import to_flat_array
from rowmill.formats.record_values import is_list
from rowmill.schema.rows import Rejected

_MOST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """The sets of a record's T tokens that a field may be of: all, the response, the trained; bool[T]."""

    response: Bools | None
    trained: Bools

    def place(self, values: Weights, name: str) -> Weights | Rejected:
        """Return one value for each token, 0.0 where there is none; reject another number of values."""
        every = np.ones(len(self.trained), np.bool_)
        chosen = [every, *(() if self.response is None else (self.response,)), self.trained]
        for places in chosen:
            if int(places.sum()) == len(values):
                placed = np.zeros(len(places), np.float32)
                placed[places] = values
                return placed
        counts = " or ".join(str(count) for count in dict.fromkeys(int(places.sum()) for places in chosen))
        return Rejected("length_mismatch", f"{name} has {len(values)} values, expected {counts}")


def read_token_values(value: Json, name: str) -> Weights | Rejected:
    """Return a list of finite numbers as float32."""
    values = to_flat_array(value) if is_list(value) else None
    if values is None or (len(values) and values.dtype.kind not in "iuf") or _has_booleans(value):
        return Rejected("bad_field", f"{name} is {describe_type(value)}, expected a flat list of numbers")
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(single))
    if len(wrong):
        return Rejected("bad_field", f"{name} is {values[wrong[0]]} at {int(wrong[0])}, expected a finite float32")
    return single


def _has_booleans(value: Json) -> bool:
    # NumPy would turn true into 1 among numbers.
    return is_list(value) and bool in map(type, value)


def read_row_field(record: Mapping[str, Json], name: str) -> float | str | Rejected | None:
    """Return the reward of a record as a number, or its group as text; None if it has none."""
    value = record.get(name)
    if value is None:
        return None
    if name == "reward":
        if type(value) not in (int, float):
            return Rejected("bad_field", f"reward is {describe_type(value)}, expected a number")
        if not abs(value) <= _MOST:
            return Rejected("bad_field", f"reward is {value}, expected a finite float32")
        return float(value)
    if type(value) not in (int, str):
        return Rejected("bad_field", f"{name} is {describe_type(value)}, expected text or an integer")
    return str(value)
