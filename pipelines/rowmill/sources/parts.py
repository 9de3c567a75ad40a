r"""A raw file as parts whose size grows with the file, its scan, and the base class of formats.

    byte     0        512 Ki      1 Mi              25 Mi              800 Mi
    part     └── 0 ──┘└── 1 ──┘└── 2 …  49 ──────┘└─ o/50 bytes each ┘└─ 16 Mi each …

A part that starts at offset o ends at the first line end at or after o + size(o). Its bounds do not depend on anything
after it, so lines appended to a file change only its last part and add new ones: at most one fiftieth of a large file.
Why not equal slices or content-defined chunks: `docs/decisions/0002`.

A record that is too long is never held in memory: its first bytes and its length are kept while the rest is skipped,
and a placeholder line, which cannot be the start of any JSON, takes its place:

    \0too_long_record <length> <limit> <first bytes>
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, BinaryIO

from rowmill.core.config import describe_type
from rowmill.core.json import Json
from rowmill.schema.rows import Rejected, Split
from rowmill.sources.dialect import Dialect
from rowmill.sources.options import FileOptions, Limits

# ── Placeholders of records that are too long ──


_TOO_LONG_PATTERN = re.compile(rb"\0too_long_record (\d{1,18}) (\d{1,18}) ")
_SHOWN_BYTES = 200


def make_too_long_line(begin: bytes, length: int, limit: int) -> bytes:
    """Return the placeholder line for a record of `length` bytes that starts with `begin`."""
    return b"\0too_long_record %d %d %s" % (length, limit, begin[:_SHOWN_BYTES].replace(b"\n", b" "))


def bound_line(line: bytes, limit: int) -> bytes:
    """Return a record's line, or its placeholder if it is too long."""
    return line if len(line) <= limit else make_too_long_line(line, len(line), limit)


def explain_too_long(line: bytes) -> str | None:
    """Return the length and limit of the record that a placeholder line replaces; None for any other line."""
    match = _TOO_LONG_PATTERN.match(line)
    return f"{int(match[1]):,} bytes; source.limits.max_record_bytes is {int(match[2]):,}" if match else None


# ── Parts and scans ──


SCAN_VERSION = 6
"""Increased whenever the same file would give other parts or other staged bytes; older scans are redone."""

BOM = b"\xef\xbb\xbf"
BLANKS = b" \t\r"
"""JSON's white space, without the line end: a line of only these is not a record."""

SMALLEST_PART_BYTES = 512 << 10
"""Every part costs later stages some 30 ms, and an append makes the last part again."""

