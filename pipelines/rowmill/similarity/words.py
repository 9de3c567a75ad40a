"""Splits texts into words, and hashes words and runs of words without a Python object for any of them.

    "Don't say 東京!"  ─NFKC, casefold─►  "don't say 東京!"  ─►  don t say 東 京  ─►  one 64-bit hash each
    n-grams of 3                                              don t say │ t say 東 │ say 東 京

A word is a run of letters, digits and `_`, with the marks on them. Scripts without spaces between words have one word
per character: Han, Kana, Thai, Lao, Khmer, Myanmar. Rejected: a segmenter for these, which would tie a recipe's rows to
a dictionary's version.

A word's hash is a polynomial of its characters modulo 2^64, scrambled. Sums over a whole chunk of text give all words
at once: with P[i] the sum of c[k]·M^k over k < i, the word [a, b) is (P[b] − P[a])·M^(−a).
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Integers, Ints, compute_offsets, expand_ranges, find_distinct
from rowmill.core.permutation import GAMMA, mix_array

Hashes: TypeAlias = NDArray[np.uint64]

CHUNK_CHARS = 1 << 18
"""Characters that are hashed together: their arrays stay in the cache; only a longer run without a space exceeds it."""

_MULTIPLIER = 0x5851F42D4C957F2D
_INVERSE = pow(_MULTIPLIER, -1, 1 << 64)
_NGRAM_MULTIPLIER = np.uint64(0xD1342543DE82EF95)

_UNKNOWN, _OTHER, _LETTER, _ALONE, _MARK = range(5)
_ALONE_NAMES = (
    "CJK UNIFIED IDEOGRAPH", "CJK COMPATIBILITY IDEOGRAPH", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "THAI ", "LAO ",
    "KHMER ", "MYANMAR ",
)  # fmt: skip
"""How Unicode's names of the characters begin that are words by themselves."""


@dataclass(frozen=True, slots=True)
class HashedTexts:
    """The words of some texts, or their distinct n-grams: text t has the hashes `[offsets[t], offsets[t + 1])`."""

    hashes: Hashes
    offsets: Ints

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    def take(self, texts: Integers) -> "HashedTexts":
        """Return some of the texts."""
        lengths = self.lengths[texts]
        return HashedTexts(self.hashes[expand_ranges(self.offsets[texts], lengths)], compute_offsets(lengths))


@dataclass(frozen=True, slots=True)
class NGrams:
    """The n-grams of some texts: a hash each, the number of the word that it begins with, and the text."""

    hashes: Hashes
    starts: Ints
    texts: Ints


def split_words(text: str) -> list[str]:
    """Return the words of a text."""
    words: list[str] = []
    for piece in _cut_at_spaces(text):
        folded = fold_text(piece)
        starts, ends, _ = _find_words(_read_code_points(folded), np.array([0, len(folded)]))
        words += [folded[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    return words


def fold_text(text: str) -> str:
    """Return a text in the form whose words are compared: NFKC, without case."""
    return unicodedata.normalize("NFKC", text).casefold()


def hash_words(texts: Sequence[str]) -> HashedTexts:
    """Hash the words of each text; equal words have equal hashes."""
    hashes: list[Hashes] = [np.empty(0, np.uint64)]
    counts: list[Ints] = [np.empty(0, np.int64)]
    for pieces, owners in _collect_chunks(texts):
        offsets = compute_offsets([len(piece) for piece in pieces])
        codes = _read_code_points("".join(pieces))
        starts, ends, of_pieces = _find_words(codes, offsets)
        powers = _raise_to(_MULTIPLIER, len(codes))
        sums = np.zeros(len(codes) + 1, np.uint64)
        # 0 is added to no character, so that a word and the same after a NUL differ.
        np.cumsum((codes + np.uint64(1)) * powers[: len(codes)], dtype=np.uint64, out=sums[1:])
        of_words = (sums[ends] - sums[starts]) * _raise_to(_INVERSE, len(codes))[starts]
        of_words += (ends - starts).astype(np.uint64) * np.uint64(GAMMA)
        mix_array(of_words)
        hashes.append(of_words)
        counts.append(np.asarray(owners, np.int64)[of_pieces])
    of_texts = np.bincount(np.concatenate(counts), minlength=len(texts))
    return HashedTexts(np.concatenate(hashes), compute_offsets(of_texts))


def hash_ngrams(words: HashedTexts, n: int) -> NGrams:
    """Hash the runs of `n` words inside each text."""
    count = max(0, len(words.hashes) - n + 1)
    hashes = words.hashes[:count].copy()
    for place in range(1, n):
        np.multiply(hashes, _NGRAM_MULTIPLIER, out=hashes)
        np.add(hashes, words.hashes[place : place + count], out=hashes)
    texts = np.repeat(np.arange(len(words.lengths)), words.lengths)[:count]
    starts = np.flatnonzero(words.offsets[texts + 1] - np.arange(count) >= n)
    hashes = hashes[starts]
    mix_array(hashes)
    return NGrams(hashes, starts, texts[starts])


def hash_whole_texts(words: HashedTexts) -> Hashes:
    """Hash each text's words as one run; texts are equal if their words are."""
    powers = _raise_to(_MULTIPLIER, int(words.lengths.max(initial=0)))
    places = np.arange(len(words.hashes)) - np.repeat(words.offsets[:-1], words.lengths)
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(words.hashes * powers[places], dtype=np.uint64)))
    hashes = sums[words.offsets[1:]] - sums[words.offsets[:-1]] + words.lengths.astype(np.uint64) * np.uint64(GAMMA)
    mix_array(hashes)
    return hashes


