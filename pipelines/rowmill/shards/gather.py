"""Take rows of many Parquet files in a planned order, in constant memory.

Parquet cannot read single rows, so each part is written once as an uncompressed Arrow file, whose pages the operating
system caches and drops; a worker then holds only one output shard in memory.

Rejected: `pyarrow.dataset.take`, which decodes every file again for each output shard.
"""

import os
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Ints, group_equal


def write_scratch_file(table: pa.Table, target: str) -> None:
    """Write a table as an uncompressed Arrow file that can be memory-mapped."""
    with pa.OSFile(target, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())


_SCRATCH_MAPS: dict[str, pa.Table] = {}
"""The memory maps of this process, all of files in one folder."""


def read_scratch_file(path: str) -> pa.Table:
    """Return a scratch file as a table, mapped once per process without reading its pages."""
    if path not in _SCRATCH_MAPS:
        # A worker outlives the stage that used the last folder, and maps keep deleted files on the disk.
        if os.path.dirname(next(iter(_SCRATCH_MAPS), path)) != os.path.dirname(path):
            _SCRATCH_MAPS.clear()
        with pa.memory_map(path, "rb") as source:
            _SCRATCH_MAPS[path] = pa.ipc.open_file(source).read_all()
    return _SCRATCH_MAPS[path]


def drop_scratch_maps() -> None:
    """Drop this process's maps of scratch files before the files are removed."""
    _SCRATCH_MAPS.clear()


def take_rows(files: Sequence[str], first_rows: Ints, rows: Ints) -> pa.Table:
    """Return rows by their number over all files, in the order of `rows`, which may repeat rows.

    `first_rows` int64[F + 1]: the number of each file's first row, then the total.
    """
    which = np.searchsorted(first_rows, rows, "right") - 1
    by_file = list(group_equal(which))
    pieces = [
        read_scratch_file(files[file]).take(pa.array(rows[places] - first_rows[file])) for file, places in by_file
    ]
    together = pa.concat_tables(pieces).combine_chunks()
    order = np.concatenate([places for _, places in by_file])
    if (np.diff(order) == 1).all():
        return together
    back = np.empty(len(rows), np.int64)
    back[order] = np.arange(len(rows))
    return together.take(pa.array(back)).combine_chunks()
