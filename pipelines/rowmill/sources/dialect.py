r"""The dialect of a CSV file, found in its first records: delimiter, quotes, escapes, lines before the header.

Only what is clear is found. Two possible delimiters, or cells in single quotes, are an error that asks; a header that
looks like the rows below it is noted; everything that differs from RFC 4180 is described to the user.

    Report of March             2 lines before the header: `skip`
    Made by sensor 7
    "id", "name"                the blank after the delimiter is no part of a cell: `trims`
    "1", "say \"hi\""             quotes escaped by a backslash: `escape`
"""

import csv
import io
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO

from rowmill.core.errors import SchemaError
from rowmill.sources.options import FileOptions

if TYPE_CHECKING:
    from _csv import Reader

_HEAD_BYTES = 256 << 10
_HEAD_RECORDS = 200
_MAX_TITLE_RECORDS = 10
"""Records that may stand before the header; more are no title."""
DELIMITERS = (",", ";", "\t", "|")
"""Delimiters that are tried if the recipe names none."""
QUOTE = '"'
OTHER_QUOTE = "'"
BACKSLASH = "\\"
DELIMITER_LINE = re.compile(r'"?sep=([^\r\n])"?\r?(?:\n|\Z)', re.IGNORECASE)
"""What Excel reads in the first line as the delimiter; it is no record."""
_NUMBER = re.compile(r"[+-]?(?:\d[\d .,']*|[.,]\d+)(?:[eE][+-]?\d+)?%?|\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?:[T ].*)?")
"""What is a value wherever it stands: a number or a date."""
_ESCAPED_QUOTE = re.compile(r"\\[\"']")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the lines of a CSV file become cells.

    `escape` makes the quote, delimiter or escape after it a part of the cell. With `trims`, blanks after a delimiter
    are not. `skip` lines come before the header, and lines that begin with `comment` are no records. Without `header`,
    the first line is a record; `column_names` replace the header's, or stand for it. `unnamed` are the positions of
    columns that have neither a name nor a value. `looks_headless`: the header looks like the rows below it.
    """

    delimiter: str
    quote: str
    escape: str | None = None
    trims: bool = False
    skip: int = 0
    comment: str | None = None
    header: bool = True
    column_names: tuple[str, ...] = ()
    unnamed: tuple[int, ...] = ()
    looks_headless: bool = False

    def read(self, lines: Iterator[str], *, strict: bool = True) -> "Reader":
        """Return the parser of the lines of a file in this dialect."""
        # The limit is process-wide; its default, 131,072 characters, is less than one long document.
        csv.field_size_limit(sys.maxsize)
        return csv.reader(
            lines if self.escape is None else map(self._double_literal_escapes, lines),
            delimiter=self.delimiter,
            quotechar=self.quote,
            escapechar=self.escape,
            skipinitialspace=self.trims,
            strict=strict,
        )

    def _double_literal_escapes(self, line: str) -> str:
        r"""Double each escape that escapes nothing, as in `C:\new`: the parser would remove it."""
        if self.escape is None or self.escape not in line:
            return line
        escape = re.escape(self.escape)
        used = "".join(map(re.escape, (self.quote, self.delimiter, self.escape, "\r", "\n")))
        return re.sub(rf"{escape}([{used}])|{escape}", lambda match: match[0] if match[1] else match[0] * 2, line)

    def describe(self, requested: Mapping[str, Any]) -> list[str]:
        """Describe what the recipe did not ask for and RFC 4180 does not have: what follows `is read`."""
        notes: list[str] = []
        if self.skip and "skip" not in requested:
            lines = "its first line, which comes" if self.skip == 1 else f"its first {self.skip} lines, which come"
            notes.append(f"without {lines} before the header")
        if self.escape is not None and "escape" not in requested:
            notes.append(f"with quotes escaped by {self.escape}")
        if self.trims:
            notes.append("without the blank after each delimiter")
        if self.unnamed:
            columns = ", ".join(str(at + 1) for at in self.unnamed)
            notes.append(f"without column {columns}, which has neither a name nor a value")
        return notes


DIALECT_OPTIONS = ("delimiter", "quote", "escape", "header", "skip", "comment", "column_names")
"""The options of a source that say something about the dialect."""


def find_dialect(stream: BinaryIO, url: str, *, default: str, options: FileOptions) -> Dialect:
    """Return the dialect of a file from its first records; what the recipe says is used if it fits.

    `default` is the delimiter of files with this suffix: it is used unless its header is one column and another
    delimiter gives several, the same number in nearly all records. A first line such as `sep=;` names the delimiter,
    unless the recipe does. Raises SchemaError if the file is one column with the requested delimiter and several with
    another, if two delimiters give several, or if its cells are in single quotes and the recipe names no quote.
    """
    content = b""
    while len(content) < _HEAD_BYTES and (block := stream.read(_HEAD_BYTES - len(content))):
        content += block
    whole = content if len(content) < _HEAD_BYTES else content[: content.rfind(b"\n") + 1]
    head, delimiter = whole.decode("utf-8-sig", "replace"), options.delimiter
    declared = DELIMITER_LINE.match(head)
    if declared is not None:
        head = head[declared.end() :]
        if delimiter is None and _count_header_cells(head, declared[1], options.quote or QUOTE) > 1:
            delimiter = declared[1]
    enclosing = options.quote or QUOTE
    skip = options.skip
    if skip is None:
        is_found = options.header is not False and options.comment is None
        skip = _count_title_lines(head, delimiter, default, enclosing) if is_found else 0
    lines = _split_lines(head)[skip:]
    head = "".join(line for line in lines if options.comment is None or not line.startswith(options.comment))
    chosen = _find_delimiter(head, url, default=default, delimiter=delimiter, enclosing=enclosing)
    if options.quote is None:
        _require_double_quotes(head, url, chosen)
    dialect = Dialect(
        chosen, enclosing, options.escape, skip=skip, comment=options.comment, header=options.header is not False,
        column_names=tuple(options.column_names or ()),
    )  # fmt: skip
    dialect = replace(dialect, trims=_has_blanks_after_delimiters(head, dialect))
    if not options.escape and f"{BACKSLASH}{dialect.quote}" in head:
        # The backslash escapes quotes if records are whole with it, and some are not without it.
        escaped = replace(dialect, escape=BACKSLASH)
        dialect = escaped if _count_damaged(head, dialect) and not _count_damaged(head, escaped) else dialect
    records = _parse_head(head, dialect)
    named = records[0] if records and dialect.header and not dialect.column_names else []
    unnamed = tuple(at for at, name in enumerate(named) if not name.strip())
    return replace(
        dialect,
        # A header in which no column has a name is left as it is.
        unnamed=unnamed if len(unnamed) < len(named) else (),
        looks_headless=options.header == "auto" and _looks_headless(records),
    )


def _split_lines(head: str) -> list[str]:
    """Return the lines with their ends, which `str.splitlines` knows more of than CSV."""
    return list(io.StringIO(head, newline=""))


def _parse_head(head: str, dialect: Dialect) -> list[list[str]]:
    reader = dialect.read(iter(_split_lines(head)), strict=False)
    records: list[list[str]] = []
    try:
        for cells in reader:
            if cells:
                records.append(cells)
            if len(records) == _HEAD_RECORDS:
                break
    except csv.Error:
        return []
    return records


def _parse_plainly(head: str, delimiter: str, quote: str) -> list[list[str]]:
    """Parse before escapes and blanks are known: a backslash before a quote, or a blank, hides no delimiter."""
    escape = BACKSLASH if _ESCAPED_QUOTE.search(head) else None
    return _parse_head(head, Dialect(delimiter, quote, escape, trims=not delimiter.isspace()))


def _count_title_lines(head: str, delimiter: str | None, default: str, quote: str) -> int:
    """Return how many lines come before a header that is clear: the first wide line, over columns of values."""
    candidates = [delimiter] if delimiter else list(dict.fromkeys((default, *DELIMITERS)))
    if any(_measure_even_width(head, candidate, quote) > 1 for candidate in candidates):
        return 0
    return next((count for candidate in candidates if (count := _find_wide_header(head, candidate, quote))), 0)


def _find_wide_header(head: str, delimiter: str, quote: str) -> int:
    dialect = Dialect(delimiter, quote)
    reader = dialect.read(iter(_split_lines(head)), strict=False)
    # Each with the number of lines before it.
    records: list[tuple[list[str], int]] = []
    begin = 0
    for cells in reader:
        if cells:
            records.append((cells, begin))
        begin = reader.line_num
        if len(records) == _HEAD_RECORDS:
            break
    if len(records) < 3:
        return 0
    width = Counter(len(cells) for cells, _ in records).most_common(1)[0][0]
    # A spreadsheet writes a title in the first cell, and empty cells up to the width of the table.
    is_title = [width > 2 and not any(cell.strip() for cell in cells[1:]) for cells, _ in records]
    first = next((at for at, (cells, _) in enumerate(records) if len(cells) == width and not is_title[at]), 0)
    if width < 2 or not 0 < first <= _MAX_TITLE_RECORDS or first + 1 == len(records):
        return 0
    (header, begin), body = records[first], [cells for cells, _ in records[first + 1 :]]
    fitting = [cells for cells in body if len(cells) == width]
    # A header is clear if its names differ, none of them is a value, and one stands over a column of values.
    names = [name.strip() for name in header]
    if not all(names) or len(set(names)) < len(names) or any(map(_NUMBER.fullmatch, names)):
        return 0
    has_values = any(_holds_values([row[at] for row in fitting]) for at in range(len(names)))
    return begin if has_values and len(fitting) >= 0.9 * len(body) else 0


def _holds_values(cells: Sequence[str]) -> bool:
    """Return whether a column's cells are numbers or dates."""
    filled = [cell.strip() for cell in cells if cell.strip()]
    return bool(filled) and sum(1 for cell in filled if _NUMBER.fullmatch(cell)) >= 0.9 * len(filled)


