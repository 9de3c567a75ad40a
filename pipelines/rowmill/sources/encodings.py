"""The encoding of a text file: UTF-8, unless the file's mark or the recipe says otherwise."""

import codecs
import io
from collections.abc import Iterator
from typing import BinaryIO, cast

from rowmill.core.errors import SourceError
from rowmill.sources.block_stream import BlockStream

_HEAD_BYTES = 64 << 10
_BLOCK_BYTES = 256 << 10
_MIN_DAMAGED_LINES = 5
_MIN_ZEROS = 8
_MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"),
          (codecs.BOM_UTF16_BE, "utf-16"))  # fmt: skip
"""Marks at the beginning of a file; UTF-32's begins with that of UTF-16."""


def check_encoding(name: str) -> str:
    """Return Python's name of an encoding of text.

    Raises
    ------
    ValueError
        If Python has no such encoding.

    """
    try:
        found = codecs.lookup(name)
        codecs.getincrementaldecoder(name)
        b"a".decode(name, "ignore")
    except LookupError:
        raise ValueError(f"{name!r} is no encoding; write for example utf-8, utf-16, latin-1 or cp1252") from None
    return found.name


def find_encoding(content: io.BufferedReader, asked: str | None) -> str | None:
    """Return the encoding of a file of which nothing was read yet; None for UTF-8."""
    if asked is not None:
        return None if asked in ("utf-8", "utf-8-sig", "ascii") else asked
    head = content.peek(_HEAD_BYTES)
    return next((name for mark, name in _MARKS if head.startswith(mark)), None)


def open_utf8(content: io.BufferedReader, url: str, encoding: str | None) -> BinaryIO:
    """Return the content of a file as UTF-8.

    Raises
    ------
    SourceError
        If no encoding is known, and the file is clearly not UTF-8; while reading, if it is not in its encoding.

    """
    if encoding is None:
        _require_utf8(content.peek(_HEAD_BYTES)[:_HEAD_BYTES], url)
        return cast(BinaryIO, content)
    decoded = BlockStream(_decode_blocks(content, encoding, url), content.close)
    return cast(BinaryIO, io.BufferedReader(decoded, _BLOCK_BYTES))


def _require_utf8(head: bytes, url: str) -> None:
    """Refuse a file of which no line beyond ASCII is UTF-8; single damaged lines are rejected when they are read."""
    if head.count(0) > max(len(head) // 4, _MIN_ZEROS):
        raise SourceError(
            f"{url}: line 1: is not UTF-8: one byte in {len(head) // head.count(0)} at the file's start is zero, as in "
            "UTF-16 without a mark; text is UTF-8 unless the recipe says otherwise; write its encoding, such as "
            "source.encoding: utf-16-le, or save it as UTF-8"
        )
    if head.isascii():
        return
    whole = head if len(head) < _HEAD_BYTES else head[: head.rfind(b"\n") + 1]
    beyond = [number for number, line in enumerate(whole.split(b"\n"), 1) if not line.isascii()]
    if len(beyond) < _MIN_DAMAGED_LINES:
        return
    lines = whole.split(b"\n")
    damaged = [number for number in beyond if not _is_utf8(lines[number - 1])]
    if len(damaged) < len(beyond):
        return
    line = lines[damaged[0] - 1]
    at = next(at for at, byte in enumerate(line) if byte > 127)
    raise SourceError(
        f"{url}: line {damaged[0]}: byte 0x{line[at]:02x} is not UTF-8, nor is any other character beyond ASCII at the "
        f"file's start ({line[max(at - 20, 0) : at + 20].decode('latin-1')!r} in Latin-1); text is UTF-8 unless the "
        "recipe says otherwise; write its encoding, such as source.encoding: latin-1, or save it as UTF-8"
    )


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _decode_blocks(content: io.BufferedReader, encoding: str, url: str) -> Iterator[bytes]:
    """Yield the content as UTF-8.

    Raises
    ------
    SourceError
        If bytes are not in the encoding.

    """
    decoder, line, block = codecs.getincrementaldecoder(encoding)(), 1, b" "
    while block:
        block = content.read(_BLOCK_BYTES)
        try:
            text = decoder.decode(block, final=not block).encode()
        except UnicodeError as error:
            raise SourceError(
                f"{url}: line {line + _count_lines_before(error)}: is not {encoding} ({error}); a file has one "
                "encoding; write the one that it has in source.encoding, or save it as UTF-8"
            ) from error
        line += text.count(b"\n")
        yield text


def _count_lines_before(error: UnicodeError) -> int:
    if not isinstance(error, UnicodeDecodeError):
        return 0
    return error.object[: error.start].decode(error.encoding, "replace").count("\n")
