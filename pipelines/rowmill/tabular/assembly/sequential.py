"""Assembly of series: one group per example, in order, continued in the next example when one is full.

Train examples draw their budgets, so that a model sees series begin and break off at many positions; held-out examples
are as full as possible. A record above its example's budget raises the budget to its own size: only a record above
`limits.records` does not fit.
"""

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets, expand_ranges
from rowmill.tabular.assembly import (
    FLUSHES,
    AssembledExamples,
    BudgetSampler,
    ExampleLimits,
    RecordLengths,
    RecordPass,
    join_passes,
)

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
    return AssembledExamples(
        records=order,
        units=units,
        examples=np.arange(len(offsets), dtype=np.int64),
        passes=np.array(numbers, np.int64),
        budgets=np.maximum(np.array(budgets, np.int64), records.tokens[order[units[:-1]]]),
        flushes=_mark_restarts(np.array(flushes, np.int8), units, bounds, starts),
    )


def _mark_restarts(flushes: Flags, offsets: Ints, bounds: list[int], starts: Ints) -> Flags:
    """Replace the reason of each pass's last example by `restart`, and that of the last one by `end`."""
    flushes[np.isin(offsets[1:], np.array(bounds, np.int64)[starts])] = _RESTART
    flushes[-1:] = _END
    return flushes
