"""The files of an export: shards measured, jobs written by workers, which publish them, and the manifest last."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, find_distinct
from rowmill.core.storage import Store, digest_bytes
from rowmill.exports import export_manifest
from rowmill.exports.base import Export, ExportContext, ExportJob, ExportLayout, WrittenFile
from rowmill.exports.export_manifest import CARD_FILE, DATA_FOLDER, MANIFEST_FILE, FileDigests
from rowmill.exports.native import make_segments
from rowmill.schema.manifest import File
from rowmill.shards import native
from rowmill.shards.host_scratch import HostScratch
from rowmill.shards.sequences import SegmentFiles, SequenceBatch, require_valid_tokens, take_segments
from rowmill.shards.shard_copies import NumberedShard, ShardCopies
from rowmill.stages.base import StageContext
from rowmill.stages.exports.export_source import ExportSource, build_export_context

_SEGMENT_DTYPE = np.dtype([("hash", "V16"), ("trained", "<i8")])
"""A worker's result for each segment: its content hash and its number of targets."""


@dataclass(frozen=True, slots=True, eq=False)
class ExportShards:
    """What all jobs of an export read: shards with the numbers of their first segments."""

    copies: ShardCopies
    first_segments: Ints


def measure_segments(shard: NumberedShard, opened: ExportShards) -> bytes:
    """Return the content hash and the targets of each segment of a shard; leave a copy for the jobs of this host."""
    segments = opened.copies.read(shard)
    measured = np.empty(len(segments.offsets) - 1, _SEGMENT_DTYPE)
    hashes = b"".join(one.to_bytes(16, "little") for one in native.hash_segments(segments, segments.mask))
    measured["hash"] = np.frombuffer(hashes, "V16")
    measured["trained"] = np.add.reduceat(segments.mask, segments.offsets[:-1], dtype=np.int64) if len(measured) else 0
    return measured.tobytes()


def open_export_shards(context: StageContext, source: ExportSource, scratch: HostScratch) -> ExportShards:
    """Return what the jobs of an export read."""
    shards = tuple(map(NumberedShard, source.shards, source.first_sequences))
    copies = ShardCopies(context.store.root, shards, scratch, keeps_padding=False)
    return ExportShards(copies, _locate_first_segments(source))


def measure_all_segments(context: StageContext, opened: ExportShards) -> "NDArray[np.void]":
    """Return each segment's hash and targets over all shards."""
    shards = opened.copies.shards
    size = 4 * sum(shard.file.bytes for shard in shards)
    measured = context.pool.map(measure_segments, shards, size_bytes=size, shared=opened)
    return np.frombuffer(b"".join(measured), _SEGMENT_DTYPE)


def _locate_first_segments(source: ExportSource) -> Ints:
    return source.first_segments[source.first_rows]


@dataclass(frozen=True, slots=True, eq=False)
class _ExportTask:
    """One job of an export: segments by their number over all shards, and the folder in the store."""

    export: Export
    job: ExportJob
    at: str
    context: ExportContext


def write_export_job(task: _ExportTask, opened: ExportShards) -> tuple[list[FileDigests], int]:
    """Write one job's files; return them with their digests, and the content hash of the written segments."""
    source = _require_segments(opened, task.job.segments)
    found = 0

    def chunks() -> Iterator[SequenceBatch]:
        nonlocal found
        for segments, offsets in task.job.chunks(task.export.rows_at_once(task.context)):
            chunk = take_segments(source, segments, offsets)
            require_valid_tokens(chunk, vocab_size=task.context.vocab_size, where=f"exports.{task.export.name}")
            found += sum(native.hash_segments(make_segments(chunk), chunk.trained))
            yield chunk

    with opened.copies.scratch.open_folder() as folder:
        (folder / DATA_FOLDER).mkdir()
        written = task.export.write(task.job, chunks(), folder, task.context)
        files = _publish_written_files(Store(opened.copies.root), folder, written, task.at)
    return files, found % native.HASH_MODULUS


def _require_segments(opened: ExportShards, segments: Ints) -> SegmentFiles:
    """Return this host's copies of the shards, of which those that hold some segments are there."""
    opened.copies.require(find_distinct(np.searchsorted(opened.first_segments, segments, "right") - 1).tolist())
    return SegmentFiles(opened.copies.files, opened.first_segments)


def _publish_written_files(store: Store, folder: Path, written: Sequence[WrittenFile], at: str) -> list[FileDigests]:
    files = [export_manifest.digest_written_file(folder, one) for one in written]
    for one in written:
        _move_file(store, folder / one.path, f"{at}/{one.path}")
    return files


def write_export_files(
    context: StageContext,
    export: Export,
    layout: ExportLayout,
    segments: Ints,
    opened: ExportShards,
    card: Mapping[str, Any],
    at: str,
) -> tuple[list[FileDigests], str]:
    """Write all files of a layout; return them and the content hash of what was read back."""
    if context.store.exists(at):
        # Leftovers of a build that was killed.
        context.store.remove(at)
    export_context = build_export_context(card, text=export_manifest.encode_json(card).decode())
    tasks = [
        _ExportTask(export, replace(job, segments=segments[job.segments]), at, export_context) for job in layout.jobs
    ]
    size = 4 * int(card["counts"]["tokens"])
    files: list[FileDigests] = []
    total = 0
    for own, found in context.pool.map(write_export_job, tasks, size_bytes=size, shared=opened):
        files += own
        total += found
    with opened.copies.scratch.open_folder() as folder:
        (folder / DATA_FOLDER).mkdir()
        last = export.finish(folder, [file.written for file in files], export_context)
        files += _publish_written_files(context.store, folder, last, at)
    return files, native.format_content_hash(total)


def publish_export_manifest(
    store: Store, files: Sequence[FileDigests], card: Mapping[str, Any], at: str
) -> dict[str, File]:
    """Write card and manifest, last of all; return all files by their paths in the export."""
    named = {
        file.written.path: File(f"{at}/{file.written.path}", file.size_bytes, file.digest, file.written.segments)
        for file in files
    }
    content = export_manifest.encode_json(card)
    for name, text in ((CARD_FILE, content), (MANIFEST_FILE, export_manifest.encode_manifest(files, content))):
        store.write(f"{at}/{name}", text)
        named[name] = File(f"{at}/{name}", len(text), digest_bytes(text), 0)
    return named


def _move_file(store: Store, source: Path, target: str) -> None:
    if store.is_local:
        path = store.local(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The scratch folder is in the stage's folder, so this is a rename.
        os.replace(source, path)
        return
    with source.open("rb") as content, store.create(target) as sink:
        shutil.copyfileobj(content, sink, 1 << 20)
