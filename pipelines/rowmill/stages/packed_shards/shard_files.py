"""Plans and examples → shard files: every token moves once, and what was written is read back.

What belongs here: examples laid out for gathering, one shard's tokens, its lineage, the reading back. What does
not: the plans, and what the stage makes of them (`packed_shards/stage.py`).

    examples' parts ─► scratch (mapped, not held) ─► each worker gathers one shard and writes it
    all shards written ─► each is read again from the storage: digest, then content hash

Conservation: each example part adds up the content hashes of its own segments; each shard those of what is read
back. The two sums must be equal. Reading back begins when the last shard is written, so that whatever overwrote or
cut short a file meanwhile is noticed, too.
"""

from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.storage import Store, digest_bytes
from rowmill.packing import layout
from rowmill.packing.layout import SequencePlan
from rowmill.schema.examples import IGNORED_LABEL, WEIGHT_COLUMN, WEIGHT_FIELD
from rowmill.schema.manifest import File, Part
from rowmill.shards import gather, native
from rowmill.shards.sequences import make_list_array

SEGMENTS = pa.schema(
    [
        pa.field("sequence_id", pa.int64(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("record", pa.int64(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
    ]
)
"""Lineage beside each shard: which record of which file stands in which segment. `record` counts from 1 in the file."""


# ── Examples to scratch, with the hashes of their own segments ─────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ExampleScratchTask:
    """A part of examples to lay out for gathering; segments of it as `(row in the part, start, length, span start)`.

    `stores_weights`: the part has loss weights. `weighted`: the shards have, since one of the recipe's datasets does.
    """

    root: str
    source: File
    target: str
    rows: Ints
    starts: Ints
    lengths: Ints
    span_begins: NDArray[np.bool_]
    ignore_token_id: int | None
    stores_weights: bool
    weighted: bool


def write_example_scratch(task: ExampleScratchTask) -> int:
    """Write a part as a mapped file; return the sum of the content hashes of its segments."""
    names = ("input_ids", "loss_mask", "example_id", *((WEIGHT_COLUMN,) if task.stores_weights else ()))
    table = Store(task.root).table(task.source, names)
    if task.weighted and not task.stores_weights:
        table = _add_uniform_weights(table)
    gather.write_scratch_file(table, task.target)
    return _hash_expected_segments(table, task)


def _add_uniform_weights(table: pa.Table) -> pa.Table:
    """Give examples of a dataset without loss weights a column of them: 1 where the mask is true."""
    flat = _flatten_examples(table)
    return table.append_column(WEIGHT_FIELD, make_list_array(flat.offsets, flat.mask.astype(np.float32)))


def _hash_expected_segments(table: pa.Table, task: ExampleScratchTask) -> int:
    if not len(task.rows):
        return 0
    flat = _flatten_examples(table)
    index = native.locate_tokens(flat.offsets, task.rows, task.starts, task.lengths)
    cut_ids, cut_mask = flat.ids[index], flat.mask[index]
    bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(task.lengths)))
    targets = cut_mask.copy()
    # Whether a segment's first token is a target depends on the attention spans, which the plan knows.
    targets[bounds[:-1][task.span_begins]] = False
    if task.ignore_token_id is not None:
        targets &= cut_ids != task.ignore_token_id
    names = table.column("example_id").combine_chunks().take(pa.array(task.rows))
    segments = native.Segments(
        cut_ids,
        cut_mask,
        bounds,
        np.array([0, len(task.rows)]),
        names,
        task.starts.astype(np.int32),
        flat.weights_at(index, targets),
    )
    return sum(native.hash_segments(segments, targets)) % native.HASH_MODULUS


@dataclass(frozen=True, slots=True)
class _FlatExamples:
    """Examples end to end: `offsets` int64[N + 1] cut their tokens; `weights` are null where the recipe has none."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    weights: "NDArray[np.float32] | None"
    offsets: Ints

    def weights_at(self, index: Ints, targets: NDArray[np.bool_]) -> "NDArray[np.float32] | None":
        """Return the weights of some tokens, 0 on those that are no `targets` where they stand."""
        return None if self.weights is None else np.where(targets, self.weights[index], np.float32(0))


def _flatten_examples(table: pa.Table) -> _FlatExamples:
    ids = table.column("input_ids").combine_chunks()
    offsets = np.asarray(ids.offsets, np.int64)
    return _FlatExamples(
        ids=ids.flatten().to_numpy(zero_copy_only=False),
        mask=_flatten_column(table, "loss_mask"),
        weights=_flatten_column(table, WEIGHT_COLUMN) if WEIGHT_COLUMN in table.column_names else None,
        offsets=offsets - offsets[0],
    )


def _flatten_column(table: pa.Table, name: str) -> "NDArray[Any]":
    return table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)


# ── Shards ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One shard: which examples' tokens, in which sequences, and where it is written."""

    root: str
    at: str
    name: str
    split: str
    dataset: str
    files: tuple[str, ...]
    first_rows: Ints
    examples: Ints
    ranges: NDArray[np.int32]
    sequence_offsets: Ints
    first_sequence: int
    blocked: bool
    ignore_token_id: int | None
    sources: dict[str, tuple[str, int]]
    card: dict[str, str]


def write_shard(task: ShardTask) -> Part:
    """Gather one shard's tokens, write it and its segments."""
    table = _gather_shard(task)
    store = Store(task.root)
    sink = BytesIO()
    native.write_native_shard(table, sink, task.card)
    shard = _save_file(store, f"{task.at}/data/{task.split}/{task.name}.parquet", sink.getvalue(), table.num_rows)
    lineage = BytesIO()
    pq.write_table(_build_lineage(table, task), lineage, compression="zstd")
    segments = _save_file(
        store, f"{task.at}/segments/{task.split}-{task.name}.parquet", lineage.getvalue(), len(task.examples)
    )
    facts = {
        "split": task.split,
        "first_sequence": task.first_sequence,
        "sequences": table.num_rows,
        "segments": len(task.examples),
        "tokens": int(task.ranges[:, 1].sum()),
        "trained_tokens": int(table.column("trained_tokens").to_numpy().sum()),
    }
    return Part(shard.digest, {"shard": shard, "segments": segments}, facts)


@dataclass(frozen=True, slots=True)
class ReadBackTask:
    """A written shard to read again."""

    root: str
    shard: File
    segments: File


def read_back(task: ReadBackTask) -> tuple[int, int]:
    """Return how many of a shard's files are not what was written, and the content hash of its sequences.

    A damaged shard has no content: its hash is 0.
    """
    store = Store(task.root)
    content = store.read(task.shard.path)
    damaged = int(digest_bytes(store.read(task.segments.path)) != task.segments.digest)
    if digest_bytes(content) != task.shard.digest:
        return damaged + 1, 0
    hashes = native.hash_sequences(native.recover_segments(native.read_native_shard(content)))
    return damaged, sum(hashes) % native.HASH_MODULUS


def _gather_shard(task: ShardTask) -> pa.Table:
    wanted, inverse = np.unique(task.examples, return_inverse=True)
    rows = gather.take_rows(task.files, task.first_rows, wanted)
    flat = _flatten_examples(rows)
    starts, lengths = task.ranges[:, 0].astype(np.int64), task.ranges[:, 1].astype(np.int64)
    index = native.locate_tokens(flat.offsets, inverse, starts, lengths)
    cut_ids, cut_mask = flat.ids[index], flat.mask[index]
    plan = SequencePlan(task.sequence_offsets, task.examples, task.ranges)
    span_lengths, span_offsets = layout.attention_spans(plan, block_cross_document_attention=task.blocked)
    labels = layout.make_labels(cut_ids, cut_mask, span_lengths, ignore_token_id=task.ignore_token_id)
    segments = native.Segments(
        ids=cut_ids,
        mask=cut_mask,
        offsets=np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))),
        sequence_offsets=task.sequence_offsets,
        example_ids=rows.column("example_id").combine_chunks().take(pa.array(inverse)),
        starts=task.ranges[:, 0],
        weights=flat.weights_at(index, labels != IGNORED_LABEL),
    )
    spans = native.Spans(
        labels=labels,
        position_ids=layout.position_ids(span_lengths),
        lengths=span_lengths,
        offsets=span_offsets,
    )
    return native.make_shard_table(segments, spans, dataset=task.dataset, first_sequence=task.first_sequence)


