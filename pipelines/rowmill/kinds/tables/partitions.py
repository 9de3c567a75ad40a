"""Partitions of a table: rows of groups together, in the order of their keys.

The rows of a table in partitions, each of which one task plans.

    up to 1 Mi rows       one partition: the calling process plans it, and writes nothing for it
    groups, series        by the hash of their keys: a task per block of parts writes the keys and lengths of its rows
                          in a file per partition, and a partition reads its file of every block
    records alone         runs of consecutive parts, of about 1 Mi rows, whose borders the parts' digests decide
    one series            one partition, whatever its size

So a new part changes the partitions of the groups that it has rows of, or the last run, and no other. A changed part
gives its rows other ids, and with these the examples that have them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Integers, Ints, compute_offsets, find_distinct
from rowmill.core.storage import File, Store, map_reads, read_tables
from rowmill.kinds.joint_rows import KindContext
from rowmill.kinds.tables import row_index
from rowmill.kinds.tables.options import Records, require_records
from rowmill.kinds.tables.row_index import KEY_COLUMNS, RowIndex
from rowmill.kinds.tables.schema import RecordSchema
from rowmill.kinds.tables.table_contract import TableContract, TableEvidence
from rowmill.kinds.tables.time_order import SortKey
from rowmill.packing.pack_plan import cut_groups
from rowmill.parts.functions import PartInputs, PartPlace, PartResult, part_function
from rowmill.parts.shuffle import collect_buckets, cut_blocks, write_buckets
from rowmill.schema.manifest import Part


@dataclass(frozen=True, slots=True)
class ObservedTable:
    """A table after all its parts were observed.

    `contract` is the one in force: the recipe's, else the last build's, else the one inferred from the data.
    """

    schema: RecordSchema
    order: SortKey | None
    contract: TableContract | None = None
    evidence: TableEvidence = field(default_factory=lambda: TableEvidence(0, {}))
    proposed: TableContract | None = None
    earlier: Mapping[str, Any] | None = None
    observed: tuple[str, ...] = ()
    """Fingerprints of the parts' evidence, in part order; the next build reads it again."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON for the manifest, which parsing and generation read."""
        return {"schema": self.schema.to_json(), "order": None if self.order is None else self.order.name}


def load_observed_table(details: dict[str, Any]) -> ObservedTable:
    """Load the table from the details of a `canonical_rows` manifest."""
    recorded = details["records"]
    return ObservedTable(
        RecordSchema.from_json(recorded["schema"]), None if recorded["order"] is None else SortKey(recorded["order"])
    )


def get_table_options(context: KindContext) -> Records:
    """Return the dataset's options of records."""
    return require_records(context.dataset)


# ── Rows ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """How rows are indexed: by groups or as series, and in which order."""

    order: SortKey | None
    is_grouped: bool
    is_series: bool

    @classmethod
    def of(cls, context: KindContext, observed: ObservedTable) -> "IndexOptions":
        """Return the options of the dataset."""
        form = get_table_options(context)
        return cls(observed.order, form.is_grouped, form.mode == "sequential")


def index_parts(context: KindContext, parts: Sequence[Part], observed: ObservedTable) -> RowIndex:
    """Index the rows of parts."""
    options = IndexOptions.of(context, observed)
    return row_index.load_row_index(
        context.store,
        [part.files["rows"] for part in parts],
        options.order,
        is_grouped=options.is_grouped,
        is_series=options.is_series,
    )


def read_row_column(store: Store, files: Sequence[File], index: RowIndex, rows: Ints, column: str) -> list[str]:
    """Return a column of the given rows, in their order, reading each file once; `files` are those of the index."""
    which, places = index.locate_rows(rows)
    found = np.empty(len(rows), object)
    for i in find_distinct(which).tolist():
        own = np.flatnonzero(which == i)
        cells = store.table(files[i], [column]).column(0)
        found[own] = cells.take(pa.array(places[own])).to_pylist()
    return found.tolist()


# ── The rows of a table in partitions, each of which one task plans ──


BLOCK_ROWS = 1 << 21
"""Rows of a block, whose keys a task holds: some 200 bytes each."""


@dataclass(frozen=True, slots=True)
class PartitionBorders:
    """Where partitions end: groups by the first `bits` of a hash, or runs of parts `[first, end)`."""

    bits: int
    runs: tuple[tuple[int, int], ...]

    @property
    def is_whole(self) -> bool:
        """Whether there is one partition of all rows."""
        return self.bits == 0 and len(self.runs) <= 1


