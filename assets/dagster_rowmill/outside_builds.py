"""Reports outputs that a Dagster instance does not know: those of builds before it existed, or on another machine.

    rowmill build                  no instance yet                      nothing is reported
    rowmill ui                     starts one     ──► this module ──►   every current output with its check results
    a build somewhere else         same storage   ──► the sensor  ──►   what it made

An output of a run that is still going is left to that run: its event comes after its output.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import dagster as dg

from dagster_rowmill.command_line_builds import FinishedStep, report_finished_steps
from dagster_rowmill.history import find_current_versions
from rowmill.build import runner
from rowmill.build.held_versions import find_held_version
from rowmill.build.steps import Project, plan_steps
from rowmill.checks import judge
from rowmill.core.errors import PipelineError
from rowmill.core.storage import digest_json
from rowmill.schema import manifest

SENSOR_INTERVAL_S: Final = 60
"""Seconds between two looks at the current versions."""


def report_unknown_outputs(instance: dg.DagsterInstance, project: Project) -> tuple[int, int]:
    """Report the current outputs of a recipe that the instance does not know.

    Returns
    -------
    tuple[int, int]
        How many were reported, and how many are left to the runs that make them.

    """
    steps = {step.key: step for step in plan_steps(project)}
    current = manifest.prefetch_current(project.store, steps)
    known = find_current_versions(instance, current)
    unknown: list[FinishedStep] = []
    left = 0
    for key, version in current.items():
        if known[key] == version:
            continue
        made = manifest.load_version(project.store, key, version)
        run = instance.get_run_by_id(made.run_id)
        if run is not None and not run.is_finished:
            left += 1
            continue
        report = replace(runner.report_kept_version(made), held=find_held_version(project.store, key))
        results = judge.load_check_results(project.store, made, steps[key].thresholds)
        unknown.append((steps[key], report, results))
    return report_finished_steps(instance, project, unknown), left


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
            now = digest_json(_stamp_outputs(projects))
            if now == context.cursor:
                return dg.SkipReason("nothing was built since the last tick")
            counts = [report_unknown_outputs(context.instance, project) for project in projects]
        except (PipelineError, OSError) as error:
            return dg.SkipReason(str(error))
        if not any(left for _, left in counts):
            context.update_cursor(now)
        return dg.SkipReason(f"{sum(reported for reported, _ in counts)} outputs of other builds reported")

    return outside_builds


def _stamp_outputs(projects: Iterable[Project]) -> list[list[str]]:
    return [
        ["/".join(key), version]
        for project in projects
        for key, version in manifest.prefetch_current(project.store, [s.key for s in plan_steps(project)]).items()
    ]


def report_to_home() -> int:
    """Report the outputs of this project to the instance in $DAGSTER_HOME; return an exit status."""
    from dagster_rowmill import definitions
    from rowmill.recipe import recipe

    try:
        configs = definitions.configs_folder()
    except PipelineError:
        # Another project's workspace.yaml, whose code locations know their recipes.
        return 0
    projects, _ = definitions.try_open_projects(recipe.find_recipes(configs), definitions.storage_root(configs))
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
