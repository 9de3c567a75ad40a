"""Rules for all files of the repository."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from rowmill.recipe import recipe
from tests.support.loops import for_each
from tests.support.lowest_versions import list_lowest_versions

ROOT = Path(__file__).resolve().parents[2]
CODE = ("assets", "benchmarks", "configs", "docs", "pipelines", "tests")
TOLD_HOSTS = {
    "127.0.0.1",
    "localhost",
    # The user's name before the host, in the address of the database that a container of ours runs.
    "dagster",
    # What a reader replaces by a bucket's name in the values for Kubernetes.
    "bucket",
    # Standards and licences are named by URLs that nothing requests.
    "json-schema.org",
    "mlcommons.org",
    "purl.org",
    "schema.org",
    "keepachangelog.com",
    "semver.org",
    "www.apache.org",
    "www.w3.org",
}
PACKAGE_INDEX = re.compile(r"pypi[.]org|pythonhosted[.]org|(?:extra[-])?index[-]url|find[-]links")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|opt|mnt|Users)/\w")


@cache
def tracked() -> tuple[Path, ...]:
    """Return the files that git tracks, or all that are here where there is no git."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], check=True, cwd=ROOT, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git checkout")
    return tuple(path for name in listed.decode().split("\0") if name and (path := ROOT / name).is_file())


def text_of(path: Path) -> str:
    """Return a file's text; nothing for pictures, archives and tables."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def name_of(path: Path) -> str:
    """Name a file as git does."""
    return path.relative_to(ROOT).as_posix()


def modules() -> list[Path]:
    """Return every Python file of the project."""
    return sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))


@cache
def project() -> dict[str, Any]:
    """Return pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins() -> dict[str, str]:
    """Return the locked versions by normalised name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): version for name, version in pairs}


def normal(name: str) -> str:
    """Normalise a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.slow
@for_each("path", modules())
def test_module_opens_by_saying_what_it_does(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))

    assert docstring, "a module's first line says what it does, well enough for a tree"
    assert docstring.splitlines()[0].endswith((".", "…", ":"))


@pytest.mark.slow
def test_no_tracked_configuration_names_a_foreign_host() -> None:
    """What is run must not reach for an address: no index, no mirror, no model store."""
    run = [
        path
        for path in tracked()
        if path.suffix in {".toml", ".txt", ".yaml", ".yml"} or path.name in {"Makefile", "run"}
    ]
    found = {
        name_of(path): hosts
        for path in run
        if (hosts := set(re.findall(r"\w+://([\w.-]+)", text_of(path))) - TOLD_HOSTS)
    }

    assert found == {}


@pytest.mark.slow
def test_no_tracked_file_is_large_or_names_a_path_of_one_machine_or_a_package_index() -> None:
    found = {name_of(path): match.group() for path in tracked() if (match := MACHINE_PATH.search(text_of(path)))}

    assert found == {}
    assert [name_of(path) for path in tracked() if PACKAGE_INDEX.search(text_of(path))] == []
    assert [name_of(path) for path in tracked() if path.stat().st_size > 1_000_000] == []


def test_recipes_load() -> None:
    found = recipe.find_recipes(ROOT / "configs")

    assert [recipe.load_recipe(path).name for path in found] == [path.stem for path in found]
    assert "demo" in {path.stem for path in found}


def test_constraints_pin_every_dependency_to_a_version_it_allows() -> None:
    optional = project()["project"]["optional-dependencies"]
    # mosaicml-streaming has an environment of its own, since it allows none of these versions.
    groups = [project()["project"]["dependencies"], *(optional[name] for name in optional if name != "mds")]
    wanted = [one for group in groups for text in group if (one := Requirement(text)).name != "rowmill"]
    locked = pins()
    missing = [one.name for one in wanted if normal(one.name) not in locked]
    refused = [
        str(one) for one in wanted if normal(one.name) in locked and locked[normal(one.name)] not in one.specifier
    ]

    assert (missing, refused) == ([], [])
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not re.fullmatch(r"#.*|[A-Za-z0-9_.-]+==[A-Za-z0-9_.+!-]+", line)] == []
    assert locked["dagster"] == locked["dagster-webserver"]


