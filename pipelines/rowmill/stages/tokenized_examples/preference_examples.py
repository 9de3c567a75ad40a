"""Preferences: a prompt with each of its answers as tokens, both sides in one example or one side in each.

paired     P chosen │ P rejected     one example: ids end to end, `side_lengths` 19 19, `prompt_length` 12
unpaired   P chosen                  an example of its own, `sides` 1
           P rejected                another, `sides` 0
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pyarrow as pa

from rowmill.conversation.truncation import ConversationTruncator
from rowmill.core.json import from_json
from rowmill.schema.conversation import Conversation
from rowmill.schema.rows import MaskedConversation, Message, Rejected
from rowmill.stages.tokenized_examples.conversation_encoding import (
    ConversationEncoder,
    decode_conversations,
    show_control_strings,
)
from rowmill.stages.tokenized_examples.example_length import LengthLimit, RowOutcome
from rowmill.tokenization.control_tokens import has_changed_placeholder
from rowmill.tokenization.encoded_batch import Example
from rowmill.tokenization.example_encoding import TokenizationCounts

CHOSEN, REJECTED = 1, 0
"""Values of `sides`: the chosen or good answer, the rejected or bad one."""


@dataclass(frozen=True, slots=True)
class _Preference:
    """A row's prompt and sides, control strings hidden; `answers` are the messages of each side after the prompt."""

    prompt: Conversation
    answers: Sequence[Sequence[Message]]
    sides: Sequence[int]
    margin: float | None
    placeholders: dict[str, str]

    def join(self, side: int, prompt: Sequence[Message]) -> Conversation:
        """Return a side as a conversation, with some of the prompt's messages."""
        return replace(self.prompt, messages=[*prompt, *self.answers[side]])


@dataclass(frozen=True, slots=True)
class _MaskedSide:
    """A side's text, and the ranges in which control strings are text."""

    masked: MaskedConversation
    ordinary: list[tuple[int, int]]


