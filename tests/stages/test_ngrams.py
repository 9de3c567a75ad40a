"""Sampled n-grams: equal runs of tokens have equal hashes at any position, and the sample is a sixteenth."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.stages.training_splits.leakage import NGRAM_LENGTH, SAMPLE_ONE_IN, sample_ngrams


def ids_of(seed: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


def whole(ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> list[int]:
    hashes, _ = sample_ngrams(ids, np.array([0, len(ids)]))
    return hashes.tolist()


def test_a_sixteenth_of_all_ngrams_is_kept_whatever_the_blocks_and_none_of_short_texts() -> None:
    hashes = whole(ids_of(0, 200_000))

    assert abs(len(hashes) * SAMPLE_ONE_IN / 200_000 - 1) < 0.03
    assert all(one % SAMPLE_ONE_IN == 0 for one in hashes)
    assert len(set(hashes)) == len(hashes)

    assert whole(ids_of(2, NGRAM_LENGTH - 1)) == []
    assert whole(ids_of(2, 0)) == []

    ids = ids_of(3, 70_000)

    for left in (1, 5_000, 16_380):
        hashes = whole(ids)
        assert hashes[len(hashes) - len(whole(ids[left:])) :] == whole(ids[left:])


@pytest.mark.slow
@given(seed=st.integers(0, 1000), before=st.integers(0, 40), after=st.integers(0, 40))
def test_ngrams_of_a_text_are_found_at_any_position(seed: int, before: int, after: int) -> None:
    text = ids_of(seed, 300)
    around = np.concatenate([ids_of(seed + 1, before), text, ids_of(seed + 2, after)])

    assert set(whole(text)) <= set(whole(around))


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_no_ngram_crosses_a_segment_boundary(lengths: list[int]) -> None:
    ids = ids_of(1, sum(lengths))
    offsets = np.cumsum([0, *lengths])
    hashes, owners = sample_ngrams(ids, offsets)
    alone = [sample_ngrams(ids[a:b], np.array([0, b - a]))[0].tolist() for a, b in pairwise(offsets)]

    assert [hashes[owners == k].tolist() for k in range(len(lengths))] == alone
