"""Forks workers from the calling process, as long as that has no threads.

A worker has at once what the calling process has imported and opened; a fork server imports the engine and opens the
tokenizer again, for 2.5 s of processor time. Threads are what makes a fork unsafe: it copies their locks, but not them.
"""

import contextlib
import gc
import multiprocessing
import os
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from rowmill.executors.worker_processes import HAS_FORK_SERVER, do_nothing, hold_interrupts, open_here, start_worker

IDLE_THREADS = frozenset({"jemalloc_bg_thd", "polars-ooc-clea"})
"""Threads that importing Arrow and Polars starts, in a fork server as well: jemalloc restores its own after a fork, the
other removes spilled files, of which there are none."""

THREAD_END_SECONDS = 0.05
"""How long a thread that ends is waited for, before workers come from a fork server instead."""


def fork_processes(workers: int) -> tuple[ProcessPoolExecutor, Any] | None:
    """Return a pool of processes that were forked from this one, and their leash; None if this one has threads.

    What `open_in_workers` named is opened first, which this process will want as well.
    """
    if not can_fork():
        return None
    open_here()
    if _list_busy_threads():
        return None
    context = multiprocessing.get_context("fork")
    # Started now, because it lets interrupts through when it starts.
    resource_tracker.ensure_running()
    with hold_interrupts():
        watched, leash = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, initargs=(watched, leash))
        # What was opened stays: workers share it as long as nobody walks it.
        gc.freeze()
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread, the idle ones too.
            warnings.simplefilter("ignore", DeprecationWarning)
            # The first task forks all processes, and then starts the thread that feeds them.
            pool.submit(do_nothing)
    return pool, leash


def can_fork() -> bool:
    """Return whether processes are forked on this system, and this one has no thread that makes it unsafe."""
    return HAS_FORK_SERVER and _wait_for_ending_threads()


def _wait_for_ending_threads() -> bool:
    """Return whether this process has no busy thread; one that was told to end gets a moment for it."""
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