class PreferenceExampleBuilder:
    """Builds the examples of one dataset's preferences."""

    def __init__(self, encoder: ConversationEncoder, limit: LengthLimit) -> None:
        """Store the steps of a conversation."""
        self._steps = encoder
        self._limit = limit
        self._is_paired = encoder.dataset.format.get_objective() == "paired"

    def build(self, rows: pa.Table, counts: TokenizationCounts) -> list[RowOutcome]:
        """Build the examples of each row: one of both sides, or one of each."""
        decoded = self._decode(rows, counts)
        made = self._encode_all(decoded, counts)
        return [self._build_row(row, sides, counts) for row, sides in zip(decoded, made, strict=True)]

    # ── rows ──

    def _decode(self, rows: pa.Table, counts: TokenizationCounts) -> list[_Preference | Rejected]:
        columns = [rows.column(name).to_pylist() for name in ("chosen", "rejected", "margin")]
        controlled = self._steps.control.find_rows(rows) | _find_controlled(self._steps, rows)
        return [
            self._decode_row(conversation, (chosen, rejected), margin, bool(hides), counts)
            for conversation, chosen, rejected, margin, hides in zip(
                decode_conversations(rows), *columns, controlled, strict=True
            )
        ]

    def _decode_row(
        self,
        prompt: Conversation,
        texts: Sequence[str | None],
        margin: float | None,
        controlled: bool,
        counts: TokenizationCounts,
    ) -> _Preference | Rejected:
        sides = [side for side, text in zip((CHOSEN, REJECTED), texts, strict=True) if text is not None]
        answers: list[list[Message]] = [from_json(text) for text in texts if text is not None]
        # Control strings of all messages are hidden together, so that a prompt is the same on both sides.
        whole = replace(prompt, messages=[*prompt.messages, *(one for answer in answers for one in answer)])
        hidden = self._steps.hide_control(whole, counts) if controlled else (whole, dict[str, str]())
        if isinstance(hidden, Rejected):
            return hidden
        messages = self._steps.limit_reasoning(hidden[0]).messages
        edges = np.cumsum([len(prompt.messages), *map(len, answers)]).tolist()
        parts = [messages[first:last] for first, last in zip([0, *edges], edges, strict=False)]
        return _Preference(replace(hidden[0], messages=parts[0]), parts[1:], sides, margin, hidden[1])

    # ── sides ──

    def _build_row(
        self, row: _Preference | Rejected, parts: list[Example] | Rejected, counts: TokenizationCounts
    ) -> RowOutcome:
        if isinstance(row, Rejected):
            return row
        if isinstance(parts, Rejected):
            return parts
        fitted = self._fit_sides(row, parts)
        if isinstance(fitted, Rejected):
            counts.dropped_tokens += sum(len(part.ids) for part in parts)
            counts.dropped_trained += sum(int(part.mask.sum()) for part in parts)
            return fitted
        return finish_sides(fitted, row.sides, row.margin, counts, is_paired=self._is_paired)

    def _encode_all(
        self, rows: Sequence[_Preference | Rejected], counts: TokenizationCounts
    ) -> list[list[Example] | Rejected]:
        """Render and mask the sides of each row, and encode those of all rows at once; rejects are passed on."""
        masked = [
            row if isinstance(row, Rejected) else self._mask_sides(row, row.prompt.messages, counts) for row in rows
        ]
        sides = [side for one in masked if not isinstance(one, Rejected) for side in one]
        encoded = iter(
            self._steps.encode_masked([one.masked for one in sides], [one.ordinary for one in sides], counts)
        )
        return [one if isinstance(one, Rejected) else _require_all(list(islice(encoded, len(one)))) for one in masked]

    def _encode_sides(self, row: _Preference, prompt: Sequence[Message]) -> list[Example] | Rejected:
        """Render, mask and encode each side with some of the prompt's messages, which is not counted."""
        counts = TokenizationCounts()
        sides = self._mask_sides(row, prompt, counts)
        if isinstance(sides, Rejected):
            return sides
        return _require_all(
            self._steps.encode_masked([side.masked for side in sides], [side.ordinary for side in sides], counts)
        )

    def _mask_sides(
        self, row: _Preference, prompt: Sequence[Message], counts: TokenizationCounts
    ) -> list[_MaskedSide] | Rejected:
        """Render and mask each side with some of the prompt's messages."""
        sides: list[_MaskedSide] = []
        loses_reasoning = False
        for side in range(len(row.sides)):
            conversation = row.join(side, prompt)
            answers = frozenset(range(len(prompt), len(conversation.messages)))
            found = self._steps.mask(conversation, only=answers)
            found = self._steps.judge_row(conversation) or found
            if isinstance(found, Rejected):
                return found
            if has_changed_placeholder(found.text, row.placeholders):
                return Rejected("control_token_in_content", "the template changes the stand-in of a control string")
            counts.add_dropped(found.dropped)
            if "reasoning" in found.dropped:
                loses_reasoning = loses_reasoning or self._steps.loses_reasoning(conversation, found)
            sides.append(_MaskedSide(*show_control_strings(found, row.placeholders)))
        counts.rows_losing_reasoning += loses_reasoning
        return sides

    # ── length ──

    def _fit_sides(self, row: _Preference, parts: list[Example]) -> list[Example] | Rejected:
        """Apply the overlong policy to both sides together."""
        longest = max(range(len(parts)), key=lambda i: len(parts[i].ids))
        tokens, policy = len(parts[longest].ids), self._limit.get_policy("preference")
        if tokens <= self._limit.tokens or policy in ("keep", "raise"):
            return parts
        if policy == "drop":
            return Rejected("overlong", f"{tokens} tokens, at most {self._limit.tokens}")
        kept = self._remove_exchanges(row, longest)
        shorter = self._encode_sides(row, [row.prompt.messages[i] for i in kept])
        if isinstance(shorter, Rejected):
            return shorter
        removed = len(row.prompt.messages) - len(kept)
        shorter = [_attribute(one, whole, removed) for one, whole in zip(shorter, parts, strict=True)]
        tokens = max(len(one.ids) for one in shorter)
        if tokens <= self._limit.tokens:
            return shorter
        if self._limit.options.token_cut == "reject":  # noqa: S105  (tokens of text)
            why = f"{tokens} tokens after the prompt's exchanges were removed, at most {self._limit.tokens}"
            return Rejected("overlong_after_structure", why)
        prompt = measure_prompt(shorter)
        return prompt if isinstance(prompt, Rejected) else cut_answers(shorter, prompt, self._limit.tokens)

    def _remove_exchanges(self, row: _Preference, side: int) -> Sequence[int]:
        """Return the prompt's messages that stay so that a side fits, or as few as possible."""
        prompt = row.prompt.messages

        def measure(messages: Sequence[Message], tools: object) -> int | None:
            del tools
            one = replace(row, answers=[row.answers[side]], sides=[row.sides[side]])
            made = self._encode_sides(one, messages)
            return None if isinstance(made, Rejected) else len(made[0].ids)

        truncator = ConversationTruncator(
            limit=self._limit.tokens,
            measure=measure,
            cut_reasoning=self._steps.cut_text,
            assistant_roles=self._steps.dataset.format.get_token_options().assistant_roles,
        )
        return truncator.remove_exchanges(prompt, row.prompt.tools, len(prompt) - 1)


