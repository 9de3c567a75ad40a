"""Canonical rows made before the stages run: the same output, counted as new, and nothing that names them."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from rowmill.build import early_parts, runner
from rowmill.build.early_parts import choose_early_steps, make_early_parts
from rowmill.build.steps import Project, plan_steps
from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.stages.base import EarlyWork
from tests.support.recipes import CHAT, Workspace, chat, document
from tests.support.tables import as_csv, purchases, records

DATASET = "rows"

pytestmark = pytest.mark.usefixtures("small_parts")


def write_chats(folder: Path) -> Workspace:
    """Write chats in several parts, of which some repeat earlier ones."""
    rows = [chat(i, words=40) for i in range(1200)]
    return Workspace(folder).one("chats.jsonl", [*rows, *rows[:300:7]], CHAT)


def make_early(project: Project, *, stops_after: int | None = None) -> EarlyWork:
    """Make parts in this process; it is asked to stop after some of them."""
    chosen = list(choose_early_steps(project, plan_steps(project), [DATASET]))
    asked = count()
    return make_early_parts(project, chosen, lambda: stops_after is not None and next(asked) >= stops_after)


def build(workspace: Workspace, early: EarlyWork) -> list[runner.StepReport]:
    return [report for _, report, _ in runner.build(replace(workspace.project, early=early))]


# ── What is made ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stops_after", [0, 2, None])
def test_a_build_goes_on_from_the_parts_and_counts_them_as_its_own(tmp_path: Path, stops_after: int | None) -> None:
    alone = write_chats(tmp_path / "alone").build()
    workspace = write_chats(tmp_path / "early")
    early = make_early(workspace.project, stops_after=stops_after)
    assert not list(workspace.store.rglob("manifests")), "something names the parts"

    reports = build(workspace, early)

    expected = [alone.report(*report.manifest.key[1:]) for report in reports]
    assert len(early.parts) == (stops_after if stops_after is not None else expected[1].parts)
    for one, other in zip(reports, expected, strict=True):
        assert (one.version, one.parts, one.parts_reused, one.rows_made) == (
            other.version,
            other.parts,
            other.parts_reused,
            other.rows_made,
        )


def test_parts_made_early_are_not_made_again(tmp_path: Path) -> None:
    workspace = write_chats(tmp_path)
    early = make_early(workspace.project)
    written = {path: path.stat().st_mtime_ns for path in workspace.store.rglob("part.json")}

    build(workspace, early)

    assert len(written) == len(early.parts)
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_the_parts_of_a_table_are_its_types(tmp_path: Path) -> None:
    source = as_csv(purchases(200))
    workspace = Workspace(tmp_path).one("rows.csv", source, records())

    early = make_early(workspace.project)

    assert len(early.parts) == 1
    assert build(workspace, early)


def test_a_source_that_changed_meanwhile_is_read_again(tmp_path: Path) -> None:
    workspace = write_chats(tmp_path)
    early = make_early(workspace.project)
    workspace.write("chats.jsonl", [chat(i) for i in range(7)])

    reports = build(workspace, early)

    assert reports[0].rows_made == 7
    assert (reports[1].parts_reused, reports[1].rows_made) == (0, 7)


def test_what_cannot_be_read_is_left_to_the_build(tmp_path: Path) -> None:
    workspace = write_chats(tmp_path)
    (tmp_path / "data" / "chats.jsonl").unlink()

    assert make_early(workspace.project) == EarlyWork()


# ── Which datasets ─────────────────────────────────────────────────────────────────────────────────


def test_rows_that_are_not_built_or_were_built_already_are_not_begun(tmp_path: Path) -> None:
    workspace = write_chats(tmp_path)
    steps = plan_steps(workspace.project)
    without_rows = [step for step in steps if step.name != CANONICAL_ROWS]

    assert not list(choose_early_steps(workspace.project, without_rows, [DATASET]))
    assert len(list(choose_early_steps(workspace.project, steps, [DATASET]))) == 1
    workspace.build()
    assert not list(choose_early_steps(workspace.project, steps, [DATASET]))


def test_one_worker_and_little_input_start_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: object) -> None:
        raise AssertionError(work)

    monkeypatch.setattr(early_parts, "fork_helper", fail)
    few, many = [chat(1)], [document(i, words=400) for i in range(1200)]
    for workers, rows in ((2, few), (1, many)):
        workspace = Workspace(tmp_path / str(workers))
        source = {"train_urls": [workspace.write("rows.jsonl", rows)]}
        project = workspace.recipe({"rows": {"source": source}}, execution={"workers": workers}).project
        assert early_parts.start_early_parts(project, plan_steps(project), [DATASET]) is None
