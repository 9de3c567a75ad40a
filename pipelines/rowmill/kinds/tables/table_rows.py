"""Rows of a table: what is decided over all parts of a dataset before its rows are made, and reported after that.

    all parts ─observe─► contract, schema, order ─► rows ─► deduplication ─► splits ─► facts

A part is observed once; its rows are made again only if the schema or the sort key changes, because then every text may
change.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from rowmill import sources
from rowmill.core.arrays import Ints
from rowmill.core.errors import ConfigError
from rowmill.core.stage_names import RAW_DATASET
from rowmill.core.storage import digest_json, map_reads, read_tables
from rowmill.kinds.joint_rows import KindContext
from rowmill.kinds.shared import splits
from rowmill.kinds.shared.splits import Splitter
from rowmill.kinds.tables import part_rows, table_contract
from rowmill.kinds.tables.ambiguous_times import index_times, report_ambiguous_times
from rowmill.kinds.tables.inference import (
    ColumnDrift,
    ColumnMismatch,
    ShapeTally,
    TableEvidence,
    build_record_schema,
    describe_column_contract,
    find_contract_changes,
    find_missing_or_new,
    format_contract_yaml,
    infer_contract,
    infer_sort_key,
    merge_evidence,
)
from rowmill.kinds.tables.options import Records
from rowmill.kinds.tables.partitions import (
    HEADER,
    NO_KEY,
    ObservedTable,
    RowIndex,
    count_group_sizes,
    get_table_options,
    index_parts,
    make_place_describer,
    measure_series_steps,
)
from rowmill.kinds.tables.schema import RecordSchema
from rowmill.kinds.tables.table_contract import TableContract, is_non_finite_shape
from rowmill.kinds.tables.table_lengths import CHARACTERS_PER_TOKEN, advise_group_column, size_histogram
from rowmill.parts.accounts import RewriteInputs, rewrite_parts, tabulate_removed
from rowmill.parts.context import StageOutput, compute_share
from rowmill.parts.functions import MappedParts
from rowmill.schema import manifest
from rowmill.schema.facts import CanonicalRowsFacts
from rowmill.schema.manifest import NOT_APPLICABLE, DisplayTable, Manifest, Part
from rowmill.sources.reading import load_scans, load_source_parts


def describe_roles(form: Records) -> dict[str, Any]:
    """Return the group and order columns: a contract is valid only for these."""
    return {"group": list(form.group_columns), "by_file": form.is_grouped_by_file, "order": form.order_column}


MAX_SHOWN_DRIFTS = 30


def report_contract(
    context: KindContext,
    draft: StageOutput,
    observed: ObservedTable,
    drifts: Sequence[ColumnDrift],
    mismatches: Mapping[str, ColumnMismatch],
) -> None:
    """Report the differences between contract and data, and store the contract for the next build."""
    form, contract = get_table_options(context), observed.contract
    if contract is None:
        return
    describe_place = make_place_describer(context)
    counts = {name: one.count for name, one in mismatches.items()}
    before = {} if observed.earlier is None else observed.earlier["mismatches"]
    draft.details["table"] = {
        "contract": contract.to_json(),
        "pinned": form.table is not None,
        "roles": describe_roles(form),
        # A blocked build does not change what the next one is compared with.
        "mismatches": before if drifts else counts,
        "observed": list(observed.observed),
    }
    placed = [(drift, describe_place(drift.place)) for drift in drifts[:MAX_SHOWN_DRIFTS]]
    if placed:
        rows = tuple((one.column, one.change, one.text, place) for one, place in placed)
        draft.tables["table_drift"] = DisplayTable(("column", "change", "cell", "place"), rows)
        draft.samples["table_drift"] = tuple(
            _describe_cell(f"{one.column} {one.change}", one.text, place) for one, place in placed[:10]
        )
    if mismatches:
        lines = [
            (name, one.count, one.text, describe_column_contract(contract.columns[name]), describe_place(one.place))
            for name, one in sorted(mismatches.items())[:MAX_SHOWN_DRIFTS]
        ]
        columns = ("column", "values", "for_example", "contract", "place")
        draft.tables["type_mismatch"] = DisplayTable(columns, tuple(lines))
        draft.samples["type_mismatch"] = tuple(_describe_cell(name, text, place) for name, _, text, _, place in lines)


def _describe_cell(what: str, text: str | None, place: str) -> str:
    return f"{what}{'' if text is None else f': {text!r}'}{f' ({place})' if place else ''}"


def merge_mismatches(parts: Sequence[Part]) -> dict[str, ColumnMismatch]:
    """Sum the mismatches of parts by column, keeping the first value of each."""
    found: dict[str, ColumnMismatch] = {}
    for number, part in enumerate(parts):
        for name, (count, text, row) in part.facts.get("mismatches", {}).items():
            first = found.get(name)
            own = ColumnMismatch(count, text, (number, row))
            found[name] = own if first is None else ColumnMismatch(first.count + count, first.text, first.place)
    return found


def find_drifts(
    context: KindContext, observed: ObservedTable, mismatches: Mapping[str, ColumnMismatch]
) -> Iterator[ColumnDrift]:
    """Yield the differences between the data and the contract in force, pinned or the last build's."""
    contract = observed.contract
    assert contract is not None
    scans = load_scans(context.input(RAW_DATASET))
    first_parts = [*accumulate((len(scan.parts) for scan in scans), initial=0)]
    # Files whose delimiter or quote character differs from the contract's.
    for scan, number in zip(scans, first_parts, strict=False):
        found = scan.dialect if scan.parts else None
        for what, own, wanted in (
            ("separated by", found and found.delimiter, contract.delimiter),
            ("quoted with", found and found.quote, contract.quote),
        ):
            if found is not None and wanted is not None and own != wanted:
                change = f"is {what} {own!r}, and the contract says {wanted!r}"
                yield ColumnDrift("the header", change, None, (number, HEADER))
    if get_table_options(context).table is None:
        # Columns that two typed files declare as different kinds of values, such as numbers and text.
        first: dict[str, tuple[str, str, str]] = {}
        told: set[str] = set()
        for scan, number in zip(scans, first_parts, strict=False):
            for name, declared in (scan.columns or {}).items() if scan.records else ():
                kind = table_contract.name_declared_kind(declared)
                earliest = first.setdefault(name, (kind, declared, scan.url))
                if kind != earliest[0] and "" not in (kind, earliest[0]) and name not in told:
                    told.add(name)
                    change = f"is {earliest[1]} in {earliest[2]}, and {declared} in {scan.url}"
                    yield ColumnDrift(name, change, None, (number, 0))
    if observed.earlier is None:
        if get_table_options(context).table is not None:
            yield from find_missing_or_new(contract, observed.evidence)
        return
    assert observed.proposed is not None
    yield from find_contract_changes(
        contract, observed.proposed, observed.evidence, mismatches, observed.earlier["mismatches"]
    )


