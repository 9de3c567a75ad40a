"""Find texts that resemble each other with MinHash and locality-sensitive hashing, and choose which of them stay.

    shingles of a row ──120 hash functions, the least of each──► m0 m1 m2 m3 m4 m5 │ m6 … m11 │ … │ m114 … m119
                                                                 band 0: one key     band 1    …    band 19

    bands     1: a b c   2: b d   3: c e                    ranks a < b < c < d < e
    round 1   a is first in all of its bands: it stays, and is compared with b and c; b goes, c is unlike
    round 2   c and d are first in what is left of theirs: they stay; c is compared with e, …

Two rows with Jaccard similarity s agree in at least one of 20 bands with 1 − (1 − s^6)^20: 0.998 at 0.8, 0.92 at 0.7,
0.27 at 0.5. The functions are min of mix(a·h + b) modulo 2^64 with a and b from SplitMix64: constants of ours, because
a library's decide which rows stay only until its next release (datasketch 2.0 changed its values).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import LARGEST_INT32, Bools, Integers, Ints, mark_changes
from rowmill.core.permutation import GAMMA, mix_array, mix_bits
from rowmill.similarity.words import HashedTexts, Hashes, hash_ngrams

BANDS = 20
BAND_SIZE = 6
FUNCTIONS = BANDS * BAND_SIZE

_MASK = (1 << 64) - 1
_SEED = 0x6E65617264757073
_CHUNK_SHINGLES = 1 << 13
"""Shingles whose intermediate values stay in the second-level cache."""


def _draw(count: int, first: int) -> NDArray[np.uint64]:
    """Return numbers of the SplitMix64 sequence."""
    return np.array([mix_bits(_SEED + (first + k + 1) * GAMMA) for k in range(count)], np.uint64)


_FACTORS = _draw(FUNCTIONS, 0) | np.uint64(1)
_SUMMANDS = _draw(FUNCTIONS, FUNCTIONS)


def compute_signatures(shingles: Hashes, offsets: Ints) -> NDArray[np.uint64]:
    """Return the signatures of rows, uint64[rows, 120]; row r has the shingles `[offsets[r], offsets[r + 1])`, ≥ 1."""
    rows = len(offsets) - 1
    signatures = np.empty((rows, FUNCTIONS), np.uint64)
    begin = 0
    while begin < rows:
        end = int(np.searchsorted(offsets, offsets[begin] + _CHUNK_SHINGLES, "right")) - 1
        end = min(max(end, begin + 1), rows)
        some = shingles[offsets[begin] : offsets[end]]
        starts = offsets[begin:end] - offsets[begin]
        for k, (factor, summand) in enumerate(zip(_FACTORS, _SUMMANDS, strict=True)):
            values = some * factor
            values += summand
            mix_array(values)
            signatures[begin:end, k] = np.minimum.reduceat(values, starts)
        begin = end
    return signatures


def hash_bands(signatures: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the key of each band of each row, uint64[rows, 20]; keys of different bands differ."""
    keys = np.empty((len(signatures), BANDS), np.uint64)
    for band in range(BANDS):
        hashes = np.full(len(signatures), mix_bits(band * GAMMA & _MASK), np.uint64)
        for column in range(band * BAND_SIZE, (band + 1) * BAND_SIZE):
            hashes ^= signatures[:, column]
            mix_array(hashes)
        keys[:, band] = hashes
    return keys


_PAIR_VALUES = 1 << 22
"""Shingles that are compared at once."""

Compare = Callable[[Integers, Integers], NDArray[np.float64]]
"""Returns the similarity of each pair of rows."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Rows that go, each with the row that stays instead and their similarity."""

    rows: Integers
    kept: Integers
    similarity: NDArray[np.float64]


def collect_shingles(words: HashedTexts, n: int) -> HashedTexts:
    """Return the distinct n-grams of each text, sorted."""
    ngrams = hash_ngrams(words, n)
    order = np.lexsort((ngrams.hashes, ngrams.texts))
    values, texts = ngrams.hashes[order], ngrams.texts[order]
    is_new = mark_changes(values, texts)
    return HashedTexts(values[is_new], np.searchsorted(texts[is_new], np.arange(len(words.lengths) + 1)))


def compute_similarity(shingles: HashedTexts, first: Integers, second: Integers) -> NDArray[np.float64]:
    """Return the Jaccard similarity of pairs of rows: shingles in both by shingles in either."""
    sizes = shingles.lengths
    both = sizes[first] + sizes[second]
    common = np.empty(len(first), np.int64)
    ends = np.cumsum(both)
    borders = [0]
    while borders[-1] < len(both):
        reached = int(ends[borders[-1] - 1]) if borders[-1] else 0
        borders.append(max(borders[-1] + 1, int(np.searchsorted(ends, reached + _PAIR_VALUES, "right"))))
    for begin, end in pairwise(borders):
        common[begin:end] = _count_common(shingles, first[begin:end], second[begin:end])
    return common / np.maximum(both - common, 1)


