"""Differences between the contract in force and the data, each with the cell that shows it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rowmill.kinds.tables.table_contract.contract import TIMES, ColumnContract, TableContract
from rowmill.kinds.tables.table_contract.inference import CellLocation, TableEvidence
from rowmill.kinds.tables.table_contract.value_shapes import INTEGERS, NUMBERS, formats_of


@dataclass(frozen=True, slots=True)
class ColumnMismatch:
    """Values of a column that do not fit its contract: their number, and the first one."""

    count: int
    text: str
    place: CellLocation


@dataclass(frozen=True, slots=True)
class ColumnDrift:
    """A change of one column: its description, and the cell that shows it with its location, if one does."""

    column: str
    change: str
    text: str | None = None
    place: CellLocation | None = None


def find_missing_or_new(contract: TableContract, evidence: TableEvidence) -> Iterator[ColumnDrift]:
    """Yield the columns that the contract does not know, and the required ones that records lack."""
    for name, seen in evidence.columns.items():
        if name not in contract.columns:
            tallies = (seen.cells or seen.kinds).values()
            examples = [(place, text) for tally in tallies for text, place in tally.examples]
            text = min(examples)[1] if examples else None
            yield ColumnDrift(name, "is new: the contract has no such column", text, seen.first)
    for name, column in contract.columns.items():
        seen = evidence.columns.get(name)
        if seen is None and evidence.records:
            yield ColumnDrift(name, "is missing from every record", None, (0, 0))
        elif column.required and seen is not None and seen.present < evidence.records:
            yield ColumnDrift(name, f"is missing from {evidence.records - seen.present:,} records", None, seen.gap)


def find_contract_changes(
    before: TableContract,
    now: TableContract,
    evidence: TableEvidence,
    mismatches: Mapping[str, ColumnMismatch],
    known: Mapping[str, int],
) -> Iterator[ColumnDrift]:
    """Yield the changes since an unpinned contract; `known` counts the mismatches that the data had then."""
    yield from find_missing_or_new(before, evidence)
    for name, column in before.columns.items():
        found = mismatches.get(name)
        seen = evidence.columns.get(name)
        earlier = known.get(name, 0)
        if found is not None and found.count > earlier:
            values = "1 value does" if found.count == 1 else f"{found.count:,} values do"
            more = f" (before: {earlier:,})" if earlier else ""
            problem = f"is {describe_column_contract(column)}, which {values} not fit{more}"
            yield ColumnDrift(name, problem, found.text, found.place)
        elif seen is not None and seen.values and name in now.columns:
            other = now.columns[name]
            if not _is_narrower(other, column):
                # The first cell that does not fit the earlier contract, or else the first cell.
                tallies = seen.cells or seen.kinds
                odd = [tally for shape, tally in tallies.items() if not reads_shape(column, shape)]
                examples = [(place, text) for tally in odd or tallies.values() for text, place in tally.examples]
                place, text = min(examples) if examples else (None, None)
                yield ColumnDrift(
                    name,
                    f"was {describe_column_contract(column)}, and its values now read as "
                    f"{describe_column_contract(other)}",
                    text,
                    place,
                )


def describe_column_contract(column: ColumnContract) -> str:
    """Describe a column's contract: `number, NA and ? for no value`."""
    said: list[str] = [column.type if column.format is None else f"{column.type} as {column.format}"]
    if column.decimal != ".":
        said.append(f"decimal sign {column.decimal!r}")
    if column.thousands:
        said.append(f"thousands sign {column.thousands!r}")
    if column.na:
        said.append(f"{' and '.join(column.na)} for no value")
    return ", ".join(said)


def _is_narrower(now: ColumnContract, before: ColumnContract) -> bool:
    """Tell whether the earlier contract reads everything that the later one does, to the same texts."""
    if set(now.na) - set(before.na):
        return False
    if (now.type, before.type) == ("date", "datetime"):
        return now.format == before.format
    if now.type in ("integer", "number") and before.type in ("integer", "number"):
        return _numeric_shapes(now) <= _numeric_shapes(before)
    return (now.type, now.format) == (before.type, before.format)


def _numeric_shapes(column: ColumnContract) -> frozenset[str]:
    if column.type == "integer":
        return INTEGERS[column.thousands]
    return NUMBERS[column.decimal, column.thousands]


def reads_shape(column: ColumnContract, shape: str) -> bool:
    """Tell whether a column's contract reads values of a shape."""
    if column.type in ("integer", "number"):
        return shape in _numeric_shapes(column)
    if column.type in ("text", "any"):
        return True
    return column.format in formats_of(shape) if column.type in TIMES else column.type == shape
