"""JSON objects one after another, however they are laid out: over several lines, without line ends, with commas.

{"a": 1}{"a": 2}        no line end between them
{                       written for people
  "a": 1
}
{"a": 1},               a list without its brackets
{"a": 2},
"""

import json
from collections.abc import Iterator
from typing import BinaryIO

from rowmill.core.errors import SourceError
from rowmill.sources.file_format import FileFormat, FileOptions
from rowmill.sources.json_array import JsonStructure, PartialElement, read_blocks, remove_line_ends
from rowmill.sources.parts import FileScan, PartContent, cut_rows

BETWEEN = b" \t\r\n,"
"""What may stand between two objects."""


def is_json_stream(head: bytes) -> bool:
    """Return whether a file that begins like this with an object has another layout than JSON Lines.

    False also where the first object is not valid: a damaged first line is a reject, not another layout.
    """
    first = _read_first_object(head)
    return first is not None and ("\n" in first[0] or first[1].partition("\n")[0].strip().startswith(("{", ",")))


def has_two_objects(head: bytes) -> bool:
    """Return whether a whole object is followed by the beginning of another one."""
    first = _read_first_object(head)
    return first is not None and first[1].lstrip(BETWEEN.decode()).startswith("{")


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


def split_objects(stream: BinaryIO, url: str, max_record_bytes: int) -> Iterator[bytes]:
    """Yield the text of each object; one that is too long is not held in memory, and its placeholder is yielded.

    Raises
    ------
    SourceError
        If the last object does not end.

    """
    structure, partial, count = _ObjectStructure(), PartialElement(max_record_bytes, between=BETWEEN), 0
    for block in read_blocks(stream):
        start = 0
        for end in structure.ends(block):
            yield partial.take(block[start : end + 1])
            start, count = end + 1, count + 1
        partial.add(block[start:])
    if rest := partial.take(b""):
        raise SourceError(
            f"{url}: the JSON object after object {count:,} does not end ({rest[:40]!r}); the file is read as a stream "
            "of objects, because its first one is not a line of its own; expected whole objects; fetch the file again"
        )


class _ObjectStructure(JsonStructure):
    def ends(self, block: bytes) -> list[int]:
        """Return the positions of the brackets that end an object."""
        text, marks, depths = self.locate_marks(block)
        closes = (text[marks] == ord("}")) | (text[marks] == ord("]"))
        return marks[(depths == 0) & closes].tolist()


class _JsonStream(FileFormat):
    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: FileOptions) -> Iterator[PartContent]:
        limit = file.limits.max_record_bytes
        return cut_rows((remove_line_ends(record) for record in split_objects(stream, scan.url, limit)), limit)


FORMAT = _JsonStream("json_stream", options=frozenset({"encoding", "field"}), is_text=True, is_json=True)
