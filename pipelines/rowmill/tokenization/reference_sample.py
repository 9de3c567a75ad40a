r"""Choose which stretches of a part's texts the reference tokenizer encodes again.

An engine that differs from the reference differs on characters, not on rows, so characters are counted: of every batch
2 %, and of all parts of a dataset together a million, of each at most 64 k for that. (The first characters of a part,
up to twice as many, the reference encodes alone: of them half would be compared.) They are taken as stretches of at
most about 8 k from as many texts as possible, and which ones depends on the texts alone. A stretch begins and ends at a
border, a place where the pre-tokenization of every known tokenizer cuts, and is encoded between texts that make its
borders the same as in its text:

    in its text           … calm.\n│Waves come and go.\nIt is│ late …
    what is encoded             \n │Waves come and go.\nIt is│ a
    what is compared               └───────────────────────┘

A byte-level or SentencePiece tokenizer cuts between a line break and a letter or digit, and before a single space
between two letters. Of a text without a border, such as base64, all is compared up to `MAX_WHOLE_CHARS`, and nothing
of a longer one: the reference takes 500 bytes per token. A border is a guess that costs time where it is wrong, never
a result: a stretch that differs is judged by its whole text (`Encoder.matches_reference`).
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import xxhash

from rowmill.core.arrays import compute_offsets

MIN_PART_CHARS, MIN_DATASET_CHARS = 1 << 16, 1 << 20
"""Characters that are compared of a part, where it has as many, and of a dataset. 64 k are 20 ms of the reference, a
fifth of what a part of plain chats takes: of each of sixty parts they would notice no more than a million do."""

MIN_SAMPLE_SHARE = 0.02
"""The share of a batch's characters that is compared, at least."""

STRETCH_CHARS = (1 << 10, 1 << 13)
"""The shortest and the longest stretch, but for the way to the next border."""

MAX_WHOLE_CHARS = 1 << 18
"""Longer texts without borders are not compared."""

_AROUND_CHARS = 1 << 8
"""How far before a control string or a script its stretch begins."""

