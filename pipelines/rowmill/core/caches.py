"""Values that stay in memory while they are used: those used last, and those read from files that have not changed."""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Final, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class RecentValues(Generic[KeyT, ValueT]):
    """The values used last, together of at most `limit` in size, but at least `least` of them.

    Safe to share among threads. A copy in another process, forked or pickled, holds none: a lock that is held while a
    process forks is never released there.
    """

    def __init__(self, limit: int, size_of: Callable[[ValueT], int], least: int = 1) -> None:
        self._limit, self._size_of, self._least = limit, size_of, least
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock, self._size = os.getpid(), threading.Lock(), 0
        self._values: OrderedDict[KeyT, ValueT] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments alone."""
        return RecentValues, (self._limit, self._size_of, self._least)

    def get(self, key: KeyT, make: Callable[[], ValueT]) -> ValueT:
        """Return a value, which is made if it is not held."""
        if self._process != os.getpid():
            self._begin()
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        # Not locked: at worst two threads make the same value.
        value = make()
        with self._lock:
            if key not in self._values:
                self._size += self._size_of(value)
            self._values[key] = value
            while self._size > self._limit and len(self._values) > self._least:
                self._size -= self._size_of(self._values.popitem(last=False)[1])
        return value


# ── What was read from small files, while they are unchanged ──
#
# A build reads manifests, pointers and check results again at every step, and other processes write there
# meanwhile. Whoever writes a file renames it into place, so a change shows in the file's inode and times.

LARGEST_FILE_BYTES: Final = 512 << 10
"""Larger files are read anew: what is made of them would leave no room for the others."""

KEPT_FILE_BYTES: Final = 8 << 20
"""JSON text of which the values are kept, each of some eight times its size; a compressed file counts tenfold."""

CLOCK_TICK_NS: Final = 20_000_000
"""Twice the 10 ms by which a file system's times may be late: a file could change within them and keep its times."""

_FileFacts = tuple[int, int, int, int, int]
_FILES = RecentValues[tuple[str, _FileFacts, Hashable], tuple[Any, int]](KEPT_FILE_BYTES, lambda entry: entry[1])
_CONTENTS = RecentValues[tuple[bytes, Hashable], tuple[Any, int]](KEPT_FILE_BYTES, lambda entry: entry[1])


def read_unchanged(path: str, parse: Callable[[bytes], ValueT]) -> ValueT:
    """Return what a function makes of a small file, or made of it before if the file is the same.

    Callers share the value and must not change it. `parse` must be a function of a module, not one made for the call.
    Raises FileNotFoundError if there is no file.
    """
    while True:
        facts = _describe_file(os.stat(path))
        *_, modified, changed = facts
        if facts[2] > LARGEST_FILE_BYTES or max(modified, changed) > time.time_ns() - CLOCK_TICK_NS:
            with open(path, "rb") as handle:
                return parse(handle.read())
        try:
            return _FILES.get((path, facts, parse), partial(_read_as_described, path, facts, parse))[0]
        except _ReplacedError:
            continue


def parse_once(content: bytes, parse: Callable[[bytes], ValueT]) -> ValueT:
    """Return what a function makes of a small file's bytes, or made of equal ones before, as `read_unchanged` does.

    For files of a storage that has no inodes, and whose bytes are at hand.
    """
    if len(content) > LARGEST_FILE_BYTES:
        return parse(content)
    return _CONTENTS.get((content, parse), lambda: _parse_and_weigh(content, parse))[0]


class _ReplacedError(Exception):
    """The file was replaced after it was looked at."""


def _read_as_described(path: str, facts: _FileFacts, parse: Callable[[bytes], ValueT]) -> tuple[ValueT, int]:
    with open(path, "rb") as handle:
        if _describe_file(os.fstat(handle.fileno())) != facts:
            raise _ReplacedError
        content = handle.read()
    return _parse_and_weigh(content, parse)


def _parse_and_weigh(content: bytes, parse: Callable[[bytes], ValueT]) -> tuple[ValueT, int]:
    return parse(content), len(content) * (1 if content.startswith(b"{") else 10)


def _describe_file(facts: os.stat_result) -> _FileFacts:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
