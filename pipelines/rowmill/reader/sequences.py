"""Sequences as a reader hands them out, and the decoded row groups that they are views of.

Position ids are computed from span lengths, which is faster than decoding the column that holds the same numbers.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import (
    Ints,
    Numbers,
    Tokens,
    Weights,
    expand_ranges,
    fill_null_numbers,
    sum_by_span,
    view_numbers,
)
from rowmill.core.segment_trees import make_tree_positions
from rowmill.reader.source_losses import SourceNames
from rowmill.schema.examples import ROW_FIELDS, WEIGHT_COLUMN, find_token_fields
from rowmill.schema.rows import DOMAIN_COLUMN, PADDING_COLUMN, PARENTS_COLUMN

_OF_TOKENS = ("input_ids", "labels", WEIGHT_COLUMN)
_OF_SPANS = ("seq_lengths", PARENTS_COLUMN)
_OF_SPANS_WITH_NULLS = {"sides": -1, "prompt_lengths": -1, "margins": float("nan")}
"""Columns that are fields of `PackedSequence`; nulls, as fillers have, become these numbers."""
_SOURCE_COLUMNS = ("dataset", "segment_lengths", DOMAIN_COLUMN)


def list_columns(stored: Collection[str], *, with_sources: bool) -> list[str]:
    """Return the columns to decode of a shard that has these."""
    known = (*_OF_TOKENS, *_OF_SPANS, *_OF_SPANS_WITH_NULLS, PADDING_COLUMN)
    others = (*ROW_FIELDS, *(_SOURCE_COLUMNS if with_sources else ()))
    return [
        *(name for name in known if name in stored),
        *find_token_fields(stored),
        *(name for name in others if name in stored),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequence:
    """One sequence: `input_ids` and `labels` int32[T], `seq_lengths` int32[K] with sum T.

    Labels are unshifted: position i is itself the target, or -100. The first token of each of the K attention
    spans is not a target. `loss_weights` float32[T] are 0 where there is no target; None if the recipe has no weights.

    Preferences have values per span, which is a side: `sides` int8[K] are 1 for the chosen or good answer and 0 for the
    rejected or bad one; each begins with `prompt_lengths` int32[K] tokens of prompt; `margins` float32[K] are NaN where
    none is set. In a filler, sides and prompt lengths are -1. All three are None for other recipes.

    If the recipe has `packing.segment_multiple_of`, the last `padding` int32[K] tokens of each span are padding,
    without a target; else there is none, and `padding` is None.

    With `packing.share_prefixes` in the recipe, a span is a segment that several examples may share, and span k
    continues the earlier span `segment_parents[k]`, int32[K]; -1 for none. A token's weight is then the sum over the
    examples that train it. The logits at its predecessor predict it: for a span's first one, its parent's last token.

    If token rows carry fields, `token_fields` have [T] by name, or [T, size] of fixed-size lists, each number at the
    token that it is of, and `row_fields` an array of K values, one per span: a reward is float32 and NaN where there is
    none, a group's name is text or None.

    If sources are asked for, `segment_lengths`, `segment_datasets` and `segment_domains` have an entry for each
    segment, of which an attention span has several if attention is open: tokens with padding, and numbers in the
    reader's `source_names`, -1 for none.
    """

    input_ids: Tokens
    labels: Tokens
    seq_lengths: Tokens
    loss_weights: Weights | None = None
    sides: NDArray[np.int8] | None = None
    prompt_lengths: Tokens | None = None
    margins: Weights | None = None
    padding: Tokens | None = None
    token_fields: Mapping[str, Numbers] = field(default_factory=dict[str, Numbers])
    row_fields: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, "NDArray[Any]"])
    segment_parents: Tokens | None = None
    segment_lengths: Ints | None = None
    segment_datasets: Ints | None = None
    segment_domains: Ints | None = None

    @property
    def position_ids(self) -> Ints:
        """The position ids, int64[T], from 0 in each attention span, or on from those of its parent."""
        if self.segment_parents is not None:
            return make_tree_positions(self.segment_parents, self.seq_lengths)
        return expand_ranges(np.zeros_like(self.seq_lengths), self.seq_lengths)

    @property
    def real_lengths(self) -> Tokens:
        """The lengths of the attention spans without padding, int32[K]."""
        return self.seq_lengths if self.padding is None else self.seq_lengths - self.padding

    def copy(self) -> "PackedSequence":
        """Return a copy that does not keep a whole decoded row group in memory."""
        copies: dict[str, Any] = {}
        for column in fields(self):
            value = getattr(self, column.name)
            if isinstance(value, Mapping):
                copies[column.name] = {name: values.copy() for name, values in value.items()}
            elif value is not None:
                copies[column.name] = value.copy()
        return replace(self, **copies)


RowValues: TypeAlias = dict[str, tuple[list[int], Any]]
"""The values of all rows by name, end to end, and the bounds of rows in them: plain lists, as they are read singly."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedRowGroup:
    """A decoded row group: the values of all its rows by field of `PackedSequence`."""

    values: RowValues
    token_fields: RowValues
    row_fields: RowValues

    @classmethod
    def of(cls, columns: Mapping[str, Any], names: SourceNames | None = None) -> "DecodedRowGroup":
        """Take over decoded columns, those of `list_columns`; `names` number the sources."""
        tokens, spans = (columns[name].offsets.to_pylist() for name in ("input_ids", "seq_lengths"))
        found: RowValues = {
            name: (bounds, view_numbers(columns[name].values))
            for bounds, of_level in ((tokens, _OF_TOKENS), (spans, _OF_SPANS))
            for name in of_level
            if name in columns
        }
        for name, null in _OF_SPANS_WITH_NULLS.items():
            if name in columns:
                found[name] = spans, fill_null_numbers(columns[name].values, null)
        padding = columns.get(PADDING_COLUMN)
        if padding is not None:
            # Shards have the padding of each segment, a sequence that of each attention span.
            offsets = (view_numbers(column.offsets).astype(np.int64) for column in (padding, columns["seq_lengths"]))
            found["padding"] = spans, sum_by_span(view_numbers(padding.values), *offsets)
        if names is not None and "segment_lengths" in columns:
            lengths = columns["segment_lengths"]
            sizes, domains = view_numbers(lengths.values).astype(np.int64), np.full(len(lengths.values), -1)
            if padding is not None:
                sizes += view_numbers(padding.values)
            if DOMAIN_COLUMN in columns:
                domains = _number_names(columns[DOMAIN_COLUMN].values, names.domains)
            datasets = _number_names(columns["dataset"].cast(pa.string()), names.datasets)
            datasets = np.repeat(datasets, np.diff(view_numbers(lengths.offsets)))
            of_segments = {"segment_lengths": sizes, "segment_domains": domains, "segment_datasets": datasets}
            bounds = lengths.offsets.to_pylist()
            found |= {name: (bounds, values) for name, values in of_segments.items()}
        return cls(
            found,
            {name: (tokens, view_numbers(columns[name].values)) for name in find_token_fields(columns)},
            {name: (spans, _decode_row_field(columns[name])) for name in ROW_FIELDS if name in columns},
        )

    @property
    def size_bytes(self) -> int:
        """Return the memory that its numbers take, some bytes less than all of it takes."""
        return sum(values.nbytes for _, values in (*self.values.values(), *self.token_fields.values()))

    def row(self, i: int) -> PackedSequence:
        """Return a sequence: views of the row group, so copy it if it is kept."""
        of_row, token_fields, row_fields = (
            {name: values[bounds[i] : bounds[i + 1]] for name, (bounds, values) in fields.items()}
            for fields in (self.values, self.token_fields, self.row_fields)
        )
        return PackedSequence(**of_row, token_fields=token_fields, row_fields=row_fields)


def _number_names(values: pa.Array, names: tuple[str, ...]) -> Ints:
    """Return each value's number among the names, -1 for another one."""
    # Imported here: only batches with sources need it.
    import pyarrow.compute as pc

    return pc.index_in(values, pa.array(names, pa.string())).fill_null(-1).to_numpy().astype(np.int64)


def _decode_row_field(column: pa.ListArray) -> NDArray[Any]:
    """Return a field's value for each span, which is a segment: NaN for a missing number, None for a missing text."""
    values = column.values
    if pa.types.is_floating(values.type):
        return fill_null_numbers(values, np.nan)
    return np.array(values.to_pylist(), object)
