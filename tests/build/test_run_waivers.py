"""Waivers of one run: added before the recipe's, named as such, and proposed with a bound that the value keeps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rowmill.build.gate import add_run_waivers, propose_run_waiver, propose_run_waivers
from rowmill.build.steps import Project, find_step
from rowmill.checks.gates import RUN_WAIVER_PREFIX
from rowmill.checks.judge import CheckResult
from rowmill.core.errors import ConfigError
from rowmill.core.storage import Store
from rowmill.recipe import recipe
from tests.support.tiny_project import RECIPE

WAIVER = {"check": "unknown_roles", "dataset": "chats", "at_most": 0.25, "reason": "narrators are wanted here"}
ROWS = ("tiny", "chats", "canonical_rows")
FAILED = CheckResult(
    check="unknown_roles", key=ROWS, version="0" * 32, threshold_digest="", value=0.33412, bound=0.01,
    wanted="at most 1 %", severity="error", passed=False, blocking=True, what="", remedy="",
)  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Project:
    loaded = recipe.parse_recipe(dict(RECIPE), name="tiny", where="tiny.yaml", base=tmp_path)
    return Project(loaded, Store(str(tmp_path)), tmp_path)


def test_waiver_covers_its_check_and_is_part_of_the_identity_of_what_is_built_on_it(project: Project) -> None:
    accepted = add_run_waivers(project, [WAIVER], "run")
    [judged] = [one for one in find_step(accepted, ROWS).thresholds if one.check == "unknown_roles"]
    assert (judged.waiver_bound, judged.waiver_reason) == (0.25, RUN_WAIVER_PREFIX + str(WAIVER["reason"]))
    # What is built on the rows differs; the rows themselves do not.
    assert find_step(accepted, ROWS).code_version == find_step(project, ROWS).code_version
    below = ("tiny", "chats", "tokenized_examples")
    assert find_step(accepted, below).code_version != find_step(project, below).code_version
    assert not project.recipe.gates.waivers


def test_waiver_of_the_run_comes_before_the_recipes(project: Project) -> None:
    recipes = add_run_waivers(project, [WAIVER | {"at_most": 0.02}], "run")
    accepted = add_run_waivers(recipes, [WAIVER], "run")
    [judged] = [one for one in find_step(accepted, ROWS).thresholds if one.check == "unknown_roles"]
    assert judged.waiver_bound == 0.25
    assert add_run_waivers(project, [], "run") is project


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"check": "unknown_role"}, r"run\.0: .*did you mean unknown_roles\?"),
        ({"check": "mask_verified"}, r"run\.0: .*guards correctness"),
        ({"dataset": "chat"}, r"run\.0: dataset: 'chat' is not a dataset; choose chats or tasks"),
        ({"reason": ""}, r"run\.0: reason: .*at least 10"),
    ],
)
def test_invalid_waiver_is_refused_with_its_place(project: Project, change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        add_run_waivers(project, [WAIVER | change], "run")


@pytest.mark.parametrize(("value", "bound"), [(0.33412, 0.34), (0.2, 0.2), (0.000912, 0.00092), (1.0, 1), (12.0, 12)])
def test_proposed_waiver_lets_the_value_pass_and_needs_a_reason(project: Project, value: float, bound: float) -> None:
    proposed = propose_run_waiver(replace(FAILED, value=value))

    assert proposed == {"check": "unknown_roles", "dataset": "chats", "at_most": bound, "reason": ""}
    assert bound >= value
    assert proposed is not None
    with pytest.raises(ConfigError, match="reason"):
        add_run_waivers(project, [proposed], "run")


def test_proposal_keeps_what_the_run_was_given_and_adds_what_failed_nevertheless() -> None:
    dropped = replace(FAILED, check="content_dropped", key=("tiny", "chats", "tokenized_examples"), value=0.3373)
    widened = {"check": "content_dropped", "dataset": "chats", "at_most": 0.34, "reason": ""}
    too_low = widened | {"at_most": 0.1, "reason": "too low a bound"}
    assert propose_run_waivers([dropped], [WAIVER]) == [WAIVER, widened]
    assert propose_run_waivers([dropped], [WAIVER, too_low]) == [WAIVER, widened]


@pytest.mark.parametrize(
    "change",
    [{"blocking": False}, {"value": None}, {"check": "mask_verified"}, {"check": "a_rule_of_the_recipe"}],
    ids=["not_blocking", "not_measured", "never_waivable", "own_rule"],
)
def test_nothing_is_proposed_where_a_waiver_would_not_help(change: dict[str, Any]) -> None:
    assert propose_run_waiver(replace(FAILED, **change)) is None
