"""The table contract: what a recipe may pin of a table's columns, and the cells that are read by it.

    parts ──observe──► evidence ──infer──► contract ──make_cell_writer──► typed cells
                                              ▲
                             the recipe's ────┘

A cell's text has a shape (integer, decimal with a point, a date of a known format, …), which is all that evidence and
contract know of it.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rowmill.core.config import Config
from rowmill.kinds.tables.schema import (
    MAX_DIGITS,
    Column,
    ColumnType,
    SortKey,
    list_fitting_candidates,
    zero_time_of_day,
)
from rowmill.kinds.tables.serialization import write_decimal

NON_FINITE_WORDS = frozenset("nan -nan inf +inf -inf infinity +infinity -infinity".split())
"""Words for what is no number of JSON, in any case."""
NA_WORDS = NON_FINITE_WORDS | frozenset(
    "na n/a #n/a #na <na> null none nil missing #value! #div/0! #null! #ref! #name? #num!".split()
)
"""Words for a missing value in a column of numbers, dates or booleans, in any case; in text they are text."""

_BOOLEANS = frozenset({"true", "false", "True", "False", "TRUE", "FALSE"})
LONGEST_NA_WORD = max(map(len, NA_WORDS))

_GROUPS = r"[+-]?[1-9][0-9]{0,2}"
_SHAPES = {
    "integer": rf"0|-?[1-9][0-9]{{0,{MAX_DIGITS - 1}}}",
    "sign": rf"\+(?:0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})|-0",
    "zeros": r"[+-]?0[0-9]+",
    "point_group": rf"{_GROUPS}\.[0-9]{{3}}",
    "point": r"[+-]?(?:(?:0|[1-9][0-9]{0,400})\.[0-9]{0,400}|\.[0-9]{1,400})",
    "exponent": r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})[eE][+-]?[0-9]{1,3}",
    "comma_group": rf"{_GROUPS},[0-9]{{3}}",
    "comma_groups": rf"{_GROUPS}(?:,[0-9]{{3}}){{2,}}",
    "commas_point": rf"{_GROUPS}(?:,[0-9]{{3}})+\.[0-9]{{0,400}}",
    "comma": r"[+-]?(?:(?:0|[1-9][0-9]{0,400}),[0-9]{0,400}|,[0-9]{1,400})",
    "point_groups": rf"{_GROUPS}(?:\.[0-9]{{3}}){{2,}}",
    "points_comma": rf"{_GROUPS}(?:\.[0-9]{{3}})+,[0-9]{{0,400}}",
    "spaces": rf"{_GROUPS}(?:[ \u00a0\u202f][0-9]{{3}})+",
    "spaces_point": rf"{_GROUPS}(?:[ \u00a0\u202f][0-9]{{3}})+\.[0-9]{{0,400}}",
    "spaces_comma": rf"{_GROUPS}(?:[ \u00a0\u202f][0-9]{{3}})+,[0-9]{{0,400}}",
    "quotes": rf"{_GROUPS}(?:'[0-9]{{3}})+",
    "quotes_point": rf"{_GROUPS}(?:'[0-9]{{3}})+\.[0-9]{{0,400}}",
    "boolean": "|".join(sorted(_BOOLEANS)),
    "mark": r"[-?.*_–—]{1,4}",
}
_SHAPE = re.compile("|".join(f"(?P<{name}>(?:{pattern})\\Z)" for name, pattern in _SHAPES.items()))
_MAY_BE_TIME = re.compile(r"(?=[^0-9]*[0-9])(?=[^ ./:-]*[ ./:-])[0-9A-Za-z ./:+-]{4,40}\Z", re.ASCII)

_WHOLE = frozenset({"integer", "sign"})
_PLAIN = _WHOLE | {"point", "point_group", "exponent"}
INTEGERS: dict[str, frozenset[str]] = {
    "": _WHOLE,
    ",": _WHOLE | {"comma_group", "comma_groups"},
    ".": _WHOLE | {"point_group", "point_groups"},
    " ": _WHOLE | {"spaces"},
    "'": _WHOLE | {"quotes"},
}
"""Shapes of integers by thousands separator."""
NUMBERS: dict[tuple[str, str], frozenset[str]] = {
    (".", ""): _PLAIN,
    (".", ","): _PLAIN | {"comma_group", "comma_groups", "commas_point"},
    (".", " "): _PLAIN | {"spaces", "spaces_point"},
    (".", "'"): _PLAIN | {"quotes", "quotes_point"},
    (",", ""): _WHOLE | {"comma", "comma_group"},
    (",", "."): _WHOLE | {"comma", "comma_group", "point_group", "point_groups", "points_comma"},
    (",", " "): _WHOLE | {"comma", "comma_group", "spaces", "spaces_comma"},
}
"""Shapes of numbers by decimal and thousands separator."""


def shape_of(text: str) -> str:
    """Return the shape of a nonempty text; surrounding blanks are ignored."""
    bare = text.strip(" \t")
    # Most texts begin with a letter, as only the boolean shape does.
    found = None if bare[:1].isalpha() and bare not in _BOOLEANS else _SHAPE.match(bare)
    if found is not None:
        kind = found.lastgroup
        assert kind is not None
        return f"mark:{bare}" if kind == "mark" else kind
    if not bare:
        return "blank"
    if len(bare) <= LONGEST_NA_WORD and bare.lower() in NA_WORDS:
        return f"na:{bare}"
    return time_shape_of(bare)


def time_shape_of(text: str) -> str:
    """Return the shape of a JSON string: a time or text, because JSON writes numbers without quotes."""
    # The times of day of a column are many more than its days.
    return _name_time_formats(zero_time_of_day(text)) if _MAY_BE_TIME.match(text) else "text"


@lru_cache(maxsize=1 << 14)
def _name_time_formats(text: str) -> str:
    """Return the formats that read a text: `when:date:%d/%m/%Y|%m/%d/%Y`, with `~` if they disagree."""
    read = [(order, order.read(text)) for order in list_fitting_candidates(text)]
    fitting = [(order, position) for order, position in read if position is not None]
    if not fitting:
        return "text"
    kind = "time" if fitting[0][0].is_time_of_day else "datetime" if ":" in text else "date"
    differ = "~" if any(position != fitting[0][1] for _, position in fitting) else ""
    return f"when:{kind}:{differ}{'|'.join(order.name for order, _ in fitting)}"


def formats_of(shape: str) -> tuple[str, ...]:
    """Return the formats that read texts of a shape; none for shapes other than times."""
    return tuple(shape.split(":", 2)[2].lstrip("~").split("|")) if shape.startswith("when:") else ()


def is_absent_shape(shape: str) -> bool:
    """Tell whether texts of a shape mean a missing value in columns other than text."""
    return shape == "blank" or shape.startswith(("na:", "mark:"))


def is_infinite(cell: str) -> bool:
    """Tell whether a cell is a word for an infinite number."""
    word = cell.strip(" \t").lower()
    return word in NON_FINITE_WORDS and "inf" in word


def is_ambiguous_shape(shape: str) -> bool:
    """Tell whether two formats disagree on texts of a shape."""
    return shape.startswith("when:") and ":~" in shape


CellType = Literal["integer", "number", "boolean", "date", "datetime", "time", "text", "any"]
TIMES = frozenset({"date", "datetime", "time"})
"""Types whose values are text read by a `format`."""
ISO8601 = "iso8601"


def _is_one_character(text: str) -> str:
    if len(text) != 1 or text in "\n\r":
        raise ValueError(f"must be one character, such as ';', but no line end; got {text!r}")
    return text


Texts = Annotated[tuple[str, ...], Field(strict=False)]
"""A list of texts; without this, pydantic accepts only a tuple inside a union of models."""
Delimiter = Annotated[str, AfterValidator(_is_one_character)]


class ColumnContract(Config):
    """Type and format of a column's values, and what happens to a value that does not fit."""

    type: CellType
    """`integer`, `number` (exact decimals), `boolean` (true, false), `date`, `datetime`, `time` (text that `format`
    reads, kept as written), `text`, or `any`: the type that the source or the JSON has."""
    format: str | None = None
    """Format of a date, datetime or time: `iso8601` or a strptime format; only for these types."""
    na: Texts = ()
    """Words that mean a missing value, in addition to the empty cell."""
    decimal: Literal[".", ","] = "."
    """Decimal separator of a number."""
    thousands: Literal["", ",", ".", " ", "'"] = ""
    """Thousands separator; empty: none."""
    required: bool = True
    """Whether every record has the column."""
    on_mismatch: Literal["reject", "na"] = "reject"
    """What happens to a value that does not fit: the record is rejected as `type_mismatch`, or it becomes null."""
    use: bool = True
    """Whether records contain this column."""

    @model_validator(mode="after")
    def _check_consistency(self) -> "ColumnContract":
        if (self.format is not None) != (self.type in TIMES):
            rule = "needs a format" if self.type in TIMES else "takes no format"
            raise ValueError(
                f"format: a column of type {self.type} {rule}; write for example type: date and format: iso8601"
            )
        if self.format is not None and self.format != ISO8601 and "%" not in self.format:
            raise ValueError(
                f"format: {self.format!r} is not a format; write iso8601 or a strptime format such as %d/%m/%Y"
            )
        if (self.decimal, self.thousands) not in NUMBERS and (self.type, self.thousands) != ("integer", "."):
            raise ValueError(
                f"decimal {self.decimal!r} and thousands {self.thousands!r} cannot be combined; they must differ, "
                "and an apostrophe needs a decimal point; write the separators of the data"
            )
        if (self.decimal, self.thousands) != (".", "") and self.type not in ("integer", "number"):
            raise ValueError(f"decimal and thousands: a column of type {self.type} has no separators; delete them")
        return self


