"""Files and datasets to parts to raw records: invariants of parts, every kind of file, every codec."""

import bz2
import csv
import datetime as dt
import decimal
import gzip
import io
import json
import lzma
import math
import os
import re
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate, groupby
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.core.config import Config, validate_options
from rowmill.core.errors import ConfigError, SourceError
from rowmill.core.storage import Store
from rowmill.sources import (
    Files,
    FileScan,
    GeneratedSource,
    HuggingFaceSource,
    Source,
    StoreStager,
    find_files,
    json_files,
    number_equal_parts,
    plain_text,
    public_url,
    read_records,
    scan_source,
)
from rowmill.sources.options import Limits, SampleBy
from rowmill.sources.parts import PartContent, cut_lines, cut_rows, part_bytes, part_rows
from rowmill.sources.urls import expand_braces
from tests.support.source_files import reasons, records, scan_content, scan_files, stager, values
from tests.support.tiers import draw

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
    ".zstd": zstandard.compress,
}


pytestmark = pytest.mark.usefixtures("small_parts")

NO_LIMIT = 1 << 60


class Holder(Config):
    """A model with a source in it, as a dataset has one."""

    source: Source


def validated(**source: Any) -> Files | HuggingFaceSource:
    found = Holder.model_validate({"source": source}).source
    assert not isinstance(found, GeneratedSource)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty folder for source files."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


# Options


@pytest.mark.parametrize(
    ("given_source", "kind"),
    [
        ({"train_urls": ["a.jsonl"]}, Files),
        ({"validation_urls": ["a.jsonl"]}, Files),
        ({"kind": "files", "train_urls": ["a.jsonl"]}, Files),
        ({"id": "owner/name"}, HuggingFaceSource),
        ({"kind": "huggingface", "id": "owner/name", "stream": False}, HuggingFaceSource),
    ],
)
def test_source_kind_follows_from_its_fields(given_source: dict[str, Any], kind: type) -> None:
    assert type(validated(**given_source)) is kind


def test_source_survives_its_own_dump() -> None:
    for source in (validated(train_urls=["a.jsonl"], tags=["x"]), validated(id="a/b", stream=False)):
        assert Holder.model_validate({"source": source.model_dump()}).source == source
        assert Holder(source=source).source == source
    assert validated(id="a/b", stream=False) == HuggingFaceSource(id="a/b", streaming=False)


@pytest.mark.parametrize(
    ("given_source", "words"),
    [
        ({}, ["names no data", "train_urls"]),
        ({"kind": "filez", "train_urls": ["a.jsonl"]}, ["filez", "files", "huggingface"]),
        ({"id": "a/b", "train_urls": ["a.jsonl"]}, ["train_urls"]),
        ({"train_urls": ["a.jsonl"], "revision": "main"}, ["revision"]),
        ({"train_urls": "a.jsonl"}, ["train_urls", "a string"]),
        ({"train_urls": ["data/{a,b}/*.jsn"]}, ["'data/a/*.jsn'", ".jsonl", ".parquet", ".zst"]),
        ({"train_urls": ["a.jsonl.rar"]}, [".jsonl.rar", ".gz"]),
        ({"id": ""}, ["id"]),
    ],
)
def test_invalid_source_is_refused_at_load(given_source: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_options(Holder, {"source": given_source}, "datasets.x")
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    "url", ["data/v1.2/", "data/part-*", "data/x.json*", "https://host/a.jsonl?download=1", "A.JSONL"]
)
def test_url_whose_suffix_is_known_or_cannot_be_told_passes(url: str) -> None:
    assert Files(train_urls=[url]).train_urls == [url]


# Finding files


