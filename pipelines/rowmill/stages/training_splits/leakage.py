"""Leaks between training and evaluation: rows, groups, times, prompts, and near-duplicate texts in two splits.

Everything is counted from the written files, not from decisions: rows from their Parquet files, tokens from the shards.
Only keys outside train are held in memory. Near-duplicate texts share sampled n-grams of token ids:

    ids      5 9 2 7 … ─► one hash per run of 13 ids inside a segment ─► kept where the hash is 0 mod 16

Equal n-grams are kept or dropped alike everywhere, so the share of common n-grams in the sample estimates the share in
the whole, with a sixteenth of the memory. Rejected: MinHash with locality-sensitive buckets, which compares whole
documents and misses a test question inside a long page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import find_distinct
from rowmill.core.permutation import mix_array
from rowmill.core.stage_names import CANONICAL_ROWS, TOKENIZED_EXAMPLES
from rowmill.core.storage import File, Store
from rowmill.kinds.base import NearRows
from rowmill.kinds.shared.splits import Boundaries, Splitter
from rowmill.parts.context import scan_rows
from rowmill.recipe.recipe import Recipe
from rowmill.schema.counts import Counts
from rowmill.schema.manifest import Manifest
from rowmill.schema.order_counts import (
    GroupLeakCounts,
    NearDuplicateLeakCounts,
    PromptLeakCounts,
    RowLeakCounts,
    TimeLeakCounts,
)
from rowmill.schema.row_counts import RowCounts, TimeSplitCounts
from rowmill.schema.rows import SPLITS, TREE_COLUMNS, Rejected
from rowmill.schema.shard_counts import ShardDetails, select_shards
from rowmill.shards import native
from rowmill.shards.native import read_unpadded
from rowmill.stages.base import StageContext
from rowmill.stages.inputs import load_origin

if TYPE_CHECKING:
    import polars as pl

NEAR_ROWS_VERSION = 1
"""Increase it when different rows of a table may count as near duplicates."""
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
        # The hash of the complete n-gram that starts at each place.
        wide = ids[begin : begin + _CHUNK + NGRAM_LENGTH - 1].astype(np.uint64)
        count = len(wide) - NGRAM_LENGTH + 1
        hashes = wide[:count].copy()
        for place in range(1, NGRAM_LENGTH):
            np.multiply(hashes, _MULTIPLIER, out=hashes)
            np.add(hashes, wide[place : place + count], out=hashes)
        mix_array(hashes)
        at = np.flatnonzero(hashes & np.uint64(SAMPLE_ONE_IN - 1) == 0)
        kept.append(hashes[at])
        places.append(at + begin)
    every, at = np.concatenate(kept), np.concatenate(places)
    owners = np.searchsorted(offsets, at, "right") - 1
    inside = offsets[owners + 1] - at >= NGRAM_LENGTH
    return every[inside], owners[inside]


MAX_SAMPLE_IDS = 10
"""Sample ids of a check result."""
NEAR_SHARE = 0.5
"""Minimum share of an example's sampled n-grams in train for a near-duplicate."""

_ROW_COLUMNS = ("row_id", "dataset", "content_hash", "split", "group_key", "prompt_hash")


@dataclass(slots=True)
class LeakReport:
    """The counts of leaks, and sample ids by check; a leak that no dataset can have is not counted."""

    counts: list[Counts] = field(default_factory=list[Counts])
    samples: dict[str, tuple[str, ...]] = field(default_factory=dict[str, "tuple[str, ...]"])

    def note(self, check: str, counts: Counts, ids: Sequence[str]) -> None:
        """Store what a check is computed from, and the first ids."""
        self.counts.append(counts)
        if ids:
            self.samples[check] = tuple(ids[:MAX_SAMPLE_IDS])


