r"""Render strings that record every operation on them: proof that a template prints contents without reading them.

    operation   '</think>' in content        content.strip('\n')        content | tojson
    recorded    literal '</think>'           edge '\n'                  no proof: rows are rendered one by one
    invariant   a content without these literals and edges is printed by the same steps, at the same position

A template is a deterministic program. If every operation on a content either prints it as it is, or asks a
question whose answer is recorded and is the same for all contents that satisfy the record, then two rows with
equal roles and such contents run through the same steps. So the template text around contents can be learned once per
sequence of roles instead of once per row. Any other operation stops the proof, and rows are rendered one by one.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rowmill.conversation.template_engines import make_clock, raise_exception
from rowmill.core.json import Json
from rowmill.core.template_sandbox import contains_node
from rowmill.schema.rows import Message

_PLACEHOLDER_FORMAT = "Zq{0}\"\\'<&>{{{{%s}}}}\té漢  \n{0}qZ"
"""Contains characters that every kind of escaping changes, so a placeholder found in a render was printed as it is."""

_ALLOWED_FILTERS = frozenset(
    "trim length count tojson default d selectattr rejectattr select reject map list first last reverse items string "
    "join indent".split()
)
_ALLOWED_TESTS = frozenset(
    "defined undefined none string mapping iterable sequence number boolean true false eq equalto == ne !=".split()
)
_ALLOWED_FUNCTIONS = frozenset({"raise_exception", "strftime_now", "namespace", "range"})


@dataclass(frozen=True, slots=True)
class PlaceholderRendering:
    """A rendered conversation of placeholders, and the conditions under which other contents render the same way.

    Replacing the placeholders `contents` leaves the rest of `text` unchanged, provided that no new content contains
    one of `literals`, or begins or ends with the characters in its message's `edges` (None: white space).
    `hidden` matches contents that could not be covered, so that their positions would not be proven.
    """

    text: str
    contents: tuple[str, ...]
    literals: frozenset[str]
    edges: Mapping[int, frozenset[str | None]]
    hidden: "re.Pattern[str]"


_NOTHING = re.compile(r"(?!)")


class ContentReadError(BaseException):
    """The template did more with a content than print it or ask a recorded question."""


@dataclass(slots=True)
class ContentNotes:
    """The conditions on contents that a render recorded.

    `literals`: texts that no content may contain. `edges`: by message, characters with which its content must not begin
    or end; None means all white space.
    """

    literals: set[str] = field(default_factory=set[str])
    edges: dict[int, set[str | None]] = field(default_factory=dict[int, "set[str | None]"])

    def note_absence(self, literal: object) -> None:
        """Record a text on whose absence a step depends."""
        if type(literal) is not str or not literal:
            raise ContentReadError("a content is compared with a value other than a constant string")
        self.literals.add(literal)


class PrintableText(str):  # noqa: SLOT000  (`TracedContent` has attributes)
    """A string that may be joined and printed; all other operations of `str` raise `ContentReadError`."""

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: object) -> "PrintableText":
        return PrintableText(_get_raw_text(self) + _get_raw_text(other))

    def __radd__(self, other: object) -> "PrintableText":
        return PrintableText(_get_raw_text(other) + _get_raw_text(self))

    def __str__(self) -> str:
        return _get_raw_text(self)


class TracedContent(PrintableText):  # noqa: PLW1641  (its hash is refused below)
    """The content of one message; also allows operations whose answer can be recorded."""

    message: int
    notes: ContentNotes

    def __contains__(self, literal: object) -> bool:
        self.notes.note_absence(literal)
        return False

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, bool | int | float):
            return False
        self.notes.note_absence(other)
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def startswith(self, literal: object, *limits: object) -> bool:
        """Record a text that no content may contain, and answer False."""
        if limits:
            raise ContentReadError("a part of a content is inspected")
        self.notes.note_absence(literal)
        return False

    endswith = startswith

    def split(self, literal: object = None, *_: object) -> "list[str]":  # pyrefly: ignore[bad-override]
        """Record the separator as absent, and return the unsplit content."""
        self.notes.note_absence(literal)
        return [self]

    rsplit = split  # pyrefly: ignore[bad-override]

    def replace(self, literal: object, *_: object) -> "TracedContent":
        """Record the replaced text as absent, and return the unchanged content."""
        self.notes.note_absence(literal)
        return self

    def strip(self, characters: object = None) -> "TracedContent":
        """Record the characters as absent from both ends, and return the unchanged content."""
        if characters is not None and type(characters) is not str:
            raise ContentReadError("a content is stripped of characters that are not a constant string")
        self.notes.edges.setdefault(self.message, set()).add(characters)
        return self

    lstrip = strip
    rstrip = strip


def _get_raw_text(value: object) -> str:
    if not isinstance(value, str):
        raise ContentReadError("a content is joined to a value other than a string")
    return str.__str__(value)


def _make_refusal(name: str) -> Any:
    def refused(*_: object, **__: object) -> NoReturn:
        raise ContentReadError(f"the template uses {name} of a content")

    return refused


_KEPT_STR_METHODS = {"__class__", "__new__", "__init__", "__getattribute__", "__setattr__", "__delattr__",
                     "__repr__", "__doc__",
         "__init_subclass__", "__subclasshook__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__sizeof__",
         "__dir__", "__getstate__"}  # fmt: skip
for _name in sorted({*dir(str), "__iter__", "__rmod__", "__rmul__", "__hash__"} - _KEPT_STR_METHODS):
    if _name not in vars(PrintableText) and callable(getattr(str, _name, len)):
        setattr(PrintableText, _name, _make_refusal(_name))
setattr(TracedContent, "__hash__", PrintableText.__hash__)  # noqa: B010  (defining __eq__ had set it to None)


def make_content_placeholder(index: int) -> str:
    """Return the placeholder for the content of message `index`."""
    return _PLACEHOLDER_FORMAT.format(index)


def find_tracing_obstacle(tree: nodes.Template) -> str:
    """Return why the record of operations on contents could be incomplete for a template; empty if it is complete.

    Operations are recorded by methods of the content. A template must not read text in ways that bypass them: blocks
    that capture output, text joined and then read, methods of constants applied to contents.
    """
    blocks = (nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Include, nodes.Import,
              nodes.FromImport, nodes.Extends, nodes.Block)  # fmt: skip
    if contains_node(tree, *blocks, nodes.Mul, nodes.Pow):
        return "the template captures, includes or multiplies text"
    macros = frozenset(macro.name for macro in tree.find_all(nodes.Macro))
    printed = _find_printed_nodes(tree, macros)
    checks = (
        ("the template uses a filter that may read text", all(map(_is_safe_filter, tree.find_all(nodes.Filter)))),
        (
            "the template uses a test that may read text",
            all(one.name in _ALLOWED_TESTS for one in tree.find_all(nodes.Test)),
        ),
        (
            "the template passes values of the row to a function",
            all(_is_safe_traced_call(one, macros, printed) for one in tree.find_all(nodes.Call)),
        ),
        (
            "the template searches a text for a value of the row",
            all(map(_is_safe_compare, tree.find_all(nodes.Compare))),
        ),
        ("the template formats text", all(isinstance(one.right, nodes.Const) for one in tree.find_all(nodes.Mod))),
        ("the template joins text and stores it", all(id(one) in printed for one in tree.find_all(nodes.Concat))),
    )
    return next((why for why, holds_true in checks if not holds_true), "")


def _is_safe_filter(one: nodes.Filter) -> bool:
    """Return whether a filter is allowed, and the test or filter that it is given by name as well."""
    given = {"select": (0, _ALLOWED_TESTS), "reject": (0, _ALLOWED_TESTS), "selectattr": (1, _ALLOWED_TESTS),
             "rejectattr": (1, _ALLOWED_TESTS),
             "map": (0, _ALLOWED_FILTERS)}  # fmt: skip
    message, known = given.get(one.name, (0, None))
    named = one.args[message : message + 1] if known is not None else []
    return one.name in _ALLOWED_FILTERS and all(isinstance(n, nodes.Const) and n.value in (known or ()) for n in named)


def _is_safe_traced_call(call: nodes.Call, macros: frozenset[str], printed: set[int]) -> bool:
    if isinstance(call.node, nodes.Name):
        # A macro returns plain text, and reading the contents in it would not be recorded.
        return call.node.name in _ALLOWED_FUNCTIONS or (call.node.name in macros and id(call) in printed)
    arguments = [*call.args, *(kwarg.value for kwarg in call.kwargs), call.dyn_args, call.dyn_kwargs]
    constant = all(argument is None or isinstance(argument, nodes.Const) for argument in arguments)
    return isinstance(call.node, nodes.Getattr) and constant


def _is_safe_compare(compare: nodes.Compare) -> bool:
    sides = [compare.expr, *(one.expr for one in compare.ops)]
    return all(
        one.op not in ("in", "notin")
        or isinstance(left, nodes.Const)
        or (isinstance(one.expr, nodes.List | nodes.Tuple) and all(isinstance(i, nodes.Const) for i in one.expr.items))
        for left, one in zip(sides, compare.ops, strict=False)
    )


def _find_printed_nodes(tree: nodes.Template, macros: frozenset[str]) -> set[int]:
    """Return the ids of joins (`~`) and macro calls whose text is printed directly."""
    found: set[int] = set()
    waiting = [child for output in tree.find_all(nodes.Output) for child in output.nodes]
    while waiting:
        one = waiting.pop()
        if isinstance(one, nodes.Concat):
            found.add(id(one))
            waiting.extend(one.nodes)
        elif isinstance(one, nodes.CondExpr):
            waiting.extend(branch for branch in (one.expr1, one.expr2) if branch is not None)
        elif isinstance(one, nodes.Call) and isinstance(one.node, nodes.Name) and one.node.name in macros:
            found.add(id(one))
    return found


class _GenerationTag(Extension):
    """Parses `{% generation %}` as its body; which characters it marks does not matter for the text.

    `template_engines.GenerationTag` makes a call block of it, which captures text: such a template cannot be traced.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads the attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TracingRenderer:
    """One template, compiled to render recording strings; `reason` says why it cannot be used, else empty."""

    def __init__(self, source: str, now: datetime, values: Mapping[str, Json]) -> None:
        """Check and compile; without budget, so the caller must have rendered the same messages within one before."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters |= {"tojson": _convert_to_json, "string": _convert_to_string, "join": _join_values}
        known: dict[str, Any] = environment.globals
        known["raise_exception"], known["strftime_now"] = raise_exception, make_clock(now)
        self.reason = find_tracing_obstacle(environment.parse(source))
        # Compiled only after the check, because compiling evaluates constants, such as a gigabyte of x, without budget.
        self._template = None if self.reason else environment.from_string(source)
        self._values = values

    def render(self, roles: Sequence[str], kwargs: Mapping[str, Json]) -> PlaceholderRendering | None:
        """Render one placeholder per role with template arguments; None if the text depends on more than places."""
        if self._template is None:
            return None
        notes = ContentNotes()
        messages: list[Message] = []
        for index, role in enumerate(roles):
            content = TracedContent(make_content_placeholder(index))
            content.message, content.notes = index, notes
            messages.append({"role": role, "content": content})
        try:
            text = self._template.render(**{**self._values, **kwargs, "messages": messages, "tools": None})
        except (ContentReadError, TemplateError, TypeError, ValueError, AttributeError):
            return None
        contents = tuple(make_content_placeholder(index) for index in range(len(roles)))
        if any(text.count(one) != 1 for one in contents) or any(
            lit in one for lit in notes.literals for one in contents
        ):
            return None
        edges = {index: frozenset(characters) for index, characters in notes.edges.items()}
        return PlaceholderRendering(text, contents, frozenset(notes.literals), edges, _NOTHING)


def _convert_to_json(value: Json, **_: object) -> str:
    return json.dumps(_require_untraced(value), ensure_ascii=False)


def _require_untraced(value: Json) -> Json:
    """Return a value that may be read; raise if it contains a traced content."""
    if isinstance(value, PrintableText):
        raise ContentReadError("a content is written as JSON")
    if isinstance(value, Mapping):
        return {key: _require_untraced(one) for key, one in value.items()}
    return [_require_untraced(one) for one in value] if isinstance(value, (list, tuple)) else value


def _convert_to_string(value: Json) -> str:
    return value if isinstance(value, str) else str(_require_untraced(value))


def _join_values(values: Iterable[Json], separator: str = "", *_: object, **named: object) -> str:
    """Join as Jinja does; the result is a `PrintableText` if any part is."""
    if named:
        raise ContentReadError("attributes of messages are joined")
    parts = [_convert_to_string(value) for value in values]
    text = _get_raw_text(separator).join(map(_get_raw_text, parts))
    return PrintableText(text) if any(isinstance(part, PrintableText) for part in parts) else text
