"""Padding after segments: where the tokens are, and the shard without it."""

import numpy as np
import pyarrow as pa
import pytest

from rowmill.packing import pack_plan
from rowmill.packing.pack_plan import SequencePlan
from rowmill.schema.examples import WEIGHT_COLUMN
from rowmill.shards import native
from rowmill.shards.native import drop_padding

LENGTHS = [3, 5, 2, 4]
"""Two sequences: segments of 3 and 5 tokens, then of 2 and 4."""

PLAN = SequencePlan(np.array([0, 2, 4]), np.arange(4), np.array([[0, length] for length in LENGTHS], np.int32))


def _make_table(multiple: int, *, blocked: bool) -> pa.Table:
    ids = np.arange(10, 10 + sum(LENGTHS), dtype=np.int32)
    lengths, offsets = pack_plan.attention_spans(PLAN, block_cross_document_attention=blocked)
    segments = native.Segments(
        ids=ids,
        trained=pack_plan.mark_targets(ids, np.ones(len(ids), bool), lengths, ignore_token_id=None),
        offsets=np.cumsum([0, *LENGTHS]),
        sequence_offsets=PLAN.sequence_offsets,
        example_ids=pa.array(list("abcd")),
        starts=np.zeros(4, np.int32),
        token_values={WEIGHT_COLUMN: np.ones(len(ids), np.float32)},
    )
    own = pack_plan.count_padding(PLAN, multiple, block_cross_document_attention=blocked)
    padded = lengths + (own if blocked else np.add.reduceat(own, PLAN.sequence_offsets[:-1]))
    return native.make_shard_table(segments, padded, offsets, dataset="d", padding=native.Padding(own, 9))


def test_padding_follows_each_segment_and_its_positions_run_on() -> None:
    row = _make_table(4, blocked=True).to_pylist()[0]

    assert row["input_ids"] == [10, 11, 12, 9, 13, 14, 15, 16, 17, 9, 9, 9]
    assert row["labels"] == [-100, 11, 12, -100, -100, 14, 15, 16, 17, -100, -100, -100]
    assert row["position_ids"] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert row["loss_weights"] == [1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    assert (row["seq_lengths"], row["segment_lengths"], row["segment_padding"]) == ([4, 8], [3, 5], [1, 3])
    assert (row["tokens"], row["trained_tokens"]) == (8, 6)


def test_open_attention_pads_each_sequence_once_at_its_end() -> None:
    table = _make_table(4, blocked=False)
    assert table.column("seq_lengths").to_pylist() == [[8], [8]]
    assert table.column("segment_padding").to_pylist() == [[0, 0], [0, 2]]
    assert table.column("input_ids").to_pylist()[1] == [18, 19, 20, 21, 22, 23, 9, 9]


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("multiple", [4, 7])
def test_a_shard_without_its_padding_is_the_one_that_was_not_padded(multiple: int, blocked: bool) -> None:
    whole = _make_table(1, blocked=blocked).drop(["segment_padding"])
    padded = _make_table(multiple, blocked=blocked)

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
