"""Keep pyarrow from importing pandas until something needs it: a user's code, or times with nanoseconds.

pyarrow imports pandas the first time that a Python list becomes an array, to see whether the list is a pandas object:
0.4 s of processor time in every process. Where it finds none it goes on without, and tries again only when something
asks for pandas by name, such as `Table.to_pandas()`, which therefore works as ever.
"""

import contextlib
import sys
from importlib.abc import MetaPathFinder


class _PandasNotFound(MetaPathFinder):
    """Answers an import of pandas as if it were not installed."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        del path, target
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is kept out while pyarrow looks for it", name="pandas")


_STATE = {"kept out": False}


def is_pandas_kept_out() -> bool:
    """Return whether this process keeps pandas out, so that processes that it starts can do the same."""
    return _STATE["kept out"]


def keep_pandas_out() -> None:
    """Let pyarrow look for pandas now and find none; only in a process of our own, before a list becomes an array.

    Until `let_pandas_in`, pyarrow takes a pandas object for an ordinary sequence. Does nothing where pandas is imported
    already.
    """
    if "pandas" in sys.modules:
        return
    finder = _PandasNotFound()
    sys.meta_path.insert(0, finder)
    try:
        import pyarrow as pa

        pa.array([0])
    finally:
        sys.meta_path.remove(finder)
    _STATE["kept out"] = True


def let_pandas_in() -> None:
    """Let pyarrow know pandas again, if it was kept out and is installed."""
    if not is_pandas_kept_out():
        return
    import pyarrow as pa

    with contextlib.suppress(ImportError):
        pa.table({"column": pa.nulls(0)}).to_pandas()
    _STATE["kept out"] = False
