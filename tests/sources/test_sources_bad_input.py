"""Broken input on purpose: a bad row is one reject, a broken file is one clear error, nothing is guessed."""

import bz2
import gzip
import json
import lzma
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.core.errors import DamagedFileError, IntegrityError, SchemaError, SourceError
from rowmill.sources import FileScan, HuggingFaceSource, RawRecord, read_records, scan_source
from tests.support.source_files import reasons, records, scan_files, stager
from tests.support.tiers import draw, mark_all_but

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty folder for source files."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def scan_file(path: Path) -> FileScan:
    """Scan one file; a text file is cut into lines."""
    [scan] = scan_files(path.parent, path.name, sample_by="line" if path.suffix == ".txt" else "document")
    return scan


def read_file(path: Path) -> list[RawRecord]:
    scan = scan_file(path)
    found = records([scan], path.parent)
    assert len(found) == scan.records
    return found


# Rows

DEEP_64 = '{"a":' + "[" * 63 + "]" * 63 + "}"
DEEP_65 = '{"a":' + "[" * 64 + "]" * 64 + "}"

BAD_LINES = [
    (b'{"a":"\xff"}', "not_utf8", "0xff at position 6"),
    (b'{"a":"\xed\xa0\x80"}', "not_utf8", "0xed"),
    ("{}".encode("utf-16"), "not_utf8", "0xff"),
    (b'{"a":1', "invalid_json", ""),
    (b"{'a':1}", "invalid_json", ""),
    (b"hello", "invalid_json", ""),
    (b'{"a":1}{"b":2}', "invalid_json", ""),
    (b'{"a":1e999}', "invalid_json", "infinity"),
    (b'{"a":"\\ud800"}', "invalid_json", "surrogate"),
    (b'{"a":"\x01"}', "invalid_json", ""),
    (b"\x0c", "invalid_json", ""),
    (b'{"a":' + b"9" * 5000 + b"}", "invalid_json", "4,300 digits"),
    (b'{"a":' + b"9" * 400 + b',"b":1e999}', "invalid_json", "infinity"),
    (b'{"a":' + b"9" * 400 + b',"b":"\\ud800"}', "invalid_json", ""),
    (b'{"a":NaN,"b":1e999}', "invalid_json", ""),
    (b'{"a":1,"a":1}', "duplicate_key", "'a'"),
    (b'{"m":[{"c":"lost", "c":"kept"}]}', "duplicate_key", "'c'"),
    (b'{"m":[{"c":NaN,"c":"\\u0022"}]}', "duplicate_key", "'c'"),
    (b'{"x":"\\u0022\\u0022","c":"","c":""}', "duplicate_key", "'c'"),
    (b'{"n":' + b"9" * 400 + b',"n":1}', "duplicate_key", "'n'"),
    (b"[1]", "not_an_object", "a list"),
    (b"1", "not_an_object", "an integer"),
    (b"123456789012345678901234567890", "not_an_object", "an integer"),
    (b'"text"', "not_an_object", "a string"),
    (b"null", "not_an_object", "null"),
    (DEEP_65.encode(), "too_deep", "64"),
    (b"[" * 100_000, "too_deep", "64"),
    (b'{"a":' * 1500 + b"1" + b"}" * 1500, "too_deep", "64"),
    # Truncated inside a string, and full of quotes: brackets in it do not nest, and scanning stays linear.
    (b'{"page":"' + b'[\\"' * 200_000, "invalid_json", ""),
    (b'{"page":"' + b'[\\"' * 200_000 + b"\\", "invalid_json", ""),
    (b'{"n":' + b"1" * 30 + b',"a":' + b"[" * 900 + b"]" * 900 + b"}", "too_deep", "64"),
]


@pytest.mark.parametrize("long", ["", "9" * 400])
@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_no_json_are_null(folder: Path, constant: str, long: str) -> None:
    (folder / "a.jsonl").write_text(f'{{"a":{constant},"n":[{long or 1},{constant}],"t":"NaN"}}\n', encoding="utf-8")
    [record] = read_file(folder / "a.jsonl")
    assert record.value == {"a": None, "n": [int(long or 1), None], "t": "NaN"}


