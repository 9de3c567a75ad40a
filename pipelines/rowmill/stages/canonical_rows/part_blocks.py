"""Blocks of consecutive parts, each of which one task reads to compare the rows of all parts in buckets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.storage import Store
from rowmill.schema.manifest import File, Part
from rowmill.stages.part_files import write_table

MAX_BUCKETS = 256


@dataclass(frozen=True, slots=True)
class PartBlock:
    """Consecutive parts: `parts[first:]` of a dataset, with the files that a task reads of them."""

    first: int
    parts: tuple[Part, ...]


def cut_blocks(parts: Sequence[Part], fact: str, limit: int) -> list[PartBlock]:
    """Cut parts into blocks whose sum of a fact is at most `limit`; appended parts change the last block only."""
    return list(_iterate_blocks(parts, fact, limit))


def _iterate_blocks(parts: Sequence[Part], fact: str, limit: int) -> Iterator[PartBlock]:
    first, total = 0, 0
    for number, part in enumerate(parts):
        own = int(part.facts[fact])
        total += own
        if total > limit and number > first:
            yield PartBlock(first, tuple(parts[first:number]))
            first, total = number, own
    yield PartBlock(first, tuple(parts[first:]))


def count_buckets(blocks: Sequence[PartBlock]) -> int:
    """Return as many buckets as blocks, so that one is about as large as the other: a power of two."""
    return min(1 << (len(blocks) - 1).bit_length(), MAX_BUCKETS)


def write_buckets(store: Store, at: str, lines: pa.Table, of_byte: NDArray[np.uint8], buckets: int) -> dict[str, File]:
    """Write lines in a file per bucket, named by its number; `of_byte` are the bytes whose first bits choose it."""
    of_bucket = (of_byte.astype(np.int64) * buckets) >> 8
    order = np.argsort(of_bucket.astype(np.uint8), kind="stable")
    borders = np.searchsorted(of_bucket[order], np.arange(buckets + 1))
    return {
        str(bucket): write_table(store, f"{at}/bucket-{bucket:03d}.arrow", lines.take(order[begin:end]))
        for bucket, (begin, end) in enumerate(pairwise(borders.tolist()))
        if begin < end
    }
