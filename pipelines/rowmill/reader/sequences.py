"""Sequences as a reader hands them out, and the decoded row groups that they are views of.

Position ids are computed from span lengths, which is faster than decoding the column that holds the same numbers.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

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

_COLUMNS = ("input_ids", "labels", "seq_lengths")
_OPTIONAL_COLUMNS = (WEIGHT_COLUMN, "sides", "prompt_lengths", "margins", PADDING_COLUMN, PARENTS_COLUMN)
"""Read only where the shards have them."""
_SOURCE_COLUMNS = ("dataset", "segment_lengths", DOMAIN_COLUMN)


def list_columns(stored: Collection[str], *, with_sources: bool) -> list[str]:
    """Return the columns to decode of a shard that has these."""
    sources = (name for name in _SOURCE_COLUMNS if with_sources and name in stored)
    fields = (name for name in ROW_FIELDS if name in stored)
    return [
        *_COLUMNS,
        *(name for name in _OPTIONAL_COLUMNS if name in stored),
        *find_token_fields(stored),
        *fields,
        *sources,
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


@dataclass(frozen=True, slots=True, eq=False)
class DecodedRowGroup:
    """A decoded row group, flat; the bounds are plain lists because they are read one by one."""

    ids: Tokens
    labels: Tokens
    bounds: list[int]
    lengths: Tokens
    span_bounds: list[int]
    weights: Weights | None = None
    sides: NDArray[np.int8] | None = None
    prompt_lengths: Tokens | None = None
    margins: Weights | None = None
    padding: Tokens | None = None
    token_fields: Mapping[str, Numbers] = field(default_factory=dict[str, Numbers])
    row_fields: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, "NDArray[Any]"])
    parents: Tokens | None = None
    sources: "_SegmentSources | None" = None

    @classmethod
    def of(cls, columns: Mapping[str, Any], names: SourceNames | None = None) -> "DecodedRowGroup":
        """Take over decoded columns, those of `list_columns`; `names` number the sources."""
        ids, lengths = columns["input_ids"], columns["seq_lengths"]
        padding = None
        if PADDING_COLUMN in columns:
            # Shards have the padding of each segment, a sequence that of each attention span.
            of_segments = columns[PADDING_COLUMN]
            offsets = (view_numbers(column.offsets).astype(np.int64) for column in (of_segments, lengths))
            padding = sum_by_span(view_numbers(of_segments.values), *offsets)
        return cls(
            ids=view_numbers(ids.values),
            labels=view_numbers(columns["labels"].values),
            bounds=ids.offsets.to_pylist(),
            lengths=view_numbers(lengths.values),
            span_bounds=lengths.offsets.to_pylist(),
            weights=view_numbers(columns[WEIGHT_COLUMN].values) if WEIGHT_COLUMN in columns else None,
            sides=_fill_nulls(columns.get("sides"), -1),
            prompt_lengths=_fill_nulls(columns.get("prompt_lengths"), -1),
            margins=_fill_nulls(columns.get("margins"), float("nan")),
            padding=padding,
            token_fields={name: view_numbers(columns[name].values) for name in find_token_fields(columns)},
            row_fields={name: _decode_row_field(columns[name]) for name in ROW_FIELDS if name in columns},
            parents=view_numbers(columns[PARENTS_COLUMN].values) if PARENTS_COLUMN in columns else None,
            sources=None if names is None else _SegmentSources.of(columns, names),
        )

    @property
    def size_bytes(self) -> int:
        """Return the memory that its tokens take, some bytes less than all of it takes."""
        numbers = [*self.token_fields.values(), *([] if self.weights is None else [self.weights])]
        return self.ids.nbytes + self.labels.nbytes + sum(number.nbytes for number in numbers)

    def row(self, i: int) -> PackedSequence:
        """Return a sequence: views of the row group, so copy it if it is kept."""
        tokens, spans = slice(self.bounds[i], self.bounds[i + 1]), slice(self.span_bounds[i], self.span_bounds[i + 1])
        sources: dict[str, Any] = {} if self.sources is None else self.sources.row(i)
        return PackedSequence(
            self.ids[tokens],
            self.labels[tokens],
            self.lengths[spans],
            None if self.weights is None else self.weights[tokens],
            sides=None if self.sides is None else self.sides[spans],
            prompt_lengths=None if self.prompt_lengths is None else self.prompt_lengths[spans],
            margins=None if self.margins is None else self.margins[spans],
            padding=None if self.padding is None else self.padding[spans],
            token_fields={name: values[tokens] for name, values in self.token_fields.items()},
            row_fields={name: values[spans] for name, values in self.row_fields.items()},
            segment_parents=None if self.parents is None else self.parents[spans],
            **sources,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _SegmentSources:
    """The sources of a row group's segments: `datasets` int64 by row, the others by segment."""

    bounds: list[int]
    lengths: Ints
    datasets: Ints
    domains: Ints

    @classmethod
    def of(cls, columns: Mapping[str, Any], names: SourceNames) -> "_SegmentSources":
        lengths = view_numbers(columns["segment_lengths"].values).astype(np.int64)
        if PADDING_COLUMN in columns:
            lengths += view_numbers(columns[PADDING_COLUMN].values)
        domains = np.full(len(lengths), -1)
        if DOMAIN_COLUMN in columns:
            domains = _number_names(columns[DOMAIN_COLUMN].values, names.domains)
        datasets = _number_names(columns["dataset"].cast(pa.string()), names.datasets)
        return cls(columns["segment_lengths"].offsets.to_pylist(), lengths, datasets, domains)

    def row(self, i: int) -> dict[str, Any]:
        segments = slice(self.bounds[i], self.bounds[i + 1])
        lengths = self.lengths[segments]
        datasets = np.full(len(lengths), self.datasets[i])
        return {"segment_lengths": lengths, "segment_datasets": datasets, "segment_domains": self.domains[segments]}


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


def _fill_nulls(column: pa.ListArray | None, null: float) -> Any:
    """Return the values of a column that the shards may have, with a number for those of fillers and missing ones."""
    return None if column is None else fill_null_numbers(column.values, null)
