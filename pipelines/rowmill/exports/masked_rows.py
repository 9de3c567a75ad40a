"""SkyRL and verl: segments as rows of ids and a mask, which is not shifted.

input_ids   10 11 2       a row is a segment; the trainer packs
loss_mask    0  1 1       the token is itself a target; never the first
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import make_list_array
from rowmill.exports.base import ExportContext, ExportJob, FileCounts, Sharded, WrittenFile, write_parquet
from rowmill.shards import label_conventions
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.native import ROW_GROUP
from rowmill.shards.sequences import SequenceBatch

MASKED_SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.int8()), nullable=False),
    ]
)


class MaskedRows(Sharded):
    """Segments one by one in Parquet, with a mask of targets."""

    CONVENTION: ClassVar[LabelConvention] = "unshifted_mask"

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write one file."""
        path = f"data/{job.name}.parquet"
        return [write_parquet(folder / path, chunks, _make_table, card=context.card, rows=ROW_GROUP).written(path)]


def _make_table(chunk: SequenceBatch, tally: FileCounts) -> pa.Table:
    mask = label_conventions.make_unshifted_mask(chunk.trained).astype(np.int8)
    tally.add(chunk, trained=int(mask.sum()))
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
