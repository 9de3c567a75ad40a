r"""JSON files: a list of records in one document, one record after another, or one on each line.

Only `\n` ends a line: U+2028, U+0085 and a lone `\r` are characters like any other, so nothing here calls `splitlines`.

A list of 2 GB must fit through a worker of 1.5 GB, so the file is never held in memory. Only its strings, brackets and
commas are followed, block by block in NumPy: about three times as fast as regular expressions.

    [ {"a": [1, 2]}, {"b": "],["} ]
    1 2     3     2 1             0     depth; a comma at depth 1 ends an element, and so does depth 0

Objects one after another may be laid out in any way:

    {"a": 1}{"a": 2}        no line end between them
    {                       written for people
      "a": 1
    }
    {"a": 1},               a list without its brackets
    {"a": 2},
"""

import io
import json
import re
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import BinaryIO, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import orjson

from rowmill.core.errors import SourceError
from rowmill.sources.encodings import BlockStream
from rowmill.sources.parts import (
    BOM,
    FileFormat,
    FileScan,
    OpenStream,
    PartContent,
    SourceFile,
    cut_lines,
    cut_rows,
    make_too_long_line,
)


class _JsonLines(FileFormat):
    def detect(self, open_stream: OpenStream, file: SourceFile) -> FileFormat:
        """Return the format of a list, or of objects that are laid out otherwise, under the name of JSON Lines."""
        if file.options.field is not None:
            return VALUE_FORMAT
        with open_stream() as stream:
            head = read_head(stream)
            first, _, rest = head.partition(b"\n")
            if is_valid_json(first) and not (first.startswith(b"[") and not rest.strip()):
                return self
            is_whole = not stream.read(1)
        is_list = head.startswith(b"[") and (is_whole or not is_valid_json(first))
        if is_list and (is_valid_json(head) or head[1:].lstrip().startswith(b"{")):
            return ARRAY_FORMAT
        # False also where the first object is not valid: a damaged first line is a reject, not another layout.
        found = _read_first_object(head)
        if found is not None and ("\n" in found[0] or found[1].partition("\n")[0].strip().startswith(("{", ","))):
            return STREAM_FORMAT
        return self

    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: SourceFile) -> Iterator[PartContent]:
        return cut_lines(stream, file.limits.max_record_bytes)


LINES_FORMAT = _JsonLines(
    "json_lines",
    suffixes=(".jsonl", ".ndjson", ".jsonlines"),
    options=frozenset({"encoding", "field"}),
    is_text=True,
    is_json=True,
    is_own_lines=True,
)


Bytes: TypeAlias = npt.NDArray[np.uint8]
Positions: TypeAlias = npt.NDArray[np.int64]

BLOCK_BYTES = 1 << 20
_WHITE_SPACE = b" \t\r\n"
_INDENTATION = re.compile(rb"\n[ \t\r\n]*")
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'

_IS_STRUCTURE = np.zeros(256, np.bool_)
_IS_STRUCTURE[list(b"[]{},")] = True
_DEPTH_STEP = np.zeros(256, np.int64)
_DEPTH_STEP[list(b"[{")] = 1
_DEPTH_STEP[list(b"]}")] = -1


def read_head(stream: BinaryIO) -> bytes:
    """Return the first block of a stream from its first non-blank character on."""
    return next(read_blocks(stream), b"")


