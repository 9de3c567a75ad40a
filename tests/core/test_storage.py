"""Names, atomic writes, locks, and a build on a remote root."""

import fcntl
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rowmill.core.errors import BusyError, ConfigError, DamagedFileError
from rowmill.core.storage import File, Store, check_name, digest_bytes, digest_json
from tests.support.recipes import CHAT, PAIR, TEXT, Workspace, chat, document, pair


@pytest.fixture
def memory_root() -> Iterator[str]:
    """Provide an empty root in fsspec's memory, emptied afterwards."""
    fsspec.filesystem("memory").store.clear()
    yield "memory://root"
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("name", ["../x", "", "a/b", "1a", "a.b", "training_splits", "a" * 65, "é", "a\n"])
def test_check_name_that_could_leave_its_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a name"):
        check_name(name, "configs/x.yaml")


def _write_and_fail(store: Store, relative: str) -> None:
    with store.create(relative) as handle:
        handle.write(b"new")
        raise RuntimeError


def test_create_that_fails_midway_leaves_what_was_there(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("a/file", b"old")

    with pytest.raises(RuntimeError):
        _write_and_fail(store, "a/file")

    assert store.read("a/file") == b"old"
    assert store.list("a") == ["file"]
    assert store.list("nowhere") == []


@pytest.mark.parametrize("remote", [False, True])
def test_files_of_a_folder_are_listed_at_any_depth_in_order(tmp_path: Path, memory_root: str, remote: bool) -> None:
    store = Store(memory_root if remote else str(tmp_path))
    for path in ("a/c/d/e", "a/b", "ab/x", "a/c/a"):
        store.write(path, b"123")
    if not remote:
        (tmp_path / "a" / "half.tmp").write_bytes(b"1")

    assert list(store.list_files("a")) == ["a/b", "a/c/a", "a/c/d/e"]
    assert {facts.size_bytes for facts in store.list_files("a").values()} == {3}
    assert store.list_files("nowhere") == {}


def test_lock_held_elsewhere_ends_in_busy_error_that_names_it_until_its_holder_left(tmp_path: Path) -> None:
    store = Store(str(tmp_path))

    with (
        store.lock("x/.lock", what="demo/chats"),
        pytest.raises(BusyError, match=r"^demo/chats: another process .*; wait for that build or stop it$"),
        store.lock("x/.lock", what="demo/chats", timeout_s=0.1),
    ):
        pass
    with store.lock("x/.lock", what="second", timeout_s=0.1):
        pass


@pytest.mark.parametrize("remote", [False, True])
def test_file_is_read_only_as_it_was_written(tmp_path: Path, memory_root: str, remote: bool) -> None:
    store = Store(memory_root if remote else str(tmp_path))
    store.write("stage/part.parquet", b"abc")
    file = File("stage/part.parquet", 3, digest_bytes(b"abc"), 0)

    assert store.content(file).to_pybytes() == b"abc"
    for content in (b"xyz", b"", b"ab"):
        store.write(file.path, content)
        with pytest.raises(DamagedFileError, match=r"part\.parquet: digest") as caught:
            store.content(file)
        assert pickle.loads(pickle.dumps(caught.value)).path == file.path
    store.remove(file.path)
    with pytest.raises(DamagedFileError, match=r"part\.parquet: missing"):
        store.table(file)


def test_digest_ignores_key_order_and_sees_every_value() -> None:
    assert digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1})
    assert digest_json({"a": 1}) != digest_json({"a": 2})
    assert digest_json("a", "b") != digest_json("ab")


@pytest.mark.slow
def test_workspace_on_a_remote_root_gives_the_versions_of_a_local_one(tmp_path: Path, memory_root: str) -> None:
    local, remote = Workspace(tmp_path), Workspace(tmp_path, root=memory_root)
    makers = {"chats": (chat, CHAT), "pairs": (pair, PAIR), "texts": (document, TEXT)}
    local.recipe(
        {name: local.dataset(f"{name}.jsonl", map(make, range(40)), kind) for name, (make, kind) in makers.items()}
    )

    assert remote.build().versions() == local.build().versions()
    assert remote.build().made() == set()


# ── Unfinished files ──────────────────────────────────────────────────────────────────────────────

WRITER = """
import sys, time
from rowmill.core.storage import Store
with Store(sys.argv[1]).create("stats/rows/part-0.parquet") as handle:
    handle.write(b"half")
    handle.flush()
    print("writing", flush=True)
    time.sleep(600)
"""


def test_unfinished_file_goes_once_its_writer_is_dead_and_not_before(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"

        assert store.remove_unfinished() == []
        assert store.list("stats/rows") == []

        writer.kill()
        writer.wait()
    [left] = store.list_unfinished("stats")
    assert store.remove_unfinished() == [left]
    assert store.list_unfinished("") == []


def test_only_unfinished_files_go_with_what_a_library_left_beside_them(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for name in ("notes.tmp", "a.0123.tmp", f"{'a' * 32}.tmp.txt"):
        store.write(f"mine/{name}", b"")

    assert store.remove_unfinished() == []
    name = f"stats.duckdb.{'0' * 32}.tmp"
    for beside in ("", ".db", ".db.wal"):
        (tmp_path / f"{name}{beside}").write_bytes(b"")
    assert sorted(store.remove_unfinished()) == sorted([name, f"{name}.db", f"{name}.db.wal"])


def test_writer_whose_file_was_taken_for_abandoned_writes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, lock, taken = Store(str(tmp_path)), fcntl.flock, list[str]()

    def remove_first(handle: Any, kind: int) -> None:
        if not taken:
            taken.append(handle.name)
            os.unlink(handle.name)
        lock(handle, kind)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    store.write("a", b"whole")

    assert taken
    assert store.read("a") == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_file_is_not_taken_for_abandoned_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, replace = Store(str(tmp_path)), os.replace

    def clean_first(source: str, target: str) -> None:
        assert store.remove_unfinished() == []
        replace(source, target)

    monkeypatch.setattr(os, "replace", clean_first)
    store.write("a/b.txt", b"whole")

    assert store.read("a/b.txt") == b"whole"


def test_write_that_finds_no_space_names_its_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="large") as refused:
            Store(str(tmp_path)).write("a/page.html", bytes(1_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert refused.value.filename == str(tmp_path / "a" / "page.html")
    assert list((tmp_path / "a").iterdir()) == []
