"""Shares of parts: every part is in one share, whatever the number of shares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.errors import ConfigError
from rowmill.core.storage import digest_json
from rowmill.executors import Share, parse_share


@given(st.integers(1, 40), st.lists(st.integers()))
def test_every_part_is_in_exactly_one_share(total: int, parts: list[int]) -> None:
    shares = [parse_share(f"{number}/{total}") for number in range(1, total + 1)]
    for fingerprint in map(digest_json, parts):
        assert [share.has(fingerprint) for share in shares].count(True) == 1


def test_shares_are_about_equal() -> None:
    names = [digest_json(i) for i in range(8000)]
    counts = [sum(map(Share(number, 8).has, names)) for number in range(1, 9)]
    assert sum(counts) == 8000
    assert min(counts) > 850


def test_share_is_printed_as_it_was_given() -> None:
    assert str(parse_share("2/8")) == "2/8"


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "0/0", "a/b", "-1/3", "1/3/5", "", "1/3 ", "\u0661/3"])
def test_wrong_share_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not one of N shares; allowed is I/N with I from 1 .*; number the jobs"):
        parse_share(text)
