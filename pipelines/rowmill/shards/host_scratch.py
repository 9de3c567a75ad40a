"""Files that a host makes once for the tasks of a stage: copies of shards, out of which rows are taken in any order.

    host A   task 1 asks for a, b ─► makes a, b        host B   task 3 asks for b, c ─► makes b, c
             task 2 asks for b, c ─► makes c

A task must not depend on a file that another task made: that task may have run on another host. It asks for the file,
and the first task on a host that asks for one makes it from what the store has.

Parquet cannot read single rows, so each part is written once as an uncompressed Arrow file, whose pages the operating
system caches and drops; a worker then holds only one output shard in memory. Rejected: `pyarrow.dataset.take`, which
decodes every file again for each output shard.
"""

import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Ints, group_equal
from rowmill.core.storage import Store
from rowmill.schema.indexed_shards import read_sequences
from rowmill.schema.manifest import File
from rowmill.shards import native
from rowmill.shards.native import drop_padding


@dataclass(frozen=True, slots=True)
class HostScratch:
    """A folder that every host has for itself; or, with `folder`, that all hosts of the stage share."""

    name: str
    folder: str | None = None

    @property
    def path(self) -> str:
        """Path of the folder on this host."""
        return self.folder or os.path.join(tempfile.gettempdir(), f"rowmill-{self.name}")

    def locate(self, name: str) -> str:
        """Return the path that a file has on this host, whether it was made or not."""
        return os.path.join(self.path, name)

    def require(self, makers: Mapping[str, Callable[[str], object]]) -> None:
        """Make the files that this host lacks; each function is given the path to write to."""
        os.makedirs(self.path, exist_ok=True)
        # What another process is making comes last: several that need the same files share the work.
        for waits in (False, True):
            for name in [name for name in makers if not os.path.exists(self.locate(name))]:
                with _try_lock(f"{self.locate(name)}.lock", waits=waits) as is_mine:
                    if is_mine and not os.path.exists(self.locate(name)):
                        self._make(name, makers[name])

    def _make(self, name: str, make: Callable[[str], object]) -> None:
        temporary = f"{self.locate(name)}.{uuid.uuid4().hex}"
        try:
            make(temporary)
            os.replace(temporary, self.locate(name))
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)

    @contextmanager
    def open_folder(self) -> Generator[Path]:
        """Yield a folder for the files of one task, removed at the end."""
        os.makedirs(self.path, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.path) as folder:
            yield Path(folder)

    def remove(self) -> None:
        """Remove this host's files."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def _try_lock(path: str, *, waits: bool) -> Generator[bool]:
    with open(path, "ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


# ── Rows of many files in a planned order, in constant memory ──


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


# ── Copies of shards ──


def write_shard_scratch(table: pa.Table, target: str) -> None:
    """Write rows of shards as a scratch file, with dataset names as plain strings, as dictionaries differ by shard."""
    place = table.schema.get_field_index("dataset")
    write_scratch_file(table.set_column(place, "dataset", table.column("dataset").cast(pa.string())), target)


@dataclass(frozen=True, slots=True)
class NumberedShard:
    """A shard, and the number of its first sequence in the split of its dataset."""

    file: File
    first_sequence: int


@dataclass(frozen=True, slots=True)
class ShardCopies:
    """Shards of the store at `root`, each copied to a host when a task there first needs it.

    A copy has the numbers of its sequences, which the shard itself lacks. `keeps_padding` says whether copies have the
    padding of segments. A `filler`, one sequence without a target, comes after the last shard.
    """

    root: str
    shards: tuple[NumberedShard, ...]
    scratch: HostScratch
    keeps_padding: bool
    filler: pa.Table | None = None

    @property
    def files(self) -> list[str]:
        """The copies' paths on this host, in the order of the shards; not all may have been made."""
        names = [_name_copy(shard) for shard in self.shards]
        return [self.scratch.locate(name) for name in (*names, *([] if self.filler is None else [_FILLER]))]

    def require(self, numbers: Iterable[int]) -> None:
        """Copy some shards, as far as this host lacks them; the number after the last shard is the filler's."""
        makers: dict[str, Callable[[str], object]] = {}
        for number in numbers:
            if number < len(self.shards):
                makers[_name_copy(self.shards[number])] = partial(self._copy_shard, self.shards[number])
            elif self.filler is not None:
                makers[_FILLER] = partial(write_shard_scratch, self.filler)
        self.scratch.require(makers)

    def read(self, shard: NumberedShard) -> native.Segments:
        """Return a shard's segments, and copy it while it is in memory."""
        table = read_sequences(Store(self.root), shard.file).combine_chunks()
        self.scratch.require({_name_copy(shard): partial(self._write_copy, table, shard.first_sequence)})
        return native.recover_segments(table)

    def _copy_shard(self, shard: NumberedShard, target: str) -> None:
        self._write_copy(read_sequences(Store(self.root), shard.file), shard.first_sequence, target)

    def _write_copy(self, table: pa.Table, first_sequence: int, target: str) -> None:
        numbers = np.arange(first_sequence, first_sequence + table.num_rows, dtype=np.int64)
        kept = table if self.keeps_padding else drop_padding(table)
        write_shard_scratch(native.number_sequences(kept, numbers), target)


_FILLER = "filler.arrow"


def _name_copy(shard: NumberedShard) -> str:
    return f"{shard.file.digest}-{shard.first_sequence}.arrow"
