"""Waiting for many files: each of them and its folder is synced, by several threads; an error is raised."""

import os
from pathlib import Path
from threading import Lock

import pytest

from rowmill.core.storage import Store


@pytest.mark.parametrize("count", [0, 1, 5, 64, 100])
def test_every_file_and_its_folder_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    store = Store(str(tmp_path))
    paths = [f"{number // 3}/{number}" for number in range(count)]
    for path in paths:
        store.write(path, path.encode())
    synced: set[int] = set()
    lock = Lock()
    sync_one = os.fsync

    def note_file(handle: int) -> None:
        with lock:
            synced.add(os.fstat(handle).st_ino)
        sync_one(handle)

    monkeypatch.setattr(os, "fsync", note_file)
    store.sync(iter(paths))

    assert synced == {os.stat(store.path(one)).st_ino for path in paths for one in (path, path.split("/")[0])}


def test_a_file_that_cannot_be_synced_is_an_error(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    paths = [str(number) for number in range(64)]
    for path in paths[:-1]:
        store.write(path, b"content")

    with pytest.raises(FileNotFoundError):
        store.sync(paths)


def test_files_of_an_object_store_need_no_sync() -> None:
    Store("memory://syncs").sync(["absent"])
