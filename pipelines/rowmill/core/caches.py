"""Values that stay in memory while they are used: those used last, within a limit of size."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

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
