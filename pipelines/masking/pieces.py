"""Where a row's own text stands in its print: content, reasoning, calls, results; and what is not there.

What belongs here: finding own text as printed (as it is, trimmed, or JSON-escaped). What does not: what
follows from a missing piece (`on_dropped`) or from its place (loss); both are decided in `Masker`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipelines.contract import Printed, TemplateContract
from pipelines.rows import Json, Message, Piece, Span

SHORT = 8
"""Characters under which a text may stand somewhere by chance, so that its place must be confirmed."""

_KINDS = {"system": "system", "user": "user", "tool": "tool_result"}
_DROPPED = {"system": "system", "user": "user", "tool": "tool_result"}


@dataclass(slots=True)
class Located:
    """Own text found, by message, and own text that was not printed."""

    own: dict[int, list[Piece]] = field(default_factory=dict[int, list[Piece]])
    """Each message's pieces, in the order in which they were looked for."""
    first: dict[int, int] = field(default_factory=dict[int, int])
    """Start of each message's first piece inside its own span."""
    last: dict[int, int] = field(default_factory=dict[int, int])
    """End of each message's last piece inside its own span."""
    reasoning: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    answer: dict[int, int] = field(default_factory=dict[int, int])
    """Start of each message's first piece that is not reasoning."""
    dropped: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def pieces(self) -> list[Piece]:
        """Return all pieces in the order of the text."""
        pieces = [piece for own in self.own.values() for piece in own]
        if any(map(_is_later, pieces, pieces[1:])):
            pieces.sort(key=_start)
        return pieces


def _start(piece: Piece) -> int:
    return piece.start


def _is_later(one: Piece, following: Piece) -> bool:
    return one.start > following.start