_BORDER = re.compile(r"\n(?=[^\W_])|(?<=[^\W\d_])(?=[ 、。，][^\W\d_])")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Characters `[begin, end)` of text number `text`, encoded after `lead` and before `tail`."""

    text: int
    begin: int
    end: int
    lead: str = ""
    tail: str = ""


def divide_minimum(parts: int) -> int:
    """Return how many characters of each of so many parts are compared at least."""
    return min(MIN_PART_CHARS, MIN_DATASET_CHARS // max(1, parts))


@dataclass(slots=True)
class ReferenceSample:
    """What of one part is in the sample so far; `minimum` characters of it at least will be."""

    minimum: int = MIN_PART_CHARS
    characters: int = 0
    features: set[str] = field(default_factory=set[str])
    """The control strings and scripts."""
    engineless: int = 0
    """Characters of the part that the reference encoded alone: they are no part of the sample."""

    def choose(self, texts: Sequence[str], control_strings: Iterable[str]) -> list[Stretch]:
        """Choose the stretches of a batch, and add them to the sample.

        `control_strings` are those of the batch: each is in the sample once per part, and so is each script.
        """
        total = sum(map(len, texts))
        wanted = min(total, max(self.minimum - self.characters, int(total * MIN_SAMPLE_SHARE) + 1))
        chosen: list[Stretch] = []
        for one in _iterate_stretches(texts, wanted):
            chosen.append(one)
            wanted -= one.end - one.begin
            if wanted <= 0:
                break
        sampled = "\0".join([texts[one.text][one.begin : one.end] for one in chosen])
        self.features.update(_find_scripts([sampled]))
        present = {one: one for one in control_strings} | _find_scripts(texts)
        for name in sorted(present.keys() - self.features):
            self.features.add(name)
            if present[name] not in sampled:
                chosen += _cut_around(texts, present[name])
        self.characters += sum(one.end - one.begin for one in chosen)
        return chosen


def _iterate_stretches(texts: Sequence[str], wanted: int) -> Iterator[Stretch]:
    """Yield a stretch of every text, then a second one of every text that has one, and so on.

    Texts are cut into windows of equal length; the order of the texts and that of each text's windows follow from the
    text's hash.
    """
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    size = int(np.clip(wanted // max(1, np.count_nonzero(lengths)), *STRETCH_CHARS))
    counts = -(-lengths // size)
    numbers = np.repeat(np.arange(len(texts)), counts)
    windows = np.arange(len(numbers)) - np.repeat(compute_offsets(counts)[:-1], counts)
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(text.encode()) for text in texts), np.uint64, len(texts))
    keys = hashes[numbers] + windows.astype(np.uint64)
    keys = keys * np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = keys ^ (keys >> np.uint64(27))
    ranks = np.empty(len(numbers), np.int64)
    ranks[np.lexsort((keys, numbers))] = windows
    whole: set[int] = set()
    for j in np.lexsort((keys, ranks)).tolist():
        number, begin = int(numbers[j]), int(windows[j]) * size
        if number in whole:
            continue
        found = _cut(texts[number], number, begin, begin + size, begin + size)
        if found is not None:
            yield found
            if not found.lead and not found.tail:
                whole.add(number)


def find_border(text: str, begin: int, end: int) -> int | None:
    """Return the first border from `begin` on that lies before `end`; None if there is none."""
    found = _BORDER.search(text, begin, end)
    return None if found is None else found.end()


def _cut(text: str, number: int, begin: int, latest: int, end: int) -> Stretch | None:
    """Return the stretch from the first border after `begin`, before `latest`, to the first one after `end`.

    None if none is there. Where none is for thousands of characters, it is the whole text, or None if that is too long.
    """
    reach = STRETCH_CHARS[1]
    left = _BORDER.search(text, begin, latest + 1) if begin else None
    right = _BORDER.search(text, end, end + reach) if end < len(text) else None
    if begin and left is None and _BORDER.search(text, max(0, begin - reach), begin + reach):
        return None
    has_end = right is not None or len(text) - end <= STRETCH_CHARS[0]
    if (begin and left is None) or not has_end:
        return Stretch(number, 0, len(text)) if len(text) <= MAX_WHOLE_CHARS else None
    return Stretch(
        number,
        left.end() if left else 0,
        right.end() if right else len(text),
        "" if left is None else left.group() or "a",
        "" if right is None else "a" if right.group() else " a",
    )


def _cut_around(texts: Sequence[str], content: str) -> list[Stretch]:
    """Return the stretch around the first occurrence of a string that has borders near it, or none."""
    for number, text in enumerate(texts):
        place = text.find(content)
        if place < 0:
            continue
        for reach in (_AROUND_CHARS, STRETCH_CHARS[1]):
            found = _cut(text, number, max(0, place - reach), place, place + len(content))
            if found is not None:
                return [found]
    return []


def _find_scripts(texts: Sequence[str]) -> dict[str, str]:
    """Return the scripts of the letters of texts, and the categories of other characters, each with a character of it.

    ASCII is in every sample and is left out.
    """
    joined = "".join([text for text in texts if not text.isascii()]).encode("utf-32-le")
    if not joined:
        return {}
    codes = np.frombuffer(joined, np.uint32)
    occurs = np.zeros(int(codes.max()) + 1, np.bool_)
    occurs[codes] = True
    occurs[:0x80] = False
    return {_name_script(code): chr(code) for code in np.flatnonzero(occurs).tolist()}


@lru_cache(maxsize=1 << 15)
def _name_script(code: int) -> str:
    """Return the script of a letter or mark, which is the first word of its name; else the character's category."""
    character = chr(code)
    category = unicodedata.category(character)
    return unicodedata.name(character, category).partition(" ")[0] if category[0] in "LM" else category
