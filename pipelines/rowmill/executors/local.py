"""A pool of processes on this machine.

A task is one part and one set of files, so results do not depend on how many workers there are.

Where workers come from the fork server, the calling process works through the first tasks itself until that is ready,
so that nobody waits for it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import Literal, TypeVar

from rowmill.core import remote_index
from rowmill.core.config import Config
from rowmill.core.errors import IntegrityError
from rowmill.executors.shared_values import call_with, call_with_file, write_shared
from rowmill.executors.worker_pool import WorkerPool
from rowmill.executors.worker_processes import HAS_FORK_SERVER, hold_interrupts

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

INLINE_BELOW_BYTES = 8 << 20
"""Less work than this is nearly done when the fork server is ready: measured 2.5 s, and 3 to 8 MB/s per
process. With 0 every task waits for a worker."""

FORKED_INLINE_BELOW_BYTES = 2 << 20
"""The same where workers were forked from the calling process, which has them at once."""


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
        self._processes = WorkerPool(workers)

    def forks_for(self, size_bytes: int) -> bool:
        """Return whether `start` forks workers for so much input, if this process has no threads."""
        return (
            HAS_FORK_SERVER and self.workers > 1 and INLINE_BELOW_BYTES > 0 and size_bytes >= FORKED_INLINE_BELOW_BYTES
        )

    def start(self, size_bytes: int) -> "Future[None] | None":
        """Start the workers, unless so little input is done before they are ready.

        They are forked from the calling process if it has no threads, so call it before anything starts one.
        """
        if not HAS_FORK_SERVER or self.workers == 1 or not INLINE_BELOW_BYTES:
            return None
        if self.forks_for(size_bytes):
            self._processes.fork()
        return self._processes.start_in_background() if size_bytes >= self._inline_below else None

    def map(
        self, function: Callable[..., ResultT], tasks: Iterable[object], *, size_bytes: int, shared: object = None
    ) -> Iterator[ResultT]:
        """Yield the results in task order, as `Executor.map` says."""
        inline = function if shared is None else partial(call_with, function, shared)
        if self.workers == 1 or size_bytes < self._inline_below:
            yield from map(inline, tasks)
            return
        waiting = iter(tasks)
        if HAS_FORK_SERVER and INLINE_BELOW_BYTES:
            started = self._processes.start_in_background()
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
        pool = self._processes.wait_for_pool()
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
                self._processes.end_now()
            if type(error).__name__ == "BrokenProcessPool":
                self._processes.forget()
                raise IntegrityError(
                    "a worker process died (killed, or out of memory); finished parts are kept; build again, with "
                    "fewer execution.workers if memory was short"
                ) from error
            raise
        finally:
            remote_index.forget_absences()

    @property
    def _inline_below(self) -> int:
        """Bytes of input below which the calling process does the tasks itself."""
        return min(FORKED_INLINE_BELOW_BYTES, INLINE_BELOW_BYTES) if self._processes.are_forked else INLINE_BELOW_BYTES

    def close(self) -> None:
        """Stop the workers."""
        self._processes.close()
