"""Views of a rank's sequences: a slice, another order, or mapped; for inspection and evaluation.

Shuffling here is for inspection. The training order was shuffled when it was built, with balanced steps.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from rowmill.core import permutation
from rowmill.core.arrays import Ints, find_distinct
from rowmill.core.errors import ConfigError
from rowmill.reader.layouts import BatchLayout
from rowmill.reader.schedule import WHOLE_SHARE, find_current_worker
from rowmill.reader.sequences import PackedSequence

SequenceFunction: TypeAlias = Callable[[PackedSequence], PackedSequence]
BatchFunction: TypeAlias = Callable[[Any], Any]


class AsyncDataset:
    """Sequences of which `len` and access by number are known, with the methods of Levanter's `AsyncDataset`."""

    __slots__ = ()

    view: "View"
    """The view of all of them; that of a view is itself."""

    def __len__(self) -> int:
        return self.view.length

    def __getitem__(self, i: int) -> PackedSequence:
        """Return sequence i; negative numbers count from the end."""
        length = len(self)
        if not -length <= i < length:
            raise IndexError(f"sequence {i} of {length}")
        return self.view.fetch(np.array([i % length], np.int64))[0].copy()

    async def async_len(self) -> int:
        """Return the number of sequences."""
        return len(self)

    async def current_len(self) -> int:
        """Return the number of sequences: an opened build is complete, so it does not grow."""
        return len(self)

    async def wait_until_len_at_least(self, length: int) -> int:
        """Return the number of sequences immediately; a build does not grow."""
        del length
        return len(self)

    async def final_length_is_known(self) -> bool:
        """Return true: `async_len` is final."""
        return True

    def is_finite(self) -> bool:
        """Return true: the order of a build ends, however many passes it holds."""
        return True

    def has_len(self) -> bool:
        """Return true: the length is known without waiting."""
        return True

    async def getitem_async(self, i: int) -> PackedSequence:
        """Return sequence i, read in a thread so that the event loop is not blocked."""
        return await asyncio.to_thread(self.__getitem__, i)

    def get_batch(self, indices: Sequence[int] | Ints) -> Any:
        """Return sequences of these numbers as one batch, in the order given; a reader does not count them as read."""
        view, numbers = self.view, np.asarray(indices, np.int64)
        if not len(numbers):
            raise ConfigError("get_batch: no index; a batch has at least one sequence; give one")
        if numbers.min() < -view.length or numbers.max() >= view.length:
            raise IndexError(f"sequences {numbers.min()} to {numbers.max()} of {view.length}")
        batch = view.layout.make_batch(view.fetch(numbers % view.length))
        return batch if view.on_batch is None else view.on_batch(batch)

    def slice_dataset(self, start: int, stop: int) -> "View":
        """View sequences `start` up to `stop`, as Python slices a list."""
        begin, end, _ = slice(start, stop).indices(len(self))
        fetch = self.view.fetch
        return replace(self.view, length=max(0, end - begin), fetch=lambda numbers: fetch(numbers + begin))

    def take(self, count: int) -> "View":
        """View the first `count` sequences, or all if there are fewer."""
        return self.slice_dataset(0, max(0, count))

    def map(self, function: SequenceFunction) -> "View":
        """View all with a function applied to each before it is laid out; it returns a new sequence."""
        fetch = self.view.fetch
        return replace(self.view, fetch=lambda numbers: [function(row) for row in fetch(numbers)])

    def map_batches(self, function: BatchFunction) -> "View":
        """View all with a function applied to each batch; it may return anything."""
        before = self.view.on_batch
        return replace(self.view, on_batch=function if before is None else lambda batch: function(before(batch)))

    def shuffle(self, seed: int) -> "View":
        """View all in another order; the same seed gives the same order."""
        if not len(self):
            return self.view
        return self._reorder(permutation.make_feistel(len(self), permutation.hash_labels(seed, "view")))

    def era_shuffle(self, seed: int, *, era_length: int) -> "View":
        """View all, shuffled inside runs of `era_length` (the last may be shorter); the runs keep their order."""
        if era_length < 1:
            raise ConfigError(f"era_length: {era_length}; at least 1 is needed; raise it")
        length = len(self)

        def shuffle_eras(numbers: Ints) -> Ints:
            eras = numbers // era_length
            out = np.empty_like(numbers)
            for era in find_distinct(eras).tolist():
                begin = era * era_length
                key = permutation.hash_labels(seed, "view", "era", era)
                inside = permutation.make_feistel(min(era_length, length - begin), key)
                out[eras == era] = begin + inside(numbers[eras == era] - begin)
            return out

        return self._reorder(shuffle_eras)

    def _reorder(self, order: Callable[[Ints], Ints]) -> "View":
        fetch = self.view.fetch
        return replace(self.view, fetch=lambda numbers: fetch(order(numbers)))


@dataclass(frozen=True, slots=True, eq=False)
class View(AsyncDataset):
    """Some of a rank's sequences, by number. Every method returns another view or reads; none changes this one."""

    length: int
    fetch: Callable[[Ints], list[PackedSequence]]
    layout: BatchLayout
    batch_size: int
    on_batch: BatchFunction | None = None

    @property
    def view(self) -> "View":  # pyrefly: ignore[bad-override]
        return self

    def __iter__(self) -> Iterator[Any]:
        """Yield batches of `batch_size` sequences from the first on; the last may be smaller.

        In a `DataLoader` worker: this worker's share of them.
        """
        share = find_current_worker() or WHOLE_SHARE
        for begin in range(0, self.length, self.batch_size)[share.worker :: share.workers]:
            yield self.get_batch(range(begin, min(begin + self.batch_size, self.length)))
