r"""Records as lines of text and back: the form that a model is trained on and generates.

    {"id": 7, "paid": Decimal("42.50")}  ──Serialiser──►  {"id":7,"paid":42.50}\n
                                         ◄──RecordDecoder── read_json

Decoding a serialized record returns an equal record, types included, for every record that the lossless format accepts.
A record that it does not accept is `Rejected`, never altered. The reference format prints as pandas' `to_json` with ten
decimals does, and loses what that loses.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from json.encoder import encode_basestring
from typing import Any, Literal, NamedTuple

from rowmill.core.config import Config
from rowmill.core.json import Json
from rowmill.kinds.tables.schema import (
    CANONICAL,
    MAX_DEPTH,
    MAX_DIGITS,
    Column,
    Record,
    RecordSchema,
    Value,
    canonical_datetime,
    canonical_duration,
)
from rowmill.schema.rows import Rejected

Wire = Literal["lossless", "reference"]

_ABSENT = object()
_INTEGER_LIMIT = 10**MAX_DIGITS
_MAX_PLAIN_SCALE = 400
"""Maximum digits after the point of a zero written without an exponent."""
_MIN_PLAIN_EXPONENT = -4
"""A number below 0.0001 is written with an exponent, as floats are everywhere."""
_LONG_EXPONENT = re.compile(r"e([+-]?)0*(?=\d)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class _UnwritableError(Exception):
    """A value that cannot be written as its column's type."""


class Serialiser:
    """Writes records of one schema; everything that depends on the schema is compiled once.

    `special_tokens` are the texts that the tokenizer reads as single control tokens (all its special tokens and the
    delimiters). With `wire="reference"` a record that contains one is rejected.
    """

    def __init__(self, schema: RecordSchema, *, special_tokens: Iterable[str], wire: Wire = "lossless") -> None:
        self._schema = schema
        self._wire = wire
        starts = sorted((text for text in special_tokens if text), key=len, reverse=True)
        alternatives = "|".join(map(re.escape, starts))
        self._special = re.compile(alternatives) if starts else None
        # A look-ahead finds overlapping occurrences, each of which must be escaped.
        self._special_start = re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL) if starts else None
        self._plain = self._make_column_writers(encode_basestring)
        self._guarded = self._make_column_writers(self._write_guarded_string)

    def __call__(self, record: Mapping[str, Value]) -> str | Rejected:
        """Return the record's line with its line end, or why the record is rejected."""
        line = self._write_line(record, self._plain)
        if isinstance(line, Rejected):
            return line
        # `<\\/s>` in the reference format is not a delimiter, but the format does not promise to keep it apart from
        # one.
        seen = line.replace("\\/", "/") if self._wire == "reference" else line
        special = self._special is not None and self._special.search(seen) is not None
        if not special and (line.isascii() or _SURROGATE.search(line) is None):
            return line
        if self._wire == "lossless":
            line = self._write_line(record, self._guarded)
            if isinstance(line, Rejected) or self._special is None or self._special.search(line) is None:
                return line
        elif not special:
            return Rejected("unserialisable", "a lone surrogate has no text in the reference form")
        return Rejected("control_token_in_content", "special-token text stands where it cannot be escaped")

    def _make_column_writers(
        self, write_string: Callable[[str], str]
    ) -> list[tuple[Column, str, Callable[[Value], str]]]:
        written = write_string if self._wire == "lossless" else lambda text: write_string(text).replace("/", "\\/")
        return [
            (column, f"{written(column.name)}:", _make_writer(column, self._wire, written, 2))
            for column in self._schema.columns
        ]

    def _write_line(
        self, record: Mapping[str, Value], columns: list[tuple[Column, str, Callable[[Value], str]]]
    ) -> str | Rejected:
        parts: list[str] = []
        column = None
        try:
            for column, prefix, write in columns:
                value = record.get(column.name, _ABSENT)
                if value is None:
                    if not column.nullable:
                        return Rejected("unserialisable", f"{column.name}: null, and the schema allows none")
                    parts.append(prefix + "null")
                elif value is not _ABSENT:
                    parts.append(prefix + write(value))
                elif column.required:
                    return Rejected("unserialisable", f"{column.name}: absent, and the schema requires it")
        except _UnwritableError as error:
            assert column is not None
            return Rejected("unserialisable", f"{column.name}: {error}")
        if len(parts) != len(record):
            return Rejected("unserialisable", "a key that is not in the schema")
        return f"{{{','.join(parts)}}}\n"

    def _write_guarded_string(self, text: str) -> str:
        if _SURROGATE_PAIR.search(text) is not None:
            raise _UnwritableError("two lone surrogates in a row, which JSON reads as one character")
        pieces: list[str] = []
        done = 0
        for match in () if self._special_start is None else self._special_start.finditer(text):
            pieces += [encode_basestring(text[done : match.start()])[1:-1], _escape_character(match[1])]
            done = match.end()
        written = f'"{"".join(pieces)}{encode_basestring(text[done:])[1:]}'
        return _SURROGATE.sub(lambda found: _escape_character(found[0]), written)


