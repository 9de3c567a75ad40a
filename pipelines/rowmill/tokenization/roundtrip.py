"""Whether ids give back the text that they were made of, byte for byte, for whole batches.

What belongs here: the bytes of every id, and comparing. What does not: encoding.

Decoding is a table look-up: every id of a byte-level or SentencePiece vocabulary stands for fixed bytes, so a batch
is decoded by one gather over a flat array. A vocabulary of another kind is decoded by the function handed in.
"""

import re
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import orjson
from numpy.typing import NDArray

from rowmill.core.arrays import Ints

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SENTENCEPIECE_SPACE = "\u2581"


class RoundTripDecoder:
    """The bytes of a tokenizer's ids.

    `byte_table` are the bytes by id of a byte-level vocabulary, None for another; `decode` is the tokenizer's own.
    """

    def __init__(
        self, backend: str, byte_table: Sequence[bytes] | None, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._backend = backend
        self._given = byte_table
        self._decode = decode

    @cached_property
    def _byte_table(self) -> tuple[NDArray[np.uint8], Ints, Ints] | None:
        pieces = self._given if self._given is not None else _read_sentencepiece_bytes(self._backend)
        if pieces is None:
            return None
        lengths = np.array([len(one) for one in pieces], np.int64)
        return np.frombuffer(b"".join(pieces), np.uint8), np.cumsum(lengths) - lengths, lengths

    def altered(self, texts: Sequence[str], ids: NDArray[np.int32], offsets: Ints) -> list[int]:
        """Return which texts their ids do not give back; text i has ids `[offsets[i], offsets[i + 1])`."""
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


def _read_sentencepiece_bytes(backend: str) -> list[bytes] | None:
    """Return the bytes of every id of a vocabulary that writes spaces as U+2581; None for any other."""
    parsed = orjson.loads(backend)
    vocabulary = parsed["model"].get("vocab")
    if isinstance(vocabulary, list):
        pieces: dict[str, int] = {str(piece): number for number, (piece, _) in enumerate(vocabulary)}
    elif isinstance(vocabulary, dict):
        pieces = {str(piece): int(number) for piece, number in vocabulary.items()}
    else:
        return None
    if parsed["model"]["type"] == "WordPiece" or not any(SENTENCEPIECE_SPACE in piece for piece in pieces):
        return None
    added = {str(token["content"]): int(token["id"]) for token in parsed["added_tokens"]}
    table = [b""] * (max([*pieces.values(), *added.values()]) + 1)
    for piece, number in pieces.items():
        byte = _BYTE_TOKEN.fullmatch(piece)
        table[number] = (
            bytes([int(byte[1], 16)])
            if byte
            else piece.replace(SENTENCEPIECE_SPACE, " ").encode("utf-8", "surrogatepass")
        )
    for content, number in added.items():
        table[number] = content.encode()
    return table
