"""Rows of decoded JSON objects made one by one: what `RowBuilder` is compared with."""

from collections.abc import Mapping
from typing import NamedTuple

from rowmill.core.json import Json
from rowmill.kinds.reading.canonicalization import DEFAULT_DOMAIN
from rowmill.kinds.shared.messages import get_at_path
from rowmill.kinds.tables.schema import Column, Record, RecordSchema, SortKey, Value
from rowmill.kinds.tables.serialization import RecordDecoder, RecordProblem, Serialiser, Wire
from rowmill.kinds.tables.table_contract import TIMES, TableContract
from rowmill.kinds.tables.typed_cells import (
    ColumnRoles,
    Mismatches,
    format_position,
    log_mismatches,
    reject_absent,
    reject_mismatch,
    reject_unparsable,
)
from rowmill.schema.rows import Rejected


class TypedRecord(NamedTuple):
    """A valid record: its text, its group and order keys, and its domain."""

    text: str
    group: str | None
    order: str | None
    domain: str | None


class ValueRowBuilder:
    """Makes rows of decoded JSON objects, one by one."""

    def __init__(
        self, contract: TableContract, schema: RecordSchema, order: SortKey | None, roles: ColumnRoles
    ) -> None:
        self._contract = contract
        self._schema = schema
        self._order = order
        self._roles = roles
        self._names = frozenset(schema.names)
        self._read = RecordDecoder(schema)
        self._write = Serialiser(schema, special_tokens=())
        self._key = Serialiser(RecordSchema((Column("k", "json"),)), special_tokens=())
        self._readable: dict[tuple[str, str], bool] = {}
        self._words = {name: frozenset(one.na) for name, one in contract.used.items() if one.na}
        self._times = {
            name: SortKey(one.format)
            for name, one in contract.used.items()
            if one.type in TIMES and one.format is not None and schema.by_name[name].type == "string"
        }

    def __call__(self, decoded: Mapping[str, Json], row: int, mismatches: Mismatches) -> TypedRecord | Rejected:
        """Return the typed record, or its reject."""
        record = self._convert_record(decoded, row, mismatches)
        if isinstance(record, Rejected):
            return record
        group = self._write_group_key(decoded, record)
        if isinstance(group, Rejected):
            return group
        order = self._read_position(record)
        if isinstance(order, Rejected):
            return order
        text = self._write(record)
        if isinstance(text, Rejected):
            return text
        domain = None if self._roles.domain is None else self.domain_of(record.get(self._roles.domain))
        return TypedRecord(text.removesuffix("\n"), group, order, domain)

    def _convert_record(self, decoded: Mapping[str, Json], row: int, mismatches: Mismatches) -> Record | Rejected:
        """Return a decoded object's record; a mismatch is rejected, or becomes null if the contract allows it."""
        if not decoded.keys() <= self._names:
            decoded = {name: value for name, value in decoded.items() if name in self._names}
        if self._words and any(self._is_absent(name, decoded.get(name)) for name in self._words):
            decoded = {name: None if self._is_absent(name, value) else value for name, value in decoded.items()}
        while True:
            record = self._read(dict(decoded))
            misfit = record.column if isinstance(record, RecordProblem) else self._find_unreadable_time(record)
            if misfit is None:
                assert not isinstance(record, RecordProblem)
                return record
            if isinstance(record, RecordProblem) and record.reason != "type":
                return Rejected("unserialisable", f"{record.column}: {record.reason}")
            column = self._contract.columns[misfit]
            log_mismatches(mismatches, misfit, str(decoded[misfit])[:80], row)
            if column.on_mismatch == "reject":
                return reject_mismatch(misfit, column, decoded[misfit])
            decoded = {**decoded, misfit: None}

    def _is_absent(self, name: str, value: Json) -> bool:
        return type(value) is str and value in self._words.get(name, ())

    def _find_unreadable_time(self, record: Record) -> str | None:
        for name, order in self._times.items():
            value = record.get(name)
            if value is None:
                continue
            known = self._readable.get((name, value))
            if known is None:
                known = self._readable[name, value] = order.read(value) is not None
            if not known:
                return name
        return None

    def _write_group_key(self, decoded: Mapping[str, Json], record: Record) -> str | Rejected | None:
        """Return the group's key: the values as in the source, if the record has them."""
        if not self._roles.group:
            return None
        texts: list[str] = []
        for name in self._roles.group:
            is_column = name in self._names
            value = decoded.get(name) if is_column else get_at_path(decoded, name)
            if value is None or (is_column and record.get(name) is None):
                return reject_absent("group_missing", name)
            line = self._key({"k": value})
            assert isinstance(line, str), line
            texts.append(line[len('{"k":') : -len("}\n")])
        return f"[{','.join(texts)}]" if self._roles.is_list else texts[0]

    def _read_position(self, record: Record) -> str | Rejected | None:
        path = self._roles.time_key
        return self.position_of(record.get(self._roles.order or "") if path is None else get_at_path(record, path))

    def position_of(self, value: Value) -> str | Rejected | None:
        """Return the time or order key of a value of the order column."""
        name = self._roles.time_key or self._roles.order
        if name is None or (self._roles.time_key is None and self._order is None):
            return None
        if value is None:
            return reject_absent("order_missing", name)
        if self._roles.time_key is not None or self._order is None:
            return str(value)
        position = self._order.read(value)
        return reject_unparsable(name, value, self._order) if position is None else format_position(position)

    def domain_of(self, value: Value) -> str:
        """Return the domain that a value names."""
        return value if type(value) is str and value.strip() else DEFAULT_DOMAIN


def serialise_record(
    record: Mapping[str, Value], schema: RecordSchema, *, special_tokens: tuple[str, ...] = (), wire: Wire = "lossless"
) -> str | Rejected:
    """Return the line of one record."""
    return Serialiser(schema, special_tokens=special_tokens, wire=wire)(record)
