"""Great Expectations and the comparison that closes gates decide alike; verify says so where they do not."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.checks import expectation_suite, judge
from rowmill.checks.catalog import CHECKS
from rowmill.checks.gates import ExpectationType, Threshold
from rowmill.cli import main
from rowmill.core.storage import Store
from rowmill.schema.manifest import Manifest
from tests.support.recipes import PAIR, Workspace, pair

pytestmark = pytest.mark.slow

NUMBERS = st.one_of(
    st.sampled_from(
        [0.0, -0.0, 0.05, 0.1, 1.0, math.nextafter(0.05, 1), math.nextafter(0.05, 0), -1e300, 1e300, 5e-324]
    ),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(2**53), 2**53).map(float),
)
Rule = tuple[str, float | None, float | None, float]
"""An expectation's name, its two bounds, and the number that is asked about."""


def threshold(number: int, kind: str, low: float | None, high: float | None) -> Threshold:
    rule = {"type": kind, "column": f"fact_{number}", "min_value": low, "max_value": high}
    return Threshold(f"rule_{number}", "at_most", 0.0, "error", "a fact", "mend it", expectation=rule)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    low, high = draw(st.one_of(st.none(), NUMBERS)), draw(st.one_of(st.none(), NUMBERS))
    if low is not None and high is not None and low > high:
        low, high = high, low
    bound = high if low is None else low
    if bound is None:
        low = bound = draw(NUMBERS)
    return draw(st.sampled_from(get_args(ExpectationType))), low, high, draw(st.one_of(st.just(bound), NUMBERS))


@settings(max_examples=15, deadline=None)
@given(st.lists(rules(), min_size=20, max_size=40))
def test_rules_hold_exactly_where_the_library_says_so(
    drawn: list[tuple[str, float | None, float | None, float]],
) -> None:
    asked = [(threshold(i, kind, low, high), value) for i, (kind, low, high, value) in enumerate(drawn)]
    answers = expectation_suite.run_expectation_suite(asked)

    assert answers == {one.check: one.holds(value) for one, value in asked}


def test_every_check_holds_at_its_bound_and_not_beyond_it() -> None:
    asked: list[tuple[Threshold, float]] = []
    for i, check in enumerate(CHECKS):
        for j, value in enumerate(
            (check.bound, math.nextafter(check.bound, math.inf), math.nextafter(check.bound, -math.inf))
        ):
            bound = Threshold(f"{check.name}_{i}_{j}", check.direction, check.bound, "error", check.what, check.remedy)
            asked.append((bound, value))
    answers = expectation_suite.run_expectation_suite(asked)

    assert answers == {one.check: one.holds(value) for one, value in asked}
    assert {True, False} == set(answers.values())


@pytest.mark.parametrize("passed", [True, False])
def test_result_that_the_library_contradicts_is_named(tmp_path: Path, *, passed: bool) -> None:
    value = 0.04 if passed else 0.06
    made = Manifest(("r", "rows", "canonical_rows"), "canonical_rows", "f" * 32, "0", {}, (), {"rejects": value})
    bound = Threshold("rejects", "at_most", 0.05, "error", "share", "mend it")
    (result,) = judge.run_checks(Store(str(tmp_path)), made, [bound])

    assert result.passed is passed
    assert list(expectation_suite.find_disagreements([result], [bound])) == []
    (said,) = expectation_suite.find_disagreements([replace(result, passed=not passed)], [bound])
    assert said.startswith(
        f"r/rows/canonical_rows: rejects {value:g}: Great Expectations {'passes' if passed else 'fails'}"
    )


def test_verify_fails_if_the_library_contradicts_a_saved_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [pair(i) for i in range(5)], PAIR)
    built = workspace.build()
    assert main.main(["verify", str(workspace.config)]) == main.ExitStatus.SUCCESS
    store, folder = built.project.store, "mini/rows/canonical_rows/check_results"
    (name,) = store.list(folder)
    saved = store.read_sealed(f"{folder}/{name}")
    assert saved is not None
    (nonempty,) = [one for one in saved["results"].values() if one["check"] == "nonempty"]
    nonempty["passed"] = False
    store.write_sealed(f"{folder}/{name}", saved)
    capsys.readouterr()

    status = main.main(["verify", str(workspace.config)])

    assert status == main.ExitStatus.GATE_CLOSED
    shown = " ".join(capsys.readouterr().out.split())
    assert "nonempty 5: Great Expectations passes, the saved result fails" in shown
    assert "1 denied by Great Expectations" in shown
    assert "damaged" not in shown


@pytest.mark.campaign
def test_build_never_imports_the_library_and_verify_does(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [pair(i) for i in range(5)], PAIR)
    program = (
        "import sys; from rowmill.cli import main; status = main.main(sys.argv[1:]); "
        "print(status, 'great_expectations' in sys.modules)"
    )
    last = [
        subprocess.run(
            [sys.executable, "-c", program, verb, str(workspace.config)], capture_output=True, text=True, check=True
        ).stdout.splitlines()[-1]
        for verb in ("build", "verify")
    ]

    assert last == [f"{main.ExitStatus.SUCCESS} False", f"{main.ExitStatus.SUCCESS} True"]
