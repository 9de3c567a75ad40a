"""Tasks on the nodes of a Ray cluster that the user runs; the only module that imports Ray.

What belongs here: connecting, submitting, retrying, results in task order. What does not: starting clusters, running a
task (`ray_worker.py`), comparing nodes (`build/hosts.py`).

    calling process ── task, shared value by reference ──► node A   task 1
         ▲                                                 node B   task 2 …
         └───────────────── small results ─────────────────┘
                     files: only through the store

Ray only places tasks. There are no actors, no named state, and nothing in its object store but the value that a map
shares, so any node may die: Ray runs its tasks again elsewhere, and a task that runs twice writes the same files. If
the calling process dies, the next build continues from finished parts.
"""

import atexit
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from rowmill.core import remote_index
from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, IntegrityError, MissingPackageError
from rowmill.executors.ray_worker import FailedTask, TaskCall, TransientTaskError, run_call
from rowmill.executors.versions import describe_versions

ResultT = TypeVar("ResultT")

RETRIES = 5
_CONNECT_TIMEOUT_S, _HOST_TIMEOUT_S = 5.0, 60.0
_LEAST_WINDOW = 16
"""Tasks in flight at least, so that a cluster without nodes has a reason to start some."""
_BUFFERED_WINDOWS = 8
"""Finished results that may wait for an earlier one, in windows: a task that is retried does not stop the others."""
_CAPACITY_AGE_S = 2.0
_LOOKS, _LOOK_PAUSE_S = 10, 1.0


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
        self._is_own_connection = False
        self._capacity, self._capacity_at = 1, -_CAPACITY_AGE_S

    @property
    def workers(self) -> int:
        """How many tasks the cluster runs at once now."""
        if time.monotonic() - self._capacity_at > _CAPACITY_AGE_S:
            cores = [node["Resources"]["CPU"] for node in self._list_nodes()]
            self._capacity = max(1, sum(int(one // self._options.cpus_per_task) for one in cores))
            self._capacity_at = time.monotonic()
        return self._capacity

    @property
    def spans_hosts(self) -> bool:
        """Yes."""
        return True

    def map(
        self, function: Callable[..., ResultT], tasks: Iterable[object], *, size_bytes: int, shared: object = None
    ) -> Iterator[ResultT]:
        """Yield the results in task order, as `Executor.map` says."""
        del size_bytes
        ray = self._connect()
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
        return _import_ray().remote(run_call).options(
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
        ray = self._connect()
        call, asked = TaskCall(function, (), os.getcwd()).pickle(), dict[str, tuple[str, Any]]()
        for node in self._list_settled_nodes():
            where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(run_call).options(num_cpus=0, scheduling_strategy=where)
            asked[node["NodeID"]] = node["NodeManagerHostname"], task.remote(call, None)
        found: dict[str, ResultT] = {}
        for node_id, (host, one) in asked.items():
            name = f"{host} ({node_id[:8]})"
            try:
                found[name] = _take_result(one, _HOST_TIMEOUT_S)
            except (ray.exceptions.RayError, IntegrityError) as error:
                if node_id not in {node["NodeID"] for node in self._list_nodes()}:
                    continue
                raise ConfigError(
                    f"execution.executor: node {name} cannot run a task ({_shorten(error)}); every node needs this "
                    "version of rowmill, with its extra `build`; install it there, or remove the node"
                ) from error
        return found

    def close(self) -> None:
        """Leave the cluster, if this executor has joined it."""
        if self._is_own_connection:
            _import_ray().shutdown()
        self._is_own_connection = False

    def _connect(self) -> Any:
        """Return Ray, connected; a connection that the process has already is used as it is."""
        ray = _import_ray()
        if not ray.is_initialized():
            address = self._options.address
            try:
                _require_listener(address)
                ray.init(address, log_to_driver=False, configure_logging=False)
            except (OSError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"execution.executor.address: no Ray cluster answers at {address!r} ({_shorten(error)}); give the "
                    "host:port of a running head node, ray://host:port, or auto on a machine of the cluster; start "
                    "the cluster (`ray start --head`), or correct the address"
                ) from error
            self._is_own_connection = True
            atexit.register(self.close)
        return ray

    def _list_nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that are alive and have cores."""
        return [node for node in self._connect().nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]

    def _list_settled_nodes(self) -> list[dict[str, Any]]:
        """Return the nodes once two looks show the same ones: some may be joining or leaving."""
        found = self._list_nodes()
        for _ in range(_LOOKS):
            time.sleep(_LOOK_PAUSE_S)
            before, found = found, self._list_nodes()
            if {node["NodeID"] for node in before} == {node["NodeID"] for node in found}:
                break
        return found

    def _require_large_enough_node(self) -> None:
        """Check that some node takes a task; a cluster that has none yet may start one that does."""
        wanted = {"CPU": self._options.cpus_per_task, "memory": self._options.memory_per_task or 0}
        found = [node["Resources"] for node in self._list_nodes()]
        if found and not any(all(one.get(name, 0) >= value for name, value in wanted.items()) for one in found):
            best = max(found, key=lambda one: (one.get("memory", 0), one["CPU"]))
            raise ConfigError(
                f"execution.executor: a task reserves {wanted['CPU']:g} cores and {wanted['memory']:,} bytes; the "
                f"largest of {len(found)} nodes has {best['CPU']:g} cores and {int(best.get('memory', 0)):,} bytes; "
                "lower cpus_per_task or memory_per_task, or add a larger node"
            )


def _take_result(reference: Any, timeout_s: float | None = None) -> Any:
    ray = _import_ray()
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
            f"a task was lost {RETRIES + 1} times ({_shorten(error)}); a node must stay up and have the memory that "
            "its tasks need; finished parts are kept; check the nodes, set execution.executor.memory_per_task if "
            "memory was short, and build again"
        ) from error
    if isinstance(result, FailedTask):
        raise result.error
    return result


def _shorten(error: Exception) -> str:
    """Return the last line of an error, which names the cause in errors of Ray."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]


def _require_listener(address: str) -> None:
    """Check that something listens at an address, which Ray itself tries for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()


def _import_ray() -> Any:
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.util.scheduling_strategies  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "execution.executor: the package ray is not installed; kind: ray needs it on this machine and on all "
            "nodes; run pip install 'rowmill[ray]'"
        ) from error
    return ray
