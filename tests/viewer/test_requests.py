"""Requests that the viewer's lists and `rowmill sql` take on an object store, and what they see of later builds."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from rowmill.core import remote
from rowmill.viewer.builds import Builds
from tests.support.cli_project import run
from tests.support.object_server import ObjectServer, serving_s3fs
from tests.support.recipes import PAIR, Workspace, pair
from tests.support.viewer import ask

pytestmark = pytest.mark.slow

ROOT = "s3://bucket/store"

LIST_PAGE, QUERY = 20, 16
"""Requests that the first page of a list, and a query of one view, may take for one dataset."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    with serving_s3fs(monkeypatch) as made:
        yield made


def count_requests(server: ObjectServer, ask_once: Callable[[], object]) -> int:
    before = server.requests
    ask_once()
    return server.requests - before


def copy_tables(server: ObjectServer, times: int) -> None:
    """Add to each table the same rows as further kept versions, and as those of further recipes."""
    stored = {path: content for path, content in server.objects.items() if path.startswith("bucket/store/stats/")}
    for number in range(1, times):
        for path, content in stored.items():
            server.objects[path.replace("recipe=mini", f"recipe=other{number}")] = content
            server.objects[path.replace("version=", f"version=a{number}")] = content


def test_requests_of_lists_and_queries_do_not_grow_with_the_tables(server: ObjectServer, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, ROOT).one("rows.jsonl", [pair(i) for i in range(24)], PAIR)
    workspace.build()
    recipe = str(tmp_path / "configs" / "mini.yaml")

    def open_viewer() -> Builds:
        builds = Builds.of_folder(tmp_path / "configs", ROOT)
        ask(builds, "/mini")
        return builds

    def query() -> str:
        return run("sql", "from rows select count(*) as n", recipe, "--root", ROOT, "--format", "csv").out

    counts: list[list[int]] = []
    for times in (1, 10):
        copy_tables(server, times)
        opened = [(open_viewer(), address) for address in ("/mini/rows", "/mini/rejects", "/mini/left_out")]
        lists = [count_requests(server, partial(ask, builds, address)) for builds, address in opened]
        counts.append([*lists, count_requests(server, query)])
        assert '<span class="dim total">24</span>' in ask(opened[0][0], "/mini/rows").text
        assert query() == "n\n24\n"

    assert counts[1] == counts[0]
    assert max(counts[0][:-1]) <= LIST_PAGE
    assert counts[0][-1] <= QUERY


def test_pages_show_what_was_built_since_the_viewer_was_opened(server: ObjectServer, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, ROOT).one("rows.jsonl", [pair(i) for i in range(5)], PAIR)
    workspace.build()
    builds = Builds.of_folder(tmp_path / "configs", ROOT)
    sql = "/mini/sql?q=from rows select 'rows: ' || count(*) as n"
    assert "rows: 5" in ask(builds, sql).text
    assert '<span class="dim total">5</span>' in ask(builds, "/mini/rows").text

    workspace.write("rows.jsonl", [pair(i) for i in range(7)])
    workspace.build()

    assert "rows: 7" in ask(builds, sql).text
    assert '<span class="dim total">7</span>' in ask(builds, "/mini/rows").text
