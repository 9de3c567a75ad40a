"""A `.json` file: a list of records, or one value; and telling these from JSON Lines under that suffix.

What belongs here: splitting a list's text into its elements, without parsing them. What does not: judging
an element; it goes on as one JSON line and is judged when its part is read, like any other line.

A list of 2 GB has to pass through a worker of 1.5 GB, so the file is never held: only strings and brackets
are followed, by two regular expressions that each swallow everything up to the next bracket.

    [ {"a": [1, 2]}, {"b": "],["} ]
    ^ ^    ^     ^^^ ^           ^ ^     depth 1 2 3 2 1 · 2 1 · 0; a comma at depth 1 ends an element
"""

import re
from collections.abc import Iterator
from typing import BinaryIO, Literal

import orjson

from pipelines.errors import SourceError
from pipelines.sources.parts import BOM, Slice, cut_rows

_BLOCK_BYTES = 1 << 20
_WHITE = b" \t\r\n"
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_UP_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+", re.DOTALL)
_UP_TO_BRACKET_OR_COMMA = re.compile(rb'(?:[^"\[\]{},]++|' + _STRING + rb")*+", re.DOTALL)
_INDENTATION = re.compile(rb"[ \t\r]*\n[ \t\r\n]*")


def kind_of_json(stream: BinaryIO) -> Literal["json_array", "json_lines", "json_value"]:
    """Tell by its beginning what a `.json` file holds.

    The first character that is not white space is `[`: a list. Else, if the first line alone is a JSON
    value: JSON Lines. Else: one value.
    """
    head = b""
    while not head and (block := stream.read(_BLOCK_BYTES)):
        head = block.removeprefix(BOM).lstrip(_WHITE)
    if head[:1] == b"[":
        return "json_array"
    while b"\n" not in head and (block := stream.read(_BLOCK_BYTES)):
        head += block
    first_line = head.partition(b"\n")[0]
    return "json_lines" if not head or _parses(first_line) else "json_value"


def _parses(text: bytes) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def cut(stream: BinaryIO, url: str) -> Iterator[Slice]:
    """Cut a list into parts by the number of its elements."""
    return cut_rows(on_one_line(element) for element in elements(stream, url))


def cut_value(stream: BinaryIO) -> Iterator[Slice]:
    """Return the whole file as one record; this one is held in memory, since one record always is."""
    return cut_rows([on_one_line(stream.read().removeprefix(BOM).strip(_WHITE))])


def elements(stream: BinaryIO, url: str) -> Iterator[bytes]:
    """Yield the text of each element of the list in the stream, without white space around it.

    Raises
    ------
    SourceError
        Where the list does not end, or something stands behind its end.

    """
    buffer = b""
    while not buffer and (block := stream.read(_BLOCK_BYTES)):
        buffer = block.removeprefix(BOM).lstrip(_WHITE)
    start = position = depth = 1
    count = 0
    while depth:
        pattern = _UP_TO_BRACKET_OR_COMMA if depth == 1 else _UP_TO_BRACKET
        position = pattern.match(buffer, position).end()  # pyright: ignore[reportOptionalMemberAccess]
        token = buffer[position : position + 1]
        if token in (b"", b'"'):  # The end of the buffer, or a string that goes on behind it.
            buffer, position, start = _read_on(buffer[start:], stream, url, count), position - start, 0
            continue
        position += 1
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1, b",": 0}[token]
        if depth == 0 or (depth == 1 and token == b","):
            element = buffer[start : position - 1].strip(_WHITE)
            start = position
            count += bool(element)
            if element:
                yield element
    _require_end(buffer[position:], stream, url, count)


def _read_on(held: bytes, stream: BinaryIO, url: str, count: int) -> bytes:
    # As much again as is held: a string of 100 MB is then scanned twice in all, not once per block.
    block = stream.read(max(_BLOCK_BYTES, len(held)))
    if not block:
        raise SourceError(
            f"{url}: the JSON list does not end; element {count + 1} begins and {len(held):,} bytes later the file "
            "is over; a list is read to its ']' or not at all; fetch the file again, or name it .jsonl if it "
            "holds one record per line"
        )
    return held + block


def _require_end(rest: bytes, stream: BinaryIO, url: str, count: int) -> None:
    while not rest.strip(_WHITE):
        rest = stream.read(_BLOCK_BYTES)
        if not rest:
            return
    raise SourceError(
        f"{url}: something stands behind the JSON list, which ends after {count:,} elements "
        f"({rest.strip(_WHITE)[:40]!r}); a .json file holds one list, one value or JSON lines of objects; split "
        "the file, or name it .jsonl"
    )


def on_one_line(text: bytes) -> bytes:
    """Return the same JSON text without line ends.

    In valid JSON they stand between tokens only and go, with the indentation that follows. In a broken
    text one may stand inside a string, where dropping it could make the text valid: it becomes `\\r`,
    which is white space between tokens and as forbidden as `\\n` inside a string.
    """
    if b"\n" not in text:
        return text
    return _INDENTATION.sub(b" ", text) if _parses(text) else text.replace(b"\n", b"\r")
