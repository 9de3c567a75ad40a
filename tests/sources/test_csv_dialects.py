"""CSV dialects: detected and configured delimiters and quotes, and line numbers of records."""

import csv
import gzip
import io
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowmill import sources
from rowmill.core.errors import ConfigError, SchemaError, SourceError
from rowmill.kinds.tables.options import require_records
from rowmill.kinds.tables.records import Records
from rowmill.sources import Files, FileScan
from rowmill.sources.delimited import UnnamedColumnError
from rowmill.sources.dialect import Dialect
from tests.support.recipes import TO_ROWS, Workspace
from tests.support.source_files import reasons, records, scan_content, scan_files, values

WIDE = b"age;work;pay\n" + b"".join(b"%d;x, y;%d,5\n" % (i, i) for i in range(30))


def scanned(folder: Path, content: bytes, name: str = "a.csv", **options: Any) -> FileScan:
    return scan_content(folder, name, content, **options)


def scanned_again(folder: Path, known: FileScan, **options: Any) -> FileScan:
    """Scan the same file with other options."""
    [scan] = scan_files(folder, "a.csv", known={known.url: known}, **options)
    return scan


def dialect_of(scan: FileScan) -> Dialect:
    assert scan.dialect is not None
    return scan.dialect


def records_of(scan: FileScan, folder: Path) -> list[Any]:
    return values([scan], folder)


def lines_of(scan: FileScan, folder: Path, count: int) -> list[int | None]:
    """Return the lines of the first records of a file of one part."""
    [part] = scan.parts
    return [sources.find_part_line(part, scan, folder, row) for row in range(count)]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_delimiter_is_the_one_that_gives_columns_and_is_recorded(tmp_path: Path, delimiter: str, name: str) -> None:
    scan = scanned(tmp_path, "a;b;c\n1;2;3\n".replace(";", delimiter).encode(), name)
    assert scan.dialect == Dialect(delimiter, '"')
    assert records_of(scan, tmp_path) == [{"a": "1", "b": "2", "c": "3"}]


def test_commas_inside_the_cells_of_another_delimiter_separate_nothing(tmp_path: Path) -> None:
    scan = scanned(tmp_path, WIDE)
    assert dialect_of(scan).delimiter == ";"
    assert records_of(scan, tmp_path)[1] == {"age": "1", "work": "x, y", "pay": "1,5"}


@pytest.mark.parametrize(
    "content",
    [b"text\nwhat; why\nwhen\n", b"text;more\njust prose\nand; more; of it\nno\n", b"a,b\n1;2,3;4\n", b"text\n", b""],
)
def test_delimiter_stays_the_default_if_no_other_gives_even_columns(tmp_path: Path, content: bytes) -> None:
    assert dialect_of(scanned(tmp_path, content)).delimiter == ","


def test_delimiter_that_leaves_one_column_or_is_not_clear_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"a\.csv: is one column with source\.delimiter ',', and 3 columns with ';'"):
        scanned(tmp_path, WIDE, delimiter=",")
    content = b"name;price, EUR;size\nx;1,5;3\ny;2,5;4\n"
    with pytest.raises(SchemaError, match=r"has 2 columns with ',', 3 columns with ';'; only one can be the delimiter"):
        scanned(tmp_path, content)
    assert dialect_of(scanned(tmp_path, content, delimiter=";")).delimiter == ";"


def test_change_of_the_quote_or_of_the_detection_reads_the_file_again(tmp_path: Path) -> None:
    scan = scanned(tmp_path, b"a#b\n'x#y'#'2'\n", delimiter="#", quote="'")
    assert records_of(scan, tmp_path) == [{"a": "x#y", "b": "2"}]
    assert dialect_of(scanned_again(tmp_path, scan, delimiter="#", quote='"')).quote == '"'
    scan = scanned(tmp_path, b"sep=;\na;b\n1;2\n")
    assert scanned_again(tmp_path, replace(scan, dialect=Dialect(",", '"'), reader_version=0)) == scan


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("line", [b"sep=;\r\n", b"SEP=;\n", b'"sep=;"\n'])
def test_sep_line_of_excel_sets_the_delimiter_and_is_not_a_record(tmp_path: Path, mark: bytes, line: bytes) -> None:
    # The header alone has two commas and one semicolon.
    scan = scanned(tmp_path, mark + line + b"a;b,c,d\n1;x,y,z\n\n2;u\n")
    assert (dialect_of(scan).delimiter, scan.records) == (";", 2)
    assert records_of(scan, tmp_path) == [{"a": "1", "b,c,d": "x,y,z"}, {"a": "2", "b,c,d": "u"}]
    assert lines_of(scan, tmp_path, 2) == [3, 5]


