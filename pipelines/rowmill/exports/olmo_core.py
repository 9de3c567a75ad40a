"""OLMo-core: raw arrays without a header, and the check of where its reader cuts them.

    segments 10 11 2 | 20 2     token_ids_part_00000.npy     0a 0b 02 14 02     the smallest unsigned integer
                                labels_mask_part_00000.npy   00 01 01 00 01     one byte each
                                token_ids_part_00000.csv.gz  0,3  3,5           a line per segment

For local files the reader ignores the third file: it cuts after every EOS (with a BOS set, between an EOS and a BOS).
So a segment must end in its only EOS; anything else is refused here, because the reader would join two segments or
split one.
"""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rowmill.core.arrays import Ints, Tokens
from rowmill.core.errors import ConfigError
from rowmill.exports.base import ExportContext, ExportJob, FileCounts, Sharded, WrittenFile
from rowmill.shards import label_conventions
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.sequences import SequenceBatch


class OLMoCore(Sharded):
    """Raw NumPy arrays for OLMo-core, which packs them itself."""

    CONVENTION: ClassVar[LabelConvention] = "unshifted_mask"

    kind: Literal["olmo_core"] = "olmo_core"
    """OLMo-core's `NumpyPackedFSLDataset`."""
    unit: Literal["unpacked"] = "unpacked"
    """Segments one by one."""
    bos_id: Literal["tokenizer"] | Annotated[int, Field(ge=0)] | None = "tokenizer"
    """The `bos_token_id` of its TokenizerConfig: with one, its reader cuts between an EOS and a BOS; null if the
    TokenizerConfig has none."""

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write one part."""
        part = f"token_ids_{job.name.replace('-', '_')}"
        mask_name = part.replace("token_ids", "labels_mask")
        data, tally, dtype = folder / "data", FileCounts(), choose_token_dtype(context.vocab_size)
        rule = _CutRule(self.name, context.eos_id, context.bos_id if self.bos_id == "tokenizer" else self.bos_id)
        with (
            (data / f"{part}.npy").open("wb") as ids,
            (data / f"{mask_name}.npy").open("wb") as mask,
            (data / f"{part}.csv.gz").open("wb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as borders,
        ):
            for chunk in chunks:
                trained = label_conventions.make_unshifted_mask(chunk.trained)
                rule.require_exact_cuts(chunk)
                begin = tally.tokens
                ids.write(chunk.ids.astype(dtype).tobytes())
                mask.write(trained.astype(np.uint8).tobytes())
                lines = np.stack((chunk.offsets[:-1], chunk.offsets[1:]), axis=1) + begin
                borders.write("".join(f"{first},{last}\n" for first, last in lines.tolist()).encode())
                tally.add(chunk, trained=int(trained.sum()))
        side = (f"data/{mask_name}.npy", f"data/{part}.csv.gz")
        return [tally.written(f"data/{part}.npy"), *(WrittenFile(path) for path in side)]

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return its dataset's configuration."""
        bos = context.bos_id if self.bos_id == "tokenizer" else self.bos_id
        dtype = np.dtype(choose_token_dtype(context.vocab_size)).name
        return (
            f'NumpyPackedFSLDatasetConfig(paths=["{data}/token_ids_part_*.npy"], expand_glob=True,\n'
            f'    label_mask_paths=["{data}/labels_mask_part_*.npy"], dtype=NumpyDatasetDType.{dtype},\n'
            f"    tokenizer=TokenizerConfig(vocab_size={context.vocab_size}, eos_token_id={context.eos_id}, "
            f"bos_token_id={bos}, pad_token_id=…),\n    sequence_length=…)   # a power of two"
        )


def choose_token_dtype(vocab_size: int) -> "type[np.unsignedinteger[Any]]":
    """Return the smallest unsigned type that holds every id of a vocabulary."""
    for dtype in (np.uint8, np.uint16, np.uint32):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return dtype
    return np.uint64


class _CutRule:
    """The reader's rule for cuts, chunk by chunk; a boundary between chunks is checked with the later chunk."""

    def __init__(self, export: str, eos_id: int | None, bos_id: int | None) -> None:
        if eos_id is None:
            raise ConfigError(
                f"exports.{export}: the tokenizer has no EOS, after which OLMo-core cuts; one is needed; name one in "
                "tokenizer_config.json, or choose another kind"
            )
        self._export, self._eos_id, self._bos_id = export, eos_id, bos_id

    def require_exact_cuts(self, chunk: SequenceBatch) -> None:
        """Refuse a chunk that the reader would not cut exactly between its segments.

        Raises ConfigError naming the first example that would be joined or split, and the id that causes it.
        """
        firsts, ends = chunk.offsets[:-1], chunk.offsets[1:] - 1
        # A chunk's first segment follows another one in the file, which this chunk's cuts do not cover.
        wrong = firsts[chunk.ids[firsts] != self._bos_id] if self._bos_id is not None else firsts[:0]
        if not len(wrong):
            is_end = chunk.ids == self._eos_id
            if self._bos_id is not None:
                is_end[:-1] &= chunk.ids[1:] == self._bos_id
            wrong = np.setxor1d(np.flatnonzero(is_end), ends, assume_unique=True)
        if len(wrong):
            segment = int(np.searchsorted(chunk.offsets, wrong[0], "right")) - 1
            self._refuse_segment(
                str(chunk.example_ids[segment].as_py()), chunk.ids[firsts[segment] : ends[segment] + 1]
            )

    def _refuse_segment(self, name: str, segment: "Tokens | Ints") -> None:
        eos = f"{self._eos_id} (EOS)"
        if int(segment[-1]) != self._eos_id:
            what = f"ends in {int(segment[-1])}, not in {eos}, so it would be joined to the next one"
        elif self._bos_id not in (None, int(segment[0])):
            what = f"begins with {int(segment[0])}, not with {self._bos_id} (BOS): it would be joined to the one before"
        else:
            what = f"holds {eos} before its end, so it would be split there"
        raise ConfigError(
            f"exports.{self._export}: example {name} {what}; OLMo-core's reader cuts only by these ids and must cut "
            "once per example; use a template whose end of turn is a token other than EOS, do not truncate examples, "
            "set bos_id to that of its TokenizerConfig, or choose another kind"
        )