@pytest.mark.parametrize(
    ("pattern", "expanded"),
    [
        (
            "s3://b/{x,y}/p-{0..1}.jsonl",
            ["s3://b/x/p-0.jsonl", "s3://b/x/p-1.jsonl", "s3://b/y/p-0.jsonl", "s3://b/y/p-1.jsonl"],
        ),
        ("p-{08..11}", ["p-08", "p-09", "p-10", "p-11"]),
        ("p-{2..0}", ["p-2", "p-1", "p-0"]),
        ("{z,a}{1,}", ["z1", "z", "a1", "a"]),
        ("{a,{b,c{1..2}},d}", ["a", "b", "c1", "c2", "d"]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{a}{}", ["{a}{}"]),
        ("{a,b", ["{a,b"]),
        ("a}{b,c}", ["a}b", "a}c"]),
        ("{x{a,b}}", ["{xa}", "{xb}"]),
        ("plain", ["plain"]),
    ],
)
def test_braces_expand_in_the_order_written(pattern: str, expanded: list[str]) -> None:
    assert expand_braces(pattern) == expanded


def test_too_many_braces_are_refused() -> None:
    with pytest.raises(ConfigError, match="100,000"):
        expand_braces("{0..9999}{0..9999}")


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names(folder: Path, *urls: str) -> list[str]:
    return [file.url for file in find_files(Files(train_urls=list(urls)), folder)]


def test_globs_sort_by_code_point_and_match_files_only(folder: Path) -> None:
    touch(folder, "b.jsonl", "a.jsonl", "Z.jsonl", "é.jsonl", "10.jsonl", "9.jsonl", "c.jsonl/README.md")

    assert names(folder, "*.jsonl") == ["10.jsonl", "9.jsonl", "Z.jsonl", "a.jsonl", "b.jsonl", "é.jsonl"]
    assert names(folder, "b.jsonl", "[aZ].jsonl") == ["b.jsonl", "Z.jsonl", "a.jsonl"]
    touch(folder, "a[1].jsonl")
    assert names(folder, "a[1].jsonl") == ["a[1].jsonl"]


def test_folder_means_its_data_files_at_any_depth(folder: Path) -> None:
    touch(folder, "in/b.jsonl", "in/a/c.csv.gz", "in/README.md", "in/_tmp/d.jsonl", "in/.e.jsonl", "in2/f.txt")
    assert names(folder, "in") == ["in/a/c.csv.gz", "in/b.jsonl"]
    assert names(folder, "in*/") == ["in/a/c.csv.gz", "in/b.jsonl", "in2/f.txt"]
    assert names(folder, str(folder / "in2")) == [str(folder / "in2/f.txt")]


def test_all_urls_without_files_are_listed_at_once(folder: Path) -> None:
    touch(folder, "a.jsonl")
    (folder / "empty").mkdir()

    with pytest.raises(SourceError) as caught:
        names(folder, "{a,b}.jsonl", "no/*.csv", "empty", "memory://nowhere/x.jsonl")

    for miss in ("b.jsonl, ", "no/*.csv, ", "empty, ", "memory://nowhere/x.jsonl"):
        assert miss in str(caught.value)
    assert "a.jsonl" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"train_urls": ["a.jsonl", "*.jsonl"]}, r"a\.jsonl"),
        ({"train_urls": ["a.jsonl", "./a.jsonl"]}, r"a\.jsonl"),
        ({"train_urls": ["a.jsonl", "link.jsonl"]}, r"a\.jsonl"),
        ({"train_urls": ["a.jsonl"], "validation_urls": ["a.jsonl"]}, "already named"),
        ({"train_urls": ["other/*"]}, r"a\.md"),
        ({"train_urls": ["nosuch://host/a.jsonl"]}, "nosuch"),
    ],
)
def test_urls_that_name_a_file_twice_or_what_cannot_be_read_are_refused(
    folder: Path, source: dict[str, Any], message: str
) -> None:
    touch(folder, "a.jsonl", "other/a.md")
    (folder / "link.jsonl").symlink_to("a.jsonl")
    with pytest.raises(ConfigError, match=message):
        find_files(Files(**source), folder)


def test_validation_urls_give_every_file_its_split(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"a":1}\n')
    (folder / "b.jsonl").write_text('{"b":1}\n')
    both = scan_files(folder, "a.jsonl", validation_urls=["b.jsonl"])
    alone = scan_files(folder, "a.jsonl", known={both[0].url: both[0]})

    assert [(one.split_hint, one.parts[0].split_hint) for one in both] == [("train",) * 2, ("validation",) * 2]
    assert (alone[0].split_hint, alone[0].parts[0].split_hint) == (None, None)


# Parts


LINES = st.lists(st.integers(0, 120_000).flatmap(lambda n: st.sampled_from([n, n % 100])), max_size=30)


def text_of(lengths: list[int], *, ends: bool) -> bytes:
    lines = [(str(number) * length)[:length].encode() for number, length in enumerate(lengths)]
    return b"\n".join(lines) + (b"\n" if ends and lines else b"")


def sliced(content: bytes) -> list[PartContent]:
    return list(cut_lines(io.BytesIO(content), NO_LIMIT))


@settings(max_examples=draw(60), deadline=None)
@given(LINES, st.booleans())
def test_parts_of_lines_joined_are_the_file(lengths: list[int], ends: bool) -> None:
    content = text_of(lengths, ends=ends)
    parts = sliced(content)

    assert b"".join(part.content for part in parts) == content
    assert sum(part.records for part in parts) == sum(1 for length in lengths if length)
    offset, line, record = 0, 1, 1
    for part in parts:
        assert (part.offset, part.first_line, part.first_record) == (offset, line, record)
        assert part.length == len(part.content) > 0
        offset, line, record = offset + part.length, line + part.content.count(b"\n"), record + part.records
    for part in parts[:-1]:
        assert part.content.endswith(b"\n")
        assert part.length >= part_bytes(part.offset)
        assert b"\n" not in part.content[part_bytes(part.offset) - 1 : -1]


@settings(max_examples=draw(60), deadline=None)
@given(LINES, LINES)
def test_lines_appended_change_no_finished_part(before: list[int], after: list[int]) -> None:
    old = text_of(before, ends=True)
    parts, grown = sliced(old), sliced(old + text_of(after, ends=False))
    finished = [part for part in parts if part.length >= part_bytes(part.offset)]
    assert len(finished) >= len(parts) - 1
    assert grown[: len(finished)] == finished


