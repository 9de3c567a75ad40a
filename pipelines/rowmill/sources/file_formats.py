"""The formats of source files, one line each, and finding one by a file's name."""

from rowmill.sources import arrow_files, delimited, json_files, plain_text, urls
from rowmill.sources.encodings import CODECS
from rowmill.sources.file_format import FileFormat
from rowmill.sources.parts import FileScan

FILE_FORMATS: tuple[FileFormat, ...] = (
    json_files.LINES_FORMAT,
    json_files.ARRAY_FORMAT,
    json_files.VALUE_FORMAT,
    json_files.STREAM_FORMAT,
    arrow_files.PARQUET,
    arrow_files.ARROW,
    delimited.FORMAT,
    plain_text.FORMAT,
)
"""All formats; a format without a suffix is detected by content."""

FORMATS_BY_SUFFIX = {suffix: file_format for file_format in FILE_FORMATS for suffix in file_format.suffixes}
"""Format by suffix; the content of a file of JSON decides between four."""

SUFFIXES = tuple(suffix + codec for suffix in FORMATS_BY_SUFFIX for codec in CODECS)

_BY_NAME = {file_format.name: file_format for file_format in FILE_FORMATS}


def find_file_format(name: str) -> FileFormat:
    """Return the format that a scan or part records; the base class for records that never were a file."""
    return _BY_NAME.get(name) or FileFormat(name)


def choose_file_format(url: str, named: str | None = None) -> tuple[FileFormat, str, str] | None:
    """Return the format, the suffix and the codec that a file's name selects; None if it selects none.

    `named` is a suffix without its point, which the recipe gives all its files.
    """
    name, codec = urls.extract_suffix_text(url).lower(), find_codec(url)
    stem = name.removesuffix(codec) if named is None else f".{named}"
    suffix = next((suffix for suffix in FORMATS_BY_SUFFIX if stem.endswith(suffix)), None)
    return (FORMATS_BY_SUFFIX[suffix], suffix, codec) if suffix else None


def find_codec(url: str) -> str:
    """Return the suffix of the codec that a file's name ends in, or an empty text."""
    name = urls.extract_suffix_text(url).lower()
    return next((codec for codec in CODECS if codec and name.endswith(codec)), "")


def describe_reading(scan: FileScan) -> list[str]:
    """Describe how a file is read that is not laid out as its name says: what follows `is read`."""
    chosen = choose_file_format(scan.url)
    is_named_lines = chosen is not None and chosen[0] is json_files.LINES_FORMAT
    notes: list[str] = []
    if scan.reader == json_files.STREAM_FORMAT.name:
        notes.append("as JSON objects one after another, not one per line")
    if scan.reader == json_files.ARRAY_FORMAT.name and is_named_lines:
        notes.append("as one JSON list, not as JSON Lines")
    if scan.encoding is not None and "encoding" not in scan.asked:
        notes.append(f"as {scan.encoding.upper()}, not as UTF-8")
    return notes + (scan.dialect.describe(scan.asked) if scan.dialect is not None else [])
