"""One process forked from the calling one, that works beside it until it is asked to stop.

calling process ── stop? ──► helper
                ◄─ answer ──
"""

import multiprocessing
from collections.abc import Callable
from typing import Any

from rowmill.executors.forked_workers import can_fork
from rowmill.executors.worker_processes import hold_interrupts, start_worker

ANSWER_SECONDS = 10
"""How long an answer is waited for; a helper that is at something longer is ended, and its answer is lost."""

_STOP = "stop"

HelperWork = Callable[[Callable[[], bool]], Any]
"""What a helper does, given a function that tells whether it is to stop; it returns its answer."""


class ForkedHelper:
    """A process that works beside this one; it ends with it, however that goes."""

    def __init__(self, process: Any, connection: Any, leash: Any) -> None:
        """Note a process that runs; `fork_helper` starts one."""
        self._process, self._connection, self._leash = process, connection, leash

    def finish(self) -> Any:
        """Ask the process to stop, and return its answer once it has ended; None if it gave none."""
        answer = None
        try:
            self._connection.send(_STOP)
            if self._connection.poll(ANSWER_SECONDS):
                answer = self._connection.recv()
        except (EOFError, OSError):
            # It died, of a lack of memory perhaps; what it would have done is done again.
            pass
        finally:
            self.end_now()
        return answer

    def end_now(self) -> None:
        """End the process, whatever it is doing."""
        self._leash.close()
        self._process.join(ANSWER_SECONDS)
        self._process.kill()
        self._process.join()
        self._connection.close()


def fork_helper(work: HelperWork) -> ForkedHelper | None:
    """Fork a process that does some work; None if this process has threads, or processes are not forked here."""
    if not can_fork():
        return None
    context = multiprocessing.get_context("fork")
    with hold_interrupts():
        watched, leash = context.Pipe(duplex=False)
        ours, theirs = context.Pipe()
        process = context.Process(target=_help, args=(work, watched, leash, ours, theirs), daemon=True)
        process.start()
        theirs.close()
        watched.close()
    return ForkedHelper(process, ours, leash)


def _help(work: HelperWork, watched: Any, leash: Any, ours: Any, theirs: Any) -> None:
    ours.close()
    start_worker(watched, leash)
    theirs.send(work(theirs.poll))
    # It stays until it is asked, so that the question never meets a closed pipe.
    theirs.recv()