def choose_borders(context: KindContext, rows: Sequence[File]) -> PartitionBorders:
    """Choose the partitions of a table by the sizes and digests of its parts."""
    whole = PartitionBorders(0, ((0, len(rows)),))
    counts, limit = [file.rows for file in rows], row_index.PARTITION_ROWS
    form = get_table_options(context)
    # Records of a single series are planned together.
    if sum(counts) <= limit or (form.mode == "sequential" and not form.is_grouped):
        return whole
    if form.mode != "tabular":
        return PartitionBorders(row_index.choose_hash_bits(sum(counts)), whole.runs)
    return PartitionBorders(0, tuple(cut_groups(counts, [file.digest for file in rows], limit)))


@dataclass(frozen=True, slots=True)
class RowPart:
    """A part of rows, the ids of its records, and the fingerprint of these ids, which identifies both."""

    rows: File = field(compare=False)
    tokens: File = field(compare=False)
    fingerprint: str


@dataclass(frozen=True, slots=True)
class TablePartition:
    """Rows that are planned together: all of `parts`, or those in the files of `keys`.

    `first` is the number of its first part. `keys` are files of blocks, each with the number of parts of its block.
    `name` is that of a partition by hash.
    """

    first: int
    parts: tuple[RowPart, ...]
    keys: tuple[tuple[int, File | None], ...] = ()
    name: str | None = None

    @property
    def identity(self) -> list[object]:
        """Everything that decides which rows it has, how they are numbered, what they are called, and their lengths."""
        names = [part.fingerprint for part in self.parts]
        if not self.keys:
            return [*names]
        ends = np.cumsum([parts for parts, _ in self.keys]).tolist()
        # Rows are numbered by their parts, so that those of other blocks count, too.
        blocks = [
            [parts, None if file is None else names[end - parts : end]]
            for (parts, file), end in zip(self.keys, ends, strict=True)
        ]
        return [self.name, blocks]

    @property
    def bytes(self) -> int:
        """Size of the files that are read to plan it."""
        if not self.keys:
            return sum(part.rows.bytes for part in self.parts)
        return sum(file.bytes for _, file in self.keys if file is not None)


@dataclass(frozen=True, slots=True, eq=False)
class PartitionRows:
    """A partition's rows as integers: `lengths` int64[N] are their tokens, −1 if rejected."""

    index: RowIndex
    lengths: Ints


# ── Partitions by hash ─────────────────────────────────────────────────────────────────────────────


_KEY_SCHEMA = pa.schema(
    [
        pa.field("part", pa.int32(), nullable=False),
        pa.field("place", pa.int32(), nullable=False),
        pa.field("split", pa.string()),
        pa.field("group_key", pa.string()),
        pa.field("order_key", pa.string()),
        pa.field("length", pa.int32(), nullable=False),
    ]
)
"""A row of a partition in a block: `part` numbers the block's parts, `place` the part's rows."""


@dataclass(frozen=True, slots=True)
class KeyBlockInputs(PartInputs):
    """Consecutive parts whose keys and lengths are divided among partitions."""

    parts: tuple[RowPart, ...]
    bits: int

    @property
    def input_rows(self) -> int:
        """Rows of the parts."""
        return sum(part.rows.rows for part in self.parts)

    @property
    def input_bytes(self) -> int:
        """Size of the rows."""
        return sum(part.rows.bytes for part in self.parts)


def partition_rows(context: KindContext, borders: PartitionBorders, parts: Sequence[RowPart]) -> list[TablePartition]:
    """Return the partitions of a table."""
    if not borders.bits:
        return [TablePartition(first, tuple(parts[first:end])) for first, end in borders.runs]
    blocks = cut_blocks([part.rows.rows for part in parts], BLOCK_ROWS)
    written = context.map(
        split_block_keys, [KeyBlockInputs(tuple(parts[block.start : block.stop]), borders.bits) for block in blocks]
    ).parts
    partitions: list[TablePartition] = []
    for number, lines in collect_buckets(written):
        file_of_block = {block.block: block.lines for block in lines}
        keys = tuple((len(block), file_of_block.get(at)) for at, block in enumerate(blocks))
        partitions.append(TablePartition(0, tuple(parts), keys, name_partition(number, borders.bits)))
    return partitions


