"""Rows of shards by shard and row, checked where a shard is opened.

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
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowmill.core.arrays import Ints, compute_offsets
from rowmill.core.errors import IntegrityError, PipelineError
from rowmill.core.remote import read_end, read_range
from rowmill.core.storage import Store, digest_bytes, digest_file
from rowmill.reader.sequences import DecodedRowGroup, PackedSequence, list_columns
from rowmill.reader.source_losses import SourceNames
from rowmill.schema.indexed_shards import NEEDED_COLUMNS, ExampleCache, ExampleReferences, insert_tokens
from rowmill.schema.manifest import File

# A Parquet file ends with its footer's length and four magic bytes.
_PARQUET_TAIL_BYTES = 8

FIRST_END_BYTES = 64 << 10
"""What is read of the end of a remote file: the footer, which has some 40 KB in a shard of two million tokens. A longer
one takes two requests more."""


class Shard(NamedTuple):
    """A file of sequences, or an index of them, as `current.json` names it: a tuple, since a build may have 10⁵."""

    path: str
    rows: int
    digest: str


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


def _read_footer(store: Store, path: str) -> tuple[Any, pa.Schema, int]:
    """Return a shard's metadata, its schema and its size; of a remote file, only its end is read."""
    if store.is_local:
        # Arrow reads a local file itself, not through Python.
        with pq.ParquetFile(store.path(path)) as opened:
            return opened.metadata, opened.schema_arrow, os.path.getsize(store.path(path))
    end, size_bytes = read_end(store.path(path), store.address(path), FIRST_END_BYTES)
    needed = int.from_bytes(end[-_PARQUET_TAIL_BYTES:-4], "little") + _PARQUET_TAIL_BYTES
    if len(end) < min(needed, size_bytes):
        end, size_bytes = read_end(store.path(path), store.address(path), needed)
    # What is before the footer is not looked at, so it may be absent.
    with pq.ParquetFile(pa.BufferReader(end)) as opened:
        return opened.metadata, opened.schema_arrow, size_bytes


def check_shard(store: Store, expected: ExpectedShard, *, verify: bool) -> ShardFooter:
    """Check a shard by its footer, with `verify` by its digest too.

    Raises IntegrityError if it is missing or truncated, belongs to another order, rank, dataset or tokenizer, or
    (`verify`) has another digest than the published one.
    """
    shard, where = expected.shard, store.path(expected.shard.path)
    try:
        metadata, schema, size_bytes = _read_footer(store, shard.path)
    except FileNotFoundError:
        raise_missing(where)
    except (pa.ArrowInvalid, OSError) as error:
        raise IntegrityError(f"{where}: not a readable Parquet file ({error}); remove it and build again") from error
    _require_equal(where, "rows", metadata.num_rows, shard.rows)
    # Row groups are written one after the other: the last one ends where the footer begins.
    last = _list_chunks(metadata, metadata.num_row_groups - 1) if metadata.num_row_groups else []
    end = max((_find_column_start(column) + column.total_compressed_size for column in last), default=4)
    expected_bytes = int(end) + int(metadata.serialized_size) + _PARQUET_TAIL_BYTES
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
        source = store.path(path) if store.is_local else _fetch_columns(store, path, footer, group, columns)
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


def _fetch_columns(store: Store, path: str, footer: ShardFooter, group: int, columns: Sequence[str]) -> pa.BufferReader:
    """Fetch columns of a row group, and what is between them, in one request.

    Opening the file would take three, and read ahead what is not wanted. The bytes come back at their place in memory
    as long as the file, of which the other pages are never touched.
    """
    chunks = _list_chunks(footer.metadata, group)
    needed = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]
    begin = min(_find_column_start(chunk) for chunk in needed)
    end = max(_find_column_start(chunk) + chunk.total_compressed_size for chunk in needed)
    whole = mmap.mmap(-1, footer.size_bytes)
    whole[begin:end] = read_range(store.path(path), store.address(path), begin, end)
    return pa.BufferReader(pa.py_buffer(whole))


def raise_missing(where: str) -> NoReturn:
    """Raise the error for a file that is not there."""
    raise IntegrityError(f"{where}: missing; current.json names it; copy the whole folder, or build again")


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
            for number, footer in threads.map(lambda n: (n, self._check(n, verify=verify)), numbers):
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
        footer = self._check(shard, verify=False)
        self._keep_footer(shard, footer)
        return footer

    def _check(self, shard: int, *, verify: bool) -> ShardFooter:
        return check_shard(self._store, self._shards[shard], verify=verify)

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
