"""What one worker does with one source part of records: what its values show of the columns, then its rows.

What belongs here: the two readings of a part, one before and one after the dataset's table contract is known, and the
rejects of rows. What does not: the contract and how a cell is read (`table_contract/`), texts (`codec/`), which parts
there are and what is decided over all of them (`stages/record_rows.py`).

    part ──observe──► how values are written, and where  ─┐
                                                           ├─ all parts ─► contract, schema, order
    part ──rows_of──► rows.parquet, rejects.parquet, ledger  ◄──┘

A row's `record` is its lossless text without the line end. Its content, and the group that it is in, are told by what
the source wrote, not by the contract: no type that a column gets moves a row to another split.

Rows of CSV are written column by column, each distinct cell read once; other records one by one.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import lru_cache
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any, cast

import orjson
import pyarrow as pa

from pipelines import filters, sources
from pipelines.codec import Problem, Reader, RepeatedKeyError, Serialiser, read_json
from pipelines.formats import Records
from pipelines.formats.columns import at_path
from pipelines.ledger import LEDGER, NOT_TAKEN
from pipelines.manifest import File, Part
from pipelines.ordering import Order, Position
from pipelines.parts import RejectLog, write_parquet
from pipelines.recipe import Dataset
from pipelines.records import Column, Record, RecordSchema, Value
from pipelines.rows import ROWS, Json, Rejected, message_counts
from pipelines.splits import Split, Splits, Splitter, assign_split
from pipelines.storage import Store, digest_bytes
from pipelines.table_contract import ColumnContract, TableContract, cell_writer, read_position
from pipelines.table_contract import evidence as table_evidence
from pipelines.table_contract.contract import TIMES
from pipelines.table_contract.drift import describe

DEFAULT_DOMAIN = "__default__"
CELLS = "delimited"
"""The reader whose records hold texts of cells."""


@dataclass(frozen=True, slots=True)
class ObserveTask:
    """A source part to look through; `take` as in `RowsTask`."""

    root: str
    folder: str
    fingerprint: str
    base: str
    part: sources.Part
    take: int | None


@dataclass(frozen=True, slots=True)
class RowsTask:
    """A source part to make rows of: `contract`, `schema` and `order` are the dataset's, the first two as JSON text.

    `take` is how many of its records `max_items` lets in (None: all).
    """

    root: str
    folder: str
    fingerprint: str
    base: str
    dataset_name: str
    dataset: Dataset
    part: sources.Part
    take: int | None
    contract: str
    schema: str
    order: Order | None


# ── The first reading ──────────────────────────────────────────────────────────────────────────────


def observe(task: ObserveTask) -> Part:
    """Say how the values of a part's records are written."""
    # The digits of a number say nothing of its type.
    decoded = _decoded(task.part, Path(task.base), task.take, is_exact=False)
    seen = table_evidence.observe(decoded.values, decoded.numbers, are_cells=task.part.reader == CELLS)
    store, at = Store(task.root), f"{task.folder}/parts/{task.fingerprint}"
    content = orjson.dumps(seen.to_json())
    store.write(f"{at}/seen.json", content)
    return Part(task.fingerprint, {"seen": File(f"{at}/seen.json", len(content), digest_bytes(content), 0)})


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A part's records: decoded those that are objects, and why others are not; `numbers` count from 0 in the part."""

    values: list[dict[str, Json]]
    numbers: Sequence[int]
    raws: list[bytes]
    rejected: list[tuple[int, Rejected, bytes]]


def _decoded(part: sources.Part, base: Path, take: int | None, *, is_exact: bool = True) -> _Decoded:
    """Return a part's records, numbers with their own digits if `is_exact`; those beyond `take` are left out."""
    if part.reader == CELLS:
        cells = _cells_at_once(sources.read_bytes(part, base), take)
        if cells is not None:
            return cells
    found = _Decoded([], numbers := [], [], [])
    for raw in sources.read(part, base):
        if take is not None and raw.number >= take:
            break
        if raw.value is None:
            value = raw.rejected or Rejected("not_an_object")
        else:
            value = raw.value if part.reader == CELLS or not is_exact else _exact(raw.raw, raw.value)
        if isinstance(value, Rejected):
            found.rejected.append((raw.number, value, raw.raw))
        else:
            found.values.append(value)
            numbers.append(raw.number)
            found.raws.append(raw.raw)
    return found