def _require_all(parts: Sequence[Example | Rejected]) -> list[Example] | Rejected:
    """Return the examples of a row's sides, or the first reject."""
    examples = [part for part in parts if not isinstance(part, Rejected)]
    return examples if len(examples) == len(parts) else next(part for part in parts if isinstance(part, Rejected))


def _find_controlled(encoder: ConversationEncoder, rows: pa.Table) -> np.ndarray:
    """Return which rows have a control string in one of their sides."""
    found = np.zeros(rows.num_rows, np.bool_)
    for name in ("chosen", "rejected"):
        texts = rows.set_column(rows.schema.get_field_index("messages"), "messages", rows.column(name))
        found |= encoder.control.find_rows(texts)
    return found


def finish_sides(
    sides: Sequence[Example], kinds: Sequence[int], margin: float | None, counts: TokenizationCounts, *, is_paired: bool
) -> RowOutcome:
    """Return the examples of a row's sides, whose `kinds` are `CHOSEN` or `REJECTED`: one of both, or one of each."""
    prompt = measure_prompt(sides)
    if isinstance(prompt, Rejected):
        return prompt
    if is_paired:
        counts.add_of_kind("pairs", 1)
        counts.add_of_kind("longer_chosen", int(len(sides[0].ids) > len(sides[1].ids)))
        return [_join_sides(sides, kinds, margin, prompt)]
    return [_describe(one, [one], [kind], prompt, None) for one, kind in zip(sides, kinds, strict=True)]


def cut_answers(sides: Sequence[Example], prompt: int, limit: int) -> list[Example] | Rejected:
    """Cut the answers on the right, which all follow a prompt of so many tokens."""
    if prompt >= limit:
        return Rejected("overlong_prompt", f"the prompt has {prompt} tokens, at most {limit}")
    return [side.cut(0, limit) if len(side.ids) > limit else side for side in sides]


def measure_prompt(sides: Sequence[Example]) -> int | Rejected:
    """Return the tokens before the first trained one, which all sides must share."""
    if not all(side.mask.any() for side in sides):
        return Rejected("no_loss_tokens", "no trained token is left of a side")
    lengths = [int(np.argmax(side.mask)) for side in sides]
    first = sides[0].ids[: lengths[0]]
    if any(not np.array_equal(one.ids[:length], first) for one, length in zip(sides, lengths, strict=True)):
        return Rejected("prompt_differs", f"the prompts before the answers have {' and '.join(map(str, lengths))} ids")
    return lengths[0]


def _attribute(shorter: Example, whole: Example, messages_removed: int) -> Example:
    """Return a side with what was removed of its prompt, so that original = tokens + removed."""
    return replace(
        shorter,
        original_tokens=len(whole.ids),
        original_trained=int(whole.mask.sum()),
        messages_removed=messages_removed,
        exchanges_removed=len(whole.ids) - len(shorter.ids),
        exchanges_trained=int(whole.mask.sum()) - int(shorter.mask.sum()),
    )


def _join_sides(sides: Sequence[Example], kinds: Sequence[int], margin: float | None, prompt: int) -> Example:
    """Return both sides as one example, end to end."""
    starts = np.cumsum([0, *(len(side.ids) for side in sides)])
    joined = Example(
        ids=np.concatenate([side.ids for side in sides]),
        mask=np.concatenate([side.mask for side in sides]),
        span_starts=np.concatenate([one.span_starts + at for one, at in zip(sides, starts, strict=False)]),
        span_messages=np.concatenate([side.span_messages for side in sides]),
        span_kinds=np.concatenate([side.span_kinds for side in sides]),
        original_tokens=sum(side.original_tokens for side in sides),
        original_trained=sum(side.original_trained for side in sides),
        messages_removed=sides[0].messages_removed,
        exchanges_removed=sum(side.exchanges_removed for side in sides),
        tokens_cut=sum(side.tokens_cut for side in sides),
        exchanges_trained=sum(side.exchanges_trained for side in sides),
        cut_trained=sum(side.cut_trained for side in sides),
    )
    return _describe(joined, sides, kinds, prompt, margin)


def _describe(
    example: Example, parts: Sequence[Example], sides: Sequence[int], prompt: int, margin: float | None
) -> Example:
    columns = {
        "sides": list(sides),
        "side_lengths": [len(part.ids) for part in parts],
        "prompt_length": prompt,
        "margin": margin,
    }
    return replace(example, columns=columns)
