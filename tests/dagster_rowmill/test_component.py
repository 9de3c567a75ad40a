"""A recipe as a component of a Dagster project: its attributes, its errors, and the tools that find it."""

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from dagster_rowmill import Recipe
from rowmill.core.errors import ConfigError
from tests.support.tiny_project import RECIPE, Tiny

# Dagster warns of its own use of a beta parameter when it loads a folder of components.
pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
PYPROJECT = """
[project]
name = "shop"
version = "0"
[tool.dg]
directory_type = "project"
[tool.dg.project]
root_module = "shop"
"""
DEFINITIONS = """
from pathlib import Path
from dagster import definitions, load_from_defs_folder

@definitions
def defs():
    return load_from_defs_folder(path_within_project=Path(__file__).parent)
"""
SOURCE = {"train_urls": ["data/chats.jsonl"], "after": ["raw/conversations"]}
INLINE = RECIPE | {"datasets": RECIPE["datasets"] | {"chats": RECIPE["datasets"]["chats"] | {"source": SOURCE}}}
MISSPELT = INLINE | {"seq_length": 1}


class Shop:
    """A Dagster project with components in folders, data, and an asset that writes some of it."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance) -> None:
        self.root = folder
        self.tiny = Tiny(folder, instance).write()
        self.defs = folder / "src" / "shop" / "defs"
        self.defs.mkdir(parents=True)
        for module in (self.defs, self.defs.parent):
            (module / "__init__.py").touch()
        (folder / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
        (self.defs.parent / "definitions.py").write_text(DEFINITIONS, encoding="utf-8")
        (self.defs / "raw.py").write_text(
            'import dagster as dg\n\n@dg.asset(key=["raw", "conversations"])\ndef conversations() -> None: ...\n',
            encoding="utf-8",
        )

    def add(self, name: str, **attributes: Any) -> Path:
        folder = self.defs / name
        folder.mkdir()
        content = {"type": "dagster_rowmill.Recipe", "attributes": attributes}
        (folder / "defs.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return folder


@pytest.fixture
def shop(tmp_path: Path, instance: dg.DagsterInstance) -> Shop:
    return Shop(tmp_path, instance)


def load(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> dg.Definitions:
    monkeypatch.syspath_prepend(str(shop.root / "src"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        monkeypatch.delitem(sys.modules, name)
    return dg.load_from_defs_folder(path_within_project=shop.defs)


@pytest.mark.slow
def test_recipes_of_files_and_of_yaml_load_beside_the_projects_own_assets(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.add("by_path", recipe="configs/tiny.yaml")
    shop.add("written_here", recipe=INLINE)
    loaded = load(shop, monkeypatch)
    graph = loaded.resolve_asset_graph()
    upstream = graph.get(dg.AssetKey(["written_here", "chats.raw_dataset"])).parent_keys
    assert upstream == {dg.AssetKey(["raw", "conversations"])}
    assert graph.has(dg.AssetKey(["tiny", "gpu_partitions"]))
    assert {"rebuild_tiny", "rebuild_written_here"} <= {job.name for job in loaded.resolve_all_job_defs()}
    # One run over the assets of all recipes: their storage is one resource.
    [storage] = {id(value) for key, value in (loaded.resources or {}).items() if key == "storage"}
    assert storage


def test_attributes_reach_the_project(shop: Shop) -> None:
    folder = shop.add("own", recipe=INLINE)
    component = Recipe(recipe=INLINE, name="other", store="s3://bucket/kept", executor={"kind": "local"})
    project = component.open_project(folder, shop.root)
    assert (project.recipe.name, project.store.root, project.base) == ("other", "s3://bucket/kept", shop.root)
    assert Recipe(recipe=INLINE).open_project(folder, shop.root).store.root == str(shop.root / ".rowmill")


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"recipe": MISSPELT}, r"defs\.yaml: attributes\.recipe: seq_length: unknown key; .*did you mean"),
        (
            {"recipe": "configs/no.yaml"},
            r"attributes\.recipe: 'configs/no\.yaml' is not a file in .*; expected the path",
        ),
        ({"recipe": INLINE, "executor": {"kind": "rai"}}, r"attributes: executor: 'rai' is not a kind; choose"),
    ],
)
def test_mistake_is_an_error_of_four_parts_that_names_the_file(
    shop: Shop, attributes: dict[str, Any], said: str
) -> None:
    folder = shop.add("own", **attributes)
    with pytest.raises(ConfigError, match=said):
        Recipe(**attributes).open_project(folder, shop.root)


def test_recipe_that_may_not_stop_others_is_shown_with_its_error(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.add("bad-one", recipe=MISSPELT, on_error="show")
    shop.add("good", recipe=INLINE)
    graph = load(shop, monkeypatch).resolve_asset_graph()
    node = graph.get(dg.AssetKey(["bad_one", "cannot_be_loaded"]))
    assert "did you mean seq_len?" in (node.description or "")
    assert graph.has(dg.AssetKey(["good", "gpu_partitions"]))


def install_entry_points(folder: Path) -> Path:
    """Write what pip writes of `pyproject.toml`, since an editable installation may be older than it."""
    pyproject = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    facts = folder / "rowmill_here-0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: rowmill-here\nVersion: 0\n", encoding="utf-8")
    lines = [
        line
        for group, entries in pyproject["project"]["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (facts / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("dagster_dg_cli") is None, reason="no dg; pip install dagster-dg-cli")
def test_dg_lists_scaffolds_and_checks_it(shop: Shop) -> None:
    installed = install_entry_points(shop.root / "installed")

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-c", "from dagster_dg_cli.cli import main; main()", *arguments]
        path = os.pathsep.join([*sys.path, *map(str, (shop.root / "src", installed))])
        env = os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}
        done = subprocess.run(command, cwd=shop.root, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    assert "dagster_rowmill.Recipe" in run("list", "components")[1]
    assert run("scaffold", "defs", "dagster_rowmill.Recipe", "scaffolded")[0] == 0
    scaffolded = shop.defs / "scaffolded" / "defs.yaml"
    recipe = yaml.safe_load(scaffolded.read_text())["attributes"]["recipe"]
    assert recipe["datasets"]["chats"]["format"]["kind"] == "chat"
    # Steps of a fixed size would be mostly fillers for whoever tries it with a small file first.
    assert "mixture" not in recipe
    assert run("check", "yaml")[0] == 0
    scaffolded.unlink()
    bad = shop.add("bad", recipe=MISSPELT)
    status, said = run("check", "defs")
    assert status != 0
    assert "attributes.recipe: seq_length: unknown key" in " ".join(said.split())
    (bad / "defs.yaml").write_text("type: dagster_rowmill.Recipe\nattributes: {stor: x}\n", encoding="utf-8")
    status, said = run("check", "yaml")
    assert status != 0
    assert "'stor' was unexpected" in said
