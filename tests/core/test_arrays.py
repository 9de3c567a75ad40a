"""Counts over runs of flags."""

import numpy as np

from rowmill.core.arrays import count_true


def test_true_flags_are_counted_by_run_and_an_empty_run_has_none() -> None:
    flags = np.array([True, False, True, True])

    assert count_true(flags, np.array([0, 0, 2, 2, 4, 4])).tolist() == [0, 1, 0, 2, 0]
    assert count_true(flags[:0], np.array([0, 0])).tolist() == [0]
    assert count_true(flags[:0], np.array([0])).tolist() == []