class Locator:
    """Finds the own text of one print."""

    __slots__ = ("_contract", "_folded", "_gaps", "_located", "_printed", "_spans", "_text")

    def __init__(self, printed: Printed, contract: TemplateContract) -> None:
        self._printed = printed
        self._text = printed.text
        self._contract = contract
        self._located = Located()
        self._spans: dict[int, tuple[int, int]] = {}
        for span in printed.spans:
            known = self._spans.get(span.message)
            # Several spans of one message: its text is looked for from the first one's start to the last one's end.
            self._spans[span.message] = (known[0] if known else span.start, span.end)
        self._gaps: list[tuple[int, int]] | None = None
        self._folded: list[Piece] = []

    def locate(self, messages: Sequence[Message], assistant_roles: frozenset[str], leads: Mapping[int, int]) -> Located:
        """Find every message's own text; `leads` says where an assistant's text can begin at the earliest."""
        adapted = self._printed.messages
        for index, message in enumerate(messages):
            if message["role"] in assistant_roles:
                self._assistant(index, message, adapted[index], leads.get(index))
            else:
                self._other(index, message)
                self._other_calls(index, message, adapted[index])
        return self._located

    def tools_missing(self, tools: Sequence[Json], assistants: Sequence[Span]) -> bool:
        """Tell whether the name of a tool is printed nowhere outside the assistant's own messages."""
        text = self._text
        for tool in tools:
            name = _tool_name(tool)
            at = text.find(name) if name else 0
            while at >= 0:
                inside = next((span for span in assistants if span.start <= at < span.end), None)
                if inside is None:
                    break
                at = text.find(name, inside.end)
            if at < 0:
                return True
        return False

    # ── other roles ──

    def _other(self, index: int, message: Message) -> None:
        content = message.get("content")
        if type(content) is not str or not content or content.isspace():
            return
        role = message["role"]
        kind = _KINDS.get(role, "user")
        span = self._spans.get(index)
        if span is not None:
            found = self._find_after_head(content, role, *span) or self._find_free(content, *span)
            if found is not None:
                self._add(index, kind, found)
                return
        found = self._find_outside(content, index)
        if found is not None:
            piece = Piece(*found, index, kind)
            self._folded.append(piece)
            self._located.own.setdefault(index, []).append(piece)
        else:
            self._located.dropped.append((_DROPPED.get(role, "unknown_role"), index))

    def _other_calls(self, index: int, message: Message, adapted: Message) -> None:
        """Find the calls and reasoning of a role that is not the model's: a planner's, say, in a dataset of agents."""
        start, end = self._spans.get(index, (0, 0))
        reasoning, calls = message.get("reasoning_content"), adapted.get("tool_calls")
        if type(reasoning) is str and reasoning and not reasoning.isspace():
            start = self._reasoning(index, reasoning, start, end)
        for call in calls if type(calls) is list else ():
            start = self._call(index, call, start, end)

    def _find_after_head(self, content: str, role: str, start: int, end: int) -> tuple[int, int] | None:
        if len(content) >= SHORT:
            return None
        for head in self._contract.heads.get(role, ()):
            at = start + len(head)
            if self._text.startswith(head, start) and self._text.startswith(content, at) and at + len(content) <= end:
                return at, at + len(content)
        return None

    def _find_outside(self, content: str, index: int) -> tuple[int, int] | None:
        """Find text that a template prints elsewhere: before the messages, or folded into another one."""
        if self._gaps is None:
            self._gaps = list(_gaps(self._printed.spans, len(self._text)))
        for start, end in self._gaps:
            found = self._find_free(content, start, end)
            if found is not None:
                return found
        for other in sorted(self._spans, key=lambda one: abs(one - index)):
            if other != index and self._is_no_assistant(other):
                found = self._find_free(content, *self._spans[other], self._located.own.get(other, ()))
                if found is not None:
                    return found
        return None

    def _find_free(self, content: str, start: int, end: int, own: Sequence[Piece] = ()) -> tuple[int, int] | None:
        """Find a text where no other message's stands: neither folded in here, nor in `own`, this span's own text.

        Two messages may say the same; what is printed once is not the text of both.
        """
        found = self._find(content, start, end)
        while found is not None:
            taken = [piece for piece in (*self._folded, *own) if piece.start < found[1] and found[0] < piece.end]
            if not taken:
                return found
            found = self._find(content, max(piece.end for piece in taken), end)
        return None

    def _is_no_assistant(self, index: int) -> bool:
        return self._printed.messages[index].get("role") in ("user", "tool", "system", "developer")

    # ── the assistant ──

    def _assistant(self, index: int, message: Message, adapted: Message, lead_end: int | None) -> None:
        span = self._spans.get(index)
        start, end = span if span is not None else (0, 0)
        cursor = lead_end if lead_end is not None else start
        content = message.get("content")
        text = content if type(content) is str else ""
        inline = message.get("inline_reasoning")
        reasoning = message.get("reasoning_content")
        if type(inline) is int and 0 < inline <= len(text):
            cursor = self._inline(index, text[:inline], cursor, end)
            text = text[inline:]
        elif type(reasoning) is str and reasoning and not reasoning.isspace():
            cursor = self._reasoning(index, reasoning, cursor, end)
        calls = adapted.get("tool_calls")
        if text and not text.isspace():
            found = self._find(text, cursor, end) if span else None
            if found is None and span is not None:
                found = self._find(text, start, end)
            if found is None:
                self._located.dropped.append(("text_beside_call" if calls else "assistant_text", index))
            else:
                self._add(index, "assistant", found)
                cursor = max(cursor, found[1])
        if type(calls) is list:
            for call in calls:
                cursor = self._call(index, call, cursor, end)

    def _reasoning(self, index: int, reasoning: str, start: int, end: int) -> int:
        found = self._find(reasoning, start, end)
        if found is not None and len(reasoning) < SHORT and not self._closes(found[1]):
            found = None
        if found is None:
            self._located.dropped.append(("reasoning", index))
            return start
        self._located.reasoning[index] = found
        self._add(index, "reasoning", found)
        return found[1]

    def _inline(self, index: int, block: str, start: int, end: int) -> int:
        """Find reasoning that stands with its tags at the head of content, if the template left it there."""
        found = self._find(block, start, end)
        if found is None:
            self._located.dropped.append(("reasoning", index))
            return start
        self._located.reasoning[index] = found
        self._add(index, "reasoning", found)
        return found[1]

    def _closes(self, at: int) -> bool:
        return any(close and self._text.startswith(close, at) for close in self._contract.reasoning_close)

    def _call(self, index: int, call: Json, start: int, end: int) -> int:
        function = call.get("function") or {}
        name = function.get("name")
        cursor = start
        if type(name) is str and name:
            found = self._find(name, start, end)
            if found is None:
                self._located.dropped.append(("call_name", index))
            else:
                self._add(index, "tool_call", found)
                cursor = found[1]
        arguments = function.get("arguments")
        if arguments is None or arguments in ({}, ""):
            return cursor
        whole = arguments if type(arguments) is str else json.dumps(arguments, ensure_ascii=False)
        at = self._text.find(whole, cursor, end)
        if at >= 0:
            self._add(index, "tool_call", (at, at + len(whole)))
            return at + len(whole)
        return self._leaves(index, arguments, start, cursor, end)

    def _leaves(self, index: int, arguments: Json, start: int, cursor: int, end: int) -> int:
        """Find arguments leaf by leaf, for templates that print them in a form of their own."""
        last = cursor
        if type(arguments) is str:
            try:
                arguments = json.loads(arguments)
            except ValueError:
                self._located.dropped.append(("call_arguments", index))
                return cursor
        for leaf in _leaves(arguments):
            found = next(
                (f for form in _forms(leaf) if (f := self._find(form, cursor, end) or self._find(form, start, end))),
                None,
            )
            if found is None:
                self._located.dropped.append(("call_arguments", index))
                return last
            self._add(index, "tool_call", found)
            last = max(last, found[1])
        return last

    # ── finding ──

    def _add(self, index: int, kind: str, found: tuple[int, int]) -> None:
        start, end = found
        located = self._located
        piece = Piece(start, end, index, kind)
        if index in located.own:
            located.own[index].append(piece)
            located.first[index] = min(located.first.get(index, start), start)
            located.last[index] = max(located.last.get(index, end), end)
        else:
            located.own[index] = [piece]
            located.first[index] = start
            located.last[index] = end
        if kind != "reasoning":
            known = located.answer.get(index)
            located.answer[index] = start if known is None else min(known, start)

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


def _gaps(spans: Sequence[Span], length: int) -> Iterator[tuple[int, int]]:
    position = 0
    for span in spans:
        if span.start > position:
            yield position, span.start
        position = span.end
    if position < length:
        yield position, length


def _tool_name(tool: Json) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _leaves(value: Json) -> Iterator[Json]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif value != "":
        yield value


def _forms(leaf: Json) -> Sequence[str]:
    """Return the ways in which templates print one value."""
    if isinstance(leaf, str):
        return (leaf,)
    return tuple(dict.fromkeys((json.dumps(leaf, ensure_ascii=False), str(leaf))))
