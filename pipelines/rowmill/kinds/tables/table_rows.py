"""Rows of a table: what is decided over all parts of a dataset before its rows are made, and reported after that.

    all parts ─observe─► contract, schema, sort key ─► rows ─► deduplication ─► splits ─► facts

A part is observed once; its rows are made again only if the schema or the sort key changes, because then every text may
change.

Times of an order column that can be meant in two ways, so that sorting by them may give a wrong order:

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
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill import sources
from rowmill.core.arrays import Bools, Ints, are_among, find_distinct, format_count
from rowmill.core.errors import ConfigError
from rowmill.core.stage_names import RAW_DATASET
from rowmill.core.storage import digest_json, map_reads, read_tables
from rowmill.kinds.base import DatasetOptions, KindContext
from rowmill.kinds.shared import splits
from rowmill.kinds.shared.filters import FILTERS_OF_MADE_ROWS
from rowmill.kinds.shared.splits import Splitter
from rowmill.kinds.tables import part_rows
from rowmill.kinds.tables.counts import (
    GroupAdviceCounts,
    OrderedTimeCounts,
    TablePartDetails,
    TableRowCounts,
    TimeStepCounts,
)
from rowmill.kinds.tables.inference import (
    EVIDENCE,
    CellLocation,
    ShapeTally,
    TableEvidence,
    build_record_schema,
    describe_column_contract,
    format_contract_yaml,
    infer_contract,
    infer_sort_key,
    merge_evidence,
)
from rowmill.kinds.tables.options import require_records
from rowmill.kinds.tables.partitions import (
    NO_KEY,
    PARTITION_ROWS,
    ObservedTable,
    RowIndex,
    StoredRecords,
    count_group_sizes,
    index_parts,
)
from rowmill.kinds.tables.schema import DAY, ELAPSED, RecordSchema, SortKey
from rowmill.kinds.tables.serialization import read_json
from rowmill.kinds.tables.size_estimates import CHARACTERS_PER_TOKEN, advise_group_column
from rowmill.kinds.tables.table_contract import NON_FINITE_WORDS, TableContract
from rowmill.kinds.tables.table_drift import (
    SHOWN_CHANGES,
    StoredTable,
    TableChange,
    describe_cell,
    describe_changes,
    find_contract_changes,
    make_place_describer,
)
from rowmill.parts.accounts import RewriteInputs, clean_value, rewrite_parts, tabulate_removed
from rowmill.parts.context import StageOutput
from rowmill.parts.functions import MappedParts
from rowmill.schema.counts import Counts, CountSet, compute_share
from rowmill.schema.manifest import DisplayTable, Histogram, Part
from rowmill.schema.row_counts import GroupCounts
from rowmill.schema.rows import HELD_OUT, SPLITS, parse_row_id
from rowmill.sources.reading import load_scans, load_source_parts

MAX_SHOWN_COLUMNS = 30


def report_contract(
    context: KindContext, draft: StageOutput, observed: ObservedTable, changes: Sequence[TableChange]
) -> int:
    """Report what differs from the contract, and store what later builds are compared with.

    Returns the number of values that do not fit.
    """
    form, contract = require_records(context.dataset), observed.contract
    if contract is None:
        return 0
    scans = load_scans(context.input(RAW_DATASET))
    describe_place = make_place_describer(scans, context.base)
    stored = StoredTable(contract, form.table is not None, read_declared_types(scans), observed.evidence)
    draft.details["table"] = stored.to_json()
    if changes:
        draft.samples["table_contract"] = tuple(describe_changes(changes[:SHOWN_CHANGES], describe_place))
    mismatches: dict[str, tuple[int, str, CellLocation]] = {}
    for number, part in enumerate(draft.parts):
        for name, (count, text, row) in part.get_details(TablePartDetails).mismatches.items():
            known, first, place = mismatches.get(name, (0, text, (number, row)))
            mismatches[name] = (known + count, first, place)
    if mismatches:
        lines = [
            (name, count, text, describe_column_contract(contract.columns[name]), describe_place(place))
            for name, (count, text, place) in sorted(mismatches.items())[:MAX_SHOWN_COLUMNS]
        ]
        columns = ("column", "values", "for_example", "contract", "place")
        draft.tables["type_mismatch"] = DisplayTable(columns, tuple(lines))
        draft.samples["type_mismatch"] = tuple(describe_cell(name, text, place) for name, _, text, _, place in lines)
    return sum(count for count, _, _ in mismatches.values())


VERSION = 9
"""Increase it when any record may get a different type, text, key or split, or facts are counted differently."""


def identify_rows(dataset: DatasetOptions, limit: int) -> dict[str, Any]:
    """Return the options that decide rows, and separately those of the advice on groups; prompts affect neither."""
    form = require_records(dataset)
    times = {"is_timeseries", "timestamp_format", "timestamp_interval_seconds"}
    rows = {
        "versions": [VERSION, sources.SCAN_VERSION],
        "group_columns": form.group_columns,
        "is_grouped_by_file": form.is_grouped_by_file,
        "is_one_group_column": isinstance(form.data.group_training_examples_by, str),
        "order_column": form.order_column,
        "domain_key": form.domain_key,
        "mode": form.mode,
        "time_series": form.time_series.model_dump(mode="json", include=times),
        "table": None if form.table is None else form.table.to_json(),
        "filters": dataset.filters.model_dump(mode="json", exclude=set(FILTERS_OF_MADE_ROWS)),
        "splits": dataset.splits.model_dump(mode="json"),
        "max_run_chars": dataset.source.limits.max_run_chars,
    }
    advice = {"limit": limit, "cap": form.cap, "on_overflow": form.assembly.on_overflow}
    return {"rows": rows, "advice": advice}


def make_table_rows(
    context: KindContext,
    scanned: Sequence[tuple[sources.SourcePart, int | None]],
    options: str,
) -> tuple[MappedParts, ObservedTable]:
    """Observe all parts, decide schema and sort key, and make the rows of all parts.

    `scanned` are the parts, each with how many of its records are taken (None: all). Returns the parts, and the
    observed table.
    """
    seen = _observe_parts(context, scanned)
    known = _decide_table(context, seen)
    schema = orjson.dumps(known.schema.to_json()).decode()
    contract = "" if known.contract is None else orjson.dumps(known.contract.to_json()).decode()
    name, form, splits = context.dataset_name or "", require_records(context.dataset), context.dataset.splits
    limits, by_prefix = context.dataset.source.limits, context.dataset.filters.deduplicate == "prefix200"
    rows = context.map(
        part_rows.make_table_part,
        [
            part_rows.TableRowsInputs(
                part,
                take,
                options,
                contract,
                schema,
                known.sort_key,
                form,
                splits,
                limits.max_run_chars,
                by_prefix,
                name,
                context.base,
            )
            for part, take in scanned
        ],
    )
    return rows, known


def _observe_parts(context: KindContext, scanned: Sequence[tuple[sources.SourcePart, int | None]]) -> list[Part]:
    return context.map(
        part_rows.observe_part,
        [
            part_rows.ObserveInputs(part, take, sources.SCAN_VERSION, part.sha256, part.reader, context.base)
            for part, take in scanned
        ],
    ).parts


def propose_contract(context: KindContext, scanned: Sequence[tuple[sources.SourcePart, int | None]]) -> str | None:
    """Return the YAML file, with the evidence, of the contract inferred from the data; pinned columns are kept."""
    form = require_records(context.dataset)
    evidence = merge_part_evidence(context, _observe_parts(context, scanned))
    if not evidence.columns:
        return None
    found = infer_dataset_contract(context, evidence)
    pinned = {} if form.table is None else form.table.columns
    columns = {name: one for name, one in pinned.items() if name in found.columns}
    columns |= {name: one for name, one in found.columns.items() if name not in pinned}
    contract = found.model_copy(
        update={"columns": columns, "group": form.group_columns or None, "order": form.order_column}
    )
    return format_contract_yaml(
        contract,
        evidence,
        title=f"{context.key[0]}: datasets.{context.dataset_name}",
        place_of=make_place_describer(load_scans(context.input(RAW_DATASET)), context.base),
        shows_cells=not form.privacy.dp_enabled,
    )


def merge_part_evidence(context: KindContext, seen: Sequence[Part]) -> TableEvidence:
    """Merge the evidence of the observed parts."""
    stored = map_reads(context.store, lambda one: context.store.content(one.files["seen"]), seen)
    return merge_evidence([EVIDENCE.validate_json(memoryview(one).tobytes()) for one in stored])


def _decide_table(context: KindContext, seen: Sequence[Part]) -> ObservedTable:
    form, where = require_records(context.dataset), f"datasets.{context.dataset_name}.format"
    scans = load_scans(context.input(RAW_DATASET))
    files = [scan.url for scan in scans if scan.records and scan.split_hint not in HELD_OUT]
    is_lone = form.mode == "sequential" and not form.has_keys and form.data.group_training_examples_by is None
    if is_lone and len(files) > 1:
        shown = ", ".join(files[:3]) + (" …" if len(files) > 3 else "")
        raise ConfigError(
            f"{where}.time_series.is_timeseries: the rows of {len(files):,} files ({shown}) have no group, and would "
            "be sorted into one series; set data.group_training_examples_by to a column, to {file: true} if each file "
            "is a series, or to {file: false} if one series goes on from file to file"
        )
    evidence = merge_part_evidence(context, seen)
    if not evidence.columns:
        return ObservedTable(RecordSchema(()), None, form.table, evidence)
    contract = form.table or infer_dataset_contract(context, evidence)
    named = {f"data.group_training_examples_by ({name})": name for name in form.group_columns}
    if form.order_column is not None:
        named["data.order_training_examples_by"] = form.order_column
    for option, name in named.items():
        if name not in evidence.columns or name not in contract.columns:
            there = ", ".join(list(evidence.columns)[:20])
            raise ConfigError(
                f"{where}.{option.split(' ')[0]}: no record has a column {name!r}; there are {there}; name one of them"
            )
    schema = build_record_schema(contract, evidence, read_declared_types(scans), form.leading_columns)
    sort_key = None
    if form.order_column is not None:
        sort_key = infer_sort_key(
            form.order_column,
            contract,
            evidence,
            schema,
            timestamp_format=form.time_series.timestamp_format,
            must_be_time=form.time_series.is_timeseries,
            is_pinned=form.table is not None,
            where=f"{where}.time_series.timestamp_format",
        )
    return ObservedTable(schema, sort_key, contract, evidence)


def infer_dataset_contract(context: KindContext, evidence: TableEvidence) -> TableContract:
    """Infer the contract of a dataset from its data."""
    form = require_records(context.dataset)
    scans = load_scans(context.input(RAW_DATASET))
    dialects = {(one.delimiter, one.quote) for scan in scans if (one := scan.dialect) is not None and scan.records}
    delimiter, quote = next(iter(dialects)) if len(dialects) == 1 else (None, None)
    return infer_contract(
        evidence,
        read_declared_types(scans),
        order=form.order_column,
        leading=form.leading_columns,
        delimiter=delimiter,
        quote=quote,
    )


def read_declared_types(scans: Sequence[sources.FileScan]) -> dict[str, str]:
    """Return the types that sources declare; a column with two declared types is inferred from its values."""
    found: dict[str, set[str]] = {}
    for scan in scans:
        for name, kind in (scan.columns or {}).items():
            found.setdefault(name, set()).add(kind)
    # A source without declared types may contain anything.
    if not all(scan.columns for scan in scans if scan.records):
        return {}
    return {name: next(iter(kinds)) for name, kinds in found.items() if len(kinds) == 1}


def apply_exact_splits(context: KindContext, parts: list[Part], observed: ObservedTable) -> list[Part]:
    """Assign splits by number of rows if the recipe says so, and keep a single series in train."""
    form = require_records(context.dataset)
    is_lone = form.mode == "sequential" and bool(parts)
    if not context.dataset.splits.is_exact and not is_lone:
        return parts
    index = index_parts(context, parts, observed)
    if context.dataset.splits.is_exact:
        wanted = _decide_exact_splits(context, parts, index)
    else:
        wanted = np.zeros(len(index.splits), np.int8)
        if len(index.keys) != 1 or _find_hinted_rows(context, index).any():
            return parts
    changes: list[RewriteInputs | None] = []
    for part, (begin, end) in zip(parts, pairwise(index.first_rows.tolist()), strict=True):
        is_same = (wanted[begin:end] == index.splits[begin:end]).all()
        changes.append(None if is_same else RewriteInputs(part, tabulate_removed({}), wanted[begin:end].tobytes()))
    return rewrite_parts(context, parts, changes, context.dataset.format)


def _find_hinted_rows(context: KindContext, index: RowIndex) -> NDArray[np.bool_]:
    """Return which rows come from a held-out source and stay in its split: bool[N]."""
    hints = np.array([part.split_hint in HELD_OUT for part in load_source_parts(context.input(RAW_DATASET))], bool)
    return np.repeat(hints, np.diff(index.first_rows))


def _decide_exact_splits(context: KindContext, parts: Sequence[Part], index: RowIndex) -> NDArray[np.int8]:
    """Assign splits by number to rows outside validation sources; such sources replace the validation share."""
    options = context.dataset.splits
    splitter = Splitter(options)
    hinted = _find_hinted_rows(context, index)
    if (index.splits[hinted] == SPLITS.index("validation")).any():
        options = options.model_copy(update={"validation": 0})
    if index.groups is not None:
        groups, names = index.groups, [key.encode() for key in index.keys]
    else:
        by_group = options.group_key is not None
        column = "group_key" if by_group else "content_hash"
        tables = read_tables(context.store, [part.files["rows"] for part in parts], [column])
        encoded = pa.concat_tables(tables).column(0).combine_chunks().dictionary_encode()
        values = encoded.dictionary.to_pylist()
        groups = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        names = [value.encode() if by_group else b'"' + value.hex().encode() + b'"' for value in values]
    rows = np.bincount(groups[~hinted], minlength=len(names)).astype(np.int64)
    taken_groups = np.flatnonzero(rows)
    places = np.array([splitter.place(names[group]) for group in taken_groups.tolist()], np.uint64)
    decided = np.zeros(len(names), np.int8)
    decided[taken_groups] = splits.assign_exact_splits(options, places, rows[taken_groups])
    return np.where(hinted, index.splits, decided[groups]).astype(np.int8)


def complete_table_output(context: KindContext, draft: StageOutput, observed: ObservedTable) -> StageOutput:
    """Count what only tables have: schema, groups, times."""
    form = require_records(context.dataset)
    characters = draft.counts.get(TableRowCounts).characters
    # Times are compared of series, of a configured interval, and of dates in groups; but not of groups in a table that
    # is planned in partitions, so that no process holds all of its rows.
    fits_one_partition = sum(part.files["rows"].rows for part in draft.parts) <= PARTITION_ROWS
    has_dates = form.mode == "grouped" and observed.sort_key is not None and observed.sort_key.is_date
    is_timed = form.mode == "sequential" or form.time_series.timestamp_interval_seconds is not None
    index = index_parts(context, draft.parts, observed) if is_timed or (has_dates and fits_one_partition) else None
    interval, steps = _measure_intervals(context, index)
    scans = load_scans(context.input(RAW_DATASET))
    changes = list(find_contract_changes(form.table, observed.evidence, scans)) if observed.contract else []
    counted: list[Counts] = [
        TableRowCounts(
            columns=len(observed.schema.columns),
            contract_differences=len(changes),
            mismatched_values=report_contract(context, draft, observed, changes),
            non_finite=_count_non_finite(draft, observed),
        ),
        *([] if steps is None else [steps]),
        *([] if observed.sort_key is None else [report_ambiguous_times(context, draft, observed.sort_key, index)]),
    ]
    draft.tables["columns"] = DisplayTable(
        ("column", "type", "nullable", "required"),
        tuple((column.name, column.type, column.nullable, column.required) for column in observed.schema.columns[:100]),
    )
    if form.mode != "tabular":
        # Series are split when an example is full, and groups if the recipe allows it; other groups must fit whole.
        must_fit_whole = form.mode == "grouped" and form.assembly.on_overflow != "split"
        # Part by part; a lone series is one group.
        files = [part.files["rows"] for part in draft.parts]
        if form.has_keys:
            keys, sizes = count_group_sizes(context.store.table(file, ("group_key",)).column(0) for file in files)
        else:
            keys, sizes = (NO_KEY,), np.array([sum(file.rows for file in files)], np.int64)
        objections = _report_groups(context, draft, keys, sizes, characters / max(int(sizes.sum()), 1))
        counted += [
            GroupCounts(
                groups=len(keys), rows_of_largest_group=int(sizes.max(initial=0)), is_group_cut=not must_fit_whole
            ),
            GroupAdviceCounts(group_objections=objections),
        ]
    draft.counts += CountSet.of(*counted)
    draft.details["records"] = StoredRecords(observed.schema, observed.sort_key, form.mode, interval).to_json()
    # Parsing of generated records reads the schema, so a different schema is a different version.
    draft.card["schema"] = digest_json(observed.schema.to_json())
    return draft


def _count_non_finite(draft: StageOutput, observed: ObservedTable) -> int:
    """Count the numbers that are NaN or infinite, by column: JSON stores floats as strings, and cells are missing."""
    found: dict[str, list[ShapeTally]] = {}
    for column in observed.schema.columns:
        seen = observed.evidence.columns.get(column.name)
        if seen is None or column.type not in ("float", "decimal", "integer"):
            continue
        tallies = [
            tally
            for shape, tally in seen.cells.items()
            if shape.startswith("na:") and shape[3:].lower() in NON_FINITE_WORDS
        ]
        tallies += [seen.kinds["string"]] if column.type == "float" and "string" in seen.kinds else []
        if tallies:
            found[column.name] = tallies
    counts = {name: sum(one.count for one in tallies) for name, tallies in found.items()}
    if found:
        rows = [
            (name, counts[name], " ".join(dict.fromkeys(text for one in tallies for text, _ in one.examples)))
            for name, tallies in found.items()
        ]
        draft.tables["non_finite"] = DisplayTable(("column", "values", "for_example"), tuple(rows))
    return sum(counts.values())


def _report_groups(
    context: KindContext, draft: StageOutput, keys: tuple[str, ...], sizes: Ints, characters_per_record: float
) -> int:
    """Report the groups and the advice on them; return the number of objections to the chosen column."""
    form = require_records(context.dataset)
    record_room = context.limit
    tokens = sizes * (characters_per_record / CHARACTERS_PER_TOKEN)
    advice = advise_group_column(
        ", ".join(form.group_columns) or ("each file" if form.is_grouped_by_file else "one series"),
        sizes,
        tokens.round().astype(np.int64),
        record_room=record_room,
        mode=form.mode,
        cap=form.cap,
        is_ordered=form.order_column is not None,
        is_approximate=True,
    )
    draft.tables["group_advice"] = advice.table()
    largest = np.argsort(-sizes, kind="stable")[:10]
    draft.tables["largest_groups"] = DisplayTable(
        ("group", "rows", "about_tokens"),
        tuple((keys[i], int(sizes[i]), round(float(tokens[i]))) for i in largest.tolist()),
    )
    limit = record_room / max(characters_per_record / CHARACTERS_PER_TOKEN, 1e-9)
    # Geometric bins, and the most records that fit into an example.
    edges = find_distinct(np.geomspace(1, max(int(sizes.max(initial=1)) + 1, 2), 24).round().astype(np.int64))
    bars, _ = np.histogram(sizes, bins=edges)
    draft.histograms["group_sizes"] = Histogram(
        "records per group", "records", tuple(map(float, edges.tolist())), tuple(bars.tolist()),
        round(float(limit), 1) if form.mode == "grouped" else None,
    )  # fmt: skip
    draft.samples["group_size"] = draft.samples["group_advice"] = tuple(keys[i] for i in largest.tolist())
    return len(advice.unsuitable) + len(advice.warnings)


def _measure_intervals(context: KindContext, index: RowIndex | None) -> tuple[str | None, TimeStepCounts | None]:
    """Return the interval of the series, configured or constant in the data, and the steps that deviate from it."""
    form = require_records(context.dataset)
    configured = form.time_series.timestamp_interval_seconds
    if index is None or (form.mode != "sequential" and configured is None):
        return None, None
    # The differences of consecutive positions within each series.
    found = np.empty(0, np.int64)
    if (
        form.mode == "sequential"
        and index.groups is not None
        and index.positions is not None
        and index.seconds_per_position is not None
    ):
        rows, begins = index.sort_rows(np.arange(len(index.groups), dtype=np.int64))
        within = np.ones(max(len(rows) - 1, 0), bool)
        within[begins[1:-1] - 1] = False
        found = np.diff(index.positions[rows])[within]
    if configured is None or index.seconds_per_position is None:
        constant = len(found) > 0 and bool((found == found[0]).all()) and int(found[0]) > 0
        own = None if not constant or index.seconds_per_position is None else int(found[0]) * index.seconds_per_position
        return None if own is None else format(own, "f"), None
    expected = float(configured) / float(index.seconds_per_position)
    off = int((np.abs(found - expected) > 1e-9 * max(expected, 1)).sum())
    return str(configured), TimeStepCounts(steps=len(found), deviating_steps=off)


# ── Ambiguous times ────────────────────────────────────────────────────────────────────────────────


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
    if index.groups is None or index.positions is None or index.seconds_per_position is None:
        return nothing
    rows = np.argsort(index.groups, kind="stable")
    steps = _measure_source_steps(index, rows)
    if int((steps < 0).sum()) > int((steps > 0).sum()):
        # The newest row is first.
        rows = rows[::-1]
        steps = _measure_source_steps(index, rows)
    goes_back = steps < 0
    second = float(1 / index.seconds_per_position)
    # The clock is put back between two rows whose true distance is not recorded: the steps around it estimate it.
    usual = np.where(steps < _HOUR * second, steps, 0)
    around = np.maximum(np.append(0, usual[:-1]), np.append(usual[1:], 0))
    missing = np.maximum(2 * around, _MAX_GAP * second)
    before = np.append(0, index.positions[rows][:-1])
    at_night = (before / second - _NIGHT[0]) % DAY < _NIGHT[1] - _NIGHT[0]
    is_put_back = goes_back & (-steps < _HOUR * second) & (-steps >= _HOUR * second - missing) & at_night
    if not is_put_back.any() or int((goes_back & ~is_put_back).sum()) > _MAX_UNORDERED * len(steps):
        return nothing
    # Which rows are later than all before them: ranks of times ascend from series to series, so that one running
    # maximum serves all of them.
    times, series = index.positions[rows], np.cumsum(np.diff(index.groups[rows], prepend=-1) != 0)
    order = np.lexsort((times, series))
    ranks = np.empty(len(rows), np.int64)
    ranks[order] = np.cumsum((np.diff(series[order], prepend=0) != 0) | (np.diff(times[order], prepend=0) != 0))
    is_latest = ranks > np.append(-1, np.maximum.accumulate(ranks)[:-1])
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


def report_ambiguous_times(
    context: KindContext, draft: StageOutput, sort_key: SortKey, index: RowIndex | None
) -> OrderedTimeCounts:
    """Report ambiguous times; return the records that may have the most frequent problem, and those that have it."""
    problems = [one for one in _find_problems(context, draft.parts, sort_key, index) if one is not None]
    if problems:
        draft.tables["ambiguous_times"] = DisplayTable(
            ("problem", "records", "series", "cell", "place", "what", "what_to_do"),
            tuple((one.name, one.records, *shown, one.remedy) for one in problems for shown in one.shown),
        )
        column = require_records(context.dataset).order_column
        draft.samples["ambiguous_times"] = tuple(
            f"{one.name}: {format_count(one.records, 'record')}, the first is {place}: {column} {cell!r}"
            f"{f' of series {series}' if series else ''} {what}; {one.remedy}"
            for one in problems
            for series, cell, place, what in one.shown[:1]
        )
    worst = max(problems, key=lambda one: compute_share(one.records, one.total), default=None)
    return (
        OrderedTimeCounts()
        if worst is None
        else OrderedTimeCounts(ordered_records=worst.total, ambiguous_records=worst.records)
    )


def _find_problems(
    context: KindContext, parts: Sequence[Part], sort_key: SortKey, index: RowIndex | None
) -> Iterator[TimeProblem | None]:
    """Yield the problems of a table's times."""
    form = require_records(context.dataset)
    describe_place = make_place_describer(load_scans(context.input(RAW_DATASET)), context.base)

    def read_cell(part: int, row: int) -> tuple[str, str]:
        """Return the time of a row of a part, and the place of its record in the source."""
        table = context.store.table(parts[part].files["rows"], ["row_id", "record"]).slice(row, 1)
        row_id, record = (column[0].as_py() for column in table.columns)
        cell = clean_value(str(read_json(record)[form.order_column or ""]))
        return cell, describe_place((part, parse_row_id(row_id)[1]))

    zoned, unzoned = (_list_zones(parts, name) for name in ("with", "without"))
    yield _describe_mixed_zones(zoned, unzoned, describe_place)
    if sort_key == ELAPSED and parts:
        yield _describe_mixed_units(context, parts, read_cell)
    if index is None:
        return
    is_local = sort_key.is_date and "%z" not in sort_key.name and _count_zones(zoned) <= _count_zones(unzoned)
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
    if form.mode == "sequential":
        yield _describe_repeated_times(index, hours, read_cell)


