"""Hugging Face rows: packed as our own shards are, or segments one by one, as Parquet or a saved `DatasetDict`.

What belongs here: the columns that `datasets`, TRL and `Trainer` read without a collator of ours. What does not:
packed columns (`native.py`).

    input_ids       10   11 2        a row is a segment; whoever reads it packs or pads
    attention_mask   1    1 1
    labels        -100   11 2
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa

from rowmill.core.errors import ConfigError
from rowmill.core.storage import digest_bytes
from rowmill.exports import native
from rowmill.exports.base import Job, Layout, Prospect, Shape, Sharded, Tally, Terms, Unit, Written, write_parquet
from rowmill.shards import label_conventions
from rowmill.shards.label_conventions import Letter
from rowmill.shards.native import ROW_GROUP
from rowmill.shards.sequences import Sequences, lists

UNPACKED = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("attention_mask", pa.list_(pa.int8()), nullable=False),
        pa.field("labels", pa.list_(pa.int32()), nullable=False),
    ]
)
"""A segment per row, without padding, so that all of it may be attended to."""


class HuggingFace(Sharded):
    """Rows for `datasets`, TRL and `Trainer`: segments one by one, or packed; Parquet or `save_to_disk`."""

    LETTER: ClassVar[Letter] = "A"

    kind: Literal["hf"] = "hf"
    """Hugging Face `datasets`."""
    unit: Unit = "unpacked"
    """`unpacked`: a row is a segment; `packed`: the columns of `native`."""
    arrow: bool = False
    """Whether to write a `DatasetDict` with `save_to_disk` instead of Parquet."""

    def rows_at_once(self, seq_len: int) -> int:
        """Return whole row groups of packed rows, else what is in hand anyway."""
        return native.group_rows(seq_len) if self.unit == "packed" else super().rows_at_once(seq_len)

    def lay_out(self, shape: Shape) -> Layout:
        """Cut the order into files; `save_to_disk` cuts into as many by itself."""
        parts = super().lay_out(shape)
        if not self.arrow:
            return parts
        every = Job(f"{self.split}-in-{len(parts.jobs)}", np.arange(len(shape.lengths)), shape.sequence_offsets)
        return Layout([every] if parts.jobs else [])

    def write(self, job: Job, chunks: Iterator[Sequences], folder: Path, terms: Terms) -> list[Written]:
        """Write one file, or the whole `DatasetDict`."""
        if self.arrow:
            return self._save_to_disk(job, chunks, folder, terms)
        path = f"data/{job.name}.parquet"
        if self.unit == "packed":
            return [native.write_packed(chunks, folder, path, terms)]
        return [write_unpacked(chunks, folder, path, card=terms.card)]

    def _save_to_disk(self, job: Job, chunks: Iterator[Sequences], folder: Path, terms: Terms) -> list[Written]:
        import datasets

        tally, staged = Tally(), folder / f"{job.name}.arrow"
        tables = native.packed if self.unit == "packed" else unpacked
        made = (_counted(_plain(tables(chunk)), chunk, tally) for chunk in chunks)
        first = next(made)
        with pa.OSFile(str(staged), "wb") as sink, pa.ipc.new_stream(sink, first.schema) as writer:
            for table in chain([first], made):
                writer.write_table(table)
        # The library draws a fingerprint from the clock where it is given none.
        rows = datasets.Dataset(datasets.table.MemoryMappedTable.from_file(str(staged)), fingerprint=_stamp(terms.card))
        shards = int(job.name.rsplit("-", 1)[1])
        shown = not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        datasets.DatasetDict({self.split: rows}).save_to_disk(folder / "data", num_shards={self.split: shards})
        if shown:
            datasets.enable_progress_bars()
        del rows
        staged.unlink()
        files = sorted(one.relative_to(folder).as_posix() for one in (folder / "data").rglob("*") if one.is_file())
        main = next(one for one in files if one.endswith(".arrow"))
        return [tally.written(one) if one == main else Written(one) for one in files]

    def pointer(self, data: str, terms: Terms) -> str:
        """Return how to load it, and the collator that plain `Trainer` packs with."""
        load = native.PARQUET_LOAD.format(data=data)
        if self.arrow:
            load = f'rows = load_from_disk("{data}")["{self.split}"]'
        if self.unit == "packed":
            return native.trl_pointer(load)
        collator = (
            "DataCollatorWithFlattening(return_position_ids=True, return_flash_attn_kwargs=True, return_seq_idx=True)"
        )
        return f"{load}\nTrainer(…, data_collator={collator})"

    def refuse(self, prospect: Prospect) -> None:
        """Refuse file sizes where `save_to_disk` has no say in rows."""
        super().refuse(prospect)
        if self.arrow and self.shard_sequences is not None:
            raise ConfigError(
                "shard_sequences with arrow: true; save_to_disk cuts rows evenly, into as many files as shard_bytes "
                "makes; delete shard_sequences"
            )


def _stamp(card: str) -> str:
    return digest_bytes(card.encode())[:16]


def _counted(table: pa.Table, chunk: Sequences, tally: Tally) -> pa.Table:
    labels = table.column("labels").combine_chunks().flatten().to_numpy()
    tally.add(chunk, trained=int((labels != label_conventions.IGNORE).sum()))
    return table


def _plain(table: pa.Table) -> pa.Table:
    """Return a table without dictionaries, which differ from chunk to chunk."""
    for i, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(i, pa.field(field.name, pa.string()), table.column(i).cast(pa.string()))
    return table


def unpacked(sequences: Sequences) -> pa.Table:
    """Return segments as rows."""
    ones = np.ones(len(sequences.ids), np.int8)
    labels = label_conventions.unshifted(sequences.ids, sequences.trained)
    columns = [lists(sequences.offsets, values) for values in (sequences.ids, ones, labels)]
    return pa.Table.from_arrays(columns, schema=UNPACKED)


def write_unpacked(chunks: Iterator[Sequences], folder: Path, path: str, *, card: str | None) -> Written:
    """Write segments as one Parquet file, with the card in its schema if there is one."""
    tally = Tally()

    schema = UNPACKED.with_metadata({"rowmill": card}) if card else UNPACKED
    tables = (_counted(unpacked(chunk), chunk, tally) for chunk in chunks)
    write_parquet(folder / path, tables, schema, rows=ROW_GROUP)
    return tally.written(path)
