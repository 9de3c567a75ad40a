"""What one worker does with one source part of records: what its values say of the columns, then its rows.

What belongs here: the two readings of a part, one before and one after the dataset's schema is known, and the
rejects of rows. What does not: the schema (`formats/inference.py`), texts (`codec/`), which parts there are and
what is decided over all of them (`stages/record_rows.py`).

    part ──observe──► what values rule out, texts that order   ─┐
                                                                ├─ all parts ─► schema, order
    part ──rows_of──► rows.parquet, rejects.parquet, ledger  ◄──┘

A row's `record` is its lossless text without the line end. Its content is told by what the source wrote, not by the
schema: a new row that makes a column text moves no earlier row to another split.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import orjson
import pyarrow as pa

from pipelines import filters
from pipelines.codec import Problem, Reader, Serialiser, read_json
from pipelines.formats import Records, inference
from pipelines.formats.columns import at_path
from pipelines.ledger import LEDGER, NOT_TAKEN
from pipelines.manifest import File, Part
from pipelines.ordering import Order
from pipelines.parts import RejectLog, write_parquet
from pipelines.recipe import Dataset
from pipelines.records import Column, Record, RecordSchema, Value
from pipelines.rows import ROWS, Json, Rejected, canonical_json, message_counts
from pipelines.sources import RawRecord
from pipelines.sources.sharing import TakenGroup, read_taken, records_of
from pipelines.splits import Splits, Splitter, assign_split
from pipelines.storage import Store, digest_bytes

DEFAULT_DOMAIN = "__default__"
CELLS = "delimited"
"""The reader whose records hold texts of cells."""


@dataclass(frozen=True, slots=True)
class ObserveTask:
    """Source parts to look through together; `order_column` is the column whose texts are kept apart."""

    root: str
    folder: str
    fingerprint: str
    base: str
    taken: TakenGroup
    order_column: str | None


@dataclass(frozen=True, slots=True)
class RowsTask:
    """Source parts to make rows of together: `schema` and `order` are the dataset's."""

    root: str
    folder: str
    fingerprint: str
    base: str
    dataset_name: str
    dataset: Dataset
    taken: TakenGroup
    schema: str
    order: Order | None


# ── The first reading ──────────────────────────────────────────────────────────────────────────────


def observe(task: ObserveTask) -> Part:
    """Say what a part's records rule out about the types of columns, and keep the distinct texts that order."""
    each = _decoded(task.taken, Path(task.base), [])
    decoded = [value for _, _, value in each if not isinstance(value, Rejected)]
    seen = inference.observe(decoded, are_cells=_are_cells(task.taken))
    store, at = Store(task.root), f"{task.folder}/parts/{task.fingerprint}"
    content = orjson.dumps(seen.to_json())
    store.write(f"{at}/seen.json", content)
    files = {"seen": File(f"{at}/seen.json", len(content), digest_bytes(content), 0)}
    if task.order_column is not None:
        texts = {text for one in decoded if type(text := one.get(task.order_column)) is str and text}
        table = pa.table({"text": pa.array(sorted(texts), pa.string())})
        files["order_texts"] = write_parquet(store, f"{at}/order_texts.parquet", table)
    return Part(task.fingerprint, files)


def _are_cells(taken: TakenGroup) -> bool:
    """Tell whether records hold texts of cells; the parts of a group are of one kind of file."""
    return taken[0][0].reader == CELLS


def _decoded(
    taken: TakenGroup, base: Path, not_taken: list[str]
) -> Iterator[tuple[str, RawRecord, dict[str, Json] | Rejected]]:
    """Yield the records that are taken with their rows' ids, exactly decoded; the ids of others join `not_taken`."""
    are_cells = _are_cells(taken)
    for _, row_id, raw in read_taken(taken, base, not_taken):
        if raw.value is None:
            yield row_id, raw, raw.rejected or Rejected("not_an_object")
        else:
            yield row_id, raw, raw.value if are_cells else _exact(raw.raw)


def _exact(line: bytes) -> dict[str, Json] | Rejected:
    """Decode a line that is a JSON object, numbers with their own digits."""
    try:
        return cast("dict[str, Json]", read_json(line.decode()))
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


