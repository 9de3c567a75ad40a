"""Assembly: the specification's vectors, and invariants of every plan."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.arrays import Ints
from rowmill.core.permutation import make_feistel
from rowmill.kinds.tables.partition_plan import (
    DELIMITERS_PER_UNIT,
    FLUSHES,
    BudgetSampler,
    ExampleLimits,
    PlannedSplit,
    RecordOrder,
    SplitRecords,
    cut_examples,
    order_records,
    split_large_runs,
)

PAGE = (85, 80, 79, 80)
A, B = (82, 82, 82, 84, 85), (82, 82, 82)


def SHUFFLED(number: int, count: int) -> Ints:  # noqa: N802  (two orders that a test may choose)
    return make_feistel(count, number + 1)(np.arange(count))


def AS_GIVEN(number: int, count: int) -> Ints:  # noqa: N802
    return np.arange(count)


def records(*groups: Sequence[int]) -> SplitRecords:
    sizes = np.array([0, *(len(group) for group in groups)], np.int64)
    tokens = np.array([one for group in groups for one in group], np.int64)
    return SplitRecords("train", np.arange(len(tokens)), tokens, np.cumsum(sizes), np.arange(len(groups)))


def alone(lengths: Sequence[int]) -> SplitRecords:
    return records(*((one,) for one in lengths))


def examples_of(made: PlannedSplit) -> list[list[int]]:
    bounds = made.example_first_place.tolist()
    return [made.order.records[a:b].tolist() for a, b in pairwise(bounds)]


def ended(made: PlannedSplit) -> list[str]:
    return [FLUSHES[one] for one in made.flushes.tolist()]


def drawing(limits: ExampleLimits, seed: int) -> BudgetSampler:
    least, span = limits.min_budget_tokens, limits.record_room - limits.min_budget_tokens + 1
    return lambda number, group: lambda ordinal: least + (seed * 7 + number + group + 3 * ordinal) % span


def drawn(budget: int) -> BudgetSampler:
    return lambda _number, _group: lambda _ordinal: budget


# ── The vectors ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("limit", "sizes"), [(282, [282, 118]), (281, [203, 197])])
def test_tabular_page_of_four_records_gives_the_sizes_of_the_specification(limit: int, sizes: list[int]) -> None:
    of, room = alone(PAGE), ExampleLimits(limit, 36, 3)

    made = cut_examples(of, order_records(of, None, AS_GIVEN, is_series=False), room, "tabular")

    assert made.example_tokens.tolist() == sizes


@pytest.mark.parametrize(
    ("limit", "cap", "sizes"), [(524, 2, [524]), (523, 2, [277, 283]), (524, 1, [277, 283]), (524, None, [524])]
)
def test_grouped_page_of_two_groups_gives_the_sizes_of_the_specification(
    limit: int, cap: int | None, sizes: list[int]
) -> None:
    of, room = records((85, 80, 74), (80, 80, 85)), ExampleLimits(limit, 36, cap)

    made = cut_examples(of, order_records(of, None, AS_GIVEN, is_series=False), room, "grouped")

    assert made.example_tokens.tolist() == sizes


@pytest.mark.parametrize(
    ("limit", "cap", "sizes"),
    [(4096, 4, [367, 122, 283]), (35 + DELIMITERS_PER_UNIT + 330, None, [367, 122, 283]), (4096, None, [452, 283])],
)
def test_sequential_page_of_two_series_gives_the_sizes_of_the_specification(
    limit: int, cap: int | None, sizes: list[int]
) -> None:
    of, room = records(A, B), ExampleLimits(limit, 35, cap)

    made = cut_examples(of, order_records(of, None, AS_GIVEN, is_series=True), room, "sequential")

    assert made.example_tokens.tolist() == sizes
    assert ended(made)[-1] == "end"


@pytest.mark.parametrize(
    ("tokens", "draw", "wanted", "reasons"),
    [
        ((900, 50), 700, [[900], [50]], ["budget", "end"]),
        ((400, 300, 1), 700, [[400, 300], [1]], ["budget", "end"]),
        ((400, 300, 300, 1), None, [[400, 300, 300], [1]], ["budget", "end"]),
    ],
)
def test_budget_of_a_thousand_flushes_as_specified(
    tokens: tuple[int, ...], draw: int | None, wanted: list[list[int]], reasons: list[str]
) -> None:
    of, room = records(tokens), ExampleLimits(1000 + 10 + DELIMITERS_PER_UNIT, 10, None)

    made = cut_examples(
        of,
        order_records(of, None, AS_GIVEN, is_series=True),
        room,
        "sequential",
        None if draw is None else drawn(draw),
    )

    assert [[int(of.tokens[i]) for i in one] for one in examples_of(made)] == wanted
    assert ended(made) == reasons


def test_budget_is_at_least_seven_tenths_and_the_size_of_a_record_above_it() -> None:
    of, room = records((900, 50)), ExampleLimits(1012, 10, None)

    made = cut_examples(of, order_records(of, None, AS_GIVEN, is_series=True), room, "sequential", drawn(700))

    assert made.budget_tokens.tolist() == [900, 700]

    assert [ExampleLimits(12 + m, 10, None).min_budget_tokens for m in (1000, 1001, 1, 10)] == [700, 701, 1, 7]


# ── Why an example ends ────────────────────────────────────────────────────────────────────────────


def test_flush_names_the_first_reason_in_order_and_a_pass_always_ends_with_one() -> None:
    of, room = records((5, 5, 5), (5,), (5, 5)), ExampleLimits(12 + 10, 10, 2)

    made = cut_examples(of, order_records(of, 12, AS_GIVEN, is_series=True), room, "sequential")

    assert ended(made) == [
        "max_records", "group_change", "group_change", "restart", "max_records", "group_change", "group_change", "end",
    ]  # fmt: skip

    of, room = alone((5, 5, 5)), ExampleLimits(1000, 10, None)

    made = cut_examples(of, order_records(of, 7, SHUFFLED, is_series=False), room, "tabular")

    assert [len(one) for one in examples_of(made)] == [3, 3, 1]
    assert ended(made) == ["restart", "restart", "end"]
    assert made.passes.tolist() == [0, 1, 2]


# ── Resampling ─────────────────────────────────────────────────────────────────────────────────────


def passes_of(order: RecordOrder) -> list[list[int]]:
    """Return the records of each pass."""
    return [one.tolist() for one in np.split(order.records, order.pass_first_place[1:-1])]


def run_sizes(order: RecordOrder) -> list[int]:
    return np.diff(order.run_first_place).tolist()


def test_resampled_passes_show_as_many_records_as_asked_for_in_other_orders() -> None:
    order = order_records(alone([7] * 10), 25, SHUFFLED, is_series=False)

    assert len(order.records.tolist()) == 25
    passes = passes_of(order)
    assert [sorted(one) for one in passes[:2]] == [list(range(10))] * 2
    assert len(set(passes[2])) == 5

    of = records(*([1] * 3 for _ in range(30)))

    first, second = passes_of(order_records(of, 180, SHUFFLED, is_series=True))

    assert first == list(range(90))
    assert second != first
    assert sorted(second) == list(range(90))


@pytest.mark.parametrize("seed", range(20))
def test_grouped_resampling_adds_whole_groups_until_six(seed: int) -> None:
    of = records(*([1] * size for size in (1, 2, 3, 4, 5)))

    order = order_records(of, 6, lambda _, count: make_feistel(count, seed)(np.arange(count)), is_series=False)

    [only] = passes_of(order)
    sizes = run_sizes(order)
    assert 6 <= len(only) <= 10
    assert len(only) - sizes[-1] < 6
    assert set(sizes) <= {1, 2, 3, 4, 5}


@pytest.mark.parametrize("wanted", range(1, 16))
def test_sequential_partial_pass_cuts_its_last_series_to_a_prefix(wanted: int) -> None:
    of = records(*([1] * size for size in (1, 2, 3, 4, 5)))

    order = order_records(of, wanted, SHUFFLED, is_series=True)

    [only] = passes_of(order)
    assert len(only) == wanted
    assert set(order.records[order.run_first_place[:-1]].tolist()) <= set(of.group_first_record.tolist())


# ── Invariants ───────────────────────────────────────────────────────────────────────────────────────

GROUPS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=12)
CAPS = st.one_of(st.none(), st.integers(1, 4))
WANTED = st.one_of(st.none(), st.integers(1, 60))


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40), cap=CAPS, room=st.integers(40, 120), wanted=WANTED
)
def test_tabular_examples_contain_every_record_of_a_pass_once_within_limits(
    lengths: list[int], cap: int | None, room: int, wanted: int | None
) -> None:
    of, limits = alone(lengths), ExampleLimits(room + 5 + DELIMITERS_PER_UNIT, 5, cap)
    order = order_records(of, wanted, SHUFFLED, is_series=False)

    made = cut_examples(of, order, limits, "tabular")

    assert made.order.records.tolist() == order.records.tolist()
    _keeps_limits(made, limits, np.diff(made.example_first_place))
    _is_greedy(made, of, limits, lambda tokens: tokens <= limits.record_room)


@given(groups=GROUPS, cap=CAPS, room=st.integers(240, 500), wanted=WANTED)
def test_grouped_examples_never_cut_a_group(
    groups: list[list[int]], cap: int | None, room: int, wanted: int | None
) -> None:
    of, limits = records(*groups), ExampleLimits(room + 5 + DELIMITERS_PER_UNIT, 5, cap)
    order = order_records(of, wanted, SHUFFLED, is_series=False)

    made = cut_examples(of, order, limits, "grouped")

    units = [made.order.records[a:b].tolist() for a, b in pairwise(made.unit_first_place)]
    whole = [list(range(a, b)) for a, b in pairwise(of.group_first_record)]
    assert all(unit in whole for unit in units)
    assert made.order.records.tolist() == order.records.tolist()
    _keeps_limits(made, limits, np.diff(made.example_first_unit))


@given(groups=GROUPS, room=st.integers(40, 90))
def test_oversized_groups_are_split_between_records_and_lose_none(groups: list[list[int]], room: int) -> None:
    of, limits = records(*groups), ExampleLimits(room + 5 + DELIMITERS_PER_UNIT, 5, None)

    made = split_large_runs(of, order_records(of, None, AS_GIVEN, is_series=False), limits)

    assert len(passes_of(made)) == 1
    pieces = [one.tolist() for one in np.split(made.records, made.run_first_place[1:-1])]
    assert [one for piece in pieces for one in piece] == list(range(len(of.tokens)))
    assert all(int(of.tokens[piece].sum()) <= limits.record_room for piece in pieces)
    assert set(of.group_first_record.tolist()) <= {*(piece[0] for piece in pieces), len(of.tokens)}


@pytest.mark.slow
@given(groups=GROUPS, cap=CAPS, room=st.integers(40, 120), wanted=WANTED, seed=st.integers(0, 99))
def test_sequential_examples_contain_one_group_in_order_within_their_budgets(
    groups: list[list[int]], cap: int | None, room: int, wanted: int | None, seed: int
) -> None:
    of, limits = records(*groups), ExampleLimits(room + 5 + DELIMITERS_PER_UNIT, 5, cap)
    draws = drawing(limits, seed)
    order = order_records(of, wanted, SHUFFLED, is_series=True)

    made = cut_examples(of, order, limits, "sequential", draws)

    assert made.order.records.tolist() == order.records.tolist()
    _keeps_limits(made, limits, np.diff(made.example_first_place))
    for example, budget in zip(examples_of(made), made.budget_tokens.tolist(), strict=True):
        assert example == list(range(example[0], example[-1] + 1))
        assert len({int(np.searchsorted(of.group_first_record, one, "right")) for one in example}) == 1
        first = int(of.tokens[example[0]])
        assert limits.min_budget_tokens <= budget <= limits.record_room or budget == first
        assert int(of.tokens[example].sum()) <= budget


def _keeps_limits(made: PlannedSplit, limits: ExampleLimits, counted: Ints) -> None:
    assert int(made.example_tokens.max()) <= limits.example_tokens
    assert limits.cap is None or int(counted.max()) <= limits.cap
    assert len(made.budget_tokens) == len(made.flushes) == len(made.passes) == len(made.example_first_unit) - 1


def _is_greedy(made: PlannedSplit, of: SplitRecords, limits: ExampleLimits, fits: Callable[[int], bool]) -> None:
    """Assert that an example ends for its budget only if the next record would not fit."""
    examples = examples_of(made)
    for one, following, reason in zip(examples, examples[1:], ended(made), strict=False):
        if reason == "budget":
            assert not fits(int(of.tokens[one].sum()) + int(of.tokens[following[0]]))


@pytest.mark.parametrize("cap", [1, 7, None])
def test_plan_without_records_is_empty(cap: int | None) -> None:
    of, room = records(), ExampleLimits(100, 10, cap)

    for made in (
        cut_examples(of, order_records(of, None, AS_GIVEN, is_series=False), room, "tabular"),
        cut_examples(of, order_records(of, 5, AS_GIVEN, is_series=False), room, "grouped"),
        cut_examples(of, order_records(of, 5, AS_GIVEN, is_series=True), room, "sequential"),
    ):
        assert made.example_tokens.tolist() == []
