"""Reports outputs that a Dagster instance did not make, so that its assets show them as if it had.

    rowmill build                  an instance is there           ──►   the command reports what it made
    rowmill build                  no instance yet                      nothing is reported
    rowmill ui                     starts one     ──► this module ──►   every current output with its check results
    a build somewhere else         same storage   ──► the sensor  ──►   what it made

An output of a run that is still going is left to that run: its event comes after its output. A step whose newest event
in the instance already says the same is left out, so that builds in which nothing changed add no events.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

import dagster as dg

from dagster_rowmill import metadata
from dagster_rowmill.factory import (
    find_asset_deps,
    find_upstream_assets,
    iterate_materializations,
    make_asset_check_result,
)
from dagster_rowmill.history import find_current_versions, report_event
from dagster_rowmill.names import make_asset_key
from dagster_rowmill.recipe_loading import configs_folder, storage_root, try_open_projects
from rowmill.build import runner
from rowmill.build.gate import find_held_version, propose_run_waivers
from rowmill.build.runner import StepReport
from rowmill.build.steps import Project, Step, plan_steps
from rowmill.checks import judge
from rowmill.checks.judge import CheckResult
from rowmill.core.errors import PipelineError
from rowmill.core.storage import digest_json
from rowmill.recipe import recipe
from rowmill.reports import build_record
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest

SENSOR_INTERVAL_S: Final = 60
"""Seconds between two looks at the current versions."""
FinishedStep = tuple[Step, StepReport, Sequence[CheckResult]]


def report_steps(home: str, project: Project, finished: Sequence[FinishedStep]) -> int:
    """Report finished steps to the instance of a DAGSTER_HOME; return how many were new to it."""
    before = os.environ.get("DAGSTER_HOME")
    # The instance's event log has its folder there.
    os.environ["DAGSTER_HOME"] = home
    try:
        with dg.DagsterInstance.from_config(home) as instance:
            return report_finished_steps(instance, project, finished)
    finally:
        if before is None:
            del os.environ["DAGSTER_HOME"]
        else:
            os.environ["DAGSTER_HOME"] = before


def report_finished_steps(instance: dg.DagsterInstance, project: Project, finished: Sequence[FinishedStep]) -> int:
    """Report finished steps, each after its inputs; return how many were new to the instance."""
    deps, reported = find_asset_deps(plan_steps(project)), 0
    served = project.recipe.execution.reports_url or os.environ.get("ROWMILL_REPORTS_URL", "")
    viewer_url = os.environ.get("ROWMILL_VIEWER_URL", "")
    for step, report, results in finished:
        asset = make_asset_key(step.key)
        inputs = [*map(make_asset_key, deps[step.key]), *find_upstream_assets(project, step)]
        tags, pointers = _make_version_tags(instance, report.manifest, inputs)
        newest = instance.get_latest_materialization_event(asset)
        if newest is not None and (shown := newest.asset_materialization) is not None:
            # Whether it says the same: versions, held or not, and where they are logged.
            logged = {name: value for name, value in shown.metadata.items() if name.startswith(metadata.LOGGED_KEY)}
            results_now = build_record.load_log_results(project, report.manifest).values()
            is_same = (metadata.HELD_KEY in shown.metadata) == (report.held is not None)
            is_same = is_same and logged == metadata.show_trackers(results_now)
            if is_same and tags.items() <= (shown.tags or {}).items():
                continue
        made_at = datetime.fromisoformat(report.manifest.built_at).timestamp()
        # An older version that is current again came after the newest event.
        is_later = newest is None or newest.timestamp < made_at
        timestamp = made_at if is_later else None
        page = metadata.make_stage_page(project, report, served, results, viewer_url)
        made = dg.AssetMaterialization(asset, metadata=page, tags=tags | pointers)
        for event in (made, *iterate_materializations(step, report.manifest)):
            report_event(instance, event, timestamp=timestamp)
        waivers = propose_run_waivers(results)
        for result in [result for result in results if result.check not in step.off_checks]:
            check_page = metadata.make_check_page(result, project.store, served, waivers, viewer_url)
            evaluation = make_asset_check_result(result, asset, check_page)
            event = dg.AssetCheckEvaluation(
                asset_key=asset,
                check_name=result.check,
                passed=evaluation.passed,
                severity=evaluation.severity,
                description=evaluation.description,
                metadata=evaluation.metadata,
            )
            report_event(instance, event, timestamp=timestamp)
        reported += 1
    return reported


def _make_version_tags(
    instance: dg.DagsterInstance, output: Manifest, inputs: Sequence[dg.AssetKey]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the tags by which Dagster tells whether an asset is up to date: versions, and the events of inputs.

    Each input needs both its data version and the number of the event that had it. Without the second, Dagster takes
    the input for a new one and marks the asset as unsynced.
    """
    tags = {
        "dagster/data_version": output.version,
        "dagster/data_version_is_user_provided": "true",
        "dagster/code_version": output.code_version,
    }
    pointers: dict[str, str] = {}
    for key in inputs:
        records = instance.fetch_materializations(key, limit=1).records
        shown = records[0].asset_materialization if records else None
        if shown is not None and (input_version := (shown.tags or {}).get("dagster/data_version")) is not None:
            tags[f"dagster/input_data_version/{key.to_user_string()}"] = input_version
            pointers[f"dagster/input_event_pointer/{key.to_user_string()}"] = str(records[0].storage_id)
    return tags, pointers


