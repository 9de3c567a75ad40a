"""Sequences without a build, and writing them with one export; for tests of single formats."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from rowmill.exports import AnyExport, Export
from rowmill.exports.base import ExportContext, ExportIndex, ExportJob, WrittenFile
from rowmill.schema.examples import WEIGHT_COLUMN
from rowmill.shards.sequences import SequenceBatch

VECTOR = [[([10, 11, 2], [0, 1, 1]), ([20, 2], [0, 1])]]
"""One sequence of two segments: ids, and which are targets; EOS 2, vocabulary 100."""
TERMS: dict[str, Any] = {
    "seq_len": 64, "vocab_size": 100, "bos_id": None, "eos_id": 2, "kinds": frozenset({"conversation"}),
}  # fmt: skip


_TERM_NAMES = {field.name for field in fields(ExportContext)}


def sequences(
    content: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]],
    *,
    weights: Sequence[float] | None = None,
    is_open: bool = False,
) -> SequenceBatch:
    """Return sequences from their segments; `weights` are flat over all tokens."""
    segments = [segment for one in content for segment in one]
    return SequenceBatch(
        ids=np.array([i for ids, _ in segments for i in ids], np.int32),
        trained=np.array([bool(m) for _, mask in segments for m in mask], bool),
        token_values={} if weights is None else {WEIGHT_COLUMN: np.array(weights, np.float32)},
        offsets=_firsts([len(ids) for ids, _ in segments]),
        sequence_offsets=_firsts([len(one) for one in content]),
        is_open=np.full(len(content), is_open),
        example_ids=pa.array([f"e{i}#0" for i in range(len(segments))], pa.string()),
        starts=np.zeros(len(segments), np.int32),
        datasets=pa.array(["d"] * len(content), pa.string()),
        numbers=np.arange(len(content), dtype=np.int64),
    )


def _firsts(counts: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


def export(**options: Any) -> Export:
    """Return an export from its options, as a recipe would."""
    return TypeAdapter(AnyExport).validate_python({"name": "tested", **options})


def shape(lengths: Sequence[int], per_sequence: Sequence[int], **changes: Any) -> ExportIndex:
    """Return the shape that an export gets for segments of these lengths."""
    values: dict[str, Any] = {
        "context": terms(**{name: changes.pop(name) for name in (*changes,) if name in _TERM_NAMES}),
        "lengths": np.array(lengths, np.int64),
        "sequence_offsets": _firsts(per_sequence),
        "domains": np.zeros(len(lengths), np.int64),
        "domain_values": (None,),
        "name_of": lambda number: f"e{number}#0",
    }
    return ExportIndex(**{**values, **changes})


def terms(**changes: Any) -> ExportContext:
    return ExportContext(**{**TERMS, **changes})


def write(
    one: Export, chunk: SequenceBatch, folder: Path, *, name: str | None = None, **changes: Any
) -> tuple[Path, list[WrittenFile]]:
    """Write one chunk as one job; return the data folder and what was written."""
    (folder / "data").mkdir(parents=True)
    name = name or {"astrai_bin": "__default__", "astrai_h5": "__default__/data_0000.h5", "hf": "train-in-1"}.get(
        one.kind_name, "part-00000"
    )
    job = ExportJob(name, np.arange(len(chunk.offsets) - 1), chunk.sequence_offsets, len(chunk.ids))
    written = one.write(job, iter([chunk]), folder, terms(**changes))
    return folder / "data", [*written, *one.finish(folder, written, terms(**changes))]
