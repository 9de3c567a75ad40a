"""Native shards: packed sequences in Parquet, one row each, readable by HF `datasets` and TRL with no glue.

What belongs here: the columns, making a table of sequences from examples and a plan, writing and reading
it, the content hash that proves nothing was lost or copied. What does not: the plan (`packing.py`).

    input_ids      10   11  2 | 20    2
    labels       -100   11  2 | -100  2       the first token of an attention span is never a target
    position_ids    0    1  2 |  0    1
    seq_lengths     3           2

The content hash is a sum over segments, so it does not depend on order: BLAKE2b-128 of (example id, start,
token bytes, target mask) modulo 2^128. It is computed from the examples by the plan and again from the
written shards; counts alone would not notice a packer that replaces tokens by copies of others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Tokens = NDArray[np.int32]
Bools = NDArray[np.bool_]

IGNORE = -100
"""The label of a position without loss, as PyTorch's cross entropy skips it."""

ROW_GROUP = 1024
FILLER_TOKENS = 2
MODULUS = 1 << 128

SEQUENCES = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("labels", pa.list_(pa.int32()), nullable=False),
        pa.field("position_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("seq_lengths", pa.list_(pa.int32()), nullable=False),
        pa.field("example_ids", pa.list_(pa.string()), nullable=False),
        pa.field("starts", pa.list_(pa.int32()), nullable=False),
        pa.field("segment_lengths", pa.list_(pa.int32()), nullable=False),
        pa.field("dataset", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("sequence_id", pa.int64(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("trained_tokens", pa.int32(), nullable=False),
        pa.field("filler", pa.bool_(), nullable=False),
    ]
)
"""A shard. `starts` is the first token taken of each segment's example; no sequence holds padding."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of some sequences, flat.

    `ids` and `mask` run over all tokens; `offsets` int64[K + 1] cut them into segments; `sequence_offsets`
    int64[S + 1] cut the segments into sequences; `example_ids` and `starts` have one entry per segment.
    """

    ids: Tokens
    mask: Bools
    offsets: Ints
    sequence_offsets: Ints
    example_ids: pa.Array
    starts: Tokens


def cut(ids: Tokens, mask: Bools, row_offsets: Ints, rows: Ints, starts: Ints, lengths: Ints) -> tuple[Tokens, Bools]:
    """Return the tokens `[starts[k], starts[k] + lengths[k])` of row `rows[k]`, end to end."""
    first = row_offsets[rows] + starts
    begin = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))[:-1]
    index = np.repeat(first - begin, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)
    return ids[index], mask[index]


@dataclass(frozen=True, slots=True)
class Spans:
    """What follows from a plan for each token: labels and positions, and the lengths of attention spans.

    `offsets` int64[S + 1] cut `lengths` into sequences; with open attention each sequence is one span.
    """

    labels: Tokens
    position_ids: Tokens
    lengths: Tokens
    offsets: Ints


def to_table(segments: Segments, spans: Spans, *, dataset: str, first_sequence: int, filler: bool = False) -> pa.Table:
    """Make the rows of a shard."""
    token_offsets = segments.offsets[segments.sequence_offsets]
    counted = np.concatenate((np.zeros(1, np.int64), np.cumsum(spans.labels != IGNORE)))
    count = len(segments.sequence_offsets) - 1
    columns = [
        _lists(token_offsets, segments.ids),
        _lists(token_offsets, spans.labels),
        _lists(token_offsets, spans.position_ids),
        _lists(spans.offsets, spans.lengths),
        pa.ListArray.from_arrays(pa.array(segments.sequence_offsets, pa.int32()), segments.example_ids),
        _lists(segments.sequence_offsets, segments.starts.astype(np.int32)),
        _lists(segments.sequence_offsets, np.diff(segments.offsets).astype(np.int32)),
        pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([dataset], pa.string())),
        pa.array(np.arange(first_sequence, first_sequence + count, dtype=np.int64)),
        pa.array(np.diff(token_offsets).astype(np.int32)),
        pa.array(np.diff(counted[token_offsets]).astype(np.int32)),
        pa.array(np.full(count, filler)),
    ]
    return pa.Table.from_arrays(columns, schema=SEQUENCES)


