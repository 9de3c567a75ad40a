"""Positions from order columns: exact steps, days that roll over."""

import pickle
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.errors import ConfigError
from rowmill.kinds.tables.schema import CANDIDATES, TIME_OF_DAY, Column, SortKey, resolve_sort_key, zero_time_of_day

TEXT = Column("t", "string")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def seconds(passed: timedelta) -> Decimal:
    return Decimal(passed // timedelta(microseconds=1)) / 1_000_000


@pytest.mark.parametrize("value", [None, "", "soon", 1, "2024-13-01", "01/02/24"])
def test_value_in_another_format_has_no_position(value: Any) -> None:
    assert SortKey("iso8601").read(value) is None


def test_configured_format_is_strptime_can_be_pickled_and_unknown_words_are_refused() -> None:
    order = resolve_sort_key("%Y%m%d %H", TEXT)

    assert order.read("20240101 01") == 1704070800
    assert resolve_sort_key("%H.%M", TEXT).read_series(["23.30", "00.30"]) == [84600, 88200]
    with pytest.raises(ConfigError, match="unknown format 'iso'"):
        resolve_sort_key("iso", TEXT)

    order = SortKey("%Y-%m")
    order.read("2024-01")
    assert pickle.loads(pickle.dumps(order)).read("2024-01") == 1704067200


@pytest.mark.slow
@given(st.datetimes(timezones=st.just(UTC)), st.datetimes(timezones=st.timezones()))
def test_instants_are_exact_seconds_and_compare_as_the_times_do(one: datetime, other: datetime) -> None:
    first, second = (SortKey("iso8601").read(time.isoformat()) for time in (one, other))

    assert first == seconds(one - EPOCH)
    assert isinstance(first, int | Decimal)
    assert isinstance(second, int | Decimal)
    assert second - first == seconds(other - one)


@given(st.lists(st.times(), min_size=1))
def test_times_of_day_never_decrease_and_keep_the_time_of_day(times: list[Any]) -> None:
    texts = [one.isoformat() for one in times]
    positions: list[Any] = [*TIME_OF_DAY.read_series(texts)]
    assert positions == sorted(positions)
    assert [position % 86400 for position in positions] == [TIME_OF_DAY.read(text) for text in texts]


DAYS = st.sampled_from(
    ["2024-01-15", "2024-02-30", "1/2/2011", "2/13/2011", "02/02/2011", "0/0/2011", "2011/3/4", "1.2.2011",
     "1-Jan-2011", "Jan 1 2011", "Jan 2011", "x", ""]
)  # fmt: skip
CLOCKS = st.builds(
    "{}:{:02d}{}".format,
    st.sampled_from(["0", "9", "09", "10", "19", "23", "24", "30"]),
    st.sampled_from([0, 7, 59, 60]),
    st.sampled_from(["", ":00", ":59", ":60", ":07.5", "Z", "+01:00", " "]),
)


@given(DAYS, st.sampled_from([" ", "T", "", "  "]), CLOCKS)
def test_same_formats_read_a_text_with_zeros_for_its_time_of_day(day: str, between: str, clock: str) -> None:
    text = f"{day}{between}{clock}"
    zeroed = zero_time_of_day(text)

    for one in CANDIDATES:
        assert (one.read(text) is None) == (one.read(zeroed) is None)
        for other in CANDIDATES:
            assert (one.read(text) == other.read(text)) == (one.read(zeroed) == other.read(zeroed))
