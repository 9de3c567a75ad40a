"""Reads Dagster's event log, the newest versions of assets and the results of their checks, and adds events to it.

Both queries cover all assets at once: a gate before the ranks of three datasets has sixty checks, and one query for
each was a quarter of a nightly run without changes.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import dagster as dg
from dagster._core.events import DagsterEvent, StepMaterializationData
from dagster._core.instance.utils import RUNLESS_JOB_NAME, RUNLESS_RUN_ID

from dagster_rowmill import metadata
from dagster_rowmill.names import make_asset_key
from rowmill.checks.gates import Threshold
from rowmill.schema.manifest import StageKey

CheckKey: TypeAlias = tuple[StageKey, str]
"""An asset's key, and the name of one of its checks."""

MAX_SEARCHED_RESULTS = 50
"""Number of records searched for a result on the current version."""


def find_current_versions(instance: dg.DagsterInstance, keys: Iterable[StageKey]) -> dict[StageKey, str | None]:
    """Return the data version of each asset's newest materialization; None for one that has none."""
    assets = {make_asset_key(key): key for key in keys}
    events = instance.event_log_storage.get_latest_materialization_events(list(assets))
    return {key: _read_data_version(events.get(asset)) for asset, key in assets.items()}


def _read_data_version(event: dg.EventLogEntry | None) -> str | None:
    materialization = event.asset_materialization if event else None
    return (materialization.tags or {}).get("dagster/data_version") if materialization else None


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

    def __init__(self, instance: dg.DagsterInstance, checks: Iterable[CheckKey]) -> None:
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
