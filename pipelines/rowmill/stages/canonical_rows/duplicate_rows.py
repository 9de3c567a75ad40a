"""Rows that equal an earlier row of their dataset.

Finds the rows of a dataset that equal an earlier row, over all parts, and removes them.

    parts of a block ─► hash, row, row id, in buckets by the first byte of the hash     a task per block of 4 Mi rows
    a bucket of all blocks ─► rows that repeat an earlier one, by block                 a task per bucket
    a block of all buckets ─► what to remove from each part                             a task per block ─► rewrite_part

The first row in source order is kept, so appended rows never displace earlier ones. Equal hashes are in one bucket, so
no process holds the hashes of more than some 4 Mi rows, up to 256 buckets, and the calling process holds none. The
hashes of a block are kept under its parts' fingerprints: the next build hashes new parts only. Rows that fit one block
are compared in the calling process, and nothing but the rewritten parts is written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, are_among, compute_offsets, find_distinct
from rowmill.core.storage import File, Store, digest_json
from rowmill.formats import filters
from rowmill.schema.manifest import Part
from rowmill.schema.rows import Rejected
from rowmill.stages.base import PartTask, StageContext, make_parts, part_folder
from rowmill.stages.canonical_rows.rewritten_parts import RewriteTask, rewrite_parts, tabulate_removed
from rowmill.stages.part_files import write_table

MAX_BUCKETS = 256


@dataclass(frozen=True, slots=True)
class PartBlock:
    """Consecutive parts: `parts[first:]` of a dataset, with the files that a task reads of them."""

    first: int
    parts: tuple[Part, ...]


def cut_blocks(parts: Sequence[Part], fact: str, limit: int) -> list[PartBlock]:
    """Cut parts into blocks whose sum of a fact is at most `limit`; appended parts change the last block only."""
    blocks: list[PartBlock] = []
    first, total = 0, 0
    for number, part in enumerate(parts):
        size = int(part.facts[fact])
        total += size
        if total > limit and number > first:
            blocks.append(PartBlock(first, tuple(parts[first:number])))
            first, total = number, size
    return [*blocks, PartBlock(first, tuple(parts[first:]))]


def count_buckets(blocks: Sequence[PartBlock]) -> int:
    """Return as many buckets as blocks, so that one is about as large as the other: a power of two."""
    return min(1 << (len(blocks) - 1).bit_length(), MAX_BUCKETS)


def write_buckets(store: Store, at: str, lines: pa.Table, of_byte: NDArray[np.uint8], buckets: int) -> dict[str, File]:
    """Write lines in a file per bucket, named by its number; `of_byte` are the bytes whose first bits choose it."""
    of_bucket = (of_byte.astype(np.int64) * buckets) >> 8
    order = np.argsort(of_bucket.astype(np.uint8), kind="stable")
    borders = np.searchsorted(of_bucket[order], np.arange(buckets + 1))
    return {
        str(bucket): write_table(store, f"{at}/bucket-{bucket:03d}.arrow", lines.take(order[begin:end]))
        for bucket, (begin, end) in enumerate(pairwise(borders.tolist()))
        if begin < end
    }


# ── Finds the rows of a dataset that equal an earlier row, over all parts, and removes them ──


VERSION = 1
"""Increase it when the files of blocks and buckets may have other content."""

BLOCK_ROWS = 1 << 22
"""Rows of a block, of which a task holds the hashes and ids: some 64 bytes each."""

_LINE_SCHEMA = pa.schema(
    [
        pa.field("hash", pa.binary(filters.HASH_BYTES), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("row_id", pa.string(), nullable=False),
    ]
)
"""A row of a block: `row` counts through the block's parts."""
_REPEAT_SCHEMA = pa.schema(
    [pa.field("row", pa.int64(), nullable=False), pa.field("original", pa.string(), nullable=False)]
)
"""A row of a block that equals an earlier one, and the id of the first that it equals."""


@dataclass(frozen=True, slots=True)
class DistinctRows:
    """The parts without duplicates, and the fingerprints of the parts that the hashes are kept in."""

    parts: list[Part]
    made_of: frozenset[str] = frozenset()


