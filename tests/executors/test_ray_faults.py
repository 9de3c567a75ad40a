"""Faults of Ray clusters during builds: nodes that die in any stage, a cluster that stops, a driver that is killed.

Skipped where Ray is absent.

All of it belongs to `make campaign`, which prints what it came to; in CI one node dies (`test_ray_cluster.py`).
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from rowmill.build import gc
from rowmill.cli.error_boundary import ExitStatus
from rowmill.executors.ray_cluster import RayTasks
from tests.support.ray_nodes import ROOT, start_node, starting_cluster, stop_cluster, write_two_datasets
from tests.support.recipes import Built, Workspace

pytestmark = [
    pytest.mark.campaign,
    # Ray leaves sockets and processes to the interpreter's end.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KILLS, KILLS_PER_BUILD, STOPS = 20, 5, 5
PATIENCE_S = 300.0
LOCAL = {"kind": "local"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with starting_cluster() as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return write_two_datasets(tmp_path_factory.mktemp("local"), LOCAL).build()


# ── Nodes that die ─────────────────────────────────────────────────────────────────────────────────
@contextmanager
def watching_tasks(act: Callable[[str], None]) -> Generator[None]:
    """Call `act` with a function's module each time that a cluster is given a task, and that a result comes back."""
    map_undisturbed = RayTasks.map

    def map_and_act(self: RayTasks, function: Any, tasks: Iterable[object], **options: Any) -> Iterator[Any]:
        where = str(getattr(getattr(function, "args", (function,))[0], "__module__", ""))

        def give() -> Iterator[object]:
            for task in tasks:
                act(where)
                yield task

        for result in map_undisturbed(self, function, give(), **options):
            yield result
            act(where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayTasks, "map", map_and_act)
        yield


def test_nodes_that_die_in_any_stage_change_no_byte(
    cluster: Any, tmp_path: Path, undisturbed: Built, capsys: pytest.CaptureFixture[str]
) -> None:
    moments = list[str]()
    with watching_tasks(moments.append):
        write_two_datasets(tmp_path / "peace", {"kind": "ray", "address": cluster.address}).build()
    by_function = {name: [i for i, one in enumerate(moments) if one == name] for name in dict.fromkeys(moments)}
    chance, killed = random.Random(20), Counter[str]()

    for first in range(0, KILLS, KILLS_PER_BUILD):
        # The stages' functions in turn, each at a random moment of its own.
        functions = [list(by_function)[i % len(by_function)] for i in range(first, first + KILLS_PER_BUILD)]
        chosen = {chance.choice(by_function[name]) for name in functions}
        seen = 0

        def kill(where: str, chosen: set[int] = chosen) -> None:
            nonlocal seen
            seen += 1
            if seen - 1 in chosen:
                killed[where.removeprefix("rowmill.stages.")] += 1
                victim = chance.choice(sorted(cluster.worker_nodes, key=lambda node: node.node_id))
                cluster.remove_node(victim, allow_graceful=False)
                start_node(cluster)

        workspace = write_two_datasets(tmp_path / str(first), {"kind": "ray", "address": cluster.address})
        with watching_tasks(kill):
            built = workspace.build()

        assert built.digests() == undisturbed.digests(), chosen
        require_nothing_left(workspace)
    with capsys.disabled():
        print(f"\n{KILLS} nodes killed at {len(moments)} moments of builds, none wrong: {dict(killed)}")

    assert killed.total() == KILLS


def require_nothing_left(workspace: Workspace) -> None:
    """Hold a store to be without scratch folders, and without files of killed tasks after garbage collection."""
    assert not list(workspace.store.rglob("scratch-*"))
    gc.collect_garbage(workspace.project, keep=1, dry_run=False)
    assert not [path for path in workspace.store.rglob("*") if ".tmp" in path.name]


# ── Drivers and clusters that end ──────────────────────────────────────────────────────────────────
def start_driver(workspace: Workspace, parts: int) -> "subprocess.Popen[str]":
    """Start `rowmill build` in a process of its own, and wait until some parts are finished."""
    path = os.pathsep.join(str(ROOT / name) for name in (".", "assets", "pipelines"))
    command = [sys.executable, "-m", "rowmill.cli.main", "build", str(workspace.config)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    driver = subprocess.Popen(command, **pipes, text=True, env=os.environ | {"PYTHONPATH": path})
    deadline = time.monotonic() + PATIENCE_S
    while len(list(workspace.store.rglob("part.json"))) < parts:
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return driver


def test_build_on_a_cluster_goes_on_after_its_driver_was_killed(
    cluster: Any, tmp_path: Path, undisturbed: Built
) -> None:
    workspace = write_two_datasets(tmp_path, {"kind": "ray", "address": cluster.address})
    driver = start_driver(workspace, parts=20)

    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=PATIENCE_S)
    built = workspace.build()

    assert built.report("chats", "canonical_rows").reused
    assert built.digests() == undisturbed.digests()


def test_build_whose_cluster_stopped_is_finished_on_this_machine(
    cluster: Any, tmp_path: Path, undisturbed: Built, trials: Callable[[int], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The last test of this module: the first cluster to be stopped is that of the others."""
    # 32 parts of rows and examples, then shards.
    parts = random.Random(5).sample(range(2, 32), trials(STOPS))
    for number in parts:
        with nullcontext(cluster) if number == parts[0] else starting_cluster() as stopped:
            workspace = write_two_datasets(tmp_path / str(number), {"kind": "ray", "address": stopped.address})
            driver = start_driver(workspace, parts=number)
            stop_cluster(stopped)
        _, printed = driver.communicate(timeout=PATIENCE_S)

        assert driver.returncode == ExitStatus.OUTSIDE_FAILURE, printed
        assert "; finished parts are kept; " in printed
        built = write_two_datasets(tmp_path / str(number), LOCAL).build()
        assert built.digests() == undisturbed.digests(), number
    with capsys.disabled():
        print(f"\n{len(parts)} clusters stopped after {parts} parts, each build finished without one")
