"""What a process of our own does without: pandas, most searches for garbage, and taking its objects apart at its end.

    build of 10,000 chats, processor time   pandas 0.4 s per process   garbage 1.0 s   teardown 0.5 s

A command and its workers are such processes; a process that only imports `rowmill` is left as it is. pyarrow imports
pandas the first time that a list becomes an array, to see whether the list is a pandas object. Where it finds none it
goes on without, and looks again only when something asks for pandas by name, such as `Table.to_pandas()`, which works
as ever. A user's code may hand pandas objects to pyarrow, so `let_pandas_in` is called before it runs.
"""

import atexit
import contextlib
import gc
import os
import sys
from importlib.abc import MetaPathFinder

ALLOCATIONS = 500_000
"""New objects before the youngest are searched for cycles; Python's own 700 to 2,000 suit programs that make many.

A build of 100 chats makes 200,000 that stay, modules and classes above all: to search them took 0.1 of its 2.1 s.
"""

_KEPT_OUT: list[str] = []
"""What this process keeps out, until it is let in."""


class _PandasNotFound(MetaPathFinder):
    """Answers an import of pandas as if it were not installed."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        del path, target
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is kept out while pyarrow looks for it", name="pandas")


def keep_pandas_out() -> None:
    """Let pyarrow look for pandas now and find none; does nothing where pandas is imported already.

    Until `let_pandas_in`, pyarrow takes a pandas object for an ordinary sequence.
    """
    if "pandas" in sys.modules or _KEPT_OUT:
        return
    finder = _PandasNotFound()
    sys.meta_path.insert(0, finder)
    try:
        import pyarrow as pa

        pa.array([0])
    finally:
        sys.meta_path.remove(finder)
    _KEPT_OUT.append("pandas")


def let_pandas_in() -> None:
    """Let pyarrow know pandas again, if it was kept out and is installed."""
    if not _KEPT_OUT:
        return
    import pyarrow as pa

    with contextlib.suppress(ImportError):
        pa.table({"column": pa.nulls(0)}).to_pandas()
    _KEPT_OUT.clear()


def collect_rarely() -> None:
    """Look for garbage in cycles hundreds of times less often than Python does by default.

    Imports, tokenizers and rows are millions of small objects, hardly any of them in cycles.
    """
    gc.set_threshold(ALLOCATIONS, 20, 20)


class QuickExit:
    """Ends the process once all exit functions that are registered after this one have run.

    Python would then free every module, tokenizer and table one by one. Files are written and closed before; locks of
    files end with the process.
    """

    def __init__(self) -> None:
        """Register the end; exit functions run in the reverse order, so make one before anything else registers."""
        self._process = os.getpid()
        self._status: int | None = None
        atexit.register(self._end)

    def set_status(self, status: int) -> None:
        """Set the exit status; without one, and in a forked process, Python ends in its own way."""
        self._status = status

    def _end(self) -> None:
        if self._status is None or os.getpid() != self._process:
            return
        # What cannot be written, because nobody reads it any more, is reported by Python's own way.
        with contextlib.suppress(OSError, ValueError):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(self._status)
