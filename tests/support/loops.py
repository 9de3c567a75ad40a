"""Hundreds of small cases as one test: each is tried, and every one that fails is named.

A parametrized test costs each worker a collected item per case, and a run a report of it; a case of a millisecond is
better tried in a loop. Cases that need fixtures of their own stay parametrized.
"""

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any


def for_each(name: str, cases: Iterable[Any], ids: Callable[[Any], str] = str) -> Callable[[Any], Any]:
    """Call the test once per case, given as the argument `name`; fail with the list of the cases that failed."""
    tried = list(cases)
    assert tried, "a loop over nothing cannot fail"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_all(**fixtures: Any) -> None:
            failed: list[str] = []
            for case in tried:
                try:
                    test(**{name: case}, **fixtures)
                except Exception as error:  # noqa: BLE001 - whatever a case raises is its failure
                    failed.append(f"{ids(case)}: {''.join(traceback.format_exception(error, limit=-2))}")
            assert not failed, f"{len(failed)} of {len(tried)} cases fail:\n" + "\n".join(failed[:20])

        signature = inspect.signature(test)
        others = [one for one in signature.parameters.values() if one.name != name]
        run_all.__signature__ = signature.replace(parameters=others)  # pyrefly: ignore[missing-attribute]
        return run_all

    return decorate