@settings(max_examples=draw(40), deadline=None)
@given(st.integers(0, 3000), st.integers(0, 3000))
def test_rows_appended_change_no_finished_part(before: int, after: int) -> None:
    rows = [b"%d" % number for number in range(before + after)]
    parts, grown = list(cut_rows(rows[:before], NO_LIMIT)), list(cut_rows(rows, NO_LIMIT))
    finished = [part for part in parts if part.records == part_rows(part.offset)]
    assert len(finished) >= len(parts) - 1
    assert grown[: len(finished)] == finished
    assert b"".join(part.content for part in grown) == b"".join(row + b"\n" for row in rows)


def test_parts_of_long_rows_stay_within_memory() -> None:
    parts = list(cut_rows((b"x" * (3 << 20) for _ in range(20)), NO_LIMIT))
    assert [part.records for part in parts] == [6, 6, 6, 2]


def test_equal_parts_are_numbered_in_recipe_order(folder: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.jsonl"):
        (folder / name).write_text('{"same": 1}\n')
    scans = scan_files(folder, "b.jsonl", "a.jsonl", "c.jsonl")
    first = scans[0].parts[0].sha256[:16]
    assert [one.parts[0].part_id for one in scans] == [first, f"{first}~2", f"{first}~3"]
    assert number_equal_parts(scans) == scans


def test_scan_survives_json(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    pq.write_table(pa.table({"x": [1, 2]}), folder / "b.parquet")
    for one in scan_files(folder):
        assert FileScan.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_same_content_has_the_same_parts_plain_or_compressed(folder: Path) -> None:
    content = b"".join(b'{"n": %d, "pad": "%s"}\n' % (number, b"-" * 900) for number in range(600))
    (folder / "a.jsonl").write_bytes(content)
    for suffix, compress in COMPRESS.items():
        (folder / f"a.jsonl{suffix}").write_bytes(compress(content))
    plain, *packed = scan_files(folder)

    assert len(plain.parts) > 3
    for one in packed:
        assert [(part.sha256, part.offset, part.length) for part in one.parts] == [
            (part.sha256, part.offset, part.length) for part in plain.parts
        ]


# Known scans


def known_of(scans: list[FileScan]) -> dict[str, FileScan]:
    return {one.url: FileScan.from_json(one.to_json()) for one in scans}


def test_unmoved_file_is_read_again_only_without_its_copy_or_when_it_is_cut_otherwise(folder: Path) -> None:
    (folder / "a.txt").write_text("one\ntwo\n")
    (folder / "b.jsonl").write_text('{"b": 1}\n')
    scans = scan_files(folder)

    def refuse(name: str, content: bytes) -> str:
        raise AssertionError(f"{name} is staged again: {content!r}")

    assert scan_source(Files(train_urls=["."]), folder, refuse, known_of(scans)) == scans
    staged = scans[0].parts[0].staged
    assert staged is not None
    Path(staged).unlink()
    assert values(scan_files(folder, known=known_of(scans)), folder) == [{"text": "one\ntwo\n"}, {"b": 1}]
    by_line = scan_files(folder, sample_by="line")
    whole = scan_files(folder, known=known_of(by_line))
    assert values(by_line, folder) == [{"text": "one"}, {"text": "two"}, {"b": 1}]
    assert values(whole, folder) == [{"text": "one\ntwo\n"}, {"b": 1}]
    assert whole[1] == by_line[1]


def test_moved_file_is_read_again(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"a": 1}\n')
    before = scan_files(folder)
    facts = (folder / "a.jsonl").stat()
    (folder / "a.jsonl").write_text('{"a": 2}\n')
    os.utime(folder / "a.jsonl", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    after = scan_files(folder, known=known_of(before))

    assert values(after, folder) == [{"a": 2}]


# Texts


def texts_in(folder: Path, content: bytes, sample_by: SampleBy) -> list[tuple[int, str]]:
    """Return the texts of a file with their lines, and the lines of blank ones with the reason."""
    (folder / "a.txt").write_bytes(content)
    found = records(scan_files(folder, sample_by=sample_by), folder)
    assert [one.number for one in found] == list(range(len(found)))
    said = [(one.line, one.value["text"]) for one in found if one.value]
    return sorted([*said, *((one.line, one.rejected.reason) for one in found if one.rejected)])


BLANK_LINES = [(number, "blank") for number in (4, 5)]


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("line", [(1, "A"), (2, " b"), (3, "blank"), *BLANK_LINES, (6, "c\u3000"), (7, "blank"), (8, "d")]),
        ("paragraph", [(1, "A\n b"), *BLANK_LINES, (6, "c\u3000"), (8, "d")]),
        ("document", []),
    ],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "end"])
