"""Calls with a time limit: what they return and raise, and one that never returns."""

import threading

import pytest

from rowmill.core.remote import call_with_time_limit


def test_call_is_as_without_limit_or_given_up() -> None:
    assert call_with_time_limit(lambda: 7, 60) == 7
    with pytest.raises(KeyError, match="absent"):
        call_with_time_limit(lambda: {}["absent"], 60)

    def fail() -> None:
        raise TimeoutError("theirs")

    with pytest.raises(TimeoutError, match="theirs"):
        call_with_time_limit(fail, 60)
    let_go = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        call_with_time_limit(let_go.wait, 0.01)
    let_go.set()