def _collect_chunks(texts: Iterable[str]) -> Iterator[tuple[list[str], list[int]]]:
    """Yield folded pieces of texts, and the text of each."""
    pieces: list[str] = []
    owners: list[int] = []
    chars = 0
    for number, text in enumerate(texts):
        for piece in _cut_at_spaces(text):
            # What is ASCII needs no normalization: most texts.
            pieces.append(folded := piece.lower() if piece.isascii() else fold_text(piece))
            owners.append(number)
            chars += len(folded)
            if chars >= CHUNK_CHARS:
                yield pieces, owners
                pieces, owners, chars = [], [], 0
    yield pieces, owners


def _cut_at_spaces(text: str) -> Iterator[str]:
    """Cut a long text after spaces: no word, and nothing that folding joins, crosses one."""
    begin = 0
    while len(text) - begin > CHUNK_CHARS:
        space = max(text.rfind(separator, begin, begin + CHUNK_CHARS) for separator in " \n")
        if space < begin:
            following = [at for separator in " \n" if (at := text.find(separator, begin)) >= 0]
            space = min(following, default=len(text) - 1)
        yield text[begin : space + 1]
        begin = space + 1
    yield text[begin:] if begin else text


def _read_code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _find_words(codes: NDArray[np.uint32], offsets: Ints) -> tuple[Ints, Ints, Ints]:
    """Return where words begin and end, and the text of each; text t is `codes[offsets[t]:offsets[t + 1]]`."""
    table = _open_kind_table()
    kinds = table[codes]
    if (unknown := kinds == _UNKNOWN).any():
        for code in find_distinct(codes[unknown]).tolist():
            table[code] = _find_kind(chr(code))
        kinds = table[codes]
    is_first = np.zeros(len(codes) + 1, np.bool_)
    is_first[offsets] = True
    marks = np.flatnonzero(kinds == _MARK)
    if len(marks):
        # A mark has the kind of the character that it is on; a mark on nothing belongs to no word.
        places = np.arange(len(kinds))
        base = np.maximum.accumulate(np.where(kinds == _MARK, 0, places))[marks]
        first = np.maximum.accumulate(np.where(is_first[:-1], places, 0))[marks]
        kinds[marks] = np.where((kinds[base] == _MARK) | (base < first), _OTHER, kinds[base])
    begins = kinds == _LETTER
    begins[1:] &= is_first[1:-1] | (kinds[:-1] != _LETTER)
    begins |= kinds == _ALONE
    begins[marks] = False
    borders = np.flatnonzero(begins | (kinds == _OTHER) | is_first[:-1])
    ends = np.append(borders[1:], len(codes))
    is_word = begins[borders]
    starts = borders[is_word]
    return starts, ends[is_word], np.searchsorted(offsets, starts, "right") - 1


@cache
def _open_kind_table() -> NDArray[np.uint8]:
    """Return each character's kind; those beyond ASCII are filled in when they occur."""
    table = np.full(0x110000, _UNKNOWN, np.uint8)
    table[:128] = [_find_kind(chr(code)) for code in range(128)]
    return table


def _find_kind(character: str) -> int:
    category = unicodedata.category(character)
    if category[0] not in "LMN" and character != "_":
        return _OTHER
    if unicodedata.name(character, "").startswith(_ALONE_NAMES):
        return _ALONE
    return _MARK if category[0] == "M" else _LETTER


_KEPT_POWERS: dict[int, Hashes] = {}


def _raise_to(base: int, count: int) -> Hashes:
    """Return base^0 … base^(count - 1) modulo 2^64, and more of them; the longest list so far is kept."""
    # A size that few chunks exceed, so that equal powers are computed once.
    count = max(2 * CHUNK_CHARS, 1 << max(0, count - 1).bit_length())
    powers = _KEPT_POWERS.get(base)
    if powers is None or len(powers) < count:
        factors = np.full(count, base, np.uint64)
        factors[:1] = 1
        powers = _KEPT_POWERS[base] = np.cumprod(factors, dtype=np.uint64)
    return powers


def join_texts(words: HashedTexts, owners: Ints, count: int) -> HashedTexts:
    """Return the words of all texts of an owner as one text; `owners` ascend, below `count`."""
    ends = np.searchsorted(owners, np.arange(count), "right")
    return HashedTexts(words.hashes, np.append(0, words.offsets[ends]))