def _cells_at_once(content: bytes, take: int | None) -> _Decoded | None:
    """Decode a part of CSV rows that are all as wide as the header; None where one is not, or is no text."""
    lines = content.split(b"\n")[:-1][:take]
    try:
        values = orjson.loads(b"[" + b",".join(lines) + b"]")
    except orjson.JSONDecodeError:
        return None
    if len(values) != len(lines) or any(type(one) is not dict for one in values):
        return None
    return _Decoded(values, range(len(lines)), lines, [])


_FLAT = frozenset({str, int, bool, float, type(None)})


def _exact(line: bytes, value: Mapping[str, Json]) -> dict[str, Json] | Rejected:
    """Decode a line that is a JSON object, numbers with their own digits; `value` is what it is without them."""
    # A flat object with as many `":` as keys, and no blank behind a quote, has none twice; looking for one while
    # decoding takes twice as long.
    has_colons = line.count(b'":') == len(value) and b'" ' not in line and b'"\t' not in line and b'"\r' not in line
    is_plain = has_colons and _FLAT.issuperset(map(type, value.values()))
    try:
        return cast("dict[str, Json]", read_json(line.decode(), unique_keys=not is_plain))
    except RepeatedKeyError as error:
        return Rejected("duplicate_column", f"{error} stands twice in one object")
    except ValueError as error:
        return Rejected("unserialisable", str(error))


# ── The second reading ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Typed:
    """A record that can go on: its text, its keys, and what it is for its split."""

    text: str
    group: str | None
    order: str | None
    domain: str | None


@dataclass(slots=True)
class _Mismatches:
    """Values that do not fit their columns, by column: how many, and the first with its record's number."""

    found: dict[str, tuple[int, str, int]] = field(default_factory=dict[str, tuple[int, str, int]])

    def add(self, column: str, text: str, row: int, count: int = 1) -> None:
        known, first, place = self.found.get(column, (0, text, row))
        self.found[column] = (known + count, *((first, place) if place <= row else (text, row)))

    def to_json(self) -> dict[str, Any]:
        return {name: list(self.found[name]) for name in sorted(self.found)}


@dataclass(frozen=True, slots=True)
class _Roles:
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


def _roles_of(form: Records, splits: Splits) -> _Roles:
    given = (splits.group_key,) if isinstance(splits.group_key, str) else tuple(splits.group_key or ())
    is_list = not isinstance(form.data.group_training_examples_by or splits.group_key, str)
    groups = form.group_columns or given
    return _Roles(groups, is_list, form.is_grouped_by_file, form.order_column, splits.time_key, form.domain_key)


def _position_text(position: Position) -> str:
    return format(position, "f") if isinstance(position, Decimal) else str(position)


def _unparsable(column: str, value: object, order: Order) -> Rejected:
    return Rejected("order_unparsable", f"{column} is {value!r:.80}, not in {order.name}")


def _misfit(name: str, column: ColumnContract, value: object) -> Rejected:
    return Rejected("type_mismatch", f"{name}: {value!r:.80} does not fit {describe(column)}")


# ── Cells ──────────────────────────────────────────────────────────────────────────────────────────


