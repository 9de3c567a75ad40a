"""A build without what only Linux has: workers are spawned, and neither `/proc`, `/dev/shm` nor affinity are there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rowmill.core.errors import ConfigError
from tests.repository.test_public_api import run_python
from tests.support.recipes import LENIENT, PAIR, Workspace, chat, pair

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, multiprocessing.forkserver, os, sys
import numpy, polars, pyarrow, pydantic, fsspec, transformers
# What a Mac answers when the module chooses how workers start; other libraries were imported before.
sys.platform = "darwin"
from rowmill.executors import local
sys.platform = "linux"
del os.sched_getaffinity
local.INLINE_BELOW_BYTES = 0

def hear(event, args):
    if event in ("os.fork", "os.forkpty"):
        raise RuntimeError("forked")
    # The tests' own folder may be in memory.
    if event in ("open", "os.listdir", "os.scandir") and not str(args[0]).startswith(os.environ["HERE"]) and (
        str(args[0]).startswith(("/proc", "/dev/shm"))
    ):
        raise FileNotFoundError(2, "not on this system", args[0])

sys.addaudithook(hear)

if __name__ == "__main__":
    from rowmill.build import runner, steps
    assert local.START_METHOD == "spawn"
    project = steps.open_project(sys.argv[1])
    assert project.recipe.total_workers >= 1
    started, start = [], local.start_processes
    local.start_processes = lambda *arguments: started.append(arguments) or start(*arguments)
    done = runner.build(project)
    print(json.dumps({"pools": len(started), "versions": {"/".join(step.key): made.version for step, made, _ in done}}))
"""


def write(folder: Path) -> Workspace:
    workspace = Workspace(folder)
    datasets = {
        "chats": workspace.dataset("chats.jsonl", [chat(i, turns=2) for i in range(60)]),
        "tasks": workspace.dataset("tasks.jsonl", [pair(i) for i in range(60)], PAIR),
    }
    return workspace.recipe(datasets, gates=LENIENT, execution={"workers": 2})


@pytest.mark.slow
def test_build_with_spawned_workers_and_without_linux_writes_the_same_bytes(tmp_path: Path) -> None:
    expected = write(tmp_path / "here").build().versions()
    elsewhere = write(tmp_path / "elsewhere")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "pipelines"), "TMPDIR": str(temporary), "HERE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(program), str(elsewhere.config)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    assert made["pools"] > 0
    assert {key.partition("/")[2]: version for key, version in made["versions"].items()} == expected


def test_windows_is_refused_at_import_in_one_sentence() -> None:
    code = "import os; os.name = 'nt'\ntry:\n    import rowmill\nexcept ImportError as error:\n    print(error)"

    assert run_python(code) == "rowmill: Windows has none of its file locks; Linux and macOS have; run it in WSL 2"


@pytest.mark.parametrize("names", [("chats", "Chats"), ("a-B", "a-b")])
def test_names_that_are_one_folder_where_capitals_do_not_count_are_refused(
    names: tuple[str, str], tmp_path: Path
) -> None:
    workspace = Workspace(tmp_path)
    rows = workspace.dataset("chats.jsonl", [chat(i) for i in range(3)])

    with pytest.raises(ConfigError, match=f"{names[1]} and {names[0]}: names must differ in more than"):
        assert workspace.recipe(dict.fromkeys(names, rows)).project


def test_tracked_files_differ_in_more_than_capitals() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    assert len({name.lower() for name in tracked}) == len(tracked)
