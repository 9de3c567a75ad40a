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

from rowmill.core.errors import ConfigError
from rowmill.exports.base import ExportContext, ExportJob, Sharded, WrittenFile
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
        data, file, dtype = folder / "data", WrittenFile(f"data/{part}.npy"), choose_token_dtype(context.vocab_size)
        where, bos_id = f"exports.{self.name}", context.bos_id if self.bos_id == "tokenizer" else self.bos_id
        if context.eos_id is None:
            raise ConfigError(
                f"{where}: the tokenizer has no EOS, after which OLMo-core cuts; one is needed; name one in "
                "tokenizer_config.json, or choose another kind"
            )
        with (
            (data / f"{part}.npy").open("wb") as ids,
            (data / f"{mask_name}.npy").open("wb") as mask,
            (data / f"{part}.csv.gz").open("wb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as borders,
        ):
            for chunk in chunks:
                trained = label_conventions.make_unshifted_mask(chunk.trained)
                require_exact_cuts(chunk, where, context.eos_id, bos_id)
                begin = file.tokens
                ids.write(chunk.ids.astype(dtype).tobytes())
                mask.write(trained.astype(np.uint8).tobytes())
                lines = np.stack((chunk.offsets[:-1], chunk.offsets[1:]), axis=1) + begin
                borders.write("".join(f"{first},{last}\n" for first, last in lines.tolist()).encode())
                file.add(chunk, trained=int(trained.sum()))
        side = (f"data/{mask_name}.npy", f"data/{part}.csv.gz")
        return [file, *(WrittenFile(path) for path in side)]

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


def require_exact_cuts(chunk: SequenceBatch, where: str, eos_id: int, bos_id: int | None) -> None:
    """Refuse a chunk that the reader would not cut exactly between its segments.

    Raises ConfigError naming the first example that would be joined or split, and the id that causes it.
    """
    firsts, ends = chunk.offsets[:-1], chunk.offsets[1:] - 1
    # A chunk's first segment follows another one in the file, which this chunk's cuts do not cover.
    wrong = firsts[chunk.ids[firsts] != bos_id] if bos_id is not None else firsts[:0]
    if not len(wrong):
        is_end = chunk.ids == eos_id
        if bos_id is not None:
            is_end[:-1] &= chunk.ids[1:] == bos_id
        wrong = np.setxor1d(np.flatnonzero(is_end), ends, assume_unique=True)
    if not len(wrong):
        return
    at = int(np.searchsorted(chunk.offsets, wrong[0], "right")) - 1
    first, last = int(chunk.ids[firsts[at]]), int(chunk.ids[ends[at]])
    eos = f"{eos_id} (EOS)"
    if last != eos_id:
        what = f"ends in {last}, not in {eos}, so it would be joined to the next one"
    elif bos_id not in (None, first):
        what = f"begins with {first}, not with {bos_id} (BOS): it would be joined to the one before"
    else:
        what = f"holds {eos} before its end, so it would be split there"
    raise ConfigError(
        f"{where}: example {chunk.example_ids[at].as_py()} {what}; OLMo-core's reader cuts only by these ids and must "
        "cut once per example; use a template whose end of turn is a token other than EOS, do not truncate examples, "
        "set bos_id to that of its TokenizerConfig, or choose another kind"
    )
