"""From the evidence of a table's values to contract, schema and sort key.

Evidence counts the shapes of each column's values, with the first location of each. It is collected part by part and
merged, so that a contract never depends on how a table is cut into parts.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from pydantic import TypeAdapter

from rowmill.core.errors import ConfigError
from rowmill.kinds.tables.schema import (
    CANDIDATES,
    ELAPSED,
    ISO8601,
    TEXT,
    TIME_OF_DAY,
    Column,
    ColumnType,
    RecordSchema,
    SortKey,
    resolve_sort_key,
)
from rowmill.kinds.tables.table_contract import (
    INTEGERS,
    NUMBERS,
    TIMES,
    CellType,
    ColumnContract,
    TableContract,
    formats_of,
    is_absent_shape,
    is_ambiguous_shape,
    parse_declared_column,
)

CellLocation: TypeAlias = tuple[int, int]
"""A part, and a record in it, both counted from 0."""

MAX_EXAMPLES = 3
"""Distinct texts kept of each shape."""
MAX_EXAMPLE_CHARS = 100
"""Characters kept of such a text."""


@dataclass(frozen=True, slots=True)
class ShapeTally:
    """Number of values of a shape, and the first distinct ones with their locations."""

    count: int
    examples: tuple[tuple[str, CellLocation], ...]


@dataclass(frozen=True, slots=True)
class ColumnEvidence:
    """Evidence about one column.

    `present` records have it, of which `nulls` have null or an empty cell. `cells` counts the other cells of CSV by
    shape; for JSON values, `kinds` counts the types and `times` the texts that are times. `gap` is the first record
    without the column.
    """

    first: CellLocation
    present: int = 0
    nulls: int = 0
    cells: Mapping[str, ShapeTally] = field(default_factory=dict[str, ShapeTally])
    kinds: Mapping[str, ShapeTally] = field(default_factory=dict[str, ShapeTally])
    times: Mapping[str, ShapeTally] = field(default_factory=dict[str, ShapeTally])
    gap: CellLocation | None = None

    @property
    def values(self) -> int:
        """Number of values that are neither null nor an empty cell."""
        return self.present - self.nulls


TALLIES = ("cells", "kinds", "times")
"""The fields of a column's evidence that count shapes."""


@dataclass(frozen=True, slots=True)
class TableEvidence:
    """Evidence about all columns, in order of first occurrence."""

    records: int
    columns: Mapping[str, ColumnEvidence]

    def find_gap(self, column: str) -> CellLocation | None:
        """Return the first record of a part that lacks a column."""
        own = self.columns.get(column)
        return min((one.first for one in self.columns.values()), default=(0, 0)) if own is None else own.gap


EVIDENCE = TypeAdapter(TableEvidence)
"""The evidence of a part as its file stores it."""


def merge_evidence(parts: Sequence[TableEvidence]) -> TableEvidence:
    """Merge the evidence of parts; columns are in order of first occurrence."""
    columns: dict[str, ColumnEvidence] = {}
    for name in dict.fromkeys(name for part in parts for name in part.columns):
        seen = [(number, part.columns[name]) for number, part in enumerate(parts) if name in part.columns]
        lacking = ((number, own.find_gap(name)) for number, own in enumerate(parts) if own.records)
        columns[name] = ColumnEvidence(
            (seen[0][0], seen[0][1].first[1]),
            sum(one.present for _, one in seen),
            sum(one.nulls for _, one in seen),
            *(_merge_tallies((number, getattr(one, what)) for number, one in seen) for what in TALLIES),
            gap=next(((number, gap[1]) for number, gap in lacking if gap is not None), None),
        )
    return TableEvidence(sum(part.records for part in parts), columns)


def _merge_tallies(parts: Iterable[tuple[int, Mapping[str, ShapeTally]]]) -> dict[str, ShapeTally]:
    counts, examples = Counter[str](), defaultdict[str, dict[str, CellLocation]](dict)
    for number, tallies in parts:
        for shape, tally in tallies.items():
            counts[shape] += tally.count
            for text, (_, row) in tally.examples:
                examples[shape].setdefault(text, (number, row))
    return {shape: ShapeTally(count, (*examples[shape].items(),)[:MAX_EXAMPLES]) for shape, count in counts.items()}


