"""Dagster's event log kept open: the same files and answers as Dagster's own, with few connections."""

import os
import sqlite3
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from sqlalchemy import event
from sqlalchemy.pool import Pool

from dagster_rowmill import event_log
from dagster_rowmill.event_log import KeptEventLog
from rowmill.cli.ui import prepare_home
from rowmill.core.errors import ConfigError
from tests.support.tiny_project import Tiny, refusals

NORMAL, FULL = 1, 2
ASSET = dg.AssetKey(["tiny", "seen"])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    return prepare_home(tmp_path)


@dg.asset(key=ASSET)
def seen(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
    context.log.info("said by %s", context.run.run_id)
    return dg.MaterializeResult(data_version=dg.DataVersion(context.run.run_id))


def runs_of(instance: dg.DagsterInstance) -> list[str]:
    """Return the runs that materialized the asset, newest first, as the index remembers them."""
    return [record.run_id for record in instance.fetch_materializations(ASSET, limit=100).records]


def said_in(instance: dg.DagsterInstance, run_id: str) -> list[str]:
    return [one.user_message for one in instance.all_logs(run_id) if one.user_message.startswith("said by")]


def open_logs() -> set[str]:
    """Return the files of event logs that this process has open."""
    files: list[str] = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            files.append(os.readlink(fd))
        except OSError:
            continue
    return {file for file in files if "/history/runs/" in file and file.endswith(".db")}


@contextmanager
def connections() -> Generator[list[object], None, None]:
    """Collect every connection that SQLAlchemy opens in this process."""
    opened: list[object] = []
    note = lambda connection, _: opened.append(connection)  # noqa: E731
    event.listen(Pool, "connect", note)
    try:
        yield opened
    finally:
        event.remove(Pool, "connect", note)


@pytest.mark.usefixtures("home")
def test_shipped_settings_name_this_log() -> None:
    with dg.DagsterInstance.get() as instance:
        assert isinstance(instance.event_log_storage, KeptEventLog)


@pytest.mark.slow
def test_history_is_the_same_with_dagsters_own_log_before_and_after(home: Path) -> None:
    settings = (home / "dagster.yaml").read_text(encoding="utf-8")
    own = "telemetry: {enabled: false}\n"
    runs: list[str] = []
    for text in (own, settings, own, settings):
        (home / "dagster.yaml").write_text(text, encoding="utf-8")
        with dg.DagsterInstance.get() as instance:
            assert isinstance(instance.event_log_storage, KeptEventLog) == (text == settings)
            runs.insert(0, dg.materialize([seen], instance=instance).run_id)
            assert runs_of(instance) == runs
            assert [said_in(instance, run) for run in runs] == [[f"said by {run}"] for run in runs]


@pytest.mark.campaign
@pytest.mark.usefixtures("home")
def test_whole_workspace_opens_few_connections(tmp_path: Path) -> None:
    with dg.DagsterInstance.get() as instance:
        tiny = Tiny(tmp_path, instance).write()
        with connections() as opened:
            result = tiny.run()

    assert refusals(result) == {}
    # Dagster's own has one for each of its statements, of which there are more than two for an event.
    assert len(opened) < len(list(result.all_events)) / 3


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_threads_take_turns_and_lose_nothing() -> None:
    def report(number: int) -> int:
        instance.report_runless_asset_event(dg.AssetMaterialization(ASSET, metadata={"number": number}))
        return len(runs_of(instance))

    with dg.DagsterInstance.get() as instance:
        with ThreadPoolExecutor(8) as threads:
            seen_so_far = list(threads.map(report, range(100)))
        records = instance.fetch_materializations(ASSET, limit=1000).records
    numbers = [one.asset_materialization.metadata["number"].value for one in records if one.asset_materialization]
    assert min(seen_so_far) >= 1
    assert sorted(map(str, numbers)) == sorted(map(str, range(100)))


@pytest.mark.campaign
@pytest.mark.usefixtures("home")
def test_files_of_old_runs_are_closed_and_read_again_when_asked_for() -> None:
    with dg.DagsterInstance.get() as instance:
        runs = [dg.materialize([seen], instance=instance).run_id for _ in range(event_log.MAX_OPEN_FILES + 4)]
        still_open = open_logs()
        first = said_in(instance, runs[0])
    after = open_logs()

    assert 0 < len(still_open) <= event_log.MAX_OPEN_FILES
    assert first == [f"said by {runs[0]}"]
    assert after == set()


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_wiped_log_begins_anew() -> None:
    with dg.DagsterInstance.get() as instance:
        dg.materialize([seen], instance=instance)
        instance.wipe()
        assert runs_of(instance) == []
        run = dg.materialize([seen], instance=instance).run_id
        assert runs_of(instance) == [run]
        assert said_in(instance, run) == [f"said by {run}"]


def test_without_a_home_the_error_names_dagster_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    with pytest.raises(ConfigError, match="DAGSTER_HOME: not set, so Dagster's events have no folder"):
        KeptEventLog.from_config_value(None, {})


def test_commits_wait_for_the_disk_only_where_the_log_is_not_written_ahead(home: Path, tmp_path: Path) -> None:
    log = KeptEventLog(str(home / "history" / "runs"))

    for lent in (log.index_connection(), log.run_connection("one")):
        with lent as connection:
            found = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
        assert found == ["wal", NORMAL]
    with sqlite3.connect(tmp_path / "events.db") as connection:
        event_log.commit_without_waiting(connection, None)
        assert connection.execute("PRAGMA synchronous").fetchone() == (FULL,)
