"""Reading ahead changes no batch: the same ones, in order, also where the caller moves the reader meanwhile."""

import multiprocessing
import pickle
import shutil
import threading
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rowmill.reader.reader as reader_module
from rowmill.core.errors import IntegrityError
from rowmill.reader.schedule import BLOCK_SEQUENCES, DEPTH, PlannedBatch, read_ahead
from tests.support.reader_builds import STEPPED, delivered, make, open_reader, shard_of


@pytest.fixture
def built(made: dict[str, Path]) -> Path:
    return made["stepped"]


@pytest.fixture(scope="module")
def built_in(made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the storage roots of the build by the layout of its ranks."""
    indexed: dict[str, Any] = STEPPED | {"partitions": {**STEPPED["partitions"], "layout": "index"}}
    return {"copied": made["stepped"], "index": make(tmp_path_factory.mktemp("index") / "project", **indexed)}


def plan(sizes: Sequence[int]) -> list[PlannedBatch]:
    ends = np.cumsum(sizes).tolist()
    return [PlannedBatch(end - size, end, end) for size, end in zip(sizes, ends, strict=True)]


def names(block: Sequence[PlannedBatch]) -> list[str]:
    return [f"{one.begin}-{one.end}" for one in block]


@pytest.mark.slow
@given(sizes=st.lists(st.integers(1, 100), max_size=60), seq_len=st.sampled_from([64, 4096, 1 << 20]))
def test_batches_come_in_order_and_blocks_stay_small(sizes: list[int], seq_len: int) -> None:
    planned = plan(sizes)
    blocks: list[int] = []

    def read(block: Sequence[PlannedBatch]) -> list[str]:
        blocks.append(sum(one.end - one.begin for one in block[:-1]))
        return names(block)

    assert list(read_ahead([iter(planned)], read, seq_len=seq_len)) == list(zip(planned, names(planned), strict=True))
    assert max(blocks, default=0) < BLOCK_SEQUENCES
    assert blocks[:1] in ([], [0]), "the first batch is read alone"


def test_error_comes_in_place_of_the_block_that_has_it() -> None:
    def read(block: Sequence[PlannedBatch]) -> list[str]:
        if block[-1].end > 5:
            raise IntegrityError("gone")
        return names(block)

    seen: list[str] = []
    with pytest.raises(IntegrityError, match="gone"):
        seen += (name for _, name in read_ahead([iter(plan([1] * 20))], read, seq_len=4096))

    assert seen == ["0-1", "1-2", "2-3"]


def test_nothing_more_is_read_once_the_iterator_is_closed() -> None:
    read: list[str] = []

    def remember(block: Sequence[PlannedBatch]) -> list[str]:
        read.extend(names(block))
        return names(block)

    batches = read_ahead([iter(plan([1] * 10_000))], remember, seq_len=4096)
    next(batches)
    batches.close()
    assert len(read) < BLOCK_SEQUENCES * (DEPTH + 1)


def test_first_blocks_of_the_next_pass_are_read_before_this_one_ends() -> None:
    whole, read, is_again = plan([1] * 40), list[str](), threading.Event()

    def remember(block: Sequence[PlannedBatch]) -> list[str]:
        if block[0].begin == 0 and read:
            is_again.set()
        read.extend(names(block))
        return names(block)

    batches = read_ahead([iter(whole), iter(whole)], remember, seq_len=4096)
    seen = [name for _, name in islice(batches, len(whole))]

    assert is_again.wait(60)
    assert seen == names(whole)
    batches.close()
    assert len(read) <= len(whole) + 3, "little is read in vain where no other pass follows"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["copied", "index"])
def test_reader_asks_for_the_next_pass_before_this_one_ends(
    built_in: dict[str, Path], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, is_again = list[int](), threading.Event()

    def watch(passes: Any, read: Callable[[Sequence[PlannedBatch]], Any], *, seq_len: int) -> Any:
        def remember(block: Sequence[PlannedBatch]) -> Any:
            if block[0].begin == 0 and asked:
                is_again.set()
            asked.extend(one.begin for one in block)
            return read(block)

        return read_ahead(passes, remember, seq_len=seq_len)

    monkeypatch.setattr(reader_module, "read_ahead", watch)
    reader = open_reader(built_in[layout], 1, 4, batch_size=1)
    first = [batch["input_ids"].tobytes() for batch in islice(reader, len(reader))]

    assert is_again.wait(60)
    reader.rewind()
    assert delivered(reader) == first
    assert asked[: len(reader)] == asked[len(reader) :][: len(reader)] == list(range(len(reader)))


@pytest.mark.parametrize("batch_size", [1, 3, None])
@pytest.mark.parametrize("layout", ["copied", "index"])
def test_passes_after_a_rewind_are_equal(built_in: dict[str, Path], layout: str, batch_size: int | None) -> None:
    whole = delivered(open_reader(built_in["copied"], 2, 4, batch_size=batch_size))
    reader, seen = open_reader(built_in[layout], 2, 4, batch_size=batch_size), list[bytes]()
    for _ in range(3):
        seen += delivered(reader)
        assert not delivered(reader), "a reader at its end has no batch"
        reader.rewind()

    assert seen == whole * 3


def test_reader_that_is_moved_or_rewound_inside_its_loop_goes_on_from_there(built: Path) -> None:
    whole = delivered(open_reader(built, batch_size=1))
    reader, seen = open_reader(built, batch_size=1), list[bytes]()
    for batch in reader:
        seen.append(batch["input_ids"].tobytes())
        if len(seen) % len(whole) == 0 and len(seen) < 3 * len(whole):
            reader.rewind()

    assert seen == whole * 3
    reader, seen = open_reader(built, batch_size=1), []
    state = reader.state_dict()
    for number, batch in enumerate(reader):
        seen.append(batch["input_ids"].tobytes())
        if number == 4:
            state = reader.state_dict()
        if number == 9:
            reader.load_state_dict(state)
        if number == 12:
            reader.rewind()
        if number == 20:
            break
    assert seen == [*whole[:10], *whole[5:8], *whole[:8]]


def test_steps_left_out_between_passes_are_left_out_and_others_come(built: Path) -> None:
    reader = open_reader(built)
    whole = delivered(reader)
    reader.rewind()
    reader.skip_steps([0, 2])
    assert delivered(reader) == [whole[1], *whole[3:]]
    reader.load_state_dict(reader.state_dict() | {"position": 0, "taken": 0, "skip_steps": []})
    assert delivered(reader) == whole
    reader, seen = open_reader(built), list[bytes]()
    reader.skip_steps([5])
    for number, batch in enumerate(reader):
        seen.append(batch["input_ids"].tobytes())
        if number == 2:
            reader.load_state_dict(reader.state_dict() | {"skip_steps": []})
    assert seen == whole


def test_copies_made_between_two_passes_read_the_next_one(built: Path) -> None:
    reader = open_reader(built, batch_size=1)
    whole = delivered(reader)
    reader.rewind()
    copy = pickle.loads(pickle.dumps(reader))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(delivered(reader)))
    child.start()

    assert queue.get(timeout=60) == delivered(copy) == delivered(reader) == whole
    child.join(timeout=60)


def test_damaged_page_of_a_shard_is_an_error_that_names_it(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built / "tiny" / "gpu_partitions", tmp_path / "tiny" / "gpu_partitions")
    shard = shard_of(tmp_path, 0)
    content = bytearray(shard.read_bytes())
    # The first page begins behind four magic bytes.
    content[4:60] = bytes(56)
    shard.write_bytes(content)
    reader = open_reader(tmp_path, 0, 4)

    with pytest.raises(IntegrityError, match=rf"{shard.name}: row group 0 cannot be read .*; copy it again"):
        list(islice(reader, 3))
