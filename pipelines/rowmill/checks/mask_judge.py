"""Check one loss mask without the code that made it: find characters that train or do not train by mistake.

Nothing of `conversation/` is imported, so that this check cannot share a defect with it: the row is rendered by an
environment set up here as transformers', or by transformers' own function, and every letter and digit of the messages'
own text is replaced by a private code point in a second render. If that render, mapped back, equals the plain one,
every such character has a proven owner. What must train follows from where the owners change:

    <s>[INST] What is it? [/INST] It is four.</s>[INST] …
              └─ message 0 ─┘     └message 1┘
       prompt: nothing trains ───┘ └─own text trains─┘└─ the end of turn trains, nothing after it

Punctuation has no proven owner; between two letters of one message it belongs to that message.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise, takewhile
from types import CodeType
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from numpy.typing import NDArray

from rowmill.core.json import Json
from rowmill.core.template_sandbox import Sandbox, estimate_printed_size
from rowmill.schema.rows import Message

FoundT = TypeVar("FoundT")
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

_PRIVATE_CHARACTERS = (
    np.concatenate([np.arange(block.start, block.stop, dtype="<u4") for block in _PRIVATE_BLOCKS])
    .tobytes()
    .decode("utf-32-le")
)
"""The code points that replace own characters; without enough of them a conversation cannot be proven."""

_ALPHANUMERIC_RUN = re.compile(r"([^\W_]+)")
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


def _make_sandbox() -> Sandbox:
    sandbox = Sandbox([GenerationBlock])
    names: dict[str, Any] = sandbox.globals
    names["raise_exception"] = _refuse
    sandbox.filters["tojson"] = _to_json
    return sandbox


@lru_cache(maxsize=16)
def compile_template(text: str) -> CodeType:
    """Compile a template, for datasets that differ in other options, later builds, and processes forked later."""
    return _make_sandbox().compile_charged(text)


class JinjaTemplate:
    """A chat template in a sandbox that is set up as transformers sets up its own.

    What it finds out about template text around answers it remembers, so answers that have the same text before or
    after them, in rows with tools or in rows without, are judged alike: a tenth of the time on long dialogues.
    """

    remembers = True

    def __init__(self, text: str, special_tokens: Mapping[str, str], kwargs: Mapping[str, Json], now: datetime) -> None:
        """Fix the values that a template may read."""
        # Transformers' clock shows the real time, so a table of the formats in the template replaces it. Jinja drops
        # the first newline after a block, so the template's own white space is unchanged.
        formats = {form: now.strftime(form) for _, form in _CLOCK_CALL.findall(text)}
        self._text = f"{{% set strftime_now = {json.dumps(formats)}.get %}}\n{text}" if formats else text
        absent = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
        self._values: dict[str, Any] = {**absent, **special_tokens, **kwargs}
        self.eos_token = str(self._values["eos_token"])
        self._plain_ends: dict[str, str] = {}
        self._user_prompts: dict[str, str] = {}

    def render(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, *, add_generation_prompt: bool = False
    ) -> str | None:
        """Return the rendered text, or None if the template refuses the conversation."""
        try:
            return self._render(list(messages), tools, {**self._values, "add_generation_prompt": add_generation_prompt})
        except Exception:  # noqa: BLE001  (a template may raise anything)
            return None

    def _render(self, messages: list[Message], tools: Sequence[Json] | None, values: dict[str, Any]) -> str:
        sandbox, compiled = self._compiled
        sandbox.budget.refill(estimate_printed_size([messages, tools]))
        return compiled.render(messages=messages, tools=tools, documents=None, **values)

    def open(self) -> None:
        """Compile the template now, so that processes that are forked later need not."""
        _ = self._compiled

    @cached_property
    def _compiled(self) -> tuple[Sandbox, Any]:
        sandbox = _make_sandbox()
        return sandbox, sandbox.load_template(compile_template(self._text))

    def plain_end(self, tools: Sequence[Json] | None) -> str:
        """Return the text that ends an answer both before another turn and as the last turn; empty if they differ."""
        key = self.get_tools_key(tools)
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
        after, other = last.text_after(code), earlier.text_after(code)
        if after is None or other is None:
            return ""
        common = take_common_tokens(after, other)
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
        key = self.get_tools_key(tools)
        if key not in self._user_prompts:
            messages = [{"role": "user", "content": "What is it"}]
            prompted = self.render(messages, tools, add_generation_prompt=True)
            self._user_prompts[key] = find_prompt_suffix(self.render(messages, tools), prompted)
        return self._user_prompts[key]

    def get_tools_key(self, tools: Sequence[Json] | None) -> str:
        """Return what of the tools decides the text around messages: their JSON text, or whether there are any."""
        if self.remembers:
            return "some" if tools else "none"
        return json.dumps(tools)


class TransformersTemplate(JinjaTemplate):
    """A chat template as transformers' own function renders it; to import that takes half a second."""

    remembers = False

    def _render(self, messages: list[Message], tools: Sequence[Json] | None, values: dict[str, Any]) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        tools = None if tools is None else list(tools)
        texts, _ = render_jinja_template([messages], tools=tools, chat_template=self._text, **values)
        return texts[0]


class GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}`, which prints what is in it."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the block's body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body, lineno=line)]


def _to_json(
    value: Json, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


# ── Owners of characters ──


@dataclass(frozen=True)
class ProvenRender:
    """A render in which the owner of every letter and digit of own text is proven."""

    text: str
    codes: NDArray[np.int64]
    """By position: the number of the own character printed there, −1 for template text."""
    messages: NDArray[np.int64]
    """The message of every own character, by its number."""
    kept: frozenset[int] = frozenset()
    """Messages whose content was not replaced, because another message has the same and the template compares them."""

    @cached_property
    def owned(self) -> NDArray[np.int64]:
        """The positions at which own characters are printed."""
        return np.flatnonzero(self.codes >= 0)

    @cached_property
    def first_printing(self) -> NDArray[np.int64]:
        """By number of the own character: the first position at which it is printed, −1 if there is none."""
        positions = np.full(len(self.messages), -1)
        # Of several positions the one that is written last stays.
        positions[self.codes[self.owned[::-1]]] = self.owned[::-1]
        return positions

    @cached_property
    def printings(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Own characters where each is printed first, in the order of the text: their number, position and message."""
        positions = self.owned[self.first_printing[self.codes[self.owned]] == self.owned]
        codes = self.codes[positions]
        return codes, positions, self.messages[codes]

    @cached_property
    def first_position(self) -> dict[int, int]:
        """Message → first position of any of its own characters."""
        _, positions, messages = self.printings
        owners, first = np.unique(messages, return_index=True)
        return dict(zip(owners.tolist(), positions[first].tolist(), strict=True))

    @cached_property
    def last_code(self) -> dict[int, int]:
        """Message → the own character whose first printing comes last."""
        codes, _, messages = self.printings
        owners, last = np.unique(messages[::-1], return_index=True)
        return dict(zip(owners.tolist(), codes[::-1][last].tolist(), strict=True))

    def text_after(self, code: int) -> str | None:
        """Return the template text between an own character and the next one; None if it is not printed."""
        if not 0 <= code < len(self.messages) or self.first_printing[code] < 0:
            return None
        start = int(self.first_printing[code]) + 1
        following = self.owned[np.searchsorted(self.owned, start) :]
        return self.text[start : int(following[0]) if len(following) else len(self.codes)]


class _TextHider:
    """Replaces own characters by private code points, and records the message of each.

    Every own character is numbered, replaced or not, so that the numbers of a conversation and of its prefix agree.
    """

    def __init__(self, parts: frozenset[TextPart], kept: frozenset[str]) -> None:
        self._parts, self._kept = parts, kept
        self._known: dict[tuple[int, TextPart, str], str] = {}
        self._runs: list[tuple[int, str]] = []
        self._count = 0

    @property
    def originals(self) -> str:
        """The own characters by their number."""
        return "".join([run for _, run in self._runs])

    @property
    def messages(self) -> NDArray[np.int64]:
        """The messages of the own characters by their number."""
        return np.repeat(*np.array([(message, len(run)) for message, run in self._runs], np.int64).reshape(-1, 2).T)

    def hide(self, text: str, message: int, part: TextPart, where: str = "") -> str:
        key = (message, part, f"{where}\0{text}")
        if key not in self._known:
            pieces = _ALPHANUMERIC_RUN.split(text)
            runs = pieces[1::2]
            edges = list(accumulate(map(len, runs), initial=self._count))
            pieces[1::2] = [_PRIVATE_CHARACTERS[start:end] for start, end in pairwise(edges)]
            self._count = edges[-1]
            self._runs.append((message, "".join(runs)))
            self._known[key] = "".join(pieces)
        return self._known[key] if part in self._parts else text

    def message(self, message: Message, index: int) -> Message:
        hidden = dict(message)
        content = message.get("content")
        if isinstance(content, str):
            content = self.hide(content, index, "content")
        elif isinstance(content, list):
            content = [
                {**part, "text": self.hide(part["text"], index, "content", str(number))} if "text" in part else part
                for number, part in enumerate(content)
            ]
        hidden["content"] = message.get("content") if str(message.get("content")) in self._kept else content
        for key in _REASONING_KEYS:
            if isinstance(message.get(key), str):
                hidden[key] = self.hide(message[key], index, "reasoning")
        if isinstance(message.get("tool_calls"), list):
            hidden["tool_calls"] = []
            for number, call in enumerate(message["tool_calls"]):
                function = call["function"]
                name = self.hide(function["name"], index, "call_name", str(number))
                arguments = self._hide_arguments(function.get("arguments"), index, str(number))
                hidden_function = {**function, "name": name, "arguments": arguments}
                hidden["tool_calls"].append({**call, "function": hidden_function})
        return hidden

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


def _map_strings(value: Json, change: Callable[[str, str], str], path: str = "") -> Json:
    match value:
        case str():
            return change(value, path)
        case dict():
            return {key: _map_strings(inner, change, f"{path}/{key}") for key, inner in value.items()}
        case list():
            return [_map_strings(inner, change, f"{path}/{i}") for i, inner in enumerate(value)]
        case _:
            return value


def prove_owners(
    template: JinjaTemplate, messages: Sequence[Message], tools: Sequence[Json] | None, plain: str | None = None
) -> ProvenRender | None:
    """Render a conversation and prove the owners of its characters; None if the template prevents the proof.

    `plain` is the rendered conversation, if the caller has it.
    """
    plain = template.render(messages, tools) if plain is None else plain
    if plain is None:
        return None
    contents = [str(message.get("content")) for message in messages]
    repeated = frozenset(content for content in contents if contents.count(content) > 1)
    # A template may compare messages, and equal ones differ once their characters are replaced.
    attempts = [(parts, kept) for kept in dict.fromkeys((frozenset[str](), repeated)) for parts in _HIDDEN_PART_SETS]
    for parts, kept in attempts:
        hiding = _TextHider(parts, kept)
        offered = hiding.tools(tools)
        hidden = template.render([hiding.message(message, i) for i, message in enumerate(messages)], offered)
        if hidden is None:
            continue
        originals = _list_code_points(hiding.originals)
        if len(originals) > len(_PRIVATE_CHARACTERS):
            return None
        # For every character the number of the own character that it replaces, −1 for other characters.
        points = _list_code_points(hidden)
        codes = np.full(len(points), -1)
        begin = 0
        for block in _PRIVATE_BLOCKS:
            inside = (points >= block.start) & (points < block.stop)
            codes[inside] = points[inside] - block.start + begin
            begin += len(block)
        if len(codes) != len(plain) or codes.max(initial=-1) >= len(originals):
            continue
        points[codes >= 0] = originals[codes[codes >= 0]]
        if np.array_equal(points, _list_code_points(plain)):
            unhidden = frozenset(i for i, content in enumerate(contents) if content in kept)
            return ProvenRender(plain, codes, hiding.messages, unhidden)
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


def find_marker(marker: str, text: str) -> "re.Match[str] | None":
    """Find a marker, such as the end of a turn, in a text; its numbers may be others, because some count the turns."""
    return re.search(r"[0-9]+".join(map(re.escape, re.split(r"[0-9]+", marker))), text)


def find_prompt_suffix(before: str | None, prompted: str | None) -> str:
    """Return the text that the generation prompt adds; empty if that is nothing or unknown."""
    if before is None or prompted is None:
        return ""
    length = count_common_characters(before, prompted)
    for token in TOKEN_PATTERN.finditer(prompted):
        if token.start() < length < token.end():
            length = token.start()
    return prompted[length:]


# ── Defects of a mask ──


MaskDefectKind = Literal[
    "own_text_untrained",
    "other_text_trained",
    "header_trained",
    "start_untrained",
    "frame_untrained",
    "end_untrained",
    "wrong_end",
    "empty_answer_trained",
    "text_differs",
]

_STOP_WORDS = re.compile(
    r"<(?!/)[^<>]*(?:end|eo[tsm]|call|return|turn|user|observation|response)[^<>]*>|</s>", re.IGNORECASE
)
"""Control tokens that may end a turn; a wide pattern, because it only excuses a mask from a missing end."""

_STOP_RUN = re.compile(rf"(?:(?:{_STOP_WORDS.pattern})\s*)+", re.IGNORECASE)

_NON_SPACE_RUN = re.compile(r"\S*")


@dataclass(frozen=True, slots=True)
class MaskDefect:
    """Characters `[start, end)` of the judged text that train, or do not train, by mistake."""

    kind: MaskDefectKind
    message: int
    """The message whose mask is wrong; −1 for text of no message."""
    start: int
    end: int
    text: str


# ── The judgement ──


@dataclass(frozen=True, slots=True)
class _TurnEndRegion:
    """Template text after own text: `[start, required)` must train, text up to `allowed` may."""

    required: int
    allowed: int


@dataclass
class IndependentMaskJudge:
    """Judges masks of one template in which all messages of `roles` are supervised.

    With `by_blocks` masks follow the template's `{% generation %}` blocks. Then the template's author decides whether
    headers and second ends train, and only own text, foreign text and a missing end are judged.
    """

    template: JinjaTemplate
    roles: frozenset[str] = frozenset({"assistant"})
    by_blocks: bool = False
    _known: dict[tuple[object, ...], Any] = field(default_factory=dict[tuple[object, ...], Any])

    def recall(self, key: tuple[object, ...], find: Callable[[], FoundT]) -> FoundT:
        """Return what was found out before of this template text, else find it out."""
        if not self.template.remembers:
            return find()
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    def judge(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, text: str, trained: Sequence[tuple[int, int]]
    ) -> list[MaskDefect] | None:
        """Return the defects of a mask; None if the owners of the text cannot be proven.

        `messages` and `tools` are in the form that the template reads; `trained` are character ranges of `text`.
        """
        plain = self.template.render(messages, tools)
        if plain is None or not text.startswith(plain):
            at = count_common_characters(plain or "", text)
            return [MaskDefect("text_differs", -1, at, len(text), text[at : at + 60])]
        proven = prove_owners(self.template, messages, tools, plain)
        if proven is None or any(messages[i]["role"] in self.roles for i in proven.kept):
            return None
        return _MaskJudgement(self, proven, messages, tools, text, trained).list_defects()


@dataclass
class _MaskJudgement:
    """The judgement of one mask."""

    judge: IndependentMaskJudge
    proven: ProvenRender
    messages: Sequence[Message]
    tools: Sequence[Json] | None
    text: str
    trained: Sequence[tuple[int, int]]
    found: list[MaskDefect] = field(default_factory=list[MaskDefect])

    def list_defects(self) -> list[MaskDefect]:
        self._trains = bytearray(len(self.text))
        for start, end in self.trained:
            self._trains[start:end] = b"\1" * (end - start)
        self._judge_own_characters()
        # The template's characters between those that have an owner.
        _, positions, messages = self.proven.printings
        starts = np.append(0, positions + 1)
        # One space between two words of a message may train or not, and most gaps are such spaces.
        is_space = (_list_code_points(self.text)[starts[:-1]] == ord(" ")) & (positions == starts[:-1] + 1)
        is_space[1:] &= messages[1:] == messages[:-1]
        is_space[:1] = False
        for i in np.flatnonzero((positions > starts[:-1]) & ~is_space).tolist():
            left, start = int(messages[i - 1]) if i else None, int(starts[i])
            right, end = int(messages[i]), int(positions[i])
            if not (left == right and self.text[start:end].isspace()):
                self._judge_gap(left, start, right, end)
        self._judge_gap(int(messages[-1]) if len(messages) else None, int(starts[-1]), None, len(self.text))
        return self.found

    # ── characters with an owner ──

    def _judge_own_characters(self) -> None:
        codes, owned, first = self.proven.codes, self.proven.owned, self.proven.first_printing
        supervised = np.array([self._is_supervised(index) for index in range(len(self.messages))] + [False])
        trains = np.frombuffer(self._trains, np.uint8)[owned] > 0
        for position in owned[supervised[self.proven.messages[codes[owned]]] != trains].tolist():
            owner = int(self.proven.messages[codes[position]])
            train = self._is_supervised(owner)
            if train and first[codes[position]] != position:
                continue
            kind: MaskDefectKind = "own_text_untrained" if train else "other_text_trained"
            self._expect_training(position, position + 1, owner, kind, train=train)

    def _is_supervised(self, message: int) -> bool:
        return message >= 0 and self.messages[message]["role"] in self.judge.roles

    # ── the template's characters between them ──

    def _judge_gap(self, left: int | None, start: int, right: int | None, end: int) -> None:
        if start >= end:
            return
        if left is not None and left == right:
            train = self._is_supervised(left)
            if train and self._holds_result_without_letters(left, start, end):
                return
            kind: MaskDefectKind = "frame_untrained" if train else "other_text_trained"
            self._expect_training(start, end, left, kind, train=train)
            return
        if (
            left is not None
            and right is not None
            and left > right
            and self._is_supervised(left)
            and self._is_supervised(right)
        ):
            # The template merges turns of the model and prints their calls after all their texts.
            self._expect_training(start, end, left, "frame_untrained", train=True)
            return
        closing, header, exact = _TurnEndRegion(start, start), end, False
        if left is not None and self._is_supervised(left):
            closing = self._find_turn_end(left, start, end, right)
            self._expect_training(start, closing.required, left, "end_untrained", train=True)
        elif (
            left is not None
            and (right is None or not self._is_supervised(right))
            and self._continues_after(left, start)
        ):
            found = find_marker(self.judge.template.plain_end(self.tools), self.text[start:end])
            stop = end if found is None else start + found.start()
            self._expect_training(start, stop, left, "other_text_trained", train=False)
            closing = _TurnEndRegion(start, self._find_token_end(stop, end))
        # Some templates print a message's call and the result before its own text.
        if right is not None and self._is_supervised(right) and end == self.proven.first_position[right]:
            begin, before = max(start, closing.required), self.messages[right - 1]["role"] if right else ""
            key = ("header", self.text[begin:end], before, self.judge.template.get_tools_key(self.tools))
            length, exact = self.judge.recall(key, partial(self._measure_header, right, begin, end))
            header = begin + length
        message, kind = self._assign_blame(left, right)
        if not self.judge.by_blocks or kind not in ("header_trained", "wrong_end"):
            self._expect_training(closing.allowed, max(closing.allowed, header), message, kind, train=False)
        if exact and right is not None and not self.judge.by_blocks:
            self._expect_training(max(header, closing.allowed), end, right, "start_untrained", train=True)

    def _holds_result_without_letters(self, message: int, start: int, end: int) -> bool:
        """Return whether a result such as `[]`, of which nothing is proven, is printed within its call's message."""
        results = takewhile(
            lambda index: self.messages[index]["role"] == "tool", range(message + 1, len(self.messages))
        )
        contents = [self.messages[index].get("content") for index in results if index not in self.proven.last_code]
        gap = self.text[start:end]
        return any(isinstance(one, str) and one.strip() and one.strip() in gap for one in contents)

    def _continues_after(self, message: int, start: int) -> bool:
        """Return whether a tool result is printed inside the model's turn, which then ends after it."""
        ending = self.judge.template.plain_end(self.tools)
        if message < 0 or self.messages[message]["role"] != "tool" or not ending:
            return False
        callers = [i for i in range(message) if self._is_supervised(i) and i in self.proven.last_code]
        if not callers:
            return False
        call_end = int(self.proven.first_printing[self.proven.last_code[callers[-1]]])
        return call_end < start and find_marker(ending, self.text[call_end:start]) is None

    def _assign_blame(self, left: int | None, right: int | None) -> tuple[int, MaskDefectKind]:
        """Return which message to blame for trained template text between two messages, and the kind of defect."""
        lower = -1 if left is None else left
        upper = len(self.messages) if right is None else right
        printed = self.proven.last_code
        for index in range(lower + 1, upper):
            if self._is_supervised(index) and index not in printed:
                return index, "empty_answer_trained"
        if right is not None and (left is None or self._is_supervised(right)):
            return right, "header_trained"
        if left is not None and self._is_supervised(left):
            return left, "wrong_end"
        return upper if right is not None else lower, "other_text_trained"

    def _expect_training(self, start: int, end: int, message: int, kind: MaskDefectKind, *, train: bool) -> None:
        """Add a defect for each run of characters other than white space whose training differs from `train`."""
        if self._trains.find(not train, start, end) < 0:
            return
        position = start
        while position < end:
            if self._is_as_expected(position, train=train):
                position += 1
                continue
            last = position
            while last < end and not self._is_as_expected(last, train=train):
                last += 1
            self._add_defect(kind, message, position, last)
            position = last

    def _is_as_expected(self, position: int, *, train: bool) -> bool:
        is_template = position >= len(self.proven.codes) or self.proven.codes[position] < 0
        return bool(self._trains[position]) == train or (is_template and self.text[position].isspace())

    def _add_defect(self, kind: MaskDefectKind, message: int, start: int, end: int) -> None:
        last = self.found[-1] if self.found else None
        if last is not None and (last.kind, last.message, last.end) == (kind, message, start):
            self.found[-1] = MaskDefect(kind, message, last.start, end, self.text[last.start : end])
        else:
            self.found.append(MaskDefect(kind, message, start, end, self.text[start:end]))

    # ── where a turn ends ──

    def _find_turn_end(self, index: int, start: int, end: int, right: int | None) -> _TurnEndRegion:
        """Return the text after an answer's last own character that must train, and that may; `right` owns the next."""
        if right is None and index + 1 < len(self.messages):
            # The next message has no letter or digit to prove, such as a tool result `[]`.
            right = index + 1
        after = self.text[start : min(end, len(self.proven.text))]
        following, fields = None if right is None else self.messages[right]["role"], tuple(sorted(self.messages[index]))
        key = ("end", after, following, fields, self.judge.template.get_tools_key(self.tools))
        other = self.judge.recall(key, partial(self._render_other_continuation, index, start, is_last=right is None))
        common = after if other is None else take_common_tokens(after, other)
        common = self.judge.template.without_header(common, self.tools).rstrip()
        ends = [
            marker for marker in (self.judge.template.plain_end(self.tools), self.judge.template.eos_token) if marker
        ]
        stops = [found.end() for marker in ends if (found := find_marker(marker, common)) is not None]
        if stops:
            stop = start + min(stops)
            if right is not None or len(self.text) <= len(self.proven.text):
                return _TurnEndRegion(stop, stop)
            # The end of the last answer is printed, so nothing may be appended.
            self._add_defect("wrong_end", index, len(self.proven.text), len(self.text))
            return _TurnEndRegion(stop, len(self.text))
        if right is None:
            return self._judge_last_open_end(index, start + len(common), common)
        # The end depends on the text after it: one more token may train. It must train if the template prints another
        # token at the end of a conversation: then both tokens end turns.
        required = start + len(common)
        allowed = self._find_token_end(required, end)
        own_token = TOKEN_PATTERN.match(self.text[required:end].lstrip())
        other_token = TOKEN_PATTERN.match((other or "")[len(common) :].lstrip())
        both_end = own_token is not None and other_token is not None and own_token.group() != other_token.group()
        # The conversation breaks off after a call without result, so the end of its turn is unknown.
        is_unanswered = self.messages[right]["role"] == "user" and bool(self.messages[index].get("tool_calls"))
        is_optional = is_unanswered or self._is_supervised(right)
        return _TurnEndRegion(allowed if both_end and not is_optional else required, allowed)

    def _judge_last_open_end(self, index: int, required: int, common: str) -> _TurnEndRegion:
        """Judge the last answer if no known end is printed: a token after it, or an appended end, must train."""
        end, appended = len(self.text), len(self.proven.text)
        opener = self.judge.template.header_token(self.tools)
        behind = self.text[required:end]
        if opener and self.text.startswith(opener, required + len(behind) - len(behind.lstrip())):
            # The next turn's header follows directly: the template prints no end that could train.
            return _TurnEndRegion(required, required)
        trains = any(self._trains[i] and not self.text[i].isspace() for i in range(required, end))
        is_stop = _STOP_WORDS.search(common) or (self._get_last_calls() and re.search(r"<[^/<>][^<>]*>$", common))
        rest = self.judge.template.without_header(behind, self.tools)
        if not trains and not self.judge.by_blocks and (not is_stop or rest.strip()):
            self._add_defect("end_untrained", index, required, end)
        if end > appended and not self.text[required:appended].strip():
            return _TurnEndRegion(required, end)
        return _TurnEndRegion(required, self._find_token_end(required, end))

    def _get_last_calls(self) -> Sequence[Any]:
        return self.messages[-1].get("tool_calls") or ()

    def _find_token_end(self, start: int, end: int) -> int:
        """Return the end of the first token after a position, or of the first run of tokens that may end a turn."""
        while start < end and self.text[start].isspace():
            start += 1
        token = TOKEN_PATTERN.match(self.text, start, end) or _STOP_RUN.search(self.text, start, end)
        return token.end() if token else _NON_SPACE_RUN.match(self.text, start, end).end()  # pyrefly: ignore[missing-attribute]

    def _render_other_continuation(self, index: int, start: int, *, is_last: bool) -> str | None:
        """Return the template text after the same own character if the conversation ended there, or continued."""
        code = int(self.proven.codes[start - 1])
        shortened = [*self.messages[: index + 1]]
        for other in self._list_follow_ups() if is_last else [shortened]:
            proven = prove_owners(self.judge.template, other, self.tools)
            after = None if proven is None else proven.text_after(code)
            if after is not None:
                return after
        return None

    def _list_follow_ups(self) -> Iterator[list[Message]]:
        results: list[Message] = [
            {"role": "tool", "content": "done", "name": call["function"]["name"], "tool_call_id": call.get("id")}
            for call in self._get_last_calls()
        ]
        ask: Message = {"role": "user", "content": "And then"}
        answer: Message = {"role": "assistant", "content": "Nothing"}
        content = self.messages[-1].get("content")
        if isinstance(content, list):
            as_parts = [
                {**message, "content": [{"type": "text", "text": message["content"]}]} for message in (ask, answer)
            ]
            ask, answer = as_parts
        if results:
            yield [*self.messages, *results, answer]
            yield [*self.messages, *results]
        yield [*self.messages, ask, answer]
        yield [*self.messages, ask]

    # ── where a turn begins ──

    def _measure_header(self, index: int, start: int, end: int) -> tuple[int, bool]:
        """Return the length of the generation prompt before an answer, and whether the model must write the rest."""
        before = self._render_prefix(index, add_generation_prompt=False)
        prompted = self._render_prefix(index, add_generation_prompt=True)
        default_prompt = self.judge.template.user_prompt(self.tools)
        suffix = find_prompt_suffix(before, prompted)
        if prompted and self.text.startswith(prompted) and len(prompted) <= end:
            first = self.judge.template.header_token(self.tools)
            return max(len(prompted) - start, 0), bool(first) and first in suffix
        if before is not None and before == prompted:
            # The template asks for this answer without a word, so the model writes the header as well.
            return 0, False
        suffix = suffix or default_prompt
        header_text = self.text[start:end]
        # All prefixes that end after a whole token or word, longest first.
        edges = {match.end() for match in re.finditer(rf"{TOKEN_PATTERN.pattern}|[^\s<\[]+", suffix)}
        for length in sorted(edges, reverse=True):
            begun = suffix[:length].strip()
            at = header_text.rfind(begun)
            if begun and at >= 0:
                return at + len(begun), False
        return 0, False

    def _render_prefix(self, index: int, *, add_generation_prompt: bool) -> str | None:
        return self.judge.template.render(
            self.messages[:index], self.tools, add_generation_prompt=add_generation_prompt
        )
