"""The first entry of an asset's page: verdict, picture, three numbers, news; from real builds."""

import re
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from dagster_rowmill import stage_summary
from rowmill.build import runner
from rowmill.build.runner import StepReport
from rowmill.build.steps import Project, Step
from rowmill.checks import judge
from tests.support.tiny_project import FOREIGN_WARNINGS, Tiny, chat

pytestmark = FOREIGN_WARNINGS
LINK = "http://127.0.0.1:3001/tiny/report.html#chats/canonical_rows"


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Project, list[tuple[Step, StepReport]]]]:
    """Yield a project after two builds, the second with one more row, and the reports of the second."""
    with dg.DagsterInstance.ephemeral() as instance:
        tiny = Tiny(tmp_path_factory.mktemp("summary"), instance).write()
        runner.build(tiny.project)
        tiny.append("chats", chat(1000))
        yield tiny.project, [(step, report) for step, report, _ in runner.build(tiny.project)]


def write(project: Project, step: Step, report: StepReport) -> str:
    return stage_summary.write_summary(report.manifest, stage_summary.make_summary(project, step, report), LINK)


@pytest.mark.slow
def test_summary_of_every_stage_is_shown_inline_with_a_picture_and_three_numbers(
    builds: tuple[Project, list[tuple[Step, StepReport]]],
) -> None:
    project, reports = builds
    for step, report in reports:
        verdict, picture, numbers, _ = (text := write(project, step, report)).split("\n\n")

        assert len(text) < stage_summary.MAX_INLINE_CHARS
        assert re.match(r"\*\*Passed\*\* · (\d+ checks?|\d+ of \d+ checks warn\\\n`\w+` )", verdict)
        assert verdict.endswith(f"[report]({LINK})")
        assert "width='340'" in picture.replace("%20", " ")
        assert numbers.count("**") == 6


def test_news_are_the_numbers_that_changed_since_the_version_before(
    builds: tuple[Project, list[tuple[Step, StepReport]]],
) -> None:
    project, reports = builds
    news = {"/".join(step.key[1:]): write(project, step, report).rpartition("\n\n")[2] for step, report in reports}

    assert all(len(line) <= stage_summary.MAX_LINE_CHARS + 1 for one in news.values() for line in one.splitlines())
    assert re.fullmatch(r"Since \d{4}-\d\d-\d\d \d\d:\d\d UTC: rows \+1", news["chats/canonical_rows"])
    assert re.fullmatch(r"Unchanged since \d{4}-\d\d-\d\d \d\d:\d\d UTC", news["tasks/canonical_rows"])


def test_failed_checks_are_named_with_their_values_and_nothing_is_saved(tmp_path: Path) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        project = Tiny(tmp_path, instance).write(unknown_roles=12).project
        raw, rows = project.graph.steps[:2]
        report = runner.build(project, only=["raw_dataset"])[0][1]
        made = runner.run_step(project, rows, {raw.key: report.manifest})

        verdict, failure, *_ = write(project, rows, made).splitlines()

    assert re.fullmatch(r"\*\*Blocked\*\* · 1 of \d+ checks failed\\", verdict)
    assert failure == "`unknown_roles` 20 %\\"
    # A summary that opened a gate would be a way around the checks.
    assert judge.load_check_results(project.store, made.manifest, rows.thresholds) == []
