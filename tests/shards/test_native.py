"""Native shards: the specification's vector, reading back, conservation, gathering in any order, and padding."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.core.arrays import compute_offsets
from rowmill.core.storage import Store, digest_bytes
from rowmill.packing import pack_plan
from rowmill.schema.content_hash import HASH_MODULUS, format_content_hash
from rowmill.schema.examples import WEIGHT_COLUMN
from rowmill.schema.manifest import File
from rowmill.shards import host_scratch, native
from rowmill.shards.native import Segments, drop_padding
from tests.support.export_cases import sequences
from tests.support.tiers import draw

WEIGHED = {WEIGHT_COLUMN: pa.float32()}


def _segments(parts: list[tuple[list[int], list[int]]], per_sequence: list[int]) -> Segments:
    batch = sequences([parts])
    return Segments(
        ids=batch.ids,
        trained=batch.trained,
        offsets=batch.offsets,
        sequence_offsets=compute_offsets(np.array(per_sequence, np.int64)),
        example_ids=batch.example_ids,
        starts=batch.starts,
    )


def _table(segments: Segments, *, blocked: bool = True, multiple: int = 0) -> pa.Table:
    """Return a shard of segments, each filled up to a multiple if there is one."""
    ranges = np.stack([segments.starts, np.diff(segments.offsets).astype(np.int32)], axis=1)
    plan = pack_plan.SequencePlan(segments.sequence_offsets, np.arange(len(ranges)), ranges)
    lengths, offsets = pack_plan.attention_spans(plan, block_cross_document_attention=blocked)
    trained = pack_plan.mark_targets(segments.ids, segments.trained, lengths, ignore_token_id=None)
    segments = replace(segments, trained=trained)
    if not multiple:
        return native.make_shard_table(segments, lengths, offsets, dataset="d")
    own = pack_plan.count_padding(plan, multiple, block_cross_document_attention=blocked)
    padded = lengths + (own if blocked else np.add.reduceat(own, plan.sequence_offsets[:-1]))
    return native.make_shard_table(segments, padded, offsets, dataset="d", padding=native.Padding(own, 9))


def _back(table: pa.Table) -> pa.Table:
    return native.read_native_shard(native.encode_native_shard(table, {"recipe": "demo"}, group_rows=1024))


TWO: tuple[list[tuple[list[int], list[int]]], list[int]] = ([([10, 11, 2], [0, 1, 1]), ([20, 2], [0, 1])], [2])
"""The specification's vector: two segments of one sequence."""


def test_to_table_of_the_specified_vector() -> None:
    table = _back(_table(_segments(*TWO)))

    [row] = table.to_pylist()
    assert row["input_ids"] == [10, 11, 2, 20, 2]
    assert row["labels"] == [-100, 11, 2, -100, 2]
    assert row["position_ids"] == [0, 1, 2, 0, 1]
    assert row["seq_lengths"] == row["segment_lengths"] == [3, 2]
    assert (row["dataset"], row["tokens"], row["trained_tokens"], row["filler"]) == ("d", 5, 3, False)
    assert table.schema.metadata[b"rowmill.recipe"] == b"demo"


def test_to_table_with_open_attention_runs_positions_on() -> None:
    [row] = _table(_segments([([10, 11], [0, 1]), ([20, 2], [1, 1])], [2]), blocked=False).to_pylist()
    assert row["position_ids"] == [0, 1, 2, 3]
    assert (row["seq_lengths"], row["segment_lengths"]) == ([4], [2, 2])
    assert row["labels"] == [-100, 11, 20, 2]


PARTS = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 1)), min_size=1, max_size=6), min_size=1, max_size=8
)


