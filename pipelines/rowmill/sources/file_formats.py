"""The formats of source files, one line each, and finding one by a file's name.

What belongs here: the list. What does not: reading; each format is declared in its reader's module.
"""

from rowmill.sources import delimited, json_array, json_lines, parquet, plain_text, urls
from rowmill.sources.compression import CODECS
from rowmill.sources.file_format import FileFormat

FILE_FORMATS: tuple[FileFormat, ...] = (
    json_lines.FORMAT,
    json_array.FORMAT,
    json_array.VALUE_FORMAT,
    parquet.FORMAT,
    delimited.FORMAT,
    plain_text.FORMAT,
)
"""All formats; a format without a suffix is detected by content."""

FORMATS_BY_SUFFIX = {suffix: one for one in FILE_FORMATS for suffix in one.suffixes}
"""Format by suffix; the content of a `.json` file decides between three."""

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
