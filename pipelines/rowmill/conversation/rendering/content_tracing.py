r"""Rendering with contents that the template may print but not read: proof that only their place matters.

What belongs here: strings that note what is asked of them, the screen that says for which templates their
notes are complete, and one render. What does not: what follows for masks (`turn_layouts.py`).

    asked     '</think>' in content        content.strip('\n')        content | tojson
    noted     literal '</think>'           edge '\n'                  no proof: rows go one by one
    law       a content without these literals and edges is printed by the same steps, at the same place

A template is a deterministic program. If every operation on a content either prints it as it is, or asks a
question whose answer is noted here and is the same for all contents that keep the notes, then two rows with
equal roles whose contents keep them run through the same steps. So what is printed around contents needs to
be learned once per sequence of roles, not once per row. Operations that are neither stop the proof, and the
rows are printed one by one as ever.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rowmill.conversation.rendering.sandbox import clock, raise_exception
from rowmill.conversation.rendering.span_markers import holds
from rowmill.conversation.template_contract import OpaquePrint
from rowmill.core.json import Json
from rowmill.schema.rows import Message

_PLACEHOLDER = "Zq{0}\"\\'<&>{{{{%s}}}}\té漢  \n{0}qZ"
"""Every character that some way of escaping or changing text would change; found again, the text was only printed."""

_FILTERS = frozenset(
    "trim length count tojson default d selectattr rejectattr select reject map list first last reverse items string "
    "join indent".split()
)
_TESTS = frozenset(
    "defined undefined none string mapping iterable sequence number boolean true false eq equalto == ne !=".split()
)
_FUNCTIONS = frozenset({"raise_exception", "strftime_now", "namespace", "range"})


class NotOpaqueError(BaseException):
    """The template did something with a content that is more than printing it."""


@dataclass(slots=True)
class Notes:
    """What a template asked about contents: texts they must not hold, and characters they must not begin or end with.

    `edges` maps a message's index to such characters; None stands for all white space.
    """

    literals: set[str] = field(default_factory=set[str])
    edges: dict[int, set[str | None]] = field(default_factory=dict[int, "set[str | None]"])

    def absent(self, literal: object) -> None:
        """Note a text whose absence decided a step."""
        if type(literal) is not str or not literal:
            raise NotOpaqueError("a content is compared with something that is no constant text")
        self.literals.add(literal)


class Printable(str):  # noqa: SLOT000  (`Content` has attributes)
    """Text that may be joined and printed; everything else that a string can do is refused."""

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: object) -> "Printable":
        return Printable(_raw(self) + _raw(other))

    def __radd__(self, other: object) -> "Printable":
        return Printable(_raw(other) + _raw(self))

    def __str__(self) -> str:
        return _raw(self)


class Content(Printable):  # noqa: PLW1641  (its hash is refused below)
    """The content of one message; answers the questions whose answers can be noted."""

    place: int
    notes: Notes

    def __contains__(self, literal: object) -> bool:
        self.notes.absent(literal)
        return False

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, bool | int | float):
            return False
        self.notes.absent(other)
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def startswith(self, literal: object, *limits: object) -> bool:
        """Note the text with which no content may begin."""
        return self._found(literal, limits)

    def endswith(self, literal: object, *limits: object) -> bool:
        """Note the text with which no content may end."""
        return self._found(literal, limits)

    def _found(self, literal: object, limits: Sequence[object]) -> bool:
        if limits:
            raise NotOpaqueError("a content is looked at in part")
        self.notes.absent(literal)
        return False

    def split(self, literal: object = None, *_: object) -> "list[str]":  # pyright: ignore[reportIncompatibleMethodOverride]
        """Split at a text that is not there."""
        self.notes.absent(literal)
        return [self]

    rsplit = split  # pyright: ignore[reportAssignmentType]

    def replace(self, literal: object, *_: object) -> "Content":
        """Replace a text that is not there."""
        self.notes.absent(literal)
        return self

    def strip(self, characters: object = None) -> "Content":
        """Take characters from both ends, where none of them stands."""
        if characters is not None and type(characters) is not str:
            raise NotOpaqueError("a content is stripped of what is no constant text")
        self.notes.edges.setdefault(self.place, set()).add(characters)
        return self

    lstrip = strip  # pyright: ignore[reportAssignmentType]
    rstrip = strip  # pyright: ignore[reportAssignmentType]


def _raw(value: object) -> str:
    if not isinstance(value, str):
        raise NotOpaqueError("a content is joined to what is no text")
    return str.__str__(value)


def _refuse(name: str) -> Any:
    def refused(*_: object, **__: object) -> NoReturn:
        raise NotOpaqueError(f"a content's {name} is asked for")

    return refused


_KEPT = {"__class__", "__new__", "__init__", "__getattribute__", "__setattr__", "__delattr__", "__repr__", "__doc__",
         "__init_subclass__", "__subclasshook__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__sizeof__",
         "__dir__", "__getstate__"}  # fmt: skip
for _name in sorted({*dir(str), "__iter__", "__rmod__", "__rmul__", "__hash__"} - _KEPT):
    if _name not in vars(Printable) and callable(getattr(str, _name, len)):
        setattr(Printable, _name, _refuse(_name))
setattr(Content, "__hash__", Printable.__hash__)  # noqa: B010  (defining __eq__ had set it to None)


def placeholder(index: int) -> str:
    """Return the content that stands for any content of message `index`."""
    return _PLACEHOLDER.format(index)


def screen(tree: nodes.Template) -> str:
    """Say why notes about contents could be incomplete for a template, or return the empty string.

    Notes are taken by methods of the content. What Jinja or Python do with text behind their back must not
    occur: blocks that capture print, text joined and then read, methods of constants applied to contents.
    """
    blocks = (nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Include, nodes.Import,
              nodes.FromImport, nodes.Extends, nodes.Block)  # fmt: skip
    if holds(tree, *blocks, nodes.Mul, nodes.Pow):
        return "it captures, includes or multiplies text"
    macros = frozenset(macro.name for macro in tree.find_all(nodes.Macro))
    printed = _printed(tree, macros)
    checks = (
        ("it uses another filter", all(map(_safe_filter, tree.find_all(nodes.Filter)))),
        ("it uses another test", all(one.name in _TESTS for one in tree.find_all(nodes.Test))),
        ("it calls with values of the row", all(_safe_call(one, macros, printed) for one in tree.find_all(nodes.Call))),
        ("it looks for a value of the row in a text", all(map(_safe_compare, tree.find_all(nodes.Compare)))),
        ("it formats text", all(isinstance(one.right, nodes.Const) for one in tree.find_all(nodes.Mod))),
        ("it joins text and keeps it", all(id(one) in printed for one in tree.find_all(nodes.Concat))),
    )
    return next((why for why, holds_true in checks if not holds_true), "")


def _safe_filter(one: nodes.Filter) -> bool:
    """Tell whether a filter, and the test or filter that it may be given by name, is a known one."""
    given = {"select": (0, _TESTS), "reject": (0, _TESTS), "selectattr": (1, _TESTS), "rejectattr": (1, _TESTS),
             "map": (0, _FILTERS)}  # fmt: skip
    place, known = given.get(one.name, (0, None))
    named = one.args[place : place + 1] if known is not None else []
    return one.name in _FILTERS and all(isinstance(n, nodes.Const) and n.value in (known or ()) for n in named)


def _safe_call(call: nodes.Call, macros: frozenset[str], printed: set[int]) -> bool:
    if isinstance(call.node, nodes.Name):
        # What a macro prints comes back as plain text, whose contents nobody would notice being read.
        return call.node.name in _FUNCTIONS or (call.node.name in macros and id(call) in printed)
    arguments = [*call.args, *(one.value for one in call.kwargs), call.dyn_args, call.dyn_kwargs]
    constant = all(one is None or isinstance(one, nodes.Const) for one in arguments)
    return isinstance(call.node, nodes.Getattr) and constant


def _safe_compare(compare: nodes.Compare) -> bool:
    sides = [compare.expr, *(one.expr for one in compare.ops)]
    return all(
        one.op not in ("in", "notin")
        or isinstance(left, nodes.Const)
        or (isinstance(one.expr, nodes.List | nodes.Tuple) and holds_only_constants(one.expr))
        for left, one in zip(sides, compare.ops, strict=False)
    )


def holds_only_constants(items: nodes.List | nodes.Tuple) -> bool:
    """Tell whether a list or tuple of a template is written out."""
    return all(isinstance(one, nodes.Const) for one in items.items)


def _printed(tree: nodes.Template, macros: frozenset[str]) -> set[int]:
    """Return the joins (`~`) and calls of macros whose text goes straight into the print."""
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


class _Generation(Extension):
    """`{% generation %}` as what it prints: which characters it marks is the masks' business."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads the attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class OpaqueRenderer:
    """One template, compiled to be run with contents that it may only print; `reason` says why it may not."""

    def __init__(self, source: str, now: datetime, values: Mapping[str, Json]) -> None:
        """Screen and compile; whoever renders has rendered the same messages within the budget before."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters |= {"tojson": _to_json, "string": _to_string, "join": _to_joined}
        known: dict[str, Any] = environment.globals
        known["raise_exception"], known["strftime_now"] = raise_exception, clock(now)
        self.reason = screen(environment.parse(source))
        # Only then: compiling works out what is constant, such as a gigabyte of x, and no budget is charged for it.
        self._template = None if self.reason else environment.from_string(source)
        self._values = values

    def render(self, roles: Sequence[str]) -> OpaquePrint | None:
        """Print one placeholder per role; null if the print depends on more than their place."""
        if self._template is None:
            return None
        notes = Notes()
        messages: list[Message] = []
        for index, role in enumerate(roles):
            content = Content(placeholder(index))
            content.place, content.notes = index, notes
            messages.append({"role": role, "content": content})
        try:
            text = self._template.render(**{**self._values, "messages": messages, "tools": None})
        except (NotOpaqueError, TemplateError, TypeError, ValueError, AttributeError):
            return None
        contents = tuple(placeholder(index) for index in range(len(roles)))
        if any(text.count(one) != 1 for one in contents) or any(
            lit in one for lit in notes.literals for one in contents
        ):
            return None
        edges = {index: frozenset(characters) for index, characters in notes.edges.items()}
        return OpaquePrint(text, contents, frozenset(notes.literals), edges)


def _to_json(value: Json, **_: object) -> str:
    return json.dumps(_read(value), ensure_ascii=False)


def _read(value: Json) -> Json:
    """Return a value whose texts may be read; a content among them stops the proof."""
    if isinstance(value, Printable):
        raise NotOpaqueError("a content is written as JSON")
    if isinstance(value, Mapping):
        return {key: _read(one) for key, one in value.items()}
    return [_read(one) for one in value] if isinstance(value, list | tuple) else value


def _to_string(value: Json) -> str:
    return value if isinstance(value, str) else str(_read(value))


def _to_joined(values: Iterable[Json], separator: str = "", *_: object, **named: object) -> str:
    """Join as Jinja does; text with a content in it may still only be joined and printed."""
    if named:
        raise NotOpaqueError("attributes of messages are joined")
    parts = [_to_string(one) for one in values]
    text = _raw(separator).join(map(_raw, parts))
    return Printable(text) if any(isinstance(one, Printable) for one in parts) else text
