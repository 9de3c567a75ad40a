r"""Serialization of a record as a line of text."""

import base64
import math
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any, Literal

from rowmill.kinds.tables.schema import MAX_DEPTH, MAX_DIGITS, Column, RecordSchema, Value
from rowmill.kinds.tables.time_order import CANONICAL, canonical_duration
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
    return _get_serialiser(schema, special_tokens, wire)(record)


@lru_cache(maxsize=16)
def _get_serialiser(schema: RecordSchema, special_tokens: tuple[str, ...], wire: Wire) -> Serialiser:
    return Serialiser(schema, special_tokens=special_tokens, wire=wire)


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
            return _SCALARS[column.type]


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


def _write_float(value: Value) -> str:
    if type(value) is not float:
        raise _UnwritableError(f"a {type(value).__name__}, not a float")
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


def _write_boolean(value: Value) -> str:
    if type(value) is not bool:
        raise _UnwritableError(f"a {type(value).__name__}, not a bool")
    return "true" if value else "false"


def _write_duration(value: Value) -> str:
    if type(value) is not Decimal or not value.is_finite() or value.as_tuple() != canonical_duration(value).as_tuple():
        raise _UnwritableError(f"{value!r:.60} is no Decimal of seconds without trailing zeros")
    return format(value, "f")


def _write_bytes(value: Value) -> str:
    if type(value) is not bytes:
        raise _UnwritableError(f"a {type(value).__name__}, not bytes")
    return f'"{base64.b64encode(value).decode()}"'


_SCALARS: dict[str, Callable[[Value], str]] = {
    "integer": _write_integer,
    "float": _write_float,
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
