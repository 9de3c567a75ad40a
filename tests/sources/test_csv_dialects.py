"""CSV dialects: detected and configured delimiters and quotes, and line numbers of records.

What belongs here: delimiters, quotes, line numbers. What does not: cells and bad rows (`test_sources.py`).
"""

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rowmill import sources
from rowmill.core.errors import SchemaError
from rowmill.sources import Files, FileScan

WIDE = b"age;work;pay\n" + b"".join(b"%d;x, y;%d,5\n" % (i, i) for i in range(30))


def scanned(folder: Path, content: bytes, name: str = "a.csv", **options: Any) -> FileScan:
    (folder / name).write_bytes(content)
    source = Files.model_validate({"train_urls": [name], **options})

    def stage(at: str, copy: bytes) -> str:
        (folder / at).write_bytes(copy)
        return str(folder / at)

    return sources.scan_source(source, folder, stage, {})[0]


def records_of(scan: FileScan, folder: Path) -> list[Any]:
    return [raw.value for part in scan.parts for raw in sources.read_records(part, folder)]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_delimiter_is_the_one_that_gives_columns_and_is_recorded(tmp_path: Path, delimiter: str, name: str) -> None:
    content = "a;b;c\n1;2;3\n".replace(";", delimiter).encode()

    scan = scanned(tmp_path, content, name)

    assert (scan.delimiter, scan.quote) == (delimiter, '"')
    assert records_of(scan, tmp_path) == [{"a": "1", "b": "2", "c": "3"}]


def test_commas_inside_the_cells_of_another_delimiter_separate_nothing(tmp_path: Path) -> None:
    scan = scanned(tmp_path, WIDE)

    assert scan.delimiter == ";"
    assert records_of(scan, tmp_path)[1] == {"age": "1", "work": "x, y", "pay": "1,5"}


@pytest.mark.parametrize(
    "content",
    [b"text\nwhat; why\nwhen\n", b"text;more\njust prose\nand; more; of it\nno\n", b"a,b\n1;2,3;4\n", b"text\n", b""],
)
def test_delimiter_stays_the_default_if_no_other_gives_even_columns(tmp_path: Path, content: bytes) -> None:
    assert scanned(tmp_path, content).delimiter == ","


def test_configured_delimiter_that_leaves_one_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"a\.csv: is one column with source\.delimiter ',', and 3 columns with ';'"):
        scanned(tmp_path, WIDE, delimiter=",")


def test_header_with_two_possible_delimiters_is_an_error(tmp_path: Path) -> None:
    content = b"name;price, EUR;size\nx;1,5;3\ny;2,5;4\n"

    with pytest.raises(SchemaError, match=r"has 2 columns with ',', 3 columns with ';'; only one can be the delimiter"):
        scanned(tmp_path, content)
    assert scanned(tmp_path, content, delimiter=";").delimiter == ";"


def test_configured_quote_and_delimiter_are_used_and_a_change_reads_the_file_again(tmp_path: Path) -> None:
    scan = scanned(tmp_path, b"a#b\n'x#y'#'2'\n", delimiter="#", quote="'")

    assert records_of(scan, tmp_path) == [{"a": "x#y", "b": "2"}]
    again = Files(train_urls=["a.csv"], delimiter="#", quote='"')
    [other] = sources.scan_source(again, tmp_path, lambda at, _: str(tmp_path / at), {scan.url: scan})
    assert other.quote == '"'


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("line", [b"sep=;\r\n", b"SEP=;\n", b'"sep=;"\n'])
def test_sep_line_of_excel_sets_the_delimiter_and_is_not_a_record(tmp_path: Path, mark: bytes, line: bytes) -> None:
    # The header alone has two commas and one semicolon.
    scan = scanned(tmp_path, mark + line + b"a;b,c,d\n1;x,y,z\n\n2;u\n")

    assert (scan.delimiter, scan.records) == (";", 2)
    assert records_of(scan, tmp_path) == [{"a": "1", "b,c,d": "x,y,z"}, {"a": "2", "b,c,d": "u"}]
    assert [sources.find_part_line(scan.parts[0], scan, tmp_path, row) for row in range(2)] == [3, 5]


def test_sep_line_is_overridden_by_the_recipe_and_by_even_columns(tmp_path: Path) -> None:
    assert scanned(tmp_path, b"sep=;\na,b;c\n1,2;3\n", delimiter=",").delimiter == ","
    assert scanned(tmp_path, b"sep=;\na,b\n1,2\n").delimiter == ","
    assert scanned(tmp_path, b"sep=#\na#b\n1#2\n").delimiter == "#"
    assert records_of(scanned(tmp_path, b"sep=x1,b\n1,2\n"), tmp_path) == [{"sep=x1": "1", "b": "2"}]


@pytest.mark.parametrize(
    "content",
    [
        b"a,b\n'x','1'\n'y','2'\n",
        b"'a','b'\n'x',1\n'y',2\n",
        b"a;b\n'x; and; more';1\ny;2\nz;3\n",
        b"a,b\n1,'Smith, J.'\n2,'Doe, A.'\n",
    ],
)
def test_cells_in_single_quotes_are_refused_unless_configured(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(SchemaError, match=r"a\.csv: its cells stand in single quotes, such as '.*source\.quote: \"'\""):
        scanned(tmp_path, content)
    assert not any("'" in "".join(row.values()) for row in records_of(scanned(tmp_path, content, quote="'"), tmp_path))
    scanned(tmp_path, b"a,b\n'x','1'\n", quote='"')


@pytest.mark.parametrize(
    "content",
    [
        b"a,b\n'tis,1\nrock 'n' roll,2\n",
        b"a,b\n'x',1\ny,2\nz,3\n",
        b"a,b\n\"it's, 'so'\",'x'\n",
        b"text\n'alone'\n",
        b"a,b\nO'Neil,1\n",
    ],
)
def test_apostrophes_are_part_of_the_cells(tmp_path: Path, content: bytes) -> None:
    scan = scanned(tmp_path, content)

    assert scan.quote == '"'
    assert content.count(b"'") == sum("".join(row.values()).count("'") for row in records_of(scan, tmp_path))


def test_scan_from_before_dialect_detection_is_repeated(tmp_path: Path) -> None:
    scan = scanned(tmp_path, b"sep=;\na;b\n1;2\n")
    older = replace(scan, delimiter=",", dialect_version=0)

    [again] = sources.scan_source(
        Files(train_urls=["a.csv"]), tmp_path, lambda at, _: str(tmp_path / at), {scan.url: older}
    )

    assert again == scan


@pytest.mark.parametrize("delimiter", ["", "ab", "\n"])
def test_delimiter_that_is_not_one_character_is_refused(delimiter: str) -> None:
    with pytest.raises(ValueError, match="expected one character other than a line end"):
        Files(train_urls=["a.csv"], delimiter=delimiter)


@pytest.mark.parametrize("option", ["delimiter", "quote"])
def test_dialect_options_for_other_files_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: applies to CSV and TSV files only, and no URL names one"):
        Files.model_validate({"train_urls": ["a.jsonl"], option: ";"})
    Files.model_validate({"train_urls": ["folder/"], option: ";"})


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_record_after_multiline_cells_is_found_on_its_line(tmp_path: Path, name: str) -> None:
    content = b'a,b\n1,"x\ny"\n\n2,z\n"3\n",q\n4,r\n'

    scan = scanned(tmp_path, gzip.compress(content) if name.endswith("gz") else content, name)

    [part] = scan.parts
    assert [sources.find_part_line(part, scan, tmp_path, row) for row in range(5)] == [2, 5, 6, 8, None]
