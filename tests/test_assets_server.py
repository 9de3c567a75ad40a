"""The real thing: `dagster dev` with its daemon, driven over GraphQL as its pages drive it, ended by SIGINT."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import dagster as dg
import pytest

from assets.automation import RANGE_END, RANGE_START
from tests.tiny_project import Tiny

ROOT = Path(__file__).resolve().parent.parent
RANKS = ("rank-00000-of-00002", "rank-00001-of-00002")
AnswerT = TypeVar("AnswerT")

LOCATION = (
    "{ workspaceOrError { ... on Workspace { locationEntries { loadStatus locationOrLoadError { __typename } } } } }"
)
LAUNCH_RUN = """
mutation ($params: ExecutionParams!) {
  launchRun(executionParams: $params) { __typename ... on LaunchRunSuccess { run { runId } } }
}"""
RUN_STATUS = "query ($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"
LAUNCH_BACKFILL = """
mutation ($params: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $params) { __typename ... on LaunchBackfillSuccess { backfillId } }
}"""
BACKFILL_STATUS = """
query ($id: String!) { partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill { status } } }"""
MATERIALIZATIONS = """
query ($key: AssetKeyInput!) {
  assetOrError(assetKey: $key) { ... on Asset { assetMaterializations(limit: 10) { partition } } }
}"""
SELECTOR = {"repositoryLocationName": "rowmill", "repositoryName": "__repository__"}


@dataclass(frozen=True)
class Server:
    """A running `dagster dev` over a tiny project."""

    process: "subprocess.Popen[bytes]"
    port: int
    tiny: Tiny

    def ask(self, query: str, **variables: Any) -> Mapping[str, Any]:
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/graphql", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            whole = json.load(answer)
        assert "errors" not in whole, whole
        return whole["data"]

    def materialized(self, *steps: str) -> list[str | None]:
        asset = self.ask(MATERIALIZATIONS, key={"path": ["tiny", *steps]})["assetOrError"]
        return [one["partition"] for one in asset.get("assetMaterializations", ())]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Start what `rowmill ui` starts, in a session of its own, so that everything it starts can be found and ended."""
    tiny = Tiny(tmp_path, dg.DagsterInstance.ephemeral()).write()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = f"from pathlib import Path; from pipelines import ui; ui.serve(Path({str(ROOT)!r}), port={port})"
    places = {
        "ROWMILL_CONFIGS": str(tiny.path.parent),
        "ROWMILL_STORE": tiny.store,
        "DAGSTER_HOME": str(tmp_path / "home"),
    }
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=os.environ | places, stdout=log, stderr=log, start_new_session=True
        )
    try:
        started = Server(process, port, tiny)
        eventually(lambda: _loaded(started), "the code location is loaded")
        yield started
    finally:
        for pid in _session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def test_run_from_the_user_interface_builds_every_rank_and_sigint_leaves_no_process(server: Server) -> None:
    status = _finished(server, "rebuild_tiny", None)

    assert status == "SUCCESS"
    assert sorted(filter(None, server.materialized("gpu_partitions"))) == list(RANKS)
    assert (server.tiny.folder / "home" / "dagster.yaml").read_text() == (ROOT / "assets" / "dagster.yaml").read_text()

    server.process.send_signal(signal.SIGINT)
    server.process.wait(timeout=60)
    eventually(lambda: not _session(server.process.pid), "no process is left")


def test_materialize_all_over_broken_data_builds_no_rank(server: Server) -> None:
    server.tiny.write(unknown_roles=12)
    everything = [list(step.key) for step in _road(server.tiny)]
    params = {"assetSelection": [{"path": path} for path in everything], "partitionNames": list(RANKS)}

    launched = server.ask(LAUNCH_BACKFILL, params=params)["launchPartitionBackfill"]
    status = eventually(lambda: _ended(server, launched["backfillId"]), "the backfill has ended")

    # A backfill runs the ranks apart from the stages before them; there Dagster's blocking checks hold nothing back.
    assert status in {"COMPLETED_FAILED", "FAILED"}
    assert server.materialized("chats", "canonical_rows") == [None]
    assert server.materialized("chats", "tokenized_examples") == []
    assert server.materialized("gpu_partitions") == []


def eventually(ask: Callable[[], AnswerT], what: str, *, within_s: float = 180) -> AnswerT:
    """Ask until the answer is true; the wait between two questions is all that takes time here."""
    deadline, pause = time.monotonic() + within_s, threading.Event()
    while time.monotonic() < deadline:
        if answer := ask():
            return answer
        pause.wait(0.3)
    raise AssertionError(f"not within {within_s:.0f} s: {what}")


def _loaded(server: Server) -> bool:
    assert server.process.poll() is None, (server.tiny.folder / "log").read_text()
    try:
        workspace = server.ask(LOCATION)["workspaceOrError"]
    except OSError:
        return False
    return [
        (entry["loadStatus"], entry["locationOrLoadError"]["__typename"]) for entry in workspace["locationEntries"]
    ] == [("LOADED", "RepositoryLocation")]


def _finished(server: Server, job: str, assets: list[list[str]] | None) -> str:
    selector: dict[str, Any] = SELECTOR | {"jobName": job}
    if assets is not None:
        selector["assetSelection"] = [{"path": path} for path in assets]
    tags = [{"key": RANGE_START, "value": RANKS[0]}, {"key": RANGE_END, "value": RANKS[-1]}]
    params = {"selector": selector, "runConfigData": {}, "executionMetadata": {"tags": tags}}
    run_id = server.ask(LAUNCH_RUN, params=params)["launchRun"]["run"]["runId"]

    def status() -> str | None:
        now = server.ask(RUN_STATUS, id=run_id)["runOrError"]["status"]
        return now if now in {"SUCCESS", "FAILURE", "CANCELED"} else None

    return eventually(status, "the run has ended") or ""


def _ended(server: Server, backfill_id: str) -> str | None:
    now = server.ask(BACKFILL_STATUS, id=backfill_id)["partitionBackfillOrError"]["status"]
    return now if now in {"COMPLETED_SUCCESS", "COMPLETED_FAILED", "FAILED", "CANCELED"} else None


def _road(tiny: Tiny) -> Any:
    from pipelines import build

    return build.road(tiny.project)


def _session(leader: int) -> list[int]:
    """Return the living processes of a session: field 6 of /proc/<pid>/stat, without those waiting to be reaped."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(session) == leader and state != "Z":
                found.append(int(entry.name))
    return found
