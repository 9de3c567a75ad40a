"""Hashes of sequences: they add up as the integers that they stand for, and are those of the shards' content."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.arrays import compute_offsets
from rowmill.shards import native
from rowmill.shards.sequences import SEQUENCE_HASHES, join_hashes, tabulate_hashes
from tests.support.recipes import Workspace, chat

hashes = st.lists(st.integers(0, native.HASH_MODULUS - 1), min_size=1, max_size=8)


def table(values: list[int]) -> pa.Table:
    raw = [value.to_bytes(16, "little") for value in values]
    return pa.table([raw, [1] * len(raw), [0] * len(raw)], schema=SEQUENCE_HASHES)


@given(first=hashes, second=hashes, data=st.data())
def test_sum_is_that_of_the_integers_with_repeats(first: list[int], second: list[int], data: st.DataObject) -> None:
    every = first + second
    numbers = data.draw(st.lists(st.integers(0, len(every) - 1), max_size=20))
    joined = join_hashes([table(first), table(second)])
    assert joined.sum_content(np.array(numbers, np.int64)) == sum(every[i] for i in numbers) % native.HASH_MODULUS


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
    assert compute_offsets([part.facts["sequences"] for part in shards])[-1] == len(stored.tokens)
