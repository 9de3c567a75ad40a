"""CSV and TSV: the header gives the keys, and every cell stays text as written.

What belongs here: which dialect a file is in, and cells to JSON lines. What does not: types; whether `01234` is a
number is decided over a whole column by the code that needs numbers (`table_contract/`), never by the reader.

RFC 4180: cells may be quoted with `"`, a quoted cell may hold line ends. The standard library's parser is used, in
strict mode: Arrow, Polars and DuckDB are faster, but fail the file at a bad row or change the row silently
(`docs/decisions/0024` has what each does). Here a row that does not fit its header becomes a JSON list of its cells (of
its lines, if the quotes are wrong), so that reading the part rejects that one row as `not_an_object`; a cell that is
not UTF-8 keeps its bytes, and its row is rejected as `not_utf8`.
"""

import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import BinaryIO

import orjson

from rowmill.core.errors import SchemaError, SourceError
from rowmill.core.frozen_classes import frozen_dataclass
from rowmill.core.json import Json
from rowmill.sources.file_format import FileFormat, FileOptions, OpenStream
from rowmill.sources.limits import Limits, make_too_long_line, require_columns
from rowmill.sources.parts import FileScan, PartContent, cut_rows

_BLOCK_CHARS = 1 << 20
_HEAD_BYTES = 256 << 10
_HEAD_RECORDS = 200
DELIMITERS = (",", ";", "\t", "|")
"""Delimiters that are tried if the recipe names none."""
QUOTE = '"'
OTHER_QUOTE = "'"
DIALECT_VERSION = 1
"""Raised when the dialect of some file is found otherwise; CSV files that were scanned before are scanned again."""
_DELIMITER_LINE = re.compile(r'"?sep=([^\r\n])"?\r?(?:\n|\Z)', re.IGNORECASE)
"""What Excel reads in the first line as the delimiter; it is no record."""


@frozen_dataclass
class Dialect:
    """The delimiter and the quote character of a file."""

    delimiter: str
    quote: str


def find_dialect(stream: BinaryIO, url: str, *, default: str, delimiter: str | None, quote: str | None) -> Dialect:
    """Return the dialect of a file from its first records; a requested delimiter or quote is used if it fits.

    `default` is the delimiter of files with this suffix: it is used unless its header is one column and another
    delimiter gives several, the same number in nearly all records.

    A first line such as `sep=;` names the delimiter, unless the recipe does.

    Raises
    ------
    SchemaError
        If the file is one column with the requested delimiter and several with another, if two delimiters give
        several, or if its cells are in single quotes and the recipe names no quote.

    """
    head = _read_head(stream)
    declared = _DELIMITER_LINE.match(head)
    if declared is not None:
        head = head[declared.end() :]
        if delimiter is None and _count_header_cells(head, declared[1], quote or QUOTE) > 1:
            delimiter = declared[1]
    found = _find_delimiter(head, url, default=default, delimiter=delimiter, enclosing=quote or QUOTE)
    if quote is None:
        _require_double_quotes(head, url, found.delimiter)
    return found


def _require_double_quotes(head: str, url: str, delimiter: str) -> None:
    """Refuse a file whose cells are enclosed in single quotes, which would stay in the cells."""
    is_one_column = _measure_even_width(head, delimiter, QUOTE) <= 1
    for one in dict.fromkeys((delimiter, *(DELIMITERS if is_one_column else ()))):
        cell = None if QUOTE in head else _find_single_quoted_cell(head, one)
        if cell is not None:
            raise SchemaError(
                f"{url}: its cells stand in single quotes, such as {cell[:60]}; cells are enclosed in double quotes "
                "unless the recipe says otherwise; write source.quote: \"'\", or source.quote: '\"' if the single "
                "quotes belong to the cells"
            )


def _find_single_quoted_cell(head: str, delimiter: str) -> str | None:
    """Return a cell in single quotes if every record has one, or records are as wide as the header with them alone."""
    border = re.escape(delimiter)
    enclosed = re.compile(rf"(?:^|(?<={border}))'(?:[^'\r\n]|'')*'(?=\r?$|{border})", re.MULTILINE)
    cells = enclosed.findall(head)
    if not cells or _measure_even_width(head, delimiter, OTHER_QUOTE) <= 1:
        return None
    records = len(_parse_head(head, delimiter, OTHER_QUOTE)) - 1
    is_needed = len(cells) >= max(records, 1) or not _measure_even_width(head, delimiter, QUOTE)
    return cells[-1] if is_needed else None


