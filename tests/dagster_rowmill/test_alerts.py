"""Sensors of alerts: a broken night is told once, trainers keep their build, and the repaired one is told, too."""

import asyncio
import logging
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dagster as dg
import pytest
import yaml
from dagster._core.execution.submit_asset_runs import submit_asset_run
from dagster._core.launcher.sync_in_memory_run_launcher import SyncInMemoryRunLauncher
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.test_utils import create_test_daemon_workspace_context, freeze_time
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget, PythonFileTarget
from dagster._daemon.freshness import FreshnessDaemon
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon
from dagster._daemon.sensor import execute_sensor_iteration
from dagster._scheduler.scheduler import ScheduleIterationTimes, launch_scheduled_runs

from dagster_rowmill import definitions
from dagster_rowmill.names import make_asset_key
from rowmill.build.steps import plan_steps
from rowmill.reports import alert_text, report_page
from tests.alerts.test_alerts import receiving
from tests.support.ports import take_free_ports
from tests.support.tiny_project import RECIPE, Tiny, task

pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")

ALERTS = [{"kind": "webhook", "url_env": "HOOK", "on": ["failed", "blocked", "overdue", "published"]}]

ENVIRONMENT_VARIABLES = pytest.mark.filterwarnings("ignore:Property `ScheduleDefinition.env:DeprecationWarning")
"""Dagster reads a property of every schedule that it will not have in future."""


