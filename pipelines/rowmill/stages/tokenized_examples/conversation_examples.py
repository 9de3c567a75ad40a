"""Conversations on the reference path: rendered, masked, encoded and fitted to the limit row by row.

render ─► mask ─► encode ─► too long? truncate, and again ─► Example
"""

import pyarrow as pa

from rowmill.schema.conversation import Conversation
from rowmill.schema.rows import Rejected
from rowmill.stages.tokenized_examples.conversation_encoding import (
    ConversationEncoder,
    decode_conversations,
    show_control_strings,
)
from rowmill.stages.tokenized_examples.conversation_shortening import ConversationShortener, RenderedCandidate
from rowmill.stages.tokenized_examples.example_length import LengthLimit, RowOutcome
from rowmill.tokenization.control_tokens import has_changed_placeholder
from rowmill.tokenization.example_encoding import TokenizationCounts


class ConversationExampleBuilder:
    """Builds the examples of one dataset's conversations."""

    def __init__(self, encoder: ConversationEncoder, limit: LengthLimit) -> None:
        """Store the steps of a conversation."""
        self._steps = encoder
        self._shortener = ConversationShortener(encoder, limit)

    def build(self, rows: pa.Table, counts: TokenizationCounts) -> list[RowOutcome]:
        """Build the examples of each row: one, or one per turn that the template prints otherwise while it is last."""
        decoded = decode_conversations(rows)
        controlled = self._steps.control.find_rows(rows)
        candidates: list[RenderedCandidate] = []
        outcomes: list[RowOutcome] = [[] for _ in decoded]
        for place, conversation in enumerate(decoded):
            rendered = self._render_candidates(place, conversation, bool(controlled[place]), counts)
            if isinstance(rendered, Rejected):
                outcomes[place] = rendered
            else:
                candidates.extend(rendered)
        encoded = self._steps.encode_masked(
            [one.masked for one in candidates], [one.ordinary for one in candidates], counts
        )
        for candidate, example in zip(candidates, encoded, strict=True):
            held = outcomes[candidate.place]
            if isinstance(held, Rejected):
                continue
            if isinstance(example, Rejected):
                outcomes[candidate.place] = example
                continue
            fitted = self._shortener.fit_to_limit(candidate, example, counts)
            outcomes[candidate.place] = fitted if isinstance(fitted, Rejected) else [*held, *fitted]
        return outcomes

    def _render_candidates(
        self, place: int, conversation: Conversation, controlled: bool, counts: TokenizationCounts
    ) -> list[RenderedCandidate] | Rejected:
        hidden = self._steps.hide_control(conversation, counts) if controlled else (conversation, dict[str, str]())
        if isinstance(hidden, Rejected):
            return hidden
        conversation, placeholders = hidden
        conversation = self._steps.limit_reasoning(conversation)
        candidates: list[RenderedCandidate] = []
        loses_reasoning = False
        for one, only in self._steps.masker.split_turns(conversation):
            masked = self._steps.mask(one, only=only)
            if isinstance(masked, Rejected):
                return masked
            if has_changed_placeholder(masked.text, placeholders):
                return Rejected("control_token_in_content", "the template changes the stand-in of a control string")
            counts.add_dropped(masked.dropped)
            if "reasoning" in masked.dropped:
                loses_reasoning = loses_reasoning or self._steps.loses_reasoning(one, masked)
            masked, ordinary = show_control_strings(masked, placeholders)
            candidates.append(RenderedCandidate(place, one, only, placeholders, masked, ordinary))
        counts.rows_losing_reasoning += loses_reasoning
        return self._steps.judge_row(conversation) or candidates