def find_leaks(context: StageContext, packed: Mapping[str, Manifest]) -> LeakReport:
    """Count every kind of leak between the splits of all datasets."""
    import polars as pl

    leaks = LeakReport()
    sources = {name: _LeakSource.of(context, shards) for name, shards in packed.items()}
    frames = [frame for source in sources.values() if (frame := source.rows(context.store)) is not None]
    rows = pl.concat(frames) if frames else pl.LazyFrame(schema=dict.fromkeys(_ROW_COLUMNS, pl.String))
    held_out = rows.filter(pl.col("split") != "train")
    same, ids = _find_split_overlaps(rows, held_out, ["content_hash"])
    leaks.note("same_row", RowLeakCounts(contents_in_two_splits=same), ids)
    if any(dataset.format.has_groups(dataset) for dataset in context.recipe.datasets.values()):
        same, ids = _find_split_overlaps(rows, held_out, ["dataset", "group_key"])
        leaks.note("same_group", GroupLeakCounts(groups_in_two_splits=same), ids)
    datasets = context.recipe.datasets
    near = {
        name: datasets[name].format.find_near_rows(context, datasets[name], sources[name].canonical)
        for name in list_datasets_of_compared_rows(context.recipe)
    }
    if len(near) < len(context.recipe.datasets):
        # Rows that a kind compares itself have no prompts.
        prompted = held_out.filter(~pl.col("dataset").is_in([*near])) if near else held_out
        named = prompted.filter(pl.col("prompt_hash").is_not_null()).select("prompt_hash")
        train = rows.filter(pl.col("split") == "train").select("prompt_hash").join(named, on="prompt_hash", how="semi")
        asked = train.unique().collect(engine="streaming")
        leaked = named.join(asked.lazy(), on="prompt_hash", how="semi")
        leaks.note(
            "same_prompt",
            PromptLeakCounts(compared_rows=_count_lazy_rows(prompted), rows_with_train_prompt=_count_lazy_rows(leaked)),
            _list_leaked_rows(prompted, asked, ["prompt_hash"]),
        )
    if any(dataset.splits.time_key is not None for dataset in context.recipe.datasets.values()):
        _count_time_leaks(leaks, context, sources)
    _measure_near_duplicates(leaks, context, packed, near)
    counts = rows.group_by("dataset", "split").len().collect(engine="streaming")
    worst = 0.0
    for name, dataset in context.recipe.datasets.items():
        own = {str(split): int(n) for ds, split, n in counts.iter_rows() if ds == name}
        has_source = sources[name].canonical.get_counts(RowCounts).validation_source
        # A dataset with a source of test rows holds out no others.
        of_source = {*(["validation"] if has_source else []), *([] if dataset.splits.test else ["test"])}
        # Rows of held-out sources do not count toward configured shares.
        total = sum(count for split, count in own.items() if split not in of_source)
        if not total or dataset.splits.time_key is not None:
            continue
        for split in ("validation", "test"):
            if split in of_source or (split == "validation" and sources[name].moved):
                continue
            worst = max(worst, abs(own.get(split, 0) - float(dataset.splits.wanted_rows(split, total))) / total)
    leaks.counts.append(RowLeakCounts(largest_split_error=round(worst, 9)))
    return leaks


@dataclass(frozen=True, slots=True)
class _LeakSource:
    """The rows that a dataset's shards were built from, and those whose split was decided later, by number."""

    canonical: Manifest
    moved: Sequence[File]

    @classmethod
    def of(cls, context: StageContext, packed: Manifest) -> "_LeakSource":
        tokenized = load_origin(context, packed, TOKENIZED_EXAMPLES)
        return cls(load_origin(context, tokenized, CANONICAL_ROWS), packed.files("moved"))

    def rows(self, store: Store) -> "pl.LazyFrame | None":
        import polars as pl

        files = self.canonical.files("rows")
        if not files:
            return None
        rows = scan_rows(store, files, _ROW_COLUMNS)
        if not self.moved:
            return rows
        moved = scan_rows(store, self.moved, ("row_id", "split"))
        joined = rows.join(moved, on="row_id", how="left", suffix="_moved")
        # The surplus is in no split: it is used neither for training nor for evaluation.
        now = joined.with_columns(pl.coalesce("split_moved", "split").alias("split")).drop("split_moved")
        return now.filter(pl.col("split") != "surplus").select(_ROW_COLUMNS)


def list_datasets_of_compared_rows(recipe: Recipe) -> list[str]:
    """Return the datasets whose kind compares rows itself: neither their prompts nor their examples are compared."""
    return [name for name, dataset in recipe.datasets.items() if dataset.format.COMPARES_ROWS]


def _find_split_overlaps(rows: "pl.LazyFrame", held: "pl.LazyFrame", key: list[str]) -> tuple[int, list[str]]:
    """Return how many keys have rows in more than one split, and rows of the first; only keys outside train can."""
    import polars as pl

    named = held.filter(pl.col(key[-1]).is_not_null()).select(key).unique()
    splits = rows.select([*key, "split"]).join(named, on=key, how="semi").group_by(key).agg(pl.col("split").n_unique())
    leaked = splits.filter(pl.col("split") > 1).select(key).collect(engine="streaming")
    return len(leaked), _list_leaked_rows(held, leaked, key)


def _count_lazy_rows(rows: "pl.LazyFrame") -> int:
    import polars as pl

    return int(rows.select(pl.len()).collect(engine="streaming").item())


def _list_leaked_rows(held: "pl.LazyFrame", leaked: "pl.DataFrame", key: list[str]) -> list[str]:
    """Return at most ten held-out rows, of the first keys that leaked."""
    if leaked.is_empty():
        return []
    first = leaked.sort(key).head(MAX_SAMPLE_IDS).lazy()
    found = held.join(first, on=key, how="semi").select("row_id").collect(engine="streaming")
    return sorted(found["row_id"].to_list())[:MAX_SAMPLE_IDS]


