"""The nodes of a Ray cluster: how many tasks they run, whether one is large enough, and a call on each of them."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rowmill.core.errors import ConfigError, IntegrityError
from rowmill.executors.ray_connection import RayConnection, shorten_error
from rowmill.executors.ray_results import take_result
from rowmill.executors.ray_worker import TaskCall, run_call

ResultT = TypeVar("ResultT")

CAPACITY_AGE_S = 2.0
"""How long a count of the cluster's cores is good for: nodes join and leave."""
_HOST_TIMEOUT_S = 60.0


@dataclass(slots=True)
class RayNodes:
    """The nodes of a cluster, for tasks that reserve so many cores and, unless None, bytes of memory."""

    connection: RayConnection
    cpus_per_task: float
    memory_per_task: int | None
    _capacity: int = field(default=1, init=False)
    _capacity_at: float = field(default=-CAPACITY_AGE_S, init=False)

    def count_tasks(self) -> int:
        """Return how many tasks the cluster runs at once now, at least 1."""
        if time.monotonic() - self._capacity_at > CAPACITY_AGE_S:
            cores = [node["Resources"]["CPU"] for node in self.connection.list_nodes()]
            self._capacity = max(1, sum(int(core // self.cpus_per_task) for core in cores))
            self._capacity_at = time.monotonic()
        return self._capacity

    def require_large_enough(self) -> None:
        """Check that some node takes a task; a cluster that has none yet may start one that does.

        Raises
        ------
        ConfigError
            With the largest node.

        """
        wanted = {"CPU": self.cpus_per_task, "memory": self.memory_per_task or 0}
        found = [node["Resources"] for node in self.connection.list_nodes()]
        if found and not any(all(one.get(name, 0) >= value for name, value in wanted.items()) for one in found):
            best = max(found, key=lambda one: (one.get("memory", 0), one["CPU"]))
            raise ConfigError(
                f"execution.executor: a task reserves {wanted['CPU']:g} cores and {wanted['memory']:,} bytes; the "
                f"largest of {len(found)} nodes has {best['CPU']:g} cores and {int(best.get('memory', 0)):,} bytes; "
                "lower cpus_per_task or memory_per_task, or add a larger node"
            )

    def run_on_each(self, function: Callable[[], ResultT]) -> dict[str, ResultT]:
        """Run a function on each node that takes tasks, beside those that run there.

        A node that joins the cluster meanwhile is asked too; one that leaves is left out, as no task reaches it.

        Raises
        ------
        ConfigError
            If a node cannot run it twice.

        """
        ray = self.connection.open()
        call, found, failed = TaskCall(function, (), os.getcwd()).pickle(), dict[str, ResultT](), set[str]()
        waiting = self.connection.list_nodes()
        while waiting:
            errors = dict[str, Exception]()
            for node, task in [(node, self._ask(call, node)) for node in waiting]:
                try:
                    found[_name_node(node)] = take_result(task, _HOST_TIMEOUT_S)
                except (ray.exceptions.RayError, IntegrityError) as error:
                    errors[node["NodeID"]] = error
            # A node that was joining or leaving may have failed. One that stays is asked again.
            nodes = self.connection.list_settled_nodes() if errors else self.connection.list_nodes()
            for node in nodes:
                if node["NodeID"] in failed & errors.keys():
                    raise _refuse_node(node, errors[node["NodeID"]])
            failed |= errors.keys()
            waiting = [node for node in nodes if _name_node(node) not in found]
        return found

    def _ask(self, call: bytes, node: dict[str, Any]) -> Any:
        """Give a node a task beside those that run there."""
        ray = self.connection.open()
        where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        return ray.remote(run_call).options(num_cpus=0, scheduling_strategy=where).remote(call, None)


def _name_node(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"


def _refuse_node(node: dict[str, Any], error: Exception) -> ConfigError:
    refusal = ConfigError(
        f"execution.executor: node {_name_node(node)} cannot run a task ({shorten_error(error)}); every node needs "
        "this version of rowmill, with its extra `build`; install it there, or remove the node"
    )
    refusal.__cause__ = error
    return refusal
