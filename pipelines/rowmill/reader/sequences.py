"""Read sequences by their place in the order, from shards that were written for any number of ranks.

What belongs here: finding the row of a place, decoding one row group per stored rank and caching it. What does
not: the shape of a batch (`layouts.py`).

    place    0 1 2 3 4 5 6 7 …      stored for 4 ranks: place p is row p // 4 of stored rank p mod 4
    2 ranks  0 1 0 1 0 1 0 1        rank 1 reads places 1, 3, 5, 7: stored ranks 1 and 3, each in its own order

A rank of any world size meets each stored rank's rows in ascending order, so one decoded row group per
stored rank is enough: memory does not grow with the data. Position ids are computed from span lengths, which
is faster than decoding the column that holds the same numbers.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, Tokens, Weights
from rowmill.core.storage import Store
from rowmill.reader.published import Shard, open_parquet
from rowmill.schema.examples import WEIGHT_COLUMN

_COLUMNS = ("input_ids", "labels", "seq_lengths")
_OPTIONAL_COLUMNS = (WEIGHT_COLUMN, "sides", "prompt_lengths", "margins")
"""Read only where the shards have them."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequence:
    """One sequence, without padding: `input_ids` and `labels` int32[T], `seq_lengths` int32[K] with sum T.

    Labels are unshifted: position i is itself the target, or -100. The first token of each of the K attention
    spans is not a target. `loss_weights` float32[T] are 0 where there is no target; None if the recipe has no weights.

    Preferences have values per span, which is a side: `sides` int8[K] are 1 for the chosen or good answer and 0 for the
    rejected or bad one; each begins with `prompt_lengths` int32[K] tokens of prompt; `margins` float32[K] are NaN where
    none is set. In a filler, sides and prompt lengths are -1. All three are None for other recipes.
    """

    input_ids: Tokens
    labels: Tokens
    seq_lengths: Tokens
    loss_weights: Weights | None = None
    sides: NDArray[np.int8] | None = None
    prompt_lengths: Tokens | None = None
    margins: Weights | None = None

    @property
    def position_ids(self) -> Ints:
        """The position ids, int64[T], from 0 in each attention span."""
        return make_position_ids(self.seq_lengths)

    def copy(self) -> "PackedSequence":
        """Return a copy that does not keep a whole decoded row group in memory."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value.copy() for name, value in own.items() if value is not None})


def make_position_ids(lengths: Tokens) -> Ints:
    """Return 0, 1, … in each span, end to end: lengths 3, 2 give 0 1 2 0 1."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) - np.repeat(ends - lengths, lengths)


