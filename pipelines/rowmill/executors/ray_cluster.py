"""Tasks on the nodes of a Ray cluster that the user runs: one task, and the executor, which joins the cluster.

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
import pickle
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from rowmill.core import remote_index
from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, IntegrityError, MissingPackageError, UnreachableError, is_transient
from rowmill.core.installation import format_install_command
from rowmill.core.remote import call_with_time_limit
from rowmill.executors import base
from rowmill.executors.base import describe_difference, describe_versions

_CONNECT_TIMEOUT_S, _ANSWER_TIMEOUT_S = 5.0, 40.0
_LOOKS, _LOOK_PAUSE_S = 10, 1.0

_HEADS: dict[str, str] = {}
"""The head's own address of each cluster that this process has joined, by the address that a recipe gave."""


def shorten_error(error: Exception) -> str:
    """Return the last line of an error, which names the cause in errors of Ray."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]


def _require_same_cluster(address: str, head: str) -> None:
    """Refuse an address of another cluster than the one whose head is at `head`; `auto` takes the one that is there."""
    if address == "auto" or _HEADS.get(address) == head or _locate_head(address) == _locate_head(head):
        return
    raise ConfigError(
        f"execution.executor.address: {address!r}, but this process is connected to the Ray cluster at {head} already; "
        "a process uses one cluster at a time; set the address to auto to use that one, or build in another process, "
        "or after ray.shutdown()"
    )


def _locate_head(address: str) -> tuple[str, str]:
    """Return host and port, the host as a number, and as nothing for each address of this machine."""
    host, _, port = address.rpartition(":")
    try:
        number = socket.gethostbyname(host.strip("[]"))
    except OSError:
        return host, port
    try:
        with socket.socket() as local:
            local.bind((number, 0))
    except OSError:
        # Only addresses of this machine can be bound.
        return number, port
    return "", port


def import_ray() -> Any:
    """Return Ray with what of it is used here; raise MissingPackageError if it is not installed."""
    try:
        ray: Any = import_module("ray")
        import_module("ray.util.scheduling_strategies")
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "execution.executor: the package ray is not installed; kind: ray needs it on this machine and on all "
            f"nodes; run {format_install_command('ray')}"
        ) from error
    return ray


# ── One task: what runs on its node ──


class TransientTaskError(Exception):
    """An error of the outside world that may pass; `error` is the original."""

    def __init__(self, error: Exception) -> None:
        """Keep the original as the only argument, so that pickling keeps it."""
        super().__init__(error)
        self.error = error


@dataclass(frozen=True, slots=True)
class FailedTask:
    """An error that another attempt would meet again, as a result, so that the caller gets the original."""

    error: Exception


def pickle_call(
    function: Callable[..., object], *arguments: object, versions: Mapping[str, str] | None = None
) -> bytes:
    """Return a call for `run_call`; `versions`, where given, are those that its host must have."""
    return pickle.dumps((function, arguments, os.getcwd(), versions))


def run_call(content: bytes, shared: object) -> object:
    """Return the result of a pickled call, with the shared value as its last argument unless that is None.

    Raises TransientTaskError if another attempt may succeed; other errors are returned as `FailedTask`.
    """
    # Threads are limited before the libraries are imported that the function needs, so it comes pickled.
    _limit_threads()
    function, arguments, folder, versions = pickle.loads(content)  # noqa: S301  (from our own calling process)
    if os.path.isdir(folder):
        # Relative paths start where the calling process is.
        os.chdir(folder)
    try:
        _require_versions(versions)
        return function(*arguments) if shared is None else function(*arguments, shared)
    except Exception as error:
        if is_transient(error):
            raise TransientTaskError(error) from error
        return FailedTask(error)


@cache
def _limit_threads() -> None:
    base.limit_to_one_thread()
    base.encode_in_own_thread()


def _require_versions(expected: Mapping[str, str] | None) -> None:
    if expected is not None and (different := describe_difference(expected, describe_versions())):
        raise ConfigError(
            f"execution.executor: the host {os.uname().nodename} has {different}; the same versions give the same "
            "bytes; install those of the calling process there, and build again"
        )


RETRIES = 5
"""How often a task is tried again after its node died, or an error that may pass."""


def take_result(reference: Any, timeout_s: float | None = None) -> Any:
    """Wait for a task, and return its result.

    Raises an error of the task as it was, and IntegrityError if the task was lost too often.
    """
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


# ── The executor ──


ResultT = TypeVar("ResultT")

CAPACITY_AGE_S = 2.0
"""How long a count of the cluster's cores is good for: nodes join and leave."""
_HOST_TIMEOUT_S = 60.0
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
    """Ordered map over the tasks of a cluster, which it joins with its first use."""

    spans_hosts = True

    def __init__(self, options: RayExecutor) -> None:
        self._options = options
        self._has_joined = self._is_lost = False
        self._capacity, self._capacity_at = 1, -CAPACITY_AGE_S

    def connect(self) -> Any:
        """Return Ray, connected; a connection that the process has already is used if it is to the same cluster."""
        ray, address = import_ray(), self._options.address
        if ray.is_initialized():
            _require_same_cluster(address, str(ray.get_runtime_context().gcs_address))
            return ray
        try:
            # Ray itself tries an address at which nothing listens for a minute.
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if host and port.isdigit():
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
            ray.init(address, log_to_driver=False, configure_logging=False)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"execution.executor.address: no Ray cluster answers at {address!r} ({shorten_error(error)}); give the "
                "host:port of a running head node, ray://host:port, or auto on a machine of the cluster; start the "
                "cluster (`ray start --head`), or correct the address"
            ) from error
        self._has_joined = True
        _HEADS[address] = str(ray.get_runtime_context().gcs_address)
        atexit.register(self.close)
        return ray

    def list_nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that are alive and have cores.

        A lost cluster is an UnreachableError before Ray ends the process, a minute after its head has gone.
        """
        ray = self.connect()
        try:
            # A lost cluster is not waited for again.
            limit_s = 0.0 if self._is_lost else _ANSWER_TIMEOUT_S
            nodes: list[dict[str, Any]] = call_with_time_limit(ray.nodes, limit_s)
        except (TimeoutError, ray.exceptions.RayError) as error:
            self._is_lost = True
            raise UnreachableError(
                f"execution.executor.address: the Ray cluster at {self._options.address!r} does not answer any more "
                f"({shorten_error(error)}); its head must run to the end of a build; finished parts are kept; start "
                "the cluster again, or set execution.executor to {kind: local}, and build again"
            ) from error
        return [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]

    def list_settled_nodes(self) -> list[dict[str, Any]]:
        """Return the nodes once two looks show the same ones: some may be joining or leaving."""
        nodes = self.list_nodes()
        for _ in range(_LOOKS):
            time.sleep(_LOOK_PAUSE_S)
            before, nodes = nodes, self.list_nodes()
            if {node["NodeID"] for node in before} == {node["NodeID"] for node in nodes}:
                break
        return nodes

    @property
    def workers(self) -> int:
        """How many tasks the cluster runs at once now, at least 1."""
        if time.monotonic() - self._capacity_at > CAPACITY_AGE_S:
            cores = [node["Resources"]["CPU"] for node in self.list_nodes()]
            self._capacity = max(1, sum(int(core // self._options.cpus_per_task) for core in cores))
            self._capacity_at = time.monotonic()
        return self._capacity

    def _require_large_enough(self) -> None:
        """Check that some node takes a task; a cluster that has none yet may start one that does."""
        reserved = {"CPU": self._options.cpus_per_task, "memory": self._options.memory_per_task or 0}
        resources = [node["Resources"] for node in self.list_nodes()]
        fits = [all(node.get(name, 0) >= value for name, value in reserved.items()) for node in resources]
        if resources and not any(fits):
            best = max(resources, key=lambda node: (node.get("memory", 0), node["CPU"]))
            raise ConfigError(
                f"execution.executor: a task reserves {reserved['CPU']:g} cores and {reserved['memory']:,} bytes; the "
                f"largest of {len(resources)} nodes has {best['CPU']:g} cores and {int(best.get('memory', 0)):,} bytes"
                "; lower cpus_per_task or memory_per_task, or add a larger node"
            )

    def run_on_hosts(self, function: Callable[[], ResultT]) -> dict[str, ResultT]:
        """Run a function on each node that takes tasks, beside those that run there.

        A node that joins the cluster meanwhile is asked too; one that leaves is left out, as no task reaches it.
        """

        def name_node(node: dict[str, Any]) -> str:
            return f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"

        ray = self.connect()
        call, results, failed = pickle_call(function), dict[str, ResultT](), set[str]()
        waiting = self.list_nodes()
        while waiting:
            errors = dict[str, Exception]()
            for node, task in [(node, self._ask(call, node)) for node in waiting]:
                try:
                    results[name_node(node)] = take_result(task, _HOST_TIMEOUT_S)
                except (ray.exceptions.RayError, IntegrityError) as error:
                    errors[node["NodeID"]] = error
            # A node that was joining or leaving may have failed. One that stays is asked again.
            nodes = self.list_settled_nodes() if errors else self.list_nodes()
            for node in nodes:
                if node["NodeID"] in failed & errors.keys():
                    error = errors[node["NodeID"]]
                    raise ConfigError(
                        f"execution.executor: node {name_node(node)} cannot run a task ({shorten_error(error)}); "
                        "every node needs this version of rowmill, with its extra `build`; install it there, or remove "
                        "the node"
                    ) from error
            failed |= errors.keys()
            waiting = [node for node in nodes if name_node(node) not in results]
        return results

    def _ask(self, call: bytes, node: dict[str, Any]) -> Any:
        """Give a node a task beside those that run there."""
        ray = self.connect()
        where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        return ray.remote(run_call).options(num_cpus=0, scheduling_strategy=where).remote(call, None)

    def start(self, size_bytes: int) -> None:
        """Start nothing: the cluster runs already."""
        del size_bytes

    def map(
        self, function: Callable[..., ResultT], tasks: Iterable[object], *, size_bytes: int, shared: object = None
    ) -> Iterator[ResultT]:
        """Yield the results in task order, as `Executor.map` says."""
        del size_bytes
        ray = self.connect()
        remote_index.forget_absences()
        self._require_large_enough()
        # One argument by reference for all tasks: a node fetches it once.
        reference = None if shared is None else ray.put(shared)
        versions = describe_versions()
        calls = (pickle_call(function, task, versions=versions) for task in tasks)
        options = self._options
        run = import_ray().remote(run_call).options(
            num_cpus=options.cpus_per_task,
            memory=options.memory_per_task,
            max_retries=RETRIES,
            retry_exceptions=[TransientTaskError],
            scheduling_strategy="SPREAD",
        )  # fmt: skip
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
                finished |= {flying.pop(task_ref): take_result(task_ref) for task_ref in done}
                while yielded in finished:
                    yield finished.pop(yielded)
                    yielded += 1
        finally:
            remote_index.forget_absences()
            for task_ref in flying:
                ray.cancel(task_ref)

    def close(self) -> None:
        """Leave the cluster, if this executor has joined it."""
        if self._has_joined:
            import_ray().shutdown()
        self._has_joined = self._is_lost = False
