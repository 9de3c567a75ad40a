"""Near duplicates: rows that resemble a longer row are found over all parts, bucket by bucket, and removed.

    part ─► words ─► shingles, MinHashes ─► bands.arrow, shingles.arrow      kept: made once per part
                                             │
    parts of a block ─► lines (key, row) in buckets by the first bits of the key       a task per block of 4 Mi lines
    a bucket of all blocks ─► sorted by key ─► lines whose key another row has, too    a task per bucket
                                             │
    keys of two rows or more ─► ranks ─► parts/accounts.py

Only rows that share a band's key with another are looked at together. The calling process holds the lines whose keys
are shared and no others, so its memory follows the number of candidates, not of rows. The buckets of blocks, as large
as the bands of all parts, are removed once they are compared. Lines that fit one block are compared in the calling
process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Integers, Ints, compute_offsets, find_distinct, narrow_integers
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.json import to_json
from rowmill.core.storage import File, Store
from rowmill.parts.accounts import RewriteInputs, plan_removal, rewrite_parts
from rowmill.parts.context import scan_rows, scratch_folder
from rowmill.parts.functions import (
    PartInputs,
    PartPlace,
    PartResult,
    RowFileInputs,
    choose_buckets,
    collect_buckets,
    count_buckets,
    cut_blocks,
    part_function,
    write_buckets,
)
from rowmill.schema.manifest import DisplayTable, Part
from rowmill.schema.row_counts import NearDuplicateCounts, RowCounts
from rowmill.schema.rows import Rejected
from rowmill.similarity.near_duplicates import (
    BANDS,
    Removed,
    collect_shingles,
    compute_signatures,
    compute_similarity,
    drop_equal_groups,
    find_near_duplicates,
    hash_bands,
)
from rowmill.similarity.words import HashedTexts, hash_words, join_texts
from rowmill.stages.base import StageContext
from rowmill.stages.canonical_rows.contaminated_rows import RowSearch
from rowmill.stages.canonical_rows.row_texts import SHOWN_ROWS, TextSource, shorten_text

if TYPE_CHECKING:
    import polars as pl

BLOCK_LINES = 1 << 22
"""Lines of a block, some 64 MB."""


def collect_groups(context: StageContext, signed: Sequence[Part], starts: Ints) -> tuple[Integers, Integers]:
    """Return the rows that share a key with another row: the number of the key and the row.

    `starts` are the first rows of the parts; each part has its lines in the file `bands`.
    """
    blocks = cut_blocks([part.files["bands"].rows for part in signed], BLOCK_LINES)
    buckets = count_buckets(len(blocks))
    firsts = [int(starts[block.start]) for block in blocks]
    divided = context.map(
        split_block_bands,
        [
            BlockBands(
                tuple(signed[number].files["bands"] for number in block),
                tuple((starts[block.start : block.stop] - first).tolist()),
                buckets,
            )
            for block, first in zip(blocks, firsts, strict=True)
        ],
    ).parts
    compared = context.map(
        compare_band_bucket,
        [
            BucketBands(tuple(block.lines for block in lines), tuple(firsts[block.block] for block in lines))
            for _, lines in collect_buckets(divided)
        ],
    ).parts
    context.drop_parts(divided)
    # Small integers: the calling process holds the lines of all shared keys at once.
    groups: list[Integers] = [np.empty(0, np.int32)]
    rows: list[Integers] = [np.empty(0, np.int32)]
    first = 0
    for part in compared:
        table = context.store.table(part.files["groups"])
        numbers = table.column("group").to_numpy()
        groups.append(narrow_integers(numbers + first))
        rows.append(narrow_integers(table.column("row").to_numpy()))
        first += int(numbers.max(initial=-1)) + 1
    return np.concatenate(groups), np.concatenate(rows)


def _read_band_lines(store: Store, bands: Sequence[File], starts: Sequence[int]) -> "pl.DataFrame":
    """Return the lines of some parts, their rows counted from the parts' `starts`."""
    import polars as pl

    tables = (cast("pl.DataFrame", pl.from_arrow(store.table(file, ("key", "row")))) for file in bands)
    return pl.concat(table.with_columns(pl.col("row") + start) for table, start in zip(tables, starts, strict=True))


# ── Blocks and buckets ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class BlockBands(PartInputs):
    """The band keys of a block's parts, and the first row of each part in the block."""

    bands: tuple[File, ...]
    starts: tuple[int, ...]
    buckets: int


@part_function(version=1)
def split_block_bands(inputs: BlockBands, place: PartPlace) -> PartResult:
    """Write the lines of a block's parts in a file per bucket, their rows counted through the block."""
    lines = _read_band_lines(place.store, inputs.bands, inputs.starts)
    first_bytes = (lines["key"].to_numpy() >> np.uint64(56)).astype(np.uint8)
    of_bucket = choose_buckets(first_bytes, inputs.buckets)
    return PartResult(write_buckets(place, lines.to_arrow(), of_bucket, inputs.buckets))


