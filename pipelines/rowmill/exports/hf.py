"""Rows for `datasets`, TRL and the Trainer: packed or single segments, as Parquet or a saved `DatasetDict`.

    input_ids       10   11 2        a row is a segment; the trainer packs or pads
    attention_mask   1    1 1
    labels        -100   11 2
    logprobs         0 -0.5 0        if token rows carry fields: the number of the token at the same place

A field of a row, such as its reward, is one value beside the lists.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import compute_offsets, make_list_array
from rowmill.core.errors import ConfigError
from rowmill.core.storage import digest_bytes
from rowmill.exports import native
from rowmill.exports.base import (
    ExportContext,
    ExportIndex,
    ExportJob,
    ExportLayout,
    FileCounts,
    RecipeSummary,
    Sharded,
    Unit,
    WrittenFile,
    write_parquet,
)
from rowmill.schema.examples import IGNORED_LABEL, ROW_FIELDS, make_token_columns
from rowmill.shards import label_conventions
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.native import ROW_GROUP
from rowmill.shards.sequences import SequenceBatch


def join_jobs(jobs: list[ExportJob], split: str) -> list[ExportJob]:
    """Return one job of all segments in place of several; the library makes as many files as there were jobs."""
    if not jobs:
        return []
    segments = np.concatenate([job.segments for job in jobs])
    counts = np.concatenate([np.diff(job.sequence_offsets) for job in jobs])
    return [ExportJob(f"{split}-in-{len(jobs)}", segments, compute_offsets(counts))]


def save_dataset_dict(
    job: ExportJob, tables: Iterator[pa.Table], tally: FileCounts, folder: Path, *, split: str, card: str
) -> list[WrittenFile]:
    """Write the tables of a job of `join_jobs` below `data/`; `tally` has their counts when all are read."""
    import datasets

    staged = folder / f"{job.name}.arrow"
    first = next(tables)
    with pa.OSFile(str(staged), "wb") as sink, pa.ipc.new_stream(sink, first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table)
    # Without a given fingerprint, the library makes one from the clock.
    rows = datasets.Dataset(
        datasets.table.MemoryMappedTable.from_file(str(staged)), fingerprint=digest_bytes(card.encode())[:16]
    )
    shards = int(job.name.rsplit("-", 1)[1])
    had_progress_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    datasets.DatasetDict({split: rows}).save_to_disk(folder / "data", num_shards={split: shards})
    if had_progress_bars:
        datasets.enable_progress_bars()
    del rows
    staged.unlink()
    files = sorted(path.relative_to(folder).as_posix() for path in (folder / "data").rglob("*") if path.is_file())
    main = next(file for file in files if file.endswith(".arrow"))
    return [tally.written(file) if file == main else WrittenFile(file) for file in files]


UNPACKED_SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("attention_mask", pa.list_(pa.int8()), nullable=False),
        pa.field("labels", pa.list_(pa.int32()), nullable=False),
    ]
)
"""A segment per row, without padding: every position is attended to."""


class HuggingFaceExport(Sharded):
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
        return native.count_group_rows(context.seq_len) if self.unit == "packed" else super().rows_at_once(context)

    def lay_out(self, index: ExportIndex) -> ExportLayout:
        """Cut the order into files; `save_to_disk` makes the same number of files itself."""
        parts = super().lay_out(index)
        return ExportLayout(join_jobs([*parts.jobs], self.split)) if self.arrow else parts

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write one file, or the whole `DatasetDict`."""
        if self.arrow:
            tally = FileCounts()
            make_table = native.make_packed_table if self.unit == "packed" else make_unpacked_table
            tables = (_count_table(_decode_dictionaries(make_table(chunk)), chunk, tally) for chunk in chunks)
            return save_dataset_dict(job, tables, tally, folder, split=self.split, card=context.card)
        path = f"data/{job.name}.parquet"
        if self.unit == "packed":
            return [native.write_packed(chunks, folder, path, context)]
        return [write_unpacked(chunks, folder, path, card=context.card)]

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the code that loads it, and the collator with which `Trainer` packs."""
        load = native.PARQUET_LOAD.format(data=data)
        if self.arrow:
            load = f'rows = load_from_disk("{data}")["{self.split}"]'
        if self.unit == "packed":
            return native.format_trl_config(load)
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


def _count_table(table: pa.Table, chunk: SequenceBatch, tally: FileCounts) -> pa.Table:
    labels = table.column("labels").combine_chunks().flatten().to_numpy()
    tally.add(chunk, trained=int((labels != IGNORED_LABEL).sum()))
    return table


def _decode_dictionaries(table: pa.Table) -> pa.Table:
    """Return a table without dictionaries, which differ from chunk to chunk."""
    for i, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(i, pa.field(field.name, pa.string()), table.column(i).cast(pa.string()))
    return table


def make_unpacked_table(sequences: SequenceBatch) -> pa.Table:
    """Return segments as rows."""
    ones = np.ones(len(sequences.ids), np.int8)
    labels = label_conventions.make_unshifted_labels(sequences.ids, sequences.trained)
    fields = {name: make_list_array(sequences.offsets, values) for name, values in sequences.token_fields.items()}
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


def write_unpacked(chunks: Iterator[SequenceBatch], folder: Path, path: str, *, card: str | None) -> WrittenFile:
    """Write segments as one Parquet file, with the card in its schema if there is one."""
    return write_parquet(
        folder / path,
        chunks,
        lambda chunk, tally: _count_table(make_unpacked_table(chunk), chunk, tally),
        card=card,
        rows=ROW_GROUP,
    ).written(path)
