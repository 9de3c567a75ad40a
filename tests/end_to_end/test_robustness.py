"""Full disks, kills, broken workers and concurrent builds: the next build always gives the same bytes.

Builds that are to die run in processes of their own. Where one dies is said by the file that it is about to
rename into place, through Python's audit events: exact, with no hook in the engine and no timing.
"""

import gzip
import itertools
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from rowmill.build import runner, steps
from rowmill.core.errors import ConfigError, IntegrityError, PipelineError
from rowmill.executors import local
from tests.support.recipes import CHAT, CHATML, PAIR, Built, Workspace, chat, lines, pair, write_tokenizer
from tests.support.tiers import mark_all_but

pytestmark = pytest.mark.slow

PROCESSES = multiprocessing.get_context("forkserver")
"""Forked from a server that has imported everything once and done nothing: as fresh as a new process, and quicker."""
PROCESSES.set_forkserver_preload(["rowmill.build.runner", "pandas", "polars", "transformers"])

PATIENCE_S = 60.0


def with_data(workspace: Workspace, **changes: object) -> Workspace:
    """Write two datasets; the chats are compressed, so that their parts are staged, in files that are a part each."""
    for number in range(3):
        rows = lines(chat(i, words=30) for i in range(250 * number, 250 * (number + 1)))
        workspace.write(f"chats-{number}.jsonl.gz", gzip.compress(rows, mtime=0))
    workspace.write("tasks.jsonl", [pair(i) for i in range(50)])
    datasets = {
        "chats": {"source": {"train_urls": ["data/chats-*.jsonl.gz"]}, "format": CHAT},
        "tasks": {"source": {"train_urls": ["data/tasks.jsonl"]}, "format": PAIR},
    }
    return workspace.recipe(datasets, **changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the project once, in peace."""
    return with_data(Workspace(tmp_path_factory.mktemp("undisturbed"))).build()


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return with_data(Workspace(tmp_path))


def assert_same(built: Built, undisturbed: Built) -> None:
    assert built.versions() == undisturbed.versions()
    assert built.digests() == undisturbed.digests()


def until(holds: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Tell whether something comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# ── Builds in other processes ──────────────────────────────────────────────────────────────────────
def build_in_process(
    config: Path, inline_below_bytes: int | None = None, deaths: tuple[str, int] | None = None
) -> None:
    """Build; with `deaths`, kill this process before it renames the n-th file whose path matches a pattern.

    The ids of the workers alive at that moment are left beside the recipe, or the number of such files if it ends.
    """
    if inline_below_bytes is not None:
        local.INLINE_BELOW_BYTES = inline_below_bytes
    pattern, last = deaths or ("", 0)
    numbers = itertools.count(1)

    def hear(event: str, args: tuple[object, ...]) -> None:
        if event == "os.rename" and re.search(pattern, str(args[1])) and next(numbers) == last:
            workers = [str(process.pid) for process in multiprocessing.active_children()]
            config.with_name("workers").write_text(" ".join(workers), encoding="ascii")
            os.kill(os.getpid(), signal.SIGKILL)

    if deaths is not None:
        sys.addaudithook(hear)
    runner.build(steps.open_project(config))
    config.with_name("renames").write_text(str(next(numbers) - 1), encoding="ascii")


def started(workspace: Workspace, **options: object) -> BaseProcess:
    process = PROCESSES.Process(target=build_in_process, args=(workspace.config,), kwargs=options)
    process.start()
    return process


def finished(process: BaseProcess) -> int | None:
    """Wait for a process and return its exit code; None if it did not end in time."""
    process.join(PATIENCE_S)
    if process.exitcode is None:
        process.kill()
    return process.exitcode


def killed(workspace: Workspace, pattern: str, count: int = 1, **options: object) -> bool:
    """Run a build that dies before the n-th rename to a matching path; tell whether it got there."""
    return finished(started(workspace, deaths=(pattern, count), **options)) == -signal.SIGKILL


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


IN_THE_MIDDLE = {
    "raw_dataset": [("chats/raw_dataset/staged/", 2), ("chats/raw_dataset/manifests/", 1)],
    "canonical_rows": [("chats/canonical_rows/parts/.*/rows.arrow", 2), ("chats/canonical_rows/parts/.*/part.json", 2)],
    "tokenized_examples": [("tokenizers/", 1), ("chats/tokenized_examples/parts/.*/part.json", 2)],
    "truncation_stats": [("chats/truncation_stats/versions/", 1), ("chats/truncation_stats/pointer.json", 1)],
    "packed_shards": [("chats/packed_shards/parts/.*/segments/", 1), ("chats/packed_shards/manifests/", 1)],
    "training_splits": [("training_splits/parts/.*/rank_steps", 1), ("training_splits/versions/", 1)],
    "gpu_partitions": [
        ("gpu_partitions/parts/.*/data/", 2), ("gpu_partitions/parts/.*/part.json", 1),
        ("gpu_partitions/current.json", 1),
    ],
}  # fmt: skip
"""Where a build is killed in each stage: in the middle of its parts, and between the files that say it is done."""


@pytest.mark.parametrize("stage", mark_all_but(["packed_shards"], IN_THE_MIDDLE))
def test_killed_build_is_finished_by_the_next_with_the_same_bytes(
    workspace: Workspace, undisturbed: Built, stage: str
) -> None:
    for pattern, count in IN_THE_MIDDLE[stage]:
        assert killed(workspace, pattern, count), f"never got to {pattern}"
    assert_same(workspace.build(), undisturbed)


# ── kill -9 ────────────────────────────────────────────────────────────────────────────────────────
def test_killed_build_leaves_no_manifest_and_the_next_keeps_the_finished_parts(workspace: Workspace) -> None:
    assert killed(workspace, "chats/tokenized_examples/parts/.*/part.json", 2)
    assert (workspace.store / "mini/chats/canonical_rows/pointer.json").exists()
    assert not list((workspace.store / "mini/chats/tokenized_examples").glob("manifests/*"))
    report = workspace.build().report("chats", "tokenized_examples")
    assert report.parts > 2
    assert report.parts_reused == 1


def test_killed_build_leaves_no_worker(workspace: Workspace, undisturbed: Built) -> None:
    with_data(workspace, execution={"workers": 2})
    # Parts are written by the workers; what the killed process itself writes next is the manifest.
    assert killed(workspace, "chats/tokenized_examples/manifests/", 1, inline_below_bytes=0)

    workers = [int(pid) for pid in workspace.config.with_name("workers").read_text(encoding="ascii").split()]
    assert len(workers) == 2
    assert until(lambda: not any(map(is_alive, workers)))
    assert_same(workspace.build(), undisturbed)


def test_killed_build_leaves_no_lock(workspace: Workspace) -> None:
    assert killed(workspace, "chats/raw_dataset/manifests/", 1)
    with workspace.project.store.lock("mini/chats/raw_dataset/.lock", what="the lock", timeout_s=1):
        pass


# ── Workers ────────────────────────────────────────────────────────────────────────────────────────
def test_worker_that_dies_is_one_error_and_the_next_build_finishes(
    workspace: Workspace, undisturbed: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "INLINE_BELOW_BYTES", 0)
    with_data(workspace, execution={"workers": 2})

    def kill_workers(where: str, **_: object) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    with pytest.raises(IntegrityError, match="a worker process died"):
        workspace.build(progress=kill_workers)
    assert_same(workspace.build(), undisturbed)


def test_error_in_a_worker_arrives_as_itself(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "INLINE_BELOW_BYTES", 0)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    write_tokenizer(workspace.folder / "tokenizer", template=endless + CHATML)

    with pytest.raises(ConfigError, match="the template takes too many steps"):
        with_data(workspace, execution={"workers": 2}).build()


# ── Full disks ─────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system in memory whose size a test may change with `resize`; skip where that is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a tmpfs; test_build_that_may_write_only_small_files covers the error")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def resize(disk: Path, size_bytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size_bytes >> 10}k", str(disk)], check=True)


NO_ROOM = r"^mini/\S+: no space left under .*; free space there, or choose another storage root, and build again$"


@pytest.mark.parametrize("share", mark_all_but([0.55], [0.03, 0.3, 0.55, 0.7, 0.85]))
def test_build_on_a_full_disk_is_one_error_and_finishes_once_there_is_room(
    workspace: Workspace, undisturbed: Built, small_disk: Path, share: float
) -> None:
    needed = sum(path.stat().st_blocks * 512 for path in Path(undisturbed.project.store.root).rglob("*"))
    there = Workspace(workspace.folder, str(small_disk / "store"))
    resize(small_disk, int(needed * share))
    with pytest.raises(PipelineError, match=NO_ROOM):
        there.build()
    resize(small_disk, 4 * needed)
    assert_same(there.build(), undisturbed)


def build_with_small_files(config: Path, limit_bytes: int, report: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    try:
        runner.build(steps.open_project(config))
    except PipelineError as error:
        report.write_text(str(error), encoding="utf-8")


@pytest.mark.parametrize(
    "limit_bytes", mark_all_but([20_000], [20_000, 40_000]), ids=["the tokenizer is too large", "the sources are"]
)
def test_build_that_may_write_only_small_files_is_one_error(
    workspace: Workspace, undisturbed: Built, limit_bytes: int
) -> None:
    """The same without a disk of one's own: the system refuses to let any file grow beyond a limit."""
    report = workspace.folder / "report"
    process = PROCESSES.Process(target=build_with_small_files, args=(workspace.config, limit_bytes, report))
    process.start()

    assert finished(process) == 0
    assert re.search(NO_ROOM, report.read_text(encoding="utf-8"))
    assert_same(workspace.build(), undisturbed)


# ── Two builds at once ─────────────────────────────────────────────────────────────────────────────
def test_two_builds_at_once_both_end_well_and_give_the_same_bytes(workspace: Workspace, undisturbed: Built) -> None:
    both = [started(workspace) for _ in range(2)]
    assert [finished(one) for one in both] == [0, 0]
    after = workspace.build()
    assert after.made() == set()
    assert_same(after, undisturbed)
    assert not list(workspace.store.rglob("*.tmp"))
    assert not list(workspace.store.rglob("scratch-*"))


def test_build_beside_one_that_is_killed_ends_well(workspace: Workspace, undisturbed: Built) -> None:
    """The survivor waits for the lock that the other holds, and gets it when the other dies."""
    survivor = started(workspace)
    assert killed(workspace, "gpu_partitions/parts/.*/data/", 1) or finished(survivor) == 0
    assert finished(survivor) == 0
    assert_same(workspace.build(), undisturbed)
