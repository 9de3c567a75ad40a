"""When a recipe is rebuilt: on request, every night, when its source files change, or when its assets are out of date.

A run covers all steps, and the engine returns existing outputs, because a Dagster job never skips a step by itself.

The nightly run compares states, so it is the main mechanism. The sensor and the conditions react to changes: if the run
that they launch fails, the change is forgotten. They are off by default.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final

import dagster as dg
import orjson

from dagster_rowmill.names import dagster_name, list_upstream_assets, make_asset_key
from dagster_rowmill.resources import RUN_EXECUTORS
from rowmill.build import steps
from rowmill.build.steps import Project
from rowmill.core.errors import PipelineError, SourceError
from rowmill.core.storage import digest_json
from rowmill.sources import Files, find_files, urls

RECIPE_TAG: Final = "rowmill/recipe"
"""Tag that limits the queue to one run per recipe (`dagster.yaml`)."""
SENSOR_INTERVAL_S: Final = 60
"""Seconds between two checks of the source files; also how long they must have been unchanged."""


def make_job(project: Project) -> Any:
    """Return the job that runs all steps of a recipe, one per recipe, so that each has its own schedule and queue."""
    # On-demand stages are materialized by hand: a nightly run must not need a model server.
    keys = [make_asset_key(step.key) for step in steps.plan_steps(project) if not step.on_demand]
    name = project.recipe.name
    return dg.define_asset_job(
        f"rebuild_{dagster_name(name)}",
        selection=dg.AssetSelection.assets(*keys),
        executor_def=RUN_EXECUTORS[project.recipe.execution.run_executor],
        tags={RECIPE_TAG: name},
        description=f"Every stage of {name} and all its checks; what is unchanged is reused.",
    )


def make_nightly_schedule(project: Project, job: Any) -> dg.ScheduleDefinition:
    """Return the schedule that rebuilds a recipe every night; without changes, a run takes seconds."""
    name, is_on = project.recipe.name, project.recipe.execution.schedule_on

    @dg.schedule(
        name=f"nightly_{dagster_name(name)}",
        job=job,
        cron_schedule=project.recipe.execution.cron,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.RUNNING if is_on else dg.DefaultScheduleStatus.STOPPED,
        description="Rebuilds everything that the recipe or its source files have changed.",
    )
    def nightly(context: dg.ScheduleEvaluationContext) -> dg.RunRequest:
        return dg.RunRequest(run_key=f"{name}:{context.scheduled_execution_time:%Y-%m-%dT%H:%M}")

    return nightly


@dataclass(frozen=True, slots=True)
class SourceWatchState:
    """A sensor's cursor: the state of the files at the last tick and at the last run, and the number of runs."""

    seen: str = ""
    fired: str = ""
    runs: int = 0


def update_watch(watch: SourceWatchState, now: str) -> tuple[SourceWatchState, str | None]:
    """Return the new cursor, and a run key if a run is due: the files changed, then stayed unchanged for one tick.

    The number of runs is in the key: with the state alone, a restored file would never launch a run.
    """
    if now != watch.seen or now == watch.fired:
        return SourceWatchState(seen=now, fired=watch.fired, runs=watch.runs), None
    runs = watch.runs + 1
    return SourceWatchState(seen=now, fired=now, runs=runs), f"{runs}-{now}"


def make_source_sensor(project: Project, job: Any) -> dg.SensorDefinition:
    """Return the sensor that rebuilds a recipe after its source files changed and stayed unchanged for one tick."""
    name, is_on = project.recipe.name, project.recipe.execution.watch_sources

    @dg.sensor(
        name=f"raw_files_{dagster_name(name)}",
        job=job,
        minimum_interval_seconds=SENSOR_INTERVAL_S,
        default_status=dg.DefaultSensorStatus.RUNNING if is_on else dg.DefaultSensorStatus.STOPPED,
        description="Rebuilds when source files, or the assets that write them, have changed and then stayed unchanged "
        "for one tick.",
    )
    def raw_files(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        try:
            now = digest_json(stamp_sources(project, context.instance))
        except PipelineError as error:
            return dg.SkipReason(str(error))
        watch, run_key = update_watch(
            SourceWatchState(**orjson.loads(context.cursor)) if context.cursor else SourceWatchState(), now
        )
        requests = [dg.RunRequest(run_key=run_key)] if run_key else []
        return dg.SensorResult(run_requests=requests, cursor=orjson.dumps(asdict(watch)).decode())

    return raw_files


def stamp_sources(project: Project, instance: dg.DagsterInstance) -> dict[str, list[tuple[str, str]]]:
    """Return the state of every source: the version of each asset that it comes after, else the stamp of each file.

    Files of a source with `after` are not looked at: they change while the asset that writes them runs. A dataset of
    the hub is pinned and cannot change.

    Raises
    ------
    SourceError
        If a source names no file, its storage does not answer, or an asset before it was never materialized.

    """
    states: dict[str, list[tuple[str, str]]] = {}
    for name, dataset in project.recipe.datasets.items():
        if upstream := list_upstream_assets(dataset.source):
            states[name] = [(key.to_user_string(), _stamp_asset(instance, key, name)) for key in upstream]
        elif isinstance(dataset.source, Files):
            locations = (urls.locate_url(file.url, project.base) for file in find_files(dataset.source, project.base))
            states[name] = [(where.url, urls.stamp_file(where)) for where in locations]
    return states


def _stamp_asset(instance: dg.DagsterInstance, key: dg.AssetKey, dataset: str) -> str:
    """Return what changes when an asset is materialized with other data: its data version, or the time if it has none.

    Raises
    ------
    SourceError
        If it was never materialized.

    """
    event = instance.get_latest_materialization_event(key)
    if event is None or event.asset_materialization is None:
        raise SourceError(
            f"datasets.{dataset}.source.after: {key.to_user_string()} was never materialized; the dataset is built "
            "after it; materialize it, or correct the key"
        )
    return (event.asset_materialization.tags or {}).get("dagster/data_version") or str(event.timestamp)


def choose_condition(project: Project) -> dg.AutomationCondition[Any] | None:
    """Return the condition under which a recipe's assets materialize themselves; None if the recipe sets none."""
    return make_change_condition() if project.recipe.execution.automation == "on_change" else None


def make_change_condition() -> dg.AutomationCondition[Any]:
    """Fire once for each change of an asset's inputs, as soon as its inputs exist and their checks passed.

    Never a bare `execution_failed()`: it would retry forever.
    """
    conditions = dg.AutomationCondition
    changed: Any = (
        conditions.newly_missing()
        | conditions.code_version_changed()
        | conditions.any_deps_match(conditions.data_version_changed())
    )
    return (
        changed.since_last_handled()
        & ~conditions.any_deps_missing()
        & ~conditions.any_deps_in_progress()
        & ~conditions.in_progress()
        # A change launches only one run, which the gate must not refuse.
        & conditions.all_deps_blocking_checks_passed()
    ).with_label("on_change")
