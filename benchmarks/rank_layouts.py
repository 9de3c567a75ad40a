"""Ranks as copies and as indexes: the time for another world size, and what a trainer waits for.

    python -m benchmarks.rank_layouts [million tokens] [world_size | waiting | borders]

Another world size is `partitions.world_size` from 8 to 16: the stage `gpu_partitions` alone, for which the order is
made already. Waiting is measured in eight processes at once, one per rank, each of which sleeps as long as a step takes
at 30,000 tokens a second between two batches of one sequence. Remote storage is the same folder, with 20 ms for each
request; the first batch is measured from a reader that is not open yet, in a process that has imported it. The last
measurements are of a build of 10⁶ steps and more than 100 GB (`repeated_build.py`), resumed at step 10⁶: by eight ranks
at once, whose processor time two cores share, and by one alone. Borders are where an epoch of the order ends, and where
the order itself ends and the trainer calls `rewind()`. With 10 million tokens all of it takes six minutes.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.repeated_build import count_shard_bytes, repeat_build
from rowmill.build import runner
from rowmill.core.storage import Store

SEQ_LEN, RANKS, BATCH = 4096, 8, 16
SECONDS = 20
"""How long each rank reads."""
LATE_STEP, LATE_SECONDS = 1_000_000, 10
EPOCHS = 2
BEFORE_STEPS, BORDER_STEPS, AFTER_STEPS = 30, 4, 12
"""Steps that are read before an epoch's border; those from it on whose waits are the border's; all that are read."""

TRAIN = """
import json, sys, time
from pathlib import Path
import benchmarks.slow_storage
from rowmill.reader import Reader
root, rank, seconds, position = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
def open_reader():
    return Reader(root, "bench", rank=rank, world_size=8, batch_size=1, as_torch=False)
begin, began = time.perf_counter(), time.process_time()
reader = open_reader()
opened = time.perf_counter() - begin
batches = iter(reader)
batch = next(batches)
first, first_cpu = time.perf_counter() - begin, time.process_time() - began
waits, ends = [], time.perf_counter() + seconds
while time.perf_counter() < ends:
    time.sleep(batch["input_ids"].size / 30_000)
    before = time.perf_counter()
    batch = next(batches)
    waits.append(time.perf_counter() - before)
state = reader.state_dict() | ({"position": position, "taken": 0} if position else {})
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
del reader, batches, batch
begin, began = time.perf_counter(), time.process_time()
reader = open_reader()
reader.load_state_dict(state)
next(iter(reader))
resumed, resumed_cpu = time.perf_counter() - begin, time.process_time() - began
took = {"opened": opened, "first": first, "first_cpu": first_cpu, "resumed": resumed, "resumed_cpu": resumed_cpu}
print(json.dumps(took | {"peak_mb": peak, "waits": waits}))
"""

CROSS = """
import json, sys, time
import benchmarks.slow_storage
from rowmill.reader import Reader
root, rank, begin, before, after = sys.argv[1], *map(int, sys.argv[2:])
reader = Reader(root, "bench", rank=rank, world_size=8, batch_size=1, as_torch=False)
if begin:
    reader.load_state_dict(reader.state_dict() | {"position": begin, "taken": 0})
batches = iter(reader)
batch = next(batches)
waits = []
while len(waits) < before + after:
    time.sleep(batch["input_ids"].size / 30_000)
    started = time.perf_counter()
    batch = next(batches, None)
    if batch is None:
        reader.rewind()
        batches = iter(reader)
        batch = next(batches)
    waits.append(time.perf_counter() - started)
