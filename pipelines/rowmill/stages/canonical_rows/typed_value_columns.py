"""Decoded JSON objects to typed records, column by column: the fast path, equal to `typed_values.py`."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import cached_property, partial
from itertools import repeat
from typing import Any, TypeVar, cast

import polars as pl

from rowmill.core.json import Json
from rowmill.formats.record_values import get_at_path
from rowmill.schema.rows import Rejected
from rowmill.stages.canonical_rows.typed_records import ColumnRoles, MismatchLog, TypedColumns, TypedRecord
from rowmill.stages.canonical_rows.typed_values import ValueRowBuilder
from rowmill.tabular.schema import Column, RecordSchema, Value
from rowmill.tabular.table_contract import TableContract
from rowmill.tabular.time_order import SortKey

ABSENT = object()
"""Placeholder in a column for records that lack it."""
_ResultT = TypeVar("_ResultT")
_TextT = TypeVar("_TextT", str, str | None)


class ColumnValues:
    """The values of one key of many records; `ABSENT` if a record lacks it."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    @cached_property
    def _identity_keys(self) -> Sequence[Any]:
        """Keys that are equal only for equal type and text, since 1 == True and 1.5 == 1.50."""
        types = set(map(type, self._values)) - {type(None), type(ABSENT)}
        return self._values if types in ({str}, {int}, {bool}) else list(map(id, self._values))

    @cached_property
    def _distinct_values(self) -> dict[Any, Any]:
        return dict(zip(self._identity_keys, self._values, strict=True))

    def map(self, make: Callable[[Any], _ResultT]) -> list[_ResultT]:
        """Apply a function to each value; it is called once for equal values."""
        made = {key: make(value) for key, value in self._distinct_values.items()}
        return [made[key] for key in self._identity_keys]


def split_columns(records: Sequence[Mapping[str, Json]]) -> dict[str, ColumnValues]:
    """Return the values of each key that some record has."""
    if not records:
        return {}
    first = records[0].keys()
    if all(record.keys() == first for record in records):
        return {name: ColumnValues([record[name] for record in records]) for name in first}
    names = dict.fromkeys(name for one in records for name in one)
    return {name: ColumnValues([record.get(name, ABSENT) for record in records]) for name in names}


_CACHED_TYPES = frozenset({str, int, bool})
_MAX_CACHED_CHARS = 64
_MAX_CACHED_VALUES = 1 << 16
"""Short values of a column that are cached across parts: a part of a small file has few rows."""
_NO_ROLES = ColumnRoles((), is_list=False, by_file=False, order=None, time_key=None, domain=None)


