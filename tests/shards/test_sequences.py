"""What exporters are handed: segments in any grouping; what is refused before it is written; and hashes that add up."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.core.arrays import Ints, compute_offsets
from rowmill.core.errors import IntegrityError
from rowmill.exports import hf
from rowmill.schema.content_hash import HASH_MODULUS
from rowmill.schema.examples import WEIGHT_COLUMN
from rowmill.schema.shard_counts import ShardDetails
from rowmill.shards.host_scratch import drop_scratch_maps, write_scratch_file
from rowmill.shards.sequences import (
    SEQUENCE_HASHES,
    SequenceBatch,
    join_hashes,
    require_valid_tokens,
    tabulate_hashes,
    take_segments,
)
from tests.support.export_cases import VECTOR, sequences
from tests.support.recipes import Workspace, chat
from tests.support.tiers import draw

SEGMENT = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 1)), min_size=1, max_size=5).map(
    lambda tokens: ([i for i, _ in tokens], [0, *(m for _, m in tokens[1:])])
)
FILES = st.lists(st.lists(st.lists(SEGMENT, min_size=1, max_size=3), min_size=1, max_size=3), min_size=1, max_size=3)
"""Files of sequences of segments (ids, mask)."""


def write_segment_files(contents: list[SequenceBatch], folder: Path) -> tuple[list[str], Ints]:
    """Write a file of each batch, whose dataset is named after its number."""
    paths = [str(folder / f"{number}.arrow") for number in range(len(contents))]
    for number, (batch, path) in enumerate(zip(contents, paths, strict=True)):
        table = hf.make_packed_table(batch)
        names = pa.array([f"d{number}"] * len(table))
        write_scratch_file(table.set_column(table.schema.get_field_index("dataset"), "dataset", names), path)
    return paths, compute_offsets([len(one.offsets) - 1 for one in contents])


@settings(deadline=None, max_examples=draw(40))
@given(files=FILES, data=st.data())
def test_take_returns_the_wanted_segments_in_the_wanted_grouping(
    tmp_path_factory: pytest.TempPathFactory, files: Any, data: st.DataObject
) -> None:
    opened = write_segment_files([sequences(one) for one in files], tmp_path_factory.mktemp("shards"))
    every = [segment for content in files for one in content for segment in one]
    homes = [f"d{i}" for i, content in enumerate(files) for one in content for _ in one]
    wanted = data.draw(st.lists(st.integers(0, len(every) - 1), min_size=1, max_size=9))
    cuts = data.draw(st.sets(st.integers(1, len(wanted)), max_size=3))
    offsets = np.array([0, *sorted(cuts | {len(wanted)})])

    taken = take_segments(*opened, np.array(wanted), offsets)
    drop_scratch_maps()

    assert taken.ids.tolist() == [i for number in wanted for i in every[number][0]]
    assert taken.trained.tolist() == [bool(m) for number in wanted for m in every[number][1]]
    assert np.diff(taken.offsets).tolist() == [len(every[number][0]) for number in wanted]
    assert taken.sequence_offsets.tolist() == offsets.tolist()
    assert taken.datasets.to_pylist() == [homes[wanted[first]] for first in offsets[:-1]]
    require_valid_tokens(taken, vocab_size=100, where="here")


def test_take_carries_weights_and_open_attention(tmp_path: Path) -> None:
    files = write_segment_files([sequences(VECTOR, weights=[0, 0.5, 2, 0, 0.25], is_open=True)], tmp_path)
    taken = take_segments(*files, np.array([0, 1]), np.array([0, 2]))
    drop_scratch_maps()

    assert taken.weights is not None
    assert taken.weights.tolist() == [0, 0.5, 2, 0, 0.25]
    assert (taken.is_open.tolist(), taken.spans()[0].tolist()) == ([True], [0, 5])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ids": np.array([10, 100, 2, 20, 2], np.int32)}, r"token id 100 in example e0#0; ids are 0 to 99"),
        ({"ids": np.array([10, 11, 2, -1, 2], np.int32)}, r"token id -1 in example e1#0"),
        ({"offsets": np.array([0, 5, 5])}, r"an empty segment of example e1#0"),
        ({"trained": np.array([False, True, True, False])}, r"a mask of 4 positions for 5 tokens"),
        ({"token_values": {WEIGHT_COLUMN: np.zeros(6, np.float32)}}, r"a mask of 6 positions for 5 tokens"),
        ({"trained": np.array([False, True, True, True, True])}, r"example e1#0 trains on the first token"),
    ],
)
def test_unsound_sequences_are_refused_before_anything_is_written(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(IntegrityError, match=f"here: {said}"):
        require_valid_tokens(replace(sequences(VECTOR), **changes), vocab_size=100, where="here")


def test_sound_sequences_pass() -> None:
    require_valid_tokens(sequences(VECTOR), vocab_size=21, where="here")


hashes = st.lists(st.integers(0, HASH_MODULUS - 1), min_size=1, max_size=8)


def table(values: list[int]) -> pa.Table:
    raw = [value.to_bytes(16, "little") for value in values]
    return pa.table([raw, [1] * len(raw), [0] * len(raw)], schema=SEQUENCE_HASHES)


@given(first=hashes, second=hashes, data=st.data())
def test_sum_is_that_of_the_integers_with_repeats(first: list[int], second: list[int], data: st.DataObject) -> None:
    every = first + second
    numbers = data.draw(st.lists(st.integers(0, len(every) - 1), max_size=20))
    joined = join_hashes([table(first), table(second)])
    assert joined.sum_content(np.array(numbers, np.int64)) == sum(every[i] for i in numbers) % HASH_MODULUS


def test_no_sequences_have_no_content() -> None:
    assert join_hashes([]).sum_content(np.empty(0, np.int64)) == 0


@pytest.mark.slow
def test_packed_shards_store_the_hashes_and_sizes_of_their_sequences(tmp_path: Path) -> None:
    made = Workspace(tmp_path).one("a.jsonl", [chat(i) for i in range(40)], splits={"validation": 0.2}).build()
    packed, store = made.manifest("rows", "packed_shards"), made.project.store
    shards = [part for part in packed.parts if "shard" in part.files]
    stored = join_hashes([store.table(part.files["sequences"]) for part in shards])
    again = join_hashes([tabulate_hashes(store.table(part.files["shard"]).combine_chunks()) for part in shards])

    assert np.array_equal(stored.limbs, again.limbs)
    assert len(np.unique(stored.limbs, axis=0)) == packed.facts["sequences"]
    assert stored.sum_content(np.arange(len(stored.tokens))) == int(
        packed.facts["content_hash"].removeprefix("xxh3:"), 16
    )
    assert stored.tokens.sum() == packed.facts["tokens"]
    assert stored.trained_tokens.sum() == packed.facts["trained_tokens"]
    assert compute_offsets([part.get_details(ShardDetails).sequences for part in shards])[-1] == len(stored.tokens)
