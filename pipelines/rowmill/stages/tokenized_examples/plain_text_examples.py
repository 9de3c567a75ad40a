"""Pairs and documents: text that is tokenized without a chat template.

pair   encode input, encode output as its continuation ─► BOS input sep output EOS
text   encode ─► BOS text EOS ─► too long? windows, or the first tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Ints
from rowmill.core.errors import ConfigError
from rowmill.recipe.dataset import Dataset
from rowmill.schema.examples import SPAN_KINDS
from rowmill.stages.tokenized_examples.example_length import LengthLimit, RowOutcome
from rowmill.tokenization.concatenation import (
    TokenColumn,
    concat_token_columns,
    count_boundary_tokens,
    make_constant_column,
    omit_existing_token,
    split_at_byte,
)
from rowmill.tokenization.encoded_batch import TEMPLATE_KIND, Example
from rowmill.tokenization.encoded_texts import EncodedTexts
from rowmill.tokenization.encoder import Encoder
from rowmill.tokenization.example_encoding import (
    TokenizationCounts,
    encode_and_compare,
    encode_continuations_and_compare,
)
from rowmill.tokenization.token_truncation import cut_pair, split_into_windows


@dataclass(frozen=True, slots=True)
class PlainTextExampleBuilder:
    """Builds the examples of a dataset's pairs and documents."""

    encoder: Encoder
    dataset: Dataset
    limit: LengthLimit

    # ── pairs ──

    def build_pairs(self, rows: pa.Table, counts: TokenizationCounts) -> list[RowOutcome]:
        """Build one example of each row's input and output."""
        texts, outputs = (rows.column(name).to_pylist() for name in ("text", "output"))
        separator = self.dataset.format.get_token_options().separate_with
        joint = separator if isinstance(separator, str) else ""
        inputs = [text + joint for text in texts]
        trains = _resolve_pair_loss(self.dataset)
        columns, sizes = self._make_pair_columns(inputs, outputs, counts, trains=trains)
        first = 1 if columns[0].kind == TEMPLATE_KIND else 0
        return [
            self._fit_pair(one, int(sizes[i]), first, counts) for i, one in enumerate(concat_token_columns(columns))
        ]

    def encode_pairs(
        self, inputs: Sequence[str], outputs: Sequence[str], counts: TokenizationCounts, *, trains: tuple[bool, bool]
    ) -> list[Example]:
        """Return the example of each input with its output, of any length; `trains` says which of them is trained."""
        if not inputs:
            return []
        return list(concat_token_columns(self._make_pair_columns(inputs, outputs, counts, trains=trains)[0]))

    def _make_pair_columns(
        self, inputs: Sequence[str], outputs: Sequence[str], counts: TokenizationCounts, *, trains: tuple[bool, bool]
    ) -> tuple[list[TokenColumn], Ints]:
        """Return the tokens of pairs in columns, and the number of those of each input."""
        card, separator = self.encoder.card, self.dataset.format.get_token_options().separate_with
        prompt, answer = SPAN_KINDS.index("prompt"), SPAN_KINDS.index("assistant")
        trains_input, trains_output = trains
        given, answers = self._encode_texts(inputs, outputs, counts, trains_output=trains_output)
        columns = [
            *self._make_edge_column("add_bos", card.bos_id, card.adds_bos, len(inputs), trains=False),
            TokenColumn(given.ids, given.offsets, prompt, trains_input),
        ]
        if isinstance(separator, int):
            columns.append(make_constant_column(separator, len(inputs), kind=prompt, trains=trains_input))
        columns.append(TokenColumn(answers.ids, answers.offsets, answer, trains_output))
        has_eos = card.eos_id is not None
        columns += self._make_edge_column("add_eos", card.eos_id, has_eos, len(inputs), trains=trains_output)
        return columns, np.diff(given.offsets)

    def _encode_texts(
        self, inputs: Sequence[str], outputs: Sequence[str], counts: TokenizationCounts, *, trains_output: bool
    ) -> tuple[EncodedTexts, EncodedTexts]:
        """Encode inputs and outputs: apart, or as one text cut between them."""
        if self.dataset.loss.boundary != "whole":
            given = encode_and_compare(self.encoder, inputs, counts)
            return given, encode_continuations_and_compare(self.encoder, outputs, counts)
        encoded = encode_and_compare(self.encoder, [a + b for a, b in zip(inputs, outputs, strict=True)], counts)
        edges = np.array([len(text.encode()) for text in inputs], np.int64)
        counts.boundary_tokens += count_boundary_tokens(encoded, edges)
        return split_at_byte(encoded, edges, boundary_tokens_first=trains_output)

    def _fit_pair(self, example: Example, input_tokens: int, first: int, counts: TokenizationCounts) -> RowOutcome:
        settled = self.limit.apply_policy(example, "pair", counts)
        if settled is not None:
            return settled
        return [cut_pair(example, self.limit.tokens, self.limit.options.truncate_side, input_tokens, first)]

    # ── documents ──

    def build_documents(self, rows: pa.Table, counts: TokenizationCounts) -> list[RowOutcome]:
        """Build the examples of each row's text: one, or a window each if it is too long and split."""
        card, texts = self.encoder.card, rows.column("text").to_pylist()
        encoded = encode_and_compare(self.encoder, texts, counts)
        columns = [
            *self._make_edge_column("add_bos", card.bos_id, card.bos_id is not None, len(texts), trains=False),
            TokenColumn(encoded.ids, encoded.offsets, SPAN_KINDS.index("record"), trains=True),
            *self._make_edge_column("add_eos", card.eos_id, card.eos_id is not None, len(texts), trains=True),
        ]
        if columns[0].kind == TEMPLATE_KIND:
            columns[0] = omit_existing_token(columns[0], encoded, 0)
        if columns[-1].kind == TEMPLATE_KIND:
            columns[-1] = omit_existing_token(columns[-1], encoded, -1)
        return [self._fit_document(one, counts) for one in concat_token_columns(columns)]

    def _fit_document(self, example: Example, counts: TokenizationCounts) -> RowOutcome:
        settled = self.limit.apply_policy(example, "text", counts)
        if settled is not None:
            return settled
        if self.limit.get_policy("text") == "split":
            return split_into_windows(example, self.limit.tokens)
        return [example.cut(0, self.limit.tokens)]

    # ── BOS and EOS ──

    def _make_edge_column(
        self, option: Literal["add_bos", "add_eos"], token_id: int | None, by_itself: bool, count: int, *, trains: bool
    ) -> list[TokenColumn]:
        """Return the column of a BOS or EOS, or none: `auto` adds the token if the tokenizer has it."""
        options = self.dataset.format.get_token_options()
        wanted = options.add_bos if option == "add_bos" else options.add_eos
        if wanted is False or (wanted == "auto" and not by_itself):
            return []
        if token_id is None:
            raise ConfigError(
                f"format.{option}: true, but the tokenizer has no such token; expected auto or false; set auto"
            )
        return [make_constant_column(token_id, count, kind=TEMPLATE_KIND, trains=trains)]


def _resolve_pair_loss(dataset: Dataset) -> tuple[bool, bool]:
    """Return whether a pair's input and output are trained."""
    loss = dataset.loss
    if loss.trains_everything:
        return True, True
    if not loss.mask and loss.mask_default == "mask":
        return False, True
    return (
        loss.mask.get("prompt", loss.mask_default) == "train",
        loss.mask.get("response", loss.mask_default) == "train",
    )
