"""The public names of the Dagster layer: which there are, that a page explains each, and that its example loads."""

import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import dagster_rowmill
from tests.support.recipes import Workspace, chat

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/how-to/run-it-for-a-team.md"
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_public_names_are_these_and_others_attribute_errors() -> None:
    assert dagster_rowmill.__all__ == ["Recipe", "StorageResource", "build_definitions", "materialize_recipe"]
    with pytest.raises(AttributeError, match="'dagster_rowmill' has no attribute 'defs_of'"):
        _ = dagster_rowmill.defs_of  # pyrefly: ignore[missing-attribute]


@pytest.mark.parametrize("name", dagster_rowmill.__all__)
def test_public_name_loads_and_is_explained(name: str) -> None:
    assert callable(getattr(dagster_rowmill, name))
    assert f"| `{name}(" in PAGE.read_text(encoding="utf-8")


def test_example_of_the_page_gives_definitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [chat(i) for i in range(12)])
    assert workspace.config.parent == tmp_path / "configs"
    monkeypatch.chdir(tmp_path)
    [example] = EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    exec(compile(example, PAGE.name, "exec", dont_inherit=True), names)

    assert isinstance(names["defs"], dg.Definitions)
    keys = {"/".join(key.path) for key in names["defs"].resolve_asset_graph().get_all_asset_keys()}
    assert "mini/gpu_partitions" in keys
