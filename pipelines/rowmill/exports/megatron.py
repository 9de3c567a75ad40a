"""Megatron: documents end to end for Megatron-LM, and packed sequences with their starts for Megatron Bridge.

    Megatron-LM: documents 10 11 2 │ 20 2; EOD 2; uint16

    name_text_document.bin        0a00 0b00 0200 1400 0200
    name_text_document.idx        MMIDIDX…, lengths 3 2, byte offsets 0 6, documents 0 1 2
    name_loss_mask_document.bin   00 01 01 00 01       with loss_mask: companion, for FlagScale

Its dataset shuffles documents, joins them, and cuts samples of the sequence length. It has no mask and trains every
token. So without the second pair an untrained token is an error, and so is a document that does not end in EOD: the
EOD that is added would be trained.

    Megatron Bridge: Parquet with the segments 10 11 2 | 20 2     input_ids     10 11 2 20 2
                                                                  seq_start_id   0      3
                                                                  loss_mask      1  1 0  1 0      convention C

The reader shifts each segment and drops its last token, so a sequence is as long as its segments less one each.
"""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from rowmill.core.arrays import Bools, Ints, Tokens, compute_offsets, make_list_array, read_lists
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.errors import ConfigError, IntegrityError
from rowmill.exports.base import (
    Export,
    ExportContext,
    ExportIndex,
    ExportJob,
    ExportLayout,
    TableExport,
    WrittenFile,
)
from rowmill.packing.pack_plan import plan_best_fit
from rowmill.schema.recipe_summary import RecipeSummary
from rowmill.schema.rows import are_running_text
from rowmill.shards import label_conventions
from rowmill.shards.label_conventions import LabelConvention, make_unshifted_mask
from rowmill.shards.sequences import SequenceBatch

INDEX_HEADER = b"MMIDIDX\x00\x00"
FIRST_WIDE_VOCABULARY = 65_500
"""From this vocabulary size on, Megatron stores tokens in 32 bits."""
_CODES = {"u1": 1, "<i4": 4, "<u2": 8}
"""Megatron's numbers of the types that are used here."""
_OPTIONS = {"train": "train", "validation": "valid", "test": "test"}
"""The split in the names of Megatron's options."""


