r"""Prove which message every character of a render belongs to, by rendering the row's texts as private code points.

    own texts    Hi           Hello            each character gets a unique code point
    covered      ①②          ③④⑤⑥⑦
    render       <user>①②<end><assistant>③④⑤⑥⑦<end>
    mapped back  <user>Hi<end><assistant>Hello<end>      equal to the plain render: ownership is proven

A template cannot print a private code point by itself, so each one in the render shows where that character of that
text was printed. White space, quotes and backslashes are not covered, because templates trim and escape them; neither
are literals with which the template compares. An uncovered character belongs to the text whose characters surround it.
If the mapped-back text differs from the plain render, the template inspected covered text; the next attempt covers
less, and after the last one nothing is proven.

Rejected: searching the render for the row's texts. The search finds a short or repeated text at the wrong position;
a code point occurs only where its character was printed.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from jinja2 import nodes
from numpy.typing import NDArray

from rowmill.core.json import Json
from rowmill.schema.rows import ContentSpan, Message

if TYPE_CHECKING:
    from rowmill.conversation.renderer import Renderer

OwnTextPart = Literal["content", "reasoning", "call_name", "call_key", "call_value"]


@dataclass(frozen=True, slots=True)
class OwnedText:
    """One own text of a row, at `[start, end)` of the render; `call` is the index of its tool call, −1 without one."""

    start: int
    end: int
    message: int
    part: OwnTextPart
    call: int = -1


@dataclass(frozen=True, slots=True)
class CharacterOwnership:
    """Which characters of a render belong to which own text, proven by a render with private code points.

    `texts`: own texts rendered in full, in the order of the render, each at its first occurrence. `missing`: own texts
    rendered in part or not at all. `hidden`: own texts that could not be replaced by code points, so their positions
    are unknown.
    """

    texts: tuple[OwnedText, ...]
    missing: tuple[OwnedText, ...]
    hidden: tuple[tuple[OwnedText, str], ...]


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """The plain render of a conversation, and what its template was given.

    `messages`, `tools` and `kwargs` as passed to the template, with arguments, ids and reasoning adapted.
    """

    text: str
    messages: Sequence[Message] = ()
    tools: Sequence[Json] | None = None
    kwargs: Mapping[str, Json] = field(default_factory=dict[str, Json])
    inline_reasoning: Mapping[int, int] = field(default_factory=dict[int, int])
    """By message: how many characters at the start of its content are reasoning with its tags."""
    blocks: Sequence[tuple[int, int]] = ()
    """The ranges of `{% generation %}` blocks, sorted."""
    is_fast: bool = False
    """Whether the fast engine rendered it."""


_PRIVATE_PLANES = ((0xF0000, 0xFFFFE), (0x100000, 0x10FFFE))
"""The private-use planes of Unicode, without the non-characters at their ends."""
_PRIVATE_CODES = np.concatenate([np.arange(first, last, dtype=np.uint32) for first, last in _PRIVATE_PLANES])
_FIRST_PRIVATE_CODE = _PRIVATE_PLANES[0][0]
_PLANE_CODES = _PRIVATE_PLANES[0][1] - _PRIVATE_PLANES[0][0]
_COVERED_EDGE_CHARS = (256, 64, 16, 4)
"""Characters covered at each end of a text, tried in turn if the row has more characters than there are private code
points."""


def _make_kept_table() -> "NDArray[np.bool_]":
    table = np.zeros(0x110000, bool)
    table[:0x20] = True
    for character in '"\\':
        table[ord(character)] = True
    for code in range(0x3001):
        if chr(code).isspace():
            table[code] = True
    # A surrogate cannot be encoded next to other characters.
    table[0xD800:0xE000] = True
    return table


_KEPT_CHARACTERS = _make_kept_table()


_TextReplacer = Callable[[int, OwnTextPart, int, str], str]
"""From the message, the part, its call and the own text to the text in its place."""


class _OwnTextSource(NamedTuple):
    """One own text and its position in the conversation."""

    message: int
    part: OwnTextPart
    call: int
    text: str


@dataclass(frozen=True, slots=True)
class CoverAttempt:
    """Which text of a row is covered."""

    alike: bool = False
    """Give equal contents equal code points, for templates that compare messages."""
    literals: Literal["tags", "all"] = "tags"
    """Literals of the template that stay uncovered inside own text."""
    keys: bool = True
    """Cover the names of arguments."""
    deep: bool = True
    """Cover text inside lists and mappings, which a template may print as Python's `repr`, with code points escaped."""
    others: bool = True
    """Cover messages of other roles than the model's."""
    whole: bool = False
    """Cover texts that consist of quotes, backslashes and control characters only."""


