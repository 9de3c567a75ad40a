"""Conversations that are longer than the limit: shorten them, and render, mask and encode what is left."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rowmill.conversation.truncation import ConversationTruncator, TruncatedConversation
from rowmill.schema.conversation import Conversation
from rowmill.schema.rows import MaskedConversation, Message, Rejected, Span
from rowmill.stages.tokenized_examples.conversation_encoding import ConversationEncoder, show_control_strings
from rowmill.stages.tokenized_examples.example_length import LengthLimit, RowOutcome, reject_for_length
from rowmill.tokenization.encoded_batch import Example
from rowmill.tokenization.example_encoding import TokenizationCounts
from rowmill.tokenization.token_truncation import truncate_tokens


@dataclass(frozen=True, slots=True)
class RenderedCandidate:
    """A conversation that becomes one example, with its mask; `place` is its row's in the batch."""

    place: int
    conversation: Conversation
    only: frozenset[int] | None
    placeholders: dict[str, str]
    masked: MaskedConversation
    ordinary: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ConversationShortener:
    """Fits the examples of one dataset's conversations to the limit."""

    steps: ConversationEncoder
    limit: LengthLimit

    def fit_to_limit(self, candidate: RenderedCandidate, example: Example, counts: TokenizationCounts) -> RowOutcome:
        """Apply the overlong policy to one example."""
        settled = self.limit.apply_policy(example, "conversation", counts)
        if settled is not None:
            return settled
        splits = self.limit.options.overlong == "split"
        shortened = self._truncate(candidate, example, counts, split=splits)
        if isinstance(shortened, Rejected):
            return reject_for_length(example, shortened, counts)
        if splits:
            counts.dropped_trained += max(0, example.original_trained - sum(one.original_trained for one in shortened))
        return shortened

    def _truncate(
        self, candidate: RenderedCandidate, original: Example, counts: TokenizationCounts, *, split: bool
    ) -> RowOutcome:
        conversation, masker = candidate.conversation, self.steps.masker
        supervised = frozenset(masker.supervised(conversation.messages))
        chosen = supervised if candidate.only is None else supervised & candidate.only
        flags = [i in chosen for i in range(len(conversation.messages))]
        truncator = ConversationTruncator(
            limit=self.limit.tokens,
            measure=lambda messages, tools: self.steps.count_rendered_tokens(
                conversation, messages, tools, candidate.placeholders
            ),
            cut_reasoning=self.steps.cut_text,
            assistant_roles=self.steps.dataset.format.get_token_options().assistant_roles,
            token_cut=self.limit.options.token_cut,
        )
        messages, tools = conversation.messages, conversation.tools
        shortened = truncator.split(messages, tools, flags) if split else truncator.truncate(messages, tools, flags)
        if isinstance(shortened, Rejected):
            return shortened
        pieces = shortened if isinstance(shortened, list) else [shortened]
        made: list[Example] = []
        for piece in pieces:
            example = self._rerender_piece(candidate, piece, chosen, counts)
            if isinstance(example, Rejected):
                return example
            counts.dropped_tokens += piece.tokens_left_out
            made.append(self._attribute_removed_tokens(candidate, example, None if split else original, piece, chosen))
        return made

    def _rerender_piece(
        self,
        candidate: RenderedCandidate,
        piece: TruncatedConversation,
        chosen: frozenset[int],
        counts: TokenizationCounts,
    ) -> Example | Rejected:
        """Render and mask a shortened conversation, and cut tokens if structure was not enough."""
        example = self._rerender(candidate, piece.messages, piece.kept, chosen, counts, piece.reasoning_context)
        if isinstance(example, Rejected) or len(example.ids) <= self.limit.tokens:
            return example
        bos = self.steps.encoder.card.bos_id
        return truncate_tokens(example, self.limit.tokens, self.limit.options.truncate_side, bos)

    def _rerender(
        self,
        candidate: RenderedCandidate,
        messages: Sequence[Message],
        kept: Sequence[int],
        chosen: frozenset[int],
        counts: TokenizationCounts,
        reasoning_context: Sequence[int] = (),
    ) -> Example | Rejected:
        """Render and mask some of a conversation's messages; `kept[i]` is the original index of `messages[i]`."""
        conversation = replace(candidate.conversation, messages=list(messages))
        only = frozenset(new for new, old in enumerate(kept) if old in chosen)
        masked = self.steps.mask(conversation, only=only)
        if isinstance(masked, Rejected):
            return masked
        masked = _mask_cut_reasoning(masked, frozenset(reasoning_context))
        masked, ordinary = show_control_strings(masked, candidate.placeholders)
        return self.steps.encode_masked([masked], [ordinary], counts)[0]

    def _attribute_removed_tokens(
        self,
        candidate: RenderedCandidate,
        example: Example,
        original: Example | None,
        piece: TruncatedConversation,
        chosen: frozenset[int],
    ) -> Example:
        """Attribute the removed tokens to the stages of truncation, so that original = tokens + removed.

        Without `original`, the example is one of several pieces, and its own length before shortening counts.
        """
        left = int(example.mask.sum()) + example.cut_trained
        after_exchanges = left
        if piece.reasoning_removed or piece.reasoning_context:
            after_exchanges = self._count_trained_tokens(candidate, piece.kept, chosen, otherwise=left)
        tokens, trained = piece.original_tokens, after_exchanges
        if original is not None:
            tokens, trained = len(original.ids), original.original_trained
        elif piece.messages_removed:
            trained = self._count_trained_tokens(candidate, piece.whole, chosen, otherwise=after_exchanges)
        return replace(
            example,
            original_tokens=tokens,
            original_trained=trained,
            messages_removed=piece.messages_removed,
            exchanges_removed=tokens - len(example.ids) - example.tokens_cut - piece.reasoning_removed,
            reasoning_removed=piece.reasoning_removed,
            exchanges_trained=trained - after_exchanges,
            reasoning_trained=after_exchanges - left,
        )

    def _count_trained_tokens(
        self, candidate: RenderedCandidate, kept: Sequence[int], chosen: frozenset[int], *, otherwise: int
    ) -> int:
        """Count the trained tokens of some of a conversation's messages, `otherwise` if they have no mask."""
        messages = [candidate.conversation.messages[i] for i in kept]
        example = self._rerender(candidate, messages, kept, chosen, TokenizationCounts())
        return otherwise if isinstance(example, Rejected) else int(example.mask.sum())


def _mask_cut_reasoning(masked: MaskedConversation, messages: frozenset[int]) -> MaskedConversation:
    """Remove the loss from truncated reasoning: it stays as context, but the model must not learn to stop there."""
    cut = [p for p in masked.pieces if p.kind == "reasoning" and p.message in messages]
    if not cut:
        return masked
    trained = list(masked.trained)
    for piece in cut:
        trained = [part for span in trained for part in _subtract_range(span, piece.start, piece.end)]
    return replace(masked, trained=tuple(trained))


def _subtract_range(span: Span, start: int, end: int) -> Iterator[Span]:
    if end <= span.start or span.end <= start:
        yield span
        return
    if span.start < start:
        yield replace(span, end=start)
    if end < span.end:
        yield replace(span, start=end)
