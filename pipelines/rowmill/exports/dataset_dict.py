"""A `DatasetDict` on disk, as `save_to_disk` of `datasets` writes it: the same bytes for the same tables."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import compute_offsets
from rowmill.core.storage import digest_bytes
from rowmill.exports.base import ExportJob, FileCounts, WrittenFile


def join_jobs(jobs: list[ExportJob], split: str) -> list[ExportJob]:
    """Return one job of all segments in place of several; the library makes as many files as there were jobs."""
    if not jobs:
        return []
    segments = np.concatenate([job.segments for job in jobs])
    counts = np.concatenate([np.diff(job.sequence_offsets) for job in jobs])
    return [ExportJob(f"{split}-in-{len(jobs)}", segments, compute_offsets(counts))]


def save_dataset_dict(
    job: ExportJob, tables: Iterator[pa.Table], tally: FileCounts, folder: Path, *, split: str, card: str
) -> list[WrittenFile]:
    """Write the tables of a job of `join_jobs` below `data/`; `tally` has their counts when all are read."""
    import datasets

    staged = folder / f"{job.name}.arrow"
    first = next(tables)
    with pa.OSFile(str(staged), "wb") as sink, pa.ipc.new_stream(sink, first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table)
    # Without a given fingerprint, the library makes one from the clock.
    rows = datasets.Dataset(
        datasets.table.MemoryMappedTable.from_file(str(staged)), fingerprint=digest_bytes(card.encode())[:16]
    )
    shards = int(job.name.rsplit("-", 1)[1])
    had_progress_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    datasets.DatasetDict({split: rows}).save_to_disk(folder / "data", num_shards={split: shards})
    if had_progress_bars:
        datasets.enable_progress_bars()
    del rows
    staged.unlink()
    files = sorted(path.relative_to(folder).as_posix() for path in (folder / "data").rglob("*") if path.is_file())
    main = next(file for file in files if file.endswith(".arrow"))
    return [tally.written(file) if file == main else WrittenFile(file) for file in files]
