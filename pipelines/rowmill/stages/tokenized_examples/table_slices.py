"""Slices of a partition's plan: each a run of examples of one split with their records, which one task writes."""

from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.storage import File, Store
from rowmill.stages.part_files import write_table


@dataclass(frozen=True, slots=True, eq=False)
class ExampleSlice:
    """A run of examples of one split.

    `parts` are the numbers of the parts of rows that it has records of, `rows[r]` is the row of record r, counted over
    all rows of these parts. Unit u has records `[units[u], units[u + 1])`, example e units
    `[examples[e], examples[e + 1])`; `numbers[e]` numbers the examples that begin with the same row.
    """

    fingerprint: str
    split: str
    tokens: int
    parts: Ints
    rows: Ints
    units: Ints
    examples: Ints
    numbers: Ints
    starts: Ints
    passes: Ints
    budgets: Ints
    flushes: NDArray[np.int8]

    @property
    def records(self) -> int:
        """How many records its examples show."""
        return len(self.rows)


_SCALARS = ("fingerprint", "split", "tokens")
_ARRAYS = tuple(field.name for field in fields(ExampleSlice) if field.name not in _SCALARS)


def save_slice(store: Store, path: str, piece: ExampleSlice) -> File:
    """Write a slice as a table of one line."""
    columns = {name: pa.array([getattr(piece, name)]) for name in (*_SCALARS, *_ARRAYS)}
    return write_table(store, path, pa.table(columns))


def load_slice(store: Store, file: File) -> ExampleSlice:
    """Read what `save_slice` wrote."""
    table = store.table(file)
    scalars = {name: table.column(name)[0].as_py() for name in _SCALARS}
    arrays = {name: table.column(name).combine_chunks().flatten().to_numpy() for name in _ARRAYS}
    return ExampleSlice(**scalars, **arrays)
