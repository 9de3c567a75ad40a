"""What one worker does with one source part of records: what its values show of the columns, then its rows.

What belongs here: the two readings of a part, one before and one after the dataset's table contract is known, and the
rejects of rows. What does not: the contract and how a cell is read (`table_contract/`), texts (`serialization/`), which
parts there are and what is decided over all of them (`table_schema.py`).

    part ──observe──► how values are written, and where  ─┐
                                                           ├─ all parts ─► contract, schema, order
    part ──rows_of──► rows.parquet, rejects.parquet, ledger  ◄──┘

A row's `record` is its lossless text without the line end. Its content, and the group that it is in, are told by what
the source wrote, not by the contract: no type that a column gets moves a row to another split.

Rows are made column by column, each distinct cell or value read once (`typed_records.py`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any, cast

import orjson
import pyarrow as pa

from rowmill import sources
from rowmill.core.json import Json
from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.core.storage import Store, digest_bytes
from rowmill.formats import Records, filters
from rowmill.formats.splits import Split, Splits, Splitter, assign_split
from rowmill.recipe.dataset import Dataset
from rowmill.schema.ledger import NOT_TAKEN
from rowmill.schema.manifest import File, Part
from rowmill.schema.rows import ROW_SCHEMA, Rejected, count_messages
from rowmill.stages.canonical_rows.typed_records import (
    ABSENT,
    CellRowBuilder,
    ColumnValues,
    MismatchLog,
    TypedRecord,
    ValueColumnBuilder,
    resolve_column_roles,
    split_columns,
)
from rowmill.stages.part_files import RejectLog, build_ledger, sample_rejects, write_parquet
from rowmill.tabular.schema import RecordSchema
from rowmill.tabular.serialization import RepeatedKeyError, make_exact_decoder, read_json
from rowmill.tabular.table_contract import TableContract
from rowmill.tabular.table_contract import evidence as table_evidence
from rowmill.tabular.time_order import SortKey


@dataclass(frozen=True, slots=True)
class ObserveTask:
    """A source part to look through; `take` as in `TableRowsTask`."""

    root: str
    folder: str
    fingerprint: str
    base: str
    part: sources.SourcePart
    take: int | None


@dataclass(frozen=True, slots=True)
class TableRowsTask:
    """A source part to make rows of: `contract`, `schema` and `order` are the dataset's, the first two as JSON text.

    `take` is how many of its records `max_items` lets in (None: all).
    """

    root: str
    folder: str
    fingerprint: str
    base: str
    dataset_name: str
    dataset: Dataset
    part: sources.SourcePart
    take: int | None
    contract: str
    schema: str
    order: SortKey | None


def _has_cells(part: sources.SourcePart) -> bool:
    return sources.find_file_format(part.reader).has_cells


# ── The first reading ──────────────────────────────────────────────────────────────────────────────


def observe_part(task: ObserveTask) -> Part:
    """Say how the values of a part's records are written."""
    # The digits of a number say nothing of its type.
    decoded = _decode_part(task.part, Path(task.base), task.take, is_exact=False)
    seen = table_evidence.observe_records(decoded.values, decoded.numbers, are_cells=_has_cells(task.part))
    store, at = Store(task.root), f"{task.folder}/parts/{task.fingerprint}"
    content = orjson.dumps(seen.to_json())
    store.write(f"{at}/seen.json", content)
    return Part(task.fingerprint, {"seen": File(f"{at}/seen.json", len(content), digest_bytes(content), 0)})


@dataclass(frozen=True, slots=True)
class _DecodedPart:
    """A part's records: decoded those that are objects, and why others are not; `numbers` count from 0 in the part."""

    values: list[dict[str, Json]]
    numbers: Sequence[int]
    raws: list[bytes]
    rejected: list[tuple[int, Rejected, bytes]]


def _decode_part(part: sources.SourcePart, base: Path, take: int | None, *, is_exact: bool = True) -> _DecodedPart:
    """Return a part's records, numbers with their own digits if `is_exact`; those beyond `take` are left out."""
    if _has_cells(part):
        cells = _decode_cells(sources.read_part_bytes(part, base), take)
        if cells is not None:
            return cells
    found, read_exactly = _DecodedPart([], numbers := [], [], []), make_exact_line_reader()
    for raw in sources.read_records(part, base):
        if take is not None and raw.number >= take:
            break
        if raw.value is None:
            value = raw.rejected or Rejected("not_an_object")
        else:
            value = raw.value if _has_cells(part) or not is_exact else read_exactly(raw.raw, raw.value)
        if isinstance(value, Rejected):
            found.rejected.append((raw.number, value, raw.raw))
        else:
            found.values.append(value)
            numbers.append(raw.number)
            found.raws.append(raw.raw)
    return found


