"""Conversion of a CSV cell by its column's contract: its JSON text, null or a mismatch, and its position in the order.

Every cell has one JSON text, the one that the lossless codec writes for its value; so a cell whose text is already JSON
never becomes a Python value.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from json.encoder import encode_basestring

from rowmill.core.json import Json
from rowmill.kinds.tables.serialization import write_decimal
from rowmill.kinds.tables.table_contract.contract import ColumnContract
from rowmill.kinds.tables.table_contract.value_shapes import INTEGERS, NUMBERS, shape_of
from rowmill.kinds.tables.time_order import Position, SortKey

NULL = "null"
_AS_JSON = re.compile(r"0|-?[1-9][0-9]{0,400}")
_AS_JSON_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,400}|(?!-?0\.0{4}[0-9]*[1-9])-?(?:0|[1-9][0-9]{0,400})\.[0-9]{1,400}")
"""Numbers that are their own JSON text; below 0.0001 they have an exponent."""
_AS_WRITTEN = "\0"
"""Returned by a reader for a text that fits and stays text."""
_BOOLEANS = {"true": "true", "false": "false"}


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
        case "integer":
            return _make_integer_reader(INTEGERS[column.thousands], column.thousands)
        case "number":
            return _make_number_reader(column)
        case "boolean":
            return lambda text: _BOOLEANS.get(text.lower()) if shape_of(text) == "boolean" else None
        case "date" | "datetime" | "time":
            assert column.format is not None
            order = SortKey(column.format)
            return lambda text: None if order.read(text) is None else _AS_WRITTEN
        case "text" | "any":
            return lambda _: _AS_WRITTEN


def _make_integer_reader(shapes: frozenset[str], thousands: str) -> Callable[[str], str | None]:
    def read(text: str) -> str | None:
        if _AS_JSON.fullmatch(text):
            return text
        return str(int(_remove_thousands(text, thousands))) if shape_of(text) in shapes else None

    return read


def _make_number_reader(column: ColumnContract) -> Callable[[str], str | None]:
    shapes = NUMBERS.get((column.decimal, column.thousands), frozenset())
    is_plain = column.decimal == "."

    def read(text: str) -> str | None:
        # `1.234` is a fraction only if the point is the decimal separator.
        if is_plain and _AS_JSON_NUMBER.fullmatch(text):
            return text
        shape = shape_of(text)
        if shape not in shapes:
            return None
        if shape == "sign":
            # Written as in a column of integers: decimals elsewhere in the column do not change it.
            return str(int(text))
        bare = _remove_thousands(text, column.thousands)
        return write_decimal(Decimal(bare if is_plain else bare.replace(",", ".")))

    return read


def _remove_thousands(text: str, thousands: str) -> str:
    if thousands == " ":
        return re.sub("[ \u00a0\u202f]", "", text)
    return text.replace(thousands, "") if thousands else text


def read_position(column: ColumnContract, order: SortKey, cell: str, written: str) -> Position | None:
    """Return a cell's position in the order: a number's by its value, a time's or text's by the cell itself."""
    if column.type in ("integer", "number"):
        value: Json = Decimal(written) if any(sign in written for sign in ".eE") else int(written)
        return order.read(value)
    return order.read(cell.strip(" \t") if column.type != "text" else cell)
