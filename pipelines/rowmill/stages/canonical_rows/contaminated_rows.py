"""Finds the rows that have an item of a benchmark, over all parts, and removes them.

    part ─► texts ─► n-grams looked up in the index ─► candidates ─► compared word by word ─► contamination.arrow
                                                                                                │ action: reject
                                                                                                ▼
                                                                         the part without them (`rewrite_part.py`)

A search is kept under the part's and the index's fingerprints: the next build searches new parts only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rowmill.core.json import to_json
from rowmill.core.storage import File, Store, digest_json
from rowmill.formats.removal_filters import Decontaminate
from rowmill.schema.manifest import DisplayTable, Part
from rowmill.schema.rows import Rejected
from rowmill.similarity.contamination import Candidate, CoveredItems, Match
from rowmill.similarity.words import hash_words, split_words
from rowmill.stages.base import PartTask, StageContext, make_parts
from rowmill.stages.canonical_rows.benchmark_items import BenchmarkItems, ScannedBenchmark, load_items, make_index
from rowmill.stages.canonical_rows.rewrite_part import plan_removal, rewrite_parts
from rowmill.stages.canonical_rows.row_texts import (
    MAX_SHOWN_CHARS,
    SHOWN_ROWS,
    RowTexts,
    TextSource,
    shorten_text,
)
from rowmill.stages.kept_parts import part_folder
from rowmill.stages.part_files import write_table

VERSION = 1
"""Increase it when a row may match another item, or with another coverage."""

CONTAMINATION_FILE = "contamination"

CONTAMINATION_SCHEMA = pa.schema(
    [
        pa.field("place", pa.int64(), nullable=False),
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("benchmark", pa.string(), nullable=False),
        pa.field("item", pa.int64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("record", pa.int64(), nullable=False),
        pa.field("coverage", pa.float64(), nullable=False),
        pa.field("ngram", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("item_text", pa.string(), nullable=False),
    ]
)
"""A row of a part with its best item: `place` in the part, `item` in the benchmark, and both texts, cut."""


@dataclass(frozen=True, slots=True)
class ContaminationSearch:
    """The parts after decontamination, the rows that were found, by part, and what is shown of the benchmarks."""

    parts: list[Part]
    found: Sequence[dict[str, File]]
    rows: int
    fewest_items: int
    """Items in the benchmark file that has fewest."""
    tables: Mapping[str, DisplayTable]
    made_of: frozenset[str]


def remove_contaminated_rows(
    context: StageContext, made: list[Part], scanned: tuple[ScannedBenchmark, ...]
) -> ContaminationSearch | None:
    """Search all parts, and rewrite those with contaminated rows; None if the dataset names no benchmark."""
    options = context.dataset.filters.decontaminate
    if options is None:
        return None
    index = make_index(context, options, scanned)
    searched, _, _ = make_parts(context, search_part, [_plan_search(context, part, index, options) for part in made])
    parts = made
    if options.action == "reject":
        removals = [dict(_list_rejects(context, one)) for one in searched]
        planned = [plan_removal(context, part, removed) for part, removed in zip(made, removals, strict=True)]
        parts = rewrite_parts(context, made, planned)
    return ContaminationSearch(
        parts=parts,
        found=[one.files for one in searched],
        rows=sum(int(one.facts["rows"]) for one in searched),
        fewest_items=min(int(items) for _, _, _, items in index.facts["files"]),
        tables=_build_tables(context, index, searched),
        made_of=frozenset({index.fingerprint, *(one.fingerprint for one in searched)}),
    )


@dataclass(frozen=True, slots=True)
class _SearchTask:
    root: str
    folder: str
    fingerprint: str
    rows: File
    texts: TextSource
    index: tuple[tuple[str, File], ...]
    options: Decontaminate


def _plan_search(context: StageContext, part: Part, index: Part, options: Decontaminate) -> PartTask:
    texts = TextSource.of_dataset(context)
    decides = [index.fingerprint, options.coverage, *texts.identity]
    fingerprint = digest_json("contamination", VERSION, part.fingerprint, *decides)
    rows, files = part.files["rows"], tuple(sorted(index.files.items()))
    task = _SearchTask(context.store.root, context.folder, fingerprint, rows, texts, files, options)
    return PartTask(fingerprint, task, int(part.facts["kept"]), rows.bytes)


def search_part(task: _SearchTask) -> Part:
    """Find the rows of a part that have an item of a benchmark."""
    store = Store(task.root)
    rows = store.table(task.rows, ("row_id", *task.texts.columns))
    known = load_items(task.root, task.index, task.options.ngram)
    lines = list(_match_rows(known, task.texts.list_texts(rows), task.options.coverage))
    files: dict[str, File] = {}
    if lines:
        row_ids = rows.column("row_id").take(pa.array([line["place"] for line in lines])).to_pylist()
        table = pa.Table.from_pylist(
            [line | {"row_id": row_id} for line, row_id in zip(lines, row_ids, strict=True)],
            schema=CONTAMINATION_SCHEMA,
        )
        path = f"{part_folder(task.folder, task.fingerprint)}/contamination.arrow"
        files[CONTAMINATION_FILE] = write_table(store, path, table)
    return Part(task.fingerprint, files, {"rows": len(lines)})


def _match_rows(known: BenchmarkItems, texts: RowTexts, coverage: float) -> Iterator[dict[str, Any]]:
    covered = known.search.find_covered(hash_words(texts.texts), texts.rows, coverage)
    borders = np.append(np.flatnonzero(np.append(True, covered.rows[1:] != covered.rows[:-1])), len(covered.rows))
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        if begin == end:
            continue
        row = int(covered.rows[begin])
        of_row = texts.of_row(row)
        match = known.search.find_best_match(of_row, _list_candidates(known, covered, begin, end), coverage)
        if match is not None:
            yield _describe_match(known, row, of_row, match)


def _list_candidates(known: BenchmarkItems, covered: CoveredItems, begin: int, end: int) -> Iterator[Candidate]:
    for place in range(begin, end):
        item = int(covered.items[place])
        yield Candidate(item, known.texts_of(item), float(covered.coverage[place]))


def _describe_match(known: BenchmarkItems, row: int, texts: Sequence[str], match: Match) -> dict[str, Any]:
    item = known.describe(match.item)
    having = (text for text in texts if match.ngram in " ".join(split_words(text)))
    return {
        "place": row,
        "benchmark": item["benchmark"],
        "item": item["item"],
        "source": item["source"],
        "record": item["record"],
        "coverage": round(match.coverage, 9),
        "ngram": match.ngram[:MAX_SHOWN_CHARS],
        "text": shorten_text(next(having, "")),
        "item_text": shorten_text("\n".join(item["texts"])),
    }


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


def _build_tables(context: StageContext, index: Part, searched: Sequence[Part]) -> dict[str, DisplayTable]:
    """Tabulate what was removed beside what it matched, the highest coverage first, and the benchmarks' files."""
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
    files = [(*line, rows_by_file.get((line[0], line[1]), 0)) for line in index.facts["files"]]
    columns = ("row_id", "text", "benchmark", "item", "item_text", "coverage")
    tables = {"benchmarks": DisplayTable(("benchmark", "file", "records", "items", "rows_found"), tuple(files))}
    if shown:
        tables["contamination"] = DisplayTable(columns, tuple(tuple(line[name] for name in columns) for line in shown))
    return tables
