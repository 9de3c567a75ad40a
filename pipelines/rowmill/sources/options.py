"""How the content of a source's files is read: the options that formats take, and the limits of a record.

A record that is too long, or has too long a run, is rejected, and its neighbours are kept. The default limits are far
above real data.
"""

import codecs
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rowmill.core.config import Config


class Limits(Config):
    """Limits of one record."""

    max_record_bytes: int = Field(default=64 << 20, ge=1024)
    """Bytes of a record: a line, an element of a list, a row as JSON; a longer one is rejected as `too_long_record`.
    Reading takes about ten times as much memory."""

    max_run_chars: int = Field(default=1_000_000, ge=1000)
    """Characters of a text without a border: letters and digits only, white space only, or signs only. A row with a
    longer run is rejected as `too_long_run`, since its tokens would take minutes; real text has at most some
    thousands. Raise it for long sequences without borders, such as those of genes."""


SampleBy = Literal["line", "paragraph", "document"]


def check_encoding(name: str) -> str:
    """Return Python's name of an encoding of text; raises ValueError if Python has no such encoding."""
    try:
        codec = codecs.lookup(name)
        codecs.getincrementaldecoder(name)
        b"a".decode(name, "ignore")
    except LookupError:
        raise ValueError(f"{name!r} is no encoding; write for example utf-8, utf-16, latin-1 or cp1252") from None
    return codec.name


def _require_one_character(text: str) -> str:
    if len(text) != 1 or text in "\r\n":
        raise ValueError(f"expected one character other than a line end, got {text!r}; write, for example, ';'")
    return text


Character = Annotated[str, AfterValidator(_require_one_character)]


class FileOptions(Config):
    """Options that decide which records a file's content is; a format names those that it takes."""

    sample_by: SampleBy = "document"
    """What one record of a `.txt` file is: a `line`, a `paragraph` (the lines up to a blank line) or a `document` (the
    whole file, of at most 64 MiB). Blank records are rejected as `blank`. Other kinds of files define their own
    records."""

    file_format: Literal["jsonl", "json", "parquet", "arrow", "csv", "tsv", "txt"] | None = None
    """Format of all files, whatever their names end in; null: each by its suffix."""

    encoding: Annotated[str, AfterValidator(check_encoding)] | None = None
    """Encoding of text files, such as `latin-1` or `cp1252`; null: UTF-8, or UTF-16 and UTF-32 by their marks."""

    field: str | None = Field(default=None, min_length=1)
    """Path of the list whose elements are the records, in JSON files that hold one object: `data`, or `data.rows`."""

    delimiter: Character | None = None
    """Delimiter of the cells of CSV and TSV files; null: detected from the first records, preferring a comma or tab.
    The detected one is recorded."""

    quote: Character | None = None
    """Quote character of cells of CSV and TSV files that hold the delimiter or a line end; null: a double quote."""

    escape: Character | None = None
    """Character of CSV and TSV files that makes a quote, a delimiter or itself part of a cell, such as a backslash;
    null: a quote inside a cell is doubled, unless the first records show that backslashes escape it."""

    header: Literal["auto"] | bool = "auto"
    """Whether the first line of CSV and TSV files names the columns; false: they are `c1`, `c2`, … `auto`: it does, and
    the check `doubtful_header` warns if it looks like the rows below it."""

    skip: int | None = Field(default=None, ge=0)
    """Lines before the header of CSV and TSV files; null: none, unless the first wide line is clearly the header."""

    comment: str | None = Field(default=None, min_length=1)
    """Text at the beginning of the lines of CSV and TSV files that are comments, such as `#`; null: there are none.
    They are counted as `comment`, and no check counts them as rejects."""

    column_names: list[str] | None = Field(default=None, min_length=1)
    """Names of all columns of CSV and TSV files, in place of the header's; null: the header's."""

    limits: Limits = Limits()
    """Limits on the size of a record."""