def _escape_character(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


def _make_writer(column: Column, wire: Wire, write_string: Callable[[str], str], depth: int) -> Callable[[Value], str]:
    """Return the writer of a column's values other than null; `depth` is the nesting depth of its containers."""
    kind = column.type
    if kind in ("list", "struct"):
        return _make_nested_writer(column, wire, write_string, depth)
    if kind == "json":
        return lambda value: _write_json_value(value, wire, write_string, depth)
    if kind == "string":
        return _make_typed_writer(str, write_string)
    # A pandas column of integers with nulls is one of floats.
    if wire == "reference" and kind in _LOSSY and (kind != "integer" or column.nullable):
        return _LOSSY[kind]
    canonical = CANONICAL.get(kind)
    if canonical is None:
        return _WRITERS[kind]

    def write_canonical(value: Value) -> str:
        if type(value) is not str or canonical(value) != value:
            raise _UnwritableError(f"{value!r:.60} is no canonical ISO 8601 text")
        return f'"{value}"'

    return write_canonical


def _make_typed_writer(kind: type, write: Callable[[Any], str], noun: str = "") -> Callable[[Value], str]:
    def checked(value: Value) -> str:
        if type(value) is not kind:
            raise _UnwritableError(f"a {type(value).__name__}, not {noun or f'a {kind.__name__}'}")
        return write(value)

    return checked


_write_boolean = _make_typed_writer(bool, lambda value: "true" if value else "false")
_write_bytes = _make_typed_writer(bytes, lambda value: f'"{base64.b64encode(value).decode()}"', "bytes")


def _write_integer(value: Value) -> str:
    if type(value) is not int:
        raise _UnwritableError(f"a {type(value).__name__}, not an int")
    if not -_INTEGER_LIMIT < value < _INTEGER_LIMIT:
        raise _UnwritableError(f"an integer of more than {MAX_DIGITS} digits")
    return str(value)


def _write_float(value: float) -> str:
    if math.isfinite(value):
        return _LONG_EXPONENT.sub(lambda sign: f"e{sign[1].rstrip('+')}", repr(value))
    return '"NaN"' if value != value else '"Infinity"' if value > 0 else '"-Infinity"'  # noqa: PLR0124  (NaN)


def write_decimal(value: Value) -> str:
    """Return a finite decimal as JSON, digits and scale kept: `1.50`, `0.00025`, `2.2e-16`, `1e21`."""
    if type(value) is not Decimal or not value.is_finite():
        raise _UnwritableError(f"{value!r:.60} is no finite Decimal")
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int)
    is_short = exponent >= -_MAX_PLAIN_SCALE if not value else value.adjusted() >= _MIN_PLAIN_EXPONENT
    if exponent > 0 or not is_short:
        return format(value, "e").replace("e+", "e")
    # A whole number is read back as an integer, which has no negative zero.
    return "-0e0" if not value and not exponent and value.is_signed() else format(value, "f")


