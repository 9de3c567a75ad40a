"""AstrAI, HDF5: one file per shard with a group per array.

    data/wiki/data_0000.h5     sequence/data_0       1-D int64
                               loss_mask/data_0      1-D int64, 0 or 1
                               position_ids/data_0   1-D int64

Each group holds one data set: the reader takes them in the order of their names, in which `data_10` comes
before `data_2`.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

from rowmill.exports.astrai import AstrAI, list_array_names, make_arrays
from rowmill.exports.base import ExportContext, ExportJob, FileCounts, WrittenFile
from rowmill.shards.sequences import SequenceBatch


class AstrAIH5(AstrAI):
    """AstrAI's HDF5 files: tokens, masks and positions as int64, a folder per domain."""

    NEEDS: ClassVar[tuple[str, str] | None] = ("h5py", "h5")
    # Later revisions of AstrAI do not read HDF5.
    NOTES: ClassVar[dict[str, str]] = {"reader_revision": "AstrAI 553a42702d927b09710c4bb62f5f9455fd24461b"}

    kind: Literal["astrai_h5"] = "astrai_h5"
    """AstrAI with `storage_format: h5`."""
    unit: Literal["unpacked"] = "unpacked"
    """A stream of tokens per domain."""

    def place(self, folder: str, number: int, *, count: int) -> str:
        """Return a file in the domain's folder."""
        return f"{folder}/data_{number:04d}.h5"

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write one file."""
        # Untyped, and optional.
        h5py: Any = import_module("h5py")
        path, tally = f"data/{job.name}", FileCounts()
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(folder / path, "w") as file:
            # Creation times would change the bytes of every build.
            datasets = {
                name: file.create_group(name).create_dataset(
                    "data_0", shape=(job.tokens,), dtype="<i8", track_times=False
                )
                for name in list_array_names(context.kinds)
            }
            for chunk in chunks:
                begin, values = tally.tokens, make_arrays(chunk)
                tally.add(chunk, trained=int(values["loss_mask"].sum()))
                for name, dataset in datasets.items():
                    dataset[begin : tally.tokens] = values[name]
        return [tally.written(path)]