PartZones = tuple[int, int, str, int]
"""A part, how many of its times have a zone, or have none, and the first such cell with its record."""


def _list_zones(parts: Sequence[Part], name: str) -> list[PartZones]:
    """Return the parts that have times `with` a zone, or `without`."""
    zones = ((number, part.get_details(TablePartDetails).zones.get(name)) for number, part in enumerate(parts))
    return [(number, *own) for number, own in zones if own is not None]


def _count_zones(zones: Sequence[PartZones]) -> int:
    return sum(count for _, count, _, _ in zones)


def _describe_mixed_zones(
    zoned: Sequence[PartZones], unzoned: Sequence[PartZones], describe_place: Callable[[tuple[int, int]], str]
) -> TimeProblem | None:
    """Describe a table in which some times have a zone and others do not, by the first of the rarer ones."""
    counts = _count_zones(zoned), _count_zones(unzoned)
    if not all(counts):
        return None
    is_missing = counts[1] <= counts[0]
    part, _, cell, record = (unzoned if is_missing else zoned)[0]
    what = (
        f"has no zone and is read as UTC, while {counts[0]:,} have one"
        if is_missing
        else f"has a zone, while {counts[1]:,} have none and are read as UTC"
    )
    # Rows that were removed later, such as duplicates, are among them.
    return TimeProblem(
        "mixed zones",
        min(counts),
        sum(counts),
        (("", clean_value(cell), describe_place((part, record)), what),),
        "write the zone into all times, or convert all to UTC",
    )


