"""Ray clusters on this machine, and a project to build on them."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rowmill.build import prepare
from rowmill.executors import RayExecutor
from rowmill.executors.ray_cluster import import_ray
from tests.support.recipes import CHAT, PAIR, Workspace, chat, pair

ROOT = Path(__file__).resolve().parents[2]
STARTS = 3
SMALL_STORE = {"object_store_memory": 80 << 20}


def start_node(cluster: Any, **options: Any) -> Any:
    """Add a node that takes one task at a time, and wait until it has run one.

    Another is started where Ray gives the node up meanwhile, as it does on a machine that is too busy to answer it.
    """
    for _ in range(STARTS):
        node = cluster.add_node(num_cpus=1, **SMALL_STORE, **options)
        executor = RayExecutor(kind="ray", address=cluster.address).open(workers=1)
        ready = any(f"({node.node_id[:8]})" in name for name in executor.run_on_hosts(os.getpid))
        executor.close()
        if ready:
            return node
        cluster.remove_node(node, allow_graceful=False)
    raise RuntimeError(f"no node of {STARTS} stayed")


@contextmanager
def starting_cluster() -> Generator[Any]:
    """Start a head that takes no tasks, and two nodes that take one at a time; skip the test where Ray is absent."""
    pytest.importorskip("ray", reason="ray is absent: pip install 'rowmill[ray]' in an environment of its own")
    start_cluster = import_module("ray.cluster_utils").Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / name) for name in (".", "assets", "pipelines")))
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        # A node of a busy machine answers late; Ray would take it for dead, and a killed one is noticed at once anyway.
        patch.setenv("RAY_health_check_timeout_ms", "60000")
        patch.setenv("RAY_agent_register_timeout_ms", "300000")
        head = {"num_cpus": 0, "include_dashboard": False, **SMALL_STORE}
        found = start_cluster(initialize_head=True, head_node_args=head)
        # Connected until the cluster is stopped: a connection is a job, and each job starts workers of its own.
        RayExecutor(kind="ray", address=found.address).open(workers=1).connect()
        for _ in range(2):
            start_node(found)
        yield found
        stop_cluster(found)


def stop_cluster(cluster: Any) -> None:
    """Leave a cluster and stop it."""
    prepare.close_workers()
    import_ray().shutdown()
    cluster.shutdown()


def write_two_datasets(folder: Path, executor: dict[str, Any]) -> Workspace:
    workspace = Workspace(folder)
    # Each file is large enough to be a part.
    for number in range(15):
        workspace.write(f"chats-{number:02}.jsonl", [chat(180 * number + i, words=40) for i in range(180)])
    tasks = workspace.write("tasks.jsonl", [pair(i) for i in range(50)])
    datasets = {
        "chats": {"source": {"train_urls": ["data/chats-*.jsonl"]}, "format": CHAT},
        "tasks": {"source": {"train_urls": [tasks]}, "format": PAIR},
    }
    execution = {"workers": 1, "executor": executor}
    return workspace.recipe(datasets, execution=execution, exports=[{"kind": "axolotl", "name": "ax"}])