COVER_ATTEMPTS = (
    CoverAttempt(whole=True),
    CoverAttempt(),
    CoverAttempt(deep=False),
    CoverAttempt(alike=True, literals="all", deep=False),
    CoverAttempt(alike=True, literals="all", keys=False, deep=False),
    CoverAttempt(alike=True, literals="all", keys=False, deep=False, others=False),
)


def list_compared_literals(tree: nodes.Template) -> tuple[str, ...]:
    """Return the string constants with which a template compares, splits or replaces, longest first."""
    found: set[str] = set()
    for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
        found |= {one.value for one in node.find_all(nodes.Const) if isinstance(one.value, str)}
    return tuple(sorted((one for one in found if one.strip()), key=lambda one: (-len(one), one)))


class TemplateLiterals:
    """The literals of a template that must stay uncovered inside own text."""

    def __init__(self, tree: nodes.Template) -> None:
        self.sorts = any(one.name in ("dictsort", "sort") for one in tree.find_all(nodes.Filter))
        """Whether the template sorts something, possibly the arguments of a call."""
        every = list_compared_literals(tree)
        tags = [one for one in every if not one.isalnum()]
        self._patterns = {"tags": _compile_alternatives(tags), "all": _compile_alternatives(every)}
        self.hidden = re.compile("(?:" + "|".join([*map(re.escape, tags), r'[\s"\\\x00-\x1f]']) + ")+")
        """Matches texts of which no character is covered."""

    def within(self, text: str, which: Literal["tags", "all"]) -> Iterator[tuple[int, int]]:
        """Yield the ranges of a text at which such a literal occurs."""
        pattern = self._patterns[which]
        if pattern is not None:
            for found in pattern.finditer(text):
                yield found.span()


def _compile_alternatives(texts: Sequence[str]) -> "re.Pattern[str] | None":
    return re.compile("|".join(map(re.escape, texts))) if texts else None


# ── covering ──


