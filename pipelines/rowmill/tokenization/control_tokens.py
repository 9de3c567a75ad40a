r"""Keep control-token strings in the data from becoming control tokens.

as_text     ["a", "<", "|", "im", "_end", "|", ">", "b"]   the string came from the data

A text without a template may bring its own BOS and EOS: these are its edges, not its content, and become the token
under every policy, once.

    "<s>Hi</s></s>\n"   ─►   "<s>Hi</s>"   ─►   BOS Hi EOS
"""

import re
import string
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.core.arrays import Bools
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json, iterate_strings
from rowmill.tokenization.tokenizer import EncodedTexts, Encoder, TokenizerCard, compute_byte_positions

Ranges = list[tuple[int, int]]
"""Ranges of characters, ascending."""


class ControlStrings:
    """The strings that must not become control tokens when they occur in a row's text.

    Control tokens are the special added tokens, and added tokens that occur in the template's source.
    """

    def __init__(self, card: TokenizerCard, template: str) -> None:
        chosen = {content for _, content, special in card.added if content and (special or content in template)}
        self.strings = tuple(sorted(chosen, key=lambda s: (-len(s), s)))
        self.ids = frozenset(i for i, content, _ in card.added if content in chosen)
        forms = {form for s in self.strings for form in (s, orjson.dumps(s)[1:-1].decode())}
        self.pattern = "|".join(re.escape(form) for form in sorted(forms, key=lambda s: (-len(s), s)))
        self._find = re.compile("|".join(map(re.escape, self.strings))) if self.strings else None
        self._template = template

    def count_occurrences(self, messages: Sequence[dict[str, Json]], tools: Json, kwargs: Json) -> Counter[str]:
        """Count the strings in a row's text, by `role string`; `tools` and `kwargs` count as roles."""
        values = [*((str(m["role"]), m) for m in messages), ("tools", tools), ("kwargs", kwargs)]
        find = self._find
        if find is None:
            return Counter()
        return Counter(
            f"{role} {found}" for role, value in values for found in find.findall("\0".join(iterate_strings(value)))
        )

    def find_rows(self, table: pa.Table) -> Bools:
        """Return which canonical rows contain a control string anywhere in their JSON: bool[N]."""
        found = np.zeros(table.num_rows, bool)
        if not self.strings:
            return found
        for name in ("messages", "tools", "template_kwargs"):
            column = table.column(name)
            if column.null_count < len(column):
                hits = pc.match_substring_regex(column, self.pattern)
                found |= hits.fill_null(fill_value=False).to_numpy(zero_copy_only=False)
        return found

    def find_ranges(self, texts: Sequence[str]) -> "dict[int, Ranges]":
        """Return the character ranges of the strings in texts, by the place of each text that has some."""
        if self._find is None or not texts:
            return {}
        hits = pc.match_substring_regex(pa.array(texts, pa.large_string()), self._find.pattern)
        places = np.flatnonzero(hits.to_numpy(zero_copy_only=False)).tolist()
        return {place: [match.span() for match in self._find.finditer(texts[place])] for place in places}

    def hide(self, value: Json, row_json: str) -> "tuple[Json, dict[str, str]]":
        """Replace control strings in every string of a JSON value by placeholders of equal length.

        Returns the new value, and the map from placeholder to string. The equal length keeps character spans of the
        rendered text valid after the strings are restored.
        """
        if self._find is None:
            return value, {}
        find, placeholders = self._find, dict[str, str]()
        # The first one of any length ends with that of the shortest string: where this is free, all of them are.
        shortest = _make_first_placeholder(len(self.strings[-1]))
        is_first_free = shortest not in row_json and shortest not in self._template

        def replace_one(match: re.Match[str]) -> str:
            text = match.group()
            if text not in placeholders:
                others, first = "".join(placeholders.values()), _make_first_placeholder(len(text))
                if not is_first_free or first in others:
                    first = _find_free_placeholder(len(text), f"{row_json}{self._template}{others}")
                placeholders[text] = first
            return placeholders[text]

        hidden = _map_strings(value, lambda text: find.sub(replace_one, text))
        return hidden, {placeholder: text for text, placeholder in placeholders.items()}


@dataclass(frozen=True, slots=True)
class EdgeStrings:
    """The strings that begin and end a text without being its content; empty for an edge that has none."""

    begin: str = ""
    end: str = ""

    def cut_repeats(self, text: str) -> str:
        """Return the text with each of its edges once, and without white space behind the end."""
        if self.end and (body := text.rstrip()).endswith(self.end):
            while (shorter := body.removesuffix(self.end).rstrip()).endswith(self.end):
                body = shorter
            text = body
        while self.begin and text.startswith(2 * self.begin):
            text = text.removeprefix(self.begin)
        return text

    def exclude(self, text: str, ranges: Ranges) -> Ranges:
        """Return the ranges that are not an edge of the text."""
        if self.begin and text.startswith(self.begin):
            ranges = [one for one in ranges if one != (0, len(self.begin))]
        if self.end and text.endswith(self.end):
            ranges = [one for one in ranges if one != (len(text) - len(self.end), len(text))]
        return ranges


def restore_control_strings(text: str, placeholders: dict[str, str]) -> tuple[str, Ranges]:
    """Restore control strings; return the text and the character ranges that must stay ordinary text."""
    if not placeholders:
        return text, []
    ranges: Ranges = []
    pieces: list[str] = []
    position = 0
    # Placeholders are letters and digits.
    for match in re.finditer("|".join(placeholders), text):
        start, end = match.span()
        ranges.append((start, end))
        pieces += (text[position:start], placeholders[match.group()])
        position = end
    return "".join((*pieces, text[position:])), ranges


def has_changed_placeholder(restored: str, placeholders: dict[str, str]) -> bool:
    """Return whether a restored text contains a placeholder in different case, because the template changes case.

    Placeholders of fewer than six characters could occur by chance and are not searched.
    """
    lowered = restored.lower()
    return any(len(one) >= 6 and one.lower() in lowered for one in placeholders)


def contains_added_token(encoder: Encoder, encoded: EncodedTexts, text: str, ranges: Sequence[tuple[int, int]]) -> bool:
    """Return whether an encoded text has an added token inside character ranges that must stay ordinary text."""
    starts: list[int] = encoded.starts[encoder.find_added_tokens(encoded.ids)].tolist()
    if not starts:
        return False
    if not text.isascii():
        at = compute_byte_positions(text)
        ranges = [(int(at[begin]), int(at[end])) for begin, end in ranges]
    begins = [begin for begin, _ in ranges]
    places = [bisect_right(begins, start) - 1 for start in starts]
    return any(place >= 0 and start < ranges[place][1] for place, start in zip(places, starts, strict=True))


def _make_first_placeholder(length: int) -> str:
    """Return the first string of the given length that `_find_free_placeholder` tries."""
    return "aaaa".rjust(length, "Q")[-length:]


def _find_free_placeholder(length: int, taken: str) -> str:
    """Return an ASCII string of the given length that does not occur in `taken`; deterministic."""
    letters = string.ascii_letters + string.digits
    tail = min(length, 4)
    for combination in product(letters, repeat=tail):
        word = "Q" * (length - tail) + "".join(combination)
        if word not in taken:
            return word
    raise ConfigError(
        f"no free placeholder of {length} characters; the row uses every word of that length; "
        "reject it with template.control_tokens"
    )


def _map_strings(value: Json, change: Callable[[str], str]) -> Json:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in cast("list[Json]", value)]
    if isinstance(value, dict):
        return {change(k): _map_strings(v, change) for k, v in cast("dict[str, Json]", value).items()}
    return value
