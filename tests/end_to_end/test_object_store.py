"""The demo on an object store: how many requests a build takes, and how long where each takes 20 ms.

What belongs here: whole builds on a server of this machine. What does not: storages that fail (`core/test_remote.py`).
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rowmill.build import runner
from rowmill.build.steps import Project, Step, open_project
from rowmill.core.errors import BusyError
from rowmill.core.storage import Store
from tests.support.object_server import ObjectServer, list_s3_variables, serving
from tests.support.recipes import Road, chat
from tests.support.tiny_project import FOREIGN_WARNINGS

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, *FOREIGN_WARNINGS]

FIRST_BUILD, NOTHING_CHANGED, ONE_ROW_APPENDED = 600, 200, 400
"""Requests that a build of the demo may take."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    s3fs = pytest.importorskip("s3fs", reason="object stores need s3fs: pip install 's3fs'")
    s3fs.S3FileSystem.clear_instance_cache()
    with serving() as made:
        for name, value in list_s3_variables(made).items():
            monkeypatch.setenv(name, value)
        yield made


def build(project: Project, server: ObjectServer) -> tuple[int, dict[str, str], int]:
    """Build; return the requests that it took, the versions, and how many steps were made."""
    before = server.requests
    done = runner.build(project)
    versions = {"/".join(step.key): report.version for step, report, _ in done}
    return server.requests - before, versions, sum(not report.reused for _, report, _ in done)


def test_requests_of_the_demo_stay_within_their_budgets(server: ObjectServer, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs" / "demo", tmp_path / "configs" / "demo")
    config = tmp_path / "configs" / "demo" / "demo.yaml"
    local = runner.build(open_project(config))
    project = open_project(config, "s3://bucket/store")

    first, versions, made = build(project, server)
    server.latency_s = 0.02
    again, same, made_again = build(project, server)
    server.latency_s = 0.0
    rows = min((config.parent / "data").rglob("*.jsonl"))
    lines = rows.read_bytes().splitlines(keepends=True)
    rows.write_bytes(b"".join([*lines, lines[0].replace(b"the ", b"this ")]))
    appended, other, made_then = build(project, server)

    assert versions == same == {"/".join(step.key): report.version for step, report, _ in local}
    assert versions != other
    assert (made, made_again) == (17, 0)
    assert 0 < made_then < 17
    assert first <= FIRST_BUILD, f"{first} requests"
    assert again <= NOTHING_CHANGED, f"{again} requests"
    assert appended <= ONE_ROW_APPENDED, f"{appended} requests"


def with_rows(folder: Path) -> Project:
    return Road(folder, "s3://bucket/store").one("rows.jsonl", [chat(i) for i in range(20)]).project


POINTER = "bucket/store/road/rows/canonical_rows/pointer.json"


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_builders_one_sets_the_pointer_and_the_other_says_so(
    is_first: bool, server: ObjectServer, tmp_path: Path
) -> None:
    project = with_rows(tmp_path)
    if not is_first:
        runner.build(project)
        Road(tmp_path).write("rows.jsonl", [chat(i) for i in range(21)])
    other = Store("s3://bucket/other")
    other.write_sealed("pointer.json", {"version": "f" * 32, "fingerprint": "e" * 32})

    def interfere(step: Step) -> None:
        if step.name == "canonical_rows":
            server.objects[POINTER] = server.objects["bucket/other/pointer.json"]

    with pytest.raises(BusyError, match=r"road/rows/canonical_rows: another build has made version ffffffffffff"):
        runner.build(project, begin=interfere)

    assert server.objects[POINTER] == server.objects["bucket/other/pointer.json"]


def test_two_builders_of_one_version_both_end(server: ObjectServer, tmp_path: Path) -> None:
    project = with_rows(tmp_path)
    versions = [report.version for _, report, _ in runner.build(project)]
    pointer = server.objects[POINTER]
    server.objects = {path: content for path, content in server.objects.items() if not path.startswith("bucket/store")}

    def interfere(step: Step) -> None:
        if step.name == "canonical_rows":
            # The same version, in other bytes.
            server.objects[POINTER] = b" " + pointer

    assert [report.version for _, report, _ in runner.build(project, begin=interfere)] == versions
