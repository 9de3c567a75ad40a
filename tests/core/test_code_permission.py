"""Recipes that name code: with the switch it is refused before a line of it runs, in every process."""

from pathlib import Path

import pytest

from dagster_rowmill.definitions import build_definitions
from rowmill.cli import main
from rowmill.core.errors import NO_CODE_VARIABLE, ConfigError
from rowmill.kinds.tables.generation import CallableBackend
from tests.support.cli_project import CliProject

MODULE = """
from pathlib import Path
from rowmill.formats import RowFormat
from rowmill.schema.rows import Row
Path(__file__).with_name("ran").touch()

class Mine(RowFormat):
    def rows(self, record):
        return Row("text", text=record["messages"][0]["content"])
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliProject:
    """Return a project whose recipe names a class; its module leaves a file when it runs."""
    # Set once, so that whatever a command does to it is undone.
    monkeypatch.setenv(NO_CODE_VARIABLE, "")
    (tmp_path / "mine.py").write_text(MODULE)
    source = {"train_urls": ["data/chats.jsonl"]}
    own = {"source": source, "format": {"kind": "python", "class": "mine:Mine"}}
    return CliProject(tmp_path).write(datasets={"own": own})


def has_run(project: CliProject) -> bool:
    return (project.folder / "ran").exists()


@pytest.mark.parametrize("verb", ["plan", "build", "inspect", "stats", "verify", "report", "gc"])
def test_command_without_code_refuses_the_recipe_and_runs_nothing(
    project: CliProject, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert project.rowmill(verb, "--no-code") == main.ExitStatus.INVALID

    assert not has_run(project)
    assert (
        ": datasets.own.format.class: mine:Mine is Python code, which --no-code or ROWMILL_NO_CODE forbids to run; "
        in (capsys.readouterr().err)
    )


def test_package_of_a_class_is_not_run_to_find_the_class(
    project: CliProject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = project.folder / "site" / "their_formats"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"from pathlib import Path\nPath({str(project.folder / 'ran')!r}).touch()\n")
    (package / "rows.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(package.parent))
    own = {
        "source": {"train_urls": ["data/chats.jsonl"]},
        "format": {"kind": "python", "class": "their_formats.rows:Mine"},
    }
    project.write(datasets={"own": own})

    assert project.rowmill("plan", "--no-code") == main.ExitStatus.INVALID

    assert not has_run(project)
    assert "their_formats.rows:Mine is Python code, which --no-code" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("1", main.ExitStatus.INVALID),
        ("true", main.ExitStatus.INVALID),
        ("0", main.ExitStatus.SUCCESS),
        ("", main.ExitStatus.SUCCESS),
    ],
)
def test_variable_says_the_same(project: CliProject, monkeypatch: pytest.MonkeyPatch, value: str, status: int) -> None:
    monkeypatch.setenv(NO_CODE_VARIABLE, value)

    assert project.rowmill("plan") == status
    assert has_run(project) is (status == main.ExitStatus.SUCCESS)


@pytest.mark.slow
def test_recipe_without_code_is_built_all_the_same(project: CliProject) -> None:
    project.write_recipe()

    assert project.rowmill("plan", "--no-code") == main.ExitStatus.SUCCESS


def test_function_of_a_backend_is_refused_and_dagster_runs_nothing(
    project: CliProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(project.folder))
    monkeypatch.setenv(NO_CODE_VARIABLE, "1")

    with pytest.raises(ConfigError, match=r"^generation\.backend\.target: mine:Mine is Python code"):
        CallableBackend(target="mine:Mine").open()

    assert not has_run(project)
    with pytest.raises(ConfigError, match="mine:Mine is Python code"):
        build_definitions([Path(project.recipe)], str(project.folder / ".rowmill"), strict=True)
    assert not has_run(project)
