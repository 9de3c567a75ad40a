"""The reader: one order for every world size, exact resumes, two layouts, and refusal of what is not the build."""

import asyncio
import hashlib
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
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.core.errors import ConfigError, DamagedFileError, IntegrityError
from rowmill.core.json import SEAL_KEY
from rowmill.core.storage import Store
from rowmill.reader import Batch, PackedSequence, Reader
from rowmill.reader.layouts import join_flat, stack_padded
from rowmill.schema import manifest
from rowmill.schema.shard_counts import select_shards
from tests.support.reader_builds import STEPPED, TOKENIZER, current, delivered, make, open_reader, shard_of
from tests.support.recipes import flip_bit
from tests.support.tiers import draw

DIVISORS = (1, 2, 4, 8)


@pytest.fixture
def copied(made: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of the stepped build's published folder alone, to be damaged."""
    shutil.copytree(made["stepped"] / "tiny" / "gpu_partitions", tmp_path / "tiny" / "gpu_partitions")
    return tmp_path


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
        shards = [part.files["shard"] for part in select_shards(packed.parts, "train")]
        rows.append([ids for shard in shards for ids in store.table(shard, ["input_ids"]).column(0).to_pylist()])
    pad = found["card"]["pad_id"]
    pairs = zip(order.column("dataset").to_pylist(), order.column("sequence_id").to_pylist(), strict=True)
    return [np.array([pad, pad] if dataset < 0 else rows[dataset][item], np.int64).tobytes() for dataset, item in pairs]


@pytest.mark.parametrize("name", ["stepped", "unstepped"])
def test_identity_is_the_same_on_every_rank_and_is_json(made: dict[str, Path], name: str) -> None:
    found = current(made[name])
    first, *others = [open_reader(made[name], rank, 4).identity for rank in range(4)]

    assert json.loads(json.dumps(first)) == first
    assert all(other == first for other in others)
    assert {key: first[key] for key in ("recipe", "version", "order")} == {
        key: found[key] for key in ("recipe", "version", "order")
    }
    assert first["digest"] == open_reader(made[name]).state_dict()["content"]
    assert (first["layout"], first["stored_ranks"], first["world_size"]) == ("copied", found["world_size"], 4)
    assert first["templates"] == {"tasks": None, "texts": None}
    assert first["tokenizer_json"] == hashlib.sha256((TOKENIZER / "tokenizer.json").read_bytes()).hexdigest()


def test_identity_is_that_of_the_bytes_wherever_they_were_made(made: dict[str, Path], tmp_path: Path) -> None:
    first = open_reader(made["stepped"]).identity
    again = open_reader(make(tmp_path / "again", **STEPPED)).identity
    other = open_reader(make(tmp_path / "other", word="figure", **STEPPED)).identity

    assert again == first
    assert {key for key in first if first[key] != other[key]} == {"version", "digest", "order"}


def interleaved(readers: list[Reader]) -> list[bytes]:
    """Return what ranks in lockstep are shown, place by place."""
    return [row for together in zip(*map(delivered, readers), strict=True) for row in together]


def ranks_of(root: Path, world_size: int, **options: Any) -> list[Reader]:
    return [open_reader(root, rank, world_size, **options) for rank in range(world_size)]


def same(one: Batch, other: Batch) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# ── One order ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("world_size", DIVISORS)
@pytest.mark.parametrize("name", ["stepped", "unstepped"])
def test_ranks_together_give_the_order_for_every_world_size(made: dict[str, Path], name: str, world_size: int) -> None:
    assert interleaved(ranks_of(made[name], world_size, batch_size=1)) == order_of(made[name])


@pytest.mark.parametrize("options", [{"rank": 2, "world_size": 2}, {"batch_size": 0}, {"layout": "ragged"}])
def test_impossible_options_and_world_sizes_are_refused(made: dict[str, Path], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=";"):
        open_reader(made["stepped"], **options)
    with pytest.raises(ConfigError, match=r"world_size: 3 does not divide .* choose 2 or 4"):
        next(iter(open_reader(made["stepped"], 0, 3)))


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
    ranks = ranks_of(made["stepped"], 2)
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
    layout = data.draw(st.sampled_from(["flat", "padded"]))
    whole, first, second = (
        open_reader(made[name], rank, world_size, batch_size=batch_size, layout=layout) for _ in range(3)
    )
    expected = list(whole)
    seen = list(islice(first, data.draw(st.integers(0, len(expected)))))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found = seen + list(second)

    assert len(found) == len(expected)
    assert all(map(same, found, expected))


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
    firsts = ranks_of(made[name], before)
    for reader in firsts:
        list(islice(reader, step))
    states = [reader.state_dict() for reader in firsts]
    position = states[0]["position"]
    if (len(order) - position) % after:
        return
    seconds = ranks_of(made[name], after, batch_size=1)
    for reader in seconds:
        reader.load_state_dict(states[0])
    # Rank r keeps to the places p with p mod W = r, so the first place may be another rank's turn.
    turns = seconds[position % after :] + seconds[: position % after]

    assert all(state == states[0] for state in states)
    assert interleaved(turns) == order[position:]


def test_world_size_that_divides_only_later_steps_goes_on_from_there(made: dict[str, Path]) -> None:
    first = open_reader(made["growing"], 0, 2)
    list(islice(first, 3))
    state, fours = first.state_dict(), ranks_of(made["growing"], 4, batch_size=1)
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
    first, last = open_reader(made["unstepped"]), open_reader(made["unstepped"])
    begin = len(list(islice(first, len(order) % size)))
    ranks = ranks_of(made["unstepped"], size)
    for reader in ranks:
        reader.load_state_dict(first.state_dict())
        list(islice(reader, 4))
    last.load_state_dict(ranks[0].state_dict())

    assert all(reader.state_dict() == ranks[0].state_dict() for reader in ranks)
    assert delivered(last) == order[begin + 4 * size :]


@pytest.mark.slow
def test_states_of_other_ranks_orders_and_tokens_are_refused(made: dict[str, Path], tmp_path: Path) -> None:
    reader = open_reader(made["stepped"], 1, 2, batch_size=3)
    list(islice(reader, 3))
    state = reader.state_dict()

    assert (state["position"], state["taken"], state["world_size"]) == (8, 3, 2)
    with pytest.raises(ConfigError, match="2 ranks began"):
        open_reader(made["stepped"], 1, 4).load_state_dict(state)
    state = open_reader(made["growing"]).state_dict()
    with pytest.raises(IntegrityError, match="the state's order"):
        open_reader(made["stepped"]).load_state_dict(state)
    other = make(tmp_path / "project", word="letter", **STEPPED)
    state = open_reader(made["stepped"]).state_dict()
    assert current(other)["order"] == current(made["stepped"])["order"]
    with pytest.raises(IntegrityError, match="the state's content"):
        open_reader(other).load_state_dict(state)


def test_reader_at_its_end_gives_nothing_until_it_is_rewound(made: dict[str, Path]) -> None:
    reader = open_reader(made["stepped"])
    whole = list(reader)
    assert list(reader) == []
    reader.rewind()
    assert all(map(same, list(reader), whole))


# ── Layouts ────────────────────────────────────────────────────────────────────────────────────────


def sequence(ids: list[int], labels: list[int], lengths: list[int]) -> PackedSequence:
    return PackedSequence(np.array(ids, np.int32), np.array(labels, np.int32), np.array(lengths, np.int32))


TWO = [sequence([11, 12, 13], [-100, 12, -100], [2, 1]), sequence([14, 15], [-100, 15], [2])]


FLAT = {
    "input_ids": [[11, 12, 13, 14, 15]],
    "labels": [[-100, 12, -100, -100, 15]],
    "position_ids": [[0, 1, 0, 0, 1]],
    "seq_idx": [[0, 0, 1, 2, 2]],
    "cu_seq_lens_q": [0, 2, 3, 5],
    "cu_seq_lens_k": [0, 2, 3, 5],
    "max_length_q": 2,
    "max_length_k": 2,
}
FILLED = {
    "input_ids": [[11, 12, 13, 14, 15, 9, 9, 9]],
    "labels": [[-100, 12, -100, -100, 15, -100, -100, -100]],
    "position_ids": [[0, 1, 0, 0, 1, 0, 1, 2]],
    "seq_idx": [[0, 0, 1, 2, 2, -1, -1, -1]],
    "cu_seq_lens_q": [0, 2, 3, 5, 8],
    "cu_seq_lens_k": [0, 2, 3, 5, 8],
    "max_length_q": 3,
    "max_length_k": 3,
}


@pytest.mark.parametrize(
    ("length", "expected"),
    [(None, FLAT), (5, FLAT), (8, FILLED)],
    ids=["joined without padding", "of just that length", "filled up with one span more"],
)
def test_flat_layout(length: int | None, expected: dict[str, Any]) -> None:
    batch = join_flat(TWO, pad_id=9, length=length)
    assert {name: np.asarray(value).tolist() for name, value in batch.items()} == expected


def test_flat_layout_filled_up_has_padding_alone_in_its_last_span() -> None:
    padded = [replace(TWO[0], padding=np.array([1, 0], np.int32)), replace(TWO[1], padding=np.array([1], np.int32))]
    batch = join_flat(padded, pad_id=9, length=8)
    assert batch["cu_seqlens_padded"].tolist() == [0, 2, 3, 5, 8]
    assert batch["cu_seqlens"].tolist() == [0, 1, 2, 3, 3]


@pytest.mark.parametrize(("lay_out", "length"), [(join_flat, 4), (stack_padded, 2)])
def test_layout_refuses_sequences_longer_than_pad_to(lay_out: Callable[..., Batch], length: int) -> None:
    with pytest.raises(ConfigError, match=f"pad_to: {length}"):
        lay_out(TWO, pad_id=9, length=length)


def test_padded_layout_fills_up_at_the_right() -> None:
    batch = stack_padded(TWO, pad_id=9, length=4)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[11, 12, 13, 9], [14, 15, 9, 9]],
        "labels": [[-100, 12, -100, -100], [-100, 15, -100, -100]],
        "position_ids": [[0, 1, 0, 0], [0, 1, 0, 0]],
        "segment_ids": [[0, 0, 1, -1], [0, 0, -1, -1]],
        "attention_mask": [[1, 1, 1, 0], [1, 1, 0, 0]],
    }


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