class ValueColumnBuilder:
    """Makes rows of decoded JSON objects, column by column, equal to those of `ValueRowBuilder`."""

    def __init__(
        self, contract: TableContract, schema: RecordSchema, order: SortKey | None, roles: ColumnRoles
    ) -> None:
        self._one_by_one = ValueRowBuilder(contract, schema, order, roles)
        self._known = defaultdict[tuple[str, type], dict[Any, tuple[str | None, Value]]](dict)
        self._alone = {column.name: _make_column_builder(column, contract) for column in schema.columns}
        self._roles = roles

    def __call__(
        self,
        records: Sequence[Mapping[str, Json]],
        columns: Mapping[str, ColumnValues],
        rows: Sequence[int],
        mismatches: MismatchLog,
    ) -> TypedColumns:
        """Return the typed columns of a part's records; `rows` are record numbers."""
        if "." in (self._roles.time_key or ""):
            # A nested time key needs the typed record.
            made = {place: self._one_by_one(one, rows[place], mismatches) for place, one in enumerate(records)}
            return _join_typed([[None] * len(records) for _ in TypedRecord._fields], made)
        absent = ColumnValues([ABSENT] * len(records))
        own = {name: columns.get(name, absent) for name in self._alone}
        pieces = [column.map(partial(self._write_piece, name)) for name, column in own.items()]
        unfit = sorted({place for one in pieces if None in one for place, text in enumerate(one) if text is None})
        made = {place: self._one_by_one(records[place], rows[place], mismatches) for place in unfit}
        groups = self._write_group_keys(records, own, made)
        orders = self._read_positions(own.get(self._roles.time_key or self._roles.order or "", absent), made)
        domains = self._read_domains(own.get(self._roles.domain or "", absent), len(records))
        for piece in pieces:
            for place in unfit:
                piece[place] = piece[place] or ""
        texts = [f"{{{''.join(one)[1:]}}}" for one in _zip_columns(pieces, len(records))]
        return _join_typed([texts, list(groups), list(orders), list(domains)], made)

    def _write_piece(self, name: str, value: Any) -> str | None:
        """Return a value's piece of its record's text, with a leading comma; None if it does not fit."""
        return self._read_value(name, value)[0]

    def _typed_value(self, name: str, value: Any) -> Value:
        return self._read_value(name, value)[1] if name in self._alone else None

    def _read_value(self, name: str, value: Any) -> tuple[str | None, Value]:
        """Return a value's piece of text and its typed value, both None if it does not fit."""
        kind = type(value)
        key = str(value) if kind is Decimal else value if kind in _CACHED_TYPES else None
        if key is None or (kind is str and len(value) > _MAX_CACHED_CHARS):
            return self._convert_value(name, value)
        known = self._known[name, kind]
        found = known.get(key)
        if found is None:
            if len(known) >= _MAX_CACHED_VALUES:
                known.clear()
            found = known[key] = self._convert_value(name, value)
        return found

    def _convert_value(self, name: str, value: Any) -> tuple[str | None, Value]:
        read = self._alone[name].read({} if value is ABSENT else {name: value})
        if read is None:
            return None, None
        record, text = read
        return (f",{text[1:-2]}" if record else ""), record.get(name)

    def _write_group_keys(
        self,
        records: Sequence[Mapping[str, Json]],
        own: Mapping[str, ColumnValues],
        made: dict[int, TypedRecord | Rejected],
    ) -> Sequence[str | None]:
        keys: list[Sequence[str]] = []
        for name in self._roles.group:
            column = own[name] if name in own else ColumnValues([get_at_path(record, name) for record in records])
            texts = column.map(partial(self._write_key, name))
            keys.append(_collect_rejected(texts, made))
        return [self._roles.key_of(texts) for texts in zip(*keys, strict=True)] if keys else [None] * len(records)

    def _write_key(self, name: str, value: Any) -> str | Rejected:
        return self._one_by_one.key_of(name, None if value is ABSENT else value)

    def _read_positions(self, column: ColumnValues, made: dict[int, TypedRecord | Rejected]) -> Sequence[str | None]:
        name = self._roles.time_key or self._roles.order
        if name is None:
            return column.map(lambda _: None)

        def position_of(value: Any) -> str | Rejected | None:
            if name in self._alone and self._write_piece(name, value) is None:
                # Records whose value does not fit were made one by one.
                return None
            return self._one_by_one.position_of(self._typed_value(name, value))

        # The checker takes the type variable for str alone, although None is one of the values.
        return _collect_rejected(column.map(position_of), made)  # pyrefly: ignore[bad-argument-type]

    def _read_domains(self, column: ColumnValues, count: int) -> Sequence[str | None]:
        name = self._roles.domain
        if name is None:
            return [None] * count
        return column.map(lambda value: self._one_by_one.domain_of(self._typed_value(name, value)))


def _join_typed(columns: Sequence[list[Any]], made: Mapping[int, TypedRecord | Rejected]) -> TypedColumns:
    """Return the columns of texts, groups, orders and domains, including the records that were made one by one."""
    for place, one in made.items():
        if isinstance(one, TypedRecord):
            for column, value in zip(columns, one, strict=True):
                column[place] = value
    refused = {place: one for place, one in made.items() if isinstance(one, Rejected)}
    return TypedColumns(*map(_make_text_column, columns), refused=refused)


def _make_text_column(texts: list[str | None]) -> pl.Series:
    try:
        return pl.Series(texts, dtype=pl.String)
    except UnicodeEncodeError:
        # A lone surrogate, which JSON can escape but UTF-8 cannot hold, in a value outside the record's text.
        held = [None if text is None else text.encode("utf-8", "backslashreplace").decode() for text in texts]
        return pl.Series(held, dtype=pl.String)


def _make_column_builder(column: Column, contract: TableContract) -> ValueRowBuilder:
    """Return the reference path for records of one column."""
    known = {column.name: contract.columns[column.name]} if column.name in contract.columns else {}
    alone = contract.model_copy(update={"columns": known})
    return ValueRowBuilder(alone, RecordSchema((column,)), None, _NO_ROLES)


def _zip_columns(columns: Sequence[Sequence[str | None]], count: int) -> Iterable[tuple[Any, ...]]:
    return zip(*columns, strict=True) if columns else repeat((), count)


def _collect_rejected(found: Sequence[_TextT | Rejected], made: dict[int, TypedRecord | Rejected]) -> Sequence[_TextT]:
    """Return the texts, empty for rejects; a record's first reason is kept."""
    for place, one in enumerate(found):
        if type(one) is Rejected:
            made.setdefault(place, one)
    return [cast("_TextT", "" if type(one) is Rejected else one) for one in found]
