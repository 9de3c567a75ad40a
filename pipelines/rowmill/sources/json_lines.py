r"""JSON Lines: one record per line, and only `\n` ends a line.

U+2028, U+0085 and a lone `\r` inside a line are characters like any other, which is why nothing here ever calls
`splitlines`.
"""

from collections.abc import Iterator
from typing import BinaryIO

from rowmill.sources.file_format import FileFormat, FileOptions, OpenStream
from rowmill.sources.parts import FileScan, PartContent, cut_lines


class _JsonLines(FileFormat):
    def detect(self, open_stream: OpenStream, file: FileOptions) -> FileFormat:
        """Return the format of a list, or of objects that are laid out otherwise, under the name of JSON Lines."""
        from rowmill.sources import json_array, json_stream

        if file.field is not None:
            return json_array.VALUE_FORMAT
        with open_stream() as stream:
            head = json_array.read_head(stream)
            first, _, rest = head.partition(b"\n")
            if json_array.is_valid_json(first) and not (first.startswith(b"[") and not rest.strip()):
                return self
            is_whole = not stream.read(1)
        is_list = head.startswith(b"[") and (is_whole or not json_array.is_valid_json(first))
        if is_list and (json_array.is_valid_json(head) or head[1:].lstrip().startswith(b"{")):
            return json_array.FORMAT
        return json_stream.FORMAT if json_stream.is_json_stream(head) else self

    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: FileOptions) -> Iterator[PartContent]:
        return cut_lines(stream, file.limits.max_record_bytes)


FORMAT = _JsonLines(
    "json_lines",
    suffixes=(".jsonl", ".ndjson", ".jsonlines"),
    options=frozenset({"encoding", "field"}),
    is_text=True,
    is_json=True,
    is_own_lines=True,
)
