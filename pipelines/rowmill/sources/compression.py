"""Decompressed content as a stream, with a clear error if it is truncated.

Memory use is constant: each codec yields blocks. Every failure below the stream (a truncated gzip member, a wrong
checksum, a disk that stops answering) becomes one `SourceError` with the file and the number of bytes read, because the
content up to the failure looks complete and must not be used as the file.
"""

import bz2
import gzip
import io
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

import zstandard

from rowmill.core.errors import SourceError
from rowmill.sources.block_stream import BlockStream
from rowmill.sources.limits import EXPANSION_FREE_BYTES, require_expansion

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


def _pass_through(raw: BinaryIO) -> BinaryIO:
    return raw


CODECS: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    "": _pass_through,
    ".gz": lambda raw: cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb")),
    ".bz2": lambda raw: cast(BinaryIO, bz2.BZ2File(raw, "rb")),
    ".xz": lambda raw: cast(BinaryIO, lzma.LZMAFile(raw, "rb")),  # noqa: SIM115 (`DecompressedStream` closes it)
    ".zst": lambda raw: cast(BinaryIO, BlockStream(_decompress_zstd(raw))),
    ".zstd": lambda raw: cast(BinaryIO, BlockStream(_decompress_zstd(raw))),
}
"""Decompressor by codec suffix, which follows the format's suffix; the empty suffix is an uncompressed file."""


class DecompressedStream(io.RawIOBase):
    """The content of a file, counting what was read; owns the file and closes it."""

    def __init__(self, raw: BinaryIO, codec: str, url: str, max_expansion: int) -> None:
        self._raw = raw
        self._max_expansion = max_expansion
        self._url = url
        self._codec = codec
        self._position = 0
        self._content = CODECS[codec](raw)
        # One step of the decoder; `read` would gather more, and lose it if the data is truncated.
        self._step: Callable[[int], bytes] = getattr(self._content, "read1", self._content.read)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: "memoryview") -> int:  # pyrefly: ignore[bad-override]
        """Fill `buffer`; return how many bytes.

        Raises
        ------
        SourceError
            If the file is truncated or damaged, or expands too much.

        """
        try:
            block = self._read_step(len(buffer))
        except SourceError:
            # The layer below has the better explanation.
            raise
        except (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            how = f"its {self._codec} data" if self._codec else "it"
            raise SourceError(
                f"{self._url}: {how} cannot be read past byte {self._position:,} of the content ({error}); "
                "a source must be readable to its end; fetch the file again"
            ) from error
        buffer[: len(block)] = block
        self._position += len(block)
        if self._codec and self._position > EXPANSION_FREE_BYTES:
            require_expansion(self._url, self._position, self._raw.tell(), self._max_expansion)
        return len(block)

    def _read_step(self, size: int) -> bytes:
        block = self._step(size)
        if not block and self._codec and self._raw.tell() == 0:
            # gzip accepts zero bytes as zero members, but even a compressed empty file has a header.
            raise EOFError("the file is empty")
        return block

    def close(self) -> None:
        """Close the stream and the file."""
        if not self.closed:
            self._content.close()
            self._raw.close()
        super().close()


@contextmanager
def open_seekable(stream: BinaryIO, *, is_seekable: bool) -> Generator[BinaryIO]:
    """Give a stream that can be read from its end; one that cannot is copied to disk first."""
    if is_seekable:
        yield stream
        return
    with tempfile.TemporaryFile() as spool:
        shutil.copyfileobj(stream, spool)
        spool.seek(0)
        yield cast(BinaryIO, spool)


def open_content(raw: BinaryIO, codec: str, url: str, *, max_expansion: int) -> io.BufferedReader:
    """Return the decompressed content of an opened file as a buffered stream that owns it."""
    return io.BufferedReader(DecompressedStream(raw, codec, url, max_expansion), 1 << 20)
