"""The reader inside `DataLoader` workers: every batch once, in the order of one process, resumable or refused."""

import json
import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowmill.core.errors import ConfigError
from rowmill.core.storage import Store
from rowmill.reader import Batch, Reader
from rowmill.reader.stored_rows import ExpectedShard, SequenceSource, Shard, ShardFiles, locate_copied
from tests.support.reader_builds import BUILDS, Workers, loaded_in_turn, open_reader, tokens
from tests.support.tiers import draw, mark_all_but

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    # torchdata 0.11 calls what torch 2.13 deprecates.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("workers", mark_all_but([2], [1, 2, 3, 7]))
@pytest.mark.parametrize("batch_size", mark_all_but([None, 3], [None, 1, 3]))
def test_workers_together_deliver_every_batch_once_in_the_order_of_one_process(
    made: dict[str, Path], standin: Workers, name: str, workers: int, batch_size: int | None
) -> None:
    one, *copies = (open_reader(made[name], 1, 2, batch_size=batch_size) for _ in range(1 + workers))
    whole = tokens(one)
    assert len(set(whole)) > workers
    assert tokens(loaded_in_turn(copies, standin)) == whole


@pytest.mark.slow
@given(
    name=st.sampled_from(list(BUILDS)),
    workers=st.integers(1, 4),
    batch_size=st.none() | st.integers(1, 5),
    data=st.data(),
)
@settings(deadline=None, max_examples=draw(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_workers_resumed_from_their_own_states_go_on_at_the_next_batch(
    made: dict[str, Path], standin: Workers, name: str, workers: int, batch_size: int | None, data: st.DataObject
) -> None:
    whole = tokens(open_reader(made[name], batch_size=batch_size))
    copies = [open_reader(made[name], batch_size=batch_size) for _ in range(workers)]
    # What StatefulDataLoader does: a state per worker, of the batches that were handed on, and the worker that is next.
    rounds = data.draw(st.integers(0, len(whole) // workers))
    seen = tokens(islice(loaded_in_turn(copies, standin), rounds * workers))
    states = [json.loads(json.dumps(one.state_dict())) for one in copies]
    resumed = [open_reader(made[name], batch_size=batch_size) for _ in range(workers)]
    for worker, (reader, state) in enumerate(zip(resumed, states, strict=True)):
        standin.become(worker, workers)
        reader.load_state_dict(state)
    standin.info = None

    assert seen + tokens(loaded_in_turn(resumed, standin)) == whole


def test_state_from_outside_of_workers_is_shared_out_from_there(made: dict[str, Path], standin: Workers) -> None:
    whole, first, *copies = (open_reader(made["stepped"], batch_size=3) for _ in range(4))
    seen = tokens(islice(first, 5))
    for copy in copies:
        copy.load_state_dict(first.state_dict())
    assert seen + tokens(loaded_in_turn(copies, standin)) == tokens(whole)


def begun_in_worker(root: Path, standin: Workers) -> Reader:
    """Return the copy of worker 1 of 2 after its first batch."""
    reader = open_reader(root, batch_size=3)
    standin.become(1, 2)
    next(iter(reader))
    return reader


@pytest.mark.parametrize("here", [None, (0, 2), (1, 3)])
def test_state_of_another_worker_is_refused(
    made: dict[str, Path], standin: Workers, here: tuple[int, int] | None
) -> None:
    state = begun_in_worker(made["stepped"], standin).state_dict()
    standin.info = None
    if here:
        standin.become(*here)
    with pytest.raises(ConfigError, match=r"worker 1 of 2, and this is .*; continue with 2 workers"):
        open_reader(made["stepped"], batch_size=3).load_state_dict(state)


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 2), (2, 3)])
def test_state_of_a_worker_is_refused_where_batches_would_be_cut_anew(
    made: dict[str, Path], standin: Workers, world_size: int, batch_size: int
) -> None:
    state = begun_in_worker(made["stepped"], standin).state_dict()
    with pytest.raises(ConfigError, match=r"(batch_size|world_size): 2, but the state .* continue with"):
        open_reader(made["stepped"], 0, world_size, batch_size=batch_size).load_state_dict(state)


def test_worker_that_is_to_begin_again_midway_is_refused_unless_it_was_rewound(
    made: dict[str, Path], standin: Workers
) -> None:
    reader = begun_in_worker(made["stepped"], standin)
    with pytest.raises(ConfigError, match=r"DataLoader worker 1 of 2 would restart .*; set persistent_workers=False"):
        next(iter(reader))
    reader.rewind()

    assert tokens(reader) == tokens(open_reader(made["stepped"], batch_size=3))


def test_views_and_pickled_readers_are_shared_out_as_well(made: dict[str, Path], standin: Workers) -> None:
    view = open_reader(made["stepped"], batch_size=3).take(20)
    whole = tokens(view)
    assert len(whole) == 7
    assert tokens(loaded_in_turn([view, view], standin)) == whole
    # Workers that are spawned get the dataset pickled.
    reader = open_reader(made["stepped"])
    next(iter(reader))
    assert tokens(pickle.loads(pickle.dumps(reader))) == tokens(reader)


class SlowInParent(Store):
    """A store whose files the process that made it cannot open before it is allowed to."""

    parent = os.getpid()
    is_opening, may_open = threading.Event(), threading.Event()

    def path(self, relative: str) -> str:
        if os.getpid() == self.parent:
            self.is_opening.set()
            self.may_open.wait(60)
        return super().path(relative)


def test_forked_copy_reads_while_a_thread_of_its_parent_does(tmp_path: Path) -> None:
    """A lock that is held while a process forks is never released in the child."""
    columns = {name: pa.array([[5, 6, 7]], pa.list_(pa.int32())) for name in ("input_ids", "labels", "seq_lengths")}
    pq.write_table(pa.table(columns), tmp_path / "shard.parquet")
    files = ShardFiles(SlowInParent(str(tmp_path)), [ExpectedShard(Shard("shard.parquet", 1, ""), {})])
    rows = SequenceSource(files, partial(locate_copied, 1, np.array([0, 1])))
    first = np.array([0])
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(rows.at(first)[0].input_ids.tolist()))
    with ThreadPoolExecutor(1) as reading:
        reading.submit(rows.at, first)
        SlowInParent.is_opening.wait(60)
        child.start()
        try:
            assert queue.get(timeout=20) == [5, 6, 7]
        finally:
            SlowInParent.may_open.set()
            child.kill()
            child.join(timeout=60)


