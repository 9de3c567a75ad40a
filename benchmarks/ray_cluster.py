"""A Ray cluster of two nodes with a core each, against two workers of the local pool on the same machine.

    python -m benchmarks.ray_cluster [megabytes] [runs]

Both build real chats to packed shards, in turn, with the tokenizer kept in the store. Each has built once before, so
that workers exist and have opened the tokenizer. The second figure is how many empty tasks a second the cluster is
given, runs and hands back in order. Needs the extra `ray`.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import corpus, measure
from rowmill.build.prepare import close_workers
from rowmill.build.steps import Project
from rowmill.executors import RayExecutor

TASKS = 5000
STORE_BYTES = 200 << 20


@contextmanager
def start_cluster() -> Generator[str]:
    """Start a head without cores and two nodes with one; yield the address."""
    cluster_utils: Any = import_module("ray.cluster_utils")
    os.environ["PYTHONPATH"] = os.pathsep.join(str(measure.ROOT / name) for name in (".", "assets", "pipelines"))
    # Machines that are busy answer late.
    os.environ.update({"RAY_health_check_timeout_ms": "60000"})
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    try:
        yield cluster.address
    finally:
        close_workers()
        cluster.shutdown()


def use_cluster(one: Project, address: str) -> Project:
    """Return a project that builds on a cluster."""
    execution = one.recipe.execution.model_copy(update={"executor": RayExecutor(kind="ray", address=address)})
    return replace(one, recipe=one.recipe.model_copy(update={"execution": execution}))


def time_build(one: Project) -> float:
    """Build in an empty store; return the seconds."""
    measure.fresh(Path(one.store.root))
    begin = time.perf_counter()
    measure.build_shards(one)
    return time.perf_counter() - begin


def compare_builds(folder: Path, address: str, megabytes: float, runs: int) -> None:
    """Build in turn on the cluster and in local workers; emit both, and the ratio."""
    rows = folder / "rows.jsonl"
    count = corpus.write(rows, size_bytes=int(megabytes * 1e6))
    local = measure.project(rows, folder / "local", workers=2)
    remote = use_cluster(measure.project(rows, folder / "ray", workers=2), address)
    for one in (local, remote):
        time_build(one)
    seconds = [(time_build(local), time_build(remote)) for _ in range(runs)]
    medians = [statistics.median(one) for one in zip(*seconds, strict=True)]
    measure.emit(
        "ray_cluster_build",
        megabytes=megabytes,
        rows=count,
        local_s=[round(one, 2) for one, _ in seconds],
        ray_s=[round(one, 2) for _, one in seconds],
        ratio=round(medians[1] / medians[0], 3),
        load=round(os.getloadavg()[0], 1),
    )


def measure_scheduling(address: str) -> None:
    """Map a function that does nothing; emit tasks a second."""
    executor = RayExecutor(kind="ray", address=address).open(workers=1)
    rates: list[float] = []
    for _ in range(4):
        begin = time.perf_counter()
        done: list[Any] = list(executor.map(abs, range(TASKS), size_bytes=1))
        assert done == list(range(TASKS))
        rates.append(TASKS / (time.perf_counter() - begin))
    executor.close()
    # Workers start in the first map.
    rounded = [round(one) for one in rates[1:]]
    measure.emit("ray_scheduling", tasks=TASKS, tasks_per_s=rounded, load=round(os.getloadavg()[0], 1))


def main(megabytes: float, runs: int) -> None:
    """Run both."""
    with tempfile.TemporaryDirectory() as name, start_cluster() as address:
        measure_scheduling(address)
        compare_builds(Path(name), address, megabytes, runs)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 200.0, int(sys.argv[2]) if len(sys.argv) > 2 else 3)
