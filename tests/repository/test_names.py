"""A class's name stands once in the engine and its Dagster layer, so that a search for it ends at one place."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_class_name_is_unique() -> None:
    modules = [path for folder in ("assets", "pipelines") for path in (ROOT / folder).rglob("*.py")]
    counts = Counter(
        node.name
        for path in modules
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )

    assert len(counts) > 300
    assert {name for name, count in counts.items() if count > 1} == set()
