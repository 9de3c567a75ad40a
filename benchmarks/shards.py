"""Shards: writing them against pyarrow's own writer, reading a rank from a cold open, opening a manifest of 100 GB.

    python -m benchmarks.shards [million tokens]

Writing compares the same table: ours (zstd, a row group of 1,024 sequences, no dictionaries for tokens) against
`pyarrow.parquet.write_table` with its defaults. Reading is done in a fresh process, with the files' pages dropped
from the cache first, and its clock begins before the reader is opened. The manifest's entries are simulated: as many
shards of 2 million tokens as 100 GB of them have, on disk as one JSON file.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import measure
from rowmill.core.storage import Store
from rowmill.packing.pack_plan import mark_targets, plan_greedy
from rowmill.schema import manifest
from rowmill.schema.manifest import File, Manifest, Part
from rowmill.schema.shard_counts import ShardDetails
from rowmill.shards import native

SEQ_LEN, SEGMENT = 4096, 240
SHARD_BYTES = 4 << 20
"""What a shard of 2 million tokens takes, compressed."""

READ = """
import json, sys, time
from rowmill.reader import Reader
begin, began = time.perf_counter(), time.process_time()
reader = Reader(sys.argv[1], "bench", rank=0, world_size=1, batch_size=4, as_torch=False)
opened = time.perf_counter() - begin
tokens = sum(batch["input_ids"].size for batch in reader)
print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - begin,
                  "cpu_s": time.process_time() - began, "opened_s": opened}))
