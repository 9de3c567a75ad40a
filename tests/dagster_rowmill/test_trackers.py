"""Trackers from Dagster: a published build is logged once, whoever builds it, and the asset's page says where."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rowmill.names import make_asset_key
from dagster_rowmill.outside_builds import report_finished_steps, report_unknown_outputs
from rowmill.build import runner
from rowmill.cli import main
from rowmill.reports import build_record
from tests.alerts.test_alerts import receiving
from tests.support.tiny_project import RECIPE, Tiny

pytestmark = pytest.mark.skipif(
    find_spec("openlineage") is None, reason="no openlineage; pip install 'rowmill[openlineage]'"
)


def write(folder: Path, instance: dg.DagsterInstance, *trackers: dict[str, Any]) -> Tiny:
    return Tiny(folder, instance).write(execution={**RECIPE["execution"], "log_to": list(trackers)})


def read_page(instance: dg.DagsterInstance) -> dict[str, Any]:
    """Return what the newest page of the ranks says of trackers."""
    event = instance.get_latest_materialization_event(make_asset_key(("tiny", "gpu_partitions")))
    assert event is not None
    assert event.asset_materialization is not None
    page = event.asset_materialization.metadata
    return {name: value.value for name, value in page.items() if name.startswith("logged to")}


@pytest.mark.slow
def test_build_is_logged_once_and_a_failure_is_on_the_page_and_in_the_log(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    with dg.DagsterInstance.ephemeral() as instance, receiving(*[500] * 3) as receiver:
        address = receiver.url.partition("/hook")[0]
        away = {"kind": "openlineage", "url": address}
        tiny = write(tmp_path, instance, {"kind": "openlineage", "file": str(file)}, away)
        first, page = tiny.run(), read_page(instance)
        repeated, repaired = tiny.run(), read_page(instance)
        warned = [
            [entry.user_message for entry in instance.all_logs(run.run_id) if entry.level == 30]
            for run in (first, repeated)
        ]

    assert first.success
    assert repeated.success
    assert page["logged to openlineage"] == str(file)
    assert page["logged to openlineage 2"].startswith("not logged: HTTPError: 500 Server Error")
    assert repaired == {"logged to openlineage": str(file), "logged to openlineage 2": address}
    assert [any("not logged to openlineage" in line for line in lines) for lines in warned] == [True, False]
    events = [json.loads(line)["run"]["runId"] for line in file.read_text().splitlines()]
    assert len(events) == len(set(events)) == len(receiver.received) == 12


def test_secret_that_is_not_set_is_one_warning_before_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LINEAGE_KEY", raising=False)
    with dg.DagsterInstance.ephemeral() as instance:
        tracker = {"kind": "openlineage", "url": "http://127.0.0.1:9", "api_key_env": "LINEAGE_KEY"}
        run = write(tmp_path, instance, tracker).run()
        logs = [entry.user_message for entry in instance.all_logs(run.run_id) if "LINEAGE_KEY" in entry.user_message]
        page = read_page(instance)

    assert run.success
    missing = "execution.log_to, openlineage: api_key_env: the environment variable LINEAGE_KEY is not set"
    assert [line.startswith(missing) for line in logs] == [True, False]
    assert page["logged to openlineage"].startswith(f"not logged: {missing}")


def test_build_of_the_command_line_is_not_logged_again_by_dagster(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    with dg.DagsterInstance.ephemeral() as instance:
        tiny = write(tmp_path, instance, {"kind": "openlineage", "file": "events.jsonl"})
        assert main.main(["build", str(tiny.path), "--root", tiny.store, "--skip-preflight"]) == 0
        before = file.read_bytes()
        report_unknown_outputs(instance, tiny.project)
        pages = [read_page(instance)]
        assert tiny.run().success
        pages.append(read_page(instance))

    assert file.read_bytes() == before
    assert pages == [{"logged to openlineage": str(file)}] * 2


def test_page_of_a_build_elsewhere_is_renewed_once_its_tracker_answers(tmp_path: Path) -> None:
    with dg.DagsterInstance.ephemeral() as instance, receiving() as receiver:
        address = receiver.url.partition("/hook")[0]
        tiny = write(tmp_path, instance, {"kind": "openlineage", "url": address, "api_key_env": "LINEAGE_KEY"})
        project = tiny.project
        counts, pages, finished = list[int](), list[str](), list[Any]()
        for key in ("", "secret", "secret"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("LINEAGE_KEY", key)
                finished = runner.build(project)
                build_record.log_outputs(project, [report.manifest for _, report, _ in finished])
            counts.append(report_finished_steps(instance, project, finished))
            pages += [str(value) for value in read_page(instance).values()]

    assert counts == [len(finished), 1, 0]
    assert pages[0].startswith("not logged: ")
    assert pages[1:] == [address] * 2
