"""Rows of token ids for `datasets` and the trainers that read Parquet: `native`, `hf`, `axolotl`, `skyrl` and `verl`.

    native, packed hf    the columns of the native shards
    hf, axolotl          input_ids 10 11 2    attention_mask 1 1 1    labels -100 11 2     the trainer packs or pads
    hf                   logprobs   0 -0.5 0   if token rows carry fields: the number of the token at the same place
    skyrl, verl          input_ids 10 11 2    loss_mask 0 1 1                              not shifted; never the first

A row of the others than `native` is a segment. A field of a row, such as its reward, is one value beside the lists.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import orjson
import pyarrow as pa
from pydantic import Field

from rowmill.core.arrays import compute_offsets, make_list_array
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.errors import ConfigError
from rowmill.core.storage import digest_bytes
from rowmill.exports.base import (
    ExportContext,
    ExportIndex,
    ExportJob,
    ExportLayout,
    TableExport,
    Unit,
    WrittenFile,
)
from rowmill.schema.examples import IGNORED_LABEL, ROW_FIELDS, make_token_columns
from rowmill.schema.recipe_summary import RecipeSummary
from rowmill.shards import label_conventions
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.native import ROW_GROUP, SEQUENCE_SCHEMA, Padding, choose_pad_id, make_shard_table, number_sequences
from rowmill.shards.sequences import SequenceBatch

GROUP_TOKENS = 32 << 20
"""Maximum tokens of a row group: sequences of a hundred thousand tokens make smaller groups."""

PARQUET_LOAD = 'rows = load_dataset("parquet", data_files="{data}/*.parquet", split="train")'

TRL_OPTIONS: dict[str, Any] = {
    "packing": False,
    "padding_free": True,
    "max_length": None,
    "per_device_train_batch_size": 1,
    "train_sampling_strategy": "sequential",
    "dataset_kwargs": {"skip_prepare_dataset": True},
}
"""What TRL's `SFTConfig` needs to train packed rows unchanged and in order; the pages on TRL show the same."""


class Native(TableExport):
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

    def make_table(self, chunk: SequenceBatch, file: WrittenFile, context: ExportContext) -> pa.Table:
        """Return sequences whose segments are padded to a multiple as in the shards of the recipe."""
        pad_id = choose_pad_id({"pad_id": context.pad_id, "eos_id": context.eos_id})
        return count_labels(make_packed_table(chunk, context.segment_multiple_of, pad_id), chunk, file)

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return TRL's configuration."""
        return format_trl_config(PARQUET_LOAD.format(data=data))


def format_trl_config(load: str) -> str:
    """Return the lines that load packed rows and train them with TRL."""
    options = [f"    {name}={value!r}," for name, value in TRL_OPTIONS.items()]
    model = 'AutoModelForCausalLM.from_pretrained(…, attn_implementation="flash_attention_2")'
    return "\n".join([load, "SFTConfig(", *options, ")", model])


