"""Tasks on a Ray cluster of two nodes on this machine: order, shared values, retries, dead nodes, and refusals.

Skipped where Ray is absent.
"""

import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rowmill.cli.main import main
from rowmill.core.errors import ConfigError, DamagedFileError, IntegrityError
from rowmill.executors import RayExecutor
from rowmill.executors.ray_cluster import RayTasks
from tests.executors import test_ray_cluster
from tests.support import teacher
from tests.support.cli_project import list_files
from tests.support.completions_server import Reply, serving
from tests.support.ray_nodes import start_node, starting_cluster, write_two_datasets
from tests.support.recipes import TO_EXAMPLES, Built, Workspace, chat
from tests.support.shard_layouts import SHARD_LAYOUTS, write_layout
from tests.support.tiers import mark_all_but

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    # Ray leaves sockets and processes to the interpreter's end.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with starting_cluster() as found:
        yield found


@pytest.fixture
def tasks(cluster: Any) -> Iterator[RayTasks]:
    executor = RayExecutor(kind="ray", address=cluster.address).open(workers=1)
    yield executor
    executor.close()


# ── Functions that tasks run ───────────────────────────────────────────────────────────────────────
def take_time(number: int) -> tuple[int, str]:
    ray: Any = import_module("ray")
    time.sleep(0.3 if number == 0 else 0.02)
    return number, str(ray.get_runtime_context().get_node_id())


def wait_for_others(task: tuple[str, int]) -> bool:
    folder, number = task
    deadline = time.monotonic() + 60
    while number == 0 and len(os.listdir(folder)) < 10:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    Path(folder, str(number)).touch()
    return True


def stay_on(node_id: str, path: str) -> int:
    """Wait on one node until it is killed."""
    ray: Any = import_module("ray")
    if ray.get_runtime_context().get_node_id() == node_id:
        Path(path).touch()
        time.sleep(60)
    return 1


def fail_first_calls(folder: str, times: int) -> int:
    """Fail as a node does that was joining: for the first calls."""
    number = len(os.listdir(folder))
    Path(folder, f"{number}-{os.getpid()}-{time.monotonic_ns()}").touch()
    if number < times:
        raise IntegrityError("this node is not ready")
    return 1


def take_place(number: int, shared: "NDArray[np.int64]") -> tuple[int, bool]:
    return int(shared[number]), bool(shared.flags.writeable)


def fail_first_time(path: str) -> int:
    """Fail as a network does, but not when called again."""
    at = Path(path)
    attempts = int(at.read_text()) if at.exists() else 0
    at.write_text(str(attempts + 1))
    if attempts < 2:
        raise ConnectionResetError(errno.ECONNRESET, "reset")
    return attempts


def fail_for_good(path: str) -> None:
    with Path(path).open("a") as log:
        log.write("tried\n")
    raise DamagedFileError("it is damaged", "a/b")


def fill_disk(path: str) -> None:
    with Path(path).open("a") as log:
        log.write("tried\n")
    raise OSError(errno.ENOSPC, "No space left on device")


def read_thread_limit(_: int) -> str:
    return os.environ["POLARS_MAX_THREADS"]


# ── The executor ───────────────────────────────────────────────────────────────────────────────────
def test_results_come_in_task_order_from_all_nodes(tasks: RayTasks) -> None:
    made = list(tasks.map(test_ray_cluster.take_time, range(60), size_bytes=1))
    assert [number for number, _ in made] == list(range(60))
    assert len({node for _, node in made}) == tasks.workers == 2


def test_a_slow_task_holds_no_other_up(cluster: Any, tmp_path: Path) -> None:
    """The first task ends when ten later ones have, though only two are in flight."""
    executor = RayExecutor(kind="ray", address=cluster.address, max_in_flight=2).open(workers=1)
    made = list(executor.map(test_ray_cluster.wait_for_others, [(str(tmp_path), i) for i in range(14)], size_bytes=1))
    assert made == [True] * 14
    executor.close()


def test_tasks_read_one_shared_value(tasks: RayTasks) -> None:
    shared = np.arange(0, 200_000, 10)
    made = list(tasks.map(test_ray_cluster.take_place, range(20), size_bytes=1, shared=shared))
    assert made == [(10 * number, False) for number in range(20)]