def _decode_cells(content: bytes, take: int | None) -> _DecodedPart | None:
    """Decode a part of CSV rows that are all as wide as the header; None where one is not, or is no text."""
    lines = content.split(b"\n")[:-1][:take]
    try:
        values = orjson.loads(b"[" + b",".join(lines) + b"]")
    except orjson.JSONDecodeError:
        return None
    if len(values) != len(lines) or any(type(one) is not dict for one in values):
        return None
    return _DecodedPart(values, range(len(lines)), lines, [])


_FLAT_TYPES = frozenset({str, int, bool, float, type(None)})


class _FloatDecimalCache(dict[float, Decimal]):
    """The decimal with the digits that orjson writes a float with, one object for each."""

    def __missing__(self, value: float) -> Decimal:
        found = Decimal(orjson.dumps(value).decode())
        # 0.0 and -0.0 are one key, and two texts.
        return self.setdefault(value, found) if value else found


def _is_written_as(value: Mapping[str, Json], line: bytes) -> bool:
    try:
        return orjson.dumps(value) == line
    except TypeError:
        # Integers beyond 64 bits.
        return False


def make_exact_line_reader() -> Callable[[bytes, dict[str, Json]], dict[str, Json] | Rejected]:
    """Return what decodes a line that is a JSON object exactly, given what it is without its numbers' digits."""
    decimals, decode = _FloatDecimalCache(), make_exact_decoder()

    def read(line: bytes, value: dict[str, Json]) -> dict[str, Json] | Rejected:
        types = set(map(type, value.values()))
        is_flat = types <= _FLAT_TYPES
        # A line that is written back as it stands has no key twice, and of its numbers no other digits.
        if is_flat and _is_written_as(value, line):
            if float not in types:
                return value
            return {name: decimals[one] if type(one) is float else one for name, one in value.items()}
        # Nor has a flat one with as many `":` as keys, and no blank behind a quote, a key twice; looking for one
        # while decoding takes twice as long.
        has_colons = line.count(b'":') == len(value) and b'" ' not in line and b'"\t' not in line
        try:
            text = line.decode()
            is_plain = is_flat and has_colons and b'"\r' not in line
            return cast("dict[str, Json]", decode(text) if is_plain else read_json(text, unique_keys=True))
        except RepeatedKeyError as error:
            return Rejected("duplicate_column", f"{error} stands twice in one object")
        except ValueError as error:
            return Rejected("unserialisable", str(error))

    return read


# ── The second reading ─────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=2)
def _open_row_builders(
    dataset_json: str, contract_json: str, schema_json: str, order: SortKey | None
) -> tuple[CellRowBuilder, ValueColumnBuilder, Splitter, bool]:
    dataset = Dataset.model_validate_json(dataset_json)
    form = dataset.format.require_table()
    schema = RecordSchema.from_json(orjson.loads(schema_json))
    contract = TableContract.from_json(orjson.loads(contract_json))
    roles = resolve_column_roles(form, dataset.splits)
    made = (contract, schema, order, roles)
    splitter = make_table_splitter(form, dataset.splits)
    return CellRowBuilder(*made), ValueColumnBuilder(*made), splitter, roles.by_file


def make_table_splitter(form: Records, splits: Splits) -> Splitter:
    """Return what decides splits of records: whole groups, however they are named; one series alone is train's."""
    if form.mode == "sequential" and not form.is_grouped:
        splits = splits.model_copy(update={"validation": 0, "test": 0})
    return Splitter(splits, by_group=form.is_grouped)


