"""Splits: the specification's vector; a row's split depends only on its key."""

from collections import Counter
from fractions import Fraction
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.config import validate_options
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json, canonical_json
from rowmill.kinds.shared import splits
from rowmill.kinds.shared.splits import Splits, Splitter, compute_boundaries
from rowmill.schema.rows import Rejected

CONTENT = b"0123456789abcdef"


def splitter(**values: object) -> Splitter:
    return Splitter(validate_options(Splits, values, "splits"))


def in_time(gap: object = 0, **boundaries: object) -> Splitter:
    return splitter(time_key="when", boundaries=boundaries, gap=gap)


def split_of_group(decide: Splitter, value: Json) -> object:
    """Decide for a group's value as a row's `group_key` holds it: as canonical JSON."""
    return decide(canonical_json(value).decode(), None, CONTENT)


def test_group_split_is_as_specified_and_depends_on_the_seed_and_the_typed_value() -> None:
    decide = splitter(validation=0.1, test=0.1, group_key="user")
    decided = {f"g{i}": decide(f'"g{i}"', None, CONTENT) for i in range(12)}

    assert [name for name, split in decided.items() if split == "validation"] == ["g2", "g8"]
    assert [name for name, split in decided.items() if split == "test"] == ["g4"]

    names = [f"g{i}" for i in range(100)]

    first, second = (splitter(test=0.5, seed=seed, group_key="user") for seed in (0, 1))

    assert [split_of_group(first, n) for n in names] != [split_of_group(second, n) for n in names]

    decide = splitter(validation=0, test=0.5, group_key="user")

    assert {split_of_group(decide, i) == split_of_group(decide, str(i)) for i in range(64)} == {True, False}
    assert all(split_of_group(decide, {"a": i, "b": 1}) == split_of_group(decide, {"b": 1, "a": i}) for i in range(64))

    assert splitter(group_key="user")(None, None, CONTENT) == Rejected("group_missing")


def test_split_without_group_key_follows_the_content() -> None:
    decide = splitter(validation=0.3, test=0.3)
    hashes = [blake2b(bytes([i]), digest_size=16).digest() for i in range(200)]

    assert [decide(str(i), None, h) for i, h in enumerate(hashes)] == [decide(None, None, h) for h in hashes]
    assert {decide(None, None, h) for h in hashes} == {"train", "validation", "test"}
    grouped = splitter(validation=0.3, test=0.3, group_key="user")
    assert [decide(None, None, h) for h in hashes] == [split_of_group(grouped, h.hex()) for h in hashes]


