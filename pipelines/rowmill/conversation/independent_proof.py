"""Render with transformers' own function, and prove which message every character comes from.

What belongs here: the proof that the mask judge uses. What does not: the judgement (`mask_judge.py`). Nothing of
`masking/` or `rendering/` is imported, so that this check cannot share a defect with them.

Every letter and digit of the messages' own text is replaced by a private-use code point, and the conversation is
rendered again. If that render, mapped back, equals the plain one, every such character has a proven owner.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rowmill.core.frozen_classes import frozen_dataclass
from rowmill.core.json import Json
from rowmill.schema.rows import Message

TextPart = Literal["content", "reasoning", "call_name", "argument", "nested_argument", "tool_description"]


_HIDDEN_PART_SETS: tuple[frozenset[TextPart], ...] = (
    frozenset({"content", "reasoning", "call_name", "argument", "nested_argument", "tool_description"}),
    # The `repr` of a list, which some templates print, escapes private code points.
    frozenset({"content", "reasoning", "call_name", "argument", "tool_description"}),
    frozenset({"content", "reasoning", "argument", "tool_description"}),
    frozenset({"content", "reasoning", "argument"}),
    frozenset({"content", "argument"}),
    frozenset({"content", "reasoning"}),
    frozenset({"content"}),
)
"""Sets of parts to replace, tried in turn, because a template may compare a call's name, say, with a literal."""


_PRIVATE_BLOCKS = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


_PRIVATE_CHARACTERS = "".join(chr(point) for block in _PRIVATE_BLOCKS for point in block)
"""The code points that replace own characters; without enough of them a conversation cannot be proven."""


_ALPHANUMERIC_RUN = re.compile(r"[^\W_]+")
"""A run of characters to replace: those of `str.isalnum`."""


TOKEN_PATTERN = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Za-z_]{2,40}\]")
"""Text that looks like a control token."""


_END_WORDS = re.compile(r"end|eo[tsm]|/", re.IGNORECASE)


_START_WORDS = re.compile(r"<[^<>]*(?:start_of_turn|im_start|start_header)[^<>]*>|<\|start\|>", re.IGNORECASE)
"""Tokens that begin a turn."""


_CLOCK_CALL = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1""")


_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


_TOOLS_MESSAGE = -1
"""The message number of tool descriptions."""


class TransformersTemplate:
    """A chat template as transformers renders it."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], kwargs: Mapping[str, Json], now: datetime) -> None:
        self._text = _fix_clock(text, now)
        absent = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
        self._values: dict[str, Any] = {**absent, **special_tokens, **kwargs}
        self.eos_token = str(self._values["eos_token"])
        self._plain_ends: dict[str, str] = {}

    def render(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, *, add_generation_prompt: bool = False
    ) -> str | None:
        """Return the rendered text, or None if the template refuses the conversation."""
        from transformers.utils.chat_template_utils import render_jinja_template

        values: dict[str, Any] = {**self._values, "add_generation_prompt": add_generation_prompt}
        try:
            texts, _ = render_jinja_template(
                [list(messages)], tools=None if tools is None else list(tools), chat_template=self._text, **values
            )
        except Exception:  # noqa: BLE001  (a template may raise anything)
            return None
        return texts[0]

    def plain_end(self, tools: Sequence[Json] | None) -> str:
        """Return the text that ends an answer both before another turn and as the last turn; empty if they differ."""
        key = json.dumps(tools)
        if key not in self._plain_ends:
            self._plain_ends[key] = self._find_plain_end(tools)
        return self._plain_ends[key]

    def _find_plain_end(self, tools: Sequence[Json] | None) -> str:
        user = {"role": "user", "content": "What is it"}
        answer = {"role": "assistant", "content": "It is four"}
        last = prove_owners(self, [user, answer], tools)
        later = [{"role": "user", "content": "And then"}, {"role": "assistant", "content": "Nothing"}]
        earlier = prove_owners(self, [user, answer, *later], tools)
        if last is None or earlier is None or 1 not in last.last_code:
            return ""
        code = last.last_code[1]
        if code not in earlier.first_printing:
            return ""
        common = take_common_tokens(last.text_after(code), earlier.text_after(code))
        return self.without_header(common, tools).strip()

    def without_header(self, text: str, tools: Sequence[Json] | None) -> str:
        """Return text without the next header, which some templates print at the end of every render."""
        header = self.header_token(tools)
        text = text.partition(header)[0] if header else text
        start = _START_WORDS.search(text)
        return text[: start.start()] if start else text

    def header_token(self, tools: Sequence[Json] | None) -> str:
        """Return the first control token of the generation prompt that does not close the user's turn."""
        tokens = TOKEN_PATTERN.findall(self.user_prompt(tools))
        return next((token for token in tokens if not _END_WORDS.search(token)), "")

    def user_prompt(self, tools: Sequence[Json] | None) -> str:
        """Return the generation prompt after a single user message."""
        messages = [{"role": "user", "content": "What is it"}]
        return find_prompt_suffix(
            self.render(messages, tools), self.render(messages, tools, add_generation_prompt=True)
        )


