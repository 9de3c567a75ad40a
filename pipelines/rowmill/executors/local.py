"""A pool of processes on this machine.

What belongs here: feeding processes with a bounded number of tasks, ordered results, a worker that died. What does
not: what a task does; where processes come from (`worker_processes.py`); values that tasks share
(`shared_values.py`). A task is one part and one set of files, so results do not depend on how many workers there are.

Until the fork server is ready the calling process works through the first tasks itself, so that nobody waits for it.
"""

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeVar

from rowmill.core import remote_index
from rowmill.core.config import Config
from rowmill.core.errors import IntegrityError
from rowmill.executors.shared_values import call_with, call_with_file, write_shared
from rowmill.executors.worker_processes import HAS_FORK_SERVER, hold_interrupts, start_processes

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

INLINE_BELOW_BYTES = 8 << 20
"""Less work than this is nearly done when the fork server is ready: measured 2.5 s, and 3 to 8 MB/s per
process. With 0 every task waits for a worker."""


class LocalExecutor(Config):
    """Processes on this machine, `execution.workers` of them."""

    kind: Literal["local"] = "local"
    """Run tasks in processes on this machine."""

    def open(self, workers: int) -> "LocalPool":
        """Return a pool of that many processes."""
        return LocalPool(workers)


class LocalPool:
    """Ordered map over processes; with one worker, in the calling process. Closed at exit at the latest."""

    def __init__(self, workers: int) -> None:
        """Note the number of workers; processes start with the first map that is worth them."""
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None
        self._starting: Future[None] | None = None
        self._leash: Any = None

    def start(self, size_bytes: int) -> "Future[None] | None":
        """Start the workers, unless so little input is done before they are ready."""
        if HAS_FORK_SERVER and self.workers > 1 and size_bytes >= INLINE_BELOW_BYTES > 0:
            return self._start_in_background()
        return None

    def map(
        self, function: Callable[..., ResultT], tasks: Iterable[object], *, size_bytes: int, shared: object = None
    ) -> Iterator[ResultT]:
        """Yield the results in task order, as `Executor.map` says."""
        inline = function if shared is None else partial(call_with, function, shared)
        if self.workers == 1 or size_bytes < INLINE_BELOW_BYTES:
            yield from map(inline, tasks)
            return
        waiting = iter(tasks)
        if HAS_FORK_SERVER and INLINE_BELOW_BYTES:
            started = self._start_in_background()
            for task in waiting:
                if started.done():
                    waiting = chain((task,), waiting)
                    break
                yield inline(task)
            else:
                return
        if shared is None:
            yield from self._map_in_pool(function, waiting)
            return
        with write_shared(shared) as folder:
            yield from self._map_in_pool(partial(call_with_file, function, folder), waiting)

    @property
    def spans_hosts(self) -> bool:
        """No."""
        return False

    def run_on_hosts(self, function: Callable[[], ResultT]) -> dict[str, ResultT]:
        """Return nothing: there is no host but this one."""
        del function
        return {}

    def _map_in_pool(self, function: Callable[[TaskT], ResultT], tasks: Iterable[TaskT]) -> Iterator[ResultT]:
        pool = self._start_pool()
        remote_index.forget_absences()
        pending: deque[Future[ResultT]] = deque()
        try:
            for task in tasks:
                with hold_interrupts():
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
                self._forget_pool()
                raise IntegrityError(
                    "a worker process died (killed, or out of memory); finished parts are kept; build again, with "
                    "fewer execution.workers if memory was short"
                ) from error
            raise
        finally:
            remote_index.forget_absences()

    def _start_in_background(self) -> "Future[None]":
        """Start the fork server and the first worker in a thread; done as soon as workers can be had."""
        if self._starting is None:
            starting: Future[None] = Future()

            def start() -> None:
                try:
                    with hold_interrupts():
                        self._open_pool().submit(_do_nothing).result()
                except BaseException as error:  # noqa: BLE001  (whoever waits for it gets it)
                    starting.set_exception(error)
                else:
                    starting.set_result(None)

            self._starting = starting
            threading.Thread(target=start, daemon=True).start()
        return self._starting

    def _start_pool(self) -> ProcessPoolExecutor:
        if self._starting is not None:
            self._starting.result()
        return self._open_pool()

    def _open_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool, self._leash = start_processes(self.workers)
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
            self._forget_pool()

    def _forget_pool(self) -> None:
        self._pool = self._starting = None
        atexit.unregister(self.close)


def _do_nothing() -> None:
    """Be the first task: who gets its result knows that there is a worker."""
