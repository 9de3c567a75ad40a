"""The schema of a dataset's records: each column's type, from all values that stand in it.

What belongs here: what one part's values say about a column, adding that up over parts, and the type that follows.
What does not: the types themselves and their texts (`records.py`, `codec/`), reading parts.

A type is decided over all data, because one value can change it: 9,999 zip codes that are written back as numbers
and one `01234` are strings. So each part says only what its values *rule out*; the sums over parts are the same in
any order, and a part that was seen before is not read again.

    cells of CSV      possible types: integer, decimal, boolean; each cell that is not written back rules some out
    values of JSON    kinds seen: integer, decimal, boolean, string, container
    typed sources     the type that the file declares (Parquet, Hugging Face)
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from pipelines.records import MAX_DIGITS, Column, ColumnType, Record, RecordSchema, Value
from pipelines.rows import Json

INTEGER, DECIMAL, BOOLEAN, STRING, CONTAINER = (1 << bit for bit in range(5))
_CELL_TYPES = INTEGER | DECIMAL | BOOLEAN
_KINDS: dict[type, int] = {
    int: INTEGER, Decimal: DECIMAL, bool: BOOLEAN, str: STRING, list: CONTAINER, dict: CONTAINER,
}  # fmt: skip
_INTEGER = re.compile(rf"0|-?[1-9][0-9]{{0,{MAX_DIGITS - 1}}}")
# -0 is not written back by any number type: an integer has no sign there, and JSON reads the text as one.
_DECIMAL = re.compile(r"0|-?[1-9][0-9]{0,400}|-?(?:0|[1-9][0-9]{0,400})\.[0-9]{1,400}")
_BOOLEANS = frozenset({"true", "false"})


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of one column: in how many records, how often null, what its cells may be, what its values are."""

    present: int = 0
    nulls: int = 0
    cells: int = 0
    possible: int = _CELL_TYPES
    kinds: int = 0

    def plus(self, other: "Seen") -> "Seen":
        """Add what another part says."""
        return Seen(
            self.present + other.present,
            self.nulls + other.nulls,
            self.cells + other.cells,
            self.possible & other.possible,
            self.kinds | other.kinds,
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """What the records of some parts say about the columns, in the order in which these were first met."""

    records: int
    columns: dict[str, Seen]

    def to_json(self) -> dict[str, Json]:
        """Return it as a JSON value."""
        columns = [[name, s.present, s.nulls, s.cells, s.possible, s.kinds] for name, s in self.columns.items()]
        return {"records": self.records, "columns": columns}

    @classmethod
    def from_json(cls, told: Mapping[str, Json]) -> "Observed":
        """Read what `to_json` returned."""
        lines: list[tuple[str, int, int, int, int, int]] = told["columns"]
        return cls(told["records"], {name: Seen(*numbers) for name, *numbers in lines})


def add_up(parts: Iterable[Observed]) -> Observed:
    """Add up what parts say; columns stand in the order in which the parts meet them."""
    records, columns = 0, dict[str, Seen]()
    for part in parts:
        records += part.records
        for name, seen in part.columns.items():
            columns[name] = columns[name].plus(seen) if name in columns else seen
    return Observed(records, columns)


# ── One part ───────────────────────────────────────────────────────────────────────────────────────


def observe(records: Sequence[Mapping[str, Json]], *, are_cells: bool) -> Observed:
    """Say what a part's records rule out; cells are texts of a CSV file, of which the empty one is null."""
    values: dict[str, list[Json]] = {}
    for record in records:
        for name, value in record.items():
            held = values.get(name)
            if held is None:
                values[name] = [value]
            else:
                held.append(value)
    see = _see_cells if are_cells else _see_values
    return Observed(len(records), {name: see(column) for name, column in values.items()})


def _see_cells(cells: list[Json]) -> Seen:
    nulls = cells.count("")
    possible, matches = _CELL_TYPES, _CELL_MATCHES
    distinct = set(cells)
    distinct.discard("")
    for kind, fits in matches.items():
        if not all(map(fits, distinct)):
            possible &= ~kind
    return Seen(len(cells), nulls, len(cells) - nulls, possible)


_CELL_MATCHES: dict[int, Callable[[str], object]] = {
    INTEGER: _INTEGER.fullmatch,
    DECIMAL: _DECIMAL.fullmatch,
    BOOLEAN: _BOOLEANS.__contains__,
}


def _see_values(values: list[Json]) -> Seen:
    kinds = 0
    for one in set(map(type, values)):
        kinds |= _KINDS.get(one, 0)
    return Seen(present=len(values), nulls=values.count(None), kinds=kinds)


# ── All parts ──────────────────────────────────────────────────────────────────────────────────────


def schema_of(observed: Observed, declared: Mapping[str, str], leading: Sequence[str]) -> RecordSchema:
    """Return the schema; `declared` are the types of typed sources, `leading` the columns whose keys stand first."""
    columns = [_column(name, seen, observed.records, declared.get(name)) for name, seen in observed.columns.items()]
    return RecordSchema(tuple(columns)).led_by(leading)


def _column(name: str, seen: Seen, records: int, declared: str | None) -> Column:
    nullable, required = seen.nulls > 0, seen.present == records
    if declared is not None and not seen.cells:
        return declared_column(name, declared, nullable=nullable, required=required)
    return Column(name, _type(seen), nullable=nullable, required=required)


def _type(seen: Seen) -> ColumnType:
    if not seen.cells:
        return _type_of_kinds(seen.kinds)
    of_cells = next((kind for kind in (INTEGER, DECIMAL, BOOLEAN) if seen.possible & kind), STRING)
    # Beside texts of JSON a cell is text too, whatever it looks like.
    return "string" if seen.kinds & STRING and not seen.kinds & ~STRING else _type_of_kinds(seen.kinds | of_cells)


def _type_of_kinds(kinds: int) -> ColumnType:
    match kinds:
        case 1:  # INTEGER
            return "integer"
        case 2 | 3:  # DECIMAL, and INTEGER beside it
            return "decimal"
        case 4:  # BOOLEAN
            return "boolean"
        case 0 | 8:  # nothing but nulls; STRING
            return "string"
        case _:
            return "json"


# ── Types that a source declares ───────────────────────────────────────────────────────────────────


_ARROW: tuple[tuple[re.Pattern[str], ColumnType], ...] = (
    (re.compile(r"u?int(8|16|32|64)"), "integer"),
    (re.compile(r"half_?float|float(16|32|64)?|double"), "float"),
    (re.compile(r"decimal(32|64|128|256)?\(.*\)"), "decimal"),
    (re.compile(r"bool"), "boolean"),
    (re.compile(r"(large_)?(string|utf8)(_view)?"), "string"),
    (re.compile(r"timestamp\[.*\]"), "datetime"),
    (re.compile(r"date(32|64)(\[.*\])?"), "date"),
    (re.compile(r"time(32|64)\[.*\]"), "time"),
    (re.compile(r"duration\[.*\]"), "duration"),
    (re.compile(r"(large_|fixed_size_)?binary(_view)?(\[\d+\])?"), "bytes"),
)
_LIST = re.compile(r"(?:large_|fixed_size_)?list(?:_view)?<[^:<>]+: (.+?)>(?:\[\d+\])?")
_FEATURE = re.compile(r"Value\((?:dtype=)?'([^']+)'.*\)")


def declared_column(name: str, declared: str, *, nullable: bool, required: bool) -> Column:
    """Return the column of a declared Arrow type, or `json` for one that only its values can tell."""
    feature = _FEATURE.fullmatch(declared)
    declared = declared if feature is None else feature[1]
    for pattern, kind in _ARROW:
        if pattern.fullmatch(declared):
            return Column(name, kind, nullable=nullable, required=required)
    inner = _LIST.fullmatch(declared)
    if inner is not None:
        item = declared_column("item", inner[1].removesuffix(" not null"), nullable=True, required=True)
        return Column(name, "list", nullable=nullable, required=required, item=item)
    fields = _struct_fields(declared)
    if fields is not None:
        # Arrow writes every field of a struct, absent ones as null.
        inner_columns = tuple(declared_column(n, kind, nullable=True, required=True) for n, kind in fields)
        return Column(name, "struct", nullable=nullable, required=required, fields=inner_columns)
    return Column(name, "json", nullable=nullable, required=required)


def _struct_fields(declared: str) -> list[tuple[str, str]] | None:
    """Part `struct<a: int64, b: list<item: string>>` into its fields; nothing for any other text."""
    if not (declared.startswith("struct<") and declared.endswith(">")):
        return None
    fields: list[tuple[str, str]] = []
    depth, begin, body = 0, 0, declared[len("struct<") : -1]
    for at, character in enumerate(f"{body},"):
        depth += (character in "<([") - (character in ">)]")
        if character == "," and not depth:
            name, colon, kind = body[begin:at].strip().partition(": ")
            if not colon:
                return None
            fields.append((name, kind.removesuffix(" not null")))
            begin = at + 1
    return fields


# ── Records of the schema ──────────────────────────────────────────────────────────────────────────


class CellReader:
    """Types the cells of CSV records of one schema: the empty cell is null, every other is read as its column says."""

    def __init__(self, schema: RecordSchema) -> None:
        self._convert = {one.name: _CELL_READERS.get(one.type) for one in schema.columns}

    def __call__(self, cells: Mapping[str, str]) -> Record:
        """Return the record of a row of cells."""
        record: Record = {}
        for name, cell in cells.items():
            convert = self._convert[name]
            record[name] = (cell if convert is None else convert(cell)) if cell else None
        return record


_CELL_READERS: dict[ColumnType, Callable[[str], Value]] = {
    "integer": int,
    "decimal": Decimal,
    "boolean": "true".__eq__,
}