VERSION = 6
"""Increase it when any record may get a different type, text, key or split, or facts are counted differently."""


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
    name, form, splits = context.dataset_name or "", get_table_options(context), context.dataset.splits
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
                known.order,
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
    form = get_table_options(context)
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
        place_of=make_place_describer(context),
        shows_cells=not form.privacy.dp_enabled,
    )


def merge_part_evidence(context: KindContext, seen: Sequence[Part]) -> TableEvidence:
    """Merge the evidence of the observed parts."""
    stored = map_reads(context.store, lambda one: context.store.content(one.files["seen"]), seen)
    return merge_evidence(TableEvidence.from_json(orjson.loads(memoryview(one))) for one in stored)


def _decide_table(context: KindContext, seen: Sequence[Part]) -> ObservedTable:
    form, where = get_table_options(context), f"datasets.{context.dataset_name}.format"
    _require_one_series(context, form, where)
    evidence = merge_part_evidence(context, seen)
    observed = tuple(part.fingerprint for part in seen)
    if not evidence.columns:
        return ObservedTable(RecordSchema(()), None, form.table, evidence, observed=observed)
    declared = _read_declared_types(context)
    proposed = infer_dataset_contract(context, evidence, declared)
    earlier = None if form.table is not None else _load_earlier_table(context)
    contract = form.table or (proposed if earlier is None else TableContract.from_json(earlier["contract"]))
    named = {f"data.group_training_examples_by ({name})": name for name in form.group_columns}
    if form.order_column is not None:
        named["data.order_training_examples_by"] = form.order_column
    for option, name in named.items():
        if name not in evidence.columns or name not in contract.columns:
            there = ", ".join(list(evidence.columns)[:20])
            raise ConfigError(
                f"{where}.{option.split(' ')[0]}: no record has a column {name!r}; there are {there}; name one of them"
            )
    schema = build_record_schema(contract, evidence, declared, form.leading_columns)
    order = None
    if form.order_column is not None:
        order = infer_sort_key(
            form.order_column,
            contract,
            evidence,
            schema,
            timestamp_format=form.time_series.timestamp_format,
            must_be_time=form.time_series.is_timeseries,
            is_pinned=form.table is not None,
            where=f"{where}.time_series.timestamp_format",
        )
    return ObservedTable(schema, order, contract, evidence, proposed, earlier, observed)


