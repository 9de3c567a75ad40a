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


def block_counts(weights: dict[str, Any], size: int, blocks: int, **values: Any) -> list[list[int]]:
    sizes = dict.fromkeys(weights, 100_000)
    order = mixed(sizes, train_weights=weights, mixture_block_size=size, batch_size=size, steps=blocks, **values)
    rows = order.datasets.reshape(blocks, size)
    return [np.bincount(row, minlength=len(weights)).tolist() for row in rows]


def one_pass(size: int, **values: Any) -> list[int]:
    return mixed({"a": size}, **values).items.tolist()


# --- counts per block


THIRDS = {"a": 1, "b": 1, "c": 1}
THREE_RARE = {"a": 0.05, "b": 0.05, "c": 0.05, "d": 0.85}


@pytest.mark.parametrize(
    ("weights", "size", "rounding", "expected"),
    [
        (THIRDS, 10, "carry", [[4, 3, 3], [3, 4, 3], [3, 3, 4], [4, 3, 3]]),
        (THIRDS, 10, "fixed", [[4, 3, 3]] * 4),
        ({"a": 0.123, "b": 0.397}, 20, "fixed", [[5, 15]] * 3),
        ({"a": 0.29, "b": 0.71}, 100, "carry", [[29, 71]] * 2),
        ({"a": 0.0002, "b": 0.9998}, 2048, "carry", [[rare, 2048 - rare] for rare in (0, 0, 1, 0, 1, 0)]),
        (THREE_RARE, 16, "carry", [[1, 1, 0, 14], [1, 0, 1, 14], [1, 1, 1, 13]]),
        ({"a": "3", "b": 7.0}, 10, "carry", [[3, 7]]),
    ],
    ids=[
        "thirds carry their fractions from block to block",
        "fixed blocks do not",
        "fixed blocks round by largest remainder",
        "29 hundredths of a hundred are 29",
        "a rare dataset gets a place when it is due",
        "three rare datasets take turns",
        "weights are normalised decimals",
    ],
)
def test_counts_of_blocks(weights: dict[str, Any], size: int, rounding: str, expected: list[list[int]]) -> None:
    assert block_counts(weights, size, len(expected), block_rounding=rounding) == expected


def test_page_for_users_of_levanter_has_the_counts_of_fixed_blocks() -> None:
    """Levanter rounds each share down and gives the rest to the largest: 4 and 16."""
    page = Path(__file__).resolve().parents[2] / "docs/coming-from/levanter.md"
    assert "are 4 and 16 sequences there, 5 and 15 here" in page.read_text(encoding="utf-8")


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


HUNDREDS = {"a": 100, "b": 100}


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        (
            dict.fromkeys(ABC, 100),
            {"train_weights": ABC, "mixture_block_size": 10, "batch_size": 10, "steps": 2},
            "abaabaccabbaacbaabac",
        ),
        (
            FIVE,
            {
                "train_weights": ABC, "mixture_block_size": 10, "randomize_blocks": False,
                "stop_strategy": "first_exhausted",
            },
            "aaaaa",
        ),
        (
            HUNDREDS,
            {
                "train_weights": [[0, {"a": 1}], [3, {"a": 0.5, "b": 0.5}]], "batch_size": 5, "steps": 6,
                "mixture_block_size": 10, "randomize_blocks": False,
            },
            "a" * 20 + "b" * 5 + "aaabb",
        ),
        ({"a": 5, "b": 5}, {"train_weights": {"a": 1, "b": 0}, "stop_strategy": "all_exhausted"}, "aaaaa"),
    ],
    ids=[
        "blocks are permuted each by its own key",
        "first_exhausted ends with the first stream's last item",
        "a stage counts from its own start",
        "a dataset of weight zero is never shown",
    ],
)  # fmt: skip
def test_order_of_datasets(sizes: dict[str, int], options: dict[str, Any], expected: str) -> None:
    assert letters(mixed(sizes, **options)) == expected