class RowMaker:
    """Makes rows of records of one schema; all that the options decide is worked out here, once."""

    def __init__(self, form: Records, schema: RecordSchema, order: Order | None, dataset: Dataset) -> None:
        self._schema = schema
        self._order = order
        self._order_column = form.order_column
        self._domain_key = form.domain_key
        self._cells = inference.CellReader(schema)
        self._values = Reader(schema)
        self._write = Serialiser(schema, special_tokens=())
        splits = dataset.splits
        given = (splits.group_key,) if isinstance(splits.group_key, str) else tuple(splits.group_key or ())
        self._group_columns = form.group_columns or given
        self._many = not isinstance(form.data.group_training_examples_by or splits.group_key, str)
        self._keys = {name: key_writer(schema.by_name[name]) for name in self._group_columns if name in schema.by_name}
        self._time_key = splits.time_key

    def typed(self, decoded: Mapping[str, Json], *, are_cells: bool) -> Record | Rejected:
        """Return a decoded object's record."""
        if are_cells:
            return self._cells(decoded)
        record = self._values(decoded)
        return (
            Rejected("unserialisable", f"{record.column}: {record.reason}") if isinstance(record, Problem) else record
        )

    def __call__(self, record: Record) -> _Typed | Rejected:
        """Return what a row holds of a record, or why it has none."""
        group = self._group(record)
        if isinstance(group, Rejected):
            return group
        order = self._position(record)
        if isinstance(order, Rejected):
            return order
        text = self._write(record)
        if isinstance(text, Rejected):
            return text
        domain = None if self._domain_key is None else record.get(self._domain_key)
        named = domain if type(domain) is str and domain.strip() else DEFAULT_DOMAIN
        return _Typed(text.removesuffix("\n"), group, order, None if self._domain_key is None else named)

    def _group(self, record: Record) -> str | Rejected | None:
        if not self._group_columns:
            return None
        texts: list[str] = []
        for name in self._group_columns:
            write = self._keys.get(name)
            value = record.get(name) if write is not None else at_path(record, name)
            if value is None:
                return Rejected("group_missing", f"{name} is absent or null")
            texts.append(canonical_json(value).decode() if write is None else write(value))
        return f"[{','.join(texts)}]" if self._many else texts[0]

    def _position(self, record: Record) -> str | Rejected | None:
        if self._time_key is not None:
            value = at_path(record, self._time_key)
            return Rejected("order_missing", f"{self._time_key} is absent or null") if value is None else str(value)
        if self._order_column is None or self._order is None:
            return None
        value = record.get(self._order_column)
        if value is None:
            return Rejected("order_missing", f"{self._order_column} is absent or null")
        position = self._order.read(value)
        if position is None:
            return Rejected("order_unparsable", f"{self._order_column} is {value!r:.80}, not in {self._order.name}")
        return (
            position
            if isinstance(position, str)
            else format(position, "f")
            if isinstance(position, Decimal)
            else str(position)
        )


def key_writer(column: Column) -> Callable[[Value], str]:
    """Return what writes a column's values as JSON text, typed: 1 is not "1"."""
    alone = RecordSchema((Column(column.name, column.type, item=column.item, fields=column.fields),))
    write = Serialiser(alone, special_tokens=())
    prefix = len(json.dumps(column.name, ensure_ascii=False)) + len('{":') - 1

    def text_of(value: Value) -> str:
        line = write({column.name: value})
        assert isinstance(line, str), line
        return line[prefix : -len("}\n")]

    return text_of


@lru_cache(maxsize=2)
def _maker(dataset_json: str, schema_json: str, order: Order | None) -> tuple[RowMaker, Splitter]:
    dataset = Dataset.model_validate_json(dataset_json)
    assert isinstance(dataset.format, Records)
    schema = RecordSchema.from_json(orjson.loads(schema_json))
    return RowMaker(dataset.format, schema, order, dataset), splitter_of(dataset.format, dataset.splits)


def splitter_of(form: Records, splits: Splits) -> Splitter:
    """Return what decides splits of records: whole groups, however they are named; one series alone is train's."""
    if form.mode == "sequential" and not form.group_columns:
        splits = splits.model_copy(update={"validation": 0, "test": 0})
    return Splitter(splits, by_group=bool(form.group_columns))


def rows_of(task: RowsTask) -> Part:
    """Make the rows of some source parts."""
    maker, splitter = _maker(task.dataset.model_dump_json(), task.schema, task.order)
    log, columns = RejectLog("canonical_rows"), _Columns(task)
    are_cells, hint = _are_cells(task.taken), task.taken[0][0].split_hint
    not_taken: list[str] = []
    for row_id, raw, decoded in _decoded(task.taken, Path(task.base), not_taken):
        record = decoded if isinstance(decoded, Rejected) else maker.typed(decoded, are_cells=are_cells)
        made = record if isinstance(record, Rejected) else maker(record)
        if isinstance(made, Rejected) or isinstance(decoded, Rejected):
            log.add(row_id, made if isinstance(made, Rejected) else Rejected("unserialisable"), raw.raw)
            continue
        content = content_of(decoded)
        split = assign_split(
            splitter,
            source=hint,
            group_key=made.group,
            order_key=made.order,
            content_hash=content,
        )
        if isinstance(split, Rejected):
            log.add(row_id, split, raw.raw)
            continue
        columns.add(row_id, made, content, str(split), filters.prefix_hash(decoded) if columns.by_prefix else None)
    return _save(task, columns, log, not_taken)


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


def _save(task: RowsTask, columns: _Columns, log: RejectLog, left_out: list[str]) -> Part:
    store, at = Store(task.root), f"{task.folder}/parts/{task.fingerprint}"
    texts = [one.text for one in columns.made]
    facts: dict[str, Any] = {
        "records": records_of(task.taken),
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