_BLOCK_BYTES = 1 << 20
_CONTENT_LIMIT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class PartContent:
    """A part as a reader cuts it: its place in the file and its records as JSON lines.

    `offset` and `length` count bytes of the decompressed file for line formats, rows for the others. `is_whole`: the
    content holds every record as in the file; otherwise it holds placeholder lines for records that are too long.
    """

    offset: int
    length: int
    first_line: int
    first_record: int
    records: int
    content: bytes
    is_whole: bool = True
    lines: int | None = None
    """Lines of the file that it consists of, blank ones too; None for a format in which a record is no line."""


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A slice of a source file, named by its content.

    `first_line` and `first_record` count from 1. For formats without lines they are equal, and "line" means record.
    `staged` is the location of a copy as JSON lines; None: the bytes `[offset, offset + length)` of the file itself.
    `arrow`: absent keys appear as nulls in the records, as in Arrow.
    """

    url: str
    split_hint: Split | None
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
    content_bytes: int
    """Size of its records as JSON lines."""
    lines: int | None
    """Lines of the file that it consists of, as in `PartContent`."""

    @property
    def identity(self) -> tuple[object, ...]:
        """What decides the rows that are made of it: not where its file lies, nor what comes before it there."""
        return self.part_id, self.sha256, self.reader, self.arrow, self.split_hint


@dataclass(frozen=True, slots=True)
class FileScan:
    """Everything recorded about one file (or one Hugging Face split) after reading it once.

    `stamp` shows cheaply whether the file changed since; "" never matches. `columns` are the names and types that a
    typed format declares. `revision` is the commit of a Hugging Face dataset. `max_record_bytes` is the limit that it
    was read under. `dialect` is that of a CSV file, and `encoding` that of a text file that is not UTF-8; `asked` are
    the options that it was read with (`SourceFile.list_asked`), and `reader_version` is that of the code that read it.
    """

    url: str
    split_hint: Split | None
    reader: str
    stamp: str
    records: int
    parts: tuple[SourcePart, ...]
    columns: dict[str, str] | None = None
    revision: str | None = None
    max_record_bytes: int | None = None
    dialect: Dialect | None = None
    encoding: str | None = None
    asked: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reader_version: int = 0
    version: int = SCAN_VERSION

    def to_json(self) -> dict[str, Any]:
        """Return the scan as a JSON object, to be kept in a manifest."""
        values: dict[str, Any] = asdict(self)
        values["parts"] = list(values["parts"])
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "FileScan":
        """Return the scan that `to_json` wrote."""
        arguments: dict[str, Any] = {own.name: values[own.name] for own in fields(cls) if own.name in values}
        arguments["parts"] = tuple(SourcePart(**part) for part in values["parts"])
        if (stored := arguments["dialect"]) is not None:
            dialect: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
            arguments["dialect"] = Dialect(**dialect)
        return cls(**arguments)


def part_bytes(offset: int) -> int:
    """Return the minimum size in bytes of a part of a line format that starts at `offset`."""
    return min(max(offset // 50, SMALLEST_PART_BYTES), 16 << 20)


def part_rows(offset: int) -> int:
    """Return the size in rows of a part of a row format that begins at row `offset`."""
    return min(max(offset // 50, 1024), 65536)


def cut_lines(stream: BinaryIO, max_line_bytes: int) -> Iterator[PartContent]:
    r"""Cut a stream at `\n` into parts that concatenate to it; memory holds one part, one line and one block."""
    line, record = 1, 1
    for offset, length, content in cut_pieces(stream, find_line_end, max_line_bytes=max_line_bytes):
        bounded_content = content
        if len(content) > max_line_bytes:
            # Each line that is too long is replaced by its placeholder.
            bounded_content = b"\n".join([bound_line(line, max_line_bytes) for line in content.split(b"\n")])
        is_whole = len(content) == length and bounded_content == content
        body = content.removeprefix(BOM) if offset == 0 else content
        records = sum(1 for line in body.split(b"\n") if line.strip(BLANKS))
        ends = content.count(b"\n")
        lines = ends + (not content.endswith(b"\n"))
        yield PartContent(offset, length, line, record, records, bounded_content, is_whole, lines)
        line, record = line + ends, record + records


def find_line_end(buffer: bytearray, start: int) -> int:
    """Return the position after the first line end after `start`; 0 if there is none."""
    return buffer.find(b"\n", start) + 1


def cut_pieces(
    stream: BinaryIO,
    find_end: Callable[[bytearray, int], int],
    *,
    check_length: Callable[[int], None] | None = None,
    max_line_bytes: int | None = None,
) -> Iterator[tuple[int, int, bytes]]:
    """Cut a stream into pieces that concatenate to the stream; yield each with its offset and length.

    A piece that starts at offset o ends at the first end at or after o + `part_bytes(o)`; `find_end(buffer, start)`
    returns the first end after `start`, or 0. `check_length` can refuse a stream: before each read it receives the
    number of bytes without an end. With `max_line_bytes`, a line that is too long is skipped, and the piece holds its
    placeholder.
    """
    buffer, offset, line_start = bytearray(), 0, 0
    # Positions of placeholder lines in the buffer, with the bytes missing in each.
    skipped: list[tuple[int, int]] = []
    while True:
        size = part_bytes(offset)
        searched = size - 1
        while not (end := find_end(buffer, searched)):
            searched = max(searched, len(buffer))
            if check_length is not None:
                check_length(len(buffer) - size)
            if not (block := stream.read(_BLOCK_BYTES)):
                end = len(buffer)
                break
            buffer += block
            if max_line_bytes is None:
                continue
            newline = buffer.rfind(b"\n", len(buffer) - len(block))
            line_start = newline + 1 if newline >= 0 else line_start
            length = len(buffer) - line_start
            if length > max_line_bytes:
                # The last line is already too long: the rest of it is skipped.
                begin, rest = bytes(buffer[line_start:][:_BLOCK_BYTES]), b""
                del buffer[line_start:]
                while block := stream.read(_BLOCK_BYTES):
                    inside, newline_byte, rest = block.partition(b"\n")
                    length += len(inside)
                    if newline_byte:
                        rest = newline_byte + rest
                        break
                placeholder = make_too_long_line(begin, length, max_line_bytes)
                skipped.append((line_start, length - len(placeholder)))
                buffer += placeholder + rest
                line_start = buffer.rfind(b"\n") + 1
                searched = size - 1
        if not end:
            return
        length = end + sum(missing for place, missing in skipped if place < end)
        yield offset, length, bytes(memoryview(buffer)[:end])
        del buffer[:end]
        line_start = max(line_start - end, 0)
        skipped = [(place - end, missing) for place, missing in skipped if place >= end]
        offset += length


def take_first_records(slices: Iterable[PartContent], count: int) -> Iterator[PartContent]:
    """Yield the first slice, cut after `count` records: a part that can be read without the rest of its file.

    No further slice is read. A cut slice is not the file's own bytes, so it has to be staged.
    """
    for piece in slices:
        lines = piece.content.split(b"\n")
        records = end = 0
        for end, line in enumerate(lines, 1):
            records += bool((line.removeprefix(BOM) if end == 1 and piece.offset == 0 else line).strip(BLANKS))
            if records == count:
                break
        yield replace(piece, records=records, content=b"\n".join([*lines[:end], b""]), is_whole=False)
        return


def cut_rows(rows: Iterable[bytes], max_record_bytes: int) -> Iterator[PartContent]:
    """Cut rows, each one JSON line without its line end, into parts by number of rows.

    A part also ends once it holds 16 MiB, so that long rows do not make it unbounded. This, too, depends only on the
    preceding rows.
    """
    pending: list[bytes] = []
    offset = pending_bytes = 0
    row_limit = part_rows(0)
    for row in (bound_line(row, max_record_bytes) for row in rows):
        pending.append(row)
        pending_bytes += len(row) + 1
        if len(pending) >= row_limit or pending_bytes >= _CONTENT_LIMIT_BYTES:
            yield _make_part_content(pending, offset)
            offset += len(pending)
            pending, pending_bytes, row_limit = [], 0, part_rows(offset)
    if pending:
        yield _make_part_content(pending, offset)


def _make_part_content(rows: list[bytes], offset: int) -> PartContent:
    content = b"\n".join([*rows, b""])
    return PartContent(offset, len(rows), offset + 1, offset + 1, len(rows), content)


def assign_split_hint(scan: FileScan, hint: Split | None) -> FileScan:
    """Return a scan, and its parts, with the split that the recipe gives the file now."""
    parts = tuple(replace(part, split_hint=hint) for part in scan.parts)
    return replace(scan, split_hint=hint, parts=parts)


def number_equal_parts(scans: Sequence[FileScan]) -> list[FileScan]:
    """Make equal part ids distinct by appending `~2`, `~3`, … in recipe order."""
    counts: dict[str, int] = {}
    numbered: list[FileScan] = []
    for scan in scans:
        parts: list[SourcePart] = []
        for part in scan.parts:
            name = part.sha256[:16]
            count = counts[name] = counts.get(name, 0) + 1
            parts.append(replace(part, part_id=name if count == 1 else f"{name}~{count}"))
        numbered.append(replace(scan, parts=tuple(parts)))
    return numbered


# ── Formats ──

OpenStream = Callable[[], BinaryIO]
"""Opens a file's content from its beginning, decompressed."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source, not read yet; `url` is the recipe's URL, including its secrets.

    `format`, `suffix` and `codec` are what its name, or the recipe, says of it; its content may be of another format.
    """

    url: str
    split_hint: Split | None
    options: FileOptions
    format: "FileFormat"
    suffix: str
    codec: str
    keeps_non_finite: bool = False

    @property
    def limits(self) -> Limits:
        """Limits of its records."""
        return self.options.limits

    @property
    def is_seekable(self) -> bool:
        """Whether its content is read from the file itself, in which the reader seeks."""
        return self.format.is_seekable and not self.codec

    def list_asked(self, actual: "FileFormat") -> dict[str, Any]:
        """Return the options that decide how a file of a format is read, without those left to its content."""
        options = {name: getattr(self.options, name) for name in sorted({*actual.options, "file_format"})}
        asked = {name: value for name, value in options.items() if value is not None and value != "auto"}
        return asked | ({"keeps_non_finite": self.keeps_non_finite} if actual.is_arrow else {})


@dataclass(frozen=True)
class FileFormat:
    """Base class of the formats that `files.py` lists; an instance of it describes records that never were a file."""

    name: str
    """The name that scans and parts record as their reader."""
    version: int = 0
    """Raised when it reads some file otherwise than before; files that were scanned before are scanned again."""
    suffixes: tuple[str, ...] = ()
    """Suffixes of its files, without a compression codec; each suffix belongs to one format."""
    options: frozenset[str] = frozenset()
    """Options of `kind: files` that apply only to this format."""
    is_seekable: bool = False
    """Whether its reader seeks in an uncompressed file."""
    is_text: bool = False
    """Whether its files are text, which has an encoding."""
    is_json: bool = False
    """Whether its records are written as JSON in the file."""
    is_arrow: bool = False
    """Whether its records come from Arrow, which gives every mapping the union of all keys, null where absent."""
    is_own_lines: bool = False
    """Whether a record is a line of the file, read from the file itself; other formats are staged."""
    has_cells: bool = False
    """Whether every value is the text of a cell."""
    has_documents: bool = False
    """Whether its records are pieces of text; blank ones are rejected."""
    syntax_hint: str = ""
    """Text added to the error of a record that is not valid JSON."""

    def detect(self, open_stream: OpenStream, file: SourceFile) -> "FileFormat":
        """Return the actual format of a file, decided by its content if the suffix is ambiguous."""
        return self

    def note_options(self, scan: FileScan, file: SourceFile, open_stream: OpenStream) -> FileScan:
        """Return the scan with the options that decide the file's parts."""
        return scan

    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: SourceFile) -> Iterator[PartContent]:
        """Cut the file into parts; raises SourceError when the file cannot be read."""
        raise NotImplementedError

    def read_columns(self, scan: FileScan, file: SourceFile, open_stream: OpenStream) -> dict[str, str] | None:
        """Return the columns that the file declares, and their types; None for formats that declare none."""
        return None

    def find_line(self, stream: BinaryIO, scan: FileScan, record: int) -> int | None:
        """Return the line of the file on which a record begins, counted from 0; None where files have no lines."""
        return None

    def reject_non_object(self, value: Json) -> Rejected:
        """Return the reject of a record that is not an object."""
        return Rejected("not_an_object", f"{describe_type(value)}; a record is an object")
