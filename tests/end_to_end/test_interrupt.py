"""Ctrl-C during a build: one line, status 130, no worker left, and the next build goes on."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rowmill.build import prepare
from rowmill.build.steps import plan_steps
from rowmill.cli import error_boundary
from rowmill.executors import local
from tests.support.recipes import Workspace, chat
from tests.support.tiers import mark_all_but

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
COMMAND = """
import os
import signal
import sys
# A shell's job in the background ignores the signal, and so would whatever it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# As the command does before it imports NumPy.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
from rowmill.cli import main as cli
from rowmill.executors import local
# However few rows there are, workers make them: with 0 those of a fork server, otherwise forked ones.
local.INLINE_BELOW_BYTES = int(sys.argv[2])
local.FORKED_INLINE_BELOW_BYTES = 1
if __name__ == "__main__":
    sys.exit(cli.main(["build", sys.argv[1]]))
"""
PATIENCE_S = 60.0


def write(folder: Path) -> Workspace:
    workspace = Workspace(folder)
    urls = [workspace.write(f"{n}.jsonl", [chat(1000 * n + i, turns=4) for i in range(300)]) for n in range(8)]
    dataset = {"source": {"train_urls": urls}, "format": {"kind": "chat"}}
    return workspace.recipe({"chats": dataset}, execution={"workers": 2})


def group_of(pid: int) -> list[int]:
    """Return the processes of a group that still run."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, group = (entry / "stat").read_text(encoding="ascii").rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(group) == pid and state != "Z":
                found.append(int(entry.name))
    return found


MOMENTS = [
    "mini/chats/raw_dataset/pointer.json", "mini/chats/canonical_rows/parts/*/part.json",
    "mini/chats/tokenized_examples/.lock", "mini/chats/tokenized_examples/parts/*/part.json",
]  # fmt: skip


@pytest.mark.parametrize("moment", mark_all_but(["mini/chats/tokenized_examples/.lock"], MOMENTS))
@pytest.mark.parametrize("inline_below_bytes", [0, pytest.param(local.INLINE_BELOW_BYTES, id="forked")])
def test_interrupted_build_prints_one_line_and_leaves_no_process(
    tmp_path: Path, moment: str, inline_below_bytes: int
) -> None:
    workspace = write(tmp_path / "project")
    # A tokenizer that is opened for the first time leaves threads, and so no workers could be forked.
    prepare.require_ready(workspace.project, plan_steps(workspace.project))
    script = tmp_path / "build.py"
    script.write_text(COMMAND, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, str(script), str(workspace.config), str(inline_below_bytes)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "pipelines")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not list(workspace.store.glob(moment)):
                assert process.poll() is None and time.monotonic() < deadline, "the build never came so far"
                time.sleep(0.002)
            if inline_below_bytes:
                # The command, two workers, Python's resource tracker.
                while len(group_of(process.pid)) < 4:
                    assert process.poll() is None and time.monotonic() < deadline, "the workers were never there"
                    time.sleep(0.002)
            os.killpg(process.pid, signal.SIGINT)
            _, said = process.communicate(timeout=PATIENCE_S)
        finally:
            # Whatever failed above, nothing is waited for without end when the block is left.
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    assert process.returncode == error_boundary.ExitStatus.INTERRUPTED, said
    assert "Traceback" not in said
    assert said.strip().endswith("stopped; finished parts are kept, and the next build resumes from them")
    # Python's resource tracker ends after all other processes.
    deadline = time.monotonic() + PATIENCE_S
    while group_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert group_of(process.pid) == []
    again = workspace.build()
    assert again.versions() == write(tmp_path / "clean").build().versions()
