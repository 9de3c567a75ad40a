"""Lengths of examples before and after truncation, and what each stage of it removed, over all parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.storage import File, Store, read_tables
from rowmill.executors import Executor
from rowmill.kinds.shared.splits import SPLITS

COLUMNS = ("split", "original_tokens", "tokens", "trained_tokens", "messages_removed", "exchanges_removed",
           "reasoning_removed", "tokens_cut", "trained_removed", "exchanges_trained", "reasoning_trained",
           "cut_trained", "domain")  # fmt: skip

STAGES = (
    ("exchanges", "exchanges_removed", "exchanges_trained"),
    ("reasoning", "reasoning_removed", "reasoning_trained"),
    ("tokens", "tokens_cut", "cut_trained"),
)
"""The stages of truncation, with the columns of the tokens and of the trained tokens that each removed."""

SHARE_BINS = 20


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredExamples:
    """The examples of a part, or of all parts.

    `original` int32[E] are tokens before truncation, `trained` int32[E] the trained ones among them, `splits` uint8[E]
    places in `SPLITS`. The rest are sums: of examples that lost tokens, and of what each stage of truncation removed
    (examples, messages, tokens, trained tokens); `trained_shares` counts examples by the share of trained tokens.
    """

    original: NDArray[np.int32]
    trained: NDArray[np.int32]
    splits: NDArray[np.uint8]
    shortened: int
    longest_shortened: int
    tokens_removed: int
    trained_removed: int
    stages: NDArray[np.int64]
    trained_shares: NDArray[np.int64]
    domains: pl.DataFrame

    def list_splits(self) -> list[str]:
        """Return the splits that have examples, by name."""
        return sorted(SPLITS[place] for place in np.flatnonzero(np.bincount(self.splits)).tolist())

    def select_split(self, name: str) -> NDArray[np.int32]:
        """Return the tokens of each example of a split before truncation."""
        return self.original[self.splits == [str(split) for split in SPLITS].index(name)]


RUNS_PER_WORKER = 4
"""Runs of files that a worker measures: a task for each file would cost more than reading it."""


def measure_examples(
    store: Store, files: Sequence[File], pool: Executor, *, runs_per_worker: int = RUNS_PER_WORKER
) -> MeasuredExamples:
    """Measure the examples of some files, in runs that the workers share."""
    each = -(-len(files) // (pool.workers * runs_per_worker)) or 1
    runs = [tuple(files[first : first + each]) for first in range(0, len(files), each)]
    return _join(list(pool.map(partial(measure_files, store), runs, size_bytes=sum(file.bytes for file in files))))


MEASURED_ROWS = 1 << 18
"""Examples that are measured at once: a part has a few hundred, and each step costs more than that takes."""


def measure_files(store: Store, files: Sequence[File], *, rows_at_once: int = MEASURED_ROWS) -> MeasuredExamples:
    """Measure the examples of some files, a few files at once."""
    runs = _cut_runs(files, rows_at_once)
    return _join([_measure(pa.concat_tables(read_tables(store, run, COLUMNS))) for run in runs])


def _cut_runs(files: Sequence[File], rows: int) -> list[list[File]]:
    """Cut files into runs of at most so many rows, or one file."""
    runs: list[list[File]] = []
    held = 0
    for file in files:
        if not runs or held + file.rows > rows:
            runs.append([])
            held = 0
        runs[-1].append(file)
        held += file.rows
    return runs


def _join(parts: Sequence[MeasuredExamples]) -> MeasuredExamples:
    nothing = np.empty(0, np.int32)
    return MeasuredExamples(
        np.concatenate([nothing, *(part.original for part in parts)]),
        np.concatenate([nothing, *(part.trained for part in parts)]),
        np.concatenate([np.empty(0, np.uint8), *(part.splits for part in parts)]),
        sum(part.shortened for part in parts),
        max((part.longest_shortened for part in parts), default=0),
        sum(part.tokens_removed for part in parts),
        sum(part.trained_removed for part in parts),
        sum((part.stages for part in parts), np.zeros((len(STAGES), 4), np.int64)),
        sum((part.trained_shares for part in parts), np.zeros(SHARE_BINS, np.int64)),
        pl.concat([part.domains for part in parts]).group_by("domain").sum() if parts else pl.DataFrame(),
    )


def _measure(columns: pa.Table) -> MeasuredExamples:
    original, tokens, trained = (_read_ints(columns, name) for name in ("original_tokens", "tokens", "trained_tokens"))
    removed, trained_removed = original - tokens, _read_ints(columns, "trained_removed")
    shares = trained / np.maximum(tokens, 1)
    return MeasuredExamples(
        original.astype(np.int32),
        (trained + trained_removed).astype(np.int32),
        pc.index_in(columns.column("split"), pa.array(SPLITS)).to_numpy().astype(np.uint8),
        int((removed > 0).sum()),
        int(original[removed > 0].max(initial=0)),
        int(removed.sum()),
        int(trained_removed.sum()),
        np.array([_sum_stage(columns, *stage) for stage in STAGES], np.int64),
        np.histogram(shares, bins=SHARE_BINS, range=(0.0, 1.0))[0],
        _sum_domains(columns),
    )


def _sum_stage(columns: pa.Table, stage: str, removed: str, trained: str) -> tuple[int, int, int, int]:
    """Return the examples that a stage of truncation changed, and the messages and tokens that it removed."""
    taken = _read_ints(columns, removed)
    messages = _read_ints(columns, "messages_removed") if stage == "exchanges" else np.zeros_like(taken)
    touched = int(((taken > 0) | (messages > 0)).sum())
    return touched, int(messages.sum()), int(taken.sum()), int(_read_ints(columns, trained).sum())


def _sum_domains(columns: pa.Table) -> pl.DataFrame:
    """Sum what truncation removed by domain; rows without one are a group, too."""
    frame = cast(
        "pl.DataFrame", pl.from_arrow(columns.select(["domain", "original_tokens", "tokens", "trained_removed"]))
    )
    original = pl.col("original_tokens").cast(pl.Int64)
    lost = original - pl.col("tokens")
    return frame.group_by("domain").agg(
        pl.len().cast(pl.Int64).alias("examples"),
        (lost > 0).sum().cast(pl.Int64).alias("shortened"),
        lost.sum().alias("tokens_removed"),
        pl.col("trained_removed").cast(pl.Int64).sum(),
        original.sum(),
    )


def _read_ints(table: pa.Table, name: str) -> NDArray[np.int64]:
    return table.column(name).to_numpy(zero_copy_only=False).astype(np.int64)
