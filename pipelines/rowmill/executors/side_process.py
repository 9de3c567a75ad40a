"""A fork of the calling process that works ahead of it, and counts as far as it got.

    calling process ──forks──► side process: notes one result after another
         │ does something else    │
         └────────stop()──────────┘ ended wherever it is; what it noted until then is returned

It does what the calling process would do later, so nothing depends on how far it comes: it may be ended at any point,
and what raises in it is raised again where the calling process does the work. It notes results in a temporary file, not
a pipe, which would be full while nobody reads it.
"""

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from rowmill.executors.local import HAS_FORK_SERVER, has_no_threads, hold_interrupts, start_worker

Note = Callable[[object], None]
"""Notes a result that can be pickled."""

STOP_SECONDS = 2.0
"""How long a side process may take for its end, before it is killed: it may be inside a call of a library."""


class SideProcess:
    """A fork that runs `work`; start one with `fork_beside`."""

    def __init__(self, work: Callable[[Note], None]) -> None:
        context: Any = multiprocessing.get_context("fork")
        self._noted = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `stop`)
        watched, self._leash = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_run, args=(work, self._noted.fileno(), watched, self._leash), daemon=True
        )
        try:
            with hold_interrupts():
                self._process.start()
        except OSError:
            self._leash.close()
            self._noted.close()
            raise
        finally:
            watched.close()

    def stop(self) -> list[Any]:
        """End the process if it still runs; return what it noted, in order."""
        self._process.terminate()
        self._process.join(STOP_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._leash.close()
        found: list[Any] = []
        with self._noted:
            self._noted.seek(0)
            # The last one may be cut short.
            with contextlib.suppress(EOFError, pickle.UnpicklingError):
                while True:
                    found.append(pickle.load(self._noted))  # noqa: S301  (from a fork of this process)
        return found


def fork_beside(work: Callable[[Note], None]) -> SideProcess | None:
    """Start a side process; None where there can be none: this process has threads, or the system has no more."""
    if not (HAS_FORK_SERVER and has_no_threads()):
        return None
    # A limit of processes, memory or files: the work is done later without it.
    with contextlib.suppress(OSError):
        return SideProcess(work)
    return None


def _run(work: Callable[[Note], None], noted: int, watched: Any, leash: Any) -> None:
    """Do the work, in the side process."""
    # What holds something for the length of a block, such as a scratch folder, lets go of it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    start_worker(watched, leash)
    # The calling process meets the same.
    logging.disable()
    with contextlib.suppress(Exception):
        work(lambda result: _write(noted, pickle.dumps(result)))


def _write(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]
