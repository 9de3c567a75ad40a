"""The files of an export: shards prepared for random access, jobs written by workers, complete files published.

What belongs here: moving tokens and files, and hashing what was read and what was written. What does not: which tokens
(`export_source.py`), a format's bytes (`rowmill.exports`).
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.storage import Store
from rowmill.exports import export_manifest
from rowmill.exports.base import Export, ExportContext, ExportJob, ExportLayout
from rowmill.exports.export_manifest import CARD_FILE, MANIFEST_FILE, FileDigests
from rowmill.schema.manifest import File
from rowmill.shards import native
from rowmill.shards.native import ShardScratchTask
from rowmill.shards.sequences import SegmentFiles, SequenceBatch, require_valid_tokens, take_segments
from rowmill.stages.base import StageContext
from rowmill.stages.exports.export_source import ExportSource, build_export_terms

_SEGMENT_DTYPE = np.dtype([("hash", "V16"), ("trained", "<i8")])
"""A worker's result for each segment: its content hash and its number of targets."""


def write_export_scratch(task: ShardScratchTask) -> bytes:
    """Prepare a shard for random access; return the content hash and the targets of each segment."""
    segments = native.lay_out_shard(task)
    told = np.empty(len(segments.offsets) - 1, _SEGMENT_DTYPE)
    hashes = b"".join(one.to_bytes(16, "little") for one in native.hash_segments(segments, segments.mask))
    told["hash"] = np.frombuffer(hashes, "V16")
    told["trained"] = np.add.reduceat(segments.mask, segments.offsets[:-1], dtype=np.int64) if len(told) else 0
    return told.tobytes()


def lay_out_shards(work: StageContext, source: ExportSource, scratch: Path) -> "tuple[SegmentFiles, NDArray[np.void]]":
    """Write all shards as scratch files; return them, and each segment's hash and targets over all shards."""
    targets = tuple(str(scratch / f"{i:06d}.arrow") for i in range(len(source.shards)))
    tasks = [
        ShardScratchTask(work.store.root, shard, target, first)
        for shard, target, first in zip(source.shards, targets, source.first_sequences, strict=True)
    ]
    told = b"".join(
        work.pool.map(write_export_scratch, tasks, size_bytes=4 * sum(shard.bytes for shard in source.shards))
    )
    return SegmentFiles(targets, _locate_first_segments(source)), np.frombuffer(told, _SEGMENT_DTYPE)


def _locate_first_segments(source: ExportSource) -> Ints:
    return source.first_segments[source.first_rows]


@dataclass(frozen=True, slots=True, eq=False)
class _ExportTask:
    """One job of an export: segments by their number over all shards, and its target folder."""

    export: Export
    job: ExportJob
    shelf: SegmentFiles
    folder: str
    terms: ExportContext


def write_export_job(task: _ExportTask) -> tuple[list[FileDigests], int]:
    """Write one job's files; return them with their digests, and the content hash of the written segments."""
    found = 0

    def chunks() -> Iterator[SequenceBatch]:
        nonlocal found
        for segments, offsets in task.job.chunks(task.export.rows_at_once(task.terms.seq_len)):
            chunk = take_segments(task.shelf, segments, offsets)
            require_valid_tokens(chunk, vocab_size=task.terms.vocab_size, where=f"exports.{task.export.name}")
            found += sum(native.hash_segments(_to_segments(chunk), chunk.trained))
            yield chunk

    folder = Path(task.folder)
    written = task.export.write(task.job, chunks(), folder, task.terms)
    return [export_manifest.digest_written_file(folder, one) for one in written], found % native.HASH_MODULUS


def _to_segments(chunk: SequenceBatch) -> native.Segments:
    return native.Segments(
        ids=chunk.ids,
        mask=chunk.trained,
        offsets=chunk.offsets,
        sequence_offsets=chunk.sequence_offsets,
        example_ids=chunk.example_ids,
        starts=chunk.starts,
        weights=chunk.weights,
    )


def write_export_files(
    work: StageContext,
    export: Export,
    layout: ExportLayout,
    segments: Ints,
    shelf: SegmentFiles,
    card: Mapping[str, Any],
    out: Path,
) -> tuple[list[FileDigests], str]:
    """Write all jobs of a layout; return the files and the content hash of what was read back."""
    terms = build_export_terms(card, text=export_manifest.encode_json(card).decode())
    tasks = [
        _ExportTask(export, replace(job, segments=segments[job.segments]), shelf, str(out), terms)
        for job in layout.jobs
    ]
    size = 4 * int(card["counts"]["tokens"])
    files: list[FileDigests] = []
    total = 0
    for own, found in work.pool.map(write_export_job, tasks, size_bytes=size):
        files += own
        total += found
    last = export.finish(out, [one.written for one in files], terms)
    return [
        *files,
        *(export_manifest.digest_written_file(out, one) for one in last),
    ], f"{total % native.HASH_MODULUS:032x}"


def publish_export_files(
    store: Store, out: Path, files: Sequence[FileDigests], card: Mapping[str, Any], at: str
) -> dict[str, File]:
    """Move all files to their final place, the manifest last."""
    if store.exists(at):
        # Leftovers of a build that was killed while it moved files.
        store.remove(at)
    content = export_manifest.encode_json(card)
    named: dict[str, File] = {}
    for one in files:
        _move_file(store, out / one.written.path, f"{at}/{one.written.path}")
        named[one.written.path] = File(f"{at}/{one.written.path}", one.size_bytes, one.digest, one.written.segments)
    for name, text in ((CARD_FILE, content), (MANIFEST_FILE, export_manifest.encode_manifest(files, content))):
        (out / name).write_bytes(text)
        described = export_manifest.digest_written_file(out, export_manifest.WrittenFile(name))
        _move_file(store, out / name, f"{at}/{name}")
        named[name] = File(f"{at}/{name}", described.size_bytes, described.digest, 0)
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
