"""Calls with a time limit: what they return and raise, and one that never returns."""

import threading

import pytest

from rowmill.core.remote import call_with_time_limit


def test_call_that_returns_in_time_is_as_without_limit() -> None:
    assert call_with_time_limit(lambda: 7, 60) == 7
    with pytest.raises(KeyError, match="absent"):
        call_with_time_limit(lambda: {}["absent"], 60)


def test_time_limit_of_the_call_itself_is_its_own_error() -> None:
    def fail() -> None:
        raise TimeoutError("theirs")

    with pytest.raises(TimeoutError, match="theirs"):
        call_with_time_limit(fail, 60)


def test_call_that_does_not_return_is_given_up() -> None:
    let_go = threading.Event()

    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        call_with_time_limit(let_go.wait, 0.01)
    let_go.set()