def test_sequences_hold_what_is_stored_in_flat_buffers(made: dict[str, Path]) -> None:
    reader = open_reader(made["stepped"], 1, 4)
    tables = [pq.read_table(path, columns=["position_ids"]) for path in reader.data_files["rank-00001-of-00004"]]
    stored = pa.concat_tables(tables).column(0).to_pylist()
    assert [reader[i].position_ids.tolist() for i in range(len(reader))] == stored
    # No object per token: a sequence's arrays are int32 buffers of as many tokens.
    row = reader[0]
    assert (row.input_ids.dtype, row.labels.dtype, pa.array(row.input_ids).type) == (np.int32, np.int32, pa.int32())
    assert int(row.seq_lengths.sum()) == len(row.input_ids) == len(row.labels)


# ── Views ──────────────────────────────────────────────────────────────────────────────────────────


def test_slices_are_those_of_a_list_and_deliver_nothing_of_the_run(made: dict[str, Path]) -> None:
    reader = open_reader(made["stepped"])
    every = delivered(open_reader(made["stepped"], batch_size=1))

    assert delivered(reader.slice_dataset(2, 7)) == every[2:7]
    assert delivered(reader.slice_dataset(2, 7).slice_dataset(1, 99)) == every[3:7]
    assert delivered(reader.take(3)) == every[:3]
    assert delivered(reader.slice_dataset(-2, len(reader))) == every[-2:]
    assert reader[-1].input_ids.astype(np.int64).tobytes() == every[-1]
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