def _looks_headless(records: Sequence[Sequence[str]]) -> bool:
    """Return whether the first record has a number or date over a column of them, and a text over each of texts.

    Years, or other numbers that follow one another, are names of columns.
    """
    header, rows = (records[0], records[1:]) if records else ([], [])
    rows = [row for row in rows if len(row) == len(header)]
    if not rows:
        return False
    kinds = [(bool(_NUMBER.fullmatch(name.strip())), _holds_values([row[at] for row in rows]))
             for at, name in enumerate(header) if name.strip()]  # fmt: skip
    if not any(above for above, _ in kinds) or any(above != below for above, below in kinds):
        return False
    numbers = [int(name) for name in header if name.strip().isdecimal()]
    steps = {after - before for before, after in pairwise(numbers)}
    is_counting = len(numbers) > 2 and len(steps) == 1 and steps != {0}
    is_years = bool(numbers) and all(1900 <= number <= 2100 for number in numbers)
    return not is_counting and not is_years


def _require_double_quotes(head: str, url: str, delimiter: str) -> None:
    """Refuse a file whose cells are enclosed in single quotes, which would stay in the cells."""
    if QUOTE in head:
        return
    is_one_column = _measure_even_width(head, delimiter, QUOTE) <= 1
    for candidate in dict.fromkeys((delimiter, *(DELIMITERS if is_one_column else ()))):
        border = re.escape(candidate)
        enclosed = re.compile(rf"(?:^|(?<={border}))'(?:[^'\r\n]|'')*'(?=\r?$|{border})", re.MULTILINE)
        cells = enclosed.findall(head)
        if not cells or _measure_even_width(head, candidate, OTHER_QUOTE) <= 1:
            continue
        records = len(_parse_plainly(head, candidate, OTHER_QUOTE)) - 1
        # Every record has such a cell, or records are as wide as the header with single quotes alone.
        if len(cells) >= max(records, 1) or not _measure_even_width(head, candidate, QUOTE):
            raise SchemaError(
                f"{url}: its cells stand in single quotes, such as {cells[-1][:60]}; cells are enclosed in double "
                "quotes unless the recipe says otherwise; write source.quote: \"'\", or source.quote: '\"' if the "
                "single quotes belong to the cells"
            )


