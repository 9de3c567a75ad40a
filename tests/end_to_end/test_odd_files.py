"""Files as people have them, built from the recipe of `rowmill init`, or with the option that its error names."""

import json
import re
from pathlib import Path
from typing import Any

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

OPTIONS: dict[str, dict[str, Any]] = {"latin1.csv": {"encoding": "latin-1"}, "no_header.csv": {"header": False}}
"""What the error or the warning about a file asks for."""
EXPONENTS = ["2.2e-16", "1e-20", "6.02e23", "1e21", "1e-5", "1.50", "1e308", "1e-308"]

RECORDS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "backslash.csv": (60, [{"a": 0, "b": 'he said "hi" 0'}]),
    "blank_after_delimiter.csv": (39, [{"id": 1, "name": "ann 1"}]),
    "comments.csv": (30, [{"id": 0, "temp": "280.5"}]),
    "empty_header.csv": (60, [{"a": 0, "c2": 1, "b": "x0"}]),
    "excel_tail.csv": (30, [{"id": 1, "name": "ann1", "x": "1.5"}]),
    "exponents.csv": (8, [{"id": number, "p": p} for number, p in enumerate(EXPONENTS, 1)]),
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


@pytest.fixture
def built(request: pytest.FixtureRequest, real_data: Path, tmp_path: Path) -> Built:
    """Build a file with the recipe of `init` and the options that it needs."""
    name = str(request.param)
    (tmp_path / name).write_bytes((real_data / "odd_files" / name).read_bytes())
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    if name == "latin1.csv":
        with pytest.raises(PipelineError, match="encoding"):
            create_project(tmp_path, [name], tokenizer=tokenizer, seq_len=256)
        dataset: dict[str, Any] = {"source": {"train_urls": [name]}, "format": {"kind": "records"}}
    else:
        made = create_project(tmp_path, [name], tokenizer=tokenizer, seq_len=256)
        [dataset] = yaml.safe_load(made.recipe.read_text(encoding="utf-8"))["datasets"].values()
    dataset["source"] |= OPTIONS.get(name, {})
    gates = {**GATES, "fill": {"at_least": 0}, "split_share": {"at_most": 1}}
    return Workspace(tmp_path).recipe({"rows": dataset}, seq_len=256, gates=gates).build()


def test_every_odd_file_is_tried(real_data: Path) -> None:
    assert sorted(path.name for path in (real_data / "odd_files").iterdir() if path.suffix != ".md") == NAMES


@pytest.mark.parametrize(("built", "name"), [(name, name) for name in sorted(RECORDS)], indirect=["built"])
def test_odd_table_is_built_as_it_is_meant(built: Built, name: str) -> None:
    count, first = RECORDS[name]
    made = built.manifest("rows", "canonical_rows")
    records = [row["record"] for row in built.rows_of("rows", "canonical_rows", file="rows")]
    values = [json.loads(one, parse_float=str) for one in records]
    assert len(values) == count
    assert values[: len(first)] == first
    left_out = {reason: number for state, reason, number in made.ledger if state == "rejected"}
    assert left_out == LEFT_OUT.get(name, {})
    if name == "some_nan.csv":  # cells that are no numbers are missing and counted
        assert made.facts["non_finite"] == 12
        assert [row[:2] for row in made.tables["non_finite"].rows] == [("x", 12)]
    if name == "nanoseconds.parquet":  # times and numbers of a typed file are as written
        assert all(re.search(r'"v":-?\d+\.\d{1,8}[,}]', text) for text in records), records[:3]


CHATS = [name for name in NAMES if name not in RECORDS and name != "chat_cases.jsonl"]


@pytest.mark.parametrize("built", CHATS, indirect=True)
def test_odd_chats_are_all_built(built: Built) -> None:
    facts = built.manifest("rows", "canonical_rows").facts
    assert facts["kept"] >= 30
    assert facts["rejected"] == 0