def is_valid_json(text: bytes) -> bool:
    """Return whether a text is one JSON value."""
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def split_elements(stream: BinaryIO, url: str, max_record_bytes: int, *, is_alone: bool = True) -> Iterator[bytes]:
    """Yield the text of each element of the list in the stream, without white space around it.

    A list that `is_alone` is all that the stream holds. An element that is too long is not held in memory; its
    placeholder line is yielded.
    """
    structure = JsonStructure()
    count = 0
    partial = PartialElement(max_record_bytes)
    for block in read_blocks(stream):
        start = int(structure.depth == 0)  # The list's bracket is the first character.
        text, marks, depths = structure.locate_marks(block)
        closings = np.flatnonzero(depths == 0)
        if len(closings):
            marks, depths = marks[: closings[0] + 1], depths[: closings[0] + 1]
            structure.depth = 0
        # Elements end at the commas and the bracket of the list.
        is_end = (depths == 0) | ((depths == 1) & (text[marks] == _COMMA))
        for end in marks[is_end].tolist():
            element = partial.take(block[start:end])
            start = end + 1
            if element:
                count += 1
                yield element
        if structure.depth == 0:
            if not is_alone:
                return
            rest = block[start:]
            while not rest.strip(_WHITE_SPACE):
                rest = stream.read(BLOCK_BYTES)
                if not rest:
                    return
            raise SourceError(
                f"{url}: data follows the JSON list, which ends after {count:,} elements "
                f"({rest.strip(_WHITE_SPACE)[:40]!r}); a .json file holds one list, one value or JSON lines of "
                "objects; split the file, or rename it to .jsonl"
            )
        partial.add(block[start:])
    raise SourceError(
        f"{url}: the JSON list does not end; after element {count:,} the file continues for {partial.length:,} "
        "bytes and ends without ']'; expected a complete list; fetch the file again, or rename it to "
        ".jsonl if it holds one record per line"
    )


def open_list(stream: BinaryIO, url: str, field: str) -> BinaryIO:
    """Return a stream that begins with the list at a path in the object of `stream`, such as `data` or `data.rows`."""
    at: io.BufferedReader = io.BufferedReader(BlockStream(read_blocks(stream)))
    for name in field.split("."):
        member = _open_member(at, name)
        if isinstance(member, dict):
            kinds = ", ".join(f"{key} ({kind})" for key, kind in list(member.items())[:20]) or "none"
            raise SourceError(
                f"{url}: source.field {field!r} names no list of it; the lists and objects at {name!r} are: {kinds}; "
                "expected the path of a list of records, such as data or data.rows; correct source.field"
            )
        at = member
    if at.peek(1)[:1] != b"[":
        raise SourceError(
            f"{url}: source.field {field!r} is not a list; expected the path of a list of records, such as data or "
            "data.rows; correct source.field, or omit it if the whole object is one record"
        )
    return cast(BinaryIO, at)


_MEMBER_KINDS = {ord("["): "a list", ord("{"): "an object"}
_MAX_KEY_BYTES = 1 << 16


def _open_member(stream: io.BufferedReader, name: str) -> io.BufferedReader | dict[str, str]:
    """Return a stream that begins with the value of a key, if it is a list or an object; else all such values."""
    kinds: dict[str, str] = {}
    structure, before = JsonStructure(), b""
    blocks = read_blocks(cast(BinaryIO, stream))
    for block in blocks:
        text, marks, depths = structure.locate_marks(block)
        steps = _DEPTH_STEP[text[marks]]
        # A member begins after the bracket of the object, or after a comma in it.
        is_border, is_opening = (depths == 1) & (steps >= 0), (depths == 2) & (steps > 0)
        begin = 0
        for mark, opens in zip(marks[is_border | is_opening].tolist(), is_opening[is_border | is_opening], strict=True):
            if not opens:
                begin, before = mark + 1, b""
                continue
            # What comes before a value in a list is no key.
            written = (before + block[begin:mark]).strip(_WHITE_SPACE)
            key = orjson.loads(written[:-1]) if written[-1:] == b":" and is_valid_json(written[:-1]) else None
            if key == name:
                return io.BufferedReader(BlockStream(chain([block[mark:]], blocks)))
            if isinstance(key, str):
                kinds[key] = _MEMBER_KINDS[int(text[mark])]
        if structure.depth == 0:
            break
        before = (before + block[begin:])[:_MAX_KEY_BYTES] if structure.depth == 1 else b""
    return kinds


