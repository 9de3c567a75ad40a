r"""Plain text: each line, paragraph or whole file is a record `{"text": …}`, as `source.sample_by` says.

    sample_by    a text is                                        its parts end
    line         a line, without its line end                     at a line end
    paragraph    the lines up to a blank line, joined by "\n"      after a blank line
    document     the whole file                                   at its end: a file is one part

The values are those of the text builder of Hugging Face `datasets`. That library drops empty paragraphs; here every
line of a file belongs to a record, and a text of only white space is rejected as `blank` (`reading.py`): a blank line
with `line`, a blank line after another with `paragraph`, a blank file with `document`. A line ends with `\n` or `\r\n`;
the lines of a text are joined by `\n`.

In the staged copy, each record is on the line on which it starts in the file, so line numbers agree.
"""

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

import orjson

from rowmill.core.errors import SourceError
from rowmill.sources.options import Limits, SampleBy
from rowmill.sources.parts import (
    BLANKS,
    BOM,
    FileFormat,
    FileScan,
    PartContent,
    SourceFile,
    bound_line,
    cut_pieces,
    explain_too_long,
    find_line_end,
)

TEXT_LIMIT_BYTES = 64 << 20
"""Longest paragraph or document, some 16 million tokens: a text is held in memory, several times while it is encoded.
Lines may be as long as records."""

_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


def cut_plain_text(stream: BinaryIO, url: str, sample_by: SampleBy, limits: Limits) -> Iterator[PartContent]:
    """Cut the file into parts; offsets are the file's own bytes, the content is JSON lines."""
    line = record = 1
    limit = limits.max_record_bytes
    match sample_by:
        case "line":
            pieces = cut_pieces(stream, find_line_end, max_line_bytes=limit)
        case "paragraph":
            pieces = cut_pieces(stream, _find_paragraph_end, check_length=partial(_require_text_size, url, sample_by))
        case "document":
            whole = stream.read(TEXT_LIMIT_BYTES + 1)
            _require_text_size(url, sample_by, len(whole))
            pieces = iter([(0, len(whole), whole)] if whole else [])
    for offset, length, content in pieces:
        text = content.removeprefix(BOM) if offset == 0 else content
        texts = list(_split_texts(text, sample_by))
        staged = b"".join(bound_line(_encode_text(piece), limit) + b"\n" * lines for piece, lines in texts)
        yield PartContent(offset, length, line, record, len(texts), staged)
        line, record = line + content.count(b"\n"), record + len(texts)


def _require_text_size(url: str, sample_by: SampleBy, length: int) -> None:
    """Refuse a file whose text of `length` bytes or more is too long for memory."""
    if length > TEXT_LIMIT_BYTES:
        finer = "paragraph or line" if sample_by == "document" else "line"
        raise SourceError(
            f"{url}: has a {sample_by} of more than {TEXT_LIMIT_BYTES:,} bytes; at most {TEXT_LIMIT_BYTES:,} are "
            f"allowed, since a text is held in memory; set source.sample_by to {finer}, or split the file"
        )


def _find_paragraph_end(buffer: bytearray, start: int) -> int:
    """Return the position after the first blank line that ends after `start`; 0 if there is none."""
    # The line end before the blank line may be before `start`.
    match = _BLANK_LINE.search(buffer, max(buffer.rfind(b"\n", 0, start), 0))
    while match is not None and match.end() <= start:
        match = _BLANK_LINE.search(buffer, match.end() - 1)
    return match.end() if match else 0


def _split_texts(content: bytes, sample_by: SampleBy) -> Iterator[tuple[bytes, int]]:
    """Yield each text of a piece with the number of lines from its start to the next text's start."""
    if not content:
        return
    if sample_by == "document":
        yield content.replace(b"\r\n", b"\n"), 1
        return
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    text_lines: list[bytes] = []
    for line in (raw.removesuffix(b"\r") for raw in lines):
        if sample_by == "line":
            yield line, 1
        elif line.strip(BLANKS):
            text_lines.append(line)
        else:
            # One blank line ends a paragraph; a second one is an empty paragraph.
            yield b"\n".join(text_lines) or line, len(text_lines) + 1
            text_lines.clear()
    if text_lines:
        yield b"\n".join(text_lines), len(text_lines)


def _encode_text(text: bytes) -> bytes:
    if explain_too_long(text) is not None:
        return text
    try:
        return orjson.dumps({"text": text.decode()})
    except UnicodeDecodeError:
        # The invalid bytes are kept: reading the part then rejects only this text, as `not_utf8`.
        value = {"text": text.decode("utf-8", "surrogateescape")}
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")


class _PlainText(FileFormat):
    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: SourceFile) -> Iterator[PartContent]:
        return cut_plain_text(stream, scan.url, file.options.sample_by, file.limits)


FORMAT = _PlainText(
    "plain_text", suffixes=(".txt",), options=frozenset({"sample_by", "encoding"}), is_text=True, has_documents=True
)
