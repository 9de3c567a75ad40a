r"""Moves reasoning to `reasoning_content`, from other keys, tags, typed parts or separate messages.

    "pre <think>r1</think> mid <think>r2</think> end"   →   content "pre mid end", reasoning "r1\n\nr2"
    {"type": "thinking", "thinking": [{"type": "text", "text": "r"}]}   →   reasoning "r"
    {"role": "assistant", "channel": "analysis", "content": "r"}        →   reasoning "r" of the next message

`think_mode: inline` keeps reasoning separate in the row, so that truncation can still shorten it.
`inline_reasoning` moves it into the content just before rendering.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, field_validator

from rowmill.core.config import Config
from rowmill.core.json import Json
from rowmill.schema.rows import REASONING_KEY, Message

INLINE_KEY = "inline_reasoning"
"""Number of characters at the start of an inlined message's content that are reasoning with its tags."""
REASONING_SEPARATOR = "\n\n"


class Reasoning(Config):
    """How reasoning is found, and how much of it is kept."""

    reasoning_keys: list[str] = Field(
        default=[
            *("reasoning", "reasoning_content", "thinking", "reason", "reasoning_details", "thinking_blocks"),
            *("think", "thought"),
        ]
    )
    """Keys of a message that may hold reasoning, as text or as a list of parts; the first that is not blank is used."""
    extract_think_tags: bool = True
    """Whether tagged reasoning is extracted from an assistant's content."""
    think_tags: list[Annotated[list[str], Field(min_length=2, max_length=2)]] = Field(default=[["<think>", "</think>"]])
    """Pairs of opening and closing tags; `inline` writes the first pair."""
    think_mode: Literal["auto", "keep", "drop", "inline"] = "auto"
    """keep: the template receives reasoning; drop: it is removed; inline: it is put, tagged, before the content; auto:
    keep, and inline for reasoning that stood in tags, if the template prints no reasoning."""
    think_max_tokens: Annotated[int, Field(ge=0)] | None = 0
    """Tokens to keep of each message's reasoning, from its start; 0 and null: all."""
    think_role: str | None = "think"
    """Role of messages that are only reasoning, which joins the next assistant message's; null: no such role."""

    @field_validator("think_tags")
    @classmethod
    def _check_tags(cls, pairs: list[list[str]]) -> list[list[str]]:
        tags = [tag for pair in pairs for tag in pair]
        if not pairs or "" in tags or len(set(tags)) < len(tags):
            raise ValueError("think_tags are ambiguous; expected one or more pairs of different, non-empty tags")
        return pairs


class ExtractedReasoning(NamedTuple):
    """Content without reasoning blocks, the blocks (stripped, also empty ones), the number of tags kept as text."""

    content: str
    blocks: list[str]
    literal: int


class _ThinkTag(NamedTuple):
    start: int
    end: int
    pair: int
    opens: bool


_FENCES = ("```", "~~~")
_AFTER_LONE_CLOSE = re.compile(r"[ \t\r]*(?:\n|\Z)")
_SPACE = re.compile(r"\s*")
_BACKTICKS = re.compile("`+")
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")
_QUOTES = frozenset("\"'`‘’“”‚„‹›«»「」『』《》")
_OPENING_BRACKETS = frozenset("([{<（【")
_EMPHASIS = frozenset("*_~|")


