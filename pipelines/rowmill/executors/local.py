"""A pool of processes on this machine.

What belongs here: starting workers, feeding them with a bounded number of tasks, ordered results, dying
together. What does not: what a task does. A task is one part and one set of files, so results do not
depend on how many workers there are.

Workers are spawned, not forked: the parent may hold threads of Arrow, Polars and Dagster, and a fork
copies their locks in whatever state they are in. A spawned worker takes about half a second, so small
work is done in the calling process (`inline_below_bytes`).
"""

import atexit
import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any, TypeVar

from rowmill.core.errors import IntegrityError

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

INLINE_BELOW_BYTES = 2 << 20
"""Less work than this is done before a worker has started: measured 0.6 s to spawn, 8 MB/s per worker."""


class LocalPool:
    """Ordered map over processes; with one worker, in the calling process. Closed at exit at the latest."""

    def __init__(self, workers: int) -> None:
        """Note the number of workers; processes start with the first map that is worth them."""
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None
        self._leash: Any = None

    def map(
        self, function: Callable[[TaskT], ResultT], tasks: Iterable[TaskT], *, size_bytes: int
    ) -> Iterator[ResultT]:
        """Yield `function(task)` for each task, in task order; `size_bytes` is how much input there is."""
        if self.workers == 1 or size_bytes < INLINE_BELOW_BYTES:
            yield from map(function, tasks)
            return
        yield from self._map_in_pool(function, tasks)

    def _map_in_pool(self, function: Callable[[TaskT], ResultT], tasks: Iterable[TaskT]) -> Iterator[ResultT]:
        pool = self._start_pool()
        pending: deque[Future[ResultT]] = deque()
        try:
            for task in tasks:
                with _hold_interrupts():
                    pending.append(pool.submit(function, task))
                # Two tasks per worker in flight keep all busy; more would only hold memory.
                if len(pending) > 2 * self.workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BaseException as error:
            for future in pending:
                future.cancel()
            if not isinstance(error, Exception):
                # Interrupted: nobody waits for what the workers are at, and the next build does it again.
                self._end_workers()
            if type(error).__name__ == "BrokenProcessPool":
                self._pool = None
                raise IntegrityError(
                    "a worker process died (killed, or out of memory); finished parts are kept; build again, with "
                    "fewer execution.workers if memory was short"
                ) from error
            raise

    def _start_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            # Started now, because it lets interrupts through when it starts.
            resource_tracker.ensure_running()
            watched, self._leash = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(
                self.workers, mp_context=context, initializer=_start_worker, initargs=(watched,)
            )
            atexit.register(self.close)
        return self._pool

    def _end_workers(self) -> None:
        """End the workers at once, whatever they are doing."""
        if self._leash is not None:
            self._leash.close()
        self.close()

    def close(self) -> None:
        """Stop the workers."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
            atexit.unregister(self.close)


@contextmanager
def _hold_interrupts() -> Generator[None]:
    """Hold interrupts back while a worker may start: it inherits that, so Ctrl-C in a terminal reaches us alone.

    A worker that it reached would print a traceback, even before it has run a line of ours.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(leash: Any) -> None:
    # One thread per library and worker: the processes are the parallelism.
    for name in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "POLARS_MAX_THREADS"):
        os.environ[name] = "false" if name == "TOKENIZERS_PARALLELISM" else "1"
    import pyarrow as pa

    pa.set_cpu_count(1)
    # A part makes some hundred thousand small objects, hardly any in cycles; looking for them took two per cent.
    gc.set_threshold(100_000, 20, 20)
    threading.Thread(target=_exit_with_parent, args=(leash,), daemon=True).start()


def _exit_with_parent(leash: Any) -> None:
    """Leave when the parent is gone, however it went, or lets go: a killed build must not leave writers behind."""
    parent: Any = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel, leash])
        os._exit(1)
