"""Whether the spans and positions of a written shard follow from its segments.

segment_lengths 3 2     seq_lengths 3 2     position_ids 0 1 2 0 1     or with open attention  5  and  0 1 2 3 4
"""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets, sum_by_span
from rowmill.packing.layout import position_ids
from rowmill.schema.rows import PADDING_COLUMN


def has_whole_spans(shard: pa.Table) -> bool:
    """Return whether each attention span of a shard is a segment or a sequence, and positions count from 0 in it."""
    if not shard.num_rows:
        return True
    lengths, segments = _read_span_column(shard, "segment_lengths")
    if PADDING_COLUMN in shard.column_names:
        lengths = lengths + _read_span_column(shard, PADDING_COLUMN)[0]
    found, spans = _read_span_column(shard, "seq_lengths")
    positions, tokens = _read_span_column(shard, "position_ids")
    return (
        np.array_equal(found, sum_by_span(lengths, segments, spans))
        and np.array_equal(tokens, compute_offsets(found)[spans])
        and np.array_equal(positions, position_ids(found))
    )


def _read_span_column(shard: pa.Table, name: str) -> tuple[NDArray[Any], Ints]:
    """Return the values of a column of lists, and where each row's begin: int64[R + 1]."""
    column = shard.column(name).combine_chunks()
    return column.flatten().to_numpy(), compute_offsets(column.value_lengths().to_numpy())
