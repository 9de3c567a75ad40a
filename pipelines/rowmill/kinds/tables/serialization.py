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
from functools import lru_cache
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
        make = _make_lossless_writer if self._wire == "lossless" else _make_reference_writer
        write_name = write_string if self._wire == "lossless" else lambda name: write_string(name).replace("/", "\\/")
        return [
            (column, f"{write_name(column.name)}:", make(column, write_string, 2)) for column in self._schema.columns
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


def serialise_record(
    record: Mapping[str, Value], schema: RecordSchema, *, special_tokens: tuple[str, ...] = (), wire: Wire = "lossless"
) -> str | Rejected:
    """Return the line of one record; for many records, reuse a `Serialiser`."""
    return _open_serialiser(schema, special_tokens=special_tokens, wire=wire)(record)


_open_serialiser = lru_cache(maxsize=16)(Serialiser)


def _escape_character(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


def _make_lossless_writer(column: Column, write_string: Callable[[str], str], depth: int) -> Callable[[Value], str]:
    """Return the writer of a column's values other than null; `depth` is the nesting depth of its containers."""
    match column.type:
        case "string":
            return _make_typed_writer(str, write_string)
        case "datetime" | "date" | "time":
            canonical = CANONICAL[column.type]

            def write_canonical(value: Value) -> str:
                if type(value) is not str or canonical(value) != value:
                    raise _UnwritableError(f"{value!r:.60} is no canonical ISO 8601 text")
                return f'"{value}"'

            return write_canonical
        case "list" | "struct":
            return _make_nested_writer(column, write_string, depth, _make_lossless_writer)
        case "json":
            return lambda value: _write_json_value(value, write_string, depth)
        case "integer" | "float" | "decimal" | "boolean" | "duration" | "bytes":
            return _WRITERS[column.type]


def _make_typed_writer(kind: type, write: Callable[[Any], str]) -> Callable[[Value], str]:
    def checked(value: Value) -> str:
        if type(value) is not kind:
            raise _UnwritableError(f"a {type(value).__name__}, not a {kind.__name__}")
        return write(value)

    return checked


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


_write_boolean = _make_typed_writer(bool, lambda value: "true" if value else "false")


def _write_duration(value: Value) -> str:
    if type(value) is not Decimal or not value.is_finite() or value.as_tuple() != canonical_duration(value).as_tuple():
        raise _UnwritableError(f"{value!r:.60} is no Decimal of seconds without trailing zeros")
    return format(value, "f")


def _write_bytes(value: Value) -> str:
    if type(value) is not bytes:
        raise _UnwritableError(f"a {type(value).__name__}, not bytes")
    return f'"{base64.b64encode(value).decode()}"'


_WRITERS: dict[str, Callable[[Value], str]] = {
    "integer": _write_integer,
    "float": _make_typed_writer(float, _write_float),
    "decimal": write_decimal,
    "boolean": _write_boolean,
    "duration": _write_duration,
    "bytes": _write_bytes,
}


def _make_nested_writer(
    column: Column, write_string: Callable[[str], str], depth: int, make: Callable[..., Callable[[Value], str]]
) -> Callable[[Value], str]:
    if depth > MAX_DEPTH:
        return _refuse_depth
    if column.item is not None:
        item, write = column.item, make(column.item, write_string, depth + 1)

        def write_list(value: Value) -> str:
            if type(value) is not list:
                raise _UnwritableError(f"a {type(value).__name__}, not a list")
            return f"[{','.join([_write_or_null(one, item, write) for one in value])}]"

        return write_list
    fields = [(one, f"{write_string(one.name)}:", make(one, write_string, depth + 1)) for one in column.fields]

    def write_struct(value: Value) -> str:
        if type(value) is not dict:
            raise _UnwritableError(f"a {type(value).__name__}, not a dict")
        parts: list[str] = []
        for field, prefix, write in fields:
            if field.name in value:
                parts.append(prefix + _write_or_null(value[field.name], field, write))
            elif field.required:
                raise _UnwritableError(f"{field.name} is absent, and the schema requires it")
        if len(parts) != len(value):
            raise _UnwritableError("a key that is not in the schema")
        return f"{{{','.join(parts)}}}"

    return write_struct


def _write_or_null(value: Value, column: Column, write: Callable[[Value], str]) -> str:
    if value is not None:
        return write(value)
    if not column.nullable:
        raise _UnwritableError(f"{column.name}: null, and the schema allows none")
    return "null"


def _refuse_depth(value: Value) -> str:
    raise _UnwritableError(f"nested over {MAX_DEPTH} deep")


def _write_json_value(value: Value, write_string: Callable[[str], str], depth: int) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return _write_boolean(value)
        case int():
            return _write_integer(value)
        case Decimal():
            # Without a point or an exponent it would be read back as an integer.
            text = write_decimal(value)
            return text if "." in text or "e" in text else f"{text}e0"
        case str():
            return write_string(value)
        case _ if depth > MAX_DEPTH:
            return _refuse_depth(value)
        case list():
            return f"[{','.join([_write_json_value(item, write_string, depth + 1) for item in value])}]"
        case dict():
            members: list[str] = []
            for key, member in value.items():
                if type(key) is not str:
                    raise _UnwritableError(f"a key that is a {type(key).__name__}, not a str")
                members.append(f"{write_string(key)}:{_write_json_value(member, write_string, depth + 1)}")
            return f"{{{','.join(members)}}}"
        case _:
            raise _UnwritableError(f"a {type(value).__name__} is no value of JSON")


def _make_reference_writer(column: Column, write_string: Callable[[str], str], depth: int) -> Callable[[Value], str]:
    """Return the writer that prints as pandas' `to_json(double_precision=10, force_ascii=False)` does."""
    quoted: Callable[[str], str] = lambda text: write_string(text).replace("/", "\\/")  # noqa: E731
    match column.type:
        case "integer" if column.nullable:
            # A pandas column of integers with nulls is one of floats.
            return lambda value: _format_ten_decimals(float(_write_integer(value)))
        case "string":
            return _make_typed_writer(str, quoted)
        case "json":
            return lambda value: _write_reference_value(value, quoted, depth)
        case "list" | "struct":
            return _make_nested_writer(
                column, quoted, depth, lambda inner, _, deeper: _make_reference_writer(inner, write_string, deeper)
            )
        case "float" | "decimal" | "datetime" | "date" | "duration":
            return _LOSSY[column.type]
        case "integer" | "boolean" | "time" | "bytes":
            exact = _make_lossless_writer(column, write_string, depth)
            return lambda value: exact(value).replace("/", "\\/")


def _format_ten_decimals(value: float) -> str:
    if value == 0:
        return "0.0"
    if not 1e-15 <= abs(value) <= 1e16:
        return f"{value:.10g}"
    text = f"{value:.10f}".rstrip("0")
    return f"{text}0" if text.endswith(".") else text


def _write_reference_value(value: Value, quoted: Callable[[str], str], depth: int) -> str:
    if isinstance(value, Decimal):
        return _format_ten_decimals(float(value))
    if isinstance(value, (list, dict)) and depth > MAX_DEPTH:
        return _refuse_depth(value)
    if isinstance(value, list):
        return f"[{','.join([_write_reference_value(one, quoted, depth + 1) for one in value])}]"
    if isinstance(value, dict):
        pairs = [f"{quoted(str(key))}:{_write_reference_value(one, quoted, depth + 1)}" for key, one in value.items()]
        return f"{{{','.join(pairs)}}}"
    return _write_json_value(value, quoted, depth)


def _write_epoch_ms(value: Value) -> str:
    moment = datetime.fromisoformat(value)
    return str(int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000))


_LOSSY: dict[str, Callable[[Value], str]] = {
    "float": lambda value: _format_ten_decimals(value) if math.isfinite(value) else "null",
    "decimal": lambda value: _format_ten_decimals(float(write_decimal(value))),
    "datetime": _write_epoch_ms,
    "date": _write_epoch_ms,
    "duration": lambda value: str(int(value * 1000)),
}


class RecordProblem(NamedTuple):
    """Why an object does not fit the schema: a reason of the closed list, and the column."""

    reason: str
    column: str


class _MistypedError(Exception):
    """A decoded value that does not fit its column's type."""


class _TooLargeError(Exception):
    """A number outside the range of its column's type."""


class RecordDecoder:
    """Converts decoded objects to records of one schema; everything that depends on the schema is compiled once.

    It takes what `read_json` returns: numbers are `int` or `Decimal`. Integer columns accept `1.0` as 1, float columns
    accept `18`; a boolean is not a number.
    """

    def __init__(self, schema: RecordSchema, *, wire: Wire = "lossless") -> None:
        self._names = frozenset(schema.names)
        self._columns = [(column, _make_converter(column, wire)) for column in schema.columns]

    def __call__(self, decoded: Mapping[str, Json]) -> Record | RecordProblem:
        """Return the record, keys in schema order, or the first problem in the order of the reasons."""
        record: Record = {}
        try:
            for column, convert in self._columns:
                value = decoded.get(column.name, _ABSENT)
                if value is None:
                    if not column.nullable:
                        return self._find_problem(decoded)
                    record[column.name] = None
                elif value is not _ABSENT:
                    record[column.name] = convert(value)
                elif column.required:
                    return self._find_problem(decoded)
        except (_MistypedError, _TooLargeError):
            return self._find_problem(decoded)
        return record if len(record) == len(decoded) else self._find_problem(decoded)

    def _find_problem(self, decoded: Mapping[str, Json]) -> RecordProblem:
        """Return the problem whose reason is first in the list, of equal reasons the first column's."""
        null = mistyped = None
        for column, convert in self._columns:
            value = decoded.get(column.name, _ABSENT)
            if value is None:
                null = null or (None if column.nullable else RecordProblem("null", column.name))
                continue
            try:
                _ = value is _ABSENT or convert(value)
            except _TooLargeError:
                return RecordProblem("number_too_large", column.name)
            except _MistypedError:
                mistyped = mistyped or RecordProblem("type", column.name)
        for name in decoded:
            if name not in self._names:
                return RecordProblem("unknown_column", name)
        for column, _ in self._columns:
            if column.required and column.name not in decoded:
                return RecordProblem("missing_column", column.name)
        found = null or mistyped
        assert found is not None
        return found


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
    match column.type:
        case "datetime" | "date" | "duration" if wire == "reference":
            return _FROM_MILLISECONDS[column.type]
        case "datetime" | "date" | "time":
            canonical = CANONICAL[column.type]

            def convert_temporal(value: Json) -> str:
                found = canonical(value) if type(value) is str else None
                if found is None:
                    raise _MistypedError
                return found

            return convert_temporal
        case "list":
            assert column.item is not None
            item, convert_item = column.item, _make_converter(column.item, wire)

            def convert_list(value: Json) -> list[Value]:
                if type(value) is not list:
                    raise _MistypedError
                return [_require_nullable(item) if one is None else convert_item(one) for one in value]

            return convert_list
        case "struct":
            fields = [(field, _make_converter(field, wire)) for field in column.fields]

            def convert_struct(value: Json) -> Record:
                if type(value) is not dict:
                    raise _MistypedError
                record: Record = {}
                for field, convert in fields:
                    if field.name in value:
                        inner = value[field.name]
                        record[field.name] = _require_nullable(field) if inner is None else convert(inner)
                    elif field.required:
                        raise _MistypedError
                if len(record) != len(value):
                    raise _MistypedError
                return record

            return convert_struct
        case "integer" | "float" | "decimal" | "boolean" | "string" | "duration" | "bytes" | "json":
            return _READERS[column.type]


def _as_integer(value: Json) -> int:
    if type(value) is int:
        return value
    if type(value) is not Decimal:
        raise _MistypedError
    if value.adjusted() >= MAX_DIGITS:
        raise _TooLargeError
    if value != value.to_integral_value():
        raise _MistypedError
    return int(value)


def _as_float(value: Json) -> float:
    if type(value) is Decimal or type(value) is int:
        try:
            number = float(value)
        except OverflowError:
            raise _TooLargeError from None
        if math.isinf(number):
            raise _TooLargeError
        return number
    if type(value) is str and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    raise _MistypedError


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _as_decimal(value: Json) -> Decimal:
    if type(value) is Decimal:
        return value
    if type(value) is int:
        return Decimal(value)
    raise _MistypedError


def _make_typed_reader(kind: type) -> Callable[[Json], Value]:
    def read(value: Json) -> Value:
        if type(value) is not kind:
            raise _MistypedError
        return value

    return read


def _as_duration(value: Json) -> Decimal:
    number = _as_decimal(value)
    if abs(number.adjusted()) > MAX_DIGITS:
        raise _TooLargeError
    return canonical_duration(number)


def _from_epoch(value: Json, *, only_date: bool) -> str:
    try:
        moment = datetime.fromtimestamp(_as_integer(value) / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        raise _TooLargeError from None
    found = canonical_datetime(moment.isoformat())
    assert found is not None
    return found[:10] if only_date else found.removesuffix("+00:00")


def _as_bytes(value: Json) -> bytes:
    if type(value) is not str:
        raise _MistypedError
    try:
        return base64.b64decode(value.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise _MistypedError from None


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
        raise _MistypedError


class Codec(Config):
    """How a record is written as text."""

    wire: Wire = "lossless"
    """`lossless` reads back exactly; `reference` prints floats to 10 decimals and dates as epoch milliseconds."""
