"""Times of an order column that can be meant in two ways, so that sorting by them may give a wrong order.

| problem | in the source | why it matters |
|---|---|---|
| a repeated hour | 01:00 01:30 **01:00 01:30** 02:00, local times as daylight saving ends | sorting mixes them |
| repeated times | 01:00 02:00 **02:00** 03:00 in one series | nothing orders the two records |
| missing zones | 01:00+02:00 **02:00** | a time without a zone is read as UTC |
| mixed units | 1700000000 **1700000060000**, seconds and milliseconds since 1970 | the other unit sorts last |
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, Ints
from rowmill.kinds.tables.row_index import RowIndex
from rowmill.kinds.tables.time_order import DAY

_HOUR = 3600
_NIGHT = (-2 * _HOUR, 4 * _HOUR)
"""Daylight saving ends between 22:00 and 04:00, by the clock that is put back."""
_MAX_GAP = 600
"""Seconds that may pass unrecorded while the clock is put back, where the steps of a series are shorter."""
_MAX_UNORDERED = 0.01
"""Share of steps against the order of the source up to which it counts as ordered."""


@dataclass(frozen=True, slots=True, eq=False)
class TimePairs:
    """Rows with an ambiguous time, and for each the row that it is compared with; `begins` marks the first of a run.

    All are int64[N] row numbers of an index, and bool[N], by series and then in source order.
    """

    rows: Ints
    others: Ints
    begins: Bools


def find_repeated_times(index: RowIndex) -> TimePairs:
    """Find the rows whose series has their time in an earlier row already."""
    empty = np.empty(0, np.int64)
    if index.groups is None or index.positions is None:
        return TimePairs(empty, empty, np.empty(0, np.bool_))
    rows, _ = index.sort_rows(np.arange(len(index.groups), dtype=np.int64))
    groups, times = index.groups[rows], index.positions[rows]
    again = np.flatnonzero((groups[1:] == groups[:-1]) & (times[1:] == times[:-1])) + 1
    return TimePairs(rows[again], rows[again - 1], np.ones(len(again), np.bool_))


def find_repeated_hours(index: RowIndex) -> TimePairs:
    """Find the rows of an hour that occurs twice in a series of local times, as at the end of daylight saving.

    The source has to be ordered, oldest or newest first, but for steps back by about an hour at night. `others` are the
    last rows before the clock is put back. Times of a whole hour's step only repeat (`find_repeated_times`).

        00:30 01:00 01:30 │ 01:00 01:30 │ 02:00        the rows between the bars are found, and compared with 01:30
    """
    empty = np.empty(0, np.int64)
    nothing = TimePairs(empty, empty, np.empty(0, np.bool_))
    if index.groups is None or index.positions is None or index.unit is None:
        return nothing
    rows = np.argsort(index.groups, kind="stable")
    steps = _measure_source_steps(index, rows)
    if int((steps < 0).sum()) > int((steps > 0).sum()):
        # The newest row is first.
        rows = rows[::-1]
        steps = _measure_source_steps(index, rows)
    goes_back = steps < 0
    second = float(1 / index.unit)
    # The clock is put back between two rows whose true distance is not recorded: the steps around it estimate it.
    usual = np.where(steps < _HOUR * second, steps, 0)
    around = np.maximum(np.append(0, usual[:-1]), np.append(usual[1:], 0))
    missing = np.maximum(2 * around, _MAX_GAP * second)
    before = np.append(0, index.positions[rows][:-1])
    at_night = (before / second - _NIGHT[0]) % DAY < _NIGHT[1] - _NIGHT[0]
    is_put_back = goes_back & (-steps < _HOUR * second) & (-steps >= _HOUR * second - missing) & at_night
    if not is_put_back.any() or int((goes_back & ~is_put_back).sum()) > _MAX_UNORDERED * len(steps):
        return nothing
    is_latest = _mark_latest(index, rows)
    numbers = np.arange(len(rows))
    last_event = np.maximum.accumulate(np.where(is_latest | goes_back, numbers, 0))
    is_found = ~is_latest & is_put_back[last_event]
    return TimePairs(rows[is_found], rows[last_event[is_found] - 1], is_put_back[is_found])


def has_times_of_day(index: RowIndex) -> bool:
    """Tell whether any time of an index of dates is not midnight."""
    return (
        index.positions is not None and index.unit is not None and bool((index.positions % int(DAY / index.unit)).any())
    )


def _measure_source_steps(index: RowIndex, rows: Ints) -> Ints:
    """Return the step from each row's predecessor in its series, 0 for the first row of a series."""
    assert index.groups is not None
    assert index.positions is not None
    groups = index.groups[rows]
    steps = np.diff(index.positions[rows], prepend=0)
    steps[np.diff(groups, prepend=-1) != 0] = 0
    return steps


