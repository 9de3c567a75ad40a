"""CSV and TSV: the header gives the keys, and every cell stays text as written.

RFC 4180: cells may be quoted with `"`, a quoted cell may hold line ends. The standard library's parser is used, in
strict mode: Arrow, Polars and DuckDB are faster, but fail the file at a bad row or change the row silently
(`docs/decisions/0024` has what each does). Here a line that is no row of the table becomes a JSON list, which reading
the part rejects; a cell that is not UTF-8 keeps its bytes, and its row is rejected as `not_utf8`.

    [["blank"], "", "", ""]        no row, with the reason: delimiters only, the header again, a comment
    ["1", "2", "3", "4"]           not as wide as the header; its lines, if the quotes are wrong
"""

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import BinaryIO, NamedTuple

import orjson

from rowmill.core.errors import SchemaError, SourceError
from rowmill.core.json import Json
from rowmill.schema.rows import Rejected
from rowmill.sources.dialect import DELIMITER_LINE, DIALECT_OPTIONS, Dialect, find_dialect
from rowmill.sources.options import Limits
from rowmill.sources.parts import (
    FileFormat,
    FileScan,
    OpenStream,
    PartContent,
    SourceFile,
    cut_rows,
    make_too_long_line,
)

_BLOCK_CHARS = 1 << 20
_BOM = "\ufeff"
_COMMENT = ["comment"]
_HEADER_AGAIN = ["header_again"]
_BLANK = ["blank"]


class _RecordTooLongError(Exception):
    """The current record is too long: its first characters, and its length."""

    def __init__(self, begin: str, length: int) -> None:
        super().__init__()
        self.begin = begin
        self.length = length


class _RecordLines:
    """Physical lines for the parser, and the lines of the current record for error messages."""

    def __init__(self, text: io.TextIOWrapper, url: str, max_record_chars: int, dialect: Dialect) -> None:
        self._text = text
        self._url = url
        self._limit = max_record_chars
        self._quote, self._comment = dialect.quote, dialect.comment
        self.number = 0
        self.record: list[str] = []
        self._record_chars = 0
        self.comments: list[tuple[int, str]] = []
        """Comments before the current record, each with its line."""
        # Lines before the header.
        for _ in range(dialect.skip):
            with suppress(StopIteration):
                self._read_line()

    def __iter__(self) -> "_RecordLines":
        return self

    def __next__(self) -> str:
        line = self._read_line()
        if self._comment is not None and not self.record:
            while line.startswith(self._comment):
                self.comments.append((self.number, line.rstrip("\r\n")))
                line = self._read_line()
        self._record_chars = len(line) + (self._record_chars if self.record else 0)
        self.record.append(line)
        if self._record_chars > self._limit:
            # The rest of the line is skipped.
            begin, length = self.record[0], self._record_chars
            quotes = sum(piece.count(self._quote) for piece in self.record)
            while not line.endswith("\n") and (line := self._text.readline(_BLOCK_CHARS)):
                quotes += line.count(self._quote)
                length += len(line)
            raise self.open_quote() if quotes % 2 else _RecordTooLongError(begin, length)
        return line

    def _read_line(self) -> str:
        line = self._text.readline(self._limit + 1)
        if not self.number and DELIMITER_LINE.fullmatch(line):
            self.number += 1
            line = self._text.readline(self._limit + 1)
        if not line:
            raise StopIteration
        self.number += 1
        # A file that was joined from several has their marks inside.
        return line[1:] if line[0] == _BOM and not self.record else line

    def open_quote(self) -> SourceError:
        begin, quote = self.number - len(self.record) + 1, self._quote
        return SourceError(
            f"{self._url}: line {begin}: a quoted cell starts in this record and does not end by line {self.number}; "
            f"a cell that starts with {quote} must end with {quote} and double those inside, within "
            "source.limits.max_record_bytes; correct the quotes, or write source.escape if a character escapes them"
        )


class _Line(NamedTuple):
    """A record or a comment: the first of its lines, from 1, and what it holds: cells, or its value as JSON.

    A named tuple, not a dataclass: one is made per row, and a frozen dataclass makes cutting a file half as fast again.
    """

    number: int
    cells: Sequence[str] = ()
    value: Json = None
    too_long: _RecordTooLongError | None = None
    error: str = ""


def _iterate_lines(stream: BinaryIO, url: str, limit: int, dialect: Dialect) -> Iterator[_Line]:
    """Yield a file's lines after those that come before the header, quoted line ends joined."""
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    lines = _RecordLines(text, url, limit, dialect)
    reader = dialect.read(lines)
    is_at_end = False
    while not is_at_end:
        lines.record.clear()
        lines.comments.clear()
        line = None
        try:
            cells = next(reader)
            line = _Line(lines.number - len(lines.record) + 1, cells) if cells else None
        except StopIteration:
            is_at_end = True
        except _RecordTooLongError as error:
            line = _Line(lines.number - len(lines.record) + 1, too_long=error)
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise lines.open_quote() from error
            line = _Line(lines.number - len(lines.record) + 1, value=list(lines.record), error=str(error))
        for number, comment in lines.comments:
            yield _Line(number, value=[_COMMENT, comment])
        if line is not None:
            yield line
    text.detach()


