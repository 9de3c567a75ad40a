"""What every benchmark shares: a recipe over the corpus, timed runs, one JSON line with date, machine and versions."""

import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "pipelines"), str(ROOT / "assets")]

from benchmarks import corpus  # noqa: E402  (the path must be set first)
from rowmill.build import runner  # noqa: E402
from rowmill.build.steps import Project  # noqa: E402
from rowmill.core.storage import Store  # noqa: E402
from rowmill.recipe.recipe import parse_recipe  # noqa: E402
from rowmill.stages import catalog  # noqa: E402
from rowmill.stages.packed_shards import stage as packed_shards  # noqa: E402

RUNS = 5
TO_SHARDS = catalog.list_stages_up_to(packed_shards.STAGE)
LIBRARIES = ("fastokens", "gigatoken", "minijinja", "tokenizers", "transformers", "pyarrow", "polars", "numpy")


def project(rows: Path, root: Path, *, workers: int) -> Project:
    """Return a project that packs the corpus with the Qwen3 tokenizer and its stock template."""
    values = {
        "tokenizer": str(corpus.TOKENIZER),
        "seq_len": 4096,
        "datasets": {
            "chats": {
                "source": {"train_urls": [str(rows)]},
                "format": {"kind": "chat"},
                "template": {"chat_template": {"file": str(corpus.TEMPLATE)}},
                "splits": {"validation": 0},
            }
        },
        "execution": {"workers": workers},
    }
    return Project(parse_recipe(values, name="bench", where="benchmark"), Store(str(root)), ROOT)


def build_shards(one: Project) -> list[Any]:
    """Build from JSON Lines to packed shards, every finding judged; return the reports."""
    return [report for _, report, _ in runner.build(one, only=TO_SHARDS)]


def fresh(root: Path) -> None:
    """Empty a storage root but for the opened tokenizer, which every build but the very first finds there."""
    for path in root.iterdir() if root.is_dir() else ():
        if path.name != "tokenizers":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def timed(run: Callable[[], float], *, runs: int = RUNS) -> dict[str, Any]:
    """Call `run`, which returns seconds, several times; return the median and all of them."""
    seconds = [run() for _ in range(runs)]
    return {"median_s": round(statistics.median(seconds), 3), "runs_s": [round(s, 3) for s in seconds]}


def emit(name: str, **values: Any) -> None:
    """Print one JSON line, and keep it in `benchmarks/results.jsonl`."""
    machine = {"cpu": platform.machine(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    stamp = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "versions": {n: version(n) for n in LIBRARIES}}
    line = json.dumps({"benchmark": name, **values, **stamp})
    print(line, flush=True)
    with (ROOT / "benchmarks" / "results.jsonl").open("a", encoding="utf-8") as sink:
        sink.write(line + "\n")