# ── Builds before this instance, or elsewhere ──────────────────────────────────────────────────────


def report_unknown_outputs(instance: dg.DagsterInstance, project: Project) -> tuple[int, int]:
    """Report the current outputs of a recipe that the instance does not know.

    Returns how many were reported, and how many are left to the runs that make them.
    """
    steps = {step.key: step for step in plan_steps(project)}
    current = manifest.prefetch_current(project.store, steps)
    versions = find_current_versions(instance, current)
    unknown: list[FinishedStep] = []
    unfinished = 0
    for key, version in current.items():
        if versions[key] == version:
            continue
        output = manifest.load_version(project.store, key, version)
        run = instance.get_run_by_id(output.run_id)
        if run is not None and not run.is_finished:
            unfinished += 1
            continue
        report = replace(runner.report_kept_version(output), held=find_held_version(project.store, key))
        results = judge.load_check_results(project.store, output, steps[key].thresholds)
        unknown.append((steps[key], report, results))
    return report_finished_steps(instance, project, unknown), unfinished


def make_outside_builds_sensor(projects: Sequence[Project]) -> dg.SensorDefinition:
    """Return the sensor that reports what other builds made, on by default; it launches nothing."""

    @dg.sensor(
        name="outside_builds",
        minimum_interval_seconds=SENSOR_INTERVAL_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Shows outputs that were built outside this Dagster, such as by `rowmill build`.",
    )
    def outside_builds(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        try:
            now = digest_json(
                [
                    ["/".join(key), version]
                    for project in projects
                    for key, version in manifest.prefetch_current(
                        project.store, [step.key for step in plan_steps(project)]
                    ).items()
                ]
            )
            if now == context.cursor:
                return dg.SkipReason("nothing was built since the last tick")
            counts = [report_unknown_outputs(context.instance, project) for project in projects]
        except (PipelineError, OSError) as error:
            return dg.SkipReason(str(error))
        if not any(unfinished for _, unfinished in counts):
            context.update_cursor(now)
        return dg.SkipReason(f"{sum(reported for reported, _ in counts)} outputs of other builds reported")

    return outside_builds


def report_to_home() -> int:
    """Report the outputs of this project to the instance in $DAGSTER_HOME; return an exit status."""
    try:
        configs = configs_folder()
    except PipelineError:
        # Another project's workspace.yaml, whose code locations know their recipes.
        return 0
    projects, _ = try_open_projects(recipe.find_recipes(configs), storage_root(configs))
    reported = 0
    with dg.DagsterInstance.get() as instance:
        for project in projects:
            try:
                reported += report_unknown_outputs(instance, project)[0]
            except (PipelineError, OSError) as error:
                print(f"! {project.recipe.name}: earlier builds are not shown in Dagster: {error}", file=sys.stderr)
    if reported:
        print(f"Dagster shows {reported} outputs of earlier builds")
    return 0


if __name__ == "__main__":
    sys.exit(report_to_home())
