"""Calls of libraries that may never return."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

ResultT = TypeVar("ResultT")


def call_with_time_limit(function: Callable[[], ResultT], limit_s: float) -> ResultT:
    """Call a function on a thread; after the time limit the thread is abandoned, and ends when its call returns.

    Raises
    ------
    TimeoutError
        If the function does not return in time.

    """
    outcome: Future[ResultT] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001  (it is raised again in the waiting thread)
            outcome.set_exception(error)

    # Not an executor: at exit the interpreter would wait for its threads, and one may be blocked forever.
    threading.Thread(target=call, daemon=True, name="rowmill-limited-call").start()
    try:
        return outcome.result(limit_s)
    except TimeoutError:
        if outcome.done():
            raise
        raise TimeoutError(f"no answer within {limit_s:.0f} s") from None
