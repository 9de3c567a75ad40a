"""Reads of many files: at once from remote storage, one after another from a folder, in order from both."""

from pathlib import Path
from threading import Barrier, current_thread, main_thread

import pyarrow as pa

from rowmill.core.storage import Store, map_reads, read_tables
from rowmill.parts.functions import write_table


def test_remote_files_are_read_at_once_and_in_order() -> None:
    together = Barrier(8, timeout=30)

    def read(number: int) -> int:
        # Broken after 30 s if fewer than eight reads are under way.
        together.wait()
        return number

    assert map_reads(Store("memory://concurrent-reads"), read, range(16)) == list(range(16))


def test_files_of_a_folder_are_read_by_the_calling_thread(tmp_path: Path) -> None:
    threads = map_reads(Store(str(tmp_path)), lambda _: current_thread(), range(4))

    assert set(threads) == {main_thread()}


def test_tables_are_in_the_order_of_their_files(tmp_path: Path) -> None:
    for store in (Store(str(tmp_path)), Store("memory://tables")):
        files = [write_table(store, f"{k}.arrow", pa.table({"a": [k], "b": [-k]})) for k in range(20)]

        tables = read_tables(store, files, ["a"])

        assert [table.to_pydict() for table in tables] == [{"a": [k]} for k in range(20)]
