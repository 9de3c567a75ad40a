"""Sequences by their place in the order: places → rows of shards, which are checked where a shard is opened.

    place    0 1 2 3 4 5 6 7 …      stored for 4 ranks: place p is row p // 4 of stored rank p mod 4
    2 ranks  0 1 0 1 0 1 0 1        rank 1 reads places 1, 3, 5, 7: stored ranks 1 and 3, each in its own order

    copied   that row of the shards of the stored rank
    index    that line of the index of the stored rank names a shard and a row in it; −1 is the shard of a filler

    shards  7 7 3        one task per shard: footer ─► row groups ─► rows
    rows    5 900 12     on remote storage several at once, since each waits for its requests

The check before a token reaches a trainer reads only footers: a Parquet footer holds the position of every column
chunk, and so the length of its file; the card in it names order, rank and tokenizer. Changed tokens in a file of the
right length are found by `verify`, which reads everything once. Decoded row groups stay in memory up to `KEPT_BYTES`,
so that data of a million tokens, and ranks that are read in turn, are decoded once.
"""

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import gcd
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowmill.core.arrays import Ints, Tokens, compute_offsets, find_distinct, view_numbers
from rowmill.core.errors import IntegrityError, PipelineError
from rowmill.core.remote import read_end, read_range
from rowmill.core.storage import Store, digest_bytes, digest_file
from rowmill.reader.published import PublishedBuild, Shard, raise_missing
from rowmill.reader.sequences import DecodedRowGroup, PackedSequence, list_columns
from rowmill.reader.source_losses import SourceNames
from rowmill.schema.indexed_shards import NEEDED_COLUMNS, ExampleCache, ExampleReferences, insert_tokens
from rowmill.schema.manifest import File

# A Parquet file ends with its footer's length and four magic bytes.
_PARQUET_TAIL_BYTES = 8

FIRST_END_BYTES = 64 << 10
"""What is read of the end of a remote file: the footer, which has some 40 KB in a shard of two million tokens. A longer
one takes two requests more."""


class ExpectedShard(NamedTuple):
    """A shard, and values that its identity card must have."""

    shard: Shard
    card: Mapping[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class ShardFooter:
    """What a checked shard's footer says: row group g has the rows `[offsets[g], offsets[g + 1])`."""

    metadata: Any
    offsets: Ints
    columns: frozenset[str]
    size_bytes: int
    references: ExampleReferences | None
    """The examples that hold its tokens; None: it holds them itself."""

    @property
    def memory_bytes(self) -> int:
        """The memory of the footer as Arrow holds it: measured 280 KB for 42 KB in a file."""
        return 7 * int(self.metadata.serialized_size)


def check_shard(store: Store, expected: ExpectedShard, *, verify: bool) -> ShardFooter:
    """Check a shard by its footer, with `verify` by its digest too.

    Raises IntegrityError if it is missing or truncated, belongs to another order, rank, dataset or tokenizer, or
    (`verify`) has another digest than the published one.
    """
    shard, where = expected.shard, store.path(expected.shard.path)
    try:
        # Arrow reads a local file itself, not through Python.
        source: Any = where
        if store.is_local:
            size_bytes = os.path.getsize(where)
        else:
            address = store.address(shard.path)
            end, size_bytes = read_end(where, address, FIRST_END_BYTES)
            needed = int.from_bytes(end[-_PARQUET_TAIL_BYTES:-4], "little") + _PARQUET_TAIL_BYTES
            if len(end) < min(needed, size_bytes):
                end, size_bytes = read_end(where, address, needed)
            # What is before the footer is not looked at, so it may be absent.
            source = pa.BufferReader(end)
        with pq.ParquetFile(source) as opened:
            metadata, schema = opened.metadata, opened.schema_arrow
    except FileNotFoundError:
        raise_missing(where)
    except (pa.ArrowInvalid, OSError) as error:
        raise IntegrityError(f"{where}: not a readable Parquet file ({error}); remove it and build again") from error
    _require_equal(where, "rows", metadata.num_rows, shard.rows)
    # Row groups are written one after the other: the last one ends where the footer begins.
    last = _list_chunks(metadata, metadata.num_row_groups - 1) if metadata.num_row_groups else []
    footer_begin = max((_find_column_start(column) + column.total_compressed_size for column in last), default=4)
    expected_bytes = int(footer_begin) + int(metadata.serialized_size) + _PARQUET_TAIL_BYTES
    _require_equal(where, "bytes", size_bytes, expected_bytes)
    card = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    for name, value in expected.card.items():
        _require_equal(where, name, card.get(f"rowmill.{name}"), value)
    if verify:
        path = shard.path
        digest = digest_file(store.local(path)) if store.is_local else digest_bytes(store.read(path))
        _require_equal(where, "digest", digest, shard.digest)
    groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    references = ExampleReferences.parse(schema.metadata)
    return ShardFooter(metadata, compute_offsets(groups), frozenset(schema.names), size_bytes, references)


def read_row_group(store: Store, path: str, footer: ShardFooter, group: int, columns: Sequence[str]) -> pa.Table:
    """Read columns of one row group of a checked shard.

    Raises IntegrityError if the file is missing by now, or the row group cannot be decoded.
    """
    try:
        source: Any = store.path(path)
        if not store.is_local:
            # The columns, and what is between them, in one request: opening the file would take three, and read ahead
            # what is not wanted. They are at their place in memory as long as the file, of which the other pages are
            # never touched.
            chunks = _list_chunks(footer.metadata, group)
            needed = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]
            begin = min(_find_column_start(chunk) for chunk in needed)
            end = max(_find_column_start(chunk) + chunk.total_compressed_size for chunk in needed)
            whole = mmap.mmap(-1, footer.size_bytes)
            whole[begin:end] = read_range(store.path(path), store.address(path), begin, end)
            source = pa.BufferReader(pa.py_buffer(whole))
        # Not buffered before: Arrow's own threads would do that, which may let go of a Python object only when the
        # interpreter is ending, and that aborts the process. The columns are in memory already, or in a local file.
        file = pq.ParquetFile(source, metadata=footer.metadata, pre_buffer=False)
        try:
            return file.read_row_group(group, columns=list(columns), use_threads=False).combine_chunks()
        finally:
            file.close(force=True)
    except FileNotFoundError:
        raise_missing(store.path(path))
    except PipelineError:
        # The storage does not answer, which says nothing about the file.
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise IntegrityError(
            f"{store.path(path)}: row group {group} cannot be read ({' '.join(str(error).split())}); it must be as the "
            "build wrote it; copy it again, or remove it and build again"
        ) from error