@pytest.mark.slow
@settings(deadline=None)
@given(parts=PARTS, data=st.data())
def test_segments_of_what_was_written_are_the_segments(parts: list[list[tuple[int, int]]], data: st.DataObject) -> None:
    first = data.draw(st.integers(1, len(parts)))
    sizes = [first, len(parts) - first] if first < len(parts) else [first]
    segments = _segments([([i for i, _ in p], [m for _, m in p]) for p in parts], sizes)

    back = native.recover_segments(_back(_table(segments)))

    lengths = np.diff(segments.offsets)
    targets = pack_plan.mark_targets(segments.ids, segments.trained, lengths, ignore_token_id=None)
    assert back.ids.tolist() == segments.ids.tolist()
    assert back.trained.tolist() == targets.tolist()
    assert back.offsets.tolist() == segments.offsets.tolist()
    assert back.sequence_offsets.tolist() == segments.sequence_offsets.tolist()
    found, expected = sum(native.hash_sequences(back)), sum(native.hash_segments(replace(segments, trained=targets)))
    assert found % HASH_MODULUS == expected % HASH_MODULUS


def _hash(segments: Segments) -> int:
    return sum(native.hash_segments(segments))


@pytest.mark.parametrize("place", [0, 3, 4])
def test_content_hash_sees_a_token_replaced_by_a_copy(place: int) -> None:
    segments = _segments(*TWO)
    before = _hash(segments)
    segments.ids[place] = 11
    assert _hash(segments) != before


def test_content_hash_sees_a_shifted_mask_and_a_swapped_name() -> None:
    segments = _segments([([10, 11, 2], [0, 1, 1]), ([10, 11, 2], [0, 1, 1])], [2])
    assert _hash(replace(segments, trained=np.roll(segments.trained, 1))) != _hash(segments)
    assert _hash(replace(segments, example_ids=pa.array(["e0#0", "e0#0"]))) != _hash(segments)


def test_content_hash_sees_a_weight_moved_or_changed() -> None:
    segments = _segments(*TWO)
    weights = [np.array(one, np.float32) for one in ([0, 0.5, 2, 0, 1], [0, 2, 0.5, 0, 1], [0, 0.5, 2, 0, 0.5])]
    values = [{WEIGHT_COLUMN: one} for one in weights]
    assert len({_hash(replace(segments, token_values=one)) for one in (*values, {})}) == 4


def test_weights_are_read_back_with_the_content_hash_that_they_were_written_with() -> None:
    weighted = replace(_segments(*TWO), token_values={WEIGHT_COLUMN: np.array([0, 0.5, 2, 0, 1], np.float32)})
    table = _back(_table(weighted))

    assert table.schema.equals(native.extend_schema(native.SHARD_SCHEMA, WEIGHED))
    back = native.recover_segments(table)
    assert back.weights is not None
    assert back.weights.tolist() == [0, 0.5, 2, 0, 1]
    assert native.hash_sequences(back) == [_hash(weighted) % HASH_MODULUS]


def test_fillers_have_two_tokens_no_target_and_no_weight() -> None:
    row = native.make_filler(pad_id=3, token_types={}).to_pylist()[0]
    assert row["input_ids"] == [3, 3]
    assert row["labels"] == [-100, -100]
    assert (row["filler"], row["sequence_id"], row["trained_tokens"]) == (True, -1, 0)
    assert native.make_filler(pad_id=3, token_types=WEIGHED).to_pylist()[0]["loss_weights"] == [0, 0]


