"""A pool of processes on this machine.

What belongs here: starting workers, feeding them with a bounded number of tasks, ordered results, dying
together. What does not: what a task does. A task is one part and one set of files, so results do not
depend on how many workers there are.

    calling process ──starts──► fork server: imports the engine, opens what `open_in_workers` named
         │                           │ forks
         │ tasks, results            ├──► worker 1
         └───────────────────────────┴──► worker 2 …

Workers are never forked from the calling process: it may hold threads of Arrow, Polars and Dagster, and a fork
copies their locks in whatever state they are in. They are forked from a server that has run no task, so it holds
none; what it has imported and opened, every worker has at once and shares in memory. Measured with the Qwen3
tokenizer: a spawned worker spends 1.0 s importing and 1.7 s opening, a forked one 0.02 s. Where there is no fork
server (macOS, Windows) workers are spawned and open everything themselves; the bytes are the same.

Until the server is ready the calling process works through the first tasks itself, so that nobody waits for it.
"""

import atexit
import json
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, TypeVar

from rowmill.core import arrow_import, garbage_collection, remote_index
from rowmill.core.config import Config
from rowmill.core.errors import IntegrityError
from rowmill.executors import worker_setup

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

INLINE_BELOW_BYTES = 8 << 20
"""Less work than this is nearly done when the fork server is ready: measured 2.5 s, and 3 to 8 MB/s per
process. With 0 every task waits for a worker."""

_OPENED_IN_WORKERS: list[tuple[str, str, list[str]]] = []


def open_in_workers(function: Callable[..., object], *arguments: str) -> None:
    """Have the fork server call a cached module-level function before it forks, so that workers find its result.

    It counts for servers that start later; a server that runs already is left as it is.
    """
    wanted = (function.__module__, function.__qualname__, list(arguments))
    if wanted not in _OPENED_IN_WORKERS:
        _OPENED_IN_WORKERS.append(wanted)


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
        inline = function if shared is None else partial(_call_with, function, shared)
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
        with _write_shared(shared) as folder:
            yield from self._map_in_pool(partial(_call_with_file, function, folder), waiting)

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
                    with _hold_interrupts():
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
            context = multiprocessing.get_context("forkserver" if HAS_FORK_SERVER else "spawn")
            # Started now, because it lets interrupts through when it starts.
            resource_tracker.ensure_running()
            if HAS_FORK_SERVER:
                _start_fork_server()
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
            self._forget_pool()

    def _forget_pool(self) -> None:
        self._pool = self._starting = None
        atexit.unregister(self.close)


HAS_FORK_SERVER = sys.platform == "linux"


def _start_fork_server() -> None:
    """Start the process that workers are forked from, if none runs; it reads once what it is to open."""
    forkserver.set_forkserver_preload(["rowmill.executors.fork_server"])
    os.environ[worker_setup.VARIABLE] = json.dumps(
        {"path": sys.path, "calls": _OPENED_IN_WORKERS, "keeps_pandas_out": arrow_import.is_pandas_kept_out()}
    )
    try:
        with _hold_interrupts():
            forkserver.ensure_running()
    finally:
        del os.environ[worker_setup.VARIABLE]


# ── Values that all tasks of a map need ────────────────────────────────────────────────────────────


def _call_with(function: Callable[..., ResultT], shared: object, task: object) -> ResultT:
    return function(task, shared)


def _call_with_file(function: Callable[..., ResultT], folder: str, task: object) -> ResultT:
    return function(task, _read_shared(folder))


@contextmanager
def _write_shared(value: object) -> Generator[str]:
    """Write a value to a folder, arrays apart, so that workers map them and share their pages."""
    with tempfile.TemporaryDirectory(prefix="rowmill-shared-") as folder:
        buffers: list[pickle.PickleBuffer] = []
        content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        Path(folder, "value").write_bytes(content)
        for number, buffer in enumerate(buffers):
            Path(folder, str(number)).write_bytes(buffer.raw())
        yield folder


@lru_cache(maxsize=1)
def _read_shared(folder: str) -> object:
    count = len(os.listdir(folder)) - 1
    buffers = [_map_file(Path(folder, str(number))) for number in range(count)]
    return pickle.loads(Path(folder, "value").read_bytes(), buffers=buffers)  # noqa: S301  (written by our own parent)


def _map_file(path: Path) -> "mmap.mmap | bytes":
    with path.open("rb") as file:
        # An empty file cannot be mapped.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""


def _do_nothing() -> None:
    """Be the first task: who gets its result knows that there is a worker."""


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
    worker_setup.limit_to_one_thread()
    garbage_collection.collect_rarely()
    threading.Thread(target=_exit_with_parent, args=(leash,), daemon=True).start()


def _exit_with_parent(leash: Any) -> None:
    """Leave when the parent is gone, however it went, or lets go: a killed build must not leave writers behind."""
    parent: Any = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel, leash])
        os._exit(1)
