"""Moves the history of assets to their present keys, once for each DAGSTER_HOME.

    demo / chats / canonical_rows ──► demo / chats.canonical_rows

Materializations keep their times, so plots over time go on, and the newest result of each check opens the gates that it
opened.

It must happen before a run under the new keys, or the copies would be newer than that run's events; so `rowmill ui`,
`make demo` and builds of the command line do it when they start. On another server:

    python -m dagster_rowmill.moved_keys
"""

import os
import sys
from pathlib import Path
from typing import Final

import dagster as dg

from dagster_rowmill.history import report_event
from dagster_rowmill.names import make_asset_key
from rowmill.checks.catalog import CHECKS_BY_NAME
from rowmill.core.stage_names import EXPORTS
from rowmill.schema.manifest import StageKey
from rowmill.stages import catalog

MARK: Final = "rowmill_asset_keys"
"""File in a DAGSTER_HOME whose assets have their present keys."""

MAX_COPIED: Final = 1000
"""Materializations of one asset that are copied, the newest."""


def move_history_once(instance: dg.DagsterInstance) -> int:
    """Move the history of an instance unless that was done before; return the number of assets moved."""
    home = os.environ.get("DAGSTER_HOME")
    mark = None if not home else Path(home).expanduser() / MARK
    if mark is not None and mark.exists():
        return 0
    moved = move_history(instance)
    if mark is not None:
        mark.write_text("recipe / dataset.stage\n", encoding="utf-8")
    return moved


def move_history(instance: dg.DagsterInstance) -> int:
    """Move the history of all assets with former keys; return their number."""
    former = [key for asset in instance.get_asset_keys() if (key := _read_former_key(asset)) is not None]
    return sum(_move_asset(instance, key) for key in former)


def _read_former_key(asset: dg.AssetKey) -> StageKey | None:
    """Return the stage's key of an asset that has a former key; None for all others."""
    stages = {stage.name for stage in catalog.list_stages("dataset")}
    stages |= {stage.name for stage in catalog.list_stages("dataset", on_demand=True)}
    if len(asset.path) == 3 and (asset.path[2] in stages or asset.path[1] == EXPORTS):
        return (asset.path[0], asset.path[1], asset.path[2])
    return None


def _move_asset(instance: dg.DagsterInstance, key: StageKey) -> bool:
    old, new = dg.AssetKey(list(key)), make_asset_key(key)
    if instance.get_latest_materialization_event(new) is not None:
        return False
    records = instance.fetch_materializations(old, limit=MAX_COPIED).records
    for record in reversed(records):
        _copy_materialization(instance, record, new)
    _copy_check_results(instance, old, new)
    instance.wipe_assets([old])
    return bool(records)


def _copy_materialization(instance: dg.DagsterInstance, record: dg.EventLogRecord, new: dg.AssetKey) -> None:
    before = record.asset_materialization
    if before is None:
        return
    copy = dg.AssetMaterialization(
        new, description=before.description, metadata=before.metadata, partition=before.partition, tags=before.tags
    )
    report_event(instance, copy, timestamp=record.timestamp, run_id=record.run_id)


def _copy_check_results(instance: dg.DagsterInstance, old: dg.AssetKey, new: dg.AssetKey) -> None:
    keys = [dg.AssetCheckKey(old, name) for name in CHECKS_BY_NAME]
    found = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
    for key, record in found.items():
        evaluation = record.evaluation
        if isinstance(evaluation, dg.AssetCheckEvaluation):
            instance.report_runless_asset_event(
                dg.AssetCheckEvaluation(
                    asset_key=new,
                    check_name=key.name,
                    passed=evaluation.passed,
                    metadata=evaluation.metadata,
                    severity=evaluation.severity,
                    description=evaluation.description,
                )
            )


def move_home_history() -> int:
    """Move the history of the instance in $DAGSTER_HOME."""
    with dg.DagsterInstance.get() as instance:
        moved = move_history_once(instance)
    if moved:
        print(f"Dagster's history of {moved} assets is now under their present keys")
    return 0


if __name__ == "__main__":
    sys.exit(move_home_history())