@settings(deadline=None, max_examples=draw(30))
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any), data=st.data())
def test_take_returns_the_wanted_rows_in_the_wanted_order(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    wanted = data.draw(st.lists(st.integers(0, sum(sizes) - 1), min_size=1, max_size=12))
    folder = tmp_path_factory.mktemp("scratch")
    firsts = compute_offsets(np.array(sizes, np.int64))
    files = [str(folder / f"{i}.arrow") for i in range(len(sizes))]
    for file, (first, end) in zip(files, pairwise(firsts.tolist()), strict=True):
        rows = pa.array([[n] * (n % 3) for n in range(first, end)], pa.list_(pa.int64()))
        host_scratch.write_scratch_file(pa.table({"row": rows, "name": [str(n) for n in range(first, end)]}), file)

    table = host_scratch.take_rows(files, firsts, np.array(wanted, np.int64))

    assert table.column("name").to_pylist() == [str(n) for n in wanted]
    assert table.column("row").to_pylist() == [[n] * (n % 3) for n in wanted]


def test_cut_joins_the_ranges_in_order() -> None:
    places = native.locate_tokens(np.array([0, 4, 10]), np.array([1, 0, 1]), np.array([2, 0, 0]), np.array([3, 2, 1]))
    assert places.take(np.arange(10)).tolist() == [6, 7, 8, 0, 1, 4]


def test_shard_with_other_sequences_than_the_manifest_records_is_found(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    table = _table(_segments([([10, 11, 2], [0, 1, 1])], [1]))
    content = native.encode_native_shard(table, {}, group_rows=1)
    store.write("shard.parquet", content)
    files = [File("shard.parquet", len(content), digest_bytes(content), 1)]
    own = format_content_hash(sum(native.hash_sequences(native.recover_segments(table.combine_chunks()))))
    found = list(native.find_content_damage(store, "chats", files, format_content_hash(7)))

    assert list(native.find_content_damage(store, "chats", files, own)) == []
    assert found[0].startswith(f"chats: its sequences hash to {own}, expected xxh3:0")


def test_lists_of_a_shard_are_compressed_and_only_single_values_have_statistics() -> None:
    content = native.encode_native_shard(_table(_segments(*TWO)), {}, group_rows=1)

    group = pq.ParquetFile(pa.BufferReader(content)).metadata.row_group(0)
    found = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    listed = {path for path in found if path.endswith(".list.element")}
    assert {path for path, one in found.items() if one.compression == "ZSTD"} == listed
    assert {path for path, one in found.items() if one.is_stats_set} == set(found) - listed
    assert {"input_ids.list.element", "labels.list.element", "position_ids.list.element"} <= listed


LENGTHS = [3, 5, 2, 4]
"""Two sequences: segments of 3 and 5 tokens, then of 2 and 4."""


def _make_padded(multiple: int, *, blocked: bool) -> pa.Table:
    ids = range(10, 10 + sum(LENGTHS))
    parts = [
        ([*ids[end - length : end]], [1] * length) for end, length in zip(np.cumsum(LENGTHS), LENGTHS, strict=True)
    ]
    weights = {WEIGHT_COLUMN: np.ones(len(ids), np.float32)}
    return _table(replace(_segments(parts, [2, 2]), token_values=weights), blocked=blocked, multiple=multiple)


def test_padding_follows_each_segment_and_its_positions_run_on() -> None:
    row = _make_padded(4, blocked=True).to_pylist()[0]

    assert row["input_ids"] == [10, 11, 12, 9, 13, 14, 15, 16, 17, 9, 9, 9]
    assert row["labels"] == [-100, 11, 12, -100, -100, 14, 15, 16, 17, -100, -100, -100]
    assert row["position_ids"] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert row["loss_weights"] == [1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    assert (row["seq_lengths"], row["segment_lengths"], row["segment_padding"]) == ([4, 8], [3, 5], [1, 3])
    assert (row["tokens"], row["trained_tokens"]) == (8, 6)


def test_open_attention_pads_each_sequence_once_at_its_end() -> None:
    table = _make_padded(4, blocked=False)
    assert table.column("seq_lengths").to_pylist() == [[8], [8]]
    assert table.column("segment_padding").to_pylist() == [[0, 0], [0, 2]]
    assert table.column("input_ids").to_pylist()[1] == [18, 19, 20, 21, 22, 23, 9, 9]


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("multiple", [4, 7])
def test_a_shard_without_its_padding_is_the_one_that_was_not_padded(multiple: int, blocked: bool) -> None:
    whole = _make_padded(1, blocked=blocked).drop(["segment_padding"])
    padded = _make_padded(multiple, blocked=blocked)

    assert drop_padding(padded).to_pylist() == whole.to_pylist()
    assert drop_padding(padded.slice(1, 1)).to_pylist() == whole.slice(1, 1).to_pylist()
    assert drop_padding(whole) is whole
    hashes = [native.hash_sequences(native.recover_segments(table)) for table in (padded, whole)]
    assert hashes[0] == hashes[1]


def test_fillers_are_padded_like_segments() -> None:
    row = native.make_filler(pad_id=3, token_types={}, multiple=8).to_pylist()[0]
    assert row["input_ids"] == [3] * 8
    assert row["position_ids"] == list(range(8))
    assert (row["seq_lengths"], row["segment_lengths"], row["segment_padding"]) == ([8], [2], [6])
