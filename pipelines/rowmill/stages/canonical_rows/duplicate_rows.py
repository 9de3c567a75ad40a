"""Rows that equal an earlier row of their dataset: found over all parts by a shuffle of their hashes, and removed.

    parts of a block ─► hash, row, row id, in buckets by the first byte of the hash     a task per block of 4 Mi rows
    a bucket of all blocks ─► rows that repeat an earlier one, by block                 a task per bucket
    a block of all buckets ─► what to remove from each part                             a task per block ─► rewrite_part

The first row in source order is kept, so appended rows never displace earlier ones. Equal hashes are in one bucket, so
no process holds the hashes of more than some 4 Mi rows, up to 256 buckets, and the calling process holds none. The
hashes of a block are kept: the next build hashes new parts only.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, are_among, compute_offsets, find_distinct, mark_changes
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.storage import File
from rowmill.kinds.shared import filters
from rowmill.parts.accounts import RewriteInputs, rewrite_parts, tabulate_removed
from rowmill.parts.functions import (
    BlockLines,
    PartInputs,
    PartPlace,
    PartResult,
    choose_buckets,
    collect_buckets,
    count_buckets,
    cut_blocks,
    part_function,
    write_buckets,
)
from rowmill.schema.manifest import Part
from rowmill.schema.row_counts import RowCounts
from rowmill.schema.rows import Rejected
from rowmill.stages.base import StageContext

DUPLICATE_BLOCK_ROWS = 1 << 22
"""Rows of a block, of which a task holds the hashes and ids: some 64 bytes each."""

_LINE_SCHEMA = make_required_schema(hash=pa.binary(filters.CONTENT_HASH_BYTES), row=pa.int64(), row_id=pa.string())
"""A row of a block: `row` counts through the block's parts."""
_REPEAT_SCHEMA = make_required_schema(row=pa.int64(), original=pa.string())
"""A row of a block that equals an earlier one, and the id of the first that it equals."""


def drop_duplicates(context: StageContext, parts: list[Part]) -> list[Part]:
    """Return the parts without the rows that repeat an earlier one; parts that have none stay as they are."""
    if context.dataset.filters.deduplicate == "off" or not parts:
        return parts
    column = "content_hash" if context.dataset.filters.deduplicate == "exact" else "dedupe_key"
    blocks = cut_blocks([part.get_counts(RowCounts).kept for part in parts], DUPLICATE_BLOCK_ROWS)
    buckets = count_buckets(len(blocks))
    rows_of_blocks = [tuple(parts[number].files["rows"] for number in block) for block in blocks]
    hashed = context.map(hash_block, [BlockRows(files, column, buckets) for files in rows_of_blocks]).parts
    repeated = context.map(find_bucket_repeats, [BucketLines(lines) for _, lines in collect_buckets(hashed)]).parts
    chosen = context.map(
        split_block_repeats,
        [
            BlockRepeats(
                tuple(parts[number].get_counts(RowCounts).kept for number in block),
                tuple(bucket.files[str(at)] for bucket in repeated if str(at) in bucket.files),
            )
            for at, block in enumerate(blocks)
        ],
    ).parts
    removed = {
        block[int(name)]: file
        for block, of_block in zip(blocks, chosen, strict=True)
        for name, file in of_block.files.items()
    }
    rewrites = [
        RewriteInputs(part, removed[number]) if number in removed else None for number, part in enumerate(parts)
    ]
    return rewrite_parts(context, parts, rewrites, context.dataset.format)


@dataclass(frozen=True, slots=True)
class BlockRows(PartInputs):
    """The rows of a block's parts, whose hashes in `column` are divided among buckets."""

    rows: tuple[File, ...]
    column: str
    buckets: int


