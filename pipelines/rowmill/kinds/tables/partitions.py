"""The rows of a table as an index of integers, and in partitions, each of which one task plans.

    up to 1 Mi rows       one partition
    groups, series        by the hash of their keys: a task per block of parts writes the keys and lengths of its rows
                          in a file per partition, and a partition reads its file of every block
    records alone         runs of consecutive parts, of about 1 Mi rows, whose borders the parts' digests decide
    one series            one partition, whatever its size

So a new part changes the partitions of the groups that it has rows of, or the last run, and no other. A changed part
gives its rows other ids, and with these the examples that have them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets, find_distinct
from rowmill.core.json import Json
from rowmill.core.storage import File, Store, map_reads, read_tables
from rowmill.kinds.base import KindContext
from rowmill.kinds.tables.inference import TableEvidence
from rowmill.kinds.tables.options import RecordOptions, require_records
from rowmill.kinds.tables.schema import DAY, MAX_DIGITS, Mode, RecordSchema, SortKey
from rowmill.kinds.tables.serialization import Wire, read_json
from rowmill.kinds.tables.table_contract import TableContract
from rowmill.packing.pack_plan import cut_groups
from rowmill.parts.functions import (
    PartInputs,
    PartPlace,
    PartResult,
    collect_buckets,
    cut_blocks,
    part_function,
    write_buckets,
)
from rowmill.schema.manifest import Manifest, Part
from rowmill.schema.rows import SPLITS

PARTITION_ROWS = 1 << 20
"""Rows of a partition at most, up to `MAX_BITS`: a process plans them in some 400 MB."""
MAX_BITS = 8


def choose_hash_bits(rows: int) -> int:
    """Return how many bits of a key's hash decide its partition in a table of so many rows."""
    return min(max(-(-rows // PARTITION_ROWS) - 1, 0).bit_length(), MAX_BITS)


def assign_partitions(keys: pa.ChunkedArray, bits: int) -> NDArray[np.uint8]:
    """Return the partition of each group key: uint8[N]."""
    encoded = keys.combine_chunks().dictionary_encode()
    # Not the hash that decides a key's split.
    digests = (
        blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"partition").digest()
        for key in encoded.dictionary.to_pylist()
    )
    numbers = np.array([digest[0] >> (8 - bits) for digest in digests], np.uint8)
    return numbers[encoded.indices.to_numpy(zero_copy_only=False)]


def share_sample(wanted: int, counts: Sequence[int]) -> list[int]:
    """Divide a sample among partitions in proportion to their train records; the shares add up to `wanted`.

    Every partition has as many full passes as the table would have as a whole, and a share of the partial one.

        wanted 25, records 4 6 ─► 2 passes of both, and 2 3 of the partial pass ─► 10 15
    """
    total = sum(counts)
    if not total:
        return [0] * len(counts)
    full, rest = divmod(wanted, total)
    shares: list[int] = []
    before = 0
    for count in counts:
        # The remainder's borders are rounded, not its shares: so the shares add up.
        part = rest * (before + count) // total - rest * before // total
        shares.append(full * count + part)
        before += count
    return shares


# ── Index of rows ──────────────────────────────────────────────────────────────────────────────────


NO_KEY = "null"
"""Key of the only series in a dataset without a group column."""
KEY_COLUMNS = ("split", "group_key", "order_key")
"""The columns of rows that an index is made of."""
_LARGEST = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class RowIndex:
    """The rows of a dataset, or of a partition of it.

    `splits` int8[N] index `SPLITS`; `groups` int64[N] index `keys`, which ascend (None without groups); `positions`
    int64[N] order a group's rows (None: source order), in multiples of `seconds_per_position` if they are times (None
    if only their order is known). `first_rows` int64[P + 1] are the offsets of the parts; `row_in_part` int64[N]
    numbers the rows in their parts (None: all rows of every part).
    """

    splits: NDArray[np.int8]
    groups: Ints | None
    keys: tuple[str, ...]
    positions: Ints | None
    seconds_per_position: Decimal | None
    first_rows: Ints
    row_in_part: Ints | None = None

    def locate_rows(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the number of each row's part, and its number in this part."""
        which = np.searchsorted(self.first_rows, rows, "right") - 1
        return which, rows - self.first_rows[which] if self.row_in_part is None else self.row_in_part[rows]

    def sort_rows(self, rows: Ints) -> tuple[Ints, Ints]:
        """Sort rows by group and position, ties in source order; return them and the groups' offsets (end included).

        Groups without any of these rows are left out; without groups each row is its own group, in source order.
        """
        if self.groups is None:
            return rows, np.arange(len(rows) + 1, dtype=np.int64)
        keys = (rows, self.groups[rows]) if self.positions is None else (rows, self.positions[rows], self.groups[rows])
        ordered = rows[np.lexsort(keys)]
        begins = np.flatnonzero(np.diff(self.groups[ordered], prepend=-1))
        return ordered, np.append(begins, len(ordered)).astype(np.int64)


def build_row_index(
    tables: Sequence[pa.Table],
    sort_key: SortKey | None,
    *,
    has_keys: bool,
    is_series: bool,
    first_rows: Ints | None = None,
    row_in_part: Ints | None = None,
) -> RowIndex:
    """Index rows by their keys, in the order of the source: a table for each part, unless `first_rows` are given.

    `first_rows` and `row_in_part` are those of `RowIndex`. Of a time of day the position is the seconds since the first
    midnight of its series.
    """
    if first_rows is None:
        first_rows = compute_offsets([table.num_rows for table in tables])
    splits = [pc.index_in(table.column("split"), pa.array(SPLITS)).to_numpy() for table in tables]
    groups: Ints | None = None
    keys: tuple[str, ...] = ()
    if has_keys:
        codes: list[Ints] = [np.empty(0, np.int64)]
        numbers: dict[str, int] = {}
        for table in tables:
            encoded = table.column("group_key").combine_chunks().dictionary_encode()
            own = [numbers.setdefault(key, len(numbers)) for key in encoded.dictionary.to_pylist()]
            codes.append(np.array(own, np.int64)[encoded.indices.to_numpy(zero_copy_only=False)])
        keys = tuple(sorted(numbers, key=group_sort_key))
        ranks = np.empty(len(numbers), np.int64)
        ranks[[numbers[key] for key in keys]] = np.arange(len(numbers))
        groups = ranks[np.concatenate(codes)]
    elif is_series:
        groups, keys = np.zeros(int(first_rows[-1]), np.int64), (NO_KEY,)
    positions = seconds_per_position = None
    if sort_key is not None and groups is not None:
        columns = [table.column("order_key") for table in tables]
        positions, seconds_per_position = _read_positions(columns, is_time=sort_key.is_time)
        if sort_key.is_time_of_day and seconds_per_position is not None:
            positions = _roll_over_midnight(positions, groups, int(DAY / seconds_per_position))
    numbered = np.concatenate([np.empty(0, np.int8), *splits]).astype(np.int8)
    return RowIndex(numbered, groups, keys, positions, seconds_per_position, first_rows, row_in_part)


def count_group_sizes(columns: Iterable[pa.ChunkedArray]) -> tuple[tuple[str, ...], Ints]:
    """Return all group keys, ascending, and the rows of each, given the keys of one part after the other."""
    counts: Counter[str] = Counter()
    for column in columns:
        for one in column.value_counts().to_pylist():
            counts[one["values"]] += one["counts"]
    keys = sorted(counts, key=group_sort_key)
    return tuple(keys), np.array([counts[key] for key in keys], np.int64)


def group_sort_key(key: str) -> tuple[object, ...]:
    """Return a sort key for a group key: nulls first, then numbers by value, strings by code points, then the rest."""
    return _rank_json_value(read_json(key))


def _rank_json_value(value: Json) -> tuple[object, ...]:
    match value:
        case bool():
            return (3, value)
        case int() | Decimal():
            return (1, value)
        case str():
            return (2, value)
        case list():
            return (4, *(_rank_json_value(one) for one in value))
        case _:
            return (0, str(value))


def _read_positions(columns: Sequence[pa.ChunkedArray], *, is_time: bool) -> tuple[Ints, Decimal | None]:
    if not is_time:
        texts = [column.to_pylist() for column in columns]
        return _rank_values(texts), None
    try:
        whole = [pc.cast(column, pa.int64()).combine_chunks().to_numpy(zero_copy_only=False) for column in columns]
        return np.concatenate([np.empty(0, np.int64), *whole]), Decimal(1)
    except pa.ArrowInvalid:
        numbers = [[Decimal(text) for text in column.to_pylist()] for column in columns]
    decimals = max((-int(number.as_tuple().exponent) for part in numbers for number in part), default=0)
    decimals = max(decimals, 0)
    # Scaled, a number as short as `1e-999999999` has more digits than memory holds.
    if decimals > MAX_DIGITS or any(number.adjusted() > MAX_DIGITS for part in numbers for number in part):
        return _rank_values(numbers), None
    scaled = [[int(number.scaleb(decimals)) for number in part] for part in numbers]
    if any(abs(number) >= _LARGEST for part in scaled for number in part):
        return _rank_values(numbers), None
    return np.concatenate([np.empty(0, np.int64), *(np.array(part, np.int64) for part in scaled)]), Decimal(1).scaleb(
        -decimals
    )


def _rank_values(parts: Iterable[Sequence[object]]) -> Ints:
    """Replace each value by its rank among the distinct values."""
    held = [list(part) for part in parts]
    distinct: list[object] = sorted({one for part in held for one in part})  # pyrefly: ignore[bad-specialization]
    ranks = {one: at for at, one in enumerate(distinct)}
    return np.array([ranks[one] for part in held for one in part], np.int64)


def _roll_over_midnight(positions: Ints, groups: Ints, day: int) -> Ints:
    """Add a day to a series' times of day after every decrease; the order within a series is the source's."""
    order = np.argsort(groups, kind="stable")
    times, own = positions[order], groups[order]
    next_day = np.diff(times, prepend=times[:1]) < 0
    begins = np.diff(own, prepend=-1) != 0
    next_day &= ~begins
    days = np.cumsum(next_day)
    before = days[np.flatnonzero(begins)]
    rolled = np.empty_like(positions)
    rolled[order] = times + day * (days - np.repeat(before, np.diff(np.append(np.flatnonzero(begins), len(own)))))
    return rolled


@dataclass(frozen=True, slots=True)
class ObservedTable:
    """A table after all its parts were observed; `contract` is the recipe's, else the one inferred from the data."""

    schema: RecordSchema
    sort_key: SortKey | None
    contract: TableContract | None = None
    evidence: TableEvidence = field(default_factory=lambda: TableEvidence(0, {}))


@dataclass(frozen=True, slots=True)
class StoredExamples:
    """What the manifest of a table's examples says about them, for lengths, parsing and generation.

    `frame` is `PromptFrame` as JSON, and `options` are those of `TablePlan`; `longest_example` counts tokens, and
    `longest_group` records.
    """

    frame: dict[str, Any]
    wire: Wire
    options: dict[str, Any]
    longest_example: int
    longest_group: int


@dataclass(frozen=True, slots=True)
class StoredRecords:
    """What the manifests of a table's rows and examples say about it; `examples` is None in that of rows."""

    schema: RecordSchema
    sort_key: SortKey | None
    mode: Mode
    interval_seconds: str | None
    examples: StoredExamples | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON for the details of a manifest."""
        of_rows = {
            "schema": self.schema.to_json(),
            "order": None if self.sort_key is None else self.sort_key.name,
            "mode": self.mode,
            "interval_seconds": self.interval_seconds,
        }
        return (
            of_rows
            if self.examples is None
            else of_rows | {one.name: getattr(self.examples, one.name) for one in fields(self.examples)}
        )

    @classmethod
    def load(cls, output: Manifest) -> "StoredRecords":
        """Return what a manifest of `canonical_rows` or `tokenized_examples` says."""
        stored = output.details["records"]
        examples = (
            StoredExamples(**{one.name: stored[one.name] for one in fields(StoredExamples)})
            if "frame" in stored
            else None
        )
        sort_key = None if stored["order"] is None else SortKey(stored["order"])
        schema = RecordSchema.from_json(stored["schema"])
        return cls(schema, sort_key, stored["mode"], stored["interval_seconds"], examples)

    @classmethod
    def load_examples(cls, output: Manifest) -> StoredExamples:
        """Return what a manifest of `tokenized_examples` says about its examples alone."""
        examples = cls.load(output).examples
        assert examples is not None
        return examples


def load_observed_table(output: Manifest) -> ObservedTable:
    """Load the table of a manifest of `canonical_rows` or `tokenized_examples`, without its evidence."""
    stored = StoredRecords.load(output)
    return ObservedTable(stored.schema, stored.sort_key)


def index_parts(context: KindContext, parts: Sequence[Part], observed: ObservedTable) -> RowIndex:
    """Index the rows of parts."""
    tables = read_tables(context.store, [part.files["rows"] for part in parts], KEY_COLUMNS)
    form = require_records(context.dataset)
    return build_row_index(tables, observed.sort_key, has_keys=form.has_keys, is_series=form.mode == "sequential")


def read_row_column(store: Store, files: Sequence[File], index: RowIndex, rows: Ints, column: str) -> list[str]:
    """Return a column of the given rows, in their order, reading each file once; `files` are those of the index."""
    which, row_in_part = index.locate_rows(rows)
    found = np.empty(len(rows), object)
    for i in find_distinct(which).tolist():
        own = np.flatnonzero(which == i)
        cells = store.table(files[i], [column]).column(0)
        found[own] = cells.take(pa.array(row_in_part[own])).to_pylist()
    return found.tolist()


# ── Partitions ─────────────────────────────────────────────────────────────────────────────────────


KEY_BLOCK_ROWS = 1 << 21
"""Rows of a block, whose keys a task holds: some 200 bytes each."""


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
    `name` is that of a partition by hash, which decides what is drawn for it.
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
"""A row of a partition in a block: `part` numbers the block's parts, `place` (a stored name) the part's rows."""


@dataclass(frozen=True, slots=True)
class KeyBlockInputs(PartInputs):
    """Consecutive parts whose keys and lengths are divided among partitions."""

    parts: tuple[RowPart, ...]
    bits: int

    @property
    def input_rows(self) -> int:
        return sum(part.rows.rows for part in self.parts)

    @property
    def input_bytes(self) -> int:
        return sum(part.rows.bytes for part in self.parts)


def partition_rows(context: KindContext, parts: Sequence[RowPart]) -> list[TablePartition]:
    """Return the partitions of a table; the sizes and digests of its parts decide where they end."""
    form, counts = require_records(context.dataset), [part.rows.rows for part in parts]
    # Records of a single series are planned together.
    if sum(counts) <= PARTITION_ROWS or (form.mode == "sequential" and not form.has_keys):
        return [TablePartition(0, tuple(parts))]
    if form.mode == "tabular":
        runs = cut_groups(counts, [part.rows.digest for part in parts], PARTITION_ROWS)
        return [TablePartition(first, tuple(parts[first:end])) for first, end in runs]
    bits, blocks = choose_hash_bits(sum(counts)), cut_blocks(counts, KEY_BLOCK_ROWS)
    written = context.map(
        split_block_keys, [KeyBlockInputs(tuple(parts[block.start : block.stop]), bits) for block in blocks]
    ).parts
    partitions: list[TablePartition] = []
    for number, lines in collect_buckets(written):
        file_of_block = {block.block: block.lines for block in lines}
        keys = tuple((len(block), file_of_block.get(at)) for at, block in enumerate(blocks))
        partitions.append(TablePartition(0, tuple(parts), keys, f"{number} of {1 << bits}"))
    return partitions


@part_function(version=1)
def split_block_keys(inputs: KeyBlockInputs, place: PartPlace) -> PartResult:
    """Write the keys and lengths of a block's rows, in a file per partition."""

    def read_part(numbered: tuple[int, RowPart]) -> pa.Table:
        number, part = numbered
        keys = place.store.table(part.rows, KEY_COLUMNS)
        lengths = place.store.table(part.tokens, ("length",)).column(0)
        numbers, row_in_part = np.full(len(keys), number, np.int32), np.arange(len(keys), dtype=np.int32)
        return pa.table([numbers, row_in_part, *keys.columns, lengths], schema=_KEY_SCHEMA)

    lines = pa.concat_tables(map_reads(place.store, read_part, enumerate(inputs.parts)))
    of_partition = assign_partitions(lines.column("group_key"), inputs.bits)
    return PartResult(write_buckets(place, lines, of_partition.astype(np.int64), 1 << inputs.bits))


@dataclass(frozen=True, slots=True, eq=False)
class PartitionRows:
    """The rows of a partition as integers: their index, and `tokens` int64[N] of each, −1 for one that was rejected.

    `name` is that of the partition.
    """

    index: RowIndex
    tokens: Ints
    name: str | None


def read_partition(
    store: Store, partition: TablePartition, form: RecordOptions, sort_key: SortKey | None
) -> PartitionRows:
    """Read the rows of a partition as integers."""
    first_rows = row_in_part = None
    if partition.keys:
        files = [file for _, file in partition.keys]
        tables = map_reads(store, lambda file: _KEY_SCHEMA.empty_table() if file is None else store.table(file), files)
        counts = [
            np.bincount(table.column("part").to_numpy(), minlength=parts)
            for table, (parts, _) in zip(tables, partition.keys, strict=True)
        ]
        first_rows = compute_offsets(np.concatenate(counts))
        row_in_part = np.concatenate([table.column("place").to_numpy() for table in tables]).astype(np.int64)
        lengths = [table.column("length") for table in tables]
    else:
        tables = read_tables(store, [part.rows for part in partition.parts], KEY_COLUMNS)
        tokens = read_tables(store, [part.tokens for part in partition.parts], ("length",))
        lengths = [table.column(0) for table in tokens]
    index = build_row_index(
        tables,
        sort_key,
        has_keys=form.has_keys,
        is_series=form.mode == "sequential",
        first_rows=first_rows,
        row_in_part=row_in_part,
    )
    row_tokens = np.concatenate([np.empty(0, np.int64), *(own.to_numpy() for own in lengths)]).astype(np.int64)
    return PartitionRows(index, row_tokens, partition.name)
