"""The Jinja environment of chat templates: it behaves as `apply_chat_template`'s does.

Trimmed blocks, loop controls, `{% generation %}`, `raise_exception`, `strftime_now`, unsorted unescaped `tojson`, no
mutation, no internals. What a template may use is limited (`core/template_sandbox.py`). Only `GenerationTag.borders`,
set while a row is rendered, print something that the template does not.

Compiling is not charged, so the length of a template and the depth of its syntax tree are limited before: Jinja's
compiler, Python's and the fast engine all traverse the tree by recursion.
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import orjson
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser

from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.core.template_sandbox import MAX_WIDTH, BudgetError, RenderBudget, Sandbox, estimate_printed_size

MAX_TEMPLATE_CHARS = 1 << 17
"""Maximum length of a template; the longest template published with a model has 17,000 characters."""

MAX_TEMPLATE_DEPTH = 100
"""Maximum depth of the syntax tree; the deepest published with a model has 21 levels. Every link of a chain
(`a + b + c`, `elif`) is a level."""

_MAX_CACHED_JSON = 4096


def require_short_template(text: str) -> None:
    """Refuse a template that is too long to compile quickly."""
    if len(text) > MAX_TEMPLATE_CHARS:
        raise ConfigError(
            f"template.chat_template: has {len(text):,} characters; at most {MAX_TEMPLATE_CHARS:,} are allowed; "
            "shorten it, or check that the file is a chat template"
        )


def require_shallow_template(tree: nodes.Template) -> None:
    """Refuse a template whose syntax tree is too deep to compile."""
    pending: list[tuple[nodes.Node, int, int]] = [(tree, 1, 1)]
    while pending:
        node, depth, line = pending.pop()
        if depth > MAX_TEMPLATE_DEPTH:
            raise make_too_deep_error(f"line {line}: ")
        inner = depth + max(1, _count_nesting_levels(node))
        pending += [(child, inner, child.lineno or line) for child in node.iter_child_nodes()]


def _count_nesting_levels(node: nodes.Node) -> int:
    """Return how many levels the fast engine, which crashes on stack overflow, nests for one node."""
    match node:
        case nodes.Concat():
            return len(node.nodes)
        case nodes.Compare():
            return len(node.ops)
        case nodes.If():
            return len(node.elif_)
        case _:
            return 1


def make_too_deep_error(where: str = "") -> ConfigError:
    """Build the error for a template that is too deep."""
    return ConfigError(
        f"template.chat_template: {where}expressions or blocks are nested more than {MAX_TEMPLATE_DEPTH} levels deep; "
        f"at most {MAX_TEMPLATE_DEPTH} are allowed, and each operator or elif of a chain is one; join texts with a "
        "list and join, or set a variable halfway"
    )


def raise_exception(message: object = "") -> str:
    """Raise an error with the template's message."""
    raise TemplateError(str(message))


def make_clock(now: datetime) -> Callable[[str], str]:
    """Return `strftime_now` for a pinned clock, so that a row's text does not depend on the day it was built."""
    return now.strftime


class ToJson:
    """The `tojson` filter of chat templates: keys in source order, nothing escaped, equal values encoded once.

    Cached because thousands of rows have the same tool schemas, and encoding them takes most of a render's time.
    """

    def __init__(self, budget: RenderBudget) -> None:
        self._budget = budget
        self._known: dict[tuple[bytes, tuple[object, ...]], str] = {}

    def __call__(
        self,
        value: Json,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """Encode with the arguments that `json.dumps` has."""
        if indent is not None and _is_wide_indent(indent):
            raise BudgetError("the template asks tojson for an enormous indent")

        def encode() -> str:
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        if type(value) is str:
            self._budget.grow(len(value))
            return encode()
        key = _make_cache_key(value)
        if not key:
            self._budget.grow(estimate_printed_size(value))
            return encode()
        options = (ensure_ascii, indent, repr(separators), sort_keys)
        text = self._known.get((key, options))
        if text is None:
            if len(self._known) >= _MAX_CACHED_JSON:
                self._known.clear()
            text = self._known[key, options] = encode()
        self._budget.grow(len(text))
        return text


def _make_cache_key(value: Json) -> bytes:
    """Return bytes that are equal only for equal values; empty for a value that is too large or cannot be encoded.

    Also empty if they contain null, because orjson writes NaN as null.
    """
    try:
        key = orjson.dumps(value)
    except (TypeError, ValueError):
        return b""
    return b"" if len(key) > 65_536 or b"null" in key else key


def _is_wide_indent(indent: Any) -> bool:
    return not isinstance(indent, int) or indent > MAX_WIDTH


class ChatSandbox(Sandbox):
    """The sandbox with what chat templates expect; `now` is what their clock shows."""

    def __init__(self, now: datetime) -> None:
        super().__init__([GenerationTag])
        self.filters["tojson"] = ToJson(self.budget)
        known: dict[str, Any] = self.globals
        known["raise_exception"] = raise_exception
        known["strftime_now"] = make_clock(now)

    @property
    def generation_tag(self) -> "GenerationTag":
        """The extension that prints generation blocks."""
        return self.extensions[GenerationTag.identifier]  # pyrefly: ignore[bad-return]


class GenerationTag(Extension):
    """Jinja extension that adds `{% generation %}`."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads the attribute)
    borders: tuple[str, str] | None = None
    """What a block prints before and after its text while a row is rendered; else None."""

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse `{% generation %}…{% endgeneration %}` as `apply_chat_template` does, as a call block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("generated"), [], [], body).set_lineno(line)

    def generated(self, caller: Any) -> str:
        """Return the block's text, between its borders if they are set."""
        text = caller()
        return text if self.borders is None else f"{self.borders[0]}{text}{self.borders[1]}"
