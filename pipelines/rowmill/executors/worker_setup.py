"""What is set up once for all workers: one thread per library, the engine imported, tokenizers opened.

Nothing here may start a thread that workers need: a fork does not copy threads.
"""

import contextlib
import gc
import importlib
import os
import sys

VARIABLE = "ROWMILL_WORKER_SETUP"
"""Environment variable with the arguments of `open_all` as JSON: `sys.path` and the calls to make. A fork
server of Python 3.11 starts without the path of the process that starts it."""

THREAD_LIMITS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def limit_to_one_thread() -> None:
    """Give every library one thread: the processes are the parallelism."""
    os.environ.update(THREAD_LIMITS)
    import pyarrow as pa

    pa.set_cpu_count(1)
    if "polars" in sys.modules:
        import polars as pl

        # Polars read its variables when it was imported; loading no option reads them again, before its first use.
        pl.Config.load('{"environment": {}}')


def open_all(path: list[str], calls: list[tuple[str, str, list[str]]]) -> None:
    """Import the engine by a path, and call module-level functions by their names."""
    limit_to_one_thread()
    sys.path[:] = path
    importlib.import_module("rowmill.stages.catalog")
    call_all(calls)
    # What was opened stays: walking it at every collection cost ten per cent of a part, and would unshare it.
    gc.collect()
    gc.freeze()


def call_all(calls: list[tuple[str, str, list[str]]]) -> None:
    """Call module-level functions by their names, to have what they cache."""
    for module, function, arguments in calls:
        # A worker opens again what cannot be opened here, and says what is wrong.
        with contextlib.suppress(Exception):
            getattr(importlib.import_module(module), function)(*arguments)