def _find_delimiter(head: str, url: str, *, default: str, delimiter: str | None, enclosing: str) -> str:
    expected = delimiter or default
    several = {
        candidate: width
        for candidate in DELIMITERS
        if candidate != expected and (width := _measure_even_width(head, candidate, enclosing)) > 1
    }
    columns = _count_header_cells(head, expected, enclosing)
    widest = max(several, key=several.__getitem__, default=None)
    if widest is None or columns > several[widest]:
        return expected
    if delimiter is not None and columns <= 1:
        raise SchemaError(
            f"{url}: is one column with source.delimiter {delimiter!r}, and {several[widest]} columns with {widest!r}; "
            f"expected a delimiter that separates cells; set source.delimiter: {widest!r}, or omit it"
        )
    ties = [candidate for candidate in several if several[candidate] == several[widest]]
    if delimiter is None and (columns > 1 or len(ties) > 1):
        wide = {candidate: width for candidate, width in {expected: columns, **several}.items() if width > 1}
        counts = ", ".join(f"{width} columns with {candidate!r}" for candidate, width in wide.items())
        raise SchemaError(f"{url}: has {counts}; only one can be the delimiter; set source.delimiter")
    return delimiter or widest


def _count_header_cells(head: str, delimiter: str, quote: str) -> int:
    return next((len(cells) for cells in _parse_plainly(head, delimiter, quote)), 0)


def _measure_even_width(head: str, delimiter: str, quote: str) -> int:
    """Return the number of columns with a delimiter; 0 unless nearly all records have as many as the header."""
    records = _parse_plainly(head, delimiter, quote)
    named = sum(1 for name in records[0] if name.strip()) if records else 0
    # Of two columns, the index of a data frame has no name.
    if not named or named < min(len(records[0]) - 1, 2):
        return 0
    width = len(records[0])
    return width if sum(len(cells) == width for cells in records) >= 0.9 * len(records) else 0


def _has_blanks_after_delimiters(head: str, dialect: Dialect) -> bool:
    """Return whether quoted cells stand after a blank, or every cell after the first begins with one."""
    if dialect.delimiter.isspace():
        return False
    border, quote = re.escape(dialect.delimiter), re.escape(dialect.quote)
    lines = _split_lines(head)[:_HEAD_RECORDS]
    quoted = sum(1 for line in lines if re.search(rf"{border} +{quote}", line))
    if lines and quoted >= 0.5 * len(lines):
        return True
    records = _parse_head(head, dialect)
    cells = [cell for record in records for cell in record[1:] if cell]
    return len(records) > 1 and bool(cells) and all(cell.startswith(" ") for cell in cells)


def _count_damaged(head: str, dialect: Dialect) -> int:
    """Count the records whose quotes do not fit, except the last one, which the head may cut."""
    reader = dialect.read(iter(_split_lines(head)))
    damaged = 0
    while True:
        try:
            next(reader)
        except StopIteration:
            return damaged
        except csv.Error as error:
            damaged += "unexpected end of data" not in str(error)
