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
from dataclasses import field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from jinja2 import nodes
from numpy.typing import NDArray

from rowmill.core.arrays import compute_offsets
from rowmill.core.frozen_classes import frozen_dataclass
from rowmill.core.json import Json
from rowmill.schema.rows import Message

OwnTextPart = Literal["content", "reasoning", "call_name", "call_key", "call_value"]


@frozen_dataclass
class OwnedText:
    """One own text of a row, at `[start, end)` of the render; `call` is the index of its tool call, −1 without one."""

    start: int
    end: int
    message: int
    part: OwnTextPart
    call: int = -1


@frozen_dataclass
class CharacterOwnership:
    """Which characters of a render belong to which own text, proven by a render with private code points.

    `texts`: own texts rendered in full, in the order of the render, each at its first occurrence. `missing`: own texts
    rendered in part or not at all. `hidden`: own texts that could not be replaced by code points, so their positions
    are unknown.
    """

    texts: tuple[OwnedText, ...]
    missing: tuple[OwnedText, ...]
    hidden: tuple[tuple[OwnedText, str], ...]


@frozen_dataclass
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


class _OwnTextSource(NamedTuple):
    """One own text and its position in the conversation."""

    message: int
    part: OwnTextPart
    call: int
    text: str


@frozen_dataclass
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

    def hide(self, text: str) -> bool:
        """Return whether a text has such a literal and nothing beside it that would be covered."""
        pattern = self._patterns["tags"]
        if pattern is None or (not pattern.match(text) and not _KEPT_CHARACTERS[ord(text[:1] or " ")]):
            return False
        rest, count = pattern.subn("", text)
        return count > 0 and all(_KEPT_CHARACTERS[ord(character)] for character in rest)

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
        for index, message in enumerate(messages):
            self._collect_sources(index, message)
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
        self._new = [covered[bounds[i] : bounds[i + 1]] for i in range(len(texts))]
        self._next = 0
        self.messages = [self._rewrite_message(index, message) for index, message in enumerate(messages)]

    def _collect_sources(self, index: int, message: Message) -> None:
        is_model = message.get("role") in self._roles
        if is_model or self._attempt.others:
            for part, call, text in self._iterate_message_texts(index, message):
                self.sources.append(_OwnTextSource(index, part, call, text))

    def _iterate_message_texts(self, index: int, message: Message) -> Iterator[tuple[OwnTextPart, int, str]]:
        """Yield a message's own texts in the order in which `_rewrite_message` takes them."""
        seen_reasoning = False
        for key, value in message.items():
            if key == "content":
                yield from self._iterate_content_texts(index, value)
            elif key in self._keys and isinstance(value, str) and not seen_reasoning:
                seen_reasoning = True
                yield "reasoning", -1, value
            elif key == "tool_calls" and isinstance(value, list):
                for number, call in enumerate(value):
                    for part, text in _iterate_call_texts(call, self._attempt):
                        yield part, number, text

    def _iterate_content_texts(self, index: int, value: Json) -> Iterator[tuple[OwnTextPart, int, str]]:
        reasoning_length = self._inline_reasoning.get(index, 0)
        if reasoning_length and isinstance(value, str):
            yield "reasoning", -1, value[:reasoning_length]
            yield "content", -1, value[reasoning_length:]
            return
        for text in _iterate_contents(value):
            yield "content", -1, text

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
        held = compute_offsets(~kept)
        counts = np.diff(held[self._starts])
        for i in np.flatnonzero(counts == 0).tolist():
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

    def _take_next_text(self, _: str) -> str:
        """Return the next source's covered text; texts are taken in the order of `sources`."""
        number = self._numbers[self._next]
        self._next += 1
        return self._new[number]

    def _rewrite_message(self, index: int, message: Message) -> Message:
        if not (self._attempt.others or message.get("role") in self._roles):
            return message
        changed: Message = {}
        reasoning: str | None = None
        for key, value in message.items():
            new = value
            if key == "content":
                new = self._rewrite_content(index, value)
            elif key in self._keys and isinstance(value, str):
                reasoning = self._take_next_text(value) if reasoning is None else reasoning
                new = reasoning
            elif key == "tool_calls" and isinstance(value, list):
                new = [_rewrite_call(call, self._take_next_text, self._attempt) for call in value]
            changed[key] = new
        return changed

    def _rewrite_content(self, index: int, value: Json) -> Json:
        if isinstance(value, str):
            reasoning_length = self._inline_reasoning.get(index, 0)
            return (
                self._take_next_text(value[:reasoning_length]) + self._take_next_text(value[reasoning_length:])
                if reasoning_length
                else self._take_next_text(value)
            )
        if isinstance(value, list):
            return [
                {**part, "text": self._take_next_text(part["text"])} if _is_text_part(part) else part for part in value
            ]
        return value

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
            gaps = compute_offsets(is_gap)
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


# ── own texts of a message ──


def _is_text_part(part: Json) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _iterate_contents(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield from (part["text"] for part in value if _is_text_part(part))


def _iterate_call_texts(call: Json, attempt: CoverAttempt) -> Iterator[tuple[OwnTextPart, str]]:
    """Yield the own texts of a call in the order in which `_rewrite_call` takes them."""
    function = call.get("function") or {}
    if isinstance(function.get("name"), str):
        yield "call_name", function["name"]
    yield from _iterate_argument_texts(function.get("arguments"), attempt, 0)


def _iterate_argument_texts(value: Json, attempt: CoverAttempt, depth: int) -> Iterator[tuple[OwnTextPart, str]]:
    if isinstance(value, str):
        yield "call_value", value
    elif depth and not attempt.deep:
        return
    elif isinstance(value, dict):
        for key, item in value.items():
            if attempt.keys:
                yield "call_key", key
            yield from _iterate_argument_texts(item, attempt, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _iterate_argument_texts(item, attempt, depth + 1)


def _rewrite_call(call: Json, take: Callable[[str], str], attempt: CoverAttempt) -> Json:
    function: dict[str, Json] = dict(call.get("function") or {})
    if isinstance(function.get("name"), str):
        function["name"] = take(function["name"])
    if "arguments" in function:
        function["arguments"] = _rewrite_arguments(function["arguments"], take, attempt, 0)
    return {**call, "function": function}


def _rewrite_arguments(value: Json, take: Callable[[str], str], attempt: CoverAttempt, depth: int) -> Any:
    if isinstance(value, str):
        return take(value)
    if depth and not attempt.deep:
        return value
    if isinstance(value, dict):
        keys = attempt.keys
        return {(take(k) if keys else k): _rewrite_arguments(v, take, attempt, depth + 1) for k, v in value.items()}
    if isinstance(value, list):
        return [_rewrite_arguments(item, take, attempt, depth + 1) for item in value]
    return value
