"""The verdict of a build: closed gates before what is missing, before what is out of date, before warnings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rowmill.core.errors import GateError
from rowmill.reports.build_view import BuildView, load_build_view
from tests.reports.conftest import with_hostile_rows
from tests.support.recipes import LENIENT, Built


def find_verdict(build: BuildView) -> tuple[str, str]:
    mark, _, sentence = build.verdict
    return mark, sentence


@pytest.mark.slow
def test_complete_build_is_ready(reported: Built) -> None:
    build = load_build_view(reported.project)
    assert find_verdict(build) == ("✓", "Ready to train: everything is built, and every applicable check passed")


def test_missing_and_outdated_steps_are_counted(reported: Built) -> None:
    build = load_build_view(reported.project)
    ranks = build.made["mini", "gpu_partitions"]
    assert ranks is not None

    missing = BuildView(build.project, {**build.made, ranks.key: None})
    outdated = BuildView(build.project, {**build.made, ranks.key: replace(ranks, code_version="older")})

    assert find_verdict(missing) == ("!", "Not complete: 1 step of 12 not built")
    assert find_verdict(outdated) == ("!", "Out of date: options of 1 step changed")


@pytest.mark.parametrize(
    ("gates", "wanted"),
    [
        ({"rejects": {"at_most": 0.01}}, ("✗", "Not ready: 1 failed check closes its gate")),
        ({"rejects": {"at_most": 0.01, "severity": "warn"}}, ("✓", "Ready to train, with 1 warning")),
    ],
)
def test_closed_gate_and_warning_are_told_apart(tmp_path: Path, gates: dict[str, Any], wanted: tuple[str, str]) -> None:
    workspace = with_hostile_rows(tmp_path, gates=LENIENT | gates, partitions={"world_size": 1})
    try:
        workspace.build()
    except GateError:
        assert wanted[0] == "✗"
    build = load_build_view(workspace.project)
    assert find_verdict(build) == wanted
    assert [one.check for one in build.failed] == ["rejects"]
