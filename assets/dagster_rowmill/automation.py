"""When a recipe is rebuilt, and who is told: its job, schedule, condition and sensors.

A recipe is rebuilt on request, every night, when its source files change, or when its assets are out of date. Sensors
of failed runs, of finished ones and of the clock tell people what became of it.

A run covers all steps, and the engine returns existing outputs, because a Dagster job never skips a step by itself.

The nightly run compares states, so it is the main mechanism. The sensor and the conditions react to changes: if the run
that they launch fails, the change is forgotten. They are off by default.
"""

import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import dagster as dg
import orjson

from dagster_rowmill.factory import BLOCKED_BY, name_check_step
from dagster_rowmill.names import dagster_name, list_upstream_assets, make_asset_key
from dagster_rowmill.resources import RUN_EXECUTORS
from rowmill.build.steps import Project, plan_steps
from rowmill.core.errors import GateError, PipelineError, SourceError
from rowmill.core.stage_names import TRAINING_SPLITS
from rowmill.core.storage import digest_json
from rowmill.recipe.recipe import Freshness
from rowmill.reports import alert_text
from rowmill.sources import Files, find_files, urls

RECIPE_TAG: Final = "rowmill/recipe"
"""Tag that limits the queue to one run per recipe (`dagster.yaml`)."""
SENSOR_INTERVAL_S: Final = 60
"""Seconds between two checks of the source files; also how long they must have been unchanged."""


def make_job(project: Project) -> Any:
    """Return the job that runs all steps of a recipe, one per recipe, so that each has its own schedule and queue."""
    # On-demand stages are materialized by hand: a nightly run must not need a model server.
    keys = [make_asset_key(step.key) for step in plan_steps(project) if not step.on_demand]
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
    the hub is pinned and cannot change. Raises SourceError if a source names no file, its storage does not answer, or
    an asset before it was never materialized.
    """
    states: dict[str, list[tuple[str, str]]] = {}
    for name, dataset in project.recipe.datasets.items():
        if upstream := list_upstream_assets(dataset.source):
            states[name] = []
            for key in upstream:
                event = instance.get_latest_materialization_event(key)
                if event is None or event.asset_materialization is None:
                    raise SourceError(
                        f"datasets.{name}.source.after: {key.to_user_string()} was never materialized; the dataset is "
                        "built after it; materialize it, or correct the key"
                    )
                # What changes when the asset is materialized with other data; the time if it has no data version.
                version = (event.asset_materialization.tags or {}).get("dagster/data_version")
                states[name].append((key.to_user_string(), version or str(event.timestamp)))
        elif isinstance(dataset.source, Files):
            locations = (urls.locate_url(file.url, project.base) for file in find_files(dataset.source, project.base))
            states[name] = [(where.url, urls.stamp_file(where)) for where in locations]
    return states


def make_change_condition(project: Project) -> dg.AutomationCondition[Any] | None:
    """Fire once for each change of an asset's inputs, as soon as its inputs exist and their checks passed.

    None if the recipe does not ask for it. Never a bare `execution_failed()`: it would retry forever.
    """
    if project.recipe.execution.automation != "on_change":
        return None
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


# ── Alerts ─────────────────────────────────────────────────────────────────────────────────────────
#
# What a message says, and whether it was sent this night already, is the engine's (`rowmill.reports.alert_text`), so
# that `rowmill build --alert` says the same.


OVERDUE_INTERVAL_S = 600
"""Seconds between two looks at the clock."""


def make_alert_sensors(project: Project, job: Any) -> list[dg.SensorDefinition]:
    """Return the sensors of a recipe's alerts; none if it has no alerts."""
    execution, name = project.recipe.execution, project.recipe.name
    if not execution.alerts:
        return []
    running = dg.DefaultSensorStatus.RUNNING

    def builds_recipe(run: dg.DagsterRun) -> bool:
        # Conditions and *Materialize* run assets without the recipe's job, and may run those of several recipes.
        return run.job_name == job.name or any(key.path[0] == name for key in run.asset_selection or ())

    @dg.run_failure_sensor(
        name=f"alert_failed_{dagster_name(name)}",
        default_status=running,
        description=f"Tells execution.alerts of {name} that a run failed, or that a check closed a gate.",
    )
    def failed(context: dg.RunFailureSensorContext) -> None:
        # The stage that each step of the run makes or judges.
        places: dict[str, str] = {}
        for step in plan_steps(project):
            key = make_asset_key(step.key)
            places |= dict.fromkeys((key.to_python_identifier(), name_check_step(key)), "/".join(step.key[1:]))
        failures = context.get_step_failure_events()
        errors = [
            _make_error(places[str(event.step_key)], event.step_failure_data)
            for event in failures
            if event.step_key in places
        ]
        if not failures:
            errors = [PipelineError(context.failure_event.message or "the run failed")]
        if errors and builds_recipe(context.dagster_run):
            _log_each(context, alert_text.announce(project, errors=errors))

    @dg.run_status_sensor(
        name=f"alert_finished_{dagster_name(name)}",
        run_status=dg.DagsterRunStatus.SUCCESS,
        default_status=running,
        description=f"Tells execution.alerts of {name} that trainers read a new build, or that a check warned.",
    )
    def finished(context: dg.RunStatusSensorContext) -> None:
        if builds_recipe(context.dagster_run):
            _log_each(context, alert_text.announce(project))

    sensors: list[dg.SensorDefinition] = [failed, finished]
    if execution.freshness is not None:
        sensors.append(_make_overdue_sensor(project, execution.freshness))
    return sensors