def _require_equal(where: str, what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise IntegrityError(f"{where}: {what} {actual}, but {expected} was published; remove the file and build again")


def _list_chunks(metadata: Any, group: int) -> list[Any]:
    row_group = metadata.row_group(group)
    return [row_group.column(i) for i in range(metadata.num_columns)]


def _find_column_start(column: Any) -> int:
    return column.data_page_offset if column.dictionary_page_offset is None else column.dictionary_page_offset


# ── Rows by shard and row ──


ResultT = TypeVar("ResultT")

CHECKED_AT_ONCE = 16
"""Shards that are checked at the same time: a remote footer costs round trips."""

READ_AT_ONCE = 8
"""Shards of remote storage that are read at the same time: at 20 ms a request some 300 row groups a second."""

KEPT_BYTES = 16 << 20
"""Memory for decoded row groups, unless the row groups that are read in turn need more."""

KEPT_FOOTER_BYTES = 16 << 20
"""Memory for footers, unless the shards that are read in turn need more: a build may have tens of thousands."""

KEPT_EXAMPLES_BYTES = 64 << 20
"""Memory for files of examples, out of which sequences of shards without tokens are joined."""

_SPARSE_SHARE = 4
"""A sequence is copied out of its row group if it is not one of at least every fourth of it."""


class StoredRows:
    """Rows of some shards. `in_turn` is the number of shards that are read in turn, such as one per stored rank.

    With `names` the sequences say where their segments come from.

    Safe to share among threads. A copy in another process, forked or pickled, opens its own files.
    """

    def __init__(
        self, store: Store, shards: Sequence[ExpectedShard], *, in_turn: int = 1, names: SourceNames | None = None
    ) -> None:
        self._store, self._shards, self._in_turn, self._names = store, shards, in_turn, names
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._footers: OrderedDict[int, ShardFooter] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], DecodedRowGroup] = OrderedDict()
        self._kept_bytes = self._kept_footer_bytes = 0
        self._threads: ThreadPoolExecutor | None = None
        self._examples = ExampleCache(self._store, KEPT_EXAMPLES_BYTES)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments alone, so that another process opens its own files."""
        return partial(StoredRows, in_turn=self._in_turn, names=self._names), (self._store, self._shards)

    def require(self, numbers: Iterable[int], *, verify: bool) -> None:
        """Check some shards concurrently; raises IntegrityError for the first one that is not the published file."""
        with ThreadPoolExecutor(CHECKED_AT_ONCE) as threads:
            named: dict[str, File] = {}
            check = partial(check_shard, self._store, verify=verify)
            wanted = {number: self._shards[number] for number in numbers}
            for number, footer in zip(wanted, threads.map(check, wanted.values()), strict=True):
                self._keep_footer(number, footer)
                if verify and footer.references is not None:
                    named |= {file.path: file for file in footer.references.files}
            # Reading a file of examples compares its digest.
            for _ in threads.map(self._store.content, named.values()):
                pass

    def at(self, shards: Ints, rows: Ints) -> list[PackedSequence]:
        """Return the sequences at these rows of these shards, which need not be sorted.

        The sequences may be views of decoded row groups: copy those that are kept.
        """
        return self._gather(shards, rows, self._take_sequences)

    def list_example_ids(self, shards: Ints, rows: Ints) -> list[list[str]]:
        """Return the examples that the sequences at these rows are made of; a filler has none."""
        return self._gather(shards, rows, self._take_example_ids)

    def _gather(self, shards: Ints, rows: Ints, take: Callable[[tuple[int, Ints]], list[ResultT]]) -> list[ResultT]:
        if self._process != os.getpid():
            # Forked: an inherited lock may stay locked, and threads are not inherited.
            self._begin()
        order = np.lexsort((rows, shards))
        used, begins = np.unique(shards[order], return_index=True)
        places = np.split(order, begins[1:])
        tasks = [(shard, rows[some]) for shard, some in zip(used.tolist(), places, strict=True)]
        results: Iterable[list[ResultT]]
        if self._store.is_local or len(tasks) < 2:
            results = map(take, tasks)
        else:
            with self._lock:
                self._threads = self._threads or ThreadPoolExecutor(READ_AT_ONCE, thread_name_prefix="rowmill-rows")
            results = self._threads.map(take, tasks)
        values: list[Any] = [None] * len(rows)
        for some, fetched in zip(places, results, strict=True):
            for place, value in zip(some.tolist(), fetched, strict=True):
                values[place] = value
        return values

    # ── One shard ──────────────────────────────────────────────────────────────────────────────────

    def _take_sequences(self, task: tuple[int, Ints]) -> list[PackedSequence]:
        shard, rows = task
        footer = self._load_footer(shard)
        offsets = footer.offsets
        groups = np.searchsorted(offsets, rows, "right") - 1
        sequences: list[PackedSequence] = []
        # Rows are sorted: a row group has a run of them.
        runs = np.unique(groups, return_index=True, return_counts=True)
        for group, first, count in zip(*(column.tolist() for column in runs), strict=True):
            begin, chosen = int(offsets[group]), rows[first : first + count]
            if footer.references is not None:
                sequences += self._join_examples(shard, group, chosen - begin)
                continue
            decoded = self._load_group(shard, group)
            some = [decoded.row(row - begin) for row in chosen.tolist()]
            # A few sequences must not keep the memory of a whole row group while they wait.
            is_sparse = _SPARSE_SHARE * count < offsets[group + 1] - begin
            sequences += [sequence.copy() for sequence in some] if is_sparse else some
        return sequences

    def _join_examples(self, shard: int, group: int, rows: Ints) -> list[PackedSequence]:
        """Return sequences of a row group that names their tokens; each file of examples is looked up once."""
        footer = self._load_footer(shard)
        assert footer.references is not None
        with_sources = self._names is not None
        columns = list_columns(footer.references.list_columns(footer.columns), with_sources=with_sources)
        stored = [name for name in footer.columns if name in {*columns, *NEEDED_COLUMNS}]
        path = self._shards[shard].shard.path
        table = read_row_group(self._store, path, footer, group, stored).take(pa.array(rows))
        joined = insert_tokens(table, footer.references, self._examples.load, columns).combine_chunks()
        decoded = DecodedRowGroup.of({name: joined.column(name).combine_chunks() for name in columns}, self._names)
        return [decoded.row(row) for row in range(len(rows))]

    def _take_example_ids(self, task: tuple[int, Ints]) -> list[list[str]]:
        shard, rows = task
        offsets = self._load_footer(shard).offsets
        groups = (np.searchsorted(offsets, rows, "right") - 1).tolist()
        read = {group: self._read_columns(shard, group, ["example_ids"]) for group in set(groups)}
        pairs = zip(rows.tolist(), groups, strict=True)
        # The only segment of a filler has an empty id.
        return [
            [name for name in read[group]["example_ids"][row - int(offsets[group])].as_py() if name]
            for row, group in pairs
        ]

    def _load_footer(self, shard: int) -> ShardFooter:
        with self._lock:
            footer = self._footers.get(shard)
            if footer is not None:
                self._footers.move_to_end(shard)
                return footer
        footer = check_shard(self._store, self._shards[shard], verify=False)
        self._keep_footer(shard, footer)
        return footer

    def _keep_footer(self, shard: int, footer: ShardFooter) -> None:
        with self._lock:
            before = self._footers.get(shard)
            self._kept_footer_bytes += footer.memory_bytes - (before.memory_bytes if before else 0)
            self._footers[shard] = footer
            while self._kept_footer_bytes > KEPT_FOOTER_BYTES and len(self._footers) > self._in_turn:
                self._kept_footer_bytes -= self._footers.popitem(last=False)[1].memory_bytes

    def _load_group(self, shard: int, number: int) -> DecodedRowGroup:
        key = (shard, number)
        with self._lock:
            group = self._groups.get(key)
            if group is not None:
                self._groups.move_to_end(key)
                return group
        columns = list_columns(self._load_footer(shard).columns, with_sources=self._names is not None)
        group = DecodedRowGroup.of(self._read_columns(shard, number, columns), self._names)
        with self._lock:
            self._kept_bytes += group.size_bytes - (self._groups[key].size_bytes if key in self._groups else 0)
            self._groups[key] = group
            while self._kept_bytes > KEPT_BYTES and len(self._groups) > self._in_turn:
                self._kept_bytes -= self._groups.popitem(last=False)[1].size_bytes
        return group

    def _read_columns(self, shard: int, group: int, names: Sequence[str]) -> dict[str, Any]:
        path, footer = self._shards[shard].shard.path, self._load_footer(shard)
        table = read_row_group(self._store, path, footer, group, names)
        return {name: table.column(name).chunk(0) for name in names}


CHECKED_REMOTE_SHARDS = 64
"""Shards that are checked before the first batch on remote storage: 256 take half a second of processor time in
every rank. The others are checked when they are first read; `verify` checks all. Local shards are all checked."""

KEPT_INDEX_GROUPS = 64
"""Decoded row groups of indexes that stay in memory: half a megabyte each."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSource:
    """The sequences of an order by place."""

    rows: StoredRows
    places: "CopiedPlaces | IndexedPlaces"

    def at(self, places: Ints) -> list[PackedSequence]:
        """Return the sequences at these places; the places need not be sorted.

        The sequences are views of decoded row groups: copy those that are kept.
        """
        return self.rows.at(*self.places.locate(places))

    def list_example_ids(self, places: Ints) -> list[list[str]]:
        """Return the examples that are in the sequences at these places; a filler has none."""
        return self.rows.list_example_ids(*self.places.locate(places))


