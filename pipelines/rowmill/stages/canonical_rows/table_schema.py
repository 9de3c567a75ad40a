"""Rows of records: what is decided over all parts of a dataset, before and after its rows are made.

    all parts ─observe─► schema, order ─► rows ─► deduplication ─► splits ─► facts

A part is observed once; its rows are made again only if the schema or the sort key changes, because then every text may
change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from rowmill import sources
from rowmill.core.concurrent_reads import map_reads, read_tables
from rowmill.core.errors import ConfigError
from rowmill.core.stage_names import RAW_DATASET
from rowmill.core.storage import digest_json
from rowmill.formats import Records, splits
from rowmill.formats.removal_filters import REMOVAL_FILTERS
from rowmill.formats.splits import Splitter
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, Part
from rowmill.stages.base import PartTask, StageContext, make_parts
from rowmill.stages.canonical_rows import table_rows
from rowmill.stages.canonical_rows.rewrite_part import RewriteTask, rewrite_parts, tabulate_removed
from rowmill.stages.canonical_rows.table_drift import describe_place, describe_roles
from rowmill.stages.inputs import load_scans, load_source_parts
from rowmill.stages.table_inputs import ObservedTable, get_table_options, index_parts
from rowmill.tabular import table_contract
from rowmill.tabular.row_index import RowIndex
from rowmill.tabular.schema import RecordSchema
from rowmill.tabular.table_contract import ColumnDrift, TableContract, TableEvidence
from rowmill.tabular.table_contract.document import format_contract_yaml

VERSION = 6
"""Increase it when any record may get a different type, text, key or split, or facts are counted differently."""


def identify_table_rows(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide rows, and separately those of the advice on groups; prompts affect neither."""
    dataset = recipe.datasets[name]
    form = dataset.format.require_table()
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
        "filters": dataset.filters.model_dump(mode="json", exclude=set(REMOVAL_FILTERS)),
        "splits": dataset.splits.model_dump(mode="json"),
        "max_run_chars": dataset.source.limits.max_run_chars,
    }
    advice = {"limit": recipe.limit_of(name), "cap": form.cap, "on_overflow": form.assembly.on_overflow}
    return {"rows": rows, "advice": advice}


# ── Before making rows ───────────────────────────────────────────────────────────────────────────


def make_table_rows(
    context: StageContext,
    scanned: Sequence[tuple[sources.SourcePart, int | None]],
    options: str,
    known: ObservedTable | None = None,
) -> tuple[list[Part], int, int, ObservedTable]:
    """Observe all parts, decide schema and sort key unless they are `known`, and make the rows of all parts.

    `scanned` are the parts, each with how many of its records are taken (None: all). Returns the parts, the number of
    reused ones, the rows read for the others, and the observed table.
    """
    seen = _observe_parts(context, scanned)
    known = known or _decide_table(context, seen)
    schema = orjson.dumps(known.schema.to_json()).decode()
    stored = None if known.contract is None else known.contract.to_json()
    contract = "" if stored is None else orjson.dumps(stored).decode()
    planned: list[PartTask] = []
    for (part, take), own in zip(scanned, seen, strict=True):
        fingerprint = digest_json(
            options, VERSION, known.to_json(), stored, own.fingerprint, part.part_id, part.split_hint
        )
        task = table_rows.TableRowsTask(
            context.store.root, context.folder, fingerprint, str(context.base), context.dataset_name or "",
            context.dataset, part, take, contract, schema, known.order,
        )  # fmt: skip
        planned.append(PartTask(fingerprint, task, part.records, max(part.length, part.records * 200)))
    made, reused, rows_made = make_parts(
        context, table_rows.make_table_part, planned, make_many=table_rows.make_table_part_batch
    )
    return made, reused, rows_made, known


