"""Inference of a contract from evidence: each column's type, from all of its values.

A number type reads the shapes listed in `value_shapes.py`, so `.2`, `1e-05` and `NA` belong to it. One stray cell, or
one in a thousand, does not change a column's type: it is a mismatch, counted and reported. All digits with a leading 0
do change it: that is a code. Dates are text to a model, and only an order column needs them parsed, so a stray cell
makes any other column of dates text, which loses nothing. A column that two formats read differently stays text, too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rowmill.core.errors import ConfigError
from rowmill.tabular.schema import Column, ColumnType, RecordSchema
from rowmill.tabular.table_contract.contract import TIMES, CellType, ColumnContract, TableContract
from rowmill.tabular.table_contract.declared_types import parse_declared_column
from rowmill.tabular.table_contract.evidence import ColumnEvidence, ShapeTally, TableEvidence
from rowmill.tabular.table_contract.value_shapes import (
    INTEGERS,
    NUMBERS,
    formats_of,
    is_absent_shape,
    is_ambiguous_shape,
)
from rowmill.tabular.time_order import CANDIDATES, ELAPSED, ISO8601, TEXT, TIME_OF_DAY, SortKey, resolve_sort_key

STRAY_SHARE = 1000
"""One value in this many may not fit the type of all others."""
MIN_FITTING = 10
"""Minimum values that fit a type before one that does not counts as stray."""


def infer_contract(
    evidence: TableEvidence,
    declared: Mapping[str, str],
    *,
    order: str | None = None,
    leading: Sequence[str] = (),
    delimiter: str | None = None,
    quote: str | None = None,
) -> TableContract:
    """Infer a contract; `declared` are the types of typed sources, `leading` the columns that are written first."""
    names = [*(name for name in leading if name in evidence.columns), *evidence.columns]
    columns = {
        name: _infer_column(evidence.columns[name], evidence.records, declared.get(name), is_order=name == order)
        for name in dict.fromkeys(names)
    }
    return TableContract(delimiter=delimiter, quote=quote, columns=columns)


def _infer_column(seen: ColumnEvidence, records: int, declared: str | None, *, is_order: bool) -> ColumnContract:
    required = seen.present == records
    if declared is not None and not seen.cells:
        kind = _map_schema_type(parse_declared_column("column", declared, nullable=True, required=True).type)
        if kind not in ("text", "any"):
            return ColumnContract(type=kind, format="iso8601" if kind in TIMES else None, required=required)
        if kind == "any":
            return ColumnContract(type="any", required=required)
    if seen.kinds and not seen.cells:
        kind = _map_schema_type(_infer_json_type(seen.kinds))
        return (
            _infer_from_times(seen.times, required=required)
            if kind == "text"
            else ColumnContract(type=kind, required=required)
        )
    if seen.kinds:
        return ColumnContract(type="any" if seen.kinds.keys() - {"string"} else "text", required=required)
    return _infer_from_cells(seen.cells, required=required, is_order=is_order)


def _map_schema_type(kind: ColumnType) -> CellType:
    """Return the contract type of a schema type."""
    match kind:
        case "integer" | "boolean" | "date" | "datetime" | "time":
            return kind
        case "float" | "decimal":
            return "number"
        case "string":
            return "text"
        case "duration" | "bytes" | "list" | "struct" | "json":
            return "any"


def _infer_json_type(kinds: Iterable[str]) -> ColumnType:
    match sorted(kinds):
        case ["integer"]:
            return "integer"
        case ["decimal"] | ["decimal", "integer"]:
            return "decimal"
        case ["boolean"]:
            return "boolean"
        case ["string"] | []:
            return "string"
        case _:
            return "json"


# ── Cells ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _CandidateType:
    """A candidate type, and the shapes that it reads."""

    column: ColumnContract
    shapes: frozenset[str]


def _list_candidate_types() -> tuple[_CandidateType, ...]:
    integer = _CandidateType(ColumnContract(type="integer"), INTEGERS[""])
    numbers = [
        _CandidateType(ColumnContract(type="number", decimal=decimal, thousands=thousands), shapes)  # pyrefly: ignore[bad-argument-type]
        for (decimal, thousands), shapes in NUMBERS.items()
    ]
    grouped = [
        _CandidateType(ColumnContract(type="integer", thousands=sign), shapes)  # pyrefly: ignore[bad-argument-type]
        for sign, shapes in INTEGERS.items()
        if sign
    ]
    # `1.234` is a fraction unless another cell shows that the point separates thousands.
    return (
        integer,
        numbers[0],
        *grouped,
        *numbers[1:],
        _CandidateType(ColumnContract(type="boolean"), frozenset({"boolean"})),
    )


_CANDIDATE_TYPES = _list_candidate_types()
"""In order of preference: of two that read equally many cells, the first wins."""


def _infer_from_cells(cells: Mapping[str, ShapeTally], *, required: bool, is_order: bool) -> ColumnContract:
    text = ColumnContract(type="text", required=required)
    absent = sum(tally.count for shape, tally in cells.items() if is_absent_shape(shape))
    values = sum(tally.count for tally in cells.values()) - absent
    if not values or "zeros" in cells:
        return text
    found = [(_count_fitting(cells, one.shapes), one) for one in _CANDIDATE_TYPES]
    most, best = max(found, key=lambda pair: pair[0])
    if _is_tolerable(values - most, most):
        if _is_comma_ambiguous(cells, best):
            return text
        return best.column.model_copy(update={"required": required, "na": _collect_na_words(cells)})
    return _infer_from_times(cells, required=required, is_order=is_order)


def _count_fitting(cells: Mapping[str, ShapeTally], shapes: Iterable[str]) -> int:
    return sum(cells[shape].count for shape in shapes if shape in cells)


def _is_tolerable(odd: int, fitting: int) -> bool:
    if not odd:
        return fitting > 0
    return fitting >= MIN_FITTING and odd <= max(1, (odd + fitting) // STRAY_SHARE)


def _is_comma_ambiguous(cells: Mapping[str, ShapeTally], best: _CandidateType) -> bool:
    """Tell whether a comma, as in `1,234`, may as well be a decimal as a thousands separator."""
    if "comma_group" not in cells:
        return False
    as_thousands = _count_fitting(cells, NUMBERS[".", ","])
    as_fraction = max(_count_fitting(cells, NUMBERS[",", sign]) for sign in ("", ".", " "))
    return as_thousands == as_fraction and best.column.type in ("integer", "number")


def _collect_na_words(cells: Mapping[str, ShapeTally]) -> tuple[str, ...]:
    return tuple(sorted(shape.partition(":")[2] for shape in cells if shape.startswith(("na:", "mark:"))))


def _infer_from_times(tallies: Mapping[str, ShapeTally], *, required: bool, is_order: bool = False) -> ColumnContract:
    text = ColumnContract(type="text", required=required)
    absent = sum(tally.count for shape, tally in tallies.items() if is_absent_shape(shape))
    values = sum(tally.count for tally in tallies.values()) - absent
    counts = _count_formats(tallies)
    if not counts:
        return text
    best = max(counts, key=lambda name: counts[name])
    odd = values - counts[best]
    if odd and not (is_order and _is_tolerable(odd, counts[best])):
        return text
    if _find_rival_format(tallies, best):
        return text
    kinds = {shape.split(":", 2)[1] for shape in tallies if best in formats_of(shape)}
    kind: CellType = "time" if kinds == {"time"} else "date" if kinds == {"date"} else "datetime"
    return ColumnContract(type=kind, format=best, required=required, na=_collect_na_words(tallies))


def _count_formats(tallies: Mapping[str, ShapeTally]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for order in CANDIDATES:
        read = sum(tally.count for shape, tally in tallies.items() if order.name in formats_of(shape))
        if read:
            counts[order.name] = read
    return counts


def _find_rival_format(tallies: Mapping[str, ShapeTally], best: str) -> tuple[str, tuple[str, object]] | None:
    """Return another format that reads as many texts, with a text that it reads differently."""
    counts = _count_formats(tallies)
    for shape, tally in tallies.items():
        if is_ambiguous_shape(shape) and best in formats_of(shape):
            for name in formats_of(shape):
                if name != best and counts[name] == counts[best]:
                    return name, tally.examples[0]
    return None


# ── Schema and sort key of a contract ──────────────────────────────────────────────────────────────────────────


def build_record_schema(
    contract: TableContract, evidence: TableEvidence, declared: Mapping[str, str], leading: Sequence[str]
) -> RecordSchema:
    """Return the schema of records under a contract; the evidence decides which columns are nullable or optional."""
    columns = [
        _build_schema_column(name, one, evidence.columns.get(name), evidence.records, declared.get(name))
        for name, one in contract.used.items()
    ]
    return RecordSchema(tuple(columns)).with_leading(name for name in leading if name in contract.used)


def _build_schema_column(
    name: str, column: ColumnContract, seen: ColumnEvidence | None, records: int, declared: str | None
) -> Column:
    if seen is None:
        return Column(name, _map_cell_type(column), nullable=True, required=False)
    allows_null = column.on_mismatch == "na" or (bool(seen.cells) and bool(column.na or _has_blanks(seen, column)))
    nullable, required = seen.nulls > 0 or allows_null, seen.present == records
    if seen.cells or (not seen.kinds and declared is None):
        return Column(name, _map_cell_type(column), nullable=nullable, required=required)
    if declared is not None:
        own = parse_declared_column(name, declared, nullable=nullable, required=required)
        if column.type in ("any", _map_schema_type(own.type)) or column.type in TIMES:
            return own
    kind = _infer_json_type(seen.kinds) if column.type == "any" else _map_cell_type(column)
    return Column(name, kind, nullable=nullable, required=required)


def _has_blanks(seen: ColumnEvidence, column: ColumnContract) -> bool:
    return column.type != "text" and "blank" in seen.cells


def _map_cell_type(column: ColumnContract) -> ColumnType:
    match column.type:
        case "integer" | "boolean":
            return column.type
        case "number":
            return "decimal"
        case "date" | "datetime" | "time" | "text":
            return "string"
        case "any":
            return "string"


def infer_sort_key(
    name: str,
    contract: TableContract,
    evidence: TableEvidence,
    schema: RecordSchema,
    *,
    timestamp_format: str,
    must_be_time: bool,
    is_pinned: bool,
    where: str,
) -> SortKey:
    """Return the sort key of the order column.

    Raises
    ------
    ConfigError
        If the column cannot order records: no format reads its text, two disagree, or its type has no order.

    """
    column = contract.columns[name]
    if timestamp_format != "auto":
        return resolve_sort_key(timestamp_format, schema.by_name[name], where=where)
    match column.type:
        case "integer" | "number":
            return ELAPSED
        case "date" | "datetime":
            assert column.format is not None
            return SortKey(column.format)
        case "time":
            return TIME_OF_DAY if column.format is None or column.format == ISO8601.name else SortKey(column.format)
        case "text" if (is_pinned and not must_be_time) or not evidence.columns[name].values:
            return TEXT
        case "text":
            raise _make_order_error(name, evidence.columns[name], where)
        case "any" if schema.by_name[name].type == "duration":
            return ELAPSED
        case "boolean" | "any":
            raise ConfigError(
                f"{where}: column {name!r} is {schema.by_name[name].type}, which has no order; choose a column "
                "of numbers, times or text"
            )


def _make_order_error(name: str, seen: ColumnEvidence, where: str) -> ConfigError:
    """Explain why a column of text has no order: alphabetically, `Apr 2024` would precede `Jan 2024`."""
    tallies = seen.cells or seen.times
    counts = _count_formats(tallies)
    if not counts and not _count_numbers(tallies):
        example = next((text for tally in tallies.values() for text, _ in tally.examples), "")
        return ConfigError(
            f"{where}: auto: column {name!r} is text that no known time format reads, such as {example!r:.60}; "
            "write the format as a strptime format, or `text` to sort by code points"
        )
    if _count_numbers(tallies) > max(counts.values(), default=0):
        odd = next(
            text for shape, tally in tallies.items() if not _is_number_shape(shape) for text, _ in tally.examples
        )
        return ConfigError(
            f"{where}: auto: column {name!r} has numbers and {odd!r:.60}, which cannot be ordered together; "
            "correct the cells, or pin the column's type and its na words in the table contract"
        )
    best = max(counts, key=lambda format_name: counts[format_name])
    rival = _find_rival_format(tallies, best)
    if rival is not None and counts[best] == sum(tally.count for tally in tallies.values()):
        return ConfigError(
            f"{where}: auto: {best} and {rival[0]} both read every value of column {name!r} and disagree on "
            f"{rival[1][0]!r:.60}; write the one that is meant"
        )
    worst = next((t for shape, one in tallies.items() if best not in formats_of(shape) for t, _ in one.examples), "")
    return ConfigError(
        f"{where}: auto: no known format reads every value of column {name!r}; {best} comes closest and does not read "
        f"{worst!r:.60}; ISO 8601, d/m/Y, m/d/Y, d.m.Y, Y/m/d, %b %d %Y, %b %Y and %H:%M[:%S] are known; write "
        "another as a strptime format"
    )


def _count_numbers(tallies: Mapping[str, ShapeTally]) -> int:
    return sum(tally.count for shape, tally in tallies.items() if _is_number_shape(shape))


_NUMBER_SHAPES = frozenset().union(*NUMBERS.values(), *INTEGERS.values())


def _is_number_shape(shape: str) -> bool:
    return shape in _NUMBER_SHAPES
