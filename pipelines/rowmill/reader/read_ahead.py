"""Read the next batches on a thread while a trainer works on one.

What belongs here: how far ahead is read, and the thread. What does not: which batches come next (`schedule.py`), how
one is read (`stored_rows.py`).

    blocks     0 | 1 2 | 3 4 5 6 | …        the first batch is read alone, so that it comes soon; later blocks are
    waiting        └── at most DEPTH ──┘      larger: sequences in the same row group are then decoded once

A thread, not a process: decoding Parquet releases the interpreter's lock, and a batch need not be copied.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from rowmill.reader.schedule import PlannedBatch

BatchT = TypeVar("BatchT")

DEPTH = 2
"""Blocks that are read ahead."""

BLOCK_SEQUENCES, BLOCK_TOKENS = 64, 1 << 19
"""The largest block, unless one batch is larger: some 12 MB as a batch's arrays."""


def read_ahead(
    planned: Iterator[PlannedBatch], read: Callable[[Sequence[PlannedBatch]], Sequence[BatchT]], *, seq_len: int
) -> Generator[tuple[PlannedBatch, BatchT]]:
    """Yield each planned batch with its content, reading some blocks of batches ahead.

    An error is raised where the first batch of its block would come. Closing the iterator ends the thread.
    """
    blocks = _cut_blocks(planned, max(1, min(BLOCK_SEQUENCES, BLOCK_TOKENS // seq_len)))
    thread = ThreadPoolExecutor(1, thread_name_prefix="rowmill-read-ahead")
    try:
        waiting: deque[tuple[list[PlannedBatch], Future[Sequence[BatchT]]]] = deque()
        while True:
            waiting.extend((block, thread.submit(read, block)) for block in islice(blocks, DEPTH - len(waiting)))
            if not waiting:
                return
            block, reading = waiting.popleft()
            batches = reading.result()
            waiting.extend((block, thread.submit(read, block)) for block in islice(blocks, DEPTH - len(waiting)))
            yield from zip(block, batches, strict=True)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def _cut_blocks(planned: Iterator[PlannedBatch], largest: int) -> Iterator[list[PlannedBatch]]:
    """Yield blocks of batches, each of up to twice as many sequences as the one before, up to `largest`."""
    block: list[PlannedBatch] = []
    limit = 1
    for batch in planned:
        block.append(batch)
        sequences = sum(one.end - one.begin for one in block)
        if sequences >= limit:
            yield block
            block, limit = [], min(largest, 2 * max(limit, sequences))
    if block:
        yield block