def test_all_exhausted_ends_with_the_last_streams_last_item_or_is_refused_where_none_can_end() -> None:
    order = mixed(FIVE, train_weights=ABC, mixture_block_size=10, randomize_blocks=False, stop_strategy="all_exhausted")
    assert (len(order.items), letters(order)[10], letters(order)[28]) == (29, "a", "c")
    assert order.passes[[0, 10, 28]].tolist() == [0, 1, 0]
    assert len(mixed({"a": 5, "b": 5}, stop_strategy="all_exhausted", **ENDING).items) == 10

    with pytest.raises(ConfigError, match="b has weight 0 from position 20 on"):
        mixed({"a": 5, "b": 15}, stop_strategy="all_exhausted", **ENDING)
    order = mixed({"a": 40, "b": 15}, stop_strategy="first_exhausted", **ENDING)
    assert Counter(letters(order)) == {"a": 40, "b": 10}


ENDING: dict[str, Any] = {
    "train_weights": [[0, {"a": 0.5, "b": 0.5}], [20, {"a": 1}]], "batch_size": 1, "mixture_block_size": 10,
}  # fmt: skip
"""A stage of halves, then one of which `b` is no part."""


def test_used_up_datasets_restart_in_another_order_until_epochs_or_steps_end() -> None:
    order = mixed({"a": 50}, train_weights={"a": 1}, batch_size=10, steps=12)
    first, second = order.items[:50].tolist(), order.items[50:100].tolist()
    assert order.passes.tolist() == [0] * 50 + [1] * 50 + [2] * 20
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second

    order = mixed({"a": 4, "b": 100}, train_weights={"a": 1, "b": 1}, epochs=3, stop_strategy="first_exhausted")
    assert Counter(letters(order))["a"] == 12
    assert letters(order)[-1] == "a"

    options = {"batch_size": 7, "steps": 3, "stop_strategy": "all_exhausted"}
    assert len(mixed(HUNDREDS, train_weights={"a": 1, "b": 1}, **options).items) == 21
    order = scheduled({"a": 25}, epochs=1000, batch_size=10, steps=5)
    assert order.epoch_offsets.tolist() == [0, 25, 50, 75]


def test_adding_a_dataset_reshuffles_no_other_one() -> None:
    alone = mixed({"b": 40}, train_weights={"b": 1}, batch_size=40, steps=2)
    joined = mixed({"a": 9, "b": 40}, train_weights={"a": 1, "b": 1}, batch_size=40, steps=4)
    assert joined.items[joined.datasets == 1][:80].tolist() == alone.items.tolist()


# --- without weights


@pytest.mark.slow
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=4), epochs=st.integers(1, 3), block=st.integers(1, 50))
def test_without_weights_each_epoch_shows_every_sequence_once(sizes: list[int], epochs: int, block: int) -> None:
    schedule = scheduled({"abcd"[d]: size for d, size in enumerate(sizes)}, epochs=epochs, mixture_block_size=block)
    order = schedule.take(0, schedule.length)
    everything = sorted((d, i) for d, size in enumerate(sizes) for i in range(size))

    assert schedule.epoch_offsets.tolist() == [e * sum(sizes) for e in range(epochs + 1)]
    for e, (start, end) in enumerate(pairwise(schedule.epoch_offsets.tolist())):
        shown = zip(order.datasets[start:end].tolist(), order.items[start:end].tolist(), strict=True)
        assert sorted(shown) == everything
        assert set(order.passes[start:end].tolist()) <= {e}


# --- shuffles


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        (20, {"shuffle": 5}, [1, 0, 3, 4, 2, 8, 9, 5, 6, 7, 13, 14, 11, 10, 12]),
        (10, {}, [8, 1, 9, 5, 7, 6, 4, 3, 0, 2]),
        (10, {"permutation_type": "linear"}, [0, 7, 4, 1, 8, 5, 2, 9, 6, 3]),
        (10, {"shuffle": False}, list(range(10))),
    ],
    ids=["eras are permuted each inside", "as specified", "as specified of linear ones", "no shuffle is plan order"],
)
def test_shuffle_gives_this_order(size: int, options: dict[str, Any], expected: list[int]) -> None:
    assert one_pass(size, **options)[: len(expected)] == expected


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


