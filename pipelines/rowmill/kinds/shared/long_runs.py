"""Rejects rows with a text in which no border stands for a million characters: encoded files, and rows of one sign.

Tokenizers cut a text at its borders and join the pieces that they get, so a piece costs more than its share: with
`gigatoken` a million letters take 0.1 to 0.4 s and ten million 2 to 7 s, and `tokenizers` takes four times as long, or
gives up on white space. Text with borders takes 0.01 s.

    letters, digits, _     aaaaaaaa…    also Chinese, Japanese and Korean, which have punctuation in every sentence
    white space            ␠␠␠␠␠␠␠␠…
    signs                  --------…    also combining marks, which are borders in Thai and Hindi

A run is of one of these classes; a border is where the next begins, as in the patterns of most tokenizers. Blanks alone
would be none: minified code and base64 have few, but signs, and take no longer than text.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from rowmill.core.json import Json, from_json
from rowmill.schema.rows import Rejected, Row

_CLASSES: Final = (re.compile(r"\w+"), re.compile(r"\s+"), re.compile(r"[^\w\s]+"))

_SHOWN_CHARS: Final = 20


def reject_long_run(values: Iterable[Json], limit: int) -> Rejected | None:
    """Return the reject if one of the texts in some values has a run of more than `limit` characters."""
    for text in _iterate_texts(values):
        found = find_long_run(text, limit)
        if found is not None:
            begin, length = found
            return Rejected(
                "too_long_run",
                f"{length:,} characters without a border, from character {begin + 1:,} of a text on, which begin with "
                f"{text[begin : begin + _SHOWN_CHARS]!r}; source.limits.max_run_chars is {limit:,}",
            )
    return None


def list_row_texts(row: Row) -> list[Json]:
    """Return the values of a row whose texts become tokens; a kind's own columns hold JSON text."""
    parsed: list[Json] = []
    for value in row.columns.values():
        if isinstance(value, str):
            try:
                parsed.append(from_json(value))
            except ValueError:
                parsed.append(value)
    return [list(row.messages), list(row.tools or ()), row.text, row.output, row.record, *parsed]


def find_long_run(text: str, limit: int) -> tuple[int, int] | None:
    """Return the beginning and length of the first run of more than `limit` characters, or None."""
    # Such a run holds two neighbours of the places that are half as far apart, so only these are looked at.
    step = limit // 2
    for at in range(0, len(text) - step, step) if len(text) > limit else ():
        one, ahead = next((one, found) for one in _CLASSES if (found := one.match(text, at)))
        if ahead.end() - at <= step:
            continue
        behind = one.match(text[max(at - step, 0) : at][::-1])
        begin = at if behind is None else at - behind.end()
        if ahead.end() - begin > limit:
            return begin, ahead.end() - begin
    return None


def _iterate_texts(values: Iterable[Json]) -> Iterator[str]:
    waiting = [*values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
