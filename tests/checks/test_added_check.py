"""A check is added in one place: its line in the catalog. Commands, Dagster, SQL and the options of a recipe follow."""

from pathlib import Path

import pytest

from tests.support.extended_engine import ExtendedEngine
from tests.support.recipes import LENIENT, Workspace, chat

FIRST_CHECK = "CHECKS: tuple[Check, ...] = (\n"
NEW_CHECK = """    Check("files", ("raw_dataset",), "at_least", 2, "warn",
        "source files of the dataset", "add the files that are missing"),
"""
"""It looks at a number that the stage counts already, so that nothing else is to be written."""

QUESTIONS = """
graph = load_asset_graph()
found["dagster"] = ["/".join(key.asset_key.path) for key in graph.asset_check_keys if key.name == "files"]
found["sql"] = query("SELECT dataset, stage, outcome, value, bound FROM check_results WHERE check_name = 'files'")
"""


@pytest.mark.campaign
def test_check_of_one_line_is_run_shown_and_has_an_option(tmp_path: Path) -> None:
    engine = ExtendedEngine(tmp_path / "engine")
    engine.replace("pipelines/rowmill/checks/catalog.py", FIRST_CHECK, FIRST_CHECK + NEW_CHECK)
    rows, gates = [chat(i) for i in range(12)], LENIENT | {"files": {"at_least": 3}}
    workspace = Workspace(tmp_path / "project").one("rows.jsonl", rows, gates=gates)
    made = engine.build(workspace.config, tmp_path / "built", QUESTIONS, (("build",), ("verify",)))
    for command in ("build", "verify"):
        assert "files" in made[command]
        assert "add the files that are missing" in made[command]
    assert made["dagster"] == ["mini/rows.raw_dataset"]
    assert made["sql"] == [["rows", "raw_dataset", "failed", 1, 3]]
