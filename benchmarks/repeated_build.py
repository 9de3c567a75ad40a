"""A published build of any size, made of a small one: its files are named again and again in `current.json`.

    small    shards a b c            order 0 1 2 … 4879             steps 0 … 304
    twice    shards a b c a b c      order 0 1 2 … 4879, again      steps 0 … 609

No shard is written: a reader opens, checks and decodes the same files more often, as if each were another one. Digests
of files are those of the small build, so `verify=True` would refuse what was repeated.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowmill.core.storage import Store
from rowmill.stages.gpu_partitions import INDEX_GROUP


def repeat_build(store: Store, recipe: str, times: int) -> int:
    """Name everything that a recipe published so many times; return the number of steps."""
    at = f"{recipe}/gpu_partitions/current.json"
    raw: Any = store.read_sealed(at)
    shards = sum(len(one["shards"]["train"]) for one in raw["sets"].values())
    for number, rank in enumerate(raw["ranks"].values()):
        if number == 0:
            # A reader takes the steps of all ranks from the first one.
            _repeat_steps(Path(store.path(f"{rank['folder']}/facts.parquet")), times)
        if raw["layout"] == "copied":
            rank["files"] *= times
        else:
            (path, rows, digest), *_ = rank["files"]
            _repeat_index(Path(store.path(path)), times, shards)
            rank["files"] = [[path, rows * times, digest]]
    for one in raw["sets"].values():
        one["shards"]["train"] *= times
    raw["places"] *= times
    raw["steps"] *= times
    store.write_sealed(at, raw)
    return int(raw["steps"])


def count_shard_bytes(store: Store, recipe: str) -> int:
    """Return the size of all shards that the ranks of a published build are read from."""
    raw: Any = store.read_sealed(f"{recipe}/gpu_partitions/current.json")
    named = raw["ranks"].values() if raw["layout"] == "copied" else raw["sets"].values()
    paths = [file[0] for one in named for file in one.get("files") or one["shards"]["train"]]
    sizes = {path: Path(store.path(path)).stat().st_size for path in set(paths)}
    return sum(sizes[path] for path in paths)


def _repeat_steps(path: Path, times: int) -> None:
    """Repeat the columns that a reader takes; the others would be of no use."""
    steps = pq.read_table(path, columns=["sequences", "step_trained_tokens"])
    pq.write_table(pa.concat_tables([steps] * times), path, compression="zstd")


def _repeat_index(path: Path, times: int, shards: int) -> None:
    """Repeat an index, whose `shard` goes on counting: copy n of shard s is shard n · shards + s."""
    index = pq.read_table(path)
    rows = index.num_rows
    named = np.tile(index.column("shard").to_numpy(), times)
    copy = np.repeat(np.arange(times, dtype=np.int32), rows) * shards
    whole = pa.concat_tables([index] * times).combine_chunks()
    at = whole.schema.get_field_index("shard")
    whole = whole.set_column(at, whole.schema.field(at), pa.array(np.where(named < 0, named, named + copy)))
    pq.write_table(whole, path, compression="zstd", row_group_size=INDEX_GROUP, use_dictionary=["dataset", "pass"])
