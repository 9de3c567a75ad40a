r"""Limits on the size of a source, so that no file exhausts a machine's memory or disk.

A record that is too long, or has too long a run, is rejected, and its neighbours are kept; every other excess stops the
build, because it is a mistake or an attack and would fill a disk before a check could see it. The defaults are far
above real data.

A record that is too long is never held in memory: its first bytes and its length are kept while the rest is skipped,
and a placeholder line, which cannot be the start of any JSON, takes its place:

    \0too_long_record <length> <limit> <first bytes>
"""

import re
from collections.abc import Sequence

from pydantic import Field

from rowmill.core.config import Config
from rowmill.core.errors import SchemaError, SourceError

_TOO_LONG_PATTERN = re.compile(rb"\0too_long_record (\d{1,18}) (\d{1,18}) ")
_SHOWN_BYTES = 200

EXPANSION_FREE_BYTES = 256 << 20
"""Content that any compressed file may have: short files of equal rows compress a thousandfold."""


class RecordLimits(Config):
    """Limits of one record."""

    max_record_bytes: int = Field(default=64 << 20, ge=1024)
    """Bytes of a record: a line, an element of a list, a row as JSON; a longer one is rejected as `too_long_record`.
    Reading takes about ten times as much memory."""

    max_run_chars: int = Field(default=1_000_000, ge=1000)
    """Characters of a text without a border: letters and digits only, white space only, or signs only. A row with a
    longer run is rejected as `too_long_run`, since its tokens would take minutes; real text has at most some
    thousands. Raise it for long sequences without borders, such as those of genes."""


class Limits(RecordLimits):
    """Limits of one record, one file and one source."""

    max_expansion: int = Field(default=200, ge=2)
    """Bytes of content per byte of a compressed or Parquet file, past the first 256 MiB of content; real text has 3 to
    20. A file that expands more stops the build."""

    max_columns: int = Field(default=10_000, ge=1)
    """Columns of a CSV, TSV or Parquet file; more stop the build."""

    max_files: int = Field(default=100_000, ge=1)
    """Files of a source; more stop the build."""


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


def require_expansion(url: str, content: int, size: int, limit: int) -> None:
    """Refuse a file of `size` bytes whose content is at least `content` bytes, if that is too much."""
    if content > EXPANSION_FREE_BYTES and content > size * limit:
        raise SourceError(
            f"{url}: expands to more than {limit} times its size ({size:,} bytes to over {content:,}); at most {limit} "
            "times are allowed, which text never reaches; check the file, or raise source.limits.max_expansion"
        )


def require_columns(url: str, names: Sequence[str], limit: int) -> None:
    """Refuse a table of too many columns."""
    if len(names) > limit:
        raise SchemaError(
            f"{url}: has {len(names):,} columns; at most {limit:,} are allowed; check the delimiter, or raise "
            "source.limits.max_columns"
        )


def require_files(count: int, limit: int) -> None:
    """Refuse a source of too many files."""
    if count > limit:
        raise SourceError(
            f"the source has {count:,} files; at most {limit:,} are allowed; join them into larger ones, narrow the "
            "glob, or raise source.limits.max_files"
        )
