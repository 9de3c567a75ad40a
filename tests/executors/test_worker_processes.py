"""Workers find what the fork server opened, and no worker outlives the process that started it."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from rowmill.executors import base
from rowmill.executors.local import HAS_FORK_SERVER, hold_interrupts, start_processes
from tests.support.meeting import MEETING_VARIABLE, meet_as_told

pytestmark = pytest.mark.slow

SHARED = """
from rowmill.executors import LocalPool, open_in_workers
from rowmill.executors.local import INLINE_BELOW_BYTES
from tests.executors import test_local, test_worker_processes

if __name__ == "__main__":
    open_in_workers(test_worker_processes.opened_by)
    pool = LocalPool(2)
    list(pool.map(test_local.take_time, range(400), size_bytes=INLINE_BELOW_BYTES))
    found = set(pool.map(test_worker_processes.find_opener, range(8), size_bytes=INLINE_BELOW_BYTES))
    import os
    print(sorted((pid != os.getpid(), opener == pid) for pid, opener in found))
"""


@cache
def opened_by() -> int:
    return os.getpid()


def find_opener(number: int) -> tuple[int, int]:
    del number
    meet_as_told()
    return os.getpid(), opened_by()


@pytest.mark.skipif(not HAS_FORK_SERVER, reason="workers are spawned on this platform")
def test_what_the_fork_server_opened_is_opened_by_no_worker(tmp_path: Path) -> None:
    """A process of its own, since a fork server that runs already opens nothing more."""
    command, env = [sys.executable, "-c", SHARED], os.environ | {MEETING_VARIABLE: f"2:{tmp_path}"}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert shown.stdout.strip() == "[(True, False), (True, False)]"


ENCODING = """
from rowmill.executors import LocalPool, open_in_workers
from rowmill.executors.local import INLINE_BELOW_BYTES
from tests.executors import test_local, test_worker_processes

if __name__ == "__main__":
    import os
    from collections import Counter
    open_in_workers(test_worker_processes.encode_words)
    pool = LocalPool(2)
    BEGUN
    list(pool.map(test_local.take_time, range(400), size_bytes=INLINE_BELOW_BYTES))
    threads = Counter()
    for pid, is_right, started in pool.map(
        test_worker_processes.encode_in_worker, range(8), size_bytes=INLINE_BELOW_BYTES
    ):
        threads[pid == os.getpid(), is_right, pid] += started
    print({(*what, started) for (*what, _), started in threads.items()})
"""


def encode_words() -> list[list[int]]:
    """Encode texts as the reference does, of which several at once may take several threads."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(["a b", "b"] * 8)]


def encode_in_worker(number: int) -> tuple[int, bool, int]:
    """Return this process, whether the ids are right, and how many threads were started for them."""
    del number
    before = len(os.listdir("/proc/self/task"))
    is_right = encode_words() == [[0, 1], [1]] * 8
    return os.getpid(), is_right, len(os.listdir("/proc/self/task")) - before


@pytest.mark.skipif(not HAS_FORK_SERVER, reason="workers are spawned on this platform")
@pytest.mark.parametrize("begun", ["pass", "pool.start(INLINE_BELOW_BYTES)"], ids=["fork server", "forked"])
def test_workers_encode_also_where_the_process_that_they_are_forked_from_has_encoded(begun: str) -> None:
    """A pool of threads that was forked has no threads: who hands it work waits for ever."""
    command = [sys.executable, "-c", ENCODING.replace("BEGUN", begun)]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=os.getcwd(), timeout=120)
    assert shown.stdout.strip() == "{(False, True, 1)}"


FAILING = """
import os
from rowmill.core.errors import IntegrityError
from rowmill.executors import LocalPool, open_in_workers
from rowmill.executors.local import INLINE_BELOW_BYTES
from tests.executors import test_local, test_worker_processes

if __name__ == "__main__":
    open_in_workers(test_worker_processes.break_setup)
    pool = LocalPool(2)
    STARTED
    try:
        list(pool.map(test_local.take_time, range(400), size_bytes=INLINE_BELOW_BYTES))
    except IntegrityError as error:
        print(error)
"""


def break_setup() -> None:
    """Leave this process, and those forked from it, unable to set up a worker."""

    def refuse() -> None:
        raise RuntimeError("can't start new thread")

    base.limit_to_one_thread = refuse


