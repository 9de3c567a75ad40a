"""The fast path: write the marks into the template's text and render it with minijinja, an engine in Rust.

What belongs here: the change to the template's text, the check which templates may use this engine, and one render.
What does not: the decision to trust it, which `Renderer` bases on probes.

    {% for m in messages -%}  →  {% for m in messages -%}{% if m["K"] is defined %}C7.{{ m["K"] }}C{% endif -%}
    {%- endfor %}             →  {%- endfor %}{% if true %}C7C{% endif %}

Every message carries its index under a private key `K`; for any other value the inserted block prints
nothing. A template that compares messages would see the key, so its rows with equal messages take the reference
path. The inserted block ends with the white-space sign of its tag, so that `trim_blocks` and `-%}` act on the text
after it as before.

minijinja's limits (fuel, recursion, range) end loops, but not growth by doubling, so templates whose variables could
double are refused here; they take the reference path, which counts characters.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import minijinja
from jinja2 import nodes

from rowmill.conversation.sandbox import ToJson, make_clock, raise_exception
from rowmill.conversation.span_markers import contains_node, read_marks
from rowmill.conversation.template_contract import RenderedConversation
from rowmill.core.json import Json
from rowmill.schema.rows import Message

FAST_PATH_MARK = "\ufdd0"
INDEX_KEY = "\ufdd1"
"""The mark of the fast path, and the private key of a message's index; a row with either takes the reference path."""

BASE_FUEL = 8_000
FUEL_PER_MESSAGE = 1_500
"""Instructions that one render may take; real templates take about a hundred per message."""

_TAG_PATTERN = re.compile(
    r"""\{\#.*?\#\}
      | \{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}
      | \{\{(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^"'])*?\}\}
      | \{%(?P<left>[-+]?)\s*(?P<word>\w+)
           (?P<rest>(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^"'])*?)(?P<right>[-+]?)%\}""",
    re.VERBOSE | re.DOTALL,
)
_FOR_PATTERN = re.compile(r"\s+(?P<targets>[\w\s,()]+?)\s+in\s+(?P<iter>.*)", re.DOTALL)
_SET_ITEM_PATTERN = re.compile(r"\s+(?P<name>\w+)\s*=\s*\w+\[\s*(?P<index>\w+)\s*\]\s*", re.DOTALL)

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


def compares_messages(tree: nodes.Template) -> bool:
    """Return whether a template may compare two messages, which the private index key would make unequal."""
    for compare in tree.find_all(nodes.Compare):
        sides = [compare.expr, *(one.expr for one in compare.ops)]
        if sum(not isinstance(side, nodes.Const | nodes.List | nodes.Tuple) for side in sides) > 1:
            return True
    by_filter = any(one.name in ("unique", "groupby") for one in tree.find_all(nodes.Filter))
    methods = (one.attr for one in tree.find_all(nodes.Getattr))
    return by_filter or any(name in ("index", "count") for name in methods)


def has_equal_messages(messages: Sequence[Message]) -> bool:
    """Return whether two messages of a row are equal."""
    known: dict[tuple[str, str], list[Message]] = {}
    for message in messages:
        content = message.get("content")
        alike = known.setdefault((message["role"], content if isinstance(content, str) else ""), [])
        if message in alike:
            return True
        alike.append(message)
    return False


def _is_safe_engine_call(call: nodes.Call, macros: set[str]) -> bool:
    target = call.node
    if isinstance(target, nodes.Name):
        return target.name in macros or target.name in _SAFE_CALLS or target.name == "loop"
    if isinstance(target, nodes.Getattr):
        return target.attr in _SAFE_METHODS or _is_shrinking_replace(call)
    # Calls of `MarkRecorder`: charges and the generation tag.
    return isinstance(target, nodes.ExtensionAttribute)


def _is_shrinking_replace(call: nodes.Call) -> bool:
    """Return whether a call is `x.replace("longer", "shorter")`, which cannot make text grow."""
    if not isinstance(call.node, nodes.Getattr) or call.node.attr != "replace" or len(call.args) < 2:
        return False
    values = [arg.value for arg in call.args[:2] if isinstance(arg, nodes.Const)]
    return len(values) == 2 and all(isinstance(v, str) for v in values) and 0 < len(values[0]) >= len(values[1])


def _find_growth_obstacle(tree: nodes.Template, macros: set[str]) -> str:
    assigned = list(tree.find_all(nodes.Assign))
    grown = {_get_target_name(one) for one in assigned if _can_grow_text(one.node, macros)}
    for macro in tree.find_all(nodes.Macro):
        for one in macro.find_all(nodes.Assign):
            if _calls_macro(one.node, macros) and _count_uses(macro, _get_target_name(one)) > 1:
                return "a macro prints the output of a macro twice"
    for one in assigned:
        references = [ref for ref in _list_references(one.node) if ref in grown]
        if len(references) > 1 and _can_grow_text(one.node, macros):
            return f"the variable {_get_target_name(one)} may double"
        if references and _calls_macro(one.node, macros):
            return f"a macro builds the variable {_get_target_name(one)} from text that grows"
    return ""


