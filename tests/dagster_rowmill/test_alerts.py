"""Sensors of alerts: a broken night is told once, trainers keep their build, and the repaired one is told, too."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.test_utils import create_test_daemon_workspace_context, freeze_time
from dagster._core.workspace.load_target import PythonFileTarget
from dagster._daemon.freshness import FreshnessDaemon

from dagster_rowmill import definitions
from dagster_rowmill.names import make_asset_key
from rowmill.reader import Reader
from rowmill.reports import alert_text, report_page
from tests.alerts.test_alerts import receiving
from tests.support.ports import take_free_ports
from tests.support.tiny_project import FOREIGN_WARNINGS, RECIPE, Tiny, task

pytestmark = [*FOREIGN_WARNINGS, pytest.mark.filterwarnings("ignore::dagster.BetaWarning")]

ALERTS = [{"kind": "webhook", "url_env": "HOOK", "on": ["failed", "blocked", "overdue", "published"]}]


def run_night(tiny: Tiny) -> dg.ExecuteInProcessResult:
    """Run the nightly job, then the sensors that the daemon runs after it."""
    defined = tiny.definitions()
    job = defined.resolve_job_def("rebuild_tiny")
    result = job.execute_in_process(instance=tiny.instance, raise_on_error=False)
    kind = dg.DagsterEventType.RUN_SUCCESS if result.success else dg.DagsterEventType.RUN_FAILURE
    [record] = [event for event in result.all_events if event.event_type == kind]
    name = "alert_finished_tiny" if result.success else "alert_failed_tiny"
    context = dg.build_run_status_sensor_context(
        sensor_name=name, dagster_event=record, dagster_instance=tiny.instance, dagster_run=result.dagster_run
    )
    defined.resolve_sensor_def(name)(context if result.success else context.for_run_failure())
    return result


@pytest.mark.slow
def test_broken_night_is_told_once_and_the_repaired_one_is_published(
    tiny_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny: Tiny = tiny_folder
    port = take_free_ports()
    mail = {"kind": "email", "server": f"127.0.0.1:{port}", "sender": "a@example.org", "to": ["b@example.org"]}
    alerts = [*ALERTS, {**mail, "encryption": "none"}]
    execution = {**RECIPE["execution"], "alerts": alerts, "reports_url": "https://reports.example.org"}
    with receiving() as receiver, receiving_mail(port) as mails:
        monkeypatch.setenv("HOOK", receiver.url)
        tiny.write(execution=execution)
        assert run_night(tiny).success
        before, yesterday = alert_text.find_published_version(tiny.project), read_sequences(tiny)
        # Half of an upload: the file ends within a record, and a part of it is not what was asked for.
        whole = (tiny.folder / "data" / "tasks.jsonl").read_text()
        half = whole[: len(whole) // 2] + "".join('{"prompt": "half an upl\n' for _ in range(9))
        (tiny.folder / "data" / "tasks.jsonl").write_text(half)
        assert [run_night(tiny).success for _ in range(2)] == [False, False]
        during, read_meanwhile = alert_text.find_published_version(tiny.project), read_sequences(tiny)
        page = tiny.project.store.read(report_page.report_path("tiny")).decode()
        (tiny.folder / "data" / "tasks.jsonl").write_text(whole)
        # Some of five rows are for training.
        for i in range(60, 65):
            tiny.append("tasks", task(i))
        assert run_night(tiny).success

    assert [message["event"] for message in receiver.received] == ["published", "blocked", "published"]
    blocked, published = receiver.received[1]["lines"], receiver.received[2]["lines"]
    assert before is not None
    assert [len(lines) for lines in (blocked, published)] == [5, 3]
    assert blocked[0].startswith("tasks/canonical_rows: rejects is ")
    assert blocked[1].startswith("invalid_json: 9, the first is data/tasks.jsonl line ")
    assert blocked[2].startswith(f"Trainers read version {before[:12]}, of ")
    assert blocked[2].endswith(" UTC. Held back since then: files: 1 changed; rows +0 -30.")
    assert blocked[3] == "https://reports.example.org/tiny/report.html"
    assert ": files: 1 changed; rows +5 -0; tokens +7" in published[0]
    # The mail has the same six lines, and nobody asked for mails of published builds.
    [told] = mails
    assert told.splitlines()[-6:] == ["tiny: blocked", *blocked]
    assert "Not ready: " in page
    assert "<h2>Since the last build</h2>" in page
    assert "rows +0 -30" in page
    assert during == before != alert_text.find_published_version(tiny.project)
    assert read_meanwhile == yesterday != read_sequences(tiny)


def read_sequences(tiny: Tiny) -> list[list[int]]:
    """Read what a trainer would get."""
    readers = [Reader(tiny.store, "tiny", rank=rank, world_size=2, batch_size=2, verify=True) for rank in range(2)]
    return [reader[i].input_ids.tolist() for reader in readers for i in range(len(reader))]


@contextmanager
def receiving_mail(port: int) -> Generator[list[str]]:
    """Keep the text of the mails that a server on loopback gets."""
    controller = pytest.importorskip("aiosmtpd.controller", reason="aiosmtpd is not installed")
    received: list[str] = []

    class Keeper:
        async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
            parsed = message_from_bytes(envelope.content, policy=policy.default)
            received.append(parsed.get_content())
            return "250 OK"

    server = controller.Controller(Keeper(), hostname="127.0.0.1", port=port)
    server.start()
    try:
        yield received
    finally:
        server.stop()


@pytest.mark.slow
def test_first_screen_of_the_ranks_says_what_is_new_and_whether_trainers_read_it(tiny_folder: Any) -> None:
    tiny: Tiny = tiny_folder
    tiny.write().run()
    first = tiny.shown("gpu_partitions").metadata["summary"].value
    tiny.append("tasks", {"prompt": "Name a number above 60.", "answer": "61 is above 60."})
    tiny.run()
    page = tiny.shown("gpu_partitions").metadata
    tiny.run()
    quiet = tiny.shown("gpu_partitions").metadata["summary"].value

    shown = " ".join(str(page["summary"].value).replace("\\\n", " ").split())
    assert "Trainers read this version" in " ".join(str(first).replace("\\\n", " ").split())
    assert "Trainers read this version; since " in shown
    assert ": files: 1 changed; rows +1 -0; tokens +15 -0" in shown
    assert len(str(page["summary"].value)) < 1_000
    table: Any = page["since the last build"].value
    [row] = table.records
    assert (row.data["dataset"], row.data["rows"]) == ("tasks", "+1 -0")
    assert "Unchanged since" in str(quiet).replace("\\\n", " ")


@pytest.mark.slow
def test_recipe_that_was_not_built_in_time_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    with receiving() as receiver, dg.DagsterInstance.local_temp(str(tmp_path / "home")) as instance:
        monkeypatch.setenv("HOOK", receiver.url)
        tiny = Tiny(tmp_path, instance).write(
            execution={**RECIPE["execution"], "alerts": ALERTS, "freshness": {"hours": 30}}
        )
        sensor = tiny.definitions().resolve_sensor_def("alert_overdue_tiny")
        monkeypatch.setenv("ROWMILL_CONFIGS", str(tiny.path.parent))
        monkeypatch.setenv("ROWMILL_STORE", tiny.store)

        def look(hours: float = 0) -> str | None:
            """Let Dagster's daemon judge the freshness some hours later, then let the sensor look."""
            with freeze_time(time.time() + hours * 3600):
                list(FreshnessDaemon().run_iteration(context))
            with monkeypatch.context() as patched:
                now = time.time() + hours * 3600
                patched.setattr(time, "time", lambda: now)
                return sensor.evaluate_tick(dg.build_sensor_context(instance=instance)).skip_message

        target = PythonFileTarget(definitions.__file__, "defs", str(Path.cwd()), "rowmill")
        with create_test_daemon_workspace_context(target, instance) as context:
            unjudged = sensor.evaluate_tick(dg.build_sensor_context(instance=instance)).skip_message
            never = look()
            instance.report_runless_asset_event(dg.AssetMaterialization(make_asset_key(("tiny", "training_splits"))))
            said = [never, look(), look(31), look(32)]

    assert unjudged == "freshness of training_splits: not known; is freshness on in dagster.yaml?"
    assert said == [
        "freshness of training_splits: UNKNOWN",
        "freshness of training_splits: PASS",
        "tiny: not built for 31 hours; wanted at most 30",
        "tiny: not built for 32 hours; wanted at most 30",
    ]
    [message] = receiver.received
    assert (message["title"], message["lines"][0]) == ("tiny: overdue", said[2])


def test_recipe_without_alerts_has_no_sensor_of_them(tiny_folder: Any) -> None:
    tiny: Tiny = tiny_folder
    names = [sensor.name for sensor in tiny.write().definitions().sensors or ()]

    assert not any(name.startswith("alert_") for name in names)


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Any:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Tiny(tmp_path, instance)