def _mark_latest(index: RowIndex, rows: Ints) -> Bools:
    """Mark the rows that are later than all rows before them in their series."""
    assert index.groups is not None
    assert index.positions is not None
    groups, times = index.groups[rows], index.positions[rows]
    series = np.cumsum(np.diff(groups, prepend=-1) != 0)
    order = np.lexsort((times, series))
    is_next = (np.diff(series[order], prepend=0) != 0) | (np.diff(times[order], prepend=0) != 0)
    # Ranks ascend from series to series, so that one running maximum serves all of them.
    ranks = np.empty(len(rows), np.int64)
    ranks[order] = np.cumsum(is_next)
    return ranks > np.append(-1, np.maximum.accumulate(ranks)[:-1])


# ── Zones ─────────────────────────────────────────────────────────────────────────────────────────


def mark_zones(texts: pa.LargeStringArray) -> NDArray[np.bool_]:
    """Mark the ISO 8601 texts that end with an offset from UTC; null does not."""
    found = pc.match_substring_regex(texts, r"[0-9](?:Z|[+-][0-9]{2}:?[0-9]{2}(?::[0-9]{2})?)[ \t]*$")
    return pc.fill_null(found, fill_value=False).to_numpy(zero_copy_only=False)


# ── Units ─────────────────────────────────────────────────────────────────────────────────────────

UNITS = ("seconds", "milliseconds", "microseconds", "nanoseconds")
"""Units of numbers since 1970."""
_EPOCHS = (1e8, 1e10)
"""Seconds since 1970 of 1973 and 2286. Other numbers are no epochs: elapsed times, steps, row numbers."""
_MAX_OTHER = 0.01
"""Share of numbers outside the four ranges up to which a column is one of epochs."""


@dataclass(frozen=True, slots=True, eq=False)
class EpochUnits:
    """Numbers of a part, or of several, as epochs: of each of `UNITS`, and last those of none.

    `counts` int64[5]; `lowest` and `highest` float64[4] in seconds; `first` are the first values' parts and rows.
    """

    counts: Ints
    lowest: NDArray[np.float64]
    highest: NDArray[np.float64]
    first: tuple[tuple[int, int] | None, ...]

    @classmethod
    def of(cls, numbers: NDArray[np.float64], part: int) -> "EpochUnits":
        """Classify the numbers of a part."""
        units = np.full(len(numbers), len(UNITS))
        for unit in range(len(UNITS)):
            units[(numbers >= _EPOCHS[0] * 1e3**unit) & (numbers < _EPOCHS[1] * 1e3**unit)] = unit
        own = [np.flatnonzero(units == unit) for unit in range(len(UNITS))]
        return cls(
            np.bincount(units, minlength=len(UNITS) + 1),
            np.array([numbers[rows].min(initial=np.inf) / 1e3**unit for unit, rows in enumerate(own)]),
            np.array([numbers[rows].max(initial=0) / 1e3**unit for unit, rows in enumerate(own)]),
            tuple((part, int(rows[0])) if len(rows) else None for rows in own),
        )

    def plus(self, later: "EpochUnits") -> "EpochUnits":
        """Add the numbers of a later part."""
        return EpochUnits(
            self.counts + later.counts,
            np.minimum(self.lowest, later.lowest),
            np.maximum(self.highest, later.highest),
            tuple(one or other for one, other in zip(self.first, later.first, strict=True)),
        )

    def find_mixed(self) -> tuple[int, list[int]]:
        """Return the most frequent unit, and those of other numbers that mean times of about the same years.

        Large numbers of another meaning, such as ids, lie between the ranges, or far apart once they are converted.
        """
        *counts, outside = self.counts.tolist()
        usual = int(np.argmax(counts))
        if outside > _MAX_OTHER * sum(counts):
            return usual, []
        return usual, [
            unit
            for unit, count in enumerate(counts)
            if count and unit != usual
            if self.highest[unit] >= self.lowest[usual] / 2 and self.lowest[unit] <= self.highest[usual] * 2
        ]
