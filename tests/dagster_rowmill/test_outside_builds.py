"""What Dagster shows of builds that it did not see: made before its history began, or elsewhere."""

import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import dagster as dg
import pytest

from dagster_rowmill.factory import find_checked_version
from dagster_rowmill.names import make_asset_key
from dagster_rowmill.outside_builds import make_outside_builds_sensor, report_unknown_outputs
from rowmill.build.steps import Step, plan_steps
from rowmill.cli.error_boundary import ExitStatus
from rowmill.core.storage import Store
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest
from rowmill.stages.gpu_partitions import rank_names
from tests.support.cli_project import RECIPE, CliProject

pytestmark = pytest.mark.slow


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliProject:
    """Return a project that was built before there was a home of Dagster."""
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    project = CliProject(tmp_path).write()
    project.run("build")
    return project


def load_outputs(project: CliProject) -> list[tuple[Step, Manifest]]:
    """Return each step with its current output."""
    return [(step, project.current(*step.key[1:])) for step in plan_steps(project.project)]


def shown(instance: dg.DagsterInstance, step: Step) -> tuple[dg.EventLogEntry, dg.AssetMaterialization]:
    """Return the newest event of a step's asset, and the materialization in it."""
    event = instance.get_latest_materialization_event(make_asset_key(step.key))
    assert event is not None
    assert event.asset_materialization is not None
    return event, event.asset_materialization


def test_outputs_of_a_build_before_the_history_are_shown_with_checks_and_times(
    built: CliProject, instance: dg.DagsterInstance
) -> None:
    outputs = load_outputs(built)
    assert report_unknown_outputs(instance, built.project) == (len(outputs), 0)
    assert len(outputs) > 10
    for step, made in outputs:
        assert find_checked_version(instance, step.key) == made.version
        event, materialization = shown(instance, step)
        assert event.timestamp == pytest.approx(datetime.fromisoformat(made.built_at).timestamp(), abs=0.001)
        assert "summary" in materialization.metadata
    assert instance.get_materialized_partitions(dg.AssetKey(["small", "ranks"])) == set(
        rank_names(built.project.recipe.partitions.world_size)
    )
    assert report_unknown_outputs(instance, built.project) == (0, 0)


def test_failed_check_of_an_earlier_build_is_shown_as_failed(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    project = CliProject(tmp_path).write(gates=RECIPE["gates"] | {"rejects": {"at_most": 0}})
    project.run("build", "--skip-preflight", status=ExitStatus.GATE_CLOSED)
    report_unknown_outputs(instance, project.project)
    check = dg.AssetCheckKey(dg.AssetKey(["small", "chats.canonical_rows"]), "rejects")
    [record] = instance.event_log_storage.get_asset_check_execution_history(check, limit=5)
    assert isinstance(record.evaluation, dg.AssetCheckEvaluation)
    assert not record.evaluation.passed


def test_output_of_a_run_that_is_still_going_is_left_to_it_and_old_code_is_marked(
    built: CliProject, instance: dg.DagsterInstance
) -> None:
    (step, made), (old_step, old), *_ = load_outputs(built)
    _overwrite(built.project.store, replace(old, code_version="older"))
    run_id = "3d2f8c50-0000-4000-8000-000000000000"
    _overwrite(built.project.store, replace(made, run_id=run_id))
    run = dg.DagsterRun(job_name="rebuild_small", run_id=run_id, status=dg.DagsterRunStatus.STARTED)
    instance.run_storage.add_run(run)

    assert report_unknown_outputs(instance, built.project)[1] == 1
    assert instance.get_latest_materialization_event(make_asset_key(step.key)) is None
    instance.report_run_failed(run)
    assert report_unknown_outputs(instance, built.project) == (1, 0)
    _, materialization = shown(instance, old_step)
    assert (materialization.tags or {})["dagster/code_version"] == "older" != old_step.code_version


def _overwrite(store: Store, made: Manifest) -> None:
    manifest.make_current(store, manifest.save_manifest(store, made))


def test_sensor_reports_each_build_once_or_says_that_the_storage_does_not_answer(
    built: CliProject, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
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
    built.run("build", "--only", "raw_dataset")
    third, _ = tick(cursor)

    assert first == f"{len(load_outputs(built))} outputs of other builds reported"
    assert second == "nothing was built since the last tick"
    assert third == "1 outputs of other builds reported"

    def fail(*_: object) -> None:
        raise OSError("the storage does not answer")

    monkeypatch.setattr(manifest, "prefetch_current", fail)
    said = sensor(dg.build_sensor_context(instance=instance))
    assert isinstance(said, dg.SkipReason)
    assert said.skip_message == "the storage does not answer"


def test_start_of_the_pages_reports_to_the_home_and_says_how_many(built: CliProject, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    env = os.environ | {"DAGSTER_HOME": str(home), "DAGSTER_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "dagster_rowmill.outside_builds"]
    printed = [
        subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
        for folder in (built.folder, built.folder, home)
    ]
    assert printed == [f"Dagster shows {len(load_outputs(built))} outputs of earlier builds\n", "", ""]