def _write_duration(value: Value) -> str:
    if type(value) is not Decimal or not value.is_finite() or value.as_tuple() != canonical_duration(value).as_tuple():
        raise _UnwritableError(f"{value!r:.60} is no Decimal of seconds without trailing zeros")
    return format(value, "f")


_WRITERS: dict[str, Callable[[Value], str]] = {
    "integer": _write_integer,
    "float": _make_typed_writer(float, _write_float),
    "decimal": write_decimal,
    "boolean": _write_boolean,
    "duration": _write_duration,
    "bytes": _write_bytes,
}


def _make_nested_writer(
    column: Column, wire: Wire, write_string: Callable[[str], str], depth: int
) -> Callable[[Value], str]:
    if depth > MAX_DEPTH:
        return _refuse_depth
    if column.item is not None:
        item, write = column.item, _make_writer(column.item, wire, write_string, depth + 1)
        return _make_typed_writer(list, lambda items: f"[{','.join([_write_or_null(i, item, write) for i in items])}]")
    fields = [
        (one, f"{write_string(one.name)}:", _make_writer(one, wire, write_string, depth + 1)) for one in column.fields
    ]

    def write_struct(value: Record) -> str:
        parts: list[str] = []
        for field, prefix, write in fields:
            if field.name in value:
                parts.append(prefix + _write_or_null(value[field.name], field, write))
            elif field.required:
                raise _UnwritableError(f"{field.name} is absent, and the schema requires it")
        if len(parts) != len(value):
            raise _UnwritableError("a key that is not in the schema")
        return f"{{{','.join(parts)}}}"

    return _make_typed_writer(dict, write_struct)


def _write_or_null(value: Value, column: Column, write: Callable[[Value], str]) -> str:
    if value is not None:
        return write(value)
    if not column.nullable:
        raise _UnwritableError(f"{column.name}: null, and the schema allows none")
    return "null"


def _refuse_depth(value: Value) -> str:
    raise _UnwritableError(f"nested over {MAX_DEPTH} deep")


def _write_json_value(value: Value, wire: Wire, write_string: Callable[[str], str], depth: int) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return _write_boolean(value)
        case int():
            return _write_integer(value)
        case Decimal() if wire == "reference":
            return _format_ten_decimals(float(value))
        case Decimal():
            # Without a point or an exponent it would be read back as an integer.
            text = write_decimal(value)
            return text if "." in text or "e" in text else f"{text}e0"
        case str():
            return write_string(value)
        case _ if depth > MAX_DEPTH:
            return _refuse_depth(value)
        case list():
            return f"[{','.join([_write_json_value(item, wire, write_string, depth + 1) for item in value])}]"
        case dict():
            members: list[str] = []
            for key, member in value.items():
                if type(key) is not str:
                    raise _UnwritableError(f"a key that is a {type(key).__name__}, not a str")
                members.append(f"{write_string(key)}:{_write_json_value(member, wire, write_string, depth + 1)}")
            return f"{{{','.join(members)}}}"
        case _:
            raise _UnwritableError(f"a {type(value).__name__} is no value of JSON")


def _format_ten_decimals(value: float) -> str:
    if value == 0:
        return "0.0"
    if not 1e-15 <= abs(value) <= 1e16:
        return f"{value:.10g}"
    text = f"{value:.10f}".rstrip("0")
    return f"{text}0" if text.endswith(".") else text


def _write_epoch_ms(value: Value) -> str:
    moment = datetime.fromisoformat(value)
    return str(int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000))


