"""Places of the order → rows of shards, for both layouts of ranks.

place    0 1 2 3 4 5 6 7 …      stored for 4 ranks: place p is row p // 4 of stored rank p mod 4
2 ranks  0 1 0 1 0 1 0 1        rank 1 reads places 1, 3, 5, 7: stored ranks 1 and 3, each in its own order

copied   that row of the shards of the stored rank
index    that line of the index of the stored rank names a shard and a row in it; −1 is the shard of a filler
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import gcd
from typing import Any

import numpy as np

from rowmill.core.arrays import Ints, Tokens, compute_offsets, find_distinct, view_numbers
from rowmill.reader.published import PublishedBuild
from rowmill.reader.sequences import PackedSequence
from rowmill.reader.source_losses import SourceNames
from rowmill.reader.stored_rows import ExpectedShard, ShardFooter, StoredRows, check_shard, read_row_group

CHECKED_REMOTE_SHARDS = 64
"""Shards that are checked before the first batch on remote storage: 256 take half a second of processor time in
every rank. The others are checked when they are first read; `verify` checks all. Local shards are all checked."""

KEPT_INDEX_GROUPS = 64
"""Decoded row groups of indexes that stay in memory: half a megabyte each."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSource:
    """The sequences of an order by place."""

    rows: StoredRows
    places: "CopiedPlaces | IndexedPlaces"

    def at(self, places: Ints) -> list[PackedSequence]:
        """Return the sequences at these places; the places need not be sorted.

        The sequences are views of decoded row groups: copy those that are kept.
        """
        return self.rows.at(*self.places.locate(places))

    def list_example_ids(self, places: Ints) -> list[list[str]]:
        """Return the examples that are in the sequences at these places; a filler has none."""
        return self.rows.list_example_ids(*self.places.locate(places))


