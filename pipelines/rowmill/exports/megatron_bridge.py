"""Megatron-Bridge: packed Parquet with the starts of segments, and the metadata that its packed dataset needs.

    segments 10 11 2 | 20 2     input_ids     10 11 2 20 2
                                seq_start_id   0      3
                                loss_mask      1  1 0  1 0      convention C: the reader shifts each segment

The reader drops the last token of every segment, so a sequence is as long as its segments less one each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from rowmill.core.arrays import Ints, compute_offsets, make_list_array
from rowmill.core.errors import ConfigError
from rowmill.exports.base import (
    ExportContext,
    ExportIndex,
    ExportJob,
    ExportLayout,
    FileCounts,
    RecipeSummary,
    Sharded,
    WrittenFile,
    write_parquet,
)
from rowmill.shards import label_conventions
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.sequences import SequenceBatch

ROW_GROUP = 500
PACKED_SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("seq_start_id", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.int8()), nullable=False),
    ]
)


class MegatronBridge(Sharded):
    """Packed Parquet for the fine-tuning recipes of Megatron-Bridge."""

    MEANT_BY: ClassVar = ("nemo",)

    CONVENTION: ClassVar[LabelConvention] = "rolled_mask"

    kind: Literal["megatron_bridge"] = "megatron_bridge"
    """Megatron-Bridge's packed dataset."""
    unit: Literal["packed"] = "packed"
    """Sequences of several segments."""
    pack_size: Annotated[int, Field(ge=2)] | None = None
    """Its `packed_sequence_size`: tokens per sequence, where each segment counts one less; null: `seq_len`. With any
    other number, the segments are packed again."""
    pad_segments_to: Annotated[int, Field(ge=1)] | None = None
    """Segments are padded with EOS, without loss, until their length less one is a multiple of this number: 2·CP, with
    sequence parallelism lcm(2·CP, CP·TP). The segments are then packed again."""

    def refuse(self, summary: RecipeSummary) -> None:
        """Refuse a new plan for segments that see each other."""
        super().refuse(summary)
        opened = [name for name, dataset in summary.datasets.items() if dataset.is_open]
        if opened and self.needs_new_plan(summary.seq_len):
            raise ConfigError(
                f"pack_size and pad_segments_to plan segments again, but attention of datasets.{opened[0]} "
                "crosses from one to the next; such segments stay together; set "
                "packing.block_cross_document_attention: true, or delete both"
            )

    def needs_new_plan(self, seq_len: int) -> bool:
        """Return whether the sequences differ from those of the build."""
        return self.pad_segments_to is not None or self.pack_size not in (None, seq_len)

    def rows_at_once(self, context: ExportContext) -> int:
        """Return the rows of a group."""
        return ROW_GROUP

    def lay_out(self, index: ExportIndex) -> ExportLayout:
        """Cut the order into files, after planning again if segments grow or sequences have another size."""
        size = self.pack_size or index.seq_len
        if not self.needs_new_plan(index.seq_len):
            return super().lay_out(index)
        if self.pad_segments_to is not None and index.eos_id is None:
            raise ConfigError(
                f"exports.{self.name}.pad_segments_to: segments are padded with EOS, but the tokenizer has "
                "none; one is needed; name one in tokenizer_config.json, or delete pad_segments_to"
            )
        read = np.maximum(self._pad_lengths(index.lengths) - 1, 1)
        longer = np.flatnonzero(read > size)
        if len(longer):
            raise ConfigError(
                f"exports.{self.name}.pack_size: {size}, but {len(longer)} segments are longer with their padding, the "
                f"longest has {int(read.max())} tokens ({index.name_of(int(longer[0]))} is the first); raise "
                "pack_size, or lower seq_len"
            )
        segments, offsets = index.best_fit(read, size)
        before = compute_offsets(index.lengths[segments])
        return ExportLayout(self.cut(np.diff(before[offsets]), offsets, segments))

    def _pad_lengths(self, lengths: Ints) -> Ints:
        step = self.pad_segments_to or 1
        return lengths + (1 - lengths) % step

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write one file; its note measures the packs in it."""
        path, tally = f"data/{job.name}.idx.parquet", FileCounts()

        def tables() -> Iterator[pa.Table]:
            for chunk in chunks:
                table = self.table(chunk, context)
                mask = table.column("loss_mask").chunk(0).flatten().to_numpy()
                tally.add(chunk, trained=int(mask.sum()))
                yield table

        write_parquet(folder / path, tables(), PACKED_SCHEMA, rows=ROW_GROUP)
        return [tally.written(path, measure_packs(pq.read_table(folder / path, partitioning=None)))]

    def table(self, sequences: SequenceBatch, context: ExportContext) -> pa.Table:
        """Return sequences as rows, padded if `pad_segments_to` is set."""
        borders, in_sequences = sequences.spans()
        ids, mask, spans = sequences.ids, label_conventions.make_rolled_mask(sequences.trained, borders), borders
        if self.pad_segments_to is not None:
            lengths = np.diff(borders)
            spans = compute_offsets(self._pad_lengths(lengths))
            where = np.arange(len(ids)) + np.repeat(spans[:-1] - borders[:-1], lengths)
            ids = np.full(int(spans[-1]), context.eos_id or 0, np.int32)
            ids[where] = sequences.ids
            padded = np.zeros(len(ids), bool)
            padded[where] = mask
            mask = padded
        token_offsets = spans[in_sequences]
        starts = spans[:-1] - np.repeat(token_offsets[:-1], np.diff(in_sequences))
        columns = [
            make_list_array(token_offsets, ids),
            make_list_array(in_sequences, starts.astype(np.int32)),
            make_list_array(token_offsets, mask.astype(np.int8)),
        ]
        return pa.Table.from_arrays(columns, schema=PACKED_SCHEMA)

    def finish(self, folder: Path, written: Sequence[WrittenFile], context: ExportContext) -> list[WrittenFile]:
        """Write the metadata of all files."""
        size = self.pack_size or context.seq_len
        packs: list[PackCounts] = [file.note for file in written]
        total = sum(pack.packs for pack in packs)
        content: dict[str, Any] = {
            "dataset_max_seqlen": max(pack.longest for pack in packs),
            "max_samples_per_bin": max(pack.most_segments for pack in packs),
            "min_packed_seqlen": min(pack.fewest_tokens for pack in packs),
            "pack_size": size,
            "packing_efficiency": round(sum(pack.tokens for pack in packs) / total / size * 100, 2),
            "packing_factor": round(sum(pack.segments for pack in packs) / total, 2),
        }
        path = f"data/{size}_metadata.jsonl"
        (folder / path).write_bytes(orjson.dumps([content], option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE))
        return [WrittenFile(path)]

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the fields of its dataset's configuration."""
        size = self.pack_size or context.seq_len
        return (
            f'PackedSequenceSpecs(packed_sequence_size={size}, packed_train_data_path="{data}/*.idx.parquet",\n'
            f'                    packed_metadata_path="{data}/{size}_metadata.jsonl")   # micro_batch_size: 1'
        )


@dataclass(frozen=True, slots=True)
class PackCounts:
    """What a file's packs hold, as the reader counts: `longest` is the longest segment of any."""

    packs: int
    segments: int
    tokens: int
    longest: int
    most_segments: int
    fewest_tokens: int


def measure_packs(table: pa.Table) -> PackCounts:
    """Count the packs of a file."""
    starts = table.column("seq_start_id").combine_chunks()
    ids = table.column("input_ids").combine_chunks()
    sizes = np.diff(np.asarray(ids.offsets, np.int64))
    offsets = np.asarray(starts.offsets, np.int64)
    values = starts.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.append(values[1:], 0)
    ends[offsets[1:] - 1] = sizes
    lengths = ends - values - 1
    segments, tokens = np.diff(offsets), np.add.reduceat(lengths, offsets[:-1])
    return PackCounts(
        packs=table.num_rows,
        segments=int(segments.sum()),
        tokens=int(tokens.sum()),
        longest=int(lengths.max()),
        most_segments=int(segments.max()),
        fewest_tokens=int(tokens.min()),
    )
