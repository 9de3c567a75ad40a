"""tinker: one Datum per segment, as a line of JSON in the client's wire format, and reading the lines as objects.

    segment 10 11 2, loss on 11 and 2

    {"loss_fn_inputs": {"target_tokens": {"data": [11, 2], "dtype": "int64", "shape": [2]},
                        "weights": {"data": [1.0, 1.0], "dtype": "float32", "shape": [2]}},
     "model_input": {"chunks": [{"tokens": [10, 11], "type": "encoded_text"}]}}

A segment of one token predicts nothing and would be an empty chunk, which the service refuses: it is left out
and counted. A Datum has no boundaries, so there is no packed form.
"""

from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import orjson

from rowmill.core.arrays import compute_offsets
from rowmill.core.errors import ConfigError
from rowmill.core.installation import format_install_command
from rowmill.exports.base import (
    ExportContext,
    ExportIndex,
    ExportJob,
    ExportLayout,
    Sharded,
    WrittenFile,
    open_export,
)
from rowmill.shards import label_conventions
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.sequences import SequenceBatch

IDS_FILE = "example_ids.txt"


class Tinker(Sharded):
    """A Datum per segment for tinker, as JSON Lines."""

    CONVENTION: ClassVar[LabelConvention] = "shifted"
    HOLDS_WEIGHTS: ClassVar[bool] = True

    kind: Literal["tinker"] = "tinker"
    """Lines that become `tinker.Datum`."""
    unit: Literal["unpacked"] = "unpacked"
    """Segments one by one: a Datum has no inner boundaries."""
    reduction: Literal["none", "mean"] = "none"
    """`none`: weights unchanged; `mean`: divided so that those of a Datum add up to 1."""

    def lay_out(self, index: ExportIndex) -> ExportLayout:
        """Cut the order into files of segments with at least two tokens."""
        short = index.lengths < 2
        before = compute_offsets(~short)
        counts = np.diff(before[index.sequence_offsets])
        kept = counts > 0
        offsets = compute_offsets(counts[kept])
        jobs = self.cut(index.tokens[kept], offsets, np.flatnonzero(~short))
        return ExportLayout(jobs, {"not_taken": int(short.sum())}, {"left_out_segments_of_one_token": int(short.sum())})

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write one file of lines; its note is the ids of the lines, which `finish` joins."""
        file, names = WrittenFile(f"data/{job.name}.jsonl"), BytesIO()
        with (folder / file.path).open("wb") as sink:
            for chunk in chunks:
                token_weights = chunk.trained if chunk.weights is None else chunk.weights
                datums = label_conventions.make_shifted_targets(chunk.ids, token_weights, chunk.offsets)
                # A weight may be 0 on a token that has a label.
                mask = datums.weights if chunk.weights is None else chunk.trained
                file.add(chunk, trained=int((mask != 0).sum()))
                weights = datums.weights
                if self.reduction == "mean":
                    # A span whose weights are all 0 keeps them.
                    sizes = np.concatenate((np.zeros(1), np.cumsum(np.abs(weights), dtype=np.float64)))
                    sums = np.diff(sizes[datums.offsets])
                    divisors = np.repeat(np.where(sums == 0, 1.0, sums), np.diff(datums.offsets))
                    weights = (weights / divisors).astype(np.float32)
                bounds: list[int] = datums.offsets.tolist()
                for begin, end in pairwise(bounds):
                    size = [end - begin]
                    tokens = {"tokens": datums.inputs[begin:end], "type": "encoded_text"}
                    line = {
                        "loss_fn_inputs": {
                            "target_tokens": {"data": datums.targets[begin:end], "dtype": "int64", "shape": size},
                            "weights": {"data": weights[begin:end], "dtype": "float32", "shape": size},
                        },
                        "model_input": {"chunks": [tokens]},
                    }
                    sink.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
                names.write("".join(f"{name}\n" for name in chunk.example_ids.to_pylist()).encode())
        file.note = names.getvalue()
        return [file]

    def finish(self, folder: Path, written: Sequence[WrittenFile], context: ExportContext) -> list[WrittenFile]:
        """Join the ids of all files: line n names line n of all files together."""
        with (folder / IDS_FILE).open("wb") as sink:
            sink.writelines(file.note for file in written)
        return [WrittenFile(IDS_FILE)]

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the code that reads the objects."""
        return f'from rowmill import read_datums\nfor datum in read_datums("{data}"): …   # tinker.Datum'


def read_datums(path: str | Path) -> Iterator[Any]:
    """Yield the `tinker.Datum` of each line of an export, in order.

    Raises
    ------
    IntegrityError
        If the export is incomplete, or of another kind.
    ConfigError
        If tinker is not installed.

    """
    try:
        import tinker
    except ImportError as error:
        raise ConfigError(
            f"tinker is not installed here; it is needed for its objects; run {format_install_command('tinker')}, or "
            "read the lines as JSON"
        ) from error
    exported = open_export(path, kind="tinker")
    for file in sorted(exported.data.glob("*.jsonl")):
        with file.open("rb") as lines:
            for line in lines:
                datum = orjson.loads(line)
                chunks = [tinker.EncodedTextChunk(tokens=chunk["tokens"]) for chunk in datum["model_input"]["chunks"]]
                inputs = {name: tinker.TensorData(**value) for name, value in datum["loss_fn_inputs"].items()}
                yield tinker.Datum(model_input=tinker.ModelInput(chunks=chunks), loss_fn_inputs=inputs)
