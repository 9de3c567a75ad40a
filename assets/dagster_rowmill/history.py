"""Dagster's event log: the newest versions and results, events added to it, and old runs deleted from it.

Both queries cover all assets at once: a gate before the ranks of three datasets has sixty checks, and one query for
each was a quarter of a nightly run without changes.

A run is kept as long as one of its events is the newest of its kind: the last materialization of an asset or a
partition, or the last result of a check. Gates and pages need these, however old they are.

Dagster itself removes only ticks of schedules and sensors (`retention` in `dagster.yaml`).
"""

import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import dagster as dg
from dagster._core.events import DagsterEvent, StepMaterializationData
from dagster._core.instance.utils import RUNLESS_JOB_NAME, RUNLESS_RUN_ID

from dagster_rowmill import metadata
from dagster_rowmill.names import make_asset_key
from rowmill.checks.gates import Threshold
from rowmill.core.errors import ConfigError
from rowmill.schema.manifest import StageKey

MAX_SEARCHED_RESULTS = 50
"""Number of records searched for a result on the current version."""


def find_current_versions(instance: dg.DagsterInstance, keys: Iterable[StageKey]) -> dict[StageKey, str | None]:
    """Return the data version of each asset's newest materialization; None for one that has none."""
    assets = {make_asset_key(key): key for key in keys}
    events = instance.event_log_storage.get_latest_materialization_events(list(assets))
    versions: dict[StageKey, str | None] = {}
    for asset, key in assets.items():
        event = events.get(asset)
        materialization = event.asset_materialization if event else None
        versions[key] = (materialization.tags or {}).get("dagster/data_version") if materialization else None
    return versions


def report_event(
    instance: dg.DagsterInstance, event: dg.AssetMaterialization | dg.AssetCheckEvaluation, *, timestamp: float | None
) -> None:
    """Add an event of an asset at a time, now if it is None: `report_runless_asset_event` has no argument for it."""
    if isinstance(event, dg.AssetMaterialization):
        kind, content = dg.DagsterEventType.ASSET_MATERIALIZATION, StepMaterializationData(event)
    else:
        kind, content = dg.DagsterEventType.ASSET_CHECK_EVALUATION, event
    instance.report_dagster_event(
        DagsterEvent(event_type_value=kind.value, event_specific_data=content, job_name=RUNLESS_JOB_NAME),
        run_id=RUNLESS_RUN_ID,
        timestamp=timestamp,
    )


class CheckHistory:
    """The results of some checks: one query for the newest of all, and another per check only if needed."""

    def __init__(self, instance: dg.DagsterInstance, checks: Iterable[tuple[StageKey, str]]) -> None:
        """Read the newest record of each check."""
        self._log = instance.event_log_storage
        keys = [_make_check_key(key, check) for key, check in checks]
        self._newest: Mapping[dg.AssetCheckKey, Any] = self._log.get_latest_asset_check_execution_by_key(keys)

    def on(self, key: StageKey, threshold: Threshold, version: str | None) -> dg.AssetCheckEvaluation | None:
        """Return the newest completed result on this version under this threshold.

        A result is a function of (content, threshold): an older one stays valid, so a restored version opens at once,
        and a check that is only planned or crashed hides no earlier result.
        """
        check = _make_check_key(key, threshold.check)
        newest = self._newest.get(check)
        if newest is None:
            return None
        matching = _find_matching_evaluation([newest], threshold, version)
        return matching or _find_matching_evaluation(
            self._log.get_asset_check_execution_history(check, limit=MAX_SEARCHED_RESULTS), threshold, version
        )


def _make_check_key(key: StageKey, check: str) -> dg.AssetCheckKey:
    return dg.AssetCheckKey(asset_key=make_asset_key(key), name=check)


def _find_matching_evaluation(
    records: Iterable[Any], threshold: Threshold, version: str | None
) -> dg.AssetCheckEvaluation | None:
    for record in records:
        evaluation: Any = record.evaluation
        # Otherwise it is only planned: queued, running or dead.
        if isinstance(evaluation, dg.AssetCheckEvaluation):
            values = {name: value.value for name, value in evaluation.metadata.items()}
            if (values.get(metadata.VERSION_KEY), values.get(metadata.THRESHOLD_KEY)) == (version, threshold.digest):
                return evaluation
    return None


