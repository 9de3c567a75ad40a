"""What the order reads of every train sequence: tokens, targets, segments, the longest one, and what it costs.

24 bytes a sequence. A million of them are sent to the workers; more are a file that the workers of a host map, so that
neither they nor the calling process hold them.
"""

import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rowmill.core.storage import Store
from rowmill.packing import rank_assignment
from rowmill.recipe.recipe import Recipe
from rowmill.schema.manifest import File, Manifest
from rowmill.shards.host_scratch import HostScratch
from rowmill.stages.base import StageContext
from rowmill.stages.scratch_folders import open_host_scratch

SENT_SEQUENCES: Final = 1 << 20
"""As many sequences are sent to the workers, 24 MB; the facts of more are in a file."""

SEQUENCE_DTYPE = np.dtype(
    [
        ("tokens", np.int32),
        ("trained_tokens", np.int32),
        ("segments", np.int32),
        ("longest_segment", np.int32),
        ("flops", np.int64),
    ]
)
"""A train sequence. `flops` is what it costs; 0 unless ranks are balanced by it."""

_FILE = "sequences.bin"


@dataclass(frozen=True, slots=True, eq=False)
class SequenceTable:
    """The train sequences of all datasets, in recipe order, as an array of `SEQUENCE_DTYPE`, or in a file of a host."""

    count: int
    held: NDArray[Any] | None
    scratch: HostScratch
    stored: tuple[str, str] | None = None
    """The storage root and the path of the copy that other hosts fetch."""

    def load(self) -> NDArray[Any]:
        """Return the sequences; those of a file are read where they are asked for."""
        if self.held is not None:
            return self.held
        if self.stored is not None:
            self.scratch.require({_FILE: partial(_fetch, *self.stored)})
        return np.memmap(self.scratch.locate(_FILE), SEQUENCE_DTYPE, "r", shape=(self.count,))


def _fetch(root: str, relative: str, path: str) -> None:
    with Store(root).open(relative) as stored, Path(path).open("wb") as file:
        shutil.copyfileobj(stored, file)


@contextmanager
def open_sequences(context: StageContext, packed: Mapping[str, Manifest]) -> Generator[SequenceTable]:
    """Lend the facts of all train sequences."""
    tasks = [task for one in packed.values() for task in _list_tasks(context, one)]
    count, size = sum(task.shard.rows for task in tasks), sum(task.shard.bytes for task in tasks)
    found = context.pool.map(read_shard_sequences, tasks, size_bytes=size)
    with open_host_scratch(context) as scratch:
        if count <= SENT_SEQUENCES:
            yield SequenceTable(count, np.concatenate([np.empty(0, SEQUENCE_DTYPE), *found]), scratch)
            return
        scratch.require({_FILE: partial(_write_sequences, found)})
        if not context.pool.spans_hosts or context.store.is_local:
            yield SequenceTable(count, None, scratch)
            return
        relative = f"{context.folder}/{scratch.name}/{_FILE}"
        try:
            with Path(scratch.locate(_FILE)).open("rb") as file, context.store.create(relative) as stored:
                shutil.copyfileobj(file, stored)
            yield SequenceTable(count, None, scratch, (context.store.root, relative))
        finally:
            context.store.remove(relative)


def _write_sequences(found: Iterator[NDArray[Any]], path: str) -> None:
    with Path(path).open("wb") as file:
        file.writelines(one.tobytes() for one in found)


# ── One shard ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _ShardTask:
    root: str
    shard: File
    flops_linear: int | None
    """None: costs are not wanted."""


def _list_tasks(context: StageContext, packed: Manifest) -> Iterator[_ShardTask]:
    partitions = context.recipe.partitions
    linear = partitions.flops_linear if partitions.balance == "flops" else None
    for part in packed.parts:
        if part.facts["split"] == "train":
            yield _ShardTask(context.store.root, part.files["shard"], linear)


def list_open_datasets(recipe: Recipe) -> Sequence[str]:
    """Return the datasets in which attention crosses segments."""
    return [name for name, one in recipe.datasets.items() if not one.packing.block_cross_document_attention]


def read_shard_sequences(task: _ShardTask) -> NDArray[Any]:
    """Return the sequences of a shard, in `SEQUENCE_DTYPE`."""
    columns = ("tokens", "trained_tokens", "segment_lengths", *(() if task.flops_linear is None else ("seq_lengths",)))
    table = Store(task.root).table(task.shard, columns).combine_chunks()
    lists = table.column("segment_lengths").combine_chunks()
    offsets = np.asarray(lists.offsets, np.int64)
    offsets = offsets - offsets[0]
    lengths = lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    found = np.zeros(len(table), SEQUENCE_DTYPE)
    for name in ("tokens", "trained_tokens"):
        found[name] = table.column(name).to_numpy()
    found["segments"] = np.diff(offsets)
    found["longest_segment"] = np.maximum.reduceat(lengths, offsets[:-1]) if len(found) else 0
    if task.flops_linear is not None:
        # The spans that a trainer's kernels see: with open attention whole sequences, and with their padding.
        spans = table.column("seq_lengths").combine_chunks()
        bounds = np.asarray(spans.offsets, np.int64)
        costs = rank_assignment.compute_flops(spans.flatten().to_numpy(), bounds - bounds[0], task.flops_linear)
        found["flops"] = costs
    return found
