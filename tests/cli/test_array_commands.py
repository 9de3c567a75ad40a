"""`rowmill work` and `plan --stages` as a batch service runs them: statuses, what they print, the jobs of a build."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rowmill.build.prepare import SHARE_VERSIONS_FOLDER
from rowmill.cli.error_boundary import ExitStatus
from tests.support.cli_project import run
from tests.support.recipes import CHAT, Workspace, chat

DIVIDED = ("canonical_rows", "tokenized_examples", "packed_shards")
TOTAL = 3
ROOT = Path(__file__).resolve().parents[2]


def write_chats(folder: Path) -> Workspace:
    """Write chats of several parts and several pack groups; some repeat rows of other parts."""
    rows = [chat(i, words=40) for i in range(1000)]
    rows += rows[:300:7]
    workspace = Workspace(folder)
    urls = [workspace.write(f"{first:04}.jsonl", rows[first : first + 200]) for first in range(0, len(rows), 200)]
    dataset = {"source": {"train_urls": urls}, "format": CHAT, "packing": {"group_tokens": 4096}}
    return workspace.recipe({"rows": dataset})


def context(workspace: Workspace, number: int, *options: str, engine: Path | None = None) -> "subprocess.Popen[str]":
    """Start `rowmill work` for a share, in a process of its own; `engine` holds another copy of the package."""
    command = [sys.executable, "-m", "rowmill.cli.main", "work", str(workspace.config), "--share", f"{number}/{TOTAL}"]
    return subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(engine), *sys.path] if engine else sys.path)},
    )


def finish(started: Sequence["subprocess.Popen[str]"]) -> None:
    """Wait for processes that must succeed."""
    for one in started:
        printed = one.communicate(timeout=60)
        assert one.returncode == ExitStatus.SUCCESS, printed


@pytest.mark.slow
def test_three_processes_make_all_parts_and_a_build_reuses_them(tmp_path: Path) -> None:
    plain, workspace = write_chats(tmp_path / "plain").build(), write_chats(tmp_path / "shares")
    workspace.build(only=["raw_dataset"])
    expected = {stage: plain.report("rows", stage).parts for stage in DIVIDED[:2]}
    expected["packed_shards"] = plain.manifest("rows", "packed_shards").facts["pack_groups"]
    for stage in DIVIDED:
        # Parts with duplicates are rewritten in a second pass, which needs all parts of the first.
        for _ in range(2 if stage == "canonical_rows" else 1):
            finish([context(workspace, number, "--only", stage) for number in range(1, TOTAL + 1)])
        built = workspace.build(only=[stage, "truncation_stats"] if stage == "tokenized_examples" else [stage])
        made = built.report("rows", stage)
        assert made.rows_made == 0
        assert made.parts_reused == expected[stage] > TOTAL
    whole = workspace.build()
    assert whole.versions() == plain.versions()
    assert whole.digests() == plain.digests()
    assert not list(workspace.store.rglob(SHARE_VERSIONS_FOLDER))


@pytest.mark.slow
def test_shares_with_other_code_are_refused(tmp_path: Path) -> None:
    workspace, engine = write_chats(tmp_path / "mini"), tmp_path / "other"
    shutil.copytree(ROOT / "pipelines", engine, ignore=shutil.ignore_patterns("__pycache__"))
    with (engine / "rowmill" / "__init__.py").open("a") as code:
        code.write("# another version\n")
    workspace.build(only=["raw_dataset"])
    finish([context(workspace, 1, "--only", "canonical_rows", engine=engine)])
    made = len(list(workspace.store.rglob("part.json")))
    second = context(workspace, 2, "--only", "canonical_rows")
    _, err = second.communicate(timeout=60)

    assert second.returncode == ExitStatus.INVALID
    assert "share 1/3 was made with the code of rowmill " in err
    assert len(list(workspace.store.rglob("part.json"))) == made > 0


def test_work_makes_what_it_can_and_waits_for_the_rest_with_75(tmp_path: Path) -> None:
    workspace = write_chats(tmp_path)
    waiting = run("work", str(workspace.config), "--share", "1/2", status=75)
    assert ExitStatus.INPUTS_MISSING == 75
    assert waiting.out.splitlines() == [
        f"rows/{stage}: waits for rows/raw_dataset; build that, then run this again" for stage in DIVIDED
    ]
    workspace.build(only=["raw_dataset"])
    command = ["work", str(workspace.config), "--share", "2/3"]
    rows, *others = run(*command, status=ExitStatus.INPUTS_MISSING).out.splitlines()
    assert "made;" in rows
    assert all("waits for rows/canonical_rows" in line for line in others)
    run(*command, "--only", "canonical_rows")


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "a/b", "-1/3", "1/3/5", ""])
def test_work_with_a_wrong_share_says_what_is_allowed(text: str, tmp_path: Path) -> None:
    refused = run("work", str(write_chats(tmp_path).config), f"--share={text}", status=ExitStatus.INVALID)
    assert f"--share {text}: not one of N shares; allowed is I/N with I from 1 to N" in refused.err


def test_plan_stages_prints_jobs_in_the_order_to_submit_them(tmp_path: Path) -> None:
    workspace = write_chats(tmp_path)
    recipe = str(workspace.config)
    assert run("plan", recipe, "--stages").out.splitlines() == [
        f"one    rowmill build {recipe} --only raw_dataset",
        f"array  rowmill work {recipe} --only canonical_rows --share I/N",
        f"one    rowmill build {recipe} --only canonical_rows",
        f"array  rowmill work {recipe} --only tokenized_examples --share I/N",
        f"one    rowmill build {recipe} --only tokenized_examples --only truncation_stats",
        f"array  rowmill work {recipe} --only packed_shards --share I/N",
        f"one    rowmill build {recipe}",
    ]
    assert not workspace.store.exists()


@pytest.mark.slow
def test_the_commands_of_plan_stages_build_the_recipe(tmp_path: Path) -> None:
    expected, workspace = write_chats(tmp_path / "plain").build(), write_chats(tmp_path / "shares")
    for job in json.loads(run("plan", str(workspace.config), "--stages", "--json").out)["jobs"]:
        words = job["command"].split()[1:]
        for number in range(1, TOTAL + 1 if job["kind"] == "array" else 2):
            run(*(word if word != "I/N" else f"{number}/{TOTAL}" for word in words))
    again = workspace.build()
    assert not again.made()
    assert again.digests() == expected.digests()
