"""Records: planning a million of them in every mode, what encoding costs a token, and what memory a build takes.

    python -m benchmarks.records [rows]
    python -m benchmarks.records retail [rows]

Processor seconds are told beside elapsed ones: both are measured in one process and one thread, so they are what a
core needs on a machine that does nothing else. The peer of encoding is our own text format on the same characters,
ten records to a document: what a token of a record costs more is the price of encoding each record alone.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import corpus, measure
from benchmarks.scale import ProcessWatch
from rowmill.build import prepare, runner
from rowmill.build.steps import Project
from rowmill.core import permutation
from rowmill.core.storage import Store
from rowmill.kinds.tables.partition_plan import (
    BudgetSampler,
    ExampleLimits,
    PlannedSplit,
    SplitRecords,
    cut_examples,
    order_records,
)
from rowmill.recipe.recipe import parse_recipe

LENGTHS = 1_000_000
RUNS = 3
PER_DOCUMENT = 10


def shuffled(number: int, count: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return a pass's order as a build would draw it."""
    return permutation.make_feistel(count, permutation.hash_labels(0, "assembly", "bench", "train", number))(
        np.arange(count)
    )


def assembly() -> None:
    """Plan a million records in each mode, with the caps that matter."""
    random = np.random.default_rng(0)
    tokens = random.integers(20, 200, LENGTHS).astype(np.int64)
    borders = np.sort(random.choice(np.arange(1, LENGTHS), 20_000, replace=False))
    rows, starts = np.arange(LENGTHS), np.concatenate(([0], borders, [LENGTHS])).astype(np.int64)
    of = SplitRecords("train", rows, tokens, starts, np.arange(len(starts) - 1))
    alone = SplitRecords("train", rows, tokens, np.arange(LENGTHS + 1), np.full(LENGTHS, -1))

    def draw(room: ExampleLimits) -> BudgetSampler:
        span = room.record_room - room.min_budget_tokens + 1

        def of_series(number: int, group: int) -> Callable[[int], int]:
            # As `partition_plan.py` draws.
            key = permutation.make_label_hasher(0, "budget", "bench", "train", number, group)
            return lambda ordinal: room.min_budget_tokens + (key(ordinal) * span >> 64)

        return of_series

    for cap in (1, 10, None):
        room, wide = ExampleLimits(4096, 40, cap), ExampleLimits(1 << 20, 40, cap)
        ways: dict[str, Callable[[], PlannedSplit]] = {
            "tabular": lambda room=room: cut_examples(
                alone, order_records(alone, None, shuffled, is_series=False), room, "tabular"
            ),
            "grouped": lambda wide=wide: cut_examples(
                of, order_records(of, None, shuffled, is_series=False), wide, "grouped"
            ),
            "sequential": lambda room=room: cut_examples(
                of, order_records(of, None, shuffled, is_series=True), room, "sequential", draw(room)
            ),
        }
        for mode, way in ways.items():
            made, taken, worked = timed(way)
            measure.emit(
                "record_assembly", mode=mode, cap=cap, records=LENGTHS, examples=len(made.passes), seconds=taken,
                cpu_s=worked,
            )  # fmt: skip


