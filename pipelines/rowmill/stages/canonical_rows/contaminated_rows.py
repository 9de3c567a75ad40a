"""Rows of a dataset that hold an item of a benchmark: found over all parts, and removed.

    benchmark files ─► distinct items, an index of their n-grams (one part, made once and read by every worker once)
    part ─► texts ─► n-grams looked up in the index ─► candidates ─► compared word by word ─► contamination.arrow
                                                                                                │ action: reject
                                                                                                ▼
                                                                         the part without them (`parts/accounts.py`)

A search is kept under the part's and the index's fingerprints: the next build searches new parts only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rowmill import sources
from rowmill.core.arrays import group_equal
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json, to_json
from rowmill.core.storage import File, Store
from rowmill.kinds.shared.filters import Benchmark
from rowmill.kinds.shared.messages import get_at_path, is_mapping
from rowmill.parts.accounts import plan_removal, rewrite_parts
from rowmill.parts.functions import PartInputs, PartPlace, PartResult, RowFileInputs, part_function
from rowmill.schema import manifest
from rowmill.schema.counts import Counts, Details
from rowmill.schema.manifest import DisplayTable, Part
from rowmill.schema.row_counts import ContaminationCounts
from rowmill.schema.rows import Rejected
from rowmill.similarity.contamination import (
    Candidate,
    ItemIndex,
    ItemSearch,
    build_index,
    number_distinct_items,
)
from rowmill.similarity.words import hash_words, split_words
from rowmill.sources import FileScan
from rowmill.sources.reading import load_scans, read_records
from rowmill.stages.base import StageContext
from rowmill.stages.canonical_rows.row_texts import (
    MAX_SHOWN_CHARS,
    SHOWN_ROWS,
    TextSource,
    shorten_text,
)

ITEM_SCHEMA = make_required_schema(
    benchmark=pa.string(),
    item=pa.int64(),
    source=pa.string(),
    record=pa.int64(),
    texts=pa.list_(pa.string()),
    words=pa.int64(),
)
"""Distinct items: of those with the same words only the first is here. `item` counts from 0 through the files of the
benchmark, `record` from 1 in its file."""


@dataclass(frozen=True, slots=True)
class ScannedBenchmark:
    """A benchmark and the scans of its files."""

    options: Benchmark
    scans: tuple[FileScan, ...]


def scan_benchmarks(context: StageContext) -> tuple[ScannedBenchmark, ...]:
    """Scan the files of a dataset's benchmarks; files whose stamp did not change are not read again."""
    options = context.dataset.filters.decontaminate
    if options is None:
        return ()
    stage = sources.StoreStager(context.store, f"{context.folder}/staged")
    earlier = manifest.load_current_if_intact(context.store, context.key)
    known = {} if earlier is None else {scan.url: scan for scan in load_scans(earlier)}
    return tuple(
        ScannedBenchmark(benchmark, tuple(sources.scan_source(benchmark.open_source(), context.base, stage, known)))
        for benchmark in options.benchmarks
    )


def identify_benchmarks(scanned: Sequence[ScannedBenchmark]) -> list[Any]:
    """Return what identifies the content of the benchmarks' files."""
    return [
        [one.options.name, [[scan.url, scan.reader, [part.sha256 for part in scan.parts]] for scan in one.scans]]
        for one in scanned
    ]


@dataclass(frozen=True, slots=True)
class IndexInputs(PartInputs):
    """The benchmarks' files, and the options that decide their items."""

    options: dict[str, Any]
    benchmarks: list[Any]
    """What identifies the content of the files (`identify_benchmarks`)."""
    scanned: tuple[ScannedBenchmark, ...] = field(compare=False)
    base: Path = field(compare=False)
    where: str = field(compare=False)

    @property
    def input_rows(self) -> int:
        return sum(scan.records for benchmark in self.scanned for scan in benchmark.scans)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkDetails(Details):
    """What the index of all benchmarks was made of."""

    files: tuple[tuple[str, str, int, int], ...]
    """Benchmark, file, records and items of each."""
    ignored_ngrams: int
    """N-grams that too many items share."""


