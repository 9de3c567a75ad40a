"""Open source files as text: decompress them, and decode the encoding that the file's mark or the recipe names.

Memory use is constant: each codec yields blocks. Every failure below the stream (a truncated gzip member, a wrong
checksum, a disk that stops answering) becomes one `SourceError` with the file and the number of bytes read, because the
content up to the failure looks complete and must not be used as the file.
"""

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

import zstandard

from rowmill.core.errors import SourceError


class BlockStream(io.RawIOBase):
    """A stream of blocks, which are made as they are read; `on_close` is called when it is closed."""

    def __init__(self, blocks: Iterator[bytes], on_close: Callable[[], None] | None = None) -> None:
        self._blocks = blocks
        self._on_close = on_close
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview") -> int:  # pyrefly: ignore[bad-override]
        """Fill `buffer` from the next block; return how many bytes, 0 at the end."""
        while not self._ready and (block := next(self._blocks, None)) is not None:
            self._ready = memoryview(block)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        if not self.closed and self._on_close is not None:
            self._on_close()
        super().close()


_ZSTD_INPUT_BYTES = 16 << 10
"""Compressed bytes per call; small, because one call returns everything that they expand to."""


def _decompress_zstd(raw: BinaryIO) -> Iterator[bytes]:
    """Yield the content of Zstandard frames, one after another.

    Not `zstandard.stream_reader`: it treats a truncated frame as the end of the data.
    """
    frame, is_inside, pending = zstandard.ZstdDecompressor().decompressobj(), False, b""
    while compressed := pending or raw.read(_ZSTD_INPUT_BYTES):
        yield frame.decompress(compressed)
        is_inside, pending = not frame.eof, frame.unused_data
        if frame.eof:
            frame = zstandard.ZstdDecompressor().decompressobj()
    if is_inside:
        raise EOFError("the last frame does not end")


CODECS: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    "": lambda raw: raw,
    ".gz": lambda raw: cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb")),
    ".bz2": lambda raw: cast(BinaryIO, bz2.BZ2File(raw, "rb")),
    ".xz": lambda raw: cast(BinaryIO, lzma.LZMAFile(raw, "rb")),  # noqa: SIM115 (`open_content` closes it)
    ".zst": lambda raw: cast(BinaryIO, BlockStream(_decompress_zstd(raw))),
    ".zstd": lambda raw: cast(BinaryIO, BlockStream(_decompress_zstd(raw))),
}
"""Decompressor by codec suffix, which follows the format's suffix; the empty suffix is an uncompressed file."""


def open_content(raw: BinaryIO, codec: str, url: str) -> io.BufferedReader:
    """Return the decompressed content of an opened file as a buffered stream, which owns the file and closes it."""
    content = CODECS[codec](raw)
    # One step of the decoder; `read` would gather more, and lose it if the data is truncated.
    step: Callable[[int], bytes] = getattr(content, "read1", content.read)

    def read_blocks() -> Iterator[bytes]:
        position, block = 0, b" "
        while block:
            try:
                block = step(1 << 20)
                if not block and codec and raw.tell() == 0:
                    # gzip accepts zero bytes as zero members, but even a compressed empty file has a header.
                    raise EOFError("the file is empty")  # noqa: TRY301
            except SourceError:
                # The layer below has the better explanation.
                raise
            except (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
                how = f"its {codec} data" if codec else "it"
                raise SourceError(
                    f"{url}: {how} cannot be read past byte {position:,} of the content ({error}); "
                    "a source must be readable to its end; fetch the file again"
                ) from error
            position += len(block)
            yield block

    def close() -> None:
        content.close()
        raw.close()

    return io.BufferedReader(BlockStream(read_blocks(), close), 1 << 20)


_HEAD_BYTES = 64 << 10
_BLOCK_BYTES = 256 << 10
_MIN_DAMAGED_LINES = 5
_MIN_ZEROS = 8
_MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"),
          (codecs.BOM_UTF16_BE, "utf-16"))  # fmt: skip
"""Marks at the beginning of a file; UTF-32's begins with that of UTF-16."""

_BINARY_MARKS = {
    b"\x1f\x8b": ".gz",
    b"\xfd7zXZ\x00": ".xz",
    b"(\xb5/\xfd": ".zst",
    b"PAR1\x15": ".parquet",
    b"ARROW1\x00\x00": ".arrow",
    b"PK\x03\x04": ".zip",
}
"""First bytes of files that are no text, and the suffix under which each is read."""


def open_utf8(content: io.BufferedReader, url: str, requested: str | None) -> tuple[BinaryIO, str | None]:
    """Return the content of a file as UTF-8, and the encoding that it has; None: it is UTF-8 already."""
    head = content.peek(_HEAD_BYTES)[:_HEAD_BYTES]
    if binary := next((name for mark, name in _BINARY_MARKS.items() if head.startswith(mark)), None):
        raise SourceError(
            f"{url}: begins as a file of {binary} does; a file of this name is text; rename it to end in {binary}"
            if binary != ".zip"
            else f"{url}: is a zip archive; allowed are files, compressed or not; unpack it, and name its files"
        )
    encoding = requested or next((name for mark, name in _MARKS if head.startswith(mark)), None)
    if encoding in (None, "utf-8", "utf-8-sig", "ascii"):
        _require_utf8(head, url)
        return cast(BinaryIO, content), None
    decoded = BlockStream(_decode_blocks(content, encoding, url), content.close)
    return cast(BinaryIO, io.BufferedReader(decoded, _BLOCK_BYTES)), encoding


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
    beyond = [(number, line) for number, line in enumerate(whole.split(b"\n"), 1) if not line.isascii()]
    # A line is UTF-8 if nothing of it is left out as damaged.
    if len(beyond) < _MIN_DAMAGED_LINES or any(line.decode(errors="ignore").encode() == line for _, line in beyond):
        return
    number, line = beyond[0]
    at = next(at for at, byte in enumerate(line) if byte > 127)
    raise SourceError(
        f"{url}: line {number}: byte 0x{line[at]:02x} is not UTF-8, nor is any other character beyond ASCII at the "
        f"file's start ({line[max(at - 20, 0) : at + 20].decode('latin-1')!r} in Latin-1); text is UTF-8 unless the "
        "recipe says otherwise; write its encoding, such as source.encoding: latin-1, or save it as UTF-8"
    )


def _decode_blocks(content: io.BufferedReader, encoding: str, url: str) -> Iterator[bytes]:
    """Yield the content as UTF-8; raises SourceError if bytes are not in the encoding."""
    decoder, line, block = codecs.getincrementaldecoder(encoding)(), 1, b" "
    while block:
        block = content.read(_BLOCK_BYTES)
        try:
            text = decoder.decode(block, final=not block).encode()
        except UnicodeError as error:
            if isinstance(error, UnicodeDecodeError):
                line += error.object[: error.start].decode(error.encoding, "replace").count("\n")
            raise SourceError(
                f"{url}: line {line}: is not {encoding} ({error}); a file has one "
                "encoding; write the one that it has in source.encoding, or save it as UTF-8"
            ) from error
        line += text.count(b"\n")
        yield text
