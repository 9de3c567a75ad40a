"""How much of what is counted is known by its name alone: facts looked up by a string, and markers in place of counts.

Counts are typed (`rowmill/schema/counts.py`). A number is lowered by whoever gives the rest a type, and never raised.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "pipelines" / "rowmill", ROOT / "assets" / "dagster_rowmill")
STORAGE = {"core", "sources"}
"""Packages whose `facts` are what a storage says of its files."""
MARKERS = ("NOT_APPLICABLE", "UNCOUNTED")
BOUNDS = {"looked up by a string": 7, "NOT_APPLICABLE": 0, "UNCOUNTED": 0}


def list_uses(tree: ast.AST) -> Iterator[str]:
    """Yield the bound that each use counts towards."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=held) | ast.Call(func=ast.Attribute(value=held, attr="get")):
                if (isinstance(held, ast.Attribute) and held.attr == "facts") or (
                    isinstance(held, ast.Name) and held.id == "facts"
                ):
                    yield "looked up by a string"
            case ast.Name(id=name) | ast.alias(name=name) if name in MARKERS:
                yield name
            case _:
                pass


def test_facts_by_name_are_no_more_than_these() -> None:
    files = [path for at in SOURCES for path in at.rglob("*.py") if path.relative_to(at).parts[0] not in STORAGE]
    found = Counter(use for path in files for use in list_uses(ast.parse(path.read_text(encoding="utf-8"))))

    assert {name: found[name] for name in BOUNDS} == BOUNDS
