"""Prompts for reinforcement learning: the ids that a trainer sends to generation, of which none is trained.

messages ─► render with the generation prompt ─► encode ─► too long? drop ─► Example
"""

from dataclasses import dataclass

import pyarrow as pa

from rowmill.schema.conversation import Conversation
from rowmill.schema.rows import MaskedConversation, Rejected
from rowmill.stages.tokenized_examples.conversation_encoding import (
    ConversationEncoder,
    decode_conversations,
    show_control_strings,
)
from rowmill.stages.tokenized_examples.example_length import LengthLimit, RowOutcome
from rowmill.tokenization.control_tokens import has_changed_placeholder
from rowmill.tokenization.example_encoding import TokenizationCounts


@dataclass(frozen=True, slots=True)
class _RenderedPrompt:
    """A prompt's text, and the ranges in which control strings are text; `place` is its row's in the batch."""

    place: int
    masked: MaskedConversation
    ordinary: list[tuple[int, int]]


class PromptExampleBuilder:
    """Builds the examples of one dataset's prompts."""

    def __init__(self, encoder: ConversationEncoder, limit: LengthLimit) -> None:
        """Store the steps of a conversation."""
        self._steps = encoder
        self._limit = limit

    def build(self, rows: pa.Table, counts: TokenizationCounts) -> list[RowOutcome]:
        """Build the example of each row."""
        controlled = self._steps.control.find_rows(rows)
        outcomes: list[RowOutcome] = []
        rendered: list[_RenderedPrompt] = []
        for place, conversation in enumerate(decode_conversations(rows)):
            one = self._render(place, conversation, bool(controlled[place]), counts)
            outcomes.append(one if isinstance(one, Rejected) else [])
            rendered += [] if isinstance(one, Rejected) else [one]
        encoded = self._steps.encode_masked(
            [one.masked for one in rendered], [one.ordinary for one in rendered], counts
        )
        for one, example in zip(rendered, encoded, strict=True):
            if isinstance(example, Rejected):
                outcomes[one.place] = example
            else:
                # Nothing shortens a prompt: the kind refuses such policies.
                outcomes[one.place] = self._limit.apply_policy(example, "prompt", counts) or [example]
        return outcomes

    def _render(
        self, place: int, conversation: Conversation, controlled: bool, counts: TokenizationCounts
    ) -> _RenderedPrompt | Rejected:
        hidden = self._steps.hide_control(conversation, counts) if controlled else (conversation, dict[str, str]())
        if isinstance(hidden, Rejected):
            return hidden
        conversation, placeholders = hidden
        shown = self._steps.inline_reasoning(self._steps.limit_reasoning(conversation))
        masked = self._steps.masker.render_prompt(shown)
        if not isinstance(masked, Rejected):
            masked = self._steps.judge.reject_prompt(shown, masked.text) or masked
        if isinstance(masked, Rejected):
            return masked
        if has_changed_placeholder(masked.text, placeholders):
            return Rejected("control_token_in_content", "the template changes the stand-in of a control string")
        counts.add_dropped(masked.dropped)
        return _RenderedPrompt(place, *show_control_strings(masked, placeholders))