@part_function(version=1)
def split_block_keys(inputs: KeyBlockInputs, place: PartPlace) -> PartResult:
    """Write the keys and lengths of a block's rows, in a file per partition."""
    tables = map_reads(place.store, lambda numbered: _read_part_keys(place.store, *numbered), enumerate(inputs.parts))
    lines = pa.concat_tables(tables)
    of_partition = row_index.assign_partitions(lines.column("group_key"), inputs.bits)
    return PartResult(write_buckets(place, lines, of_partition.astype(np.int64), 1 << inputs.bits))


def _read_part_keys(store: Store, number: int, part: RowPart) -> pa.Table:
    keys = store.table(part.rows, KEY_COLUMNS)
    lengths = store.table(part.tokens, ("length",)).column(0)
    own = {"part": np.full(len(keys), number, np.int32), "place": np.arange(len(keys), dtype=np.int32)}
    columns = [
        own[f.name] if f.name in own else lengths if f.name == "length" else keys.column(f.name) for f in _KEY_SCHEMA
    ]
    return pa.table(columns, schema=_KEY_SCHEMA)


def name_partition(number: int, bits: int) -> str:
    """Return the name of a partition by hash, which decides what is drawn for it."""
    return f"{number} of {1 << bits}"


# ── Reading partitions ─────────────────────────────────────────────────────────────────────────────


def read_partition(store: Store, partition: TablePartition, options: IndexOptions) -> PartitionRows:
    """Read the rows of a partition."""
    if partition.keys:
        return _read_hash_partition(store, partition, options)
    tables = read_tables(store, [part.rows for part in partition.parts], KEY_COLUMNS)
    tokens = read_tables(store, [part.tokens for part in partition.parts], ("length",))
    lengths = join_lengths([table.column(0).to_numpy() for table in tokens])
    return PartitionRows(_build_index(tables, options), lengths)


def _read_hash_partition(store: Store, partition: TablePartition, options: IndexOptions) -> PartitionRows:
    files = [file for _, file in partition.keys]
    tables = map_reads(store, lambda file: _KEY_SCHEMA.empty_table() if file is None else store.table(file), files)
    counts = [
        np.bincount(table.column("part").to_numpy(), minlength=parts)
        for table, (parts, _) in zip(tables, partition.keys, strict=True)
    ]
    places = np.concatenate([table.column("place").to_numpy() for table in tables]).astype(np.int64)
    first_rows = compute_offsets(np.concatenate(counts))
    index = _build_index(tables, options, first_rows, places)
    return PartitionRows(index, join_lengths([table.column("length").to_numpy() for table in tables]))


def _build_index(
    tables: Sequence[pa.Table], options: IndexOptions, first_rows: Ints | None = None, places: Ints | None = None
) -> RowIndex:
    return row_index.build_row_index(
        tables,
        options.order,
        is_grouped=options.is_grouped,
        is_series=options.is_series,
        first_rows=first_rows,
        places=places,
    )


def join_lengths(lengths: Sequence[Integers]) -> Ints:
    """Join the lengths of parts."""
    return np.concatenate([np.empty(0, np.int64), *lengths]).astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class HeldPartition:
    """A partition in memory: its name if a hash decides it, its rows, and the files of their parts."""

    name: str | None
    rows: PartitionRows
    files: Sequence[File]


def hold_partitions(
    store: Store, files: Sequence[File], lengths: Sequence[Ints], borders: PartitionBorders, options: IndexOptions
) -> Iterator[HeldPartition]:
    """Yield the partitions of a table given the lengths of all parts; nothing is written."""
    tables = read_tables(store, files, KEY_COLUMNS)
    if not borders.bits:
        for first, end in borders.runs:
            rows = PartitionRows(_build_index(tables[first:end], options), join_lengths(lengths[first:end]))
            yield HeldPartition(None, rows, files[first:end])
        return
    of_partition = [row_index.assign_partitions(table.column("group_key"), borders.bits) for table in tables]
    for number in range(1 << borders.bits):
        own = [np.flatnonzero(one == number) for one in of_partition]
        if any(map(len, own)):
            held = [table.take(pa.array(rows)) for table, rows in zip(tables, own, strict=True)]
            index = _build_index(held, options, compute_offsets([len(rows) for rows in own]), np.concatenate(own))
            rows = PartitionRows(index, join_lengths([one[own] for one, own in zip(lengths, own, strict=True)]))
            yield HeldPartition(name_partition(number, borders.bits), rows, files)