def make_table_part(task: TableRowsTask) -> Part:
    """Make the rows of one source part."""
    made_by = (task.dataset.model_dump_json(), task.contract, task.schema, task.order)
    cell_rows, value_rows, splitter, is_by_file = _open_row_builders(*made_by)
    log, kept, mismatches = RejectLog(CANONICAL_ROWS), _TableRowColumns(task), MismatchLog()
    decoded = _decode_part(task.part, Path(task.base), task.take)
    for number, rejected, raw in decoded.rejected:
        log.add(f"{task.part.part_id}:{number}", rejected, raw)
    columns = split_columns(decoded.values)
    if _has_cells(task.part):
        made = cell_rows(decoded.values, decoded.numbers, mismatches)
    else:
        made = value_rows(decoded.values, columns, decoded.numbers, mismatches)
    file_key = encode_basestring(task.part.url) if is_by_file else None
    is_by_time = task.dataset.splits.time_key is not None
    known: dict[str | bytes | None, Split | Rejected] = {}
    contents = hash_records(decoded.values, columns)
    for place, (number, row, content) in enumerate(zip(decoded.numbers, made, contents, strict=True)):
        row_id = f"{task.part.part_id}:{number}"
        if isinstance(row, Rejected):
            log.add(row_id, row, decoded.raws[place])
            continue
        group = file_key or row.group
        # Rows of one time, or of one group, are in one split, which is worked out once.
        unit = row.order if is_by_time else group or content
        split = known.get(unit)
        if split is None:
            split = known[unit] = assign_split(
                splitter, source=task.part.split_hint, group_key=group, order_key=row.order, content_hash=content
            )
        if isinstance(split, Rejected):
            log.add(row_id, split, decoded.raws[place])
            continue
        kept.add(
            row_id,
            row if file_key is None else row._replace(group=file_key),
            content,
            str(split),
            filters.hash_record_prefix(decoded.values[place]) if kept.by_prefix else None,
        )
    taken = task.part.records if task.take is None else min(task.take, task.part.records)
    left_out = [f"{task.part.part_id}:{number}" for number in range(taken, task.part.records)]
    return _save_table_rows(task, kept, log, left_out, mismatches)


def hash_record(decoded: Mapping[str, Json]) -> bytes:
    """Return 16 bytes that are equal for records with equal keys and values, as the source wrote them."""
    try:
        text = orjson.dumps(decoded, default=_tag_decimal, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        # Integers beyond 64 bits.
        text = json.dumps(decoded, default=_tag_decimal, ensure_ascii=False, sort_keys=True).encode(
            "utf-8", "surrogatepass"
        )
    return hashlib.blake2b(text, digest_size=filters.HASH_BYTES).digest()


def hash_records(records: Sequence[Mapping[str, Json]], columns: Mapping[str, ColumnValues]) -> list[bytes]:
    """Return the content of each of many records; equal values of a column are written once."""
    try:
        named = sorted((name.encode(), name) for name in columns)
        pieces = [columns[name].map(_make_content_writer(name)) for _, name in named]
    except (TypeError, UnicodeEncodeError):
        # Integers beyond 64 bits.
        return [hash_record(one) for one in records]
    if not pieces:
        return [hash_record(one) for one in records]
    digest_of, size = hashlib.blake2b, filters.HASH_BYTES
    return [digest_of(b"{%b}" % b"".join(row)[1:], digest_size=size).digest() for row in zip(*pieces, strict=True)]


def _make_content_writer(name: str) -> Callable[[Json], bytes]:
    start = b",%b:" % orjson.dumps(name)

    def write(value: Json) -> bytes:
        return (
            b"" if value is ABSENT else start + orjson.dumps(value, default=_tag_decimal, option=orjson.OPT_SORT_KEYS)
        )

    return write


def _tag_decimal(value: Any) -> list[str]:
    assert isinstance(value, Decimal)
    return ["decimal", str(value)]


class _TableRowColumns:
    """Rows of a part, column by column."""

    def __init__(self, task: TableRowsTask) -> None:
        self.dataset = task.dataset_name
        self.by_prefix = task.dataset.filters.deduplicate == "prefix200"
        self.ids: list[str] = []
        self.made: list[TypedRecord] = []
        self.hashes: list[bytes] = []
        self.dedupe_keys: list[bytes | None] = []
        self.splits: list[str] = []

    def add(self, row_id: str, made: TypedRecord, content: bytes, split: str, dedupe_key: bytes | None) -> None:
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
        return pa.table([known.get(field.name, _empty_column(field, count)) for field in ROW_SCHEMA], schema=ROW_SCHEMA)


def _empty_column(field: pa.Field, count: int) -> Any:
    if field.nullable:
        return pa.nulls(count, field.type)
    empty: Any = [] if pa.types.is_list(field.type) else False if pa.types.is_boolean(field.type) else 0
    return [empty] * count


def _save_table_rows(
    task: TableRowsTask, columns: _TableRowColumns, log: RejectLog, left_out: list[str], mismatches: MismatchLog
) -> Part:
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
        **count_messages(()),
        "splits": dict(sorted(Counter(columns.splits).items())),
        "examples_of_rejects": sample_rejects(log),
        "characters": sum(map(len, texts)) + len(texts),
        "mismatches": mismatches.to_json(),
    }
    files = {
        "rows": write_parquet(store, f"{at}/rows.parquet", columns.table()),
        "rejects": write_parquet(store, f"{at}/rejects.parquet", log.table()),
        "ledger": write_parquet(
            store, f"{at}/ledger.parquet", build_ledger(pa.chunked_array([columns.ids], pa.string()), log, left_out)
        ),
    }
    return Part(task.fingerprint, files, facts)
