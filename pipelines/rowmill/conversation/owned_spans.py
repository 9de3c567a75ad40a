"""A row's own text in its render, by message and kind, from the proven ownership of its characters.

A call's arguments are one piece if the template prints them as JSON, so that their braces do not count as template
text. Otherwise every name and value is a piece, and numbers, booleans and nulls are searched between their neighbours.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rowmill.conversation.character_ownership import CharacterOwnership, OwnedText, OwnTextPart, RenderedConversation
from rowmill.core.json import Json
from rowmill.schema.rows import ContentSpan, Message

if TYPE_CHECKING:
    from rowmill.conversation.renderer import Renderer

_CONTENT_KINDS = {"system": "system", "user": "user", "tool": "tool_result"}


def get_content_kind(role: str, roles: frozenset[str]) -> str:
    """Return the kind of a message's content."""
    return "assistant" if role in roles else _CONTENT_KINDS.get(role, "user")


def get_dropped_kind(message: Message, part: OwnTextPart, roles: frozenset[str]) -> str:
    """Return the `DroppedKind` under which a missing own text is counted."""
    if part != "content":
        return {"reasoning": "reasoning", "call_name": "call_name"}.get(part, "call_arguments")
    if message["role"] in roles:
        return "text_beside_call" if message.get("tool_calls") else "assistant_text"
    return _CONTENT_KINDS.get(message["role"], "unknown_role")


@dataclass(slots=True)
class LocatedContent:
    """The own text found in a render, by message, and the own text that the template dropped."""

    own: dict[int, list[ContentSpan]] = field(default_factory=dict[int, list[ContentSpan]])
    """Each message's pieces; in the order of the text after `sort`."""
    dropped: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """(kind, message index) of every own text that is not rendered."""
    unproven: list[ContentSpan] = field(default_factory=list[ContentSpan])
    """The pieces of texts that could not be covered; they lie between the proven pieces of other messages."""

    def add(self, piece: ContentSpan) -> None:
        """Add a piece to its message."""
        self.own.setdefault(piece.message, []).append(piece)

    def sort(self) -> None:
        """Sort each message's pieces in the order of the text."""
        for pieces in self.own.values():
            pieces.sort(key=_get_content_start)

    def iterate_spans(self) -> Iterator[ContentSpan]:
        """Yield all pieces, message by message."""
        for pieces in self.own.values():
            yield from pieces

    def pieces(self) -> list[ContentSpan]:
        """Return all pieces in the order of the text."""
        pieces = list(self.iterate_spans())
        if any(map(_is_later, pieces, pieces[1:])):
            pieces.sort(key=_get_content_start)
        return pieces

    def reasoning(self, message: int) -> tuple[int, int] | None:
        """Return the range of a message's reasoning."""
        found = [p for p in self.own.get(message, ()) if p.kind == "reasoning"]
        return (found[0].start, found[-1].end) if found else None

    def answer(self, message: int) -> int | None:
        """Return the start of a message's first piece other than reasoning."""
        return min((p.start for p in self.own.get(message, ()) if p.kind != "reasoning"), default=None)


def group_by_message(pieces: Sequence[ContentSpan]) -> list[list[ContentSpan]]:
    """Group consecutive pieces of the same message."""
    groups: list[list[ContentSpan]] = []
    for piece in pieces:
        if groups and groups[-1][-1].message == piece.message:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def _get_content_start(piece: ContentSpan) -> int:
    return piece.start


def _is_later(one: ContentSpan, following: ContentSpan) -> bool:
    return one.start > following.start


def is_tool_missing(tools: Sequence[Json], text: str, models: Sequence[tuple[int, int]]) -> bool:
    """Return whether some tool's name occurs nowhere outside `models`, the sorted ranges of the model's messages."""
    for tool in tools:
        name = _get_tool_name(tool)
        at = text.find(name) if name else 0
        while at >= 0:
            inside = next((end for start, end in models if start <= at < end), None)
            if inside is None:
                break
            at = text.find(name, inside)
        if at < 0:
            return True
    return False


def _get_tool_name(tool: Json) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def list_leaf_forms(leaf: Json) -> Sequence[str]:
    """Return the forms in which templates print one value."""
    if isinstance(leaf, str):
        return (leaf,)
    return tuple(dict.fromkeys((json.dumps(leaf, ensure_ascii=False), str(leaf))))


# ── from the proof ──


_ARGUMENT_REACH_CHARS = 256
"""Characters after a call's name within which arguments without any string must begin."""


def locate_own_text(
    renderer: "Renderer", rendered: RenderedConversation, messages: Sequence[Message], roles: frozenset[str]
) -> LocatedContent | None:
    """Return the own text of a rendered conversation; None if the template prevents the proof.

    `messages` are the canonical ones, `roles` the model's roles.
    """
    proof = renderer.prove_ownership(rendered, roles)
    if proof is None:
        return None
    return _locate_proven_content(proof, messages, rendered.messages, rendered.text, roles)


def _locate_proven_content(
    ownership: CharacterOwnership,
    messages: Sequence[Message],
    adapted: Sequence[Message],
    text: str,
    roles: frozenset[str],
) -> LocatedContent:
    """Return the pieces of a render; `adapted` are the messages passed to the template, `roles` the model's roles."""
    located = LocatedContent()
    by_call: dict[tuple[int, int], list[OwnedText]] = {}
    for one in ownership.texts:
        if one.call >= 0:
            by_call.setdefault((one.message, one.call), []).append(one)
        else:
            kind = "reasoning" if one.part == "reasoning" else get_content_kind(messages[one.message]["role"], roles)
            located.add(ContentSpan(one.start, one.end, one.message, kind))
    missing = (
        (get_dropped_kind(messages[one.message], one.part, roles), one.message, one.call) for one in ownership.missing
    )
    located.dropped += [(kind, index) for kind, index, _ in dict.fromkeys(missing)]
    for index, message in enumerate(adapted):
        calls = message.get("tool_calls")
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            _add_call_content(located, index, call, by_call.get((index, number), []), ownership.texts, text)
    for one, own in ownership.hidden:
        # Text of other roles does not train, and no position is better than a wrong one.
        if messages[one.message]["role"] in roles:
            _add_hidden_content(located, one, own, messages, text, roles)
    located.sort()
    return located