# ── Pruning ──────────────────────────────────────────────────────────────────────────────────────────


DAYS_VARIABLE: Final = "ROWMILL_HISTORY_DAYS"
DEFAULT_DAYS: Final = 30
"""Days for which runs are kept if the variable is not set; 0 keeps all."""

PRUNE_CRON: Final = "30 3 * * *"
"""After the default hour of nightly runs, in UTC."""

FINISHED_STATUSES: Final = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
LASTING_EVENTS: Final = (dg.DagsterEventType.ASSET_MATERIALIZATION, dg.DagsterEventType.ASSET_CHECK_EVALUATION)
"""Events that may be needed long after their run."""


def read_days_kept() -> int:
    """Return for how many days runs are kept, from the environment.

    Raises ConfigError if it is not a number of days.
    """
    text = os.environ.get(DAYS_VARIABLE, "")
    if text and not text.isdecimal():
        raise ConfigError(
            f"{DAYS_VARIABLE}: expected a number of days, got {text!r}; 0 keeps all runs; correct it, or unset it"
        )
    return int(text) if text else DEFAULT_DAYS


def delete_old_runs(instance: dg.DagsterInstance, *, days: int, now: datetime | None = None) -> int:
    """Delete runs that ended more than `days` ago and hold no newest event; return their number."""
    if days == 0:
        return 0
    before = (now or datetime.now(UTC)) - timedelta(days=days)
    ended = dg.RunsFilter(statuses=list(FINISHED_STATUSES), updated_before=before)
    # The run that holds the newest event of each asset or partition, and of each check.
    of_assets: dict[tuple[dg.AssetKey, str | None], str | None] = {}
    of_checks: dict[dg.AssetCheckKey, str | None] = {}
    expired: list[str] = []
    for run_id in [record.dagster_run.run_id for record in instance.get_run_records(ended)]:
        events = [entry.dagster_event for entry in instance.all_logs(run_id, of_type=set(LASTING_EVENTS))]
        materialized = {
            (key, event.partition)
            for event in events
            if event and event.is_step_materialization and (key := event.asset_key) is not None
        }
        for key, partition in materialized - of_assets.keys():
            wanted = dg.AssetRecordsFilter(asset_key=key, asset_partitions=[partition] if partition else None)
            records = instance.fetch_materializations(wanted, limit=1).records
            of_assets[key, partition] = records[0].run_id if records else None
        judged = {
            evaluation.asset_check_key
            for event in events
            if event and isinstance(evaluation := event.event_specific_data, dg.AssetCheckEvaluation)
        }
        if unknown := list(judged - of_checks.keys()):
            newest: Any = instance.event_log_storage.get_latest_asset_check_execution_by_key(unknown)
            of_checks |= {check: newest[check].run_id if check in newest else None for check in unknown}
        if run_id not in {*(of_assets[place] for place in materialized), *(of_checks[check] for check in judged)}:
            expired.append(run_id)
    for run_id in expired:
        instance.delete_run(run_id)
        instance.compute_log_manager.delete_logs(prefix=[run_id])
    return len(expired)


class PruneConfig(dg.Config):
    """Configuration of one run, set in the launchpad."""

    days: int | None = None
    """Days for which runs are kept, 0 for all; null: from the environment."""


@dg.op(name="prune_runs", description="Deletes old runs that hold no newest event.")
def prune_runs(context: dg.OpExecutionContext, config: PruneConfig) -> None:
    """Delete old runs from this instance's history."""
    days = read_days_kept() if config.days is None else config.days
    deleted = delete_old_runs(context.instance, days=days)
    context.log.info(f"{deleted} runs deleted; runs of the last {days} days are kept" if days else "all runs are kept")


@dg.job(
    name="prune_history",
    executor_def=dg.in_process_executor,
    description="Deletes old runs with their events; the newest event of each asset and check is kept.",
)
def prune_history() -> None:
    """Run the only step."""
    prune_runs()


daily_prune_history: Final = dg.ScheduleDefinition(
    name="daily_prune_history",
    job=prune_history,
    cron_schedule=PRUNE_CRON,
    execution_timezone="UTC",
    default_status=dg.DefaultScheduleStatus.RUNNING,
    description=f"Keeps the history to {DAYS_VARIABLE} days, {DEFAULT_DAYS} by default.",
)
