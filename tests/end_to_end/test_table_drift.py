"""Tables over several builds: a change is shown by its cell and stops the build, and no group moves."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from rowmill.build import runner
from rowmill.build.steps import find_step
from rowmill.core.errors import ConfigError, GateError
from tests.support.recipes import TO_EXAMPLES, TO_ROWS, Built, Workspace, current_rows, lines
from tests.support.tables import as_csv, as_parquet, grouped, records
from tests.support.tiers import mark_all_but


def sale(i: int) -> dict[str, Any]:
    return {
        "customer": str(17850 + i % 60),
        "day": f"2024-{1 + i % 12:02d}-{1 + i * 7 % 28:02d}",
        "price": f"{i % 90}.{i % 10}0",
        "paid": "True" if i % 3 else "False",
        "note": "" if i % 4 == 0 else f"N{i}",
    }


def sales(count: int = 1500) -> list[dict[str, Any]]:
    return [sale(i) for i in range(count)]


GROUPED = records(**grouped())
BY_TIME = records(**grouped("g", "t"))
UNORDERED = records(**grouped(order=None))


def project(
    folder: Path, content: bytes, form: dict[str, Any] = GROUPED, name: str = "sales.csv", **source: Any
) -> Workspace:
    return Workspace(folder).one(name, content, form, source=source, splits={"test": 0.2}, seq_len=8192)


def rows_of(built: Built) -> list[dict[str, Any]]:
    return built.rows_of("rows", "canonical_rows", file="rows")


def splits_of(built: Built) -> dict[str, str]:
    return {row["group_key"]: row["split"] for row in rows_of(built)}


def types_of(built: Built) -> dict[str, str]:
    told = built.manifest("rows", "canonical_rows").details["records"]["schema"]["columns"]
    return {one["name"]: one["type"] for one in told}


def facts_of(built: Built) -> dict[str, Any]:
    return built.manifest("rows", "canonical_rows").facts


# ── A night that changes something ─────────────────────────────────────────────────────────────────
def with_columns(rows: list[dict[str, Any]], **added: str) -> list[dict[str, Any]]:
    return [{**row, **added} for row in rows]


NIGHTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a group of another type": (
        lambda rows: as_csv([*rows, {**sale(1), "customer": "guest"}]),
        ("customer was integer, which 1 value does not fit: 'guest' (data/sales.csv line 1502)",),
    ),
    "groups of another type": (
        lambda rows: as_csv([*rows, *({**sale(i), "customer": f"guest{i}"} for i in range(60))]),
        ("customer was integer, which 60 values do not fit: 'guest0' (data/sales.csv line 1502)",),
    ),
    "a word in a column of numbers": (
        lambda rows: as_csv([*rows, {**sale(1), "price": "NA"}]),
        ("price was number, which 1 value does not fit: 'NA' (data/sales.csv line 1502)",),
    ),
    "another date format": (
        lambda rows: as_csv([*rows, {**sale(1), "day": "13/02/2024"}]),
        ("day was date as iso8601, which 1 value does not fit: '13/02/2024' (data/sales.csv line 1502)",),
    ),
    "codes that begin with 0": (
        lambda rows: as_csv([*rows, {**sale(1), "customer": "017850"}]),
        ("customer was integer, which 1 value does not fit: '017850' (data/sales.csv line 1502)",),
    ),
    "a new column": (
        lambda rows: as_csv(with_columns(rows, channel="web")),
        ("channel is new: the published build has no such column: 'web' (data/sales.csv line 2)",),
    ),
    "a missing column": (
        lambda rows: as_csv([{name: row[name] for name in row if name != "note"} for row in rows]),
        ("note is missing from every record (data/sales.csv line 2)",),
    ),
    "another decimal sign": (
        lambda rows: as_csv([{**row, "price": row["price"].replace(".", ",")} for row in rows]),
        ("price was number, which 1,500 values do not fit: '0,00' (data/sales.csv line 2)",),
    ),
    "text that is all numbers": (
        lambda rows: as_csv([{**row, "note": row["note"][1:]} for row in rows]),
        ("note was text, and its values now read as integer: '1' (data/sales.csv line 3)",),
    ),
    "cells of several lines before it": (
        lambda rows: as_csv([{**rows[0], "note": "two\nlines"}, *rows[1:], {**sale(1), "customer": "guest"}]),
        ("customer was integer, which 1 value does not fit: 'guest' (data/sales.csv line 1503)",),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("night", mark_all_but(list(NIGHTS)[::3], NIGHTS))
def test_night_that_changes_a_table_stops_with_its_cell_and_moves_no_group(tmp_path: Path, night: str) -> None:
    change, said = NIGHTS[night]
    workspace = project(tmp_path, as_csv(sales()))
    before = workspace.build()
    workspace.write("sales.csv", change(sales()))
    with pytest.raises(GateError) as caught:
        workspace.build()
    after = workspace.build(only=TO_ROWS)

    assert before.result("table_drift", "rows", "canonical_rows").outcome == "not_applicable"
    assert {"train", "test"} == set(splits_of(before).values())
    new = {"guest", '"017850"'}
    known = {group: split for group, split in splits_of(after).items() if not any(name in group for name in new)}
    assert known.items() <= splits_of(before).items()
    assert [line.strip() for line in str(caught.value).splitlines()[1:]][: len(said)] == list(said)
    assert "rowmill advise mini --write" in str(caught.value)
    assert published_version(workspace) == before.manifest("gpu_partitions").version


def published_version(workspace: Workspace) -> str:
    published = workspace.project.store.read_sealed("mini/gpu_partitions/current.json")
    assert published is not None
    return str(published["version"])


@pytest.mark.slow
def test_another_delimiter_of_equal_cells_makes_the_same_rows_and_is_no_change(tmp_path: Path) -> None:
    workspace = project(tmp_path, as_csv(sales()))
    before = workspace.build()
    workspace.write("sales.csv", as_csv(sales()).replace(b",", b";"))
    after = workspace.build()

    assert after.manifest("gpu_partitions").version == before.manifest("gpu_partitions").version
    assert after.manifest("rows", "raw_dataset").version != before.manifest("rows", "raw_dataset").version
    workspace.write("sales.csv", as_csv([*sales(), {**sale(1), "price": "NA"}]).replace(b",", b";"))
    assert workspace.build(only=TO_ROWS).result("table_drift", "rows", "canonical_rows").samples == (
        "price was number, which 1 value does not fit: 'NA' (data/sales.csv line 1502)",
    )


@pytest.mark.slow
def test_change_stays_a_change_until_it_is_corrected_and_more_rows_are_none(tmp_path: Path) -> None:
    workspace = project(tmp_path, as_csv(sales()))
    before = splits_of(workspace.build())
    for rows in (sales(), sales(1501)):
        workspace.write("sales.csv", as_csv([*rows, {**sale(1), "customer": "guest"}]))
        for _ in range(2):
            with pytest.raises(GateError, match="table_drift: 1 "):
                workspace.build()
    workspace.write("sales.csv", as_csv(sales(1700)))
    after = workspace.build()
    assert after.result("table_drift", "rows", "canonical_rows").value == 0
    assert splits_of(after) == before


@pytest.mark.slow
def test_groups_are_held_out_alike_whatever_type_their_column_has(tmp_path: Path) -> None:
    texts = project(tmp_path / "texts", as_csv([*sales(), *({**sale(i), "customer": f"C{i}"} for i in range(60))]))
    numbers = project(tmp_path / "numbers", as_csv(sales()))
    of_texts, of_numbers = texts.build(only=TO_ROWS), numbers.build(only=TO_ROWS)
    assert (types_of(of_texts)["customer"], types_of(of_numbers)["customer"]) == ("string", "integer")
    assert {key: split for key, split in splits_of(of_texts).items() if "C" not in key} == splits_of(of_numbers)


def test_json_value_of_another_type_is_a_change(tmp_path: Path) -> None:
    rows = [{"g": i % 9, "v": i} for i in range(40)]
    workspace = project(tmp_path, lines(rows), records(data={"group_training_examples_by": "g"}), name="rows.jsonl")
    before = splits_of(workspace.build())
    workspace.write("rows.jsonl", [*rows, {"g": "guest", "v": 1}])
    after = workspace.build(only=TO_ROWS)
    result = after.result("table_drift", "rows", "canonical_rows")
    assert result.samples == ("g was integer, which 1 value does not fit: 'guest' (data/rows.jsonl line 41)",)
    assert {group: split for group, split in splits_of(after).items() if "guest" not in group} == before


@pytest.mark.slow
def test_change_that_is_waived_is_built_as_it_is_and_is_what_the_next_is_compared_with(tmp_path: Path) -> None:
    workspace = project(tmp_path, as_csv(sales()))
    settings = read_settings(workspace)
    workspace.build()
    workspace.write("sales.csv", as_csv([*with_columns(sales(), channel="web"), {**sale(1), "channel": "shop"}]))
    waiver = {"check": "table_drift", "dataset": "rows", "at_most": 1, "reason": "the shop names the channel of a sale"}
    waived: dict[str, Any] = {**settings, "gates": {**settings["gates"], "waivers": [waiver]}}
    workspace.recipe(**waived)
    made = workspace.build()
    assert types_of(made)["channel"] == "string"
    assert len(rows_of(made)) == 1501
    again = workspace.recipe(**settings).build()
    assert again.result("table_drift", "rows", "canonical_rows").outcome == "passed"


@pytest.mark.slow
def test_change_that_an_option_explains_warns(tmp_path: Path) -> None:
    workspace = project(tmp_path, as_csv(sales()))
    workspace.build()
    workspace = project(tmp_path, as_csv(with_columns(sales(), channel="web")), UNORDERED)
    result = workspace.build().result("table_drift", "rows", "canonical_rows")
    assert (result.value, result.blocking) == (1, False)
    assert "the options of mini/rows/canonical_rows changed as well" in result.sentence


@pytest.mark.slow
def test_older_version_that_is_used_again_is_not_compared_and_the_next_build_is_compared_with_it(
    tmp_path: Path,
) -> None:
    workspace = project(tmp_path, as_csv(sales()))
    older = workspace.build().manifest("gpu_partitions").version
    accept_once(workspace, as_csv(with_columns(sales(), channel="web")))
    step = find_step(workspace.project, ("mini", "gpu_partitions"))
    assert runner.run_step(workspace.project, step, {}, version=older).version == older
    with pytest.raises(GateError, match="channel is new"):
        workspace.build()
    workspace.write("sales.csv", as_csv(sales()))
    assert workspace.build().manifest("gpu_partitions").version == older


def read_settings(workspace: Workspace) -> dict[str, Any]:
    return yaml.safe_load(workspace.config.read_text(encoding="utf-8"))


def accept_once(workspace: Workspace, content: bytes) -> Built:
    """Build another table with a waiver, which the recipe then has no more."""
    settings, name = read_settings(workspace), "sales.csv"
    workspace.write(name, content)
    waiver = {"check": "table_drift", "at_most": 99, "reason": "a change that somebody looked at"}
    waived: dict[str, Any] = {**settings, "gates": {**settings["gates"], "waivers": [waiver]}}
    workspace.recipe(**waived)
    made = workspace.build()
    workspace.recipe(**settings)
    return made


# ── A store with a history, and an empty one ───────────────────────────────────────────────────────


def without(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


SOME = sales(400)
TARGET = as_csv([*SOME, *({**sale(i), "customer": f"guest{i}"} for i in range(6)), {**sale(1), "price": "free"}])
HISTORIES: dict[str, tuple[bytes, ...]] = {
    "narrower types": (as_csv([{**row, "price": "7", "note": ""} for row in SOME]),),
    "wider types": (as_csv([{**row, "price": f"EUR {row['price']}", "paid": "perhaps"} for row in SOME]),),
    "other words for no value": (as_csv([{**row, "price": "1" if row["note"] else "NA"} for row in SOME]),),
    "other columns": (as_csv(with_columns(without(SOME, "note", "paid"), channel="web")),),
    "another delimiter": (as_csv(SOME).replace(b",", b";"),),
    "back and forth": (as_csv(SOME), TARGET, as_csv([{**row, "paid": "7"} for row in SOME]), TARGET, as_csv(SOME)),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", mark_all_but(["waived"], ["waived", "blocked", "pinned before"]))
@pytest.mark.parametrize("history", mark_all_but(["narrower types", "back and forth"], HISTORIES))
def test_build_is_that_of_an_empty_store_whatever_was_built_before(tmp_path: Path, history: str, way: str) -> None:
    workspace = project(tmp_path, TARGET)
    settings = read_settings(workspace)
    waiver = {"check": "table_drift", "at_most": 99, "reason": "a change that somebody looked at"}
    gates = {**settings["gates"], "drift": {"at_most": 99}, "waivers": [waiver]}
    waived: dict[str, Any] = {**settings, "gates": gates}
    clean = Workspace(tmp_path, str(tmp_path / "empty")).recipe(**waived).build()
    if way == "pinned before":
        columns = {"customer": {"type": "text"}, "day": {"type": "text"}, "price": {"type": "text"}}
        pinned = {"rows": settings["datasets"]["rows"] | {"format": {**GROUPED, "table": {"columns": columns}}}}
        with_pin: dict[str, Any] = {**waived, "datasets": pinned}
        workspace.recipe(**with_pin).build(only=TO_ROWS)
        workspace.recipe(**waived)
    for number, content in enumerate(HISTORIES[history]):
        workspace.write("sales.csv", content)
        workspace.recipe(**waived if way != "blocked" or not number else settings)
        with suppress(GateError):
            workspace.build()
    workspace.write("sales.csv", TARGET)
    if way == "blocked":
        workspace.recipe(**settings)
        with pytest.raises(GateError, match="table_drift"):
            workspace.build()
    lived = workspace.recipe(**waived).build()

    assert lived.versions() == clean.versions()
    assert lived.segments() == clean.segments()
    contents = [[row["input_ids"] for row in made.rank_rows(["input_ids"])] for made in (lived, clean)]
    assert contents[0] == contents[1]
    assert rows_of(lived) == rows_of(clean)


@pytest.mark.slow
def test_table_of_one_dataset_that_changed_stops_that_one_alone(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    tables = {name: workspace.dataset(f"{name}.csv", as_csv(sales(300)), records()) for name in ("a", "b")}
    workspace.recipe(tables, seq_len=2048).build()
    workspace.write("a.csv", as_csv(with_columns(sales(300), channel="web")))
    workspace.write("b.csv", as_csv(sales(301)))
    with pytest.raises(GateError) as caught:
        workspace.build()

    assert "mini/a/canonical_rows: table_drift: 1 " in str(caught.value)
    assert "mini/b/canonical_rows" not in str(caught.value)
    examples = current_rows(workspace.project, "b", "tokenized_examples", file="examples")
    assert sum(len(one["row_ids"]) for one in examples) == 301


@pytest.mark.slow
def test_rows_that_are_appended_are_compared_with_all_of_the_published_ones(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.write("a.csv", as_csv(sales(300)))
    workspace.recipe({"rows": {"source": {"train_urls": ["data/*.csv"]}, "format": records()}}, seq_len=2048)
    workspace.build()
    workspace.write("b.csv", as_csv([sale(i) for i in range(300, 320)]))
    passed = workspace.build()
    workspace.write("c.csv", as_csv([{**sale(i), "customer": f"C{i}"} for i in range(320, 340)]))

    assert passed.result("table_drift", "rows", "canonical_rows").outcome == "passed"
    with pytest.raises(
        GateError, match=r"customer was integer, which 20 values do not fit: 'C320' \(data/c\.csv line 2\)"
    ):
        workspace.build()


# ── The first build ────────────────────────────────────────────────────────────────────────────────
def test_na_words_and_number_formats_do_not_make_a_column_text(tmp_path: Path) -> None:
    rows = [{"a": f"{i}.5", "b": f"{i}.25", "c": str(i), "d": str(i), "e": "True", "f": f"{i}.5"} for i in range(40)]
    odd = {"a": ".2", "b": "1e-05", "c": "NA", "d": "True", "e": "false", "f": "NaN"}
    made = project(tmp_path, as_csv([*rows, odd, {**odd, "d": "7"}]), records()).build(only=TO_ROWS)
    types = {"a": "decimal", "b": "decimal", "c": "integer", "d": "integer", "e": "boolean", "f": "decimal"}
    assert types_of(made) == types
    assert rows_of(made)[-1]["record"] == '{"a":0.2,"b":1e-5,"c":null,"d":7,"e":false,"f":null}'
    manifest = made.manifest("rows", "canonical_rows")
    assert ("rejected", "type_mismatch", 1) in manifest.ledger
    assert manifest.samples["type_mismatch"] == ("d: 'True' (data/sales.csv line 42)",)
    assert manifest.facts["non_finite"] == 2
    assert [row[:2] for row in manifest.tables["non_finite"].rows] == [("f", 2)]


def test_na_word_in_the_order_column_is_missing_and_others_keep_their_order(tmp_path: Path) -> None:
    rows = [{"g": "A", "t": str(t), "v": "x"} for t in (3, 12, 1, 10, 2)] + [{"g": "B", "t": "NA", "v": "x"}]
    made = project(tmp_path, as_csv(rows), BY_TIME).build(only=TO_EXAMPLES)
    assert ("rejected", "order_missing", 1) in made.manifest("rows", "canonical_rows").ledger
    assert made.manifest("rows", "canonical_rows").details["records"]["order"] == "elapsed_seconds"


def test_repeated_key_of_json_is_a_reject(tmp_path: Path) -> None:
    content = b'{"a":1,"a":2}\n{"a":3}\n{"a":{"b":1,"b":1}}\n{"a":1,"a" : 2}\n{"a" :1,"a":2,"b":"\\":"}\n'
    made = project(tmp_path, content, records(), name="rows.jsonl").build(only=TO_ROWS)
    assert [row["record"] for row in rows_of(made)] == ['{"a":3}']
    assert ("rejected", "duplicate_key", 4) in made.manifest("rows", "canonical_rows").ledger


# ── Files ──────────────────────────────────────────────────────────────────────────────────────────


def readings(folder: Path, groups: Any, *, files: int = 3) -> Workspace:
    """Write sensors' files whose times interleave, and a recipe of their series."""
    workspace = Workspace(folder)
    for number in range(files):
        rows = [{"t": str(10 * t + number), "v": str(number)} for t in range(8)]
        workspace.write(f"sensor{number}.csv", as_csv(rows))
    form = records(**grouped(groups, "t"), time_series={"is_timeseries": True})
    return workspace.recipe(
        {"rows": {"source": {"train_urls": ["data/*.csv"]}, "format": form, "splits": {"test": 0.4}}}
    )


