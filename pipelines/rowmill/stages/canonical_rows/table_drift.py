"""Drift of a table from its contract: what changed, which values do not fit, and where they are."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rowmill import sources
from rowmill.core.stage_names import RAW_DATASET
from rowmill.formats import Records
from rowmill.schema.manifest import DisplayTable, Part
from rowmill.sources import FileScan
from rowmill.stages.base import StageContext, StageOutput
from rowmill.stages.inputs import load_scans
from rowmill.stages.table_inputs import ObservedTable, get_table_options
from rowmill.tabular import table_contract
from rowmill.tabular.table_contract import ColumnDrift, ColumnMismatch, TableContract
from rowmill.tabular.table_contract.drift import describe_column_contract


def describe_roles(form: Records) -> dict[str, Any]:
    """Return the group and order columns: a contract is valid only for these."""
    return {"group": list(form.group_columns), "by_file": form.is_grouped_by_file, "order": form.order_column}


MAX_SHOWN_DRIFTS = 30


def report_contract(
    context: StageContext,
    draft: StageOutput,
    observed: ObservedTable,
    drifts: Sequence[ColumnDrift],
    mismatches: Mapping[str, ColumnMismatch],
) -> None:
    """Report the differences between contract and data, and store the contract for the next build."""
    form, contract = get_table_options(context), observed.contract
    if contract is None:
        return
    parts = [(part, scan) for scan in load_scans(context.input(RAW_DATASET)) for part in scan.parts]
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
    placed = [(drift, describe_place(context, parts, drift)) for drift in drifts[:MAX_SHOWN_DRIFTS]]
    if placed:
        rows = tuple((one.column, one.change, one.text, place) for one, place in placed)
        draft.tables["table_drift"] = DisplayTable(("column", "change", "cell", "place"), rows)
        draft.samples["table_drift"] = tuple(_describe_drift(one, place) for one, place in placed[:10])
    if mismatches:
        found = [(name, one, contract.columns[name]) for name, one in sorted(mismatches.items())][:MAX_SHOWN_DRIFTS]
        misfits = [ColumnDrift(name, "", one.text, one.place) for name, one, _ in found]
        lines = [
            (name, one.count, one.text, describe_column_contract(column), describe_place(context, parts, misfit))
            for (name, one, column), misfit in zip(found, misfits, strict=True)
        ]
        draft.tables["type_mismatch"] = DisplayTable(
            ("column", "values", "for_example", "contract", "place"), tuple(lines)
        )
        draft.samples["type_mismatch"] = tuple(
            _describe_drift(one, line[-1]) for one, line in zip(misfits, lines, strict=True)
        )


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
    context: StageContext, observed: ObservedTable, mismatches: Mapping[str, ColumnMismatch]
) -> Iterator[ColumnDrift]:
    """Yield the differences between the data and the contract in force, pinned or the last build's."""
    assert observed.contract is not None
    yield from _find_dialect_drifts(context, observed.contract)
    if get_table_options(context).table is None:
        yield from _find_type_conflicts(context)
    if observed.earlier is None:
        if get_table_options(context).table is not None:
            yield from table_contract.find_missing_or_new(observed.contract, observed.evidence)
        return
    assert observed.proposed is not None
    yield from table_contract.find_contract_changes(
        observed.contract, observed.proposed, observed.evidence, mismatches, observed.earlier["mismatches"]
    )


def _find_dialect_drifts(context: StageContext, contract: TableContract) -> Iterator[ColumnDrift]:
    """Yield the files whose delimiter or quote character differs from the contract's."""
    number = 0
    for scan in load_scans(context.input(RAW_DATASET)):
        found = scan.dialect if scan.parts else None
        for what, own, wanted in (
            ()
            if found is None
            else (
                ("separated by", found.delimiter, contract.delimiter),
                ("quoted with", found.quote, contract.quote),
            )
        ):
            if wanted is not None and own != wanted:
                yield ColumnDrift(
                    "the header", f"is {what} {own!r}, and the contract says {wanted!r}", None, (number, 0)
                )
        number += len(scan.parts)


def _find_type_conflicts(context: StageContext) -> Iterator[ColumnDrift]:
    """Yield the columns that two typed files declare as different kinds of values, such as numbers and text."""
    first: dict[str, tuple[str, str, str]] = {}
    told: set[str] = set()
    number = 0
    for scan in load_scans(context.input(RAW_DATASET)):
        for name, declared in (scan.columns or {}).items() if scan.records else ():
            kind = table_contract.name_declared_kind(declared)
            known = first.setdefault(name, (kind, declared, scan.url))
            if kind != known[0] and "" not in (kind, known[0]) and name not in told:
                told.add(name)
                change = f"is {known[1]} in {known[2]}, and {declared} in {scan.url}"
                yield ColumnDrift(name, change, None, (number, 0))
        number += len(scan.parts)


def describe_place(
    context: StageContext, parts: Sequence[tuple[sources.SourcePart, FileScan]], drift: ColumnDrift
) -> str:
    """Describe a cell's location: `data/sales.csv line 20002`."""
    if drift.place is None or drift.place[0] >= len(parts):
        return ""
    part, scan = parts[drift.place[0]]
    if drift.text is None and drift.column == "the header":
        return f"{part.url} line 1"
    return sources.describe_place(part, scan, context.base, drift.place[1])


def _describe_drift(drift: ColumnDrift, place: str) -> str:
    cell = "" if drift.text is None else f": {drift.text!r}"
    return f"{drift.column} {drift.change}".rstrip() + f"{cell}{f' ({place})' if place else ''}"