# ── Inference of a contract from evidence: each column's type, from all of its values ──


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
        kind = find_declared_type(declared)
        if kind not in ("text", "any"):
            return ColumnContract(type=kind, format="iso8601" if kind in TIMES else None, required=required)
        if kind == "any":
            return ColumnContract(type="any", required=required)
    if seen.kinds and not seen.cells:
        kind = _CELL_TYPES.get(_infer_json_type(seen.kinds), "any")
        return (
            _infer_from_times(seen.times, required=required)
            if kind == "text"
            else ColumnContract(type=kind, required=required)
        )
    if seen.kinds:
        return ColumnContract(type="any" if seen.kinds.keys() - {"string"} else "text", required=required)
    text = ColumnContract(type="text", required=required)
    absent = sum(tally.count for shape, tally in seen.cells.items() if is_absent_shape(shape))
    values = sum(tally.count for tally in seen.cells.values()) - absent
    if not values or "zeros" in seen.cells:
        return text
    found = [(_count_fitting(seen.cells, shapes), column) for column, shapes in _CANDIDATE_TYPES]
    most, best = max(found, key=lambda pair: pair[0])
    if _is_tolerable(values - most, most):
        # A comma, as in `1,234`, may as well be a decimal as a thousands separator.
        as_thousands = _count_fitting(seen.cells, NUMBERS[".", ","])
        as_fraction = max(_count_fitting(seen.cells, NUMBERS[",", sign]) for sign in ("", ".", " "))
        if "comma_group" in seen.cells and as_thousands == as_fraction and best.type in ("integer", "number"):
            return text
        return best.model_copy(update={"required": required, "na": _collect_na_words(seen.cells)})
    return _infer_from_times(seen.cells, required=required, is_order=is_order)


_CELL_TYPES: dict[ColumnType, CellType] = {
    "integer": "integer", "boolean": "boolean", "date": "date", "datetime": "datetime", "time": "time",
    "float": "number", "decimal": "number", "string": "text",
}  # fmt: skip
"""The contract type of each schema type; `any` for the others."""
_SCHEMA_TYPES: dict[CellType, ColumnType] = {"integer": "integer", "boolean": "boolean", "number": "decimal"}
"""The schema type of each contract type; `string` for the others."""


def find_declared_type(declared: str) -> CellType:
    """Return the contract type of a declared Arrow type; `any` if it has none."""
    return _CELL_TYPES.get(parse_declared_column("column", declared, nullable=True, required=True).type, "any")


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


_NUMBERS = [
    (ColumnContract(type="number", decimal=decimal, thousands=thousands), shapes)  # pyrefly: ignore[bad-argument-type]
    for (decimal, thousands), shapes in NUMBERS.items()
]
_INTEGERS = [
    (ColumnContract(type="integer", thousands=sign), shapes)  # pyrefly: ignore[bad-argument-type]
    for sign, shapes in INTEGERS.items()
]
_BOOLEANS = (ColumnContract(type="boolean"), frozenset({"boolean"}))
# `1.234` is a fraction unless another cell shows that the point separates thousands.
_CANDIDATE_TYPES = (_INTEGERS[0], _NUMBERS[0], *_INTEGERS[1:], *_NUMBERS[1:], _BOOLEANS)
"""Types with the shapes that they read; of two that read equally many cells, the first wins."""


def _count_fitting(cells: Mapping[str, ShapeTally], shapes: Iterable[str]) -> int:
    return sum(cells[shape].count for shape in shapes if shape in cells)


