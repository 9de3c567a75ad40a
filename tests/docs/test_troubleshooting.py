"""Every message that the troubleshooting page explains is one that the programs print."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain

import pytest

from rowmill.checks.catalog import CHECKS_BY_NAME
from rowmill.schema.ledger import REJECT_REASONS
from tests.docs.test_docs import ROOT

PAGE = ROOT / "docs/troubleshooting.md"
VALUE = "\N{HORIZONTAL ELLIPSIS}"


def read_shown_messages() -> list[str]:
    """Return the first cell of every row of the page's tables."""
    return re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@cache
def collect_texts() -> tuple[str, ...]:
    """Return every text of the packages, with an ellipsis for each inserted value."""
    modules = chain((ROOT / "pipelines").rglob("*.py"), (ROOT / "assets").rglob("*.py"))
    nodes = chain.from_iterable(_walk_code(ast.parse(path.read_text(encoding="utf-8"))) for path in modules)
    return tuple(text for node in nodes if (text := _read_text(node)))


def _walk_code(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        # A docstring is a statement of its own; an f-string is one text.
        if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
            yield from _walk_code(child)


def _read_text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_read_text(part) or VALUE for part in node.values)
    return ""


@pytest.mark.parametrize("message", read_shown_messages())
def test_message_of_the_page_is_one_of_the_code(message: str) -> None:
    if message in CHECKS_BY_NAME or message in REJECT_REASONS:
        return
    pieces = [re.escape(piece.strip()) for piece in message.split(VALUE)]
    pattern = re.compile(".*".join(pieces), re.DOTALL)

    assert any(pattern.search(text) for text in collect_texts()), f"no text of the code has {message!r}"


def test_page_has_messages_of_every_part() -> None:
    assert len(read_shown_messages()) > 25