def test_sep_line_is_overridden_by_the_recipe_and_by_even_columns(tmp_path: Path) -> None:
    assert dialect_of(scanned(tmp_path, b"sep=;\na,b;c\n1,2;3\n", delimiter=",")).delimiter == ","
    assert dialect_of(scanned(tmp_path, b"sep=;\na,b\n1,2\n")).delimiter == ","
    assert dialect_of(scanned(tmp_path, b"sep=#\na#b\n1#2\n")).delimiter == "#"
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
    assert dialect_of(scan).quote == '"'
    assert content.count(b"'") == sum("".join(row.values()).count("'") for row in records_of(scan, tmp_path))


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        *(("a.csv", {"delimiter": text}, "expected one character other than a line end") for text in ("", "ab", "\n")),
        *(("a.csv", options, r"(delimiter|quote) and (quote|escape) are both .; they must differ")
          for options in ({"delimiter": '"'}, {"delimiter": ";", "quote": ";"}, {"quote": "'", "escape": "'"})),
        *(("a.jsonl", {option: ";"}, f"{option}: ; applies to CSV and TSV files only, and no URL names one")
          for option in ("delimiter", "quote")),
    ],
)  # fmt: skip
def test_impossible_options_of_a_dialect_are_refused(url: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Files.model_validate({"train_urls": [url], **options})
    if url == "a.jsonl":
        Files.model_validate({"train_urls": ["folder/"], **options})


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_record_after_multiline_cells_is_found_on_its_line(tmp_path: Path, name: str) -> None:
    content = b'a,b\n1,"x\ny"\n\n2,z\n"3\n",q\n4,r\n'
    scan = scanned(tmp_path, gzip.compress(content) if name.endswith("gz") else content, name)
    assert lines_of(scan, tmp_path, 5) == [2, 5, 6, 8, None]


def reasons_of(scan: FileScan, folder: Path) -> list[str]:
    return [reason for reason in reasons(records([scan], folder)) if reason is not None]


@pytest.mark.parametrize(
    ("content", "left_out", "rows"),
    [
        (b"a,b\nx,y\na,b\nz,w\n", ["header_again"], [("x", "y"), ("z", "w")]),
        (b"\xef\xbb\xbfa,b\n1,y\n\xef\xbb\xbfa,b\n2,w\n", ["header_again"], [("1", "y"), ("2", "w")]),
        (b"\xef\xbb\xbfa,b\n1,y\n\xef\xbb\xbf2,w\n", [], [("1", "y"), ("2", "w")]),
        (b"a,b\n1,y\n,\n , \n2,w\n,,,\n", ["blank"] * 3, [("1", "y"), ("2", "w")]),
        (b'a,b\n1,y\n"",""\n,w\n', ["blank"], [("1", "y"), ("", "w")]),
    ],
)
def test_lines_that_are_no_rows_are_left_out_and_counted(
    tmp_path: Path, content: bytes, left_out: list[str], rows: list[tuple[str, str]]
) -> None:
    scan = scanned(tmp_path, content)
    assert reasons_of(scan, tmp_path) == left_out
    assert [tuple(one.values()) for one in records_of(scan, tmp_path) if one] == rows


def test_comments_are_left_out_between_rows_and_not_inside_cells(tmp_path: Path) -> None:
    scan = scanned(tmp_path, b'# made today\na,b\n1,"x\n# no comment"\n#2,y\n3,z\n# end', comment="#")

    assert reasons_of(scan, tmp_path) == ["comment"] * 3
    rows = [one for one in records_of(scan, tmp_path) if one]
    assert rows == [{"a": "1", "b": "x\n# no comment"}, {"a": "3", "b": "z"}]
    assert lines_of(scan, tmp_path, 5) == [1, 3, 5, 6, 7]


@pytest.mark.parametrize(
    "title", [b"Report\n", b"Report of March\n\n", b"Report,March\nMade,2024-03-31\n", b"# one\n# two\n"]
)
def test_title_lines_before_a_clear_header_are_left_out_and_noted(tmp_path: Path, title: bytes) -> None:
    scan = scanned(tmp_path, title + b"id,name,price\n1,ann,2.5\n2,bob,3.5\n3,cy,4.5\n")
    assert [one["name"] for one in records_of(scan, tmp_path)] == ["ann", "bob", "cy"]
    assert "before the header" in " ".join(sources.describe_reading(scan))
    assert lines_of(scan, tmp_path, 1) == [title.count(b"\n") + 2]


@pytest.mark.parametrize("delimiter", [b",", b";", b"\t"])
@pytest.mark.parametrize("title", [b"Report,,\n", b"Report of March,,\n,,\n", b",,\nReport,,\n"])
def test_title_of_a_spreadsheet_has_empty_cells_after_it(tmp_path: Path, title: bytes, delimiter: bytes) -> None:
    content = title + b"id,name,price\n1,ann,2.5\n2,bob,3.5\n3,cy,4.5\n"
    scan = scanned(tmp_path, content.replace(b",", delimiter))
    assert dialect_of(scan).skip == title.count(b"\n")
    assert [one["name"] for one in records_of(scan, tmp_path)] == ["ann", "bob", "cy"]


@pytest.mark.parametrize("content", [b",score\na,NA\nb,2\nc,3\n", b",,score\na,x,NA\nb,y,2\nc,z,3\n"])
def test_row_after_an_index_without_a_name_is_no_header(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(SchemaError, match="column 1 has no name in the header"):
        scanned(tmp_path, content)


def test_names_proposed_for_a_repeated_one_are_accepted(tmp_path: Path) -> None:
    content = b"a,b,a,a_2,a\n1,2,3,4,5\n"
    with pytest.raises(SchemaError, match=r"'a' more than once.*\[a, b, a_3, a_2, a_4\]$"):
        records_of(scanned(tmp_path, content), tmp_path)
    scan = scanned(tmp_path, content, column_names=["a", "b", "a_3", "a_2", "a_4"])
    assert [*records_of(scan, tmp_path)[0].values()] == ["1", "2", "3", "4", "5"]


def test_index_without_a_name_hides_no_delimiter(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"column 1 has no name .* source\.column_names: \[c1, score\]"):
        scanned(tmp_path, b";score\na;1\nb;2\nc;3\n")


@pytest.mark.parametrize(
    "content",
    [
        b"text\nHello, world\nBye, moon\nSo, what\n",
        b"name,city\n1,ann,Oslo\n2,bob,Rome\n3,cy,Bern\n",
        b"name\n1,2\n3,4\n5,6\n",
        b"id,name\n1,ann\n2,bob\n",
        b"a,b,\n1,2,\n3,4,\n",
    ],
)
def test_header_that_is_not_clear_is_the_first_line(tmp_path: Path, content: bytes) -> None:
    assert dialect_of(scanned(tmp_path, content)).skip == 0


def test_configured_lines_before_the_header_are_left_out(tmp_path: Path) -> None:
    assert records_of(scanned(tmp_path, b"x,y\na,b\nc,d\n", skip=1), tmp_path) == [{"a": "c", "b": "d"}]
    assert records_of(scanned(tmp_path, b"Report\nid,n\n1,2\n3,4\n", skip=0), tmp_path) == [None, None, None]


@pytest.mark.parametrize(
    "content",
    [b'"id", "name"\n"1", "ann, b"\n"2", "bob"\n', b"id, name\n1, ann\n2, bob\n", b'id; name\n1; "ann; b"\n2; bob\n'],
)
def test_blanks_after_delimiters_are_no_part_of_cells(tmp_path: Path, content: bytes) -> None:
    scan = scanned(tmp_path, content)
    assert [list(one) for one in records_of(scan, tmp_path)] == [["id", "name"]] * 2
    assert not any(cell.startswith((" ", '"')) for one in records_of(scan, tmp_path) for cell in one.values())
    assert sources.describe_reading(scan) == ["without the blank after each delimiter"]


@pytest.mark.parametrize("content", [b"id, name\n1,ann\n2, bob\n", b"id,name\n1, ann\n2, bob\n", b"a\tb\n1\t 2\n"])
def test_blanks_of_some_cells_stay(tmp_path: Path, content: bytes) -> None:
    assert not dialect_of(scanned(tmp_path, content)).trims


def test_backslashes_that_escape_quotes_are_found_and_others_stay(tmp_path: Path) -> None:
    scan = scanned(tmp_path, b'a,b\n1,"he said \\"hi\\", twice"\n2,"C:\\new\\old"\n')

    assert [one["b"] for one in records_of(scan, tmp_path)] == ['he said "hi", twice', "C:\\new\\old"]
    assert sources.describe_reading(scan) == ["with quotes escaped by \\"]
    again = scanned(tmp_path, b"a,b\n1,x\\,y\n", escape="\\")
    assert records_of(again, tmp_path) == [{"a": "1", "b": "x,y"}]


@pytest.mark.parametrize("content", [b'a,b\n1,"C:\\"\n2,"x"\n', b'a,b\n1,"say ""hi\\"""\n', b"a,b\n1,C:\\new\n"])
def test_backslashes_of_proper_cells_are_text(tmp_path: Path, content: bytes) -> None:
    scan = scanned(tmp_path, content)
    assert dialect_of(scan).escape is None
    assert "\\" in records_of(scan, tmp_path)[0]["b"]


def test_columns_without_a_name_are_left_out_if_empty_and_otherwise_one_error(tmp_path: Path) -> None:
    scan = scanned(tmp_path, b"a,,b,\n1,,x,\n2, ,y,\n")

    assert records_of(scan, tmp_path) == [{"a": "1", "b": "x"}, {"a": "2", "b": "y"}]
    assert sources.describe_reading(scan) == ["without column 2, 4, which has neither a name nor a value"]
    with pytest.raises(SchemaError, match=r"column 1 has no name in the header, and line 3 has '7' in it; .*\[c1, b\]"):
        scanned(tmp_path, b",b\n,x\n7,y\n")
    named = scanned(tmp_path, b",b\n,x\n7,y\n", column_names=["n", "b"])
    assert records_of(named, tmp_path) == [{"n": "", "b": "x"}, {"n": "7", "b": "y"}]
    with pytest.raises(UnnamedColumnError, match=r"^a\.csv: column 1 has no name") as error:
        scanned(tmp_path, b",b\n7,y\n")
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), again.names) == (str(error.value), ["c1", "b"])


