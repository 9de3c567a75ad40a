"""JSON as people have it: lists and streams of objects give the rows of JSON Lines, under any suffix of JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rowmill.build import preflight
from rowmill.core.errors import ConfigError, PipelineError, SourceError
from rowmill.recipe.new_project import create_project
from tests.support.recipes import CHAT, Workspace, chat
from tests.support.source_files import records, scan_content

pytestmark = pytest.mark.slow

Records = Sequence[Mapping[str, Any]]

RECORDS: Records = [{"a": i, "b": '}{,][\\" é', "c": {"d": [1, {"e": None}]}} for i in range(5)]

LAYOUTS: dict[str, tuple[Callable[[Records], str], str]] = {
    "list": (json.dumps, "json_array"),
    "indented list": (lambda rows: json.dumps(rows, indent=1), "json_array"),
    "list under blank lines": (lambda rows: f"\n \n{json.dumps(rows)}\n\n", "json_array"),
    "objects over several lines": (lambda rows: "\n".join(json.dumps(one, indent=2) for one in rows), "json_stream"),
    "objects without line ends": (lambda rows: "".join(map(json.dumps, rows)), "json_stream"),
    "lines that end with a comma": (lambda rows: "".join(f"{json.dumps(one)},\n" for one in rows), "json_stream"),
    "lines": (lambda rows: "".join(f"{json.dumps(one)}\n" for one in rows), "json_lines"),
    "lines with blank ones": (lambda rows: "\n\n".join(map(json.dumps, rows)), "json_lines"),
}


def read(folder: Path, name: str, content: str, **options: Any) -> tuple[str, list[Any]]:
    """Return a file's reader, and its records or the reasons of its rejects."""
    scan = scan_content(folder, name, content, **options)
    found = records([scan], folder)
    return scan.reader, [one.rejected.reason if one.rejected else one.value for one in found]


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".jsonlines", ".json"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_read_under_any_suffix(layout: str, suffix: str, tmp_path: Path) -> None:
    write, reader = LAYOUTS[layout]
    assert read(tmp_path, f"rows{suffix}", write(RECORDS)) == (reader, RECORDS)