def test_an_error_that_passes_is_tried_again(tasks: RayTasks, tmp_path: Path) -> None:
    assert list(tasks.map(test_ray_cluster.fail_first_time, [str(tmp_path / "n")], size_bytes=1)) == [2]


def test_an_error_that_stays_comes_back_as_it_was_after_one_attempt(tasks: RayTasks, tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match="it is damaged") as damaged:
        list(tasks.map(test_ray_cluster.fail_for_good, [str(tmp_path / "n")], size_bytes=1))
    with pytest.raises(OSError, match="No space left") as full:
        list(tasks.map(test_ray_cluster.fill_disk, [str(tmp_path / "full")], size_bytes=1))

    assert damaged.value.path == "a/b"
    assert full.value.errno == errno.ENOSPC
    assert (tmp_path / "n").read_text() == (tmp_path / "full").read_text() == "tried\n"


def test_workers_have_one_thread_per_library(tasks: RayTasks) -> None:
    assert set(tasks.map(test_ray_cluster.read_thread_limit, range(4), size_bytes=1)) == {"1"}


@pytest.mark.campaign
def test_a_node_that_leaves_while_it_is_asked_is_left_out(cluster: Any, tasks: RayTasks, tmp_path: Path) -> None:
    victim, asked = start_node(cluster), tmp_path / "asked"

    def kill() -> None:
        while not asked.exists():
            time.sleep(0.05)
        cluster.remove_node(victim, allow_graceful=False)

    killing = threading.Thread(target=kill, daemon=True)
    killing.start()
    made = tasks.run_on_hosts(partial(test_ray_cluster.stay_on, victim.node_id, str(asked)))
    killing.join(timeout=60)

    assert list(made.values()) == [1, 1]


