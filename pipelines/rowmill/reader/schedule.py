"""Which sequences make a batch of a rank, one batch after the other, and reading the next batches on a thread.

    place     0 1 2 3 | 4 5 6 7      steps of 4 places
    rank 1    · 1 · 3 | · 5 · 7      this rank's sequence n is at place rank + n · world_size
    number      0   1     2   3

    blocks     0 | 1 2 | 3 4 5 6 | …        the first batch is read alone, so that it comes soon; later blocks are
    waiting        └── at most DEPTH ──┘      larger: sequences in the same row group are then decoded once
    pass       … 62 63 64 | 0 | 1 2 | …       the first blocks of the next pass are read before this one ends

The plan is integers, without a file. A thread, not a process: decoding Parquet releases the interpreter's lock, and a
batch need not be copied.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

import numpy as np

from rowmill.core.arrays import Ints
from rowmill.core.errors import ConfigError, join_choices


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The sequences `[begin, end)` of this rank; `following` is the number at which its next batch begins."""

    begin: int
    end: int
    following: int


@dataclass(frozen=True, slots=True, eq=False)
class RankSchedule:
    """The batches of one rank.

    Step s is the places `[step_offsets[s], step_offsets[s + 1])`; without steps, the offsets are the start and the end
    of the whole order. `batch_size` None is the rank's share of a step. No batch is of a step in `skipped`.
    """

    rank: int
    world_size: int
    step_offsets: Ints
    has_steps: bool
    batch_size: int | None
    skipped: frozenset[int] = frozenset()

    def __len__(self) -> int:
        """Return the number of this rank's sequences."""
        return self.find_number(int(self.step_offsets[-1]))

    def find_number(self, place: int) -> int:
        """Return the number of this rank's first sequence at or after a place."""
        return (place - self.rank + self.world_size - 1) // self.world_size

    def find_step(self, number: int) -> int:
        """Return the step of a sequence; without steps, 0."""
        return int(np.searchsorted(self.step_offsets, self.rank + number * self.world_size, "right")) - 1

    def find_step_end(self, number: int) -> int:
        """Return the number that follows the last sequence of this rank in a sequence's step."""
        return self.find_number(int(self.step_offsets[self.find_step(number) + 1]))

    def find_kept(self, number: int) -> int:
        """Return the first number from this one on that is not of a skipped step, or the number of sequences."""
        while number < len(self) and self.skipped and self.find_step(number) in self.skipped:
            number = self.find_step_end(number)
        return number

    def skip_batches(self, number: int, batches: int) -> int:
        """Return the number at which the batch `batches` later begins, at most the end."""
        number = self.find_kept(number)
        for _ in range(batches):
            if number >= len(self):
                break
            number = self.find_kept(self._find_batch_end(number))
        return number

    def plan_batches(self, number: int, every: int) -> Iterator[PlannedBatch]:
        """Yield the batches from a number on, and of these every `every`-th."""
        number = self.find_kept(number)
        while number < len(self):
            end = self._find_batch_end(number)
            following = self.skip_batches(end, every - 1)
            yield PlannedBatch(number, end, following)
            number = following

    def plan_passes(self, number: int, first: int, every: int) -> Iterator[Iterator[PlannedBatch]]:
        """Yield the batches from a number on to the end, then those of whole passes from batch `first` on, for ever."""
        yield self.plan_batches(number, every)
        while (begin := self.skip_batches(0, first)) < len(self):
            yield self.plan_batches(begin, every)

    def _find_batch_end(self, begin: int) -> int:
        """Return the number that follows the last sequence of the batch that begins at a number."""
        step_end = self.find_step_end(begin)
        if self.batch_size is None and self.has_steps:
            return step_end
        return min(begin + (self.batch_size or 1), step_end)

    def require_steps(self, steps: Iterable[int]) -> None:
        """Refuse numbers that are not of a step; raises ConfigError with the numbers that are."""
        count = len(self.step_offsets) - 1 if self.has_steps else 0
        wrong = sorted(step for step in steps if not 0 <= step < count)
        if wrong:
            has = f"steps are 0 to {count - 1}" if count else "the recipe has no mixture.batch_size, so it has no steps"
            raise ConfigError(f"reader: step {join_choices(wrong)}; {has}; correct the number")

    def require_equal_shares(self, position: int) -> None:
        """Refuse a world size that gives ranks unequal shares of a step at or after a place.

        Raises ConfigError with the nearest world sizes that divide all of them.
        """
        offsets = self.step_offsets
        remaining = np.diff(offsets)[offsets[:-1] >= position] if self.has_steps else offsets[-1:] - position
        common = int(np.gcd.reduce(remaining)) if len(remaining) else 0
        if common % self.world_size:
            below = next(d for d in range(self.world_size, 0, -1) if common % d == 0)
            above = next((d for d in range(self.world_size, common + 1) if common % d == 0), below)
            raise ConfigError(
                f"world_size: {self.world_size} does not divide the steps from place {position} on; every rank takes "
                f"equally many sequences of a step; choose {join_choices(dict.fromkeys((below, above)))}, or build "
                "with another batch_size"
            )


# ── Reading ahead ──


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
