"""Sizing and advice: the specification's figures, and counts for each piece of advice."""

from typing import Any

import numpy as np
import pytest

from rowmill.kinds.tables.size_estimates import advise_group_column, estimate_example


def sized(**changes: Any) -> Any:
    values: dict[str, Any] = {"limit": 12_288, "prompt": 100, "record_tokens": 20, "records_per_group": 17, "cap": 5}
    return estimate_example("grouped", **values | changes)


def test_estimate_of_groups_tables_and_series_is_that_of_the_specification() -> None:
    found = sized()
    assert (found.unit_tokens, found.example_tokens, found.fits) == (340, 1800, True)
    assert sized(cap=None).units == 35
    assert found.largest_unit == 12_186

    five, eight = sized(records_per_group=80), sized(records_per_group=80, cap=8)
    assert (five.example_tokens, five.fits, five.advice) == (8100, True, ())
    assert (eight.example_tokens, eight.fits, eight.advice) == (12_900, False, ("cap_unreachable (flush at 7)",))

    table = estimate_example("tabular", limit=1000, prompt=36, cap=3, record_tokens=80)
    series = estimate_example("sequential", limit=1000, prompt=36, cap=None, record_tokens=80, records_per_group=50)
    assert (table.example_tokens, table.fits) == (36 + 240, True)
    assert (series.example_tokens, series.fits) == (1000, True)


@pytest.mark.parametrize(("tokens", "advice"), [(12_186, ()), (12_187, ("overflow",))])
def test_estimate_of_a_lone_group_above_the_budget_overflows(tokens: int, advice: tuple[str, ...]) -> None:
    assert sized(record_tokens=tokens, records_per_group=1, cap=1).advice == advice


@pytest.mark.parametrize(
    ("mode", "limit", "advice"),
    [
        ("tabular", 102, ()),
        ("tabular", 101, ("cap_unreachable (flush at 9)",)),
        ("tabular", 100, ("cap_unreachable (flush at 9)",)),
        ("grouped", 120, ()),
        ("grouped", 119, ("cap_unreachable (flush at 9)",)),
    ],
)
def test_ten_entries_of_ten_tokens_fit_only_with_their_bos_and_eos(
    mode: Any, limit: int, advice: tuple[str, ...]
) -> None:
    found = estimate_example(mode, limit=limit, prompt=0, cap=10, record_tokens=10)

    assert (found.fits, found.advice) == (not advice, advice)
    assert found.units == (9 if advice else 10)


@pytest.mark.parametrize("cap", [1, 10, None])
def test_estimate_of_a_group_that_fits_into_no_example_says_so_whatever_the_cap(cap: int | None) -> None:
    found = sized(record_tokens=12_187, records_per_group=1, cap=cap)

    assert (found.fits, found.advice) == (False, ("overflow",))


def advised(sizes: list[int], **changes: Any) -> Any:
    counts = np.array(sizes, np.int64)
    values: dict[str, Any] = {"record_room": 12_000, "cap": 10}
    return advise_group_column("column", counts, counts * 20, **values | changes)


def test_advice_on_groups_of_ten_to_fifty_and_on_long_series_is_good() -> None:
    found = advised([10 + (i * 7) % 41 for i in range(100)])

    assert not found.unsuitable
    assert not found.warnings
    assert found.sizes["count"] == 100
    assert found.largest == "Largest group: 50 records, 1000 tokens"

    assert advised([5000] * 3, mode="sequential").unsuitable == {}


@pytest.mark.parametrize(
    ("sizes", "word"), [([950, 20, 15, 15], "dominant"), ([2500] * 4, "unbounded"), ([10] * 99 + [601], "overflow")]
)
def test_unsuitable_column_is_explained(sizes: list[int], word: str) -> None:
    assert word in advised(sizes).unsuitable


@pytest.mark.parametrize(
    ("sizes", "changes", "word"),
    [([3] * 99 + [61], {}, "skewed"), ([10] * 200, {"is_ordered": False}, "no_order"), ([10] * 89, {}, "few_examples")],
)
def test_advice_warns_with_its_keyword(sizes: list[int], changes: dict[str, Any], word: str) -> None:
    found = advised(sizes, **changes)
    assert found.unsuitable == {}
    assert set(found.warnings) == {word}
