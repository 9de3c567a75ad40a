"""Runs of a flat array: what is joined is what an index of single values would give."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.arrays import Runs

VALUES = np.arange(100, 140, dtype=np.int32)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=12), st.sampled_from(["<i4", "?", "<f4"]))
def test_any_runs_are_joined_in_their_order(runs: list[tuple[int, int]], dtype: str) -> None:
    starts, lengths = (np.array(one, np.int64) for one in (zip(*runs, strict=True) if runs else ([], [])))
    values = (VALUES % 7).astype(dtype)
    taken = Runs.of(starts, lengths).take(values)

    assert taken.dtype == values.dtype
    assert taken.tolist() == [value for begin, size in runs for value in values[begin : begin + size].tolist()]


@given(st.lists(st.integers(0, 5), max_size=8).flatmap(st.permutations), st.randoms(use_true_random=False))
def test_pieces_of_an_array_are_joined_in_any_order(lengths: list[int], random: "np.random.Generator") -> None:
    """As the examples of a pack group are: nothing overlaps, some are empty."""
    bounds = np.cumsum([0, *lengths])
    order = list(range(len(lengths)))
    random.shuffle(order)
    taken = Runs.of(bounds[:-1][order], np.diff(bounds)[order]).take(VALUES[: bounds[-1]])

    assert taken.tolist() == [value for k in order for value in VALUES[bounds[k] : bounds[k + 1]].tolist()]


@pytest.mark.parametrize("overlaps", [True, False])
def test_runs_that_overlap_are_joined_by_an_index(overlaps: bool) -> None:
    runs = Runs.of(np.array([4, 0]), np.array([3, 5 if overlaps else 4]))

    assert (runs.borders is None) == overlaps
