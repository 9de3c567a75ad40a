"""The reader: one order for every world size, exact resumes, two layouts, and refusal of what is not the build."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.build import runner, steps
from rowmill.core.errors import ConfigError, DamagedFileError, IntegrityError
from rowmill.core.json import SEAL_KEY
from rowmill.core.storage import Store
from rowmill.reader import Batch, PackedSequence, Reader
from rowmill.reader.layouts import join_flat, stack_padded
from rowmill.schema import manifest
from tests.support.tiers import draw

# Great Expectations, which judges the build, imports a module that Python 3.11 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:module 'sre_:DeprecationWarning")

TOKENIZER = Path(__file__).resolve().parents[2] / "configs" / "demo" / "tokenizer"
DIVISORS = (1, 2, 4, 8)
STEPPED: dict[str, Any] = {"mixture": {"batch_size": 8, "epochs": 2}, "partitions": {"world_size": 4}}
"""Steps of 8 over two epochs, stored for 4 ranks."""
GROWING: dict[str, Any] = {"mixture": {"batch_size": [[0, 6], [3, 8]]}, "partitions": {"world_size": 2}}
"""Steps of 6, from step 3 (place 18) on of 8."""
UNSTEPPED: dict[str, Any] = {"mixture": {}, "partitions": {"world_size": 8}}
"""No batch size: one run of places, filled up to 8 ranks."""


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


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the storage roots of three builds, by name."""
    options = {"stepped": STEPPED, "growing": GROWING, "unstepped": UNSTEPPED}
    return {name: make(tmp_path_factory.mktemp(name) / "project", **one) for name, one in options.items()}