class PartialElement:
    """The start of an element that continues in the next block; of one that is too long, only its first block."""

    def __init__(self, max_record_bytes: int, *, between: bytes = _WHITE_SPACE) -> None:
        self._limit = max_record_bytes
        self._between = between
        self._blocks: list[bytes] = []
        self.length = 0

    def add(self, block: bytes) -> None:
        """Add text that no element ends in."""
        self.length += len(block)
        if self.length <= self._limit or not self._blocks:
            self._blocks.append(block)
        else:
            del self._blocks[1:]

    def take(self, block: bytes) -> bytes:
        """Return the element that `block` ends, and reset."""
        self.add(block)
        element = b"".join(self._blocks).strip(self._between)
        if self.length > self._limit:
            element = make_too_long_line(element, self.length, self._limit)
        self._blocks.clear()
        self.length = 0
        return element


def read_blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the stream from its first non-blank character on, in blocks that do not end in a backslash."""
    carried = b""
    at_start = True
    while block := stream.read(BLOCK_BYTES):
        block = carried + (block.removeprefix(BOM).lstrip(_WHITE_SPACE) if at_start else block)
        at_start = at_start and not block
        whole = len(block.rstrip(b"\\"))
        carried = block[whole:]
        if whole:
            yield block[:whole]
    if carried:
        yield carried


class JsonStructure:
    """Finds brackets and commas block by block; `depth` is the number of open brackets."""

    def __init__(self) -> None:
        self.depth = 0
        self._in_string = False

    def locate_marks(self, block: bytes) -> tuple[Bytes, Positions, Positions]:
        """Return the block's bytes, the positions of its brackets and commas, and the depth after each."""
        text = np.frombuffer(block, np.uint8)
        quotes = np.flatnonzero(text == _QUOTE)
        preceded = quotes > 0
        preceded[preceded] = text[quotes[preceded] - 1] == _BACKSLASH
        if preceded.any():
            # A quote is escaped by an odd number of backslashes before it.
            slashes = np.flatnonzero(text == _BACKSLASH)
            begins = np.maximum.accumulate(np.where(np.diff(slashes, prepend=-2) == 1, -1, slashes))
            last = np.searchsorted(slashes, quotes[preceded] - 1)
            escaped = np.zeros(len(quotes), np.bool_)
            escaped[preceded] = (slashes[last] - begins[last]) % 2 == 0
            quotes = quotes[~escaped]
        marks = np.flatnonzero(_IS_STRUCTURE[text])
        quotes_before = np.searchsorted(quotes, marks) + self._in_string
        marks = marks[quotes_before % 2 == 0]
        self._in_string ^= bool(len(quotes) % 2)
        depths = self.depth + np.cumsum(_DEPTH_STEP[text[marks]])
        self.depth = int(depths[-1]) if len(depths) else self.depth
        return text, marks, depths


def remove_line_ends(text: bytes) -> bytes:
    r"""Return the same JSON text without line ends.

    In valid JSON, line ends occur only between tokens and are removed with the indentation that follows. In an invalid
    text, one may be inside a string, where removing it could make the text valid: it becomes `\r`, which is white space
    between tokens and as forbidden as `\n` inside a string.
    """
    if b"\n" not in text:
        return text
    return _INDENTATION.sub(b" ", text) if is_valid_json(text) else text.replace(b"\n", b"\r")