def _find_delimiter(head: str, url: str, *, default: str, delimiter: str | None, enclosing: str) -> Dialect:
    wanted = delimiter or default
    several = {
        one: width for one in DELIMITERS if one != wanted and (width := _measure_even_width(head, one, enclosing)) > 1
    }
    columns = _count_header_cells(head, wanted, enclosing)
    widest = max(several, key=lambda one: several[one], default=None)
    if widest is None or columns > several[widest]:
        return Dialect(wanted, enclosing)
    if delimiter is not None and columns <= 1:
        raise SchemaError(
            f"{url}: is one column with source.delimiter {delimiter!r}, and {several[widest]} columns with {widest!r}; "
            f"expected a delimiter that separates cells; set source.delimiter: {widest!r}, or omit it"
        )
    ties = [one for one in several if several[one] == several[widest]]
    if delimiter is None and (columns > 1 or len(ties) > 1):
        counts = ", ".join(
            f"{width} columns with {one!r}" for one, width in {wanted: columns, **several}.items() if width > 1
        )
        raise SchemaError(f"{url}: has {counts}; only one can be the delimiter; set source.delimiter")
    return Dialect(delimiter or widest, enclosing)


def _read_head(stream: BinaryIO) -> str:
    content = b""
    while len(content) < _HEAD_BYTES and (block := stream.read(_HEAD_BYTES - len(content))):
        content += block
    whole = content if len(content) < _HEAD_BYTES else content[: content.rfind(b"\n") + 1]
    return whole.decode("utf-8-sig", "replace")


def _parse_head(head: str, delimiter: str, quote: str) -> list[list[str]]:
    csv.field_size_limit(sys.maxsize)
    try:
        reader = csv.reader(io.StringIO(head, newline=""), delimiter=delimiter, quotechar=quote)
        return [cells for cells in islice(reader, _HEAD_RECORDS) if cells]
    except csv.Error:
        return []


def _count_header_cells(head: str, delimiter: str, quote: str) -> int:
    return next((len(cells) for cells in _parse_head(head, delimiter, quote)), 0)


def _measure_even_width(head: str, delimiter: str, quote: str) -> int:
    """Return the number of columns with a delimiter; 0 unless nearly all records have as many as the header."""
    records = _parse_head(head, delimiter, quote)
    if not records or not all(name.strip() for name in records[0]):
        return 0
    width = len(records[0])
    return width if sum(len(cells) == width for cells in records) >= 0.9 * len(records) else 0


def find_record_line(stream: BinaryIO, dialect: Dialect, record: int) -> int | None:
    """Return the line on which a record starts, counted from 0 after the header; quoted cells may hold line ends."""
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    lines = _RecordLines(text, "", sys.maxsize - 1)
    reader = csv.reader(lines, delimiter=dialect.delimiter, quotechar=dialect.quote, strict=True)
    number, begin = -2, 0
    while number < record:
        begin = lines.number + 1
        try:
            number += bool(next(reader))
        except StopIteration:
            return None
        except csv.Error:
            number += 1
    return begin


class _RecordTooLongError(Exception):
    """The current record is too long: its first characters, and its length."""

    def __init__(self, begin: str, length: int) -> None:
        super().__init__()
        self.begin = begin
        self.length = length


