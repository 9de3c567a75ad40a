"""Tasks on the nodes of a Ray cluster that the user runs.

What belongs here: submitting, retrying, results in task order. What does not: the connection (`ray_connection.py`),
running a task (`ray_worker.py`), comparing nodes (`build/hosts.py`).

    calling process ── task, shared value by reference ──► node A   task 1
         ▲                                                 node B   task 2 …
         └───────────────── small results ─────────────────┘
                     files: only through the store

Ray only places tasks. There are no actors, no named state, and nothing in its object store but the value that a map
shares, so any node may die: Ray runs its tasks again elsewhere, and a task that runs twice writes the same files. If
the calling process dies, the next build continues from finished parts.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from rowmill.core import remote_index
from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, IntegrityError
from rowmill.executors.ray_connection import RayConnection, import_ray, shorten_error
from rowmill.executors.ray_worker import FailedTask, TaskCall, TransientTaskError, run_call
from rowmill.executors.versions import describe_versions

ResultT = TypeVar("ResultT")

RETRIES = 5
_HOST_TIMEOUT_S = 60.0
_LEAST_WINDOW = 16
"""Tasks in flight at least, so that a cluster without nodes has a reason to start some."""
_BUFFERED_WINDOWS = 8
"""Finished results that may wait for an earlier one, in windows: a task that is retried does not stop the others."""
_CAPACITY_AGE_S = 2.0


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
        self._capacity, self._capacity_at = 1, -_CAPACITY_AGE_S

    @property
    def workers(self) -> int:
        """How many tasks the cluster runs at once now."""
        if time.monotonic() - self._capacity_at > _CAPACITY_AGE_S:
            cores = [node["Resources"]["CPU"] for node in self._connection.list_nodes()]
            self._capacity = max(1, sum(int(one // self._options.cpus_per_task) for one in cores))
            self._capacity_at = time.monotonic()
        return self._capacity

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
        self._require_large_enough_node()
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
                done, _ = ray.wait(list(flying), timeout=_CAPACITY_AGE_S)
                finished |= {flying.pop(one): _take_result(one) for one in done}
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
        """Run a function on each node that takes tasks, beside those that run there.

        A node that leaves the cluster meanwhile is left out, as no task reaches it.

        Raises
        ------
        ConfigError
            If a node cannot run it.

        """
        ray = self._connection.open()
        call, asked = TaskCall(function, (), os.getcwd()).pickle(), dict[str, tuple[str, Any]]()
        for node in self._connection.list_settled_nodes():
            where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(run_call).options(num_cpus=0, scheduling_strategy=where)
            asked[node["NodeID"]] = node["NodeManagerHostname"], task.remote(call, None)
        found: dict[str, ResultT] = {}
        for node_id, (host, one) in asked.items():
            name = f"{host} ({node_id[:8]})"
            try:
                found[name] = _take_result(one, _HOST_TIMEOUT_S)
            except (ray.exceptions.RayError, IntegrityError) as error:
                if node_id not in {node["NodeID"] for node in self._connection.list_nodes()}:
                    continue
                raise ConfigError(
                    f"execution.executor: node {name} cannot run a task ({shorten_error(error)}); every node needs "
                    "this version of rowmill, with its extra `build`; install it there, or remove the node"
                ) from error
        return found

    def close(self) -> None:
        """Leave the cluster, if this executor has joined it."""
        self._connection.close()

    def _require_large_enough_node(self) -> None:
        """Check that some node takes a task; a cluster that has none yet may start one that does."""
        wanted = {"CPU": self._options.cpus_per_task, "memory": self._options.memory_per_task or 0}
        found = [node["Resources"] for node in self._connection.list_nodes()]
        if found and not any(all(one.get(name, 0) >= value for name, value in wanted.items()) for one in found):
            best = max(found, key=lambda one: (one.get("memory", 0), one["CPU"]))
            raise ConfigError(
                f"execution.executor: a task reserves {wanted['CPU']:g} cores and {wanted['memory']:,} bytes; the "
                f"largest of {len(found)} nodes has {best['CPU']:g} cores and {int(best.get('memory', 0)):,} bytes; "
                "lower cpus_per_task or memory_per_task, or add a larger node"
            )


def _take_result(reference: Any, timeout_s: float | None = None) -> Any:
    ray = import_ray()
    try:
        result = ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayTaskError as failed:
        if isinstance(failed.cause, TransientTaskError):
            raise failed.cause.error from None
        raise
    except ray.exceptions.GetTimeoutError:
        raise
    except ray.exceptions.RayError as error:
        raise IntegrityError(
            f"a task was lost {RETRIES + 1} times ({shorten_error(error)}); a node must stay up and have the memory "
            "that its tasks need; finished parts are kept; check the nodes, set execution.executor.memory_per_task if "
            "memory was short, and build again"
        ) from error
    if isinstance(result, FailedTask):
        raise result.error
    return result
