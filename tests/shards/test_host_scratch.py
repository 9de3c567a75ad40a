"""Files that tasks make once per host: made where they lack, once, whole, and gone afterwards."""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest

from rowmill.shards.host_scratch import HostScratch


def write_text(text: str, parts: list[str], path: str) -> None:
    parts.append(text)
    Path(path).write_text(text)


def makers(parts: list[str], *names: str) -> dict[str, Callable[[str], object]]:
    return {name: partial(write_text, name, parts) for name in names}


def test_a_host_makes_only_what_it_lacks(tmp_path: Path) -> None:
    scratch, made = HostScratch("s", str(tmp_path / "s")), list[str]()
    scratch.require(makers(made, "a", "b"))
    scratch.require(makers(made, "b", "c"))

    assert made == ["a", "b", "c"]
    assert Path(scratch.locate("c")).read_text() == "c"


def test_each_host_has_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, made = HostScratch("s"), list[str]()
    for host in ("one", "two"):
        (tmp_path / host).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / host))
        scratch.require(makers(made, "a"))
    scratch.remove()

    assert made == ["a", "a"]
    assert (tmp_path / "one" / "rowmill-s" / "a").exists()
    assert not list((tmp_path / "two").iterdir())


def test_processes_that_need_the_same_files_make_each_once(tmp_path: Path) -> None:
    scratch, made, names = HostScratch("s", str(tmp_path / "s")), list[str](), [str(number) for number in range(40)]
    start = Barrier(4, timeout=60)

    def require(_: int) -> None:
        start.wait()
        scratch.require(makers(made, *names))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(require, range(4)))

    assert sorted(made) == sorted(names)


def test_a_file_that_failed_is_not_there_and_is_made_again(tmp_path: Path) -> None:
    scratch = HostScratch("s", str(tmp_path / "s"))

    def fail(path: str) -> None:
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        scratch.require({"a": fail})
    assert not os.path.exists(scratch.locate("a"))
    scratch.require(makers([], "a"))
    assert Path(scratch.locate("a")).read_text() == "a"
