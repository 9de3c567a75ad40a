"""A raw file as parts that grow with it, and what is known of a file that was scanned.

What belongs here: the nouns `Part`, `FileScan` and `Slice`, the two laws of size, cutting a stream or
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

VERSION = 3
"""Raised whenever the same file would give other parts or other staged bytes; older scans are redone."""

BOM = b"\xef\xbb\xbf"
BLANKS = b" \t\r"
"""What JSON calls white space, without the line end: a line of nothing else is no record."""

_BLOCK_BYTES = 1 << 20
_CONTENT_LIMIT_BYTES = 16 << 20

Reader = Literal["json_lines", "json_array", "json_value", "parquet", "delimited", "plain_text", "huggingface"]
SplitHint = Literal["train", "validation"]
SampleBy = Literal["line", "paragraph", "document"]


@dataclass(frozen=True, slots=True)
class Slice:
    """A part as a reader cuts it: its place in the file and its records as JSON lines.

    `offset` and `length` count bytes of the decompressed file for line formats, rows for the others.
    """

    offset: int
    length: int
    first_line: int
    first_record: int
    records: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Part:
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
    reader: Reader
    arrow: bool
    stamp: str
    staged: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the part as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Part":
        """Take back what `to_json` gave."""
        return cls(**values)


@dataclass(frozen=True, slots=True)
class FileScan:
    """All that is kept of one file (or one Hugging Face split) after reading it once.

    `stamp` tells cheaply whether the file moved since; "" never vouches for it. `columns` are the
    names and types that a typed format declares. `revision` is the commit of a Hugging Face dataset.
    `sample_by` is what a text file was cut into, None for other files.
    """

    url: str
    split_hint: SplitHint | None
    reader: Reader
    stamp: str
    records: int
    parts: tuple[Part, ...]
    columns: dict[str, str] | None = None
    revision: str | None = None
    sample_by: SampleBy | None = None
    version: int = VERSION

    def to_json(self) -> dict[str, Any]:
        """Return the scan as a JSON object, to be kept in a manifest."""
        values: dict[str, Any] = asdict(self)
        values["parts"] = list(values["parts"])
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "FileScan":
        """Take back what `to_json` gave."""
        own: dict[str, Any] = {**values, "parts": tuple(Part.from_json(part) for part in values["parts"])}
        return cls(**own)


def part_bytes(offset: int) -> int:
    """Return the least size in bytes of a part of a line format that begins at `offset`."""
    return min(max(offset // 50, 128 << 10), 16 << 20)


def part_rows(offset: int) -> int:
    """Return the size in rows of a part of a row format that begins at row `offset`."""
    return min(max(offset // 50, 1024), 65536)


def cut_lines(stream: BinaryIO) -> Iterator[Slice]:
    r"""Cut a stream at `\n` into parts that, joined, are the stream; memory holds one part and one block."""
    line, record = 1, 1
    for offset, content in cut_at(stream, find_line_end):
        records = _count_records(content, at_start=offset == 0)
        yield Slice(offset, len(content), line, record, records, content)
        line, record = line + content.count(b"\n"), record + records


def find_line_end(buffer: bytearray, start: int) -> int:
    """Return where the first line ends that does so after `start`, 0 if none does."""
    return buffer.find(b"\n", start) + 1


def cut_at(
    stream: BinaryIO,
    find_end: Callable[[bytearray, int], int],
    *,
    check_length: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, bytes]]:
    """Cut a stream into pieces that, joined, are the stream; yield each with its offset.

    A piece that begins at offset o ends at the first end at or after o + `part_bytes(o)`; `find_end(buffer, start)`
    returns the first end after `start`, 0 if there is none. `check_length` may refuse a stream: before more is read
    it is given how many bytes have no end in them.
    """
    buffer = bytearray()
    offset = 0
    while end := _fill(buffer, stream, part_bytes(offset), find_end, check_length):
        content = bytes(memoryview(buffer)[:end])
        del buffer[:end]
        yield offset, content
        offset += end


def _fill(
    buffer: bytearray,
    stream: BinaryIO,
    size: int,
    find_end: Callable[[bytearray, int], int],
    check_length: Callable[[int], None] | None,
) -> int:
    """Read on until the buffer holds an end at or after `size`; return where the piece ends, 0 at the very end."""
    searched = size - 1
    while not (end := find_end(buffer, searched)):
        searched = max(searched, len(buffer))
        if check_length is not None:
            check_length(len(buffer) - size)
        block = stream.read(_BLOCK_BYTES)
        if not block:
            return len(buffer)
        buffer += block
    return end


def _count_records(content: bytes, *, at_start: bool) -> int:
    body = content.removeprefix(BOM) if at_start else content
    return sum(1 for line in body.split(b"\n") if line.strip(BLANKS))


def cut_rows(rows: Iterable[bytes]) -> Iterator[Slice]:
    """Cut rows, each one JSON line without its line end, into parts by number.

    A part also ends once it holds 16 MiB, so that long rows do not make it unbounded. That, too, depends
    only on the rows before.
    """
    held: list[bytes] = []
    offset = held_bytes = 0
    wanted = part_rows(0)
    for row in rows:
        held.append(row)
        held_bytes += len(row) + 1
        if len(held) >= wanted or held_bytes >= _CONTENT_LIMIT_BYTES:
            yield _slice_of(held, offset)
            offset += len(held)
            held, held_bytes, wanted = [], 0, part_rows(offset)
    if held:
        yield _slice_of(held, offset)


def _slice_of(rows: list[bytes], offset: int) -> Slice:
    content = b"\n".join([*rows, b""])
    return Slice(offset, len(rows), offset + 1, offset + 1, len(rows), content)


def name_part(piece: Slice, *, scan: FileScan, index: int, arrow: bool, staged: str | None) -> Part:
    """Return the part of a file for a slice of it; equal parts still have equal ids (`number_equal_parts`)."""
    sha256 = hashlib.sha256(piece.content).hexdigest()
    return Part(
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
    )


def number_equal_parts(scans: Sequence[FileScan]) -> list[FileScan]:
    """Tell parts with equal ids apart by `~2`, `~3`, … in recipe order, so that each id is given once."""
    seen: dict[str, int] = {}
    return [replace(scan, parts=tuple(_numbered(part, seen) for part in scan.parts)) for scan in scans]


def _numbered(part: Part, seen: dict[str, int]) -> Part:
    name = part.sha256[:16]
    count = seen[name] = seen.get(name, 0) + 1
    return replace(part, part_id=name if count == 1 else f"{name}~{count}")
