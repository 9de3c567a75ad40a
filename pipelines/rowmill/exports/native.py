"""The export `native`: packed sequences in the columns of the native shards, which TRL and HF `datasets` read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import expand_ranges
from rowmill.exports.base import ExportContext, ExportJob, FileCounts, Sharded, WrittenFile, write_parquet
from rowmill.shards import label_conventions
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.native import (
    ROW_GROUP,
    SEQUENCE_SCHEMA,
    Padding,
    Segments,
    Spans,
    choose_pad_id,
    make_shard_table,
    number_sequences,
)
from rowmill.shards.sequences import SequenceBatch

GROUP_TOKENS = 32 << 20
"""Maximum tokens of a row group: sequences of a hundred thousand tokens make smaller groups."""


class Native(Sharded):
    """Packed Parquet with positions and span lengths: the native format, which HF `datasets` and TRL read."""

    CONVENTION: ClassVar[LabelConvention] = "unshifted"
    HOLDS_WEIGHTS: ClassVar[bool] = True
    HOLDS_FIELDS: ClassVar[bool] = True

    kind: Literal["native"] = "native"
    """Packed sequences in the columns of the native shards."""
    unit: Literal["packed"] = "packed"
    """Sequences of several segments."""

    def rows_at_once(self, context: ExportContext) -> int:
        """Return the rows of a group: 1,024, fewer if sequences are long."""
        return count_group_rows(context.seq_len)

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write one shard."""
        path = f"data/{job.name}.parquet"
        return [write_packed(chunks, folder, path, context, multiple=context.segment_multiple_of)]

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return TRL's configuration."""
        return format_trl_config(PARQUET_LOAD.format(data=data))


TRL_OPTIONS: dict[str, Any] = {
    "packing": False,
    "padding_free": True,
    "max_length": None,
    "per_device_train_batch_size": 1,
    "train_sampling_strategy": "sequential",
    "dataset_kwargs": {"skip_prepare_dataset": True},
}
"""What TRL's `SFTConfig` needs to train packed rows unchanged and in order; the pages on TRL show the same."""

PARQUET_LOAD = 'rows = load_dataset("parquet", data_files="{data}/*.parquet", split="train")'


def format_trl_config(load: str) -> str:
    """Return the lines that load packed rows and train them with TRL."""
    options = [f"    {name}={value!r}," for name, value in TRL_OPTIONS.items()]
    model = 'AutoModelForCausalLM.from_pretrained(…, attn_implementation="flash_attention_2")'
    return "\n".join([load, "SFTConfig(", *options, ")", model])


def count_group_rows(seq_len: int) -> int:
    """Return the number of sequences of a row group."""
    return max(1, min(ROW_GROUP, GROUP_TOKENS // seq_len))


def write_packed(
    chunks: Iterator[SequenceBatch], folder: Path, path: str, context: ExportContext, *, multiple: int = 1
) -> WrittenFile:
    """Write packed sequences as one Parquet file with the card in its schema.

    Segments are padded to a multiple as in the shards of the recipe.
    """
    pad_id = choose_pad_id({"pad_id": context.pad_id, "eos_id": context.eos_id})

    def make_table(chunk: SequenceBatch, tally: FileCounts) -> pa.Table:
        table = make_packed_table(chunk, multiple=multiple, pad_id=pad_id)
        tally.add(chunk, trained=int(table.column("trained_tokens").to_numpy().sum()))
        return table

    rows = count_group_rows(context.seq_len)
    return write_parquet(folder / path, chunks, make_table, card=context.card, rows=rows).written(path)


def make_segments(sequences: SequenceBatch) -> Segments:
    """Return the segments of sequences, as native shards hold them."""
    return Segments(
        ids=sequences.ids,
        mask=sequences.trained,
        offsets=sequences.offsets,
        sequence_offsets=sequences.sequence_offsets,
        example_ids=sequences.example_ids,
        starts=sequences.starts,
        weights=sequences.weights,
        token_fields=sequences.token_fields,
        columns=sequences.columns,
    )


def make_packed_table(sequences: SequenceBatch, *, multiple: int = 1, pad_id: int = 0) -> pa.Table:
    """Return sequences in the columns of a shard, with their weights and fields if they have some."""
    borders, span_offsets = sequences.spans()
    lengths = np.diff(borders).astype(np.int32)
    padding = None
    if multiple > 1:
        after_spans = -lengths % np.int32(multiple)
        # The padding of an attention span is that of its last segment.
        of_segments = np.zeros(len(sequences.offsets) - 1, np.int32)
        of_segments[np.searchsorted(sequences.offsets, borders[1:]) - 1] = after_spans
        padding = Padding(of_segments, pad_id)
        lengths = lengths + after_spans
    spans = Spans(
        labels=label_conventions.make_unshifted_labels(sequences.ids, sequences.trained),
        position_ids=expand_ranges(np.zeros_like(lengths), lengths).astype(np.int32),
        lengths=lengths,
        offsets=span_offsets,
    )
    table = make_shard_table(make_segments(sequences), spans, dataset="", padding=padding)
    table = number_sequences(table, sequences.numbers)
    place = table.schema.get_field_index("dataset")
    return table.set_column(place, SEQUENCE_SCHEMA.field("dataset"), sequences.datasets.dictionary_encode())