def test_text_file_is_cut_into_lines_paragraphs_or_one_document(
    folder: Path, sample_by: SampleBy, expected: list[tuple[int, str]], line_end: str, last: str
) -> None:
    text = "A\n b\n\n \t\n\nc\u3000\n\nd" + ("\n" if last else "")
    found = texts_in(folder, text.replace("\n", line_end).encode(), sample_by)
    assert found == ([(1, text)] if sample_by == "document" else expected)


@pytest.mark.parametrize("sample_by", ["line", "paragraph", "document"])
def test_texts_are_those_of_the_text_builder_of_datasets(folder: Path, sample_by: SampleBy) -> None:
    import datasets

    content = "Act I\nScene I\n\nFirst Citizen:\nBefore we proceed\n\nAll:\nSpeak.\n"
    ours = [text for _, text in texts_in(folder, content.encode(), sample_by) if text != "blank"]
    file, cache = str(folder / "a.txt"), str(folder.parent / "cache")
    rows = datasets.load_dataset("text", data_files=file, sample_by=sample_by, split="train", cache_dir=cache)
    theirs = [text for text in rows["text"] if text.strip()]
    # Their last paragraph keeps the file's line end.
    assert ours == ([text.removesuffix("\n") for text in theirs] if sample_by == "paragraph" else theirs)


@settings(max_examples=draw(60), deadline=None)
@given(st.lists(st.sampled_from(["", " ", "\r", "a", "b c", "x" * 70_000]), max_size=12), st.booleans())
def test_parts_of_a_text_file_hold_the_same_texts_wherever_they_are_cut(lines: list[str], ends: bool) -> None:
    content = "\n".join(lines) + "\n" * ends
    whole = [line.removesuffix("\r") for line in content.split("\n")]
    said = [line for line in whole if line.strip(" \t\r")]
    blocks = ["\n".join(block) for says, block in groupby(whole, key=lambda line: bool(line.strip(" \t\r"))) if says]

    for sample_by in ("line", "paragraph"):
        parts = list(plain_text.cut_plain_text(io.BytesIO(content.encode()), "a.txt", sample_by, Limits()))
        texts = [orjson.loads(line)["text"] for part in parts for line in part.content.splitlines() if line]

        # Every nonblank line is in one text, in order; every part begins where the previous one ended.
        assert [line for text in texts for line in text.split("\n") if line.strip(" \t\r")] == said
        assert [part.offset for part in parts] == list(accumulate([0, *(part.length for part in parts)]))[:-1]
        assert sum(part.length for part in parts) == len(content)
        assert [part.first_record for part in parts] == list(accumulate([1, *(part.records for part in parts)]))[:-1]
        if sample_by == "paragraph":
            assert [text for text in texts if text.strip()] == blocks


def test_paragraphs_appended_change_no_finished_part() -> None:
    paragraphs = [f"{number} " + "word " * (number % 90) + "\n" * (number % 4 + 1) for number in range(9_000)]
    content = "".join(paragraphs).encode()

    for kept in (len(content) // 3, len(content) // 2):
        parts = list(plain_text.cut_plain_text(io.BytesIO(content[:kept]), "a.txt", "paragraph", Limits()))
        grown = list(plain_text.cut_plain_text(io.BytesIO(content), "a.txt", "paragraph", Limits()))

        assert len(parts) > 3
        assert grown[: len(parts) - 1] == parts[:-1]


@pytest.mark.parametrize(("sample_by", "finer"), [("document", "paragraph or line"), ("paragraph", "line")])
def test_oversized_text_is_an_error_with_the_limit(
    folder: Path, sample_by: SampleBy, finer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_text, "TEXT_LIMIT_BYTES", 3 << 20)
    (folder / "a.txt").write_bytes(b"four megabytes in lines\n" * (4 << 20 >> 4))

    with pytest.raises(SourceError, match=r"^a\.txt: has a ") as caught:
        scan_files(folder, "a.txt", sample_by=sample_by)

    assert "at most 3,145,728 are allowed" in str(caught.value)
    assert f"set source.sample_by to {finer}, or" in str(caught.value)
    assert scan_files(folder, sample_by="line")[0].records == 4 << 20 >> 4


@pytest.mark.parametrize("urls", [["a.jsonl"], ["a.{csv,parquet.zst}"]])
def test_sample_by_without_a_text_file_is_refused(urls: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"sample_by: line applies to \.txt files only, and no URL names one"):
        validate_options(Holder, {"source": {"train_urls": urls, "sample_by": "line"}}, "datasets.x")
    for other in ("a.txt.gz", "data/", "data/*"):
        assert Files(train_urls=[*urls, other], sample_by="line").sample_by == "line"


# Reading


def test_only_a_line_feed_ends_a_line(folder: Path) -> None:
    odd = "\u2028\u2029\u0085\x0b\x0c"
    lines_file = scan_content(folder, "a.jsonl", '{"a":"' + odd[:3] + '"}\r\n\n \t\r\n{"b":\r1}\n{"c":3}')
    texts_file = scan_content(folder, "b.txt", f"x{odd}y\r\n\n  z\r\r\n", sample_by="line")
    lines, texts = records([lines_file], folder), records([texts_file], folder)
    places = [(one.number, one.line, one.value) for one in lines]
    assert places == [(0, 1, {"a": odd[:3]}), (1, 4, {"b": 1}), (2, 5, {"c": 3})]
    assert [(one.line, one.value) for one in texts] == [(1, {"text": f"x{odd}y"}), (2, None), (3, {"text": "  z\r"})]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "array.json", "a.txt", "a.csv", "a.jsonl.gz"])
