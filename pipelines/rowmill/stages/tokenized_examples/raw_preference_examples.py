"""Preferences of plain text (`format.text: raw`): prompt and answer as tokens, end to end, without a chat template.

prompt "The sea is"  chosen " calm."  rejected " loud."   ─► ids of each prompt + answer + EOS
"""

from collections.abc import Sequence
from itertools import islice

import pyarrow as pa

from rowmill.core.json import from_json_column
from rowmill.schema.rows import Rejected
from rowmill.stages.tokenized_examples.example_length import LengthLimit, RowOutcome
from rowmill.stages.tokenized_examples.plain_text_examples import PlainTextExampleBuilder
from rowmill.stages.tokenized_examples.preference_examples import (
    CHOSEN,
    REJECTED,
    cut_answers,
    finish_sides,
    measure_prompt,
)
from rowmill.tokenization.encoded_batch import Example
from rowmill.tokenization.example_encoding import TokenizationCounts


class RawPreferenceExampleBuilder:
    """Builds the examples of one dataset's preferences of plain text."""

    def __init__(self, texts: PlainTextExampleBuilder, limit: LengthLimit) -> None:
        """Store what encodes a prompt with its answer."""
        self._texts = texts
        self._limit = limit
        self._is_paired = texts.dataset.format.get_objective() == "paired"

    def build(self, rows: pa.Table, counts: TokenizationCounts) -> list[RowOutcome]:
        """Build the examples of each row: one of both sides, or one of each."""
        prompts = [messages[0]["content"] for messages in from_json_column(rows.column("messages"))]
        columns = [from_json_column(rows.column(name)) for name in ("chosen", "rejected")]
        margins = rows.column("margin").to_pylist()
        answers = [
            {side: messages[0]["content"] for side, messages in zip((CHOSEN, REJECTED), own, strict=True) if messages}
            for own in zip(*columns, strict=True)
        ]
        encoded = iter(
            self._texts.encode_pairs(
                [prompt for prompt, own in zip(prompts, answers, strict=True) for _ in own],
                [answer for own in answers for answer in own.values()],
                counts,
                trains=(False, True),
            )
        )
        return [
            self._finish_row(list(islice(encoded, len(own))), list(own), margin, counts)
            for own, margin in zip(answers, margins, strict=True)
        ]

    def _finish_row(
        self, parts: list[Example], sides: Sequence[int], margin: float | None, counts: TokenizationCounts
    ) -> RowOutcome:
        fitted = self._fit_sides(parts)
        if isinstance(fitted, Rejected):
            counts.dropped_tokens += sum(len(part.ids) for part in parts)
            counts.dropped_trained += sum(int(part.mask.sum()) for part in parts)
            return fitted
        return finish_sides(fitted, sides, margin, counts, is_paired=self._is_paired)

    def _fit_sides(self, parts: list[Example]) -> list[Example] | Rejected:
        """Apply the overlong policy to both sides together; a text has no exchanges that could be removed."""
        tokens, policy = max(len(part.ids) for part in parts), self._limit.get_policy("preference")
        if tokens <= self._limit.tokens or policy in ("keep", "raise"):
            return parts
        if policy == "drop":
            return Rejected("overlong", f"{tokens} tokens, at most {self._limit.tokens}")
        if self._limit.options.token_cut == "reject":  # noqa: S105  (tokens of text)
            return Rejected("overlong_after_structure", f"{tokens} tokens of plain text, at most {self._limit.tokens}")
        prompt = measure_prompt(parts)
        return prompt if isinstance(prompt, Rejected) else cut_answers(parts, prompt, self._limit.tokens)