def _count_uses(macro: nodes.Macro, name: str) -> int:
    """Count how often a macro prints a variable or assigns from it; tests of it do not count."""
    makers = [*macro.find_all(nodes.Output), *macro.find_all(nodes.Assign)]
    return sum(_list_references(maker).count(name) for maker in makers) - sum(
        _get_target_name(one) == name for one in macro.find_all(nodes.Assign)
    )


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


def insert_text_marks(source: str, silent: frozenset[int] = frozenset()) -> str:
    """Insert marks into a template's text, except for the loops numbered in `silent`, which print nothing.

    Raises
    ------
    ValueError
        If a `for` tag cannot be parsed.

    """
    pieces: list[str] = []
    position = 0
    loops: list[tuple[int, list[str], bool]] = []
    count = 0
    for tag in _TAG_PATTERN.finditer(source):
        word, rest, right = tag["word"], tag["rest"] or "", tag["right"] or ""
        if word not in ("for", "endfor", "generation", "endgeneration", "set"):
            continue
        pieces.append(source[position : tag.start()])
        position = tag.end()
        if word == "for":
            names = _read_loop_targets(rest)
            loops.append((count, names, "range(" in rest.replace(" ", "")))
            pieces.append(tag[0])
            pieces += [_make_head_mark(count, name, right) for name in names if count not in silent]
            count += 1
        elif word == "endfor":
            number = loops.pop()[0]
            mark = f"{{% if true %}}{FAST_PATH_MARK}{number}{FAST_PATH_MARK}{{% endif {right}%}}"
            pieces += [tag[0], "" if number in silent else mark]
        elif word == "set":
            pieces += [tag[0], _make_item_mark(rest, right, loops)]
        else:
            pieces.append(_replace_generation_tag(word, tag["left"], right))
    return "".join([*pieces, source[position:]])


def _read_loop_targets(rest: str) -> list[str]:
    loop = _FOR_PATTERN.fullmatch(rest)
    if loop is None:
        raise ValueError(f"cannot read the loop{rest}")
    return re.findall(r"\w+", loop["targets"])


def _make_head_mark(loop: int, name: str, right: str) -> str:
    item = f'{name}["{INDEX_KEY}"]'
    return f"{{% if {item} is defined %}}{FAST_PATH_MARK}{loop}.{{{{ {item} }}}}{FAST_PATH_MARK}{{% endif {right}%}}"


def _make_item_mark(rest: str, right: str, loops: Sequence[tuple[int, list[str], bool]]) -> str:
    found = _SET_ITEM_PATTERN.fullmatch(rest)
    if found is None or not loops or not loops[-1][2] or found["index"] not in loops[-1][1]:
        return ""
    return _make_head_mark(loops[-1][0], found["name"], right)


def _replace_generation_tag(word: str, left: str, right: str) -> str:
    # `with` gives the block the same scope as in the reference engine.
    if word == "generation":
        return f"{{%{left} with %}}{{% if true %}}{FAST_PATH_MARK}{{{FAST_PATH_MARK}{{% endif {right}%}}"
    return f"{{%{left} if true %}}{FAST_PATH_MARK}}}{FAST_PATH_MARK}{{% endif %}}{{% endwith {right}%}}"


class MinijinjaEngine:
    """One template, compiled for minijinja with marks in its text."""

    def __init__(
        self,
        source: str,
        now: datetime,
        tojson: ToJson,
        values: Mapping[str, Json],
        silent: frozenset[int] = frozenset(),
    ) -> None:
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
        text = re.sub(r"\r\n|\r", "\n", source)
        self._environment.add_template("chat", insert_text_marks(text, silent))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None,
        values: Mapping[str, Json],
        *,
        fuel: int,
    ) -> RenderedConversation:
        """Render once and read the marks.

        Raises
        ------
        Exception
            Any error of the engine or the template; the caller then takes the reference path.

        """
        self._environment.fuel = fuel
        text = self._environment.render_template("chat", messages=messages, tools=tools, **values)
        return read_marks(text, FAST_PATH_MARK, messages)

    def plain(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None,
        values: Mapping[str, Json],
        *,
        fuel: int,
    ) -> str:
        """Render messages without the index key, and remove the marks that loops print even then.

        Raises
        ------
        Exception
            Any error of the engine or the template.

        """
        self._environment.fuel = fuel
        text = self._environment.render_template("chat", messages=messages, tools=tools, **values)
        return "".join(text.split(FAST_PATH_MARK)[::2])


def _disable_escaping(_: str) -> bool:
    return False