def _is_tolerable(odd: int, fitting: int) -> bool:
    if not odd:
        return fitting > 0
    return fitting >= MIN_FITTING and odd <= max(1, (odd + fitting) // STRAY_SHARE)


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
    columns: list[Column] = []
    for name, column in contract.used.items():
        seen, of_source = evidence.columns.get(name), declared.get(name)
        kind = _SCHEMA_TYPES.get(column.type, "string")
        if seen is None:
            columns.append(Column(name, kind, nullable=True, required=False))
            continue
        allows_null = column.on_mismatch == "na" or (
            bool(seen.cells) and (bool(column.na) or (column.type != "text" and "blank" in seen.cells))
        )
        nullable, required = seen.nulls > 0 or allows_null, seen.present == evidence.records
        own = Column(name, kind, nullable=nullable, required=required)
        if not seen.cells and (seen.kinds or of_source is not None):
            if column.type == "any":
                own = replace(own, type=_infer_json_type(seen.kinds))
            if of_source is not None:
                parsed = parse_declared_column(name, of_source, nullable=nullable, required=required)
                if column.type in ("any", _CELL_TYPES.get(parsed.type, "any")) or column.type in TIMES:
                    own = parsed
        columns.append(own)
    first = [name for name in dict.fromkeys(leading) if name in contract.used]
    columns.sort(key=lambda column: first.index(column.name) if column.name in first else len(first))
    return RecordSchema(tuple(columns))


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
    """Return the sort key of the order column."""
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
            text for shape, tally in tallies.items() if shape not in _NUMBER_SHAPES for text, _ in tally.examples
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
    return sum(tally.count for shape, tally in tallies.items() if shape in _NUMBER_SHAPES)


_NUMBER_SHAPES = frozenset().union(*NUMBERS.values(), *INTEGERS.values())


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


def list_number_shapes(column: ColumnContract) -> frozenset[str]:
    """Return the shapes that a column of integers or numbers reads."""
    return INTEGERS[column.thousands] if column.type == "integer" else NUMBERS[column.decimal, column.thousands]


def reads_shape(column: ColumnContract, shape: str) -> bool:
    """Tell whether a column's contract reads values of a shape."""
    if column.type in ("integer", "number"):
        return shape in list_number_shapes(column)
    if column.type in ("text", "any"):
        return True
    return column.format in formats_of(shape) if column.type in TIMES else column.type == shape


_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"})
_DEFAULTS = {name: field.default for name, field in ColumnContract.model_fields.items()}
_SHAPES_SHOWN = 5
_SHAPE_NAMES = {
    "integer": "integers", "sign": "integers with a sign", "zeros": "digits that begin with 0", "point": "decimals",
    "point_group": "decimals", "exponent": "numbers with an exponent", "comma_group": "numbers such as 1,234",
    "comma_groups": "numbers with commas between thousands", "commas_point": "numbers with commas and a point",
    "comma": "decimals with a comma", "point_groups": "numbers with points between thousands",
    "points_comma": "numbers with points and a comma", "boolean": "booleans", "blank": "blanks", "text": "texts",
    "decimal": "decimals", "string": "texts", "container": "lists or objects",
}  # fmt: skip


def format_contract_yaml(
    contract: TableContract,
    evidence: TableEvidence,
    *,
    title: str,
    place_of: Callable[[CellLocation], str],
    shows_cells: bool = True,
) -> str:
    """Return a contract as YAML; without `shows_cells` it contains no values of the data, for private data."""

    def example_of(tally: ShapeTally) -> str:
        if not shows_cells or not tally.examples:
            return ""
        text, place = tally.examples[0]
        return f", such as {text[:40]!r} ({place_of(place)})"

    lines = [
        f"# Table contract of {title}: what its columns are, and what later data is checked against.",
        f"# Proposed from {evidence.records:,} records. Edit it; a build follows this file, not the data.",
    ]
    for name in ("delimiter", "quote", "group", "order"):
        value = getattr(contract, name)
        if value is not None:
            lines.append(f"{name}: {json.dumps(value, ensure_ascii=False)}")
    lines.append("columns:")
    for name, column in contract.columns.items():
        seen = evidence.columns.get(name)
        said = ["in no record"] if seen is None else _describe_evidence(column, seen, evidence.records, example_of)
        lines += [f"  # {line}" for line in said]
        is_plain = _PLAIN_KEY.fullmatch(name) and name.lower() not in _RESERVED
        key = name if is_plain else json.dumps(name, ensure_ascii=not name.isprintable())
        options = [
            f"{option}: {given if option == 'type' else json.dumps(given, ensure_ascii=False)}"
            for option, given in column.model_dump(mode="json").items()
            if option == "type" or given != (list(_DEFAULTS[option]) if option == "na" else _DEFAULTS[option])
        ]
        lines.append(f"  {key}: {{{', '.join(options)}}}")
    return "\n".join(lines) + "\n"


def _describe_evidence(
    column: ColumnContract, seen: ColumnEvidence, records: int, example_of: Callable[[ShapeTally], str]
) -> Iterator[str]:
    absent = records - seen.present
    counts = [
        f"{seen.values:,} values",
        *([f"{seen.nulls:,} empty"] if seen.nulls else []),
        *([f"{absent:,} records without it"] if absent else []),
    ]
    tallies = seen.cells or seen.times or seen.kinds
    most = sorted(tallies.items(), key=lambda one: -one[1].count)
    shapes = [f"{tally.count:,} {_describe_shape(shape)}" for shape, tally in most[:_SHAPES_SHOWN]]
    more = [f"{len(most) - _SHAPES_SHOWN} more formats"] if len(most) > _SHAPES_SHOWN else []
    yield f"{', '.join(counts)}: {', '.join([*shapes, *more])}" if shapes else ", ".join(counts)
    # What a user's strptime format reads is known only by trying it.
    is_known = column.format is None or column.format in {order.name for order in CANDIDATES}
    for shape, tally in most if is_known else ():
        if column.type != "text" and not reads_shape(column, shape) and not is_absent_shape(shape):
            yield f"{tally.count:,} do not fit{example_of(tally)}"
    if column.type != "text":
        return
    # Why a column that looks like numbers or dates is text.
    values = sum(tally.count for shape, tally in tallies.items() if not is_absent_shape(shape))
    texts = tallies.get("text")
    if "zeros" in tallies:
        yield f"text, because digits that begin with 0 are codes{example_of(tallies['zeros'])}"
    elif texts is not None and 0 < texts.count <= values // 10:
        yield f"text, because of {texts.count:,} values{example_of(texts)}"
    elif texts is None and "comma_group" in tallies:
        yield "text, because 1,234 may be over a thousand or a fraction: write type: number and decimal or thousands"
    elif texts is None and any(is_ambiguous_shape(shape) for shape in tallies):
        shape = next(shape for shape in tallies if is_ambiguous_shape(shape))
        yield f"text, because {' and '.join(formats_of(shape))} disagree on it: write type: date and the format"


def _describe_shape(shape: str) -> str:
    if shape.startswith(("na:", "mark:")):
        return f"{shape.partition(':')[2]!r}"
    if shape.startswith("when:"):
        return f"{shape.split(':')[1]}s as {' or '.join(formats_of(shape))}"
    return _SHAPE_NAMES.get(shape, shape.replace("_", " "))
