"""Small builds for tests of the reader, and readers of them."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import yaml

from rowmill.build import runner, steps
from rowmill.reader import Batch, Reader

TOKENIZER = Path(__file__).resolve().parents[2] / "configs" / "demo" / "tokenizer"
STEPPED: dict[str, Any] = {"mixture": {"batch_size": 8, "epochs": 2}, "partitions": {"world_size": 4}}
"""Steps of 8 over two epochs, stored for 4 ranks."""
GROWING: dict[str, Any] = {"mixture": {"batch_size": [[0, 6], [3, 8]]}, "partitions": {"world_size": 2}}
"""Steps of 6, from step 3 (place 18) on of 8."""
UNSTEPPED: dict[str, Any] = {"mixture": {}, "partitions": {"world_size": 8}}
"""No batch size: one run of places, filled up to 8 ranks."""
BUILDS = {"stepped": STEPPED, "growing": GROWING, "unstepped": UNSTEPPED}


def make(folder: Path, *, word: str = "number", **options: Any) -> Path:
    """Build a recipe of two datasets in a folder; return its storage root."""
    rows = [
        {"prompt": f"Name a {word} above {i}.", "answer": f"{i + 1} is above {i}. " * (1 + i % 5)} for i in range(160)
    ]
    texts = [{"text": f"Document {i}: " + "the sum of the parts. " * (1 + i % 9)} for i in range(60)]
    (folder / "configs").mkdir(parents=True)
    for name, lines in {"tasks": rows, "texts": texts}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    recipe = {
        "tokenizer": str(TOKENIZER),
        "seq_len": 64,
        "defaults": {"splits": {"validation": 0, "test": 0}},
        "datasets": {
            "tasks": {
                "source": {"train_urls": ["tasks.jsonl"]},
                "format": {"kind": "supervised", "input_field": "prompt", "output_field": "answer"},
            },
            "texts": {"source": {"train_urls": ["texts.jsonl"]}, "format": {"kind": "text"}},
        },
        "gates": {"fill": {"at_least": 0}, "filler_share": {"at_most": 1}, "rank_balance": {"at_most": 9}},
        "execution": {"workers": 1},
    }
    path = folder / "configs" / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe | options), encoding="utf-8")
    project = steps.open_project(path, str(folder / "built"))
    runner.build(project)
    return folder / "built"


def current(root: Path) -> dict[str, Any]:
    return orjson.loads((root / "tiny" / "gpu_partitions" / "current.json").read_bytes())


def open_reader(root: Path | str, rank: int = 0, world_size: int = 1, **options: Any) -> Reader:
    every: dict[str, Any] = {"as_torch": False} | options
    return Reader(root, "tiny", rank=rank, world_size=world_size, **every)


def delivered(reader: Iterable[Batch]) -> list[bytes]:
    """Return the token bytes of batches of one sequence each."""
    return [batch["input_ids"].tobytes() for batch in reader]


def shard_of(root: Path, rank: int) -> Path:
    return root / current(root)["ranks"][f"rank-{rank:05d}-of-00004"]["files"][0][0]


class Workers:
    """A stand-in for `torch.utils.data`: says which worker "this process" is, as torch does inside one."""

    def __init__(self) -> None:
        self.info: SimpleNamespace | None = None

    def get_worker_info(self) -> SimpleNamespace | None:
        return self.info

    def become(self, worker: int, workers: int) -> None:
        self.info = SimpleNamespace(id=worker, num_workers=workers)


def loaded_in_turn(copies: list[Any], standin: Workers) -> Iterator[Batch]:
    """Yield what a `DataLoader` with `batch_size=None` takes from its workers' copies of a dataset."""
    running = dict(enumerate(map(iter, copies)))
    while running:
        for worker in list(running):
            standin.become(worker, len(copies))
            try:
                batch = next(running[worker])
            except StopIteration:
                del running[worker]
                continue
            finally:
                standin.info = None
            yield batch


def in_bytes(batches: Iterable[Batch]) -> list[dict[str, Any]]:
    """Return batches with their arrays as dtype, shape and bytes."""

    def write(value: Any) -> Any:
        return (str(value.dtype), value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    return [{name: write(value) for name, value in batch.items()} for batch in batches]


def tokens(batches: Any) -> list[bytes]:
    return [np.asarray(batch["input_ids"]).tobytes() for batch in batches]
