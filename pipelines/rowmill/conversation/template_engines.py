"""The two engines that render chat templates: Jinja in a sandbox, which is the reference, and minijinja, which is fast.

The Jinja environment behaves as `apply_chat_template`'s does: trimmed blocks, loop controls, `{% generation %}`,
`raise_exception`, `strftime_now`, unsorted unescaped `tojson`, no mutation, no internals. What a template may use is
limited (`core/template_sandbox.py`). Only `GenerationTag.borders`, set while a row is rendered, print something that
the template does not. Compiling is not charged, so the length of a template and the depth of its syntax tree are
limited before: Jinja's compiler, Python's and the fast engine all traverse the tree by recursion.

minijinja does not know `{% generation %}`, so the tag is written as a `with` block, which has the same scope; nothing
else of a template is changed. `Renderer` uses the engine only if it prints the same texts as Jinja on every probe. Its
limits (fuel, recursion, range) end loops, but not growth by doubling, so templates whose variables could double are
refused here; they take the reference path, which counts characters.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

import minijinja
import orjson
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser

from rowmill.conversation.template_registry import list_bundled_templates, read_named_template
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.core.template_sandbox import (
    MAX_WIDTH,
    BudgetError,
    RenderBudget,
    Sandbox,
    contains_node,
    estimate_printed_size,
)
from rowmill.schema.rows import Message

MAX_TEMPLATE_CHARS = 1 << 17
"""Maximum length of a template; the longest template published with a model has 17,000 characters."""

MAX_TEMPLATE_DEPTH = 100
"""Maximum depth of the syntax tree; the deepest published with a model has 21 levels. Every link of a chain
(`a + b + c`, `elif`) is a level."""

_MAX_CACHED_JSON, _MAX_CACHED_BYTES = 4096, 65_536


def require_shallow_template(tree: nodes.Template) -> None:
    """Refuse a template whose syntax tree is too deep to compile."""
    pending: list[tuple[nodes.Node, int, int]] = [(tree, 1, 1)]
    while pending:
        node, depth, line = pending.pop()
        if depth > MAX_TEMPLATE_DEPTH:
            raise make_too_deep_error(f"line {line}: ")
        # The fast engine, which crashes on stack overflow, nests several levels for one node.
        levels = 1
        if isinstance(node, nodes.Concat):
            levels = len(node.nodes)
        elif isinstance(node, nodes.Compare):
            levels = len(node.ops)
        elif isinstance(node, nodes.If):
            levels = len(node.elif_)
        inner = depth + max(1, levels)
        pending += [(child, inner, child.lineno or line) for child in node.iter_child_nodes()]


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
        self._shared: dict[int, Json] = {}
        self._shared_texts: dict[tuple[int, tuple[object, ...]], str] = {}

    def share(self, values: Sequence[Json]) -> None:
        """Recognize these objects, which must not change, from now on without encoding them: the tools of many rows."""
        self._shared = dict(zip(map(id, values), values, strict=True))
        self._shared_texts.clear()

    def __call__(
        self,
        value: Json,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """Encode with the arguments that `json.dumps` has."""
        if indent is not None and (not isinstance(indent, int) or indent > MAX_WIDTH):
            raise BudgetError("the template asks tojson for an enormous indent")

        def encode() -> str:
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        if type(value) is str:
            self._budget.grow(len(value))
            return encode()
        options = (ensure_ascii, indent, None if separators is None else repr(separators), sort_keys)
        # The objects are held, so that no other one has the same id.
        shared = self._shared_texts.get((id(value), options))
        if shared is not None:
            self._budget.grow(len(shared))
            return shared
        try:
            key = orjson.dumps(value)
        except (TypeError, ValueError):
            key = b""
        # Equal only for equal values; with null they need not be, because orjson writes NaN as null.
        if not key or len(key) > _MAX_CACHED_BYTES or b"null" in key:
            self._budget.grow(estimate_printed_size(value))
            return encode()
        text = self._known.get((key, options))
        if text is None:
            if len(self._known) >= _MAX_CACHED_JSON:
                self._known.clear()
            text = self._known[key, options] = encode()
        if id(value) in self._shared:
            self._shared_texts[id(value), options] = text
        self._budget.grow(len(text))
        return text


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


@cache
def list_answer_marks() -> dict[str, str]:
    """Return the line that each bundled template prints before an answer: the mark of a chat that is text."""
    marks: dict[str, str] = {}
    for name in list_bundled_templates():
        template = ChatSandbox(datetime(2025, 1, 1)).from_string(read_named_template(name))  # noqa: DTZ001
        asked = [{"role": "user", "content": "asked"}]
        printed = template.render(messages=asked, add_generation_prompt=True, bos_token="", eos_token="")
        marks[name] = printed.partition("asked")[2].strip().splitlines()[-1]
    return marks


# ── The fast path ──


BASE_FUEL = 8_000
FUEL_PER_MESSAGE = 1_500
"""Instructions that one render may take; real templates take about a hundred per message."""

_BORDERS = ("rowmill_block_opens", "rowmill_block_closes")
"""Values that are printed at the borders of generation blocks, if a render sets them."""

_TAG_PATTERN = re.compile(
    r"""\{\#.*?\#\}
      | \{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}
      | \{\{(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^"'])*?\}\}
      | \{%(?P<left>[-+]?)\s*(?P<word>\w+)
           (?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^"'])*?(?P<right>[-+]?)%\}""",
    re.VERBOSE | re.DOTALL,
)
_SAFE_METHODS = frozenset(
    "strip lstrip rstrip split rsplit startswith endswith items keys values get upper lower title capitalize "
    "find rfind count index removeprefix removesuffix isdigit isalpha isalnum isspace".split()
)
_SAFE_FILTERS = frozenset(
    "tojson trim length count list items first last string lower upper capitalize title select reject selectattr "
    "rejectattr map join default d int float safe sort unique reverse dictsort abs sum min max".split()
)
_SAFE_CALLS = frozenset("raise_exception strftime_now namespace range dict caller".split())
_GROWING_NODES = (nodes.Add, nodes.Concat, nodes.List, nodes.Tuple, nodes.Dict)


def find_engine_obstacle(tree: nodes.Template) -> str:
    """Return why a template may not use the fast engine; empty if it may.

    Text may grow only in proportion to the loops: an assignment may use a variable that itself grows once
    (`text = text + part`), not twice (`text = text + text`).
    """
    if contains_node(tree, nodes.AssignBlock, nodes.FilterBlock, nodes.Include, nodes.Import, nodes.FromImport):
        return "the template captures or includes template text"
    if contains_node(tree, nodes.Mul, nodes.Pow):
        return "the template multiplies"
    if any(one.attr.startswith("_") for one in tree.find_all(nodes.Getattr)):
        return "the template reads a private attribute"
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        if not _is_safe_engine_call(call, macros):
            return "the template calls a method that is not on the list of safe ones"
    for one in tree.find_all(nodes.Filter):
        if one.name not in _SAFE_FILTERS:
            return f"the template uses the filter {one.name}"
    return _find_growth_obstacle(tree, macros)


def _is_safe_engine_call(call: nodes.Call, macros: set[str]) -> bool:
    target = call.node
    if isinstance(target, nodes.Name):
        return target.name in macros or target.name in _SAFE_CALLS or target.name == "loop"
    if isinstance(target, nodes.Getattr):
        # A call `x.replace("longer", "shorter")` cannot make text grow.
        values = [arg.value for arg in call.args[:2] if isinstance(arg, nodes.Const)]
        are_texts = len(values) == 2 and all(isinstance(value, str) for value in values)
        shrinks = target.attr == "replace" and are_texts and 0 < len(values[0]) >= len(values[1])
        return target.attr in _SAFE_METHODS or shrinks
    # The generation tag.
    return isinstance(target, nodes.ExtensionAttribute)


def _find_growth_obstacle(tree: nodes.Template, macros: set[str]) -> str:
    assigned = list(tree.find_all(nodes.Assign))
    grown = {_get_target_name(one) for one in assigned if _can_grow_text(one.node, macros)}
    for macro in tree.find_all(nodes.Macro):
        inside = list(macro.find_all(nodes.Assign))
        # How often the macro prints a variable or assigns from it; tests of it do not count.
        uses = Counter(name for one in (*macro.find_all(nodes.Output), *inside) for name in _list_references(one))
        uses.subtract(map(_get_target_name, inside))
        for one in inside:
            if _calls_macro(one.node, macros) and uses[_get_target_name(one)] > 1:
                return "a macro prints the output of a macro twice"
    for one in assigned:
        references = [ref for ref in _list_references(one.node) if ref in grown]
        if len(references) > 1 and _can_grow_text(one.node, macros):
            return f"the variable {_get_target_name(one)} may double"
        if references and _calls_macro(one.node, macros):
            return f"a macro builds the variable {_get_target_name(one)} from text that grows"
    return ""


def _can_grow_text(expression: nodes.Node, macros: set[str]) -> bool:
    if isinstance(expression, _GROWING_NODES) or contains_node(expression, *_GROWING_NODES):
        return True
    joins = [node for node in _find_nodes(expression, nodes.Filter) if node.name == "join"]
    return bool(joins) or _calls_macro(expression, macros)


def _calls_macro(expression: nodes.Node, macros: set[str]) -> bool:
    calls = _find_nodes(expression, nodes.Call)
    return any(isinstance(call.node, nodes.Name) and call.node.name in macros for call in calls)


def _find_nodes(node: nodes.Node, kind: Any) -> list[Any]:
    return [*([node] if isinstance(node, kind) else []), *node.find_all(kind)]


def _get_target_name(assign: nodes.Assign) -> str:
    target = assign.target
    if isinstance(target, nodes.NSRef):
        return f"{target.name}.{target.attr}"
    return target.name if isinstance(target, nodes.Name) else ""


def _list_references(expression: nodes.Node) -> list[str]:
    found = [name.name for name in _find_nodes(expression, nodes.Name)]
    for one in _find_nodes(expression, nodes.Getattr):
        if isinstance(one.node, nodes.Name):
            found += [f"{one.node.name}.{one.attr}"]
    return found


def replace_generation_tags(source: str) -> str:
    """Write generation blocks as `with` blocks that print the values of `_BORDERS`, if they are set, at their borders.

    Each replacement ends with the white-space sign of its tag, so that the text after it is trimmed as before.
    """

    def replace(tag: "re.Match[str]") -> str:
        left, right = tag["left"], tag["right"]
        opens, closes = (f"{{% if {name} %}}{{{{ {name} }}}}{{% endif" for name in _BORDERS)
        match tag["word"]:
            case "generation":
                return f"{{%{left} with %}}{opens} {right}%}}"
            case "endgeneration":
                return f"{closes.replace('{%', '{%' + left, 1)} %}}{{% endwith {right}%}}"
            case _:
                return tag[0]

    return _TAG_PATTERN.sub(replace, source)


class MinijinjaEngine:
    """One template, compiled for minijinja."""

    def __init__(self, source: str, now: datetime, tojson: ToJson, values: Mapping[str, Json]) -> None:
        """Compile; `values` are passed to every render, and a row's values override them."""
        self._environment = minijinja.Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            debug=False,
            undefined_behavior="lenient",
            auto_escape_callback=_disable_escaping,
            filters={"tojson": tojson},
            globals={**values, "raise_exception": raise_exception, "strftime_now": make_clock(now)},
        )
        # Jinja reads every line end as \n.
        self._environment.add_template("chat", replace_generation_tags(re.sub(r"\r\n|\r", "\n", source)))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None,
        values: Mapping[str, Json],
        borders: tuple[str, str] | None = None,
    ) -> str:
        """Render once, or raise any error; `borders` are printed at the start and the end of every generation block."""
        self._environment.fuel = BASE_FUEL + FUEL_PER_MESSAGE * (len(messages) + len(tools or ()))
        if borders is not None:
            values = {**values, **dict(zip(_BORDERS, borders, strict=True))}
        return self._environment.render_template("chat", messages=messages, tools=tools, **values)


def _disable_escaping(_: str) -> bool:
    return False