@given(keys=st.lists(st.text(), max_size=50), tenths=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_raising_a_share_only_takes_rows_from_train(keys: list[str], tenths: tuple[int, int]) -> None:
    validation, test = tenths
    before = splitter(validation=f"0.{validation}", test=f"0.{test}", group_key="user")
    after = splitter(validation=f"0.{validation + 1}", test=f"0.{test}", group_key="user")

    for name in keys:
        old, new = split_of_group(before, name), split_of_group(after, name)
        assert old == new or (old, new) == ("train", "validation")


@pytest.mark.parametrize("share", [0, "0", 0.0])
def test_share_of_zero_holds_nothing_out(share: object) -> None:
    decide = splitter(validation=share, test=0, group_key="user")

    assert {split_of_group(decide, i) for i in range(2000)} == {"train"}


def test_shares_are_met_to_within_their_deviation_and_leave_some_for_train() -> None:
    decide = splitter(validation=0.05, test="2e-1", group_key="user")
    decided = [split_of_group(decide, i) for i in range(20_000)]

    assert abs(decided.count("validation") - 1000) < 5 * 31
    assert abs(decided.count("test") - 4000) < 5 * 57

    with pytest.raises(ConfigError, match="leave nothing for train"):
        splitter(validation=0.9, test="0.1")


@pytest.mark.parametrize("share", [-0.1, 1.0, 5.0, -3, True, "half", "1/3", "", None, [0.1]])
def test_share_other_than_a_decimal_below_one_is_refused(share: object) -> None:
    with pytest.raises(ConfigError, match="splits: test"):
        splitter(test=share)


INSTANTS = {"validation": "2024-01-01", "test": "2024-06-01"}


@pytest.mark.parametrize(
    ("boundaries", "when", "split"),
    [
        (INSTANTS, "2023-12-31", "train"),
        (INSTANTS, "2024-01-01", "validation"),
        (INSTANTS, "2024-01-01T00:30:00+01:00", "train"),
        (INSTANTS, "2024-05-31T23:59:59.999999Z", "validation"),
        (INSTANTS, "2024-06-01T00:00:00Z", "test"),
        (INSTANTS, "2031-01-01", "test"),
        *(({"test": 0}, when, "train" if when == "-1" else "test") for when in ("-1", "0", "1e3", "0.5")),
        (INSTANTS | {"gap": "7d"}, "2023-12-24T23:59:59", "train"),
        (INSTANTS | {"gap": "7d"}, "2023-12-25T00:00:00", "train"),
        (INSTANTS | {"gap": "7d"}, "2023-12-25T00:00:01", None),
        (INSTANTS | {"gap": "7d"}, "2023-12-31T23:59:59", None),
        (INSTANTS | {"gap": "7d"}, "2024-01-01", "validation"),
        (INSTANTS | {"gap": "7d"}, "2024-05-31", None),
    ],
)
def test_time_split_begins_at_each_boundary_and_rejects_rows_inside_the_gap(
    boundaries: dict[str, Any], when: str, split: str | None
) -> None:
    assert in_time(**boundaries)(None, when, CONTENT) == (split or Rejected("split_gap", when))


@pytest.mark.parametrize("gap", [3600, "3600", "3600 s", "60m", "1h", "1.0h"])
def test_gap_means_the_same_in_every_unit(gap: object) -> None:
    decide = in_time(test="2024-01-01", gap=gap)

    assert decide.assign_by_time("2023-12-31T23:00:00") == "train"
    assert decide.assign_by_time("2023-12-31T23:00:01") == Rejected("split_gap", "2023-12-31T23:00:01")


def test_time_split_of_a_missing_or_unreadable_time_is_rejected() -> None:
    assert in_time(test="2024-01-01")(None, None, CONTENT) == Rejected("order_missing")
    assert in_time(test="2024-01-01")(None, "soon", CONTENT) == Rejected("order_unparsable", "soon")
    assert in_time(test=17)(None, "2024-01-01", CONTENT) == Rejected("order_unparsable", "2024-01-01")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"boundaries": {"test": 5}}, "boundaries without time_key"),
        ({"gap": 5}, "gap without time_key"),
        ({"crossing_groups": "reject"}, "crossing_groups without time_key"),
        ({"time_key": "t", "boundaries": {"test": 5}, "crossing_groups": "reject"}, "without group_key"),
        ({"time_key": "t", "boundaries": {"test": 5}, "test": 0.2}, "both decide"),
        ({"time_key": "t", "boundaries": {}}, "no boundary"),
        ({"time_key": "t", "boundaries": {"validation": 5, "test": 5}}, "before test"),
        ({"time_key": "t", "boundaries": {"validation": 5, "test": "2024-01-01"}}, "expected an instant"),
        ({"time_key": "t", "boundaries": {"test": "soon"}}, "expected an instant"),
        ({"time_key": "t", "boundaries": {"test": 5}, "gap": "7d"}, "write a number"),
        ({"time_key": "t", "boundaries": {"test": "2024-01-01"}, "gap": "a week"}, "expected a duration"),
        ({"group_key": []}, "group_key"),
    ],
)
def test_incompatible_options_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        splitter(**values)


TIMES = [(f"2024-01-{day:02d}", 1) for day in range(1, 9)]


@pytest.mark.parametrize(
    ("shares", "times", "found"),
    [
        ({"validation": 0.25, "test": 0.125}, TIMES, {"validation": "2024-01-06", "test": "2024-01-08"}),
        ({"validation": 0, "test": 0.25}, TIMES, {"test": "2024-01-07"}),
        ({"validation": 0.25, "test": 0.25}, [(str(n), 1) for n in (10, 9, 8, 7)], {"validation": 9, "test": 10}),
        ({"validation": 0, "test": 0.5}, [("1.5", 1), ("2.5", 1)], {"test": 2.5}),
        # Three rows of the same time stay together: too many for test, few enough for validation.
        ({"validation": 0.25, "test": 0.2}, [("1", 7), ("2", 3)], {"validation": 2}),
    ],
)
def test_shares_of_time_become_boundaries(
    shares: dict[str, object], times: list[tuple[str, int]], found: dict[str, object]
) -> None:
    splits = validate_options(Splits, {"time_key": "t", **shares}, "splits")
    resolved = compute_boundaries(splits, times)

    assert resolved is not None
    assert resolved.model_dump(exclude_none=True) == found