class TableContract(Config):
    """Types and formats of a table; `rowmill advise --write` proposes one from the data."""

    delimiter: Delimiter | None = None
    """Delimiter of its CSV files; a file with another one fails `table_contract`. Null: not checked."""
    quote: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """Quote character of its CSV files; null: not checked."""
    group: Texts | None = None
    """The group columns that it was written for; a different `data.group_training_examples_by` is an error."""
    order: str | None = None
    """The order column that it was written for; a different `data.order_training_examples_by` is an error."""
    columns: dict[str, ColumnContract] = Field(min_length=1)
    """The columns by name, in the order in which records are written."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON value, for manifests."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "TableContract":
        """Read what `to_json` returned."""
        # Not strict, so that lists are accepted for tuples.
        return cls.model_validate(stored, strict=False)

    @property
    def used(self) -> dict[str, ColumnContract]:
        """The columns that records contain."""
        return {name: one for name, one in self.columns.items() if one.use}


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


def parse_declared_column(name: str, declared: str, *, nullable: bool, required: bool) -> Column:
    """Return the column of a declared Arrow type; `json` if the declaration does not determine it."""
    feature = _FEATURE.fullmatch(declared)
    declared = declared if feature is None else feature[1]
    for pattern, kind in _ARROW:
        if pattern.fullmatch(declared):
            return Column(name, kind, nullable=nullable, required=required)
    inner = _LIST.fullmatch(declared)
    if inner is not None:
        item = parse_declared_column("item", inner[1].removesuffix(" not null"), nullable=True, required=True)
        return Column(name, "list", nullable=nullable, required=required, item=item)
    fields = _split_struct_fields(declared)
    if fields is not None:
        # Arrow stores every field of a struct, absent ones as null.
        inner_columns = tuple(parse_declared_column(n, kind, nullable=True, required=True) for n, kind in fields)
        return Column(name, "struct", nullable=nullable, required=required, fields=inner_columns)
    return Column(name, "json", nullable=nullable, required=required)


_KINDS: dict[ColumnType, str] = {
    "integer": "numbers", "float": "numbers", "decimal": "numbers", "boolean": "booleans", "string": "text",
    "datetime": "times", "date": "times", "time": "times", "duration": "durations", "bytes": "bytes",
}  # fmt: skip


def name_declared_kind(declared: str) -> str:
    """Return the kind of values of a declared type: "numbers", "text", …; "" where it may be anything."""
    return _KINDS.get(parse_declared_column("column", declared, nullable=True, required=True).type, "")


def _split_struct_fields(declared: str) -> list[tuple[str, str]] | None:
    """Split `struct<a: int64, b: list<item: string>>` into its fields; None for any other text."""
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


NULL = "null"
_AS_JSON = re.compile(r"0|-?[1-9][0-9]{0,400}")
_AS_JSON_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,400}|(?!-?0\.0{4}[0-9]*[1-9])-?(?:0|[1-9][0-9]{0,400})\.[0-9]{1,400}")
"""Numbers that are their own JSON text; below 0.0001 they have an exponent."""
_AS_WRITTEN = "\0"
"""Returned by a reader for a text that fits and stays text."""
_JSON_BOOLEANS = {"true": "true", "false": "false"}


def make_cell_writer(column: ColumnContract) -> Callable[[str], str | None]:
    """Return a function from a cell to its JSON text: `null` without a value, None for a cell that does not fit."""
    absent = frozenset(("", *column.na))
    read = _make_cell_reader(column)
    otherwise = NULL if column.on_mismatch == "na" else None
    is_text = column.type in ("text", "any")

    def write(cell: str) -> str | None:
        if cell in absent:
            return NULL
        if is_text:
            return encode_basestring(cell)
        bare = cell.strip(" \t")
        if not bare or bare in absent:
            return NULL
        written = read(bare)
        # Times stay as written, surrounding blanks included.
        return otherwise if written is None else encode_basestring(cell) if written is _AS_WRITTEN else written

    return write


def _make_cell_reader(column: ColumnContract) -> Callable[[str], str | None]:
    match column.type:
        case "integer" | "number":
            return _make_number_reader(column)
        case "boolean":
            return lambda text: _JSON_BOOLEANS.get(text.lower()) if shape_of(text) == "boolean" else None
        case "date" | "datetime" | "time":
            assert column.format is not None
            order = SortKey(column.format)
            return lambda text: None if order.read(text) is None else _AS_WRITTEN
        case "text" | "any":
            return lambda _: _AS_WRITTEN


def _make_number_reader(column: ColumnContract) -> Callable[[str], str | None]:
    is_whole, is_plain = column.type == "integer", column.type == "integer" or column.decimal == "."
    as_json = _AS_JSON if is_whole else _AS_JSON_NUMBER
    shapes = INTEGERS[column.thousands] if is_whole else NUMBERS.get((column.decimal, column.thousands), frozenset())

    def read(text: str) -> str | None:
        # `1.234` is a fraction only if the point is the decimal separator.
        if is_plain and as_json.fullmatch(text):
            return text
        shape = shape_of(text)
        if shape not in shapes:
            return None
        bare = re.sub("[ \u00a0\u202f]", "", text) if column.thousands == " " else text.replace(column.thousands, "")
        # A sign is written as in a column of integers: decimals elsewhere in the column do not change it.
        if is_whole or shape == "sign":
            return str(int(bare))
        return write_decimal(Decimal(bare if is_plain else bare.replace(",", ".")))

    return read
