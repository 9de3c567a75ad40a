"""AstrAI, raw binary: a file of int64 per array of a shard, and the shapes that its reader needs.

    data/wiki/meta.json           {"loss_mask": {"dtype": "int64", "shape": [N]}, "position_ids": {…}, "sequence": {…}}
    data/wiki/sequence.bin        N × int64, little-endian
    data/wiki/loss_mask.bin       N × int64, 0 or 1
    data/wiki/position_ids.bin    N × int64

A domain of several shards has folders `shard_0000`, `shard_0001`, … with these files each; the reader looks
for `meta.json` at any depth. It opens a `.bin` for every key, so `meta.json` has no other keys.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import orjson

from rowmill.exports.astrai import AstrAI, list_array_names, make_arrays
from rowmill.exports.base import ExportContext, ExportJob, FileCounts, WrittenFile
from rowmill.shards.sequences import SequenceBatch


class AstrAIBin(AstrAI):
    """AstrAI's raw binary files: tokens, masks and positions as int64, a folder per domain."""

    kind: Literal["astrai_bin"] = "astrai_bin"
    """AstrAI with `storage_format: bin`."""
    unit: Literal["unpacked"] = "unpacked"
    """A stream of tokens per domain."""

    def place(self, folder: str, number: int, *, count: int) -> str:
        """Return the domain's folder, or a folder in it if there are several shards."""
        return folder if count == 1 else f"{folder}/shard_{number:04d}"

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write one shard's files."""
        at = folder / "data" / job.name
        at.mkdir(parents=True)
        names, tally = list_array_names(context.kinds), FileCounts()
        with ExitStack() as opened:
            files = {name: opened.enter_context((at / f"{name}.bin").open("wb")) for name in names}
            for chunk in chunks:
                values = make_arrays(chunk)
                for name, file in files.items():
                    file.write(values[name].tobytes())
                tally.add(chunk, trained=int(values["loss_mask"].sum()))
        shape = {"dtype": "int64", "shape": [tally.tokens]}
        (at / "meta.json").write_bytes(orjson.dumps(dict.fromkeys(names, shape), option=orjson.OPT_SORT_KEYS))
        path = f"data/{job.name}"
        beside = [*(f"{name}.bin" for name in names if name != "sequence"), "meta.json"]
        return [tally.written(f"{path}/sequence.bin"), *(WrittenFile(f"{path}/{name}") for name in beside)]
