"""Mixing: the specification's vectors; shares are kept at every block's end; passes are permutations."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.config import validate_options
from rowmill.core.errors import ConfigError
from rowmill.packing.mixture import (
    SampleOrder,
    SampleSchedule,
    compute_wanted_shares,
    find_step_start,
    measure_share_error,
    schedule_sequences,
)
from rowmill.packing.options import Mixture

ABC = {"a": 0.5, "b": 0.3, "c": 0.2}
FIVE = {"a": 5, "b": 5, "c": 5}


def mixture(**values: Any) -> Mixture:
    return validate_options(Mixture, values, "mixture")


def scheduled(sizes: dict[str, int], *, seed: int = 0, **values: Any) -> SampleSchedule:
    return schedule_sequences(mixture(**values), sizes, seed)


def mixed(sizes: dict[str, int], *, seed: int = 0, **values: Any) -> SampleOrder:
    schedule = scheduled(sizes, seed=seed, **values)
    return schedule.take(0, schedule.length)


def measure(schedule: SampleSchedule, order: SampleOrder) -> float:
    return measure_share_error(schedule, schedule.count_datasets(0, order.datasets)[1])


def letters(order: SampleOrder) -> str:
    return "".join("abcd"[d] for d in order.datasets.tolist())


def block_counts(weights: dict[str, object], size: int, blocks: int, **values: Any) -> list[list[int]]:
    order = mixed(
        dict.fromkeys(weights, 100_000),
        train_weights=weights,
        mixture_block_size=size,
        batch_size=size,
        steps=blocks,
        **values,
    )
    rows = order.datasets.reshape(blocks, size)
    return [np.bincount(row, minlength=len(weights)).tolist() for row in rows]


def one_pass(size: int, **values: Any) -> list[int]:
    return mixed({"a": size}, **values).items.tolist()


# --- counts per block


def test_thirds_carry_their_fractions_from_block_to_block() -> None:
    thirds: dict[str, object] = {"a": 1, "b": 1, "c": 1}

    assert block_counts(thirds, 10, 4) == [[4, 3, 3], [3, 4, 3], [3, 3, 4], [4, 3, 3]]
    assert block_counts(thirds, 10, 4, block_rounding="fixed") == [[4, 3, 3]] * 4


def test_fixed_blocks_round_by_largest_remainder_not_as_levanter_does() -> None:
    """Levanter rounds each share down and gives the rest to the largest: 4 and 16, says the page for its users."""
    assert block_counts({"a": 0.123, "b": 0.397}, 20, 3, block_rounding="fixed") == [[5, 15]] * 3
    page = Path(__file__).resolve().parents[2] / "docs/coming-from/levanter.md"
    assert "are 4 and 16 sequences there, 5 and 15 here" in page.read_text(encoding="utf-8")


def test_twenty_nine_hundredths_of_a_hundred_are_29() -> None:
    assert block_counts({"a": 0.29, "b": 0.71}, 100, 2) == [[29, 71]] * 2


def test_a_rare_dataset_gets_a_place_when_it_is_due() -> None:
    assert [row[0] for row in block_counts({"a": 0.0002, "b": 0.9998}, 2048, 6)] == [0, 0, 1, 0, 1, 0]


def test_a_rare_dataset_without_a_place_in_fixed_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 5000 is needed"):
        block_counts({"a": 0.0002, "b": 0.9998}, 2048, 1, block_rounding="fixed")


def test_three_rare_datasets_take_turns() -> None:
    weights: dict[str, object] = {"a": 0.05, "b": 0.05, "c": 0.05, "d": 0.85}

    assert block_counts(weights, 16, 3) == [[1, 1, 0, 14], [1, 0, 1, 14], [1, 1, 1, 13]]


def test_weights_are_normalised_decimals() -> None:
    assert block_counts({"a": "3", "b": 7.0}, 10, 1) == [[3, 7]]


@pytest.mark.slow
@given(
    weights=st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any),
    size=st.integers(1, 40),
    blocks=st.integers(1, 12),
)
def test_every_block_ends_less_than_one_sequence_from_each_share(weights: list[int], size: int, blocks: int) -> None:
    counts = block_counts({str(d): w for d, w in enumerate(weights)}, size, blocks)
    for b, given_so_far in enumerate(np.cumsum(counts, axis=0).tolist(), start=1):
        off = [Fraction(w * b * size, sum(weights)) - c for w, c in zip(weights, given_so_far, strict=True)]

        assert all(abs(o) < 1 for o in off)


# --- places and stops


def test_blocks_are_permuted_each_by_its_own_key() -> None:
    order = mixed(dict.fromkeys(ABC, 100), train_weights=ABC, mixture_block_size=10, batch_size=10, steps=2)

    assert letters(order) == "abaabaccabbaacbaabac"


def test_first_exhausted_ends_with_the_first_streams_last_item() -> None:
    order = mixed(
        FIVE,
        train_weights=ABC,
        mixture_block_size=10,
        randomize_blocks=False,
        stop_strategy="first_exhausted",
    )

    assert letters(order) == "aaaaa"


def test_all_exhausted_ends_with_the_last_streams_last_item() -> None:
    order = mixed(FIVE, train_weights=ABC, mixture_block_size=10, randomize_blocks=False, stop_strategy="all_exhausted")

    assert len(order.items) == 29
    assert letters(order)[10] == "a"
    assert letters(order)[28] == "c"
    assert order.passes[[0, 10, 28]].tolist() == [0, 1, 0]


def test_all_exhausted_before_a_later_stage_ends_there() -> None:
    order = mixed(
        {"a": 5, "b": 5},
        train_weights=[[0, {"a": 0.5, "b": 0.5}], [20, {"a": 1}]],
        batch_size=1,
        mixture_block_size=10,
        stop_strategy="all_exhausted",
    )

    assert len(order.items) == 10


def test_all_exhausted_with_a_stream_that_cannot_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="b has weight 0 from position 20 on"):
        mixed(
            {"a": 5, "b": 15},
            train_weights=[[0, {"a": 0.5, "b": 0.5}], [20, {"a": 1}]],
            batch_size=1,
            mixture_block_size=10,
            stop_strategy="all_exhausted",
        )


def test_first_exhausted_ignores_a_stream_that_cannot_end() -> None:
    order = mixed(
        {"a": 40, "b": 15},
        train_weights=[[0, {"a": 0.5, "b": 0.5}], [20, {"a": 1}]],
        batch_size=1,
        mixture_block_size=10,
        stop_strategy="first_exhausted",
    )

    assert Counter(letters(order)) == {"a": 40, "b": 10}


def test_a_stage_counts_from_its_own_start() -> None:
    order = mixed(
        {"a": 100, "b": 100},
        train_weights=[[0, {"a": 1}], [3, {"a": 0.5, "b": 0.5}]],
        batch_size=5,
        steps=6,
        mixture_block_size=10,
        randomize_blocks=False,
    )

    assert letters(order) == "a" * 20 + "b" * 5 + "aaabb"


def test_restart_begins_a_used_up_dataset_again_in_another_order() -> None:
    order = mixed({"a": 50}, train_weights={"a": 1}, batch_size=10, steps=12)
    passes = order.items[:50], order.items[50:100], order.items[100:]

    assert order.passes.tolist() == [0] * 50 + [1] * 50 + [2] * 20
    assert sorted(passes[0].tolist()) == sorted(passes[1].tolist()) == list(range(50))
    assert passes[0].tolist() != passes[1].tolist()


def test_streams_of_several_epochs_end_after_all_of_them() -> None:
    order = mixed({"a": 4, "b": 100}, train_weights={"a": 1, "b": 1}, epochs=3, stop_strategy="first_exhausted")

    assert Counter(letters(order))["a"] == 12
    assert letters(order)[-1] == "a"


def test_steps_end_before_a_stream_does() -> None:
    order = mixed(
        {"a": 100, "b": 100},
        train_weights={"a": 1, "b": 1},
        batch_size=7,
        steps=3,
        stop_strategy="all_exhausted",
    )

    assert len(order.items) == 21


def test_a_dataset_of_weight_zero_is_never_shown() -> None:
    order = mixed({"a": 5, "b": 5}, train_weights={"a": 1, "b": 0}, stop_strategy="all_exhausted")

    assert letters(order) == "aaaaa"


def test_adding_a_dataset_reshuffles_no_other_one() -> None:
    alone = mixed({"b": 40}, train_weights={"b": 1}, batch_size=40, steps=2)
    joined = mixed({"a": 9, "b": 40}, train_weights={"a": 1, "b": 1}, batch_size=40, steps=4)

    assert joined.items[joined.datasets == 1][:80].tolist() == alone.items.tolist()


# --- without weights


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    epochs=st.integers(1, 3),
    block=st.integers(1, 50),
)
def test_without_weights_each_epoch_shows_every_sequence_once(sizes: list[int], epochs: int, block: int) -> None:
    named = {"abcd"[d]: size for d, size in enumerate(sizes)}
    order = mixed(named, epochs=epochs, mixture_block_size=block)
    epoch_offsets = scheduled(named, epochs=epochs, mixture_block_size=block).epoch_offsets
    everything = sorted((d, i) for d, size in enumerate(sizes) for i in range(size))

    assert epoch_offsets.tolist() == [e * sum(sizes) for e in range(epochs + 1)]
    for e, (start, end) in enumerate(pairwise(epoch_offsets.tolist())):
        shown = zip(order.datasets[start:end].tolist(), order.items[start:end].tolist(), strict=True)
        assert sorted(shown) == everything
        assert set(order.passes[start:end].tolist()) <= {e}


def test_without_weights_only_the_epochs_that_steps_need_are_laid_out() -> None:
    order = scheduled({"a": 25}, epochs=1000, batch_size=10, steps=5)

    assert order.epoch_offsets.tolist() == [0, 25, 50, 75]


# --- shuffles


def test_eras_are_permuted_each_inside() -> None:
    assert one_pass(20, shuffle=5)[:15] == [1, 0, 3, 4, 2, 8, 9, 5, 6, 7, 13, 14, 11, 10, 12]


def test_shuffle_of_ten_is_the_specified_order() -> None:
    assert one_pass(10) == [8, 1, 9, 5, 7, 6, 4, 3, 0, 2]
    assert one_pass(10, permutation_type="linear") == [0, 7, 4, 1, 8, 5, 2, 9, 6, 3]


def test_no_shuffle_is_plan_order() -> None:
    assert one_pass(10, shuffle=False) == list(range(10))


@pytest.mark.slow
@given(
    size=st.integers(1, 200),
    shuffle=st.one_of(
        st.booleans(),
        st.integers(2, 60),
        st.builds(lambda b, w: {"io_block_size": b, "window_blocks": w}, st.integers(1, 40), st.integers(1, 9)),
    ),
    kind=st.sampled_from(("feistel", "linear")),
    reshuffle=st.booleans(),
)
def test_every_pass_is_a_permutation(size: int, shuffle: object, kind: str, reshuffle: bool) -> None:
    order = mixed({"a": size}, epochs=3, shuffle=shuffle, permutation_type=kind, reshuffle_each_epoch=reshuffle)
    passes = order.items.reshape(3, size)

    assert all(np.array_equal(np.sort(one), np.arange(size)) for one in passes)
    assert reshuffle or np.array_equal(passes[0], passes[2])


def test_era_shuffle_moves_no_sequence_out_of_its_era() -> None:
    assert [i // 7 for i in one_pass(40, shuffle=7)] == [i // 7 for i in range(40)]


def test_block_shuffle_keeps_a_window_to_its_blocks_and_the_partial_block_last() -> None:
    order = one_pass(105, shuffle={"io_block_size": 10, "window_blocks": 2})
    windows = [order[start : start + 20] for start in range(0, 100, 20)]

    assert all(len({i // 10 for i in window}) == 2 for window in windows)
    assert sorted(order[100:]) == [100, 101, 102, 103, 104]
    assert order[:20] != sorted(order[:20])


# --- slices


def test_max_train_batches_keeps_the_start_of_the_first_pass() -> None:
    whole = one_pass(50)
    order = mixed({"a": 50}, batch_size=[[0, 4], [3, 10]], max_train_batches={"a": 3}, epochs=2)

    assert order.items[:12].tolist() == whole[:12]
    assert sorted(order.items[12:].tolist()) == sorted(whole[:12])
    assert order.items[12:].tolist() != whole[:12]


def test_slice_of_everything_changes_nothing() -> None:
    sliced = mixed({"a": 12}, batch_size=4, max_train_batches={"a": 3}, epochs=3)

    assert sliced.items.tolist() == mixed({"a": 12}, batch_size=4, epochs=3).items.tolist()


def test_max_train_batches_beyond_the_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower it to 12 or less"):
        mixed({"a": 50}, batch_size=4, max_train_batches={"a": 13})


def test_budget_of_a_half_keeps_three_of_seven() -> None:
    order = mixed({"a": 7}, target_budget=2, experiment_budget=1)

    assert order.items.tolist() == one_pass(7)[:3]


def test_budget_that_empties_a_weighted_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="dataset b has a weight"):
        mixed({"a": 100, "b": 3}, target_budget=10, experiment_budget=1)


def test_weight_on_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="dataset b has a weight"):
        mixed({"a": 100, "b": 0}, train_weights={"a": 1, "b": 1}, stop_strategy="first_exhausted")


# --- options


def test_step_starts_follow_the_batch_schedule() -> None:
    assert find_step_start([(0, 10), (5, 20)], 10) == 150
    assert find_step_start([(0, 10), (10, 20)], 10) == 100
    assert find_step_start([(0, 10), (5, 20)], 3) == 30
    assert find_step_start([(0, 10)], 0) == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 5}, "steps without batch_size"),
        ({"max_train_batches": {"a": 1}}, "max_train_batches without batch_size"),
        ({"train_weights": [[0, {"a": 1}], [2, {"a": 2}]]}, "stages without batch_size"),
        ({"train_weights": {"a": 1}}, "restart without steps"),
        ({"train_weights": {"a": 1}, "batch_size": 1, "steps": 1, "epochs": 2}, "delete epochs"),
        ({"train_weights": {"a": 0, "b": 0.0}}, "are all 0"),
        ({"train_weights": {"a": -1}}, "not a weight"),
        ({"train_weights": {"a": "1/3"}}, "not a weight"),
        ({"train_weights": [[1, {"a": 1}]]}, "start at 0"),
        ({"train_weights": []}, "start at 0"),
        ({"batch_size": [[0, 4], [0, 8]]}, "ascend"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"stop_strategy": "restart"}, "without train_weights"),
        ({"block_rounding": "fixed"}, "without train_weights"),
        ({"target_budget": 5}, "set both or neither"),
        ({"target_budget": 5, "experiment_budget": 6}, "swap them"),
        (
            {"target_budget": 5, "experiment_budget": 1, "batch_size": 1, "max_train_batches": {"a": 1}},
            "delete one",
        ),
        (
            {"target_budget": 5, "experiment_budget": 1, "num_validation_sequences": {"a": 5}},
            "delete one",
        ),
        ({"shuffle": 1}, "shuffle"),
        ({"shuffle": {"io_block": 1}}, "io_block"),
        ({"permutation_type": "random"}, "permutation_type"),
    ],
)
def test_options_that_cannot_stand_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixture(**values)


@pytest.mark.parametrize("option", ["train_weights", "max_train_batches"])
def test_unknown_dataset_names_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="'z' is not a dataset; choose a"):
        mixed({"a": 5}, seed=0, **{"batch_size": 1, "steps": 1, option: {"z": 1}})


def test_mixture_survives_its_own_dump() -> None:
    chosen = mixture(
        batch_size=[[0, 4]],
        steps=3,
        train_weights=[[0, {"a": 0.1}]],
        shuffle={"io_block_size": 4, "window_blocks": 2},
    )

    assert Mixture.model_validate(chosen.model_dump()) == chosen


# --- long mixtures


def apportioned(weights: list[Fraction], size: int, length: int) -> list[list[int]]:
    """Count what each block gives each dataset, as the specification words it, in fractions throughout."""
    given, rows = [0] * len(weights), []
    for end in range(size, length + 1, size):
        floors = [max(0, int(weight * end) - had) for weight, had in zip(weights, given, strict=True)]
        row = floors.copy()
        for _ in range(size - sum(floors)):
            had = [a + b for a, b in zip(given, row, strict=True)]
            under = [d for d, weight in enumerate(weights) if had[d] < -(-weight * end // 1)]
            row[min(under, key=lambda d: ((had[d] + 1) / weights[d], d))] += 1
        given = [a + b for a, b in zip(given, row, strict=True)]
        rows.append(row)
    return rows


@pytest.mark.campaign
def test_a_hundred_thousand_blocks_of_staged_weights_are_apportioned_exactly() -> None:
    size, half = 10, 50_000
    staged = [[0, {"a": 0.37, "b": 0.62, "c": 0.01}], [half, {"a": 1, "b": 2, "c": 4}]]
    order = mixed(
        {"a": 40_000, "b": 700_000, "c": 9},
        train_weights=staged,
        mixture_block_size=size,
        batch_size=size,
        steps=2 * half,
    )
    rows = order.datasets.reshape(2 * half, size)
    counts = np.stack([(rows == d).sum(axis=1) for d in range(3)], axis=1)

    first = apportioned([Fraction(37, 100), Fraction(62, 100), Fraction(1, 100)], size, half * size)
    second = apportioned([Fraction(1, 7), Fraction(2, 7), Fraction(4, 7)], size, half * size)
    assert counts.tolist() == first + second
    for d, items in enumerate((40_000, 700_000, 9)):
        shown = order.items[order.datasets == d]
        # Pass after pass, each a permutation; the last may be cut short.
        whole = shown[: len(shown) // items * items].reshape(-1, items)
        assert (np.sort(whole, axis=1) == np.arange(items)).all()


def test_share_is_measured_from_the_order_that_was_made() -> None:
    weights = {"a": 0.5, "b": 0.5}
    options: dict[str, Any] = {"train_weights": weights, "mixture_block_size": 10, "batch_size": 10, "steps": 4}
    sizes = {"a": 100, "b": 100}
    schedule = scheduled(sizes, **options)
    made = schedule.take(0, schedule.length)
    spoiled = made.datasets.copy()
    spoiled[3:8] = 0

    assert measure(schedule, made) == 0
    assert measure(schedule, replace(made, datasets=spoiled)) > 1


@pytest.mark.parametrize("rounding", ["carry", "fixed"])
def test_share_of_later_stages_and_of_fixed_blocks_is_measured_too(rounding: str) -> None:
    options: dict[str, Any] = {
        "train_weights": [[0, {"a": 1, "b": 1, "c": 1}], [7, {"a": 1, "c": 5}]],
        "mixture_block_size": 10,
        "batch_size": 10,
        "steps": 40,
        "block_rounding": rounding,
    }
    sizes = {"a": 1000, "b": 1000, "c": 1000}
    schedule = scheduled(sizes, **options)
    made = schedule.take(0, schedule.length)
    spoiled = made.datasets.copy()
    spoiled[200:210] = 1

    assert 0 < measure(schedule, made) < 1
    assert measure(schedule, replace(made, datasets=spoiled)) > 1


def test_block_that_the_orders_end_cuts_short_promises_nothing() -> None:
    options: dict[str, Any] = {
        "train_weights": {"a": 0.5, "b": 0.5},
        "mixture_block_size": 100,
        "stop_strategy": "first_exhausted",
    }
    sizes = {"a": 3, "b": 50}

    assert measure(scheduled(sizes, **options), mixed(sizes, **options)) == 0


def test_wanted_shares_of_stages_are_weighed_by_their_lengths() -> None:
    options: dict[str, Any] = {"train_weights": [[0, {"a": 1}], [1, {"b": 1}]], "batch_size": 10, "steps": 4}
    sizes = {"a": 5, "b": 5}

    assert compute_wanted_shares(scheduled(sizes, **options)) == [0.25, 0.75]


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    shuffle=st.sampled_from((True, False, 7, {"io_block_size": 3, "window_blocks": 2})),
    reshuffle=st.booleans(),
    budget=st.none() | st.integers(5, 9),
    epochs=st.integers(1, 4),
    block=st.integers(1, 30),
    weighted=st.booleans(),
    cuts=st.lists(st.floats(0, 1), max_size=4),
)
def test_stretches_of_an_order_join_to_the_whole(
    sizes: list[int],
    shuffle: Any,
    reshuffle: bool,
    budget: int | None,
    epochs: int,
    block: int,
    weighted: bool,
    cuts: list[float],
) -> None:
    """Whatever the blocks of the mixture, the passes and the shuffle are that a stretch begins or ends in."""
    named = {"abc"[d]: size for d, size in enumerate(sizes)}
    options: dict[str, Any] = {"epochs": epochs, "shuffle": shuffle, "reshuffle_each_epoch": reshuffle}
    options |= {"mixture_block_size": block}
    if budget is not None and min(sizes) > 1:
        options |= {"target_budget": 10, "experiment_budget": budget}
    if weighted:
        options |= {"train_weights": dict.fromkeys(named, 1), "stop_strategy": "all_exhausted"}
    schedule = scheduled(named, **options)
    whole = schedule.take(0, schedule.length)
    places = sorted([0, schedule.length, *(int(cut * schedule.length) for cut in cuts)])

    stretches = [schedule.take(begin, end) for begin, end in pairwise(places)]

    for name in ("datasets", "items", "passes"):
        joined = np.concatenate([getattr(one, name) for one in stretches])
        assert np.array_equal(joined, getattr(whole, name))
    with pytest.raises(IndexError, match="are not all inside"):
        schedule.take(0, schedule.length + 1)
