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
    AssembledExamples,
    BudgetSampler,
    ExampleLimits,
    RecordLengths,
    RecordPass,
    assemble_examples,
    resample,
    split_large_runs,
)

PAGE = (85, 80, 79, 80)
A, B = (82, 82, 82, 84, 85), (82, 82, 82)


def SHUFFLED(number: int, count: int) -> Ints:  # noqa: N802  (two orders that a test may choose)
    return make_feistel(count, number + 1)(np.arange(count))


def AS_GIVEN(number: int, count: int) -> Ints:  # noqa: N802
    return np.arange(count)


def records(*groups: Sequence[int]) -> RecordLengths:
    sizes = np.array([0, *(len(group) for group in groups)], np.int64)
    return RecordLengths(np.array([one for group in groups for one in group], np.int64), np.cumsum(sizes))


def alone(lengths: Sequence[int]) -> RecordLengths:
    return records(*((one,) for one in lengths))


def lengths_of(made: AssembledExamples, of: RecordLengths, room: ExampleLimits) -> list[int]:
    return made.lengths(of.tokens, room).tolist()


def examples_of(made: AssembledExamples) -> list[list[int]]:
    bounds = made.record_offsets.tolist()
    return [made.records[a:b].tolist() for a, b in pairwise(bounds)]


def ended(made: AssembledExamples) -> list[str]:
    return [FLUSHES[one] for one in made.flushes.tolist()]


def drawing(limits: ExampleLimits, seed: int) -> BudgetSampler:
    span = limits.records - limits.min_budget + 1
    return lambda number, group: lambda ordinal: limits.min_budget + (seed * 7 + number + group + 3 * ordinal) % span


def drawn(budget: int) -> BudgetSampler:
    return lambda _number, _group: lambda _ordinal: budget


# ── The vectors ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("limit", "sizes"), [(282, [282, 118]), (281, [203, 197])])
def test_tabular_page_of_four_records_gives_the_sizes_of_the_specification(limit: int, sizes: list[int]) -> None:
    of, room = alone(PAGE), ExampleLimits(limit, 36, 3)

    made = assemble_examples(of, resample(of, None, AS_GIVEN, is_series=False), room, "tabular")

    assert lengths_of(made, of, room) == sizes


@pytest.mark.parametrize(
    ("limit", "cap", "sizes"), [(524, 2, [524]), (523, 2, [277, 283]), (524, 1, [277, 283]), (524, None, [524])]
)
def test_grouped_page_of_two_groups_gives_the_sizes_of_the_specification(
    limit: int, cap: int | None, sizes: list[int]
) -> None:
    of, room = records((85, 80, 74), (80, 80, 85)), ExampleLimits(limit, 36, cap)

    made = assemble_examples(of, resample(of, None, AS_GIVEN, is_series=False), room, "grouped")

    assert lengths_of(made, of, room) == sizes


@pytest.mark.parametrize(
    ("limit", "cap", "sizes"),
    [(4096, 4, [367, 122, 283]), (35 + DELIMITERS_PER_UNIT + 330, None, [367, 122, 283]), (4096, None, [452, 283])],
)
def test_sequential_page_of_two_series_gives_the_sizes_of_the_specification(
    limit: int, cap: int | None, sizes: list[int]
) -> None:
    of, room = records(A, B), ExampleLimits(limit, 35, cap)

    made = assemble_examples(of, resample(of, None, AS_GIVEN, is_series=True), room, "sequential")

    assert lengths_of(made, of, room) == sizes
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

    made = assemble_examples(
        of,
        resample(of, None, AS_GIVEN, is_series=True),
        room,
        "sequential",
        None if draw is None else drawn(draw),
    )

    assert [[int(of.tokens[i]) for i in one] for one in examples_of(made)] == wanted
    assert ended(made) == reasons


