r"""How much one source may hold of one thing, so that no file takes a machine's memory or disk.

What belongs here: the options, the errors that name them, and the line that stands for a record that is too long.
What does not: where they are watched (`parts.py`, `compression.py`, the readers).

A record that is too long is a reject, and its neighbours go on; what else is too much stops the build, as it is a
mistake or an attack, and would fill a disk before a check could see it. The defaults lie far from real data.

A record that is too long is never held: while it is read past, its first bytes and its length are kept, and a line
that no JSON can begin like goes on in its place:

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
"""Content that a compressed file may have whatever its size: short files of equal rows shrink a thousandfold."""


class RecordLimits(Config):
    """What one record may hold at most."""

    max_record_bytes: int = Field(default=64 << 20, ge=1024)
    """Bytes of a record: a line, an element of a list, a row as JSON; a longer one is rejected as `too_long_record`.
    Reading takes about ten times as much memory."""


class Limits(RecordLimits):
    """What one record, one file, or one source may hold at most."""

    max_expansion: int = Field(default=200, ge=2)
    """Bytes of content per byte of a compressed or Parquet file, past the first 256 MiB of content; real text has 3 to
    20. A file that expands more stops the build."""

    max_columns: int = Field(default=10_000, ge=1)
    """Columns of a CSV, TSV or Parquet file; more stop the build."""

    max_files: int = Field(default=100_000, ge=1)
    """Files of a source; more stop the build."""


def make_too_long_line(begin: bytes, length: int, limit: int) -> bytes:
    """Return the line that stands for a record of `length` bytes, of which `begin` are the first."""
    return b"\0too_long_record %d %d %s" % (length, limit, begin[:_SHOWN_BYTES].replace(b"\n", b" "))


def bound_line(line: bytes, limit: int) -> bytes:
    """Return a record's line, or the line that stands for it if it is too long."""
    return line if len(line) <= limit else make_too_long_line(line, len(line), limit)


def explain_too_long(line: bytes) -> str | None:
    """Say how long the record is that a line stands for; None if it stands for none."""
    found = _TOO_LONG_PATTERN.match(line)
    return f"{int(found[1]):,} bytes; source.limits.max_record_bytes is {int(found[2]):,}" if found else None


def require_expansion(url: str, content: int, size: int, limit: int) -> None:
    """Refuse a file of `size` bytes whose content is at least `content` bytes, if that is too much."""
    if content > EXPANSION_FREE_BYTES and content > size * limit:
        raise SourceError(
            f"{url}: expands to more than {limit} times its size ({size:,} bytes to over {content:,}); at most {limit} "
            "times are allowed, which text never reaches; see what the file is, or raise source.limits.max_expansion"
        )


def require_columns(url: str, names: Sequence[str], limit: int) -> None:
    """Refuse a table of too many columns."""
    if len(names) > limit:
        raise SchemaError(
            f"{url}: has {len(names):,} columns; at most {limit:,} are allowed; see what separates its cells, or raise "
            "source.limits.max_columns"
        )


def require_files(count: int, limit: int) -> None:
    """Refuse a source of too many files."""
    if count > limit:
        raise SourceError(
            f"the source has {count:,} files; at most {limit:,} are allowed; join them into larger ones, narrow the "
            "glob, or raise source.limits.max_files"
        )