@pytest.mark.slow
def test_each_file_is_a_separate_series_in_one_split(tmp_path: Path) -> None:
    made = readings(tmp_path, {"file": True}, files=6).build(only=TO_EXAMPLES)
    files = {f'"data/sensor{number}.csv"': number for number in range(6)}
    assert {row["group_key"]: json.loads(row["record"])["v"] for row in rows_of(made)} == files
    assert all(len(one["group_keys"]) == 1 for one in made.examples())
    assert {key for one in made.examples() for key in one["group_keys"]} == set(files)
    by_group: dict[str, set[str]] = {}
    for row in rows_of(made):
        by_group.setdefault(row["group_key"], set()).add(row["split"])
    assert {len(splits) for splits in by_group.values()} == {1}
    assert {"train", "test"} == {split for splits in by_group.values() for split in splits}


def test_files_of_one_series_are_one_where_the_recipe_says_so_and_otherwise_refused(tmp_path: Path) -> None:
    made = readings(tmp_path, {"file": False}).build(only=TO_EXAMPLES)
    assert {one["split"] for one in rows_of(made)} == {"train"}
    assert made.manifest("rows", "canonical_rows").facts["groups"] == 1
    with pytest.raises(ConfigError, match=r"the rows of 3 files \(data/sensor0\.csv, .*\{file: true\} if each file is"):
        readings(tmp_path / "none", None).build(only=TO_ROWS)


