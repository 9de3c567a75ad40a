"""Partitions of grouped tables by the hashes of their keys, and samples divided among them."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.kinds.tables.partitions import MAX_BITS, PARTITION_ROWS, assign_partitions, choose_hash_bits, share_sample

KEYS = pa.chunked_array([[f'"C-{i % 500:03d}"' for i in range(1000)], ['"漢"', '["a",1]', "7"]])


@pytest.mark.parametrize(
    ("rows", "bits"),
    [
        (0, 0),
        (541_909, 0),
        (PARTITION_ROWS, 0),
        (PARTITION_ROWS + 1, 1),
        (2 * PARTITION_ROWS + 1, 2),
        (10**10, MAX_BITS),
    ],
)
def test_number_of_partitions_follows_from_the_rows_alone(rows: int, bits: int) -> None:
    assert choose_hash_bits(rows) == bits


def test_partition_of_a_key_is_recorded_and_split_in_halves_as_the_table_grows() -> None:
    """Another hash would give every large table other examples."""
    keys = pa.chunked_array([['"C-001"', '"C-002"', "7", '"漢"']])

    assert assign_partitions(keys, 8).tolist() == [103, 233, 157, 113]
    assert (assign_partitions(keys, 0) == 0).all()

    for bits in range(1, MAX_BITS):
        finer = assign_partitions(KEYS, bits + 1)

        assert (finer >> 1 == assign_partitions(KEYS, bits)).all()
        assert set(finer[:500].tolist()) == set(finer[500:1000].tolist())
    assert set(assign_partitions(KEYS, 4).tolist()) == set(range(16))


@given(wanted=st.integers(0, 10_000), counts=st.lists(st.integers(0, 400), min_size=1, max_size=20))
def test_shares_of_a_sample_add_up_and_are_in_proportion(wanted: int, counts: list[int]) -> None:
    total = sum(counts)
    shares = share_sample(wanted, counts)

    assert sum(shares) == (wanted if total else 0)
    for share, count in zip(shares, counts, strict=True):
        full, rest = divmod(wanted, total) if total else (0, 0)
        assert full * count <= share <= (full + (rest > 0)) * count
        assert abs(share - (wanted * count / total if total else 0)) < 1


def test_single_partition_has_the_whole_sample() -> None:
    assert share_sample(25, [10]) == [25]
    assert share_sample(25, [4, 6]) == [10, 15]
    assert np.array_equal(share_sample(3, [0, 5, 0]), [0, 3, 0])
    assert share_sample(5, [0]) == [0]
