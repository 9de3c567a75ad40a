"""A file system of fsspec that answers each request after 20 ms, as object stores do, from a local folder."""

import io
import os
import time
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

LATENCY_S = 0.02


class _SlowFile(io.FileIO):
    """A file each of whose reads is a request."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "rb")
        self.size = os.path.getsize(path)

    def read(self, size: int | None = -1, /) -> bytes:
        time.sleep(LATENCY_S)
        return super().read(size) or b""


class SlowFileSystem(AbstractFileSystem):
    """The folder behind `slow:///path`; opening a file costs a request for its size, as in s3fs."""

    protocol = "slow"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("slow://").rstrip("/")

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return name, size and type after one request."""
        time.sleep(LATENCY_S)
        path = self._strip_protocol(path)
        if not os.path.exists(path):
            raise FileNotFoundError(path)
        kind = "directory" if os.path.isdir(path) else "file"
        return {"name": path, "size": os.path.getsize(path), "type": kind}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Read bytes in one request."""
        time.sleep(LATENCY_S)
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(start or 0)
            return file.read(-1 if end is None else end - (start or 0))

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        assert mode == "rb", mode
        time.sleep(LATENCY_S)
        return _SlowFile(self._strip_protocol(path))


fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
