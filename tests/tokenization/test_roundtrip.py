"""Ids that give back other text than they were made of."""

from collections.abc import Sequence

import numpy as np
import pytest

from rowmill.core.arrays import compute_offsets
from rowmill.tokenization.vocabulary import RoundTripDecoder, TokenBytes

TABLE = [b"a", b"bc", b"", b"\xc3", b"\xa9", b"\xed\xa0\x80"]


@pytest.mark.parametrize(
    ("texts", "ids", "expected"),
    [
        ([], [], []),
        (["", ""], [[], [2]], []),
        (["abc", "\u00e9a"], [[0, 1], [3, 4, 0]], []),
        (["\ud800", "a"], [[5], [0]], []),
        (["abc", "a", "bc"], [[0, 1], [1], [1]], [1]),
        (["ab", "ca"], [[0, 1], [0]], [0, 1]),
        (["a", ""], [[0], [0]], [1]),
        (["abc"], [[]], [0]),
    ],
)
def test_texts_with_other_bytes_or_borders_are_found(
    texts: list[str], ids: Sequence[list[int]], expected: list[int]
) -> None:
    decoder = RoundTripDecoder(TokenBytes.join(TABLE), lambda _: pytest.fail("a byte table needs no decoder"))
    flat = np.array([token for one in ids for token in one], np.int32)
    assert decoder.altered(texts, flat, compute_offsets(np.array(list(map(len, ids)), np.int64))) == expected
