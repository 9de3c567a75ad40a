"""Encodings of text files: UTF-8 unless a mark or the recipe says otherwise, and one error where neither is true."""

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import zstandard

from rowmill import sources
from rowmill.core.errors import SourceError
from rowmill.sources import Files, FileScan
from tests.support.source_files import scan_content, scan_files, values

TEXTS = ["José, Orléans", "naïve\tcafé", "Zürich", "straße", "piñata", "déjà vu", "søster"]


def read(folder: Path, name: str, content: bytes, **options: Any) -> tuple[FileScan, list[Any]]:
    scan = scan_content(folder, name, content, **options)
    return scan, values([scan], folder)


def written(name: str) -> str:
    if ".jsonl" in name:
        return "".join(json.dumps({"text": one}, ensure_ascii=False) + "\n" for one in TEXTS)
    if name.endswith(".json"):
        return json.dumps([{"text": one} for one in TEXTS], ensure_ascii=False)
    return "text\n" + "".join(f'"{one}"\n' for one in TEXTS)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (gzip.compress(b"{}", mtime=0), r"rename it to end in \.gz"),
        (lzma.compress(b"{}"), r"rename it to end in \.xz"),
        (zstandard.compress(b"{}"), r"rename it to end in \.zst"),
        (b"PAR1\x15\x04", r"rename it to end in \.parquet"),
        (b"ARROW1\0\0", r"rename it to end in \.arrow"),
        (b"PK\x03\x04", "unpack it"),
    ],
)
def test_file_that_is_no_text_says_what_it_is(tmp_path: Path, name: str, content: bytes, remedy: str) -> None:
    with pytest.raises(SourceError, match=remedy):
        read(tmp_path, name, content)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.jsonl.gz"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-be", "latin-1", "cp1252"])
def test_text_is_read_in_its_encoding(tmp_path: Path, name: str, encoding: str) -> None:
    content = written(name).encode(encoding)
    options = {} if encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32") else {"encoding": encoding}
    scan, records = read(tmp_path, name, gzip.compress(content, mtime=0) if name.endswith("gz") else content, **options)

    assert records == [{"text": one} for one in TEXTS]
    is_noted = encoding in ("utf-16", "utf-32")
    assert sources.describe_reading(scan) == ([f"as {encoding.upper()}, not as UTF-8"] if is_noted else [])
    if name == "a.csv":
        assert sources.find_part_line(scan.parts[0], scan, tmp_path, 3) == 5


def test_texts_of_lines_are_read_in_their_encoding_and_damaged_lines_are_rejects(tmp_path: Path) -> None:
    _, texts = read(tmp_path, "a.txt", "\n".join(TEXTS).encode("utf-16"), sample_by="line")
    assert texts == [{"text": one} for one in TEXTS]
    lines = [*(json.dumps({"text": one}, ensure_ascii=False).encode() for one in TEXTS), b'{"text":"\xff"}']
    _, found = read(tmp_path, "a.jsonl", b"\n".join(lines * 3))
    assert found == [*({"text": one} for one in TEXTS), None] * 3


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_file_that_is_clearly_not_utf8_is_one_error_that_names_line_and_option(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceError, match=r"line \d: byte 0xe9 is not UTF-8, .*source\.encoding: latin-1"):
        read(tmp_path, name, written(name).replace("\n", "\n\n").encode("latin-1"))


def test_broken_or_unmarked_utf16_is_one_error_that_names_the_line_or_the_option(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"as in UTF-16 without a mark; .*source\.encoding: utf-16-le"):
        read(tmp_path, "a.csv", "name,age\nann,7\n".encode("utf-16-le"))
    broken = "a\nb\nc\n".encode("utf-16") + b"\x00\xd8" + "\n".encode("utf-16-le")
    with pytest.raises(SourceError, match=r"a\.txt: line 4: is not utf-16 .*; a file has one encoding;"):
        read(tmp_path, "a.txt", broken, sample_by="line")


@pytest.mark.parametrize("name", ["klingon", "base64", ""])
def test_unknown_encodings_and_those_of_other_files_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no encoding; write for example utf-8, utf-16, latin-1 or cp1252"):
        Files(train_urls=["a.csv"], encoding=name)
    for url in ("a.parquet", "folder/x.arrow"):
        with pytest.raises(ValueError, match="encoding: utf-16 applies to text files only, and no URL names one"):
            Files(train_urls=[url], encoding="utf-16")


def test_changed_encoding_reads_the_file_again(tmp_path: Path) -> None:
    scan_content(tmp_path, "a.txt", "Orléans".encode("cp1252"), encoding="cp1252")
    scan = scan_content(tmp_path, "a.txt", "Orléans".encode("cp1252"), encoding="latin-1")

    for encoding, is_known in (("latin-1", True), ("cp1250", False)):
        [again] = scan_files(tmp_path, "a.txt", known={scan.url: scan}, encoding=encoding)
        assert (again == scan) is is_known