@dataclass(frozen=True, slots=True)
class BucketBands(PartInputs):
    """The lines of one bucket, block by block, and the first row of each block."""

    lines: tuple[File, ...]
    starts: tuple[int, ...]


@part_function(version=1)
def compare_band_bucket(inputs: BucketBands, place: PartPlace) -> PartResult:
    """Write the rows of a bucket that share a key with another."""
    import polars as pl

    lines = _read_band_lines(place.store, inputs.lines, inputs.starts)
    shared = lines.filter(pl.col("key").is_duplicated()).sort("key", maintain_order=True)
    groups, rows = shared["key"].rle_id().cast(pl.Int64).to_numpy(), shared["row"].to_numpy()
    is_kept = drop_equal_groups(groups, rows)
    return PartResult({"groups": place.write("groups", pa.table({"group": groups[is_kept], "row": rows[is_kept]}))})


NEAR_DUPLICATES_FILE = "near_duplicates"

NEAR_DUPLICATE_SCHEMA = make_required_schema(
    place=pa.int64(), row_id=pa.string(), kept_row_id=pa.string(), similarity=pa.float64(), displaced=pa.bool_()
)
"""A row of a part that goes, and the row that stays. `displaced`: the row that stays comes after it in the source."""


def remove_near_duplicates(context: StageContext, parts: list[Part]) -> RowSearch | None:
    """Compare the rows of all parts, and rewrite the parts of those that go; None if the dataset asks for nothing."""
    options = context.dataset.filters.near_duplicates
    if options is None:
        return None
    import polars as pl

    texts = TextSource.of_dataset(context)
    signed = context.map(
        sign_part,
        [
            SignInputs(rows=part.files["rows"], texts=texts, ngram=options.ngram, min_words=options.min_words)
            for part in parts
        ],
    ).parts
    starts = compute_offsets([part.get_counts(RowCounts).kept for part in parts])
    removed = _find_removed(context, signed, starts, options.threshold)
    named = _name_rows(context, parts, removed)
    found: list[dict[str, File]] = []
    changes: list[RewriteInputs | None] = []
    for number, part in enumerate(parts):
        # Part by part: lines as Python objects take ten times the memory of the columns that they become.
        first, last = np.searchsorted(removed.rows, starts[number : number + 2]).tolist()
        lines = named.slice(first, last - first).with_columns(
            place=pl.col("row") - int(starts[number]),
            similarity=pl.col("similarity").round(9),
            displaced=pl.col("kept") > pl.col("row"),
        )
        table = lines.select(NEAR_DUPLICATE_SCHEMA.names).to_arrow().cast(NEAR_DUPLICATE_SCHEMA)
        place = context.place("near duplicates", part, table)
        found.append({NEAR_DUPLICATES_FILE: place.write("near_duplicates", table)} if len(lines) else {})
        rejects = {
            row: Rejected("near_duplicate", to_json({"row_id": kept, "similarity": round(similarity, 4)}))
            for row, kept, similarity in lines.select("place", "kept_row_id", "similarity").iter_rows()
        }
        changes.append(plan_removal(part, rejects) if options.action == "reject" else None)
    return RowSearch(
        parts=rewrite_parts(context, parts, changes, context.dataset.format),
        found=found,
        count=lambda taken: NearDuplicateCounts(
            records_compared=taken,
            near_duplicate_records=len(removed.rows),
            displaced=int((removed.kept > removed.rows).sum()),
        ),
        tables=_tabulate_pairs(context, parts, named, starts),
    )


@dataclass(frozen=True, slots=True)
class SignInputs(RowFileInputs):
    """The rows of a part, whose texts are compared as n-grams of words if they have `min_words`."""

    texts: TextSource
    ngram: int
    min_words: int


@part_function(version=2)
def sign_part(inputs: SignInputs, place: PartPlace) -> PartResult:
    """Write the shingles and the band keys of a part's rows; rows with too few words have none."""
    rows = place.store.table(inputs.rows, ("content_hash", *inputs.texts.columns))
    texts = inputs.texts.list_texts(place.store, rows)
    # A dialogue is one text: what its turns say to each other counts, and turns shorter than an n-gram do.
    words = join_texts(hash_words(texts.texts), texts.rows, texts.count)
    shingles = collect_shingles(words, inputs.ngram)
    asked = np.flatnonzero((words.lengths >= inputs.min_words) & (shingles.lengths > 0))
    chosen = shingles.take(asked)
    keys = hash_bands(compute_signatures(chosen.hashes, chosen.offsets)).ravel()
    order = np.argsort(keys, kind="stable")
    sizes = np.zeros(texts.count, np.int64)
    sizes[asked] = chosen.lengths
    lists = pa.LargeListArray.from_arrays(compute_offsets(sizes), pa.array(chosen.hashes))
    bands = pa.table({"key": keys[order], "row": np.repeat(asked, BANDS)[order]})
    columns = {"characters": texts.characters, "content_hash": rows.column("content_hash"), "shingles": lists}
    files = {
        "bands": place.write("bands", bands),
        "shingles": place.write("shingles", pa.table(columns)),
    }
    return PartResult(files)


