"""Sequences by their place in the order: places → rows of shards, which are checked where a shard is opened.

    place    0 1 2 3 4 5 6 7 …      stored for 4 ranks: place p is row p // 4 of stored rank p mod 4
    2 ranks  0 1 0 1 0 1 0 1        rank 1 reads places 1, 3, 5, 7: stored ranks 1 and 3, each in its own order

    copied   that row of the shards of the stored rank
    index    that line of the index of the stored rank names a shard and a row in it; −1 is the shard of a filler

    shards  7 7 3        one task per shard: footer ─► row groups ─► rows
    rows    5 900 12     on remote storage several at once, since each waits for its requests

The check before a token reaches a trainer reads only footers: a Parquet footer holds the position of every column
chunk, and so the length of its file; the card in it names order, rank and tokenizer. Changed tokens in a file of the
right length are found by `verify`, which reads everything once. Decoded row groups stay in memory up to
`KEPT_GROUP_BYTES`, so that data of a million tokens, and ranks that are read in turn, are decoded once.
"""

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import gcd
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowmill.core.arrays import Ints, compute_offsets, group_equal, view_numbers
from rowmill.core.caches import RecentValues
from rowmill.core.errors import IntegrityError, PipelineError
from rowmill.core.remote import read_end, read_range
from rowmill.core.storage import Store, digest_bytes, digest_file
from rowmill.reader.published import PublishedBuild, Shard, raise_missing
from rowmill.reader.sequences import DecodedRowGroup, PackedSequence, list_columns
from rowmill.reader.source_losses import SourceNames
from rowmill.schema.indexed_shards import (
    NEEDED_COLUMNS,
    ExampleReferences,
    ExampleTokenColumns,
    insert_tokens,
    load_example_tokens,
)
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
    columns: tuple[str, ...]
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
    return ShardFooter(metadata, compute_offsets(groups), tuple(schema.names), size_bytes, references)


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


# ── Files by number ──


CHECKED_AT_ONCE = 16
"""Shards that are checked at the same time: a remote footer costs round trips."""

READ_AT_ONCE = 8
"""Shards of remote storage that are read at the same time: at 20 ms a request some 300 row groups a second."""

KEPT_GROUP_BYTES = 16 << 20
"""Memory for decoded row groups, unless the row groups that are read in turn need more."""

KEPT_FOOTER_BYTES = 16 << 20
"""Memory for footers, unless the shards that are read in turn need more: a build may have tens of thousands."""

KEPT_EXAMPLES_BYTES = 64 << 20
"""Memory for files of examples, out of which sequences of shards without tokens are joined."""

CHECKED_REMOTE_SHARDS = 64
"""Shards that are checked before the first batch on remote storage: 256 take half a second of processor time in
every rank. The others are checked when they are first read; `verify` checks all. Local shards are all checked."""

KEPT_INDEX_BYTES = 32 << 20
"""Memory for decoded row groups of indexes."""

_SPARSE_SHARE = 4
"""A sequence is copied out of its row group if it is not one of at least every fourth of it."""


