"""Files as people have them, built from the recipe of `rowmill init`, or with the option that its error names."""

import json
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from rowmill.core.errors import PipelineError
from rowmill.recipe.new_project import create_project
from tests.support.recipes import Built, Workspace, write_tokenizer

pytestmark = [pytest.mark.real_data, pytest.mark.slow]

NAMES = [
    "array.jsonl", "backslash.csv", "blank_after_delimiter.csv", "chat_cases.jsonl", "comments.csv", "concat.jsonl",
    "empty_header.csv", "excel_tail.csv", "exponents.csv", "header_again.csv", "joined_bom.csv", "late_string.jsonl",
    "latin1.csv", "mixed_types.jsonl", "nan.jsonl", "nanoseconds.parquet", "no_header.csv", "preamble.csv",
    "pretty.jsonl", "some_nan.csv", "title_lines.csv", "trailing_comma.jsonl", "trailing_delim.csv", "utf16.jsonl",
    "wrapped.json",
]  # fmt: skip

OPTIONS: dict[str, dict[str, Any]] = {
    "latin1.csv": {"encoding": "latin-1"},
    "no_header.csv": {"header": False},
}
"""What the error or the warning about a file asks for."""

RECORDS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "backslash.csv": (60, [{"a": 0, "b": 'he said "hi" 0'}]),
    "blank_after_delimiter.csv": (39, [{"id": 1, "name": "ann 1"}]),
    "comments.csv": (30, [{"id": 0, "temp": "280.5"}]),
    "empty_header.csv": (60, [{"a": 0, "c2": 1, "b": "x0"}]),
    "excel_tail.csv": (30, [{"id": 1, "name": "ann1", "x": "1.5"}]),
    "exponents.csv": (
        8,
        [
            {"id": number, "p": p}
            for number, p in enumerate(["2.2e-16", "1e-20", "6.02e23", "1e21", "1e-5", "1.50", "1e308", "1e-308"], 1)
        ],
    ),
    "header_again.csv": (2, [{"name": "ann", "city": "Oslo"}, {"name": "bob", "city": "Rome"}]),
    "joined_bom.csv": (2, [{"id": 1, "name": "ann"}, {"id": 2, "name": "bob"}]),
    "latin1.csv": (60, [{"name": "José0", "city": "Orléans"}]),
    "nanoseconds.parquet": (60, []),
    "no_header.csv": (4, [{"c1": 1, "c2": "ann", "c3": "2.5"}]),
    "preamble.csv": (4, [{"id": "1", "name": "ann", "price": "2.5"}]),
    "some_nan.csv": (100, [{"id": 1, "x": "1.5"}]),
    "title_lines.csv": (3, [{"id": 1, "name": "ann", "price": "2.5"}]),
    "trailing_delim.csv": (60, [{"a": 0, "b": "x0"}]),
}
"""How many records of a table are kept, and the first ones, decimals as text."""

LEFT_OUT = {
    "excel_tail.csv": {"blank": 5},
    "header_again.csv": {"header_again": 1},
    "joined_bom.csv": {"header_again": 1},
}

GATES = {name: {"at_most": 9} for name in ("rank_balance", "filler_share", "duplicates", "shrunk")}


def build(folder: Path, content: bytes, name: str) -> Built:
    """Build a file with the recipe of `init` and the options that it needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    tokenizer = write_tokenizer(folder / "tokenizer")
    options = OPTIONS.get(name, {})
    if name == "latin1.csv":
        with pytest.raises(PipelineError, match=rf"{next(iter(options))}"):
            create_project(folder, [name], tokenizer=str(tokenizer), seq_len=256)
        datasets: dict[str, Any] = {"rows": {"source": {"train_urls": [name]}, "format": {"kind": "records"}}}
    else:
        made = create_project(folder, [name], tokenizer=str(tokenizer), seq_len=256)
        [[_, dataset]] = yaml.safe_load(made.recipe.read_text(encoding="utf-8"))["datasets"].items()
        datasets = {"rows": dataset}
    datasets["rows"]["source"] |= options
    workspace = Workspace(folder)
    workspace.recipe(datasets, seq_len=256, gates={**GATES, "fill": {"at_least": 0}, "split_share": {"at_most": 1}})
    return workspace.build()


def test_every_odd_file_is_tried(real_data: Path) -> None:
    assert sorted(path.name for path in (real_data / "odd_files").iterdir() if path.suffix != ".md") == NAMES


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_odd_table_is_built_as_it_is_meant(name: str, real_data: Path, tmp_path: Path) -> None:
    built = build(tmp_path, (real_data / "odd_files" / name).read_bytes(), name)

    count, first = RECORDS[name]
    made = built.manifest("rows", "canonical_rows")
    rows = built.rows_of("rows", "canonical_rows", file="rows")
    texts = [json.loads(one["record"], parse_float=str) for one in rows]
    assert len(texts) == count
    assert texts[: len(first)] == first
    left_out = {reason: number for state, reason, number in made.ledger if state == "rejected"}
    assert left_out == LEFT_OUT.get(name, {})


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RECORDS and name != "chat_cases.jsonl"])
def test_odd_chats_are_all_built(name: str, real_data: Path, tmp_path: Path) -> None:
    built = build(tmp_path, (real_data / "odd_files" / name).read_bytes(), name)

    made = built.manifest("rows", "canonical_rows")
    assert made.facts["kept"] >= 30
    assert made.facts["rejected"] == 0


def test_cells_that_are_no_numbers_are_missing_and_counted(real_data: Path, tmp_path: Path) -> None:
    built = build(tmp_path, (real_data / "odd_files" / "some_nan.csv").read_bytes(), "some_nan.csv")

    made = built.manifest("rows", "canonical_rows")
    table = made.tables["non_finite"]
    assert made.facts["non_finite"] == 12
    assert [row[:2] for row in table.rows] == [("x", 12)]


def test_times_and_numbers_of_a_typed_file_are_as_written(real_data: Path, tmp_path: Path) -> None:
    built = build(tmp_path, (real_data / "odd_files" / "nanoseconds.parquet").read_bytes(), "nanoseconds.parquet")

    texts = [row["record"] for row in built.rows_of("rows", "canonical_rows", file="rows")]
    assert all(re.search(r'"v":-?\d+\.\d{1,8}[,}]', text) for text in texts), orjson.dumps(texts[:3])
