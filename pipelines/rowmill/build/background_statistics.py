"""Statistics of finished steps, written by a thread while the next steps run (decision 38).

Statistics are copies of columns of an output for SQL queries. No step reads them, and a build with workers waits for
them with all workers idle otherwise.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from rowmill.build.steps import Step
from rowmill.core.errors import DamagedFileError


class BackgroundStatistics:
    """Writes the statistics of one step after another; leaving its block stops what has not begun."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._thread = ThreadPoolExecutor(1, "write-statistics")
        self._pending: deque[tuple[Step, Future[None]]] = deque()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for what is being written; the next build writes what is left."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def submit(self, step: Step, write: Callable[[], None]) -> None:
        """Have the statistics of a step written."""
        self._pending.append((step, self._thread.submit(write)))

    def collect(self, *, waits: bool = False) -> Iterator[Step]:
        """Yield the steps whose files turned out to be damaged, of those written so far, or, with `waits`, of all.

        Raises
        ------
        Exception
            Any other error of the thread.

        """
        while self._pending and (waits or self._pending[0][1].done()):
            step, written = self._pending.popleft()
            try:
                written.result()
            except DamagedFileError:
                yield step
