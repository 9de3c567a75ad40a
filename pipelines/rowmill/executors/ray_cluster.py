"""Tasks on the nodes of a Ray cluster that the user runs.

    calling process ── task, shared value by reference ──► node A   task 1
         ▲                                                 node B   task 2 …
         └───────────────── small results ─────────────────┘
                     files: only through the store

Ray only places tasks. There are no actors, no named state, and nothing in its object store but the value that a map
shares, so any node may die: Ray runs its tasks again elsewhere, and a task that runs twice writes the same files. If
the calling process dies, the next build continues from finished parts.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from rowmill.core import remote_index
from rowmill.core.config import Config
from rowmill.executors.ray_connection import RayConnection, import_ray
from rowmill.executors.ray_nodes import CAPACITY_AGE_S, RayNodes
from rowmill.executors.ray_results import RETRIES, take_result
from rowmill.executors.ray_worker import TaskCall, TransientTaskError, run_call
from rowmill.executors.versions import describe_versions

ResultT = TypeVar("ResultT")

_LEAST_WINDOW = 16
"""Tasks in flight at least, so that a cluster without nodes has a reason to start some."""
_BUFFERED_WINDOWS = 8
"""Finished results that may wait for an earlier one, in windows: a task that is retried does not stop the others."""


class RayExecutor(Config):
    """Tasks on a Ray cluster, whose nodes must reach the sources and the storage root."""

    kind: Literal["ray"]
    """Run tasks on the nodes of a running Ray cluster; needs the extra `ray`."""
    address: str = "auto"
    """Address of the cluster: `auto` for the one that this machine belongs to, `host:port`, or `ray://host:port`."""
    cpus_per_task: Annotated[float, Field(gt=0)] = 1.0
    """Cores that a task reserves."""
    memory_per_task: Annotated[int, Field(ge=1)] | None = None
    """Bytes of memory that a task reserves; null reserves none."""
    max_in_flight: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of submitted tasks; null: twice as many as the cluster runs at once, read again as nodes join."""

    def open(self, workers: int) -> "RayTasks":
        """Return the executor; it connects with its first use. `workers` concerns this machine alone."""
        del workers
        return RayTasks(self)


class RayTasks:
    """Ordered map over the tasks of a cluster."""

    def __init__(self, options: RayExecutor) -> None:
        """Note the options."""
        self._options = options
        self._connection = RayConnection(options.address)
        self._nodes = RayNodes(self._connection, options.cpus_per_task, options.memory_per_task)

    @property
    def workers(self) -> int:
        """How many tasks the cluster runs at once now."""
        return self._nodes.count_tasks()

    @property
    def spans_hosts(self) -> bool:
        """Yes."""
        return True

    def start(self, size_bytes: int) -> None:
        """Start nothing: the cluster runs already."""
        del size_bytes

    def map(
        self, function: Callable[..., ResultT], tasks: Iterable[object], *, size_bytes: int, shared: object = None
    ) -> Iterator[ResultT]:
        """Yield the results in task order, as `Executor.map` says."""
        del size_bytes
        ray = self._connection.open()
        remote_index.forget_absences()
        self._nodes.require_large_enough()
        # One argument by reference for all tasks: a node fetches it once.
        reference = None if shared is None else ray.put(shared)
        versions = tuple(describe_versions().items())
        calls = (TaskCall(function, (task,), os.getcwd(), versions).pickle() for task in tasks)
        run = self._define_task()
        submitted = yielded = 0
        flying: dict[Any, int] = {}
        finished: dict[int, ResultT] = {}
        is_last = False
        try:
            while True:
                window = self._options.max_in_flight or max(_LEAST_WINDOW, 2 * self.workers)
                while not is_last and len(flying) < window and submitted - yielded < _BUFFERED_WINDOWS * window:
                    call = next(calls, None)
                    is_last = call is None
                    if call is not None:
                        flying[run.remote(call, reference)] = submitted
                        submitted += 1
                if not flying:
                    return
                # Not `get` in the order of submission, which would wait behind the slowest.
                done, _ = ray.wait(list(flying), timeout=CAPACITY_AGE_S)
                finished |= {flying.pop(one): take_result(one) for one in done}
                while yielded in finished:
                    yield finished.pop(yielded)
                    yielded += 1
        finally:
            remote_index.forget_absences()
            for one in flying:
                ray.cancel(one)

    def _define_task(self) -> Any:
        """Define the remote function of a map, once, as each definition is sent to all nodes."""
        options = self._options
        return import_ray().remote(run_call).options(
            num_cpus=options.cpus_per_task,
            memory=options.memory_per_task,
            max_retries=RETRIES,
            retry_exceptions=[TransientTaskError],
            scheduling_strategy="SPREAD",
        )  # fmt: skip

    def run_on_hosts(self, function: Callable[[], ResultT]) -> dict[str, ResultT]:
        """Run a function on each node that takes tasks, as `RayNodes.run_on_each` says."""
        return self._nodes.run_on_each(function)

    def close(self) -> None:
        """Leave the cluster, if this executor has joined it."""
        self._connection.close()
