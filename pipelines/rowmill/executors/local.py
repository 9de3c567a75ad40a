"""A pool of processes on this machine: workers, forked from this process or from a server, and tasks in order.

    calling process ──starts──► fork server: imports the engine, opens what `open_in_workers` named
         │                           │ forks
         │ tasks, results            ├──► worker 1
         └───────────────────────────┴──► worker 2 …

A fork copies locks in whatever state they are in. So workers are forked from the calling process only as long as that
has no threads, as a command has none at first; later, and in Dagster, they are forked from a server (`fork_server.py`)
that has run no task, and the calling process works through the first tasks itself until that is ready. What was
imported and opened before, every worker has at once: with the Qwen3 tokenizer a spawned worker spends 1.0 s importing
and 1.7 s opening, a forked one 0.02 s. On macOS and Windows workers are spawned; the bytes are the same.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent import futures
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, TypeVar

from rowmill.core import own_process, remote_index
from rowmill.core.config import Config
from rowmill.core.errors import IntegrityError
from rowmill.executors import base
from rowmill.executors.base import call_with_file, write_shared

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

HAS_FORK_SERVER = sys.platform == "linux"
START_METHOD = "forkserver" if HAS_FORK_SERVER else "spawn"
"""How workers start, unless they are forked from the calling process."""

_OPENED_IN_WORKERS: list[tuple[str, str, list[str]]] = []


def open_in_workers(function: Callable[..., object], *arguments: str) -> None:
    """Have the fork server call a cached module-level function before it forks, so that workers find its result.

    It counts for servers that start later; a server that runs already is left as it is.
    """
    call = (function.__module__, function.__qualname__, list(arguments))
    if call not in _OPENED_IN_WORKERS:
        _OPENED_IN_WORKERS.append(call)


def open_here() -> None:
    """Call in this process what `open_in_workers` named, before workers are forked from it."""
    base.call_all(_OPENED_IN_WORKERS)


def set_up_fork_server() -> None:
    """Tell a fork server that is started later what it is to open, through its environment.

    Call it before another thread starts the server. The variable stays: whoever reads the whole environment in another
    thread meanwhile, as fsspec does when it is imported, fails at one that is removed.
    """
    os.environ[base.VARIABLE] = json.dumps({"path": sys.path, "calls": _OPENED_IN_WORKERS})


def start_processes(workers: int, method: str = START_METHOD) -> tuple[ProcessPoolExecutor, Any]:
    """Return a pool of processes, and the leash that they end at when it is closed."""
    context: Any = multiprocessing.get_context(method)
    # Started now, because it lets interrupts through when it starts.
    resource_tracker.ensure_running()
    if method == "forkserver":
        # The process that workers are forked from reads once what it is to open.
        forkserver.set_forkserver_preload(["rowmill.executors.fork_server"])
        with hold_interrupts():
            forkserver.ensure_running()
    watched, leash = context.Pipe(duplex=False)
    # A fork of this process has a copy of the leash.
    ends = (watched, leash) if method == "fork" else (watched,)
    return ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, initargs=ends), leash


@contextmanager
def hold_interrupts() -> Generator[None]:
    """Hold interrupts back while a worker may start: it inherits that, so Ctrl-C in a terminal reaches us alone.

    A worker that it reached would print a traceback, even before it has run a line of ours. The mask is what a worker
    inherits. It does not hold the signal off this process, where a thread of a library that does not block it takes it
    and Python then interrupts its main thread: a pool whose processes run, but not yet the thread that ends them, would
    never end. So the main thread notes it, and is interrupted when the block is left.
    """
    noted: list[int] = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, lambda number, _: noted.append(number)) if in_main_thread else None
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
            if noted:
                signal.raise_signal(signal.SIGINT)


class WorkerStartError(BrokenExecutor):
    """A worker process could not be started or set up; the message continues `a worker process`."""


_SETUP_ERRORS: list[Exception] = []
"""Why this process, a worker, is not set up."""


def start_worker(watched: Any, leash: Any = None) -> None:
    """Be set up as a worker: one thread per library; end when `leash`, the other end of `watched`, is closed."""
    try:
        if leash is not None:
            # A fork copied it, and as long as anyone has it open, no worker ends with the calling process.
            leash.close()
        threading.Thread(target=_exit_with_parent, args=(watched,), daemon=True).start()
        base.limit_to_one_thread()
        base.encode_in_own_thread()
        own_process.keep_pandas_out()
        own_process.collect_rarely()
    except Exception as error:  # noqa: BLE001  (the first task raises it: of an initializer, the pool would lose it)
        _SETUP_ERRORS.append(error)


def run_task(content: bytes) -> Any:
    """Return the result of a pickled function and its arguments.

    A worker that fails outside a task, even by unpickling one, ends without its error reaching the calling process;
    and an error that cannot be unpickled there breaks the whole pool. So all of them are raised here.
    Raises WorkerStartError if this worker could not be set up.
    """
    for error in _SETUP_ERRORS:
        raise WorkerStartError(f"could not be set up ({type(error).__name__}: {error})") from error
    try:
        function, *arguments = pickle.loads(content)  # noqa: S301  (from our own calling process)
        return function(*arguments)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301  (made here)
        except Exception:  # noqa: BLE001  (what a class of errors does when it is made again)
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise


def _exit_with_parent(watched: Any) -> None:
    """Leave when the parent is gone, however it went, or lets go: a killed build must not leave writers behind."""
    parent: Any = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel, watched])
        os._exit(1)


def submit_task(pool: ProcessPoolExecutor, function: Callable[..., ResultT], *arguments: object) -> "Future[ResultT]":
    """Give a pool a task."""
    content = pickle.dumps((function, *arguments))
    with hold_interrupts():
        return pool.submit(run_task, content)


def do_nothing() -> None:
    """Be the first task, with which processes start; who gets its result knows that there is one."""


# ── Forks of the calling process ──


IDLE_THREADS = frozenset({"jemalloc_bg_thd", "polars-ooc-clea"})
"""Threads that importing Arrow and Polars starts, in a fork server as well: jemalloc restores its own after a fork, the
other removes spilled files, of which there are none."""

THREAD_END_SECONDS = 0.05
"""How long a thread that ends is waited for, before workers come from a fork server instead."""


def prepare_fork() -> bool:
    """Open what `open_in_workers` named, which this process will want as well; return whether it has no threads."""
    if not has_no_threads():
        return False
    # Arrow imports it with NumPy's first array: this process will, and so would each of its workers.
    importlib.import_module("numpy.ma")
    open_here()
    return not _list_busy_threads()


def has_no_threads() -> bool:
    """Return whether a fork of this process copies no thread's locks."""
    # A thread that was told to end gets a moment for it.
    deadline = time.monotonic() + THREAD_END_SECONDS
    while _list_busy_threads():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _list_busy_threads() -> list[str]:
    """Return the names of this process's other threads, without those known to be idle."""
    names: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        # It may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if task.name != str(os.getpid()):
                names.append((task / "comm").read_text(encoding="utf-8").strip())
    return [name for name in names if name not in IDLE_THREADS]