def test_every_dependency_has_a_lowest_version_and_only_clients_of_trackers_a_highest() -> None:
    optional = project()["project"]["optional-dependencies"]
    named = [
        Requirement(text) for group in (project()["project"]["dependencies"], *optional.values()) for text in group
    ]
    operators = {one.name: {bound.operator for bound in one.specifier} for one in named if one.name != "rowmill"}

    assert [name for name, of in operators.items() if ">=" not in of] == []
    # Their clients are refused by the program, too (`tracking/delivery.py`).
    assert {name for name, of in operators.items() if of != {">="}} == {"mlflow-skinny", "openlineage-python", "wandb"}
    assert {line.partition("==")[0] for line in list_lowest_versions()} == {*operators} - {"mosaicml-streaming"}


def test_pyproject_and_changelog_have_what_is_built() -> None:
    """A [tool.dagster] or [tool.dg] table silently beats workspace.yaml."""
    assert {"dagster", "dg"} & set(project()["tool"]) == set()
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {project()['project']['version']} " in changelog


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    declared = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], check=True, cwd=ROOT, capture_output=True, text=True
    ).stdout

    assert declared is not None
    assert {line.split()[1] for line in shown.splitlines()} == set(declared.group(1).split())


def test_every_file_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    passed_over = pytestconfig.getini("norecursedirs")
    tests = ROOT / "tests"
    files = [path.relative_to(tests) for path in tests.rglob("test_*.py")]

    assert Path("build/test_share.py") in files
    assert [
        str(one) for one in files if any(fnmatch(part, skip) for part in one.parts[:-1] for skip in passed_over)
    ] == []


def test_make_without_a_python_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    # The variables of the make that runs the tests are not those of this one.
    variables = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    run = subprocess.run(
        ["make", "demo", "PYTHON=no-such-python"],
        check=False, cwd=tmp_path, capture_output=True, text=True, env=variables,
    )  # fmt: skip

    assert run.returncode != 0
    assert "none of [no-such-python] is a Python 3.11 or newer with venv" in run.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_ends_with_the_test_command_of_the_readme() -> None:
    last = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert last == "make test"
    assert re.search(r"^make demo$", readme, re.MULTILINE)
    assert re.search(rf"^{last}$", readme, re.MULTILINE)


def test_pre_commit_runs_tools_of_the_environment_only() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))

    assert {repo["repo"] for repo in hooks["repos"]} == {"local"}
    assert all(hook["entry"].startswith(".venv/bin/") for repo in hooks["repos"] for hook in repo["hooks"])


@pytest.mark.slow
def test_definitions_load_without_heavy_imports() -> None:
    script = (
        "import sys; import rowmill.recipe.recipe, rowmill.build.runner; "
        "print(sorted({'torch', 'transformers', 'datasets', 'great_expectations', 'ray'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, capture_output=True, text=True).stdout

    assert shown.strip() == "[]"


def test_module_that_a_docstring_names_exists() -> None:
    """A file that was moved or renamed must not live on in the sentences that send a reader to it."""
    files = {path.relative_to(ROOT).as_posix() for path in tracked()}
    known = {"/".join(name.split("/")[i:]) for name in files for i in range(name.count("/") + 1)}
    named = [
        (name_of(path), name)
        for path in tracked()
        if path.suffix == ".py"
        for name in re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8"))
    ]

    assert ("benchmarks/against_trl.py", "peer_encode.py") in named, "the search finds no name"
    assert [pair for pair in named if pair[1] not in known] == []


def test_module_that_a_package_s_page_names_exists() -> None:
    """The page of a package sends a reader to its modules; a module of another package is named with its folder."""
    pages = [path for path in tracked() if path.name == "README.md" and path.parts[-3] in {"rowmill", "assets"}]
    missing = [
        f"{name_of(page)}: {name}"
        for page in pages
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8"))
        if not any((ROOT / folder / name).is_file() for folder in (name_of(page.parent), "pipelines/rowmill", "."))
    ]

    assert len(pages) > 15
    assert missing == []
