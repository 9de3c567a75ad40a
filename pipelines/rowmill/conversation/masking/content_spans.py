"""Locate a row's own text in its render by searching each message's span.

What belongs here: `LocatedContent`, and the search for own text as it is, trimmed, or JSON-escaped. What does not:
rows that a search cannot decide, such as calls that are not rendered as JSON (`owned_spans.py` proves their
positions); the policy for text that is not rendered (`on_dropped`).

A search is cheap but can find the wrong occurrence, so its result is checked against the closed list of template text
(`template_frames.py`). If the template text around it is not on the list, the row's positions are proven instead.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rowmill.conversation.masking.template_frames import TemplateFrames
from rowmill.conversation.template_contract import OwnTextPart, RenderedConversation
from rowmill.core.json import Json
from rowmill.schema.rows import ContentSpan, Message, Span

SHORT_TEXT_CHARS = 8
"""Texts shorter than this occur elsewhere by chance, so their position must be confirmed."""

ARGUMENT_SEARCH_CHARS = 128
"""Characters after a call's name within which its arguments must begin."""

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


class ContentLocator:
    """Searches for the own text of one render; `decides` becomes False if only a proof can locate it."""

    __slots__ = ("_folded", "_frames", "_gaps", "_located", "_rendered", "_roles", "_spans", "_text", "decides")

    def __init__(self, rendered: RenderedConversation, frames: TemplateFrames, roles: frozenset[str]) -> None:
        self._rendered = rendered
        self._text = rendered.text
        self._frames = frames
        self._roles = roles
        self._located = LocatedContent()
        self.decides = True
        self._spans: dict[int, tuple[int, int]] = {}
        for span in rendered.spans:
            known = self._spans.get(span.message)
            # A message with several spans is searched from the start of the first to the end of the last.
            self._spans[span.message] = (known[0] if known else span.start, span.end)
        self._gaps: list[tuple[int, int]] | None = None
        self._folded: list[ContentSpan] = []

    def locate(self, messages: Sequence[Message]) -> LocatedContent:
        """Find the own text of every message."""
        for index, message in enumerate(messages):
            if message["role"] in self._roles:
                self._locate_assistant(index, message)
            elif "tool_calls" in message:
                self.decides = False
            else:
                self._locate_other_role(index, message)
            if not self.decides:
                break
        return self._located

    # ── other roles ──

    def _locate_other_role(self, index: int, message: Message) -> None:
        content = message.get("content")
        role = message["role"]
        start, end = self._spans.get(index, (0, 0))
        reasoning = message.get("reasoning_content")
        if type(reasoning) is str and reasoning and not reasoning.isspace():
            start = self._locate_reasoning(index, reasoning, start, end)
        if type(content) is not str or not content or content.isspace():
            return
        kind = get_content_kind(role, self._roles)
        if index in self._spans:
            found = self._find_after_header(content, role, start, end) or self._find_free(content, start, end)
            if found is not None:
                self._located.add(ContentSpan(*found, index, kind))
                return
        found = self._find_outside(content, index)
        if found is not None:
            piece = ContentSpan(*found, index, kind)
            self._folded.append(piece)
            self._located.add(piece)
        else:
            self._located.dropped.append((get_dropped_kind(message, "content", self._roles), index))

    def _find_after_header(self, content: str, role: str, start: int, end: int) -> tuple[int, int] | None:
        header = self._frames.headers.get(role)
        if len(content) >= SHORT_TEXT_CHARS or not header:
            return None
        at = self._text.find(header + content, start, end)
        return None if at < 0 else (at + len(header), at + len(header) + len(content))

    def _find_outside(self, content: str, index: int) -> tuple[int, int] | None:
        """Find text that the template prints outside its message: before all messages, or inside another one."""
        if self._gaps is None:
            self._gaps = list(_iterate_gaps(self._rendered.spans, len(self._text)))
        for start, end in self._gaps:
            found = self._find_free(content, start, end)
            if found is not None:
                return found
        for other in sorted(self._spans, key=lambda one: abs(one - index)):
            if other != index and self._is_other_role(other):
                found = self._find_free(content, *self._spans[other], self._located.own.get(other, ()))
                if found is not None:
                    return found
        return None

    def _find_free(self, content: str, start: int, end: int, own: Sequence[ContentSpan] = ()) -> tuple[int, int] | None:
        """Find an occurrence that overlaps neither folded text of other messages nor `own`, the span's own text.

        Two messages may have equal text; one occurrence in the render is not the text of both.
        """
        found = self._find(content, start, end)
        while found is not None:
            taken = [piece for piece in (*self._folded, *own) if piece.start < found[1] and found[0] < piece.end]
            if not taken:
                return found
            found = self._find(content, max(piece.end for piece in taken), end)
        return None

    def _is_other_role(self, index: int) -> bool:
        return self._rendered.messages[index].get("role") in ("user", "tool", "system", "developer")

    # ── the assistant ──

    def _locate_assistant(self, index: int, message: Message) -> None:
        span = self._spans.get(index)
        cursor, end = span if span is not None else (0, 0)
        content = message.get("content")
        text = content if type(content) is str else ""
        inline = message.get("inline_reasoning")
        reasoning = message.get("reasoning_content")
        if type(inline) is int and 0 < inline <= len(text):
            cursor = self._locate_reasoning(index, text[:inline], cursor, end)
            text = text[inline:]
        elif type(reasoning) is str and reasoning and not reasoning.isspace():
            cursor = self._locate_reasoning(index, reasoning, cursor, end)
        calls = self._rendered.messages[index].get("tool_calls")
        if text and not text.isspace():
            found = self._find_after_prefix(text, cursor, end) or self._find(text, cursor, end) if span else None
            if found is None or (calls and len(text) < SHORT_TEXT_CHARS):
                # A search cannot decide whether an answer is missing, or where a short text with calls is.
                self.decides = False
                self._located.dropped.append((get_dropped_kind(message, "content", self._roles), index))
                return
            self._located.add(ContentSpan(*found, index, "assistant"))
            cursor = found[1]
        for call in calls if type(calls) is list else ():
            cursor = self._locate_call(index, call, cursor, end)

    def _locate_call(self, index: int, call: Json, start: int, end: int) -> int:
        """Find a call whose arguments are rendered as JSON after its name."""
        function = call.get("function") or {}
        name, arguments = function.get("name"), function.get("arguments")
        at = self._text.find(name, start, end) if type(name) is str and name else -1
        if at < 0:
            self.decides = False
            return start
        stop = at + len(str(name))
        self._located.add(ContentSpan(at, stop, index, "tool_call"))
        if arguments is None or arguments in ({}, ""):
            return stop
        whole = str(arguments) if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        at = self._text.find(whole, stop, min(end, stop + len(whole) + ARGUMENT_SEARCH_CHARS))
        if at < 0:
            self.decides = False
            return stop
        self._located.add(ContentSpan(at, at + len(whole), index, "tool_call"))
        return at + len(whole)

    def _find_after_prefix(self, content: str, start: int, end: int) -> tuple[int, int] | None:
        if len(content) >= SHORT_TEXT_CHARS:
            return None
        for prefix in self._frames.prefixes:
            before = prefix.header + prefix.rest
            at = self._text.find(before + content, start, end) if before else -1
            if at >= 0:
                return at + len(before), at + len(before) + len(content)
        return None

    def _locate_reasoning(self, index: int, reasoning: str, start: int, end: int) -> int:
        found = self._find(reasoning, start, end) if start < end else None
        if len(reasoning) < SHORT_TEXT_CHARS:
            self.decides = False
        if found is None:
            self._located.dropped.append(("reasoning", index))
            return start
        self._located.add(ContentSpan(*found, index, "reasoning"))
        return found[1]

    # ── finding ──

    def _find(self, wanted: str, start: int, end: int) -> tuple[int, int] | None:
        """Find a text as it is, trimmed, or JSON-escaped."""
        text = self._text
        at = text.find(wanted, start, end)
        if at >= 0:
            return at, at + len(wanted)
        trimmed = wanted.strip()
        if len(trimmed) != len(wanted):
            if not trimmed:
                return None
            at = text.find(trimmed, start, end)
            if at >= 0:
                return at, at + len(trimmed)
        for ascii_only in (False, True):
            escaped = json.dumps(trimmed, ensure_ascii=ascii_only)[1:-1]
            if escaped != trimmed:
                at = text.find(escaped, start, end)
                if at >= 0:
                    return at, at + len(escaped)
        return None


def _iterate_gaps(spans: Sequence[Span], length: int) -> Iterator[tuple[int, int]]:
    position = 0
    for span in spans:
        if span.start > position:
            yield position, span.start
        position = span.end
    if position < length:
        yield position, length


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