_LOSSY: dict[str, Callable[[Value], str]] = {
    "integer": lambda value: _format_ten_decimals(float(_write_integer(value))),
    "float": lambda value: _format_ten_decimals(value) if math.isfinite(value) else "null",
    "decimal": lambda value: _format_ten_decimals(float(write_decimal(value))),
    "datetime": _write_epoch_ms,
    "date": _write_epoch_ms,
    "duration": lambda value: str(int(value * 1000)),
    "bytes": lambda value: _write_bytes(value).replace("/", "\\/"),
}
"""Writers of the reference format, which prints as pandas' `to_json(double_precision=10, force_ascii=False)` does."""


class RecordProblem(NamedTuple):
    """Why an object does not fit the schema: a reason of the closed list, and the column."""

    reason: str
    column: str


_PRECEDENCE = ("number_too_large", "unknown_column", "missing_column", "null", "type")
"""Reasons why an object does not fit the schema; of several problems the first reason is reported."""


class _UnreadableError(Exception):
    """A decoded value that does not fit its column's type, or a number outside the range of it."""

    def __init__(self, reason: str = "type") -> None:
        super().__init__()
        self.reason = reason


class RecordDecoder:
    """Converts decoded objects to records of one schema; everything that depends on the schema is compiled once.

    It takes what `read_json` returns: numbers are `int` or `Decimal`. Integer columns accept `1.0` as 1, float columns
    accept `18`; a boolean is not a number.
    """

    def __init__(self, schema: RecordSchema, *, wire: Wire = "lossless") -> None:
        self._names = frozenset(schema.names)
        self._columns = [(column, _make_converter(column, wire)) for column in schema.columns]
        self._convert = _make_struct_converter(self._columns)

    def __call__(self, decoded: dict[str, Json]) -> Record | RecordProblem:
        """Return the record, keys in schema order, or the first problem in the order of the reasons."""
        try:
            return self._convert(decoded)
        except _UnreadableError:
            return self._find_problem(decoded)

    def _find_problem(self, decoded: dict[str, Json]) -> RecordProblem:
        """Return the problem whose reason is first in the list, of equal reasons the first column's."""
        problems = [RecordProblem("unknown_column", name) for name in decoded if name not in self._names]
        for column, convert in self._columns:
            value, reason = decoded.get(column.name, _ABSENT), ""
            try:
                if value is _ABSENT:
                    reason = "missing_column" if column.required else ""
                elif value is None:
                    reason = "" if column.nullable else "null"
                else:
                    convert(value)
            except _UnreadableError as error:
                reason = error.reason
            if reason:
                problems.append(RecordProblem(reason, column.name))
        return min(problems, key=lambda problem: _PRECEDENCE.index(problem.reason))