# ── The executor ──


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
    """Ordered map over processes; with one worker, in the calling process.

    Processes start when they are first needed, and again after they were lost; they end at exit at the latest.
    """

    spans_hosts = False

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None
        self._leash: Any = None
        self._starting: Future[None] | None = None
        self._at_exit: util.Finalize[None] | None = None
        self._are_forked = False
        """Whether the processes were forked from the calling process."""

    def start(self, size_bytes: int) -> "Future[None] | None":
        """Start the workers, unless so little input is done before they are ready.

        They are forked from the calling process if it has no threads, so call it before anything starts one.
        """
        if not HAS_FORK_SERVER or self.workers == 1 or not INLINE_BELOW_BYTES:
            return None
        if self.forks_at(size_bytes):
            self._fork()
        return self._start_in_background() if size_bytes >= self._inline_below else None

    @property
    def can_fork(self) -> bool:
        """Whether processes can be forked from this one, and there is a core for one more."""
        return HAS_FORK_SERVER and self.workers > 1 and INLINE_BELOW_BYTES > 0

    def forks_at(self, size_bytes: int) -> bool:
        """Return whether `start` forks workers for so much input, where it can."""
        is_started = self._starting is not None or self._pool is not None
        return self.can_fork and not is_started and size_bytes >= FORKED_INLINE_BELOW_BYTES

    def _fork(self) -> None:
        """Fork the processes from this one, unless it has threads."""
        # Interrupted between the fork and the note, nobody would end the processes.
        with hold_interrupts():
            if not prepare_fork():
                return
            pool, leash = start_processes(self.workers, "fork")
            # What was opened stays: workers share it as long as nobody walks it.
            gc.freeze()
            with warnings.catch_warnings():
                # Python 3.12 warns of any thread, the idle ones too.
                warnings.simplefilter("ignore", DeprecationWarning)
                # The first task forks all processes, and then starts the thread that feeds them.
                submit_task(pool, do_nothing)
            self._keep(pool, leash)
            self._are_forked, self._starting = True, Future()
            self._starting.set_result(None)

    def _start_in_background(self) -> "Future[None]":
        """Start the fork server and the first process in a thread; done as soon as processes can be had."""
        if self._starting is None:
            starting: Future[None] = Future()

            def start() -> None:
                try:
                    with hold_interrupts():
                        submit_task(self._open(), do_nothing).result()
                except BaseException as error:  # noqa: BLE001  (whoever waits for it gets it)
                    starting.set_exception(error)
                else:
                    starting.set_result(None)

            self._starting = starting
            set_up_fork_server()
            threading.Thread(target=start, daemon=True).start()
        return self._starting

    def _open(self) -> ProcessPoolExecutor:
        return self._pool or self._keep(*start_processes(self.workers))

    def _keep(self, pool: ProcessPoolExecutor, leash: Any) -> ProcessPoolExecutor:
        self._pool, self._leash = pool, leash
        # Before multiprocessing's own, at 10 and less: they close the queue through which workers are told to end, and
        # remove what a worker that starts still reads.
        self._at_exit = util.Finalize(None, self.close, exitpriority=100)
        return pool

    def map(
        self, function: Callable[..., ResultT], tasks: Iterable[object], *, size_bytes: int, shared: object = None
    ) -> Iterator[ResultT]:
        """Yield the results in task order, as `Executor.map` says."""
        rest = () if shared is None else (shared,)
        if self.workers == 1 or size_bytes < self._inline_below:
            yield from (function(task, *rest) for task in tasks)
            return
        waiting = iter(tasks)
        if HAS_FORK_SERVER and INLINE_BELOW_BYTES:
            started = self._start_in_background()
            for task in waiting:
                if started.done():
                    waiting = chain((task,), waiting)
                    break
                yield function(task, *rest)
            else:
                return
        if shared is None:
            yield from self._map_in_pool(function, waiting)
            return
        with write_shared(shared) as folder:
            yield from self._map_in_pool(partial(call_with_file, function, folder), waiting)

    def run_on_hosts(self, function: Callable[[], ResultT]) -> dict[str, ResultT]:
        """Return nothing: there is no host but this one."""
        del function
        return {}

    def _map_in_pool(self, function: Callable[[TaskT], ResultT], tasks: Iterable[TaskT]) -> Iterator[ResultT]:
        remote_index.forget_absences()
        pending: deque[Future[ResultT]] = deque()
        try:
            try:
                if self._starting is not None and self._starting.exception() is not None:
                    # It began under conditions that may be over: a worker starts where the process was, in a folder
                    # that may be gone when the fork server is ready.
                    self._forget()
                if self._pool is None:
                    set_up_fork_server()
                pool = self._open()
            except (EOFError, OSError) as error:
                # A fork server that died, or a limit of processes, memory or open files.
                raise WorkerStartError(f"could not be started ({type(error).__name__}: {error})") from error
            for task in tasks:
                pending.append(submit_task(pool, function, task))
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
                if self._leash is not None:
                    self._leash.close()
                self.close()
            if isinstance(error, BrokenExecutor):
                # The next map starts others. A broken pool ends its processes itself; waiting for that can hang.
                self._forget()
                problem = str(error) if isinstance(error, WorkerStartError) else "died (killed, or out of memory)"
                raise IntegrityError(
                    f"a worker process {problem}; finished parts are kept; build again, with fewer execution.workers "
                    "if memory was short"
                ) from error
            raise
        finally:
            remote_index.forget_absences()

    @property
    def _inline_below(self) -> int:
        """Bytes of input below which the calling process does the tasks itself."""
        return min(FORKED_INLINE_BELOW_BYTES, INLINE_BELOW_BYTES) if self._are_forked else INLINE_BELOW_BYTES

    def close(self) -> None:
        """End the processes after what they are doing."""
        if self._starting is not None:
            # A pool that ends removes what a worker reads when it starts.
            futures.wait([self._starting])
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._forget()

    def _forget(self) -> None:
        """Note that the processes are gone."""
        self._pool = self._starting = None
        self._are_forked = False
        if self._at_exit is not None:
            self._at_exit.cancel()
