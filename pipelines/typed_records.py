"""Decoded records to typed ones: their texts, their groups' keys, and their places in the order, by the contract.

What belongs here: making these of cells of CSV and of values of JSON, and why a record has none. What does not:
reading a part and writing its rows (`record_rows.py`), how one cell is read (`table_contract/`), texts (`codec/`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from json.encoder import encode_basestring
from typing import Any

from pipelines.codec import Problem, Reader, Serialiser
from pipelines.formats import Records
from pipelines.formats.columns import at_path
from pipelines.ordering import Order, Position
from pipelines.records import Column, Record, RecordSchema, Value
from pipelines.rows import Json, Rejected
from pipelines.splits import Splits
from pipelines.table_contract import ColumnContract, TableContract, cell_writer, read_position
from pipelines.table_contract.contract import TIMES
from pipelines.table_contract.drift import describe

DEFAULT_DOMAIN = "__default__"


@dataclass(frozen=True, slots=True)
class TypedRecord:
    """A record that can go on: its text, its keys, and what it is for its split."""

    text: str
    group: str | None
    order: str | None
    domain: str | None


@dataclass(slots=True)
class Mismatches:
    """Values that do not fit their columns, by column: how many, and the first with its record's number."""

    found: dict[str, tuple[int, str, int]] = field(default_factory=dict[str, tuple[int, str, int]])

    def add(self, column: str, text: str, row: int, count: int = 1) -> None:
        """Count values of a column that do not fit; `text` is one of them, `row` its record's number."""
        known, first, place = self.found.get(column, (0, text, row))
        self.found[column] = (known + count, *((first, place) if place <= row else (text, row)))

    def to_json(self) -> dict[str, Any]:
        """Return them as a JSON object, columns by name."""
        return {name: list(self.found[name]) for name in sorted(self.found)}


@dataclass(frozen=True, slots=True)
class Roles:
    """Which columns say in which group, at which time and of which domain a record is."""

    group: tuple[str, ...]
    is_list: bool
    by_file: bool
    order: str | None
    time_key: str | None
    domain: str | None

    def key_of(self, texts: Sequence[str]) -> str:
        """Return a group's key of the JSON texts of its values."""
        return f"[{','.join(texts)}]" if self.is_list else texts[0]


def roles_of(form: Records, splits: Splits) -> Roles:
    """Return the columns that the options name."""
    given = (splits.group_key,) if isinstance(splits.group_key, str) else tuple(splits.group_key or ())
    is_list = not isinstance(form.data.group_training_examples_by or splits.group_key, str)
    groups = form.group_columns or given
    return Roles(groups, is_list, form.is_grouped_by_file, form.order_column, splits.time_key, form.domain_key)


def _position_text(position: Position) -> str:
    return format(position, "f") if isinstance(position, Decimal) else str(position)


def _unparsable(column: str, value: object, order: Order) -> Rejected:
    return Rejected("order_unparsable", f"{column} is {value!r:.80}, not in {order.name}")


def _misfit(name: str, column: ColumnContract, value: object) -> Rejected:
    return Rejected("type_mismatch", f"{name}: {value!r:.80} does not fit {describe(column)}")


# ── Cells ──────────────────────────────────────────────────────────────────────────────────────────


