"""What is kept in memory of files: it is read once, and again as soon as the file is another."""

import os
import time
from pathlib import Path
from threading import Thread

import pytest

from rowmill.core.caches import CLOCK_TICK_NS, LARGEST_FILE_BYTES, parse_once, read_unchanged

READ: list[bytes] = []


def note(content: bytes) -> list[bytes]:
    """Note that a file is read; return a new object each time."""
    READ.append(content)
    return [content]


@pytest.fixture(autouse=True)
def _nothing_read() -> None:
    READ.clear()


def write_earlier(path: Path, content: bytes) -> None:
    """Write a file as long ago as a file system's clock needs to tell a later change from it."""
    path.write_bytes(content)
    written = path.stat()
    while time.time_ns() <= max(written.st_mtime_ns, written.st_ctime_ns) + CLOCK_TICK_NS:
        os.sched_yield()


def test_unchanged_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_earlier(path, b"{}")

    first = read_unchanged(str(path), note)

    assert first == [b"{}"]
    assert read_unchanged(str(path), note) is first
    assert READ == [b"{}"]


def test_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    path, other = tmp_path / "a.json", tmp_path / "b.json"
    write_earlier(path, b"{1}")
    read_unchanged(str(path), note)
    other.write_bytes(b"{2}")
    # Of the same size and time, as a copy that keeps times has them.
    times = path.stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)

    assert read_unchanged(str(path), note) == [b"{2}"]


def test_file_that_was_changed_in_place_is_read_again_even_if_its_time_was_put_back(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_earlier(path, b"{1}")
    read_unchanged(str(path), note)
    times = path.stat()
    path.write_bytes(b"{2}")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert read_unchanged(str(path), note) == [b"{2}"]


def test_file_that_was_changed_right_after_it_was_read_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for number in range(200):
        # In place and at once, so that some of the changes leave inode, size and times as they were.
        path.write_bytes(b"{%03d}" % number)
        assert read_unchanged(str(path), note) == [b"{%03d}" % number]


def test_file_that_is_removed_is_absent(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_earlier(path, b"{}")
    read_unchanged(str(path), note)
    path.unlink()

    with pytest.raises(FileNotFoundError):
        read_unchanged(str(path), note)


def test_two_readers_of_a_file_get_what_each_made_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_earlier(path, b"{}")

    assert (read_unchanged(str(path), note), read_unchanged(str(path), len)) == ([b"{}"], 2)


def test_equal_bytes_are_parsed_once_by_each_function() -> None:
    first = parse_once(b"{equal}", note)

    assert parse_once(bytes(bytearray(b"{equal}")), note) is first
    assert (parse_once(b"{equal}", len), parse_once(b"{other}", note)) == (7, [b"{other}"])
    assert READ == [b"{equal}", b"{other}"]


def test_large_file_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_earlier(path, bytes(LARGEST_FILE_BYTES + 1))

    assert read_unchanged(str(path), note) is not read_unchanged(str(path), note)


def test_reader_beside_a_writer_goes_forward_and_ends_with_the_last_content(tmp_path: Path) -> None:
    path, other = tmp_path / "a.json", tmp_path / "b.json"
    path.write_bytes(b"0000")

    def replace() -> None:
        for number in range(1, 1000):
            other.write_bytes(b"%04d" % number)
            other.replace(path)

    writer, seen = Thread(target=replace), list[int]()
    writer.start()
    while writer.is_alive():
        seen.append(read_unchanged(str(path), int))
    writer.join()

    assert seen == sorted(seen)
    assert read_unchanged(str(path), int) == 999