class RowGroupCache:
    """Reads the stored ranks that one reader needs, each with one decoded row group in memory.

    Safe to share among threads. A copy in another process, forked or pickled, opens its own files.
    """

    def __init__(
        self, store: Store, world_size: int, ranks: Mapping[int, tuple[Sequence[Shard], Sequence[Ints]]]
    ) -> None:
        self._store, self._world_size, self._stored = store, world_size, ranks
        self._open_ranks()

    def _open_ranks(self) -> None:
        self._process = os.getpid()
        self._ranks = {rank: _StoredRank(self._store, *stored) for rank, stored in self._stored.items()}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments alone, so that another process opens its own files."""
        return RowGroupCache, (self._store, self._world_size, self._stored)

    def at(self, places: Ints) -> list[PackedSequence]:
        """Return the sequences at these places; the places need not be sorted.

        The sequences are views of decoded row groups: copy those that are kept.
        """
        if self._process != os.getpid():
            # Forked: an inherited file shares its position with the parent, and an inherited lock may stay locked.
            self._open_ranks()
        ranks, rows = places % self._world_size, places // self._world_size
        found: dict[int, PackedSequence] = {}
        with self._lock:
            # Sorted by stored rank and row, so that each row group is decoded once.
            for i in np.lexsort((rows, ranks)).tolist():
                found[i] = self._ranks[int(ranks[i])].row(int(rows[i]))
        return [found[i] for i in range(len(places))]


class _StoredRank:
    def __init__(self, store: Store, shards: Sequence[Shard], groups: Sequence[Ints]) -> None:
        self._store, self._shards = store, shards
        counts = [np.diff(offsets) for offsets in groups]
        self._shard_of_group = np.repeat(np.arange(len(counts)), [len(one) for one in counts])
        self._group_in_shard = np.concatenate([np.arange(len(one)) for one in counts] or [np.empty(0, np.int64)])
        self._ends = np.cumsum(np.concatenate(counts or [np.empty(0, np.int64)]))
        self._file: tuple[int, pq.ParquetFile] | None = None
        self._group = (-1, _DecodedRowGroup.empty())

    def row(self, row: int) -> PackedSequence:
        number = int(np.searchsorted(self._ends, row, "right"))
        if number != self._group[0]:
            self._group = (number, self._read_group(number))
        first = int(self._ends[number - 1]) if number else 0
        return self._group[1].row(row - first)

    def _read_group(self, number: int) -> "_DecodedRowGroup":
        shard = int(self._shard_of_group[number])
        if self._file is None or self._file[0] != shard:
            if self._file is not None:
                self._file[1].close(force=True)
            self._file = (shard, open_parquet(self._store, self._shards[shard].path))
        file, group = self._file[1], int(self._group_in_shard[number])
        stored = file.schema_arrow.names
        names = [*_COLUMNS, *(name for name in _OPTIONAL_COLUMNS if name in stored)]
        table = file.read_row_group(group, columns=names, use_threads=self._store.is_local).combine_chunks()
        return _DecodedRowGroup.of({name: table.column(name).chunk(0) for name in names})


@dataclass(frozen=True, slots=True, eq=False)
class _DecodedRowGroup:
    """A decoded row group, flat; the bounds are plain lists because they are read one by one."""

    ids: Tokens
    labels: Tokens
    bounds: list[int]
    lengths: Tokens
    span_bounds: list[int]
    weights: Weights | None = None
    sides: NDArray[np.int8] | None = None
    prompt_lengths: Tokens | None = None
    margins: Weights | None = None

    @classmethod
    def empty(cls) -> "_DecodedRowGroup":
        nothing = np.empty(0, np.int32)
        return cls(nothing, nothing, [0], nothing, [0])

    @classmethod
    def of(cls, columns: Mapping[str, pa.ListArray]) -> "_DecodedRowGroup":
        ids, lengths = columns["input_ids"], columns["seq_lengths"]
        return cls(
            ids=ids.values.to_numpy(),
            labels=columns["labels"].values.to_numpy(),
            bounds=ids.offsets.to_pylist(),
            lengths=lengths.values.to_numpy(),
            span_bounds=lengths.offsets.to_pylist(),
            weights=columns[WEIGHT_COLUMN].values.to_numpy() if WEIGHT_COLUMN in columns else None,
            sides=_fill_nulls(columns.get("sides"), -1),
            prompt_lengths=_fill_nulls(columns.get("prompt_lengths"), -1),
            margins=_fill_nulls(columns.get("margins"), float("nan")),
        )

    def row(self, i: int) -> PackedSequence:
        here, spans = slice(self.bounds[i], self.bounds[i + 1]), slice(self.span_bounds[i], self.span_bounds[i + 1])
        weights = None if self.weights is None else self.weights[here]
        if self.sides is None:
            return PackedSequence(self.ids[here], self.labels[here], self.lengths[spans], weights)
        return PackedSequence(
            self.ids[here],
            self.labels[here],
            self.lengths[spans],
            weights,
            sides=self.sides[spans],
            prompt_lengths=None if self.prompt_lengths is None else self.prompt_lengths[spans],
            margins=None if self.margins is None else self.margins[spans],
        )


def _fill_nulls(column: pa.ListArray | None, null: float) -> Any:
    """Return the values of a column that the shards may have, with a number for those of fillers and missing ones."""
    if column is None:
        return None
    return column.values.fill_null(pa.scalar(null, column.values.type)).to_numpy(zero_copy_only=False)
