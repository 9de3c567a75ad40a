"""A row's own text in its render, by message and kind, and the own text that the template dropped.

What belongs here: `LocatedContent`, the kinds, and whether a tool is printed. What does not: locating it
(`owned_spans.py`), the policy for text that is not rendered (`on_dropped`).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rowmill.conversation.template_contract import OwnTextPart
from rowmill.core.json import Json
from rowmill.schema.rows import ContentSpan, Message

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
