"""What is made while the tokenizer opens: equal outputs however far it came, counted as made, none if refused."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from rowmill.build import prepare
from rowmill.build.steps import plan_steps
from rowmill.executors.local import HAS_FORK_SERVER
from tests.support.recipes import TEXT, Workspace, document

pytestmark = [pytest.mark.skipif(not HAS_FORK_SERVER, reason="nothing is forked on this platform"), pytest.mark.slow]

RUN = """
import json, sys, time
from pathlib import Path
from rowmill.build import ahead, runner
from rowmill.build.steps import open_project
from rowmill.executors import local
# A busy machine takes longer to end the threads that imports have told to end.
local.THREAD_END_SECONDS = 30
project = open_project(Path(sys.argv[1]))
reached = Path(sys.argv[1]).with_name("reached")
fork_beside = ahead.fork_beside
def fork_and_hold(work):
    '''Start a side process that stays at its third part until it is ended.'''
    def work_and_wait(note):
        parts = 0
        def note_and_wait(result):
            nonlocal parts
            note(result)
            parts += isinstance(result, str)
            if parts == 3:
                reached.touch()
                time.sleep(600)
        work(note_and_wait)
    return fork_beside(work_and_wait)
if sys.argv[2] == "begun":
    ahead.fork_beside = fork_and_hold
side = ahead.begin_rows(project, list(project.recipe.datasets))
if side is None:
    print(json.dumps({"parts": None}))
    sys.exit()
if sys.argv[2] == "whole":
    side._process.join()
while sys.argv[2] == "begun" and not reached.exists():
    time.sleep(0.01)
project = ahead.collect_rows(project, side)
made = {"parts": len(project.ahead.parts), "scans": len(project.ahead.scans)}
made["outputs"] = project.store.exists("mini/docs/raw_dataset/pointer.json")
made["views"] = project.store.exists("stats.duckdb")
reports = [report for _, report, _ in runner.build(project, only=["raw_dataset", "canonical_rows"])]
made["reports"] = [[one.reused, one.parts, one.parts_reused, one.rows_made] for one in reports]
made["versions"] = [one.version for one in reports]
print(json.dumps(made))
"""


def write(folder: Path, *, workers: int = 2, documents: int = 1200, **changes: Any) -> Workspace:
    """Write documents of 2 MB and a recipe; `changes` are of the dataset's options."""
    workspace = Workspace(folder)
    # Lines that are no JSON, and duplicates, have their own parts.
    rows = [document(i % (documents - 5), words=400) for i in range(documents)]
    content = b"".join(orjson.dumps(row) + b"\n" for row in rows) + b"{\n"
    source = {"train_urls": [workspace.write("docs.jsonl", content)]}
    return workspace.recipe({"docs": {"source": source, "format": TEXT} | changes}, execution={"workers": workers})


def run_ahead(workspace: Workspace, how: str) -> dict[str, Any]:
    """Make rows ahead in a process without threads, and build to rows; return what it found."""
    command = [sys.executable, "-c", RUN, str(workspace.config), how]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return orjson.loads(done.stdout.splitlines()[-1])


def test_rows_made_ahead_are_those_of_the_build_and_count_as_made(tmp_path: Path) -> None:
    alone = write(tmp_path / "alone", workers=1)
    expected = alone.build(only=["raw_dataset", "canonical_rows"]).versions()

    found = run_ahead(write(tmp_path / "whole"), "whole")
    # Nothing but parts and views was left before the build.
    assert (found["scans"], found["outputs"], found["views"]) == (1, False, True)
    raw, rows = found["reports"]
    assert found["parts"] >= rows[1] > 1
    assert raw == [False, raw[1], 0, 1201]
    assert rows == [False, rows[1], 0, 1201]
    assert {*found["versions"]} == {*expected.values()}

    begun = run_ahead(write(tmp_path / "begun"), "begun")
    assert begun["parts"] == 3 < found["parts"]
    assert (begun["versions"], begun["reports"]) == (found["versions"], found["reports"])


def test_parts_of_an_earlier_build_stay_reused(tmp_path: Path) -> None:
    workspace = write(tmp_path)
    first = run_ahead(workspace, "whole")
    with (tmp_path / "data" / "docs.jsonl").open("ab") as file:
        file.write(orjson.dumps(document(5000, words=400)) + b"\n")
    second = run_ahead(workspace, "whole")

    [_, of_first], [_, of_second] = first["reports"], second["reports"]
    # An appended line makes the last part again.
    assert of_second[2] == of_first[1] - 1
    assert 0 < of_second[3] < of_first[3]


def test_nothing_is_made_ahead_without_a_second_core(tmp_path: Path) -> None:
    assert run_ahead(write(tmp_path, workers=1), "whole") == {"parts": None}


def test_few_rows_are_left_to_the_build_but_not_the_views(tmp_path: Path) -> None:
    found = run_ahead(write(tmp_path, documents=100), "whole")
    assert (found["parts"], found["scans"], found["outputs"], found["views"]) == (0, 0, False, True)


COMMAND = """
import sys
from rowmill.build import ahead
from rowmill.executors import local
local.THREAD_END_SECONDS = 30
collect = ahead.collect_rows
def wait(project, side):
    side._process.join()
    made = collect(project, side)
    print("ahead", len(made.ahead.parts), file=sys.stderr)
    return made
ahead.collect_rows = wait
from rowmill.cli.main import main
sys.exit(main(["build", "--until", "tokenized_examples", *sys.argv[1:]]))
"""


def test_a_build_that_is_refused_leaves_no_output_and_the_next_one_finds_the_parts(tmp_path: Path) -> None:
    # Every document is longer than that, and the trial sees it.
    workspace = write(tmp_path, truncation={"max_length": 16, "overlong": "raise"})
    # A tokenizer that is not in the store yet is opened by a library that starts threads.
    prepare.require_ready(workspace.project, plan_steps(workspace.project))
    command = [sys.executable, "-c", COMMAND, str(workspace.config)]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    refused = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert refused.returncode != 0, refused.stdout
    assert "datasets.docs" in refused.stderr
    ahead = next(int(line.removeprefix("ahead ")) for line in refused.stderr.splitlines() if line.startswith("ahead "))
    assert ahead > 1
    assert not [*workspace.store.glob("mini/docs/*/pointer.json")]

    [_, (rows, _)] = write(tmp_path).build(only=["raw_dataset", "canonical_rows"]).steps.values()
    assert (rows.reused, rows.parts_reused) == (False, rows.parts)