def _observe_parts(context: StageContext, scanned: Sequence[tuple[sources.SourcePart, int | None]]) -> list[Part]:
    planned: list[PartTask] = []
    for part, take in scanned:
        fingerprint = digest_json("observe", VERSION, sources.SCAN_VERSION, part.sha256, part.reader, take)
        task = table_rows.ObserveTask(context.store.root, context.folder, fingerprint, str(context.base), part, take)
        planned.append(PartTask(fingerprint, task, part.records, max(part.length, part.records * 200)))
    # Equal parts are observed once: two workers must not write the same folder.
    distinct = list({one.fingerprint: one for one in planned}.values())
    parts, _, _ = make_parts(context, table_rows.observe_part, distinct, make_many=table_rows.observe_part_batch)
    made = {one.fingerprint: one for one in parts}
    return [made[one.fingerprint] for one in planned]


@dataclass(frozen=True, slots=True)
class ContractProposal:
    """The contract inferred from the data, and its YAML file with the evidence."""

    contract: TableContract
    document: str


def propose_contract(
    context: StageContext, scanned: Sequence[tuple[sources.SourcePart, int | None]]
) -> ContractProposal | None:
    """Observe a dataset and infer its table contract, keeping the columns of a pinned one; None without rows."""
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
    parts = [(part, scan) for scan in load_scans(context.input(RAW_DATASET)) for part in scan.parts]
    document = format_contract_yaml(
        contract,
        evidence,
        title=f"{context.recipe.name}: datasets.{context.dataset_name}",
        place_of=lambda place: describe_place(context, parts, ColumnDrift("", "", "", place)),
        shows_cells=not form.privacy.dp_enabled,
    )
    return ContractProposal(contract, document)


def merge_part_evidence(context: StageContext, seen: Sequence[Part]) -> TableEvidence:
    """Merge the evidence of the observed parts."""
    stored = map_reads(context.store, lambda one: context.store.content(one.files["seen"]), seen)
    return table_contract.merge_evidence(TableEvidence.from_json(orjson.loads(memoryview(one))) for one in stored)


def _decide_table(context: StageContext, seen: Sequence[Part]) -> ObservedTable:
    form, where = get_table_options(context), f"datasets.{context.dataset_name}.format"
    _require_one_series(context, form, where)
    evidence = merge_part_evidence(context, seen)
    observed = tuple(one.fingerprint for one in seen)
    if not evidence.columns:
        return ObservedTable(RecordSchema(()), None, form.table, evidence, observed=observed)
    declared = _read_declared_types(context)
    proposed = infer_dataset_contract(context, evidence, declared)
    earlier = None if form.table is not None else _load_earlier_table(context)
    contract = form.table or (proposed if earlier is None else TableContract.from_json(earlier["contract"]))
    _require_columns(evidence, contract, form, where)
    schema = table_contract.build_record_schema(contract, evidence, declared, form.leading_columns)
    order = None
    if form.order_column is not None:
        order = table_contract.infer_sort_key(
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
    context: StageContext, evidence: TableEvidence, declared: Mapping[str, str] | None = None
) -> TableContract:
    """Infer the contract of a dataset from its data."""
    form = get_table_options(context)
    scans = load_scans(context.input(RAW_DATASET))
    dialects = {(one.delimiter, one.quote) for scan in scans if (one := scan.dialect) is not None and scan.records}
    delimiter, quote = next(iter(dialects)) if len(dialects) == 1 else (None, None)
    return table_contract.infer_contract(
        evidence,
        _read_declared_types(context) if declared is None else declared,
        order=form.order_column,
        leading=form.leading_columns,
        delimiter=delimiter,
        quote=quote,
    )


def _load_earlier_table(context: StageContext) -> Mapping[str, Any] | None:
    """Return the last build's table, or None if its group or order columns were different."""
    last = manifest.load_current_if_intact(context.store, context.key)
    table = None if last is None else last.details.get("table")
    is_comparable = (
        table is not None and not table["pinned"] and table["roles"] == describe_roles(get_table_options(context))
    )
    return table if is_comparable else None


