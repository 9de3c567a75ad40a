"""Groups that stay whole: each a unit between BOS and EOS, shuffled, as many behind one prompt as fit.

What belongs here: that rule, and cutting a group that is too large where the recipe allows it. What does not:
the order inside a group, which the numbers of its records have already.
"""

import numpy as np

from rowmill.core.arrays import Ints, compute_offsets, expand_ranges
from rowmill.tabular.assembly import (
    EDGES,
    AssembledExamples,
    ExampleLimits,
    RecordLengths,
    RecordPass,
    chain_run_ends,
    explain_flushes,
    find_run_ends,
    join_passes,
)


def assemble_groups(records: RecordLengths, passes: list[RecordPass], room: ExampleLimits) -> AssembledExamples:
    """Put the units of the passes into examples; every unit with its edges fits beside the prompt."""
    firsts, lasts, starts = join_passes(passes)
    sums = compute_offsets(records.tokens)
    costs = sums[lasts] - sums[firsts] + EDGES
    offsets = chain_run_ends(find_run_ends(costs, starts, room.limit - room.prompt, room.cap))
    count = len(offsets) - 1
    return AssembledExamples(
        records=expand_ranges(firsts, lasts - firsts),
        units=compute_offsets(lasts - firsts),
        examples=offsets,
        passes=np.searchsorted(starts, offsets[:-1], "right") - 1,
        budgets=np.full(count, room.records, np.int64),
        flushes=explain_flushes(offsets, starts, room.cap),
    )


def split_large_runs(records: RecordLengths, firsts: Ints, lasts: Ints, room: ExampleLimits) -> tuple[Ints, Ints]:
    """Cut the runs that no example can hold at record boundaries, each piece as long as fits.

    Every record fits `room.records`; pieces of a run stay one behind the other.
    """
    sums = compute_offsets(records.tokens)
    large = sums[lasts] - sums[firsts] > room.records
    if not large.any():
        return firsts, lasts
    begins: list[Ints] = []
    ends: list[Ints] = []
    for first, last, is_large in zip(firsts.tolist(), lasts.tolist(), large.tolist(), strict=True):
        borders = np.array([first, last])
        if is_large:
            own = records.tokens[first:last]
            borders = first + chain_run_ends(find_run_ends(own, np.array([0, len(own)]), room.records, None))
        begins.append(borders[:-1])
        ends.append(borders[1:])
    return np.concatenate(begins), np.concatenate(ends)