def read_json(text: str, *, allows_nan: bool = False) -> Json:
    """Decode JSON text exactly: numbers with `.` or `e` as `Decimal`, others as `int`; the last of equal keys counts.

    With `allows_nan`, NaN and infinity are null, as sources read them.

    Raises
    ------
    ValueError
        If it is not JSON, is nested too deeply, or contains a number too large to be read.

    """
    try:
        return (_WITH_NAN if allows_nan else _EXACT).decode(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except InvalidOperation:
        raise ValueError("a number with an exponent beyond what can be read") from None


def refuse_constant(name: str) -> None:
    """Refuse NaN and infinity, which Python's decoder accepts."""
    raise ValueError(f"{name} is no JSON")


_EXACT = json.JSONDecoder(parse_float=Decimal, parse_constant=refuse_constant)
_WITH_NAN = json.JSONDecoder(parse_float=Decimal, parse_constant=lambda _: None)


def _make_converter(column: Column, wire: Wire) -> Callable[[Json], Value]:
    """Return the converter of a column's decoded values other than null to typed values."""
    if wire == "reference" and column.type in _FROM_MILLISECONDS:
        return _FROM_MILLISECONDS[column.type]
    if column.type == "struct":
        return _make_struct_converter([(field, _make_converter(field, wire)) for field in column.fields])
    if column.item is not None:
        item, convert_item = column.item, _make_converter(column.item, wire)

        def convert_list(value: Json) -> list[Value]:
            if type(value) is not list:
                raise _UnreadableError
            return [_require_nullable(item) if one is None else convert_item(one) for one in value]

        return convert_list
    canonical = CANONICAL.get(column.type)
    if canonical is None:
        return _READERS[column.type]

    def convert_temporal(value: Json) -> str:
        found = canonical(value) if type(value) is str else None
        if found is None:
            raise _UnreadableError
        return found

    return convert_temporal


def _make_struct_converter(columns: Iterable[tuple[Column, Callable[[Json], Value]]]) -> Callable[[Json], Record]:
    """Return the converter of objects with some columns, such as a whole record."""
    members = [(column.name, column.nullable, column.required, convert) for column, convert in columns]

    def convert_struct(decoded: Json) -> Record:
        if type(decoded) is not dict:
            raise _UnreadableError
        record: Record = {}
        for name, nullable, required, convert in members:
            value = decoded.get(name, _ABSENT)
            if value is None:
                if not nullable:
                    raise _UnreadableError
                record[name] = None
            elif value is not _ABSENT:
                record[name] = convert(value)
            elif required:
                raise _UnreadableError
        if len(record) != len(decoded):
            raise _UnreadableError
        return record

    return convert_struct


def _as_integer(value: Json) -> int:
    if type(value) is int:
        return value
    if type(value) is not Decimal:
        raise _UnreadableError
    if value.adjusted() >= MAX_DIGITS:
        raise _UnreadableError("number_too_large")
    if value != value.to_integral_value():
        raise _UnreadableError
    return int(value)


def _as_float(value: Json) -> float:
    if type(value) is Decimal or type(value) is int:
        try:
            number = float(value)
        except OverflowError:
            raise _UnreadableError("number_too_large") from None
        if math.isinf(number):
            raise _UnreadableError("number_too_large")
        return number
    if type(value) is str and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    raise _UnreadableError


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _as_decimal(value: Json) -> Decimal:
    if type(value) is Decimal:
        return value
    if type(value) is int:
        return Decimal(value)
    raise _UnreadableError


def _make_typed_reader(kind: type) -> Callable[[Json], Value]:
    def read(value: Json) -> Value:
        if type(value) is not kind:
            raise _UnreadableError
        return value

    return read


def _as_duration(value: Json) -> Decimal:
    number = _as_decimal(value)
    if abs(number.adjusted()) > MAX_DIGITS:
        raise _UnreadableError("number_too_large")
    return canonical_duration(number)


def _from_epoch(value: Json, *, only_date: bool) -> str:
    try:
        moment = datetime.fromtimestamp(_as_integer(value) / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        raise _UnreadableError("number_too_large") from None
    found = canonical_datetime(moment.isoformat())
    assert found is not None
    return found[:10] if only_date else found.removesuffix("+00:00")


def _as_bytes(value: Json) -> bytes:
    if type(value) is not str:
        raise _UnreadableError
    try:
        return base64.b64decode(value.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise _UnreadableError from None


_READERS: dict[str, Callable[[Json], Value]] = {
    "integer": _as_integer,
    "float": _as_float,
    "decimal": _as_decimal,
    "boolean": _make_typed_reader(bool),
    "string": _make_typed_reader(str),
    "duration": _as_duration,
    "bytes": _as_bytes,
    "json": lambda value: value,
}
_FROM_MILLISECONDS: dict[str, Callable[[Json], Value]] = {
    "datetime": lambda value: _from_epoch(value, only_date=False),
    "date": lambda value: _from_epoch(value, only_date=True),
    "duration": lambda value: canonical_duration(_as_duration(value).scaleb(-3)),
}


def _require_nullable(column: Column) -> None:
    if not column.nullable:
        raise _UnreadableError


class Codec(Config):
    """How a record is written as text."""

    wire: Wire = "lossless"
    """`lossless` reads back exactly; `reference` prints floats to 10 decimals and dates as epoch milliseconds."""
