"""`rowmill ui` before Dagster takes over: what a project needs, which definitions are loaded, what is missing."""

import importlib.util
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from rowmill.cli import ui
from rowmill.core.errors import ConfigError, MissingPackageError


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Return the commands that the process would have executed."""
    commands: list[Sequence[str]] = []
    monkeypatch.setattr(os, "execvpe", lambda _, command, __: commands.append(command))
    monkeypatch.setenv("ROWMILL_REPORTS_URL", "http://127.0.0.1:1")
    # Another address of reports is no server of ours; a URL as storage root has none.
    monkeypatch.setenv("ROWMILL_STORE", "memory://reports")
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    return commands


def test_folder_without_a_project_and_missing_dagster_are_errors_that_name_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = r"no project; .* a folder with configs/, or a workspace\.yaml; run it in the project's folder.*rowmill init"
    with pytest.raises(ConfigError, match=said):
        ui.serve_ui(tmp_path)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "dagster" else found(name))
    with pytest.raises(MissingPackageError, match=r"the package dagster is not installed; .* pip install .*dagster\]'"):
        ui.serve_ui(tmp_path)


@pytest.mark.parametrize(
    ("file", "loaded"),
    [("workspace.yaml", ["-w", "workspace.yaml"]), ("configs/a.yaml", ["-m", "dagster_rowmill.definitions"])],
)
def test_workspace_file_is_loaded_where_there_is_one(
    file: str, loaded: list[str], tmp_path: Path, started: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    ui.serve_ui(tmp_path, port=0)
    [command] = started
    assert list(command[-2:]) == loaded
    assert (tmp_path / ".dagster/dagster.yaml").is_file()


def listen_after_a_free_port() -> socket.socket:
    for port in range(20_000, 60_000):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return socket.create_server(("127.0.0.1", port + 1))
        except OSError:
            continue
    raise AssertionError("no two free ports in a row")


@pytest.mark.parametrize(("offset", "server"), [(0, "Dagster"), (1, "the viewer of builds")])
def test_busy_port_is_one_sentence_that_names_it_and_the_option(
    offset: int, server: str, tmp_path: Path, started: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROWMILL_REPORTS_URL")
    monkeypatch.setenv("ROWMILL_STORE", str(tmp_path / "store"))
    (tmp_path / "configs").mkdir()
    with listen_after_a_free_port() as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            ui.serve_ui(tmp_path, port=port - offset)
    said = str(refused.value)
    assert said.startswith(f"127.0.0.1:{port}: another program already listens there; {server} needs a free port; ")
    assert "--port" in said
    assert "\n" not in said
    assert started == []


def test_port_that_does_not_exist_is_refused(tmp_path: Path, started: list[Sequence[str]]) -> None:
    (tmp_path / "configs").mkdir()
    with pytest.raises(ConfigError, match=r"^127\.0\.0\.1:99999: .*--port"):
        ui.serve_ui(tmp_path, port=99_999)
    assert started == []