def test_awaited_and_mapped_sequences_are_those_of_plain_reading(made: dict[str, Path]) -> None:
    reader = open_reader(made["stepped"])

    async def read() -> tuple[int, list[PackedSequence]]:
        return await reader.async_len(), await asyncio.gather(*(reader.getitem_async(i) for i in range(20)))

    length, rows = asyncio.run(read())

    assert length == len(reader)
    assert [row.input_ids.tolist() for row in rows] == [reader[i].input_ids.tolist() for i in range(20)]
    untrained = reader.map(lambda row: replace(row, labels=np.full_like(row.labels, -100)))
    counts = untrained.map_batches(lambda batch: int((batch["labels"] != -100).sum()))
    assert set(untrained[3].labels.tolist()) == {-100}
    assert set(counts.map_batches(lambda count: count + 1)) == {1}


# ── Refusals ───────────────────────────────────────────────────────────────────────────────────────


def rewrite_card(path: Path, **card: str) -> None:
    """Write a shard again with another identity card, and its new digest nowhere."""
    table = pq.read_table(path, partitioning=None)
    metadata = table.schema.metadata | {f"rowmill.{name}".encode(): value.encode() for name, value in card.items()}
    pq.write_table(table.replace_schema_metadata(metadata), path, compression="zstd")


