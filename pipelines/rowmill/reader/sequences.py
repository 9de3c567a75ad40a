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
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowmill.core.arrays import Ints, Tokens, Weights
from rowmill.core.storage import Store
from rowmill.reader.published import Shard, open_parquet
from rowmill.schema.examples import WEIGHT_COLUMN

_COLUMNS = ("input_ids", "labels", "seq_lengths")
_WEIGHTED_COLUMNS = (*_COLUMNS, WEIGHT_COLUMN)


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequence:
    """One sequence, without padding: `input_ids` and `labels` int32[T], `seq_lengths` int32[K] with sum T.

    Labels are unshifted: position i is itself the target, or -100. The first token of each of the K attention
    spans is not a target. `loss_weights` float32[T] are 0 where there is no target; None if the recipe has no weights.
    """

    input_ids: Tokens
    labels: Tokens
    seq_lengths: Tokens
    loss_weights: Weights | None = None

    @property
    def position_ids(self) -> Ints:
        """The position ids, int64[T], from 0 in each attention span."""
        return make_position_ids(self.seq_lengths)

    def copy(self) -> "PackedSequence":
        """Return a copy that does not keep a whole decoded row group in memory."""
        weights = None if self.loss_weights is None else self.loss_weights.copy()
        return PackedSequence(self.input_ids.copy(), self.labels.copy(), self.seq_lengths.copy(), weights)


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
        names = _WEIGHTED_COLUMNS if WEIGHT_COLUMN in file.schema_arrow.names else _COLUMNS
        table = file.read_row_group(group, columns=list(names), use_threads=self._store.is_local).combine_chunks()
        return _DecodedRowGroup.of(*(table.column(name).chunk(0) for name in names))


@dataclass(frozen=True, slots=True, eq=False)
class _DecodedRowGroup:
    """A decoded row group, flat; the bounds are plain lists because they are read one by one."""

    ids: Tokens
    labels: Tokens
    bounds: list[int]
    lengths: Tokens
    span_bounds: list[int]
    weights: Weights | None = None

    @classmethod
    def empty(cls) -> "_DecodedRowGroup":
        nothing = np.empty(0, np.int32)
        return cls(nothing, nothing, [0], nothing, [0])

    @classmethod
    def of(
        cls, ids: pa.ListArray, labels: pa.ListArray, lengths: pa.ListArray, weights: pa.ListArray | None = None
    ) -> "_DecodedRowGroup":
        return cls(
            ids=ids.values.to_numpy(),
            labels=labels.values.to_numpy(),
            bounds=ids.offsets.to_pylist(),
            lengths=lengths.values.to_numpy(),
            span_bounds=lengths.offsets.to_pylist(),
            weights=None if weights is None else weights.values.to_numpy(),
        )

    def row(self, i: int) -> PackedSequence:
        here, spans = slice(self.bounds[i], self.bounds[i + 1]), slice(self.span_bounds[i], self.span_bounds[i + 1])
        weights = None if self.weights is None else self.weights[here]
        return PackedSequence(self.ids[here], self.labels[here], self.lengths[spans], weights)
