"""Positions from order columns: formats found over all values, exact steps, days that roll over.

What belongs here: laws and golden values of `ordering.py` and `iso8601.py`. What does not: sorting records.
"""

import pickle
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.errors import ConfigError
from pipelines.ordering import Order, find_order, named_order
from pipelines.records import Column, ColumnType

TEXT = Column("t", "string")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def seconds(passed: timedelta) -> Decimal:
    return Decimal(passed // timedelta(microseconds=1)) / 1_000_000


@pytest.mark.parametrize(
    ("values", "name", "positions"),
    [
        (["2024-01-01", "2024-01-02"], "iso8601", [1704067200, 1704153600]),
        (["2013-01-01T06:00:00Z"], "iso8601", [1357020000]),
        (["2024-01-01 00:00:00.25+01:00"], "iso8601", [Decimal("1704063600.25")]),
        (["01/02/2024", "13/02/2024"], "%d/%m/%Y", [1706745600, 1707782400]),
        (["02/01/2024", "02/13/2024"], "%m/%d/%Y", [1706745600, 1707782400]),
        (["Jan 1 2000", "Feb 1 2000"], "%b %d %Y", [946684800, 949363200]),
        (["23:00", "00:00", "00:00:30"], "%H:%M[:%S]", [82800, 86400, 86430]),
        (["b", "a"], "text", ["b", "a"]),
    ],
)
def test_auto_finds_the_format_that_reads_every_value(values: list[str], name: str, positions: list[Any]) -> None:
    order = find_order(TEXT, values)

    assert order.name == name
    assert order.series(values) == positions


def test_auto_with_two_formats_that_disagree_names_both_and_a_value() -> None:
    with pytest.raises(ConfigError, match=r"%d/%m/%Y and %m/%d/%Y both read .* disagree on '01/02/2024'"):
        find_order(TEXT, ["01/02/2024", "02/02/2024"])


def test_auto_with_two_formats_that_agree_on_every_value_takes_one() -> None:
    assert find_order(TEXT, ["01/01/2024", "02/02/2024"]).series(["02/02/2024"]) == [1706832000]


def test_auto_without_a_format_for_a_time_names_the_nearest_and_what_it_cannot_read() -> None:
    with pytest.raises(ConfigError, match=r"iso8601 comes nearest and does not read 'soon'.*write the format"):
        find_order(TEXT, ["2024-01-01", "soon"], must_be_time=True)


@pytest.mark.parametrize(
    ("kind", "value", "position"),
    [
        ("integer", 5, 5),
        ("float", 0.1, Decimal("0.1")),
        ("decimal", Decimal("42.50"), Decimal("42.50")),
        ("duration", Decimal(90), Decimal(90)),
        ("datetime", "2024-01-15T00:00:00+02:00", 1705269600),
        ("date", "1969-12-31", -86400),
        ("time", "00:01:00.5", Decimal("60.5")),
    ],
)
def test_typed_columns_have_their_own_order(kind: ColumnType, value: Any, position: Any) -> None:
    assert find_order(Column("t", kind), [value]).read(value) == position


@pytest.mark.parametrize("value", [None, "", "soon", 1, "2024-13-01", "01/02/24"])
def test_value_in_no_or_another_format_has_no_position(value: Any) -> None:
    assert Order("iso8601").read(value) is None


def test_column_without_an_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="column 't' is boolean, which has no order"):
        find_order(Column("t", "boolean"), [True])


def test_set_format_reads_by_strptime_and_a_word_is_refused() -> None:
    order = named_order("%Y%m%d %H", TEXT)

    assert order.read("20240101 01") == 1704070800
    assert named_order("%H.%M", TEXT).series(["23.30", "00.30"]) == [84600, 88200]
    with pytest.raises(ConfigError, match="'iso' is no format"):
        named_order("iso", TEXT)


def test_order_that_was_used_goes_to_another_process() -> None:
    order = Order("%Y-%m")
    order.read("2024-01")

    assert pickle.loads(pickle.dumps(order)).read("2024-01") == 1704067200


@given(st.datetimes(timezones=st.just(UTC)), st.datetimes(timezones=st.timezones()))
def test_instants_are_exact_seconds_and_compare_as_the_times_do(one: datetime, other: datetime) -> None:
    order = Order("iso8601")
    first = order.read(one.isoformat())
    second = order.read(other.isoformat())

    assert first == seconds(one - EPOCH)
    assert isinstance(first, int | Decimal)
    assert isinstance(second, int | Decimal)
    assert second - first == seconds(other - one)


@given(st.lists(st.times(), min_size=1))
def test_times_of_day_never_decrease_and_keep_their_clock(times: list[Any]) -> None:
    texts = [one.isoformat() for one in times]
    order = find_order(TEXT, texts)
    positions: list[Any] = [*order.series(texts)]

    assert positions == sorted(positions)
    assert [position % 86400 for position in positions] == [order.read(text) for text in texts]
