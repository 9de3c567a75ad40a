"""Finds the rows that share a band's key with another row, over all parts, bucket by bucket.

    parts of a block ─► lines (key, row) in buckets by the first bits of the key       a task per block of 4 Mi lines
    a bucket of all blocks ─► sorted by key ─► lines whose key another row has, too    a task per bucket

The calling process holds the lines whose keys are shared and no others. The buckets of blocks, as large as the bands of
all parts, are removed once they are compared. Lines that fit one block are compared in the calling process.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Integers, Ints, narrow_integers
from rowmill.core.storage import File, Store, digest_json
from rowmill.schema.manifest import Part
from rowmill.similarity.near_duplicates import drop_equal_groups
from rowmill.stages.base import PartTask, StageContext, make_parts
from rowmill.stages.canonical_rows.part_blocks import PartBlock, count_buckets, cut_blocks, write_buckets
from rowmill.stages.kept_parts import part_folder
from rowmill.stages.part_files import write_table

VERSION = 1
"""Increase it when the files of blocks and buckets may have other content."""

BLOCK_LINES = 1 << 22
"""Lines of a block, some 64 MB."""


def collect_groups(context: StageContext, signed: Sequence[Part], starts: Ints) -> tuple[Integers, Integers]:
    """Return the rows that share a key with another row: the number of the key and the row.

    `starts` are the first rows of the parts; each part has its lines in the file `bands`, and their number in `lines`.
    """
    blocks = cut_blocks(signed, "lines", BLOCK_LINES)
    # Small integers: the calling process holds all lines at once.
    groups: list[Integers] = [np.empty(0, np.int32)]
    rows: list[Integers] = [np.empty(0, np.int32)]
    first = 0
    for table in _find_shared_lines(context, signed, blocks, starts):
        numbers = table.column("group").to_numpy()
        groups.append(narrow_integers(numbers + first))
        rows.append(narrow_integers(table.column("row").to_numpy()))
        first += int(numbers.max(initial=-1)) + 1
    return np.concatenate(groups), np.concatenate(rows)


def _find_shared_lines(
    context: StageContext, signed: Sequence[Part], blocks: Sequence[PartBlock], starts: Ints
) -> Iterator[pa.Table]:
    """Yield the lines of each bucket whose key another row has, too."""
    if len(blocks) == 1:
        lines = _read_band_lines(context.store, [part.files["bands"] for part in signed], starts[:-1])
        yield _find_shared_keys(lines)
        return
    for one in _compare_blocks(context, blocks, starts):
        yield from (context.store.table(file) for file in one.files.values())


def _read_band_lines(store: Store, bands: Sequence[File], starts: Ints) -> pa.Table:
    """Return the lines of some parts, their rows counted from the parts' `starts`."""
    tables = [store.table(file, ("key", "row")) for file in bands]
    keys = [table.column("key").to_numpy() for table in tables]
    rows = [table.column("row").to_numpy() + start for table, start in zip(tables, starts.tolist(), strict=True)]
    return pa.table({"key": np.concatenate(keys), "row": np.concatenate(rows)})


def _find_shared_keys(lines: pa.Table) -> pa.Table:
    """Return the rows that share a key with another, and the number of the key."""
    keys, rows = lines.column("key").to_numpy(), lines.column("row").to_numpy()
    order = np.argsort(keys, kind="stable")
    keys, rows = keys[order], rows[order]
    is_same = keys[1:] == keys[:-1]
    is_shared = (np.append(is_same, False) | np.append(False, is_same))[: len(keys)]
    keys, rows = keys[is_shared], rows[is_shared]
    groups = np.cumsum(np.append(True, keys[1:] != keys[:-1])[: len(keys)]).astype(np.int64)
    is_kept = drop_equal_groups(groups, rows)
    return pa.table({"group": groups[is_kept], "row": rows[is_kept]})


# ── Blocks and buckets ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _BlockTask:
    root: str
    folder: str
    fingerprint: str
    bands: tuple[File, ...]
    starts: tuple[int, ...]
    buckets: int


@dataclass(frozen=True, slots=True)
class _BandBucketTask:
    root: str
    folder: str
    fingerprint: str
    lines: tuple[File, ...]
    starts: tuple[int, ...]


def _compare_blocks(context: StageContext, blocks: Sequence[PartBlock], starts: Ints) -> list[Part]:
    buckets = count_buckets(blocks)
    firsts = [int(starts[block.first]) for block in blocks]
    planned: list[PartTask] = []
    for block, first in zip(blocks, firsts, strict=True):
        bands = tuple(part.files["bands"] for part in block.parts)
        own = tuple((starts[block.first : block.first + len(bands)] - first).tolist())
        fingerprint = digest_json("bands", VERSION, [part.fingerprint for part in block.parts], own, buckets)
        task = _BlockTask(context.store.root, context.folder, fingerprint, bands, own, buckets)
        planned.append(PartTask(fingerprint, task, 0, sum(file.bytes for file in bands)))
    split = make_parts(context, split_block_bands, planned)[0]
    compared: list[PartTask] = []
    for name in sorted({name for one in split for name in one.files}, key=int):
        own = [(one.files[name], first) for one, first in zip(split, firsts, strict=True) if name in one.files]
        fingerprint = digest_json("shared bands", VERSION, [one.fingerprint for one in split], firsts, name)
        files, begins = tuple(file for file, _ in own), tuple(first for _, first in own)
        task = _BandBucketTask(context.store.root, context.folder, fingerprint, files, begins)
        compared.append(PartTask(fingerprint, task, 0, sum(file.bytes for file in files)))
    found = make_parts(context, compare_band_bucket, compared)[0]
    for one in split:
        context.store.remove(part_folder(context.folder, one.fingerprint))
    return found


def split_block_bands(task: _BlockTask) -> Part:
    """Write the lines of a block's parts in a file per bucket, their rows counted through the block."""
    store = Store(task.root)
    lines = _read_band_lines(store, task.bands, np.array(task.starts, np.int64))
    first_bytes = (lines.column("key").to_numpy() >> np.uint64(56)).astype(np.uint8)
    files = write_buckets(store, part_folder(task.folder, task.fingerprint), lines, first_bytes, task.buckets)
    return Part(task.fingerprint, files, {})


def compare_band_bucket(task: _BandBucketTask) -> Part:
    """Write the rows of a bucket that share a key with another."""
    store = Store(task.root)
    found = _find_shared_keys(_read_band_lines(store, task.lines, np.array(task.starts, np.int64)))
    path = f"{part_folder(task.folder, task.fingerprint)}/groups.arrow"
    return Part(task.fingerprint, {"groups": write_table(store, path, found)}, {})
