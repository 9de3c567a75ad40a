"""Truncate a conversation that exceeds the context: remove exchanges and tool rounds first, then reasoning.

How many tokens fewer messages have is passed in as `measure`, because only a real render shows it.

    exchanges   S │ U1 A1 │ U2 A2 call result call result A3 │ U4        limit ↓
                S │         U2 A2 call result call result A3             after the last supervised
                S           U2 A2             call result A3             tool rounds of the last exchange
    reasoning   S           U2 A2             call result A3             oldest first, cut at a token
    tokens      ──────────────[last tokens]                              by the caller (`conversation_examples.py`)

Each state is a subset of the one before, and the first that fits is returned. So a larger limit never keeps fewer
messages, and truncating a second time changes nothing.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, takewhile
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rowmill.core.config import Config
from rowmill.core.json import Json
from rowmill.schema.rows import REASONING_KEY, ROW_KINDS, Message, Rejected, RowKind

_MAX_GUESSES = 8
_MERGE_SLACK_TOKENS = 8
"""Tokens that a cut text may lose by merging with the text around it."""
OverlongPolicy = Literal["truncate", "drop", "split", "raise", "keep"]
TruncationSide = Literal["left", "right"]


class Truncation(Config):
    """The options of the group `truncation`: what happens to examples longer than the context."""

    max_length: Annotated[int, Field(ge=2)] | None = None
    """Maximum tokens of an example, inclusive; null: the recipe's `seq_len`, which is also the maximum."""
    overlong: OverlongPolicy | None = None
    """truncate: shorten by structure, then by tokens; drop: reject; split: several examples; raise: stop the build;
    keep: leave it to packing's `slice_strategy`. null: keep if `slice_strategy` is set, else split for text and
    truncate for other rows."""
    truncate_side: TruncationSide = "left"
    """Side from which tokens are cut once messages and reasoning are removed; left keeps the last tokens."""
    token_cut: Literal["allow", "reject"] = "allow"  # noqa: S105  (tokens of text)
    """Whether tokens may be cut; reject: a row that is still too long by then is rejected as
    `overlong_after_structure`."""

    @model_validator(mode="before")
    @classmethod
    def _apply_aliases(cls, values: Json) -> Json:
        if not isinstance(values, dict) or "max_seq_len" not in values:
            return values
        given: dict[str, Json] = values
        if "max_length" in given:
            raise ValueError(
                "max_seq_len is an alias of max_length and both are given; only one is allowed; delete max_seq_len"
            )
        return {"max_length" if name == "max_seq_len" else name: value for name, value in given.items()}

    def policy(self, kind: RowKind, *, sliced: bool) -> OverlongPolicy:
        """Return the policy for overlong rows of a kind; `sliced`: packing's `slice_strategy` is set."""
        if self.overlong is not None:
            return self.overlong
        if sliced:
            return "keep"
        return "split" if ROW_KINDS[kind].is_running_text else "truncate"


@dataclass(frozen=True, slots=True)
class TruncatedConversation:
    """A conversation after truncation, and how many tokens each step removed.

    `kept[i]` is the original index of `messages[i]`. `reasoning_context` indexes the `messages` whose reasoning was
    cut: the rest of it stays as context without loss. `tokens == original_tokens - exchanges_removed -
    reasoning_removed`; with `needs_token_cut` that still exceeds the limit.
    """

    messages: tuple[Message, ...]
    kept: tuple[int, ...]
    original_tokens: int
    tokens: int
    reasoning_context: tuple[int, ...] = ()
    messages_removed: int = 0
    exchanges_removed: int = 0
    reasoning_removed: int = 0
    needs_token_cut: bool = False
    whole: tuple[int, ...] = ()
    """Original indices of this piece of a split before it was truncated."""
    tokens_left_out: int = 0
    """Tokens of the untrained pieces of a split between the previous piece and this one; for the last piece, also of
    those after it."""


