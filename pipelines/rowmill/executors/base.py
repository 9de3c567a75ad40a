"""The interface of executors."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Protocol, TypeVar

ResultT = TypeVar("ResultT")


class Executor(Protocol):
    """Maps a module-level function over tasks.

    A task is one part, or a few small ones, and holds only what belongs to it. Tasks, shared values and results can be
    pickled, and results are small: content goes through the store. A task may run more than once, so running it again
    must write the same.
    """

    @property
    def workers(self) -> int:
        """How many tasks run at once, as far as is known now."""
        ...

    @property
    def spans_hosts(self) -> bool:
        """Whether tasks may run on other hosts than the calling process."""
        ...

    def start(self, size_bytes: int) -> Future[None] | None:
        """Start what tasks on so much input will need, and return at once, so that the caller goes on meanwhile.

        The future is done when workers take tasks; there is none where nothing is started.
        """
        ...

    def map(
        self, function: Callable[..., ResultT], tasks: Iterable[object], *, size_bytes: int, shared: object = None
    ) -> Iterator[ResultT]:
        """Yield `function(task)`, or `function(task, shared)`, for each task, in task order, few of them in flight.

        `size_bytes` is how much input there is. `shared` is sent once per worker, not with each task; its arrays are
        read-only.
        """
        ...

    def run_on_hosts(self, function: Callable[[], ResultT]) -> dict[str, ResultT]:
        """Run a function once on each host of an executor that spans hosts; return the results by the hosts' names."""
        ...

    def close(self) -> None:
        """Stop what the executor started."""
        ...
