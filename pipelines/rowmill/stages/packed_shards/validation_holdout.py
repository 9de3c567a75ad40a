"""Hold out a number of validation sequences: whole groups, in the order of a hash, until they fill enough.

What belongs here: which examples enter validation. What does not: a split by shares, which is decided row by row
(`splits.py`), or which of their sequences stay (the plan's first ones do).

    groups by u     g7 │ g2  │ g9  │ g1  │ …        wanted: 1,500 tokens
    their tokens   300 │ 900 │ 500 │ 400 │ …
                   └── validation ──┘└─ train …     300 + 900 + 500 reach it

A group is taken whole or not at all, so none stands on both sides. New rows can shift the margin, because a count
says nothing about one row alone; that is why shares are the better choice where a number is not needed.
"""

import numpy as np
from numpy.typing import NDArray


def hold_out_groups(
    u: NDArray[np.uint64], room: NDArray[np.int64], candidates: NDArray[np.bool_], wanted: int
) -> NDArray[np.bool_] | None:
    """Mark the candidates of the first groups, in ascending `u`, whose room adds up to what is wanted.

    All [N]: `u` is one number per group, `room` what each example fills (tokens, or sequences where each has its
    own), `candidates` those that may be held out. None if all candidates together do not reach `wanted`.
    """
    numbers, group = np.unique(u[candidates], return_inverse=True)
    filled = np.cumsum(np.bincount(group, weights=room[candidates], minlength=len(numbers)))
    if not len(numbers) or filled[-1] < wanted:
        return None
    last = numbers[int(np.searchsorted(filled, wanted))]
    return candidates & (u <= last)
