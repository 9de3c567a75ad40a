"""Hosts that share nothing but the store: processes in mount namespaces of their own, with a temporary folder each.

Skipped where the kernel refuses such namespaces.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from rowmill.build import runner
from rowmill.cli.error_boundary import ExitStatus
from rowmill.executors import RayExecutor
from tests.support.object_server import ObjectServer, serving_s3fs
from tests.support.ray_nodes import ROOT, SMALL_STORE, write_two_datasets
from tests.support.recipes import Workspace

pytestmark = pytest.mark.slow

STORE = "s3://bucket/store"
PATIENCE_S = 300.0
SEPARATE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
MOUNT = 'mount -t tmpfs none "$TMPDIR" && exec "$@"'


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with serving_s3fs(monkeypatch) as made:
        yield made


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Return the temporary folder that each host has for itself; skip the test if the kernel refuses that."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [*SEPARATE, "sh", "-c", MOUNT, "sh", "true"]
    if shutil.which("unshare") is None or subprocess.run(command, env=make_environment(folder), check=False).returncode:
        pytest.skip("no hosts apart: this kernel refuses `unshare --mount` with a tmpfs")
    return folder


def make_environment(temporary: Path) -> dict[str, str]:
    path = os.pathsep.join(str(ROOT / name) for name in (".", "assets", "pipelines"))
    return os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": path}


def start(temporary: Path, *command: str, **variables: str) -> "subprocess.Popen[str]":
    """Start a command on a host of its own."""
    return subprocess.Popen(
        [*SEPARATE, "sh", "-c", MOUNT, "sh", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=make_environment(temporary) | variables,
    )


def start_build(temporary: Path, workspace: Workspace) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "rowmill.cli.main", "build", str(workspace.config), "--root", STORE]
    return start(temporary, *command)


def require_same_versions(workspace: Workspace) -> None:
    """Hold the store to what a build on this machine comes to, and to have nothing left to make."""
    expected = workspace.build().versions()
    found = runner.build(Workspace(workspace.folder, STORE).project)
    assert {"/".join(step.key[1:]): report.version for step, report, _ in found} == expected
    assert all(report.reused for _, report, _ in found)


@pytest.mark.campaign
def test_two_builders_on_separate_hosts_end_with_the_same_versions(
    server: ObjectServer, temporary: Path, tmp_path: Path
) -> None:
    workspace = write_two_datasets(tmp_path, {"kind": "local"})
    builders = [start_build(temporary, workspace) for _ in range(2)]
    ended = [(*one.communicate(timeout=PATIENCE_S), one.returncode) for one in builders]
    for _, printed, status in ended:
        assert status == ExitStatus.SUCCESS, printed
    assert not list(temporary.iterdir())
    require_same_versions(workspace)


def wait_for_nodes(address: str, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    executor = RayExecutor(kind="ray", address=address).open(workers=1)
    try:
        while len(executor.run_on_hosts(os.getpid)) < count:
            assert time.monotonic() < deadline, "the nodes did not join"
    finally:
        executor.close()


@contextmanager
def cluster_of_separate_hosts(temporary: Path) -> Generator[str]:
    """Start a head without cores and two nodes with one, each on a host of its own; yield the address."""
    pytest.importorskip("ray", reason="ray is absent: pip install 'rowmill[ray]' in an environment of its own")
    start_cluster = import_module("ray.cluster_utils").Cluster

    ray = str(Path(sys.executable).with_name("ray"))
    # Ray's own folder is that of the head, whose name is short enough for sockets.
    variables = {"RAY_health_check_timeout_ms": "60000", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        head = start_cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **SMALL_STORE}
        )
    size = ["--object-store-memory", str(SMALL_STORE["object_store_memory"])]
    command = [ray, "start", "--address", head.address, "--num-cpus", "1", *size, "--block"]
    joined: list[subprocess.Popen[str]] = []
    try:
        # One after another: nodes that start at once choose the same name for their sockets, and one dies of it.
        for _ in range(2):
            joined.append(start(temporary, *command, **variables))
            wait_for_nodes(head.address, len(joined))
        yield head.address
    finally:
        for one in joined:
            one.terminate()
        for one in joined:
            one.communicate(timeout=PATIENCE_S)
        head.shutdown()


@pytest.mark.campaign
def test_a_cluster_of_separate_hosts_makes_the_same_versions(
    server: ObjectServer, temporary: Path, tmp_path: Path
) -> None:
    local = write_two_datasets(tmp_path, {"kind": "local"})
    with cluster_of_separate_hosts(temporary) as address:
        workspace = write_two_datasets(tmp_path, {"kind": "ray", "address": address})
        driver = start_build(temporary, workspace)
        _, printed = driver.communicate(timeout=PATIENCE_S)

    assert driver.returncode == ExitStatus.SUCCESS, printed
    require_same_versions(write_two_datasets(local.folder, {"kind": "local"}))
