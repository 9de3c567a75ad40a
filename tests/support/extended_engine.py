"""A copy of the engine to which a test adds a module or a line, and a build with that copy in its own process."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import contextlib, io, json, sys
from pathlib import Path
from rowmill.stats.views import query_views
from rowmill.build import steps
from rowmill.cli import main as cli
from rowmill.schema import manifest

config, root, commands = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
found = {}
for command, *options in commands:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = cli.main([command, str(config), "--root", root, *options])
    found[command] = [status, out.getvalue()]
project = steps.open_project(config, root)
store = project.store


def load(*key):
    return manifest.load_current(store, key)


def query(sql):
    return query_views(store, sql)[1]


def load_asset_graph():
    from dagster_rowmill.definitions import build_definitions

    return build_definitions([config], root).resolve_asset_graph()

"""
"""Runs the commands, and then the test's questions, which add to `found`."""


class ExtendedEngine:
    """The source of the engine and its Dagster layer, copied into a folder."""

    def __init__(self, folder: Path) -> None:
        """Copy the source."""
        self._folder = folder
        for package in ("assets", "pipelines"):
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))

    def write(self, module: str, text: str) -> None:
        """Write a file; `module` is its path in the repository."""
        (self._folder / module).write_text(text, encoding="utf-8")

    def replace(self, module: str, before: str, after: str) -> None:
        """Replace a text that a file holds once."""
        path = self._folder / module
        content = path.read_text(encoding="utf-8")
        assert content.count(before) == 1, f"{module} no longer holds this once: {before}"
        path.write_text(content.replace(before, after), encoding="utf-8")

    def build(
        self, config: Path, root: Path, questions: str, commands: Sequence[Sequence[str]] = (("build",),)
    ) -> dict[str, Any]:
        """Run commands of the copy, each of which must succeed, and what `questions` add to `found`.

        The result holds the output of each command under its name.
        """
        path = os.pathsep.join(str(self._folder / one) for one in ("pipelines", "assets"))
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM + questions + "\nprint(json.dumps(found))\n",
             str(config), str(root), json.dumps(list(commands))],
            check=False,
            cwd=config.parent.parent,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        for command, *_ in commands:
            status, found[command] = found[command]
            assert status == 0, found[command]
        return found
