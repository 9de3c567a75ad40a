"""Rows of a table numbered by group and position, and partitions of them.

Partitions of a grouped table: which groups are planned together, decided by the hashes of their keys.

    rows of the table     up to 1 Mi   up to 2 Mi   up to 4 Mi
    bits of the hash               0            1            2   …   at most 8
    partitions                     1            2            4   …   at most 256

A group's partition is the first bits of its key's hash. So rows that are added to a group change no other partition,
and a table that grows past a power of two splits each partition in halves. The number of rows decides, never workers.

Index of a records dataset: split, group and position of each row as integers, so that planning sees no text.

row         0    1    2    3         numbered in source order, across all parts
group_key  "B"  "A"  "B"  "A"   ──►  groups 1 0 1 0, keys "A" "B"
order_key   7    3    5    9         positions 7 3 5 9   ──►  sorted rows 1 3 | 2 0
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets
from rowmill.core.json import Json
from rowmill.core.storage import File, Store, read_tables
from rowmill.kinds.tables.serialization import read_json
from rowmill.kinds.tables.time_order import DAY, SortKey

PARTITION_ROWS = 1 << 20
"""Rows of a partition at most, up to `MAX_BITS`: a process plans them in some 400 MB."""
MAX_BITS = 8


def choose_hash_bits(rows: int) -> int:
    """Return how many bits of a key's hash decide its partition in a table of so many rows."""
    return min(max(-(-rows // PARTITION_ROWS) - 1, 0).bit_length(), MAX_BITS)


def assign_partitions(keys: pa.ChunkedArray, bits: int) -> NDArray[np.uint8]:
    """Return the partition of each group key: uint8[N]."""
    encoded = keys.combine_chunks().dictionary_encode()
    # Not the hash that decides a key's split.
    digests = (
        blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"partition").digest()
        for key in encoded.dictionary.to_pylist()
    )
    numbers = np.array([digest[0] >> (8 - bits) for digest in digests], np.uint8)
    return numbers[encoded.indices.to_numpy(zero_copy_only=False)]


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


# ── Index of a records dataset: split, group and position of each row as integers, so that planning sees ──


SPLITS = ("train", "validation", "test")
NO_KEY = "null"
"""Key of the only series in a dataset without a group column."""
KEY_COLUMNS = ("split", "group_key", "order_key")
"""The columns of rows that an index is made of."""
_LARGEST = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class RowIndex:
    """The rows of a dataset, or of a partition of it.

    `splits` int8[N] index `SPLITS`; `groups` int64[N] index `keys`, which ascend (None without groups); `positions`
    int64[N] order a group's rows (None: source order), in multiples of `unit` seconds if they are times (None if only
    their order is known). `first_rows` int64[P + 1] are the offsets of the parts; `places` int64[N] number the rows in
    their parts (None: all rows of every part).
    """

    splits: NDArray[np.int8]
    groups: Ints | None
    keys: tuple[str, ...]
    positions: Ints | None
    unit: Decimal | None
    first_rows: Ints
    places: Ints | None = None

    @property
    def group_sizes(self) -> Ints:
        """Rows of each group."""
        return np.empty(0, np.int64) if self.groups is None else np.bincount(self.groups, minlength=len(self.keys))

    def locate_rows(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the number of each row's part, and its number in this part."""
        which = np.searchsorted(self.first_rows, rows, "right") - 1
        return which, rows - self.first_rows[which] if self.places is None else self.places[rows]

    def sort_rows(self, rows: Ints) -> tuple[Ints, Ints]:
        """Sort rows by group and position, ties in source order; return them and the groups' offsets (end included).

        Groups without any of these rows are left out; without groups each row is its own group, in source order.
        """
        if self.groups is None:
            return rows, np.arange(len(rows) + 1, dtype=np.int64)
        keys = (rows, self.groups[rows]) if self.positions is None else (rows, self.positions[rows], self.groups[rows])
        ordered = rows[np.lexsort(keys)]
        begins = np.flatnonzero(np.diff(self.groups[ordered], prepend=-1))
        return ordered, np.append(begins, len(ordered)).astype(np.int64)


def load_row_index(
    store: Store, files: Sequence[File], order: SortKey | None, *, is_grouped: bool, is_series: bool
) -> RowIndex:
    """Read the keys of all parts; a time of day becomes seconds since its series' first midnight."""
    tables = read_tables(store, files, KEY_COLUMNS)
    return build_row_index(tables, order, is_grouped=is_grouped, is_series=is_series)


def build_row_index(
    tables: Sequence[pa.Table],
    order: SortKey | None,
    *,
    is_grouped: bool,
    is_series: bool,
    first_rows: Ints | None = None,
    places: Ints | None = None,
) -> RowIndex:
    """Index rows by their keys, in the order of the source: a table for each part, unless `first_rows` are given.

    `first_rows` and `places` are those of `RowIndex`.
    """
    if first_rows is None:
        first_rows = compute_offsets([table.num_rows for table in tables])
    splits = [pc.index_in(table.column("split"), pa.array(SPLITS)).to_numpy() for table in tables]
    count = int(first_rows[-1])
    groups, keys = _number_groups([table.column("group_key") for table in tables]) if is_grouped else (None, ())
    if is_series and groups is None:
        groups, keys = np.zeros(count, np.int64), (NO_KEY,)
    positions = unit = None
    if order is not None and groups is not None:
        positions, unit = _read_positions([table.column("order_key") for table in tables], is_time=order.is_time)
        if order.is_time_of_day and unit is not None:
            positions = _roll_over_midnight(positions, groups, int(DAY / unit))
    return RowIndex(
        splits=np.concatenate([np.empty(0, np.int8), *splits]).astype(np.int8),
        groups=groups,
        keys=keys,
        positions=positions,
        unit=unit,
        first_rows=first_rows,
        places=places,
    )


def count_group_sizes(columns: Iterable[pa.ChunkedArray]) -> tuple[tuple[str, ...], Ints]:
    """Return all group keys, ascending, and the rows of each, given the keys of one part after the other."""
    counts: Counter[str] = Counter()
    for column in columns:
        for one in column.value_counts().to_pylist():
            counts[one["values"]] += one["counts"]
    keys = sorted(counts, key=group_sort_key)
    return tuple(keys), np.array([counts[key] for key in keys], np.int64)


def _number_groups(columns: Sequence[pa.ChunkedArray]) -> tuple[Ints, tuple[str, ...]]:
    codes: list[Ints] = []
    numbers: dict[str, int] = {}
    for column in columns:
        encoded = column.combine_chunks().dictionary_encode()
        own = [numbers.setdefault(key, len(numbers)) for key in encoded.dictionary.to_pylist()]
        codes.append(np.array(own, np.int64)[encoded.indices.to_numpy(zero_copy_only=False)])
    met = list(numbers)
    order = sorted(range(len(met)), key=lambda number: group_sort_key(met[number]))
    ranks = np.empty(len(met), np.int64)
    ranks[order] = np.arange(len(met))
    joined = np.concatenate([np.empty(0, np.int64), *codes])
    return ranks[joined], tuple(met[number] for number in order)


def group_sort_key(key: str) -> tuple[object, ...]:
    """Return a sort key for a group key: nulls first, then numbers by value, strings by code points, then the rest."""
    return _rank_json_value(read_json(key))


def _rank_json_value(value: Json) -> tuple[object, ...]:
    match value:
        case bool():
            return (3, value)
        case int() | Decimal():
            return (1, value)
        case str():
            return (2, value)
        case list():
            return (4, *(_rank_json_value(one) for one in value))
        case _:
            return (0, str(value))


def _read_positions(columns: Sequence[pa.ChunkedArray], *, is_time: bool) -> tuple[Ints, Decimal | None]:
    if not is_time:
        texts = [column.to_pylist() for column in columns]
        return _rank_values(texts), None
    try:
        whole = [pc.cast(column, pa.int64()).combine_chunks().to_numpy(zero_copy_only=False) for column in columns]
        return np.concatenate([np.empty(0, np.int64), *whole]), Decimal(1)
    except pa.ArrowInvalid:
        numbers = [[Decimal(text) for text in column.to_pylist()] for column in columns]
    places = max((_count_decimals(number) for part in numbers for number in part), default=0)
    scaled = [[int(number.scaleb(places)) for number in part] for part in numbers]
    if any(abs(number) >= _LARGEST for part in scaled for number in part):
        return _rank_values(numbers), None
    return np.concatenate([np.empty(0, np.int64), *(np.array(part, np.int64) for part in scaled)]), Decimal(1).scaleb(
        -places
    )


def _count_decimals(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    return max(0, -exponent)


def _rank_values(parts: Iterable[Sequence[object]]) -> Ints:
    """Replace each value by its rank among the distinct values."""
    held = [list(part) for part in parts]
    distinct: list[object] = sorted({one for part in held for one in part})  # pyrefly: ignore[bad-specialization]
    place = {one: at for at, one in enumerate(distinct)}
    return np.array([place[one] for part in held for one in part], np.int64)


def _roll_over_midnight(positions: Ints, groups: Ints, day: int) -> Ints:
    """Add a day to a series' times of day after every decrease; the order within a series is the source's."""
    order = np.argsort(groups, kind="stable")
    times, own = positions[order], groups[order]
    next_day = np.diff(times, prepend=times[:1]) < 0
    begins = np.diff(own, prepend=-1) != 0
    next_day &= ~begins
    days = np.cumsum(next_day)
    before = days[np.flatnonzero(begins)]
    rolled = np.empty_like(positions)
    rolled[order] = times + day * (days - np.repeat(before, np.diff(np.append(np.flatnonzero(begins), len(own)))))
    return rolled


def measure_series_steps(index: RowIndex) -> Ints:
    """Return the differences of consecutive positions within each series, in the index's unit."""
    if index.groups is None or index.positions is None or index.unit is None:
        return np.empty(0, np.int64)
    rows, begins = index.sort_rows(np.arange(len(index.groups), dtype=np.int64))
    distances = np.diff(index.positions[rows])
    within = np.ones(len(distances), bool)
    within[begins[1:-1] - 1] = False
    return distances[within]
