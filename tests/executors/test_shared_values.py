"""A shared value comes out of its folder as it went in, with arrays that are mapped and cannot be written to."""

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rowmill.executors import LocalPool
from rowmill.executors.base import call_with_file, write_shared

if TYPE_CHECKING:
    from numpy.typing import NDArray


def take(task: str, shared: "dict[str, NDArray[np.int64]]") -> Any:
    return shared[task]


def test_value_comes_back_with_arrays_that_cannot_be_written_to() -> None:
    value = {"numbers": np.arange(1000), "none": np.arange(0)}

    with write_shared(value) as folder:
        found = [call_with_file(take, folder, task) for task in ("numbers", "none")]

        assert [one.tolist() for one in found] == [list(range(1000)), []]
        with pytest.raises(ValueError, match="read-only"):
            found[0][0] = 1


def test_value_is_read_once_for_all_tasks_and_removed_with_its_map() -> None:
    with write_shared({"numbers": np.arange(10)}) as folder:
        first, second = (call_with_file(take, folder, "numbers") for _ in range(2))
        assert first is second
    assert not os.path.exists(folder)


def test_value_in_the_calling_process_is_not_copied() -> None:
    numbers = np.arange(10)
    [found] = LocalPool(1).map(take, ["numbers"], size_bytes=0, shared={"numbers": numbers})
    assert found is numbers
