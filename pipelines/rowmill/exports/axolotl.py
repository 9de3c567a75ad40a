"""axolotl: pre-tokenized rows with exactly the three columns that it takes unchanged."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import orjson
from pydantic import Field

from rowmill.core.errors import ConfigError
from rowmill.exports import hf
from rowmill.exports.base import ExportContext, ExportIndex, ExportJob, ExportLayout, FileCounts, Sharded, WrittenFile
from rowmill.schema.examples import IGNORED_LABEL
from rowmill.shards import label_conventions
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.sequences import SequenceBatch


class Axolotl(Sharded):
    """Pre-tokenized rows for axolotl, which packs them itself."""

    CONVENTION: ClassVar[LabelConvention] = "unshifted"

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
        limit = self.sequence_len or index.seq_len
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
        """Write one file."""
        if self.ds_type == "parquet":
            return [hf.write_unpacked(chunks, folder, f"data/{job.name}.parquet", card=None)]
        tally, path = FileCounts(), f"data/{job.name}.jsonl"
        with (folder / path).open("wb") as sink:
            for chunk in chunks:
                labels = label_conventions.make_unshifted_labels(chunk.ids, chunk.trained)
                tally.add(chunk, trained=int((labels != IGNORED_LABEL).sum()))
                for begin, end in zip(chunk.offsets[:-1].tolist(), chunk.offsets[1:].tolist(), strict=True):
                    row = {
                        "attention_mask": [1] * (end - begin),
                        "input_ids": chunk.ids[begin:end].tolist(),
                        "labels": labels[begin:end].tolist(),
                    }
                    sink.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        return [tally.written(path)]

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the block of axolotl's YAML."""
        return (
            f"datasets:\n  - path: {data}\n    ds_type: {self.ds_type}\n    type:\n"
            f"sequence_len: {self.sequence_len or context.seq_len}\nsample_packing: true"
        )
