"""A raw file as parts that grow with it, and what is known of a file that was scanned.

What belongs here: the nouns `SourcePart`, `FileScan` and `PartContent`, the two laws of size, cutting a stream or
a sequence of rows by them. What does not: file formats (one module each), where files lie (`urls.py`),
how a part becomes records again (`reading.py`).

    byte     0        128 Ki    256 Ki            6.25 Mi             800 Mi
    part     └── 0 ──┘└── 1 ──┘└── 2 …  49 ──────┘└─ o/50 bytes each ┘└─ 16 Mi each …

A part that begins at offset o ends at the first line end at or after o + size(o). Its bounds depend on
nothing behind it, so lines appended to a file change its last part and add new ones, at most one
fiftieth of a large file. Why not equal slices or content-defined cuts: `docs/decisions/0002`.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, BinaryIO, Literal

from rowmill.sources.limits import bound_line, make_too_long_line

SCAN_VERSION = 4
"""Raised whenever the same file would give other parts or other staged bytes; older scans are redone."""

BOM = b"\xef\xbb\xbf"
BLANKS = b" \t\r"
"""What JSON calls white space, without the line end: a line of nothing else is no record."""

_BLOCK_BYTES = 1 << 20
_CONTENT_LIMIT_BYTES = 16 << 20

SplitHint = Literal["train", "validation"]
SampleBy = Literal["line", "paragraph", "document"]


@dataclass(frozen=True, slots=True)
class PartContent:
    """A part as a reader cuts it: its place in the file and its records as JSON lines.

    `offset` and `length` count bytes of the decompressed file for line formats, rows for the others. `is_whole`: the
    content has every record as the file has it; else lines stand in it for records that are too long.
    """

    offset: int
    length: int
    first_line: int
    first_record: int
    records: int
    content: bytes
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A slice of a source file, named by its content.

    `first_line` and `first_record` count from 1. For formats without lines they are equal, and "line"
    means record. `staged` is where a copy as JSON lines lies; None: the bytes `[offset, offset + length)`
    of the file itself. `arrow`: Arrow's gaps stand as nulls in the records and mean "absent".
    """

    url: str
    split_hint: SplitHint | None
    index: int
    offset: int
    length: int
    first_line: int
    first_record: int
    records: int
    sha256: str
    part_id: str
    reader: str
    arrow: bool
    stamp: str
    staged: str | None
    content_bytes: int | None = None
    """How long its records are as JSON lines; None in scans of before it was noted."""

    def to_json(self) -> dict[str, Any]:
        """Return the part as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "SourcePart":
        """Take back what `to_json` gave."""
        return cls(**values)


@dataclass(frozen=True, slots=True)
class FileScan:
    """All that is kept of one file (or one Hugging Face split) after reading it once.

    `stamp` tells cheaply whether the file moved since; "" never vouches for it. `columns` are the
    names and types that a typed format declares. `revision` is the commit of a Hugging Face dataset.
    `sample_by` is what a text file was cut into, None for other files; `max_record_bytes` the limit it was read under.
    `delimiter` and `quote` are the dialect of a CSV file, and `asked` what the recipe said of them.
    `keeps_non_finite`: NaN and infinity of a typed file stand in its parts as text, not as null.
    """

    url: str
    split_hint: SplitHint | None
    reader: str
    stamp: str
    records: int
    parts: tuple[SourcePart, ...]
    columns: dict[str, str] | None = None
    revision: str | None = None
    sample_by: SampleBy | None = None
    max_record_bytes: int | None = None
    delimiter: str | None = None
    quote: str | None = None
    asked: tuple[str | None, str | None] = (None, None)
    keeps_non_finite: bool = False
    version: int = SCAN_VERSION

    def to_json(self) -> dict[str, Any]:
        """Return the scan as a JSON object, to be kept in a manifest."""
        values: dict[str, Any] = asdict(self)
        values["parts"] = list(values["parts"])
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "FileScan":
        """Take back what `to_json` gave."""
        own: dict[str, Any] = {**values, "parts": tuple(SourcePart.from_json(part) for part in values["parts"])}
        own["asked"] = tuple(values.get("asked", (None, None)))
        return cls(**own)


def part_bytes(offset: int) -> int:
    """Return the least size in bytes of a part of a line format that begins at `offset`."""
    return min(max(offset // 50, 128 << 10), 16 << 20)


def part_rows(offset: int) -> int:
    """Return the size in rows of a part of a row format that begins at row `offset`."""
    return min(max(offset // 50, 1024), 65536)


def cut_lines(stream: BinaryIO, max_line_bytes: int) -> Iterator[PartContent]:
    r"""Cut a stream at `\n` into parts that, joined, are the stream; memory holds one part, one line and one block."""
    line, record = 1, 1
    for offset, length, content in cut_pieces(stream, find_line_end, max_line_bytes=max_line_bytes):
        bounded_content = _bound_lines(content, max_line_bytes)
        is_whole = len(content) == length and bounded_content == content
        records = _count_records(content, at_start=offset == 0)
        yield PartContent(offset, length, line, record, records, bounded_content, is_whole)
        line, record = line + content.count(b"\n"), record + records


def find_line_end(buffer: bytearray, start: int) -> int:
    """Return where the first line ends that does so after `start`, 0 if none does."""
    return buffer.find(b"\n", start) + 1


def _bound_lines(content: bytes, limit: int) -> bytes:
    """Put a line that stands for it in the place of each line that is too long."""
    if len(content) <= limit:
        return content
    return b"\n".join([bound_line(line, limit) for line in content.split(b"\n")])


def cut_pieces(
    stream: BinaryIO,
    find_end: Callable[[bytearray, int], int],
    *,
    check_length: Callable[[int], None] | None = None,
    max_line_bytes: int | None = None,
) -> Iterator[tuple[int, int, bytes]]:
    """Cut a stream into pieces that, joined, are the stream; yield each with its offset and length.

    A piece that begins at offset o ends at the first end at or after o + `part_bytes(o)`; `find_end(buffer, start)`
    returns the first end after `start`, 0 if there is none. `check_length` may refuse a stream: before more is read
    it is given how many bytes have no end in them. With `max_line_bytes` a line that is far too long is read past, and
    the piece holds a line that stands for it.
    """
    pieces = _PieceCutter(stream, find_end, check_length, max_line_bytes)
    offset = 0
    while (piece := pieces.next(part_bytes(offset))) is not None:
        content, length = piece
        yield offset, length, content
        offset += length


class _PieceCutter:
    """A stream being cut: what is read and not yet handed on, and how many bytes of it were read past."""

    def __init__(
        self,
        stream: BinaryIO,
        find_end: Callable[[bytearray, int], int],
        check_length: Callable[[int], None] | None,
        max_line_bytes: int | None,
    ) -> None:
        self._stream = stream
        self._find_end = find_end
        self._check_length = check_length
        self._max_line_bytes = max_line_bytes
        self._buffer = bytearray()
        self._line_start = 0
        self._passed: list[tuple[int, int]] = []
        """Where in the buffer a line stands for another, and how many bytes it lacks."""

    def next(self, size: int) -> tuple[bytes, int] | None:
        """Return the next piece of at least `size` bytes and its length in the stream; None at the very end."""
        end = self._fill_buffer(size)
        if not end:
            return None
        content = bytes(memoryview(self._buffer)[:end])
        del self._buffer[:end]
        self._line_start = max(self._line_start - end, 0)
        length = end + sum(missing for place, missing in self._passed if place < end)
        self._passed = [(place - end, missing) for place, missing in self._passed if place >= end]
        return content, length

    def _fill_buffer(self, size: int) -> int:
        """Read on until the buffer holds an end at or after `size`; return where the piece ends, 0 at the very end."""
        searched = size - 1
        while not (end := self._find_end(self._buffer, searched)):
            searched = max(searched, len(self._buffer))
            if self._check_length is not None:
                self._check_length(len(self._buffer) - size)
            block = self._stream.read(_BLOCK_BYTES)
            if not block:
                return len(self._buffer)
            self._buffer += block
            if self._max_line_bytes is not None and self._skip_line(len(block), self._max_line_bytes):
                searched = size - 1
        return end

    def _skip_line(self, added: int, limit: int) -> bool:
        """Read past the last line if it is too long already; tell whether it was."""
        newline = self._buffer.rfind(b"\n", len(self._buffer) - added)
        self._line_start = newline + 1 if newline >= 0 else self._line_start
        length = len(self._buffer) - self._line_start
        if length <= limit:
            return False
        begin = bytes(self._buffer[self._line_start :][:_BLOCK_BYTES])
        del self._buffer[self._line_start :]
        rest = b""
        while block := self._stream.read(_BLOCK_BYTES):
            inside, newline_byte, rest = block.partition(b"\n")
            length += len(inside)
            if newline_byte:
                rest = newline_byte + rest
                break
        stand_in = make_too_long_line(begin, length, limit)
        self._passed.append((self._line_start, length - len(stand_in)))
        self._buffer += stand_in
        self._buffer += rest
        self._line_start = self._buffer.rfind(b"\n") + 1
        return True


def _count_records(content: bytes, *, at_start: bool) -> int:
    body = content.removeprefix(BOM) if at_start else content
    return sum(1 for line in body.split(b"\n") if line.strip(BLANKS))


def cut_rows(rows: Iterable[bytes], max_record_bytes: int) -> Iterator[PartContent]:
    """Cut rows, each one JSON line without its line end, into parts by number.

    A part also ends once it holds 16 MiB, so that long rows do not make it unbounded. That, too, depends
    only on the rows before.
    """
    held: list[bytes] = []
    offset = held_bytes = 0
    wanted = part_rows(0)
    for row in (bound_line(row, max_record_bytes) for row in rows):
        held.append(row)
        held_bytes += len(row) + 1
        if len(held) >= wanted or held_bytes >= _CONTENT_LIMIT_BYTES:
            yield _make_part_content(held, offset)
            offset += len(held)
            held, held_bytes, wanted = [], 0, part_rows(offset)
    if held:
        yield _make_part_content(held, offset)


def _make_part_content(rows: list[bytes], offset: int) -> PartContent:
    content = b"\n".join([*rows, b""])
    return PartContent(offset, len(rows), offset + 1, offset + 1, len(rows), content)


def name_part(piece: PartContent, *, scan: FileScan, index: int, arrow: bool, staged: str | None) -> SourcePart:
    """Return the part of a file for a slice of it; equal parts still have equal ids (`number_equal_parts`)."""
    sha256 = hashlib.sha256(piece.content).hexdigest()
    return SourcePart(
        url=scan.url,
        split_hint=scan.split_hint,
        index=index,
        offset=piece.offset,
        length=piece.length,
        first_line=piece.first_line,
        first_record=piece.first_record,
        records=piece.records,
        sha256=sha256,
        part_id=sha256[:16],
        reader=scan.reader,
        arrow=arrow,
        stamp=scan.stamp,
        staged=staged,
        content_bytes=len(piece.content),
    )


def number_equal_parts(scans: Sequence[FileScan]) -> list[FileScan]:
    """Tell parts with equal ids apart by `~2`, `~3`, … in recipe order, so that each id is given once."""
    seen: dict[str, int] = {}
    return [replace(scan, parts=tuple(_number_part(part, seen) for part in scan.parts)) for scan in scans]


def _number_part(part: SourcePart, seen: dict[str, int]) -> SourcePart:
    name = part.sha256[:16]
    count = seen[name] = seen.get(name, 0) + 1
    return replace(part, part_id=name if count == 1 else f"{name}~{count}")