def test_budget_is_at_least_seven_tenths_and_the_size_of_a_record_above_it() -> None:
    of, room = records((900, 50)), ExampleLimits(1012, 10, None)

    made = assemble_examples(of, resample(of, None, AS_GIVEN, is_series=True), room, "sequential", drawn(700))

    assert made.budgets.tolist() == [900, 700]

    assert [ExampleLimits(12 + m, 10, None).min_budget for m in (1000, 1001, 1, 10)] == [700, 701, 1, 7]


# ── Why an example ends ────────────────────────────────────────────────────────────────────────────


def test_flush_names_the_first_reason_in_order_and_a_pass_always_ends_with_one() -> None:
    of, room = records((5, 5, 5), (5,), (5, 5)), ExampleLimits(12 + 10, 10, 2)

    made = assemble_examples(of, resample(of, 12, AS_GIVEN, is_series=True), room, "sequential")

    assert ended(made) == [
        "max_records", "group_change", "group_change", "restart", "max_records", "group_change", "group_change", "end",
    ]  # fmt: skip

    of, room = alone((5, 5, 5)), ExampleLimits(1000, 10, None)

    made = assemble_examples(of, resample(of, 7, SHUFFLED, is_series=False), room, "tabular")

    assert [len(one) for one in examples_of(made)] == [3, 3, 1]
    assert ended(made) == ["restart", "restart", "end"]
    assert made.passes.tolist() == [0, 1, 2]


# ── Resampling ─────────────────────────────────────────────────────────────────────────────────────


def shown(passes: list[RecordPass]) -> list[int]:
    return [one for own in passes for one in own.records.tolist()]


def test_resampled_passes_show_as_many_records_as_asked_for_in_other_orders() -> None:
    passes = resample(alone([7] * 10), 25, SHUFFLED, is_series=False)

    assert len(shown(passes)) == 25
    assert [sorted(one.records.tolist()) for one in passes[:2]] == [list(range(10))] * 2
    assert len(set(passes[2].records.tolist())) == 5

    of = records(*([1] * 3 for _ in range(30)))

    first, second = resample(of, 180, SHUFFLED, is_series=True)

    assert first.records.tolist() == list(range(90))
    assert second.records.tolist() != first.records.tolist()
    assert sorted(second.records.tolist()) == list(range(90))


@pytest.mark.parametrize("seed", range(20))
def test_grouped_resampling_adds_whole_groups_until_six(seed: int) -> None:
    of = records(*([1] * size for size in (1, 2, 3, 4, 5)))

    [only] = resample(of, 6, lambda _, count: make_feistel(count, seed)(np.arange(count)), is_series=False)

    count = len(only.records)
    assert 6 <= count <= 10
    assert count - int(only.sizes[-1]) < 6
    assert set(only.sizes.tolist()) <= {1, 2, 3, 4, 5}


@pytest.mark.parametrize("wanted", range(1, 16))
def test_sequential_partial_pass_cuts_its_last_series_to_a_prefix(wanted: int) -> None:
    of = records(*([1] * size for size in (1, 2, 3, 4, 5)))

    [only] = resample(of, wanted, SHUFFLED, is_series=True)

    assert len(only.records.tolist()) == wanted
    assert all(first in of.groups.tolist() for first in only.records[np.cumsum(only.sizes) - only.sizes].tolist())


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
    passes = resample(of, wanted, SHUFFLED, is_series=False)

    made = assemble_examples(of, passes, limits, "tabular")

    assert made.records.tolist() == shown(passes)
    _keeps_limits(made, of, limits, np.diff(made.record_offsets))
    _is_greedy(made, of, limits, lambda tokens: tokens <= limits.records)


