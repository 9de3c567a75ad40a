"""The base of the kinds for SkyRL and verl: segments as rows of ids and a mask, which is not shifted.

input_ids   10 11 2       a row is a segment; the trainer packs
loss_mask    0  1 1       the token is itself a target; never the first
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

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
        tally, path = FileCounts(), f"data/{job.name}.parquet"

        def tables() -> Iterator[pa.Table]:
            for chunk in chunks:
                mask = label_conventions.make_unshifted_mask(chunk.trained).astype(np.int8)
                tally.add(chunk, trained=int(mask.sum()))
                columns = [make_list_array(chunk.offsets, values) for values in (chunk.ids, mask)]
                yield pa.Table.from_arrays(columns, schema=MASKED_SCHEMA)

        write_parquet(folder / path, tables(), MASKED_SCHEMA.with_metadata({"rowmill": context.card}), rows=ROW_GROUP)
        return [tally.written(path)]
