"""One built recipe whose report the tests of this package read, with rows that try to be markup."""

from pathlib import Path
from typing import Any

import pytest

from rowmill.reports import report_page
from tests.support.markup import Page
from tests.support.recipes import PAIR, Built, Workspace, chat, pair

HOSTILE = (
    '<script>alert(1)</script></script><!--</style><img src="http://evil.invalid/x.png" onerror="alert(2)">'
    "{{ 7 * 7 }}{% raw %}${alert(3)}\"'`&amp;]]>"
)
"""Markup, templates and quotes, as rows of real data have them."""


def make_hostile_rows() -> list[dict[str, Any]]:
    good = [chat(i, turns=1 + i % 3) for i in range(40)]
    good[3]["messages"][0]["content"] = HOSTILE
    good[3]["messages"][1]["content"] = HOSTILE
    return [*good, {"messages": HOSTILE}, {"messages": []}, {"messages": [{"role": 7, "content": "x"}]}]


def with_hostile_rows(folder: Path, **changes: Any) -> Workspace:
    """Write a project of these rows alone."""
    return Workspace(folder).one("chats.jsonl", make_hostile_rows(), **changes)


@pytest.fixture(scope="session")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Return a build of chats, three of them rejected, and of pairs; no test changes it."""
    workspace = Workspace(tmp_path_factory.mktemp("reported"))
    pairs = workspace.dataset("pairs.jsonl", [pair(i) for i in range(30)], PAIR)
    datasets = {"chats": workspace.dataset("chats.jsonl", make_hostile_rows()), "pairs": pairs}
    return workspace.recipe(datasets).build()


@pytest.fixture(scope="session")
def folder(reported: Built) -> Path:
    """Return the folder of the report."""
    return Path(report_page.write_report(reported.project)).parent


@pytest.fixture(scope="session")
def page(folder: Path) -> Page:
    """Return the report's page."""
    return Page((folder / "report.html").read_text(encoding="utf-8"))