@part_function(version=1)
def hash_block(inputs: BlockRows, place: PartPlace) -> PartResult:
    """Write the hashes of a block's rows, in a file per bucket."""
    column = inputs.column
    tables = [place.store.table(file, (column, "row_id")).select([column, "row_id"]) for file in inputs.rows]
    joined = pa.concat_tables(tables).combine_chunks()
    hashes, row_ids = (joined.column(name) for name in (column, "row_id"))
    lines = pa.table([hashes, np.arange(len(joined)), row_ids], schema=_LINE_SCHEMA)
    first_bytes = _read_hashes(lines)[:: filters.CONTENT_HASH_BYTES]
    of_bucket = choose_buckets(first_bytes, inputs.buckets)
    return PartResult(write_buckets(place, lines, of_bucket, inputs.buckets))


def _read_hashes(lines: pa.Table) -> NDArray[np.uint8]:
    """Return the bytes of the hashes of lines end to end, without a Python object for any of them."""
    if not len(lines):
        return np.empty(0, np.uint8)
    column = lines.column("hash").combine_chunks()
    size = filters.CONTENT_HASH_BYTES
    return np.frombuffer(column.buffers()[1], np.uint8, size * len(column), size * column.offset)


@dataclass(frozen=True, slots=True)
class BucketLines(PartInputs):
    """The lines of one bucket, block by block."""

    blocks: tuple[BlockLines, ...]


@part_function(version=1)
def find_bucket_repeats(inputs: BucketLines, place: PartPlace) -> PartResult:
    """Write the rows of a bucket that equal an earlier one, in a file per block."""
    tables = [place.store.table(block.lines) for block in inputs.blocks]
    lines = pa.concat_tables(tables).combine_chunks()
    repeats, firsts = match_repeats(_read_hashes(lines).view(np.uint64).reshape(-1, 2))
    found = pa.table([lines.column("row").take(repeats), lines.column("row_id").take(firsts)], schema=_REPEAT_SCHEMA)
    borders = np.searchsorted(repeats, compute_offsets([len(table) for table in tables])).tolist()
    files: dict[str, File] = {}
    for block, (begin, end) in zip(inputs.blocks, pairwise(borders), strict=True):
        if begin < end:
            files[str(block.block)] = place.write(f"block-{block.block:05d}", found.slice(begin, end - begin))
    return PartResult(files)


def match_repeats(hashes: NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """Return the lines whose hash (uint64[N, 2]) occurred before, ascending, and the first line of each such hash."""
    begins = hashes[:, 0]
    # Few hashes begin as another one does: only these are sorted with their lines, which takes ten times as long.
    ordered = np.sort(begins)
    shared = find_distinct(ordered[~mark_changes(ordered)])
    lines = np.flatnonzero(are_among(begins, shared))
    lines = lines[np.lexsort((lines, hashes[lines, 1], begins[lines]))]
    is_first = mark_changes(begins[lines], hashes[lines, 1])
    firsts = lines[is_first][np.cumsum(is_first) - 1]
    repeats, firsts = lines[~is_first], firsts[~is_first]
    order = np.argsort(repeats)
    return repeats[order], firsts[order]


@dataclass(frozen=True, slots=True)
class BlockRepeats(PartInputs):
    """The repeats of a block, in a file per bucket, and the number of rows of each of its parts."""

    part_rows: tuple[int, ...]
    repeats: tuple[File, ...]


@part_function(version=1)
def split_block_repeats(inputs: BlockRepeats, place: PartPlace) -> PartResult:
    """Write what to remove from each part of a block that has duplicates, named by the part's number in the block."""
    tables = [_REPEAT_SCHEMA.empty_table(), *(place.store.table(file) for file in inputs.repeats)]
    repeats = pa.concat_tables(tables).combine_chunks().sort_by("row")
    starts = compute_offsets(inputs.part_rows)
    borders = np.searchsorted(repeats.column("row").to_numpy(), starts)
    files: dict[str, File] = {}
    for number, (begin, end) in enumerate(pairwise(borders.tolist())):
        if begin < end:
            places = (repeats.column("row").to_numpy()[begin:end] - starts[number]).tolist()
            originals = repeats.column("original").slice(begin, end - begin).to_pylist()
            removed = {
                at: Rejected("duplicate", f"repeats {original}") for at, original in zip(places, originals, strict=True)
            }
            files[str(number)] = place.write(f"part-{number:05d}", tabulate_removed(removed))
    return PartResult(files)