@part_function(version=3)
def index_benchmarks(inputs: IndexInputs, place: PartPlace) -> PartResult:
    """Write the benchmarks' items, and the index of their n-grams."""
    ngram, max_ngrams = inputs.options["ngram"], inputs.options["max_ngrams"]
    lines: list[dict[str, Any]] = []
    counts: list[tuple[str, str, int, int]] = []
    for benchmark in inputs.scanned:
        before = 0
        for scan in benchmark.scans:
            items_before = len(lines)
            records = (record for part in scan.parts for record in read_records(part, inputs.base))
            for number, record in enumerate(records, start=1):
                texts: list[str] = []
                if (value := record.value) is not None:
                    texts = [
                        text for name in benchmark.options.fields for text in _list_texts_of(get_at_path(value, name))
                    ]
                # Records without words in the benchmark's fields are no items.
                if any(len(hash_words([text]).hashes) for text in texts):
                    item = {"benchmark": benchmark.options.name, "item": before + number - 1, "source": scan.url}
                    lines.append(item | {"record": number, "texts": texts})
            counts.append((benchmark.options.name, scan.url, scan.records, len(lines) - items_before))
            before += scan.records
    texts = [text for line in lines for text in line["texts"]]
    owners = np.repeat(np.arange(len(lines)), [len(line["texts"]) for line in lines])
    words = hash_words(texts)
    kept = np.flatnonzero(number_distinct_items(words, owners, len(lines)) == np.arange(len(lines)))
    is_kept = np.isin(owners, kept)
    words, owners = words.take(np.flatnonzero(is_kept)), np.searchsorted(kept, owners[is_kept])
    ngrams = int(np.maximum(words.lengths - ngram + 1, 0).sum())
    if ngrams > max_ngrams:
        raise ConfigError(
            f"{inputs.where}.max_ngrams: the items of {len(inputs.scanned)} benchmarks have {ngrams:,} n-grams of "
            f"{ngram} words; at most {max_ngrams:,} are allowed, since every worker holds "
            "them; raise max_ngrams, or name fewer fields or files"
        )
    index, ignored = build_index(words, owners, len(kept), ngram)
    items = pa.Table.from_pylist(
        [lines[k] | {"words": count} for k, count in zip(kept.tolist(), index.words.tolist(), strict=True)],
        schema=ITEM_SCHEMA,
    )
    files = {
        "items": place.write("items", items),
        "ngrams": place.write(
            "ngrams", pa.table({"hashes": index.hashes, "items": index.items, "starts": index.starts})
        ),
        "short": place.write("short", pa.table({"hashes": index.short_hashes, "items": index.short_items})),
    }
    return PartResult(files, details=(BenchmarkDetails(files=tuple(counts), ignored_ngrams=ignored),))