def test_byte_order_mark_at_the_start_is_no_text(folder: Path, name: str) -> None:
    content = {"array.json": b'[{"text":"x"}]', "a.txt": b"x", "a.csv": b"text\nx"}.get(name, b'{"text":"x"}')
    content = b"\xef\xbb\xbf" + content
    scan = scan_content(folder, name, gzip.compress(content) if name.endswith(".gz") else content)
    assert values([scan], folder) == [{"text": "x"}]


LONG_TEXT = "ä" * (5 << 20)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", f'{{"n":1}}\n{{"text":"{LONG_TEXT}"}}\n{{"n":2}}\n', [{"n": 1}, {"text": LONG_TEXT}, {"n": 2}]),
        (
            "a.jsonl",
            f'{{"n": 1}}\n{{"n": {"9" * 4300}}}\n{{"n": 1{"0" * 20}.5e-20}}\n',
            [{"n": 1}, {"n": int("9" * 4300)}, {"n": 1.0}],
        ),
        (
            "a.csv",
            'id,x,y\r\n01234,1e5,"a ""b"", c"\r\n\r\nNA,,true\r\n',
            [{"id": "01234", "x": "1e5", "y": 'a "b", c'}, {"id": "NA", "x": "", "y": "true"}],
        ),
        ("a.csv", "text\n" + "x" * 300_000 + "\n", [{"text": "x" * 300_000}]),
    ],
    ids=[
        "a line of ten megabytes is one record",
        "an integer of thousands of digits is exact",
        "cells of CSV are not guessed at",
        "a cell of CSV beyond the parser's own limit is read",
    ],
)
def test_value_is_read_as_it_was_written(folder: Path, name: str, content: str, expected: list[Any]) -> None:
    assert values([scan_content(folder, name, content)], folder) == expected


def test_line_numbers_run_on_through_the_parts(folder: Path) -> None:
    rows = [b"" if n % 7 == 3 else b'{"line": %d, "pad": "%s"}' % (n + 1, b"." * 500) for n in range(999)]
    (folder / "a.jsonl").write_bytes(b"\n".join(rows))
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(b"\n".join(rows)))

    for one in scan_files(folder):
        assert len(one.parts) > 3
        found = records([one], folder)
        assert [record.line for record in found] == [record.value and record.value["line"] for record in found]
        assert len(found) == one.records == sum(1 for row in rows if row)
        numbers = [[record.number for record in read_records(part, folder)] for part in one.parts]
        assert numbers == [list(range(part.records)) for part in one.parts]


INTEGERS = st.integers(-(10**40), 10**40) | st.integers(-(2**63) - 2, -(2**63) + 2) | st.integers(2**64 - 2, 2**64 + 2)


@pytest.mark.slow
@settings(max_examples=draw(200), deadline=None)
@given(st.lists(st.fixed_dictionaries({"n": INTEGERS, "t": st.text(max_size=9) | INTEGERS.map(str)}), max_size=5))
def test_integers_of_any_size_are_read_exactly(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("ints", numbered=True)
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert values(scan_files(folder), folder) == rows


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
RECORDS = st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=4), max_size=6)


@pytest.mark.slow
@settings(max_examples=draw(100), deadline=None)
@given(RECORDS, st.sampled_from([None, 0, 2]), st.booleans())
def test_json_list_in_any_layout_gives_its_elements(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], indent: int | None, ascii_only: bool
) -> None:
    folder = tmp_path_factory.mktemp("array", numbered=True)
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    (folder / "a.json").write_text(f"\n {text} \n", encoding="utf-8")
    (one,) = scan_files(folder)

    assert one.reader == "json_array"
    assert values([one], folder) == rows
    assert [record.line for record in records([one], folder)] == list(range(1, len(rows) + 1))


@pytest.mark.parametrize(
    "element", ['"a\\\\"', '"\\\\\\""', '"],["', '{"x":"}"}', "[[],{}]", '""', "-1.5e3", '"\\\\\\\\\\""']
)
def test_list_elements_with_brackets_and_escapes_across_blocks_stay_whole(element: str) -> None:
    """The stream gives one byte at a time, so every position is a block's end once."""

    class Dripping(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(1, size or 0))

    text = f'[{element}, {element},{{"k": [{element}]}}]'
    found = list(json_files.split_elements(Dripping(text.encode()), "a.json", NO_LIMIT))

    assert found == [element.encode(), element.encode(), f'{{"k": [{element}]}}'.encode()]