class CellRows:
    """Makes rows of cells of CSV, column by column."""

    def __init__(self, contract: TableContract, schema: RecordSchema, order: Order | None, roles: Roles) -> None:
        self._columns = contract.columns
        self._names = schema.names
        self._order = order
        self._roles = roles

    def __call__(
        self, records: Sequence[Mapping[str, str]], rows: Sequence[int], mismatches: Mismatches
    ) -> list[TypedRecord | Rejected]:
        """Return what each record's row holds, or why it has none; `rows` are the records' numbers."""
        if not records:
            return []
        header = records[0].keys()
        cells = {name: [one[name] for one in records] for name in header}
        refused: dict[int, Rejected] = {}
        texts: dict[str, list[str | None]] = {}
        # In the order of the schema, so that a row's first misfit is that of its first column.
        for name in self._names:
            if name in cells:
                texts[name] = self._written(name, cells[name], rows, refused, mismatches)
        groups = self._groups(cells, texts, len(records), refused)
        orders = self._positions(cells, texts, len(records), refused)
        domains = self._domains(cells, len(records))
        template = "{" + ",".join(f"{_percent(encode_basestring(name))}:%s" for name in texts) + "}"
        lines = [template % row for row in zip(*texts.values(), strict=True)] if texts else ["{}"] * len(records)
        made = zip(lines, groups, orders, domains, strict=True)
        return [refused.get(place) or TypedRecord(*one) for place, one in enumerate(made)]

    def _written(
        self,
        name: str,
        cells: Sequence[str],
        rows: Sequence[int],
        refused: dict[int, Rejected],
        mismatches: Mismatches,
    ) -> list[str | None]:
        column = self._columns[name]
        write = cell_writer(column)
        known = {cell: write(cell) for cell in set(cells)}
        texts = [known[cell] for cell in cells]
        misfits = {cell for cell, text in known.items() if text is None}
        if column.on_mismatch == "na":
            as_reject = cell_writer(column.model_copy(update={"on_mismatch": "reject"}))
            misfits = {cell for cell in known if as_reject(cell) is None}
        if misfits:
            for place, cell in enumerate(cells):
                if cell in misfits:
                    mismatches.add(name, cell[:80], rows[place])
                    if column.on_mismatch == "reject":
                        refused.setdefault(place, _misfit(name, column, cell))
        return texts

    def _groups(
        self,
        cells: Mapping[str, Sequence[str]],
        texts: Mapping[str, Sequence[str | None]],
        count: int,
        refused: dict[int, Rejected],
    ) -> list[str | None]:
        """Return the groups' keys: the cells as they are written, whatever type their columns have."""
        names = self._roles.group
        if not names:
            return [None] * count
        keys: list[list[str]] = []
        for name in names:
            if name not in cells:
                for place in range(count):
                    refused.setdefault(place, Rejected("group_missing", f"{name} is absent or null"))
                return [None] * count
            known = {cell: encode_basestring(cell) for cell in set(cells[name])}
            keys.append([known[cell] for cell in cells[name]])
            absent = texts.get(name, cells[name])
            for place, text in enumerate(absent):
                if text == "null" or not cells[name][place]:
                    refused.setdefault(place, Rejected("group_missing", f"{name} is absent or null"))
        return [self._roles.key_of(own) for own in zip(*keys, strict=True)]

    def _positions(
        self,
        cells: Mapping[str, Sequence[str]],
        texts: Mapping[str, Sequence[str | None]],
        count: int,
        refused: dict[int, Rejected],
    ) -> list[str | None]:
        name = self._roles.time_key or self._roles.order
        if name is None or (self._roles.time_key is None and self._order is None):
            return [None] * count
        if name not in cells:
            for place in range(count):
                refused.setdefault(place, Rejected("order_missing", f"{name} is absent or null"))
            return [None] * count
        known: dict[str, str | Rejected | None] = {}
        written = texts.get(name, [None] * count)
        for cell, text in dict(zip(cells[name], written, strict=True)).items():
            known[cell] = self._position(name, cell, text)
        found = [known[cell] for cell in cells[name]]
        for place, one in enumerate(found):
            if isinstance(one, Rejected):
                refused.setdefault(place, one)
        return [None if isinstance(one, Rejected) else one for one in found]

    def _position(self, name: str, cell: str, text: str | None) -> str | Rejected | None:
        if text == "null" or not cell:
            return Rejected("order_missing", f"{name} is absent or null")
        if self._roles.time_key is not None:
            return cell if text is None or text.startswith('"') else text
        if text is None:
            return None
        column = self._columns[name]
        assert self._order is not None
        position = read_position(column, self._order, cell, text)
        return _unparsable(name, cell, self._order) if position is None else _position_text(position)

    def _domains(self, cells: Mapping[str, Sequence[str]], count: int) -> list[str | None]:
        if self._roles.domain is None:
            return [None] * count
        column = self._columns.get(self._roles.domain)
        if self._roles.domain not in cells or column is None or column.type in ("integer", "number", "boolean"):
            return [DEFAULT_DOMAIN] * count
        return [cell if cell.strip() else DEFAULT_DOMAIN for cell in cells[self._roles.domain]]


def _percent(text: str) -> str:
    return text.replace("%", "%%")


