"""How the data of a table differs: from its pinned contract, and from the table of the published build.

    pinned contract ─────────────────┐
    other files of the same build ───┴──► table_contract: a fact of the rows
    contract and values of the published rows ──► table_drift: measured when the rows are judged

Neither decides a row: types follow from the pinned contract or from the data of the build. A build whose data changes
the types of its columns makes other rows, and `table_drift` stops them until a person has looked at the cell.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from rowmill import sources
from rowmill.core.stage_names import RAW_DATASET
from rowmill.core.storage import Store
from rowmill.kinds.tables.inference import (
    EVIDENCE,
    CellLocation,
    ColumnEvidence,
    ShapeTally,
    TableEvidence,
    describe_column_contract,
    find_declared_type,
    list_number_shapes,
    reads_shape,
)
from rowmill.kinds.tables.table_contract import (
    TIMES,
    ColumnContract,
    TableContract,
    is_absent_shape,
    name_declared_kind,
)
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest
from rowmill.sources import FileScan
from rowmill.sources.reading import load_scans

SHOWN_CHANGES = 10
"""Changes that are shown with their place: finding a line takes reading its file."""
HEADER = -1
"""Number of a CSV file's header, as that of a record."""


@dataclass(frozen=True, slots=True)
class TableChange:
    """A difference of one column: its description, and the cell that shows it with its location, if one does."""

    column: str
    change: str
    text: str | None = None
    place: CellLocation | None = None


def make_place_describer(scans: Sequence[FileScan], base: Path) -> Callable[[CellLocation | None], str]:
    """Return a function that describes where a cell is in the source: `data/sales.csv line 20002`."""
    parts = [(part, scan) for scan in scans for part in scan.parts]

    def describe(place: CellLocation | None) -> str:
        if place is None or place[0] >= len(parts):
            return ""
        part, scan = parts[place[0]]
        return f"{part.url} line 1" if place[1] == HEADER else sources.describe_place(part, scan, base, place[1])

    return describe


def describe_cell(what: str, text: str | None, place: str) -> str:
    """Return a sentence about a cell, with its text and its place."""
    return f"{what}{'' if text is None else f': {text!r}'}{f' ({place})' if place else ''}"


def describe_changes(changes: Sequence[TableChange], describe_place: Callable[[CellLocation | None], str]) -> list[str]:
    """Return a sentence for each change; the first ones name their places."""
    return [
        describe_cell(f"{one.column} {one.change}", one.text, describe_place(one.place) if at < SHOWN_CHANGES else "")
        for at, one in enumerate(changes)
    ]


# ── Within a build ─────────────────────────────────────────────────────────────────────────────────


def find_contract_changes(
    pinned: TableContract | None, evidence: TableEvidence, scans: Sequence[FileScan]
) -> Iterator[TableChange]:
    """Yield the differences between a table and its pinned contract; without one, those between its typed files."""
    if pinned is not None:
        yield from _find_other_dialects(pinned, scans)
        yield from _find_new_or_missing(pinned, evidence, "the contract has no such column")
        return
    # Columns that two typed files declare as different kinds of values, such as numbers and text.
    first: dict[str, tuple[str, str, str]] = {}
    told: set[str] = set()
    for scan, number in _number_parts(scans):
        for name, declared in (scan.columns or {}).items() if scan.records else ():
            kind = name_declared_kind(declared)
            earliest = first.setdefault(name, (kind, declared, scan.url))
            if kind != earliest[0] and "" not in (kind, earliest[0]) and name not in told:
                told.add(name)
                change = f"is {earliest[1]} in {earliest[2]}, and {declared} in {scan.url}"
                yield TableChange(name, change, None, (number, 0))


def _number_parts(scans: Sequence[FileScan]) -> Iterator[tuple[FileScan, int]]:
    """Yield each file with the number of its first part."""
    return zip(scans, accumulate((len(scan.parts) for scan in scans), initial=0), strict=False)


def _find_other_dialects(contract: TableContract, scans: Sequence[FileScan]) -> Iterator[TableChange]:
    for scan, number in _number_parts(scans):
        found = scan.dialect if scan.parts else None
        for what, own, wanted in (
            ("separated by", found and found.delimiter, contract.delimiter),
            ("quoted with", found and found.quote, contract.quote),
        ):
            if found is not None and wanted is not None and own != wanted:
                yield TableChange(
                    "the header", f"is {what} {own!r}, and the contract says {wanted!r}", None, (number, HEADER)
                )


def _find_new_or_missing(contract: TableContract, evidence: TableEvidence, why_new: str) -> Iterator[TableChange]:
    for name, seen in evidence.columns.items():
        if name not in contract.columns:
            _, text = _find_first_value([*(seen.cells or seen.kinds).values()])
            yield TableChange(name, f"is new: {why_new}", text, seen.first)
    for name, column in contract.columns.items():
        seen = evidence.columns.get(name)
        if seen is None and evidence.records:
            yield TableChange(name, "is missing from every record", None, (0, 0))
        elif column.required and seen is not None and seen.present < evidence.records:
            yield TableChange(name, f"is missing from {evidence.records - seen.present:,} records", None, seen.gap)