def is_under_current_contract(context: StageContext, kept: Manifest) -> bool:
    """Tell whether existing rows of the same data were made under the contract that is in force now.

    An unpinned contract passes from build to build and is part of no fingerprint. Rows that are older than the
    contract, and found again because their data came back, would change it silently.
    """
    if get_table_options(context).table is not None:
        return True
    earlier = _load_earlier_table(context)
    table = kept.details.get("table")
    return earlier is None or table is None or table["contract"] == earlier["contract"]


def _require_one_series(context: StageContext, form: Records, where: str) -> None:
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


def _require_columns(evidence: TableEvidence, contract: TableContract, form: Records, where: str) -> None:
    named = {f"data.group_training_examples_by ({name})": name for name in form.group_columns}
    if form.order_column is not None:
        named["data.order_training_examples_by"] = form.order_column
    for option, name in named.items():
        if name not in evidence.columns or name not in contract.columns:
            there = ", ".join(list(evidence.columns)[:20])
            raise ConfigError(
                f"{where}.{option.split(' ')[0]}: no record has a column {name!r}; there are {there}; name one of them"
            )


def _read_declared_types(context: StageContext) -> dict[str, str]:
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


def apply_exact_splits(context: StageContext, parts: list[Part], observed: ObservedTable) -> list[Part]:
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
    return _rewrite_splits(context, parts, index, wanted)


def _find_hinted_rows(context: StageContext, index: RowIndex) -> NDArray[np.bool_]:
    """Return which rows come from a validation source and stay in validation: bool[N]."""
    hints = np.array([part.split_hint == "validation" for part in load_source_parts(context.input(RAW_DATASET))], bool)
    return np.repeat(hints, np.diff(index.first_rows))


def _decide_exact_splits(context: StageContext, parts: Sequence[Part], index: RowIndex) -> NDArray[np.int8]:
    """Assign splits by number to rows outside validation sources; such sources replace the validation share."""
    options = context.dataset.splits
    splitter = Splitter(options)
    hinted = _find_hinted_rows(context, index)
    if hinted.any():
        options = options.model_copy(update={"validation": 0})
    if index.groups is not None:
        units, names = index.groups, [key.encode() for key in index.keys]
    else:
        units, names = _number_units(context, parts, by_group=options.group_key is not None)
    rows = np.bincount(units[~hinted], minlength=len(names)).astype(np.int64)
    own = np.flatnonzero(rows)
    places = np.array([splitter.place(names[unit]) for unit in own.tolist()], np.uint64)
    decided = np.zeros(len(names), np.int8)
    decided[own] = splits.assign_exact_splits(options, places, rows[own])
    return np.where(hinted, index.splits, decided[units]).astype(np.int8)


def _number_units(
    context: StageContext, parts: Sequence[Part], *, by_group: bool
) -> tuple[NDArray[np.int64], list[bytes]]:
    """Return the unit of each row, by its group key or content, and the units as canonical JSON."""
    column = "group_key" if by_group else "content_hash"
    tables = read_tables(context.store, [part.files["rows"] for part in parts], [column])
    encoded = pa.concat_tables(tables).column(0).combine_chunks().dictionary_encode()
    names = encoded.dictionary.to_pylist()
    as_json = [name.encode() if by_group else b'"' + name.hex().encode() + b'"' for name in names]
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), as_json


def _rewrite_splits(context: StageContext, parts: list[Part], index: RowIndex, wanted: NDArray[np.int8]) -> list[Part]:
    planned: list[PartTask | None] = []
    for i, part in enumerate(parts):
        own = slice(int(index.first_rows[i]), int(index.first_rows[i + 1]))
        if (wanted[own] == index.splits[own]).all():
            planned.append(None)
            continue
        fingerprint = digest_json(part.fingerprint, "splits", wanted[own].tobytes().hex())
        task = RewriteTask(
            context.store.root, context.folder, fingerprint, part, tabulate_removed({}), wanted[own].tobytes()
        )
        planned.append(PartTask(fingerprint, task, part.files["rows"].rows, 4 * part.files["rows"].bytes))
    return rewrite_parts(context, parts, planned)
