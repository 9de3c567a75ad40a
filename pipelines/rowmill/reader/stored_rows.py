"""Rows of shards by shard and row: opening files, decoding row groups, keeping some of them.

    shards  7 7 3        one task per shard: footer ─► row groups ─► rows
    rows    5 900 12     on remote storage several at once, since each waits for its requests

A shard is checked when it is first opened, and by `require` before that. Decoded row groups stay in memory up to
`KEPT_BYTES`, so that data of a million tokens is decoded once, and ranks that are read in turn are decoded once
whatever their size.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from rowmill.core.arrays import Ints
from rowmill.core.storage import Store
from rowmill.reader.sequences import DecodedRowGroup, PackedSequence, list_columns
from rowmill.reader.shard_checks import ExpectedShard, ShardFooter, check_shard, read_row_group

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

CHECKED_AT_ONCE = 16
"""Shards that are checked at the same time: a remote footer costs round trips."""

READ_AT_ONCE = 8
"""Shards of remote storage that are read at the same time: at 20 ms a request some 300 row groups a second."""

KEPT_BYTES = 16 << 20
"""Memory for decoded row groups, unless the row groups that are read in turn need more."""

KEPT_FOOTER_BYTES = 16 << 20
"""Memory for footers, unless the shards that are read in turn need more: a build may have tens of thousands."""


_SPARSE_SHARE = 4
"""A sequence is copied out of its row group if it is not one of at least every fourth of it."""


class StoredRows:
    """Rows of some shards. `in_turn` is the number of shards that are read in turn, such as one per stored rank.

    Safe to share among threads. A copy in another process, forked or pickled, opens its own files.
    """

    def __init__(self, store: Store, shards: Sequence[ExpectedShard], *, in_turn: int = 1) -> None:
        self._store, self._shards, self._in_turn = store, shards, in_turn
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._footers: OrderedDict[int, ShardFooter] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], DecodedRowGroup] = OrderedDict()
        self._kept_bytes = self._kept_footer_bytes = 0
        self._threads: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments alone, so that another process opens its own files."""
        return _restore_rows, (self._store, self._shards, self._in_turn)

    def require(self, numbers: Iterable[int], *, verify: bool) -> None:
        """Check some shards concurrently.

        Raises
        ------
        IntegrityError
            For the first one that is not the published file.

        """
        with ThreadPoolExecutor(CHECKED_AT_ONCE) as threads:
            for number, footer in threads.map(lambda n: (n, self._check(n, verify=verify)), numbers):
                self._keep_footer(number, footer)

    def at(self, shards: Ints, rows: Ints) -> list[PackedSequence]:
        """Return the sequences at these rows of these shards, which need not be sorted.

        The sequences may be views of decoded row groups: copy those that are kept.
        """
        return self._gather(shards, rows, self._take_sequences)

    def list_example_ids(self, shards: Ints, rows: Ints) -> list[list[str]]:
        """Return the examples that the sequences at these rows are made of; a filler has none."""
        return self._gather(shards, rows, self._take_example_ids)

    def _gather(self, shards: Ints, rows: Ints, take: Callable[[tuple[int, Ints]], list[ResultT]]) -> list[ResultT]:
        if self._process != os.getpid():
            # Forked: an inherited lock may stay locked, and threads are not inherited.
            self._begin()
        order = np.lexsort((rows, shards))
        used, begins = np.unique(shards[order], return_index=True)
        places = np.split(order, begins[1:])
        tasks = [(shard, rows[some]) for shard, some in zip(used.tolist(), places, strict=True)]
        found: list[Any] = [None] * len(rows)
        for some, taken in zip(places, self._map(take, tasks), strict=True):
            for place, value in zip(some.tolist(), taken, strict=True):
                found[place] = value
        return found

    def _map(self, function: Callable[[TaskT], ResultT], tasks: Sequence[TaskT]) -> Iterable[ResultT]:
        if self._store.is_local or len(tasks) < 2:
            return map(function, tasks)
        with self._lock:
            self._threads = self._threads or ThreadPoolExecutor(READ_AT_ONCE, thread_name_prefix="rowmill-rows")
        return self._threads.map(function, tasks)

    # ── One shard ──────────────────────────────────────────────────────────────────────────────────

    def _take_sequences(self, task: tuple[int, Ints]) -> list[PackedSequence]:
        shard, rows = task
        offsets = self._load_footer(shard).offsets
        groups = np.searchsorted(offsets, rows, "right") - 1
        taken: list[PackedSequence] = []
        for group, first, count in zip(*(each.tolist() for each in _count_runs(groups)), strict=True):
            decoded, begin = self._load_group(shard, group), int(offsets[group])
            some = [decoded.row(row - begin) for row in rows[first : first + count].tolist()]
            # A few sequences must not keep the memory of a whole row group while they wait.
            is_sparse = _SPARSE_SHARE * count < offsets[group + 1] - begin
            taken += [one.copy() for one in some] if is_sparse else some
        return taken

    def _take_example_ids(self, task: tuple[int, Ints]) -> list[list[str]]:
        shard, rows = task
        offsets = self._load_footer(shard).offsets
        groups = (np.searchsorted(offsets, rows, "right") - 1).tolist()
        read = {group: self._read_columns(shard, group, ["example_ids"]) for group in set(groups)}
        pairs = zip(rows.tolist(), groups, strict=True)
        # The only segment of a filler has an empty id.
        return [
            [name for name in read[group]["example_ids"][row - int(offsets[group])].as_py() if name]
            for row, group in pairs
        ]

    def _load_footer(self, shard: int) -> ShardFooter:
        with self._lock:
            footer = self._footers.get(shard)
            if footer is not None:
                self._footers.move_to_end(shard)
                return footer
        footer = self._check(shard, verify=False)
        self._keep_footer(shard, footer)
        return footer

    def _check(self, shard: int, *, verify: bool) -> ShardFooter:
        return check_shard(self._store, self._shards[shard], verify=verify)

    def _keep_footer(self, shard: int, footer: ShardFooter) -> None:
        with self._lock:
            before = self._footers.get(shard)
            self._kept_footer_bytes += footer.memory_bytes - (before.memory_bytes if before else 0)
            self._footers[shard] = footer
            while self._kept_footer_bytes > KEPT_FOOTER_BYTES and len(self._footers) > self._in_turn:
                self._kept_footer_bytes -= self._footers.popitem(last=False)[1].memory_bytes

    def _load_group(self, shard: int, number: int) -> DecodedRowGroup:
        key = (shard, number)
        with self._lock:
            group = self._groups.get(key)
            if group is not None:
                self._groups.move_to_end(key)
                return group
        group = DecodedRowGroup.of(self._read_columns(shard, number, list_columns(self._load_footer(shard).columns)))
        with self._lock:
            self._kept_bytes += group.size_bytes - (self._groups[key].size_bytes if key in self._groups else 0)
            self._groups[key] = group
            while self._kept_bytes > KEPT_BYTES and len(self._groups) > self._in_turn:
                self._kept_bytes -= self._groups.popitem(last=False)[1].size_bytes
        return group

    def _read_columns(self, shard: int, group: int, names: Sequence[str]) -> dict[str, Any]:
        path, footer = self._shards[shard].shard.path, self._load_footer(shard)
        table = read_row_group(self._store, path, footer, group, names)
        return {name: table.column(name).chunk(0) for name in names}


def _count_runs(groups: Ints) -> tuple[Ints, Ints, Ints]:
    """Return each row group of some sorted rows, the first of its rows, and how many there are."""
    return np.unique(groups, return_index=True, return_counts=True)


def _restore_rows(store: Store, shards: Sequence[ExpectedShard], in_turn: int) -> StoredRows:
    return StoredRows(store, shards, in_turn=in_turn)