@pytest.fixture
def copied(made: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of the stepped build's published folder alone, to be damaged."""
    shutil.copytree(made["stepped"] / "tiny" / "gpu_partitions", tmp_path / "tiny" / "gpu_partitions")
    return tmp_path


def current(root: Path) -> dict[str, Any]:
    return orjson.loads((root / "tiny" / "gpu_partitions" / "current.json").read_bytes())


def open_reader(root: Path | str, rank: int = 0, world_size: int = 1, **options: Any) -> Reader:
    every: dict[str, Any] = {"as_torch": False} | options
    return Reader(root, "tiny", rank=rank, world_size=world_size, **every)


@cache
def order_of(root: Path) -> list[bytes]:
    """Return the token bytes at every place, from the order and the packed shards, without the reader."""
    found = current(root)
    order = pq.read_table(root / found["order_file"], partitioning=None)
    rows: list[list[list[int]]] = []
    store = Store(str(root))
    for name in found["datasets"]:
        packed = manifest.load_version(
            store, ("tiny", name, "packed_shards"), found["inputs"][f"tiny/{name}/packed_shards"]
        )
        shards = [p.files["shard"] for p in packed.parts if p.facts["split"] == "train"]
        rows.append([ids for shard in shards for ids in store.table(shard, ["input_ids"]).column(0).to_pylist()])
    pad = found["card"]["pad_id"]
    pairs = zip(order.column("dataset").to_pylist(), order.column("sequence_id").to_pylist(), strict=True)
    return [np.array([pad, pad] if dataset < 0 else rows[dataset][item], np.int64).tobytes() for dataset, item in pairs]


def delivered(reader: Iterable[Batch]) -> list[bytes]:
    """Return the token bytes of batches of one sequence each."""
    return [batch["input_ids"].tobytes() for batch in reader]


def interleaved(readers: list[Reader]) -> list[bytes]:
    """Return what ranks in lockstep are shown, place by place."""
    return [row for together in zip(*map(delivered, readers), strict=True) for row in together]


def same(one: Batch, other: Batch) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# ── One order ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("world_size", DIVISORS)
@pytest.mark.parametrize("name", ["stepped", "unstepped"])
def test_ranks_together_give_the_order_for_every_world_size(made: dict[str, Path], name: str, world_size: int) -> None:
    ranks = [open_reader(made[name], rank, world_size, batch_size=1) for rank in range(world_size)]

    assert interleaved(ranks) == order_of(made[name])


def test_world_size_that_does_not_divide_a_step_is_refused_with_two_that_do(made: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"world_size: 3 does not divide .* choose 2 or 4"):
        next(iter(open_reader(made["stepped"], 0, 3)))


@pytest.mark.parametrize("options", [{"rank": 2, "world_size": 2}, {"batch_size": 0}, {"layout": "ragged"}])
def test_impossible_options_are_refused(made: dict[str, Path], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=";"):
        open_reader(made["stepped"], **options)


@pytest.mark.slow
@given(world_size=st.sampled_from(DIVISORS), batch_size=st.none() | st.integers(1, 9), data=st.data())
@settings(deadline=None, max_examples=draw(40))
def test_batches_keep_to_steps_and_count_their_targets(
    made: dict[str, Path], world_size: int, batch_size: int | None, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    reader = open_reader(made["stepped"], rank, world_size, batch_size=batch_size, layout="padded")
    sizes: dict[int, list[int]] = {}
    for batch in reader:
        assert reader.step is not None
        sizes.setdefault(reader.step.number, []).append(len(batch["input_ids"]))
        assert reader.step.is_complete == (sum(sizes[reader.step.number]) == 8 // world_size)

    assert list(sizes) == list(range(reader.steps or 0))
    assert {sum(one) for one in sizes.values()} == {8 // world_size}
    assert max(map(max, sizes.values())) == min(batch_size or 8, 8 // world_size)


def test_trained_tokens_of_a_step_are_the_targets_of_all_ranks(made: dict[str, Path]) -> None:
    ranks = [open_reader(made["stepped"], rank, 2) for rank in range(2)]
    for batches in zip(*ranks, strict=True):
        found = sum(int((batch["labels"] != -100).sum()) for batch in batches)

        assert {reader.step.trained_tokens for reader in ranks if reader.step} == {found}


# ── Resuming ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@given(
    name=st.sampled_from(["stepped", "growing", "unstepped"]),
    world_size=st.sampled_from((1, 2)),
    batch_size=st.none() | st.integers(1, 5),
    data=st.data(),
)
@settings(deadline=None, max_examples=draw(60))
def test_resumed_at_any_batch_equals_uninterrupted(
    made: dict[str, Path], name: str, world_size: int, batch_size: int | None, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    options = {"batch_size": batch_size, "layout": data.draw(st.sampled_from(["flat", "padded"]))}
    whole = list(open_reader(made[name], rank, world_size, **options))
    stop = data.draw(st.integers(0, len(whole)))
    first = open_reader(made[name], rank, world_size, **options)
    seen = list(islice(first, stop))
    second = open_reader(made[name], rank, world_size, **options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = list(second)

    assert len(seen) + len(rest) == len(whole)
    assert all(map(same, seen + rest, whole))


@pytest.mark.slow
@given(
    case=st.sampled_from([("stepped", DIVISORS), ("unstepped", DIVISORS), ("growing", (1, 2))]),
    step=st.integers(0, 12),
    data=st.data(),
)
@settings(deadline=None, max_examples=draw(40))
def test_resumed_between_steps_by_other_ranks_equals_uninterrupted(
    made: dict[str, Path], case: tuple[str, tuple[int, ...]], step: int, data: st.DataObject
) -> None:
    name, sizes = case
    before, after = data.draw(st.sampled_from(sizes)), data.draw(st.sampled_from(sizes))
    order = order_of(made[name])
    firsts = [open_reader(made[name], rank, before) for rank in range(before)]
    for reader in firsts:
        list(islice(reader, step))
    states = [reader.state_dict() for reader in firsts]
    position = states[0]["position"]
    if (len(order) - position) % after:
        return
    seconds = [open_reader(made[name], rank, after, batch_size=1) for rank in range(after)]
    for reader in seconds:
        reader.load_state_dict(states[0])
    # Rank r keeps to the places p with p mod W = r, so the first place may be another rank's turn.
    turns = seconds[position % after :] + seconds[: position % after]

    assert all(state == states[0] for state in states)
    assert interleaved(turns) == order[position:]


def test_world_size_that_divides_only_later_steps_goes_on_from_there(made: dict[str, Path]) -> None:
    first = open_reader(made["growing"], 0, 2)
    list(islice(first, 3))
    state = first.state_dict()
    fours = [open_reader(made["growing"], rank, 4, batch_size=1) for rank in range(4)]
    with pytest.raises(ConfigError, match="place 0 on"):
        next(iter(fours[0]))
    for reader in fours:
        reader.load_state_dict(state)

    assert (state["position"], state["taken"]) == (18, 0)
    assert interleaved(fours[2:] + fours[:2]) == order_of(made["growing"])[18:]


def test_rounds_without_steps_go_on_from_any_place_with_ranks_that_fit(made: dict[str, Path]) -> None:
    """One rank, then as many as never fitted the whole order, then one again."""
    order = order_of(made["unstepped"])
    size = next(size for size in (3, 5, 7) if len(order) % size)
    first = open_reader(made["unstepped"])
    begin = len(list(islice(first, len(order) % size)))
    ranks = [open_reader(made["unstepped"], rank, size) for rank in range(size)]
    for reader in ranks:
        reader.load_state_dict(first.state_dict())
        list(islice(reader, 4))
    last = open_reader(made["unstepped"])
    last.load_state_dict(ranks[0].state_dict())

    assert all(reader.state_dict() == ranks[0].state_dict() for reader in ranks)
    assert delivered(last) == order[begin + 4 * size :]


def test_state_inside_a_step_counts_deliveries_and_needs_the_same_ranks(made: dict[str, Path]) -> None:
    reader = open_reader(made["stepped"], 1, 2, batch_size=3)
    list(islice(reader, 3))
    state = reader.state_dict()

    assert (state["position"], state["taken"], state["world_size"]) == (8, 3, 2)
    with pytest.raises(ConfigError, match="2 ranks began"):
        open_reader(made["stepped"], 1, 4).load_state_dict(state)


def test_reader_at_its_end_gives_nothing_until_it_is_rewound(made: dict[str, Path]) -> None:
    reader = open_reader(made["stepped"])
    whole = list(reader)
    at_the_end = list(reader)
    reader.rewind()

    assert at_the_end == []
    assert all(map(same, list(reader), whole))


def test_state_of_another_order_is_refused(made: dict[str, Path]) -> None:
    state = open_reader(made["growing"]).state_dict()
    with pytest.raises(IntegrityError, match="the state's order"):
        open_reader(made["stepped"]).load_state_dict(state)


@pytest.mark.slow
def test_state_of_the_same_order_over_other_tokens_is_refused(made: dict[str, Path], tmp_path: Path) -> None:
    other = make(tmp_path / "project", word="letter", **STEPPED)
    state = open_reader(made["stepped"]).state_dict()

    assert current(other)["order"] == current(made["stepped"])["order"]
    with pytest.raises(IntegrityError, match="the state's content"):
        open_reader(other).load_state_dict(state)


# ── Layouts ────────────────────────────────────────────────────────────────────────────────────────


def sequence(ids: list[int], labels: list[int], lengths: list[int]) -> PackedSequence:
    return PackedSequence(np.array(ids, np.int32), np.array(labels, np.int32), np.array(lengths, np.int32))


TWO = [sequence([11, 12, 13], [-100, 12, -100], [2, 1]), sequence([14, 15], [-100, 15], [2])]


def test_flat_layout_joins_sequences_without_padding() -> None:
    batch = join_flat(TWO, pad_id=9, length=None)

    assert {name: np.asarray(value).tolist() for name, value in batch.items()} == {
        "input_ids": [[11, 12, 13, 14, 15]],
        "labels": [[-100, 12, -100, -100, 15]],
        "position_ids": [[0, 1, 0, 0, 1]],
        "seq_idx": [[0, 0, 1, 2, 2]],
        "cu_seq_lens_q": [0, 2, 3, 5],
        "cu_seq_lens_k": [0, 2, 3, 5],
        "max_length_q": 2,
        "max_length_k": 2,
    }


def test_flat_layout_filled_up_to_a_length_has_one_span_more() -> None:
    batch = join_flat(TWO, pad_id=9, length=8)

    assert {name: np.asarray(value).tolist() for name, value in batch.items()} == {
        "input_ids": [[11, 12, 13, 14, 15, 9, 9, 9]],
        "labels": [[-100, 12, -100, -100, 15, -100, -100, -100]],
        "position_ids": [[0, 1, 0, 0, 1, 0, 1, 2]],
        "seq_idx": [[0, 0, 1, 2, 2, -1, -1, -1]],
        "cu_seq_lens_q": [0, 2, 3, 5, 8],
        "cu_seq_lens_k": [0, 2, 3, 5, 8],
        "max_length_q": 3,
        "max_length_k": 3,
    }


def test_flat_layout_filled_up_has_padding_alone_in_its_last_span() -> None:
    padded = [replace(TWO[0], padding=np.array([1, 0], np.int32)), replace(TWO[1], padding=np.array([1], np.int32))]

    batch = join_flat(padded, pad_id=9, length=8)

    assert batch["cu_seqlens_padded"].tolist() == [0, 2, 3, 5, 8]
    assert batch["cu_seqlens"].tolist() == [0, 1, 2, 3, 3]


def test_flat_layout_of_just_that_length_is_not_filled() -> None:
    assert same(join_flat(TWO, pad_id=9, length=5), join_flat(TWO, pad_id=9, length=None))
    with pytest.raises(ConfigError, match="pad_to: 4"):
        join_flat(TWO, pad_id=9, length=4)


def test_padded_layout_fills_up_at_the_right() -> None:
    batch = stack_padded(TWO, pad_id=9, length=4)

    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[11, 12, 13, 9], [14, 15, 9, 9]],
        "labels": [[-100, 12, -100, -100], [-100, 15, -100, -100]],
        "position_ids": [[0, 1, 0, 0], [0, 1, 0, 0]],
        "segment_ids": [[0, 0, 1, -1], [0, 0, -1, -1]],
        "attention_mask": [[1, 1, 1, 0], [1, 1, 0, 0]],
    }


def test_padded_layout_refuses_a_sequence_longer_than_pad_to() -> None:
    with pytest.raises(ConfigError, match="pad_to: 2"):
        stack_padded(TWO, pad_id=9, length=2)


@pytest.mark.slow
@given(data=st.data())
@settings(deadline=None, max_examples=draw(40))
def test_layouts_of_any_sequences_hold_the_same_tokens(made: dict[str, Path], data: st.DataObject) -> None:
    lain_flat, lain_padded = (open_reader(made["stepped"], 1, 2, layout=name) for name in ("flat", "padded"))
    numbers = data.draw(st.lists(st.integers(-len(lain_flat), len(lain_flat) - 1), min_size=1, max_size=12))
    joined, stacked = lain_flat.get_batch(numbers), lain_padded.get_batch(numbers)
    kept = stacked["attention_mask"] == 1
    rows = [lain_flat[i] for i in numbers]

    assert np.array_equal(joined["input_ids"][0], np.concatenate([row.input_ids for row in rows]))
    assert np.array_equal(np.diff(joined["cu_seq_lens_q"]), np.concatenate([row.seq_lengths for row in rows]))
    assert np.array_equal(kept, stacked["segment_ids"] >= 0)
    for name in ("input_ids", "labels", "position_ids"):
        assert np.array_equal(joined[name][0], stacked[name][kept])
    assert joined["max_length_q"] == max(row.seq_lengths.max() for row in rows)


def test_position_ids_are_those_stored(made: dict[str, Path]) -> None:
    reader = open_reader(made["stepped"], 1, 4)
    tables = [pq.read_table(path, columns=["position_ids"]) for path in reader.data_files["rank-00001-of-00004"]]
    stored = pa.concat_tables(tables).column(0).to_pylist()

    assert [reader[i].position_ids.tolist() for i in range(len(reader))] == stored


# ── Views ──────────────────────────────────────────────────────────────────────────────────────────


def test_slices_are_those_of_a_list(made: dict[str, Path]) -> None:
    reader = open_reader(made["stepped"])
    every = delivered(open_reader(made["stepped"], batch_size=1))

    assert delivered(reader.slice_dataset(2, 7)) == every[2:7]
    assert delivered(reader.slice_dataset(2, 7).slice_dataset(1, 99)) == every[3:7]
    assert delivered(reader.take(3)) == every[:3]
    assert delivered(reader.slice_dataset(-2, len(reader))) == every[-2:]
    assert reader[-1].input_ids.astype(np.int64).tobytes() == every[-1]


def test_views_deliver_nothing_of_the_run(made: dict[str, Path]) -> None:
    reader = open_reader(made["stepped"])
    before = reader.state_dict()
    list(reader.take(20))
    reader.get_batch([0, 5])

    assert reader.state_dict() == before


@pytest.mark.parametrize("index", [10_000, -10_000])
def test_sequence_that_is_not_there_is_an_index_error(made: dict[str, Path], index: int) -> None:
    reader = open_reader(made["stepped"])
    with pytest.raises(IndexError):
        reader[index]
    with pytest.raises(IndexError):
        reader.get_batch([0, index])


def test_map_changes_sequences_and_map_batches_what_is_made_of_them(made: dict[str, Path]) -> None:
    reader = open_reader(made["stepped"])
    untrained = reader.map(lambda row: replace(row, labels=np.full_like(row.labels, -100)))
    counts = untrained.map_batches(lambda batch: int((batch["labels"] != -100).sum())).map_batches(
        lambda count: count + 1
    )

    assert set(untrained[3].labels.tolist()) == {-100}
    assert set(counts) == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "view", [lambda r: r.shuffle(3), lambda r: r.era_shuffle(3, era_length=7)], ids=["shuffle", "era_shuffle"]
)
def test_shuffled_view_is_a_repeatable_permutation(
    made: dict[str, Path], view: Callable[[Reader], Iterable[Batch]]
) -> None:
    every = delivered(open_reader(made["stepped"], batch_size=1))
    once, twice = (delivered(view(open_reader(made["stepped"]))) for _ in range(2))

    assert once == twice != every
    assert sorted(once) == sorted(every)


def test_era_shuffle_keeps_every_sequence_in_its_era(made: dict[str, Path]) -> None:
    every = delivered(open_reader(made["stepped"], batch_size=1))
    moved = delivered(open_reader(made["stepped"]).era_shuffle(3, era_length=7))

    assert all(sorted(moved[i : i + 7]) == sorted(every[i : i + 7]) for i in range(0, len(every), 7))


def test_awaited_sequences_are_those_of_plain_reading(made: dict[str, Path]) -> None:
    reader = open_reader(made["stepped"])

    async def read() -> tuple[int, list[PackedSequence]]:
        return await reader.async_len(), await asyncio.gather(*(reader.getitem_async(i) for i in range(20)))

    length, rows = asyncio.run(read())

    assert length == len(reader)
    assert [row.input_ids.tolist() for row in rows] == [reader[i].input_ids.tolist() for i in range(20)]


# ── Refusals ───────────────────────────────────────────────────────────────────────────────────────


def shard_of(root: Path, rank: int) -> Path:
    return root / current(root)["ranks"][f"rank-{rank:05d}-of-00004"]["files"][0][0]


def rewrite_card(path: Path, **card: str) -> None:
    """Write a shard again with another identity card, and its new digest nowhere."""
    table = pq.read_table(path, partitioning=None)
    metadata = table.schema.metadata | {f"rowmill.{name}".encode(): value.encode() for name, value in card.items()}
    pq.write_table(table.replace_schema_metadata(metadata), path, compression="zstd")


def test_published_folder_alone_is_enough(made: dict[str, Path], copied: Path) -> None:
    assert interleaved([open_reader(copied, batch_size=1, verify=True)]) == order_of(made["stepped"])


def test_recipe_that_was_not_published_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"current\.json: missing; .* run `rowmill build`"):
        open_reader(tmp_path)


def test_shard_that_is_missing_is_refused_at_once(copied: Path) -> None:
    shard_of(copied, 2).unlink()

    assert len(open_reader(copied, 1, 4)) > 0, "rank 1 of 4 does not read it"
    with pytest.raises(IntegrityError, match="missing"):
        open_reader(copied, 0, 2)


def test_shard_cut_short_is_refused(copied: Path) -> None:
    shard = shard_of(copied, 0)
    os.truncate(shard, shard.stat().st_size - 100)
    with pytest.raises(IntegrityError, match="not a readable Parquet file"):
        open_reader(copied)


def test_shard_of_another_length_is_refused_by_its_footer(copied: Path) -> None:
    shard = shard_of(copied, 0)
    content = shard.read_bytes()
    shard.write_bytes(content[:50] + content[60:])
    with pytest.raises(IntegrityError, match=r"bytes \d+, but \d+ was published"):
        open_reader(copied)


def test_changed_bytes_of_the_right_length_are_found_by_verify(copied: Path) -> None:
    shard = shard_of(copied, 0)
    content = bytearray(shard.read_bytes())
    content[60] ^= 1
    shard.write_bytes(content)

    assert len(open_reader(copied)) > 0
    with pytest.raises(IntegrityError, match="digest"):
        open_reader(copied, verify=True)


@pytest.mark.parametrize(
    "card", [{"order": "0" * 32}, {"tokenizer_digest": "0" * 32}, {"rank": "1"}, {"world_size": "8"}]
)
def test_shard_of_another_build_is_refused(copied: Path, card: dict[str, str]) -> None:
    rewrite_card(shard_of(copied, 0), **card)
    with pytest.raises(IntegrityError, match=next(iter(card))):
        open_reader(copied)


def test_shard_with_other_rows_is_refused(copied: Path) -> None:
    shard = shard_of(copied, 0)
    pq.write_table(pq.read_table(shard, partitioning=None).slice(1), shard)
    with pytest.raises(IntegrityError, match="rows"):
        open_reader(copied)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.pop("order"), "KeyError"),
        (lambda raw: raw["ranks"].popitem(), "equal ranks"),
        (lambda raw: raw.update(places=raw["places"] + 8), "its steps end at place"),
    ],
)
def test_published_file_that_contradicts_itself_is_refused(
    copied: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    raw = current(copied)
    change(raw)
    raw.pop(SEAL_KEY)
    Store(str(copied)).write_sealed("tiny/gpu_partitions/current.json", raw)
    with pytest.raises(IntegrityError, match=words):
        open_reader(copied)


def flip_a_digit(content: bytes) -> bytes:
    return content.replace(b'"places": ', b'"places": 1', 1)


def swap_two_ranks(content: bytes) -> bytes:
    raw = orjson.loads(content)
    first, second = list(raw["ranks"])[:2]
    raw["ranks"][first], raw["ranks"][second] = raw["ranks"][second], raw["ranks"][first]
    return orjson.dumps(raw)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda _: b"",
    "cut": lambda content: content[: len(content) // 2],
    "other-json": lambda _: b"[]",
    "without-seal": lambda content: orjson.dumps({k: v for k, v in orjson.loads(content).items() if k != SEAL_KEY}),
    "digit": flip_a_digit,
    "ranks-swapped": swap_two_ranks,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_published_file_that_is_not_as_it_was_written_is_refused(copied: Path, damage: str) -> None:
    path = copied / "tiny" / "gpu_partitions" / "current.json"
    content = DAMAGES[damage](path.read_bytes())
    assert content != path.read_bytes()
    path.write_bytes(content)

    with pytest.raises(
        DamagedFileError,
        match=r"tiny/gpu_partitions/current\.json: truncated, or changed .*; copy it again, or build 'tiny'",
    ):
        open_reader(copied)


def test_tokenizer_of_the_build_is_accepted_and_another_refused(made: dict[str, Path], tmp_path: Path) -> None:
    content = orjson.loads((TOKENIZER / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer.json").write_bytes(orjson.dumps(content | {"version": "0.9"}))
    open_reader(made["stepped"], tokenizer=TOKENIZER)

    with pytest.raises(IntegrityError, match="not the tokenizer of"):
        open_reader(made["stepped"], tokenizer=tmp_path)
    with pytest.raises(ConfigError, match="missing"):
        open_reader(made["stepped"], tokenizer=tmp_path / "nowhere")


def test_build_on_remote_storage_reads_as_the_local_one(made: dict[str, Path]) -> None:
    remote = fsspec.filesystem("memory")
    remote.put(str(made["stepped"] / "tiny" / "gpu_partitions"), "/copied/tiny/gpu_partitions", recursive=True)

    assert interleaved([open_reader("memory://copied", batch_size=1, verify=True)]) == order_of(made["stepped"])


# ── torch ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed; tensors cannot be tested here")


def test_tensors_are_the_arrays(torch: Any, made: dict[str, Path]) -> None:
    for layout in ("flat", "padded"):
        tensors = Reader(made["stepped"], "tiny", rank=0, world_size=2, layout=layout)
        for given_batch, batch in zip(tensors, open_reader(made["stepped"], 0, 2, layout=layout), strict=True):
            assert all(isinstance(value, torch.Tensor | int) for value in given_batch.values())
            assert same({name: np.asarray(value) for name, value in given_batch.items()}, batch)


def llama(torch: Any, attention: str) -> Any:
    """Return a model small enough for a test, without a cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "attn_implementation": attention}
    return LlamaForCausalLM(LlamaConfig(vocab_size=8192, use_cache=False, **shape)).eval()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_segments_do_not_see_each_other_in_a_model(torch: Any, made: dict[str, Path], attention: str) -> None:
    """Each segment alone, the flat batch, and the padded batch without its attention mask give the same logits.

    Only without a cache, which transformers makes unless told not to: with one, position ids part no segments.
    """
    model = llama(torch, attention)
    readers = [open_reader(made["stepped"], layout=layout, as_torch=True) for layout in ("flat", "padded")]
    joined, stacked = (reader.get_batch([0, 3, 5]) for reader in readers)
    kept = stacked.pop("attention_mask") == 1
    stacked.pop("segment_ids")
    with torch.no_grad():
        pieces = torch.split(joined["input_ids"][0], np.diff(joined["cu_seq_lens_q"]).tolist())
        alone = torch.cat([model(input_ids=piece[None]).logits[0] for piece in pieces])
        together = model(**joined).logits[0]
        rows = model(**stacked).logits[kept]

    assert len(pieces) > 3
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(rows, alone, atol=1e-5, rtol=1e-4)


def test_losses_of_ranks_and_batches_add_up_to_the_mean_of_the_step(torch: Any, made: dict[str, Path]) -> None:
    """Fillers and uneven batches change nothing when each loss is divided by the targets of the whole step."""
    model = llama(torch, "sdpa")
    whole = open_reader(made["stepped"], as_torch=True)
    ranks = [open_reader(made["stepped"], rank, 4, batch_size=1, as_torch=True) for rank in range(4)]
    parts: dict[int, list[Any]] = {}
    with torch.no_grad():
        means = [model(**batch).loss for batch in whole]
        for reader in ranks:
            for batch in reader:
                assert reader.step is not None
                loss = model(**batch, num_items_in_batch=reader.step.trained_tokens).loss
                parts.setdefault(reader.step.number, []).append(loss)

    torch.testing.assert_close(torch.stack(means), torch.stack([sum(one) for one in parts.values()]))


def test_tensors_that_were_asked_for_without_torch_are_refused(made: dict[str, Path]) -> None:
    from importlib.util import find_spec

    if find_spec("torch") is not None:
        pytest.skip("torch is installed; its absence cannot be tested here")
    with pytest.raises(ConfigError, match="torch is not installed"):
        Reader(made["stepped"], "tiny", rank=0, world_size=1, as_torch=True)


def test_rows_are_views_of_flat_buffers(made: dict[str, Path]) -> None:
    """No object per token: a sequence's arrays are int32 buffers of as many tokens."""
    row = open_reader(made["stepped"])[0]
    stored = pa.array(row.input_ids)

    assert (row.input_ids.dtype, row.labels.dtype, stored.type) == (np.int32, np.int32, pa.int32())
    assert int(row.seq_lengths.sum()) == len(row.input_ids) == len(row.labels)
