"""Sensors of alerts: a broken night is told once, trainers keep their build, and the repaired one is told, too."""

import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.test_utils import create_test_daemon_workspace_context, freeze_time
from dagster._core.workspace.load_target import PythonFileTarget
from dagster._daemon.freshness import FreshnessDaemon

from dagster_rowmill import definitions
from dagster_rowmill.names import make_asset_key
from rowmill.reports import alert_text
from tests.alerts.test_alerts import receiving
from tests.support.tiny_project import FOREIGN_WARNINGS, RECIPE, Tiny

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


def test_broken_night_is_told_once_and_the_repaired_one_is_published(
    tiny_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny: Tiny = tiny_folder
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        tiny.write(execution={**RECIPE["execution"], "alerts": ALERTS, "freshness": {"hours": 30}})
        assert run_night(tiny).success
        before = alert_text.find_published_version(tiny.project)
        tiny.write_rows("tasks", [{"prompt": "half an upload"}] * 60)
        assert [run_night(tiny).success for _ in range(2)] == [False, False]
        during = alert_text.find_published_version(tiny.project)
        tiny.write(rows=61, execution={**RECIPE["execution"], "alerts": ALERTS, "freshness": {"hours": 30}})
        assert run_night(tiny).success

    assert [message["event"] for message in receiver.received] == ["published", "blocked", "published"]
    blocked = receiver.received[1]["lines"]
    assert before is not None
    assert blocked[0].startswith("tasks/canonical_rows: ")
    assert f"Trainers read version {before[:12]}" in "\n".join(blocked)
    assert during == before != alert_text.find_published_version(tiny.project)


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