class _JsonArray(FileFormat):
    def detect(self, open_stream: OpenStream, file: SourceFile) -> FileFormat:
        """Return what a `.json` file holds: a list, one record per line, objects one after another, or one value.

        If the first line alone is a JSON value, or too long to be examined, records are lines.
        """
        if file.options.field is not None:
            return VALUE_FORMAT
        limit = file.limits.max_record_bytes
        with open_stream() as stream:
            head = b""
            while not head and (block := stream.read(BLOCK_BYTES)):
                head = block.removeprefix(BOM).lstrip(_WHITE_SPACE)
            if head[:1] == b"[":
                return self
            blocks = [head]
            while b"\n" not in blocks[-1] and sum(map(len, blocks)) <= limit:
                blocks.append(stream.read(BLOCK_BYTES))
                if not blocks[-1]:
                    break
        first_line = b"".join(blocks).partition(b"\n")[0]
        if not head or len(first_line) > limit or is_valid_json(first_line):
            return LINES_FORMAT
        with open_stream() as stream:
            first = _read_first_object(read_head(stream))
        # A whole object, and the beginning of another one.
        has_two = first is not None and first[1].lstrip(BETWEEN.decode()).startswith("{")
        return STREAM_FORMAT if has_two else VALUE_FORMAT

    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: SourceFile) -> Iterator[PartContent]:
        limit = file.limits.max_record_bytes
        elements = split_elements(stream, scan.url, limit)
        return cut_rows(map(remove_line_ends, elements), limit)


class _JsonValue(FileFormat):
    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: SourceFile) -> Iterator[PartContent]:
        limit = file.limits.max_record_bytes
        if file.options.field is not None:
            elements = split_elements(open_list(stream, scan.url, file.options.field), scan.url, limit, is_alone=False)
            return cut_rows(map(remove_line_ends, elements), limit)
        # White space around the value does not count, but must be read to be recognized.
        value = stream.read(limit + BLOCK_BYTES)
        rest = sum(map(len, iter(partial(stream.read, BLOCK_BYTES), b"")))
        whole = value.removeprefix(BOM).strip(_WHITE_SPACE)
        row = make_too_long_line(whole, len(value) + rest, limit) if rest else remove_line_ends(whole)
        return cut_rows([row], limit)


ARRAY_FORMAT = _JsonArray(
    "json_array", suffixes=(".json",), options=frozenset({"encoding", "field"}), is_text=True, is_json=True
)
VALUE_FORMAT = _JsonValue(
    "json_value",
    options=frozenset({"encoding", "field"}),
    is_text=True,
    is_json=True,
    syntax_hint="; the file was read as one value, because its first line is not a JSON value; is it JSON Lines?",
)

BETWEEN = b" \t\r\n,"
"""What may stand between two objects."""


def _read_first_object(head: bytes) -> tuple[str, str] | None:
    """Return the text of the first object and what follows it; None if the text does not begin with a whole object."""
    text = head.decode("utf-8", "ignore")
    if not text.startswith("{"):
        return None
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return text[:end], text[end:]


class _JsonStream(FileFormat):
    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: SourceFile) -> Iterator[PartContent]:
        limit = file.limits.max_record_bytes
        return cut_rows(map(remove_line_ends, _split_objects(stream, scan.url, limit)), limit)


def _split_objects(stream: BinaryIO, url: str, max_record_bytes: int) -> Iterator[bytes]:
    """Yield the text of each object; one that is too long is not held in memory, and its placeholder is yielded."""
    structure, partial, count = JsonStructure(), PartialElement(max_record_bytes, between=BETWEEN), 0
    for block in read_blocks(stream):
        start = 0
        text, marks, depths = structure.locate_marks(block)
        closes = (text[marks] == ord("}")) | (text[marks] == ord("]"))
        for end in marks[(depths == 0) & closes].tolist():
            yield partial.take(block[start : end + 1])
            start, count = end + 1, count + 1
        partial.add(block[start:])
    if rest := partial.take(b""):
        raise SourceError(
            f"{url}: the JSON object after object {count:,} does not end ({rest[:40]!r}); the file is read as a stream "
            "of objects, because its first one is not a line of its own; expected whole objects; fetch the file again"
        )


STREAM_FORMAT = _JsonStream("json_stream", options=frozenset({"encoding", "field"}), is_text=True, is_json=True)
