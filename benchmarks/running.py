"""What running costs: a code location of 20 recipes × 5 datasets, a night in which nothing changed, a report's size.

Wall and processor seconds both: a busy machine stretches the first, and Dagster waits for the disk at each of the
thousand commits of a night; with TMPDIR on a disk in memory that wait is left out.

    python -m benchmarks.running
"""

import contextlib
import io
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import dagster as dg
import yaml

from benchmarks.measure import ROOT, emit
from rowmill.cli.ui import prepare_home
from rowmill.reports import report_page

RECIPES, DATASETS, RANKS, NIGHTS = 20, 5, 8, 5
LOAD = """
import json, time
began, worked = time.perf_counter(), time.process_time()
from dagster_rowmill import definitions
imported, imported_cpu = time.perf_counter(), time.process_time()
loaded = definitions.defs()
loaded.get_repository_def().load_all_definitions()
print(json.dumps({
    "assets": len(loaded.resolve_all_asset_keys()),
    "import_s": round(imported - began, 3), "import_cpu_s": round(imported_cpu - worked, 3),
    "load_s": round(time.perf_counter() - imported, 3), "load_cpu_s": round(time.process_time() - imported_cpu, 3),
}))
"""


def location() -> None:
    """Load a location of many recipes in a fresh process, as Dagster's code server does."""
    with tempfile.TemporaryDirectory() as folder:
        configs = Path(folder) / "configs"
        configs.mkdir()
        for number in range(RECIPES):
            (configs / f"r{number}.yaml").write_text(yaml.safe_dump(_recipe()), encoding="utf-8")
        environment = {"ROWMILL_CONFIGS": str(configs), "ROWMILL_STORE": folder, "PATH": "/usr/bin"}
        runs: list[dict[str, float]] = []
        for _ in range(3):
            said = subprocess.run(
                [sys.executable, "-c", LOAD], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
            )
            runs.append(yaml.safe_load(said.stdout))
    medians = {name: statistics.median(one[name] for one in runs) for name in runs[0]}
    emit("code_location", recipes=RECIPES, datasets_each=DATASETS, **medians)


def _recipe() -> dict[str, Any]:
    dataset = {"source": {"train_urls": ["data/rows.jsonl"]}, "format": {"kind": "chat"}}
    return {
        "tokenizer": str(ROOT / "configs" / "demo" / "tokenizer"),
        "seq_len": 512,
        "datasets": {f"d{number}": dataset for number in range(DATASETS)},
        "partitions": {"world_size": RANKS},
    }


def quiet_night() -> None:
    """Run the demo's three datasets with eight ranks again and again; nothing changed since the first time."""
    from dagster_rowmill.materialize import materialize_recipe

    with tempfile.TemporaryDirectory() as folder, _instance(folder) as instance:
        recipe = Path(folder) / "configs" / "demo" / "demo.yaml"
        shutil.copytree(ROOT / "configs" / "demo", recipe.parent)
        values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        values["partitions"]["world_size"] = RANKS
        recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
        wall: list[float] = []
        cpu: list[float] = []
        history: list[int] = []
        for _ in range(1 + NIGHTS):
            began, worked = time.perf_counter(), time.process_time()
            with contextlib.redirect_stdout(io.StringIO()):
                result = materialize_recipe(recipe, f"{folder}/.rowmill", instance)
            assert result.success
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - worked)
            history.append(sum(path.stat().st_size for path in Path(folder, "home").rglob("*") if path.is_file()))
        report = Path(folder, ".rowmill", report_page.report_path("demo")).stat().st_size
    emit(
        "quiet_night",
        datasets=3,
        ranks=RANKS,
        first_s=round(wall[0], 2),
        median_s=round(statistics.median(wall[1:]), 2),
        fastest_s=round(min(wall[1:]), 2),
        median_cpu_s=round(statistics.median(cpu[1:]), 2),
        report_bytes=report,
        history_bytes_a_night=(history[-1] - history[0]) // NIGHTS,
    )


@contextlib.contextmanager
def _instance(folder: str) -> Generator[dg.DagsterInstance, None, None]:
    """Open Dagster's instance as `rowmill ui` does, with the settings that we ship."""
    os.environ["DAGSTER_HOME"] = f"{folder}/home"
    prepare_home(Path(folder))
    with dg.DagsterInstance.get() as instance:
        yield instance


def main() -> None:
    """Measure both."""
    location()
    quiet_night()


if __name__ == "__main__":
    main()