class ThinkTagReader:
    """Extracts tagged reasoning from content, left to right, outside code fences."""

    def __init__(self, pairs: Sequence[Sequence[str]]) -> None:
        self._pairs: list[tuple[str, str]] = [(pair[0], pair[1]) for pair in pairs]
        self._tags: dict[str, tuple[int, bool]] = {}
        for index, (opening, closing) in enumerate(self._pairs):
            self._tags |= {opening: (index, True), closing: (index, False)}
        # Longer tags first: of two tags with the same start, the longer one matches.
        words = [re.escape(tag) for tag in sorted(self._tags, key=len, reverse=True)]
        # Plain alternatives without groups or anchors let the regex engine skip to their first characters.
        self._marks: re.Pattern[str] = re.compile("|".join([*words, *_FENCES]))
        # The longest suffix of the closing tag that the opening tag contains: one search finds both.
        self.hints: tuple[str, ...] = tuple(
            {
                next((closing[start:] for start in range(len(closing)) if closing[start:] in opening), "")
                for opening, closing in self._pairs
            }
        )
        """Texts of which content with a tag has one: a cheap test."""

    def extract(self, content: str) -> ExtractedReasoning | None:
        """Split content into answer and reasoning; None if a block is never closed, as in truncated text."""
        kept: list[str] = []
        blocks: list[str] = []
        endless: set[int] = set()
        literal = position = after = 0
        while (tag := self._find_next_tag(content, after)) is not None:
            lone = not tag.opens and not blocks and not literal
            close = tag if lone else self._find_close(content, tag, endless)
            if close is None and tag.opens and _is_blank("".join([*kept, content[position : tag.start]])):
                return None
            if close is None or (lone and not self._ends_reasoning(content, tag)):
                literal += 1
                after = tag.end
                continue
            blocks.append(content[0 if lone else tag.end : close.start].strip())
            if not lone:
                kept.append(content[position : tag.start])
            space = _SPACE.match(content, close.end)
            position = after = close.end if space is None else space.end()
        if not blocks:
            return ExtractedReasoning(content, [], literal)
        return ExtractedReasoning("".join([*kept, content[position:]]).lstrip(), blocks, literal)

    def _ends_reasoning(self, content: str, tag: _ThinkTag) -> bool:
        """Return whether a closing tag without an opening one ends reasoning, rather than being mentioned in prose.

        It does at the end of a line. Before text, it does in R1's form, `reasoning</think>answer`: directly between the
        two, unquoted, outside code spans, in content without an opening tag.
        """
        if _AFTER_LONE_CLOSE.match(content, tag.end):
            return True
        opening = self._pairs[tag.pair][0]
        return opening not in content and not _is_set_off(content, tag) and not _is_in_code_span(content, tag.start)

    def _find_close(self, content: str, tag: _ThinkTag, endless: set[int]) -> _ThinkTag | None:
        """Find the end of a block outside code fences, or anywhere if all ends are inside fences.

        Reasoning often stops inside a code fence, and that fence must not swallow the answer. `endless` holds pairs
        without a closing tag, so that many open tags cost one search.
        """
        if not tag.opens or tag.pair in endless:
            return None
        closing = self._pairs[tag.pair][1]
        start = content.find(closing, tag.end)
        if start < 0:
            endless.add(tag.pair)
            return None
        return self._find_next_tag(content, tag.end, only=closing) or _ThinkTag(
            start, start + len(closing), tag.pair, opens=False
        )

    def _find_next_tag(self, content: str, position: int, only: str | None = None) -> _ThinkTag | None:
        """Return the next tag after a position, outside every code fence."""
        while (mark := self._marks.search(content, position)) is not None:
            word = mark[0]
            if word in _FENCES:
                position = _skip_fence(content, mark.start())
            elif only in (None, word):
                return _ThinkTag(mark.start(), mark.end(), *self._tags[word])
            else:
                position = mark.end()
        return None


def _is_set_off(content: str, tag: _ThinkTag) -> bool:
    """Return whether a tag is set off from its context by space, quotes, brackets or emphasis."""
    if content[tag.end].isspace():
        return True
    if tag.start == 0:
        return False
    before = content[tag.start - 1]
    if before in _EMPHASIS:
        return content[tag.end] == before
    return before.isspace() or before in _QUOTES or before in _OPENING_BRACKETS


def _is_in_code_span(content: str, position: int) -> bool:
    """Return whether a position is in an inline code span: between two equally long runs of backticks."""
    begin = max((found.end() for found in _BLANK_LINE.finditer(content, 0, position)), default=0)
    blank_line = _BLANK_LINE.search(content, position)
    end = len(content) if blank_line is None else blank_line.start()
    runs = [found.span() for found in _BACKTICKS.finditer(content, begin, end)]
    # For each run the index of the next one that is as long, in one pass from the end.
    nearest: dict[int, int] = {}
    closing: list[int | None] = [None] * len(runs)
    for index in range(len(runs) - 1, -1, -1):
        length = runs[index][1] - runs[index][0]
        closing[index] = nearest.get(length)
        nearest[length] = index
    index = 0
    while index < len(runs) and runs[index][0] < position:
        close = closing[index]
        if close is not None and runs[close][0] >= position:
            return True
        index = index + 1 if close is None else close + 1
    return False


def _skip_fence(content: str, start: int) -> int:
    """Return the end of a code fence; an unclosed one ends with the text, as in Markdown."""
    sign = content[start]
    end = start
    while end < len(content) and content[end] == sign:
        end += 1
    line_start = content.rfind("\n", 0, start) + 1
    line_end = content.find("\n", end)
    if start - line_start > 3 or content[line_start:start].strip(" "):
        return end
    if line_end < 0:
        return len(content)
    if sign == "`" and "`" in content[end:line_end]:
        return end
    closing = re.compile(rf"^ {{0,3}}{sign}{{{end - start},}}[ \t\r]*$", re.MULTILINE).search(content, line_end)
    return len(content) if closing is None else closing.end()


