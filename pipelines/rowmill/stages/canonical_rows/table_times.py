"""Ambiguous times of a table's order column: how many records have one, where the first ones are, and what to do.

Zones are counted part by part as rows are made, numbers are read part by part, and only series, and groups of a table
that is planned whole, are compared row by row: those need an index of all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.core.arrays import are_among
from rowmill.core.number_text import format_count
from rowmill.core.stage_names import RAW_DATASET
from rowmill.schema.manifest import DisplayTable, Part
from rowmill.schema.rows import parse_row_id
from rowmill.stages.base import StageContext, StageOutput, compute_share
from rowmill.stages.canonical_rows.table_drift import describe_place
from rowmill.stages.inputs import load_scans
from rowmill.stages.reject_samples import clean_value
from rowmill.stages.table_inputs import ObservedTable, get_table_options, index_parts
from rowmill.tabular.ambiguous_times import (
    UNITS,
    EpochUnits,
    TimePairs,
    find_repeated_hours,
    find_repeated_times,
    has_times_of_day,
)
from rowmill.tabular.row_index import NO_KEY, RowIndex
from rowmill.tabular.serialization import read_json
from rowmill.tabular.table_contract import ColumnDrift
from rowmill.tabular.table_partitions import PARTITION_ROWS
from rowmill.tabular.time_order import ELAPSED

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


def index_times(context: StageContext, parts: Sequence[Part], observed: ObservedTable) -> RowIndex | None:
    """Index the rows if their times are compared: those of series, of a configured interval, and of dates in groups.

    Groups of a table that is planned in partitions are not compared, so that no process holds all of its rows.
    """
    form = get_table_options(context)
    is_whole = sum(part.files["rows"].rows for part in parts) <= PARTITION_ROWS
    has_dates = form.mode == "grouped" and observed.order is not None and observed.order.is_date
    is_timed = form.mode == "sequential" or form.time_series.timestamp_interval_seconds is not None
    return index_parts(context, parts, observed) if is_timed or (has_dates and is_whole) else None


def report_ambiguous_times(
    context: StageContext, draft: StageOutput, observed: ObservedTable, index: RowIndex | None
) -> float | None:
    """Report ambiguous times; return the share of records with the most frequent problem, None without an order."""
    if observed.order is None:
        return None
    problems = _TimeReport(context, draft.parts).find_problems(observed, index)
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


class _TimeReport:
    """Finds the problems of a table's times, and reads the cells that it shows."""

    def __init__(self, context: StageContext, parts: Sequence[Part]) -> None:
        self._work = context
        self._parts = parts
        self._column = get_table_options(context).order_column or ""
        self._scanned = [(part, scan) for scan in load_scans(context.input(RAW_DATASET)) for part in scan.parts]

    def find_problems(self, observed: ObservedTable, index: RowIndex | None) -> list[TimeProblem]:
        """Return the problems that occur."""
        order = observed.order
        assert order is not None
        zoned, unzoned = self._count_zones("with"), self._count_zones("without")
        found = [self._describe_zones(zoned, unzoned)]
        if order == ELAPSED:
            found.append(self._find_mixed_units())
        if index is not None:
            is_local = order.is_date and "%z" not in order.name and zoned[0] <= unzoned[0]
            hours = find_repeated_hours(index) if is_local else None
            if hours is not None:
                found.append(self._describe_hours(index, hours))
            if get_table_options(self._work).mode == "sequential":
                found.append(self._describe_repeats(index, hours))
        return [one for one in found if one is not None]

    # ── Zones ────────────────────────────────────────────────────────────────────────────────────

    def _count_zones(self, name: str) -> tuple[int, str, tuple[int, int]]:
        """Return how many times are `with` or `without` a zone, and the first one with its part and record."""
        counted = [(number, part.facts["zones"].get(name)) for number, part in enumerate(self._parts)]
        own = [(number, *one) for number, one in counted if one is not None]
        if not own:
            return 0, "", (0, 0)
        part, _, text, record = own[0]
        return sum(count for _, count, _, _ in own), text, (part, record)

    def _describe_zones(
        self, zoned: tuple[int, str, tuple[int, int]], unzoned: tuple[int, str, tuple[int, int]]
    ) -> TimeProblem | None:
        if not zoned[0] or not unzoned[0]:
            return None
        is_missing = unzoned[0] <= zoned[0]
        (records, cell, place), usual = (unzoned, zoned[0]) if is_missing else (zoned, unzoned[0])
        # Rows that were removed later, such as duplicates, are among them.
        total = records + usual
        what = (
            f"has no zone and is read as UTC, while {usual:,} have one"
            if is_missing
            else f"has a zone, while {usual:,} have none and are read as UTC"
        )
        return TimeProblem(
            "mixed zones",
            records,
            total,
            (("", clean_value(cell), self._describe_place(place), what),),
            "write the zone into all times, or convert all to UTC",
        )

    # ── Units ────────────────────────────────────────────────────────────────────────────────────

    def _find_mixed_units(self) -> TimeProblem | None:
        """Read the numbers part by part: a table in groups may be larger than what one process holds."""
        columns = (self._work.store.table(part.files["rows"], ["order_key"]).column(0) for part in self._parts)
        units = [
            EpochUnits.of(pc.cast(column, pa.float64()).to_numpy(), number) for number, column in enumerate(columns)
        ]
        if not units:
            return None
        whole = reduce(EpochUnits.plus, units)
        usual, others = whole.find_mixed()
        if not others:
            return None
        shown = []
        for unit in others:
            row = whole.first[unit]
            assert row is not None
            cell, place = self._read_cell(*row)
            what = f"looks like {UNITS[unit]} since 1970, while {int(whole.counts[usual]):,} look like {UNITS[usual]}"
            shown.append(("", cell, place, what))
        return TimeProblem(
            "mixed units",
            int(whole.counts[others].sum()),
            int(whole.counts.sum()),
            tuple(shown),
            f"convert all to {UNITS[usual]}",
        )

    # ── Series ───────────────────────────────────────────────────────────────────────────────────

    def _describe_hours(self, index: RowIndex, hours: TimePairs) -> TimeProblem | None:
        return self._describe_pairs(
            "repeated hour",
            index,
            hours,
            "comes after {cell!r} although the source is in order, as local times do when daylight saving ends; "
            "sorting mixes the two hours",
            "write the zone into the times, or convert them to UTC",
        )

    def _describe_repeats(self, index: RowIndex, hours: TimePairs | None) -> TimeProblem | None:
        """Describe the repeated times outside repeated hours; `hours` is None if the times have zones or no date."""
        times = find_repeated_times(index)
        if hours is not None:
            known = np.sort(hours.rows)
            is_new = ~(are_among(times.rows, known) | are_among(times.others, known))
            times = TimePairs(times.rows[is_new], times.others[is_new], times.begins[is_new])
        has_clock = hours is not None and has_times_of_day(index)
        local = "; where the clock was put back between them, write the zone into the times" if has_clock else ""
        return self._describe_pairs(
            "repeated time",
            index,
            times,
            "is the time of {place}, too, and nothing else orders the two",
            "name the columns that tell series apart in data.group_training_examples_by, or merge records of the same "
            f"time{local}",
        )

    def _describe_pairs(
        self, name: str, index: RowIndex, pairs: TimePairs, what: str, remedy: str
    ) -> TimeProblem | None:
        """Describe the first times of runs, in source order.

        `what` may have `{cell}` and `{place}`, those of the row that a time is compared with.
        """
        if not len(pairs.rows):
            return None
        assert index.groups is not None
        begins = np.flatnonzero(pairs.begins)
        begins = begins[np.argsort(pairs.rows[begins])][:SHOWN_TIMES]
        shown = []
        for row, other in zip(pairs.rows[begins].tolist(), pairs.others[begins].tolist(), strict=True):
            key = index.keys[index.groups[row]]
            cell, place = self._read_row(index, row)
            earlier, at = self._read_row(index, other)
            shown.append(("" if key == NO_KEY else clean_value(key), cell, place, what.format(cell=earlier, place=at)))
        return TimeProblem(name, len(pairs.rows), len(index.groups), tuple(shown), remedy)

    # ── Cells ────────────────────────────────────────────────────────────────────────────────────

    def _read_row(self, index: RowIndex, row: int) -> tuple[str, str]:
        which, places = index.locate_rows(np.array([row]))
        return self._read_cell(int(which[0]), int(places[0]))

    def _read_cell(self, part: int, row: int) -> tuple[str, str]:
        """Return the time of a row of a part, and the place of its record in the source."""
        table = self._work.store.table(self._parts[part].files["rows"], ["row_id", "record"]).slice(row, 1)
        row_id, record = (column[0].as_py() for column in table.columns)
        cell = clean_value(str(read_json(record)[self._column]))
        return cell, self._describe_place((part, parse_row_id(row_id)[1]))

    def _describe_place(self, place: tuple[int, int]) -> str:
        return describe_place(self._work, self._scanned, ColumnDrift(self._column, "", "", place))