_EXAMPLE_ID_PATTERN = "^(?P<row_id>(?P<part>.*):(?P<record>[0-9]+)[.0-9]*)#[0-9]+$"
"""An example's id taken apart as `rows.place_of` takes a row's, for a whole column at once."""


def _build_lineage(table: pa.Table, task: ShardTask) -> pa.Table:
    example_ids = table.column("example_ids").combine_chunks().flatten()
    row_ids, parts, records = pc.extract_regex(example_ids, _EXAMPLE_ID_PATTERN).flatten()
    named = parts.dictionary_encode()
    urls = pa.array([task.sources[part][0] for part in named.dictionary.to_pylist()], pa.string())
    firsts = np.array([task.sources[part][1] for part in named.dictionary.to_pylist()], np.int64)
    counts = np.diff(task.sequence_offsets)
    numbers = np.arange(len(task.examples)) - np.repeat(task.sequence_offsets[:-1], counts)
    sequences = np.repeat(np.arange(len(counts)) + task.first_sequence, counts)
    columns = [
        pa.array(sequences), pa.array(numbers.astype(np.int32)), example_ids, row_ids, urls.take(named.indices),
        pa.array(firsts[named.indices.to_numpy()] + records.cast(pa.int64()).to_numpy()),
        pa.array(task.ranges[:, 0]), pa.array(task.ranges[:, 1]), pa.repeat(pa.scalar(task.split), len(row_ids)),
    ]  # fmt: skip
    return pa.Table.from_arrays(columns, schema=SEGMENTS)


def _save_file(store: Store, path: str, content: bytes, rows: int) -> File:
    store.write(path, content)
    return File(path=path, bytes=len(content), digest=digest_bytes(content), rows=rows)