# ── Layout copied ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class CopiedPlaces:
    """Shards in order of ranks: `starts` int64[S + 1] are their first rows, where each rank has `per_rank` rows."""

    world_size: int
    per_rank: int
    starts: Ints

    def locate(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the shard and the row of each place."""
        rows = places % self.world_size * self.per_rank + places // self.world_size
        shards = np.searchsorted(self.starts, rows, "right") - 1
        return shards, rows - self.starts[shards]


# ── Layout index ───────────────────────────────────────────────────────────────────────────────────


class IndexedPlaces:
    """The indexes of some stored ranks, of which the row groups read last stay in memory."""

    def __init__(self, build: PublishedBuild, indexes: Sequence[ExpectedShard], filler: int) -> None:
        self._build, self._indexes, self._filler = build, indexes, filler
        self._footers: dict[int, ShardFooter] = {}
        self._groups: OrderedDict[tuple[int, int], tuple[Tokens, Tokens]] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments alone: footers cannot be pickled."""
        return IndexedPlaces, (self._build, self._indexes, self._filler)

    def require(self, ranks: Iterable[int], *, verify: bool) -> None:
        """Check the indexes of some ranks; errors as in `check_shard`."""
        for rank in ranks:
            self._footers[rank] = check_shard(self._build.store, self._indexes[rank], verify=verify)

    def locate(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the shard and the row of each place."""
        ranks, lines = places % self._build.world_size, places // self._build.world_size
        shards, rows = np.empty(len(places), np.int64), np.empty(len(places), np.int64)
        for rank in find_distinct(ranks).tolist():
            of_rank = np.flatnonzero(ranks == rank)
            offsets = self._load_footer(rank).offsets
            groups = np.searchsorted(offsets, lines[of_rank], "right") - 1
            for group in find_distinct(groups).tolist():
                some = of_rank[groups == group]
                named = self._load_group(rank, group)
                inside = lines[some] - offsets[group]
                shards[some], rows[some] = named[0][inside], named[1][inside]
        return np.where(shards < 0, self._filler, shards), rows

    def _load_footer(self, rank: int) -> ShardFooter:
        if rank not in self._footers:
            self.require([rank], verify=False)
        return self._footers[rank]

    def _load_group(self, rank: int, group: int) -> tuple[Tokens, Tokens]:
        # Not locked: at worst two threads read the same group. One operation of a dictionary is atomic.
        kept = self._groups.get((rank, group))
        if kept is None:
            path, footer = self._indexes[rank].shard.path, self._load_footer(rank)
            table = read_row_group(self._build.store, path, footer, group, ["shard", "row"])
            kept = view_numbers(table.column("shard")), view_numbers(table.column("row"))
            self._groups[(rank, group)] = kept
            if len(self._groups) > KEPT_INDEX_GROUPS:
                self._groups.popitem(last=False)
        return kept


# ── Opening ────────────────────────────────────────────────────────────────────────────────────────


def open_order(
    build: PublishedBuild, rank: int, world_size: int, *, verify: bool, names: SourceNames | None = None
) -> SequenceSource:
    """Open the stored ranks that a rank of any world size reads, and check their files.

    Raises IntegrityError for the first file that is missing or truncated, belongs to another order, rank or tokenizer,
    or (`verify`) has another digest than the published one.
    """
    rounds = build.world_size // gcd(build.world_size, world_size)
    needed = sorted({(rank + k * world_size) % build.world_size for k in range(rounds)})
    if build.layout == "index":
        rank_names = list(build.ranks)
        indexes = [
            ExpectedShard(build.ranks[name][0], _make_rank_card(build, rank)) for rank, name in enumerate(rank_names)
        ]
        shards = [shard for name in build.datasets for shard in list_set(build, name, "train")]
        filler = ExpectedShard(build.fillers[rank_names[needed[0]]], _make_rank_card(build, needed[0]))
        rows = StoredRows(build.store, [*shards, filler], names=names)
        places = IndexedPlaces(build, indexes, len(shards))
        places.require(needed, verify=verify)
        rows.require(_choose_checked(build, [len(shards), *range(len(shards))], verify=verify), verify=verify)
        return SequenceSource(rows, places)
    of_ranks = list(build.ranks.values())
    cards = [_make_rank_card(build, rank) for rank in range(len(of_ranks))]
    shards = [ExpectedShard(shard, card) for card, of_rank in zip(cards, of_ranks, strict=True) for shard in of_rank]
    firsts = compute_offsets([len(of_rank) for of_rank in of_ranks])
    rows = StoredRows(build.store, shards, in_turn=len(needed), names=names)
    # Side by side, as they are read: the first shards of all ranks, then the second ones.
    by_rank = (range(firsts[rank], firsts[rank + 1]) for rank in needed)
    numbers_needed = [number for numbers in zip_longest(*by_rank) for number in numbers if number is not None]
    rows.require(_choose_checked(build, numbers_needed, verify=verify), verify=verify)
    starts = compute_offsets([expected.shard.rows for expected in shards])
    return SequenceSource(rows, CopiedPlaces(build.world_size, build.places // build.world_size, starts))


def open_split(
    build: PublishedBuild, dataset: str, split: str, *, verify: bool, names: SourceNames | None = None
) -> SequenceSource:
    """Open a dataset's sequences of a split, in the order of its plan, and check their files; errors as above."""
    shards = list_set(build, dataset, split)
    rows = StoredRows(build.store, shards, names=names)
    rows.require(_choose_checked(build, range(len(shards)), verify=verify), verify=verify)
    starts = compute_offsets([expected.shard.rows for expected in shards])
    return SequenceSource(rows, CopiedPlaces(1, int(starts[-1]), starts))


def list_set(build: PublishedBuild, dataset: str, split: str) -> list[ExpectedShard]:
    """Return a dataset's packed shards of a split."""
    tokenizer = str(build.card["tokenizer_digest"])
    card = {"recipe": build.recipe, "dataset": dataset, "tokenizer_digest": tokenizer}
    return [ExpectedShard(shard, card) for shard in build.sets[dataset].shards.get(split, ())]


def _make_rank_card(build: PublishedBuild, rank: int) -> dict[str, str]:
    of_rank = {"order": build.order, "world_size": str(build.world_size), "rank": str(rank)}
    return of_rank | {"tokenizer_digest": str(build.card["tokenizer_digest"])}


def _choose_checked(build: PublishedBuild, numbers: Sequence[int], *, verify: bool) -> Sequence[int]:
    return numbers if verify or build.store.is_local else numbers[:CHECKED_REMOTE_SHARDS]