# ── Since the published build ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class StoredTable:
    """What the manifest of rows says about their table, for comparison with other builds.

    `declared` are the types that its sources declare.
    """

    contract: TableContract
    is_pinned: bool
    declared: Mapping[str, str]
    evidence: TableEvidence

    def to_json(self) -> dict[str, Any]:
        """Return it for the manifest, with one example of each shape."""
        columns = {name: _shorten_examples(seen) for name, seen in self.evidence.columns.items()}
        return {
            "contract": self.contract.to_json(),
            "is_pinned": self.is_pinned,
            "declared": dict(self.declared),
            "evidence": EVIDENCE.dump_python(replace(self.evidence, columns=columns), mode="json"),
        }

    @classmethod
    def load(cls, rows: Manifest) -> "StoredTable | None":
        """Return the table of some rows; None if no record had a column."""
        stored = rows.details.get("table")
        if stored is None:
            return None
        contract = TableContract.from_json(stored["contract"])
        return cls(contract, stored["is_pinned"], stored["declared"], EVIDENCE.validate_python(stored["evidence"]))

    def find_unfit(self, name: str, contract: ColumnContract) -> list[ShapeTally]:
        """Return the values of a column that a contract does not read."""
        seen, declared = self.evidence.columns.get(name), self.declared.get(name)
        # The values of a typed column are what it declares: of two such types no value tells which.
        if seen is None or (declared is not None and find_declared_type(declared) not in ("text", "any")):
            return []
        unfit = [tally for shape, tally in seen.cells.items() if not _reads_cell(contract, shape)]
        for kind, tally in seen.kinds.items():
            if kind != "string":
                unfit += [] if contract.type in _READERS_OF_KINDS[kind] else [tally]
            elif contract.type in TIMES:
                unfit += [one for shape, one in seen.times.items() if not reads_shape(contract, shape)]
            elif contract.type not in ("text", "any"):
                unfit.append(tally)
        return unfit


_READERS_OF_KINDS = {
    "integer": ("integer", "number", "any"),
    "decimal": ("number", "any"),
    "boolean": ("boolean", "any"),
    "container": ("any",),
}
"""The types that read a kind of JSON value other than text."""


def _shorten_examples(seen: ColumnEvidence) -> ColumnEvidence:
    cells, kinds, times = (
        {shape: replace(tally, examples=tally.examples[:1]) for shape, tally in tallies.items()}
        for tallies in (seen.cells, seen.kinds, seen.times)
    )
    return replace(seen, cells=cells, kinds=kinds, times=times)


def _reads_cell(column: ColumnContract, shape: str) -> bool:
    if column.type not in ("text", "any") and is_absent_shape(shape):
        return shape == "blank" or shape.partition(":")[2] in column.na
    return reads_shape(column, shape)


def find_published_changes(before: StoredTable, now: StoredTable) -> Iterator[TableChange]:
    """Yield the changes of a table since the published one.

    Another delimiter of equal cells is none: the rows, and so their version, are the same.
    """
    yield from _find_new_or_missing(before.contract, now.evidence, "the published build has no such column")
    for name, column in before.contract.columns.items():
        seen, other = now.evidence.columns.get(name), now.contract.columns.get(name)
        if seen is None or other is None or not seen.values:
            continue
        unfit = now.find_unfit(name, column)
        count, known = (sum(one.count for one in tallies) for tallies in (unfit, before.find_unfit(name, column)))
        place, text = _find_first_value(unfit or [*(seen.cells or seen.kinds).values()])
        if count > known:
            values = "1 value does" if count == 1 else f"{count:,} values do"
            change = f"which {values} not fit{f' (before: {known:,})' if known else ''}"
        elif not _is_narrower(other, column):
            change = f"and its values now read as {describe_column_contract(other)}"
        else:
            continue
        yield TableChange(name, f"was {describe_column_contract(column)}, {change}", text, place)


def _find_first_value(tallies: Sequence[ShapeTally]) -> tuple[CellLocation | None, str | None]:
    examples = [(place, text) for tally in tallies for text, place in tally.examples]
    return min(examples) if examples else (None, None)


def _is_narrower(now: ColumnContract, before: ColumnContract) -> bool:
    """Tell whether the earlier contract reads everything that the later one does, to the same texts."""
    if set(now.na) - set(before.na):
        return False
    if (now.type, before.type) == ("date", "datetime"):
        return now.format == before.format
    if now.type in ("integer", "number") and before.type in ("integer", "number"):
        return list_number_shapes(now) <= list_number_shapes(before)
    return (now.type, now.format) == (before.type, before.format)


def compare_rows(base: Path, store: Store, rows: Manifest, published: Manifest) -> list[str] | None:
    """Return the changes of a table since its published rows, a sentence each; None if one of the two is pinned.

    A pinned contract says itself what its table is, and `table_contract` compares the data with it.
    """
    now, before = StoredTable.load(rows), StoredTable.load(published)
    if now is None or before is None or now.is_pinned or before.is_pinned:
        return None
    inputs = manifest.load_inputs(store, rows)
    scans = load_scans(next(made for made in inputs.values() if made.stage == RAW_DATASET))
    return describe_changes([*find_published_changes(before, now)], make_place_describer(scans, base))
