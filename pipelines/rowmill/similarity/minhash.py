"""MinHash signatures of rows, and the bands in which similar rows agree (locality-sensitive hashing).

    shingles of a row ──120 hash functions, the least of each──► m0 m1 m2 m3 m4 m5 │ m6 … m11 │ … │ m114 … m119
                                                                 band 0: one key     band 1    …    band 19

Two rows with Jaccard similarity s agree in a band with probability s^6, and in at least one of 20 with
1 − (1 − s^6)^20: 0.998 at 0.8, 0.92 at 0.7, 0.27 at 0.5. The functions are min of mix(a·h + b) modulo 2^64 with a and b
from SplitMix64: constants of ours, because a library's decide which rows stay only until its next release (datasketch
2.0 changed its values).
"""

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.permutation import GAMMA, mix_array, mix_bits
from rowmill.similarity.words import Hashes

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
