"""What becomes of a task's result: the value, the original error, or what to do about a lost task."""

from typing import Any

from rowmill.core.errors import IntegrityError
from rowmill.executors.ray_connection import import_ray, shorten_error
from rowmill.executors.ray_worker import FailedTask, TransientTaskError

RETRIES = 5
"""How often a task is tried again after its node died, or an error that may pass."""


def take_result(reference: Any, timeout_s: float | None = None) -> Any:
    """Wait for a task, and return its result.

    Raises
    ------
    IntegrityError
        If the task was lost too often. An error of the task itself is raised as it was.

    """
    ray = import_ray()
    try:
        result = ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayTaskError as failed:
        if isinstance(failed.cause, TransientTaskError):
            raise failed.cause.error from None
        raise
    except ray.exceptions.GetTimeoutError:
        raise
    except ray.exceptions.RayError as error:
        raise IntegrityError(
            f"a task was lost {RETRIES + 1} times ({shorten_error(error)}); a node must stay up and have the memory "
            "that its tasks need; finished parts are kept; check the nodes, set execution.executor.memory_per_task if "
            "memory was short, and build again"
        ) from error
    if isinstance(result, FailedTask):
        raise result.error
    return result