def test_shares_of_time_too_small_for_a_row_or_with_a_gap_of_another_unit_hold_nothing_out() -> None:
    assert compute_boundaries(validate_options(Splits, {"time_key": "t", "validation": 0.1}, "splits"), TIMES) is None

    splits = validate_options(Splits, {"time_key": "t", "validation": 0.5, "gap": "7d"}, "splits")

    with pytest.raises(ConfigError, match=r"splits\.gap"):
        compute_boundaries(splits, [("1", 1), ("2", 1)])


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=30), tenths=st.tuples(st.integers(0, 4), st.integers(0, 4))
)
def test_shares_of_time_are_never_exceeded(counts: list[int], tenths: tuple[int, int]) -> None:
    validation, test = (Fraction(one, 10) for one in tenths)
    splits = validate_options(Splits, {"time_key": "t", "validation": float(validation), "test": float(test)}, "splits")
    resolved = compute_boundaries(splits, [(str(when), count) for when, count in enumerate(counts)])
    decide = Splitter(splits.model_copy(update={"boundaries": resolved}))
    rows: Counter[str] = Counter()
    for when, count in enumerate(counts):
        rows[str(decide.assign_by_time(str(when)))] += count

    assert rows["test"] <= test * sum(counts)
    assert rows["validation"] + rows["test"] <= (validation + test) * sum(counts)


@pytest.mark.parametrize("values", [{"group_key": ["a", "b"]}, {"time_key": "t", "boundaries": {"test": "2024-01-01"}}])
def test_splits_survive_their_own_dump(values: dict[str, object]) -> None:
    splits = validate_options(Splits, values, "splits")

    assert Splits.model_validate(splits.model_dump()) == splits


# ── By number of rows ──────────────────────────────────────────────────────────────────────────────


def cut(rows: list[int], **values: object) -> list[int]:
    """Return how many units are in train, validation and test; units are in the order of their positions."""
    options = validate_options(Splits, {"validation": 0, "test": 0, "method": "exact", **values}, "splits")
    places = np.arange(1, len(rows) + 1, dtype=np.uint64) << np.uint64(40)
    return np.bincount(splits.assign_exact_splits(options, places, np.array(rows, np.int64)), minlength=3).tolist()


@pytest.mark.parametrize(("groups", "rows", "test"), [(2000, 10, 100), (1000, 20, 50), (200, 1, 10)])
def test_exact_twentieth_of_equal_groups_is_a_twentieth_of_the_rows(groups: int, rows: int, test: int) -> None:
    assert cut([rows] * groups, test=0.05) == [groups - test, 0, test]


def test_exact_split_takes_the_nearest_number_of_rows_and_leaves_a_unit_everywhere() -> None:
    assert cut([10] * 10, test=24) == [8, 0, 2]
    assert cut([10] * 10, test=26) == [7, 0, 3]
    assert cut([10] * 10, test=25) == [8, 0, 2]

    assert cut([1000, 1, 1], validation=1, test=1) == [1, 1, 1]
    assert cut([10, 10, 10], validation=0.45, test=0.45) == [1, 1, 1]
    assert cut([10, 10], test=19) == [1, 0, 1]
    assert cut([10], validation=5, test=5) == [1, 0, 0]

    assert cut([10] * 100, validation=0.2, test=0.3, max_rows=55) == [90, 5, 5]
    assert cut([10] * 100, test=0.3, max_rows=3) == [99, 0, 1]

    options = validate_options(Splits, {"validation": 0.1, "test": 300, "max_rows": 200}, "splits")

    assert options.is_exact
    assert (options.wanted_rows("validation", 1000), options.wanted_rows("test", 1000)) == (100, 200)


@given(rows=st.lists(st.integers(1, 30), min_size=1, max_size=60), wanted=st.integers(1, 200))
def test_exact_split_is_as_close_as_whole_units_in_order_allow(rows: list[int], wanted: int) -> None:
    [_, _, units] = cut(rows, test=wanted)
    held = sum(rows[len(rows) - units :])

    choices = [sum(rows[len(rows) - n :]) for n in range(1, len(rows))]
    assert abs(held - wanted) == min((abs(one - wanted) for one in choices), default=wanted)
