"""Rows that are token ids already: kept exactly, and held against the tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Bools, Tokens, Weights
from rowmill.schema.rows import Rejected
from rowmill.stages.tokenized_examples.custom_examples import fit_unstructured, make_unstructured_example
from rowmill.stages.tokenized_examples.example_length import LengthLimit, RowOutcome
from rowmill.tokenization.encoder import Encoder
from rowmill.tokenization.example_encoding import TokenizationCounts

COMPARED_ROWS = 64
"""Rows of a batch whose text is encoded again: enough to notice another tokenizer."""


class TokenExampleBuilder:
    """Builds the examples of one dataset's ids; ids must be below `vocab_size`.

    `fields` are columns of the rows with a number per token, which stays beside its token.
    """

    def __init__(self, encoder: Encoder, limit: LengthLimit, vocab_size: int, fields: Sequence[str] = ()) -> None:
        """Store the tokenizer and the limits."""
        self._fields = tuple(fields)
        self._encoder = encoder
        self._limit = limit
        self._vocab_size = vocab_size

    def build(self, rows: pa.Table, counts: TokenizationCounts) -> list[RowOutcome]:
        """Build the example of each row."""
        ids, masks = (_split_lists(rows.column(name)) for name in ("input_ids", "loss_mask"))
        fields = {name: _split_lists(rows.column(name)) for name in self._fields}
        outcomes = [
            self._build_row(own, mask, {name: values[place] for name, values in fields.items()}, counts)
            for place, (own, mask) in enumerate(zip(ids, masks, strict=True))
        ]
        self._compare([own for own, made in zip(ids, outcomes, strict=True) if not isinstance(made, Rejected)], counts)
        return outcomes

    def _build_row(
        self, ids: Tokens, mask: Bools, fields: Mapping[str, Weights], counts: TokenizationCounts
    ) -> RowOutcome:
        if int(ids.max()) >= self._vocab_size:
            return Rejected("bad_tokens", f"id {int(ids.max())} is unknown; ids are 0 to {self._vocab_size - 1}")
        example = replace(make_unstructured_example(ids, mask), token_fields=fields)
        return fit_unstructured(example, "tokens", self._limit, self._encoder.card.bos_id, counts)

    def _compare(self, ids: Sequence[Tokens], counts: TokenizationCounts) -> None:
        """Count ids that the tokenizer has no token for, and of some rows whether their text has the same ids."""
        if not ids:
            return
        every = np.concatenate(ids)
        known = np.zeros(self._vocab_size, np.bool_)
        known[self._token_ids[self._token_ids < self._vocab_size]] = True
        chosen = ids[:COMPARED_ROWS]
        encoded = self._encoder.encode([self._encoder.decode(one.tolist()) for one in chosen])
        again = np.split(encoded.ids, encoded.offsets[1:-1])
        counts.add_of_kind("unknown_ids", int((~known[every]).sum()))
        counts.add_of_kind("retokenized", len(chosen))
        counts.add_of_kind("same_tokenization", sum(map(np.array_equal, chosen, again)))

    @cached_property
    def _token_ids(self) -> Tokens:
        """The ids that the tokenizer has a token for."""
        vocabulary: dict[str, int] = self._encoder.reference.get_vocab(with_added_tokens=True)
        return np.fromiter(vocabulary.values(), np.int32, len(vocabulary))


def _split_lists(column: pa.ChunkedArray) -> list[np.ndarray]:
    lists = column.combine_chunks()
    offsets = np.asarray(lists.offsets)
    return np.split(lists.flatten().to_numpy(zero_copy_only=False), offsets[1:-1] - offsets[0]) if len(lists) else []