@pytest.mark.parametrize("text", ['"', '\\"', "\\u0022", "\\\\u0022", "\\\\", '\\"\\u0022:'])
def test_quotes_in_texts_are_no_repeated_keys(folder: Path, text: str) -> None:
    line = f'{{"a": "{text if text != chr(34) else chr(39)}", "b": {{"a": 1, "c": [{{"a": 2}}]}}}}'
    (folder / "a.jsonl").write_text(line + "\n", encoding="utf-8")
    [record] = read_file(folder / "a.jsonl")
    assert record.value == json.loads(line)


@pytest.mark.parametrize(
    ("line", "reason", "detail"), BAD_LINES, ids=[f"{n}-{one[1]}" for n, one in enumerate(BAD_LINES)]
)
def test_bad_line_is_one_reject_between_its_neighbours(folder: Path, line: bytes, reason: str, detail: str) -> None:
    (folder / "a.jsonl").write_bytes(b'{"n":1}\n' + line + b'\n{"n":2}\n')
    before, bad, after = read_file(folder / "a.jsonl")

    assert (before.value, after.value) == ({"n": 1}, {"n": 2})
    assert (bad.number, bad.line, bad.raw, bad.value) == (1, 2, line, None)
    assert bad.rejected is not None
    assert bad.rejected.reason == reason
    assert detail in bad.rejected.detail


@pytest.mark.parametrize("line", [DEEP_64, '{"a":"' + "[" * 100 + '"}', json.dumps({"a": [[1]] * 100})])
def test_line_with_many_brackets_that_is_not_too_deep_passes(folder: Path, line: str) -> None:
    (folder / "a.jsonl").write_text(line + "\n")
    assert [record.value for record in read_file(folder / "a.jsonl")] == [json.loads(line)]


@pytest.mark.slow
@settings(max_examples=draw(200), deadline=None)
@given(st.lists(st.binary(max_size=20).map(lambda raw: raw.replace(b"\n", b"")), max_size=8))
def test_any_bytes_give_one_record_per_line_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("any", numbered=True) / "data"
    folder.mkdir()
    content = b"\n".join(lines)
    (folder / "a.jsonl").write_bytes(content)
    try:
        found = read_file(folder / "a.jsonl")
    except SourceError as error:
        # No line beyond ASCII is UTF-8, of several; or it looks like UTF-16, a list that was cut, or no text at all.
        assert re.search(r"source\.encoding|the JSON list|rename it|unpack it", str(error))  # noqa: PT017
        return
    kept = [(number, line) for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1)]
    assert [(one.line, one.raw) for one in found] == [(number, line) for number, line in kept if line.strip(b" \t\r")]
    assert all((one.value is None) != (one.rejected is None) for one in found)


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tsv"])
def test_text_that_is_not_utf8_rejects_its_row_only(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"text\nok\nb\xe4d\nfine\n")
    found = read_file(folder / name)

    assert reasons(found)[-3:] == [None, "not_utf8", None]
    assert b"b\xe4d" in found[-2].raw
    assert [one.value and one.value["text"] for one in found][-3:] == ["ok", None, "fine"]


def test_csv_rows_that_do_not_fit_the_header_are_rejected_with_their_cells(folder: Path) -> None:
    (folder / "a.csv").write_text('a,b\n1,2\n1\n1,2,3\n"x"y,2\n3,4\n')
    found = read_file(folder / "a.csv")

    assert reasons(found) == [None, *["not_an_object"] * 3, None]
    assert [one.line for one in found] == [1, 2, 3, 4, 5]
    assert found[2].raw == b'["1","2","3"]'
    assert b'\\"x\\"y,2' in found[3].raw
    assert [one.rejected.detail for one in found if one.rejected][1] == "3 cells do not match the header"
    (folder / "a.csv").write_text("a,b\n")
    assert read_file(folder / "a.csv") == []


