"""The items of the benchmarks that a dataset is kept clean of: reading their files, and the index of their n-grams.

    benchmark files ─scan─► digests, which enter the fingerprint ─read─► items ─► distinct items, n-grams (one part)

The index is made once and read by every worker once; a build with other rows and the same benchmarks finds it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rowmill import sources
from rowmill.core.arrays import Bools
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.core.storage import File, Store, digest_json
from rowmill.formats.record_values import get_at_path, is_mapping
from rowmill.formats.removal_filters import Benchmark, Decontaminate
from rowmill.schema import manifest
from rowmill.schema.manifest import Part
from rowmill.similarity.contamination import (
    ItemIndex,
    ItemNGrams,
    ItemSearch,
    ShortTexts,
    build_index,
    number_distinct_items,
)
from rowmill.similarity.words import HashedTexts, hash_words, make_offsets
from rowmill.sources import FileScan, SourcePart
from rowmill.sources.reading import read_records
from rowmill.stages.base import PartTask, StageContext, make_parts
from rowmill.stages.inputs import load_scans
from rowmill.stages.kept_parts import part_folder
from rowmill.stages.part_files import write_table

VERSION = 2
"""Increase it when the same benchmarks may give other items or another index."""

ITEM_SCHEMA = pa.schema(
    [
        pa.field("benchmark", pa.string(), nullable=False),
        pa.field("item", pa.int64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("record", pa.int64(), nullable=False),
        pa.field("texts", pa.list_(pa.string()), nullable=False),
        pa.field("words", pa.int64(), nullable=False),
    ]
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
class _IndexTask:
    root: str
    folder: str
    fingerprint: str
    base: str
    where: str
    options: Decontaminate
    scanned: tuple[ScannedBenchmark, ...]


def make_index(context: StageContext, options: Decontaminate, scanned: tuple[ScannedBenchmark, ...]) -> Part:
    """Return the part that holds the items and the index, made now or by an earlier build."""
    decides = options.model_dump(mode="json", exclude={"coverage", "action"})
    fingerprint = digest_json("benchmark items", VERSION, decides, identify_benchmarks(scanned))
    where = f"datasets.{context.dataset_name}.filters.decontaminate"
    task = _IndexTask(context.store.root, context.folder, fingerprint, str(context.base), where, options, scanned)
    records = sum(scan.records for one in scanned for scan in one.scans)
    [made], _, _ = make_parts(context, _make_index_part, [PartTask(fingerprint, task, records, 0)])
    return made


def _make_index_part(task: _IndexTask) -> Part:
    lines, counts = _read_items(task)
    texts = [text for line in lines for text in line["texts"]]
    owners = np.repeat(np.arange(len(lines)), [len(line["texts"]) for line in lines])
    words = hash_words(texts)
    kept = np.flatnonzero(number_distinct_items(words, owners, len(lines)) == np.arange(len(lines)))
    is_kept = np.isin(owners, kept)
    words, owners = _take_texts(words, is_kept), np.searchsorted(kept, owners[is_kept])
    _require_few_ngrams(task, words)
    index = build_index(words, owners, len(kept), task.options.ngram)
    items = pa.Table.from_pylist(
        [lines[k] | {"words": count} for k, count in zip(kept.tolist(), index.words.tolist(), strict=True)],
        schema=ITEM_SCHEMA,
    )
    at, store = part_folder(task.folder, task.fingerprint), Store(task.root)
    files = {
        "items": write_table(store, f"{at}/items.arrow", items),
        "ngrams": write_table(store, f"{at}/ngrams.arrow", _make_table(index.ngrams)),
        "short": write_table(store, f"{at}/short.arrow", _make_table(index.short)),
    }
    return Part(task.fingerprint, files, {"files": counts, "items": len(kept), "ignored_ngrams": index.ignored})


def _make_table(columns: ItemNGrams | ShortTexts) -> pa.Table:
    if isinstance(columns, ShortTexts):
        return pa.table({"hashes": columns.hashes, "items": columns.items})
    return pa.table({"hashes": columns.hashes, "items": columns.items, "starts": columns.starts})


def _take_texts(words: HashedTexts, chosen: Bools) -> HashedTexts:
    lengths = words.lengths
    return HashedTexts(words.hashes[np.repeat(chosen, lengths)], make_offsets(lengths[chosen]))


def _require_few_ngrams(task: _IndexTask, words: HashedTexts) -> None:
    count = int(np.maximum(words.lengths - task.options.ngram + 1, 0).sum())
    if count > task.options.max_ngrams:
        raise ConfigError(
            f"{task.where}.max_ngrams: the items of {len(task.scanned)} benchmarks have {count:,} n-grams of "
            f"{task.options.ngram} words; at most {task.options.max_ngrams:,} are allowed, since every worker holds "
            "them; raise max_ngrams, or name fewer fields or files"
        )


def _read_items(task: _IndexTask) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """Return the items of all files, and per file its benchmark, URL, records and items."""
    lines: list[dict[str, Any]] = []
    counts: list[list[Any]] = []
    for benchmark in task.scanned:
        before = 0
        for scan in benchmark.scans:
            found = list(_read_file(benchmark.options, scan, Path(task.base)))
            lines += [line | {"item": before + line["record"] - 1} for line in found]
            counts.append([benchmark.options.name, scan.url, scan.records, len(found)])
            before += scan.records
    return lines, counts


def _read_file(benchmark: Benchmark, scan: FileScan, base: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file that have words in the benchmark's fields."""
    number = 0
    for part in scan.parts:
        for value in _read_values(part, base):
            texts = [] if value is None else [text for name in benchmark.fields for text in _list_texts(value, name)]
            if any(len(hash_words([text]).hashes) for text in texts):
                yield {"benchmark": benchmark.name, "source": scan.url, "record": number + 1, "texts": texts}
            number += 1


def _read_values(part: SourcePart, base: Path) -> Iterator[Mapping[str, Json] | None]:
    for record in read_records(part, base):
        yield record.value


def _list_texts(record: Mapping[str, Json], field: str) -> Iterator[str]:
    yield from _list_texts_of(get_at_path(record, field))


def _list_texts_of(value: Json) -> Iterator[str]:
    """Yield a text, the texts of a list, or the contents of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _list_texts_of(one)
    elif is_mapping(value):
        yield from _list_texts_of(value.get("content", value.get("value")))


@dataclass(frozen=True, slots=True)
class BenchmarkItems:
    """The items of an index, by number, and the search in it."""

    search: ItemSearch
    items: pa.Table

    def texts_of(self, item: int) -> list[str]:
        """Return the texts of an item."""
        return self.items.column("texts")[item].as_py()

    def describe(self, item: int) -> dict[str, Any]:
        """Return an item's line in `ITEM_SCHEMA`."""
        return self.items.slice(item, 1).to_pylist()[0]


@lru_cache(maxsize=1)
def load_items(root: str, files: tuple[tuple[str, File], ...], n: int) -> BenchmarkItems:
    """Load an index; a worker loads it once."""
    store, by_name = Store(root), dict(files)
    items = store.table(by_name["items"]).combine_chunks()
    ngrams, short = (store.table(by_name[name]) for name in ("ngrams", "short"))

    def column(table: pa.Table, name: str) -> Any:
        return table.column(name).to_numpy()

    index = ItemIndex(
        n,
        ItemNGrams(*(column(ngrams, name) for name in ("hashes", "items", "starts"))),
        ShortTexts(*(column(short, name) for name in ("hashes", "items"))),
        column(items, "words"),
        ignored=0,
    )
    return BenchmarkItems(ItemSearch(index), items)
