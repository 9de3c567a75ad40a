"""Groups that stay whole: each a unit between BOS and EOS, shuffled, as many behind one prompt as fit.

What belongs here: that rule, and cutting a group that is too large where the recipe allows it. What does not:
the order inside a group, which the numbers of its records have already.
"""

import numpy as np

from rowmill.tabular.assembly import (
    EDGES,
    Assembled,
    Ints,
    Pass,
    Records,
    Room,
    ends_of_runs,
    expand,
    follow,
    joined,
    reasons,
)


def assemble(records: Records, passes: list[Pass], room: Room) -> Assembled:
    """Put the units of the passes into examples; every unit with its edges fits beside the prompt."""
    firsts, lasts, starts = joined(passes)
    sums = np.concatenate((np.zeros(1, np.int64), np.cumsum(records.tokens)))
    costs = sums[lasts] - sums[firsts] + EDGES
    offsets = follow(ends_of_runs(costs, starts, room.limit - room.prompt, room.cap))
    count = len(offsets) - 1
    return Assembled(
        records=expand(firsts, lasts),
        units=np.concatenate((np.zeros(1, np.int64), np.cumsum(lasts - firsts))),
        examples=offsets,
        passes=np.searchsorted(starts, offsets[:-1], "right") - 1,
        budgets=np.full(count, room.records, np.int64),
        flushes=reasons(offsets, starts, room.cap),
    )


def cut_too_large(records: Records, firsts: Ints, lasts: Ints, room: Room) -> tuple[Ints, Ints]:
    """Cut the runs that no example can hold at record boundaries, each piece as long as fits.

    Every record fits `room.records`; pieces of a run stay one behind the other.
    """
    sums = np.concatenate((np.zeros(1, np.int64), np.cumsum(records.tokens)))
    large = sums[lasts] - sums[firsts] > room.records
    if not large.any():
        return firsts, lasts
    begins: list[Ints] = []
    ends: list[Ints] = []
    for first, last, is_large in zip(firsts.tolist(), lasts.tolist(), large.tolist(), strict=True):
        borders = np.array([first, last])
        if is_large:
            own = records.tokens[first:last]
            borders = first + follow(ends_of_runs(own, np.array([0, len(own)]), room.records, None))
        begins.append(borders[:-1])
        ends.append(borders[1:])
    return np.concatenate(begins), np.concatenate(ends)
