"""Check one loss mask without the code that made it: find characters that train or do not train by mistake.

What belongs here: the judgement and the defects it finds. What does not: the proof of which message every character
comes from (`independent_proof.py`), making masks (`masking/`), rendering rows (`rendering/`), probe conversations
(`template_proof.py`). Nothing of `masking/` or `rendering/` is imported, so that this check cannot share a defect with
them.

What must train follows from where the proven owners of characters change:

    <s>[INST] What is it? [/INST] It is four.</s>[INST] …
              └─ message 0 ─┘     └message 1┘
       prompt: nothing trains ───┘ └─own text trains─┘└─ the end of turn trains, nothing after it

Punctuation has no proven owner; between two letters of one message it belongs to that message.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rowmill.conversation.independent_proof import (
    TOKEN_PATTERN,
    ProvenRender,
    TransformersTemplate,
    count_common_characters,
    find_prompt_suffix,
    prove_owners,
    take_common_tokens,
)
from rowmill.core.frozen_classes import frozen_dataclass
from rowmill.core.json import Json
from rowmill.schema.rows import Message

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


@frozen_dataclass
class MaskDefect:
    """Characters `[start, end)` of the judged text that train, or do not train, by mistake."""

    kind: MaskDefectKind
    message: int
    """The message whose mask is wrong; −1 for text of no message."""
    start: int
    end: int
    text: str


# ── the judgement ──


@frozen_dataclass
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

    template: TransformersTemplate
    roles: frozenset[str] = frozenset({"assistant"})
    by_blocks: bool = False

    def judge(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None,
        text: str,
        trained: Sequence[tuple[int, int]],
    ) -> list[MaskDefect] | None:
        """Return the defects of a mask; None if the owners of the text cannot be proven.

        `messages` and `tools` are in the form that the template reads; `trained` are character ranges of `text`.
        """
        plain = self.template.render(messages, tools)
        if plain is None or not text.startswith(plain):
            at = count_common_characters(plain or "", text)
            return [MaskDefect("text_differs", -1, at, len(text), text[at : at + 60])]
        proven = prove_owners(self.template, messages, tools)
        if proven is None or any(messages[i]["role"] in self.roles for i in proven.kept):
            return None
        return _MaskJudgement(self, proven, messages, tools, text, trained).list_defects()


@dataclass
class _MaskJudgement:
    """The judgement of one mask.

    More than 250 lines, because every rule reads the same mask, text and proven owners and adds to the same list of
    defects; as functions, each would take all of them as parameters.
    """

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
        self._judge_gaps()
        return self.found

    # ── characters with an owner ──

    def _judge_own_characters(self) -> None:
        first = self.proven.first_printing
        for position, code in enumerate(self.proven.codes):
            if code < 0:
                continue
            owner = self.proven.owners[code].message
            train = self._is_supervised(owner)
            if bool(self._trains[position]) == train or (train and first[code] != position):
                continue
            kind: MaskDefectKind = "own_text_untrained" if train else "other_text_trained"
            self._expect_training(position, position + 1, owner, kind, train=train)

    def _is_supervised(self, message: int) -> bool:
        return message >= 0 and self.messages[message]["role"] in self.judge.roles

    # ── the template's characters between them ──

    def _judge_gaps(self) -> None:
        first = self.proven.first_printing
        places = sorted((position, self.proven.owners[code].message) for code, position in first.items())
        before: tuple[int, int | None] = (-1, None)
        for position, owner in places:
            self._judge_gap(before[1], before[0] + 1, owner, position)
            before = (position, owner)
        self._judge_gap(before[1], before[0] + 1, None, len(self.text))

    def _judge_gap(self, left: int | None, start: int, right: int | None, end: int) -> None:
        if start >= end:
            return
        if left is not None and left == right:
            train = self._is_supervised(left)
            kind: MaskDefectKind = "frame_untrained" if train else "other_text_trained"
            self._expect_training(start, end, left, kind, train=train)
            return
        if left is not None and right is not None and left > right and self._are_supervised(left, right):
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
            stop = start + self._find_end_offset(start, end)
            self._expect_training(start, stop, left, "other_text_trained", train=False)
            closing = _TurnEndRegion(start, self._find_token_end(stop, end))
        if right is not None and self._is_supervised(right) and self._begins_at(right, end):
            header, exact = self._find_header_end(right, max(start, closing.required), end)
        message, kind = self._assign_blame(left, right)
        if not self.judge.by_blocks or kind not in ("header_trained", "wrong_end"):
            self._expect_training(closing.allowed, max(closing.allowed, header), message, kind, train=False)
        if exact and right is not None and not self.judge.by_blocks:
            self._expect_training(max(header, closing.allowed), end, right, "start_untrained", train=True)

    def _begins_at(self, message: int, position: int) -> bool:
        """Return whether a message's own text begins there; some templates print its call and the result first."""
        return position == self.proven.first_position[message]

    def _continues_after(self, message: int, start: int) -> bool:
        """Return whether a tool result is printed inside the model's turn, which then ends after it."""
        ending = self.judge.template.plain_end(self.tools)
        if message < 0 or self.messages[message]["role"] != "tool" or not ending:
            return False
        callers = [i for i in range(message) if self._is_supervised(i) and i in self.proven.last_code]
        if not callers:
            return False
        call_end = self.proven.first_printing[self.proven.last_code[callers[-1]]]
        return call_end < start and ending not in self.text[call_end:start]

    def _find_end_offset(self, start: int, end: int) -> int:
        """Return the offset of the end of turn in a range; the range's length if it has none."""
        at = self.text.find(self.judge.template.plain_end(self.tools), start, end)
        return at - start if at >= 0 else end - start

    def _are_supervised(self, *messages: int) -> bool:
        return all(self._is_supervised(message) for message in messages)

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
        other = self._render_other_continuation(index, start, is_last=right is None)
        common = after if other is None else take_common_tokens(after, other)
        common = self.judge.template.without_header(common, self.tools).rstrip()
        ends = [one for one in (self.judge.template.plain_end(self.tools), self.judge.template.eos_token) if one]
        stops = [common.index(one) + len(one) for one in ends if one in common]
        if stops:
            return self._judge_printed_end(index, start + min(stops), is_last=right is None)
        if right is None:
            return self._judge_last_open_end(index, start + len(common), common)
        region = self._judge_open_end(start, end, common, other or "")
        # The conversation breaks off after a call without result, so the end of its turn is unknown.
        is_unanswered = self.messages[right]["role"] == "user" and bool(self.messages[index].get("tool_calls"))
        is_optional = is_unanswered or self._is_supervised(right)
        return _TurnEndRegion(start + len(common), region.allowed) if is_optional else region

    def _judge_printed_end(self, index: int, stop: int, *, is_last: bool) -> _TurnEndRegion:
        """Judge an answer whose end is printed: nothing may be appended."""
        if is_last and len(self.text) > len(self.proven.text):
            self._add_defect("wrong_end", index, len(self.proven.text), len(self.text))
            return _TurnEndRegion(stop, len(self.text))
        return _TurnEndRegion(stop, stop)

    def _judge_open_end(self, start: int, end: int, common: str, other: str) -> _TurnEndRegion:
        """Judge an answer whose end depends on the text after it: one more token may train.

        It must train if the template prints a different token at the end of a conversation: then both tokens end turns.
        """
        required = start + len(common)
        allowed = self._find_token_end(required, end)
        own_token = TOKEN_PATTERN.match(self.text[required:end].lstrip())
        other_token = TOKEN_PATTERN.match(other[len(common) :].lstrip())
        both_end = own_token is not None and other_token is not None and own_token.group() != other_token.group()
        return _TurnEndRegion(allowed if both_end else required, allowed)

    def _judge_last_open_end(self, index: int, required: int, common: str) -> _TurnEndRegion:
        """Judge the last answer if no known end is printed: a token after it, or an appended end, must train."""
        end, appended = len(self.text), len(self.proven.text)
        opener = self.judge.template.header_token(self.tools)
        if opener and self.text.startswith(opener, required + _count_leading_space(self.text[required:end])):
            # The next turn's header follows directly: the template prints no end that could train.
            return _TurnEndRegion(required, required)
        trains = any(self._trains[i] and not self.text[i].isspace() for i in range(required, end))
        is_stop = _STOP_WORDS.search(common) or (self._get_last_calls() and re.search(r"<[^/<>][^<>]*>$", common))
        rest = self.judge.template.without_header(self.text[required:end], self.tools)
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
        code = self.proven.codes[start - 1]
        shortened = [*self.messages[: index + 1]]
        for other in self._list_follow_ups() if is_last else [shortened]:
            proven = prove_owners(self.judge.template, other, self.tools)
            if proven is not None and code in proven.first_printing:
                return proven.text_after(code)
        return None

    def _list_follow_ups(self) -> Iterator[list[Message]]:
        """Yield conversations that continue after the last answer."""
        results: list[Message] = [
            {"role": "tool", "content": "done", "name": call["function"]["name"], "tool_call_id": call.get("id")}
            for call in self._get_last_calls()
        ]
        ask: Message = {"role": "user", "content": "And then"}
        answer: Message = {"role": "assistant", "content": "Nothing"}
        content = self.messages[-1].get("content")
        if isinstance(content, list):
            as_parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in (ask, answer)]
            ask, answer = as_parts
        if results:
            yield [*self.messages, *results, answer]
            yield [*self.messages, *results]
        yield [*self.messages, ask, answer]
        yield [*self.messages, ask]

    # ── where a turn begins ──

    def _find_header_end(self, index: int, start: int, end: int) -> tuple[int, bool]:
        """Return where the generation prompt before an answer ends, and whether the model must write the rest."""
        before = self._render_prefix(index, add_generation_prompt=False)
        prompted = self._render_prefix(index, add_generation_prompt=True)
        default_prompt = self.judge.template.user_prompt(self.tools)
        suffix = find_prompt_suffix(before, prompted)
        if prompted and self.text.startswith(prompted) and len(prompted) <= end:
            first = self.judge.template.header_token(self.tools)
            return max(len(prompted), start), bool(first) and first in suffix
        suffix = suffix or default_prompt
        header_text = self.text[start:end]
        for length in _list_token_edges(suffix):
            at = header_text.rfind(suffix[:length].strip())
            if at >= 0:
                return start + at + len(suffix[:length].strip()), False
        return start, False

    def _render_prefix(self, index: int, *, add_generation_prompt: bool) -> str | None:
        return self.judge.template.render(
            self.messages[:index], self.tools, add_generation_prompt=add_generation_prompt
        )


# ── texts ──


def _count_leading_space(text: str) -> int:
    return len(text) - len(text.lstrip())


def _list_token_edges(text: str) -> list[int]:
    """Return the lengths of all prefixes of a text that end after a whole token or word, longest first."""
    edges = {match.end() for match in re.finditer(rf"{TOKEN_PATTERN.pattern}|[^\s<\[]+", text)}
    return sorted((edge for edge in edges if text[:edge].strip()), reverse=True)
