"""Processes of this machine that run tasks: where they come from, and how they end.

    calling process ──starts──► fork server: imports the engine, opens what `open_in_workers` named
         │                           │ forks
         │ tasks, results            ├──► worker 1
         └───────────────────────────┴──► worker 2 …

A fork copies locks in whatever state they are in. So workers are forked from the calling process only as long as that
has no threads, as a command has none at first; later, and in Dagster, they are forked from a server that has run no
task. What was imported and opened before, every worker has at once and shares in memory. Measured with the Qwen3
tokenizer: a spawned worker spends 1.0 s importing and 1.7 s opening, a forked one 0.02 s. On macOS and Windows
workers are spawned and open everything themselves; the bytes are the same.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from typing import Any

from rowmill.executors import worker_setup

HAS_FORK_SERVER = sys.platform == "linux"

_OPENED_IN_WORKERS: list[tuple[str, str, list[str]]] = []


def open_in_workers(function: Callable[..., object], *arguments: str) -> None:
    """Have the fork server call a cached module-level function before it forks, so that workers find its result.

    It counts for servers that start later; a server that runs already is left as it is.
    """
    wanted = (function.__module__, function.__qualname__, list(arguments))
    if wanted not in _OPENED_IN_WORKERS:
        _OPENED_IN_WORKERS.append(wanted)


def open_here() -> None:
    """Call in this process what `open_in_workers` named, before workers are forked from it."""
    worker_setup.call_all(_OPENED_IN_WORKERS)


def start_processes(workers: int) -> tuple[ProcessPoolExecutor, Any]:
    """Return a pool of processes, and the leash that they end at when it is closed."""
    context = multiprocessing.get_context("forkserver" if HAS_FORK_SERVER else "spawn")
    # Started now, because it lets interrupts through when it starts.
    resource_tracker.ensure_running()
    if HAS_FORK_SERVER:
        _start_fork_server()
    watched, leash = context.Pipe(duplex=False)
    return ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, initargs=(watched,)), leash


def _start_fork_server() -> None:
    """Start the process that workers are forked from, if none runs; it reads once what it is to open."""
    forkserver.set_forkserver_preload(["rowmill.executors.fork_server"])
    os.environ[worker_setup.VARIABLE] = json.dumps({"path": sys.path, "calls": _OPENED_IN_WORKERS})
    try:
        with hold_interrupts():
            forkserver.ensure_running()
    finally:
        del os.environ[worker_setup.VARIABLE]


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


def start_worker(watched: Any, leash: Any = None) -> None:
    """Be set up as a worker: one thread per library; end when `leash`, the other end of `watched`, is closed."""
    if leash is not None:
        # A fork copied it, and as long as anyone has it open, no worker ends with the calling process.
        leash.close()
    worker_setup.limit_to_one_thread()
    threading.Thread(target=_exit_with_parent, args=(watched,), daemon=True).start()


def _exit_with_parent(watched: Any) -> None:
    """Leave when the parent is gone, however it went, or lets go: a killed build must not leave writers behind."""
    parent: Any = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel, watched])
        os._exit(1)


def do_nothing() -> None:
    """Be the first task, with which processes start; who gets its result knows that there is one."""