# ── Values of JSON ─────────────────────────────────────────────────────────────────────────────────


class ValueRows:
    """Makes rows of decoded JSON objects, one by one; all that the options decide is worked out here, once."""

    def __init__(self, contract: TableContract, schema: RecordSchema, order: Order | None, roles: Roles) -> None:
        self._contract = contract
        self._schema = schema
        self._order = order
        self._roles = roles
        self._names = frozenset(schema.names)
        self._read = Reader(schema)
        self._write = Serialiser(schema, special_tokens=())
        self._key = key_writer()
        self._readable: dict[tuple[str, str], bool] = {}
        self._words = {name: frozenset(one.na) for name, one in contract.used.items() if one.na}
        self._times = {
            name: Order(one.format)
            for name, one in contract.used.items()
            if one.type in TIMES and one.format is not None and schema.by_name[name].type == "string"
        }

    def __call__(self, decoded: Mapping[str, Json], row: int, mismatches: Mismatches) -> TypedRecord | Rejected:
        """Return what a row holds of a record, or why it has none."""
        record = self._typed(decoded, row, mismatches)
        if isinstance(record, Rejected):
            return record
        group = self._group(decoded)
        if isinstance(group, Rejected):
            return group
        order = self._position(record)
        if isinstance(order, Rejected):
            return order
        text = self._write(record)
        if isinstance(text, Rejected):
            return text
        domain = None if self._roles.domain is None else record.get(self._roles.domain)
        named = domain if type(domain) is str and domain.strip() else DEFAULT_DOMAIN
        return TypedRecord(text.removesuffix("\n"), group, order, None if self._roles.domain is None else named)

    def _typed(self, decoded: Mapping[str, Json], row: int, mismatches: Mismatches) -> Record | Rejected:
        """Return a decoded object's record; a misfit is rejected, or null where its contract says so."""
        if not decoded.keys() <= self._names:
            decoded = {name: value for name, value in decoded.items() if name in self._names}
        if self._words and any(self._is_absent(name, decoded.get(name)) for name in self._words):
            decoded = {name: None if self._is_absent(name, value) else value for name, value in decoded.items()}
        while True:
            record = self._read(decoded)
            misfit = record.column if isinstance(record, Problem) else self._unreadable_time(record)
            if misfit is None:
                assert not isinstance(record, Problem)
                return record
            if isinstance(record, Problem) and record.reason != "type":
                return Rejected("unserialisable", f"{record.column}: {record.reason}")
            column = self._contract.columns[misfit]
            mismatches.add(misfit, str(decoded[misfit])[:80], row)
            if column.on_mismatch == "reject":
                return _misfit(misfit, column, decoded[misfit])
            decoded = {**decoded, misfit: None}

    def _is_absent(self, name: str, value: Json) -> bool:
        return type(value) is str and value in self._words.get(name, ())

    def _unreadable_time(self, record: Record) -> str | None:
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

    def _group(self, decoded: Mapping[str, Json]) -> str | Rejected | None:
        """Return the group's key: the values as the source wrote them."""
        if not self._roles.group:
            return None
        texts: list[str] = []
        for name in self._roles.group:
            value = decoded.get(name) if name in self._names else at_path(decoded, name)
            if value is None or self._is_absent(name, value):
                return Rejected("group_missing", f"{name} is absent or null")
            texts.append(self._key(value))
        return self._roles.key_of(texts)

    def _position(self, record: Record) -> str | Rejected | None:
        if self._roles.time_key is not None:
            name = self._roles.time_key
            value = at_path(record, name)
            return Rejected("order_missing", f"{name} is absent or null") if value is None else str(value)
        name = self._roles.order
        if name is None or self._order is None:
            return None
        value = record.get(name)
        if value is None:
            return Rejected("order_missing", f"{name} is absent or null")
        position = self._order.read(value)
        return _unparsable(name, value, self._order) if position is None else _position_text(position)


def key_writer() -> Callable[[Value], str]:
    """Return what writes a value as JSON text by its own type: 1 is not "1"."""
    write = Serialiser(RecordSchema((Column("k", "json"),)), special_tokens=())

    def text_of(value: Value) -> str:
        line = write({"k": value})
        assert isinstance(line, str), line
        return line[len('{"k":') : -len("}\n")]

    return text_of
