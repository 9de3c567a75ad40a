"""Finds the benchmark items that a row has, by the share of an item's words inside n-grams that both have.

    n 3, item  a b c d e f                        n-grams in the row    words covered   coverage
    row        x a b c d y                        abc bcd               a b c d         4/6
    row        a b c x d e f                      abc def               a b c d e f     6/6
    row        a b x c d                          none                                  0

Hashes find the candidates; then the words themselves are compared, so that no equal hash removes a row. Rejected: one
common n-gram as contamination. Of the questions of GSM8K's train file 97 share eight words with its test file, nearly
all of them phrases such as "how much money does he have left"; three cover half of a test question.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, are_among, expand_ranges, mark_changes
from rowmill.similarity.words import HashedTexts, Hashes, hash_ngrams, hash_whole_texts, join_texts, split_words

FREQUENT_ITEMS = 10
"""An n-gram in more items than this is a phrase of the benchmark, not part of a question, and is ignored."""

_MAX_FILTER_BITS = 26
_FILTER_SPARSENESS = 16


@dataclass(frozen=True, slots=True)
class ItemIndex:
    """What a row's n-grams are looked up in; items are numbered as in `words`, the number of words of each.

    The n-grams of all items, sorted by hash, each have their item and the word of it that they begin with in `items`
    and `starts`. The texts of items without any n-gram are beside them; a row has such an item if it has all its texts.
    """

    n: int
    hashes: Hashes
    items: Ints
    starts: Ints
    short_hashes: Hashes
    short_items: Ints
    words: Ints


class Candidate(NamedTuple):
    """An item that a row may have: its texts, and the coverage of its hashes."""

    item: int
    texts: Sequence[str]
    coverage: float


class Match(NamedTuple):
    """The item that a row has: the share of its words that the row covers, and the first n-gram that both have."""

    item: int
    coverage: float
    ngram: str


def number_distinct_items(texts: HashedTexts, owners: Ints, count: int) -> Ints:
    """Return for each item the first one with the same words; an item without words is its own.

    `owners` are the items of the texts, ascending.
    """
    hashes = hash_whole_texts(join_texts(texts, owners, count))
    _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
    return first[which].astype(np.int64)


def build_index(texts: HashedTexts, owners: Ints, count: int, n: int) -> tuple[ItemIndex, int]:
    """Index the n-grams of `count` distinct items; return the number of those that too many items have, too.

    `owners` are the items of the texts, ascending.
    """
    ngrams = hash_ngrams(texts, n)
    words = join_texts(texts, owners, count)
    items = owners[ngrams.texts]
    starts = ngrams.starts - words.offsets[items]
    order = np.lexsort((starts, items, ngrams.hashes))
    has_ngrams = np.zeros(count, np.bool_)
    has_ngrams[items] = True
    hashes, items, starts = ngrams.hashes[order], items[order], starts[order]
    # N-grams of too many items are ignored; an item that repeats one counts once.
    begins, is_new = mark_changes(hashes), mark_changes(hashes, items)
    which = np.cumsum(begins) - 1
    is_frequent = np.bincount(which[is_new])[which] > FREQUENT_ITEMS if len(which) else begins
    hashes, items, starts = hashes[~is_frequent], items[~is_frequent], starts[~is_frequent]
    short = np.flatnonzero(~has_ngrams[owners] & (texts.lengths > 0))
    short_hashes, short_items = _sort_distinct(hash_whole_texts(texts)[short], owners[short])
    return ItemIndex(n, hashes, items, starts, short_hashes, short_items, words.lengths), int(is_frequent.sum())


class CoveredItems(NamedTuple):
    """Pairs of a row and an item that share hashes, with the share of the item's words that these cover."""

    rows: Ints
    items: Ints
    coverage: NDArray[np.float64]


