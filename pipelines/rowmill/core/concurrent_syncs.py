"""Waiting until many files are on the disk.

A file system commits what several threads wait for at once together: 700 new files took 1.7 to 2.7 s one after
another, and 0.12 to 0.2 s by eight or sixteen threads.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from rowmill.core.storage import Store

CONCURRENT_SYNCS = 16

LEAST_FILES = 4
"""Files of a thread: fewer take less time than starting it."""


def sync_files(store: Store, paths: Iterable[str]) -> None:
    """Wait until files, and the folders that hold them, are on the disk, as `Store.sync` does, several at once."""
    wanted = [*paths] if store.is_local else []
    each = max(-(-len(wanted) // CONCURRENT_SYNCS), LEAST_FILES)
    # Runs, because files of one folder follow each other.
    runs = [wanted[first : first + each] for first in range(0, len(wanted), each)]
    if len(runs) <= 1:
        store.sync(wanted)
        return
    with ThreadPoolExecutor(len(runs)) as threads:
        for _ in threads.map(store.sync, runs):
            pass
