"""Loss by example: what a trainer's loss per token was on each example in each step, written beside the run.

    segments of a batch   a#0 a#0 a#0 │ b#0 b#0 │ padding      ids of the step's places, in the order of the rank
    losses of targets      .  2.0 1.0 │  .  4.0 │              example_id a#0, step 7, loss 1.5, tokens 2

Each rank writes one file; `rowmill view --losses FOLDER` and `rowmill sql --losses FOLDER` read all of a folder.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowmill.core.errors import ConfigError
from rowmill.reader.reader import Reader
from rowmill.schema.examples import IGNORED_LABEL
from rowmill.schema.rows import PARENTS_COLUMN

SCHEMA = pa.schema([("example_id", pa.string()), ("step", pa.int64()), ("loss", pa.float64()), ("tokens", pa.int64())])
"""A line for each example in each step: the mean loss of its targets there, and their number."""

LINES_AT_ONCE = 50_000
"""Lines that are held before they are written."""


class ExampleLosses:
    """Sums the losses of a reader's batches by example; a context manager, since its file is whole when it is closed.

    The file is `rank-<rank>-from-<first step>.parquet` in `folder`, so a run that goes on writes another one.

    Raises
    ------
    ConfigError
        If the reader is not opened with `segment_sources=True`, or its recipe has no `mixture.batch_size`.

    """

    def __init__(self, reader: Reader, folder: str | Path) -> None:
        self._reader, self._folder = reader, Path(folder)
        self._lines: list[tuple[str, int, float, int]] = []
        self._writer: pq.ParquetWriter | None = None
        self._path = ""
        self._step = -1
        self._waiting: list[list[str]] = []
        """The examples of this rank's places of the step that no batch has had yet."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write what is left; also after an error, so that the losses so far can be looked at."""
        self.close()

    def add(self, token_losses: Any, batch: Mapping[str, Any], *, shifted: bool = False) -> None:
        """Add the batch that the reader delivered last; call it once for each, in their order.

        `token_losses` and `shifted` are as `loss_by_source` takes them: not reduced, a loss for each label, or for
        each but the first of a row. Loss weights do not count.
        """
        step = self._reader.step
        if step is None or "segment_lengths" not in batch:
            raise ConfigError(
                "ExampleLosses: the batch does not say which step and segments it has; a recipe with "
                "mixture.batch_size and a Reader with segment_sources=True are needed; change these"
            )
        if PARENTS_COLUMN in batch:
            raise ConfigError(
                "ExampleLosses: sequences share prefixes, whose tokens are of several examples; sequences of whole "
                "examples are needed; build with packing.share_prefixes: false"
            )
        if step.number != self._step:
            self._step = step.number
            rank, world_size = self._reader.rank, self._reader.world_size
            self._waiting = self._reader.example_ids(step.number)[rank::world_size]
        labels, losses = _to_array(batch["labels"]), _to_array(token_losses).astype(np.float64)
        rows, width = labels.shape
        if losses.size not in (rows * width, rows * (width - 1)):
            raise ConfigError(
                f"ExampleLosses: {losses.size} losses for labels of {rows} × {width}; a loss is needed for each label, "
                "or for each but the first of a row; do not reduce the loss, and do not leave out ignored labels"
            )
        losses = losses.reshape(rows, losses.size // rows)
        is_next = shifted or losses.shape[1] < width
        targets = labels[:, 1:] if is_next else labels
        losses = losses[:, : targets.shape[1]]
        lengths = _to_array(batch["segment_lengths"]).reshape(rows, -1)
        sources = _to_array(batch["segment_dataset"]).reshape(rows, -1)
        for row in range(rows):
            ends = np.cumsum(lengths[row])
            for begin, end, source in zip(ends - lengths[row], ends, sources[row], strict=True):
                if begin == end or source < 0:
                    # Padding, or a filler.
                    continue
                while self._waiting and not self._waiting[0]:
                    self._waiting.pop(0)
                example_id = self._waiting[0].pop(0)
                # The loss of the label at place p stands at p, or at p - 1 if losses are those of the next label.
                own = slice(max(int(begin) - is_next, 0), int(end) - is_next)
                is_target = targets[row, own] != IGNORED_LABEL
                count = int(is_target.sum())
                if count:
                    mean = float(losses[row, own][is_target].mean())
                    self._lines.append((example_id, step.number, mean, count))
        if len(self._lines) >= LINES_AT_ONCE:
            self._write()

    def close(self) -> None:
        """Write what is left, and give the file its name."""
        self._write()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            os.replace(f"{self._path}.unfinished", self._path)

    def _write(self) -> None:
        if not self._lines:
            return
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"rank-{self._reader.rank:05d}-from-{self._lines[0][1]:08d}.parquet"
            self._path = str(self._folder / name)
            self._writer = pq.ParquetWriter(f"{self._path}.unfinished", SCHEMA)
        columns = zip(*self._lines, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA))
        self._lines.clear()


def _to_array(values: Any) -> Any:
    """Return a tensor as an array, without its gradient."""
    return values if isinstance(values, np.ndarray) else values.detach().cpu().numpy()