def _fix_clock(text: str, now: datetime) -> str:
    """Replace transformers' clock, which shows the real time, by a table of the formats in the template."""
    formats = {form: now.strftime(form) for _, form in _CLOCK_CALL.findall(text)}
    # Jinja drops the first newline after a block, so the template's own white space is unchanged.
    return f"{{% set strftime_now = {json.dumps(formats)}.get %}}\n{text}" if formats else text


# ── ownership ──


@frozen_dataclass
class CharacterOwner:
    """The message, and the part of it, that a character comes from."""

    message: int
    part: TextPart


@dataclass(frozen=True)
class ProvenRender:
    """A render in which the owner of every letter and digit of own text is proven."""

    text: str
    codes: Sequence[int]
    """By position: the number of the own character printed there, −1 for template text."""
    owners: Sequence[CharacterOwner]
    """By number of the own character."""
    kept: frozenset[int] = frozenset()
    """Messages whose content was not replaced, because another message has the same and the template compares them."""

    @cached_property
    def first_printing(self) -> dict[int, int]:
        """Own character → first position at which it is printed."""
        codes, positions = np.unique(np.array(self.codes, dtype=np.int64), return_index=True)
        return {code: at for code, at in zip(codes.tolist(), positions.tolist(), strict=True) if code >= 0}

    @cached_property
    def first_position(self) -> dict[int, int]:
        """Message → first position of any of its own characters."""
        found: dict[int, int] = {}
        for code, at in self.first_printing.items():
            message = self.owners[code].message
            found[message] = min(at, found.get(message, at))
        return found

    @cached_property
    def last_code(self) -> dict[int, int]:
        """Message → the own character whose first printing comes last."""
        found: dict[int, int] = {}
        for code, _ in sorted(self.first_printing.items(), key=lambda one: one[1]):
            found[self.owners[code].message] = code
        return found

    def text_after(self, code: int) -> str:
        """Return the template text between an own character and the next one."""
        start = self.first_printing[code] + 1
        end = start
        while end < len(self.codes) and self.codes[end] < 0:
            end += 1
        return self.text[start:end]


class _TextHider:
    """Replaces own characters by private code points, and records the owner of each.

    Every own character is numbered, replaced or not, so that the numbers of a conversation and of its prefix agree.
    """

    def __init__(self, parts: frozenset[TextPart], kept: frozenset[str]) -> None:
        self._parts, self._kept = parts, kept
        self._known: dict[tuple[int, TextPart, str], str] = {}
        self.owners: list[CharacterOwner] = []
        self._originals: list[str] = []

    @property
    def originals(self) -> str:
        """The own characters by their number."""
        return "".join(self._originals)

    def hide(self, text: str, message: int, part: TextPart, where: str = "") -> str:
        key = (message, part, f"{where}\0{text}")
        if key not in self._known:
            owner = CharacterOwner(message, part)
            self._known[key] = _ALPHANUMERIC_RUN.sub(lambda run: self._replace_run(run.group(), owner), text)
        return self._known[key] if part in self._parts else text

    def _replace_run(self, run: str, owner: CharacterOwner) -> str:
        first = len(self.owners)
        self.owners += [owner] * len(run)
        self._originals.append(run)
        return _PRIVATE_CHARACTERS[first : len(self.owners)]

    def message(self, message: Message, index: int) -> Message:
        hidden = dict(message)
        content = self._hide_content(message.get("content"), index)
        hidden["content"] = message.get("content") if str(message.get("content")) in self._kept else content
        for key in _REASONING_KEYS:
            if isinstance(message.get(key), str):
                hidden[key] = self.hide(message[key], index, "reasoning")
        if isinstance(message.get("tool_calls"), list):
            calls = enumerate(message["tool_calls"])
            hidden["tool_calls"] = [self._hide_call(call, index, str(number)) for number, call in calls]
        return hidden

    def _hide_content(self, content: Json, index: int) -> Json:
        if isinstance(content, str):
            return self.hide(content, index, "content")
        if isinstance(content, list):
            return [
                {**part, "text": self.hide(part["text"], index, "content", str(number))} if "text" in part else part
                for number, part in enumerate(content)
            ]
        return content

    def _hide_call(self, call: Any, index: int, where: str) -> Any:
        function = call["function"]
        hidden = {**function, "name": self.hide(function["name"], index, "call_name", where)}
        hidden["arguments"] = self._hide_arguments(function.get("arguments"), index, where)
        return {**call, "function": hidden}

    def _hide_arguments(self, arguments: Json, index: int, where: str) -> Json:
        def hide(text: str, path: str) -> str:
            part: TextPart = "argument" if path.count("/") == 1 else "nested_argument"
            return self.hide(text, index, part, f"{where}{path}")

        if not isinstance(arguments, str):
            return _map_strings(arguments, hide)
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return hide(arguments, "/")
        same = json.dumps(parsed, ensure_ascii=False) == arguments
        return json.dumps(_map_strings(parsed, hide), ensure_ascii=False) if same else arguments

    def tools(self, tools: Sequence[Json] | None) -> list[Json] | None:
        def hide(text: str, path: str) -> str:
            is_description = path.endswith("/description")
            return self.hide(text, _TOOLS_MESSAGE, "tool_description", path) if is_description else text

        return None if tools is None else [_map_strings(tool, hide, f"/{i}") for i, tool in enumerate(tools)]


