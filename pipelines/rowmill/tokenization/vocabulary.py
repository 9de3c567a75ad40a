"""What the ids of a vocabulary stand for: bytes of text, and how many.

An engine that reports only ids is enough where every id stands for a fixed number of bytes. Byte-level vocabularies do.
SentencePiece vocabularies do but for two things: a space is put before a text, or before each section between added
tokens, and a character without a piece is several byte tokens, which the reference places on the whole character:

    text        "龘a</s>b"                               bytes    0..3  3..4  4..8  8..9
    tokens      ["▁", <0xE9>, <0xBE>, <0x98>, "a", "</s>", "▁b"]
    starts      [ 0    0       0       0       3    4       8 ]
    ends        [ 3    3       3       3       4    8       9 ]

`RoundTripDecoder` tells whether ids give back their texts, byte for byte. Arrow takes the bytes of a whole batch at
once, in half the time of a NumPy gather byte by byte; ids of other vocabularies are decoded by `transformers`.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, Ints, compute_offsets

SENTENCEPIECE_SPACE = "\u2581"
"""What SentencePiece vocabularies write for a space."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


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


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of text that each id of a vocabulary stands for, end to end: `[offsets[id], offsets[id + 1])`."""

    content: bytes
    offsets: Ints

    @classmethod
    def join(cls, tokens: Sequence[bytes]) -> "TokenBytes":
        """Join the bytes of every id, in the order of ids."""
        return cls(b"".join(tokens), compute_offsets(np.fromiter(map(len, tokens), np.int64, len(tokens))))


def read_token_bytes(backend: str, *, byte_level: bool) -> TokenBytes | None:
    """Return the bytes of every id of a vocabulary; None if its ids stand for no fixed bytes.

    Takes 0.2 s for 150,000 tokens.
    """
    table = _read_byte_level_bytes(backend) if byte_level else read_sentencepiece_bytes(backend)
    return None if table is None else TokenBytes.join(table)


def _read_byte_level_bytes(backend: str) -> list[bytes]:
    parsed: dict[str, Any] = orjson.loads(backend)
    vocabulary: dict[str, int] = parsed["model"]["vocab"]
    table = [b""] * len(_measure_tokens(parsed))
    # All tokens at once, since a vocabulary has a million characters.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    known = {b: b for b in printable} | {0x100 + i: b for i, b in enumerate(others)}
    content = "".join(vocabulary).translate(defaultdict(lambda: ord("?"), known)).encode("latin-1")
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


_NEVER_ADDS_UP = 1 << 40
"""The length of the id for unknown characters: it stands for no bytes of its own."""


class DummyPrefix(StrEnum):
    """Where a tokenizer puts a space that its text does not have."""

    NEVER = "never"
    BEFORE_TEXT = "before_text"
    """Before a text that begins neither with a space nor with an added token.

    The reference drops the first space of a text that it decodes, also where it did not put it there; so that such a
    text is counted as altered, it takes the reference path.
    """
    BEFORE_SECTION = "before_section"
    """Before every stretch of text between added tokens, whatever it begins with."""


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """What the ids of a vocabulary stand for, by id.

    `lengths` int64 are bytes of text, −1 for ids without a token; `added` marks added tokens, `partial` byte tokens
    that are only a part of a character.
    """

    lengths: Ints
    added: Bools
    partial: Bools
    prefix: DummyPrefix


@lru_cache(maxsize=2)
def read_token_lengths(backend: str, *, byte_level: bool) -> TokenLengths | str:
    """Return the lengths of a vocabulary's ids, or the reason why they do not give positions.

    The latest are cached: parsing the JSON text of 150,000 tokens takes 0.2 s.
    """
    if byte_level:
        lengths = _measure_tokens(orjson.loads(backend))
        nowhere = np.zeros(len(lengths), bool)
        return TokenLengths(lengths, nowhere, nowhere, DummyPrefix.NEVER)
    parsed: dict[str, Any] = orjson.loads(backend)
    model: dict[str, Any] = parsed["model"]
    if model["type"] != "BPE" or not model.get("byte_fallback"):
        return "neither a byte-level BPE nor a BPE with byte tokens"
    if any(token["normalized"] for token in parsed["added_tokens"]):
        return "an added token is searched in normalized text"
    prefix = _find_dummy_prefix(parsed)
    if prefix is None:
        return "its normalizer or pre-tokenizer does more than write spaces as U+2581"
    pieces = read_sentencepiece_bytes(backend)
    if pieces is None:
        return "its vocabulary has no pieces with spaces"
    added = np.zeros(len(pieces), bool)
    added[[int(token["id"]) for token in parsed["added_tokens"]]] = True
    lengths = np.fromiter((len(piece) or -1 for piece in pieces), np.int64, len(pieces))
    partial = np.fromiter((len(piece) == 1 and piece[0] >= 0x80 for piece in pieces), bool, len(pieces))
    unknown = model.get("unk_token")
    if unknown in model["vocab"]:
        lengths[model["vocab"][unknown]] = _NEVER_ADDS_UP
    return TokenLengths(lengths, added, partial, prefix)


def _find_dummy_prefix(parsed: dict[str, Any]) -> DummyPrefix | None:
    """Return where a tokenizer that only writes spaces as U+2581 puts another one; None if it does something else."""
    normalizers, splitters = (
        _list_steps(parsed[name], inner)
        for name, inner in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"))
    )
    replaces = [{"type": "Replace", "pattern": {"String": " "}, "content": SENTENCEPIECE_SPACE}]
    prepends = [{"type": "Prepend", "prepend": SENTENCEPIECE_SPACE}]
    # Gemma's: its spaces are gone before it looks for them.
    idle = [{"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}]
    if splitters in ([], idle):
        known = ((replaces, DummyPrefix.NEVER), (prepends + replaces, DummyPrefix.BEFORE_SECTION))
        return next((prefix for steps, prefix in known if normalizers == steps), None)
    if normalizers not in ([], replaces) or len(splitters) != 1 or splitters[0]["type"] != "Metaspace":
        return None
    if splitters[0]["replacement"] != SENTENCEPIECE_SPACE:
        return None
    schemes = {"never": DummyPrefix.NEVER, "first": DummyPrefix.BEFORE_TEXT}
    return schemes.get(splitters[0].get("prepend_scheme", "always"))


def _list_steps(node: Any, inner: str) -> list[dict[str, Any]]:
    if node is None:
        return []
    if node["type"] != "Sequence":
        return [node]
    return [step for one in cast("list[Any]", node[inner]) for step in _list_steps(one, inner)]


class RoundTripDecoder:
    """Decodes ids to bytes and compares them with texts.

    `token_bytes` is None if a vocabulary has none; `decode`: the tokenizer's own function, used then.
    """

    def __init__(self, token_bytes: TokenBytes | None, decode: Callable[[Sequence[int]], str]) -> None:
        self._byte_table: pa.Array | None = None
        if token_bytes is not None:
            buffers = [None, pa.py_buffer(token_bytes.offsets), pa.py_buffer(token_bytes.content)]
            self._byte_table = pa.Array.from_buffers(pa.large_binary(), len(token_bytes.offsets) - 1, buffers)
        self._decode = decode

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
