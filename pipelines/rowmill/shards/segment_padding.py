"""Pad tokens after the segments of native shards, for recipes with `packing.segment_multiple_of`.

    multiple of 4     segments  a b c │ d e f g h          segment_lengths   3 5
                      stored    a b c P d e f g h P P P    segment_padding   1 3     seq_lengths   4 8

The tokens of a segment are its content, which hashes, exports and comparisons see; padding belongs to the shard alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Integers, Ints, compute_offsets, expand_ranges, make_list_array, sum_by_span
from rowmill.core.storage import Store
from rowmill.schema.examples import WEIGHT_COLUMN
from rowmill.schema.manifest import File
from rowmill.schema.rollout_fields import find_token_fields
from rowmill.schema.rows import PADDING_COLUMN

_TOKEN_COLUMNS = ("input_ids", "labels", "position_ids", WEIGHT_COLUMN)


@dataclass(frozen=True, slots=True, eq=False)
class PaddedSegments:
    """Where the tokens of K segments are once padding follows each of them.

    `offsets` int64[K + 1] cut the padded tokens into segments; `places` int64[T] are the places of the T real tokens.
    """

    offsets: Ints
    places: Ints

    @classmethod
    def of(cls, lengths: Integers, padding: Integers) -> "PaddedSegments":
        """Lay out segments of some lengths, each with its padding."""
        offsets = compute_offsets(lengths.astype(np.int64) + padding)
        return cls(offsets, expand_ranges(offsets[:-1], lengths))

    def insert(self, values: NDArray[Any], fill: float) -> NDArray[Any]:
        """Return one value per padded token: those of the real tokens, and `fill`."""
        padded = np.full(int(self.offsets[-1]), fill, values.dtype)
        padded[self.places] = values
        return padded


def count_padding_tokens(table: pa.Table) -> int:
    """Return the pad tokens in some rows of a shard."""
    return int(_flatten(table, PADDING_COLUMN).sum()) if PADDING_COLUMN in table.column_names else 0


def list_padding_tokens(table: pa.Table) -> Ints:
    """Return the pad tokens of each row of a shard that has padding: int64[R]."""
    table = table.combine_chunks()
    padding = compute_offsets(_flatten(table, PADDING_COLUMN))
    return np.diff(padding[_cut(table, PADDING_COLUMN)])


def drop_padding(table: pa.Table) -> pa.Table:
    """Return rows of a shard without padding, in the columns of a shard that has none."""
    if PADDING_COLUMN not in table.column_names:
        return table
    table = table.combine_chunks()
    padding = _flatten(table, PADDING_COLUMN)
    lengths = _flatten(table, "segment_lengths")
    segments = _cut(table, "segment_lengths")
    padded = PaddedSegments.of(lengths, padding)
    kept = compute_offsets(lengths)[segments]
    columns = {name: table.column(name) for name in table.column_names if name != PADDING_COLUMN}
    for name in (*_TOKEN_COLUMNS, *find_token_fields(table.column_names)):
        if name in columns:
            columns[name] = make_list_array(kept, _flatten(table, name)[padded.places])
    if "seq_lengths" in columns:
        spans = _cut(table, "seq_lengths")
        real = _flatten(table, "seq_lengths") - sum_by_span(padding, segments, spans)
        columns["seq_lengths"] = make_list_array(spans, real)
    fields = [table.schema.field(name) for name in columns]
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields, table.schema.metadata))


def read_unpadded(store: Store, file: File, columns: Sequence[str]) -> pa.Table:
    """Read columns of a shard, `segment_lengths` among them, without padding."""
    # A column that the file lacks is not read.
    return drop_padding(store.table(file, [*columns, PADDING_COLUMN])).combine_chunks()


def _flatten(table: pa.Table, name: str) -> NDArray[Any]:
    return table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)


def _cut(table: pa.Table, name: str) -> Ints:
    return compute_offsets(table.column(name).combine_chunks().value_lengths().to_numpy(zero_copy_only=False))