def timed(way: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the last result, and the median elapsed and processor seconds of some runs."""
    taken: list[float] = []
    worked: list[float] = []
    made: Any = None
    for _ in range(RUNS):
        begin, began = time.perf_counter(), time.process_time()
        made = way()
        taken.append(time.perf_counter() - begin)
        worked.append(time.process_time() - began)
    return made, round(statistics.median(taken), 3), round(statistics.median(worked), 3)


def write_table(folder: Path, rows: int) -> tuple[Path, Path]:
    """Write a table of twelve columns as CSV, and its records ten to a document as JSON Lines."""
    random = np.random.default_rng(1)
    names = ["station", "time", *(f"reading_{i}" for i in range(8)), "quality", "note"]
    values = np.round(random.normal(20, 8, (rows, 8)), 2)
    table, documents = folder / "table.csv", folder / "documents.jsonl"
    held: list[str] = []
    with table.open("w") as cells, documents.open("w") as texts:
        cells.write(",".join(names) + "\n")
        for i in range(rows):
            day, hour = divmod(i, 24)
            row = [f"S{i % 97:03d}", f"2024-{1 + day // 28 % 12:02d}-{1 + day % 28:02d}T{hour:02d}:00:00Z"]
            row += [f"{value:.2f}" for value in values[i].tolist()] + ["good" if i % 7 else "poor", f"batch {i // 500}"]
            cells.write(",".join(row) + "\n")
            held.append(json.dumps(dict(zip(names, row, strict=True)), separators=(",", ":")))
            if len(held) == PER_DOCUMENT:
                texts.write(json.dumps({"text": "\n".join(held)}) + "\n")
                held.clear()
    return table, documents


def encoding(folder: Path, rows: int) -> None:
    """Tokenize a table and the same characters as documents; report what a million tokens of each cost."""
    table, documents = write_table(folder, rows)
    costs: dict[str, float] = {}
    for name, source, form in (
        ("text", documents, {"kind": "text"}),
        ("records", table, {"kind": "records", "data": {"max_sequences_per_example": 10}}),
    ):
        root = folder / name
        one = project(source, form, root)
        runner.build(one, only=measure.TO_SHARDS[:3])
        worked: list[float] = []
        tokens = 0
        for _ in range(RUNS):
            measure.fresh(root)
            runner.build(one, only=measure.TO_SHARDS[:2])
            began = time.process_time()
            [(_, report, _)] = runner.build(one, only=measure.TO_SHARDS[2:3])
            worked.append(time.process_time() - began)
            tokens = int(report.manifest.facts["tokens"])
        costs[name] = statistics.median(worked) / tokens * 1e6
        measure.emit(
            "record_encoding", format=name, rows=rows, tokens=tokens, cpu_s_per_million_tokens=round(costs[name], 3)
        )
    measure.emit("record_encoding_over_text", times=round(costs["records"] / costs["text"], 2), asked=1.5)


def memory(folder: Path, rows: int) -> None:
    """Build tables of growing size to shards; flat means that a worker of the largest holds what one of the first does.

    The plan is made in the calling process, which holds some integers of every record.
    """
    for times in (2, 4, 8):
        own = folder / f"memory-{times}"
        own.mkdir()
        table, _ = write_table(own, times * rows)
        one = project(table, {"kind": "records", "data": {"max_sequences_per_example": 10}}, own / "store", workers=2)
        watch = ProcessWatch()
        watch.start()
        runner.build(one, only=measure.TO_SHARDS)
        watch.stopped.set()
        watch.join()
        prepare.close_workers()
        measure.emit(
            "record_memory",
            rows=times * rows,
            input_mb=round(table.stat().st_size / 1e6, 1),
            worker_peak_gb=round(max(watch.samples) / 1e9, 3),
            main_peak_gb=round(watch.own / 1e9, 3),
        )


RETAIL_ROWS = 541_909
RETAIL: dict[str, dict[str, Any]] = {
    "tabular": {},
    "by InvoiceNo": {"data": {"group_training_examples_by": "InvoiceNo"}, "assembly": {"on_overflow": "split"}},
    "by CustomerID": {"data": {"group_training_examples_by": "CustomerID"}, "assembly": {"on_overflow": "split"}},
    "series of CustomerID": {
        "data": {"group_training_examples_by": "CustomerID", "order_training_examples_by": "InvoiceDate"},
        "time_series": {"is_timeseries": True, "timestamp_format": "%m/%d/%Y"},
    },
}
"""The modes in which the table of a shop is built."""


def write_retail(path: Path, rows: int) -> None:
    """Write the invoices of a shop: eight columns in the shape of UCI's Online Retail, a quarter without a customer."""
    random = np.random.default_rng(0)
    words = ("WHITE", "RED", "RETRO", "WOODEN", "METAL", "HANGING", "GLASS", "SET OF 6")
    things = ("HEART T-LIGHT HOLDER", "LANTERN", "COAT HANGER", "UNION JACK HOT WATER BOTTLE", "CUTLERY, CHILDREN")
    stock = [f"{words[i % 8]} {words[i // 8 % 8]} {things[i % 5]} {i}" for i in range(4_000)]
    prices = np.round(random.gamma(2, 2, len(stock)), 2)
    invoices = np.cumsum(random.random(rows) < 1 / 21)
    items, counts = random.integers(0, len(stock), rows), random.geometric(0.1, rows)
    chosen = random.integers(12_346, 18_288, int(invoices[-1]) + 1)
    is_known = random.random(len(chosen)) < 0.75
    with path.open("w", encoding="utf-8") as table:
        table.write("InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country\n")
        for invoice, item, count in zip(invoices.tolist(), items.tolist(), counts.tolist(), strict=True):
            minute = invoice * 15
            date = f"{1 + minute // 40_320 % 12}/{1 + minute // 1_440 % 28}/2011 {minute // 60 % 24}:{minute % 60:02d}"
            customer = f"{chosen[invoice]}.0" if is_known[invoice] else ""
            table.write(
                f'{536_365 + invoice},{10_000 + item},"{stock[item]}",{count},{date},{prices[item]},{customer},'
                f"{'United Kingdom' if chosen[invoice] % 10 else 'France'}\n"
            )


def retail(folder: Path, rows: int) -> None:
    """Build a shop's table to shards in each mode; report the processor time of each stage, and of all per row."""
    source = folder / "retail.csv"
    write_retail(source, rows)
    for mode, options in RETAIL.items():
        root = folder / mode.replace(" ", "_")
        gates = {name: {"severity": "warn"} for name in ("rejects", "group_size", "near_duplicate", "dropped_share")}
        one = project(source, {"kind": "records", **options}, root, gates=gates)
        open_tokenizer(root)
        spent: dict[str, float] = {}
        for stage in measure.TO_SHARDS:
            began = time.process_time()
            runner.build(one, only=[stage])
            spent[stage] = round(time.process_time() - began, 2)
        total = sum(spent.values())
        measure.emit(
            "record_stages", mode=mode, rows=rows, cpu_s=spent, total_cpu_s=round(total, 1),
            rows_per_s={stage: round(rows / max(seconds, 0.01)) for stage, seconds in spent.items()},
            us_per_row=round(total / rows * 1e6, 1),
        )  # fmt: skip


def open_tokenizer(root: Path) -> None:
    """Import and open what the first build in a store does, so that no stage is charged for it."""
    with tempfile.TemporaryDirectory() as name:
        table, _ = write_table(Path(name), 20)
        runner.build(project(table, {"kind": "records"}, root, name="warm_up"), only=measure.TO_SHARDS)


def project(
    source: Path,
    form: dict[str, Any],
    root: Path,
    *,
    workers: int = 1,
    gates: dict[str, Any] | None = None,
    name: str = "bench",
) -> Project:
    """Return a project of one dataset."""
    dataset = {"source": {"train_urls": [str(source)]}, "format": form, "splits": {"validation": 0, "test": 0}}
    values = {
        "tokenizer": str(corpus.TOKENIZER),
        "seq_len": 4096,
        "datasets": {"rows": dataset},
        "execution": {"workers": workers},
        "gates": gates or {},
    }
    return Project(parse_recipe(values, name=name, where="benchmark"), Store(str(root)), measure.ROOT)


def main(rows: int) -> None:
    """Run all."""
    assembly()
    with tempfile.TemporaryDirectory() as name:
        encoding(Path(name), rows)
        memory(Path(name), rows)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["retail", *given]:
            with tempfile.TemporaryDirectory() as own:
                retail(Path(own), int(given[0]) if given else RETAIL_ROWS)
        case given:
            main(int(given[0]) if given else 50_000)