def _list_texts_of(value: Json) -> Iterator[str]:
    """Yield a text, the texts of a list, or the contents of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _list_texts_of(one)
    elif is_mapping(value):
        yield from _list_texts_of(value.get("content", value.get("value")))


@lru_cache(maxsize=1)
def load_items(store: Store, files: tuple[tuple[str, File], ...], n: int) -> tuple[ItemSearch, pa.Table]:
    """Load the search in an index, and its items by number; a worker loads them once."""
    by_name = dict(files)
    items = store.table(by_name["items"]).combine_chunks()
    columns = [column for name in ("ngrams", "short") for column in store.table(by_name[name]).columns]
    return ItemSearch(ItemIndex(n, *(column.to_numpy() for column in (*columns, items.column("words"))))), items


CONTAMINATION_FILE = "contamination"

CONTAMINATION_SCHEMA = make_required_schema(
    place=pa.int64(),
    row_id=pa.string(),
    benchmark=pa.string(),
    item=pa.int64(),
    source=pa.string(),
    record=pa.int64(),
    coverage=pa.float64(),
    ngram=pa.string(),
    text=pa.string(),
    item_text=pa.string(),
)
"""A row of a part with its best item: `place` in the part, `item` in the benchmark, and both texts, cut."""


@dataclass(frozen=True, slots=True)
class RowSearch:
    """The parts after a filter that compares texts, its files about each of them, and what is counted and shown.

    `count` returns the counts, given how many records were taken.
    """

    parts: list[Part]
    found: Sequence[dict[str, File]]
    count: Callable[[int], Counts]
    tables: Mapping[str, DisplayTable]


def remove_contaminated_rows(
    context: StageContext, made: list[Part], scanned: tuple[ScannedBenchmark, ...]
) -> RowSearch | None:
    """Search all parts, and rewrite those with contaminated rows; None if the dataset names no benchmark."""
    options = context.dataset.filters.decontaminate
    if options is None:
        return None
    inputs = IndexInputs(
        options.model_dump(mode="json", exclude={"coverage", "action"}),
        identify_benchmarks(scanned),
        scanned,
        context.base,
        f"datasets.{context.dataset_name}.filters.decontaminate",
    )
    [index] = context.map(index_benchmarks, [inputs]).parts
    texts = TextSource.of_dataset(context)
    searched = context.map(
        search_part,
        [
            SearchInputs(
                rows=part.files["rows"], texts=texts, index=index, ngram=options.ngram, coverage=options.coverage
            )
            for part in made
        ],
    ).parts
    parts = made
    if options.action == "reject":
        removals = [dict(_list_rejects(context, part)) for part in searched]
        changes = [plan_removal(part, removed) for part, removed in zip(made, removals, strict=True)]
        parts = rewrite_parts(context, made, changes, context.dataset.format)
    shown: list[dict[str, Any]] = []
    rows_by_file: dict[tuple[str, str], int] = {}
    for one in searched:
        if CONTAMINATION_FILE not in one.files:
            continue
        table = context.store.table(one.files[CONTAMINATION_FILE])
        names = zip(table.column("benchmark").to_pylist(), table.column("source").to_pylist(), strict=True)
        for name in names:
            rows_by_file[name] = rows_by_file.get(name, 0) + 1
        order = np.argsort(-table.column("coverage").to_numpy(), kind="stable")[:SHOWN_ROWS]
        shown = sorted(shown + table.take(order).to_pylist(), key=lambda line: -line["coverage"])[:SHOWN_ROWS]
    files = [(*line, rows_by_file.get((line[0], line[1]), 0)) for line in index.get_details(BenchmarkDetails).files]
    columns = ("row_id", "text", "benchmark", "item", "item_text", "coverage")
    tables = {"benchmarks": DisplayTable(("benchmark", "file", "records", "items", "rows_found"), tuple(files))}
    if shown:
        tables["contamination"] = DisplayTable(columns, tuple(tuple(line[name] for name in columns) for line in shown))
    return RowSearch(
        parts=parts,
        found=[part.files for part in searched],
        count=lambda taken: ContaminationCounts(
            records_beside_benchmarks=taken,
            contaminated_records=sum(
                part.files[CONTAMINATION_FILE].rows for part in searched if CONTAMINATION_FILE in part.files
            ),
            items_of_smallest_benchmark=min(items for _, _, _, items in index.get_details(BenchmarkDetails).files),
        ),
        tables=tables,
    )


@dataclass(frozen=True, slots=True)
class SearchInputs(RowFileInputs):
    """The rows of a part, and the index to search them with."""

    texts: TextSource
    index: Part
    ngram: int
    coverage: float


@part_function(version=2)
def search_part(inputs: SearchInputs, place: PartPlace) -> PartResult:
    """Find the rows of a part that have an item of a benchmark."""
    rows = place.store.table(inputs.rows, ("row_id", *inputs.texts.columns))
    search, items = load_items(place.store, tuple(sorted(inputs.index.files.items())), inputs.ngram)
    texts = inputs.texts.list_texts(place.store, rows)
    covered = search.find_covered(hash_words(texts.texts), texts.rows, inputs.coverage)
    lines: list[dict[str, Any]] = []
    for row, places in group_equal(covered.rows):
        of_row = texts.of_row(row)
        found = zip(covered.items[places].tolist(), covered.coverage[places].tolist(), strict=True)
        candidates = (Candidate(item, items.column("texts")[item].as_py(), of) for item, of in found)
        match = search.find_best_match(of_row, candidates, inputs.coverage)
        if match is None:
            continue
        item = items.slice(match.item, 1).to_pylist()[0]
        having = (text for text in of_row if match.ngram in " ".join(split_words(text)))
        lines.append(
            {
                "place": row,
                "row_id": rows.column("row_id")[row].as_py(),
                "benchmark": item["benchmark"],
                "item": item["item"],
                "source": item["source"],
                "record": item["record"],
                "coverage": round(match.coverage, 9),
                "ngram": match.ngram[:MAX_SHOWN_CHARS],
                "text": shorten_text(next(having, "")),
                "item_text": shorten_text("\n".join(item["texts"])),
            }
        )
    files: dict[str, File] = {}
    if lines:
        table = pa.Table.from_pylist(lines, schema=CONTAMINATION_SCHEMA)
        files[CONTAMINATION_FILE] = place.write("contamination", table)
    return PartResult(files)


def _list_rejects(context: StageContext, searched: Part) -> Iterator[tuple[int, Rejected]]:
    if CONTAMINATION_FILE not in searched.files:
        return
    columns = ("place", "benchmark", "item", "coverage", "ngram")
    for line in context.store.table(searched.files[CONTAMINATION_FILE], columns).to_pylist():
        detail = {
            "benchmark": line["benchmark"],
            "item": line["item"],
            "coverage": round(line["coverage"], 4),
            "ngram": line["ngram"],
        }
        yield line["place"], Rejected("contaminated", to_json(detail))
