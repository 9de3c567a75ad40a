"""Partitions of a grouped table: which groups are planned together, decided by the hashes of their keys.

    rows of the table     up to 1 Mi   up to 2 Mi   up to 4 Mi
    bits of the hash               0            1            2   …   at most 8
    partitions                     1            2            4   …   at most 256

A group's partition is the first bits of its key's hash. So rows that are added to a group change no other partition,
and a table that grows past a power of two splits each partition in halves. The number of rows decides, never workers.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

PARTITION_ROWS = 1 << 20
"""Rows of a partition at most, up to `MAX_BITS`: a process plans them in some 400 MB."""
MAX_BITS = 8


def choose_hash_bits(rows: int) -> int:
    """Return how many bits of a key's hash decide its partition in a table of so many rows."""
    return min(max(-(-rows // PARTITION_ROWS) - 1, 0).bit_length(), MAX_BITS)


def assign_partitions(keys: pa.ChunkedArray, bits: int) -> NDArray[np.uint8]:
    """Return the partition of each group key: uint8[N]."""
    encoded = keys.combine_chunks().dictionary_encode()
    numbers = np.array([_hash_prefix(key, bits) for key in encoded.dictionary.to_pylist()], np.uint8)
    return numbers[encoded.indices.to_numpy(zero_copy_only=False)]


def _hash_prefix(key: str, bits: int) -> int:
    """Return the first bits of a key's hash, which is not the one that decides its split."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"partition").digest()
    return digest[0] >> (8 - bits)


def share_sample(wanted: int, counts: Sequence[int]) -> list[int]:
    """Divide a sample among partitions in proportion to their train records; the shares add up to `wanted`.

    Every partition has as many full passes as the table would have as a whole, and a share of the partial one.

        wanted 25, records 4 6 ─► 2 passes of both, and 2 3 of the partial pass ─► 10 15
    """
    total = sum(counts)
    if not total:
        return [0] * len(counts)
    full, rest = divmod(wanted, total)
    shares: list[int] = []
    before = 0
    for count in counts:
        # The remainder's borders are rounded, not its shares: so the shares add up.
        part = rest * (before + count) // total - rest * before // total
        shares.append(full * count + part)
        before += count
    return shares
