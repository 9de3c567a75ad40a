"""Whether ids give back the text that they were made of, byte for byte, for whole batches.

What belongs here: decoding and comparing. What does not: encoding, the bytes of each id (`token_bytes.py`).

Decoding is a table look-up: every id of a byte-level or SentencePiece vocabulary stands for fixed bytes, so a batch
is decoded by one gather over a flat array. A vocabulary of another kind is decoded by the function handed in.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.tokenization.token_bytes import read_sentencepiece_bytes


class RoundTripDecoder:
    """Decodes ids to bytes and compares them with texts.

    `byte_table`: the bytes by id of a byte-level vocabulary, None for others; `decode`: the tokenizer's own function.
    """

    def __init__(
        self, backend: str, byte_table: Sequence[bytes] | None, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._backend = backend
        self._given = byte_table
        self._decode = decode

    @cached_property
    def _byte_table(self) -> tuple[NDArray[np.uint8], Ints, Ints] | None:
        pieces = self._given if self._given is not None else read_sentencepiece_bytes(self._backend)
        if pieces is None:
            return None
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        return np.frombuffer(b"".join(pieces), np.uint8), np.cumsum(lengths) - lengths, lengths

    def altered(self, texts: Sequence[str], ids: NDArray[np.int32], offsets: Ints) -> list[int]:
        """Return the indices of texts that differ from their decoded ids, `[offsets[i], offsets[i + 1])` for text i."""
        if self._byte_table is None:
            pairs = zip(texts, offsets.tolist(), offsets[1:].tolist(), strict=False)
            return [i for i, (text, left, right) in enumerate(pairs) if self._decode(ids[left:right].tolist()) != text]
        blob, starts, lengths = self._byte_table
        sizes = lengths[ids]
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(ends) else 0
        found = blob[np.arange(total) + np.repeat(starts[ids] - (ends - sizes), sizes)].tobytes()
        wanted = [text.encode("utf-8", "surrogatepass") for text in texts]
        if found == b"".join(wanted) and _has_same_borders(ends, offsets, wanted):
            return []
        borders = np.concatenate((np.zeros(1, np.int64), ends))[offsets].tolist()
        return [i for i, text in enumerate(wanted) if found[borders[i] : borders[i + 1]] != text]


def _has_same_borders(ends: Ints, offsets: Ints, wanted: Sequence[bytes]) -> bool:
    borders = np.concatenate((np.zeros(1, np.int64), ends))[offsets]
    return bool((np.diff(borders) == np.array([len(one) for one in wanted], np.int64)).all())
