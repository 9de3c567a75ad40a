"""Rows whose kind builds their tokens itself."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Bools, Tokens
from rowmill.core.json import from_json
from rowmill.formats.built_examples import BuiltExample, check_built_example
from rowmill.formats.custom import BuildContext
from rowmill.formats.kind import TokenBuilder
from rowmill.recipe.dataset import Dataset
from rowmill.schema.examples import SPAN_KINDS
from rowmill.schema.rows import Rejected, RowKind
from rowmill.stages.tokenized_examples.example_length import LengthLimit, RowOutcome, reject_for_length
from rowmill.tokenization.encoded_batch import Example
from rowmill.tokenization.encoder import Encoder
from rowmill.tokenization.example_encoding import TokenizationCounts
from rowmill.tokenization.token_truncation import split_into_windows, truncate_tokens


@dataclass(slots=True)
class CustomExampleBuilder:
    """Builds examples with the kind's own builder, which is opened at the first row; `base` is the project's folder."""

    encoder: Encoder
    dataset: Dataset
    limit: LengthLimit
    base: Path
    _build_tokens: TokenBuilder | None = field(default=None, init=False)

    def build(self, rows: pa.Table, counts: TokenizationCounts) -> list[RowOutcome]:
        """Build the examples of each row's record."""
        records = rows.column("record").to_pylist()
        if self._build_tokens is None and records:
            context = BuildContext(self.encoder.to_transformers, self.dataset, self.limit.tokens)
            self._build_tokens = self.dataset.format.open_example_builder(context, self.base)
        if self._build_tokens is None:
            why = Rejected("bad_example", f"a {self.dataset.format.get_name()} dataset builds no tokens of records")
            return [why] * len(records)
        vocab_size = self.encoder.card.vocab_size
        return [
            self._fit_example(check_built_example(self._build_tokens(from_json(text)), vocab_size), counts)
            for text in records
        ]

    def _fit_example(self, built: BuiltExample | Rejected, counts: TokenizationCounts) -> RowOutcome:
        if isinstance(built, Rejected):
            return built
        example = make_unstructured_example(built.ids, built.mask, built.domain)
        return fit_unstructured(example, "record", self.limit, self.encoder.card.bos_id, counts)


def fit_unstructured(
    example: Example, kind: RowKind, limit: LengthLimit, bos_id: int | None, counts: TokenizationCounts
) -> RowOutcome:
    """Apply the overlong policy to an example without structure."""
    settled = limit.apply_policy(example, kind, counts)
    if settled is not None:
        return settled
    if limit.get_policy(kind) == "split":
        return split_into_windows(example, limit.tokens)
    if limit.options.token_cut == "reject":  # noqa: S105  (tokens of text)
        why = Rejected("overlong_after_structure", f"{len(example.ids)} tokens, at most {limit.tokens}")
        return reject_for_length(example, why, counts)
    return [truncate_tokens(example, limit.tokens, limit.options.truncate_side, bos_id)]


def make_unstructured_example(ids: Tokens, mask: Bools, domain: str | None = None) -> Example:
    """Return an example of which only ids and mask are known: it has a span for each run of trained or other tokens."""
    # The first token is never a target and belongs to the run after it.
    starts = np.append(0, np.flatnonzero(np.diff(mask[1:])) + 2)
    trains = mask[np.minimum(np.maximum(starts, 1), len(mask) - 1)]
    return Example(
        ids=ids,
        mask=mask,
        span_starts=starts,
        span_messages=np.full(len(starts), -1, np.int64),
        span_kinds=np.where(trains, SPAN_KINDS.index("record"), SPAN_KINDS.index("prompt")).astype(np.int8),
        original_tokens=len(ids),
        original_trained=int(mask.sum()),
        domain=domain,
    )