def drop_duplicates(context: StageContext, made: list[Part]) -> DistinctRows:
    """Rewrite the parts that hold duplicates of earlier rows, without them."""
    if context.dataset.filters.deduplicate == "off" or not made:
        return DistinctRows(made)
    column = "content_hash" if context.dataset.filters.deduplicate == "exact" else "dedupe_key"
    blocks = cut_blocks(made, "kept", BLOCK_ROWS)
    hashed: list[Part] = []
    if len(blocks) == 1:
        rewrites = dict(_plan_one_block(context, blocks[0], column))
    else:
        buckets = count_buckets(blocks)
        planned: list[PartTask] = []
        for block in blocks:
            fingerprint = digest_json(
                "row hashes", VERSION, [part.fingerprint for part in block.parts], column, buckets
            )
            rows = tuple(part.files["rows"] for part in block.parts)
            task = _HashTask(context.store.root, context.folder, fingerprint, rows, column, buckets)
            planned.append(PartTask(fingerprint, task, 0, sum(file.bytes for file in rows)))
        hashed = make_parts(context, hash_block, planned)[0]
        rewrites = dict(_plan_removals(context, blocks, _find_all_repeats(context, hashed)))
    parts = rewrite_parts(context, made, [rewrites.get(number) for number in range(len(made))])
    return DistinctRows(parts, frozenset(part.fingerprint for part in hashed))


def _plan_one_block(context: StageContext, block: PartBlock, column: str) -> Iterator[tuple[int, PartTask]]:
    """Yield the number of each part that must be rewritten, and its task."""
    lines = _read_lines(context.store, [part.files["rows"] for part in block.parts], column)
    repeats = _name_repeats(lines, *match_repeats(_view_halves(lines)))
    for number, removal in _split_removals(block.parts, repeats):
        part, removed = block.parts[number], tabulate_removed(removal.list_removed())
        task = RewriteTask(context.store.root, context.folder, removal.fingerprint, part, removed)
        yield number, PartTask(removal.fingerprint, task, 0, part.files["rows"].bytes)


# ── Rows of a block, in buckets ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _HashTask:
    root: str
    folder: str
    fingerprint: str
    rows: tuple[File, ...]
    column: str
    buckets: int


def hash_block(task: _HashTask) -> Part:
    """Write the hashes of a block's rows, in a file per bucket."""
    store, at = Store(task.root), part_folder(task.folder, task.fingerprint)
    lines = _read_lines(store, task.rows, task.column)
    files = write_buckets(store, at, lines, _view_halves(lines).view(np.uint8)[:, 0], task.buckets)
    return Part(task.fingerprint, files, {"rows": len(lines)})


def _read_lines(store: Store, rows: Sequence[File], column: str) -> pa.Table:
    """Return the hashes and ids of the rows of some parts, in `_LINE_SCHEMA`."""
    tables = [store.table(file, (column, "row_id")).select([column, "row_id"]) for file in rows]
    joined = pa.concat_tables(tables).combine_chunks()
    hashes, row_ids = (joined.column(name) for name in (column, "row_id"))
    return pa.table([hashes, np.arange(len(joined)), row_ids], schema=_LINE_SCHEMA)


def _view_halves(lines: pa.Table) -> NDArray[np.uint64]:
    """Return the hashes as uint64[N, 2], without a Python object for any of them."""
    hashes = lines.column("hash").combine_chunks()
    if not len(hashes):
        return np.empty((0, 2), np.uint64)
    return np.frombuffer(hashes.buffers()[1], np.uint64, 2 * len(hashes), 16 * hashes.offset).reshape(-1, 2)


# ── A bucket of all blocks ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _BucketTask:
    """The lines of one bucket, with the number of the block of each file."""

    root: str
    folder: str
    fingerprint: str
    lines: tuple[tuple[int, File], ...]


def _find_all_repeats(context: StageContext, hashed: Sequence[Part]) -> list[Part]:
    """Compare the hashes of all blocks, bucket by bucket."""
    names = sorted({name for one in hashed for name in one.files}, key=int)
    known = [one.fingerprint for one in hashed]
    planned: list[PartTask] = []
    for name in names:
        lines = tuple((block, one.files[name]) for block, one in enumerate(hashed) if name in one.files)
        fingerprint = digest_json("repeated rows", VERSION, known, name)
        task = _BucketTask(context.store.root, context.folder, fingerprint, lines)
        planned.append(PartTask(fingerprint, task, 0, sum(file.bytes for _, file in lines)))
    return make_parts(context, find_bucket_repeats, planned)[0]


def find_bucket_repeats(task: _BucketTask) -> Part:
    """Write the rows of a bucket that equal an earlier one, in a file per block."""
    store, at = Store(task.root), part_folder(task.folder, task.fingerprint)
    tables = [store.table(file) for _, file in task.lines]
    starts = compute_offsets([len(table) for table in tables])
    lines = pa.concat_tables(tables).combine_chunks()
    places, originals = match_repeats(_view_halves(lines))
    borders = np.searchsorted(places, starts)
    files: dict[str, File] = {}
    for (block, _), (begin, end) in zip(task.lines, pairwise(borders.tolist()), strict=True):
        if begin < end:
            found = _name_repeats(lines, places[begin:end], originals[begin:end])
            files[str(block)] = write_table(store, f"{at}/block-{block:05d}.arrow", found)
    return Part(task.fingerprint, files, {"repeats": len(places)})