@dataclass(frozen=True, slots=True)
class ConversationTruncator:
    """Truncates conversations to `limit` tokens; rendering and tokenization are passed in.

    `assistant_roles` are the roles the model speaks.
    """

    limit: int
    measure: Callable[[Sequence[Message], Sequence[Json] | None], int | None]
    """Counts the tokens of a real render of messages with tools; None if the template raises on them."""
    cut_reasoning: Callable[[str, int], str]
    """Returns the longest start of a text that has at most so many tokens."""
    assistant_roles: Container[str] = ("assistant",)
    token_cut: Literal["allow", "reject"] = "allow"  # noqa: S105  (tokens of text)

    def truncate(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, supervised: Sequence[bool]
    ) -> TruncatedConversation | Rejected:
        """Return the first state of the chain that fits; a fitting conversation is unchanged.

        `supervised[i]`: whether message i of the original trains; it is not decided anew for the kept messages.
        """
        original = self.measure(messages, tools)
        if original is None:
            return Rejected("template_error", "the template raises on the whole conversation")
        everything = tuple(range(len(messages)))
        whole = TruncatedConversation(tuple(messages), everything, original, original)
        if original <= self.limit:
            return whole
        # The last supervised message of the model, else the last supervised one.
        trained = [index for index, trains in enumerate(supervised) if trains]
        by_model = [index for index in trained if messages[index]["role"] in self.assistant_roles]
        anchor = max(by_model or trained, default=None)
        if anchor is None:
            return Rejected("no_assistant", "no supervised message to keep")
        kept, tokens = self._find_first_fit(messages, tools, _plan_removals(messages, anchor), original)
        state = replace(
            whole,
            messages=tuple(messages[index] for index in kept),
            kept=tuple(kept),
            tokens=tokens,
            messages_removed=len(messages) - len(kept),
            exchanges_removed=original - tokens,
        )
        return state if tokens <= self.limit else self._shorten_reasoning(state, tools)

    def remove_exchanges(self, messages: Sequence[Message], tools: Sequence[Json] | None, anchor: int) -> Sequence[int]:
        """Return the messages of the first state that fits, or of the last; reasoning stays as it is.

        The exchange of message `anchor` is never removed.
        """
        original = self.measure(messages, tools)
        if original is None or original <= self.limit:
            return range(len(messages))
        return self._find_first_fit(messages, tools, _plan_removals(messages, anchor), original)[0]

    def split(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, supervised: Sequence[bool]
    ) -> list[TruncatedConversation] | Rejected:
        """Split the conversation into pieces of as many consecutive exchanges as fit, each with system and tools.

        A single exchange that is too long is truncated. A piece without a supervised message is left out.
        """
        original = self.measure(messages, tools)
        if original is None:
            return Rejected("template_error", "the template raises on the whole conversation")
        if original <= self.limit:
            return [TruncatedConversation(tuple(messages), tuple(range(len(messages))), original, original)]
        leading, exchanges = _group_exchanges(messages)
        pieces: list[TruncatedConversation] = []
        start = left_out = 0
        while start < len(exchanges):
            stop = self._count_fitting_exchanges(messages, tools, leading, exchanges[start:]) + start
            kept = [*leading, *(index for exchange in exchanges[start:stop] for index in exchange)]
            start = stop
            if not any(supervised[index] for index in kept):
                left_out += self.measure([messages[i] for i in kept], tools) or 0
                continue
            piece = self.truncate([messages[i] for i in kept], tools, [supervised[i] for i in kept])
            if isinstance(piece, Rejected):
                return piece
            pieces.append(
                replace(piece, kept=tuple(kept[i] for i in piece.kept), whole=tuple(kept), tokens_left_out=left_out)
            )
            left_out = 0
        if pieces and left_out:
            pieces[-1] = replace(pieces[-1], tokens_left_out=pieces[-1].tokens_left_out + left_out)
        return pieces or Rejected("no_assistant", "no supervised message in any piece")

    def _count_fitting_exchanges(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None,
        leading: Sequence[int],
        exchanges: Sequence[Sequence[int]],
    ) -> int:
        """Return how many of the first exchanges fit together, at least 1."""

        def fits(number: int) -> bool:
            kept = [*leading, *(index for exchange in exchanges[:number] for index in exchange)]
            tokens = self.measure([messages[i] for i in kept], tools)
            return tokens is not None and tokens <= self.limit

        low, high = 1, len(exchanges) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _find_first_fit(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None,
        steps: Sequence[int],
        original: int,
    ) -> tuple[Sequence[int], int]:
        """Return the indices kept after the fewest removal steps that fit, else the most that the template renders.

        A binary search, since each step removes messages. Where the template raises on the remaining messages, the
        next step that renders is measured instead. The returned state was measured, and so was the one before it.
        """

        def kept_after(number: int) -> list[int]:
            return [index for index, step in enumerate(steps) if step == 0 or step > number]

        @cache
        def tokens_of(number: int) -> int | None:
            return original if number == 0 else self.measure([messages[i] for i in kept_after(number)], tools)

        def at_or_after(number: int, stop: int) -> int:
            while number < stop and tokens_of(number) is None:
                number += 1
            return number

        best: int | None = None
        low, high = 0, max(steps) + 1
        while high - low > 1:
            middle = (low + high) // 2
            probe = at_or_after(middle, high)
            tokens = tokens_of(probe) if probe < high else None
            if tokens is None or tokens <= self.limit:
                best, high = (best if tokens is None else probe), middle
            else:
                low = probe
        # Nothing fits: `low` was measured, and the template raises after every further step.
        best = low if best is None else best
        return kept_after(best), tokens_of(best) or 0

    def _shorten_reasoning(
        self, state: TruncatedConversation, tools: Sequence[Json] | None
    ) -> TruncatedConversation | Rejected:
        """Shorten reasoning, oldest first, until the conversation fits or no reasoning is left."""
        messages, tokens, cut = list(state.messages), state.tokens, list[int]()
        for index, message in enumerate(state.messages):
            if tokens <= self.limit:
                break
            if not message.get(REASONING_KEY):
                continue
            messages[index] = {key: value for key, value in message.items() if key != REASONING_KEY}
            without = self.measure(messages, tools)
            # The template does not print this reasoning, or raises without it: keep it.
            if without is None or without >= tokens:
                messages[index] = message
                continue
            if without <= self.limit:
                shortened = self._cut_reasoning_to_fit(messages, index, message, tools, without)
                if shortened is not None:
                    messages[index], without = shortened
                    cut.append(index)
            tokens = without
        if tokens > self.limit and self.token_cut == "reject":  # noqa: S105  (tokens of text)
            return Rejected("overlong_after_structure", f"{tokens} tokens after all else was cut, at most {self.limit}")
        return replace(
            state,
            messages=tuple(messages),
            tokens=tokens,
            reasoning_context=tuple(cut),
            reasoning_removed=state.tokens - tokens,
            needs_token_cut=tokens > self.limit,
        )

    def _cut_reasoning_to_fit(
        self,
        messages: Sequence[Message],
        index: int,
        message: Message,
        tools: Sequence[Json] | None,
        without: int,
    ) -> tuple[Message, int] | None:
        """Return the message with as much of its reasoning as fits, and the tokens; None if none fits.

        Each render shows by how many tokens the last guess was off, so three renders are typical; after
        `_MAX_GUESSES` the search bisects.
        """
        best: tuple[Message, int] | None = None
        low, high = 0, self.limit - without + _MERGE_SLACK_TOKENS
        guess = self.limit - without
        for attempt in count():
            if high <= low + 1:
                break
            guess = (low + high) // 2 if attempt >= _MAX_GUESSES else min(max(guess, low + 1), high - 1)
            text = self.cut_reasoning(message[REASONING_KEY], guess)
            if not text.strip():
                low, guess = guess, guess + 1
                continue
            shorter = {**message, REASONING_KEY: text}
            tokens = self.measure([*messages[:index], shorter, *messages[index + 1 :]], tools)
            if tokens is not None and tokens <= self.limit:
                best, low, guess = (shorter, tokens), guess, guess + max(1, self.limit - tokens)
            else:
                over = (high - low) // 2 if tokens is None else tokens - self.limit
                high, guess = guess, guess - max(1, over)
        return best