class _RecordLines:
    """Physical lines for the parser, and the lines of the current record for error messages."""

    def __init__(self, text: io.TextIOWrapper, url: str, max_record_chars: int) -> None:
        self._text = text
        self._url = url
        self._limit = max_record_chars
        self.number = 0
        self.record: list[str] = []
        self._record_chars = 0

    def __iter__(self) -> "_RecordLines":
        return self

    def __next__(self) -> str:
        line = self._text.readline(self._limit + 1)
        if not self.number and _DELIMITER_LINE.fullmatch(line):
            self.number += 1
            line = self._text.readline(self._limit + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self.record.append(line)
        self._record_chars += len(line)
        if self._record_chars > self._limit:
            raise self._skip_record(line)
        return line

    def _skip_record(self, line: str) -> Exception:
        """Read to the end of the line that makes a record too long; return the error to raise."""
        begin, quotes, length = self.record[0], sum(one.count('"') for one in self.record), self._record_chars
        while not line.endswith("\n") and (line := self._text.readline(_BLOCK_CHARS)):
            quotes += line.count('"')
            length += len(line)
        return self.open_quote() if quotes % 2 else _RecordTooLongError(begin, length)

    def forget(self) -> None:
        self.record.clear()
        self._record_chars = 0

    def open_quote(self) -> SourceError:
        begin = self.number - len(self.record) + 1
        return SourceError(
            f"{self._url}: line {begin}: a quoted cell starts in this record and does not end by line {self.number}; "
            'a cell that starts with " must end with " and double those inside, within source.limits.max_record_bytes; '
            "correct the quotes"
        )


def cut_delimited(stream: BinaryIO, url: str, limits: Limits, dialect: Dialect) -> Iterator[PartContent]:
    """Cut a file into parts by the number of its records, the header not counted.

    Raises
    ------
    SchemaError
        If the header has a column twice, too many columns, or is not UTF-8.
    SourceError
        If a quoted cell does not end.

    """
    return cut_rows(_encode_delimited_rows(stream, url, limits, dialect), limits.max_record_bytes)


def _encode_delimited_rows(stream: BinaryIO, url: str, limits: Limits, dialect: Dialect) -> Iterator[bytes]:
    # The limit is process-wide; its default, 131,072 characters, is less than one long document.
    csv.field_size_limit(sys.maxsize)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    lines = _RecordLines(text, url, limits.max_record_bytes)
    reader = csv.reader(lines, delimiter=dialect.delimiter, quotechar=dialect.quote, strict=True)
    header: list[str] | None = None
    while True:
        lines.forget()
        try:
            cells = next(reader)
        except StopIteration:
            break
        except _RecordTooLongError as error:
            if header is None:
                raise SchemaError(
                    f"{url}: line {lines.number}: the header has {error.length:,} characters; at most "
                    f"{limits.max_record_bytes:,} are allowed; check the file, or raise "
                    "source.limits.max_record_bytes"
                ) from None
            yield make_too_long_line(
                error.begin.encode("utf-8", "surrogateescape"), error.length, limits.max_record_bytes
            )
            continue
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise lines.open_quote() from error
            if header is None:
                raise SchemaError(
                    f"{url}: line {lines.number}: the header cannot be read ({error}); expected column names, each "
                    "quoted completely or not at all; correct its quotes"
                ) from error
            yield _encode_cells(lines.record)
            continue
        if not cells:
            continue
        if header is None:
            require_columns(url, cells, limits.max_columns)
            header = _check_header(cells, url)
        else:
            yield _encode_cells(dict(zip(header, cells, strict=True)) if len(cells) == len(header) else cells)
    text.detach()


def _check_header(header: list[str], url: str) -> list[str]:
    try:
        "".join(header).encode()
    except UnicodeEncodeError:
        raise SchemaError(
            f"{url}: the header is not UTF-8; column names must be UTF-8; save the file as UTF-8"
        ) from None
    twice = sorted(name for name, count in Counter(header).items() if count > 1)
    if twice:
        raise SchemaError(
            f"{url}: the header names {', '.join(map(repr, twice))} more than once; column names must be unique; "
            "rename one of them"
        )
    return header


def _encode_cells(value: dict[str, str] | list[str]) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")


DEFAULT_DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""Delimiter by suffix, unless the file's content or the recipe decides otherwise."""


class _Delimited(FileFormat):
    def note_options(self, scan: FileScan, file: FileOptions, open_stream: OpenStream) -> FileScan:
        default = DEFAULT_DELIMITERS[file.suffix]
        with open_stream() as stream:
            found = find_dialect(stream, scan.url, default=default, delimiter=file.delimiter, quote=file.quote)
        return replace(
            scan,
            delimiter=found.delimiter,
            quote=found.quote,
            asked=(file.delimiter, file.quote),
            dialect_version=DIALECT_VERSION,
        )

    def is_current(self, scan: FileScan, file: FileOptions) -> bool:
        is_asked = scan.delimiter is not None and scan.asked == (file.delimiter, file.quote)
        return is_asked and scan.dialect_version == DIALECT_VERSION

    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: FileOptions) -> Iterator[PartContent]:
        assert scan.delimiter is not None
        assert scan.quote is not None
        return cut_delimited(stream, scan.url, file.limits, Dialect(scan.delimiter, scan.quote))

    def find_line(self, stream: BinaryIO, scan: FileScan, record: int) -> int | None:
        if scan.delimiter is None or scan.quote is None:
            return None
        return find_record_line(stream, Dialect(scan.delimiter, scan.quote), record)

    def explain_non_object(self, value: Json) -> str:
        return f"{len(value)} cells do not match the header"


FORMAT = _Delimited(
    "delimited", suffixes=tuple(DEFAULT_DELIMITERS), options=frozenset({"delimiter", "quote"}), has_cells=True
)
