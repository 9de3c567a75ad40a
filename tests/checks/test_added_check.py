"""A check is added in one place: its line in the catalog. Commands, Dagster, SQL and the options of a recipe follow.

What belongs here: one more check, seen everywhere. What does not: the checks that there are (`test_judge.py`).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.recipes import CHAT, LENIENT, Road, chat

ROOT = Path(__file__).resolve().parents[2]

FIRST_CHECK = "CHECKS: tuple[Check, ...] = (\n"
NEW_CHECK = """    Check("files", ("raw_dataset",), "at_least", 2, "warn",
        "source files of the dataset", "add the files that are missing"),
"""
"""It looks at a number that the stage counts already, so that nothing else is to be written."""

ASK = """
import contextlib, io, json, sys
from pathlib import Path
from dagster_rowmill.definitions import build_definitions
from rowmill import stats
from rowmill.build import steps
from rowmill.cli import main as cli

config, root = Path(sys.argv[1]), sys.argv[2]
shown = {}
for command in ("build", "verify"):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = cli.main([command, str(config), "--root", root])
    shown[command] = [status, out.getvalue()]
graph = build_definitions([config], root).resolve_asset_graph()
query = "SELECT dataset, stage, outcome, value, bound FROM check_results WHERE check_name = 'files'"
print(json.dumps(shown | {
    "dagster": ["/".join(key.asset_key.path) for key in graph.asset_check_keys if key.name == "files"],
    "sql": stats.query_views(steps.open_project(config, root).store, query)[1],
}))
"""


def test_check_of_one_line_is_run_shown_and_has_an_option(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    for package in ("assets", "pipelines"):
        shutil.copytree(ROOT / package, engine / package, ignore=shutil.ignore_patterns("__pycache__"))
    catalog = engine / "pipelines/rowmill/checks/catalog.py"
    content = catalog.read_text(encoding="utf-8")
    assert content.count(FIRST_CHECK) == 1
    catalog.write_text(content.replace(FIRST_CHECK, FIRST_CHECK + NEW_CHECK), encoding="utf-8")
    road = Road(tmp_path / "project")
    source = {"train_urls": [road.write("rows.jsonl", [chat(i) for i in range(12)])]}
    road.recipe({"rows": {"source": source, "format": CHAT}}, gates=LENIENT | {"files": {"at_least": 3}})

    done = subprocess.run(
        [sys.executable, "-c", ASK, str(road.config), str(tmp_path / "built")],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(engine / "pipelines"), str(engine / "assets")])},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    for command in ("build", "verify"):
        status, shown = said[command]
        assert status == 0, done.stderr
        assert "files" in shown
        assert "add the files that are missing" in shown
    assert said["dagster"] == ["road/rows/raw_dataset"]
    assert said["sql"] == [["rows", "raw_dataset", "failed", 1, 3]]