@given(groups=GROUPS, cap=CAPS, room=st.integers(240, 500), wanted=WANTED)
def test_grouped_examples_never_cut_a_group(
    groups: list[list[int]], cap: int | None, room: int, wanted: int | None
) -> None:
    of, limits = records(*groups), ExampleLimits(room + 5 + DELIMITERS_PER_UNIT, 5, cap)
    passes = resample(of, wanted, SHUFFLED, is_series=False)

    made = assemble_examples(of, passes, limits, "grouped")

    units = [made.records[a:b].tolist() for a, b in zip(made.units, made.units[1:], strict=False)]
    whole = [list(range(a, b)) for a, b in zip(of.groups, of.groups[1:], strict=False)]
    assert all(unit in whole for unit in units)
    assert made.records.tolist() == shown(passes)
    _keeps_limits(made, of, limits, np.diff(made.examples))


@given(groups=GROUPS, room=st.integers(40, 90))
def test_oversized_groups_are_split_between_records_and_lose_none(groups: list[list[int]], room: int) -> None:
    of, limits = records(*groups), ExampleLimits(room + 5 + DELIMITERS_PER_UNIT, 5, None)

    [whole] = resample(of, None, AS_GIVEN, is_series=False)
    made = split_large_runs(of, whole, limits)

    pieces = [one.tolist() for one in np.split(made.records, np.cumsum(made.sizes)[:-1])]
    assert [one for piece in pieces for one in piece] == list(range(len(of.tokens)))
    assert all(int(of.tokens[piece].sum()) <= limits.records for piece in pieces)
    assert set(of.groups.tolist()) <= {*(piece[0] for piece in pieces), len(of.tokens)}


@pytest.mark.slow
@given(groups=GROUPS, cap=CAPS, room=st.integers(40, 120), wanted=WANTED, seed=st.integers(0, 99))
def test_sequential_examples_contain_one_group_in_order_within_their_budgets(
    groups: list[list[int]], cap: int | None, room: int, wanted: int | None, seed: int
) -> None:
    of, limits = records(*groups), ExampleLimits(room + 5 + DELIMITERS_PER_UNIT, 5, cap)
    draws = drawing(limits, seed)
    passes = resample(of, wanted, SHUFFLED, is_series=True)

    made = assemble_examples(of, passes, limits, "sequential", draws)

    assert made.records.tolist() == shown(passes)
    _keeps_limits(made, of, limits, np.diff(made.record_offsets))
    for example, budget in zip(examples_of(made), made.budgets.tolist(), strict=True):
        assert example == list(range(example[0], example[-1] + 1))
        assert len({int(np.searchsorted(of.groups, one, "right")) for one in example}) == 1
        first = int(of.tokens[example[0]])
        assert limits.min_budget <= budget <= limits.records or budget == first
        assert int(of.tokens[example].sum()) <= budget


def _keeps_limits(made: AssembledExamples, of: RecordLengths, limits: ExampleLimits, counted: Ints) -> None:
    assert max(lengths_of(made, of, limits)) <= limits.limit
    assert limits.cap is None or int(counted.max()) <= limits.cap
    assert len(made.budgets) == len(made.flushes) == len(made.passes) == len(made.examples) - 1


def _is_greedy(made: AssembledExamples, of: RecordLengths, limits: ExampleLimits, fits: Callable[[int], bool]) -> None:
    """Assert that an example ends for its budget only if the next record would not fit."""
    examples = examples_of(made)
    for one, following, reason in zip(examples, examples[1:], ended(made), strict=False):
        if reason == "budget":
            assert not fits(int(of.tokens[one].sum()) + int(of.tokens[following[0]]))


@pytest.mark.parametrize("cap", [1, 7, None])
def test_plan_without_records_is_empty(cap: int | None) -> None:
    of, room = records(), ExampleLimits(100, 10, cap)
    nothing: Ints = np.empty(0, np.int64)

    for made in (
        assemble_examples(of, resample(of, None, AS_GIVEN, is_series=False), room, "tabular"),
        assemble_examples(of, resample(of, 5, AS_GIVEN, is_series=False), room, "grouped"),
        assemble_examples(of, resample(of, 5, AS_GIVEN, is_series=True), room, "sequential"),
    ):
        assert made.lengths(nothing, room).tolist() == []