def test_published_folder_alone_is_enough_also_on_remote_storage(made: dict[str, Path], copied: Path) -> None:
    assert interleaved([open_reader(copied, batch_size=1, verify=True)]) == order_of(made["stepped"])
    remote = fsspec.filesystem("memory")
    remote.put(str(made["stepped"] / "tiny" / "gpu_partitions"), "/copied/tiny/gpu_partitions", recursive=True)
    assert interleaved([open_reader("memory://copied", batch_size=1, verify=True)]) == order_of(made["stepped"])


def test_recipe_that_was_not_published_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"current\.json: missing; .* run `rowmill build`"):
        open_reader(tmp_path)


def without_its_first_row(path: Path) -> None:
    pq.write_table(pq.read_table(path, partitioning=None).slice(1), path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 100), "not a readable Parquet file"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:50] + path.read_bytes()[60:]),
            r"bytes \d+, but \d+ was published",
        ),
        (lambda path: rewrite_card(path, order="0" * 32), "order"),
        (lambda path: rewrite_card(path, tokenizer_digest="0" * 32), "tokenizer_digest"),
        (lambda path: rewrite_card(path, rank="1"), "rank"),
        (lambda path: rewrite_card(path, world_size="8"), "world_size"),
        (without_its_first_row, "rows"),
    ],
    ids=["cut short", "another length", "order", "tokenizer", "rank", "world size", "other rows"],
)
def test_shard_that_is_not_as_published_is_refused(
    copied: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(shard_of(copied, 0))
    with pytest.raises(IntegrityError, match=message):
        open_reader(copied)


def test_shard_that_is_missing_or_whose_bytes_changed_is_refused(copied: Path) -> None:
    shard = shard_of(copied, 0)
    flip_bit(shard, 60)

    assert len(open_reader(copied)) > 0
    with pytest.raises(IntegrityError, match="digest"):
        open_reader(copied, verify=True)
    shard_of(copied, 2).unlink()
    assert len(open_reader(copied, 1, 4)) > 0, "rank 1 of 4 does not read it"
    with pytest.raises(IntegrityError, match="missing"):
        open_reader(copied, 0, 2)


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
    "digit": lambda content: content.replace(b'"places": ', b'"places": 1', 1),
    "ranks-swapped": swap_two_ranks,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_published_file_that_is_not_as_it_was_written_is_refused(copied: Path, damage: str) -> None:
    path = copied / "tiny" / "gpu_partitions" / "current.json"
    content = DAMAGES[damage](path.read_bytes())
    assert content != path.read_bytes()
    path.write_bytes(content)

    refusal = r"tiny/gpu_partitions/current\.json: truncated, or changed .*; copy it again, or build 'tiny'"
    with pytest.raises(DamagedFileError, match=refusal):
        open_reader(copied)


def test_tokenizer_of_the_build_is_accepted_and_another_refused(made: dict[str, Path], tmp_path: Path) -> None:
    content = orjson.loads((TOKENIZER / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer.json").write_bytes(orjson.dumps(content | {"version": "0.9"}))
    open_reader(made["stepped"], tokenizer=TOKENIZER)

    with pytest.raises(IntegrityError, match="not the tokenizer of"):
        open_reader(made["stepped"], tokenizer=tmp_path)
    with pytest.raises(ConfigError, match="missing"):
        open_reader(made["stepped"], tokenizer=tmp_path / "nowhere")


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
    parts: dict[int, list[Any]] = {}
    with torch.no_grad():
        means = [model(**batch).loss for batch in open_reader(made["stepped"], as_torch=True)]
        for reader in ranks_of(made["stepped"], 4, batch_size=1, as_torch=True):
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
