"""Times of an order column that can be meant in two ways, so that sorting by them may give a wrong order.

| problem | in the source | why it matters |
|---|---|---|
| a repeated hour | 01:00 01:30 **01:00 01:30** 02:00, local times as daylight saving ends | sorting mixes them |
| repeated times | 01:00 02:00 **02:00** 03:00 in one series | nothing orders the two records |
| missing zones | 01:00+02:00 **02:00** | a time without a zone is read as UTC |
| mixed units | 1700000000 **1700000060000**, seconds and milliseconds since 1970 | the other unit sorts last |

Zones are counted part by part as rows are made, numbers are read part by part; only series, and groups of a table that
is planned whole, are compared row by row, by an index of all rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, Ints, are_among, format_count
from rowmill.kinds.joint_rows import KindContext
from rowmill.kinds.tables.partitions import (
    NO_KEY,
    PARTITION_ROWS,
    ObservedTable,
    RowIndex,
    get_table_options,
    index_parts,
    make_place_describer,
)
from rowmill.kinds.tables.schema import DAY, ELAPSED, SortKey
from rowmill.kinds.tables.serialization import read_json
from rowmill.parts.accounts import clean_value
from rowmill.parts.context import StageOutput, compute_share
from rowmill.schema.manifest import DisplayTable, Part
from rowmill.schema.rows import parse_row_id

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


def mark_zones(texts: pa.LargeStringArray) -> NDArray[np.bool_]:
    """Mark the ISO 8601 texts that end with an offset from UTC; null does not."""
    found = pc.match_substring_regex(texts, r"[0-9](?:Z|[+-][0-9]{2}:?[0-9]{2}(?::[0-9]{2})?)[ \t]*$")
    return pc.fill_null(found, fill_value=False).to_numpy(zero_copy_only=False)


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


# ── What is reported ───────────────────────────────────────────────────────────────────────────────


SHOWN_TIMES = 3
"""Times of each problem that are shown: the line number of each takes reading its file up to there."""


@dataclass(frozen=True, slots=True)
class TimeProblem:
    """Ambiguous times of one kind: `shown` are the first ones, each a series, a cell, its place, and what it is.

    `total` are the records that were searched.
    """

    name: str
    records: int
    total: int
    shown: tuple[tuple[str, str, str, str], ...]
    remedy: str


def index_times(context: KindContext, parts: Sequence[Part], observed: ObservedTable) -> RowIndex | None:
    """Index the rows if their times are compared: those of series, of a configured interval, and of dates in groups.

    Groups of a table that is planned in partitions are not compared, so that no process holds all of its rows.
    """
    form = get_table_options(context)
    is_whole = sum(part.files["rows"].rows for part in parts) <= PARTITION_ROWS
    has_dates = form.mode == "grouped" and observed.order is not None and observed.order.is_date
    is_timed = form.mode == "sequential" or form.time_series.timestamp_interval_seconds is not None
    return index_parts(context, parts, observed) if is_timed or (has_dates and is_whole) else None


def report_ambiguous_times(
    context: KindContext, draft: StageOutput, observed: ObservedTable, index: RowIndex | None
) -> float | None:
    """Report ambiguous times; return the share of records with the most frequent problem, None without an order."""
    if observed.order is None:
        return None
    problems = [one for one in _find_problems(context, draft.parts, observed.order, index) if one is not None]
    if problems:
        draft.tables["ambiguous_times"] = DisplayTable(
            ("problem", "records", "series", "cell", "place", "what", "what_to_do"),
            tuple((one.name, one.records, *shown, one.remedy) for one in problems for shown in one.shown),
        )
        column = get_table_options(context).order_column
        draft.samples["ambiguous_times"] = tuple(
            f"{one.name}: {format_count(one.records, 'record')}, the first is {place}: {column} {cell!r}"
            f"{f' of series {series}' if series else ''} {what}; {one.remedy}"
            for one in problems
            for series, cell, place, what in one.shown[:1]
        )
    return max((compute_share(one.records, one.total) for one in problems), default=0.0)


def _find_problems(
    context: KindContext, parts: Sequence[Part], order: SortKey, index: RowIndex | None
) -> Iterator[TimeProblem | None]:
    """Yield the problems of a table's times."""
    form, describe_place = get_table_options(context), make_place_describer(context)

    def read_cell(part: int, row: int) -> tuple[str, str]:
        """Return the time of a row of a part, and the place of its record in the source."""
        table = context.store.table(parts[part].files["rows"], ["row_id", "record"]).slice(row, 1)
        row_id, record = (column[0].as_py() for column in table.columns)
        cell = clean_value(str(read_json(record)[form.order_column or ""]))
        return cell, describe_place((part, parse_row_id(row_id)[1]))

    zoned, unzoned = (
        [(number, *one) for number, part in enumerate(parts) if (one := part.facts["zones"].get(name)) is not None]
        for name in ("with", "without")
    )
    counts = [sum(count for _, count, _, _ in own) for own in (zoned, unzoned)]
    if all(counts):
        is_missing = counts[1] <= counts[0]
        part, _, cell, record = (unzoned if is_missing else zoned)[0]
        what = (
            f"has no zone and is read as UTC, while {counts[0]:,} have one"
            if is_missing
            else f"has a zone, while {counts[1]:,} have none and are read as UTC"
        )
        # Rows that were removed later, such as duplicates, are among them.
        yield TimeProblem(
            "mixed zones",
            min(counts),
            sum(counts),
            (("", clean_value(cell), describe_place((part, record)), what),),
            "write the zone into all times, or convert all to UTC",
        )
    if order == ELAPSED and parts:
        # Part by part: a table in groups may be larger than what one process holds.
        columns = (context.store.table(part.files["rows"], ["order_key"]).column(0) for part in parts)
        units = [EpochUnits.of(pc.cast(own, pa.float64()).to_numpy(), number) for number, own in enumerate(columns)]
        whole = reduce(EpochUnits.plus, units)
        usual, others = whole.find_mixed()
        shown = tuple(
            (
                "",
                *read_cell(*row),
                f"looks like {UNITS[unit]} since 1970, while {int(whole.counts[usual]):,} look like {UNITS[usual]}",
            )
            for unit in others
            if (row := whole.first[unit]) is not None
        )
        records, total = int(whole.counts[others].sum()), int(whole.counts.sum())
        if others:
            yield TimeProblem("mixed units", records, total, shown, f"convert all to {UNITS[usual]}")
    if index is None:
        return
    is_local = order.is_date and "%z" not in order.name and counts[0] <= counts[1]
    hours = find_repeated_hours(index) if is_local else None
    if hours is not None:
        yield _describe_pairs(
            "repeated hour",
            index,
            hours,
            read_cell,
            "comes after {cell!r} although the source is in order, as local times do when daylight saving ends; "
            "sorting mixes the two hours",
            "write the zone into the times, or convert them to UTC",
        )
    if form.mode != "sequential":
        return
    times, local = find_repeated_times(index), ""
    if hours is not None:
        # Repeated times outside repeated hours.
        known = np.sort(hours.rows)
        is_new = ~(are_among(times.rows, known) | are_among(times.others, known))
        times = TimePairs(times.rows[is_new], times.others[is_new], times.begins[is_new])
        # Some time of day is not midnight.
        if index.positions is not None and index.unit is not None and (index.positions % int(DAY / index.unit)).any():
            local = "; where the clock was put back between them, write the zone into the times"
    yield _describe_pairs(
        "repeated time",
        index,
        times,
        read_cell,
        "is the time of {place}, too, and nothing else orders the two",
        "name the columns that tell series apart in data.group_training_examples_by, or merge records of the same "
        f"time{local}",
    )


_CellReader = Callable[[int, int], tuple[str, str]]
"""Reads the time of a row of a part, and its place in the source."""


def _describe_pairs(
    name: str,
    index: RowIndex,
    pairs: TimePairs,
    read_cell: Callable[[int, int], tuple[str, str]],
    what: str,
    remedy: str,
) -> TimeProblem | None:
    """Describe the first times of runs, in source order.

    `what` may have `{cell}` and `{place}`, those of the row that a time is compared with.
    """
    if not len(pairs.rows):
        return None
    assert index.groups is not None
    begins = np.flatnonzero(pairs.begins)
    begins = begins[np.argsort(pairs.rows[begins])][:SHOWN_TIMES]
    shown: list[tuple[str, str, str, str]] = []
    for rows in np.stack((pairs.rows[begins], pairs.others[begins]), axis=1):
        which, places = index.locate_rows(rows)
        (cell, place), (earlier, at) = map(read_cell, which.tolist(), places.tolist())
        key = index.keys[index.groups[rows[0]]]
        shown.append(("" if key == NO_KEY else clean_value(key), cell, place, what.format(cell=earlier, place=at)))
    return TimeProblem(name, len(pairs.rows), len(index.groups), tuple(shown), remedy)