@pytest.mark.slow
def test_list_of_any_size_is_split_in_flat_memory() -> None:
    """64 MB of list pass through less than 16 MB of memory."""
    row = orjson.dumps({"messages": [{"role": "user", "content": 'say "[hi]" ' * 90}] * 64})

    class Generated(io.BytesIO):
        pieces = iter([b"[" + row, *[b"," + row] * 998, b"]"])

        def read(self, size: int | None = -1, /) -> bytes:
            return next(self.pieces, b"")

    tracemalloc.start()
    count = sum(1 for _ in json_files.split_elements(Generated(), "a.json", NO_LIMIT))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert count == 999
    assert peak < 16 << 20


@pytest.mark.parametrize(
    ("text", "reader", "expected"),
    [
        (' \n[\n{"a": 1},\n{"a": 2}]', "json_array", [{"a": 1}, {"a": 2}]),
        ('{"a": 1}\n{"a": 2}\n', "json_lines", [{"a": 1}, {"a": 2}]),
        ('\n\n{"a": 1}\n{"a": 2}', "json_lines", [{"a": 1}, {"a": 2}]),
        ('{"a": 1}', "json_lines", [{"a": 1}]),
        ('{\n  "a": "x\\n y",\n  "b": [\n]}\n', "json_value", [{"a": "x\n y", "b": []}]),
        ("[]", "json_array", []),
        ("[ ]\n", "json_array", []),
        ("", "json_lines", []),
    ],
)
def test_json_suffix_is_looked_into(folder: Path, text: str, reader: str, expected: list[Any]) -> None:
    scan = scan_content(folder, "a.json", text)
    assert (scan.reader, values([scan], folder), scan.records) == (reader, expected, len(expected))


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)
"""No NUL: the standard library's writer and reader disagree about it."""


@pytest.mark.slow
@settings(max_examples=draw(100), deadline=None)
@given(
    st.lists(st.tuples(CELLS, CELLS, st.just("01.50")), max_size=6), st.sampled_from([(",", ".csv"), ("\t", ".tsv")])
)
def test_cells_stay_the_text_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str]], dialect: tuple[str, str]
) -> None:
    folder = tmp_path_factory.mktemp("cells", numbered=True)
    with open(folder / f"a{dialect[1]}", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=dialect[0], quoting=csv.QUOTE_ALL)
        writer.writerows([("k", "ü v", "n"), *rows])

    assert values(scan_files(folder), folder) == [dict(zip(("k", "ü v", "n"), row, strict=True)) for row in rows]


ARROW = pa.table(
    {
        "dec": pa.array([decimal.Decimal("42.50"), None], pa.decimal128(9, 2)),
        "utc": pa.array([dt.datetime(2024, 1, 15, tzinfo=dt.UTC), None], pa.timestamp("us", "+02:00")),
        "ns": pa.array([1, 0], pa.timestamp("ns")),
        "day": pa.array([dt.date(2024, 1, 15), None]),
        "long": pa.array([90, None], pa.duration("s")),
        "short": pa.array([-1, 1], pa.duration("ns")),
        "raw": pa.array([b"\x00\x01", None]),
        "nan": pa.array([math.nan, 0.5]),
        "big": pa.array([2**64 - 1, 0], pa.uint64()),
        "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int32())),
        "nest": pa.array([[{"a": 1}], [{"b": "x"}]]),
        "json": pa.array(['{"x": null}', None], pa.json_()),
    }
)


def test_every_arrow_type_has_one_text(folder: Path) -> None:
    pq.write_table(ARROW, folder / "a.parquet")
    [one] = scan_files(folder)
    first, second = records([one], folder)

    assert first.raw == (
        b'{"dec":42.50,"utc":"2024-01-15T02:00:00+02:00","ns":"1970-01-01T00:00:00.000000001","day":"2024-01-15",'
        b'"long":90,"short":-0.000000001,"raw":"AAE=","nan":null,"big":18446744073709551615,"map":[["k",1]],'
        b'"nest":[{"a":1,"b":null}],"json":{"x": null}}'
    )
    assert second.value is not None
    assert (second.value["nest"], second.value["short"]) == ([{"a": None, "b": "x"}], 1e-9)
    assert all(part.arrow for part in one.parts)
    assert one.columns is not None
    assert one.columns["dec"] == "decimal128(9, 2)"


def test_parquet_parts_do_not_depend_on_row_groups(folder: Path) -> None:
    table = pa.table({"n": list(range(3000))})
    pq.write_table(table, folder / "a.parquet", row_group_size=3000)
    pq.write_table(table, folder / "b.parquet", row_group_size=7)
    (folder / "c.parquet.gz").write_bytes(gzip.compress((folder / "a.parquet").read_bytes()))
    scans = scan_files(folder)

    assert len({tuple(part.sha256 for part in one.parts) for one in scans}) == 1
    assert [part.records for part in scans[0].parts] == [1024, 1024, 952]
    assert values(scans[:1], folder) == [{"n": number} for number in range(3000)]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt", "b.json"])