@pytest.mark.skipif(not HAS_FORK_SERVER, reason="workers are spawned on this platform")
@pytest.mark.parametrize("start", ["pass", "pool.start(INLINE_BELOW_BYTES)"], ids=["fork server", "forked"])
def test_why_a_worker_cannot_be_set_up_is_in_the_error(start: str) -> None:
    command = [sys.executable, "-c", FAILING.replace("STARTED", start)]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert shown.stdout.startswith("a worker process could not be set up (RuntimeError: can't start new thread); ")


GONE = """
import sys, threading
from multiprocessing import spawn
from pathlib import Path
from rowmill.executors import LocalPool, open_in_workers
from rowmill.executors.local import INLINE_BELOW_BYTES
from tests.executors import test_local, test_worker_processes

if __name__ == "__main__":
    import os
    here, folder, describe = os.getcwd(), Path(sys.argv[1]), spawn.get_preparation_data
    described = threading.Event()
    def note(name):
        data = describe(name)
        if name != "ignore":
            described.set()
        return data
    spawn.get_preparation_data = note
    open_in_workers(test_worker_processes.wait_for_file, str(folder / "ready"))
    (folder / "gone").mkdir()
    os.chdir(folder / "gone")
    pool = LocalPool(2)
    # A process with a thread is not forked.
    threading.Thread(target=described.wait).start()
    starting = pool.start(INLINE_BELOW_BYTES)
    described.wait()
    os.chdir(here)
    (folder / "gone").rmdir()
    (folder / "ready").touch()
    print(type(starting.exception()).__name__)
    print(sum(number for number, _ in pool.map(test_local.take_time, range(8), size_bytes=INLINE_BELOW_BYTES)))
"""


def wait_for_file(path: str) -> None:
    deadline = time.monotonic() + 60
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.skipif(not HAS_FORK_SERVER, reason="workers are spawned on this platform")
def test_workers_that_could_not_start_where_the_process_was_are_started_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GONE, str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert shown.stdout.split() == ["BrokenProcessPool", "28"], shown.stderr


LEAVING = """
import threading
from multiprocessing import get_context, spawn
from rowmill.executors import LocalPool, open_in_workers
from rowmill.executors.local import INLINE_BELOW_BYTES
from tests.executors import test_local, test_worker_processes

def leave():
    described, describe = threading.Event(), spawn.get_preparation_data
    def note(name):
        if name != "ignore":
            described.set()
        return describe(name)
    spawn.get_preparation_data = note
    open_in_workers(test_worker_processes.take_a_second)
    # A process with a thread is not forked.
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    pool = LocalPool(2)
    pool.start(INLINE_BELOW_BYTES)
    USED

if __name__ == "__main__":
    child = get_context("spawn").Process(target=leave)
    child.start()
    child.join()
    print(child.exitcode)
"""


def take_a_second() -> None:
    time.sleep(1)


@pytest.mark.skipif(not HAS_FORK_SERVER, reason="workers are spawned on this platform")
@pytest.mark.parametrize(
    "used",
    ["described.wait()", "list(pool.map(test_local.take_time, range(200), size_bytes=INLINE_BELOW_BYTES))"],
    ids=["while they start", "after tasks"],
)
@pytest.mark.timeout(60)
def test_process_that_leaves_ends_its_workers_and_says_nothing(used: str, tmp_path: Path) -> None:
    """As a step of Dagster does, which is a process that multiprocessing ends."""
    (tmp_path / "leaving.py").write_text(LEAVING.replace("USED", used), encoding="utf-8")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run(
        [sys.executable, "leaving.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert (shown.stdout, shown.stderr) == ("0\n", "")


def test_worker_ends_when_the_leash_is_closed_whatever_it_does() -> None:
    pool, leash = start_processes(1)
    busy = pool.submit(time.sleep, 600)
    leash.close()
    assert isinstance(busy.exception(timeout=60), BrokenProcessPool)


def test_an_interrupt_waits_until_the_block_is_left() -> None:
    """Another thread does not block the signal and takes it, and Python would interrupt the main thread at once."""
    rest = threading.Event()
    other = threading.Thread(target=rest.wait)
    other.start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    reached: list[str] = []

    def interrupt_inside() -> None:
        with hold_interrupts():
            with hold_interrupts():
                os.kill(os.getpid(), signal.SIGINT)
                # Python handles a signal between two steps of its own.
                for _ in range(10_000):
                    pass
            reached.append("the end of the block")

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt_inside()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
        rest.set()
        other.join()

    assert reached == ["the end of the block"]
