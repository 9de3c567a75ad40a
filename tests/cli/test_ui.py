"""`rowmill ui` before Dagster takes over: what a project needs, which definitions are loaded, what is missing.

What belongs here: the command that would be run, seen by replacing the process's last step. What does not: Dagster's
server (`tests/end_to_end/test_browser.py`).
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rowmill.cli import ui
from rowmill.core.errors import ConfigError, MissingPackageError


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Return the commands that the process would have become."""
    commands: list[Sequence[str]] = []

    def note(_: str, command: Sequence[str], __: Any) -> None:
        commands.append(command)

    monkeypatch.setattr(os, "execvpe", note)
    monkeypatch.setenv("ROWMILL_REPORTS_URL", "http://127.0.0.1:1")
    # Another address of reports is no server of ours; a URL as storage root has none.
    monkeypatch.setenv("ROWMILL_STORE", "memory://reports")
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    return commands


def test_folder_without_a_project_is_an_error_that_names_init(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no project; .* a folder with configs/, or a workspace\.yaml; .*rowmill init"
    ):
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

    ui.serve_ui(tmp_path, port=3000)

    [command] = started
    assert list(command[-2:]) == loaded
    assert (tmp_path / ".dagster/dagster.yaml").is_file()


def test_missing_dagster_is_an_error_that_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "dagster" else found(name))

    with pytest.raises(MissingPackageError, match=r"the package dagster is not installed; .*'rowmill\[dagster\]'"):
        ui.serve_ui(tmp_path)
