"""An executor that stands for many hosts: what one task leaves on its machine no other sees."""

import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rowmill.parts.functions import PartFunction
from rowmill.shards import host_scratch


class HostsApart:
    """Runs each task in this process as if on another host: with an empty temporary folder and pickled arguments."""

    spans_hosts = True
    workers = 2

    def __init__(self, folder: Path) -> None:
        """Use a folder for those of the hosts."""
        self._folder, self._count = folder, 0
        self._own = folder / "caller"
        self._own.mkdir(parents=True)
        tempfile.tempdir = str(self._own)
        self.ran = list[str]()

    def map(
        self, function: Callable[..., Any], tasks: Iterable[object], *, size_bytes: int, shared: object = None
    ) -> Iterator[Any]:
        called = function
        if isinstance(function, partial):
            called = function.args[0] if isinstance(function.args[0], PartFunction) else function.func
        where = str(getattr(called, "__module__", ""))
        for task in tasks:
            call, argument, value = pickle.loads(pickle.dumps((function, task, shared)))
            self.ran.append(where)
            yield self._run_apart(lambda: call(argument) if value is None else call(argument, value))  # noqa: B023

    def _run_apart(self, function: Callable[[], Any]) -> Any:
        self._count += 1
        host, hidden = self._folder / f"host-{self._count}", self._folder / "hidden"
        host.mkdir()
        os.rename(self._own, hidden)
        host_scratch.drop_scratch_maps()
        tempfile.tempdir = str(host)
        try:
            return function()
        finally:
            host_scratch.drop_scratch_maps()
            tempfile.tempdir = str(self._own)
            os.rename(hidden, self._own)

    def start(self, size_bytes: int) -> None:
        del size_bytes

    def run_on_hosts(self, function: Callable[[], Any]) -> dict[str, Any]:
        return {"host": self._run_apart(function)}

    def close(self) -> None:
        """Put the temporary folder back."""
        tempfile.tempdir = None