def _list_code_points(text: str) -> NDArray[np.int64]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)


def _decode_private_codes(hidden: str) -> NDArray[np.int64]:
    """Return for every character the number of the own character that it replaces, −1 for other characters."""
    points = _list_code_points(hidden)
    codes = np.full(len(points), -1)
    begin = 0
    for block in _PRIVATE_BLOCKS:
        inside = (points >= block.start) & (points < block.stop)
        codes[inside] = points[inside] - block.start + begin
        begin += len(block)
    return codes


def _map_strings(value: Json, change: Callable[[str, str], str], path: str = "") -> Json:
    match value:
        case str():
            return change(value, path)
        case dict():
            return {key: _map_strings(one, change, f"{path}/{key}") for key, one in value.items()}
        case list():
            return [_map_strings(one, change, f"{path}/{i}") for i, one in enumerate(value)]
        case _:
            return value


def prove_owners(
    template: TransformersTemplate, messages: Sequence[Message], tools: Sequence[Json] | None
) -> ProvenRender | None:
    """Render a conversation and prove the owners of its characters; None if the template prevents the proof."""
    plain = template.render(messages, tools)
    if plain is None:
        return None
    contents = [str(one.get("content")) for one in messages]
    repeated = frozenset(content for content in contents if contents.count(content) > 1)
    # A template may compare messages, and equal ones differ once their characters are replaced.
    attempts = [(parts, kept) for kept in dict.fromkeys((frozenset[str](), repeated)) for parts in _HIDDEN_PART_SETS]
    for parts, kept in attempts:
        hiding = _TextHider(parts, kept)
        offered = hiding.tools(tools)
        hidden = template.render([hiding.message(one, i) for i, one in enumerate(messages)], offered)
        if hidden is None:
            continue
        originals = _list_code_points(hiding.originals)
        if len(originals) > len(_PRIVATE_CHARACTERS):
            return None
        codes = _decode_private_codes(hidden)
        if len(codes) != len(plain) or codes.max(initial=-1) >= len(originals):
            continue
        back = _list_code_points(hidden)
        back[codes >= 0] = originals[codes[codes >= 0]]
        if np.array_equal(back, _list_code_points(plain)):
            unhidden = frozenset(i for i, one in enumerate(contents) if one in kept)
            return ProvenRender(plain, codes.tolist(), hiding.owners, unhidden)
    return None


def count_common_characters(left: str, right: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


def take_common_tokens(left: str, right: str) -> str:
    """Return the common prefix of two texts, without a control token that it would cut in one of them."""
    length = count_common_characters(left, right)
    for text in (left, right):
        for token in TOKEN_PATTERN.finditer(text):
            if token.start() < length < token.end():
                length = token.start()
    return left[:length]


def find_prompt_suffix(before: str | None, prompted: str | None) -> str:
    """Return the text that the generation prompt adds; empty if that is nothing or unknown."""
    if before is None or prompted is None:
        return ""
    length = count_common_characters(before, prompted)
    for token in TOKEN_PATTERN.finditer(prompted):
        if token.start() < length < token.end():
            length = token.start()
    return prompted[length:]