class CellRows:
    """Makes rows of cells of CSV, column by column."""

    def __init__(self, contract: TableContract, schema: RecordSchema, order: Order | None, roles: _Roles) -> None:
        self._columns = contract.columns
        self._names = schema.names
        self._order = order
        self._roles = roles

    def __call__(
        self, records: Sequence[Mapping[str, str]], rows: Sequence[int], mismatches: _Mismatches
    ) -> list[_Typed | Rejected]:
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
        return [refused.get(place) or _Typed(*one) for place, one in enumerate(made)]

    def _written(
        self,
        name: str,
        cells: Sequence[str],
        rows: Sequence[int],
        refused: dict[int, Rejected],
        mismatches: _Mismatches,
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

    def __init__(self, contract: TableContract, schema: RecordSchema, order: Order | None, roles: _Roles) -> None:
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

    def __call__(self, decoded: Mapping[str, Json], row: int, mismatches: _Mismatches) -> _Typed | Rejected:
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
        return _Typed(text.removesuffix("\n"), group, order, None if self._roles.domain is None else named)

    def _typed(self, decoded: Mapping[str, Json], row: int, mismatches: _Mismatches) -> Record | Rejected:
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


@lru_cache(maxsize=2)
def _maker(
    dataset_json: str, contract_json: str, schema_json: str, order: Order | None
) -> tuple[CellRows, ValueRows, Splitter, bool]:
    dataset = Dataset.model_validate_json(dataset_json)
    assert isinstance(dataset.format, Records)
    schema = RecordSchema.from_json(orjson.loads(schema_json))
    contract = TableContract.from_json(orjson.loads(contract_json))
    roles = _roles_of(dataset.format, dataset.splits)
    made = (contract, schema, order, roles)
    splitter = splitter_of(dataset.format, dataset.splits)
    return CellRows(*made), ValueRows(*made), splitter, roles.by_file


def splitter_of(form: Records, splits: Splits) -> Splitter:
    """Return what decides splits of records: whole groups, however they are named; one series alone is train's."""
    if form.mode == "sequential" and not form.is_grouped:
        splits = splits.model_copy(update={"validation": 0, "test": 0})
    return Splitter(splits, by_group=form.is_grouped)


def rows_of(task: RowsTask) -> Part:
    """Make the rows of one source part."""
    made_by = (task.dataset.model_dump_json(), task.contract, task.schema, task.order)
    cell_rows, value_rows, splitter, is_by_file = _maker(*made_by)
    log, columns, mismatches = RejectLog("canonical_rows"), _Columns(task), _Mismatches()
    decoded = _decoded(task.part, Path(task.base), task.take)
    for number, rejected, raw in decoded.rejected:
        log.add(f"{task.part.part_id}:{number}", rejected, raw)
    if task.part.reader == CELLS:
        made = cell_rows(decoded.values, decoded.numbers, mismatches)
    else:
        made = [value_rows(one, row, mismatches) for row, one in zip(decoded.numbers, decoded.values, strict=True)]
    file_key = encode_basestring(task.part.url) if is_by_file else None
    is_by_time = task.dataset.splits.time_key is not None
    known: dict[str | bytes | None, Split | Rejected] = {}
    for number, row, values, raw in zip(decoded.numbers, made, decoded.values, decoded.raws, strict=True):
        row_id = f"{task.part.part_id}:{number}"
        if isinstance(row, Rejected):
            log.add(row_id, row, raw)
            continue
        content = content_of(values)
        group = file_key or row.group
        # Rows of one time, or of one group, are in one split, which is worked out once.
        unit = row.order if is_by_time else group or content
        split = known.get(unit)
        if split is None:
            split = known[unit] = assign_split(
                splitter, source=task.part.split_hint, group_key=group, order_key=row.order, content_hash=content
            )
        if isinstance(split, Rejected):
            log.add(row_id, split, raw)
            continue
        columns.add(
            row_id,
            row if file_key is None else replace(row, group=file_key),
            content,
            str(split),
            filters.prefix_hash(values) if columns.by_prefix else None,
        )
    taken = task.part.records if task.take is None else min(task.take, task.part.records)
    left_out = [f"{task.part.part_id}:{number}" for number in range(taken, task.part.records)]
    return _save(task, columns, log, left_out, mismatches)


def content_of(decoded: Mapping[str, Json]) -> bytes:
    """Return 16 bytes that are equal for records with equal keys and values, as the source wrote them."""
    try:
        text = orjson.dumps(decoded, default=_tagged, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        # Integers beyond 64 bits.
        text = json.dumps(decoded, default=_tagged, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=filters.HASH_BYTES).digest()


def _tagged(value: Any) -> list[str]:
    assert isinstance(value, Decimal)
    return ["decimal", str(value)]


class _Columns:
    """Rows of a part, column by column."""

    def __init__(self, task: RowsTask) -> None:
        self.dataset = task.dataset_name
        self.by_prefix = task.dataset.filters.deduplicate == "prefix200"
        self.ids: list[str] = []
        self.made: list[_Typed] = []
        self.hashes: list[bytes] = []
        self.dedupe_keys: list[bytes | None] = []
        self.splits: list[str] = []

    def add(self, row_id: str, made: _Typed, content: bytes, split: str, dedupe_key: bytes | None) -> None:
        self.ids.append(row_id)
        self.made.append(made)
        self.hashes.append(content)
        self.splits.append(split)
        self.dedupe_keys.append(dedupe_key)

    def table(self) -> pa.Table:
        """Return the rows as `rows.ROWS`; what only conversations have is empty."""
        count = len(self.ids)
        known: dict[str, Sequence[Any]] = {
            "row_id": self.ids, "content_hash": self.hashes, "dedupe_key": self.dedupe_keys, "split": self.splits,
            "dataset": [self.dataset] * count, "kind": ["record"] * count, "schema": ["record"] * count,
            "group_key": [one.group for one in self.made], "order_key": [one.order for one in self.made],
            "domain": [one.domain for one in self.made], "record": [one.text for one in self.made],
        }  # fmt: skip
        return pa.table([known.get(field.name, _nothing(field, count)) for field in ROWS], schema=ROWS)


def _nothing(field: pa.Field, count: int) -> list[Any]:
    if field.nullable:
        return [None] * count
    empty: Any = [] if pa.types.is_list(field.type) else False if pa.types.is_boolean(field.type) else 0
    return [empty] * count


def _save(task: RowsTask, columns: _Columns, log: RejectLog, left_out: list[str], mismatches: _Mismatches) -> Part:
    store, at = Store(task.root), f"{task.folder}/parts/{task.fingerprint}"
    texts = [one.text for one in columns.made]
    facts: dict[str, Any] = {
        "records": task.part.records,
        "further_rows": 0,
        "kept": len(columns.ids),
        "reasons": log.counts(),
        "left_out": {NOT_TAKEN: len(left_out)} if left_out else {},
        "roles": {},
        "rows_with_unknown_roles": 0,
        "examples_of_roles": {"": []},
        "schemas": {"record": len(columns.ids)} if columns.ids else {},
        "notes": {},
        "noticed": {},
        **message_counts(()),
        "splits": dict(sorted(Counter(columns.splits).items())),
        "examples_of_rejects": first_of_each(log.row_ids, log.reasons),
        "characters": sum(map(len, texts)) + len(texts),
        "mismatches": mismatches.to_json(),
    }
    files = {
        "rows": write_parquet(store, f"{at}/rows.parquet", columns.table()),
        "rejects": write_parquet(store, f"{at}/rejects.parquet", log.table()),
        "ledger": write_parquet(store, f"{at}/ledger.parquet", ledger_table(columns.ids, log, left_out)),
    }
    return Part(task.fingerprint, files, facts)


def ledger_table(kept: Sequence[str], log: RejectLog, left_out: Sequence[str], state: str = NOT_TAKEN) -> pa.Table:
    """Return a part's ledger: rows kept, rejected, and left out in one state."""
    row_ids = [*kept, *log.row_ids, *left_out]
    states = ["kept"] * len(kept) + ["rejected"] * len(log.row_ids) + [state] * len(left_out)
    reasons = [""] * len(kept) + log.reasons + [""] * len(left_out)
    return pa.table([row_ids, [log.stage] * len(row_ids), states, reasons], schema=LEDGER)


def first_of_each(row_ids: Sequence[str], reasons: Sequence[str]) -> dict[str, list[str]]:
    """Return the first three rows of each reason."""
    found: dict[str, list[str]] = {}
    for row_id, reason in zip(row_ids, reasons, strict=True):
        if len(found.setdefault(reason, [])) < 3:
            found[reason].append(row_id)
    return dict(sorted(found.items()))