@pytest.mark.parametrize("length", [1 << 10, 3 << 20])
def test_stream_is_read_across_blocks(length: int, tmp_path: Path) -> None:
    rows = [{"text": '\\}"{' * (length // 40 + i), "i": i} for i in range(40)]
    assert read(tmp_path, "rows.jsonl", "".join(map(json.dumps, rows)))[1] == rows


@pytest.mark.parametrize(
    ("content", "reader", "found"),
    [
        ('{"a": [\n{"b": 1}\n{"c": 2}\n', "json_lines", ["invalid_json", {"b": 1}, {"c": 2}]),
        ('{"a": 1} x\n{"b": 1}\n{"c": 2}\n', "json_lines", ["invalid_json", {"b": 1}, {"c": 2}]),
        ('["a", "list"]\n{"b": 1}\n{"c": 2}\n', "json_lines", ["not_an_object", {"b": 1}, {"c": 2}]),
        ('"text"\n{"b": 1}\n{"c": 2}\n', "json_lines", ["not_an_object", {"b": 1}, {"c": 2}]),
        ('{"a":1}{"b" 2}{"c":3}', "json_stream", [{"a": 1}, "invalid_json", {"c": 3}]),
    ],
)
def test_damaged_line_or_object_is_a_reject_and_no_other_layout(
    content: str, reader: str, found: list[Any], tmp_path: Path
) -> None:
    assert read(tmp_path, "rows.jsonl", content) == (reader, found)


def test_stream_that_ends_within_an_object_names_its_place_and_a_head_says_nothing(tmp_path: Path) -> None:
    refusal = r"the JSON object after object 2 does not end .*; expected whole objects; fetch"
    with pytest.raises(SourceError, match=refusal):
        read(tmp_path, "rows.jsonl", '{"a":1}{"b":2}{"c":')
    assert read(tmp_path, "rows.jsonl", '{"a": "' + "x" * 100) == ("json_lines", ["invalid_json"])
    assert read(tmp_path, "rows.json", '{\n"a": 1}\n') == ("json_value", [{"a": 1}])
    assert read(tmp_path, "rows.json", '{\n"a": 1}\n{"b": 2}') == ("json_stream", [{"a": 1}, {"b": 2}])


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("list", "rows.jsonl is read as one JSON list, not as JSON Lines"),
        ("objects without line ends", "rows.jsonl is read as JSON objects one after another, not one per line"),
        ("lines", None),
    ],
)
def test_other_layout_is_noted_once_before_a_build(layout: str, said: str | None, tmp_path: Path) -> None:
    content = LAYOUTS[layout][0]([chat(i) for i in range(12)])
    project = Workspace(tmp_path).one("rows.jsonl", content.encode(), CHAT).project
    found = [one.text for one in preflight.require_no_mistakes(project) if ".source:" in one.text]
    assert found == ([] if said is None else [f"mini: datasets.rows.source: data/{said}"])


@pytest.mark.real_data
@pytest.mark.parametrize("name", ["array", "pretty", "concat", "trailing_comma"])
def test_odd_file_is_read_as_what_it_is(name: str, real_data: Path, tmp_path: Path) -> None:
    content = (real_data / "odd_files" / f"{name}.jsonl").read_text(encoding="utf-8")
    _, found = read(tmp_path, f"{name}.jsonl", content)
    assert len(found) > 10
    assert all(isinstance(one, dict) and one["messages"] for one in found)


@pytest.mark.parametrize("length", [0, 1 << 10, 3 << 20])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_list_in_an_object_is_read_by_its_path(suffix: str, length: int, tmp_path: Path) -> None:
    filler = {"text": '\\}"{]' * (length // 5), "rows": [{"data": [1]}], "empty": [], "none": None}
    content = {"version": 1, "other": filler, "data": {"x": [[1]], "rows": RECORDS, "y": {"rows": [2]}}, "end": [3]}
    assert read(tmp_path, f"a{suffix}", json.dumps(content, indent=1), field="data.rows")[1] == RECORDS
    assert read(tmp_path, f"a{suffix}", json.dumps(content), field="other.rows")[1] == [{"data": [1]}]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("rows", r"source\.field 'rows' names no list of it; .*are: data \(a list\), more \(an object\);"),
        ("more.rows", r"the lists and objects at 'rows' are: none;"),
        ("more", r"source\.field 'more' is not a list;"),
    ],
)
def test_path_that_names_no_list_is_one_error_with_the_lists(tmp_path: Path, field: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read(tmp_path, "a.json", '{"version": 1, "data": [{}], "more": {"a": "[]"}}', field=field)


def test_init_and_build_name_the_list_of_an_object(tmp_path: Path) -> None:
    content = json.dumps({"version": 1, "data": [chat(i) for i in range(20)]})
    workspace = Workspace(tmp_path).one("rows.json", content.encode(), gates={})

    with pytest.raises(PipelineError, match=r"the records may be the 20 objects of its list data: source\.field: data"):
        preflight.require_no_mistakes(workspace.project)

    data = str(tmp_path / "data" / "rows.json")
    new = create_project(tmp_path / "new", [data], tokenizer=str(tmp_path), seq_len=64)
    assert "rows.json], field: data}" in new.recipe.read_text(encoding="utf-8")


def test_object_of_several_lists_is_one_error_that_names_them(tmp_path: Path) -> None:
    rows = [chat(i) for i in range(9)]
    (tmp_path / "rows.json").write_text(json.dumps({"a": rows, "b": {"c": rows}, "d": [1]}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"source\.field: a \(9 objects\), b\.c \(9 objects\)"):
        create_project(tmp_path, ["rows.json"], tokenizer=str(tmp_path), seq_len=64)