def test_column_names_replace_the_header_or_stand_for_it(tmp_path: Path) -> None:
    assert records_of(scanned(tmp_path, b"1,2\n3,4\n", header=False), tmp_path)[0] == {"c1": "1", "c2": "2"}
    named = scanned(tmp_path, b"1,2\n3,4\n1,2\n", header=False, column_names=["x", "y"])
    assert [one["x"] for one in records_of(named, tmp_path)] == ["1", "3", "1"]
    assert records_of(scanned(tmp_path, b"a,a\n1,2\n", column_names=["x", "y"]), tmp_path) == [{"x": "1", "y": "2"}]
    with pytest.raises(SchemaError, match=r"has 2 columns, and source\.column_names has 1; "):
        scanned(tmp_path, b"a,b\n1,2\n", column_names=["x"])


@pytest.mark.parametrize(
    ("content", "is_doubtful"),
    [
        (b"1,ann,2.5\n2,bob,3.5\n3,cy,4.5\n", True),
        (b"2024-01-01,x\n2024-01-02,y\n", True),
        (b"id,name\n1,ann\n2,bob\n", False),
        (b"country,2019,2020\nNorway,1,2\n", False),
        (b"0,1,2,3\n5,7,9,1\n", False),
        (b"ann,Oslo\nbob,Rome\n", False),
        (b"name,7\nann,x\n", False),
    ],
)
def test_header_that_looks_like_the_rows_is_doubtful(tmp_path: Path, content: bytes, is_doubtful: bool) -> None:
    found = [dialect_of(scanned(tmp_path, content, header=header)) for header in ("auto", True, False)]
    assert [one.looks_headless for one in found] == [is_doubtful, False, False]


