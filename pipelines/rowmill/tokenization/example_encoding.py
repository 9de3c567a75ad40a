"""Encode masked texts into examples, and keep the counts of a part."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rowmill.schema.conversation import Conversation
from rowmill.schema.rows import MaskedConversation, Rejected
from rowmill.tokenization.control_tokens import ControlStrings, contains_added_token
from rowmill.tokenization.encoded_batch import Example, list_examples, make_masked_batch
from rowmill.tokenization.encoded_texts import EncodedTexts
from rowmill.tokenization.encoder import Encoder
from rowmill.tokenization.reference_sample import ReferenceSample, Stretch

# ── Encoding a batch ───────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class TokenizationCounts:
    """Counts of one part; their sums over all parts are facts of the stage."""

    dropped: dict[str, int] = field(default_factory=dict[str, int])
    """Rows' text that the template did not print, by kind."""
    control_strings: dict[str, int] = field(default_factory=dict[str, int])
    """Occurrences of control tokens in rows' text, by role and string: `user <|im_end|>`."""
    controlled_rows: int = 0
    rows_losing_reasoning: int = 0
    """Rows of which an answer trains without its reasoning, because the template prints none."""
    template: dict[str, Any] = field(default_factory=dict[str, Any])
    """The template's observed behavior, for the report."""
    reference_path_texts: int = 0
    """Texts that took the reference path."""
    altered: int = 0
    """Texts whose ids decode to different text, because the tokenizer normalizes."""
    fast_path_mismatches: int = 0
    """Batches in which the fast path's ids or masks differed from the reference's."""
    engine_differs: bool = False
    """Whether ids in the sample differed: the whole part is then made again on the reference path."""
    sample: ReferenceSample = field(default_factory=ReferenceSample)
    """The stretches of the part's texts that were compared with the reference."""
    boundary_tokens: int = 0
    """Tokens that cross an edge of a span."""
    prompts_compared: int = 0
    """Rows whose generation prompt was encoded alone and compared with the row's ids."""
    prompts_that_differ: list[str] = field(default_factory=list[str])
    """Row ids of those rows whose token ids do not begin with the prompt's."""
    dropped_tokens: int = 0
    """Tokens of rows that were encoded and then rejected, as too long or without a target."""
    dropped_trained: int = 0
    """How many of `dropped_tokens` would have trained."""
    of_kind: dict[str, int] = field(default_factory=dict[str, int])
    """What only rows of one kind are counted by, by name."""

    def add_of_kind(self, name: str, count: int) -> None:
        """Add to a count that only rows of one kind have."""
        self.of_kind[name] = self.of_kind.get(name, 0) + count

    def add_control_strings(self, control: ControlStrings, one: Conversation) -> None:
        """Count control tokens in a row's text, by role and string."""
        self.controlled_rows += 1
        for name, count in control.count_occurrences(one.messages, one.tools, one.kwargs).items():
            self.control_strings[name] = self.control_strings.get(name, 0) + count

    def add_dropped(self, dropped: dict[str, int]) -> None:
        """Count the row's text that the template did not print."""
        for kind, count in dropped.items():
            self.dropped[kind] = self.dropped.get(kind, 0) + count


def encode_and_compare(encoder: Encoder, texts: Sequence[str], counts: TokenizationCounts) -> EncodedTexts:
    """Encode a batch and compare a sample with the reference; on any difference encode it all on the reference path."""
    encoded = encoder.encode(texts)
    counts.reference_path_texts += encoded.reference_texts
    counts.altered += encoded.altered
    if _matches_sample(encoder, texts, encoded, counts, continuation=False):
        return encoded
    return encoder.without_fast_path().encode(texts)


def encode_continuations_and_compare(
    encoder: Encoder, texts: Sequence[str], counts: TokenizationCounts
) -> EncodedTexts:
    """Encode continuation texts as `encode_and_compare` does; of them only a difference is counted."""
    encoded = encoder.encode_continuation(texts)
    if _matches_sample(encoder, texts, encoded, counts, continuation=True):
        return encoded
    return encoder.without_fast_path().encode_continuation(texts)


def _matches_sample(
    encoder: Encoder, texts: Sequence[str], encoded: EncodedTexts, counts: TokenizationCounts, *, continuation: bool
) -> bool:
    if encoded.reference_texts == len(texts):
        return True
    total = sum(map(len, texts))
    if counts.sample.characters + total <= counts.sample.minimum:
        counts.sample.characters += total
        stretches = [Stretch(i, 0, len(text)) for i, text in enumerate(texts)]
    else:
        stretches = counts.sample.choose(texts, encoder.find_control_strings(texts, encoded))
    if encoder.matches_reference(texts, encoded, stretches, continuation=continuation):
        return True
    counts.fast_path_mismatches += 1
    counts.engine_differs = True
    return False


def make_examples(
    masked: Sequence[MaskedConversation],
    ordinary: Sequence[list[tuple[int, int]]],
    encoder: Encoder,
    counts: TokenizationCounts,
    *,
    split: bool = False,
) -> "list[Example | Rejected]":
    """Encode masked texts in one batch and find the tokens of their spans.

    `ordinary[i]` are the ranges of text i that must not become control tokens. With `split` a text is cut where
    training begins, and the pieces are encoded separately, so that a prompt has the same ids as alone.
    """
    texts = [one.text for one in masked]
    if split or any(ordinary):
        cuts = [_find_trained_starts(one) if split else [] for one in masked]
        encoded = encoder.encode_pieces(
            texts, ordinary, cuts,
            encode=lambda pieces: encode_and_compare(encoder, pieces, counts),
            encode_continuation=lambda pieces: encode_continuations_and_compare(encoder, pieces, counts),
        )  # fmt: skip
    else:
        encoded = encode_and_compare(encoder, texts, counts)
    batch = make_masked_batch(masked, encoded)
    counts.boundary_tokens += batch.boundary_tokens
    made = list_examples(batch)
    for i, ranges in enumerate(ordinary):
        if ranges and contains_added_token(encoder.card, encoded.get_text(i), texts[i], ranges):
            made[i] = Rejected("control_token_in_content", "the tokenizer makes a control token of ordinary text")
    return made


def _find_trained_starts(one: MaskedConversation) -> list[int]:
    """Return the positions, other than 0, at which training begins after untrained text."""
    ends = {span.end for span in one.trained}
    return [span.start for span in one.trained if span.start and span.start not in ends]
