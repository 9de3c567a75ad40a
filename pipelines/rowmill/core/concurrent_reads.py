"""Many files of a store at once, where each of them is a request."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pyarrow as pa

from rowmill.core.remote_index import CONCURRENT_REQUESTS
from rowmill.core.storage import File, Store

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def map_reads(store: Store, read: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> list[ResultT]:
    """Return what a function reads of the store for each item, in order; concurrently if the store is remote."""
    if store.is_local:
        return [read(item) for item in items]
    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as threads:
        return list(threads.map(read, items))


def read_tables(store: Store, files: Iterable[File], columns: Sequence[str] | None = None) -> list[pa.Table]:
    """Read Parquet files that stages wrote, or some of their columns, each as one table."""
    return map_reads(store, lambda file: store.table(file, columns), files)