def test_shuffle_of_eras_and_blocks_keeps_to_its_window() -> None:
    assert [i // 7 for i in one_pass(40, shuffle=7)] == [i // 7 for i in range(40)]

    order = one_pass(105, shuffle={"io_block_size": 10, "window_blocks": 2})
    windows = [order[start : start + 20] for start in range(0, 100, 20)]

    assert all(len({i // 10 for i in window}) == 2 for window in windows)
    assert sorted(order[100:]) == [100, 101, 102, 103, 104]
    assert order[:20] != sorted(order[:20])


# --- slices


def test_slices_keep_the_start_of_the_first_pass() -> None:
    first = one_pass(50)[:12]
    order = mixed({"a": 50}, batch_size=[[0, 4], [3, 10]], max_train_batches={"a": 3}, epochs=2)
    assert order.items[:12].tolist() == first
    assert sorted(order.items[12:].tolist()) == sorted(first)
    assert order.items[12:].tolist() != first

    sliced = mixed({"a": 12}, batch_size=4, max_train_batches={"a": 3}, epochs=3)
    assert sliced.items.tolist() == mixed({"a": 12}, batch_size=4, epochs=3).items.tolist()
    order = mixed({"a": 7}, target_budget=2, experiment_budget=1)
    assert order.items.tolist() == one_pass(7)[:3]


RARE_IN_FIXED: dict[str, Any] = {
    "train_weights": {"a": 0.0002, "b": 0.9998}, "block_rounding": "fixed", "mixture_block_size": 2048,
    "batch_size": 2048, "steps": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"a": 100_000, "b": 100_000}, RARE_IN_FIXED, "at least 5000 is needed"),
        ({"a": 50}, {"batch_size": 4, "max_train_batches": {"a": 13}}, "lower it to 12 or less"),
        ({"a": 100, "b": 3}, {"target_budget": 10, "experiment_budget": 1}, "dataset b has a weight"),
        (
            {"a": 100, "b": 0},
            {"train_weights": {"a": 1, "b": 1}, "stop_strategy": "first_exhausted"},
            "dataset b has a weight",
        ),
        *[
            ({"a": 5}, {"batch_size": 1, "steps": 1, option: {"z": 1}}, "'z' is not a dataset; choose a")
            for option in ("train_weights", "max_train_batches")
        ],
    ],
    ids=[
        "a rare dataset without a place in fixed blocks",
        "more batches than there are data",
        "a budget that empties a weighted dataset",
        "a weight on an empty dataset",
        "an unknown dataset with a weight",
        "an unknown dataset with batches",
    ],
)
def test_mixture_that_cannot_be_scheduled_is_refused(
    sizes: dict[str, int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        mixed(sizes, **options)


# --- options


def test_step_starts_follow_the_batch_schedule_and_options_survive_their_dump() -> None:
    assert find_step_start([(0, 10), (5, 20)], 10) == 150
    assert find_step_start([(0, 10), (10, 20)], 10) == 100
    assert find_step_start([(0, 10), (5, 20)], 3) == 30
    assert find_step_start([(0, 10)], 0) == 0

    shuffle = {"io_block_size": 4, "window_blocks": 2}
    chosen = mixture(batch_size=[[0, 4]], steps=3, train_weights=[[0, {"a": 0.1}]], shuffle=shuffle)
    assert Mixture.model_validate(chosen.model_dump()) == chosen


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
        ({"target_budget": 5, "experiment_budget": 1, "batch_size": 1, "max_train_batches": {"a": 1}}, "delete one"),
        ({"target_budget": 5, "experiment_budget": 1, "num_validation_sequences": {"a": 5}}, "delete one"),
        ({"shuffle": 1}, "shuffle"),
        ({"shuffle": {"io_block": 1}}, "io_block"),
        ({"permutation_type": "random"}, "permutation_type"),
    ],
)
def test_options_that_cannot_stand_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixture(**values)


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
    size, half, sizes = 10, 50_000, {"a": 40_000, "b": 700_000, "c": 9}
    staged = [[0, {"a": 0.37, "b": 0.62, "c": 0.01}], [half, {"a": 1, "b": 2, "c": 4}]]
    order = mixed(sizes, train_weights=staged, mixture_block_size=size, batch_size=size, steps=2 * half)
    rows = order.datasets.reshape(2 * half, size)
    counts = np.stack([(rows == d).sum(axis=1) for d in range(3)], axis=1)

    first = apportioned([Fraction(37, 100), Fraction(62, 100), Fraction(1, 100)], size, half * size)
    second = apportioned([Fraction(1, 7), Fraction(2, 7), Fraction(4, 7)], size, half * size)
    assert counts.tolist() == first + second
    for d, items in enumerate(sizes.values()):
        shown = order.items[order.datasets == d]
        # Pass after pass, each a permutation; the last may be cut short.
        whole = shown[: len(shown) // items * items].reshape(-1, items)
        assert (np.sort(whole, axis=1) == np.arange(items)).all()


def measured(sizes: dict[str, int], spoiled: slice, dataset: int, **options: Any) -> tuple[float, float]:
    """Return the error of an order's shares, and that after a stretch of it was given to one dataset."""
    schedule = scheduled(sizes, mixture_block_size=10, batch_size=10, **options)
    order = schedule.take(0, schedule.length)
    datasets = order.datasets.copy()
    datasets[spoiled] = dataset
    return measure(schedule, order), measure(schedule, replace(order, datasets=datasets))


def test_shares_are_measured_from_the_order_and_wanted_by_the_lengths_of_stages() -> None:
    right, wrong = measured(HUNDREDS, slice(3, 8), 0, train_weights={"a": 0.5, "b": 0.5}, steps=4)
    assert right == 0
    assert wrong > 1

    weights = {"a": 0.5, "b": 0.5}
    options: dict[str, Any] = {"mixture_block_size": 100, "stop_strategy": "first_exhausted", "train_weights": weights}
    sizes = {"a": 3, "b": 50}
    assert measure(scheduled(sizes, **options), mixed(sizes, **options)) == 0

    stages = [[0, {"a": 1}], [1, {"b": 1}]]
    schedule = scheduled({"a": 5, "b": 5}, train_weights=stages, batch_size=10, steps=4)
    assert compute_wanted_shares(schedule) == [0.25, 0.75]


@pytest.mark.parametrize("rounding", ["carry", "fixed"])
def test_share_of_later_stages_and_of_fixed_blocks_is_measured_too(rounding: str) -> None:
    stages = [[0, THIRDS], [7, {"a": 1, "c": 5}]]
    sizes = {"a": 1000, "b": 1000, "c": 1000}
    right, wrong = measured(sizes, slice(200, 210), 1, train_weights=stages, steps=40, block_rounding=rounding)
    assert 0 < right < 1
    assert wrong > 1


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    options=st.fixed_dictionaries(
        {
            "shuffle": st.sampled_from((True, False, 7, {"io_block_size": 3, "window_blocks": 2})),
            "reshuffle_each_epoch": st.booleans(),
            "epochs": st.integers(1, 4),
            "mixture_block_size": st.integers(1, 30),
        }
    ),
    budget=st.none() | st.integers(5, 9),
    weighted=st.booleans(),
    cuts=st.lists(st.floats(0, 1), max_size=4),
)
def test_stretches_of_an_order_join_to_the_whole(
    sizes: list[int], options: dict[str, Any], budget: int | None, weighted: bool, cuts: list[float]
) -> None:
    """Whatever the blocks of the mixture, the passes and the shuffle are that a stretch begins or ends in."""
    named = {"abc"[d]: size for d, size in enumerate(sizes)}
    if budget is not None and min(sizes) > 1:
        options = options | {"target_budget": 10, "experiment_budget": budget}
    if weighted:
        options = options | {"train_weights": dict.fromkeys(named, 1), "stop_strategy": "all_exhausted"}
    schedule = scheduled(named, **options)
    whole = schedule.take(0, schedule.length)
    places = sorted([0, schedule.length, *(int(cut * schedule.length) for cut in cuts)])

    stretches = [schedule.take(begin, end) for begin, end in pairwise(places)]

    for name in ("datasets", "items", "passes"):
        joined = np.concatenate([getattr(one, name) for one in stretches])
        assert np.array_equal(joined, getattr(whole, name))
    with pytest.raises(IndexError, match="are not all inside"):
        schedule.take(0, schedule.length + 1)
