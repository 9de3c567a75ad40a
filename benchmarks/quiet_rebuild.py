"""What a build costs in which nothing changed: whole processes of `rowmill build` over many small datasets.

    python -m benchmarks.quiet_rebuild [datasets] [folder of another checkout, to measure it beside this one]
    python -m benchmarks.quiet_rebuild [datasets] s3

Processor seconds are those of the process and all it started. Each checkout builds a store of its own first. With `s3`
the store is a local server that takes 20 ms for each request.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measure import ROOT, RUNS, emit

ROWS = 200
BUILD = "import sys; from rowmill.cli.main import run; sys.argv[1:] = ['build', 'quiet']; run()"


def write_project(folder: Path, datasets: int) -> Path:
    """Write a recipe of chats and pairs, one file of JSON Lines each, mixed for two ranks; return its folder."""
    (folder / "configs").mkdir(parents=True)
    (folder / "data").mkdir()
    for number in range(datasets):
        lines = "".join(f"{json.dumps(row)}\n" for row in _rows(number))
        (folder / "data" / f"d{number}.jsonl").write_text(lines, encoding="utf-8")
    recipe = {
        "tokenizer": str(ROOT / "configs" / "demo" / "tokenizer"),
        "seq_len": 128,
        "defaults": {"splits": {"validation": 0.1}},
        "datasets": {f"d{number}": _dataset(number) for number in range(datasets)},
        "mixture": {"batch_size": 4},
        "partitions": {"world_size": 2},
        # Few short rows: shares of next to nothing say nothing here.
        "gates": {"split_share": {"at_most": 1}, "rank_balance": {"at_most": 1}, "fill": {"at_least": 0}},
    }
    (folder / "configs" / "quiet.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return folder


def _dataset(number: int) -> dict[str, Any]:
    pairs = {"kind": "supervised", "input_field": "prompt", "output_field": "answer"}
    source = {"train_urls": [f"data/d{number}.jsonl"]}
    return {"source": source, "format": pairs if number % 3 == 2 else {"kind": "chat"}}


def _rows(number: int) -> Iterator[dict[str, Any]]:
    for i in range(ROWS):
        question, answer = f"[{number}] What is {i} plus {i % 7}?", f"Set {number}: {i} plus {i % 7} is {i + i % 7}."
        if number % 3 == 2:
            yield {"prompt": question, "answer": answer}
        else:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            yield {"messages": turns}


def run_build(checkout: Path, project: Path, **variables: str) -> tuple[float, float]:
    """Build a project by one checkout's code in a process of its own; return its wall and processor seconds."""
    sources = f"{checkout / 'pipelines'}:{checkout / 'assets'}"
    environment = os.environ | {"PYTHONPATH": sources, "HF_HUB_OFFLINE": "1"} | variables
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", BUILD], cwd=project, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"the build ended with status {process.returncode}"
    return time.perf_counter() - began, used.ru_utime + used.ru_stime


def main(datasets: int, other: Path | None = None) -> None:
    """Measure this checkout, in turns with another one if it is given."""
    checkouts = {"": ROOT, **({} if other is None else {"other_": other.resolve()})}
    with tempfile.TemporaryDirectory() as folder:
        projects = {name: write_project(Path(folder) / f"p{name}", datasets) for name in checkouts}
        for name, checkout in checkouts.items():
            run_build(checkout, projects[name])
        runs = [(name, *run_build(checkouts[name], projects[name])) for _ in range(RUNS) for name in checkouts]
    medians: dict[str, float] = {}
    for name in checkouts:
        medians[f"{name}median_s"] = round(statistics.median(wall for of, wall, _ in runs if of == name), 2)
        medians[f"{name}median_cpu_s"] = round(statistics.median(cpu for of, _, cpu in runs if of == name), 2)
    emit("quiet_rebuild", datasets=datasets, **medians)


def count_requests(datasets: int) -> None:
    """Measure on a local object server: the first build that makes nothing, and one after it."""
    from tests.support.object_server import list_s3_variables, serving

    with tempfile.TemporaryDirectory() as folder, serving() as server:
        project = write_project(Path(folder) / "p", datasets)
        variables = {**list_s3_variables(server), "ROWMILL_STORE": "s3://bucket/store"}
        run_build(ROOT, project, **variables)
        server.latency_s = 0.02
        measured: dict[str, float] = {}
        for night in ("first", "second"):
            before = server.requests
            measured[f"{night}_s"] = round(run_build(ROOT, project, **variables)[0], 2)
            measured[f"{night}_requests"] = server.requests - before
    emit("quiet_rebuild_s3", datasets=datasets, **measured)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    if sys.argv[2:] == ["s3"]:
        count_requests(count)
    else:
        main(count, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