def _find_removed(context: StageContext, signed: Sequence[Part], starts: Ints, threshold: float) -> Removed:
    """Return the rows that go, numbered through all parts."""
    groups, rows = collect_groups(context, signed, starts)
    with scratch_folder(context) as folder:
        candidates = find_distinct(rows)
        characters: list[Ints] = [np.empty(0, np.int64)]
        hashes: list[NDArray[np.uint64]] = [np.empty((0, 2), np.uint64)]
        sizes: list[Ints] = [np.empty(0, np.int64)]
        path = folder / "shingles"
        with path.open("wb") as file:
            for number, part in enumerate(signed):
                first, last = np.searchsorted(candidates, starts[number : number + 2])
                if first == last:
                    continue
                asked = pa.array(candidates[first:last] - starts[number])
                table = context.store.table(part.files["shingles"]).take(asked).combine_chunks()
                characters.append(table.column("characters").to_numpy())
                raw = b"".join(table.column("content_hash").to_pylist())
                # As bytes are compared: the first byte counts most.
                hashes.append(np.frombuffer(raw, ">u8").reshape(-1, 2).astype(np.uint64))
                lists = table.column("shingles").combine_chunks()
                sizes.append(np.diff(lists.offsets.to_numpy()))
                file.write(lists.flatten().to_numpy().tobytes())
        of_rows, halves = np.concatenate(characters), np.concatenate(hashes)
        order = np.lexsort((candidates, halves[:, 1], halves[:, 0], -of_rows))
        values = np.memmap(path, np.uint64, "r") if path.stat().st_size else np.empty(0, np.uint64)
        shingles = HashedTexts(values, compute_offsets(np.concatenate(sizes)))
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        ranked = narrow_integers(ranks)[np.searchsorted(candidates, rows)]
        del rows
        found = find_near_duplicates(
            groups,
            ranked,
            threshold,
            lambda first, second: compute_similarity(shingles, order[first], order[second]),
        )
    by_rank = candidates[order]
    rows, kept = by_rank[found.rows], by_rank[found.kept]
    in_order = np.argsort(rows)
    return Removed(rows[in_order], kept[in_order], found.similarity[in_order])


def _name_rows(context: StageContext, parts: Sequence[Part], removed: Removed) -> "pl.DataFrame":
    """Return a line per row that goes, in their order: `row`, `kept`, `similarity`, `row_id` and `kept_row_id`."""
    import polars as pl

    rows = {"row": removed.rows, "kept": removed.kept, "similarity": removed.similarity}
    lines = pl.DataFrame(rows, {"row": pl.Int64, "kept": pl.Int64, "similarity": pl.Float64})
    if not len(lines):
        return lines.with_columns(row_id=pl.lit(""), kept_row_id=pl.lit(""))
    every = scan_rows(context.store, [part.files["rows"] for part in parts], ["row_id"]).with_row_index("row")
    asked = pl.concat([lines["row"], lines["kept"]]).unique().to_frame().lazy()
    ids = every.with_columns(pl.col("row").cast(pl.Int64)).join(asked, on="row", how="semi").collect(engine="streaming")
    of_kept = ids.rename({"row": "kept", "row_id": "kept_row_id"})
    return lines.join(ids, on="row", maintain_order="left").join(of_kept, on="kept", maintain_order="left")


def _tabulate_pairs(
    context: StageContext, parts: Sequence[Part], named: "pl.DataFrame", starts: Ints
) -> dict[str, DisplayTable]:
    """Tabulate rows that go beside those that stay; the least similar first, which are the ones to look at."""
    import polars as pl

    shown = named.sort("similarity", "row").head(SHOWN_ROWS)
    if not len(shown):
        return {}
    asked = pl.concat([shown["row"], shown["kept"]]).unique().sort().to_numpy()
    texts: dict[int, str] = {}
    source = TextSource.of_dataset(context)
    for number, part in enumerate(parts):
        first, last = np.searchsorted(asked, starts[number : number + 2])
        if first < last:
            places = pa.array(asked[first:last] - starts[number])
            row_texts = source.list_texts(
                context.store, context.store.table(part.files["rows"], source.columns).take(places)
            )
            for k, row in enumerate(asked[first:last].tolist()):
                texts[row] = shorten_text("\n".join(row_texts.of_row(k)))
    pairs = shown.select("row_id", "row", "kept_row_id", "kept", "similarity").iter_rows()
    columns = ("row_id", "text", "kept_row_id", "kept_text", "similarity")
    cells = ((row_id, texts[row], name, texts[kept], round(share, 4)) for row_id, row, name, kept, share in pairs)
    return {NEAR_DUPLICATES_FILE: DisplayTable(columns, tuple(cells))}
