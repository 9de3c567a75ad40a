"""The commands that stand before Dagster: a whole recipe in one process, and the server's home."""

from pathlib import Path

import dagster as dg
import pytest

from rowmill.cli import ui
from tests.support.tiny_project import Tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_materialize_says_a_line_per_stage_reports_and_is_seen_by_the_user_interface(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tiny.start("-m", "dagster_rowmill.materialize", "tiny")
    stages = [line.split(":")[0] for line in done.stdout.splitlines() if ": made in " in line]
    assert done.returncode == 0, done.stderr
    assert len(stages) == 12
    assert stages[-1] == "gpu_partitions"
    assert "tiny  current build" in done.stdout
    assert " - DEBUG - " not in done.stdout + done.stderr
    monkeypatch.setenv("DAGSTER_HOME", str(tiny.folder / "home"))
    with dg.DagsterInstance.get() as instance:
        assert [(run.job_name, run.is_success) for run in instance.get_runs()] == [("rebuild_tiny", True)]


@pytest.mark.campaign
def test_materialize_of_broken_data_fails_and_says_which_check_and_what_to_do(tiny: Tiny) -> None:
    done = tiny.write(unknown_roles=12).start("-m", "dagster_rowmill.materialize", "tiny")

    assert done.returncode == 1
    assert "chats/canonical_rows: unknown_roles: 20 %" in done.stdout
    assert "wanted at most 1 %; map the role" in done.stdout
    assert "Dependencies for step" not in done.stdout
    assert "Traceback" not in done.stderr


def test_materialize_of_an_unknown_recipe_names_those_there_are(tiny: Tiny) -> None:
    done = tiny.start("-m", "dagster_rowmill.materialize", "tinny")
    assert done.returncode == 2
    assert "choose tiny" in done.stderr
    assert "Traceback" not in done.stderr


def test_materialize_refuses_days_of_history_before_anything_runs(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWMILL_HISTORY_DAYS", "many")
    done = tiny.start("-m", "dagster_rowmill.materialize", "tiny")
    assert (done.returncode, done.stdout) == (2, "")
    assert "ROWMILL_HISTORY_DAYS: expected a number of days, got 'many'" in done.stderr
    assert not Path(tiny.store).exists()


def test_home_is_absolute_and_its_settings_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    settings = tmp_path / ".dagster" / "dagster.yaml"

    assert ui.prepare_home(Path()) == tmp_path / ".dagster"
    assert settings.read_bytes() == (ROOT / "assets" / "dagster_rowmill" / "dagster.yaml").read_bytes()
    settings.write_text("telemetry: {enabled: false}\n", encoding="utf-8")
    assert ui.prepare_home(Path()) == tmp_path / ".dagster"
    assert settings.read_text(encoding="utf-8") == "telemetry: {enabled: false}\n"


def test_home_that_is_set_is_used_expanded_and_accepted_as_dagster_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "mine"))
    assert ui.prepare_home(tmp_path / "project") == tmp_path / "mine"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DAGSTER_HOME", "~/mine")
    monkeypatch.chdir(tmp_path)
    assert ui.prepare_home(tmp_path / "project") == tmp_path / "mine"
    with dg.DagsterInstance.get():
        assert (tmp_path / "mine" / "history" / "runs" / "index.db").is_file()
    assert not (tmp_path / "~").exists()
    with dg.DagsterInstance.from_config(str(ui.prepare_home(tmp_path))) as instance:
        assert not instance.telemetry_enabled
        assert instance.run_monitoring_enabled
