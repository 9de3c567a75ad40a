"""Arrow files and typed values: saved datasets, Feather, folders that name columns, numbers of their width."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather
from pydantic import ValidationError

from rowmill.core.errors import SourceError
from rowmill.sources import Files
from tests.support.source_files import scan_files, values

ROWS = [{"messages": [{"role": "user", "content": f"q{i}"}], "n": i} for i in range(700)]


def read(folder: Path, *urls: str, **options: Any) -> list[Any]:
    return values(scan_files(folder, *urls, **options), folder)


def write_stream(path: Path, rows: list[dict[str, Any]], **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, **options) as writer:
        for batch in table.to_batches(max_chunksize=300):
            writer.write_batch(batch)


def save_dataset(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write a folder as `datasets` does with `save_to_disk`."""
    write_stream(folder / "data-00000-of-00002.arrow", rows[:400])
    write_stream(folder / "data-00001-of-00002.arrow", rows[400:])
    (folder / "state.json").write_text('{"_data_files": []}', encoding="utf-8")
    (folder / "dataset_info.json").write_text('{"features": {}}', encoding="utf-8")
    write_stream(folder / "cache-0123456789abcdef.arrow", rows[:5])


def test_saved_dataset_and_its_splits_are_read_like_any_other(tmp_path: Path) -> None:
    save_dataset(tmp_path / "saved", ROWS)

    assert read(tmp_path, "saved") == ROWS
    [first, _] = scan_files(tmp_path, "saved")
    assert first.reader == "arrow"
    assert first.columns is not None
    assert first.columns["n"] == "int64"
    save_dataset(tmp_path / "splits" / "train", ROWS)
    save_dataset(tmp_path / "splits" / "test", ROWS[:3])
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}', encoding="utf-8")
    assert len(read(tmp_path, "splits/train", validation_urls=["splits/test"])) == 703
    refusal = r"is a saved dataset with the splits test, train; .*train_urls: \[splits/train"
    with pytest.raises(SourceError, match=refusal):
        read(tmp_path, "splits")


def test_file_format_and_compressed_files_are_read(tmp_path: Path) -> None:
    feather.write_feather(pa.Table.from_pylist(ROWS), tmp_path / "a.feather")
    write_stream(tmp_path / "b.arrow", ROWS[:9])
    for name in ("a.feather", "b.arrow"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))

    assert read(tmp_path, "a.feather") == read(tmp_path, "a.feather.gz") == ROWS
    assert read(tmp_path, "b.arrow") == read(tmp_path, "b.arrow.gz") == ROWS[:9]


@pytest.mark.parametrize("cut", [3, 100, -40])
def test_cut_arrow_file_is_an_error(tmp_path: Path, cut: int) -> None:
    write_stream(tmp_path / "a.arrow", ROWS)
    whole = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(whole[: cut if cut > 0 else len(whole) // 2])

    with pytest.raises(SourceError, match=r"a\.arrow: not readable as Arrow after [\d,]+ rows"):
        read(tmp_path, "a.arrow")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_folders_name_columns(tmp_path: Path, suffix: str) -> None:
    for folder, row in {
        "lang=en/year=2024": {"text": "x", "year": 7},
        "lang=de%20AT/year=__HIVE_DEFAULT_PARTITION__": {"text": "x"},
    }.items():
        path = tmp_path / "rows" / folder / f"a{suffix}"
        if suffix == ".parquet":
            path.parent.mkdir(parents=True)
            pq.write_table(pa.Table.from_pylist([row]), path)
        else:
            write_stream(path, [row])
    found = scan_files(tmp_path, "rows/")

    assert values(found, tmp_path) == [
        {"text": "x", "lang": "de AT", "year": None},
        {"text": "x", "year": 7, "lang": "en"},
    ]
    assert [one.columns["lang"] for one in found if one.columns is not None] == ["string"] * 2


def test_narrow_floats_have_the_digits_of_their_width(tmp_path: Path) -> None:
    struct = pa.struct({"x": pa.float32(), "y": pa.int8()})
    table = pa.table(
        {
            "single": pa.array([0.1, None, 3.4e38], pa.float32()),
            "half": pa.array([0.1, 1.5, None], pa.float16()),
            "double": pa.array([0.1, 5e-324, 1e308]),
            "list": pa.array([[0.1, None], None, []], pa.list_(pa.float32())),
            "struct": pa.array([{"x": 0.1, "y": 1}, None, {"x": None, "y": 2}], struct),
            "map": pa.array([[("k", 0.1)], None, []], pa.map_(pa.string(), pa.float32())),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    first, second, third = read(tmp_path, "a.parquet")
    scalars = {"single": 0.1, "half": 0.1, "double": 0.1}
    assert first == {**scalars, "list": [0.1, None], "struct": {"x": 0.1, "y": 1}, "map": [["k", 0.1]]}
    assert (second["single"], second["double"], third["single"], third["double"]) == (None, 5e-324, 3.4e38, 1e308)


def test_named_format_reads_files_of_any_name(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "part-0").write_text('{"a": 1}\n{"a": 2}\n', encoding="utf-8")
    (tmp_path / "rows" / "part-1.dat").write_text('{"a": 3}\n', encoding="utf-8")

    assert read(tmp_path, "rows", file_format="jsonl") == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert read(tmp_path, "rows/part-1.dat", file_format="jsonl") == [{"a": 3}]
    [first, _] = scan_files(tmp_path, "rows", file_format="csv")
    assert first.reader == "delimited"
    with pytest.raises(ValidationError, match=r"part-1\.dat' has no known suffix; .*source\.file_format"):
        Files(train_urls=["rows/part-1.dat"])
