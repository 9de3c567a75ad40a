"""Partitions: the specification's vector; ranks together give the order; steps are whole, and even."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.config import validate_options
from rowmill.core.errors import ConfigError
from rowmill.packing.rank_assignment import (
    FILLER,
    Partitions,
    RankOrder,
    StepPlan,
    assign_places,
    check_world_size,
    compute_flops,
    plan_steps,
    summarize_steps,
)

EIGHT = [9, 1, 5, 7, 3, 8, 2, 6]


def planned(
    count: int,
    *,
    batch_sizes: list[tuple[int, int]] | None = None,
    epochs: list[int] | None = None,
    steps: int | None = None,
    **values: Any,
) -> StepPlan:
    options = validate_options(Partitions, values, "partitions")
    return plan_steps(options, np.array(epochs or [0, count]), batch_sizes=batch_sizes or [], steps=steps)


def dealt(trained: list[int], **options: Any) -> RankOrder:
    plan = planned(len(trained), **options)
    return assign_places(plan, 0, len(plan.step_offsets) - 1, np.array(trained, dtype=np.int64).take)


def listed(ranges: Sequence[range]) -> list[int]:
    return [position for one in ranges for position in one]


def loads_of(found: RankOrder, trained: list[int]) -> list[int]:
    return [trained[place] if place != FILLER else 0 for place in found.order.tolist()]


def steps_of(found: RankOrder) -> list[list[int]]:
    return [step.tolist() for step in np.split(found.order, found.step_offsets[1:-1])]


def test_eight_are_dealt_as_specified_in_order_or_in_windows() -> None:
    found = dealt(EIGHT, batch_sizes=[(0, 8)])
    loads = np.array(loads_of(found, EIGHT))

    assert loads.tolist() == [9, 8, 6, 7, 1, 2, 5, 3]
    assert [int(loads[r::2].sum()) for r in range(2)] == [21, 20]
    assert [int(loads[r::4].sum()) for r in range(4)] == [10, 10, 11, 10]

    assert dealt(EIGHT, batch_sizes=[(0, 4)], balance="none").order.tolist() == list(range(8))
    assert steps_of(dealt([1] * 4, batch_sizes=[(0, 4)]))[0] == [0, 1, 2, 3]

    found = dealt(EIGHT * 2, balance_ranks=8)
    assert found.step_offsets.tolist() == [0, 8, 16]
    assert loads_of(found, EIGHT * 2) == [9, 8, 6, 7, 1, 2, 5, 3, 3, 9, 8, 6, 7, 1, 2, 5]


@pytest.mark.parametrize("epochs", [None, [0, 8, 16]], ids=["in one epoch", "counted through all epochs"])
def test_second_step_is_rotated_right_by_one(epochs: list[int] | None) -> None:
    found = dealt(EIGHT * 2, batch_sizes=[(0, 8)], epochs=epochs)
    assert loads_of(found, EIGHT * 2)[8:] == [3, 9, 8, 6, 7, 1, 2, 5]


def test_skewed_loads_are_near_even_for_every_rank() -> None:
    trained = np.random.default_rng(0).lognormal(7, 1, 256 * 20).astype(np.int64).tolist()
    found = dealt(trained, batch_sizes=[(0, 256)])
    loads = np.array(loads_of(found, trained)).reshape(20, 256)

    for world_size in (2, 4, 8, 16):
        per_rank = loads.reshape(20, -1, world_size).sum(axis=1)
        assert ((per_rank.max(axis=1) - per_rank.min(axis=1)) / per_rank.mean(axis=1)).mean() < 0.05


TWO_EPOCHS: dict[str, Any] = {"batch_sizes": [(0, 4)], "epochs": [0, 5, 10], "balance": "none"}


@pytest.mark.parametrize(
    ("options", "steps", "dropped", "not_scheduled"),
    [
        ({}, [[0, 1, 2, 3], [4, -1, -1, -1], [5, 6, 7, 8], [9, -1, -1, -1]], [], []),
        ({"remainder": "drop"}, [[0, 1, 2, 3], [5, 6, 7, 8]], [4, 9], []),
        ({"remainder": "carry"}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, -1, -1]], [], []),
        ({"steps": 3}, [[0, 1, 2, 3], [4, -1, -1, -1], [5, 6, 7, 8]], [], [9]),
    ],
    ids=["pad fills each last step", "drop leaves it out", "carry takes it into the next epoch", "steps end the order"],
)
def test_remainder_of_an_epoch(
    options: dict[str, Any], steps: list[list[int]], dropped: list[int], not_scheduled: list[int]
) -> None:
    plan = planned(10, **TWO_EPOCHS, **options)
    assert steps_of(dealt([1] * 10, **TWO_EPOCHS, **options)) == steps
    assert (listed(plan.dropped), listed(plan.not_scheduled)) == (dropped, not_scheduled)


def test_batch_schedule_sets_the_length_of_each_step_and_nothing_is_dealt_to_none() -> None:
    found = dealt([1] * 20, batch_sizes=[(0, 2), (2, 6)], balance="none", world_size=2)
    assert found.step_offsets.tolist() == [0, 2, 4, 10, 16, 22]

    found = dealt([], batch_sizes=[(0, 4)])
    assert found.order.tolist() == []
    assert found.step_offsets.tolist() == [0]


@pytest.mark.parametrize(("remainder", "length"), [("pad", 12), ("carry", 12), ("drop", 8)])
def test_remainder_without_a_batch_goes_to_the_world_size(remainder: str, length: int) -> None:
    assert len(dealt([1] * 10, world_size=4, remainder=remainder).order) == length


@pytest.mark.slow
@given(
    trained=st.lists(st.integers(0, 50), max_size=80),
    batches=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    options=st.fixed_dictionaries(
        {
            "world_size": st.sampled_from((1, 2, 3)),
            "remainder": st.sampled_from(("pad", "drop", "carry")),
            "balance": st.sampled_from(("trained_tokens", "none")),
            "steps": st.none() | st.integers(1, 12),
        }
    ),
    cut=st.floats(0, 1),
)
def test_deal_keeps_every_sequence_in_its_step_for_every_rank(
    trained: list[int], batches: list[int], options: dict[str, Any], cut: float
) -> None:
    options = options | {"batch_sizes": [(3 * i, 6 * size) for i, size in enumerate(batches)]}
    options |= {"epochs": [0, int(cut * len(trained)), len(trained)]}
    found, laid = dealt(trained, **options), dealt(trained, **options | {"balance": "none"})
    shown = found.order[found.order != FILLER].tolist()
    plan = planned(len(trained), **options)
    count = len(plan.step_offsets) - 1
    loads = np.array(trained, dtype=np.int64)
    halves = [assign_places(plan, *steps, loads.take) for steps in ((0, count // 2), (count // 2, count))]

    assert sorted([*shown, *listed(plan.dropped), *listed(plan.not_scheduled)]) == list(range(len(trained)))
    assert np.array_equal(np.concatenate([half.order for half in halves]), found.order)
    assert [sorted(step) for step in steps_of(found)] == [sorted(step) for step in steps_of(laid)]
    assert options["steps"] is None or len(found.step_offsets) - 1 <= options["steps"]
    assert options["remainder"] != "drop" or FILLER not in found.order


@pytest.mark.slow
@given(trained=st.lists(st.integers(0, 50), min_size=1, max_size=60))
def test_the_dealt_order_knows_no_world_size(trained: list[int]) -> None:
    orders = [dealt(trained, batch_sizes=[(0, 8)], world_size=w).order.tolist() for w in (1, 2, 8)]
    assert orders[0] == orders[1] == orders[2]


def test_world_size_divides_every_batch_size_and_flops_linear_needs_flops() -> None:
    check_world_size(8, [(0, 256), (5, 512)])
    check_world_size(5, [])
    with pytest.raises(ConfigError, match=r"3 does not divide batch_size 256 or 512; .* choose 2 or 4"):
        check_world_size(3, [(0, 256), (5, 512)])
    with pytest.raises(ConfigError, match="choose 2 or 4"):
        dealt([1], batch_sizes=[(0, 4)], world_size=100)

    assert validate_options(Partitions, {"balance": "flops", "flops_linear": 24_576}, "p").flops_linear == 24_576
    with pytest.raises(ConfigError, match="flops_linear is set, but balance is none"):
        validate_options(Partitions, {"balance": "none", "flops_linear": 24_576}, "partitions")


@given(
    trained=st.lists(st.integers(0, 50), max_size=60),
    world_size=st.sampled_from((1, 2, 3)),
    batch_sizes=st.sampled_from(([(0, 6)], [(0, 6), (2, 12)], [])),
)
def test_step_facts_of_all_ranks_add_up(
    trained: list[int], world_size: int, batch_sizes: list[tuple[int, int]]
) -> None:
    found = dealt(trained, batch_sizes=batch_sizes, world_size=world_size, balance_ranks=4)
    # Of fillers, which must not count, these are the values of some sequence.
    of_places = np.append(trained, 99).astype(np.int64)[found.order]
    tokens, count = np.array(trained, dtype=np.int64) + 5, len(trained)
    of_sequences = {
        "tokens": of_places + 5,
        "trained_tokens": of_places,
        "segments": np.full(len(of_places), 3),
        "flops": (of_places + 5) ** 2,
        "longest_segment": of_places + 5,
    }
    facts = [summarize_steps(found, rank, world_size, of_sequences) for rank in range(world_size)]
    fillers = int(np.count_nonzero(found.order == FILLER))

    assert sum(int(f["sequences"].sum()) for f in facts) == len(found.order)
    assert sum(int(f["fillers"].sum()) for f in facts) == fillers
    assert sum(int(f["segments"].sum()) for f in facts) == 3 * count
    assert sum(int(f["tokens"].sum()) for f in facts) == int(tokens.sum())
    assert sum(int(f["flops"].sum()) for f in facts) == int((tokens * tokens).sum())
    assert np.array_equal(sum(f["trained_tokens"] for f in facts), facts[0]["step_trained_tokens"])
    assert max((int(f["longest_segment"].max(initial=0)) for f in facts), default=0) == tokens.max(initial=0)
    assert len({int(f["sequences"].sum()) for f in facts}) == 1


def test_step_facts_count_a_filler_once_and_flops_by_span() -> None:
    found, ones = dealt([7], batch_sizes=[(0, 2)]), np.array([1, 1])
    counts = {"tokens": ones * 9, "trained_tokens": ones * 7, "longest_segment": ones * 9}
    facts = summarize_steps(found, 1, 2, {"segments": ones, "flops": ones * 5} | counts)
    own = ("fillers", "tokens", "trained_tokens", "flops", "longest_segment", "step_trained_tokens")
    assert [facts[name].tolist() for name in own] == [[1], [0], [0], [0], [0], [7]]

    found = compute_flops(np.array([4, 4, 8, 262_144], np.int32), np.array([0, 2, 3, 3, 4]), 10)
    assert found.tolist() == [112, 144, 0, 262_144 * 262_154]


@pytest.mark.parametrize("values", [{"world_size": 0}, {"world_size": True}, {"remainder": "cut"}, {"balance": True}])
def test_partition_options_of_another_kind_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="partitions"):
        dealt([1], **values)
