"""Read the next batches on a thread, and find the share of a `DataLoader` worker.

    blocks     0 | 1 2 | 3 4 5 6 | …        the first batch is read alone, so that it comes soon; later blocks are
    waiting        └── at most DEPTH ──┘      larger: sequences in the same row group are then decoded once
    pass       … 62 63 64 | 0 | 1 2 | …       the first blocks of the next pass are read before this one ends

A thread, not a process: decoding Parquet releases the interpreter's lock, and a batch need not be copied.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from rowmill.reader.schedule import PlannedBatch

BatchT = TypeVar("BatchT")
PlanT = TypeVar("PlanT")

DEPTH = 2
"""Blocks that are read ahead."""

BLOCK_SEQUENCES, BLOCK_TOKENS = 64, 1 << 19
"""The largest block, unless one batch is larger: some 12 MB as a batch's arrays."""


def read_ahead(
    passes: Iterable[Iterator[PlannedBatch]],
    read: Callable[[Sequence[PlannedBatch]], Sequence[BatchT]],
    *,
    seq_len: int,
) -> Generator[tuple[PlannedBatch, BatchT]]:
    """Yield the planned batches of each pass with their content, reading some blocks of batches ahead.

    An error is raised where the first batch of its block would come. Closing the iterator ends the thread.
    """
    largest = max(1, min(BLOCK_SEQUENCES, BLOCK_TOKENS // seq_len))
    blocks = chain.from_iterable(_cut_blocks(planned, largest) for planned in passes)

    def read_next() -> tuple[list[PlannedBatch], Sequence[BatchT]]:
        # Planned on the thread as well: the batches of a block take half a millisecond.
        block = next(blocks, [])
        return block, read(block) if block else []

    thread = ThreadPoolExecutor(1, thread_name_prefix="rowmill-read-ahead")
    try:
        waiting = deque(thread.submit(read_next) for _ in range(DEPTH))
        while True:
            block, batches = waiting.popleft().result()
            if not block:
                return
            waiting.append(thread.submit(read_next))
            yield from zip(block, batches, strict=True)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def _cut_blocks(planned: Iterator[PlannedBatch], largest: int) -> Iterator[list[PlannedBatch]]:
    """Yield blocks of batches, each of up to twice as many sequences as the one before, up to `largest`."""
    block: list[PlannedBatch] = []
    limit = 1
    for batch in planned:
        block.append(batch)
        sequences = sum(entry.end - entry.begin for entry in block)
        if sequences >= limit:
            yield block
            block, limit = [], min(largest, 2 * max(limit, sequences))
    if block:
        yield block


class BatchesBetweenPasses(Generic[PlanT, BatchT]):
    """Holds the batches that were read ahead of the next pass from the end of one until the next begins.

    A copy, made by a fork or a pickle, holds none: the thread that reads them is not copied.
    """

    def __init__(self) -> None:
        self._kept: tuple[PlanT, Generator[tuple[PlannedBatch, BatchT]]] | None = None
        self._process = os.getpid()

    def __reduce__(self) -> tuple[type["BatchesBetweenPasses[PlanT, BatchT]"], tuple[()]]:
        """Pickle nothing of what is held."""
        return BatchesBetweenPasses, ()

    def keep(self, plan: PlanT, batches: Generator[tuple[PlannedBatch, BatchT]]) -> None:
        """Hold the batches that follow a pass, whose next pass is planned in this way."""
        self._kept, self._process = (plan, batches), os.getpid()

    def take(self, plan: PlanT) -> Generator[tuple[PlannedBatch, BatchT]] | None:
        """Return the batches that are held if they are planned in this way, and hold none any more."""
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and kept[0] == plan and self._process == os.getpid() else None


# ── Workers of a `DataLoader` ──


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """Every `workers`-th batch, starting with batch `worker`.

    A `DataLoader` takes from its workers in turn: with `batch_size=None` its batches come in the order of one process.
    """

    worker: int
    workers: int

    def __str__(self) -> str:
        """Return the share's name in error messages."""
        return f"worker {self.worker} of {self.workers}"


WHOLE_SHARE = WorkerShare(0, 1)
"""All batches: the share of a process without workers, and of the only worker."""


def find_current_worker() -> WorkerShare | None:
    """Return the share of this process if it is a `DataLoader` worker, else None.

    torch is not imported here: a worker process has imported it before it runs a dataset.
    """
    module = sys.modules.get("torch.utils.data")
    info = None if module is None else module.get_worker_info()
    return None if info is None else WorkerShare(int(info.id), int(info.num_workers))