@pytest.mark.parametrize(
    "options", [{"header": False}, {"skip": 0}, {"comment": "R"}, {"column_names": ["a", "b"]}, {"escape": "\\"}]
)
def test_change_of_an_option_reads_the_file_again(tmp_path: Path, options: dict[str, Any]) -> None:
    known = scanned(tmp_path, b"Report\nid,n\n1,2\n3,4\n", skip=1)
    again = scanned(tmp_path, b"Report\nid,n\n1,2\n3,4\n", **options)
    changed = scanned_again(tmp_path, known, **options)
    assert (changed.asked, changed.dialect) == (options, again.dialect)
    stored = FileScan.from_json(json.loads(json.dumps(again.to_json())))
    assert stored == again
    stored = replace(stored, stamp=changed.stamp)
    source = Files.model_validate({"train_urls": ["a.csv"], **options})
    assert sources.scan_source(source, tmp_path, lambda at, _: pytest.fail(at), {stored.url: stored}) == [stored]


LETTERS = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), max_size=6)


@st.composite
def written_tables(draw: st.DrawFn) -> tuple[bytes, dict[str, Any], list[dict[str, str]]]:
    """Return a table in a random dialect, as bytes; the recipe's options for it; and its rows."""
    names = draw(st.lists(st.from_regex(r"[a-z]{3,8}", fullmatch=True), min_size=2, max_size=4, unique=True))
    rows = draw(st.lists(st.lists(LETTERS, min_size=len(names), max_size=len(names)), min_size=1, max_size=6))
    rows = [row for row in rows if any(map(str.strip, row)) and row != names]
    delimiter, quote = draw(st.sampled_from(",;|\t#")), draw(st.sampled_from("\"'"))
    escape = draw(st.sampled_from([None, "\\"]))
    encoding = draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le"]))
    has_header, tail = draw(st.booleans()), draw(st.integers(0, 3))
    end, comment = draw(st.sampled_from(["\n", "\r\n"])), draw(st.sampled_from([None, "%%"]))
    text = io.StringIO()
    writer = csv.writer(
        text, delimiter=delimiter, quotechar=quote, escapechar=escape, doublequote=escape is None, lineterminator=end,
        quoting=csv.QUOTE_ALL,
    )  # fmt: skip
    for number, row in enumerate([*([names] if has_header else []), *rows]):
        writer.writerow(row)
        if comment is not None and draw(st.booleans()):
            text.write(f"{comment} after {number}{end}")
    text.write((delimiter * (len(names) - 1) + end) * tail)
    options: dict[str, Any] = {"delimiter": delimiter, "quote": quote, "header": has_header, "skip": 0}
    options |= {"escape": escape} if escape else {}
    options |= {"comment": comment} if comment else {}
    options |= {"encoding": encoding} if encoding == "utf-16-le" else {}
    keys = names if has_header else [f"c{at + 1}" for at in range(len(names))]
    return text.getvalue().encode(encoding), options, [dict(zip(keys, row, strict=True)) for row in rows]