def _make_overdue_sensor(project: Project, wanted: Freshness) -> dg.SensorDefinition:
    name, key = project.recipe.name, make_asset_key((project.recipe.name, TRAINING_SPLITS))

    @dg.sensor(
        name=f"alert_overdue_{dagster_name(name)}",
        minimum_interval_seconds=OVERDUE_INTERVAL_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Tells execution.alerts of {name} that Dagster shows {TRAINING_SPLITS} as overdue.",
    )
    def overdue(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        # What the asset's page shows: Dagster's daemon compares the last build with the freshness policy.
        record = context.instance.get_freshness_state_records([key]).get(key)
        state = None if record is None else record.freshness_state.value
        last = context.instance.get_latest_materialization_event(key)
        if state != "FAIL" or last is None:
            return dg.SkipReason(
                f"freshness of {TRAINING_SPLITS}: {state or 'not known; is freshness on in dagster.yaml?'}"
            )
        hours = (time.time() - last.timestamp) / 3600
        bound = "at most" if wanted.deadline is None else f"a build by the last {wanted.deadline} (UTC), in at most"
        text = f"{name}: not built for {hours:.0f} hours; wanted {bound} {wanted.hours:g}"
        _log_each(context, alert_text.announce(project, overdue=text))
        return dg.SkipReason(text)

    return overdue


def _make_error(place: str, failure: Any) -> PipelineError:
    """Return the error of a failed step: a closed gate if a check failed, of this step or of one before it."""
    raised, given = failure.error, failure.user_failure_data
    # The first error, without those that Dagster wraps it in.
    while raised is not None and raised.cause is not None:
        raised = raised.cause
    if given is not None and given.description:
        text = given.description
    else:
        text = "the step failed" if raised is None else raised.message.strip().removeprefix("rowmill.core.errors.")
    is_closed = (given is not None and BLOCKED_BY in given.metadata) or (
        raised is not None and raised.cls_name in (GateError.__name__, "DagsterAssetCheckFailedError")
    )
    return (GateError if is_closed else PipelineError)(f"{place}: {text}")


def _log_each(context: Any, problems: list[str]) -> None:
    for problem in problems:
        context.log.warning(problem)