def fillers(count: int, *, pad_id: int, dataset: str) -> pa.Table:
    """Return sequences of two pad tokens without a target, which make ranks equally long."""
    segments = Segments(
        ids=np.full(2 * count, pad_id, np.int32),
        mask=np.zeros(2 * count, bool),
        offsets=np.arange(0, 2 * count + 1, 2),
        sequence_offsets=np.arange(count + 1),
        example_ids=pa.array([""] * count, pa.string()),
        starts=np.zeros(count, np.int32),
    )
    spans = Spans(
        labels=np.full(2 * count, IGNORE, np.int32),
        position_ids=np.tile(np.array([0, 1], np.int32), count),
        lengths=np.full(count, 2, np.int32),
        offsets=np.arange(count + 1),
    )
    table = to_table(segments, spans, dataset=dataset, first_sequence=0, filler=True)
    numbers = pa.array(np.full(count, -1, np.int64))
    return table.set_column(table.schema.get_field_index("sequence_id"), SEQUENCES.field("sequence_id"), numbers)


def _lists(offsets: Ints, values: Tokens) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


def write(table: pa.Table, sink: BinaryIO, card: Mapping[str, str]) -> None:
    """Write a shard: zstd, 1,024 rows per group, the identity card in the schema's metadata."""
    metadata = {b"rowmill." + name.encode(): value.encode() for name, value in sorted(card.items())}
    typed = table.replace_schema_metadata(metadata)
    pq.write_table(typed, sink, compression="zstd", row_group_size=ROW_GROUP, use_dictionary=["dataset"])


def read(source: str | BinaryIO) -> pa.Table:
    """Read a whole shard back."""
    return pq.read_table(source, partitioning=None).combine_chunks()


def segments_of(table: pa.Table) -> Segments:
    """Recover the segments of a shard's rows from its columns alone."""
    if not table.num_rows:
        empty = np.zeros(1, np.int64)
        return Segments(
            np.empty(0, np.int32), np.empty(0, bool), empty, empty, pa.array([], pa.string()), np.empty(0, np.int32)
        )
    ids = _column(table, "input_ids")
    labels = _column(table, "labels")
    lengths = _column(table, "segment_lengths")
    names = table.column("example_ids").chunk(0)
    sequence_offsets = np.asarray(names.offsets, np.int64)
    return Segments(
        ids=ids,
        mask=labels != IGNORE,
        offsets=np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64))),
        sequence_offsets=sequence_offsets - sequence_offsets[0],
        example_ids=names.flatten(),
        starts=_column(table, "starts"),
    )


def _column(table: pa.Table, name: str) -> NDArray[np.int32]:
    return table.column(name).chunk(0).flatten().to_numpy(zero_copy_only=False)


def segment_hashes(segments: Segments, targets: Bools) -> Iterator[int]:
    """Yield each segment's content hash as an integer below 2^128; `targets` are the tokens with a label."""
    tokens, flags = segments.ids.astype("<i4").tobytes(), targets.tobytes()
    starts = segments.starts.astype("<i8").tobytes()
    bounds: list[int] = segments.offsets.tolist()
    names: list[str] = segments.example_ids.to_pylist()
    # One call per segment: a segment has some two hundred tokens, so calls cost more than hashing.
    for i, (name, left, right) in enumerate(zip(names, bounds, bounds[1:], strict=False)):
        content = b"%b%b%b%b" % (
            name.encode(),
            starts[8 * i : 8 * i + 8],
            tokens[4 * left : 4 * right],
            flags[left:right],
        )
        yield int.from_bytes(blake2b(content, digest_size=16).digest(), "little")


def sequence_hashes(segments: Segments) -> list[int]:
    """Return per sequence of a shard that was read back the sum of its segments' hashes modulo 2^128."""
    hashes = list(segment_hashes(segments, segments.mask))
    bounds: list[int] = segments.sequence_offsets.tolist()
    return [sum(hashes[left:right]) % MODULUS for left, right in pairwise(bounds)]


def concat(tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate shards' rows into one table with one chunk per column."""
    unified = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
    return unified.cast(SEQUENCES) if unified.schema != SEQUENCES else unified
