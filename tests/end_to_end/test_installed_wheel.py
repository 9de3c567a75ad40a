"""An installed wheel in a folder that has its own `pipelines`: init, every command, the reader, Dagster's definitions.

The wheel is built without a network, unpacked, and put before everything else on the path, which is what installing it
does; its dependencies are those of the environment that runs the tests.
"""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.recipes import chat, lines

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "configs/demo/tokenizer"
COMMAND = "import sys; from rowmill.cli.main import main; sys.exit(main(sys.argv[1:]))"
Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an unpacked wheel."""
    if find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed, and a wheel is built with it; install the extra `test`")
    folder = tmp_path_factory.mktemp("wheel")
    # Only what is packaged: building in the checkout would leave folders in it.
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "pipelines", "assets"):
        (source / name).symlink_to(ROOT / name)
    code = "import os, sys; from setuptools import build_meta as it; os.chdir(sys.argv[1]); it.build_wheel(sys.argv[2])"
    command = [sys.executable, "-W", "ignore", "-c", code, str(source), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    [built] = folder.glob("rowmill-*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data and a package called `pipelines`, whose import ends the program."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pipelines").mkdir()
    (folder / "pipelines/__init__.py").write_text("raise SystemExit('the local package was imported')\n")
    (folder / "data").mkdir()
    (folder / "data/chats.jsonl").write_bytes(lines(chat(i) for i in range(200)))
    return folder


@pytest.fixture(scope="module")
def run(wheel: Path, project: Path) -> Run:
    """Return a function that runs a program in the project, with nothing of the checkout on its path."""

    def run_program(*arguments: str, status: int = 0) -> str:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("ROWMILL_", "DAGSTER_"))}
        env |= {"PYTHONPATH": str(wheel), "HF_HUB_OFFLINE": "1", "DAGSTER_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run_program


@pytest.mark.slow
def test_wheel_is_what_the_programs_import(run: Run, wheel: Path) -> None:
    shown = run("-c", "import rowmill, dagster_rowmill; print(rowmill.__file__); print(dagster_rowmill.__file__)")

    assert shown.split() == [str(wheel / "rowmill/__init__.py"), str(wheel / "dagster_rowmill/__init__.py")]
    assert (wheel / "rowmill/py.typed").is_file()
    files = {path.name for path in (wheel / "rowmill/reports").glob("*.*") if path.suffix != ".py"}
    assert files == {"report.css", "report.js", "report.html.jinja", "sequence.html.jinja"}


@pytest.mark.campaign
def test_project_from_init_to_the_reader_and_dagster(run: Run, project: Path) -> None:
    said = run("-c", COMMAND, "init", "--tokenizer", str(TOKENIZER), "--seq-len", "128")
    assert "rowmill inspect chats" in said
    assert "rowmill build chats" in said
    assert {path.name for path in project.iterdir()} >= {"configs", "workspace.yaml", ".gitignore"}

    for words in (["plan"], ["inspect", "-n", "1"], ["build"], ["stats"], ["verify"], ["report"]):
        run("-c", COMMAND, words[0], "chats", *words[1:])
    run("-c", COMMAND, "sql", "SELECT count(*) FROM rows")
    reading = (
        "from rowmill import Reader; reader = Reader('.rowmill', 'chats', rank=0, world_size=1, batch_size=2); "
        "print(sum(len(batch['input_ids']) > 0 for batch in reader) > 0)"
    )
    assert run("-c", reading).strip() == "True"

    # `rowmill ui` is Dagster's server over this file; what it would load is validated.
    run("-m", "dagster", "definitions", "validate", "-w", "workspace.yaml")
    again = run("-c", COMMAND, "init", status=2)
    assert "configs/chats.yaml: exists already, and init overwrites nothing" in again