class Nights:
    """Dagster's daemon on a clock that a test sets: its scheduler, its queue of runs and its sensors.

    Everything runs in this process, so that schedules, runs, sensors and messages see the same clock.
    """

    def __init__(self, instance: dg.DagsterInstance, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # Dagster keeps what it loaded from a file in a folder, and each test has recipes of its own.
        origin = LoadableTargetOrigin(python_file=definitions.__file__, attribute="defs", working_directory=str(folder))
        target = InProcessWorkspaceLoadTarget(InProcessCodeLocationOrigin(origin, location_name="rowmill"))
        self.instance, self.workspace = instance, WorkspaceProcessContext(instance, target)
        self.monkeypatch, self.schedules = monkeypatch, dict[str, ScheduleIterationTimes]()

    def wait_until(self, now: datetime) -> list[dg.DagsterRun]:
        """Let the clock show a time, and the daemon do what is due; return the rebuilds that it ran."""
        before = {run.run_id for run in self.instance.get_runs()}
        logger = logging.getLogger("daemon")
        with freeze_time(now), self.monkeypatch.context() as patched:
            patched.setattr(alert_text, "datetime", Mock(now=Mock(return_value=now)))
            list(launch_scheduled_runs(self.workspace, logger, now, self.schedules))
            with QueuedRunCoordinatorDaemon(interval_seconds=0) as queue:
                list(queue.run_iteration(self.workspace))
            list(execute_sensor_iteration(self.workspace, logger, None, None))
        runs = [run for run in self.instance.get_runs() if run.run_id not in before]
        return [run for run in runs if run.job_name.startswith("rebuild_")]

    def materialize(self, tiny: Tiny, now: datetime) -> str:
        """Run all assets of a recipe without its job, and let the daemon do what is due; return how the run ended."""
        wanted = dg.RunRequest(asset_selection=[make_asset_key(step.key) for step in plan_steps(tiny.project)])
        loaded, logger = self.workspace.create_request_context(), logging.getLogger("daemon")
        with freeze_time(now):
            run = asyncio.run(submit_asset_run(None, wanted, 0, self.instance, self.workspace, loaded, {}, {}, logger))
        self.wait_until(now)
        [record] = self.instance.get_run_records(dg.RunsFilter([run.run_id]))
        return record.dagster_run.status.value


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return what starts the nights of a project, once it is written."""
    home = tmp_path / "home"
    home.mkdir()
    # Ours, but that runs are in this process, and wait for no slot of a pool: a clock that stands does not free any.
    settings = yaml.safe_load((Path(definitions.__file__).parent / "dagster.yaml").read_text(encoding="utf-8"))
    del settings["concurrency"]["pools"]
    launcher = {"module": SyncInMemoryRunLauncher.__module__, "class": SyncInMemoryRunLauncher.__name__}
    (home / "dagster.yaml").write_text(yaml.safe_dump(settings | {"run_launcher": launcher}), encoding="utf-8")
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("ROWMILL_CONFIGS", str(tmp_path / "configs"))
    monkeypatch.setenv("ROWMILL_STORE", str(tmp_path / ".rowmill"))
    # Runs of a clock that stands in the past are not old.
    monkeypatch.setenv("ROWMILL_HISTORY_DAYS", "0")
    with dg.DagsterInstance.get() as instance, ExitStack() as opened:

        def start() -> Nights:
            started = Nights(instance, tmp_path, monkeypatch)
            opened.enter_context(started.workspace)
            return started

        yield start


@pytest.mark.slow
@ENVIRONMENT_VARIABLES
def test_broken_night_is_told_once_and_the_repaired_one_is_published(
    tmp_path: Path, nights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the ticks at 02:00 and 02:30 of three nights to the messages that servers on loopback get."""
    port = take_free_ports()
    mail = {"kind": "email", "server": f"127.0.0.1:{port}", "sender": "a@example.org", "to": ["b@example.org"]}
    alerts = [*ALERTS, {**mail, "encryption": "none"}]
    execution = {**RECIPE["execution"], "alerts": alerts, "reports_url": "https://reports.example.org"}
    with receiving() as receiver, receiving_mail(port) as mails:
        monkeypatch.setenv("HOOK", receiver.url)
        with dg.DagsterInstance.get() as instance:
            tiny = Tiny(tmp_path, instance).write(execution=execution | {"cron": "0,30 2 * * *", "schedule_on": True})
        daemon: Nights = nights()

        def sleep(day: int) -> list[str]:
            """Return how the runs ended that a night's two ticks started."""
            looks = [(1, 59, 0), (2, 0, 20), (2, 1, 0), (2, 30, 20), (2, 31, 0)]
            started = [daemon.wait_until(datetime(2026, 11, day, *look, tzinfo=UTC)) for look in looks]
            # A tick is one run, however often the daemon looks.
            assert [len(runs) for runs in started] == [0, 1, 0, 1, 0]
            assert {run.tags["dagster/schedule_name"] for runs in started for run in runs} == {"nightly_tiny"}
            return [run.status.value for runs in started for run in runs]

        assert sleep(1) == ["SUCCESS"] * 2
        before, yesterday = alert_text.find_published_version(tiny.project), tiny.sequences()
        # Half of an upload: the file ends within a record, and a part of it is not what was asked for.
        whole = (tiny.folder / "data" / "tasks.jsonl").read_text()
        half = whole[: len(whole) // 2] + "".join('{"prompt": "half an upl\n' for _ in range(9))
        (tiny.folder / "data" / "tasks.jsonl").write_text(half)
        assert sleep(2) == ["FAILURE"] * 2
        during, read_meanwhile = alert_text.find_published_version(tiny.project), tiny.sequences()
        page = tiny.project.store.read(report_page.report_path("tiny")).decode()
        (tiny.folder / "data" / "tasks.jsonl").write_text(whole)
        # Some of five rows are for training.
        for i in range(60, 65):
            tiny.append("tasks", task(i))
        assert sleep(3) == ["SUCCESS"] * 2

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
    assert read_meanwhile == yesterday != tiny.sequences()


@pytest.mark.slow
@ENVIRONMENT_VARIABLES
def test_failures_of_different_steps_are_both_told_and_the_same_one_once(
    tmp_path: Path, nights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        with dg.DagsterInstance.get() as instance:
            execution = {**RECIPE["execution"], "alerts": ALERTS, "cron": "*/30 2 * * *", "schedule_on": True}
            tiny = Tiny(tmp_path, instance).write(execution=execution)
        daemon: Nights = nights()
        daemon.wait_until(datetime(2026, 11, 1, 1, 59, tzinfo=UTC))
        for day, minute, dataset in ((1, 0, "chats"), (1, 30, "tasks"), (2, 0, None), (2, 30, None)):
            if dataset is not None:
                (tiny.folder / "data" / f"{dataset}.jsonl").unlink()
            [run] = daemon.wait_until(datetime(2026, 11, day, 2, minute, 20, tzinfo=UTC))
            assert run.status.value == "FAILURE"

    said = [message["lines"] for message in receiver.received]
    titles = [message["title"] for message in receiver.received]
    assert titles == ["tiny: failed", "tiny: failed", "tiny: failed on the second night"]
    assert said[0][0].startswith("chats/raw_dataset: found no data at data/chats.jsonl (")
    # What is new comes first; on the next night, what has lasted longest, and both are told together.
    assert said[1][0].startswith("tasks/raw_dataset: found no data at data/tasks.jsonl (")
    assert said[1][1].startswith("also chats/raw_dataset: found no data at data/chats.jsonl (")
    assert (said[1][0].endswith(" (and 1 more)"), len(said)) == (True, 3)


@pytest.mark.slow
@ENVIRONMENT_VARIABLES
def test_assets_that_run_without_the_job_are_told_to_their_recipe_alone(
    tmp_path: Path, nights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As conditions (`automation: on_change`) and *Materialize* run them."""
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        with dg.DagsterInstance.get() as instance:
            tinies = [Tiny(tmp_path, instance, name).write(execution={"alerts": ALERTS}) for name in ("tiny", "other")]
        daemon: Nights = nights()
        daemon.wait_until(datetime(2026, 11, 1, 1, tzinfo=UTC))
        statuses = [daemon.materialize(tinies[0], datetime(2026, 11, 1, 2, tzinfo=UTC))]
        (tmp_path / "data" / "chats.jsonl").unlink()
        statuses.append(daemon.materialize(tinies[0], datetime(2026, 11, 1, 3, tzinfo=UTC)))

    assert statuses == ["SUCCESS", "FAILURE"]
    assert [message["title"] for message in receiver.received] == ["tiny: published", "tiny: failed"]
    assert receiver.received[1]["lines"][0].startswith("chats/raw_dataset: found no data at data/chats.jsonl (")


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

    # The verdict, who reads it, and what is new, a line each, before anything else but the report's address.
    answer, _, news = (text.split("\\\n") for text in str(page["summary"].value).split("\n\n"))
    assert answer[:2] == ["**Passed** · 2 checks", "**Trainers read this version**"]
    assert "\\\n".join(answer[:2]) == str(first).partition("\n\n")[0] == str(quiet).partition("\n\n")[0]
    assert (news[0][:8], news[0][-5:]) == ("Since 20", " UTC:")
    assert news[1:4] == ["files: 1 changed", "rows +1 -0", "tokens +15 -0"]
    assert list(page)[:3] == ["summary", "since the last build", "report"]
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
