"""A helper: it works beside the calling process, stops when asked, and is gone when that process is."""

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from rowmill.executors.worker_processes import HAS_FORK_SERVER

pytestmark = [pytest.mark.skipif(not HAS_FORK_SERVER, reason="no process is forked on this platform"), pytest.mark.slow]

BEGIN = """
import os, threading, time
from rowmill.executors import fork_helper
from rowmill.executors import forked_helper, forked_workers
from tests.executors import test_forked_helper as here
# A busy machine takes longer to end the threads that imports have told to end.
forked_workers.THREAD_END_SECONDS = 30
"""


def count_until_asked(is_asked_to_stop: Callable[[], bool]) -> tuple[int, bool]:
    """Return this process and whether it was asked; a test that never asks would wait for a minute."""
    end = time.monotonic() + 60
    while not is_asked_to_stop() and time.monotonic() < end:
        time.sleep(0.001)
    return os.getpid(), time.monotonic() < end


def die(is_asked_to_stop: Callable[[], bool]) -> None:
    del is_asked_to_stop
    os._exit(7)


def sleep(is_asked_to_stop: Callable[[], bool]) -> None:
    del is_asked_to_stop
    os.write(sys.stdout.fileno(), f"{os.getpid()}\n".encode())
    time.sleep(600)


def answer_at_length(is_asked_to_stop: Callable[[], bool]) -> bytes:
    del is_asked_to_stop
    return bytes(1 << 22)


def run(script: str) -> list[str]:
    """Run a script in a process without threads; what it writes to stderr is a failure."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BEGIN + script],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_helper_works_in_another_process_until_it_is_asked_to_stop() -> None:
    script = """
helper = fork_helper(here.count_until_asked)
pid, was_asked = helper.finish()
print(pid != os.getpid(), was_asked)
try:
    os.kill(pid, 0)
except ProcessLookupError:
    print("gone")
"""
    assert run(script) == ["True True", "gone"]


def test_an_answer_may_be_larger_than_a_pipe_holds() -> None:
    assert run("print(len(fork_helper(here.answer_at_length).finish()))") == [str(1 << 22)]


def test_a_helper_that_was_done_long_ago_gives_its_answer() -> None:
    done = "while not helper._connection.poll(1): pass\n"

    assert run(f"helper = fork_helper(here.answer_at_length)\n{done}print(len(helper.finish()))") == ["4194304"]
    assert run(f"helper = fork_helper(lambda _: 5)\n{done}print(helper.finish())") == ["5"]


def test_a_helper_that_dies_gives_no_answer() -> None:
    assert run("print(fork_helper(here.die).finish())") == ["None"]


def test_a_helper_that_is_busy_for_too_long_is_ended() -> None:
    shown = run("forked_helper.ANSWER_SECONDS = 2\nprint(fork_helper(here.sleep).finish())")

    assert shown[-1] == "None"
    with pytest.raises(ProcessLookupError):
        os.kill(int(shown[0]), 0)


def test_a_process_with_a_thread_has_no_helper() -> None:
    thread = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"

    assert run(f"forked_workers.THREAD_END_SECONDS = 0\n{thread}print(fork_helper(here.die))") == ["None"]


def test_workers_can_be_forked_beside_a_helper() -> None:
    script = """
from rowmill.executors import LocalPool
from rowmill.executors.local import FORKED_INLINE_BELOW_BYTES as SMALL
helper = fork_helper(here.count_until_asked)
pool = LocalPool(2)
pool.start(SMALL)
print(list(pool.map(abs, [-1, -2], size_bytes=SMALL)), helper.finish()[1])
"""
    assert run(script) == ["[1, 2] True"]


def test_a_helper_ends_when_the_calling_process_is_killed() -> None:
    script = "helper = fork_helper(here.sleep)\nassert helper is not None\ntime.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + script],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdecimal()
        process.kill()

        # The pipe ends when nobody holds it any more.
        assert process.stdout.read() == ""
