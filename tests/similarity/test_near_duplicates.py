"""Near duplicates: MinHash against Jaccard, exact similarities against sets, and the decision row after row."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.arrays import LARGEST_INT32, Integers, compute_offsets
from rowmill.similarity import near_duplicates
from rowmill.similarity.near_duplicates import (
    BANDS,
    FUNCTIONS,
    Removed,
    collect_shingles,
    compute_signatures,
    compute_similarity,
    drop_equal_groups,
    find_near_duplicates,
    hash_bands,
)
from rowmill.similarity.words import HashedTexts, hash_words

if TYPE_CHECKING:
    from numpy.typing import NDArray


def join_sets(sets: Sequence[set[int]]) -> HashedTexts:
    values = [value for one in sets for value in sorted(one)]
    return HashedTexts(np.array(values, np.uint64), compute_offsets([len(one) for one in sets]))


def measure(one: set[int], other: set[int]) -> float:
    return len(one & other) / len(one | other)


def test_shingles_are_the_distinct_ngrams_of_a_text() -> None:
    shingles = collect_shingles(hash_words(["a b a b", "", "b a"]), 2)
    assert shingles.lengths.tolist() == [2, 0, 1]
    assert shingles.hashes[2] in shingles.hashes[:2]


SETS = st.lists(st.sets(st.integers(0, 12) | st.just(2**64 - 1), min_size=1, max_size=9), min_size=1, max_size=6)


@pytest.mark.slow
@given(SETS, st.integers(1, 40))
def test_similarity_of_pairs_is_that_of_their_sets(sets: list[set[int]], size: int) -> None:
    pairs = [(i, j) for i in range(len(sets)) for j in range(len(sets))]
    first, second = (np.array(side) for side in zip(*pairs, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near_duplicates, "_PAIR_VALUES", size)
        found = compute_similarity(join_sets(sets), first, second)

    assert found.tolist() == [measure(sets[i], sets[j]) for i, j in pairs]


def make_pairs(common: int, own: int, count: int) -> list[set[int]]:
    """Return pairs of sets with `common` numbers in both and `own` in each alone."""
    drawn = np.random.default_rng(7).integers(0, 2**63, (count, common + 2 * own)).tolist()
    return [set(line[:common]) | set(side) for line in drawn for side in (line[common:][:own], line[common + own :])]


def sign(sets: Sequence[set[int]]) -> Any:
    shingles = join_sets(sets)
    return compute_signatures(shingles.hashes, shingles.offsets)


def sketch(datasketch: Any, values: set[int]) -> Any:
    """Return the sketch that datasketch makes of a set."""
    made = datasketch.MinHash(num_perm=FUNCTIONS, seed=1)
    made.update_batch([value.to_bytes(8, "little") for value in values])
    return made


@pytest.mark.parametrize(("common", "own", "found_share"), [(80, 10, 0.998), (50, 25, 0.27), (10, 45, 0.0)])
def test_signatures_agree_as_often_as_sets_do_and_bands_by_their_power(
    common: int, own: int, found_share: float
) -> None:
    signatures = sign(make_pairs(common, own, 400))
    keys = hash_bands(signatures)

    similarity = common / (common + 2 * own)
    assert np.mean(signatures[::2] == signatures[1::2]) == pytest.approx(similarity, abs=0.01)
    assert np.mean((keys[::2] == keys[1::2]).any(axis=1)) == pytest.approx(found_share, abs=0.05)
    assert keys.shape == (800, BANDS)


@pytest.mark.slow
@given(SETS)
def test_signatures_do_not_depend_on_the_rows_beside(sets: list[set[int]]) -> None:
    assert np.array_equal(sign(sets), np.concatenate([sign([one]) for one in sets]))


def test_equal_minima_in_different_bands_have_different_keys() -> None:
    keys = hash_bands(np.zeros((2, FUNCTIONS), np.uint64))
    assert len(set(keys[0].tolist())) == BANDS
    assert np.array_equal(keys[0], keys[1])


def test_similarity_estimate_is_as_good_as_that_of_datasketch() -> None:
    datasketch = pytest.importorskip("datasketch", reason="datasketch is not installed; pip install datasketch")
    sets = make_pairs(60, 20, 200)
    signatures = sign(sets)
    others = [sketch(datasketch, one) for one in sets]

    ours = np.abs(np.mean(signatures[::2] == signatures[1::2], axis=1) - 0.6).mean()
    theirs = np.mean([abs(a.jaccard(b) - 0.6) for a, b in zip(others[::2], others[1::2], strict=True)])
    assert ours == pytest.approx(theirs, abs=0.01)


def test_groups_of_the_same_rows_are_kept_once() -> None:
    groups = np.array([0, 0, 1, 1, 2, 2, 2, 3, 3])
    rows = np.array([4, 7, 4, 7, 4, 7, 9, 7, 9])
    assert drop_equal_groups(groups, rows).tolist() == [True] * 2 + [False] * 2 + [True] * 5


def decide(sets: Sequence[set[int]], groups: Sequence[Sequence[int]], threshold: float) -> Removed:
    shingles = join_sets(sets)
    numbers = np.repeat(np.arange(len(groups)), [len(one) for one in groups])
    rows = np.array([row for one in groups for row in one], np.int64)
    return find_near_duplicates(numbers, rows, threshold, partial(compute_similarity, shingles))


def decide_row_after_row(
    sets: Sequence[set[int]], groups: Sequence[Sequence[int]], threshold: float
) -> dict[int, tuple[int, float]]:
    """Return the rows that go, by definition, with the row for which each goes."""
    gone: dict[int, tuple[int, float]] = {}
    for row in range(len(sets)):
        compared = [one for one in range(row) if one not in gone and any({row, one} <= {*group} for group in groups)]
        near = [kept for kept in compared if measure(sets[row], sets[kept]) >= threshold]
        if near:
            gone[row] = (near[0], measure(sets[row], sets[near[0]]))
    return gone


def test_a_row_goes_for_a_row_that_stays_and_not_for_one_that_goes() -> None:
    chain = [set(range(10)), set(range(1, 11)), set(range(2, 12))]
    found = decide(chain, [[0, 1], [1, 2], [0, 2]], 0.8)
    assert (found.rows.tolist(), found.kept.tolist()) == ([1], [0])
    assert found.similarity.tolist() == [9 / 11]


def test_without_a_common_group_rows_are_not_compared() -> None:
    assert decide([{1}, {1}], [[0], [1]], 0.8).rows.tolist() == []
    assert decide([{1}, {1}], [], 0.8).rows.tolist() == []


def test_pairs_are_compared_as_small_integers() -> None:
    """The calling process holds up to sixteen lines of each row that resembles another."""
    shingles, widths = join_sets([set(range(10))] * 3), set[np.dtype[Any]]()

    def compare(first: Integers, second: Integers) -> "NDArray[np.float64]":
        widths.update((first.dtype, second.dtype))
        return compute_similarity(shingles, first, second)

    found = find_near_duplicates(np.zeros(3, np.int64), np.arange(3), 0.8, compare)

    assert found.rows.tolist() == [1, 2]
    assert widths == {np.dtype(np.int32)}


@pytest.mark.slow
@given(
    st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=1, max_size=9),
    st.lists(st.sets(st.integers(0, 8), min_size=1), max_size=8),
    st.sampled_from([0.7, 0.8, 1.0]),
    st.sampled_from([LARGEST_INT32, 0]),
)
def test_rounds_decide_as_row_after_row_does(
    sets: list[set[int]], groups: list[set[int]], threshold: float, largest: int
) -> None:
    known = [[row for row in sorted(one) if row < len(sets)] for one in groups]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near_duplicates, "LARGEST_INT32", largest)
        found = decide(sets, known, threshold)

    wanted = decide_row_after_row(sets, known, threshold)
    assert found.rows.tolist() == sorted(wanted)
    for row, kept, similarity in zip(found.rows.tolist(), found.kept.tolist(), found.similarity.tolist(), strict=True):
        assert kept not in wanted
        assert kept < row
        assert similarity == measure(sets[row], sets[kept]) >= threshold
        assert any(row in one and kept in one for one in known)


def test_datasketch_and_we_remove_the_same_rows() -> None:
    datasketch = pytest.importorskip("datasketch", reason="datasketch is not installed; pip install datasketch")
    sets = _vary_sets(60)
    _, groups = np.unique(hash_bands(sign(sets)).ravel(), return_inverse=True)
    rows = np.repeat(np.arange(len(sets)), BANDS)

    ours = find_near_duplicates(groups, rows, 0.8, partial(compute_similarity, join_sets(sets)))

    index = datasketch.MinHashLSH(num_perm=FUNCTIONS, params=(BANDS, FUNCTIONS // BANDS))
    theirs: list[int] = []
    for row, own in enumerate(sets):
        made = sketch(datasketch, own)
        if any(measure(own, sets[kept]) >= 0.8 for kept in index.query(made)):
            theirs.append(row)
        else:
            index.insert(row, made)
    assert 50 < len(theirs) < 160
    assert ours.rows.tolist() == theirs


def _vary_sets(count: int) -> list[set[int]]:
    """Return sets of 100 numbers, each followed by variants in which 2, 6, and 30 of them are others."""
    drawn = np.random.default_rng(3).integers(0, 2**63, (count, 100)).tolist()
    return [
        set(line[changed:]) | {value + 1 for value in line[:changed]} for line in drawn for changed in (0, 2, 6, 30)
    ]