_APART = frozenset("reasoning reasoning_content reasoning_text thinking think thought summary_text".split())
"""Types of parts each of which is a piece of reasoning of its own; others are joined without a separator."""

REASONING_PARTS = frozenset({*_APART, "redacted_thinking", "redacted_reasoning"})
"""Types of parts that hold reasoning; a redacted one holds none that can be read."""

_THOUGHT_KEYS = (
    *("thinking", "reasoning", "reasoning_content", "think", "thought", "text", "value", "content", "summary"),
)
"""Keys of a part's reasoning, as Anthropic, Mistral, OpenAI and OpenRouter write them."""

_SEALED_KEYS = ("data", "encrypted_content", "signature")
"""Keys of a part whose reasoning is encrypted, or left out by the provider."""


def read_thoughts(value: Json) -> list[str] | None:
    """Return the pieces of reasoning in a text, a part, or a list of either; None if it is something else.

    Encrypted reasoning is none.
    """
    if type(value) is str:
        return [value]
    if type(value) is dict:
        held = [inner for key in _THOUGHT_KEYS if type(inner := value.get(key)) in (str, list, dict)]
        found = next((inner for inner in held if inner), None)
        if found is not None:
            return read_thoughts(found)
        return [] if held or any(type(value.get(key)) is str for key in _SEALED_KEYS) else None
    if type(value) is not list:
        return None
    texts: list[str] = []
    for piece in map(read_thoughts, value):
        if piece is None:
            return None
        texts += piece
    is_apart = any(type(one) is dict and one.get("type") in _APART for one in value)
    return texts if is_apart or not texts else ["".join(texts)]


def join_reasoning_parts(extras: Message, keys: Iterable[str]) -> Message:
    """Return the extras with reasoning that is a list or a mapping as its text, if no other key holds the same text."""
    for key in keys:
        value = extras.get(key)
        if type(value) is str or value is None or (texts := read_thoughts(value)) is None:
            continue
        text = join_reasoning(texts)
        rest = remove_keys(extras, [key])
        extras = rest if not text or text in rest.values() else {key: text, **rest}
    return extras


def move_reasoning_keys(extras: Message, keys: Sequence[str]) -> tuple[str, Message, int, int]:
    """Take the first reasoning that is not blank; blank ones are removed, others stay as extras.

    If `reasoning_content` already holds other reasoning, that moves to the key of the chosen one. The extras without
    the reasoning are returned too, how many were moved (0 or 1), and how many others stay.
    """
    if not extras:
        return "", {}, 0, 0
    found = [key for key in keys if type(extras.get(key)) is str]
    filled = [key for key in found if not _is_blank(extras[key])]
    if not filled:
        return "", remove_keys(extras, found), 0, 0
    winner, text = filled[0], extras[filled[0]]
    rest = remove_keys(extras, [key for key in found if key == winner or key not in filled])
    displaced = rest.pop(REASONING_KEY, None)
    if displaced is not None and displaced != text:
        rest[winner] = displaced
    return text, rest, int(winner != REASONING_KEY), len(filled) - 1


def remove_keys(message: Mapping[str, Json], keys: Iterable[str]) -> Message:
    """Return a message without some keys."""
    gone = set(keys)
    return {key: value for key, value in message.items() if key not in gone}


def join_reasoning(texts: Iterable[str]) -> str:
    """Join pieces of reasoning, without blank and repeated ones."""
    seen: dict[str, str] = {}
    for text in texts:
        if not _is_blank(text):
            seen.setdefault(text.strip(), text)
    return REASONING_SEPARATOR.join(seen.values())


def _is_blank(text: str) -> bool:
    return not text or text.isspace()


def limit_reasoning(
    messages: Sequence[Message], limit: int | None, cut: Callable[[str, int], str]
) -> tuple[Message, ...]:
    """Keep the first `limit` tokens of every message's reasoning (0, None: all); `cut` truncates text by tokens."""
    if not limit:
        return tuple(messages)
    return tuple({**m, REASONING_KEY: cut(m[REASONING_KEY], limit)} if m.get(REASONING_KEY) else m for m in messages)


def inline_reasoning(messages: Sequence[Message], tags: Sequence[str]) -> tuple[Message, ...]:
    """Put each message's reasoning, tagged, at the start of its content; `INLINE_KEY` holds its length."""
    inlined: list[Message] = []
    for message in messages:
        if not message.get(REASONING_KEY):
            inlined.append(message)
            continue
        head = f"{tags[0]}\n{message[REASONING_KEY]}\n{tags[1]}{REASONING_SEPARATOR}"
        others = remove_keys(message, [REASONING_KEY])
        inlined.append({**others, "content": head + message["content"], INLINE_KEY: len(head)})
    return tuple(inlined)
