"""The real thing: `rowmill ui` with its daemon, driven over GraphQL as its pages drive it, ended by a signal."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
import yaml

from dagster_rowmill.factory import CORES_POOL
from tests.support.cli_project import CliProject
from tests.support.dagster_server import ROOT, Server, eventually, serving
from tests.support.tiny_project import Tiny

pytestmark = pytest.mark.slow

RANKS = ("rank-00000-of-00002", "rank-00001-of-00002")
SETTINGS = ROOT / "assets" / "dagster_rowmill" / "dagster.yaml"


@pytest.fixture
def tiny(tmp_path: Path, instance: dg.DagsterInstance) -> Tiny:
    return Tiny(tmp_path, instance).write()


@pytest.fixture
def server(tiny: Tiny) -> Iterator[Server]:
    with serving(tiny.path.parent, Path(tiny.store), tiny.folder / "home") as started:
        yield started


def test_two_runs_at_once_build_every_rank_and_sigint_leaves_no_process(server: Server) -> None:
    both = [server.launch("rebuild_tiny") for _ in range(2)]
    assert [server.ended_run(run) for run in both] == ["SUCCESS", "SUCCESS"]
    assert server.materialized("tiny", "gpu_partitions") == [None, None]
    assert set(server.materialized("tiny", "ranks")) == set(RANKS)
    assert (server.home / "dagster.yaml").read_bytes() == SETTINGS.read_bytes()

    end(server, signal.SIGINT)


def test_sigterm_leaves_no_process(server: Server) -> None:
    end(server, signal.SIGTERM)


def end(server: Server, number: signal.Signals) -> None:
    assert server.processes()
    server.process.send_signal(number)
    assert server.process.wait(timeout=60) == 0
    eventually(lambda: not server.processes(), "no process is left")


@pytest.mark.campaign
def test_run_over_broken_data_builds_no_rank(tiny: Tiny, server: Server) -> None:
    tiny.write(unknown_roles=12)
    assert server.ended_run(server.launch("rebuild_tiny")) == "FAILURE"
    assert server.materialized("tiny", "chats.canonical_rows") == [None]
    assert server.materialized("tiny", "chats.tokenized_examples") == []
    assert server.materialized("tiny", "gpu_partitions") == []


@pytest.mark.campaign
def test_run_that_is_killed_is_noticed_started_again_and_leaves_yesterday_readable(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tiny.folder / "home"
    home.mkdir()
    settings = yaml.safe_load(SETTINGS.read_text())
    settings["run_monitoring"]["poll_interval_seconds"] = 1
    (home / "dagster.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    tiny.run()
    yesterday = tiny.sequences()
    tiny.write(rows=4_000)
    with serving(tiny.path.parent, Path(tiny.store), home) as server:
        run = server.launch("rebuild_tiny")
        # Not its first output: the page has that of the build before.
        eventually(lambda: server.run_status(run) == "STARTED", "the run has begun")
        os.kill(server.process_of(run), signal.SIGKILL)

        # As if it had died within a stage that uses every core.
        monkeypatch.setenv("DAGSTER_HOME", str(home))
        with dg.DagsterInstance.get() as instance:
            pools = instance.event_log_storage
            pools.initialize_concurrency_limit_to_default(CORES_POOL)
            pools.claim_concurrency_slot(CORES_POOL, run, "died")
        after_kill = tiny.sequences()
        assert server.ended_run(run) == "FAILURE"
        again = eventually(lambda: _retry_of(server, run), "the run was started again")
        assert server.ended_run(again) == "SUCCESS"

    assert after_kill == yesterday
    assert len(tiny.sequences()) > len(yesterday)


def _retry_of(server: Server, run: str) -> str:
    for one in server.runs():
        tags = {tag["key"]: tag["value"] for tag in one["tags"]}
        if tags.get("dagster/parent_run_id") == run:
            return str(one["runId"])
    return ""


@pytest.mark.campaign
def test_files_of_the_project_that_are_named_like_libraries_hide_none(tmp_path: Path) -> None:
    project = CliProject(tmp_path).write()
    for name in ("click", "datasets", "duckdb", "numpy", "orjson", "polars", "pyarrow", "rich", "sqlalchemy", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the project')\n", encoding="utf-8")
    shutil.copy(ROOT / "workspace.yaml", tmp_path)
    with serving(tmp_path / "configs", tmp_path / ".rowmill", tmp_path / ".dagster", root=tmp_path) as server:
        assert server.ended_run(server.launch("rebuild_small")) == "SUCCESS"
    shown = (tmp_path / ".dagster/log").read_text(encoding="utf-8")
    assert "a file of the project" not in shown
    assert "Launching Dagster services" in shown.splitlines()[0]
    project.run("verify")