def _encode_delimited_rows(stream: BinaryIO, url: str, limits: Limits, dialect: Dialect) -> Iterator[bytes]:
    header: list[str] = []
    names: list[str] = []
    unnamed = set(dialect.unnamed)
    for line in _iterate_lines(stream, url, limits.max_record_bytes, dialect):
        cells = line.cells
        if not header and cells:
            header, names = _read_header(line, url, dialect)
            if dialect.header:
                continue
        if header and cells:
            # Nearly every row: it has a value in its first cell.
            if cells == header and dialect.header:
                yield _encode_value([_HEADER_AGAIN, *cells])
            elif len(cells) > 1 and not cells[0].strip() and not any(map(str.strip, cells)):
                yield _encode_value([_BLANK, *cells])
            elif len(cells) != len(header):
                # Without names, so that reading rejects it.
                yield _encode_value(list(cells))
            else:
                named_cells = [cell for at, cell in enumerate(cells) if at not in unnamed] if unnamed else cells
                yield _encode_value(dict(zip(names, named_cells, strict=True)))
        elif line.too_long is not None:
            if not header:
                raise SchemaError(
                    f"{url}: line {line.number}: the header has {line.too_long.length:,} characters; at most "
                    f"{limits.max_record_bytes:,} are allowed; check the file, or raise source.limits.max_record_bytes"
                )
            begin = line.too_long.begin.encode("utf-8", "surrogateescape")
            yield make_too_long_line(begin, line.too_long.length, limits.max_record_bytes)
        elif line.error and not header:
            raise SchemaError(
                f"{url}: line {line.number}: the header cannot be read ({line.error}); expected column names, each "
                "quoted completely or not at all; correct its quotes"
            )
        else:
            yield _encode_value(line.value)


def _read_header(line: _Line, url: str, dialect: Dialect) -> tuple[list[str], list[str]]:
    """Return the cells of the header, and the names of the columns that have one; the recipe may give them."""
    header = list(line.cells)
    if not dialect.header:
        header = [f"c{number}" for number in range(1, len(header) + 1)]
    try:
        "".join(header).encode()
    except UnicodeEncodeError:
        raise SchemaError(
            f"{url}: line {line.number}: the header is not UTF-8; column names must be text; write the file's "
            "encoding, such as source.encoding: latin-1, or save the file as UTF-8"
        ) from None
    names = list(dialect.column_names) or header
    if len(names) != len(header):
        raise SchemaError(
            f"{url}: has {len(header)} columns, and source.column_names has {len(names)}; there must be one name for "
            f"each column ({', '.join(header)}); correct source.column_names"
        )
    named = [name for at, name in enumerate(names) if at not in dialect.unnamed]
    twice = sorted(name for name, count in Counter(named).items() if count > 1)
    if twice:
        unique: list[str] = []
        for name in header:
            others = (f"{name}_{number}" for number in count(2))
            unique.append(name if name not in unique else next(one for one in others if one not in {*header, *unique}))
        raise SchemaError(
            f"{url}: the header names {', '.join(map(repr, twice))} more than once; column names must be unique; "
            f"rename one of them, or name the columns in source.column_names: [{', '.join(unique)}]"
        )
    return header, named


def _encode_value(value: Json) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")


class UnnamedColumnError(SchemaError):
    """A column has values and no name in the header, such as the index that pandas writes; `names` are proposed."""

    def __init__(self, message: str, names: list[str]) -> None:
        """Store both as arguments, so that pickling between processes keeps them."""
        super().__init__(message, names)
        self.names = names

    def __str__(self) -> str:
        return str(self.args[0])


def require_no_values(stream: BinaryIO, url: str, dialect: Dialect) -> None:
    """Read a file through and refuse a value in a column without a name."""
    lines = (line for line in _iterate_lines(stream, url, sys.maxsize - 1, dialect) if line.cells)
    header = next(lines, _Line(0)).cells
    for line in lines:
        column = next((at for at in dialect.unnamed if len(line.cells) == len(header) and line.cells[at].strip()), None)
        if column is not None:
            names = [name.strip() or f"c{at + 1}" for at, name in enumerate(header)]
            raise UnnamedColumnError(
                f"{url}: column {column + 1} has no name in the header, and line {line.number} has "
                f"{line.cells[column]!r:.60} in it; a column needs a name, or no value; name the columns in "
                f"source.column_names: [{', '.join(names)}]",
                names,
            )


DEFAULT_DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""Delimiter by suffix, unless the file's content or the recipe decides otherwise."""


class _Delimited(FileFormat):
    def note_options(self, scan: FileScan, file: SourceFile, open_stream: OpenStream) -> FileScan:
        default = DEFAULT_DELIMITERS[file.suffix]
        with open_stream() as stream:
            dialect = find_dialect(stream, scan.url, default=default, options=file.options)
        if dialect.unnamed:
            with open_stream() as stream:
                require_no_values(stream, scan.url, dialect)
        return replace(scan, dialect=dialect)

    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: SourceFile) -> Iterator[PartContent]:
        assert scan.dialect is not None
        rows = _encode_delimited_rows(stream, scan.url, file.limits, scan.dialect)
        return cut_rows(rows, file.limits.max_record_bytes)

    def find_line(self, stream: BinaryIO, scan: FileScan, record: int) -> int | None:
        if scan.dialect is None:
            return None
        has_header = scan.dialect.header
        number = -1
        for line in _iterate_lines(stream, "", sys.maxsize - 1, scan.dialect):
            is_header = has_header and bool(line.cells)
            has_header = has_header and not is_header
            number += not is_header
            if number == record and not is_header:
                return line.number
        return None

    def reject_non_object(self, value: Json) -> Rejected:
        if value and type(value[0]) is list:
            [reason] = value[0]
            return Rejected(reason, f"line of {len(value) - 1} cells" if reason != "comment" else value[1][:80])
        return Rejected("not_an_object", f"{len(value)} cells do not match the header")


FORMAT = _Delimited(
    "delimited",
    version=2,
    suffixes=tuple(DEFAULT_DELIMITERS),
    options=frozenset({*DIALECT_OPTIONS, "encoding"}),
    is_text=True,
    has_cells=True,
)