class ItemSearch:
    """Looks up rows in an index; opened once for many parts."""

    def __init__(self, index: ItemIndex) -> None:
        """Prepare the lookup of an index."""
        self.index = index
        self._borders = np.append(np.flatnonzero(mark_changes(index.hashes)), len(index.hashes))
        self._distinct = index.hashes[self._borders[:-1]]
        # Most of a row's n-grams are in no item: one look into a small table leaves them out.
        bits = min(max(10, (_FILTER_SPARSENESS * len(self._distinct)).bit_length()), _MAX_FILTER_BITS)
        self._mask = np.uint64((1 << bits) - 1)
        self._is_known = np.zeros(1 << bits, np.bool_)
        self._is_known[self._distinct & self._mask] = True

    def find_covered(self, texts: HashedTexts, rows: Ints, coverage: float) -> CoveredItems:
        """Return the items that rows cover by hashes: by row, the best first, ties by item; `rows` own the texts."""
        columns: Any = zip(self._cover_items(texts, rows), self._match_short(texts, rows), strict=True)
        of_rows, items, coverages = map(np.concatenate, columns)
        order = np.lexsort((items, -coverages, of_rows))
        order = order[coverages[order] >= coverage]
        return CoveredItems(of_rows[order], items[order], coverages[order])

    def _cover_items(self, texts: HashedTexts, rows: Ints) -> CoveredItems:
        ngrams = hash_ngrams(texts, self.index.n)
        likely = np.flatnonzero(self._is_known[ngrams.hashes & self._mask])
        found = likely[are_among(ngrams.hashes[likely], self._distinct)]
        at, owners = np.searchsorted(self._distinct, ngrams.hashes[found]), rows[ngrams.texts[found]]
        counts = np.diff(self._borders)[at]
        places = expand_ranges(self._borders[at], counts)
        owners, items, starts = _sort_distinct(
            np.repeat(owners, counts), self.index.items[places], self.index.starts[places]
        )
        begins = mark_changes(owners, items)
        # An n-gram adds the words that the one before it has not.
        added = np.full(len(owners), self.index.n)
        added[1:] = np.where(begins[1:], self.index.n, np.minimum(self.index.n, starts[1:] - starts[:-1]))
        pairs = np.flatnonzero(begins)
        covered = np.add.reduceat(added, pairs) if len(pairs) else np.empty(0, np.int64)
        return CoveredItems(owners[pairs], items[pairs], covered / self.index.words[items[pairs]])

    def _match_short(self, texts: HashedTexts, rows: Ints) -> CoveredItems:
        """Return the short items of which a row has every text."""
        index = self.index
        short_texts = np.flatnonzero((texts.lengths > 0) & (texts.lengths < index.n))
        hashes = hash_whole_texts(texts)[short_texts]
        first, last = (np.searchsorted(index.short_hashes, hashes, side) for side in ("left", "right"))
        owners, places = _sort_distinct(np.repeat(rows[short_texts], last - first), expand_ranges(first, last - first))
        items = index.short_items[places]
        order = np.lexsort((items, owners))
        owners, items = owners[order], items[order]
        pairs = np.flatnonzero(mark_changes(owners, items))
        counts = np.diff(np.append(pairs, len(owners)))
        owners, items = owners[pairs], items[pairs]
        needed = np.bincount(index.short_items, minlength=len(index.words))
        is_whole = counts == needed[items]
        return CoveredItems(owners[is_whole], items[is_whole], np.ones(int(is_whole.sum())))

    def find_best_match(self, texts: Sequence[str], candidates: Iterable[Candidate], coverage: float) -> Match | None:
        """Return the item that a row's words cover most, ties to the lower; None if no coverage is reached.

        `candidates` are sorted by the coverage of their hashes, which that of the words never exceeds: usually the
        first is the best.
        """
        of_row = [split_words(text) for text in texts]
        best: Match | None = None
        for candidate in candidates:
            if best is not None and best.coverage >= candidate.coverage:
                break
            match = self._compare_words(of_row, candidate)
            if match is not None and match.coverage >= max(coverage, 0 if best is None else best.coverage):
                best = match
        return best

    def _compare_words(self, of_row: Sequence[list[str]], candidate: Candidate) -> Match | None:
        n, item = self.index.n, candidate.item
        of_item = [words for text in candidate.texts if (words := split_words(text))]
        if all(len(words) < n for words in of_item):
            is_whole = all(words in of_row for words in of_item)
            return Match(item, 1.0, " ".join(of_item[0])) if is_whole else None
        row_ngrams = {tuple(words[k : k + n]) for words in of_row for k in range(len(words) - n + 1)}
        words = [word for part in of_item for word in part]
        offsets, starts = self._starts_by_item
        begins = np.sort(starts[offsets[item] : offsets[item + 1]]).tolist()
        common = [k for k in begins if tuple(words[k : k + n]) in row_ngrams]
        if not common:
            return None
        covered = sum(min(n, following - k) for k, following in pairwise([*common, common[-1] + n]))
        return Match(item, covered / len(words), " ".join(words[common[0] : common[0] + n]))

    @cached_property
    def _starts_by_item(self) -> tuple[Ints, Ints]:
        items = self.index.items
        order = np.argsort(items, kind="stable")
        return np.searchsorted(items[order], np.arange(len(self.index.words) + 1)), self.index.starts[order]


def _sort_distinct(*columns: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return the distinct lines of some columns, sorted by the first, then the next."""
    order = np.lexsort(columns[::-1])
    lines = [column[order] for column in columns]
    is_new = mark_changes(*lines)
    return tuple(column[is_new] for column in lines)
