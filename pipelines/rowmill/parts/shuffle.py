"""The shuffle: lines of all parts that must meet, such as equal hashes, are brought together bucket by bucket.

    parts ─► blocks of consecutive parts ─► a file per block and bucket ─► one task per bucket, over all blocks

A task holds the lines of one block, or those of one bucket, so memory does not grow with the dataset; the calling
process holds none. Appended parts change the last block only, and the files of the others are reused. A small dataset
is one block and one bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.storage import File
from rowmill.parts.functions import PartPlace
from rowmill.schema.manifest import Part

MAX_BUCKETS = 256


def cut_blocks(sizes: Sequence[int], limit: int) -> list[range]:
    """Cut parts into blocks of at most `limit` lines, or one part; return the numbers of each block's parts."""
    blocks: list[range] = []
    first, total = 0, 0
    for number, size in enumerate(sizes):
        total += size
        if total > limit and number > first:
            blocks.append(range(first, number))
            first, total = number, size
    return [*blocks, range(first, len(sizes))]


def count_buckets(blocks: int) -> int:
    """Return as many buckets as blocks, so that one is about as large as the other: a power of two."""
    return min(1 << (blocks - 1).bit_length(), MAX_BUCKETS)


def choose_buckets(first_bytes: NDArray[np.uint8], buckets: int) -> NDArray[np.int64]:
    """Return the bucket of each line, uint8[N] → int64[N], from the first bits of its hash."""
    return (first_bytes.astype(np.int64) * buckets) >> 8


def write_buckets(place: PartPlace, lines: pa.Table, of_bucket: NDArray[np.int64], buckets: int) -> dict[str, File]:
    """Write lines in a file per bucket that has any, in their order, named by its number."""
    order = np.argsort(of_bucket, kind="stable")
    borders = np.searchsorted(of_bucket[order], np.arange(buckets + 1))
    return {
        str(bucket): place.write(f"bucket-{bucket:03d}", lines.take(pa.array(order[begin:end])))
        for bucket, (begin, end) in enumerate(pairwise(borders.tolist()))
        if begin < end
    }


@dataclass(frozen=True, slots=True)
class BlockLines:
    """The lines of one block in one bucket; `block` is its number."""

    block: int
    lines: File


def collect_buckets(blocks: Sequence[Part]) -> list[tuple[int, tuple[BlockLines, ...]]]:
    """Return each bucket that has lines, by number, with its file of every block that has some."""
    names = sorted({int(name) for block in blocks for name in block.files})
    return [
        (
            name,
            tuple(
                BlockLines(number, block.files[str(name)])
                for number, block in enumerate(blocks)
                if str(name) in block.files
            ),
        )
        for name in names
    ]
