"""Old runs are pruned without removing what a gate or a page needs."""

from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from dagster_rowmill import history
from dagster_rowmill.event_log import KeptEventLog
from rowmill.cli.ui import default_settings, prepare_home
from rowmill.core.errors import ConfigError
from tests.support.tiny_project import Tiny, built, refusals

pytestmark = pytest.mark.slow
RANKS = dg.StaticPartitionsDefinition(["r0", "r1"])
LATER = datetime.now(UTC) + timedelta(days=100)
"""When every run of a test is old."""


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[dg.DagsterInstance, None, None]:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    prepare_home(tmp_path)
    with dg.DagsterInstance.get() as opened:
        yield opened


@dg.asset
def rows() -> None:
    pass


@dg.asset(partitions_def=RANKS)
def ranks() -> None:
    pass


@dg.asset_check(asset=rows)
def counted() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


def run(instance: dg.DagsterInstance, *assets: Any, rank: str | None = None) -> str:
    return dg.materialize(assets, instance=instance, partition_key=rank).run_id


def kept(instance: dg.DagsterInstance) -> set[str]:
    return {one.run_id for one in instance.get_runs()}


def prune(instance: dg.DagsterInstance, *, days: int = 30, now: datetime = LATER) -> int:
    return history.delete_old_runs(instance, days=days, now=now)


def test_old_runs_of_an_asset_go_and_its_newest_stays(instance: dg.DagsterInstance) -> None:
    first, second, newest = (run(instance, rows) for _ in range(3))
    assert prune(instance) == 2
    assert kept(instance) == {newest}
    assert [instance.all_logs(one) for one in (first, second)] == [[], []]
    [record] = instance.fetch_materializations(rows.key, limit=10).records
    assert record.run_id == newest


def test_run_within_the_days_stays(instance: dg.DagsterInstance) -> None:
    runs = {run(instance, rows) for _ in range(3)}
    assert prune(instance, now=datetime.now(UTC) + timedelta(days=29)) == 0
    assert prune(instance, days=0) == 0
    assert kept(instance) == runs


def test_newest_of_each_partition_stays(instance: dg.DagsterInstance) -> None:
    _, second, third = (run(instance, ranks, rank=rank) for rank in ("r0", "r1", "r0"))
    assert prune(instance) == 1
    assert kept(instance) == {second, third}


def test_newest_result_of_a_check_stays_after_its_asset_was_rebuilt(instance: dg.DagsterInstance) -> None:
    judged = run(instance, rows, counted)
    _, newest = (run(instance, rows) for _ in range(2))
    assert prune(instance) == 1
    assert kept(instance) == {judged, newest}


def test_run_that_failed_goes_and_one_that_did_not_end_stays(instance: dg.DagsterInstance) -> None:
    @dg.asset
    def broken() -> None:
        raise ValueError("as it should")

    failed = dg.materialize([broken], instance=instance, raise_on_error=False).run_id
    waiting = instance.create_run_for_job(dg.Definitions(jobs=[history.prune_history]).resolve_job_def("prune_history"))
    assert prune(instance) == 1
    assert failed not in kept(instance)
    assert kept(instance) == {waiting.run_id}


def test_deleted_run_leaves_no_file_and_no_result(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    log = instance.event_log_storage
    assert isinstance(log, KeptEventLog)
    old, newest = (run(instance, rows, counted) for _ in range(2))
    printed = tmp_path / "home" / "storage"
    assert {path.name for path in printed.iterdir()} >= {old, newest}

    prune(instance)
    assert {path.name for path in printed.iterdir()} & {old, newest} == {newest}
    files = {path.name for path in (tmp_path / "home" / "history" / "runs").iterdir()}
    assert not any(name.startswith(old) for name in files)
    assert f"{newest}.db" in files
    history = log.get_asset_check_execution_history(next(iter(counted.check_keys)), limit=10)
    assert [one.run_id for one in history] == [newest]
    # Asked for again, by a page that is still open, it is a run without events.
    assert instance.all_logs(old) == []


@pytest.mark.campaign
def test_night_after_pruning_finds_its_gates_open(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, instance).write()
    nights = [tiny.run() for _ in range(3)]
    assert prune(instance) == 2
    assert kept(instance) == {nights[-1].run_id}
    # The ranks alone: their gates rest on what the nights before left.
    alone = tiny.run_asset("gpu_partitions", without_checks=True)
    assert refusals(alone) == {}
    assert built(alone) == {("tiny", "gpu_partitions")}


def test_job_prunes_the_history_that_it_is_written_to(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {run(instance, rows) for _ in range(2)}
    monkeypatch.setenv(history.DAYS_VARIABLE, "7")
    result = history.prune_history.execute_in_process(instance=instance)
    assert result.success
    assert kept(instance) == {*runs, result.run_id}
    said = [one.user_message for one in instance.all_logs(result.run_id)]
    assert "0 runs deleted; runs of the last 7 days are kept" in said


@pytest.mark.parametrize("given", ["-1", "many", "1.5"])
def test_variable_that_is_no_number_of_days_is_an_error(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(history.DAYS_VARIABLE, given)
    with pytest.raises(ConfigError, match=f"{history.DAYS_VARIABLE}: expected a number of days, got '{given}'"):
        history.read_days_kept()


@pytest.mark.usefixtures("instance")
def test_schedule_is_on_by_default_and_shipped_settings_keep_ticks_for_a_time() -> None:
    settings = yaml.safe_load(default_settings().read_text(encoding="utf-8"))
    with dg.DagsterInstance.get() as opened:
        assert opened.get_settings("retention") == settings["retention"]
    assert set(settings["retention"]) == {"schedule", "sensor", "auto_materialize"}
    assert history.daily_prune_history.default_status == dg.DefaultScheduleStatus.RUNNING
