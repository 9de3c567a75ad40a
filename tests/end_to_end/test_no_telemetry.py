"""No telemetry: a project is built, checked and shown without one connection that its recipe does not name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rowmill.core.telemetry import NO_TELEMETRY
from tests.support.cli_project import ROOT, CliProject
from tests.support.tiers import mark_all_but

pytestmark = pytest.mark.slow

NOTE_CONNECTIONS = """
import os, sys

def note(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        address = arguments[0] if event.startswith("socket.get") else arguments[1]
        # A path is a socket of this machine, through which workers are started.
        if not isinstance(address, (str, bytes)) or event.startswith("socket.get"):
            with open(os.environ["CONNECTIONS"], "a") as file:
                print(event, address, sys.argv, file=file)

sys.addaudithook(note)
"""
"""Imported by every Python process at its start."""

COMMANDS: dict[str, list[list[str]]] = {
    "commands": [["-m", "rowmill.cli.main", *words] for words in (
        ["plan", "small"], ["build", "small", "--workers", "2"], ["verify", "small", "--deep"], ["report", "small"],
    )],
    "dagster": [["-m", "dagster_rowmill.materialize", "small"]],
    "library": [
        ["-c", "import rowmill; rowmill.build_recipe(rowmill.open_project('configs/small.yaml'))"],
    ],
}  # fmt: skip


@pytest.mark.parametrize("way", mark_all_but(["commands"], COMMANDS))
def test_build_opens_no_connection_that_its_recipe_does_not_name(way: str, tmp_path: Path) -> None:
    CliProject(tmp_path).write()
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(NOTE_CONNECTIONS, encoding="utf-8")
    noted = tmp_path / "connections"
    # Nothing of the tests' environment keeps a library quiet.
    environment = {name: value for name, value in os.environ.items() if name not in {*NO_TELEMETRY, "HF_HUB_OFFLINE"}}
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT / "pipelines"), str(ROOT / "assets")])
    for command in COMMANDS[way]:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": path, "CONNECTIONS": str(noted)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    assert not noted.exists(), noted.read_text()


def test_connection_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOTE_CONNECTIONS, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "pipelines")])
    code = "import contextlib, socket\nwith contextlib.suppress(OSError): socket.create_connection(('127.0.0.1', 9))"
    environment = os.environ | {"PYTHONPATH": path, "CONNECTIONS": str(tmp_path / "noted")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)

    assert "socket.connect ('127.0.0.1', 9)" in (tmp_path / "noted").read_text()
