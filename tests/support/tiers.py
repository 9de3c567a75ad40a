"""How much of a matrix or a property CI tries: the campaign tries all of it."""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import pytest

CaseT = TypeVar("CaseT")

CAMPAIGN_VARIABLE = "ROWMILL_TEST_CAMPAIGN"
"""Set by `--campaign`, before any test module is imported."""


def mark_all_but(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a parametrized test, marked `campaign` but for those that CI keeps.

    A case with several values is a tuple, and is kept if it, or its first value, is named.
    """
    marked: list[Any] = []
    left = list(kept)
    for case in cases:
        values = case if type(case) is tuple else (case,)
        name = case if case in left else values[0]
        if name in left:
            marked.append(case)
        else:
            marked.append(pytest.param(*values, marks=pytest.mark.campaign))
    return marked


def draw(count: int) -> int:
    """Return how many examples a property draws: all of them in the campaign, a third in CI."""
    return count if os.environ.get(CAMPAIGN_VARIABLE) else max(10, count // 3)


def take_third(cases: Sequence[CaseT]) -> list[CaseT]:
    """Return the cases that one test tries in turn: all of them in the campaign, every third in CI."""
    return list(cases if os.environ.get(CAMPAIGN_VARIABLE) else cases[::3])