class CoveredConversation:
    """One conversation with its own text covered by private code points, and the proof from its render."""

    def __init__(
        self,
        rendered: RenderedConversation,
        roles: frozenset[str],
        reasoning_keys: Sequence[str],
        literals: TemplateLiterals,
        attempt: CoverAttempt,
    ) -> None:
        """Cover a conversation; `roles` are the model's roles, `reasoning_keys` the keys that hold reasoning.

        Private code points that the plain render contains are not used.
        """
        messages = rendered.messages
        self._inline_reasoning = rendered.inline_reasoning
        self._attempt = attempt
        self._keys = frozenset(reasoning_keys)
        self._roles = roles
        self.sources: list[_OwnTextSource] = []
        self._replace_texts(messages, self._note_source)
        self._numbers: list[int] = []
        texts = self._number_distinct_texts()
        self._joined = "".join(texts)
        self._starts = np.cumsum([0, *map(len, texts)])
        self._codes = _encode_code_points(self._joined)
        kept = _KEPT_CHARACTERS[self._codes]
        for start, end in literals.within(self._joined, attempt.literals):
            kept[start:end] = True
        if attempt.whole:
            self._cover_punctuation_texts(kept)
        if attempt.literals == "all":
            self._keep_numbers(texts, kept)
        self._text = rendered.text
        self._plain = plain = _encode_code_points(rendered.text)
        self._private = (
            _PRIVATE_CODES[~np.isin(_PRIVATE_CODES, plain[plain >= _FIRST_PRIVATE_CODE])]
            if int(plain.max(initial=0)) >= _FIRST_PRIVATE_CODE
            else _PRIVATE_CODES
        )
        self._covered = np.flatnonzero(~kept)
        for edge in _COVERED_EDGE_CHARS:
            if len(self._covered) > len(self._private):
                self._keep_middles(kept, edge)
                self._covered = np.flatnonzero(~kept)
        if len(self._covered) > len(self._private):
            self._covered = self._covered[:0]
        if literals.sorts:
            self._covered = self._order_covered(self._covered)
        changed = self._codes.copy()
        changed[self._covered] = self._private[: len(self._covered)]
        covered = changed.tobytes().decode("utf-32-le", "surrogatepass")
        bounds = self._starts.tolist()
        new = (covered[bounds[number] : bounds[number + 1]] for number in self._numbers)
        self.messages = self._replace_texts(messages, lambda *_: next(new))

    def _note_source(self, message: int, part: OwnTextPart, call: int, text: str) -> str:
        self.sources.append(_OwnTextSource(message, part, call, text))
        return text

    def _replace_texts(self, messages: Sequence[Message], replace: _TextReplacer) -> list[Message]:
        """Return the messages with every own text replaced; the order of the texts is always the same."""
        replaced: list[Message] = []
        for index, message in enumerate(messages):
            if not (self._attempt.others or message.get("role") in self._roles):
                replaced.append(message)
                continue
            changed = dict(message)
            reasoning: str | None = None
            for key, value in message.items():
                if key == "content":
                    changed[key] = self._replace_content(index, value, replace)
                elif key in self._keys and isinstance(value, str):
                    # Given under several keys, it is one text.
                    reasoning = replace(index, "reasoning", -1, value) if reasoning is None else reasoning
                    changed[key] = reasoning
                elif key == "tool_calls" and isinstance(value, list):
                    changed[key] = [
                        self._replace_call_texts(index, number, call, replace) for number, call in enumerate(value)
                    ]
            replaced.append(changed)
        return replaced

    def _replace_content(self, index: int, value: Json, replace: _TextReplacer) -> Json:
        if isinstance(value, str):
            length = self._inline_reasoning.get(index, 0)
            own = replace(index, "reasoning", -1, value[:length]) if length else ""
            return own + replace(index, "content", -1, value[length:])
        if isinstance(value, list):
            return [
                {**part, "text": replace(index, "content", -1, part["text"])}
                if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
                else part
                for part in value
            ]
        return value

    def _replace_call_texts(self, index: int, number: int, call: Json, replace: _TextReplacer) -> Json:
        function: dict[str, Json] = dict(call.get("function") or {})
        if isinstance(function.get("name"), str):
            function["name"] = replace(index, "call_name", number, function["name"])
        if "arguments" in function:
            function["arguments"] = self._replace_argument(index, number, function["arguments"], 0, replace)
        return {**call, "function": function}

    def _replace_argument(self, index: int, number: int, value: Json, depth: int, replace: _TextReplacer) -> Json:
        if isinstance(value, str):
            return replace(index, "call_value", number, value)
        if depth and not self._attempt.deep:
            return value
        if isinstance(value, dict):
            changed: dict[str, Json] = {}
            for key, item in value.items():
                new = replace(index, "call_key", number, key) if self._attempt.keys else key
                changed[new] = self._replace_argument(index, number, item, depth + 1, replace)
            return changed
        if isinstance(value, list):
            return [self._replace_argument(index, number, item, depth + 1, replace) for item in value]
        return value

    def _number_distinct_texts(self) -> list[str]:
        """Return the texts that get separate code points, and store the number of each source's text.

        Only contents share code points: two calls of the same function must stay distinguishable.
        """
        texts: list[str] = []
        known: dict[tuple[str, OwnTextPart], int] = {}
        for source in self.sources:
            key = (source.text, source.part)
            if self._attempt.alike and source.part == "content" and key in known:
                self._numbers.append(known[key])
                continue
            known[key] = len(texts)
            self._numbers.append(len(texts))
            texts.append(source.text)
        return texts

    def _order_covered(self, covered: "NDArray[np.int64]") -> "NDArray[np.int64]":
        """Return the covered positions in the order in which they get code points: keys of arguments first, sorted.

        Then a template that sorts arguments by key puts the covered keys in the same order.
        """
        keys = [i for i, source in enumerate(self.sources) if source.part == "call_key"]
        if len(keys) < 2:
            return covered
        rank = np.full(len(self._starts) - 1, len(keys), np.int64)
        ordered = sorted(keys, key=lambda i: (self.sources[i].text.lower(), i))
        rank[[self._numbers[i] for i in ordered]] = np.arange(len(keys))
        texts = np.searchsorted(self._starts, covered, "right") - 1
        return covered[np.argsort(rank[texts], kind="stable")]

    def _cover_punctuation_texts(self, kept: "NDArray[np.bool_]") -> None:
        """Cover texts of only quotes, backslashes and control characters; few templates escape those."""
        # The last place stands for texts of no character at the end.
        if len(self._starts) < 2:
            return
        is_covered = np.logical_or.reduceat(np.append(~kept, False), self._starts[:-1])
        for i in np.flatnonzero(~is_covered).tolist():
            start, end = int(self._starts[i]), int(self._starts[i + 1])
            text = self._joined[start:end]
            if text.strip() and not any(map(str.isprintable, text.replace('"', "").replace("\\", ""))):
                kept[start:end] = [character.isspace() for character in text]

    def _keep_numbers(self, texts: Sequence[str], kept: "NDArray[np.bool_]") -> None:
        """Leave texts without a letter uncovered: a template may parse them as numbers."""
        for i, text in enumerate(texts):
            if not any(map(str.isalpha, text)):
                kept[self._starts[i] : self._starts[i + 1]] = True

    def _keep_middles(self, kept: "NDArray[np.bool_]", edge: int) -> None:
        for start, end in zip(self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True):
            if end - start > 2 * edge:
                kept[start + edge : end - edge] = True

    # ── mapping back ──

    def prove(self, covered: str) -> CharacterOwnership | None:
        """Return the positions of own texts in the plain render; None if the mapped-back render differs from it."""
        codes, wanted = _encode_code_points(covered), self._plain
        if len(codes) != len(wanted):
            return None
        is_own = codes >= _FIRST_PRIVATE_CODE
        if self._private is not _PRIVATE_CODES:
            is_own &= np.isin(codes, self._private)
        found = codes[is_own]
        # Without the second plane the codes are the numbers, but for their beginning.
        is_plain = self._private is _PRIVATE_CODES and len(self._covered) <= _PLANE_CODES
        numbers = (found - _FIRST_PRIVATE_CODE).astype(np.int64) if is_plain else np.searchsorted(self._private, found)
        if len(numbers) and int(numbers.max()) >= len(self._covered):
            return None
        origins = self._covered[numbers]
        codes[is_own] = self._codes[origins]
        if not np.array_equal(codes, wanted):
            return None
        return self._assign_places(self._locate_texts(np.flatnonzero(is_own), origins, self._text))

    def _locate_texts(
        self, places: "NDArray[np.int64]", origins: "NDArray[np.int64]", plain: str
    ) -> dict[int, list[tuple[int, int]]]:
        """Return by number of text where all of its covered characters are printed, in the order of the render."""
        owners = np.repeat(np.arange(len(self._starts) - 1), np.diff(self._starts))
        counts = self._counts = np.bincount(owners[self._covered], minlength=len(self._starts))
        printed: dict[int, list[tuple[int, int]]] = {}
        if len(places):
            texts, steps = owners[origins], np.diff(origins)
            is_break = (np.diff(texts) != 0) | (steps <= 0)
            # The render has more or fewer characters between two own characters than the text has.
            is_gap = (np.diff(places) != steps) & ~is_break
            gaps = np.append(0, np.cumsum(is_gap))
            firsts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(is_break) + 1))
            lasts = np.append(firsts[1:], len(places)) - 1
            whole = np.flatnonzero(lasts - firsts + 1 == counts[texts[firsts]])
            firsts, lasts = firsts[whole], lasts[whole]
            rows = zip(
                texts[firsts].tolist(), places[firsts].tolist(), places[lasts].tolist(), origins[firsts].tolist(),
                origins[lasts].tolist(), (gaps[lasts] - gaps[firsts]).tolist(), firsts.tolist(), lasts.tolist(),
                strict=True,
            )  # fmt: skip
            starts = self._starts.tolist()
            for number, position, last_position, origin, last_origin, gap_count, first, last in rows:
                if gap_count and not self._is_escaped(places[first : last + 1], origins[first : last + 1], plain):
                    continue
                start = _extend_match(self._joined[starts[number] : origin], plain, position, backwards=True)
                end = _extend_match(
                    self._joined[last_origin + 1 : starts[number + 1]], plain, last_position + 1, backwards=False
                )
                if start is not None and end is not None:
                    printed.setdefault(number, []).append((start, end))
        return printed

    def _is_escaped(self, places: "NDArray[np.int64]", origins: "NDArray[np.int64]", plain: str) -> bool:
        """Return whether only the text itself, plain or escaped, is printed between its covered characters."""
        gaps = np.flatnonzero(np.diff(places) != np.diff(origins))
        rows = zip(
            places[gaps].tolist(), places[gaps + 1].tolist(), origins[gaps].tolist(), origins[gaps + 1].tolist(),
            strict=True,
        )  # fmt: skip
        return all(
            _is_printed_form(plain[position + 1 : next_position], self._joined[origin + 1 : next_origin])
            for position, next_position, origin, next_origin in rows
        )

    def _assign_places(self, printed: Mapping[int, list[tuple[int, int]]]) -> CharacterOwnership:
        """Assign the places of a text to the messages that have it, in order."""
        found: list[OwnedText] = []
        missing: list[OwnedText] = []
        hidden: list[tuple[OwnedText, str]] = []
        taken: dict[int, int] = {}
        for i, source in enumerate(self.sources):
            if not source.text.strip():
                continue
            number = self._numbers[i]
            places = printed.get(number, [])
            turn = taken.get(number, 0)
            if turn < len(places):
                taken[number] = turn + 1
                found.append(OwnedText(*places[turn], source.message, source.part, source.call))
            elif self._counts[number]:
                missing.append(OwnedText(0, 0, source.message, source.part, source.call))
            else:
                hidden.append((OwnedText(0, 0, source.message, source.part, source.call), source.text))
        found.sort(key=_get_text_position)
        return CharacterOwnership(tuple(found), tuple(missing), tuple(hidden))


def _get_text_position(one: OwnedText) -> tuple[int, int]:
    return one.start, one.end


def _encode_code_points(text: str) -> "NDArray[np.uint32]":
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).copy()


@lru_cache(maxsize=4096)
def _is_printed_form(rendered: str, own: str) -> bool:
    """Return whether `rendered` is a text as it is or JSON-escaped."""
    return rendered in (own, json.dumps(own, ensure_ascii=False)[1:-1], json.dumps(own)[1:-1])


def _extend_match(text: str, plain: str, position: int, *, backwards: bool) -> int | None:
    """Return how far the uncovered characters at an end of a text reach in the render; None if it lacks them."""
    if not text:
        return position
    trimmed = text.lstrip() if backwards else text.rstrip()
    for one in (text, trimmed):
        for form in (one, json.dumps(one, ensure_ascii=False)[1:-1], json.dumps(one)[1:-1]):
            if backwards and plain.endswith(form, 0, position):
                return position - len(form)
            if not backwards and plain.startswith(form, position):
                return position + len(form)
    return None


# ── own text by message and kind ──


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
