"""Blocks of bytes as a stream, so that a generator can stand where a file is read."""

import io
from collections.abc import Callable, Iterator


class BlockStream(io.RawIOBase):
    """A stream of blocks, which are made as they are read; `on_close` is called when it is closed."""

    def __init__(self, blocks: Iterator[bytes], on_close: Callable[[], None] | None = None) -> None:
        self._blocks = blocks
        self._on_close = on_close
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
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
        """Close the stream."""
        if not self.closed and self._on_close is not None:
            self._on_close()
        super().close()