def test_compressed_file_gives_the_records_of_the_plain_one(folder: Path, name: str, suffix: str) -> None:
    rows = [f'{{"n":{number},"t":"ü,\\t{number}"}}' for number in range(2000)]
    cells = "\n".join(f'ü {number},"say ""{number}"""' for number in range(2000))
    text = {"b.json": f"[{', '.join(rows)}]", "a.csv": cells, "a.tsv": cells}.get(name, "\n".join(rows)).encode()
    (folder / name).write_bytes(text)
    expected = records(scan_files(folder, sample_by="line"), folder)
    (folder / name).unlink()
    # Two members, one after the other, as `cat a.gz b.gz` makes them.
    half, pack = len(text) // 2, COMPRESS[suffix]
    (folder / (name + suffix)).write_bytes(pack(text[:half]) + pack(text[half:]))

    assert records(scan_files(folder, sample_by="line"), folder) == expected
    assert len(expected) > 1900


def test_plain_json_lines_are_read_in_place_and_all_else_is_staged_by_content(folder: Path) -> None:
    for name in ("a.jsonl", "b.json", "c.txt"):
        (folder / name).write_text('{"a": 1}\n')
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n'))
    (folder / "e.json").write_text('[{"a": null}]\n')
    scans = scan_files(folder)

    assert [(one.parts[0].staged is None, one.parts[0].arrow) for one in scans] == [
        *[(True, False)] * 2,
        *[(False, False)] * 3,
    ]
    staged = sorted(path.name for path in (folder / ".stage/raw").iterdir())
    assert staged == sorted({f"{one.parts[0].sha256}.jsonl" for one in scans[2:]})


@pytest.fixture
def memory() -> Iterator[Any]:
    """Return fsspec's file system in memory, emptied afterwards."""
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/", recursive=True)


@pytest.mark.slow
def test_remote_files_are_found_staged_and_read(memory: Any, tmp_path: Path) -> None:
    memory.pipe("/bucket/x/p-0.jsonl", b'{"a": 1}\n{"a": 2}\n' * 9000)
    memory.pipe("/bucket/x/p-1.jsonl", b'{"a": 3}\n')
    memory.pipe("/bucket/y/q.csv.gz", gzip.compress(b"a\n4\n"))
    memory.pipe("/bucket/y/README.md", b"no data")
    stage = StoreStager(Store("memory://out"), "raw")
    source = Files(train_urls=["memory://bucket/x/p-{1..1}.jsonl", "memory://bucket/x/*0.jsonl", "memory://bucket/y"])
    scans = scan_source(source, tmp_path, stage, {})
    again = scan_source(source, tmp_path, stage, known_of(scans))

    assert [one.records for one in scans] == [1, 18000, 1]
    assert len(scans[1].parts) > 1
    assert [part.staged is None for one in scans for part in one.parts][-2:] == [True, False]
    assert values(scans, tmp_path) == [{"a": 3}, *([{"a": 1}, {"a": 2}] * 9000), {"a": "4"}]
    assert again == scans
    memory.pipe("/bucket/x/p-1.jsonl", b'{"a": 5}\n')
    assert values(scan_source(source, tmp_path, stage, known_of(scans))[:1], tmp_path) == [{"a": 5}]


class _Served(SimpleHTTPRequestHandler):
    """Serves a folder without logging; unknown names are 404."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is the base class's)
        del format, args


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Serve a folder over HTTP on this machine; return the address and the folder."""
    pytest.importorskip("aiohttp", reason="web addresses need aiohttp: pip install 'rowmill[http]'")
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Served, directory=str(folder))) as http:
        thread = Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", folder
        http.shutdown()
        thread.join(timeout=60)


@pytest.mark.slow
def test_web_addresses_are_read_and_changed_ones_again(server: tuple[str, Path], tmp_path: Path) -> None:
    address, folder = server
    (folder / "a.jsonl").write_bytes(b'{"a": 1}\n{"a": 2}\n')
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"a": 3}\n'))
    signed = f"{address}/{{a.jsonl,b.jsonl.gz}}?download=1"
    scans = scan_files(tmp_path, f"{address}/a.jsonl?download=1", f"{address}/b.jsonl.gz")

    assert [one.url for one in scans] == [public_url(f"{address}/a.jsonl?download=1"), f"{address}/b.jsonl.gz"]
    assert values(scans, tmp_path) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert expand_braces(signed) == [f"{address}/a.jsonl?download=1", f"{address}/b.jsonl.gz?download=1"]
    (folder / "a.jsonl").write_bytes(b'{"a": 9}\n')
    assert values(scan_files(tmp_path, signed, known=known_of(scans)), tmp_path) == [{"a": 9}, {"a": 3}]
    with pytest.raises(SourceError, match=r"nothing\.jsonl"):
        find_files(Files(train_urls=[f"{address}/nothing.jsonl"]), tmp_path)


# Hugging Face


CHATS = [
    {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b, "calls": [call]}], "n": n}
    for n, a, b, call in [(1, "a", "b", {"x": 1}), (2, "c", "d", {"y": "z"})]
]


