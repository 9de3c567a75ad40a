"""A fork that works ahead: what it noted until it was ended, and nothing of what it did not finish."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rowmill.executors.local import HAS_FORK_SERVER

pytestmark = [pytest.mark.skipif(not HAS_FORK_SERVER, reason="nothing is forked on this platform"), pytest.mark.slow]

BEGIN = """
import os, sys, tempfile, threading, time
from pathlib import Path
from rowmill.executors import fork_beside, local
folder = Path(sys.argv[1])
# A busy machine takes longer to end the threads that imports have told to end.
local.THREAD_END_SECONDS = 30

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def wait_for_end(side):
    side._process.join()
    return side
"""


def run(script: str, folder: Path) -> list[str]:
    """Run a script in a process without threads; what it writes to stderr, a warning for example, is a failure."""
    command = [sys.executable, "-W", "error", "-c", BEGIN + script, str(folder)]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_what_was_noted_comes_back_in_order_and_is_more_than_a_pipe_holds(tmp_path: Path) -> None:
    script = """
def work(note):
    for number in range(1000):
        note((number, "x" * 1000))
found = wait_for_end(fork_beside(work)).stop()
print([number for number, _ in found] == list(range(1000)))
"""
    assert run(script, tmp_path) == ["True"]


def test_it_is_ended_in_the_midst_of_its_work_and_lets_go_of_what_it_holds(tmp_path: Path) -> None:
    script = """
def work(note):
    with tempfile.TemporaryDirectory(dir=folder):
        note("first")
        (folder / "begun").touch()
        time.sleep(600)
        note("second")
side = fork_beside(work)
wait_for("begun")
print(side.stop(), sorted(path.name for path in folder.iterdir()))
"""
    assert run(script, tmp_path) == ["['first'] ['begun']"]


def test_one_that_does_not_end_is_killed_and_what_is_cut_short_is_left(tmp_path: Path) -> None:
    script = """
import signal
from rowmill.executors import side_process
side_process.STOP_SECONDS = 0.1
def work(note):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note("first")
    os.write(side_file, b"\\x80\\x05\\x95 cut")
    (folder / "begun").touch()
    time.sleep(600)
opened = tempfile.TemporaryFile
def open_file():
    global side_file
    file = opened()
    side_file = file.fileno()
    return file
side_process.tempfile.TemporaryFile = open_file
side = fork_beside(work)
wait_for("begun")
print(side.stop())
"""
    assert run(script, tmp_path) == ["['first']"]


def test_what_raises_in_it_is_not_shown(tmp_path: Path) -> None:
    script = """
import logging
def work(note):
    note("first")
    logging.getLogger("rowmill").warning("shown by the calling process")
    raise ValueError("raised by the calling process")
print(wait_for_end(fork_beside(work)).stop())
"""
    assert run(script, tmp_path) == ["['first']"]


def test_a_process_that_cannot_be_forked_goes_on_without_one(tmp_path: Path) -> None:
    script = """
def refuse():
    raise BlockingIOError("no more processes")
os.fork = refuse
print(fork_beside(lambda note: None))
"""
    assert run(script, tmp_path) == ["None"]


def test_a_process_with_threads_is_not_forked(tmp_path: Path) -> None:
    script = """
local.THREAD_END_SECONDS = 0
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(fork_beside(lambda note: None))
"""
    assert run(script, tmp_path) == ["None"]


def test_it_ends_when_the_calling_process_is_killed(tmp_path: Path) -> None:
    script = """
def work(note):
    print(os.getpid(), flush=True)
    time.sleep(600)
side = fork_beside(work)
time.sleep(600)
"""
    command = [sys.executable, "-c", BEGIN + script, str(tmp_path)]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdigit()
        process.kill()

        # The pipe ends when nobody holds it any more.
        assert process.stdout.read() == ""
