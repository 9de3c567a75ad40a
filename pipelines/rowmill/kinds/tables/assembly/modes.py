"""The three ways to join records into examples, and passes over them.

Assembly of series: one group per example, in order, continued in the next example when one is full.

Train examples draw their budgets, so that a model sees series begin and break off at many positions; held-out examples
are as full as possible. A record above its example's budget raises the budget to its own size: only a record above
`limits.records` does not fit.

Resampling of records: full passes, then a partial one, each in its own order.

n 10, wanted 25        pass 0: all 10    pass 1: all 10    pass 2: 5 of them
groups of 1 to 5, 6    whole groups until 6 are reached: 6 to 10 records; a series is truncated: exactly 6
"""

from bisect import bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets, expand_ranges
from rowmill.kinds.tables.assembly import (
    DELIMITERS_PER_UNIT,
    FLUSHES,
    AssembledExamples,
    BudgetSampler,
    ExampleLimits,
    RecordLengths,
    RecordPass,
    chain_run_ends,
    explain_flushes,
    find_run_ends,
    join_passes,
)


def assemble_records(records: RecordLengths, passes: list[RecordPass], limits: ExampleLimits) -> AssembledExamples:
    """Assemble the records of the passes into examples of one unit each; every record fits `limits.records`."""
    order, _, starts = join_passes(passes)
    offsets = chain_run_ends(find_run_ends(records.tokens[order], starts, limits.records, limits.cap))
    count = len(offsets) - 1
    return AssembledExamples(
        records=order,
        units=offsets,
        examples=np.arange(count + 1, dtype=np.int64),
        passes=np.searchsorted(starts, offsets[:-1], "right") - 1,
        budgets=np.full(count, limits.records, np.int64),
        flushes=explain_flushes(offsets, starts, limits.cap),
    )


# ── Assembly of whole groups: each is a unit between BOS and EOS; shuffled, and as many per prompt as fi ──


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


# ── Assembly of series: one group per example, in order, continued in the next example when one is full ──


Flags = NDArray[np.int8]

_END, _RESTART, _GROUP = (FLUSHES.index(name) for name in ("end", "restart", "group_change"))
_CAP, _BUDGET = FLUSHES.index("max_records"), FLUSHES.index("budget")


def assemble_series(
    records: RecordLengths, passes: list[RecordPass], limits: ExampleLimits, draw: BudgetSampler | None
) -> AssembledExamples:
    """Assemble the series of the passes into examples of one unit each; `draw` is None for held-out splits."""
    firsts, lasts, starts = join_passes(passes)
    order = expand_ranges(firsts, lasts - firsts)
    sums: list[int] = compute_offsets(records.tokens[order]).tolist()
    groups: list[int] = (np.searchsorted(records.groups, firsts, "right") - 1).tolist()
    bounds: list[int] = compute_offsets(lasts - firsts).tolist()
    pass_of: list[int] = (np.searchsorted(starts, np.arange(len(firsts)), "right") - 1).tolist()
    offsets, budgets, flushes, numbers = [0], list[int](), list[int](), list[int]()
    cap = limits.cap if limits.cap is not None else len(order)
    for run, group in enumerate(groups):
        here, end, ordinal = bounds[run], bounds[run + 1], 0
        budget_of = None if draw is None else draw(pass_of[run], group)
        while here < end:
            budget = limits.records if budget_of is None else budget_of(ordinal)
            most = min(here + cap, end)
            # One record always fits, so the search begins after it.
            stop = most if most == here + 1 else bisect_right(sums, sums[here] + budget, here + 2, most + 1) - 1
            offsets.append(stop)
            budgets.append(budget)
            numbers.append(pass_of[run])
            flushes.append(_GROUP if stop == end else _CAP if stop == most else _BUDGET)
            here, ordinal = stop, ordinal + 1
    units = np.array(offsets, np.int64)
    reasons = np.array(flushes, np.int8)
    reasons[np.isin(units[1:], np.array(bounds, np.int64)[starts])] = _RESTART
    reasons[-1:] = _END
    return AssembledExamples(
        records=order,
        units=units,
        examples=np.arange(len(offsets), dtype=np.int64),
        passes=np.array(numbers, np.int64),
        budgets=np.maximum(np.array(budgets, np.int64), records.tokens[order[units[:-1]]]),
        flushes=reasons,
    )


# ── Resampling of records: full passes, then a partial one, each in its own order ──


Permute = Callable[[int, int], Ints]
"""(pass, n) → a permutation of 0 … n−1."""


def resample_records(records: RecordLengths, wanted: int | None, permute: Permute) -> list[RecordPass]:
    """Return passes over single records: exactly `wanted` in all; None means each once."""
    passes: list[RecordPass] = []
    for number, size in _pass_sizes(len(records.tokens), wanted):
        order = permute(number, len(records.tokens))[:size]
        passes.append(RecordPass(number, order, order + 1))
    return passes


def resample_groups(records: RecordLengths, wanted: int | None, permute: Permute) -> list[RecordPass]:
    """Return passes over whole groups; the last one adds groups until its share is reached."""
    sizes = records.group_sizes
    passes: list[RecordPass] = []
    for number, size in _pass_sizes(len(records.tokens), wanted):
        order = permute(number, len(sizes))
        kept = order[: int(np.searchsorted(np.cumsum(sizes[order]), size)) + 1]
        passes.append(RecordPass(number, records.groups[kept], records.groups[kept + 1]))
    return passes


def resample_series(records: RecordLengths, wanted: int | None, permute: Permute) -> list[RecordPass]:
    """Return passes over series: exactly `wanted` records, the last series truncated to a prefix.

    A full first pass is in key order; other passes permute the groups, never the records.
    """
    sizes = records.group_sizes
    passes: list[RecordPass] = []
    for number, size in _pass_sizes(len(records.tokens), wanted):
        whole_first = number == 0 and size == len(records.tokens)
        order = np.arange(len(sizes)) if whole_first else permute(number, len(sizes))
        ends = np.cumsum(sizes[order])
        kept = order[: int(np.searchsorted(ends, size)) + 1]
        lasts = records.groups[kept + 1].copy()
        lasts[-1:] -= ends[len(kept) - 1] - size
        passes.append(RecordPass(number, records.groups[kept], lasts))
    return passes


def _pass_sizes(count: int, wanted: int | None) -> list[tuple[int, int]]:
    """Return each pass as (number, number of its records)."""
    if not count:
        return []
    full, rest = (1, 0) if wanted is None else divmod(wanted, count)
    return [*((number, count) for number in range(full)), *([(full, rest)] if rest else [])]
