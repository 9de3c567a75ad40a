"""What is counted is typed (`rowmill/schema/counts.py`): nothing is looked up by a string, or marked as not counted.

Pages, SQL, trackers and a recipe's `gates.expectations` list numbers by name (`Manifest.facts`), and look none up.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "pipelines" / "rowmill", ROOT / "assets" / "dagster_rowmill")
STORAGE = {"core", "sources"}
"""Packages whose `facts` are what a storage says of its files."""
MARKERS = ("NOT_APPLICABLE", "UNCOUNTED")


def list_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the kind of each use."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=held) | ast.Call(func=ast.Attribute(value=held, attr="get")):
                if (isinstance(held, ast.Attribute) and held.attr == "facts") or (
                    isinstance(held, ast.Name) and held.id == "facts"
                ):
                    yield node.lineno, "looked up by a string"
            case ast.Name(id=name) if name in MARKERS:
                yield node.lineno, name
            case ast.ImportFrom(names=names):
                yield from ((node.lineno, one.name) for one in names if one.name in MARKERS)
            case _:
                pass


def test_no_count_is_looked_up_by_a_string_or_marked_as_uncounted() -> None:
    files = [path for at in SOURCES for path in at.rglob("*.py") if path.relative_to(at).parts[0] not in STORAGE]

    found = [
        f"{path.relative_to(ROOT)}:{line}: {use}"
        for path in files
        for line, use in list_uses(ast.parse(path.read_text(encoding="utf-8")))
    ]

    assert len(files) > 200
    assert found == []


def test_use_by_name_is_found() -> None:
    source = "from a import UNCOUNTED\nx = part.facts['split']\ny = facts.get('tokens')\nz = counts.tokens\n"

    assert sorted(list_uses(ast.parse(source))) == [
        (1, "UNCOUNTED"), (2, "looked up by a string"), (3, "looked up by a string"),
    ]  # fmt: skip
