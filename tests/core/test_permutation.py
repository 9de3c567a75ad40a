"""Keys and permutations: the specification's vectors, and that every permutation is one."""

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.permutation import (
    GAMMA,
    PermutationType,
    hash_labels,
    make_feistel,
    make_label_hasher,
    make_linear,
    make_permutation,
    mix_bits,
    permute_rows,
)

K = hash_labels(0, "shuffle", "a", 0)
KINDS: tuple[PermutationType, ...] = ("feistel", "linear")
sizes = st.integers(1, 3000)
keys = st.integers(0, 2**64 - 1)


def test_keys_and_permutations_are_the_specified_ones() -> None:
    assert K == 6917724958345623493
    digest = blake2b('[0,"ü"]'.encode(), digest_size=8).digest()
    assert hash_labels(0, "ü") == int.from_bytes(digest, "little")
    keys = make_label_hasher(3, "budget", 'a "name"')
    assert [keys(n) for n in (0, 1, 10**9)] == [hash_labels(3, "budget", 'a "name"', n) for n in (0, 1, 10**9)]
    assert mix_bits(GAMMA) == 16294208416658607535
    assert make_feistel(10, K)(np.arange(10)).tolist() == [8, 1, 9, 5, 7, 6, 4, 3, 0, 2]
    permuted = make_linear(10, K)
    assert (permuted.a, permuted.b) == (7, 0)
    assert permuted(np.arange(10)).tolist() == [0, 7, 4, 1, 8, 5, 2, 9, 6, 3]


@pytest.mark.parametrize("kind", KINDS)
@given(n=sizes, k=keys)
def test_permutation_of_every_place_gives_every_place_once(kind: PermutationType, n: int, k: int) -> None:
    permuted = make_permutation(kind, n, k)(np.arange(n))

    assert np.array_equal(np.sort(permuted), np.arange(n))


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 2**48), k=keys, data=st.data())
def test_permutation_of_an_array_maps_each_place_by_itself_and_no_two_to_one(
    kind: PermutationType, n: int, k: int, data: st.DataObject
) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), np.int64)
    permuted = make_permutation(kind, n, k)
    result = permuted(places)

    assert result.tolist() == [permuted(places[i : i + 1]).item() for i in range(len(places))]
    assert len(set(result.tolist())) == len(set(places.tolist()))
    assert all(0 <= place < n for place in result.tolist())


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 300), some=st.lists(keys, max_size=5))
def test_permuted_rows_equal_one_permutation_per_key(kind: PermutationType, n: int, some: list[int]) -> None:
    rows = permute_rows(kind, n, some)

    assert rows.shape == (len(some), n)
    assert all(
        np.array_equal(row, make_permutation(kind, n, k)(np.arange(n))) for row, k in zip(rows, some, strict=True)
    )


def test_permuted_rows_longer_than_a_chunk_equal_one_permutation_per_key() -> None:
    rows = permute_rows("feistel", 20_000, [1, 2])

    assert np.array_equal(rows[1], make_feistel(20_000, 2)(np.arange(20_000)))


@pytest.mark.parametrize("kind", KINDS)
def test_linear_above_float_precision_stays_a_permutation(kind: PermutationType) -> None:
    """Neighbours near the end of 120,000,007 items collided where the product was a float64."""
    n = 120_000_007
    permuted = make_permutation(kind, n, K)(np.arange(n - 200_000, n))

    assert np.unique(permuted).size == 200_000
    assert permuted.min() >= 0
    assert permuted.max() < n


@pytest.mark.parametrize("kind", KINDS)
def test_places_that_are_none_are_refused(kind: PermutationType) -> None:
    for places in ([0, -1], [0, 10]):
        with pytest.raises(IndexError, match="10"):
            make_permutation(kind, 10, K)(np.array(places))
    with pytest.raises(TypeError, match="float64"):
        make_permutation(kind, 10, K)(np.array([0.5]))
    with pytest.raises(ValueError, match="at least one"):
        make_permutation(kind, 0, K)


# --- a billion places


@pytest.mark.parametrize("kind", KINDS)
def test_a_billion_places_are_permuted_as_evenly_as_at_random(kind: PermutationType) -> None:
    """Of a random sample, 10,000 buckets hold what a multinomial draw would: their variance is the mean's."""
    n, buckets = 10**9, 10_000
    places = np.random.default_rng(0).choice(n, 1 << 20, replace=False)
    permuted = make_permutation(kind, n, K)
    shown = permuted(places)
    counts = np.bincount(shown * buckets // n, minlength=buckets)

    assert np.unique(shown).size == places.size
    assert counts.var() == pytest.approx(counts.mean() * (1 - 1 / buckets), rel=0.05)


@pytest.mark.slow
def test_neighbours_of_a_billion_are_scattered_as_at_random() -> None:
    """Only the Feistel network promises this; a linear permutation spreads neighbours too evenly."""
    n, buckets = 10**9, 10_000
    shown = make_feistel(n, K)(np.arange(5 * 10**8, 5 * 10**8 + (1 << 20)))
    counts = np.bincount(shown * buckets // n, minlength=buckets)

    assert np.unique(shown).size == 1 << 20
    assert counts.var() == pytest.approx(counts.mean() * (1 - 1 / buckets), rel=0.05)
    assert np.corrcoef(shown[:-1], shown[1:])[0, 1] == pytest.approx(0, abs=0.01)
