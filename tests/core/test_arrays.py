"""Counts over runs of flags, and distinct numbers."""

import numpy as np
import pytest
from numpy.typing import NDArray

from rowmill.core.arrays import are_among, count_true, find_distinct


def test_true_flags_are_counted_by_run_and_an_empty_run_has_none() -> None:
    flags = np.array([True, False, True, True])

    assert count_true(flags, np.array([0, 0, 2, 2, 4, 4])).tolist() == [0, 1, 0, 2, 0]
    assert count_true(flags[:0], np.array([0, 0])).tolist() == [0]
    assert count_true(flags[:0], np.array([0])).tolist() == []


@pytest.mark.parametrize(
    "numbers",
    [
        np.array([], np.int64),
        np.array([7, 7, 7], np.int32),
        np.array([[2**64 - 1, 0], [5, 5]], np.uint64),
        np.random.default_rng(0).integers(-50, 50, 1000),
        np.array([0.5, -1.0, 0.5]),
    ],
    ids=["none", "one", "two dimensions", "many", "floats"],
)
def test_distinct_numbers_are_those_of_numpy(numbers: NDArray[np.int64]) -> None:
    found, expected = find_distinct(numbers), np.unique(numbers)

    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("distinct", [[], [3], [-4, 0, 9], list(range(0, 40, 3))])
def test_numbers_among_others_are_those_of_numpy(distinct: list[int]) -> None:
    numbers = np.random.default_rng(1).integers(-5, 45, (100, 3))
    found = are_among(numbers, np.array(distinct, np.int64))

    assert found.dtype == np.bool_
    assert found.tolist() == np.isin(numbers, distinct).tolist()
