"""Packing: the specification's vectors; plans partition the examples; facts follow from the plan."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rowmill.core.arrays import Integers, make_position_ids
from rowmill.core.config import validate_options
from rowmill.core.errors import ConfigError, ContextOverflowError
from rowmill.packing.options import Packing
from rowmill.packing.pack_plan import (
    ExampleSlices,
    SequencePlan,
    _count_greedy,
    attention_spans,
    bound_sequence_count,
    count_best_fit,
    count_left_out_tokens,
    count_piece_targets,
    count_sequences,
    keep_examples_whole,
    mark_targets,
    measure_padded_room,
    plan_best_fit,
    plan_concat,
    plan_greedy,
    plan_single,
    plan_slices,
    slice_too_long,
)
from rowmill.schema.rows import RowKind, SliceStrategy

TEN = [6, 5, 5, 4, 4, 3, 3, 2, 2, 2]


def mark(mask: NDArray[np.bool_], spans: Sequence[int]) -> NDArray[np.bool_]:
    return mark_targets(np.zeros(len(mask), np.int32), mask, np.array(spans), ignore_token_id=None)


def packing(**values: object) -> Packing:
    return validate_options(Packing, values, "packing")


def sequences_of(plan: SequencePlan) -> list[list[int]]:
    return [part.tolist() for part in np.split(plan.examples, plan.sequence_offsets[1:-1])]


def sliced(lengths: list[int], limit: int, strategy: SliceStrategy) -> ExampleSlices:
    return slice_too_long(np.array(lengths), limit, strategy, name_of="row#{}".format, remedies="raise seq_len")


# --- options


@pytest.mark.parametrize(
    ("options", "kind", "strategy"),
    [
        ({}, "conversation", "best_fit"),
        ({}, "text", "concat"),
        ({"pack": True}, "text", "best_fit"),
        ({"pack": True, "pack_strategy": "concat"}, "text", "concat"),
        ({"pack": False}, "text", "single"),
    ],
)
def test_strategy_follows_from_pack_and_the_kind(options: dict[str, object], kind: RowKind, strategy: str) -> None:
    assert packing(**options).strategy_for(kind) == strategy


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, None),
        ({"pack": False}, 1),
        ({"pack": 3}, 3),
        ({"pack": 3, "max_segments_per_example": 3}, 3),
        ({"max_segments_per_example": None}, None),
    ],
)
def test_segment_limit_is_the_number_of_pack(options: dict[str, object], limit: int | None) -> None:
    assert packing(**options).segment_limit == limit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            ({"max_segments_per_example": limit}, "max_segments_per_example")
            for limit in (True, False, 0, -1, "64", 1.5)
        ],
        *[({"pack": pack}, "packing: pack") for pack in (0, -1, "true", 1.5)],
        ({"pack": 3, "max_segments_per_example": 64}, "two limits"),
        *[({"pack": pack, "pack_strategy": "concat"}, "concat fills every sequence") for pack in (False, 4)],
        ({"tail": "drop", "pack": True}, "only concat has a tail"),
    ],
)
def test_options_that_cannot_stand_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        packing(**options)


def test_concat_and_its_tail_are_refused_for_other_kinds_than_text() -> None:
    with pytest.raises(ConfigError, match="only allowed for text"):
        packing(pack_strategy="concat").strategy_for("conversation")
    with pytest.raises(ConfigError, match="only concat has a tail"):
        packing(tail="drop").strategy_for("pair")


@pytest.mark.parametrize(
    ("options", "kind", "name"),
    [
        ({"slice_strategy": "left"}, "text", "keep_start"),
        ({"slice_strategy": "right"}, "text", "keep_end"),
        ({"slice_strategy": "raise"}, "text", "error"),
        ({"slice_strategy": "drop"}, "text", "drop"),
        ({}, "conversation", "keep_start"),
        ({}, "pair", "keep_end"),
        ({}, "text", "split"),
        ({}, "record", "error"),
    ],
)
def test_slice_strategy_is_named_by_an_alias_or_by_the_kind(
    options: dict[str, object], kind: RowKind, name: str
) -> None:
    assert packing(**options).slice_strategy_for(kind) == name


@pytest.mark.parametrize("values", [{}, {"pack": 3}, {"pack": False}, {"slice_strategy": "left"}])
def test_packing_survives_its_own_dump(values: dict[str, object]) -> None:
    chosen = packing(**values)
    assert packing(**chosen.model_dump()) == chosen


# --- too-long examples


@pytest.mark.parametrize(
    ("lengths", "limit", "strategy", "pieces"),
    [
        ([100], 50, "keep_start", [(0, 0, 50)]),
        ([100], 50, "keep_end", [(0, 50, 50)]),
        ([3, 9, 4], 4, "split", [(0, 0, 3), (1, 0, 4), (1, 4, 4), (1, 8, 1), (2, 0, 4)]),
        ([3, 9, 4], 4, "drop", [(0, 0, 3), (2, 0, 4)]),
        ([4, 4], 4, "error", [(0, 0, 4), (1, 0, 4)]),
    ],
)
def test_slice_gives_these_pieces(
    lengths: list[int], limit: int, strategy: SliceStrategy, pieces: list[tuple[int, int, int]]
) -> None:
    """A piece is its example, its start and its length."""
    found = sliced(lengths, limit, strategy)
    assert [*zip(found.examples.tolist(), found.starts.tolist(), found.lengths.tolist(), strict=True)] == pieces
    assert found.dropped.tolist() == ([1] if strategy == "drop" else [])


def test_pieces_that_do_not_fit_are_named_left_out_or_planned_by_example_and_start() -> None:
    refusal = r"^row#1 has 9 tokens \(1 example is too long\); at most 4 fit a sequence; raise seq_len$"
    with pytest.raises(ContextOverflowError, match=refusal):
        sliced([3, 9, 4], 4, "error")

    pieces = sliced([5, 3], 3, "split").select(np.array([False, True, True]))
    assert pieces.examples.tolist() == [0, 1]
    assert pieces.starts.tolist() == [3, 0]

    pieces = sliced([3, 9, 2], 5, "split")
    plan = plan_slices(pieces, limit=5, strategy="best_fit", max_segments=None, tail="keep")
    assert sequences_of(plan) == [[0, 2], [1], [1]]
    assert plan.ranges.tolist() == [[0, 3], [0, 2], [0, 5], [5, 4]]


@pytest.mark.parametrize(("strategy", "targets"), [("keep_start", [0, 2]), ("keep_end", [2, 2]), ("split", [0, 1, 2])])
def test_targets_per_piece_skip_the_first_token_of_a_piece(strategy: SliceStrategy, targets: list[int]) -> None:
    loss_mask = np.array([0, 0, 0, 1, 1, 0, 1, 1], dtype=bool)
    assert count_piece_targets(sliced([5, 3], 3, strategy), loss_mask, np.array([0, 5, 8])).tolist() == targets


@given(
    lengths=st.lists(st.integers(1, 40), max_size=30),
    limit=st.integers(1, 20),
    strategy=st.sampled_from(("keep_start", "keep_end", "split", "drop")),
)
def test_slice_leaves_fitting_examples_whole_and_no_piece_too_long(
    lengths: list[int], limit: int, strategy: SliceStrategy
) -> None:
    pieces = sliced(lengths, limit, strategy)
    kept = np.bincount(pieces.examples, weights=pieces.lengths, minlength=len(lengths)).astype(int).tolist()
    of_too_long = {"split": lambda n: n, "drop": lambda _: 0}.get(strategy, lambda _: limit)
    assert kept == [n if n <= limit else of_too_long(n) for n in lengths]
    assert all(1 <= n <= limit for n in pieces.lengths.tolist())


# --- plans


@pytest.mark.parametrize("plan", [plan_greedy, plan_best_fit])
def test_plan_of_four_examples_fills_two_sequences(plan: Callable[[Integers, int, int | None], SequencePlan]) -> None:
    lengths = np.array([100, 200, 150, 150])
    assert sequences_of(plan(lengths, 300, 64)) == [[0, 1], [2, 3]]
    assert sequences_of(plan(lengths, 300, 1)) == [[0], [1], [2], [3]]
    assert sequences_of(plan_single(lengths, 300)) == [[0], [1], [2], [3]]


def test_plans_differ_by_strategy_and_concat_cuts_at_every_limit() -> None:
    lengths = np.array([4, 8, 1, 4, 2, 1])
    assert sequences_of(plan_greedy(lengths, 10, 64)) == [[0], [1, 2], [3, 4, 5]]
    assert sequences_of(plan_best_fit(lengths, 10, None)) == [[0, 2, 3, 5], [1, 4]]
    lengths = np.array(TEN)
    assert sequences_of(plan_best_fit(lengths, 12, None)) == [[0, 1], [2, 3, 5], [4, 6, 7, 8], [9]]
    assert sequences_of(plan_best_fit(lengths, 12, 3)) == [[0, 1], [2, 3, 5], [4, 6, 7], [8, 9]]

    plan = plan_concat(np.array([3, 6]), 4, "keep")
    assert plan.sequence_offsets.tolist() == [0, 2, 3, 4]
    assert plan.examples.tolist() == [0, 1, 1, 1]
    assert plan.ranges.tolist() == [[0, 3], [0, 1], [1, 4], [5, 1]]
    plan = plan_concat(np.array([3, 6]), 4, "drop")
    assert plan.sequence_offsets.tolist() == [0, 2, 3]
    assert count_left_out_tokens(plan, np.array([3, 6])).tolist() == [0, 1]


@pytest.mark.parametrize(
    "plan", [partial(plan_best_fit, max_segments=None), partial(plan_greedy, max_segments=3), plan_single]
)
def test_plan_of_no_examples_has_no_sequences(plan: Callable[[Integers, int], SequencePlan]) -> None:
    assert plan(np.empty(0, dtype=np.int64), 8).sequences == 0
    assert plan_concat(np.empty(0, dtype=np.int64), 8, "keep").sequences == 0


@pytest.mark.parametrize("lengths", [[3, 0], [3, 9]])
def test_plan_of_an_empty_or_too_long_example_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="example 1"):
        plan_best_fit(np.array(lengths), 8, None)


lengths_and_limit = st.integers(1, 60).flatmap(
    lambda limit: st.tuples(st.lists(st.integers(1, limit), max_size=60), st.just(limit))
)
segment_limits = st.none() | st.integers(1, 8)


@given(case=lengths_and_limit, max_segments=segment_limits, greedy=st.booleans())
def test_plan_partitions_the_examples_within_both_limits(
    case: tuple[list[int], int], max_segments: int | None, greedy: bool
) -> None:
    lengths, limit = np.array(case[0], dtype=np.int64), case[1]
    plan = (plan_greedy if greedy else plan_best_fit)(lengths, limit, max_segments)
    segments = np.diff(plan.sequence_offsets)

    assert sorted(plan.examples.tolist()) == list(range(len(lengths)))
    assert np.array_equal(plan.ranges[:, 1], lengths[plan.examples])
    assert not plan.ranges[:, 0].any()
    assert plan.tokens.max(initial=0) <= limit
    assert segments.min(initial=1) >= 1
    assert segments.max(initial=0) <= (max_segments or len(lengths))
    assert plan.sequences >= bound_sequence_count(lengths, limit, max_segments)


@pytest.mark.slow
@given(case=lengths_and_limit, max_segments=segment_limits)
def test_plan_stands_in_example_order(case: tuple[list[int], int], max_segments: int | None) -> None:
    sequences = sequences_of(plan_best_fit(np.array(case[0] or [1]), case[1], max_segments))
    assert all(members == sorted(members) for members in sequences)
    assert [members[0] for members in sequences] == sorted(members[0] for members in sequences)


def best_fit_one_by_one(lengths: list[int], limit: int, max_segments: int | None) -> list[list[int]]:
    """Follow the rule as the specification words it: example after example, bin after bin."""
    bins: list[list[int]] = []
    reached: list[tuple[int, int, int]] = []  # free space, segments left, when this state was reached
    for when, number in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        length = lengths[number]
        fitting = [i for i, (free, left, _) in enumerate(reached) if free >= length and left > 0]
        if fitting:
            chosen = min(fitting, key=lambda i: reached[i])
        else:
            chosen = len(bins)
            bins.append([])
            reached.append((limit, max_segments or 1, 0))
        bins[chosen].append(number)
        free, left, _ = reached[chosen]
        reached[chosen] = (free - length, left - (max_segments is not None), when)
    return sorted(sorted(members) for members in bins)


@given(case=lengths_and_limit, max_segments=segment_limits)
def test_best_fit_on_the_histogram_equals_best_fit_one_by_one_or_needs_fewer_sequences(
    case: tuple[list[int], int], max_segments: int | None
) -> None:
    lengths, limit = case
    sequences = sequences_of(plan_best_fit(np.array(lengths or [1]), limit, max_segments))
    one_by_one = best_fit_one_by_one(lengths or [1], limit, max_segments)
    assert sequences == one_by_one if len(sequences) == len(one_by_one) else len(sequences) < len(one_by_one)


def random_lengths(seed: int) -> tuple[Integers, int]:
    """Draw a set of lengths of one of six families, and the tokens of a sequence."""
    rng = np.random.default_rng(seed)
    count, limit = int(rng.integers(1, int(10 ** rng.uniform(0.5, 4)))), int(2 ** rng.uniform(5, 14))
    short = rng.random(count) < rng.random()
    drawn = (
        lambda: rng.uniform(1, limit, count),
        lambda: rng.lognormal(np.log(limit) * rng.uniform(0.3, 0.9), rng.uniform(0.2, 1.5), count),
        lambda: rng.exponential(limit * 10 ** rng.uniform(-2.5, -0.2), count),
        lambda: np.where(short, rng.uniform(1, limit / 50 + 2, count), rng.uniform(limit / 10, limit, count)),
        lambda: rng.integers(1, max(2, limit // 8), count),
        lambda: np.where(short, limit // 2 + 1, limit // int(rng.integers(3, 40)) + 1),
    )[seed % 6]()
    return np.clip(drawn, 1, limit).astype(np.int64), limit


def batched_best_fit(lengths: Integers, limit: int) -> int:
    """Count the sequences of best fit decreasing in batches of a thousand examples, as a trainer packs them."""
    batches = [lengths[i : i + 1000] for i in range(0, len(lengths), 1000)]
    return sum(count_best_fit(batch, limit) for batch in batches)


@pytest.mark.slow
def test_best_fit_needs_no_more_sequences_than_greedy_or_batches_on_any_of_a_thousand_sets() -> None:
    for seed in range(1000):
        lengths, limit = random_lengths(seed)
        max_segments = (None, 64, 2 + seed % 50)[seed % 3]
        found = plan_best_fit(lengths, limit, max_segments).sequences

        assert found <= plan_greedy(lengths, limit, max_segments).sequences, seed
        assert max_segments is not None or found <= batched_best_fit(lengths, limit), seed


@pytest.mark.parametrize(("mean", "limit", "max_segments"), [(3.8, 4096, 64), (4.5, 8192, 64), (5.8, 4096, 8)])
def test_best_fit_with_a_limit_that_binds_is_near_the_lower_bound(mean: float, limit: int, max_segments: int) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(mean, 0.8, 20_000), 1, limit).astype(np.int64)
    found = plan_best_fit(lengths, limit, max_segments).sequences
    assert found <= 1.02 * bound_sequence_count(lengths, limit, max_segments)


def test_best_fit_of_speeches_needs_fewer_sequences_than_greedy(real_data: Path) -> None:
    text = (real_data / "text" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    lengths = np.array([len(speech.split()) + 1 for speech in text.split("\n\n")])
    found = plan_best_fit(lengths, 2048, 64).sequences

    assert found < plan_greedy(lengths, 2048, 64).sequences
    assert found <= 1.02 * bound_sequence_count(lengths, 2048, 64)


def test_best_fit_needs_as_few_sequences_as_can_be_worked_out() -> None:
    lengths = np.random.default_rng(5).integers(1, 90_000, 400)
    assert sequences_of(plan_best_fit(lengths, 100_000, None)) == best_fit_one_by_one(lengths.tolist(), 100_000, None)

    # Best fit decreasing joins the long ones and needs nine.
    assert plan_best_fit(np.array([40] * 8 + [20] * 24), 100, 4).sequences == 8

    assert plan_best_fit(np.array([9, 2, 6, 3, 1, 4, 8, 3]), 12, 3).sequences == 3


@pytest.mark.parametrize(("max_segments", "bound"), [(None, 1.001), (64, 1.005)])
def test_best_fit_of_log_normal_lengths_is_near_the_lower_bound(max_segments: int | None, bound: float) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1, 100_000).astype(np.int64), 1, 4096)
    plan = plan_best_fit(lengths, 4096, max_segments)
    assert plan.sequences <= bound * bound_sequence_count(lengths, 4096, None)


@given(lengths=st.lists(st.integers(1, 30), max_size=30), limit=st.integers(1, 12), drop=st.booleans())
def test_concat_reads_back_as_the_joined_documents(lengths: list[int], limit: int, drop: bool) -> None:
    plan = plan_concat(np.array(lengths, dtype=np.int64), limit, "drop" if drop else "keep")
    tokens = [(e, t) for e, n in enumerate(lengths) for t in range(n)]
    pieces = zip(plan.examples.tolist(), plan.ranges.tolist(), strict=True)
    kept = len(tokens) // limit * limit if drop else len(tokens)

    assert [(e, t) for e, (start, n) in pieces for t in range(start, start + n)] == tokens[:kept]
    assert set(plan.tokens[:-1].tolist()) <= {limit}
    assert plan.sequences == -(-kept // limit)


# --- facts


def test_positions_and_attention_follow_spans_of_segments_or_whole_sequences() -> None:
    assert make_position_ids(np.array([3, 1, 2])).tolist() == [0, 1, 2, 0, 0, 1]

    plan = plan_concat(np.array([3, 6]), 4, "keep")
    blocked, offsets = attention_spans(plan, block_cross_document_attention=True)
    opened, sequences = attention_spans(plan, block_cross_document_attention=False)

    assert (blocked.tolist(), offsets.tolist()) == ([3, 1, 4, 1], [0, 2, 3, 4])
    assert (opened.tolist(), sequences.tolist()) == ([4, 4, 1], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("mask", "spans", "loss"),
    [
        ([0, 1, 1, 0, 1], [3, 2], [1, 1, 0, 1, 0]),
        ([0, 0, 1, 1], [4], [0, 1, 1, 0]),
        ([0] * 45 + [1], [46], [0] * 44 + [1, 0]),
        ([1, 1, 1, 1], [2, 2], [1, 0, 1, 0]),
        ([1, 1, 1, 1], [4], [1, 1, 1, 0]),
    ],
)
def test_loss_is_one_position_before_its_target_in_the_same_span(
    mask: list[int], spans: list[int], loss: list[int]
) -> None:
    targets = np.flatnonzero(mark(np.array(mask, dtype=bool), spans))
    assert (targets - 1).tolist() == np.flatnonzero(loss).tolist()


def test_targets_follow_their_spans_and_whole_examples_may_exceed_any_limit() -> None:
    ids = np.array([7, 8, 9, 7, 8, 5], dtype=np.int32)
    mask = np.array([1, 1, 1, 1, 1, 1], dtype=bool)
    assert mark_targets(ids, mask, np.array([3, 3]), ignore_token_id=None).tolist() == [False, True, True] * 2
    assert mark_targets(ids, mask, np.array([3, 3]), ignore_token_id=8).tolist() == [False, False, True] * 2

    assert keep_examples_whole(np.array([1, 10**6])).lengths.tolist() == [1, 10**6]


def test_room_of_padded_segments_by_hand() -> None:
    lengths = np.array([3, 5, 6], np.int64)

    assert measure_padded_room(lengths, 10, 4)[0].tolist() == [4, 8, 8]
    assert measure_padded_room(lengths, 10, 4)[1] == 8
    assert measure_padded_room(lengths, 10, 1)[0].tolist() == [3, 5, 6]
    assert measure_padded_room(lengths, 2, 4)[0].tolist() == [4, 4, 4]


@given(spans=st.lists(st.integers(1, 6), min_size=1, max_size=10), data=st.data())
def test_targets_never_cross_a_span(spans: list[int], data: st.DataObject) -> None:
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=sum(spans), max_size=sum(spans))))
    lengths = np.array(spans)
    span_of = np.repeat(np.arange(len(spans)), lengths)
    targets = mark(mask, spans)
    places = np.flatnonzero(targets)

    assert np.array_equal(span_of[places - 1], span_of[places])
    assert np.array_equal(targets, mask & (make_position_ids(lengths) > 0))


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 60), st.none() | st.integers(1, 6))
def test_sequences_are_counted_without_a_plan(lengths: list[int], limit: int, max_segments: int | None) -> None:
    """Short lists often exceed the bound by more than a thousandth, so the greedy plan is tried, too."""
    many = np.array(lengths, np.int32)
    counted = count_sequences(many, limit, max_segments)
    assert counted == plan_best_fit(many, limit, max_segments).sequences


@given(st.lists(st.integers(1, 9), max_size=200), st.integers(9, 12), st.none() | st.integers(1, 4))
def test_greedy_sequences_are_counted_in_windows(lengths: list[int], limit: int, max_segments: int | None) -> None:
    many = np.array(lengths, np.int32)
    counted = _count_greedy(many, limit, max_segments, window=1)
    assert counted == plan_greedy(many, limit, max_segments).sequences