"""
OPEN = """
import json, sys, time
from pathlib import Path
from rowmill.schema import manifest
from rowmill.reader import published
from rowmill.core.storage import Store
def memory_mb(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024
def timed(work):
    begin, began = time.perf_counter(), time.process_time()
    made = work()
    return made, time.perf_counter() - begin, time.process_time() - began
store, before = Store(sys.argv[1]), memory_mb("VmRSS")
found, *of_manifest = timed(lambda: manifest.load_current(store, ("bench", "texts", "packed_shards")))
build, *of_published = timed(lambda: published.open_published(store, "simulated"))
print(json.dumps({
    "parts": len(found.parts), "manifest_s": of_manifest[0], "manifest_cpu_s": of_manifest[1],
    "published_s": of_published[0], "published_cpu_s": of_published[1], "more_mb": memory_mb("VmHWM") - before,
}))
"""


def packed(sequences: int) -> pa.Table:
    """Return full sequences of random segments; ids follow a power law, as real ones do."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(SEGMENT), 0.8, sequences * 40), 8, SEQ_LEN).astype(np.int64)
    plan = plan_greedy(lengths, SEQ_LEN, 64)
    last = int(plan.sequence_offsets[sequences])
    spans, offsets = plan.ranges[:last, 1], plan.sequence_offsets[: sequences + 1]
    bounds = np.concatenate(([0], np.cumsum(spans, dtype=np.int64)))
    ids = np.minimum(random.zipf(1.3, int(bounds[-1])), 150_000).astype(np.int32)
    mask = random.random(len(ids)) < 0.4
    names = pa.array([f"{i // 977:016x}:{i}#0" for i in range(last)])
    trained = mark_targets(ids, mask, spans, ignore_token_id=None)
    segments = native.Segments(ids, trained, bounds, offsets, names, np.zeros(last, np.int32))
    return native.make_shard_table(segments, spans, offsets, dataset="texts")


def writing(table: pa.Table) -> None:
    """Write one table by both writers, five times each in turn."""
    tokens = int(table.column("tokens").to_numpy().sum())

    def once(write: Callable[[io.BytesIO], object]) -> float:
        sink = io.BytesIO()
        # Processor time: both writers use one thread, and neighbours on the machine do not count.
        begin = time.process_time()
        write(sink)
        return time.process_time() - begin

    ours = measure.timed(
        lambda: once(lambda _: native.encode_native_shard(table, {"format": "native"}, group_rows=1024))
    )
    bare = measure.timed(lambda: once(lambda sink: pq.write_table(table, sink)))
    measure.emit(
        "shard_writing",
        tokens=tokens,
        ours=ours,
        pyarrow=bare,
        times_pyarrow=round(bare["median_s"] / ours["median_s"], 3),
        million_tokens_per_s=round(tokens / ours["median_s"] / 1e6, 1),
    )


def reading(folder: Path, million_tokens: int) -> None:
    """Build one rank of text and read it cold, five times."""
    one = _text_project(folder, million_tokens)
    measure.runner.build(one)
    root = Path(one.store.root)
    files = list((root / "bench" / "gpu_partitions").rglob("*.parquet"))
    runs = []
    for _ in range(measure.RUNS):
        for file in files:
            _forget(file)
        done = subprocess.run([sys.executable, "-c", READ, str(root)], check=True, capture_output=True, text=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    runs.sort(key=lambda run: run["seconds"])
    middle = runs[len(runs) // 2]
    measure.emit(
        "reader_cold",
        tokens=middle["tokens"],
        seconds=[round(run["seconds"], 3) for run in runs],
        cpu_s=[round(run["cpu_s"], 3) for run in runs],
        opened_s=round(middle["opened_s"], 3),
        million_tokens_per_s=round(middle["tokens"] / middle["seconds"] / 1e6, 1),
        million_tokens_per_cpu_s=round(middle["tokens"] / middle["cpu_s"] / 1e6, 1),
    )


def _text_project(folder: Path, million_tokens: int) -> measure.Project:
    words = np.random.default_rng(1).choice(measure.corpus.words(), size=million_tokens * 1_000_000)
    path = folder / "texts.jsonl"
    with path.open("w", encoding="utf-8") as sink:
        for begin in range(0, len(words), 2000):
            sink.write(json.dumps({"text": " ".join(words[begin : begin + 2000])}) + "\n")
    values = {
        "tokenizer": str(measure.corpus.TOKENIZER),
        "seq_len": SEQ_LEN,
        "datasets": {"texts": {"source": {"train_urls": [str(path)]}, "format": {"kind": "text"}}},
        "defaults": {"splits": {"validation": 0}},
    }
    return measure.Project(
        measure.parse_recipe(values, name="bench", where="benchmark"), Store(str(folder / "root")), folder
    )


def _forget(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def opening(folder: Path) -> None:
    """Write a manifest and a published build of 100 GB of shards, and open both in a fresh process."""
    store, count = Store(str(folder / "simulated")), 100 * (1 << 30) // SHARD_BYTES

    def file(kind: str, number: int) -> File:
        name = f"bench/texts/packed_shards/parts/{'a' * 32}/{kind}/train/part-{number:05d}.parquet"
        return File(name, SHARD_BYTES, f"{number:032x}", 512)

    def describe(number: int) -> ShardDetails:
        return ShardDetails(
            split="train", first_sequence=512 * number, sequences=512, segments=512, tokens=SHARD_BYTES // 8,
            trained_tokens=SHARD_BYTES // 8, padding=0,
        )  # fmt: skip

    parts = [
        Part(
            f"{n:032x}",
            {"shard": file("data", n), "segments": file("segments", n)},
            details={"ShardDetails": describe(n).to_json()},
        )
        for n in range(count)
    ]
    for path in (Path(store.path(one.path)) for part in parts for one in part.files.values()):
        # Saving a manifest syncs its files, so they must exist; nothing reads them.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    key = ("bench", "texts", "packed_shards")
    manifest.save_manifest(
        store, Manifest(key, "packed_shards", "f" * 32, "0", {}, tuple(parts), {"sequences": 512 * count})
    )
    ranks = {
        f"rank-{rank:05d}-of-00008": {
            "folder": f"simulated/gpu_partitions/parts/{rank:032x}",
            "files": [[one.files["shard"].path, 512, one.files["shard"].digest] for one in parts[rank::8]],
            "sequences": 512 * len(parts[rank::8]),
        }
        for rank in range(8)
    }
    content = {
        "version": "v", "recipe": "simulated", "order": "o", "order_file": "o.parquet", "datasets": ["texts"],
        "world_size": 8, "seq_len": SEQ_LEN, "places": 512 * count, "steps": 1, "has_steps": False, "inputs": {},
        "sets": {"texts": {"tags": ["texts"], "shards": {"train": [[p.files["shard"].path, 512, "d"] for p in parts]}}},
        "waivers": [], "card": {"pad_id": 0}, "ranks": ranks,
    }  # fmt: skip
    store.write_sealed("simulated/gpu_partitions/current.json", content)
    done = subprocess.run([sys.executable, "-c", OPEN, store.root], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    measure.emit("open_100_gb", **{name: round(value, 3) for name, value in found.items()})


def main(million_tokens: int) -> None:
    """Run all three."""
    writing(packed(512 * 8))
    with tempfile.TemporaryDirectory() as name:
        opening(Path(name))
        reading(Path(name), million_tokens)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
