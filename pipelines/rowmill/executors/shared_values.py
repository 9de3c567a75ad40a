"""Values that all tasks of a map need: written once, mapped into the memory of every worker.

calling process ── pickle without arrays, a file for each array ──► folder ◄── map ── worker 1, worker 2 …
"""

import mmap
import os
import pickle
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

ResultT = TypeVar("ResultT")


def call_with(function: Callable[..., ResultT], shared: object, task: object) -> ResultT:
    """Call a function of a task with a value that this process holds."""
    return function(task, shared)


def call_with_file(function: Callable[..., ResultT], folder: str, task: object) -> ResultT:
    """Call a function of a task with the value that `write_shared` put into a folder."""
    return function(task, _read_shared(folder))


@contextmanager
def write_shared(value: object) -> Generator[str]:
    """Write a value to a folder, arrays apart, so that workers map them and share their pages."""
    with tempfile.TemporaryDirectory(prefix="rowmill-shared-") as folder:
        buffers: list[pickle.PickleBuffer] = []
        content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        Path(folder, "value").write_bytes(content)
        for number, buffer in enumerate(buffers):
            Path(folder, str(number)).write_bytes(buffer.raw())
        yield folder


@lru_cache(maxsize=1)
def _read_shared(folder: str) -> object:
    count = len(os.listdir(folder)) - 1
    buffers = [_map_file(Path(folder, str(number))) for number in range(count)]
    return pickle.loads(Path(folder, "value").read_bytes(), buffers=buffers)  # noqa: S301  (written by our own parent)


def _map_file(path: Path) -> "mmap.mmap | bytes":
    with path.open("rb") as file:
        # An empty file cannot be mapped.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