def _add_call_content(
    located: LocatedContent, index: int, call: Json, texts: Sequence[OwnedText], every: Sequence[OwnedText], text: str
) -> None:
    names = [one for one in texts if one.part == "call_name"]
    values = [one for one in texts if one.part != "call_name"]
    for name in names:
        located.add(ContentSpan(name.start, name.end, index, "tool_call"))
    arguments = (call.get("function") or {}).get("arguments")
    whole = _find_whole_arguments(arguments, names, values, text)
    if whole is not None:
        located.add(ContentSpan(*whole, index, "tool_call"))
        return
    for value in values:
        located.add(ContentSpan(value.start, value.end, index, "tool_call"))
    if isinstance(arguments, dict):
        _add_scalar_content(located, index, arguments, texts, every, text)


def _find_whole_arguments(
    arguments: Json, names: Sequence[OwnedText], values: Sequence[OwnedText], text: str
) -> tuple[int, int] | None:
    """Return the range of a call's arguments as JSON, if it contains all of their proven texts."""
    if not isinstance(arguments, (dict, list)) or not arguments:
        return None
    name_end = max((name.end for name in names), default=0)
    for form in _list_json_forms(arguments):
        if values:
            start = max(0, values[0].end - len(form))
            limit = min(value.start for value in values) + len(form)
        else:
            start, limit = name_end, name_end + _ARGUMENT_REACH_CHARS + len(form)
        at = text.find(form, start, limit)
        if at >= 0 and all(at <= value.start and value.end <= at + len(form) for value in values):
            return at, at + len(form)
    return None


def _list_json_forms(value: Json) -> Iterator[str]:
    yield json.dumps(value, ensure_ascii=False)
    yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    yield json.dumps(value, ensure_ascii=False, indent=4)
    yield json.dumps(value, ensure_ascii=False, indent=2)


def _add_scalar_content(
    located: LocatedContent,
    index: int,
    arguments: Mapping[str, Json],
    texts: Sequence[OwnedText],
    every: Sequence[OwnedText],
    text: str,
) -> None:
    """Find arguments other than strings between their key, or the call's name, and the row's next own text."""
    keys = {text[one.start : one.end]: one.end for one in texts if one.part == "call_key"}
    proven = {text[one.start : one.end] for one in texts if one.part != "call_name"}
    first = max((one.end for one in texts if one.part == "call_name"), default=0)
    for key, value in arguments.items():
        inside = list(_iterate_texts(value))
        if isinstance(value, str) or value in ({}, []) or not proven.isdisjoint(inside):
            continue
        after = keys.get(key, first)
        until = next((one.start for one in every if one.start >= after), len(text))
        found = _find_printed_value(value, text, after, until)
        if found is None:
            located.dropped.append(("call_arguments", index))
        elif key in keys:
            located.add(ContentSpan(*found, index, "tool_call"))


def _find_printed_value(value: Json, text: str, after: int, until: int) -> tuple[int, int] | None:
    """Find a value as JSON or as Python's `repr`, or all of its parts in order."""
    if not isinstance(value, (dict, list)):
        places = [(at, at + len(form)) for form in list_leaf_forms(value) if (at := text.find(form, after, until)) >= 0]
        return min(places, default=None)
    forms = (*_list_json_forms(value), str(value))
    places = [(at, at + len(form)) for form in forms if (at := text.find(form, after, until)) >= 0]
    if places:
        return min(places)
    position = after
    found: list[tuple[int, int]] = []
    for leaf in _iterate_leaves(value):
        rendered = _find_printed_value(leaf, text, position, until)
        if rendered is None:
            return None
        found.append(rendered)
        position = rendered[1]
    return (found[0][0], position) if found else None


def _iterate_leaves(value: Json) -> Iterator[Json]:
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _iterate_leaves(item)
    elif value != "":
        yield value


def _iterate_texts(value: Json) -> Iterator[str]:
    """Yield the strings and keys inside a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _iterate_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _iterate_texts(item)


def _add_hidden_content(
    located: LocatedContent, one: OwnedText, own: str, messages: Sequence[Message], text: str, roles: frozenset[str]
) -> None:
    """Find a text that could not be replaced by code points, outside all other own text.

    The template text around it is checked later, against the closed list.
    """
    located.sort()
    role = messages[one.message]["role"]
    before = max((p.end for p in located.iterate_spans() if p.message < one.message), default=0)
    after = min((p.start for p in located.iterate_spans() if p.message > one.message), default=len(text))
    kind = "tool_call" if one.call >= 0 else "reasoning" if one.part == "reasoning" else get_content_kind(role, roles)
    for form in dict.fromkeys((own, own.strip(), json.dumps(own.strip(), ensure_ascii=False)[1:-1])):
        at = text.rfind(form, before, after)
        if at >= 0 and not any(p.start < at + len(form) and at < p.end for p in located.iterate_spans()):
            piece = ContentSpan(at, at + len(form), one.message, kind)
            located.add(piece)
            located.unproven.append(piece)
            return
    located.dropped.append((get_dropped_kind(messages[one.message], one.part, roles), one.message))
