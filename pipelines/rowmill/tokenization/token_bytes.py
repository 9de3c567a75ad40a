"""The bytes that each id of a vocabulary stands for, read from the backend's JSON text."""

import re
from collections import defaultdict
from typing import Any

import numpy as np
import orjson

from rowmill.core.arrays import Ints

SENTENCEPIECE_SPACE = "\u2581"
"""What SentencePiece vocabularies write for a space."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _make_byte_alphabet() -> defaultdict[int, int]:
    """Map the 256 printable characters that byte-level vocabularies use for bytes to the bytes, others to `?`.

    Source: the GPT-2 encoder: printable Latin-1 characters represent themselves, the other bytes start at U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    known = {b: b for b in printable} | {0x100 + i: b for i, b in enumerate(others)}
    return defaultdict(lambda: ord("?"), known)


def read_byte_lengths(backend: str) -> Ints:
    """Return the number of bytes of each id, int64[largest id + 1]; −1 for an id without a token."""
    return _measure_tokens(orjson.loads(backend))


def _measure_tokens(parsed: dict[str, Any]) -> Ints:
    vocabulary: dict[str, int] = parsed["model"]["vocab"]
    added: list[dict[str, Any]] = parsed["added_tokens"]
    size = max([*vocabulary.values(), *(int(t["id"]) for t in added)]) + 1
    lengths = np.full(size, -1, np.int64)
    ids = np.fromiter(vocabulary.values(), np.int64, len(vocabulary))
    lengths[ids] = np.fromiter(map(len, vocabulary), np.int64, len(vocabulary))
    for token in added:
        lengths[int(token["id"])] = len(str(token["content"]).encode())
    return lengths


def read_token_bytes(backend: str) -> list[bytes]:
    """Return the bytes of every id of a byte-level vocabulary, for printing single tokens."""
    parsed: dict[str, Any] = orjson.loads(backend)
    vocabulary: dict[str, int] = parsed["model"]["vocab"]
    table = [b""] * len(_measure_tokens(parsed))
    # All tokens at once, since a vocabulary has a million characters.
    content = "".join(vocabulary).translate(_make_byte_alphabet()).encode("latin-1")
    begin = 0
    for text, token_id in vocabulary.items():
        table[token_id] = content[begin : begin + len(text)]
        begin += len(text)
    for token in parsed["added_tokens"]:
        table[int(token["id"])] = str(token["content"]).encode()
    return table


def read_sentencepiece_bytes(backend: str) -> list[bytes] | None:
    """Return the bytes of every id of a vocabulary that writes spaces as U+2581; None for other vocabularies."""
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