print(json.dumps(waits))
"""


CLOCKS = ("opened", "first", "first_cpu", "resumed", "resumed_cpu")


def _write_texts(folder: Path, million_tokens: int) -> Path:
    words = np.random.default_rng(1).choice(measure.corpus.words(), size=million_tokens * 1_000_000)
    path = folder / "texts.jsonl"
    with path.open("w", encoding="utf-8") as sink:
        for begin in range(0, len(words), 500):
            sink.write(json.dumps({"text": " ".join(words[begin : begin + 500])}) + "\n")
    return path


def _open_project(folder: Path, source: Path, layout: str, world_size: int) -> measure.Project:
    values: dict[str, Any] = {
        "tokenizer": str(measure.corpus.TOKENIZER),
        "seq_len": SEQ_LEN,
        "datasets": {"texts": {"source": {"train_urls": [str(source)]}, "format": {"kind": "text"}}},
        "defaults": {"splits": {"validation": 0}},
        "mixture": {"batch_size": BATCH, "epochs": EPOCHS},
        "partitions": {"world_size": world_size, "layout": layout},
        "execution": {"workers": 2},
    }
    return measure.Project(
        measure.parse_recipe(values, name="bench", where="benchmark"), Store(str(folder / "root")), folder
    )


def _time_ranks(project: measure.Project) -> dict[str, float]:
    return {step.name: report.seconds for step, report, _ in runner.build(project) if not report.reused}


def changing_the_world_size(folder: Path, source: Path) -> None:
    """Build for 8 ranks, then for 16, in both layouts."""
    seconds: dict[str, float] = {}
    for layout in ("copied", "index"):
        _time_ranks(_open_project(folder, source, layout, RANKS))
        seconds[layout] = _time_ranks(_open_project(folder, source, layout, 2 * RANKS))["gpu_partitions"]
    measure.emit(
        "ranks_8_to_16",
        copied_s=round(seconds["copied"], 3),
        index_s=round(seconds["index"], 3),
        index_share=round(seconds["index"] / seconds["copied"], 4),
    )


def waiting(folder: Path, source: Path) -> None:
    """Read with eight ranks at once, in both layouts, from the disk and from slow storage; then from 10⁶ steps."""
    for layout in ("copied", "index"):
        project = _open_project(folder, source, layout, RANKS)
        _time_ranks(project)
        root = f"{folder / 'root'}"
        measure.emit("rank_waits", layout=layout, storage="local", **_read_ranks(root, RANKS))
        measure.emit("rank_waits", layout=layout, storage="20 ms a request", **_read_ranks(f"slow://{root}", RANKS))
        large, store = folder / layout, Store(str(folder / layout))
        shutil.copytree(root, large)
        steps = repeat_build(store, "bench", 1 + LATE_STEP // _count_steps(store))
        size_gb = round(count_shard_bytes(store, "bench") / 1e9)
        for ranks in (RANKS, 1):
            found = _read_ranks(f"slow://{large}", ranks, seconds=LATE_SECONDS, position=LATE_STEP * BATCH)
            measure.emit("rank_waits_late", layout=layout, ranks=ranks, steps=steps, shards_gb=size_gb, **found)


def crossing_borders(folder: Path, source: Path) -> None:
    """Read with eight ranks at once over the end of an epoch, and over that of the order."""
    for layout in ("copied", "index"):
        project = _open_project(folder, source, layout, RANKS)
        _time_ranks(project)
        root, steps = f"{folder / 'root'}", _count_steps(project.store)
        for storage, at in (("local", root), ("20 ms a request", f"slow://{root}")):
            for border, step in (("epoch", steps // EPOCHS), ("rewind", steps)):
                found = _read_over(at, step)
                measure.emit("rank_borders", layout=layout, storage=storage, border=border, **found)


def _read_over(root: str, step: int) -> dict[str, Any]:
    """Wait for batches around the beginning of a step, which may be the end of the order."""
    a_step = BATCH // RANKS
    before, border, after = (steps * a_step for steps in (BEFORE_STEPS, BORDER_STEPS, AFTER_STEPS))
    waits = 1000 * np.array(_run_ranks(CROSS, RANKS, root, step * BATCH - before * RANKS, before - 1, after))
    at_border = waits[:, before - 1 :][:, :border]
    elsewhere = np.concatenate([waits[:, : before - 1], waits[:, before - 1 + border :]], axis=1)
    return {
        "border_first_ms": round(float(at_border[:, 0].max()), 3),
        "border_max_ms": round(float(at_border.max()), 3),
        "elsewhere_p50_ms": round(float(np.percentile(elsewhere, 50)), 3),
        "elsewhere_p99_ms": round(float(np.percentile(elsewhere, 99)), 3),
        "elsewhere_max_ms": round(float(elsewhere.max()), 3),
        "load": round(os.getloadavg()[0], 1),
    }


def _count_steps(store: Store) -> int:
    return int((store.read_sealed("bench/gpu_partitions/current.json") or {})["steps"])


def _run_ranks(script: str, ranks: int, root: str, *arguments: float) -> list[Any]:
    """Run a script once for each rank, all at once; return what each printed as JSON."""
    numbers = [str(argument) for argument in arguments]
    running = [
        subprocess.Popen([sys.executable, "-c", script, root, str(rank), *numbers], stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    return [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in running]


def _read_ranks(root: str, ranks: int, *, seconds: int = SECONDS, position: int = 0) -> dict[str, Any]:
    """Read with some ranks at once; resume at a position of the order, or (0) where each stopped."""
    found = _run_ranks(TRAIN, ranks, root, seconds, position)
    waits = np.concatenate([one["waits"] for one in found]) * 1000
    return {
        "batches": len(waits),
        "wait_p50_ms": round(float(np.percentile(waits, 50)), 3),
        "wait_p99_ms": round(float(np.percentile(waits, 99)), 3),
        "wait_max_ms": round(float(waits.max()), 3),
        **{f"{name}_s": round(max(one[name] for one in found), 3) for name in CLOCKS},
        "peak_mb": round(max(one["peak_mb"] for one in found)),
        "load": round(os.getloadavg()[0], 1),
    }


MEASUREMENTS = {"world_size": changing_the_world_size, "waiting": waiting, "borders": crossing_borders}


def main(million_tokens: int, names: Sequence[str]) -> None:
    """Run some measurements, or all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = _write_texts(folder, million_tokens)
        for chosen in names or MEASUREMENTS:
            MEASUREMENTS[chosen](folder, source)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10, sys.argv[2:])
