"""Memory of the calling process in the steps that see a whole dataset: duplicates, tables, the order, lists of parts.

    python -m benchmarks.driver_memory duplicates 10000000 [folder]
    python -m benchmarks.driver_memory near_duplicates 10000000 [folder]
    python -m benchmarks.driver_memory table 10000000 [folder]
    python -m benchmarks.driver_memory grouped_table 10000000 [folder]
    python -m benchmarks.driver_memory series_table 10000000 [folder]
    python -m benchmarks.driver_memory lengths 100000000 [folder]
    python -m benchmarks.driver_memory order 100000000 [folder]
    python -m benchmarks.driver_memory manifest 100000000 [folder]

Rows are generated as finished parts of canonical rows, and sequences as the numbers that the order reads of them, so
that sizes can be tried which would take days to tokenise. Everything else is what a build does, with two workers. What
is measured is anonymous memory (`RssAnon`) over what the process held before the step; the folder wants 3 GB for 10⁸.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import corpus
from benchmarks.measure import emit
from benchmarks.scale import ProcessWatch
from rowmill.core.stage_names import CANONICAL_ROWS, TOKENIZED_EXAMPLES
from rowmill.core.storage import Store
from rowmill.executors import LocalPool, open_in_workers
from rowmill.kinds.tables.schema import Column, RecordSchema
from rowmill.kinds.tables.table_examples import make_table_examples
from rowmill.packing import rank_assignment
from rowmill.packing.mixture import schedule_sequences
from rowmill.parts.context import open_host_scratch
from rowmill.parts.functions import part_folder, write_table
from rowmill.recipe.recipe import Recipe, parse_recipe
from rowmill.schema.counts import CountSet
from rowmill.schema.example_counts import ExampleCounts
from rowmill.schema.ledger import KEPT, LEDGER_SCHEMA
from rowmill.schema.length_counts import LengthCounts
from rowmill.schema.manifest import File, Manifest, Part, read_manifest
from rowmill.schema.order_counts import OrderCounts
from rowmill.schema.row_counts import MessageCounts, RowCounts
from rowmill.schema.rows import REJECT_SCHEMA, make_row_schema
from rowmill.stages import truncation_stats
from rowmill.stages.base import StageContext
from rowmill.stages.canonical_rows import duplicate_rows, near_duplicate_rows
from rowmill.stages.training_splits import stage as training_splits
from rowmill.tokenization.stored_tokenizers import open_recipe_tokenizer, open_shared_encoder

WORKERS = 2
PART_ROWS = 200_000
NEAR_PART_ROWS = 20_000
"""Rows of a part where near duplicates are sought, which are named part by part."""
REPEATED = 0.01
"""Share of the rows of every tenth part that repeat a row of the first part."""
BYTES_OF_ROW = 2000
"""A conversation's, by which a manifest's parts are counted."""


def make_context(folder: Path, stage: tuple[str, ...]) -> StageContext:
    """Return the context of a stage of a small recipe, with an empty store."""
    recipe = _parse(folder)
    dataset = stage[0] if len(stage) > 1 else None
    return StageContext(
        Store(str(folder)), folder, (recipe.name, *stage), dataset, {}, LocalPool(WORKERS), recipe=recipe
    )


def _parse(folder: Path, kind: str = "text") -> Recipe:
    source = {"source": {"train_urls": [str(folder / "rows.jsonl")]}, "format": {"kind": kind}}
    near = {"filters": {"near_duplicates": {"min_words": 1, "ngram": 2}}}
    values: dict[str, Any] = {
        "tokenizer": "tokenizer",
        "seq_len": 4096,
        "datasets": {"a": source | near, "b": source, "c": source},
        "mixture": {"batch_size": 512},
        "partitions": {"world_size": 8},
    }
    return parse_recipe(values, name="bench", where="benchmark")


# ── Rows ─────────────────────────────────────────────────────────────────────────────────────────────


def make_rows(context: StageContext, count: int, part_rows: int = PART_ROWS) -> list[Part]:
    """Write parts of canonical rows, of a few words each."""
    parts: list[Part] = []
    for number in range(-(-count // part_rows)):
        rows = min(part_rows, count - number * part_rows)
        hashes = np.random.default_rng(number).bytes(16 * rows)
        if number and number % 10 == 0:
            hashes = np.random.default_rng(0).bytes(16 * int(REPEATED * rows)) + hashes[16 * int(REPEATED * rows) :]
        parts.append(_write_part(context, number, rows, hashes))
    return parts


def _write_part(context: StageContext, number: int, rows: int, hashes: bytes) -> Part:
    row_ids = pa.array([f"{number:016x}:{k}" for k in range(rows)])
    texts = pa.array(_make_texts(number, rows))
    given = {
        "row_id": row_ids,
        "content_hash": pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), rows, [None, pa.py_buffer(hashes)]),
        "dataset": pa.repeat("a", rows),
        "kind": pa.repeat("text", rows),
        "split": pa.repeat("train", rows),
        "text": texts,
        "schema": pa.repeat("text", rows),
    }
    schema = make_row_schema("text")
    columns = [given[f.name] if f.name in given else _fill_column(f, rows) for f in schema]
    at, fingerprint = part_folder(context.folder, f"{number:032x}"), f"{number:032x}"
    ledger = [row_ids, *(pa.repeat(value, rows) for value in ("canonical_rows", KEPT, ""))]
    files = {
        "rows": write_table(context.store, f"{at}/rows.arrow", pa.table(columns, schema=schema)),
        "rejects": write_table(context.store, f"{at}/rejects.arrow", REJECT_SCHEMA.empty_table()),
        "ledger": write_table(context.store, f"{at}/ledger.arrow", pa.table(ledger, schema=LEDGER_SCHEMA)),
    }
    counted = CountSet.of(RowCounts(kept=rows, splits={"train": rows}), MessageCounts())
    return Part(fingerprint, files, counts=counted.to_json())


def _make_texts(number: int, rows: int) -> list[str]:
    """Return texts of which every tenth resembles others of its part."""
    others = np.random.default_rng(10**9 + number).integers(0, 10**9, (rows, 11)).tolist()
    return [
        " ".join(map(str, own))
        if k % 10
        else f"{number} {k} some {k % 977} words {k % 1009} of {k % 1013} a {k % 1019} row"
        for k, own in enumerate(others)
    ]


def _fill_column(field: pa.Field, rows: int) -> pa.Array:
    """Return a column of nulls, or of the empty values of its type."""
    if field.nullable:
        return pa.nulls(rows, field.type)
    if pa.types.is_list(field.type):
        return pa.ListArray.from_arrays(np.zeros(rows + 1, np.int32), pa.array([], field.type.value_type))
    return pa.repeat(pa.scalar(0).cast(field.type), rows)


def measure_duplicates(folder: Path, count: int) -> dict[str, Any]:
    """Find and remove the duplicates among so many rows."""
    context = make_context(folder, ("a", "canonical_rows"))
    made = make_rows(context, count)
    found = measure_step(lambda: duplicate_rows.drop_duplicates(context, made))
    kept = sum(part.get_counts(RowCounts).kept for part in found.pop("result"))
    return {"rows": count, "parts": len(made), "duplicates": count - kept, **found}


def measure_near_duplicates(folder: Path, count: int) -> dict[str, Any]:
    """Find and remove the near duplicates among so many rows."""
    context = make_context(folder, ("a", "canonical_rows"))
    made = make_rows(context, count, NEAR_PART_ROWS)
    found = measure_step(lambda: near_duplicate_rows.remove_near_duplicates(context, made))
    return {"rows": count, "parts": len(made), "near_duplicates": found.pop("result").rows["near_duplicates"], **found}


# ── Tables ───────────────────────────────────────────────────────────────────────────────────────────

ROWS_OF_A_GROUP = 20


def measure_table(folder: Path, count: int) -> dict[str, Any]:
    """Make the examples of a table of so many rows without groups."""
    return _measure_table_examples(folder, count, {})


def measure_grouped_table(folder: Path, count: int) -> dict[str, Any]:
    """Make the examples of a table of so many rows, some twenty of each group, in any part."""
    return _measure_table_examples(folder, count, {"data": {"group_training_examples_by": "group"}})


def measure_series_table(folder: Path, count: int) -> dict[str, Any]:
    """Make the examples of series, of some twenty rows each."""
    form = {"data": {"group_training_examples_by": "group"}, "time_series": {"is_timeseries": True}}
    return _measure_table_examples(folder, count, form)


def _measure_table_examples(folder: Path, count: int, form: dict[str, Any]) -> dict[str, Any]:
    context = make_context(folder, ("a", "canonical_rows"))
    parts = [
        _write_table_part(context, first, min(PART_ROWS, count - first), count) for first in range(0, count, PART_ROWS)
    ]
    schema = RecordSchema((Column("group", "string"), Column("value", "integer")))
    details = {"records": {"schema": schema.to_json(), "order": None}}
    rows = Manifest(context.key, CANONICAL_ROWS, "f", "c", {}, tuple(parts), {}, version="v", details=details)
    values = {"a": {"source": {"train_urls": [str(folder / "rows.csv")]}, "format": {"kind": "records", **form}}}
    recipe = parse_recipe(
        {"tokenizer": str(corpus.TOKENIZER), "seq_len": 4096, "datasets": values, "partitions": {"world_size": 8}},
        name="bench",
        where="benchmark",
    )
    key = ("bench", "a", TOKENIZED_EXAMPLES)
    context = replace(context, recipe=recipe, key=key, inputs={rows.key: rows})
    loaded, path = open_recipe_tokenizer(context)
    open_in_workers(open_shared_encoder, context.store.root, path)
    found = measure_step(lambda: make_table_examples(context, loaded, path))
    made = found.pop("result").counts.get(ExampleCounts)
    unaccounted = made.count_unaccounted()
    return {"rows": count, "kept": made.kept, "examples": made.examples, "unaccounted": unaccounted, **found}


def _write_table_part(context: StageContext, first: int, rows: int, count: int) -> Part:
    groups = np.random.default_rng(first).integers(0, max(count // ROWS_OF_A_GROUP, 1), rows).tolist()
    given = {
        "row_id": pa.array([f"{first:016x}:{k}" for k in range(rows)]),
        "content_hash": pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(16), rows, [None, pa.py_buffer(bytes(16 * rows))]
        ),
        "dataset": pa.repeat("a", rows),
        "kind": pa.repeat("record", rows),
        "split": pa.repeat("train", rows),
        "group_key": pa.array([f'"G{group:08d}"' for group in groups]),
        "record": pa.array([f'{{"group":"G{group:08d}","value":{k % 977}}}' for k, group in enumerate(groups)]),
        "schema": pa.repeat("record", rows),
    }
    schema = make_row_schema("record")
    columns = [given[f.name] if f.name in given else _fill_column(f, rows) for f in schema]
    fingerprint = f"{first:032x}"
    path = f"{part_folder(context.folder, fingerprint)}/rows.arrow"
    file = write_table(context.store, path, pa.table(columns, schema=schema))
    return Part(fingerprint, {"rows": file}, counts=CountSet.of(RowCounts(kept=rows)).to_json())


# ── Lengths ──────────────────────────────────────────────────────────────────────────────────────────


def measure_lengths(folder: Path, count: int) -> dict[str, Any]:
    """Measure the lengths of so many examples of chats, and what other limits would change."""
    context = replace(make_context(folder, ("a", "truncation_stats")), recipe=_parse(folder, "chat"))
    parts = tuple(_write_lengths(context, first, min(PART_ROWS, count - first)) for first in range(0, count, PART_ROWS))
    key = (context.recipe.name, "a", TOKENIZED_EXAMPLES)
    examples = Manifest(key, TOKENIZED_EXAMPLES, "f", "c", {}, parts, {})
    found = measure_step(lambda: truncation_stats.make_truncation_stats(replace(context, inputs={key: examples})))
    return {"examples": found.pop("result").counts.get(LengthCounts).examples, "parts": len(parts), **found}


def _write_lengths(context: StageContext, first: int, rows: int) -> Part:
    random = np.random.default_rng(first)
    tokens = np.minimum(random.lognormal(5.5, 1.2, rows).astype(np.int32) + 8, 4096)
    nothing = np.zeros(rows, np.int32)
    given = {"split": pa.repeat("train", rows), "domain": pa.nulls(rows, pa.string())}
    given |= dict.fromkeys(("original_tokens", "tokens"), tokens) | {"trained_tokens": tokens // 2}
    path = f"{part_folder(context.folder, f'{first:032x}')}/examples.arrow"
    columns = {name: given.get(name, nothing) for name in truncation_stats.COLUMNS}
    return Part(f"{first:032x}", {"examples": write_table(context.store, path, pa.table(columns))}, {})


# ── Sequences ────────────────────────────────────────────────────────────────────────────────────────


def measure_order(folder: Path, count: int) -> dict[str, Any]:
    """Order so many sequences of three datasets, one epoch, and count what became of them."""
    context = make_context(folder, ("training_splits",))
    sizes = {"a": count * 6 // 10, "b": count * 3 // 10, "c": count // 10}
    with open_host_scratch(context) as scratch:
        scratch.require({"sequences.bin": lambda path: _write_sequences(Path(path), sum(sizes.values()))})
        sequences = training_splits.SequenceTable(sum(sizes.values()), None, scratch)
        found = measure_step(lambda: _order_sequences(context, sizes, sequences))
    places = found.pop("result")
    return {"sequences": count, "places": places, **found}


def _order_sequences(context: StageContext, sizes: dict[str, int], sequences: training_splits.SequenceTable) -> int:
    mixture = context.recipe.mixture
    mixed = schedule_sequences(mixture, sizes, 0)
    steps = rank_assignment.plan_steps(
        context.recipe.partitions, mixed.epoch_offsets, batch_sizes=mixture.batch_sizes, steps=None
    )
    source = training_splits.OrderSource(mixed, steps, sequences, sizes, 8, "trained_tokens")
    written = training_splits.write_order(context, source, ("bench", sizes))
    states = training_splits.find_sequence_states(context.store, source, written)
    training_splits.tabulate_schedule(source, written, *states)
    return written.counts.get(OrderCounts).places


def _write_sequences(path: Path, count: int) -> None:
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        for begin in range(0, count, 1 << 20):
            some = np.zeros(min(1 << 20, count - begin), training_splits.SEQUENCE_DTYPE)
            some["tokens"] = random.integers(3000, 4097, len(some))
            some["trained_tokens"] = some["tokens"] // 3
            some["segments"] = 9
            some["longest_segment"] = 900
            file.write(some.tobytes())


# ── Manifests ────────────────────────────────────────────────────────────────────────────────────────


def measure_manifest(folder: Path, count: int) -> dict[str, Any]:
    """Write and read the manifest of a stage with the parts that so many rows have at 16 MiB."""
    context = make_context(folder, ("a", "canonical_rows"))
    parts = max(1, count * BYTES_OF_ROW >> 24)

    def make(number: int) -> Part:
        name = f"{number:032x}"
        at = part_folder(context.folder, name)
        files = {kind: File(f"{at}/{kind}.parquet", 1 << 22, name, 8000) for kind in ("rows", "rejects", "ledger")}
        some = {"a": 1, "b": 2}
        counted = CountSet.of(
            RowCounts(kept=8000, splits={"train": 7900, "validation": 100}, reasons=some, schemas=some),
            MessageCounts(messages_by_role=some, notes=some, rows_by_unknown_role=some),
        )
        return Part(name, files, counts=counted.to_json())

    def write_and_read() -> int:
        made = Manifest(context.key, "canonical_rows", "f", "c", {}, tuple(map(make, range(parts))), {})
        context.store.write_sealed_list(["manifest.json"], made)
        loaded = read_manifest(context.store, "manifest.json")
        return 0 if loaded is None else len(loaded.parts)

    found = measure_step(write_and_read)
    return {"rows": count, "parts": found.pop("result"), **found}


# ── Measuring ────────────────────────────────────────────────────────────────────────────────────────


def measure_step(step: Callable[[], Any]) -> dict[str, Any]:
    """Run a step; return its result, seconds, and what this process and the largest worker held at most, in GB."""
    watch = ProcessWatch()
    watch.start()
    time.sleep(0.5)
    before, begin, worked = watch.own, time.perf_counter(), time.process_time()
    result = step()
    seconds, own = time.perf_counter() - begin, time.process_time() - worked
    watch.stopped.set()
    return {
        "result": result,
        "seconds": round(seconds, 1),
        "own_cpu_s": round(own, 1),
        "caller_gb": round(watch.own / 1e9, 3),
        "before_gb": round(before / 1e9, 3),
    }


STEPS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "duplicates": measure_duplicates,
    "near_duplicates": measure_near_duplicates,
    "table": measure_table,
    "grouped_table": measure_grouped_table,
    "series_table": measure_series_table,
    "lengths": measure_lengths,
    "order": measure_order,
    "manifest": measure_manifest,
}


def main(steps: Iterator[str], count: int, at: str | None) -> None:
    """Measure some steps, each in an empty folder."""
    for step in steps:
        folder = Path(tempfile.mkdtemp(dir=at))
        try:
            emit(f"driver_memory_{step}", **STEPS[step](folder, count))
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main(iter([sys.argv[1]]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
