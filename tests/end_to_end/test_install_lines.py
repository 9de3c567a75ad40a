"""Every line of docs/install.md is typed into an empty environment outside the clone; what is not there says so."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from release.make_release import build_distributions
from tests.support.recipes import chat, lines

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/install.md"
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(not os.environ.get("ROWMILL_INSTALL"), reason="downloads 8 GB; set ROWMILL_INSTALL=1"),
]
EXTRAS = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def run(*command: str, folder: Path, status: int = 0) -> str:
    """Run a program with nothing of this environment, and return what it prints."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "ROWMILL"))
    }
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of the current commit."""
    made = build_distributions(ROOT, tmp_path_factory.mktemp("wheel"))
    return next(path for path in made if path.suffix == ".whl")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "chats.jsonl").write_bytes(lines(chat(i) for i in range(200)))
    return tmp_path


def install(folder: Path, target: str) -> Path:
    """Make an environment, install into it, and return its folder of programs."""
    run(sys.executable, "-m", "venv", "env", folder=folder)
    run("env/bin/pip", "install", "--quiet", target, folder=folder)
    return folder / "env/bin"


def test_wheel_alone_reads_and_says_what_the_rest_needs(wheel: Path, project: Path) -> None:
    programs = install(project, str(wheel))

    assert run(str(programs / "python"), "-c", "from rowmill import Reader; print(Reader.__name__)", folder=project)
    said = run(str(programs / "rowmill"), "plan", "chats", folder=project, status=2)
    assert said.count("\n") == 1
    assert f"run pip install '{wheel}[build]'" in said


@pytest.mark.parametrize("extra", EXTRAS)
def test_wheel_with_an_extra_builds(extra: str, wheel: Path, project: Path) -> None:
    programs = install(project, f"{wheel}[{extra if extra != 'train' else 'build,train'}]")
    tokenizer = ROOT / "configs/demo/tokenizer"
    for words in (["init", "--tokenizer", str(tokenizer), "--seq-len", "128", "chats.jsonl"], ["build", "chats"]):
        run(str(programs / "rowmill"), *words, folder=project)

    if extra == "dagster":
        run(str(programs / "dagster"), "definitions", "validate", "-w", "workspace.yaml", folder=project)
    if extra == "train":
        shown = run(
            str(programs / "python"),
            str(ROOT / "docs/how-to/train.py"),
            ".rowmill",
            "chats",
            "--steps",
            "3",
            folder=project,
        )
        assert "step     3" in shown


@pytest.mark.parametrize("tool", [["uvx", "--from"], ["pipx", "run", "--spec"]])
def test_wheel_runs_from_tools_that_make_the_environment(tool: list[str], wheel: Path, project: Path) -> None:
    if shutil.which(tool[0]) is None:
        pytest.skip(f"no {tool[0]}")
    # Between the lines of the tool itself.
    assert re.search(
        r"^rowmill \d", run(*tool, f"{wheel}[build]", "rowmill", "--version", folder=project), re.MULTILINE
    )
