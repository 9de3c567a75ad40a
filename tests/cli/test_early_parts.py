"""A build that makes canonical rows while it opens the tokenizer: the same output, and no process that stays."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rowmill.build import prepare
from rowmill.build.steps import plan_steps
from rowmill.executors.worker_processes import HAS_FORK_SERVER
from tests.support.recipes import CHAT, TEXT, Workspace, document

pytestmark = [pytest.mark.skipif(not HAS_FORK_SERVER, reason="no process is forked on this platform"), pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]

COMMAND = """
import os, sys
# As the command does before it imports NumPy.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
from rowmill.build import early_parts
from rowmill.executors import forked_workers
# A busy machine takes longer to end the threads that imports have told to end.
forked_workers.THREAD_END_SECONDS = 30
finish = early_parts.finish_early_parts
def note(helper):
    early = finish(helper)
    print("early", helper is not None, len(early.scans), len(early.parts), file=sys.stderr)
    return early
early_parts.finish_early_parts = note
from rowmill.cli.main import main
sys.exit(main(["build", sys.argv[1], "--until", "packed_shards", "--json"]))
"""


def run_command(workspace: Workspace) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "pipelines")}
    command = [sys.executable, "-c", COMMAND, str(workspace.config)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def write_documents(folder: Path, workers: int, form: Mapping[str, Any] = TEXT, **changes: Any) -> Workspace:
    workspace = Workspace(folder)
    workspace.write("docs.jsonl", [document(i, words=400) for i in range(1200)])
    source = {"train_urls": ["data/docs.jsonl"]}
    return workspace.recipe({"docs": {"source": source, "format": form}}, execution={"workers": workers}, **changes)


def test_a_command_makes_rows_while_it_opens_the_tokenizer(tmp_path: Path) -> None:
    workspace = write_documents(tmp_path / "early", 2)
    # Opening a tokenizer for the first time starts threads.
    prepare.require_ready(workspace.project, plan_steps(workspace.project))

    done = run_command(workspace)

    assert done.returncode == 0, done.stderr
    assert "early True 1 " in done.stderr
    made = {step["stage"]: step for step in json.loads(done.stdout)["steps"]}
    alone = write_documents(tmp_path / "alone", 1).build()
    for name, step in made.items():
        report = alone.report(*name.split("/"))
        assert (step["version"], step["parts_reused"]) == (report.version, 0)


def test_a_mistake_in_the_first_records_ends_the_process_too(tmp_path: Path) -> None:
    workspace = write_documents(tmp_path, 2, CHAT, gates={"rejects": {"at_most": 0}})
    prepare.require_ready(workspace.project, plan_steps(workspace.project))

    done = run_command(workspace)

    assert done.returncode != 0
    assert "of 20 records tried" in done.stderr
    assert "early True" in done.stderr
    assert not list(workspace.store.rglob("manifests"))