def infer_dataset_contract(
    context: KindContext, evidence: TableEvidence, declared: Mapping[str, str] | None = None
) -> TableContract:
    """Infer the contract of a dataset from its data."""
    form = get_table_options(context)
    scans = load_scans(context.input(RAW_DATASET))
    dialects = {(one.delimiter, one.quote) for scan in scans if (one := scan.dialect) is not None and scan.records}
    delimiter, quote = next(iter(dialects)) if len(dialects) == 1 else (None, None)
    return infer_contract(
        evidence,
        _read_declared_types(context) if declared is None else declared,
        order=form.order_column,
        leading=form.leading_columns,
        delimiter=delimiter,
        quote=quote,
    )


def _load_earlier_table(context: KindContext) -> Mapping[str, Any] | None:
    """Return the last build's table, or None if its group or order columns were different."""
    last = manifest.load_current_if_intact(context.store, context.key)
    table = None if last is None else last.details.get("table")
    is_comparable = (
        table is not None and not table["pinned"] and table["roles"] == describe_roles(get_table_options(context))
    )
    return table if is_comparable else None


def is_under_current_contract(context: KindContext, kept: Manifest) -> bool:
    """Tell whether existing rows of the same data were made under the contract that is in force now.

    An unpinned contract passes from build to build and is part of no fingerprint. Rows that are older than the
    contract, and found again because their data came back, would change it silently.
    """
    if get_table_options(context).table is not None:
        return True
    earlier = _load_earlier_table(context)
    table = kept.details.get("table")
    return earlier is None or table is None or table["contract"] == earlier["contract"]


def _require_one_series(context: KindContext, form: Records, where: str) -> None:
    """Refuse to treat several files as one series unless the recipe says so."""
    if form.mode != "sequential" or form.is_grouped or form.data.group_training_examples_by is not None:
        return
    scans = load_scans(context.input(RAW_DATASET))
    files = [scan.url for scan in scans if scan.records and scan.split_hint != "validation"]
    if len(files) > 1:
        shown = ", ".join(files[:3]) + (" …" if len(files) > 3 else "")
        raise ConfigError(
            f"{where}.time_series.is_timeseries: the rows of {len(files):,} files ({shown}) have no group, and would "
            "be "
            "sorted into one series; set "
            "data.group_training_examples_by to a column, to {file: true} if each file is a series, or to "
            "{file: false} if one series goes on from file to file"
        )


def _read_declared_types(context: KindContext) -> dict[str, str]:
    """Return the types that sources declare; a column with two declared types is inferred from its values."""
    scans = load_scans(context.input(RAW_DATASET))
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
    form = get_table_options(context)
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
    return rewrite_parts(context, parts, changes)


def _find_hinted_rows(context: KindContext, index: RowIndex) -> NDArray[np.bool_]:
    """Return which rows come from a validation source and stay in validation: bool[N]."""
    hints = np.array([part.split_hint == "validation" for part in load_source_parts(context.input(RAW_DATASET))], bool)
    return np.repeat(hints, np.diff(index.first_rows))


def _decide_exact_splits(context: KindContext, parts: Sequence[Part], index: RowIndex) -> NDArray[np.int8]:
    """Assign splits by number to rows outside validation sources; such sources replace the validation share."""
    options = context.dataset.splits
    splitter = Splitter(options)
    hinted = _find_hinted_rows(context, index)
    if hinted.any():
        options = options.model_copy(update={"validation": 0})
    if index.groups is not None:
        units, names = index.groups, [key.encode() for key in index.keys]
    else:
        by_group = options.group_key is not None
        column = "group_key" if by_group else "content_hash"
        tables = read_tables(context.store, [part.files["rows"] for part in parts], [column])
        encoded = pa.concat_tables(tables).column(0).combine_chunks().dictionary_encode()
        values = encoded.dictionary.to_pylist()
        units = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        names = [value.encode() if by_group else b'"' + value.hex().encode() + b'"' for value in values]
    rows = np.bincount(units[~hinted], minlength=len(names)).astype(np.int64)
    taken_units = np.flatnonzero(rows)
    places = np.array([splitter.place(names[unit]) for unit in taken_units.tolist()], np.uint64)
    decided = np.zeros(len(names), np.int8)
    decided[taken_units] = splits.assign_exact_splits(options, places, rows[taken_units])
    return np.where(hinted, index.splits, decided[units]).astype(np.int8)


