"""The formats of source files, one line each, and finding one by a file's name.

What belongs here: the list. What does not: reading; each format is declared in its reader's module.
"""

from rowmill.sources import delimited, json_array, json_lines, json_stream, parquet, plain_text, urls
from rowmill.sources.compression import CODECS
from rowmill.sources.file_format import FileFormat
from rowmill.sources.parts import FileScan

FILE_FORMATS: tuple[FileFormat, ...] = (
    json_lines.FORMAT,
    json_array.FORMAT,
    json_array.VALUE_FORMAT,
    json_stream.FORMAT,
    parquet.FORMAT,
    delimited.FORMAT,
    plain_text.FORMAT,
)
"""All formats; a format without a suffix is detected by content."""

FORMATS_BY_SUFFIX = {suffix: one for one in FILE_FORMATS for suffix in one.suffixes}
"""Format by suffix; the content of a file of JSON decides between four."""

SUFFIXES = tuple(suffix + codec for suffix in FORMATS_BY_SUFFIX for codec in CODECS)

_BY_NAME = {one.name: one for one in FILE_FORMATS}


def find_file_format(name: str) -> FileFormat:
    """Return the format that a scan or part records; the base class for records that never were a file."""
    return _BY_NAME.get(name) or FileFormat(name)


def choose_file_format(url: str) -> tuple[FileFormat, str, str] | None:
    """Return the format, the suffix and the codec that a file's name selects; None if it selects none."""
    name = urls.extract_suffix_text(url).lower()
    codec = next((codec for codec in CODECS if codec and name.endswith(codec)), "")
    stem = name.removesuffix(codec)
    suffix = next((suffix for suffix in FORMATS_BY_SUFFIX if stem.endswith(suffix)), None)
    return (FORMATS_BY_SUFFIX[suffix], suffix, codec) if suffix else None


def describe_unexpected_format(scan: FileScan) -> str | None:
    """Describe the layout of a file that is not the one of its name; None for all others."""
    chosen = choose_file_format(scan.url)
    is_named_lines = chosen is not None and chosen[0] is json_lines.FORMAT
    if scan.reader == json_stream.FORMAT.name:
        return "JSON objects one after another, not one per line"
    if scan.reader == json_array.FORMAT.name and is_named_lines:
        return "one JSON list, not as JSON Lines"
    return None
