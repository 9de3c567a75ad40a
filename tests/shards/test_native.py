"""Native shards: the specification's vector, reading back, conservation, gathering in any order."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.core.storage import Store, digest_bytes
from rowmill.packing import layout
from rowmill.schema.manifest import File
from rowmill.shards import gather, native
from rowmill.shards.native import Segments, Spans
from tests.support.tiers import draw


def _segments(parts: list[tuple[list[int], list[int]]], per_sequence: list[int]) -> Segments:
    lengths = [len(ids) for ids, _ in parts]
    return Segments(
        ids=np.array([i for ids, _ in parts for i in ids], np.int32),
        mask=np.array([bool(m) for _, mask in parts for m in mask]),
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        sequence_offsets=np.concatenate(([0], np.cumsum(per_sequence))).astype(np.int64),
        example_ids=pa.array([f"e{i}#0" for i in range(len(parts))], pa.string()),
        starts=np.zeros(len(parts), np.int32),
    )


def _table(segments: Segments, *, blocked: bool = True) -> pa.Table:
    ranges = np.stack([segments.starts, np.diff(segments.offsets).astype(np.int32)], axis=1)
    plan = layout.SequencePlan(segments.sequence_offsets, np.arange(len(ranges)), ranges)
    lengths, offsets = layout.attention_spans(plan, block_cross_document_attention=blocked)
    labels = layout.make_labels(segments.ids, segments.mask, lengths, ignore_token_id=None)
    spans = Spans(labels, layout.position_ids(lengths), lengths, offsets)
    return native.make_shard_table(segments, spans, dataset="d")


def _back(table: pa.Table) -> pa.Table:
    return native.read_native_shard(native.encode_native_shard(table, {"recipe": "demo"}, group_rows=1024))


def test_to_table_of_the_specified_vector() -> None:
    table = _back(_table(_segments([([10, 11, 2], [0, 1, 1]), ([20, 2], [0, 1])], [2])))

    row = table.to_pylist()[0]
    assert row["input_ids"] == [10, 11, 2, 20, 2]
    assert row["labels"] == [-100, 11, 2, -100, 2]
    assert row["position_ids"] == [0, 1, 2, 0, 1]
    assert row["seq_lengths"] == row["segment_lengths"] == [3, 2]
    assert (row["dataset"], row["tokens"], row["trained_tokens"], row["filler"]) == ("d", 5, 3, False)
    assert table.schema.metadata[b"rowmill.recipe"] == b"demo"


def test_to_table_with_open_attention_runs_positions_on() -> None:
    row = _table(_segments([([10, 11], [0, 1]), ([20, 2], [1, 1])], [2]), blocked=False).to_pylist()[0]

    assert row["position_ids"] == [0, 1, 2, 3]
    assert row["seq_lengths"] == [4]
    assert row["segment_lengths"] == [2, 2]
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
    targets = layout.mark_targets(segments.mask, lengths)
    assert back.ids.tolist() == segments.ids.tolist()
    assert back.mask.tolist() == targets.tolist()
    assert back.offsets.tolist() == segments.offsets.tolist()
    assert back.sequence_offsets.tolist() == segments.sequence_offsets.tolist()
    found, expected = sum(native.hash_sequences(back)), sum(native.hash_segments(segments, targets))
    assert found % native.HASH_MODULUS == expected % native.HASH_MODULUS


@pytest.mark.parametrize("place", [0, 3, 4])
def test_content_hash_sees_a_token_replaced_by_a_copy(place: int) -> None:
    segments = _segments([([10, 11, 2], [0, 1, 1]), ([20, 2], [0, 1])], [2])
    before = sum(native.hash_segments(segments, segments.mask))

    segments.ids[place] = 11

    assert sum(native.hash_segments(segments, segments.mask)) != before


def test_content_hash_sees_a_shifted_mask_and_a_swapped_name() -> None:
    segments = _segments([([10, 11, 2], [0, 1, 1]), ([10, 11, 2], [0, 1, 1])], [2])
    before = sum(native.hash_segments(segments, segments.mask))
    shifted = np.roll(segments.mask, 1)
    renamed = Segments(
        segments.ids,
        segments.mask,
        segments.offsets,
        segments.sequence_offsets,
        pa.array(["e0#0", "e0#0"]),
        segments.starts,
    )

    assert sum(native.hash_segments(segments, shifted)) != before
    assert sum(native.hash_segments(renamed, renamed.mask)) != before


def test_content_hash_sees_a_weight_moved_or_changed() -> None:
    segments = _segments([([10, 11, 2], [0, 1, 1]), ([20, 2], [0, 1])], [2])
    given_weights = ([0, 0.5, 2, 0, 1], [0, 2, 0.5, 0, 1], [0, 0.5, 2, 0, 0.5], None)

    hashes = [
        sum(native.hash_segments(replace(segments, weights=weights), segments.mask))
        for weights in (None if one is None else np.array(one, np.float32) for one in given_weights)
    ]

    assert len(set(hashes)) == len(given_weights)


def test_weights_are_read_back_with_the_content_hash_that_they_were_written_with() -> None:
    segments = _segments([([10, 11, 2], [0, 1, 1]), ([20, 2], [0, 1])], [2])
    weighted = replace(segments, weights=np.array([0, 0.5, 2, 0, 1], np.float32))

    table = _back(_table(weighted))

    assert table.schema.equals(native.make_shard_schema(weighted=True))
    back = native.recover_segments(table)
    assert back.weights is not None
    assert back.weights.tolist() == [0, 0.5, 2, 0, 1]
    assert native.hash_sequences(back) == [sum(native.hash_segments(weighted, segments.mask)) % native.HASH_MODULUS]


def test_fillers_of_a_weighted_recipe_weigh_nothing() -> None:
    assert native.make_fillers(1, pad_id=3, dataset="", weighted=True).to_pylist()[0]["loss_weights"] == [0, 0]


def test_fillers_have_two_tokens_and_no_target() -> None:
    row = native.make_fillers(2, pad_id=3, dataset="", weighted=False).to_pylist()[1]

    assert row["input_ids"] == [3, 3]
    assert row["labels"] == [-100, -100]
    assert (row["filler"], row["sequence_id"], row["trained_tokens"]) == (True, -1, 0)


@settings(deadline=None, max_examples=draw(30))
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5), data=st.data())
def test_take_returns_the_wanted_rows_in_the_wanted_order(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    total = sum(sizes)
    wanted = data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=12)) if total else []
    if not wanted:
        return
    folder = tmp_path_factory.mktemp("scratch")
    firsts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    files: list[str] = []
    for i, size in enumerate(sizes):
        rows = [[n] * (n % 3) for n in range(int(firsts[i]), int(firsts[i]) + size)]
        path = folder / f"{i}.arrow"
        gather.write_scratch_file(
            pa.table(
                {
                    "row": pa.array(rows, pa.list_(pa.int64())),
                    "name": [str(n) for n in range(int(firsts[i]), int(firsts[i]) + size)],
                }
            ),
            str(path),
        )
        files.append(str(path))

    table = gather.take_rows(files, firsts, np.array(wanted, np.int64))

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
    own = native.format_content_hash(sum(native.hash_sequences(native.recover_segments(table.combine_chunks()))))

    found = list(native.find_content_damage(store, "chats", files, native.format_content_hash(7)))

    assert list(native.find_content_damage(store, "chats", files, own)) == []
    assert found[0].startswith(f"chats: its sequences hash to {own}, expected xxh3:0")


def test_lists_of_a_shard_are_compressed_and_only_single_values_have_statistics() -> None:
    table = _table(_segments([([10, 11, 2], [0, 1, 1]), ([20, 2], [0, 1])], [2]))

    content = native.encode_native_shard(table, {}, group_rows=1)

    group = pq.ParquetFile(pa.BufferReader(content)).metadata.row_group(0)
    found = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    listed = {path for path in found if path.endswith(".list.element")}
    assert {path for path, one in found.items() if one.compression == "ZSTD"} == listed
    assert {path for path, one in found.items() if one.is_stats_set} == set(found) - listed
    assert {"input_ids.list.element", "labels.list.element", "position_ids.list.element"} <= listed
