"""Length facts: golden values small enough to check by eye, then checks over any lengths."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rowmill.schema.manifest import Histogram
from rowmill.stats.lengths import (
    LOWER_LIMIT,
    MAX_LENGTH_BARS,
    RAISE_LIMIT,
    Lengths,
    choose_candidate_seq_lens,
    compute_length_quantiles,
    count_length_buckets,
    estimate_seq_len_effects,
    make_length_histogram,
    make_lengths_table,
    suggest_limits,
)

LENGTHS = st.lists(st.integers(0, 200_000), max_size=60).map(lambda values: np.array(values, dtype=np.int32))
LIMITS = st.integers(1, 300_000)


def lengths(*values: int) -> Lengths:
    return np.array(values, dtype=np.int32)


def test_length_histogram_counts_each_bin_and_separates_a_huge_length() -> None:
    histogram = make_length_histogram(lengths(0, 1, 3, 8, 8, 9), 8)

    assert histogram.edges == tuple(float(edge) for edge in range(11))
    assert histogram.counts == (1, 1, 0, 1, 0, 0, 0, 0, 2, 1)
    assert histogram.limit == 8

    histogram = make_length_histogram(lengths(*range(0, 400, 4), 1_000_000), 400)

    assert histogram.edges[-2:] == (800, 1_000_001)
    assert histogram.counts[-1] == 1
    assert sum(1 for count in histogram.counts if count) > 15

    histogram = make_length_histogram(lengths(), 100)

    assert histogram.edges == (0, 100)
    assert histogram.counts == (0,)


@given(LENGTHS, LIMITS)
def test_length_histogram_of_any_lengths_counts_each_once_on_its_side_of_the_limit(values: Lengths, limit: int) -> None:
    histogram = make_length_histogram(values, limit)

    assert len(histogram.counts) <= MAX_LENGTH_BARS
    assert len(histogram.edges) == len(histogram.counts) + 1
    assert list(histogram.edges) == sorted(set(histogram.edges))
    assert sum(histogram.counts) == len(values)
    at_limit = sum(c for edge, c in zip(histogram.edges, histogram.counts, strict=False) if edge >= limit)
    assert at_limit == int((values >= limit).sum())


def test_length_quantiles_of_one_to_a_hundred_are_their_own_numbers() -> None:
    found = compute_length_quantiles(lengths(*range(100, 0, -1)))

    assert found == {"p25": 25, "p50": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99, "max": 100}

    assert set(compute_length_quantiles(lengths()).values()) == {0}


@given(LENGTHS.filter(len))
def test_length_quantiles_of_any_lengths_are_the_shortest_that_reach_their_share(values: Lengths) -> None:
    found = compute_length_quantiles(values)

    for share in (25, 50, 75, 90, 95, 99):
        length = found[f"p{share}"]
        assert (values <= length).sum() * 100 >= share * len(values)
        assert (values < length).sum() * 100 < share * len(values)


def test_length_buckets_at_the_borders_belong_to_the_upper_bucket() -> None:
    found = count_length_buckets(lengths(24, 25, 49, 50, 74, 75, 99, 100, 5000), 100)

    assert found == {"under_25": 1, "25_to_50": 2, "50_to_75": 2, "75_to_100": 2, "at_max": 2}

    # A quarter of 7 is 1.75: 1 is below it, 2 above.
    assert count_length_buckets(lengths(1, 2), 7)["under_25"] == 1


def buckets(under_25: int, at_max: int, others: int) -> dict[str, int]:
    return {"under_25": under_25, "25_to_50": others, "50_to_75": 0, "75_to_100": 0, "at_max": at_max}


def test_advice_beyond_its_bounds_gives_the_hint_and_at_them_is_silent() -> None:
    assert suggest_limits(buckets(0, 31, 69)) == (RAISE_LIMIT,)
    assert suggest_limits(buckets(51, 0, 49)) == (LOWER_LIMIT,)
    assert suggest_limits(buckets(60, 40, 0)) == (RAISE_LIMIT, LOWER_LIMIT)

    assert suggest_limits(buckets(50, 30, 20)) == ()
    assert suggest_limits(buckets(0, 0, 0)) == ()

    assert choose_candidate_seq_lens(4096) == (1024, 2048, 4096, 8192, 16384)
    assert choose_candidate_seq_lens(3000) == (512, 1024, 2048, 3000, 4096, 8192)
    assert choose_candidate_seq_lens(2) == (2, 4, 8)


def test_tables_of_lengths_have_a_line_per_bin_and_effects_a_line_per_limit() -> None:
    def one_each(planned: Lengths, limit: int) -> int:
        assert planned.max() <= limit
        return len(planned)

    table = estimate_seq_len_effects(lengths(10, 20, 40), lengths(5, 10, 0), (40, 10, 20), plan=one_each)

    assert table.columns == ("seq_len", "examples_over", "trained_lost", "sequences")
    # At 10 the second example loses half its tokens, so half of the 10 trained ones; the third trains none.
    assert table.rows == ((10, 2, 5, 3), (20, 1, 0, 3), (40, 0, 0, 3))

    train = Histogram(title="t", unit="tokens", edges=(0.0, 10.0, 20.0), counts=(3, 4))
    test = Histogram(title="t", unit="tokens", edges=(0.0, 5.0), counts=(1,))

    table = make_lengths_table({"train": train, "test": test})

    assert table.columns == ("split", "lower", "upper", "examples")
    assert table.rows == (("train", 0, 10, 3), ("train", 10, 20, 4), ("test", 0, 5, 1))


@given(LENGTHS.filter(len), st.lists(LIMITS, min_size=2, max_size=4))
def test_what_if_with_a_larger_limit_never_loses_more(values: Lengths, limits: list[int]) -> None:
    table = estimate_seq_len_effects(values, values // 2, limits, plan=lambda planned, _: len(planned))

    over = [row[1] for row in table.rows]
    lost = [row[2] for row in table.rows]
    assert over == sorted(over, reverse=True)
    assert lost == sorted(lost, reverse=True)
