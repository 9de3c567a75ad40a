"""Modules, classes and functions stay small enough to be read in one sitting.

What belongs here: bounds on length over the whole engine; a longer class has its reason in its docstring. What does
not: names (`test_names.py`) and who imports whom (`test_layers.py`).
"""

import ast
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MODULE_LINES = 500
CLASS_LINES = 250
MEDIAN_FUNCTION_LINES = 8
"""Lines of a function, its docstring and signature among them, of which half are shorter."""
LONG_FUNCTION_LINES = 25
LONG_FUNCTION_SHARE = 0.1

EXECUTOR_LINES = 150
"""Lines of a module of the executors that are not empty: what runs tasks elsewhere must be easy to see through."""

LONG_CLASS_REASON = f"more than {CLASS_LINES} lines"
"""What the docstring of a longer class says before the reason."""


@cache
def parsed_modules() -> dict[str, ast.Module]:
    files = sorted(path for folder in ("pipelines", "assets") for path in (ROOT / folder).rglob("*.py"))
    return {
        path.relative_to(ROOT).as_posix().partition("/")[2]: ast.parse(path.read_text(encoding="utf-8"))
        for path in files
    }


def nodes_of(*kinds: type[ast.AST]) -> Iterator[ast.AST]:
    for tree in parsed_modules().values():
        yield from (node for node in ast.walk(tree) if isinstance(node, kinds))


def count_lines(node: ast.AST) -> int:
    assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_modules_are_short() -> None:
    lengths = {
        name: max((node.end_lineno or 0 for node in tree.body), default=0) for name, tree in parsed_modules().items()
    }

    assert {name for name, lines in lengths.items() if lines > MODULE_LINES} == set(), "split it by subject"


def test_executors_are_shorter() -> None:
    folder = ROOT / "pipelines" / "rowmill" / "executors"
    lengths = {path.name: sum(map(bool, path.read_text(encoding="utf-8").split("\n"))) for path in folder.glob("*.py")}

    assert "local.py" in lengths
    assert {name for name, lines in lengths.items() if lines > EXECUTOR_LINES} == set(), "split it by subject"


def test_longer_class_explains_its_length() -> None:
    unexplained = [
        node.name
        for node in nodes_of(ast.ClassDef)
        if isinstance(node, ast.ClassDef) and count_lines(node) > CLASS_LINES
        if LONG_CLASS_REASON not in " ".join((ast.get_docstring(node) or "").lower().split())
    ]

    assert unexplained == [], f"split it, or say why in its docstring: {LONG_CLASS_REASON}, because …"


def test_functions_are_short() -> None:
    lengths = [count_lines(node) for node in nodes_of(ast.FunctionDef, ast.AsyncFunctionDef)]

    assert statistics.median(lengths) <= MEDIAN_FUNCTION_LINES
    assert sum(lines > LONG_FUNCTION_LINES for lines in lengths) <= LONG_FUNCTION_SHARE * len(lengths)
