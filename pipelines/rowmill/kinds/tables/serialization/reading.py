"""Decoding of records: whether a JSON object fits the schema, and its typed values."""

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

from rowmill.core.json import Json
from rowmill.kinds.tables.schema import MAX_DIGITS, Column, Record, RecordSchema, Value
from rowmill.kinds.tables.serialization.writing import Wire
from rowmill.kinds.tables.time_order import CANONICAL, canonical_datetime, canonical_duration

_ABSENT = object()


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


class _DecimalCache(dict[str, Decimal]):
    """One `Decimal` object per text."""

    def __missing__(self, text: str) -> Decimal:
        found = self[text] = Decimal(text)
        return found


def make_exact_decoder() -> Callable[[str], Json]:
    """Return a decoder of records of a source, like `read_json`, that shares one object among equal decimals."""
    decoder = json.JSONDecoder(parse_float=_DecimalCache().__getitem__, parse_constant=_refuse_constant)

    def decode(text: str) -> Json:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError, InvalidOperation):
            return read_json(text, allows_nan=True)
        # Blanks or text follow the value.
        return value if end == len(text) else read_json(text, allows_nan=True)

    return decode


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_EXACT = json.JSONDecoder(parse_float=Decimal, parse_constant=_refuse_constant)
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
            return _as_list(column.item, wire)
        case "struct":
            return _as_struct(column, wire)
        case "integer" | "float" | "decimal" | "boolean" | "string" | "duration" | "bytes" | "json":
            return _SCALARS[column.type]


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


def _as_boolean(value: Json) -> bool:
    if type(value) is bool:
        return value
    raise _MistypedError


def _as_string(value: Json) -> str:
    if type(value) is str:
        return value
    raise _MistypedError


def _as_duration(value: Json) -> Decimal:
    number = _as_decimal(value)
    if abs(number.adjusted()) > MAX_DIGITS:
        raise _TooLargeError
    return canonical_duration(number)


def _as_milliseconds(value: Json) -> Decimal:
    return canonical_duration(_as_duration(value).scaleb(-3))


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


_SCALARS: dict[str, Callable[[Json], Value]] = {
    "integer": _as_integer,
    "float": _as_float,
    "decimal": _as_decimal,
    "boolean": _as_boolean,
    "string": _as_string,
    "duration": _as_duration,
    "bytes": _as_bytes,
    "json": lambda value: value,
}
_FROM_MILLISECONDS: dict[str, Callable[[Json], Value]] = {
    "datetime": lambda value: _from_epoch(value, only_date=False),
    "date": lambda value: _from_epoch(value, only_date=True),
    "duration": _as_milliseconds,
}


def _as_list(item: Column, wire: Wire) -> Callable[[Json], list[Value]]:
    convert = _make_converter(item, wire)

    def convert_list(value: Json) -> list[Value]:
        if type(value) is not list:
            raise _MistypedError
        return [_require_nullable(item) if one is None else convert(one) for one in value]

    return convert_list


def _as_struct(column: Column, wire: Wire) -> Callable[[Json], Record]:
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


def _require_nullable(column: Column) -> None:
    if not column.nullable:
        raise _MistypedError