def complete_table_output(context: KindContext, draft: StageOutput, observed: ObservedTable) -> StageOutput:
    """Add the facts that only records have: schema, groups, times, splits."""
    form, facts = get_table_options(context), draft.facts
    assert isinstance(facts, CanonicalRowsFacts)
    characters = sum(int(part.facts["characters"]) for part in draft.parts)
    index = index_times(context, draft.parts, observed)
    times = _measure_intervals(context, index)
    ambiguous = report_ambiguous_times(context, draft, observed, index)
    mismatches = merge_mismatches(draft.parts)
    drifts = [] if observed.contract is None else list(find_drifts(context, observed, mismatches))
    facts = replace(
        facts,
        columns=len(observed.schema.columns),
        interval_mismatch=times["mismatch"],
        characters=characters,
        table_drift=len(drifts),
        type_mismatch=sum(mismatch.count for mismatch in mismatches.values()),
        non_finite=_count_non_finite(draft, observed),
        ambiguous_times=NOT_APPLICABLE if ambiguous is None else ambiguous,
    )
    draft.tables["columns"] = DisplayTable(
        ("column", "type", "nullable", "required"),
        tuple((column.name, column.type, column.nullable, column.required) for column in observed.schema.columns[:100]),
    )
    if form.mode != "tabular":
        # Series are split when an example is full, and groups if the recipe allows it; other groups must fit whole.
        is_whole = form.mode == "grouped" and form.assembly.on_overflow != "split"
        # Part by part; a lone series is one group.
        files = [part.files["rows"] for part in draft.parts]
        if form.is_grouped:
            keys, sizes = count_group_sizes(context.store.table(file, ("group_key",)).column(0) for file in files)
        else:
            keys, sizes = (NO_KEY,), np.array([sum(file.rows for file in files)], np.int64)
        facts = replace(
            facts,
            group_size=int(sizes.max(initial=0)) if is_whole else NOT_APPLICABLE,
            group_advice=_report_groups(context, draft, keys, sizes, characters / max(int(sizes.sum()), 1)),
            groups=len(keys),
        )
    draft.details["records"] = observed.to_json() | {"mode": form.mode, "interval_seconds": times["interval"]}
    # Parsing of generated records reads the schema, so a different schema is a different version.
    draft.card["schema"] = digest_json(observed.schema.to_json())
    report_contract(context, draft, observed, drifts, mismatches)
    draft.facts = facts
    return draft


def _count_non_finite(draft: StageOutput, observed: ObservedTable) -> int:
    """Count the numbers that are NaN or infinite, by column: JSON stores floats as strings, and cells are missing."""
    found: dict[str, list[ShapeTally]] = {}
    for column in observed.schema.columns:
        seen = observed.evidence.columns.get(column.name)
        if seen is None or column.type not in ("float", "decimal", "integer"):
            continue
        tallies = [tally for shape, tally in seen.cells.items() if is_non_finite_shape(shape)]
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
    form = get_table_options(context)
    record_budget = context.limit
    tokens = sizes * (characters_per_record / CHARACTERS_PER_TOKEN)
    advice = advise_group_column(
        ", ".join(form.group_columns) or ("each file" if form.is_grouped_by_file else "one series"),
        sizes,
        tokens.round().astype(np.int64),
        record_budget=record_budget,
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
    limit = record_budget / max(characters_per_record / CHARACTERS_PER_TOKEN, 1e-9)
    draft.histograms["group_sizes"] = size_histogram(sizes, limit if form.mode == "grouped" else None)
    draft.samples["group_size"] = draft.samples["group_advice"] = tuple(keys[i] for i in largest.tolist())
    return len(advice.unsuitable) + len(advice.warnings)


def _measure_intervals(context: KindContext, index: RowIndex | None) -> dict[str, Any]:
    """Return the interval of the series, configured or constant in the data, and the share of deviating steps."""
    form = get_table_options(context)
    configured = form.time_series.timestamp_interval_seconds
    if index is None or (form.mode != "sequential" and configured is None):
        return {"interval": None, "mismatch": NOT_APPLICABLE}
    found = measure_series_steps(index) if form.mode == "sequential" else np.empty(0, np.int64)
    if configured is None or index.unit is None:
        constant = len(found) > 0 and bool((found == found[0]).all()) and int(found[0]) > 0
        own = None if not constant or index.unit is None else int(found[0]) * index.unit
        return {"interval": None if own is None else format(own, "f"), "mismatch": NOT_APPLICABLE}
    units = float(configured) / float(index.unit)
    off = int((np.abs(found - units) > 1e-9 * max(units, 1)).sum())
    return {"interval": str(configured), "mismatch": compute_share(off, len(found))}
