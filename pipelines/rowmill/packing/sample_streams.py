"""The endless stream of one dataset's sequences, any stretch of which is computed alone.

    pass    0                 1                 2
            3 0 4 1 2         1 4 2 0 3         2 …            take(3, 7) ─► 1 2 1 4

Each pass is shuffled with a separate key, place by place, so that no place needs those before it.
"""

from dataclasses import dataclass

import numpy as np

from rowmill.core.arrays import Ints
from rowmill.core.permutation import hash_labels, make_permutation, permute_rows
from rowmill.packing.mixture_options import BlockShuffle, Mixture


@dataclass(frozen=True, slots=True, eq=False)
class SampleStream:
    """The endless stream of one dataset: pass after pass over the `kept` of its `size` sequences."""

    mixture: Mixture
    name: str
    size: int
    kept: int
    seed: int
    chosen: Ints | None = None
    """The kept sequences in plan order; None if all are kept, or if all passes are alike."""

    @classmethod
    def of(cls, mixture: Mixture, name: str, size: int, kept: int, seed: int) -> "SampleStream":
        """Return a dataset's stream; the sequences that a budget keeps are the first of its first pass."""
        stream = cls(mixture, name, size, kept, seed)
        if kept == size or not mixture.reshuffle_each_epoch:
            return stream
        return cls(mixture, name, size, kept, seed, np.sort(stream._order_pass(0, size, 0, kept)))

    def take(self, begin: int, end: int) -> Ints:
        """Return the sequence numbers at the places `[begin, end)` of the stream."""
        if begin == end:
            return np.empty(0, np.int64)
        first, last = -(-begin // self.kept), end // self.kept
        if not self.mixture.reshuffle_each_epoch and first < last:
            return self._take_pass(0, 0, self.kept)[np.arange(begin, end) % self.kept]
        if first > last:
            return self._take_pass(last, begin - last * self.kept, end - last * self.kept)
        pieces: list[Ints] = []
        if begin < first * self.kept:
            pieces.append(self._take_pass(first - 1, begin - (first - 1) * self.kept, self.kept))
        pieces.append(self._take_passes(range(first, last)))
        if last * self.kept < end:
            pieces.append(self._take_pass(last, 0, end - last * self.kept))
        return np.concatenate(pieces)

    def _take_passes(self, numbers: range) -> Ints:
        """Return whole passes; many short ones are shuffled together."""
        if self.mixture.shuffle is not True or (self.chosen is not None and 0 in numbers):
            passes = [self._take_pass(number, 0, self.kept) for number in numbers]
            return np.concatenate([np.empty(0, np.int64), *passes])
        keys = [self._derive_key("shuffle", number) for number in numbers]
        places = permute_rows(self.mixture.permutation_type, self.kept, keys).ravel()
        return places if self.chosen is None else self.chosen[places]

    def _take_pass(self, number: int, begin: int, end: int) -> Ints:
        """Return some items of one pass; later passes shuffle the kept sequences as if there were no others."""
        if not self.mixture.reshuffle_each_epoch:
            number = 0
        if number == 0 or self.chosen is None:
            return self._order_pass(number, self.size if number == 0 else self.kept, begin, end)
        return self.chosen[self._order_pass(number, self.kept, begin, end)]

    def _order_pass(self, number: int, size: int, begin: int, end: int) -> Ints:
        """Return the items at `[begin, end)` of one pass over `size` sequences."""
        match self.mixture.shuffle:
            case False:
                return np.arange(begin, end, dtype=np.int64)
            case True:
                return self._shuffle_places(size, self._derive_key("shuffle", number), begin, end)
            case int() as era:
                return self._shuffle_eras(number, size, era, begin, end)
            case BlockShuffle() as by_blocks:
                return self._shuffle_blocks(number, size, by_blocks, begin, end)

    def _shuffle_eras(self, number: int, size: int, era: int, begin: int, end: int) -> Ints:
        whole = size // era
        first, last = min(begin // era, whole), min(-(-end // era), whole)
        keys = [self._derive_key("era", number, e) for e in range(first, last)]
        rows = permute_rows(self.mixture.permutation_type, era, keys)
        order = (rows + np.arange(first, last)[:, None] * era).ravel()
        if end > whole * era:
            rest = size - whole * era
            order = np.append(order, whole * era + self._shuffle_all(rest, self._derive_key("era", number, whole)))
        return order[begin - first * era : end - first * era]

    def _shuffle_blocks(self, number: int, size: int, by_blocks: BlockShuffle, begin: int, end: int) -> Ints:
        length, window = by_blocks.io_block_size, by_blocks.window_blocks
        full = size // length
        blocks = self._shuffle_all(full, self._derive_key("blocks", number))
        first = min(begin // length, full) // window * window
        parts = [np.empty(0, dtype=np.int64)]
        for start in range(first, min(-(-end // length), full), window):
            places = (blocks[start : start + window, None] * length + np.arange(length)).ravel()
            parts.append(places[self._shuffle_all(len(places), self._derive_key("window", number, start // window))])
        if end > full * length:
            parts.append(full * length + self._shuffle_all(size - full * length, self._derive_key("tail", number)))
        return np.concatenate(parts)[begin - first * length : end - first * length]

    def _shuffle_all(self, size: int, k: int) -> Ints:
        return self._shuffle_places(size, k, 0, size)

    def _shuffle_places(self, size: int, k: int, begin: int, end: int) -> Ints:
        places = np.arange(begin, end, dtype=np.int64)
        return make_permutation(self.mixture.permutation_type, size, k)(places) if size else places

    def _derive_key(self, purpose: str, number: int, *part: int) -> int:
        return hash_labels(self.seed, purpose, self.name, number, *part)
