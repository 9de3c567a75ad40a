"""Letters: the specification's table, and what each must keep of which tokens train."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.shards import label_conventions

IDS = np.array([10, 11, 12, 13], np.int32)
TRAINED = np.array([False, False, True, True])
WHOLE = np.array([0, 4])


def test_letters_of_the_specified_table() -> None:
    shifted = label_conventions.make_shifted_targets(IDS, TRAINED, WHOLE)

    assert label_conventions.make_unshifted_labels(IDS, TRAINED).tolist() == [-100, -100, 12, 13]
    assert shifted.inputs.tolist() == [10, 11, 12]
    assert shifted.targets.tolist() == [11, 12, 13]
    assert shifted.weights.tolist() == [0, 1, 1]
    assert label_conventions.make_rolled_mask(TRAINED, WHOLE).tolist() == [False, True, True, False]
    assert label_conventions.make_unshifted_mask(TRAINED).tolist() == [False, False, True, True]


SPANS = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=6).map(
        lambda span: [(span[0][0], False), *span[1:]]
    ),
    min_size=1,
    max_size=6,
)
"""Spans of (id, is a target), of which no first one is a target."""


@pytest.mark.slow
@given(SPANS)
def test_every_letter_tells_which_token_follows_which(spans: list[list[tuple[int, bool]]]) -> None:
    ids = np.array([i for span in spans for i, _ in span], np.int32)
    trained = np.array([m for span in spans for _, m in span], bool)
    borders = np.concatenate(([0], np.cumsum([len(span) for span in spans])))
    # (token before, target) for every target, span by span.
    wanted = [(a, b) for span in spans for (a, _), (b, is_target) in pairwise(span) if is_target]

    labels = label_conventions.make_unshifted_labels(ids, trained)
    shifted = label_conventions.make_shifted_targets(ids, trained, borders)
    rolled = label_conventions.make_rolled_mask(trained, borders)

    places = np.flatnonzero(labels != -100)
    weighed = shifted.weights.astype(bool)
    assert [*zip(ids[places - 1].tolist(), labels[places].tolist(), strict=True)] == wanted
    assert [*zip(shifted.inputs[weighed].tolist(), shifted.targets[weighed].tolist(), strict=True)] == wanted
    assert [(int(ids[i]), int(ids[i + 1])) for i in np.flatnonzero(rolled)] == wanted
    assert not rolled[borders[1:] - 1].any()
    assert np.diff(shifted.offsets).tolist() == [len(span) - 1 for span in spans]


@given(SPANS)
def test_shifted_carries_float_weights_to_their_targets(spans: list[list[tuple[int, bool]]]) -> None:
    ids = np.array([i for span in spans for i, _ in span], np.int32)
    weights = np.arange(len(ids), dtype=np.float32) / 8
    borders = np.concatenate(([0], np.cumsum([len(span) for span in spans])))

    shifted = label_conventions.make_shifted_targets(ids, weights, borders)

    expected = [w for begin, end in pairwise(borders.tolist()) for w in weights[begin + 1 : end].tolist()]
    assert shifted.weights.tolist() == expected
    assert shifted.weights.dtype == np.float32