def _count_time_leaks(leaks: LeakReport, context: StageContext, sources: Mapping[str, _LeakSource]) -> None:
    """Count rows in an earlier split than their time allows: training would see what evaluation asks about."""
    found: list[str] = []
    count = 0
    for name, source in sources.items():
        splits = context.recipe.datasets[name].splits
        # Those computed from shares of time; none if nothing was held out.
        recorded = source.canonical.get_counts(TimeSplitCounts).boundaries
        boundaries = splits.boundaries or (Boundaries.model_validate(recorded) if recorded else None)
        if splits.time_key is None or boundaries is None:
            continue
        splitter = Splitter(splits.model_copy(update={"boundaries": boundaries}))
        for file in source.canonical.files("rows"):
            table = context.store.table(file, ("row_id", "order_key", "split"))
            known: dict[str | None, int] = {}
            early: list[str] = []
            columns = (table.column(name).to_pylist() for name in ("row_id", "order_key", "split"))
            for row_id, when, split in zip(*columns, strict=True):
                if when not in known:
                    decided = splitter.assign_by_time(when)
                    # A row inside the gap, or without a time, must not be in any split.
                    known[when] = len(SPLITS) if isinstance(decided, Rejected) else SPLITS.index(decided)
                if known[when] > SPLITS.index(split):
                    early.append(row_id)
            count += len(early)
            found += early[: MAX_SAMPLE_IDS - len(found)]
    leaks.note("time_order", TimeLeakCounts(early_rows=count), found)


def _measure_near_duplicates(
    leaks: LeakReport, context: StageContext, packed: Mapping[str, Manifest], near: Mapping[str, NearRows]
) -> None:
    """Count held-out examples that nearly duplicate training data, and add the rows that kinds compared (`near`)."""
    parts = [part for name, one in packed.items() if name not in near for part in one.parts if "shard" in part.files]
    train = [part.files["shard"] for part in select_shards(parts, "train")]
    others = [part.files["shard"] for part in parts if part.get_details(ShardDetails).split != "train"]
    size = sum(file.bytes for file in others)
    sampled = list(context.pool.map(partial(sample_held_out, context.store), others, size_bytes=size))
    segment_names = [name for ids, _, _ in sampled for name in ids]
    firsts = np.cumsum([0, *(len(ids) for ids, _, _ in sampled)])
    hashes = np.concatenate([np.empty(0, np.uint64), *(one for _, one, _ in sampled)])
    segments = [np.empty(0, np.int64), *(at + one for at, (_, _, one) in zip(firsts[:-1], sampled, strict=True))]
    # The segments of one example are judged together.
    numbers = {name: number for number, name in enumerate(dict.fromkeys(segment_names))}
    owners = np.array([numbers[name] for name in segment_names], np.int64)[np.concatenate(segments)]
    distinct, places_of = np.unique(hashes, return_inverse=True)
    seen = np.zeros(len(distinct), np.bool_)
    searched = train if len(distinct) else []
    size = sum(file.bytes for file in searched)
    search = partial(find_ngrams_in_train, context.store)
    for places in context.pool.map(search, searched, size_bytes=size, shared=distinct):
        seen[places] = True
    every = np.bincount(owners, minlength=len(numbers))
    found = np.bincount(owners, weights=seen[places_of], minlength=len(numbers))
    is_near = (every > 0) & (found >= NEAR_SHARE * every)
    names = list(compress(numbers, is_near.tolist()))
    names += [row_id for rows in near.values() for row_id in rows.row_ids]
    examples = len(numbers) + sum(rows.compared for rows in near.values())
    if examples or len(near) < len(packed):
        counts = NearDuplicateLeakCounts(compared_examples=examples, near_train_examples=len(names))
        leaks.note("near_duplicate", counts, names)


def sample_held_out(store: Store, shard: File) -> "tuple[list[str], NDArray[np.uint64], NDArray[np.int64]]":
    """Return the example of each segment of a held-out shard, its sampled n-grams, and the segment of each."""
    columns = ("input_ids", "labels", "segment_lengths", "example_ids", "starts", *TREE_COLUMNS)
    segments = native.recover_segments(read_unpadded(store, shard, columns))
    hashes, owners = sample_ngrams(segments.ids, segments.offsets)
    return segments.example_ids.to_pylist(), hashes, owners


def find_ngrams_in_train(store: Store, shard: File, held: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return which held-out n-grams, by index in their sorted list, occur in a training shard."""
    table = read_unpadded(store, shard, ("input_ids", "segment_lengths", *TREE_COLUMNS))
    hashes, _ = sample_ngrams(*native.recover_example_ids(table))
    places = np.minimum(np.searchsorted(held, hashes), len(held) - 1)
    return find_distinct(places[held[places] == hashes])
