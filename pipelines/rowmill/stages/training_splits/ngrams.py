"""Sampled n-grams of token ids as 64-bit hashes, to detect near-duplicate long texts.

    ids      5 9 2 7 … ─► one hash per run of 13 ids inside a segment ─► kept where the hash is 0 mod 16

The sample depends only on the hash, so equal n-grams are kept or dropped alike everywhere: the share of common n-grams
in the sample estimates the share in the whole, with a sixteenth of the memory. Rejected: MinHash with
locality-sensitive buckets, which compares whole documents and misses a test question inside a long page.
"""

import numpy as np
from numpy.typing import NDArray

from rowmill.core.permutation import mix_array

NGRAM_LENGTH = 13
"""Token ids in an n-gram."""
SAMPLE_ONE_IN = 16
"""One n-gram in this many is kept, those whose hash is a multiple of it. A power of two."""

# Hashes and ids of this many places stay in the second-level cache during thirteen passes.
_CHUNK = 1 << 14

_MULTIPLIER = np.uint64(0x5851F42D4C957F2D)


def sample_ngrams(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the hashes of the kept n-grams and the segment of each.

    Segment k is `ids[offsets[k]:offsets[k + 1]]`; n-grams do not cross its end. A polynomial of the ids modulo
    2^64, then scrambled, so that the low bits that decide the sample depend on every id.
    """
    kept: list[NDArray[np.uint64]] = [np.empty(0, np.uint64)]
    places: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    for begin in range(0, len(ids) - NGRAM_LENGTH + 1, _CHUNK):
        hashes = _hash_ngrams(ids[begin : begin + _CHUNK + NGRAM_LENGTH - 1])
        at = np.flatnonzero(hashes & np.uint64(SAMPLE_ONE_IN - 1) == 0)
        kept.append(hashes[at])
        places.append(at + begin)
    every, at = np.concatenate(kept), np.concatenate(places)
    owners = np.searchsorted(offsets, at, "right") - 1
    inside = offsets[owners + 1] - at >= NGRAM_LENGTH
    return every[inside], owners[inside]


def _hash_ngrams(ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Hash the complete n-gram that starts at each place."""
    wide = ids.astype(np.uint64)
    count = len(wide) - NGRAM_LENGTH + 1
    hashes = wide[:count].copy()
    for place in range(1, NGRAM_LENGTH):
        np.multiply(hashes, _MULTIPLIER, out=hashes)
        np.add(hashes, wide[place : place + count], out=hashes)
    mix_array(hashes)
    return hashes