def test_list_elements_and_first_lines_that_are_broken_are_rejected_one_by_one(folder: Path) -> None:
    (folder / "a.json").write_bytes(b'[{"a": 1}, {"a" 2}, x, [3], {"a": "\xff"}, {"a":\n "b\nc"}, {"a": 4},]')
    found = read_file(folder / "a.json")
    assert reasons(found) == [None, *["invalid_json"] * 2, "not_an_object", "not_utf8", "invalid_json", None]
    assert [one.raw for one in found[1:4]] == [b'{"a" 2}', b"x", b"[3]"]
    (folder / "a.json").write_text('{"a": \n{"a": 2}\n')
    [found] = read_file(folder / "a.json")
    assert found.rejected is not None
    assert found.rejected.reason == "invalid_json"
    assert "first line" in found.rejected.detail


def test_parquet_text_that_is_not_utf8_rejects_its_row_only(folder: Path) -> None:
    raw = pa.array([b"ok", b"\xff", b"fine"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": text}), folder / "a.parquet")
    found = read_file(folder / "a.parquet")

    assert reasons(found) == [None, "not_utf8", None]
    assert found[2].value == {"text": "fine"}


# Files


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt", "a.jsonl.gz", "a.csv.zst"])
@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_empty_file_has_no_records(folder: Path, name: str, content: bytes) -> None:
    pack = COMPRESS.get(f".{name.split('.')[2]}", bytes) if name.count(".") == 2 else bytes
    (folder / name).write_bytes(pack(content))
    # Blank lines of a text file are empty records; in other files they are not records.
    blank = ["blank", "blank"] if name == "a.txt" and b"\n" in content else []

    assert scan_file(folder / name).records == len(blank)
    assert reasons(read_file(folder / name)) == blank


@pytest.mark.parametrize("content", [b"", b'{"a": 1}\n'], ids=["no bytes", "a plain file"])
@pytest.mark.parametrize("suffix", COMPRESS)
def test_file_that_is_not_compressed_as_its_suffix_says_is_one_error(folder: Path, suffix: str, content: bytes) -> None:
    (folder / f"a.jsonl{suffix}").write_bytes(content)
    with pytest.raises(SourceError, match="cannot be read past byte 0"):
        scan_file(folder / f"a.jsonl{suffix}")


LINES = b"".join(b'{"n": %d, "t": "%s"}\n' % (n, os.urandom(30).hex().encode()) for n in range(20_000))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kept", mark_all_but([0.9999], [0.001, 0.5, 0.9999]))
def test_compressed_file_cut_short_names_the_file_and_how_far_it_came(folder: Path, suffix: str, kept: float) -> None:
    packed = COMPRESS[suffix](LINES)
    (folder / f"a.jsonl{suffix}").write_bytes(packed[: int(len(packed) * kept)])
    refusal = rf"a\.jsonl{suffix}: its {suffix} data cannot be read past byte .*fetch the file again"
    with pytest.raises(SourceError, match=refusal):
        scan_file(folder / f"a.jsonl{suffix}")


def test_gzip_cut_short_says_nearly_where_it_breaks(folder: Path) -> None:
    packed = gzip.compress(LINES)
    (folder / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(SourceError) as caught:
        scan_file(folder / "a.jsonl.gz")
    byte = int(str(caught.value).split("past byte ")[1].split(" ")[0].replace(",", ""))
    assert 0.4 < byte / len(LINES) < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("suffix", COMPRESS)
def test_damaged_compressed_file_is_one_error(folder: Path, suffix: str) -> None:
    packed = bytearray(COMPRESS[suffix](LINES))
    packed[len(packed) // 2] ^= 0xFF
    (folder / f"a.jsonl{suffix}").write_bytes(packed)
    with pytest.raises(SourceError, match=f"its {suffix} data cannot be read past byte"):
        scan_file(folder / f"a.jsonl{suffix}")


def test_parquet_with_another_schema_is_read_and_with_one_name_twice_refused(folder: Path) -> None:
    pq.write_table(pa.table({"text": ["x"]}), folder / "a.parquet")
    pq.write_table(pa.table({"messages": [[{"role": "user"}]], "n": [1]}), folder / "b.parquet")
    assert read_file(folder / "a.parquet")[0].value == {"text": "x"}
    assert read_file(folder / "b.parquet")[0].value == {"messages": [{"role": "user"}], "n": 1}
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"]), folder / "a.parquet")
    with pytest.raises(SchemaError, match="'x'"):
        scan_file(folder / "a.parquet")


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "page"])
def test_parquet_that_cannot_be_read_is_one_error(folder: Path, damage: str) -> None:
    path = folder / "a.parquet"
    pq.write_table(pa.table({"n": [str(number) for number in range(50_000)]}), path, row_group_size=10_000)
    whole = path.read_bytes()
    cut = whole[: len(whole) // 2]
    page = cut + bytes(4096) + whole[len(cut) + 4096 :]
    path.write_bytes({"empty": b"", "text": b"no parquet", "cut": cut, "page": page}[damage])

    with pytest.raises(SourceError, match=r"a\.parquet: not readable as Parquet"):
        scan_file(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"a": 1}, {"a": 2}', "does not end; after element 1"),
        ("a.json", "[", "does not end; after element 0"),
        ("a.json", '[{"a": "x}, {"b": 1}]', "does not end"),
        ("a.json", '[{"a": 1}] [{"a": 2}]', "ends after 1 elements"),
        ("a.json", '[1, 2]\n{"a": 1}\n', "ends after 2 elements"),
        ("a.json", "[1", r"^a\.json: .*;.*;"),
        ("a.csv", 'a,b\n1,2\n3,"4\n5,6\n7,8\n', "line 3: a quoted cell"),
    ],
)
def test_list_or_quote_that_does_not_end_is_one_error(folder: Path, name: str, content: str, message: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(SourceError, match=message):
        scan_file(folder / name)


@pytest.mark.parametrize(
    ("header", "word"),
    [(b"a,b,a\n1,2,3\n", "'a'"), (b"a,\xff\n1,2\n", "UTF-8"), (b'"a"x,b\n1,2\n', "line 1: the header")],
)
def test_csv_header_that_gives_no_keys_is_refused(folder: Path, header: bytes, word: str) -> None:
    (folder / "a.csv").write_bytes(header)
    with pytest.raises(SchemaError, match=word):
        scan_file(folder / "a.csv")


# Files that change during a build


def test_file_that_changes_between_scan_and_read_is_noticed_and_appended_lines_disturb_no_part(folder: Path) -> None:
    path = folder / "a.jsonl"
    path.write_text('{"a": 1}\n')
    part = scan_file(path).parts[0]
    with path.open("a") as file:
        file.write('{"a": 2}\n')

    assert [record.value for record in read_records(part, folder)] == [{"a": 1}]
    for content in ('{"a": 2}\n', "", '{"a": 1}'):
        path.write_text(content)
        with pytest.raises(IntegrityError, match="changed while the build ran"):
            read_records(part, folder)
    path.unlink()
    with pytest.raises(SourceError, match=r"a\.jsonl"):
        read_records(part, folder)


def test_staged_copy_that_is_damaged_or_gone_is_noticed(folder: Path) -> None:
    (folder / "a.txt").write_text("one\n")
    part = scan_file(folder / "a.txt").parts[0]
    assert part.staged is not None

    Path(part.staged).write_text("two\n")
    with pytest.raises(DamagedFileError, match=r"damaged; .* run rowmill build again") as damaged:
        read_records(part, folder)
    Path(part.staged).unlink()
    with pytest.raises(DamagedFileError, match="missing; ") as missing:
        read_records(part, folder)
    assert [damaged.value.path, missing.value.path] == [part.staged, part.staged]


# Hugging Face


@pytest.mark.slow
def test_hugging_face_dataset_that_cannot_be_reached_is_one_error(folder: Path) -> None:
    """In a separate process, since the library reads the offline switch when it is imported."""
    program = (
        "from pathlib import Path; from rowmill.sources import HuggingFaceSource, scan_source\n"
        "from rowmill.core.errors import SourceError\n"
        "source = HuggingFaceSource(id='no/such', streaming=False)\n"
        "try: scan_source(source, Path('.'), lambda name, content: name, {})\n"
        "except SourceError as error: print(error)"
    )
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)

    assert done.stdout.startswith("no/such: the datasets library cannot load it")


def test_hugging_face_folder_with_damaged_data_is_one_error(folder: Path) -> None:
    (folder / "set").mkdir()
    (folder / "set/train.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(SourceError, match="set: the datasets library cannot load it"):
        scan_source(HuggingFaceSource(id="set"), folder, stager(folder), {})