# ── Layout copied ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class CopiedPlaces:
    """Shards in order of ranks: `starts` int64[S + 1] are their first rows, where each rank has `per_rank` rows."""

    world_size: int
    per_rank: int
    starts: Ints

    def locate(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the shard and the row of each place."""
        rows = places % self.world_size * self.per_rank + places // self.world_size
        shards = np.searchsorted(self.starts, rows, "right") - 1
        return shards, rows - self.starts[shards]


# ── Layout index ───────────────────────────────────────────────────────────────────────────────────


class IndexedPlaces:
    """The indexes of some stored ranks, of which the row groups read last stay in memory."""

    def __init__(self, build: PublishedBuild, indexes: Sequence[ExpectedShard], filler: int) -> None:
        self._build, self._indexes, self._filler = build, indexes, filler
        self._footers: dict[int, ShardFooter] = {}
        self._groups: OrderedDict[tuple[int, int], tuple[Tokens, Tokens]] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments alone: footers cannot be pickled."""
        return IndexedPlaces, (self._build, self._indexes, self._filler)

    def require(self, ranks: Iterable[int], *, verify: bool) -> None:
        """Check the indexes of some ranks; errors as in `check_shard`."""
        for rank in ranks:
            self._footers[rank] = check_shard(self._build.store, self._indexes[rank], verify=verify)

    def locate(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the shard and the row of each place."""
        ranks, lines = places % self._build.world_size, places // self._build.world_size
        shards, rows = np.empty(len(places), np.int64), np.empty(len(places), np.int64)
        for rank in find_distinct(ranks).tolist():
            of_rank = np.flatnonzero(ranks == rank)
            offsets = self._load_footer(rank).offsets
            groups = np.searchsorted(offsets, lines[of_rank], "right") - 1
            for group in find_distinct(groups).tolist():
                some = of_rank[groups == group]
                named = self._load_group(rank, group)
                inside = lines[some] - offsets[group]
                shards[some], rows[some] = named[0][inside], named[1][inside]
        return np.where(shards < 0, self._filler, shards), rows

    def _load_footer(self, rank: int) -> ShardFooter:
        if rank not in self._footers:
            self.require([rank], verify=False)
        return self._footers[rank]

    def _load_group(self, rank: int, group: int) -> tuple[Tokens, Tokens]:
        # Not locked: at worst two threads read the same group. One operation of a dictionary is atomic.
        kept = self._groups.get((rank, group))
        if kept is None:
            kept = self._read_group(rank, group)
            self._groups[(rank, group)] = kept
            if len(self._groups) > KEPT_INDEX_GROUPS:
                self._groups.popitem(last=False)
        return kept

    def _read_group(self, rank: int, group: int) -> tuple[Tokens, Tokens]:
        path, footer = self._indexes[rank].shard.path, self._load_footer(rank)
        table = read_row_group(self._build.store, path, footer, group, ["shard", "row"])
        return view_numbers(table.column("shard")), view_numbers(table.column("row"))


# ── Opening ────────────────────────────────────────────────────────────────────────────────────────


def open_order(
    build: PublishedBuild, rank: int, world_size: int, *, verify: bool, names: SourceNames | None = None
) -> SequenceSource:
    """Open the stored ranks that a rank of any world size reads, and check their files.

    Raises IntegrityError for the first file that is missing or truncated, belongs to another order, rank or tokenizer,
    or (`verify`) has another digest than the published one.
    """
    rounds = build.world_size // gcd(build.world_size, world_size)
    needed = sorted({(rank + k * world_size) % build.world_size for k in range(rounds)})
    open_layout = _open_copied if build.layout == "copied" else _open_indexed
    return open_layout(build, needed, verify=verify, names=names)


def _open_copied(
    build: PublishedBuild, needed: Sequence[int], *, verify: bool, names: SourceNames | None
) -> SequenceSource:
    of_ranks = list(build.ranks.values())
    cards = [_make_rank_card(build, rank) for rank in range(len(of_ranks))]
    shards = [ExpectedShard(shard, card) for card, of_rank in zip(cards, of_ranks, strict=True) for shard in of_rank]
    firsts = compute_offsets([len(of_rank) for of_rank in of_ranks])
    rows = StoredRows(build.store, shards, in_turn=len(needed), names=names)
    # Side by side, as they are read: the first shards of all ranks, then the second ones.
    by_rank = (range(firsts[rank], firsts[rank + 1]) for rank in needed)
    numbers_needed = [number for numbers in zip_longest(*by_rank) for number in numbers if number is not None]
    rows.require(_choose_checked(build, numbers_needed, verify=verify), verify=verify)
    starts = compute_offsets([expected.shard.rows for expected in shards])
    return SequenceSource(rows, CopiedPlaces(build.world_size, build.places // build.world_size, starts))


def _open_indexed(
    build: PublishedBuild, needed: Sequence[int], *, verify: bool, names: SourceNames | None
) -> SequenceSource:
    rank_names = list(build.ranks)
    indexes = [
        ExpectedShard(build.ranks[name][0], _make_rank_card(build, rank)) for rank, name in enumerate(rank_names)
    ]
    shards = [shard for name in build.datasets for shard in list_set(build, name, "train")]
    filler = ExpectedShard(build.fillers[rank_names[needed[0]]], _make_rank_card(build, needed[0]))
    rows = StoredRows(build.store, [*shards, filler], names=names)
    places = IndexedPlaces(build, indexes, len(shards))
    places.require(needed, verify=verify)
    numbers = [len(shards), *range(len(shards))]
    rows.require(_choose_checked(build, numbers, verify=verify), verify=verify)
    return SequenceSource(rows, places)


def open_split(
    build: PublishedBuild, dataset: str, split: str, *, verify: bool, names: SourceNames | None = None
) -> SequenceSource:
    """Open a dataset's sequences of a split, in the order of its plan, and check their files; errors as above."""
    shards = list_set(build, dataset, split)
    rows = StoredRows(build.store, shards, names=names)
    rows.require(_choose_checked(build, range(len(shards)), verify=verify), verify=verify)
    starts = compute_offsets([expected.shard.rows for expected in shards])
    return SequenceSource(rows, CopiedPlaces(1, int(starts[-1]), starts))


def list_set(build: PublishedBuild, dataset: str, split: str) -> list[ExpectedShard]:
    """Return a dataset's packed shards of a split."""
    card = {"recipe": build.recipe, "dataset": dataset} | _make_common_card(build)
    return [ExpectedShard(shard, card) for shard in build.sets[dataset].shards.get(split, ())]


def _make_rank_card(build: PublishedBuild, rank: int) -> dict[str, str]:
    of_rank = {"order": build.order, "world_size": str(build.world_size), "rank": str(rank)}
    return of_rank | _make_common_card(build)


def _make_common_card(build: PublishedBuild) -> dict[str, str]:
    return {"tokenizer_digest": str(build.card["tokenizer_digest"])}


def _choose_checked(build: PublishedBuild, numbers: Sequence[int], *, verify: bool) -> Sequence[int]:
    return numbers if verify or build.store.is_local else numbers[:CHECKED_REMOTE_SHARDS]
