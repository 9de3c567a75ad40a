"""Ambiguous times in columns: which rows are found, and which orders are left alone."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.kinds.tables.part_rows import mark_zones
from rowmill.kinds.tables.partitions import RowIndex, build_row_index
from rowmill.kinds.tables.schema import ISO8601
from rowmill.kinds.tables.table_rows import UNITS, EpochUnits, find_repeated_hours, find_repeated_times

ENDS_OF_DAYLIGHT_SAVING = {
    "America/New_York": datetime(2024, 11, 3, 6, tzinfo=UTC),
    "America/Sao_Paulo": datetime(2018, 2, 18, 2, tzinfo=UTC),
    "Australia/Sydney": datetime(2024, 4, 6, 16, tzinfo=UTC),
    "Europe/Berlin": datetime(2024, 10, 27, 1, tzinfo=UTC),
}
"""Zone → when its clocks are put back."""


def index_of(times: Sequence[str], groups: Sequence[str] | None = None) -> RowIndex:
    """Index times as one series, or in the given groups."""
    keys = pa.array([f'"{group}"' for group in groups] if groups else [None] * len(times), pa.string())
    positions = [str(ISO8601.read(time)) for time in times]
    table = pa.table({"split": ["train"] * len(times), "group_key": keys, "order_key": positions})
    return build_row_index([table], ISO8601, has_keys=groups is not None, is_series=True)


def on(*clocks: str, day: str = "2024-10-27") -> list[str]:
    return [f"{day}T{clock}" for clock in clocks]


def local_times(zone: str, minutes: int) -> list[str]:
    """Return the local times of a series over 24 hours, in the middle of which daylight saving ends."""
    begin = ENDS_OF_DAYLIGHT_SAVING[zone] - timedelta(hours=12)
    instants = [begin + timedelta(minutes=minutes * i) for i in range(24 * 60 // minutes)]
    return [instant.astimezone(ZoneInfo(zone)).replace(tzinfo=None).isoformat() for instant in instants]


# ── Hours ──────────────────────────────────────────────────────────────────────────────────────────


def test_second_pass_of_an_hour_is_found_in_the_series_that_has_it() -> None:
    index = index_of(on("01:30", "02:00", "02:30", "02:00", "02:30", "03:00", "03:30"))

    found = find_repeated_hours(index)

    assert (found.rows.tolist(), found.others.tolist(), found.begins.tolist()) == ([3, 4], [2, 2], [True, False])

    times = on("02:00", "02:00", "02:30", "02:30", "02:00", "03:00", "02:30", "03:30", "03:00", "04:00")

    found = find_repeated_hours(index_of(times, "ABABABABAB"))

    assert (found.rows.tolist(), found.others.tolist()) == ([4, 6], [2, 2])


@pytest.mark.parametrize("zone", ENDS_OF_DAYLIGHT_SAVING)
@pytest.mark.parametrize("minutes", [1, 5, 10, 15, 20, 30])
@pytest.mark.parametrize("newest_first", [False, True])
def test_hour_that_a_zone_repeats_is_found_at_every_interval(zone: str, minutes: int, newest_first: bool) -> None:
    times = local_times(zone, minutes)

    found = find_repeated_hours(index_of(times[::-1] if newest_first else times))

    middle, hour = len(times) // 2, 60 // minutes
    own = range(middle, middle + hour)
    assert found.rows.tolist() == [len(times) - 1 - row if newest_first else row for row in own]
    assert found.begins.tolist() == [True, *[False] * (hour - 1)]


@pytest.mark.parametrize("minutes", [60, 120])
def test_hourly_times_only_repeat_and_longer_steps_are_in_order(minutes: int) -> None:
    index = index_of(local_times("Europe/Berlin", minutes))

    assert find_repeated_hours(index).rows.tolist() == []
    assert len(find_repeated_times(index).rows) == (1 if minutes == 60 else 0)


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(on("02:00:00", "02:00:10", "02:00:08", "02:00:20", "02:00:30"), id="a late record"),
        pytest.param(on("14:00", "14:30", "14:00", "14:30", "15:00"), id="by day"),
        pytest.param(on("02:00", "02:30", "03:00", "01:00", "01:30"), id="two hours back"),
        pytest.param(on("02:00", "02:30", "01:45", "02:15", "01:50", "03:00", "00:10", "02:59"), id="out of order"),
        pytest.param(on("02:00", "02:30", "03:00", "03:30"), id="in order"),
        pytest.param(on("02:00"), id="one row"),
    ],
)
def test_other_steps_back_are_no_repeated_hour(times: list[str]) -> None:
    assert find_repeated_hours(index_of(times)).rows.tolist() == []


@given(st.sets(st.integers(0, 10**6), min_size=1), st.booleans())
def test_source_in_order_has_no_repeated_hour_and_no_repeated_time(seconds: set[int], newest_first: bool) -> None:
    begin = datetime(2024, 10, 20, tzinfo=UTC)
    instants = sorted(begin + timedelta(seconds=passed) for passed in seconds)
    index = index_of([one.replace(tzinfo=None).isoformat() for one in instants[:: -1 if newest_first else 1]])

    assert find_repeated_hours(index).rows.tolist() == []
    assert find_repeated_times(index).rows.tolist() == []


# ── Repeated times ─────────────────────────────────────────────────────────────────────────────────


def test_time_repeats_only_in_its_own_series_and_by_its_instant() -> None:
    times = on("01:00", "01:00", "02:00", "01:00", "01:00", "03:00")

    found = find_repeated_times(index_of(times, "ABABBA"))

    assert (found.rows.tolist(), found.others.tolist()) == ([3, 4], [1, 3])

    index = index_of(["2024-01-01T02:00:00+02:00", "2024-01-01T00:00:00Z", "2024-01-01T00:00:01Z"])

    assert find_repeated_times(index).rows.tolist() == [1]


# ── Zones ──────────────────────────────────────────────────────────────────────────────────────────


def test_zones_are_offsets_and_z_at_the_end_of_a_time() -> None:
    zoned = [
        "2024-01-01T00:00Z",
        "2024-01-01 00:00:00+0200",
        "2024-01-01T00:00:00.5-05:30 ",
        "2024-01-01T00:00+01:02:03",
    ]
    unzoned = ["2024-01-01", "2024-01-01T00:00", "2024-01-01 00:00:00.123456789", "", None]

    assert mark_zones(pa.array(zoned + unzoned, pa.large_string())).tolist() == [True] * 4 + [False] * 5


# ── Units ──────────────────────────────────────────────────────────────────────────────────────────


def units_of(numbers: Sequence[float]) -> EpochUnits:
    return EpochUnits.of(np.array(numbers, np.float64), 0)


@pytest.mark.parametrize("unit", [1, 2, 3])
def test_number_of_another_unit_is_found_whichever_is_more_frequent(unit: int) -> None:
    seconds = [1_700_000_000 + 60 * i for i in range(50)]

    rarely = units_of([*seconds, 1_700_003_000 * 1000**unit])
    mostly = units_of([1_700_000_000, *(second * 1000**unit for second in seconds)])

    assert rarely.find_mixed() == (0, [unit])
    assert rarely.first[unit] == (0, 50)
    assert mostly.find_mixed() == (unit, [0])
    assert UNITS[unit] != "seconds"


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(range(1, 2001), id="steps"),
        pytest.param(range(100_000_000, 2_000_000_000, 1_000_000), id="seconds of 60 years"),
        pytest.param([i**4 for i in range(1, 2001)], id="ids of all sizes"),
        pytest.param([150_000_000, 160_000_000, 9_000_000_000_000], id="sizes that are far apart"),
        pytest.param([0.1 * i for i in range(500)], id="elapsed"),
        pytest.param([], id="none"),
    ],
)
def test_other_numbers_have_one_unit(numbers: Sequence[float]) -> None:
    assert units_of(numbers).find_mixed()[1] == []


def test_units_of_parts_add_up_to_those_of_the_whole() -> None:
    numbers = [1_700_000_000, 1_700_000_000_000, 5, 1_700_000_060, 1_600_000_000_000_000]
    whole = units_of(numbers)

    parts = EpochUnits.of(np.array(numbers[:2], np.float64), 0).plus(
        EpochUnits.of(np.array(numbers[2:], np.float64), 1)
    )

    assert parts.counts.tolist() == whole.counts.tolist() == [2, 1, 1, 0, 1]
    assert (parts.lowest.tolist(), parts.highest.tolist()) == (whole.lowest.tolist(), whole.highest.tolist())
    assert parts.first == ((0, 0), (0, 1), (1, 2), None)
