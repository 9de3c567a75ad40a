"""Assembly of whole groups: each is a unit between BOS and EOS; shuffled, and as many per prompt as fit."""

import numpy as np

from rowmill.core.arrays import Ints, compute_offsets, expand_ranges
from rowmill.tabular.assembly import (
    DELIMITERS_PER_UNIT,
    AssembledExamples,
    ExampleLimits,
    RecordLengths,
    RecordPass,
    chain_run_ends,
    explain_flushes,
    find_run_ends,
    join_passes,
)


def assemble_groups(records: RecordLengths, passes: list[RecordPass], limits: ExampleLimits) -> AssembledExamples:
    """Assemble the units of the passes; every unit with its delimiters fits after the prompt."""
    firsts, lasts, starts = join_passes(passes)
    sums = compute_offsets(records.tokens)
    costs = sums[lasts] - sums[firsts] + DELIMITERS_PER_UNIT
    offsets = chain_run_ends(find_run_ends(costs, starts, limits.limit - limits.prompt, limits.cap))
    count = len(offsets) - 1
    return AssembledExamples(
        records=expand_ranges(firsts, lasts - firsts),
        units=compute_offsets(lasts - firsts),
        examples=offsets,
        passes=np.searchsorted(starts, offsets[:-1], "right") - 1,
        budgets=np.full(count, limits.records, np.int64),
        flushes=explain_flushes(offsets, starts, limits.cap),
    )


def split_large_runs(records: RecordLengths, firsts: Ints, lasts: Ints, limits: ExampleLimits) -> tuple[Ints, Ints]:
    """Split the runs that are too large for an example at record boundaries, each piece as long as fits.

    Every record fits `limits.records`; pieces of a run stay consecutive.
    """
    sums = compute_offsets(records.tokens)
    large = sums[lasts] - sums[firsts] > limits.records
    if not large.any():
        return firsts, lasts
    begins: list[Ints] = []
    ends: list[Ints] = []
    for first, last, is_large in zip(firsts.tolist(), lasts.tolist(), large.tolist(), strict=True):
        borders = np.array([first, last])
        if is_large:
            own = records.tokens[first:last]
            borders = first + chain_run_ends(find_run_ends(own, np.array([0, len(own)]), limits.records, None))
        begins.append(borders[:-1])
        ends.append(borders[1:])
    return np.concatenate(begins), np.concatenate(ends)