def test_nodes_that_answer_are_not_waited_for(tasks: RayTasks, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(self: RayTasks) -> None:
        raise AssertionError(self)

    monkeypatch.setattr(RayTasks, "list_settled_nodes", wait)
    assert len(tasks.run_on_hosts(os.getpid)) == 2


def test_a_node_that_fails_once_is_asked_again(tasks: RayTasks, tmp_path: Path) -> None:
    made = tasks.run_on_hosts(partial(test_ray_cluster.fail_first_calls, str(tmp_path), 1))
    assert list(made.values()) == [1, 1]


@pytest.mark.campaign
def test_a_node_that_fails_twice_is_refused(tasks: RayTasks, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node .* cannot run a task \(.*not ready\); every node needs this version"):
        tasks.run_on_hosts(partial(test_ray_cluster.fail_first_calls, str(tmp_path), 9))


def test_a_task_that_no_node_can_take_is_refused(cluster: Any) -> None:
    executor = RayExecutor(kind="ray", address=cluster.address, cpus_per_task=3).open(workers=1)
    with pytest.raises(ConfigError, match=r"reserves 3 cores .* largest of 2 nodes has 1 cores .* lower cpus_per_task"):
        list(executor.map(test_ray_cluster.take_time, range(2), size_bytes=1))
    executor.close()


def test_a_second_address_is_refused_while_the_process_is_connected(cluster: Any, tasks: RayTasks) -> None:
    assert tasks.workers == 2
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{other.getsockname()[1]}"
        executor = RayExecutor(kind="ray", address=address).open(workers=1)
        said = rf"{address}.*connected to the Ray cluster at .* set the address to auto"
        with pytest.raises(ConfigError, match=said):
            list(executor.map(test_ray_cluster.take_time, range(2), size_bytes=1))
    assert tasks.workers == 2


@pytest.mark.parametrize("spelled", ["auto", "127.0.0.1:{port}", "localhost:{port}"])
def test_other_spellings_of_the_same_cluster_share_the_connection(cluster: Any, tasks: RayTasks, spelled: str) -> None:
    port = cluster.address.rpartition(":")[2]
    assert tasks.workers == 2
    executor = RayExecutor(kind="ray", address=spelled.format(port=port)).open(workers=1)
    assert executor.workers == 2


# ── Builds ─────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return write_two_datasets(tmp_path_factory.mktemp("local"), {"kind": "local"}).build()


def test_a_build_on_a_cluster_writes_the_same_bytes(cluster: Any, tmp_path: Path, undisturbed: Built) -> None:
    built = write_two_datasets(tmp_path, {"kind": "ray", "address": cluster.address}).build()
    assert built.versions() == undisturbed.versions()
    assert built.digests() == undisturbed.digests()


@pytest.mark.parametrize("layout", mark_all_but(["index"], SHARD_LAYOUTS))
def test_shards_of_other_layouts_have_the_bytes_of_one_worker(cluster: Any, tmp_path: Path, layout: str) -> None:
    one, many = (
        write_layout(
            Workspace(tmp_path / executor["kind"]), layout, files=6, chats=90, words=40, seq_len=1024,
            execution={"workers": 1, "executor": executor},
        ).build()
        for executor in ({"kind": "local"}, {"kind": "ray", "address": cluster.address})
    )  # fmt: skip

    assert many.report("rows", "tokenized_examples").parts == 6
    assert many.versions() == one.versions()
    assert many.digests() == one.digests()


@pytest.mark.campaign
def test_scores_of_a_teacher_have_the_files_of_one_worker(cluster: Any, tmp_path: Path) -> None:
    """Each worker asks for one row at a time, so two requests at once are those of two workers."""
    together, asked = threading.Barrier(2, timeout=60), count()

    def teach_two_at_once(request: dict[str, Any]) -> Reply:
        if next(asked) < 2:
            together.wait()
        return teacher.teach(request)

    executors = {"local": {"kind": "local"}, "ray": {"kind": "ray", "address": cluster.address}}
    for script, (name, executor) in zip((teacher.teach, teach_two_at_once), executors.items(), strict=True):
        workspace = Workspace(tmp_path / name).one(
            "c.jsonl", [chat(i) for i in range(600)], splits={"validation": 0.2},
            execution={"workers": 1, "executor": executor},
        )  # fmt: skip
        workspace.build(only=TO_EXAMPLES)
        with serving(script) as server:
            command = ["score", str(workspace.config), "--base-url", server.base_url, "--model", "m"]
            assert main([*command, "--top-k", "4", "--concurrency", "1", "--retries", "0"]) == 0
        assert len(server.requests) == 600

    one, many = (list_files(tmp_path / name / "scored") for name in executors)
    # Three parts of each split, and what they are.
    assert len(one) == 7
    assert many == one


@pytest.mark.parametrize("stage", mark_all_but(["tokenized_examples"], ["canonical_rows", "tokenized_examples"]))
def test_a_node_that_dies_in_a_stage_changes_no_byte(
    stage: str, cluster: Any, tmp_path: Path, undisturbed: Built
) -> None:
    """The node dies when the first of the stage's fifteen parts is there."""
    workspace, killed = write_two_datasets(tmp_path, {"kind": "ray", "address": cluster.address}), list[int]()
    victim = start_node(cluster)

    def kill(where: str, *, done: int, **_: Any) -> None:
        if where == f"chats/{stage}" and done and not killed:
            killed.append(done)
            cluster.remove_node(victim, allow_graceful=False)

    built = workspace.build(progress=kill)
    assert killed
    assert built.report("chats", stage).parts == 15
    assert built.digests() == undisturbed.digests()


@pytest.mark.campaign
def test_a_node_with_other_code_is_refused_before_anything_is_written(cluster: Any, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "pipelines", tmp_path / "other", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "other" / "rowmill" / "__init__.py").open("a") as code:
        code.write("# another version\n")
    path = os.pathsep.join(map(str, (tmp_path / "other", ROOT, ROOT / "assets")))
    other = start_node(cluster, env_vars={"PYTHONPATH": path})
    workspace = write_two_datasets(tmp_path / "mini", {"kind": "ray", "address": cluster.address})

    try:
        with pytest.raises(ConfigError, match=r"1 of 3 hosts .* the code of rowmill \w+ instead of \w+; every host"):
            workspace.build()
    finally:
        cluster.remove_node(other)

    assert not any(path.is_file() for path in workspace.store.rglob("*"))
