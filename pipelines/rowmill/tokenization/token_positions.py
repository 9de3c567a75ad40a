"""Encoded texts as arrays, and the bytes that each of their tokens covers.

text        "a<|im_end|>b"                       bytes  0 1          11 12
tokens      ["a", "<|im_end|>", "b"]             ends     1          11 12

An engine that reports only ids is enough where every id stands for a fixed number of bytes. Byte-level vocabularies do.
SentencePiece vocabularies do but for two things: a space is put before a text, or before each section between added
tokens, and a character without a piece is several byte tokens, which the reference places on the whole character:

    text        "龘a</s>b"                               bytes    0..3  3..4  4..8  8..9
    tokens      ["▁", <0xE9>, <0xBE>, <0x98>, "a", "</s>", "▁b"]
    starts      [ 0    0       0       0       3    4       8 ]
    ends        [ 3    3       3       3       4    8       9 ]

A text whose tokens do not add up to its bytes was changed by a normalizer, or holds what the vocabulary cannot write:
its positions are unknown, and it takes the reference path.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, Ints, compute_offsets


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


def read_token_bytes(backend: str) -> list[bytes]:
    """Return the bytes of every id of a byte-level vocabulary, for printing single tokens."""
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


@dataclass(frozen=True, slots=True)
class LocatedTokens:
    """The bytes of each token within its own text, and the texts whose positions are unknown: `unlocated` int64[K]."""

    starts: Ints
    ends: Ints
    unlocated: Ints


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


def locate_tokens(ids: NDArray[np.uint32], offsets: Ints, texts: Sequence[str], known: TokenLengths) -> LocatedTokens:
    """Return the bytes that each token of a batch covers: those that the reference reports."""
    lengths = known.lengths[ids]
    sizes = np.array(count_utf8_bytes(texts), np.int64)
    # The tokens that begin with a space which the text does not have.
    prefixed = np.empty(0, np.int64)
    if known.prefix is not DummyPrefix.NEVER and len(ids):
        added, opens = known.added[ids], np.zeros(len(ids), bool)
        opens[offsets[:-1][np.diff(offsets) > 0]] = True
        if known.prefix is DummyPrefix.BEFORE_SECTION:
            opens[1:] |= added[:-1]
        prefixed = np.flatnonzero(opens & ~added)
    lengths[prefixed] -= 1
    begins = compute_offsets(lengths)
    before = begins[offsets]
    starts = begins[:-1] - np.repeat(before[:-1], np.diff(offsets))
    unknown = np.diff(before) != sizes
    if known.prefix is DummyPrefix.BEFORE_TEXT:
        unknown |= np.fromiter((text.startswith(" ") for text in texts), bool, len(texts))
    located = LocatedTokens(starts, starts + lengths, np.flatnonzero(unknown))
    partial = np.flatnonzero(known.partial[ids]) if known.partial.any() else np.empty(0, np.int64)
    alone = prefixed[lengths[prefixed] == 0]
    if len(partial) or len(alone):
        bases = np.repeat(np.cumsum(sizes) - sizes, np.diff(offsets))
        # The byte behind the last text begins no character and belongs to none.
        raw = np.frombuffer("".join(texts).encode() + b"\0", np.uint8)
        continues = (raw & 0xC0) == 0x80
        last = len(raw) - 1
        for _ in range(3):
            places = np.clip(bases[partial] + located.starts[partial], 0, last)
            located.starts[partial] -= continues[places]
        located.ends[alone] += 1
        both = np.concatenate((partial, alone))
        for _ in range(3):
            places = np.clip(bases[both] + located.ends[both], 0, last)
            located.ends[both] += continues[places]
    return located
