"""Workers forked from the calling process: only where that has no threads, with what it opened, gone when it is."""

import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from rowmill.build import prepare
from rowmill.build.steps import plan_steps
from rowmill.executors.local import HAS_FORK_SERVER
from tests.support.meeting import MEETING_VARIABLE, meet_as_told
from tests.support.recipes import TEXT, Workspace, document

pytestmark = [pytest.mark.skipif(not HAS_FORK_SERVER, reason="workers are spawned on this platform"), pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]

BEGIN = """
import os, threading, time
import polars
from rowmill.executors import LocalPool, open_in_workers
from rowmill.executors import local
from rowmill.executors.local import FORKED_INLINE_BELOW_BYTES as SMALL, INLINE_BELOW_BYTES as LARGE
from tests.executors import test_forked_workers as here
# A busy machine takes longer to end the threads that imports have told to end.
local.THREAD_END_SECONDS = 30
open_in_workers(here.opened_by)
pool = LocalPool(2)
"""
DESCRIBE = """
found = set(pool.map(here.describe_worker, range(8), size_bytes=SMALL))
print(len(found), {pid == os.getpid() for pid, *_ in found}, {rest[0] == os.getpid() for _, *rest in found})
print({tuple(rest[1:]) for _, *rest in found})
"""


@cache
def opened_by() -> int:
    return os.getpid()


def describe_worker(number: int) -> tuple[int, int, int, int, bool]:
    del number
    meet_as_told()
    masked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return os.getpid(), opened_by(), pl.thread_pool_size(), pa.cpu_count(), masked


def die(number: int) -> None:
    os._exit(number)


def run(script: str, workers: int = 2) -> list[str]:
    """Run a script in a process without threads; what it writes to stderr, a warning for example, is a failure."""
    command = [sys.executable, "-W", "error", "-c", BEGIN + script]
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1", MEETING_VARIABLE: f"{workers}:{folder}"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_workers_have_what_the_calling_process_opened_and_one_thread_per_library() -> None:
    shown = run(f"pool.start(SMALL)\n{DESCRIBE}")
    assert shown == ["2 {False} {True}", "{(1, 1, True)}"]


def test_a_process_with_a_thread_is_not_forked() -> None:
    busy = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    thread = f"local.THREAD_END_SECONDS = 0\n{busy}"
    assert run(f"{thread}assert pool.start(SMALL) is None\n{DESCRIBE}", workers=1)[0] == "1 {True} {True}"
    assert run(f"{thread}pool.start(LARGE).result()\n{DESCRIBE.replace('SMALL', 'LARGE')}")[0] == "2 {False} {False}"


def test_a_thread_that_is_ending_is_waited_for() -> None:
    thread = "threading.Thread(target=time.sleep, args=(0.01,), daemon=True).start()\n"
    assert run(f"{thread}pool.start(SMALL)\n{DESCRIBE}")[0] == "2 {False} {True}"


def test_a_dead_worker_is_an_error_and_the_next_map_has_new_workers() -> None:
    script = """
pool.start(SMALL)
try:
    list(pool.map(here.die, [7, 7], size_bytes=SMALL))
except Exception as error:
    print(type(error).__name__)
pool.start(LARGE).result()
print(os.getpid() in {pid for pid, *_ in pool.map(here.describe_worker, range(8), size_bytes=LARGE)})
"""
    assert run(script, workers=1) == ["IntegrityError", "False"]


def test_workers_end_when_the_calling_process_is_killed(tmp_path: Path) -> None:
    script = """
pool.start(SMALL)
print(*{pid for pid, *_ in pool.map(here.describe_worker, range(8), size_bytes=SMALL)}, flush=True)
list(pool.map(time.sleep, [600, 600], size_bytes=SMALL))
"""
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1", MEETING_VARIABLE: f"2:{tmp_path}"}
    command = [sys.executable, "-c", BEGIN + script]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        workers = process.stdout.readline().split()
        process.kill()

        # The pipe ends when nobody holds it any more.
        assert process.stdout.read() == ""
    assert len(workers) == 2


BUILD = """
import multiprocessing, sys
get_context = multiprocessing.get_context
def note(method=None):
    print("context", method, file=sys.stderr)
    return get_context(method)
multiprocessing.get_context = note
from rowmill.cli.main import main
from rowmill.executors import local
# As above.
local.THREAD_END_SECONDS = 30
status = main(["build", sys.argv[1], "--until", "packed_shards"])
import pyarrow as pa
print("Arrow's allocator", pa.default_memory_pool().backend_name, file=sys.stderr)
sys.exit(status)
"""


def test_a_command_forks_its_workers_and_writes_the_same_bytes(tmp_path: Path) -> None:
    """Once the tokenizer is in the store, nothing that a build does before its first task starts a thread."""

    def write(folder: Path, workers: int) -> Workspace:
        workspace = Workspace(folder)
        source = {"train_urls": [workspace.write("docs.jsonl", [document(i, words=400) for i in range(1200)])]}
        return workspace.recipe({"docs": {"source": source, "format": TEXT}}, execution={"workers": workers})

    workspace = write(tmp_path / "forked", 2)
    prepare.require_ready(workspace.project, plan_steps(workspace.project))
    command, env = [sys.executable, "-c", BUILD, str(workspace.config)], {"PYTHONPATH": str(ROOT / "pipelines")}
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "context fork\n" in done.stderr
    assert "context forkserver" not in done.stderr
    # Workers are forks of it.
    assert "Arrow's allocator system\n" in done.stderr
    forked, alone = workspace.build(), write(tmp_path / "alone", 1).build()
    assert forked.versions() == alone.versions()
