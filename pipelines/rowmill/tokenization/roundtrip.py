"""Whether ids give back the text that they were made of, byte for byte, for whole batches.

Decoding is a table look-up: every id of a byte-level or SentencePiece vocabulary stands for fixed bytes, so Arrow
takes those of a whole batch at once, in half the time of a NumPy gather byte by byte. A vocabulary of another kind is
decoded by the function handed in.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import pyarrow as pa
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
    def _byte_table(self) -> pa.LargeBinaryArray | None:
        pieces = self._given if self._given is not None else read_sentencepiece_bytes(self._backend)
        return None if pieces is None else pa.array(pieces, pa.large_binary())

    def altered(self, texts: Sequence[str], ids: NDArray[np.int32], offsets: Ints) -> list[int]:
        """Return the indices of texts that differ from their decoded ids, `[offsets[i], offsets[i + 1])` for text i."""
        if self._byte_table is None:
            pairs = zip(texts, offsets.tolist(), offsets[1:].tolist(), strict=False)
            return [i for i, (text, left, right) in enumerate(pairs) if self._decode(ids[left:right].tolist()) != text]
        _, ends, content = self._byte_table.take(pa.array(ids)).buffers()
        borders = np.frombuffer(ends, np.int64, len(ids) + 1)[offsets]
        wanted = [text.encode("utf-8", "surrogatepass") for text in texts]
        has_same_borders = np.array_equal(np.diff(borders), np.fromiter(map(len, wanted), np.int64, len(wanted)))
        if has_same_borders and content.equals(pa.py_buffer(b"".join(wanted))):
            return []
        found = content.to_pybytes()
        pairs = zip(wanted, pairwise(borders.tolist()), strict=True)
        return [i for i, (text, (begin, end)) in enumerate(pairs) if found[begin:end] != text]
