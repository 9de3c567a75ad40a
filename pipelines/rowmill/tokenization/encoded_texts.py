"""Batches of encoded texts: ids, and the bytes of its text that each token covers.

text        "a<|im_end|>b"                       bytes  0 1          11 12
tokens      ["a", "<|im_end|>", "b"]             ends     1          11 12
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """A batch of encoded texts.

    `ids` int32[T], `offsets` int64[N + 1] into it; `starts` and `ends` int64[T] are each token's bytes within
    its own text. `reference_texts` counts texts that took the reference path, `altered` those whose ids decode to
    other text.
    """

    ids: NDArray[np.int32]
    offsets: Ints
    starts: Ints
    ends: Ints
    reference_texts: int
    altered: int = 0

    def get_text(self, index: int) -> "EncodedTexts":
        """Return one of the texts, without counts."""
        cut = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return EncodedTexts(
            self.ids[cut], self.offsets[index : index + 2] - cut.start, self.starts[cut], self.ends[cut], 0
        )


def rejoin_pieces(encoded: EncodedTexts, pieces: Sequence[str], counts: Ints) -> EncodedTexts:
    """Join encoded pieces to the texts that they were cut from: text i is the next `counts[i]` pieces."""
    sizes = np.array(count_utf8_bytes(pieces), np.int64)
    before = np.cumsum(sizes) - sizes
    bounds = compute_offsets(counts)
    nonempty = counts > 0
    begins = np.zeros(len(counts), np.int64)
    begins[nonempty] = before[bounds[:-1][nonempty]]
    shift = np.repeat(before - np.repeat(begins, counts), np.diff(encoded.offsets))
    return replace(
        encoded,
        offsets=encoded.offsets[bounds],
        starts=encoded.starts + shift,
        ends=encoded.ends + shift,
        reference_texts=min(encoded.reference_texts, len(counts)),
        altered=min(encoded.altered, len(counts)),
    )


def count_utf8_bytes(texts: Iterable[str]) -> list[int]:
    """Return the bytes of each text in UTF-8; a text of ASCII characters, as most are, need not be encoded."""
    return [len(text) if text.isascii() else len(text.encode()) for text in texts]


def compute_byte_positions(text: str) -> Ints:
    """Return for every character index (and the end) its byte index in UTF-8: int64[len(text) + 1]."""
    raw = text.encode()
    if len(raw) == len(text):
        return np.arange(len(text) + 1, dtype=np.int64)
    first = (np.frombuffer(raw, np.uint8) & 0xC0) != 0x80
    return np.append(np.flatnonzero(first), len(raw))


def join_encodings(pieces: "Sequence[tuple[NDArray[np.int32], Ints, Ints]]", reference_texts: int) -> EncodedTexts:
    """Join single texts, each its ids, starts and ends, to a batch."""
    counts = np.array([len(ids) for ids, _, _ in pieces], np.int64)
    offsets = compute_offsets(counts)
    if not pieces:
        return EncodedTexts(
            np.empty(0, np.int32), offsets, np.empty(0, np.int64), np.empty(0, np.int64), reference_texts
        )
    ids, starts, ends = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return EncodedTexts(ids, offsets, starts, ends, reference_texts)


def replace_texts(encoded: EncodedTexts, places: Ints, other: EncodedTexts, *, counted: bool = True) -> EncodedTexts:
    """Replace the texts of `encoded` at the given indices by those of `other`; `counted` adds their counts."""
    chosen: dict[int, int] = {int(place): i for i, place in enumerate(places)}
    pieces: list[tuple[NDArray[np.int32], Ints, Ints]] = []
    for i in range(len(encoded.offsets) - 1):
        source, j = (other, chosen[i]) if i in chosen else (encoded, i)
        cut = slice(int(source.offsets[j]), int(source.offsets[j + 1]))
        pieces.append((source.ids[cut], source.starts[cut], source.ends[cut]))
    joined = join_encodings(pieces, reference_texts=encoded.reference_texts + counted * other.reference_texts)
    return replace(joined, altered=encoded.altered + counted * other.altered)