class Megatron(Export):
    """Documents for Megatron-LM's GPT dataset, with masks in files of their own for FlagScale."""

    CONVENTION: ClassVar[LabelConvention] = "none"

    kind: Literal["megatron"] = "megatron"
    """Megatron's indexed dataset."""
    unit: Literal["unpacked"] = "unpacked"
    """Examples one by one, each a document."""
    loss_mask: Literal["none", "companion"] = "none"
    """`companion`: masks in a second pair, which FlagScale reads; `none`: all tokens must be targets, since
    Megatron-LM trains them all."""
    accept_untrained_as_trained: bool = False
    """Whether tokens without loss may be there without masks; Megatron-LM trains them."""

    @property
    def label_convention(self) -> LabelConvention:
        return "none" if self.loss_mask == "none" else "unshifted_mask"

    def refuse(self, summary: RecipeSummary) -> None:
        """Refuse pieces of joined documents, each of which would get an end of document."""
        super().refuse(summary)
        joined = [name for name, dataset in summary.datasets.items() if dataset.is_joined]
        if joined:
            raise ConfigError(
                f"kind megatron stores whole documents, and those of datasets.{joined[0]} are joined and cut every "
                "seq_len tokens; Megatron joins and cuts by itself; set packing.pack_strategy: best_fit"
            )
        if self.loss_mask == "companion" and self.accept_untrained_as_trained:
            raise ConfigError(
                "accept_untrained_as_trained with loss_mask: companion, which stores what is untrained; it is only "
                "for loss_mask: none; delete one of them"
            )

    def lay_out(self, index: ExportIndex) -> ExportLayout:
        """Return one job: a split is one pair of files."""
        if index.context.eos_id is None:
            raise ConfigError(
                f"exports.{self.name}: documents end in EOD, for which Megatron takes the tokenizer's EOS, but it has "
                "none; one is needed; name one in tokenizer_config.json, or delete the export"
            )
        notes = {"loss_mask": self.loss_mask, "accept_untrained_as_trained": self.accept_untrained_as_trained}
        segments = np.arange(len(index.lengths))
        return ExportLayout([ExportJob(self.name, segments, index.sequence_offsets)], notes=notes)

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write the pair of tokens, and that of masks."""
        untrained, first_untrained = 0, ""
        dtype = "<u2" if context.vocab_size < FIRST_WIDE_VOCABULARY else "<i4"
        tokens = _PairWriter(folder, f"data/{job.name}_text_document", dtype)
        file, masks = WrittenFile(tokens.data), _PairWriter(folder, f"data/{job.name}_loss_mask_document", "u1")
        with tokens, masks:
            for chunk in chunks:
                _refuse_padding(chunk, context, where=f"exports.{self.name}")
                # Documents that do not end in EOD get one, which is not a target.
                eod, lengths, ends = context.eos_id or 0, np.diff(chunk.offsets), chunk.offsets[1:]
                misses = chunk.ids[ends - 1] != eod
                ids = np.insert(chunk.ids, ends[misses], eod)
                mask = np.insert(make_unshifted_mask(chunk.trained), ends[misses], values=False)
                lengths = lengths + misses
                # No token comes before the first of a document, so none can predict it.
                begins = np.cumsum(lengths) - lengths
                missing = lengths - 1 - np.add.reduceat(mask, begins, dtype=np.int64) if len(lengths) else lengths
                segments = np.flatnonzero(missing > 0)
                if len(segments) and not untrained:
                    first_untrained = str(chunk.example_ids[int(segments[0])].as_py())
                untrained += int(missing.sum())
                tokens.write(ids, lengths)
                masks.write(mask, lengths)
                file.add(chunk, trained=int(mask.sum()))
        if self.loss_mask == "companion":
            return [file, *map(WrittenFile, (tokens.finish(), masks.data, masks.finish()))]
        if untrained and not self.accept_untrained_as_trained:
            raise ConfigError(
                f"exports.{self.name}: tokens without loss: {untrained}, the first in {first_untrained}; ends "
                "of documents that had to be added count too; Megatron-LM trains every token; raise seq_len if it cuts "
                "documents, set loss_mask: companion for FlagScale, choose megatron_bridge, or set "
                "accept_untrained_as_trained: true"
            )
        (folder / masks.data).unlink()
        return [file, WrittenFile(tokens.finish())]

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the options of Megatron's or FlagScale's training script."""
        prefix, split = f"{data}/{self.name}_text_document", _OPTIONS[self.split]
        if self.loss_mask == "companion":
            return (
                f"data:\n  {split}_data_path: {prefix}\n  apply_sft_dataset_separated_loss_mask_if_existed: "
                f"true\ntrain:\n  model:\n    seq_length: {context.seq_len}"
            )
        options = f"--{split}-data-path {prefix} --seq-length {context.seq_len} --dataloader-inter-document-masking"
        # It masks what follows an EOD. In text that is the first token of the next document; in chats, where EOS may
        # end a turn, it may be a target.
        return f"{options} --eod-mask-loss" if are_running_text(context.kinds) else options


def _refuse_padding(chunk: SequenceBatch, context: ExportContext, *, where: str) -> None:
    """Refuse targets that Megatron takes for padding; a pad id that is also EOS or BOS is none to it."""
    if context.pad_id is None or context.pad_id in (context.eos_id, context.bos_id):
        return
    places = np.flatnonzero(chunk.trained & (chunk.ids == context.pad_id))
    if len(places):
        segment = int(np.searchsorted(chunk.offsets, places[0], "right")) - 1
        raise IntegrityError(
            f"{where}: the pad id {context.pad_id} is a target in {chunk.example_ids[segment].as_py()}; Megatron drops "
            "the loss of pad ids and replaces them by 0; give padding an id of its own in tokenizer_config.json, or "
            "remove the row"
        )


class _PairWriter:
    """Writes documents of one type into a `.bin`, and their places into the `.idx` beside it."""

    def __init__(self, folder: Path, prefix: str, dtype: str) -> None:
        self.data, self.index = f"{prefix}.bin", f"{prefix}.idx"
        self._folder, self._dtype = folder, np.dtype(dtype)
        self._lengths: list[Ints] = []

    def __enter__(self) -> Self:
        self._sink = (self._folder / self.data).open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._sink.close()

    def write(self, values: Tokens | Bools, lengths: Ints) -> None:
        """Append documents."""
        self._sink.write(values.astype(self._dtype).tobytes())
        self._lengths.append(lengths)

    def finish(self) -> str:
        """Write the index and return its path."""
        lengths = np.concatenate([*self._lengths, np.empty(0, np.int64)])
        size = np.int64(self._dtype.itemsize)
        code = next(code for name, code in _CODES.items() if np.dtype(name) == self._dtype)
        with (self._folder / self.index).open("wb") as sink:
            sink.write(INDEX_HEADER + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1))
            sink.write(lengths.astype("<i4").tobytes())
            sink.write(((np.cumsum(lengths) - lengths) * size).astype("<i8").tobytes())
            sink.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
        return self.index


