"""History under the keys that assets had before, as it is found under the present ones."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rowmill.history import CheckHistory, find_current_versions
from dagster_rowmill.moved_keys import MARK, move_history, move_history_once
from rowmill.build.steps import Step, plan_steps
from tests.support.tiny_project import FOREIGN_WARNINGS, Tiny

pytestmark = [*FOREIGN_WARNINGS, pytest.mark.slow]

FORMER, PRESENT = dg.AssetKey(["tiny", "chats", "canonical_rows"]), dg.AssetKey(["tiny", "chats.canonical_rows"])
FOREIGN = dg.AssetKey(["shop", "sales", "orders"])


def find_rows_step(tiny: Tiny) -> Step:
    return next(step for step in plan_steps(tiny.project) if step.key == tuple(FORMER.path))


def write_history(instance: dg.DagsterInstance, tiny: Tiny) -> None:
    """Write two materializations under the former key, and a result of each check on the newer one."""

    @dg.asset(key=FORMER, config_schema={"version": str})
    def rows(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        version = context.op_execution_context.op_config["version"]
        return dg.MaterializeResult(data_version=dg.DataVersion(version), metadata={"version": version, "rows": 7})

    for version in ("1", "2"):
        config = {"ops": {rows.op.name: {"config": {"version": version}}}}
        assert dg.materialize([rows], instance=instance, run_config=config).success
    for threshold in next(
        step for step in plan_steps(tiny.project) if step.key[1:] == tuple(FORMER.path[1:])
    ).thresholds:
        seen = {"version": "2", "threshold_digest": threshold.digest}
        instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(asset_key=FORMER, check_name=threshold.check, passed=True, metadata=seen)
        )
    instance.report_runless_asset_event(dg.AssetMaterialization(FOREIGN))


def test_materializations_keep_their_times_and_runs_and_checks_their_results(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    tiny = Tiny(tmp_path, instance).write()
    write_history(instance, tiny)
    before = instance.fetch_materializations(FORMER, limit=10).records
    step = find_rows_step(tiny)

    assert move_history(instance) == 1
    assert move_history(instance) == 0

    after = instance.fetch_materializations(PRESENT, limit=10).records
    assert [(one.timestamp, one.run_id) for one in after] == [(one.timestamp, one.run_id) for one in before]
    assert find_current_versions(instance, [step.key]) == {step.key: "2"}
    results = CheckHistory(instance, [(step.key, one.check) for one in step.thresholds])
    assert all(results.on(step.key, one, "2") for one in step.thresholds)
    assert set(instance.get_asset_keys()) == {PRESENT, FOREIGN}


def test_history_is_moved_once_for_each_home(
    tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    instance.report_runless_asset_event(dg.AssetMaterialization(FORMER))

    assert move_history_once(instance) == 1

    instance.report_runless_asset_event(dg.AssetMaterialization(FORMER))
    assert (tmp_path / MARK).exists()
    assert move_history_once(instance) == 0
