"""Resampling of records: full passes, then a partial one, each in its own order.

n 10, wanted 25        pass 0: all 10    pass 1: all 10    pass 2: 5 of them
groups of 1 to 5, 6    whole groups until 6 are reached: 6 to 10 records; a series is truncated: exactly 6
"""

from collections.abc import Callable

import numpy as np

from rowmill.core.arrays import Ints
from rowmill.tabular.assembly import RecordLengths, RecordPass

Permute = Callable[[int, int], Ints]
"""(pass, n) → a permutation of 0 … n−1."""


def resample_records(records: RecordLengths, wanted: int | None, permute: Permute) -> list[RecordPass]:
    """Return passes over single records: exactly `wanted` in all; None means each once."""
    passes: list[RecordPass] = []
    for number, size in _pass_sizes(len(records.tokens), wanted):
        order = permute(number, len(records.tokens))[:size]
        passes.append(RecordPass(number, order, order + 1))
    return passes


def resample_groups(records: RecordLengths, wanted: int | None, permute: Permute) -> list[RecordPass]:
    """Return passes over whole groups; the last one adds groups until its share is reached."""
    sizes = records.group_sizes
    passes: list[RecordPass] = []
    for number, size in _pass_sizes(len(records.tokens), wanted):
        order = permute(number, len(sizes))
        kept = order[: int(np.searchsorted(np.cumsum(sizes[order]), size)) + 1]
        passes.append(RecordPass(number, records.groups[kept], records.groups[kept + 1]))
    return passes


def resample_series(records: RecordLengths, wanted: int | None, permute: Permute) -> list[RecordPass]:
    """Return passes over series: exactly `wanted` records, the last series truncated to a prefix.

    A full first pass is in key order; other passes permute the groups, never the records.
    """
    sizes = records.group_sizes
    passes: list[RecordPass] = []
    for number, size in _pass_sizes(len(records.tokens), wanted):
        whole_first = number == 0 and size == len(records.tokens)
        order = np.arange(len(sizes)) if whole_first else permute(number, len(sizes))
        ends = np.cumsum(sizes[order])
        kept = order[: int(np.searchsorted(ends, size)) + 1]
        lasts = records.groups[kept + 1].copy()
        lasts[-1:] -= ends[len(kept) - 1] - size
        passes.append(RecordPass(number, records.groups[kept], lasts))
    return passes


def _pass_sizes(count: int, wanted: int | None) -> list[tuple[int, int]]:
    """Return each pass as (number, number of its records)."""
    if not count:
        return []
    full, rest = (1, 0) if wanted is None else divmod(wanted, count)
    return [*((number, count) for number in range(full)), *([(full, rest)] if rest else [])]