def _count_common(shingles: HashedTexts, first: Integers, second: Integers) -> Ints:
    one, other = shingles.take(first), shingles.take(second)
    # Shingles become small numbers, so that a pair and a shingle fit one integer.
    distinct, numbers = np.unique(one.hashes, return_inverse=True)
    places = np.searchsorted(distinct, other.hashes)
    is_known = np.append(distinct, np.uint64(0))[places] == other.hashes
    is_known &= places < len(distinct)
    pairs, width = np.arange(len(first)), len(distinct) + 1
    of_one = np.repeat(pairs, one.lengths) * width + numbers
    of_other = np.repeat(pairs, other.lengths)[is_known] * width + places[is_known]
    at = np.minimum(np.searchsorted(of_one, of_other), len(of_one) - 1)
    is_common = of_one[at] == of_other
    return np.bincount(of_other[is_common] // width, minlength=len(first))


def drop_equal_groups(groups: Ints, rows: Ints) -> Bools:
    """Mark the lines to keep of groups of rows, sorted by group: of groups with the same rows, one.

    Rows with equal shingles agree in all bands; comparing them once is enough.
    """
    begins = np.flatnonzero(mark_changes(groups))
    if not len(begins):
        return np.zeros(0, np.bool_)
    mixed = rows.astype(np.uint64)
    mix_array(mixed)
    counts = np.diff(np.append(begins, len(groups)))
    sums = np.add.reduceat(mixed, begins) + counts.astype(np.uint64)
    _, first = np.unique(sums, return_index=True)
    is_kept = np.zeros(len(begins), np.bool_)
    is_kept[first] = True
    return np.repeat(is_kept, counts)


def find_near_duplicates(groups: Integers, rows: Integers, threshold: float, compare: Compare) -> Removed:
    """Return the rows that go; `rows` are numbered by rank, and each line puts one into a group (a band's key).

    `compare` returns the exact similarity of pairs of rows. A row goes if an earlier row that *stays* is in one of its
    bands and is at least as similar as the threshold: of a chain a ~ b ~ c with a and c unlike, c stays. Rows rank
    by characters, then by content hash, so nothing depends on the order of files. Each round settles the first rows of
    all bands; a band in which k rows stay takes k rounds. Rejected: "the first row stays", which depends on file names;
    connected components, whose chains remove rows that are unlike every row that stays.
    """
    groups, rows = _sort_pairs(groups, rows)
    is_open = np.ones(int(rows.max(initial=-1)) + 1, np.bool_)
    batches = [Removed(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
    while len(rows):
        begins = mark_changes(groups)
        # A row stays if it is first in every group it is in.
        stays = np.zeros(len(is_open), np.bool_)
        stays[rows[begins]] = True
        stays[rows[~begins]] = False
        leaders = rows[begins][np.cumsum(begins) - 1]
        compared = np.flatnonzero(~begins & stays[leaders])
        # Each pair once.
        candidates, kept = _sort_pairs(rows[compared], leaders[compared])
        is_new = mark_changes(kept, candidates)
        kept, candidates = kept[is_new], candidates[is_new]
        similarity = compare(kept, candidates)
        near = similarity >= threshold
        kept, candidates, similarity = kept[near], candidates[near], similarity[near]
        # One pair for each row that goes: the most similar, ties to the earlier row that stays.
        order = np.lexsort((kept, -similarity, candidates))
        chosen = order[mark_changes(candidates[order])]
        kept, candidates, similarity = kept[chosen], candidates[chosen], similarity[chosen]
        batches.append(Removed(candidates, kept, similarity))
        is_open[np.flatnonzero(stays)] = False
        is_open[candidates] = False
        is_left = is_open[rows]
        groups, rows = groups[is_left], rows[is_left]
        shared = np.append(False, groups[1:] == groups[:-1])
        shared |= np.append(groups[1:] == groups[:-1], False)
        # A row alone in what is left of a group is compared with nothing there.
        groups, rows = groups[shared[: len(groups)]], rows[shared[: len(rows)]]
    gone = np.concatenate([removed.rows for removed in batches])
    order = np.argsort(gone)
    kept = np.concatenate([removed.kept for removed in batches])
    similarity = np.concatenate([removed.similarity for removed in batches])
    return Removed(gone[order], kept[order], similarity[order])


def _sort_pairs(major: Integers, minor: Integers) -> tuple[Integers, Integers]:
    """Sort pairs of numbers from 0 on by the first, then by the second.

    Numbers that fit 32 bits are sorted as one integer and returned as two small ones: a quarter of the memory.
    """
    if max(major.max(initial=0), minor.max(initial=0)) > LARGEST_INT32:
        order = np.lexsort((minor, major))
        return major[order], minor[order]
    pairs = major.astype(np.uint64)
    pairs <<= np.uint64(32)
    pairs |= minor.astype(np.uint64)
    pairs.sort()
    return (pairs >> np.uint64(32)).astype(np.int32), pairs.astype(np.uint32).view(np.int32)
