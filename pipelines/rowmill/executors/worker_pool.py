"""The processes of one pool from their start to their end."""

import atexit
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from rowmill.executors.forked_workers import fork_processes
from rowmill.executors.worker_processes import do_nothing, hold_interrupts, start_processes


class WorkerPool:
    """Processes that start when they are first asked for, and again after they were lost; closed at exit at latest."""

    def __init__(self, workers: int) -> None:
        """Note the number of processes; none is started."""
        self.workers = workers
        self.are_forked = False
        """Whether the processes were forked from the calling process."""
        self._pool: ProcessPoolExecutor | None = None
        self._starting: Future[None] | None = None
        self._leash: Any = None

    def fork(self) -> None:
        """Fork the processes from this one, unless it has threads or others were started."""
        if self._starting is not None or self._pool is not None:
            return
        # Interrupted between the fork and the note, nobody would end the processes.
        with hold_interrupts():
            forked = fork_processes(self.workers)
            if forked is not None:
                self._keep(*forked)
                self.are_forked = True
                self._starting = Future()
                self._starting.set_result(None)

    def start_in_background(self) -> "Future[None]":
        """Start the fork server and the first process in a thread; done as soon as processes can be had."""
        if self._starting is None:
            starting: Future[None] = Future()

            def start() -> None:
                try:
                    with hold_interrupts():
                        self._open().submit(do_nothing).result()
                except BaseException as error:  # noqa: BLE001  (whoever waits for it gets it)
                    starting.set_exception(error)
                else:
                    starting.set_result(None)

            self._starting = starting
            threading.Thread(target=start, daemon=True).start()
        return self._starting

    def wait_for_pool(self) -> ProcessPoolExecutor:
        """Return the pool once its processes can be had."""
        if self._starting is not None:
            self._starting.result()
        return self._open()

    def _open(self) -> ProcessPoolExecutor:
        return self._keep(*start_processes(self.workers)) if self._pool is None else self._pool

    def _keep(self, pool: ProcessPoolExecutor, leash: Any) -> ProcessPoolExecutor:
        self._pool, self._leash = pool, leash
        atexit.register(self.close)
        return pool

    def end_now(self) -> None:
        """End the processes at once, whatever they are doing."""
        if self._leash is not None:
            self._leash.close()
        self.close()

    def close(self) -> None:
        """End the processes after what they are doing."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self.forget()

    def forget(self) -> None:
        """Note that the processes are gone."""
        self._pool = self._starting = None
        self.are_forked = False
        atexit.unregister(self.close)
