"""The viewer as a process: what it imports before a page needs it, and the address with which it begins."""

import json
import os
import signal
import subprocess
import sys
from urllib.request import urlopen

import pytest

from rowmill.build import runner
from tests.support.dagster_server import ROOT
from tests.support.ports import take_free_ports
from tests.support.recipes import Built, Workspace, chat

OF_LATER_PAGES = ("duckdb", "polars", "rowmill.inspection.chat_templates", "rowmill.reports.row_view")
"""Modules that the first page does without; it would appear later with them."""
OF_NO_PAGE = ("pandas", "transformers", "torch", "great_expectations", "datasets", "ray")
"""Packages of seconds of imports. pyarrow imports pandas wherever it is handed a value of Python."""
SHOW_PAGES = f"""
import json, sys
from pathlib import Path
from rowmill.viewer import lists, pages, server
builds = server.Builds.of_folder(Path("configs"), None)
build = builds.open_build("mini")
pages.show_recipes(builds), pages.show_report(build)
first = [name for name in {OF_LATER_PAGES + OF_NO_PAGE!r} if name in sys.modules]
[row] = {{f"{{part}}:0" for part in build.lineages["rows"].parts}}
"".join(pages.show_list(builds, build, lists.ListQuery.parse("rows", {{}}), {{}}))
pages.show_row(builds, build, row), pages.show_step(builds, build, "0")
pages.show_sequence(build, "rows", "train", "0")
print(json.dumps([first, [name for name in {OF_NO_PAGE!r} if name in sys.modules]]))
"""


ASK_FOR_A_REPORT = """
import asyncio, json, sys
from pathlib import Path
from rowmill.viewer import app, server
ask_for = app.make_app(server.Builds.of_folder(Path("configs"), None))
scope = {"type": "http", "method": "GET", "path": "/mini", "query_string": b"", "headers": [(b"host", b"localhost")]}
seen = []

async def receive():
    return await asyncio.Event().wait()

async def send(message):
    seen.append([message["type"], message.get("status"), "duckdb" in sys.modules])

asyncio.run(ask_for(scope, receive, send))
print(json.dumps([*seen, ["after it", None, "duckdb" in sys.modules]]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Return a build of chats with its statistics, as the command makes it; no test changes it."""
    built = Workspace(tmp_path_factory.mktemp("served")).one("rows.jsonl", [chat(i) for i in range(20)]).build()
    runner.publish_statistics(built.project)
    return built


@pytest.mark.slow
def test_pages_import_what_they_need_and_the_first_one_nothing_of_later_ones(built: Built) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "pipelines")}
    command = [sys.executable, "-c", SHOW_PAGES]
    done = subprocess.run(command, cwd=built.project.base, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], []]


@pytest.mark.slow
def test_duckdb_is_ready_for_the_first_list_once_a_report_is_sent(built: Built) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "pipelines")}
    command = [sys.executable, "-c", ASK_FOR_A_REPORT]
    done = subprocess.run(
        command, cwd=built.project.base, env=environment, capture_output=True, text=True, check=False, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["http.response.start", 200, False],
        ["http.response.body", None, False],
        ["after it", None, True],
    ]


@pytest.mark.slow
def test_view_begins_with_what_its_command_names_and_ends_without_a_word_when_interrupted(built: Built) -> None:
    row_id = built.rows_of("rows", "canonical_rows", file="rows")[7]["row_id"]
    port = take_free_ports()
    command = [sys.executable, "-m", "rowmill.cli.main", "view", "mini", row_id, "--port", str(port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=built.project.base, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with urlopen(address, timeout=60) as page:
                shown, text = page.url, page.read().decode()
            process.send_signal(signal.SIGINT)
            status, said = process.wait(timeout=60), process.stderr.read() if process.stderr else ""
        finally:
            process.kill()

    # Whoever interrupts a server has ended it as it is meant to end.
    assert (status, said) == (0, "")
    assert address.startswith(f"http://127.0.0.1:{port}/mini/search?q=")
    assert f"/mini/rows/{row_id}?version=" in shown
    assert f'<article class="row-view" data-row="{row_id}"' in text