def count_group_rows(seq_len: int) -> int:
    """Return the number of sequences of a row group."""
    return max(1, min(ROW_GROUP, GROUP_TOKENS // seq_len))


def count_labels(table: pa.Table, chunk: SequenceBatch, file: WrittenFile) -> pa.Table:
    """Count a chunk and the labels of its rows, and return the rows."""
    labels = table.column("labels").combine_chunks().flatten().to_numpy()
    file.add(chunk, trained=int((labels != IGNORED_LABEL).sum()))
    return table


def make_packed_table(sequences: SequenceBatch, multiple: int = 1, pad_id: int = 0) -> pa.Table:
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
    table = make_shard_table(sequences, lengths, span_offsets, dataset="", padding=padding)
    table = number_sequences(table, sequences.numbers)
    place = table.schema.get_field_index("dataset")
    return table.set_column(place, SEQUENCE_SCHEMA.field("dataset"), sequences.datasets.dictionary_encode())


UNPACKED_SCHEMA = make_required_schema(
    input_ids=pa.list_(pa.int32()), attention_mask=pa.list_(pa.int8()), labels=pa.list_(pa.int32())
)
"""A segment per row, without padding: every position is attended to."""


def make_unpacked_table(sequences: SequenceBatch) -> pa.Table:
    """Return segments as rows."""
    ones = np.ones(len(sequences.ids), np.int8)
    labels = label_conventions.make_unshifted_labels(sequences.ids, sequences.trained)
    fields = {name: make_list_array(sequences.offsets, values) for name, values in sequences.token_values.items()}
    of_tokens = (make_list_array(sequences.offsets, values) for values in (sequences.ids, ones, labels))
    columns = [*of_tokens, *fields.values(), *sequences.columns.values()]
    # The fields that token rows carry are after the others.
    of_rows = (ROW_FIELDS[name] for name in sequences.columns)
    schema = pa.schema(
        [
            *UNPACKED_SCHEMA,
            *make_token_columns({name: column.type.value_type for name, column in fields.items()}),
            *of_rows,
        ]
    )
    return pa.Table.from_arrays(columns, schema=schema)


class HuggingFaceExport(TableExport):
    """Rows for `datasets`, TRL and `Trainer`: single segments, or packed; Parquet or `save_to_disk`."""

    MEANT_BY: ClassVar = ("trl", "huggingface", "transformers", "datasets", "trainer")

    CONVENTION: ClassVar[LabelConvention] = "unshifted"
    HOLDS_FIELDS: ClassVar[bool] = True

    kind: Literal["hf"] = "hf"
    """Hugging Face `datasets`."""
    unit: Unit = "unpacked"
    """`unpacked`: a row is a segment; `packed`: the columns of `native`."""
    arrow: bool = False
    """Whether to write a `DatasetDict` with `save_to_disk` instead of Parquet."""

    def rows_at_once(self, context: ExportContext) -> int:
        """Return the rows of a row group if packed, else the default."""
        return count_group_rows(context.seq_len) if self.unit == "packed" else super().rows_at_once(context)

    def lay_out(self, index: ExportIndex) -> ExportLayout:
        """Cut the order into files; `save_to_disk` makes the same number of files itself."""
        parts = super().lay_out(index)
        return ExportLayout(join_jobs([*parts.jobs], self.split)) if self.arrow else parts

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write one file, or the whole `DatasetDict`."""
        if self.arrow:
            return save_dataset_dict(self, job, chunks, folder, context)
        return super().write(job, chunks, folder, context)

    def make_table(self, chunk: SequenceBatch, file: WrittenFile, context: ExportContext) -> pa.Table:
        """Return sequences or segments as rows."""
        table = make_packed_table(chunk) if self.unit == "packed" else make_unpacked_table(chunk)
        return count_labels(table, chunk, file)

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the code that loads it, and the collator with which `Trainer` packs."""
        load = PARQUET_LOAD.format(data=data)
        if self.arrow:
            load = f'rows = load_from_disk("{data}")["{self.split}"]'
        if self.unit == "packed":
            return format_trl_config(load)
        collator = (
            "DataCollatorWithFlattening(return_position_ids=True, return_flash_attn_kwargs=True, return_seq_idx=True)"
        )
        return f"{load}\nTrainer(…, data_collator={collator})"

    def refuse(self, summary: RecipeSummary) -> None:
        """Refuse a number of rows per file with `save_to_disk`, which cannot set it."""
        super().refuse(summary)
        if self.arrow and self.shard_sequences is not None:
            raise ConfigError(
                "shard_sequences with arrow: true; save_to_disk cuts rows evenly, into as many files as shard_bytes "
                "makes; delete shard_sequences"
            )


def join_jobs(jobs: list[ExportJob], split: str) -> list[ExportJob]:
    """Return one job of all segments in place of several; the library makes as many files as there were jobs."""
    if not jobs:
        return []
    segments = np.concatenate([job.segments for job in jobs])
    counts = np.concatenate([np.diff(job.sequence_offsets) for job in jobs])
    return [ExportJob(f"{split}-in-{len(jobs)}", segments, compute_offsets(counts))]


def save_dataset_dict(
    export: TableExport, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
) -> list[WrittenFile]:
    """Write the tables of a job of `join_jobs` as a `DatasetDict` below `data/`."""
    import datasets

    counted, staged = WrittenFile(""), folder / f"{job.name}.arrow"
    tables = (_decode_dictionaries(export.make_table(chunk, counted, context)) for chunk in chunks)
    first = next(tables)
    with pa.OSFile(str(staged), "wb") as sink, pa.ipc.new_stream(sink, first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table)
    # Without a given fingerprint, the library makes one from the clock.
    rows = datasets.Dataset(
        datasets.table.MemoryMappedTable.from_file(str(staged)), fingerprint=digest_bytes(context.card.encode())[:16]
    )
    shards = int(job.name.rsplit("-", 1)[1])
    had_progress_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    datasets.DatasetDict({export.split: rows}).save_to_disk(folder / "data", num_shards={export.split: shards})
    if had_progress_bars:
        datasets.enable_progress_bars()
    del rows
    staged.unlink()
    files = sorted(path.relative_to(folder).as_posix() for path in (folder / "data").rglob("*") if path.is_file())
    counted.path = next(file for file in files if file.endswith(".arrow"))
    return [counted if file == counted.path else WrittenFile(file) for file in files]


def _decode_dictionaries(table: pa.Table) -> pa.Table:
    """Return a table without dictionaries, which differ from chunk to chunk."""
    for i, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(i, pa.field(field.name, pa.string()), table.column(i).cast(pa.string()))
    return table


class Axolotl(TableExport):
    """Pre-tokenized rows for axolotl, which packs them itself."""

    CONVENTION: ClassVar[LabelConvention] = "unshifted"
    STORES_CARD: ClassVar[bool] = False

    kind: Literal["axolotl"] = "axolotl"
    """`input_ids`, `attention_mask` and `labels`, and nothing else."""
    unit: Literal["unpacked"] = "unpacked"
    """Segments one by one."""
    sequence_len: Annotated[int, Field(ge=2)] | None = None
    """axolotl's `sequence_len`. axolotl drops longer rows, so a longer row is an error here; null: `seq_len`."""
    ds_type: Literal["parquet", "json"] = "parquet"
    """Files of Parquet, or of JSON Lines."""

    def lay_out(self, index: ExportIndex) -> ExportLayout:
        """Cut the order into files; ConfigError if a segment is longer than axolotl takes."""
        limit = self.sequence_len or index.context.seq_len
        longer = np.flatnonzero(index.lengths > limit)
        if len(longer):
            raise ConfigError(
                f"exports.{self.name}.sequence_len: {limit}, but {len(longer)} segments are longer, the longest has "
                f"{int(index.lengths.max())} tokens ({index.name_of(int(longer[0]))} is the first); axolotl would drop "
                "them; raise sequence_len, or lower seq_len or truncation.max_length"
            )
        return super().lay_out(index)

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        if self.ds_type == "parquet":
            return super().write(job, chunks, folder, context)
        file = WrittenFile(f"data/{job.name}.jsonl")
        with (folder / file.path).open("wb") as sink:
            for chunk in chunks:
                labels = label_conventions.make_unshifted_labels(chunk.ids, chunk.trained)
                file.add(chunk, trained=int((labels != IGNORED_LABEL).sum()))
                for begin, end in zip(chunk.offsets[:-1].tolist(), chunk.offsets[1:].tolist(), strict=True):
                    row = {
                        "attention_mask": [1] * (end - begin),
                        "input_ids": chunk.ids[begin:end].tolist(),
                        "labels": labels[begin:end].tolist(),
                    }
                    sink.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        return [file]

    def make_table(self, chunk: SequenceBatch, file: WrittenFile, context: ExportContext) -> pa.Table:
        """Return segments as rows."""
        return count_labels(make_unpacked_table(chunk), chunk, file)

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the block of axolotl's YAML."""
        return (
            f"datasets:\n  - path: {data}\n    ds_type: {self.ds_type}\n    type:\n"
            f"sequence_len: {self.sequence_len or context.seq_len}\nsample_packing: true"
        )


MASKED_SCHEMA = make_required_schema(input_ids=pa.list_(pa.int32()), loss_mask=pa.list_(pa.int8()))


class MaskedRows(TableExport):
    """Segments one by one in Parquet, with a mask of targets."""

    CONVENTION: ClassVar[LabelConvention] = "unshifted_mask"

    def make_table(self, chunk: SequenceBatch, file: WrittenFile, context: ExportContext) -> pa.Table:
        """Return segments as rows."""
        mask = label_conventions.make_unshifted_mask(chunk.trained).astype(np.int8)
        file.add(chunk, trained=int(mask.sum()))
        columns = [make_list_array(chunk.offsets, values) for values in (chunk.ids, mask)]
        return pa.Table.from_arrays(columns, schema=MASKED_SCHEMA)


class SkyRL(MaskedRows):
    """Pre-tokenized rows with their mask for SkyRL, which packs them itself."""

    kind: Literal["skyrl"] = "skyrl"
    """`input_ids` and `loss_mask`, and nothing else."""
    unit: Literal["unpacked"] = "unpacked"
    """Segments one by one."""

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the options of its trainer; it cuts rows at `max_length`."""
        name = "eval_pretokenized_dataset_paths" if self.split != "train" else "pretokenized_dataset_paths"
        return f"{name}=\"['{data}']\" max_length={context.seq_len}"


_OPTIONS = {"train": "train_files", "validation": "val_files", "test": "val_files"}


class Verl(MaskedRows):
    """Tokenized rows with their mask for verl's supervised fine-tuning."""

    kind: Literal["verl"] = "verl"
    """`input_ids` and `loss_mask`, which `TokenizedDataset` reads."""
    unit: Literal["unpacked"] = "unpacked"
    """Segments one by one."""

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the options of verl's trainer."""
        return (
            f"data.{_OPTIONS[self.split]}={data} data.max_length={context.seq_len} data.pad_mode=no_padding "
            "data.custom_cls.path=pkg://rowmill.exports.verl_dataset data.custom_cls.name=TokenizedDataset"
        )