BRIDGE_ROW_GROUP = 500
PACKED_SCHEMA = make_required_schema(
    input_ids=pa.list_(pa.int32()), seq_start_id=pa.list_(pa.int32()), loss_mask=pa.list_(pa.int8())
)


class MegatronBridge(TableExport):
    """Packed Parquet for the fine-tuning recipes of Megatron-Bridge."""

    MEANT_BY: ClassVar = ("nemo",)

    CONVENTION: ClassVar[LabelConvention] = "rolled_mask"
    SUFFIX: ClassVar[str] = "idx.parquet"
    STORES_CARD: ClassVar[bool] = False

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
        return BRIDGE_ROW_GROUP

    def lay_out(self, index: ExportIndex) -> ExportLayout:
        """Cut the order into files, after planning again if segments grow or sequences have another size."""
        size = self.pack_size or index.context.seq_len
        if not self.needs_new_plan(index.context.seq_len):
            return super().lay_out(index)
        if self.pad_segments_to is not None and index.context.eos_id is None:
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
        plan = plan_best_fit(read, size, None)
        before = compute_offsets(index.lengths[plan.examples])
        return ExportLayout(self.cut(np.diff(before[plan.sequence_offsets]), plan.sequence_offsets, plan.examples))

    def _pad_lengths(self, lengths: Ints) -> Ints:
        step = self.pad_segments_to or 1
        return lengths + (1 - lengths) % step

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write one file; its note counts what the packs in it hold, as the reader does."""
        [file] = super().write(job, chunks, folder, context)
        table = pq.read_table(folder / file.path, partitioning=None)
        values, offsets = read_lists(table.column("seq_start_id"))
        ends = np.append(values[1:], 0)
        ends[offsets[1:] - 1] = table.column("input_ids").combine_chunks().value_lengths().to_numpy()
        lengths = ends.astype(np.int64) - values - 1
        segments, tokens = np.diff(offsets), np.add.reduceat(lengths, offsets[:-1])
        file.note = {
            "packs": table.num_rows,
            "segments": int(segments.sum()),
            "tokens": int(tokens.sum()),
            "longest": int(lengths.max()),
            "most_segments": int(segments.max()),
            "fewest_tokens": int(tokens.min()),
        }
        return [file]

    def make_table(self, chunk: SequenceBatch, file: WrittenFile, context: ExportContext) -> pa.Table:
        """Return sequences as rows, padded if `pad_segments_to` is set."""
        borders, in_sequences = chunk.spans()
        ids, mask, spans = chunk.ids, label_conventions.make_rolled_mask(chunk.trained, borders), borders
        if self.pad_segments_to is not None:
            lengths = np.diff(borders)
            spans = compute_offsets(self._pad_lengths(lengths))
            where = np.arange(len(ids)) + np.repeat(spans[:-1] - borders[:-1], lengths)
            ids = np.full(int(spans[-1]), context.eos_id or 0, np.int32)
            ids[where] = chunk.ids
            padded = np.zeros(len(ids), bool)
            padded[where] = mask
            mask = padded
        token_offsets = spans[in_sequences]
        starts = spans[:-1] - np.repeat(token_offsets[:-1], np.diff(in_sequences))
        file.add(chunk, trained=int(mask.sum()))
        columns = [
            make_list_array(token_offsets, ids),
            make_list_array(in_sequences, starts.astype(np.int32)),
            make_list_array(token_offsets, mask.astype(np.int8)),
        ]
        return pa.Table.from_arrays(columns, schema=PACKED_SCHEMA)

    def finish(self, folder: Path, written: Sequence[WrittenFile], context: ExportContext) -> list[WrittenFile]:
        """Write the metadata of all files."""
        size = self.pack_size or context.seq_len
        packs: list[dict[str, int]] = [file.note for file in written]
        total = sum(pack["packs"] for pack in packs)
        content: dict[str, Any] = {
            "dataset_max_seqlen": max(pack["longest"] for pack in packs),
            "max_samples_per_bin": max(pack["most_segments"] for pack in packs),
            "min_packed_seqlen": min(pack["fewest_tokens"] for pack in packs),
            "pack_size": size,
            "packing_efficiency": round(sum(pack["tokens"] for pack in packs) / total / size * 100, 2),
            "packing_factor": round(sum(pack["segments"] for pack in packs) / total, 2),
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
