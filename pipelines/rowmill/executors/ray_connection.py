"""The connection to a Ray cluster; the only module that imports Ray."""

import atexit
import socket
import time
from importlib import import_module
from typing import Any

from rowmill.core.errors import ConfigError, MissingPackageError, UnreachableError
from rowmill.core.time_limit import call_with_time_limit

_CONNECT_TIMEOUT_S, _ANSWER_TIMEOUT_S = 5.0, 40.0
_LOOKS, _LOOK_PAUSE_S = 10, 1.0

_HEADS: dict[str, str] = {}
"""The head's own address of each cluster that this process has joined, by the address that a recipe gave."""


class RayConnection:
    """A process's connection to the cluster at an address."""

    def __init__(self, address: str) -> None:
        """Note the address; the first use connects."""
        self._address = address
        self._is_own = False
        self._is_lost = False

    def open(self) -> Any:
        """Return Ray, connected; a connection that the process has already is used if it is to the same cluster.

        Raises
        ------
        ConfigError
            If no cluster answers, or the process is connected to another one: Ray connects a process to one at a time.

        """
        ray = import_ray()
        if ray.is_initialized():
            _require_same_cluster(self._address, str(ray.get_runtime_context().gcs_address))
        else:
            try:
                _require_listener(self._address)
                ray.init(self._address, log_to_driver=False, configure_logging=False)
            except (OSError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"execution.executor.address: no Ray cluster answers at {self._address!r} "
                    f"({shorten_error(error)}); give the host:port of a running head node, ray://host:port, or auto on "
                    "a machine of the cluster; start the cluster (`ray start --head`), or correct the address"
                ) from error
            self._is_own = True
            _HEADS[self._address] = str(ray.get_runtime_context().gcs_address)
            atexit.register(self.close)
        return ray

    def close(self) -> None:
        """Leave the cluster, if this object has joined it."""
        if self._is_own:
            import_ray().shutdown()
        self._is_own = self._is_lost = False

    def list_nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that are alive and have cores.

        Raises
        ------
        UnreachableError
            If the cluster does not answer. It is raised before Ray ends the process, a minute after its head has gone.

        """
        ray = self.open()
        try:
            # A lost cluster is not waited for again.
            limit_s = 0.0 if self._is_lost else _ANSWER_TIMEOUT_S
            nodes: list[dict[str, Any]] = call_with_time_limit(ray.nodes, limit_s)
        except (TimeoutError, ray.exceptions.RayError) as error:
            self._is_lost = True
            raise UnreachableError(
                f"execution.executor.address: the Ray cluster at {self._address!r} does not answer any more "
                f"({shorten_error(error)}); its head must run to the end of a build; finished parts are kept; start "
                "the cluster again, or set execution.executor to {kind: local}, and build again"
            ) from error
        return [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]

    def list_settled_nodes(self) -> list[dict[str, Any]]:
        """Return the nodes once two looks show the same ones: some may be joining or leaving."""
        found = self.list_nodes()
        for _ in range(_LOOKS):
            time.sleep(_LOOK_PAUSE_S)
            before, found = found, self.list_nodes()
            if {node["NodeID"] for node in before} == {node["NodeID"] for node in found}:
                break
        return found


def shorten_error(error: Exception) -> str:
    """Return the last line of an error, which names the cause in errors of Ray."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]


def _require_listener(address: str) -> None:
    """Check that something listens at an address, which Ray itself tries for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()


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
            "nodes; run pip install 'rowmill[ray]'"
        ) from error
    return ray
