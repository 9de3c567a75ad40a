"""What runs in a task on another host: one call, and what becomes of its errors."""

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from rowmill.core.errors import ConfigError, is_transient
from rowmill.executors import worker_setup
from rowmill.executors.versions import describe_difference, describe_versions


class TransientTaskError(Exception):
    """An error of the outside world that may pass; `error` is the original."""

    def __init__(self, error: Exception) -> None:
        """Keep the original as the only argument, so that pickling keeps it."""
        super().__init__(error)
        self.error = error


@dataclass(frozen=True, slots=True)
class FailedTask:
    """An error that another attempt would meet again, as a result, so that the caller gets the original."""

    error: Exception


@dataclass(frozen=True, slots=True)
class TaskCall:
    """A call of a function; `versions`, where given, are those that its host must have."""

    function: Callable[..., object]
    arguments: tuple[object, ...]
    folder: str
    versions: tuple[tuple[str, str], ...] | None = None

    def pickle(self) -> bytes:
        """Return the call for `run_call`."""
        return pickle.dumps(self)


def run_call(content: bytes, shared: object) -> object:
    """Return the result of a pickled call, with the shared value as its last argument unless that is None.

    Raises
    ------
    TransientTaskError
        If another attempt may succeed. Other errors are returned as `FailedTask`.

    """
    # Threads are limited before the libraries are imported that the function needs, so it comes pickled.
    _limit_threads()
    call: TaskCall = pickle.loads(content)  # noqa: S301  (from our own calling process)
    if os.path.isdir(call.folder):
        # Relative paths start where the calling process is.
        os.chdir(call.folder)
    try:
        _require_versions(call.versions)
        return call.function(*call.arguments) if shared is None else call.function(*call.arguments, shared)
    except Exception as error:
        if is_transient(error):
            raise TransientTaskError(error) from error
        return FailedTask(error)


@cache
def _limit_threads() -> None:
    worker_setup.limit_to_one_thread()


def _require_versions(wanted: tuple[tuple[str, str], ...] | None) -> None:
    if wanted is not None and (different := describe_difference(dict(wanted), describe_versions())):
        raise ConfigError(
            f"execution.executor: the host {os.uname().nodename} has {different}; the same versions give the same "
            "bytes; install those of the calling process there, and build again"
        )