def _name_repeats(lines: pa.Table, places: Ints, originals: Ints) -> pa.Table:
    rows, row_ids = lines.column("row").take(places), lines.column("row_id").take(originals)
    return pa.table([rows, row_ids], schema=_REPEAT_SCHEMA)


def match_repeats(halves: NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """Return the places of hashes that occurred before, ascending, and the first place of each such hash."""
    places = np.flatnonzero(~filters.mark_first_occurrences(halves))
    if not len(places):
        return places, places
    # Only hashes that repeat are sorted in full, each first occurrence before its repeats.
    halves = np.ascontiguousarray(halves)
    alike = np.flatnonzero(are_among(halves[:, 0], find_distinct(halves[places, 0])))
    order = alike[np.lexsort((alike, halves[alike, 1], halves[alike, 0]))]
    is_new = np.append(True, (halves[order[1:]] != halves[order[:-1]]).any(axis=1))
    firsts = np.empty(len(halves), np.int64)
    firsts[order] = order[is_new][np.cumsum(is_new) - 1]
    return places, firsts[places]


# ── What to remove from each part ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Removal:
    """A part without its duplicates: its fingerprint, their places, and the ids of the rows that they repeat."""

    fingerprint: str
    places: list[int]
    originals: list[str]

    def list_removed(self) -> dict[int, Rejected]:
        """Return the reject of each row that goes, by its place."""
        pairs = zip(self.places, self.originals, strict=True)
        return {place: Rejected("duplicate", f"repeats {original}") for place, original in pairs}


@dataclass(frozen=True, slots=True)
class _RemovalTask:
    root: str
    folder: str
    fingerprint: str
    parts: tuple[Part, ...]
    repeats: tuple[File, ...]


def _plan_removals(
    context: StageContext, blocks: Sequence[PartBlock], repeated: Sequence[Part]
) -> Iterator[tuple[int, PartTask]]:
    """Yield the number of each part that must be rewritten, and its task, which names a file of what to remove."""
    known = [one.fingerprint for one in repeated]
    planned: list[PartTask] = []
    for number, block in enumerate(blocks):
        repeats = tuple(one.files[str(number)] for one in repeated if str(number) in one.files)
        fingerprint = digest_json("removed duplicates", VERSION, known, number)
        task = _RemovalTask(context.store.root, context.folder, fingerprint, block.parts, repeats)
        planned.append(PartTask(fingerprint, task, 0, sum(file.bytes for file in repeats)))
    for block, made in zip(blocks, make_parts(context, plan_block_removals, planned)[0], strict=True):
        for name, file in made.files.items():
            part, fingerprint = block.parts[int(name)], made.facts["rewritten"][name]
            task = RewriteTask(context.store.root, context.folder, fingerprint, part, file)
            yield block.first + int(name), PartTask(fingerprint, task, 0, part.files["rows"].bytes)


def plan_block_removals(task: _RemovalTask) -> Part:
    """Write what to remove from each part of a block, and name what it becomes."""
    store, at = Store(task.root), part_folder(task.folder, task.fingerprint)
    tables = [_REPEAT_SCHEMA.empty_table(), *(store.table(file) for file in task.repeats)]
    repeats = pa.concat_tables(tables).combine_chunks().sort_by("row")
    files: dict[str, File] = {}
    rewritten: dict[str, str] = {}
    for number, removal in _split_removals(task.parts, repeats):
        rewritten[str(number)] = removal.fingerprint
        removed = tabulate_removed(removal.list_removed())
        files[str(number)] = write_table(store, f"{at}/part-{number:05d}.arrow", removed)
    return Part(task.fingerprint, files, {"rewritten": rewritten})


def _split_removals(parts: Sequence[Part], repeats: pa.Table) -> Iterator[tuple[int, _Removal]]:
    """Yield the number of each part with duplicates, and what to remove from it; `repeats` are in order of rows."""
    starts = compute_offsets([int(part.facts["kept"]) for part in parts])
    borders = np.searchsorted(repeats.column("row").to_numpy(), starts)
    for number, (begin, end) in enumerate(pairwise(borders.tolist())):
        if begin < end:
            own = repeats.slice(begin, end - begin)
            places = (own.column("row").to_numpy() - starts[number]).tolist()
            originals = own.column("original").to_pylist()
            fingerprint = digest_json(parts[number].fingerprint, "without", places, originals)
            yield number, _Removal(fingerprint, places, originals)