class ShardFiles:
    """Some published files, shards or indexes of ranks, each checked before it is read.

    `in_turn` is the number of files that are read in turn, such as one per stored rank.
    """

    def __init__(self, store: Store, shards: Sequence[ExpectedShard], in_turn: int = 1) -> None:
        self.store, self.in_turn, self._shards = store, in_turn, shards
        self._footers = RecentValues[int, ShardFooter](KEPT_FOOTER_BYTES, attrgetter("memory_bytes"), in_turn)

    def require(self, numbers: Iterable[int], *, verify: bool) -> None:
        """Check some files concurrently; raises IntegrityError for the first one that is not the published file."""
        with ThreadPoolExecutor(CHECKED_AT_ONCE) as threads:
            named: dict[str, File] = {}
            for footer in threads.map(partial(self.load_footer, verify=verify), numbers):
                if verify and footer.references is not None:
                    named |= {file.path: file for file in footer.references.files}
            # Reading a file of examples compares its digest.
            for _ in threads.map(self.store.content, named.values()):
                pass

    def load_footer(self, number: int, *, verify: bool = False) -> ShardFooter:
        """Return the footer of a file, which is checked first if that was not done."""
        return self._footers.get(number, partial(check_shard, self.store, self._shards[number], verify=verify))

    def read_group(self, number: int, group: int, columns: Sequence[str]) -> pa.Table:
        """Return columns of a row group."""
        return read_row_group(self.store, self._shards[number].shard.path, self.load_footer(number), group, columns)

    def split_by_group(self, number: int, rows: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield each row group that holds some rows of a file, ascending: their places in `rows`, and in the group."""
        offsets = self.load_footer(number).offsets
        for group, places in group_equal(np.searchsorted(offsets, rows, "right") - 1):
            yield group, places, rows[places] - offsets[group]


# ── Sequences by place ──


ResultT = TypeVar("ResultT")


class SequenceSource:
    """The sequences of an order; `locate` returns the shard and the row of each place.

    With `names` the sequences say where their segments come from. Safe to share among threads. A copy in another
    process, forked or pickled, opens its own files.
    """

    def __init__(
        self, files: ShardFiles, locate: Callable[[Ints], tuple[Ints, Ints]], names: SourceNames | None = None
    ) -> None:
        self._files, self._locate, self._names = files, locate, names
        by_size = attrgetter("size_bytes")
        self._groups = RecentValues[tuple[int, int], DecodedRowGroup](KEPT_GROUP_BYTES, by_size, files.in_turn)
        self._examples = RecentValues[str, ExampleTokenColumns](KEPT_EXAMPLES_BYTES, by_size)

    def at(self, places: Ints) -> list[PackedSequence]:
        """Return the sequences at these places, which need not be sorted.

        The sequences may be views of decoded row groups: copy those that are kept.
        """
        return self._gather(places, self._take_sequences)

    def list_example_ids(self, places: Ints) -> list[list[str]]:
        """Return the examples that the sequences at these places are made of; a filler has none."""
        return self._gather(places, self._take_example_ids)

    def _gather(self, places: Ints, take: Callable[[int, Ints], list[ResultT]]) -> list[ResultT]:
        shards, rows = self._locate(places)
        order = np.lexsort((rows, shards))
        of_shards = [(shard, order[some]) for shard, some in group_equal(shards[order])]
        wanted = [shard for shard, _ in of_shards], [rows[some] for _, some in of_shards]
        if self._files.store.is_local or len(of_shards) < 2:
            results = list(map(take, *wanted))
        else:
            with ThreadPoolExecutor(min(READ_AT_ONCE, len(of_shards)), thread_name_prefix="rowmill-rows") as threads:
                results = list(threads.map(take, *wanted))
        values: list[Any] = [None] * len(rows)
        for (_, some), fetched in zip(of_shards, results, strict=True):
            for place, value in zip(some.tolist(), fetched, strict=True):
                values[place] = value
        return values

    def _take_sequences(self, shard: int, rows: Ints) -> list[PackedSequence]:
        """Return the sequences at some rows of a shard, which are sorted."""
        footer = self._files.load_footer(shard)
        sequences: list[PackedSequence] = []
        for group, _, inside in self._files.split_by_group(shard, rows):
            if footer.references is not None:
                sequences += self._join_examples(shard, footer.references, group, inside)
                continue
            decoded = self._groups.get((shard, group), partial(self._decode_group, shard, group))
            some = [decoded.row(row) for row in inside.tolist()]
            # A few sequences must not keep the memory of a whole row group while they wait.
            is_sparse = _SPARSE_SHARE * len(inside) < footer.offsets[group + 1] - footer.offsets[group]
            sequences += [sequence.copy() for sequence in some] if is_sparse else some
        return sequences

    def _decode_group(self, shard: int, group: int) -> DecodedRowGroup:
        columns = list_columns(self._files.load_footer(shard).columns, with_sources=self._names is not None)
        table = self._files.read_group(shard, group, columns)
        return DecodedRowGroup.of({name: table.column(name).chunk(0) for name in columns}, self._names)

    def _join_examples(self, shard: int, references: ExampleReferences, group: int, rows: Ints) -> list[PackedSequence]:
        """Return sequences of a row group that names their tokens; each file of examples is looked up once."""
        held = self._files.load_footer(shard).columns
        columns = list_columns(references.list_columns(held), with_sources=self._names is not None)
        stored = [name for name in held if name in {*columns, *NEEDED_COLUMNS}]
        table = self._files.read_group(shard, group, stored).take(pa.array(rows))
        joined = insert_tokens(table, references, self._load_examples, columns)
        decoded = DecodedRowGroup.of({name: joined.column(name).combine_chunks() for name in columns}, self._names)
        return [decoded.row(row) for row in range(len(rows))]

    def _load_examples(self, file: File, names: Sequence[str]) -> ExampleTokenColumns:
        return self._examples.get(file.path, partial(load_example_tokens, self._files.store, file, names))

    def _take_example_ids(self, shard: int, rows: Ints) -> list[list[str]]:
        names: list[list[str]] = []
        for group, _, inside in self._files.split_by_group(shard, rows):
            names += self._files.read_group(shard, group, ["example_ids"]).column(0).take(pa.array(inside)).to_pylist()
        # The only segment of a filler has an empty id.
        return [[name for name in of_sequence if name] for of_sequence in names]


# ── Places ──


def locate_copied(world_size: int, starts: Ints, places: Ints) -> tuple[Ints, Ints]:
    """Return the shard and the row of each place; `starts` int64[S + 1] are the first rows of shards, rank by rank."""
    rows = places % world_size * (int(starts[-1]) // world_size) + places // world_size
    shards = np.searchsorted(starts, rows, "right") - 1
    return shards, rows - starts[shards]


def locate_indexed(
    world_size: int,
    indexes: ShardFiles,
    groups: RecentValues[tuple[int, int], pa.Table],
    filler: int,
    places: Ints,
) -> tuple[Ints, Ints]:
    """Return the shard and the row of each place, which the index of its rank names; `filler` is a shard."""
    lines = places // world_size
    found = np.empty((2, len(places)), np.int64)
    for rank, of_rank in group_equal(places % world_size):
        for group, some, inside in indexes.split_by_group(rank, lines[of_rank]):
            table = groups.get((rank, group), partial(indexes.read_group, rank, group, ("shard", "row")))
            found[:, of_rank[some]] = [view_numbers(table.column(name))[inside] for name in ("shard", "row")]
    return np.where(found[0] < 0, filler, found[0]), found[1]


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
        of_ranks = ShardFiles(build.store, indexes, len(needed))
        of_ranks.require(needed, verify=verify)
        files = ShardFiles(build.store, [*shards, filler])
        files.require(_choose_checked(build, [len(shards), *range(len(shards))], verify=verify), verify=verify)
        groups = RecentValues[tuple[int, int], pa.Table](KEPT_INDEX_BYTES, attrgetter("nbytes"))
        return SequenceSource(files, partial(locate_indexed, build.world_size, of_ranks, groups, len(shards)), names)
    of_ranks = list(build.ranks.values())
    cards = [_make_rank_card(build, rank) for rank in range(len(of_ranks))]
    shards = [ExpectedShard(shard, card) for card, of_rank in zip(cards, of_ranks, strict=True) for shard in of_rank]
    firsts = compute_offsets([len(of_rank) for of_rank in of_ranks])
    files = ShardFiles(build.store, shards, len(needed))
    # Side by side, as they are read: the first shards of all ranks, then the second ones.
    by_rank = (range(firsts[rank], firsts[rank + 1]) for rank in needed)
    numbers_needed = [number for numbers in zip_longest(*by_rank) for number in numbers if number is not None]
    files.require(_choose_checked(build, numbers_needed, verify=verify), verify=verify)
    starts = compute_offsets([expected.shard.rows for expected in shards])
    return SequenceSource(files, partial(locate_copied, build.world_size, starts), names)


def open_split(
    build: PublishedBuild, dataset: str, split: str, *, verify: bool, names: SourceNames | None = None
) -> SequenceSource:
    """Open a dataset's sequences of a split, in the order of its plan, and check their files; errors as above."""
    shards = list_set(build, dataset, split)
    files = ShardFiles(build.store, shards)
    files.require(_choose_checked(build, range(len(shards)), verify=verify), verify=verify)
    starts = compute_offsets([expected.shard.rows for expected in shards])
    return SequenceSource(files, partial(locate_copied, 1, starts), names)


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
