"""Sensors that tell people what became of a recipe's runs: one of failed runs, one of finished ones, one of the clock.

They are defined only for recipes with `execution.alerts`, and run in Dagster's daemon; what a message says, and whether
it was sent this night already, is the engine's (`rowmill.reports.alert_text`), so that `rowmill build --alert` says the
same.
"""

import time
from typing import Any

import dagster as dg

from dagster_rowmill.factory import BLOCKED_BY
from dagster_rowmill.names import dagster_name, make_asset_key
from dagster_rowmill.reporting import name_check_step
from rowmill.build.steps import Project, plan_steps
from rowmill.core.errors import GateError, PipelineError
from rowmill.core.stage_names import GPU_PARTITIONS, TRAINING_SPLITS
from rowmill.recipe.recipe import Freshness
from rowmill.reports import alert_text
from rowmill.schema import manifest

OVERDUE_INTERVAL_S = 600
"""Seconds between two looks at the clock."""


def make_alert_sensors(project: Project, job: Any) -> list[dg.SensorDefinition]:
    """Return the sensors of a recipe's alerts; none if it has no alerts."""
    execution, name = project.recipe.execution, project.recipe.name
    if not execution.alerts:
        return []
    running = dg.DefaultSensorStatus.RUNNING

    @dg.run_failure_sensor(
        name=f"alert_failed_{dagster_name(name)}",
        monitored_jobs=[job],
        default_status=running,
        description=f"Tells execution.alerts of {name} that a run failed, or that a check closed a gate.",
    )
    def failed(context: dg.RunFailureSensorContext) -> None:
        places = _name_steps(project)
        errors = [
            _make_error(places.get(str(event.step_key), str(event.step_key)), event.step_failure_data)
            for event in context.get_step_failure_events()
        ]
        _log(
            context,
            alert_text.announce(
                project, errors=errors or [PipelineError(context.failure_event.message or "the run failed")]
            ),
        )

    @dg.run_status_sensor(
        name=f"alert_finished_{dagster_name(name)}",
        run_status=dg.DagsterRunStatus.SUCCESS,
        monitored_jobs=[job],
        default_status=running,
        description=f"Tells execution.alerts of {name} that trainers read a new build, or that a check warned.",
    )
    def finished(context: dg.RunStatusSensorContext) -> None:
        version = alert_text.find_published_version(project)
        made = version and manifest.load_version(project.store, (name, GPU_PARTITIONS), version)
        is_new = bool(made) and made.run_id == context.dagster_run.run_id
        _log(context, alert_text.announce(project, published=is_new))

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
        _log(context, alert_text.announce(project, overdue=text))
        return dg.SkipReason(text)

    return overdue


def _name_steps(project: Project) -> dict[str, str]:
    """Return the stage that each step of a run makes or judges."""
    stages = {make_asset_key(step.key): "/".join(step.key[1:]) for step in plan_steps(project)}
    return {name: stage for key, stage in stages.items() for name in (key.to_python_identifier(), name_check_step(key))}


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


def _log(context: Any, problems: list[str]) -> None:
    for problem in problems:
        context.log.warning(problem)
