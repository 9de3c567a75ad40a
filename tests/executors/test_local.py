"""A pool of processes: ordered results, shared values, and a dead worker is an error."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rowmill.core.errors import IntegrityError
from rowmill.executors import local
from rowmill.executors.local import FORKED_INLINE_BELOW_BYTES, HAS_FORK_SERVER, LocalPool
from rowmill.executors.local import INLINE_BELOW_BYTES as LARGE
from tests.support.meeting import meet

pytestmark = pytest.mark.slow


def take_time(number: int) -> tuple[int, int]:
    time.sleep(0.02)
    return number, os.getpid()


def take_turns(task: tuple[int, Path]) -> tuple[int, int]:
    """Do nothing before both workers have a task."""
    number, folder = task
    meet(folder, 2)
    return number, os.getpid()


class CountedLoad:
    """A shared value that adds a line to a file each time that it is unpickled."""

    def __init__(self, log: Path, numbers: "NDArray[np.int64]") -> None:
        self.log, self.numbers, self.empty = log, numbers, numbers[:0]
        self.meeting = log.with_name("meeting")
        self.meeting.mkdir()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        with self.log.open("a") as file:
            file.write("loaded\n")


def add_shared(number: int, shared: CountedLoad) -> tuple[int, int, bool]:
    meet(shared.meeting, 2 if len(shared.numbers) > 1 else 1)
    return int(shared.numbers[number]), os.getpid(), shared.numbers.flags.writeable


def die(parent: int) -> None:
    if os.getpid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def pool() -> Iterator[LocalPool]:
    pool = LocalPool(2)
    yield pool
    pool.close()


def start_workers(pool: LocalPool) -> None:
    """Give the pool work until workers do it."""
    while {pid for _, pid in pool.map(take_time, range(4), size_bytes=LARGE)} == {os.getpid()}:
        pass


def test_results_come_in_task_order_wherever_the_tasks_ran(pool: LocalPool, tmp_path: Path) -> None:
    start_workers(pool)
    made = list(pool.map(take_turns, [(number, tmp_path) for number in range(50)], size_bytes=LARGE))
    assert [number for number, _ in made] == list(range(50))
    assert len({pid for _, pid in made} - {os.getpid()}) == 2


def test_a_shared_value_is_sent_once_per_worker(pool: LocalPool, tmp_path: Path) -> None:
    start_workers(pool)
    shared = CountedLoad(tmp_path / "loads", np.arange(0, 5000, 100))

    made = list(pool.map(add_shared, range(50), size_bytes=LARGE, shared=shared))
    assert [number for number, _, _ in made] == list(range(0, 5000, 100))
    assert shared.log.read_text().count("loaded") == len({pid for _, pid, _ in made}) == 2
    assert not any(is_writeable for _, _, is_writeable in made)


def test_a_shared_value_reaches_tasks_in_the_calling_process(tmp_path: Path) -> None:
    shared = CountedLoad(tmp_path / "loads", np.array([7]))
    made = list(LocalPool(1).map(add_shared, range(1), size_bytes=0, shared=shared))
    assert [number for number, _, _ in made] == [7]
    assert not shared.log.exists()


@pytest.mark.skipif(not HAS_FORK_SERVER, reason="workers are spawned on this platform")
def test_the_environment_can_be_read_while_a_fork_server_starts_in_a_thread(pool: LocalPool) -> None:
    ended = threading.Event()
    # A process with a thread is not forked.
    threading.Thread(target=ended.wait, daemon=True).start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        started = pool.start(LARGE)
        assert started is not None
        while not started.done():
            # As fsspec reads it when it is imported; a variable that is removed meanwhile is an error.
            dict(os.environ)
        started.result()
    finally:
        sys.setswitchinterval(interval)
        ended.set()


def test_small_work_stays_in_the_calling_process(pool: LocalPool) -> None:
    made = list(pool.map(take_time, range(3), size_bytes=LARGE - 1))
    assert {pid for _, pid in made} == {os.getpid()}


@pytest.mark.campaign
@pytest.mark.skipif(not HAS_FORK_SERVER, reason="workers are spawned on this platform")
def test_the_calling_process_works_until_the_fork_server_is_ready(pool: LocalPool) -> None:
    made = list(pool.map(take_time, range(400), size_bytes=LARGE))

    pids = [pid for _, pid in made]
    own = pids.count(os.getpid())
    assert 0 < own < len(pids)
    assert set(pids[:own]) == {os.getpid()}


@pytest.mark.skipif(not HAS_FORK_SERVER, reason="workers are spawned on this platform")
def test_workers_that_were_started_before_take_the_first_task(pool: LocalPool) -> None:
    started = pool.start(LARGE)
    assert started is not None
    started.result()

    made = list(pool.map(take_time, range(20), size_bytes=LARGE))
    assert os.getpid() not in {pid for _, pid in made}


def test_no_worker_is_started_for_little_work(pool: LocalPool) -> None:
    assert pool.start(FORKED_INLINE_BELOW_BYTES - 1) is None
    assert LocalPool(1).start(LARGE) is None


def test_a_dead_worker_is_an_error_and_the_next_map_has_new_workers(pool: LocalPool) -> None:
    start_workers(pool)
    with pytest.raises(IntegrityError, match="a worker process died"):
        list(pool.map(die, [os.getpid()] * 50, size_bytes=LARGE))
    start_workers(pool)


class TwoFactsError(Exception):
    """An error that cannot be made again from its arguments, as libraries have them."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because {why}")


class Unreadable:
    """A task that a worker cannot unpickle."""

    def __init__(self) -> None:
        self.number = 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ModuleNotFoundError("No module named 'theirs'")


def raise_two_facts(number: int) -> None:
    raise TwoFactsError(f"task {number} failed", "of the data")


@pytest.mark.parametrize(
    ("function", "task", "expected", "message"),
    [
        (raise_two_facts, 7, RuntimeError, "TwoFactsError: task 7 failed because of the data"),
        (str, Unreadable(), ModuleNotFoundError, "No module named 'theirs'"),
    ],
)
def test_an_error_that_cannot_be_sent_reaches_the_caller_by_its_text(
    pool: LocalPool, function: Any, task: object, expected: type[Exception], message: str
) -> None:
    started = pool.start(LARGE)
    if started is not None:
        started.result()
    with pytest.raises(expected, match=message):
        list(pool.map(function, [task], size_bytes=LARGE))
    start_workers(pool)


def test_a_closed_pool_has_ended_its_processes_and_may_start_others(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "INLINE_BELOW_BYTES", 0)
    [(_, first)] = pool.map(take_time, [1], size_bytes=1)

    pool.close()

    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    [(_, other)] = pool.map(take_time, [1], size_bytes=1)
    assert other not in (first, os.getpid())