@pytest.fixture
def dataset(folder: Path) -> Path:
    """Return a folder that the `datasets` library can load: three splits of JSON Lines."""
    (folder / "set").mkdir()
    for split, rows in (("train", CHATS * 700), ("validation", CHATS[:1]), ("test", CHATS[1:])):
        (folder / f"set/{split}.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return folder


def scan_hub(base: Path, known: dict[str, FileScan] | None = None, **options: Any) -> list[FileScan]:
    return scan_source(HuggingFaceSource(id="set", **options), base, stager(base), known or {})


def test_hugging_face_folder_gives_the_rows_of_its_splits_or_of_those_that_are_named(dataset: Path) -> None:
    train, held = scan_hub(dataset)

    assert values([train], dataset) == CHATS * 700
    assert values([held], dataset) == CHATS[:1]
    assert (train.split_hint, held.split_hint) == ("train", "validation")
    assert [part.records for part in train.parts] == [1024, 376]
    assert all(part.arrow and part.staged for one in (train, held) for part in one.parts)
    train, held = scan_hub(dataset, split="test", validation_split="train")
    assert values([train], dataset) == CHATS[1:]
    assert held.records == 1400
    with pytest.raises(SourceError, match="no split 'training'; it has train, validation or test"):
        scan_hub(dataset, split="training")
    with pytest.raises(SourceError, match="no split 'dev'; it has train, validation or test"):
        scan_hub(dataset, validation_split="dev")


@pytest.mark.slow
def test_hugging_face_streamed_or_not_gives_the_same_bytes(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(dataset.parent / "cache"))
    assert scan_hub(dataset, streaming=True) == scan_hub(dataset, streaming=False)


@pytest.mark.slow
def test_hugging_face_splits_that_change_places_are_what_the_recipe_says_now(dataset: Path) -> None:
    known = known_of(scan_hub(dataset, split="train", validation_split="test"))
    swapped = scan_hub(dataset, split="test", validation_split="train")

    assert scan_hub(dataset, known, split="test", validation_split="train") == swapped
    assert [{part.split_hint for part in scan.parts} for scan in swapped] == [{"train"}, {"validation"}]


@pytest.mark.slow
def test_hugging_face_folder_that_did_not_move_is_not_loaded_again(dataset: Path) -> None:
    scans = scan_hub(dataset)
    alone = scan_hub(dataset, split="test", validation_split="validation")

    assert scan_hub(dataset, known_of(scans)) == scans
    assert scan_hub(dataset, known_of(alone), split="test", validation_split="validation") == alone
    (dataset / "set/validation.jsonl").write_bytes(orjson.dumps(CHATS[1]))
    assert values(scan_hub(dataset, known_of(scans))[1:], dataset) == CHATS[1:]


# Real data


@pytest.mark.slow
@pytest.mark.real_data
def test_real_files_are_read_to_the_last_row(real_data: Path, tmp_path: Path) -> None:
    table = (real_data / "SOURCES.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+\.(?:jsonl|json|parquet|csv|txt)) \|.*?\| \d+ \| (\d+) \|", table, re.MULTILINE)
    source = Files(train_urls=sorted(path for path, _ in rows), sample_by="line")
    scans = scan_source(source, real_data, stager(tmp_path), {})

    assert len(scans) >= 40
    for one in scans:
        found = records([one], real_data)
        assert len(found) == one.records
        assert {*reasons(found)} <= {None, "blank"}
        assert reasons(found).count(None) == int(dict(rows)[one.url])


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("sample_by", "texts", "blank"), [("line", 32_777, 7_223), ("paragraph", 7_222, 2), ("document", 1, 0)]
)
def test_every_line_of_a_real_play_is_in_a_text_or_blank(
    real_data: Path, tmp_path: Path, sample_by: SampleBy, texts: int, blank: int
) -> None:
    content = (real_data / "text/tinyshakespeare.txt").read_text(encoding="utf-8")
    source = Files(train_urls=["text/tinyshakespeare.txt"], sample_by=sample_by)
    found = records(scan_source(source, real_data, stager(tmp_path), {}), real_data)
    said = sum(1 for one in found if one.value)
    assert (said, len(found) - said) == (texts, blank)
    # The separator of texts, and what counts as blank.
    end, blank_text = {"line": ("\n", "\n"), "paragraph": ("\n\n", "\n"), "document": ("", "")}[sample_by]
    joined = "".join(one.value["text"] + end if one.value else blank_text for one in found)
    assert joined.rstrip("\n") == content.rstrip("\n")


@pytest.mark.real_data
@pytest.mark.parametrize(
    "name",
    ["tools/glaive_toolcall_en_demo.json", "preference/dpo_en_demo.json", "chat/fastchat_dummy_conversation.json"],
)
def test_real_list_holds_what_the_standard_library_reads(real_data: Path, tmp_path: Path, name: str) -> None:
    [one] = scan_source(Files(train_urls=[name]), real_data, stager(tmp_path), {})
    assert values([one], real_data) == json.loads((real_data / name).read_text(encoding="utf-8"))
