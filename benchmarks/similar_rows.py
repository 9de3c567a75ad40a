"""Filters that compare rows with other texts: 1 million short rows with near duplicates, 100,000 rows with benchmarks.

    python -m benchmarks.similar_rows [rows in thousands] [rows against items in thousands]

The words are those of the real conversations, as often as they stand there. One row in ten is a variant of an earlier
one with other words at its end; one in a hundred of the rows that are searched for items has one. Rows are made first;
the measured build finds them and runs the filter alone, with what it writes: the rows without those that went. Seconds
are wall clock with two workers, and processor seconds of the processes that were waited for; memory is the highest of
the calling process and of any worker.
"""

import json
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import corpus, measure

WORDS_OF_A_ROW, WORDS_OF_AN_ITEM = (25, 60), (15, 60)
ITEMS = 10_000
BUILD = """
import json, resource, sys, time
from pathlib import Path
from benchmarks.measure import ROOT
from rowmill.build import runner
from rowmill.build.steps import Project
from rowmill.core.storage import Store
from rowmill.recipe.recipe import parse_recipe
values, root = json.loads(sys.argv[1]), sys.argv[2]
project = Project(parse_recipe(values, name="bench", where="benchmark"), Store(root), ROOT)
begin = time.perf_counter()
reports = runner.build(project, only=("raw_dataset", "canonical_rows"))
made = reports[-1][1].manifest
own = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "seconds": round(time.perf_counter() - begin, 1),
    "caller_gb": round(own.ru_maxrss / 1e6, 2),
    "reasons": {reason: count for _, reason, count in made.ledger if reason}, "kept": made.facts["kept"],
}))
"""


def write_rows(path: Path, count: int, items: Sequence[str] = ()) -> None:
    """Write documents: new ones, variants of earlier ones, and some that have an item."""
    drawn, words = random.Random(0), corpus.words()
    earlier: list[list[str]] = []
    with path.open("w", encoding="utf-8") as sink:
        for number in range(count):
            if number % 10 == 9:
                row = drawn.choice(earlier)
                row = [*row[: len(row) - drawn.randint(0, 3)], drawn.choice(words)]
            else:
                row = drawn.choices(words, k=drawn.randint(*WORDS_OF_A_ROW))
                earlier.append(row)
            if items and number % 100 == 50:
                row = [*row[:10], drawn.choice(items), *row[10:]]
            sink.write(json.dumps({"text": " ".join(row)}, ensure_ascii=False) + "\n")


def write_items(path: Path) -> list[str]:
    """Write the items of a benchmark; return their texts."""
    drawn, words = random.Random(1), corpus.words()
    items = [" ".join(drawn.choices(words, k=drawn.randint(*WORDS_OF_AN_ITEM))) for _ in range(ITEMS)]
    path.write_text("".join(json.dumps({"question": one}) + "\n" for one in items), encoding="utf-8")
    return items


def run_filter(rows: Path, root: Path, filters: dict[str, Any]) -> dict[str, Any]:
    """Build rows without the filter, then with it; return what the second build took."""
    for chosen in ({}, filters):
        dataset = {"source": {"train_urls": [str(rows)]}, "format": {"kind": "text"}, "filters": chosen}
        values = {
            "tokenizer": str(corpus.TOKENIZER), "seq_len": 4096, "datasets": {"rows": dataset},
            "execution": {"workers": 2},
        }  # fmt: skip
        before = _count_child_seconds()
        done = subprocess.run(
            [sys.executable, "-c", BUILD, json.dumps(values), str(root)],
            cwd=measure.ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"cpu_s": round(_count_child_seconds() - before, 1)}


def main(thousands: int, searched_thousands: int) -> None:
    """Measure both filters."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", thousands * 1000)
        found = run_filter(folder / "rows.jsonl", folder / "near", {"near_duplicates": {}})
        measure.emit("near_duplicates", rows=thousands * 1000, **found, **_measure_workers())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        items = write_items(folder / "items.jsonl")
        write_rows(folder / "rows.jsonl", searched_thousands * 1000, items)
        benchmark = {"name": "bench", "urls": [str(folder / "items.jsonl")], "fields": ["question"]}
        found = run_filter(folder / "rows.jsonl", folder / "items", {"decontaminate": {"benchmarks": [benchmark]}})
        measure.emit("decontamination", rows=searched_thousands * 1000, items=ITEMS, **found)


def _count_child_seconds() -> float:
    """Return the processor seconds of all processes that the builds started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _measure_workers() -> dict[str, float]:
    """Return the highest memory of any process that the builds started."""
    return {"any_process_gb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6, 2)}


if __name__ == "__main__":
    asked = [int(one) for one in sys.argv[1:3]]
    main(*(asked + [1000, 100][len(asked) :]))
