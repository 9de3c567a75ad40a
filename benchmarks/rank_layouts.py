"""Ranks as copies and as indexes: the time for another world size, and what a trainer waits for.

    python -m benchmarks.rank_layouts [million tokens]

Another world size is `partitions.world_size` from 8 to 16: the stage `gpu_partitions` alone, for which the order is
made already. Waiting is measured in eight processes at once, one per rank, each of which sleeps as long as a step takes
at 30,000 tokens a second between two batches of one sequence. Remote storage is the same folder, with 20 ms for each
request; the first batch is measured from a reader that is not open yet, in a process that has imported it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from rowmill.build import runner
from rowmill.core.storage import Store

SEQ_LEN, RANKS = 4096, 8
SECONDS = 20
"""How long each rank reads."""

TRAIN = """
import json, sys, time
from pathlib import Path
import benchmarks.slow_storage
from rowmill.reader import Reader
root, rank, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
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
state = reader.state_dict()
begin = time.perf_counter()
reader = open_reader()
reader.load_state_dict(state)
next(iter(reader))
resumed = time.perf_counter() - begin
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
took = {"opened": opened, "first": first, "first_cpu": first_cpu, "resumed": resumed}
print(json.dumps(took | {"peak_mb": peak, "waits": waits}))
"""


CLOCKS = ("opened", "first", "first_cpu", "resumed")


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
        "mixture": {"batch_size": 16, "epochs": 2},
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
    """Read with eight ranks at once, in both layouts, from the disk and from slow storage."""
    for layout in ("copied", "index"):
        _time_ranks(_open_project(folder, source, layout, RANKS))
        for storage in ("", "slow://"):
            command = [sys.executable, "-c", TRAIN, f"{storage}{folder / 'root'}"]
            ranks = [
                subprocess.Popen([*command, str(rank), str(SECONDS)], stdout=subprocess.PIPE, text=True)
                for rank in range(RANKS)
            ]
            found = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
            waits = np.concatenate([one["waits"] for one in found]) * 1000
            measure.emit(
                "rank_waits",
                layout=layout,
                storage="20 ms a request" if storage else "local",
                batches=len(waits),
                wait_p50_ms=round(float(np.percentile(waits, 50)), 3),
                wait_p99_ms=round(float(np.percentile(waits, 99)), 3),
                wait_max_ms=round(float(waits.max()), 3),
                **{
                    f"{name}_s": round(max(one[name] for one in found), 3)
                    for name in ("opened", "first", "first_cpu", "resumed")
                },
                peak_mb=round(max(one["peak_mb"] for one in found)),
            )


def main(million_tokens: int) -> None:
    """Run both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = _write_texts(folder, million_tokens)
        changing_the_world_size(folder, source)
        waiting(folder, source)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