@given(written_tables())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_table_in_any_dialect_is_read_as_it_was_written(
    tmp_path: Path, table: tuple[bytes, dict[str, Any], list[dict[str, str]]]
) -> None:
    content, options, rows = table
    scan = scanned(tmp_path, content, **options)
    assert [one for one in records_of(scan, tmp_path) if one is not None] == rows
    assert set(reasons_of(scan, tmp_path)) <= {"blank", "comment"}


@given(written_tables())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_table_in_an_unknown_dialect_is_read_or_one_error_says_where(
    tmp_path: Path, table: tuple[bytes, dict[str, Any], list[dict[str, str]]]
) -> None:
    content, _, _ = table

    try:
        scan = scanned(tmp_path, content)
    except (SchemaError, SourceError) as error:
        assert re.match(r"a\.csv: (line|column|has|is|its|the header) ", str(error))  # noqa: PT017
    else:
        assert all(one.keys() for one in records_of(scan, tmp_path) if one is not None)


def test_options_of_reading_may_stand_beside_the_columns_of_a_table(tmp_path: Path) -> None:
    table = {"header": False, "skip": 1, "columns": {"c1": {"type": "integer"}, "c2": {"type": "text"}}}
    made = Workspace(tmp_path).one("a.csv", b"made today\n1,x\n2,y\n", {"kind": "records", "table": table})
    dataset = made.project.recipe.datasets["rows"]
    assert isinstance(dataset.source, Files)
    assert (dataset.source.header, dataset.source.skip) == (False, 1)
    assert isinstance(dataset.format, Records)
    assert dataset.format.table is not None
    assert list(dataset.format.table.columns) == ["c1", "c2"]
    only = Workspace(tmp_path).one("a.csv", b"1,x\n", {"kind": "records", "table": {"header": False}})
    assert require_records(only.project.recipe.datasets["rows"]).table is None
    twice = {"kind": "records", "table": {"header": False}}
    with pytest.raises(ConfigError, match=r"format\.table\.header and source\.header are the same option; keep source"):
        _ = made.one("a.csv", b"1,x\n", twice, source={"header": True}).project


def test_double_quote_may_be_a_delimiter_and_is_in_the_contract(tmp_path: Path) -> None:
    content, dialect = b'a"b\n1"x\n2"y\n', {"delimiter": '"', "quote": "'"}
    made = Workspace(tmp_path).one("a.csv", content, {"kind": "records"}, source=dialect).build(only=TO_ROWS)

    assert made.manifest("rows", "canonical_rows").details["table"]["contract"]["delimiter"] == '"'