def test_files_group_records_that_are_no_series(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    for name in ("a", "b"):
        workspace.write(f"{name}.csv", as_csv([{"v": f"{name}{i}"} for i in range(4)]))
    form = records(data={"group_training_examples_by": {"file": True}, "max_sequences_per_example": 1})
    workspace.recipe({"rows": {"source": {"train_urls": ["data/*.csv"]}, "format": form, "splits": {"test": 0}}})
    made = workspace.build(only=TO_EXAMPLES)
    assert sorted(one["group_keys"] for one in made.examples()) == [['"data/a.csv"'], ['"data/b.csv"']]
    assert {len(one["row_ids"]) for one in made.examples()} == {4}


@pytest.mark.parametrize("groups", [{"file": "yes"}, {"files": True}, {}, {"file": True, "a": 1}])
def test_invalid_group_option_error_says_what_is_valid(tmp_path: Path, groups: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected a column's name, a list of them, \{file: true\}, or null"):
        _ = readings(tmp_path, groups).project


# ── Floats that JSON has no numbers for ────────────────────────────────────────────────────────────


def test_nonfinite_floats_of_parquet_are_kept_and_counted(tmp_path: Path) -> None:
    values = [1.5, math.nan, math.inf, -math.inf, None]
    content = as_parquet(
        a=pa.array(values, from_pandas=False), b=pa.array(values, pa.float16()), c=[[1.0], [math.nan], [], None, [2.5]]
    )
    made = project(tmp_path, content, records(), name="rows.parquet").build(only=TO_ROWS)
    assert [row["record"] for row in rows_of(made)] == [
        '{"a":1.5,"b":1.5,"c":[1.0]}',
        '{"a":"NaN","b":"NaN","c":["NaN"]}',
        '{"a":"Infinity","b":"Infinity","c":[]}',
        '{"a":"-Infinity","b":"-Infinity","c":null}',
        '{"a":null,"b":null,"c":[2.5]}',
    ]
    assert (facts_of(made)["non_finite"], facts_of(made)["table_contract"]) == (6, 0)
    assert types_of(made) == {"a": "float", "b": "float", "c": "list"}


def test_other_kinds_keep_null_for_them_and_have_no_table_metadata(tmp_path: Path) -> None:
    content = as_parquet(text=["one two three", "four five six"], score=[math.nan, 1.0])
    workspace = Workspace(tmp_path).one("rows.parquet", content, {"kind": "text"})
    [part] = workspace.build(only=TO_ROWS[:1]).manifest("rows", "raw_dataset").details["scans"][0]["parts"]
    assert Path(part["staged"]).read_text(encoding="utf-8").splitlines()[0] == '{"text":"one two three","score":null}'
    rows = as_csv([{"prompt": f"what {i}", "answer": f"that {i}"} for i in range(20)])
    pairs = {"kind": "supervised", "input_field": "prompt", "output_field": "answer"}
    made = Workspace(tmp_path / "pairs").one("rows.csv", rows, pairs).build(only=TO_ROWS)
    assert not {"table_contract", "type_mismatch", "non_finite"} & facts_of(made).keys()
    assert not {"table_contract", "table_drift", "type_mismatch"} & {
        one.check for one in made.steps["rows", "canonical_rows"][1]
    }


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (pa.array([1, 2]), pa.array(["3", "x"]), "code is int64 in data/a.parquet, and string in data/b.parquet"),
        (pa.array([1.5]), pa.array([True]), "code is double in data/a.parquet, and bool in data/b.parquet"),
        (pa.array([1]), pa.array([1.5], pa.float32()), None),
        (pa.array(["a"]), pa.array(["b"], pa.large_string()), None),
        (pa.array(["a"]), pa.array([None], pa.null()), None),
    ],
)
def test_column_that_two_files_declare_as_different_kinds_stops_the_build(
    tmp_path: Path, one: Any, other: Any, said: str | None
) -> None:
    workspace = Workspace(tmp_path)
    workspace.write("a.parquet", as_parquet(code=one, n=[1] * len(one)))
    workspace.write("b.parquet", as_parquet(code=other, n=[1] * len(other)))
    made = workspace.recipe({"rows": {"source": {"train_urls": ["data/*.parquet"]}, "format": records()}}, seq_len=2048)
    if said is None:
        assert facts_of(made.build(only=TO_ROWS))["table_contract"] == 0
        return
    with pytest.raises(GateError, match=said):
        made.build(only=TO_EXAMPLES)
    pinned = records(table={"columns": {"code": {"type": "any"}, "n": {"type": "integer"}}})
    again = workspace.recipe({"rows": {"source": {"train_urls": ["data/*.parquet"]}, "format": pinned}}, seq_len=2048)
    assert facts_of(again.build(only=TO_ROWS))["table_contract"] == 0