def find_kept_messages(
    messages: Sequence[Message], removed: int, agrees: Callable[[Sequence[int]], bool]
) -> Sequence[int] | None:
    """Return which messages `ConversationTruncator` kept when it removed so many; None if no such state agrees.

    Which message was the last supervised one is not stored, so each is tried, the last one first.
    """
    for anchor in reversed(range(len(messages))):
        steps = _plan_removals(messages, anchor)
        for last in sorted(set(steps)):
            kept = [index for index, step in enumerate(steps) if step == 0 or step > last]
            if len(messages) - len(kept) == removed and agrees(kept):
                return kept
    return None


def _group_exchanges(messages: Sequence[Message]) -> tuple[list[int], list[list[int]]]:
    """Return the indices of the leading system messages and of each exchange, which begins at a user message."""
    leading = len(list(takewhile(lambda message: message["role"] == "system", messages)))
    exchanges: list[list[int]] = []
    for index in range(leading, len(messages)):
        if messages[index]["role"] == "user" or not exchanges:
            exchanges.append([])
        exchanges[-1].append(index)
    return list(range(leading)), exchanges


def _plan_removals(messages: Sequence[Message], anchor: int) -> list[int]:
    """Return for every message the step at which it is removed, from 1; 0: never.

    The order: messages after the anchor; exchanges, oldest first; tool rounds of the anchor's exchange, oldest first.
    A result is removed together with its call.
    """
    # The message with the call of every tool result: by call id, else the last message with a call.
    callers: dict[int, int] = {}
    by_id: dict[str, int] = {}
    last: int | None = None
    for index, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            by_id[call["id"]] = last = index
        if message["role"] == "tool" and last is not None:
            callers[index] = by_id.get(message.get("tool_call_id", ""), last)
    leading, exchanges = _group_exchanges(messages)
    # A supervised tool result needs its call, so the call's exchange is the one to keep.
    pivot = callers.get(anchor, anchor)
    final = next((exchange for exchange in exchanges if pivot in exchange), list[int]())
    older = list(takewhile(lambda exchange: exchange is not final, exchanges))
    rounds = [[index] for index in final if index < pivot and messages[index].get("tool_calls")]
    after = [index for index in range(anchor + 1, len(messages)) if callers.get(index, index) > anchor]
    steps = [0] * len(messages)
    number = 0
    for leaving in [after, *older, *rounds]:
        removed = [index for index in leaving if index >= len(leading) and not steps[index]]
        number += bool(removed)
        for index in removed:
            steps[index] = number
    for result, caller in callers.items():
        if steps[caller] and not 0 < steps[result] < steps[caller]:
            steps[result] = steps[caller]
    return steps