CellReader = Callable[[int, int], tuple[str, str]]
"""Reads the time of a row of a part, and the place of its record in the source."""


def _describe_mixed_units(context: KindContext, parts: Sequence[Part], read_cell: CellReader) -> TimeProblem | None:
    """Describe a column in which some numbers are seconds since 1970, and others in another unit."""
    # Part by part: a table in groups may be larger than what one process holds.
    columns = (context.store.table(part.files["rows"], ["order_key"]).column(0) for part in parts)
    units = [EpochUnits.of(pc.cast(own, pa.float64()).to_numpy(), number) for number, own in enumerate(columns)]
    whole = reduce(EpochUnits.plus, units)
    usual, others = whole.find_mixed()
    if not others:
        return None
    usual_count = int(whole.counts[usual])
    shown = tuple(
        ("", *read_cell(*row), f"looks like {UNITS[unit]} since 1970, while {usual_count:,} look like {UNITS[usual]}")
        for unit in others
        if (row := whole.first[unit]) is not None
    )
    records, total = int(whole.counts[others].sum()), int(whole.counts.sum())
    return TimeProblem("mixed units", records, total, shown, f"convert all to {UNITS[usual]}")


def _describe_repeated_times(index: RowIndex, hours: TimePairs | None, read_cell: CellReader) -> TimeProblem | None:
    """Describe the times that occur twice in a series, outside the repeated hours."""
    times, local = find_repeated_times(index), ""
    if hours is not None:
        known = np.sort(hours.rows)
        is_new = ~(are_among(times.rows, known) | are_among(times.others, known))
        times = TimePairs(times.rows[is_new], times.others[is_new], times.begins[is_new])
        # Some time of day is not midnight.
        if (
            index.positions is not None
            and index.seconds_per_position is not None
            and (index.positions % int(DAY / index.seconds_per_position)).any()
        ):
            local = "; where the clock was put back between them, write the zone into the times"
    return _describe_pairs(
        "repeated time",
        index,
        times,
        read_cell,
        "is the time of {place}, too, and nothing else orders the two",
        "name the columns that tell series apart in data.group_training_examples_by, or merge records of the same "
        f"time{local}",
    )


def _describe_pairs(
    name: str,
    index: RowIndex,
    pairs: TimePairs,
    read_cell: CellReader,
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
        which, row_in_part = index.locate_rows(rows)
        (cell, place), (earlier, at) = map(read_cell, which.tolist(), row_in_part.tolist())
        key = index.keys[index.groups[rows[0]]]
        shown.append(("" if key == NO_KEY else clean_value(key), cell, place, what.format(cell=earlier, place=at)))
    return TimeProblem(name, len(pairs.rows), len(index.groups), tuple(shown), remedy)
