"""AstrAI, raw binary: two files of int64 per shard, and the two shapes that its reader asks for.

What belongs here: `sequence.bin`, `loss_mask.bin`, `meta.json`. What does not: which segments (`astrai.py`).

    data/wiki/meta.json        {"loss_mask": {"dtype": "int64", "shape": [N]}, "sequence": {…}}
    data/wiki/sequence.bin     N × int64, little-endian
    data/wiki/loss_mask.bin    N × int64, 0 or 1

A domain of several shards has folders `shard_0000`, `shard_0001`, … with the three files each; the reader looks
for `meta.json` at any depth. It opens a `.bin` for every key, so nothing else stands in `meta.json`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import orjson

from pipelines.shards.astrai import AstrAI, has_mask, rivers
from pipelines.shards.export import Job, Tally, Terms, Written
from pipelines.shards.sequences import Sequences


class AstrAIBin(AstrAI):
    """AstrAI's raw binary files: tokens and masks as int64, a folder per domain."""

    kind: Literal["astrai_bin"] = "astrai_bin"
    """AstrAI with `storage_format: bin`."""
    unit: Literal["unpacked"] = "unpacked"
    """A river of tokens per domain."""

    def place(self, folder: str, number: int, *, count: int) -> str:
        """Return the domain's folder, or a folder in it where there are several."""
        return folder if count == 1 else f"{folder}/shard_{number:04d}"

    def write(self, job: Job, chunks: Iterator[Sequences], folder: Path, terms: Terms) -> list[Written]:
        """Write one shard's files."""
        at = folder / "data" / job.name
        at.mkdir(parents=True)
        masked, tally = has_mask(terms.kinds), Tally()
        with (at / "sequence.bin").open("wb") as sequence, (at / "loss_mask.bin").open("wb") as loss_mask:
            for chunk in chunks:
                ids, mask = rivers(chunk)
                sequence.write(ids.astype("<i8").tobytes())
                loss_mask.write(mask.astype("<i8").tobytes())
                tally.add(chunk, trained=int(mask.sum()))
        if not masked:
            (at / "loss_mask.bin").unlink()
        keys = ["sequence", "loss_mask"] if masked else ["sequence"]
        shape = {"dtype": "int64", "shape": [tally.tokens]}
        (at / "meta.json").write_bytes(orjson.dumps(dict.fromkeys(keys, shape), option=orjson.OPT_SORT_KEYS))
        side = ["loss_mask.bin", "meta.json"] if masked else ["meta.json"]
        path = f"data/{job.name}"
        return [tally.written(f"{path}/sequence.bin"), *(Written(f"{path}/{name}") for name in side)]
