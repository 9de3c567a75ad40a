"""The layers of the architecture hold, and the engine does not import Dagster."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.loops import for_each

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "datasets", "great_expectations", "ray", "pandas"}


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter over the packages in `folder`."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "pipelines"), str(folder / "assets")])}
    return subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True, text=True)


def imports_of(source: str, *, at_load: bool) -> Iterator[str]:
    """Yield the modules that a source imports, only those imported when it is loaded if `at_load`.

    `import_module("name")` imports `name`, too.
    """
    tree = ast.parse(source)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if at_load and id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))


@pytest.mark.slow
def test_layers_hold() -> None:
    result = lint_imports(ROOT)

    assert result.returncode == 0, result.stdout + result.stderr


PLANTED = {
    "pipelines/rowmill/kinds/shared/filters.py": "import rowmill.stats",
    "pipelines/rowmill/sources/urls.py": "from rowmill.conversation.truncation import Truncation",
    "pipelines/rowmill/schema/rows.py": "from rowmill.formats import RowFormat",
    "pipelines/rowmill/packing/plan.py": "from rowmill.recipe import recipe",
    "pipelines/rowmill/kinds/tables/prompt.py": "import rowmill.recipe.recipe",
    "pipelines/rowmill/kinds/tables/schema.py": "from rowmill.stages import base",
    "pipelines/rowmill/parts/functions.py": "import rowmill.kinds.shared.splits",
    "pipelines/rowmill/kinds/text.py": "from rowmill.kinds.tables.records import Records",
    "pipelines/rowmill/build/runner.py": "import dagster",
    "pipelines/rowmill/stages/raw_dataset.py": "from rowmill.stages import parsed_records",
    "pipelines/rowmill/schema/manifest.py": "from dagster_rowmill import metadata",
}
"""An import across the layers for each contract and kind of layer."""


def copy_packages(folder: Path) -> None:
    for package in ("assets", "pipelines"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


@pytest.mark.slow
def test_layers_notice_every_import_across_them_a_circle_and_a_module_outside_them(tmp_path: Path) -> None:
    copy_packages(tmp_path)
    for module, line in PLANTED.items():
        with (tmp_path / module).open("a", encoding="utf-8") as handle:
            handle.write(f"\n{line}\n")
    with (tmp_path / "pipelines" / "rowmill" / "sources" / "options.py").open("a", encoding="utf-8") as handle:
        handle.write("\ndef find():\n    from rowmill.sources.files import Files\n")
    (tmp_path / "pipelines" / "rowmill" / "unplaced.py").write_text("import rowmill.schema.rows\n", encoding="utf-8")
    result = lint_imports(tmp_path)

    assert result.returncode == 1
    found = set(re.findall(r"^-?\s*(rowmill[\w.]*) -> ([\w.]+) \(l\.\d+\)", result.stdout, re.MULTILINE))
    for module, line in PLANTED.items():
        importer = module.removeprefix("pipelines/").removesuffix(".py").replace("/", ".")
        imported = re.sub(r"^from (\S+) import (\w+)$", r"\1", line).removeprefix("import ")
        assert any(one == importer and other.startswith(imported) for one, other in found), (
            module,
            line,
            result.stdout,
        )
    assert "unplaced" in result.stdout
    assert "No cycles are allowed in rowmill.sources." in result.stdout


@pytest.mark.slow
@for_each("path", sorted((ROOT / "pipelines").rglob("*.py")))
def test_engine_module_loads_nothing_heavy_at_import(path: Path) -> None:
    loaded = {name.split(".")[0] for name in imports_of(path.read_text(encoding="utf-8"), at_load=True)}

    assert loaded & HEAVY == set(), "import it inside the function that needs it"


@pytest.mark.slow
def test_only_the_executor_of_ray_imports_it() -> None:
    modules = [path for folder in ("pipelines", "assets") for path in (ROOT / folder).rglob("*.py")]
    found = {
        path.name
        for path in modules
        if "ray" in {name.split(".")[0] for name in imports_of(path.read_text(encoding="utf-8"), at_load=False)}
    }

    assert found == {"ray_cluster.py"}


@pytest.mark.parametrize("line", ["import ray", "from ray import data", "import_module('ray')"])
def test_import_is_found_wherever_it_is_written(line: str) -> None:
    assert list(imports_of(f"def run():\n    {line}", at_load=False)) == ["ray"]
    assert list(imports_of(f"def run():\n    {line}", at_load=True)) == []


PRIVATE_NAMES = {
    # What a class that `dagster.yaml` names extends (decision 17); Dagster names its own there by this module, too.
    "event_log": ["dagster._core.storage.event_log"],
    # An event that keeps its time.
    "history": ["dagster._core.events", "dagster._core.instance.utils"],
}
"""Modules of Dagster without a public name that a module of ours needs; a test of that module notices their loss."""


@for_each("path", sorted((ROOT / "assets").rglob("*.py")))
def test_asset_module_keeps_its_annotations_and_to_public_dagster(path: Path) -> None:
    """Dagster compares annotations when it loads definitions, so they must not become strings."""
    every = set(imports_of(path.read_text(encoding="utf-8"), at_load=False))

    assert "__future__" not in every
    private = sorted(name for name in every if name.startswith(("dagster._", "dagster_shared", "dagster_pipes")))
    assert private == PRIVATE_NAMES.get(path.stem, [])


POSSESSIVE_GROUP = re.compile(r"(?<!\\)\)(?:[*+?]|\{[0-9,]+\})\+|\(\?>")


@pytest.mark.slow
@for_each("path", sorted((ROOT / "pipelines").rglob("*.py")))
def test_pattern_has_no_group_that_gives_nothing_back(path: Path) -> None:
    """Python before 3.11.5, Debian 12's among them, forgets where such a group began when it fails half-way."""
    patterns = [
        ast.unparse(node.args[0])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.args
    ]

    assert [text for text in patterns if POSSESSIVE_GROUP.search(text)] == []


@pytest.mark.slow
@for_each("path", sorted((ROOT / "pipelines").rglob("*.py")))
def test_distinct_integers_are_not_found_by_numpy(path: Path) -> None:
    """`find_distinct` says why; with `return_index` and its like NumPy sorts, too."""
    slow = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"np.{name}" for name in ("unique", "setdiff1d", "union1d", "intersect1d")}
        and not any((keyword.arg or "").startswith("return_") for keyword in node.keywords)
    ]

    assert slow == []


@pytest.mark.slow
def test_class_name_is_unique() -> None:
    """A search for a class ends at one place."""
    modules = [path for folder in ("assets", "pipelines") for path in (ROOT / folder).rglob("*.py")]
    counts = Counter(
        node.name
        for path in modules
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )

    assert len(counts) > 300
    assert {name for name, count in counts.items() if count > 1} == set()
