"""Bytes on disk from source to rank, and reading speed, of packed shards that copy tokens and of those that name them.

    python -m benchmarks.packing_layouts [megabytes of chats]

Each layout of packed shards is built with each layout of ranks, for eight ranks; the bytes are those of a stage's
folder, each divided by the tokens of all sequences. A rank is read once in training order, as a trainer does, from the
page cache, in processor time. Contents are compared batch by batch.
"""

import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks import measure
from rowmill.build import runner
from rowmill.core.storage import Store
from rowmill.reader import Reader

SEQ_LEN, RANKS = 4096, 8
STAGES = ("canonical_rows", "tokenized_examples", "packed_shards", "gpu_partitions")


def count_bytes(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def open_project(rows: Path, folder: Path, layout: str, ranks: str) -> measure.Project:
    """Return a project of one dataset of chats with a layout of shards and one of ranks."""
    values: dict[str, Any] = {
        "tokenizer": str(measure.corpus.TOKENIZER),
        "seq_len": SEQ_LEN,
        "datasets": {
            "chats": {
                "source": {"train_urls": [str(rows)]},
                "format": {"kind": "chat"},
                "template": {"chat_template": {"file": str(measure.corpus.TEMPLATE)}},
                "packing": {"layout": layout},
                "splits": {"validation": 0},
            }
        },
        "mixture": {"batch_size": 16},
        "partitions": {"world_size": RANKS, "layout": ranks},
        "execution": {"workers": 2},
    }
    recipe = measure.parse_recipe(values, name="bench", where="benchmark")
    return measure.Project(recipe, Store(str(folder / "root")), folder)


def read_rank(root: Path) -> tuple[int, float, str]:
    """Return one rank's tokens, the processor seconds of reading them, and a digest of its batches."""
    reader = Reader(root, "bench", rank=0, world_size=RANKS, batch_size=2, as_torch=False)
    began, tokens, spent, digest = time.process_time(), 0, 0.0, sha256()
    for batch in reader:
        spent += time.process_time() - began
        tokens += batch["input_ids"].size
        digest.update(batch["input_ids"].tobytes() + batch["labels"].tobytes() + batch["position_ids"].tobytes())
        began = time.process_time()
    return tokens, spent, digest.hexdigest()


def main(megabytes: int) -> None:
    """Build, count and read the four combinations."""
    digests: set[str] = set()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = folder / "chats.jsonl"
        count = measure.corpus.write(rows, size_bytes=megabytes << 20)
        for ranks in ("copied", "index"):
            for layout in ("copied", "index"):
                project = open_project(rows, folder, layout, ranks)
                reports = {step.name: report for step, report, _ in runner.build(project)}
                root = folder / "root"
                tokens = int(reports["packed_shards"].manifest.facts["tokens"])
                sizes: dict[str, int] = {}
                for stage in STAGES:
                    # The other layout's files of the same root are no part of this build.
                    paths = {file.path for part in reports[stage].manifest.parts for file in part.files.values()}
                    sizes[stage] = sum((root / path).stat().st_size for path in paths)
                read, seconds, digest = read_rank(root)
                digests.add(digest)
                measure.emit(
                    "packing_layouts",
                    layout=layout,
                    ranks=ranks,
                    source_mb=round(rows.stat().st_size / 1e6, 1),
                    rows=count,
                    tokens=tokens,
                    bytes_per_token={stage: round(size / tokens, 3) for stage, size in sizes.items()},
                    examples_to_ranks=round(sum(sizes[stage] for stage in STAGES[1:]) / tokens, 3),
                    packing_s=round(reports["packed_shards"].manifest.seconds, 2),
                    read_mtok_per_cpu_s=round(read / seconds / 1e6, 2),
                )
    assert len(digests) == 1, "the layouts gave other batches"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
