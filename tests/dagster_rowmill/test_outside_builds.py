"""What Dagster shows of builds that it did not see: made before its history began, or elsewhere."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import dagster as dg
import pytest

from dagster_rowmill.checks import find_checked_version
from dagster_rowmill.names import make_asset_key
from dagster_rowmill.outside_builds import make_outside_builds_sensor, report_unknown_outputs
from rowmill.build.steps import Step, list_rank_names, plan_steps
from rowmill.cli.error_boundary import ExitStatus
from rowmill.core.storage import Store
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest
from tests.support.cli_project import FOREIGN_WARNINGS, RECIPE, CliProject

pytestmark = [*FOREIGN_WARNINGS, pytest.mark.slow]


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliProject:
    """Return a project that was built before there was a home of Dagster."""
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    project = CliProject(tmp_path).write()
    assert project.rowmill("build") == ExitStatus.SUCCESS
    return project


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as found:
        yield found


def load_outputs(project: CliProject) -> list[tuple[Step, Manifest]]:
    """Return each step with its current output."""
    opened = project.project
    outputs = [(step, manifest.load_current(opened.store, step.key)) for step in plan_steps(opened)]
    return [(step, made) for step, made in outputs if made is not None]


def test_outputs_of_a_build_before_the_history_are_shown_with_checks_and_times(
    built: CliProject, instance: dg.DagsterInstance
) -> None:
    outputs = load_outputs(built)

    assert report_unknown_outputs(instance, built.project) == (len(outputs), 0)

    assert len(outputs) > 10
    for step, made in outputs:
        assert find_checked_version(instance, step.key) == made.version
        event = instance.get_latest_materialization_event(make_asset_key(step.key))
        assert event is not None
        assert event.timestamp == pytest.approx(datetime.fromisoformat(made.built_at).timestamp(), abs=0.001)
        assert event.asset_materialization is not None
        assert "summary" in event.asset_materialization.metadata
    assert instance.get_materialized_partitions(dg.AssetKey(["small", "ranks"])) == set(list_rank_names(built.project))
    assert report_unknown_outputs(instance, built.project) == (0, 0)


def test_failed_check_of_an_earlier_build_is_shown_as_failed(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    project = CliProject(tmp_path).write(gates=RECIPE["gates"] | {"rejects": {"at_most": 0}})
    assert project.rowmill("build", "--skip-preflight") == ExitStatus.GATE_CLOSED

    report_unknown_outputs(instance, project.project)

    check = dg.AssetCheckKey(dg.AssetKey(["small", "chats.canonical_rows"]), "rejects")
    [record] = instance.event_log_storage.get_asset_check_execution_history(check, limit=5)
    assert isinstance(record.evaluation, dg.AssetCheckEvaluation)
    assert not record.evaluation.passed


def test_output_of_a_run_that_is_still_going_is_left_to_it(built: CliProject, instance: dg.DagsterInstance) -> None:
    step, made = load_outputs(built)[0]
    run_id = "3d2f8c50-0000-4000-8000-000000000000"
    again = replace(made, run_id=run_id)
    _overwrite(built.project.store, again)
    run = dg.DagsterRun(job_name="rebuild_small", run_id=run_id, status=dg.DagsterRunStatus.STARTED)
    instance.run_storage.add_run(run)

    assert report_unknown_outputs(instance, built.project)[1] == 1
    assert instance.get_latest_materialization_event(make_asset_key(step.key)) is None

    instance.report_run_failed(run)
    assert report_unknown_outputs(instance, built.project) == (1, 0)


def _overwrite(store: Store, made: Manifest) -> None:
    manifest.make_current(store, manifest.save_manifest(store, made))


def test_output_of_an_older_version_of_the_code_is_marked_as_outdated(
    built: CliProject, instance: dg.DagsterInstance
) -> None:
    step, made = load_outputs(built)[0]
    _overwrite(built.project.store, replace(made, code_version="older"))

    report_unknown_outputs(instance, built.project)

    event = instance.get_latest_materialization_event(make_asset_key(step.key))
    assert event is not None
    assert event.asset_materialization is not None
    assert (event.asset_materialization.tags or {})["dagster/code_version"] == "older" != step.code_version


def test_sensor_reports_each_build_once_and_looks_no_further_until_the_next(
    built: CliProject, instance: dg.DagsterInstance
) -> None:
    sensor = make_outside_builds_sensor([built.project])

    def tick(cursor: str | None) -> tuple[str, str | None]:
        context = dg.build_sensor_context(instance=instance, cursor=cursor)
        said = sensor(context)
        assert isinstance(said, dg.SkipReason)
        return str(said.skip_message), context.cursor

    first, cursor = tick(None)
    second, _ = tick(cursor)
    built.append_chat(1000)
    assert built.rowmill("build", "--only", "raw_dataset") == ExitStatus.SUCCESS
    third, _ = tick(cursor)

    assert first == f"{len(load_outputs(built))} outputs of other builds reported"
    assert second == "nothing was built since the last tick"
    assert third == "1 outputs of other builds reported"


def test_storage_that_does_not_answer_is_said_in_the_tick(
    built: CliProject, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the storage does not answer")

    monkeypatch.setattr(manifest, "prefetch_current", fail)

    said = make_outside_builds_sensor([built.project])(dg.build_sensor_context(instance=instance))

    assert isinstance(said, dg.SkipReason)
    assert said.skip_message == "the storage does not answer"


def test_start_of_the_pages_reports_to_the_home_and_says_how_many(built: CliProject, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    command = [sys.executable, "-m", "dagster_rowmill.outside_builds"]
    places = {"DAGSTER_HOME": str(home), "DAGSTER_DISABLE_TELEMETRY": "1"}
    runs = [_run(command, built.folder, places) for _ in range(2)]

    assert runs == [f"Dagster shows {len(load_outputs(built))} outputs of earlier builds\n", ""]
    assert _run(command, tmp_path / "home", places) == ""


def _run(command: list[str], folder: Path, places: dict[str, str]) -> str:
    import os

    done = subprocess.run(command, cwd=folder, env=os.environ | places, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout
