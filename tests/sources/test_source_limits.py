"""Limits of sources: a record that is too long is one reject, never held in memory."""

import gzip
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.core.errors import SchemaError, SourceError
from rowmill.sources import FileScan, HuggingFaceSource, RawRecord, json_files, scan_source
from rowmill.sources.options import Limits
from rowmill.sources.parts import cut_lines
from tests.support.recipes import Workspace, chat
from tests.support.source_files import reasons, records, scan_files, stager
from tests.support.tiers import draw

LIMIT = 2000


def scan_one(path: Path, *, known: dict[str, FileScan] | None = None, **limits: int) -> FileScan:
    sample_by = "line" if ".txt" in path.name else "document"
    [one] = scan_files(path.parent, path.name, known=known, sample_by=sample_by, limits=limits)
    return one


def read_within(path: Path, max_record_bytes: int = LIMIT) -> list[RawRecord]:
    """Scan and read a file whose records may have so many bytes."""
    one = scan_one(path, max_record_bytes=max_record_bytes)
    found = records([one], path.parent)
    assert len(found) == one.records
    return found


def told(found: list[RawRecord]) -> list[Any]:
    """Return each record's value, or its reason and detail."""
    return [one.value if one.rejected is None else (one.rejected.reason, one.rejected.detail) for one in found]


def too_long(length: int) -> tuple[str, str]:
    return ("too_long_record", f"{length:,} bytes; source.limits.max_record_bytes is {LIMIT:,}")


ROWS: list[dict[str, Any]] = [{"text": "a"}, {"text": "b" * 5000}, {"text": "c"}]
LONG = json.dumps(ROWS[1], separators=(",", ":")).encode()
JSON_LINES = b'{"text":"a"}\n' + LONG + b'\n{"text":"c"}\n'


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(JSON_LINES),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(JSON_LINES)),
    "a.json": lambda path: path.write_bytes(b'[{"text":"a"},' + LONG + b',\n{"text":"c"}]'),
    "a.csv": lambda path: path.write_text("text\na\n" + "b" * 5000 + "\nc\n"),
    "a.txt": lambda path: path.write_text("a\n" + "b" * 5000 + "\nc"),
    "a.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
}
LENGTHS = {"a.csv": 5001, "a.txt": 5011}
"""A physical line of CSV is counted with its end; others are counted as JSON."""


@pytest.mark.parametrize("name", WRITERS)
def test_record_that_is_too_long_is_one_reject_between_its_neighbours(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    found = read_within(tmp_path / name)

    assert told(found) == [{"text": "a"}, too_long(LENGTHS.get(name, len(LONG))), {"text": "c"}]
    assert b"bbb" in found[1].raw
    assert len(found[1].raw) < 300
    assert told(read_within(tmp_path / name, 5100)) == ROWS


def test_limit_that_changes_is_obeyed_though_the_file_did_not_move(tmp_path: Path) -> None:
    WRITERS["a.jsonl"](tmp_path / "a.jsonl")
    first = scan_one(tmp_path / "a.jsonl")
    again = scan_one(tmp_path / "a.jsonl", known={"a.jsonl": first}, max_record_bytes=LIMIT)
    assert [part.staged is None for part in (*first.parts, *again.parts)] == [True, False]


def test_value_of_json_that_is_too_long_is_one_reject_and_a_quoted_record_of_csv_one_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS[1], indent=1))
    assert reasons(read_within(tmp_path / "a.json")) == ["too_long_record"]
    (tmp_path / "a.csv").write_text('text\na\n"b\n' + "b\n" * 2000 + '"\nc\n')
    with pytest.raises(SourceError, match=r"a quoted cell starts in this record .* source\.limits\.max_record_bytes; "):
        read_within(tmp_path / "a.csv")


@pytest.mark.parametrize("line", [b"\0too_long_record ", b"\0too_long_record x y z", b"\0too_long_record 1"])
def test_line_that_begins_like_a_placeholder_is_invalid_json(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(line + b"\n")
    assert reasons(read_within(tmp_path / "a.jsonl")) == ["invalid_json"]


@pytest.mark.slow
@settings(max_examples=draw(60), deadline=None)
@given(st.lists(st.sampled_from([0, 5, 1500, 3000, 140_000, 1_200_000, 2_500_000]), max_size=9), st.booleans())
def test_lines_that_are_too_long_keep_the_other_line_numbers(lengths: list[int], ends: bool) -> None:
    rows = [(b"%d" % number).ljust(length, b"x") for number, length in enumerate(lengths)]
    content = b"\n".join(rows) + b"\n" * ends
    parts = list(cut_lines(io.BytesIO(content), LIMIT))
    kept = b"".join(part.content for part in parts).split(b"\n")
    assert [len(row) > LIMIT for row in content.split(b"\n")] == [row.startswith(b"\0too") for row in kept]
    assert [row for row in kept if not row.startswith(b"\0")] == [r for r in content.split(b"\n") if len(r) <= LIMIT]
    place = 0
    for part in parts:
        assert part.offset == place
        own = content[place : place + part.length]
        assert part.content.count(b"\n") == own.count(b"\n")
        assert (part.content == own) is part.is_whole
        place += part.length
    assert place == len(content)


class _Endless(io.RawIOBase):
    """A record of many gigabytes, between two short ones."""

    def __init__(self, begin: bytes, blocks: int, end: bytes) -> None:
        self._blocks = iter([begin, *[b"x" * (1 << 20)] * blocks, end])

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        del size
        return next(self._blocks, b"")


def peak_of(function: Callable[[], int]) -> tuple[int, int]:
    """Return what the function does, and how much memory it takes."""
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_line_and_element_of_gigabytes_are_read_past_in_flat_memory() -> None:
    stream: Any = _Endless(b'{"a":1}\n{"b":"', 4096, b'"}\n{"c":1}\n')
    count, peak = peak_of(lambda: sum(part.records for part in cut_lines(stream, 8 << 20)))
    assert count == 3
    assert peak < 48 << 20
    stream: Any = _Endless(b'[{"a":1},{"b":"', 512, b'"},{"c":1}]')
    count, peak = peak_of(lambda: sum(1 for _ in json_files.split_elements(stream, "a.json", 8 << 20)))
    assert count == 3
    assert peak < 64 << 20


def test_record_that_is_too_long_is_counted_by_a_build(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "x" * 5000}]}
    limits = {"limits": {"max_record_bytes": LIMIT}}
    built = Workspace(tmp_path).one("a.jsonl", [chat(1), row, chat(2)], source=limits).build()

    assert (built.rejects(), built.kept()) == ([(1, "too_long_record")], [0, 2])


def test_header_of_many_columns_is_read_and_one_that_names_them_twice_names_them(tmp_path: Path) -> None:
    """A quadratic check of names would not end in reasonable time."""
    (tmp_path / "a.csv").write_text(",".join(f"c{n}" for n in range(400_000)) + "\n")
    assert scan_one(tmp_path / "a.csv").records == 0
    (tmp_path / "a.csv").write_text("a,b,a,c,b\n")
    with pytest.raises(SchemaError, match=r"the header names 'a', 'b' more than once"):
        scan_one(tmp_path / "a.csv")


def test_rows_of_a_hugging_face_dataset_that_are_too_long_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/train.jsonl").write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS))
    source = HuggingFaceSource(id="set", limits=Limits(max_record_bytes=LIMIT))
    found = records(scan_source(source, tmp_path, stager(tmp_path), {}), tmp_path)

    assert told(found) == [ROWS[0], too_long(len(LONG)), ROWS[2]]
