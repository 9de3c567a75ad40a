"""A real `rowmill ui` over a project, and requests to it like those of its pages; for end-to-end tests."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.support.ports import take_free_ports

ROOT = Path(__file__).resolve().parents[2]
AnswerT = TypeVar("AnswerT")

LOCATION = (
    "{ workspaceOrError { ... on Workspace { locationEntries { loadStatus locationOrLoadError { __typename } } } } }"
)
LAUNCH_RUN = """
mutation ($params: ExecutionParams!) {
  launchRun(executionParams: $params) { __typename ... on LaunchRunSuccess { run { runId } } }
}"""
RUN = "query ($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"
RUNS = """
{ runsOrError(limit: 20) { ... on Runs { results {
  runId status tags { key value } assetSelection { path } assets { key { path } } } } } }"""
MESSAGES = """
query ($id: ID!) { runOrError(runId: $id) { ... on Run {
  eventConnection { events { ... on MessageEvent { message } } } } } }"""
MATERIALIZATIONS = """
query ($key: AssetKeyInput!) {
  assetOrError(assetKey: $key) { ... on Asset { assetMaterializations(limit: 10) { partition } } }
}"""
REPOSITORY = {"repositoryLocationName": "rowmill", "repositoryName": "__repository__"}
ENDED = {"SUCCESS", "FAILURE", "CANCELED"}


@dataclass(frozen=True)
class Server:
    """A running `rowmill ui`."""

    process: "subprocess.Popen[bytes]"
    port: int
    home: Path

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, query: str, **variables: Any) -> Mapping[str, Any]:
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.address}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            whole = json.load(answer)
        assert "errors" not in whole, whole
        return whole["data"]

    def materialized(self, *key: str) -> list[str | None]:
        """Return the partitions of an asset's materializations, newest first; None for one without."""
        asset = self.ask(MATERIALIZATIONS, key={"path": list(key)})["assetOrError"]
        return [one["partition"] for one in asset.get("assetMaterializations", ())]

    def launch(self, job: str) -> str:
        """Start a job; return the run's id."""
        params = {"selector": REPOSITORY | {"jobName": job}, "runConfigData": {}}
        return str(self.ask(LAUNCH_RUN, params=params)["launchRun"]["run"]["runId"])

    def runs(self) -> list[Mapping[str, Any]]:
        """Return the newest runs, newest first."""
        return self.ask(RUNS)["runsOrError"]["results"]

    def run_status(self, run_id: str) -> str:
        return str(self.ask(RUN, id=run_id)["runOrError"]["status"])

    def process_of(self, run_id: str) -> int:
        """Return the process that executes a run, as its log names it."""
        events = self.ask(MESSAGES, id=run_id)["runOrError"]["eventConnection"]["events"]
        found = re.search(r"process for run \(pid: (\d+)\)", "\n".join(event.get("message", "") for event in events))
        assert found is not None
        return int(found[1])

    def ended_run(self, run_id: str) -> str:
        """Wait for a run; return how it ended."""
        return eventually(lambda: _if_ended(self.run_status(run_id)), "the run has ended")

    def processes(self) -> list[int]:
        """Return the living processes of the server's session."""
        return _session(self.process.pid)


@contextmanager
def serving(configs: Path, store: Path, home: Path, *, root: Path = ROOT) -> Generator[Server, None, None]:
    """Start what `rowmill ui` starts, in a session of its own, so that everything it starts can be found and ended."""
    # Pages on the first, reports on the second.
    port = take_free_ports(2)
    # As a shell starts a job in the background.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"from pathlib import Path; from rowmill.cli import ui; ui.serve_ui(Path({str(root)!r}), port={port})"
    )
    places = {"ROWMILL_CONFIGS": str(configs), "ROWMILL_STORE": str(store), "DAGSTER_HOME": str(home)}
    home.mkdir(exist_ok=True)
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=os.environ | places, stdout=log, stderr=log, start_new_session=True
        )
    try:
        server = Server(process, port, home)
        eventually(lambda: _loaded(server), "the code location is loaded")
        yield server
    finally:
        for pid in _session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(timeout=60)


def eventually(ask: Callable[[], AnswerT], what: str, *, within_s: float = 300) -> AnswerT:
    """Poll until the condition is true."""
    deadline, pause = time.monotonic() + within_s, threading.Event()
    while time.monotonic() < deadline:
        if answer := ask():
            return answer
        pause.wait(0.3)
    raise AssertionError(f"not within {within_s:.0f} s: {what}")


def _if_ended(status: str) -> str:
    return status if status in ENDED else ""


def _loaded(server: Server) -> bool:
    assert server.process.poll() is None, (server.home / "log").read_text()
    try:
        workspace = server.ask(LOCATION)["workspaceOrError"]
    except OSError:
        return False
    return [
        (entry["loadStatus"], entry["locationOrLoadError"]["__typename"]) for entry in workspace["locationEntries"]
    ] == [("LOADED", "RepositoryLocation")]


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
