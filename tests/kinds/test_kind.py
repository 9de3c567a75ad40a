"""A kind is its module and its line in the union; `tests/docs/test_extend_the_engine.py` builds with one more."""

import ast
from pathlib import Path
from typing import Any

import pytest

from rowmill.formats import RowFormat, register_format
from rowmill.kinds.base import OPTION_GROUPS, DatasetKind
from rowmill.kinds.catalog import KIND_ALIASES, KINDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_kind_declares_existing_groups_and_options(kind: type[DatasetKind]) -> None:
    assert set(OPTION_GROUPS) >= kind.GROUPS
    for group, fields in kind.FIELDS_NOT_READ.items():
        assert group in kind.GROUPS, "a group that is not read has no options to name"
        assert fields <= set(OPTION_GROUPS[group].model_fields)
    assert set(kind.ALIASES.values()) <= set(kind.model_fields)
    assert set(kind.FILLED_IN) <= set(kind.model_fields)


def test_only_a_kind_depends_on_its_name() -> None:
    """Differences between kinds are declarations or hooks of the kind's class."""
    found: list[str] = []
    for package in ("pipelines/rowmill", "assets"):
        for path in (ROOT / package).rglob("*.py"):
            found += [f"{path.relative_to(ROOT)}:{line}" for line in find_kind_questions(path)]

    assert found == []


def find_kind_questions(path: Path) -> list[int]:
    """Return the lines that compare a format's `kind`, or test whether a format is of a kind's class."""
    names = {kind.__name__ for kind in KINDS.values()}
    lines: list[int] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Compare(left=ast.Attribute(value=ast.Attribute(attr="format"), attr="kind")):
                lines.append(node.lineno)
            case ast.Call(func=ast.Name(id="isinstance" | "getattr"), args=[ast.Attribute(attr="format"), *_]):
                lines.append(node.lineno)
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]) if path.parent.name != "core":
                asked = {one.id for one in ast.walk(kinds) if isinstance(one, ast.Name)}
                lines += [node.lineno] if asked & names else []
            case _:
                pass
    return lines


def test_registered_format_cannot_take_the_name_of_a_kind() -> None:
    class Mine(RowFormat):
        def rows(self, record: Any) -> None:
            return None

    for name in (*KINDS, *KIND_ALIASES):
        with pytest.raises(ValueError, match="names must be unique"):
            register_format(name)(Mine)
