"""The base install, `pip install rowmill`: it reads partitions, and says which extra brings what it lacks."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.repository.test_public_api import run_python
from tests.support.cli_project import CliProject

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
BASE = ("fsspec", "numpy", "orjson", "pyarrow")

ONLY_BASE = f"""
import importlib.metadata, sys
installed = importlib.metadata.packages_distributions().keys() - set({BASE!r}) - {{"rowmill"}}
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path, target=None):
        return None if name.partition(".")[0] in installed else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Hiding, sys.meta_path)
"""
"""Makes a program see the packages of the base install alone."""


def test_base_install_is_what_the_reader_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert tuple(Requirement(one).name for one in project["dependencies"]) == BASE


def test_reader_needs_the_base_install_alone(tmp_path: Path) -> None:
    project = CliProject(tmp_path).write()
    assert project.rowmill("build") == 0
    code = ONLY_BASE + (
        "from rowmill import Reader\n"
        "reader = Reader(sys.argv[1], 'small', rank=0, world_size=1, batch_size=2, verify=True)\n"
        "print(sum(batch['input_ids'].size for batch in reader) > 0)\n"
        "for held, _ in reader.tagged_eval_sets(): next(iter(held))"
    )

    assert run_python(code, str(tmp_path / ".rowmill")) == "True"


def test_name_that_needs_an_extra_says_which() -> None:
    code = ONLY_BASE + (
        "import rowmill\ntry:\n    rowmill.sft_tokenize\nexcept ImportError as error:\n    print(error)"
    )
    said = run_python(code)

    assert re.fullmatch(
        r"rowmill\.sft_tokenize: the package \w+ is not installed; .* pip install .*\[build\]'", said
    ), said


@pytest.mark.parametrize(("words", "package"), [(["plan", "x"], "pydantic"), (["sql", "SELECT 1"], "rich")])
def test_command_that_needs_an_extra_says_which(words: list[str], package: str, tmp_path: Path) -> None:
    (tmp_path / ".rowmill/stats").mkdir(parents=True)
    code = ONLY_BASE + (
        "import contextlib, io, os; from rowmill.cli import main\n"
        "os.chdir(sys.argv[1])\n"
        "with contextlib.redirect_stderr(io.StringIO()) as said: status = main.main(sys.argv[2:])\n"
        "print(status, said.getvalue().strip())"
    )

    assert re.fullmatch(
        f"2 rowmill {words[0]}: the package {package} is not installed; the base install of rowmill only reads built "
        r"partitions; run pip install .*\[build\]'",
        run_python(code, str(tmp_path), *words),
    )