class Stream:
    """What users write around a reader; made an `IterableDataset` below, where torch is there."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.reader)

    def state_dict(self) -> dict[str, Any]:
        return self.reader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reader.load_state_dict(state)


def streamed(root: Path) -> Any:
    data: Any = import_module("torch.utils.data")
    reader = Reader(root, "tiny", rank=0, world_size=2, batch_size=3)
    return type("Streamed", (Stream, data.IterableDataset), {})(reader)


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_data_loader_of_torch_delivers_every_batch_once(made: dict[str, Path], workers: int) -> None:
    data = pytest.importorskip("torch.utils.data", reason="torch is not installed: pip install 'rowmill[train]'")
    loader = data.DataLoader(streamed(made["stepped"]), batch_size=None, num_workers=workers)
    assert tokens(loader) == tokens(open_reader(made["stepped"], 0, 2, batch_size=3))


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("stop", [0, 1, 4, 5, 20])
def test_stateful_data_loader_goes_on_at_the_next_batch(made: dict[str, Path], workers: int, stop: int) -> None:
    loading = pytest.importorskip("torchdata.stateful_dataloader", reason="no torchdata; pip install torchdata")
    first, second = (
        loading.StatefulDataLoader(streamed(made["stepped"]), batch_size=None, num_workers=workers) for _ in range(2)
    )
    seen = tokens(islice(first, stop)) if stop else []
    second.load_state_dict(first.state_dict())
    assert seen + tokens(second) == tokens(open_reader(made["stepped"], 0, 2, batch_size=3))
