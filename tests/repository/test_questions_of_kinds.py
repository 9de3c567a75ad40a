"""Kinds are asked, not tested: what differs by kind is a method of the kind, or in the description of its rows.

No place outside `kinds/` compares a kind, a row kind or an objective with a name, tests the class of a kind, looks for
a kind that joins rows, or asks whether there is one: a new kind, or a new kind of rows, is no reason to touch other
packages.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from rowmill.kinds.base import DatasetKind
from rowmill.kinds.catalog import KIND_ALIASES, KINDS
from rowmill.kinds.joint_rows import JointKind
from rowmill.schema.examples import Objective
from rowmill.schema.rows import ROW_KINDS

ENGINE = Path(__file__).resolve().parents[2] / "pipelines" / "rowmill"

VALUES = frozenset({*KINDS, *KIND_ALIASES, *ROW_KINDS, *get_args(Objective)})
"""The names of kinds, of kinds of rows, and of objectives."""

HOLDERS = frozenset({"kind", "kinds", "row_kind", "ROW_KIND", "get_name", "objective", "get_objective"})
"""The variables, fields and methods that hold such a name."""

CLASSES = frozenset({DatasetKind.__name__, JointKind.__name__, *(kind.__name__ for kind in KINDS.values())})

JOINT = frozenset({"find_joint_kind", "joins_rows", "JOINS_ROWS"})


def get_last_name(node: ast.AST) -> str:
    """Return the last name of an expression: `kind` of `row.kind`, `row["kind"]` and `row.kind()`."""
    match node:
        case ast.Call(func=function):
            return get_last_name(function)
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case _:
            return ""


def list_texts(node: ast.AST) -> set[str]:
    """Return the texts that are written in an expression or a pattern."""
    return {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def find_questions(source: str) -> Iterator[str]:
    """Yield each expression of a module that asks of which kind something is, with its line."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    # Another package's class may have the same name.
    classes = {name.name for node in imports if (node.module or "").startswith("rowmill.kinds") for name in node.names}
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                asks = any(get_last_name(side) in HOLDERS for side in (left, *others))
                if asks and not VALUES.isdisjoint(list_texts(node)):
                    yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Match(subject=subject, cases=cases) if get_last_name(subject) in HOLDERS:
                named = [case.pattern for case in cases if not VALUES.isdisjoint(list_texts(case.pattern))]
                yield from (f"{pattern.lineno}: case {ast.unparse(pattern)}" for pattern in named)
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, tested]):
                if any(get_last_name(one) in CLASSES & classes for one in ast.walk(tested)):
                    yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Call(func=function) if get_last_name(function) in JOINT:
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Attribute(attr=name) if name in JOINT:
                yield f"{node.lineno}: {ast.unparse(node)}"
            case _:
                pass


def test_no_other_package_asks_for_a_kind() -> None:
    paths = [path for path in ENGINE.rglob("*.py") if "kinds" not in path.relative_to(ENGINE).parts]
    questions = [
        f"{path.relative_to(ENGINE)}:{question}"
        for path in sorted(paths)
        for question in find_questions(path.read_text(encoding="utf-8"))
    ]

    assert questions == []


def test_each_way_to_ask_for_a_kind_is_found() -> None:
    asking = (
        'if dataset.row_kind == "tokens": pass',
        'if "text" != row["kind"]: pass',
        'trains = format.get_objective() not in ("prompts", "paired")',
        'match context.objective:\n    case "paired": pass\n    case _: pass',
        "from rowmill.kinds.chat import Chat\nis_chat = isinstance(dataset.format, Chat)",
        "joint = find_joint_kind(dataset.format)",
        "skipped = options.joins_rows",
    )
    others = 'if piece.kind == "reasoning": pass\nif name == "text": pass\nis_styled = isinstance(value, Text)'

    assert [len(list(find_questions(one))) for one in asking] == [1] * len(asking)
    assert list(find_questions(others)) == []
