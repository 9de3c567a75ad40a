"""Records in whole builds: rows, schema, splits, examples, ledger and shards of small tables."""

import datetime as dt
import io
import json
import math
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console
from tokenizers import Tokenizer

from rowmill.build import steps
from rowmill.cli import main
from rowmill.core.errors import ConfigError, ContextOverflowError, GateError, GenerationError
from rowmill.inspection import inspect
from rowmill.kinds.tables.partition_plan import TablePlan
from rowmill.reports.console import render_table_plans
from tests.end_to_end.test_table_drift import facts_of, rows_of
from tests.support.recipes import TO_EXAMPLES, TO_ROWS, Built, Workspace, lines, tokenizer_json
from tests.support.tables import (
    as_csv,
    as_parquet,
    as_written,
    cells,
    grouped,
    known,
    purchases,
    read_back,
    records,
    schema_of,
    trained_texts,
)
from tests.support.tiers import mark_all_but

TOKENIZER = Tokenizer.from_str(tokenizer_json())
ALL_ROWS = {"deduplicate": "off"}
SERIES = {**grouped(), "time_series": {"is_timeseries": True}}
MODES: dict[str, dict[str, Any]] = {"tabular": {}, "grouped": grouped(), "sequential": SERIES}


def table(workspace: Workspace, content: bytes, form: dict[str, Any], **options: Any) -> Workspace:
    """Write a table and a recipe of it."""
    return workspace.one("table.csv", content, records(**form), **{"splits": {"test": 0}, "seq_len": 2048} | options)


def built(
    folder: Path, form: dict[str, Any], count: int = 60, *, only: tuple[str, ...] = TO_EXAMPLES, **options: Any
) -> Built:
    return table(Workspace(folder), as_csv(purchases(count)), form, **options).build(only=only)


def built_of(
    folder: Path, name: str, content: bytes | list[dict[str, Any]], form: dict[str, Any], test: float = 0
) -> Built:
    """Build a file of records as far as its examples."""
    return Workspace(folder).one(name, content, form, splits={"test": test}).build(only=TO_EXAMPLES)


# ── Every record comes back ────────────────────────────────────────────────────────────────────────
@pytest.mark.slow
@pytest.mark.parametrize("cap", mark_all_but([2], [1, 2, None]))
@pytest.mark.parametrize("mode", MODES)
def test_trained_tokens_of_every_mode_and_cap_read_back_as_the_rows(tmp_path: Path, mode: str, cap: int | None) -> None:
    form = {**MODES[mode], "data": {**MODES[mode].get("data", {}), "max_sequences_per_example": cap}}
    made = built(tmp_path, form)
    parsed, schema = read_back(made, TOKENIZER, form), schema_of(made)
    assert known(made)["mode"] == mode
    assert as_written(parsed, schema) == cells(purchases(60), schema.names)
    assert {span.kind for one in parsed for span in one.spans} <= {"record", "delimiter"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_examples_hold_the_generation_prompt_and_are_those_of_the_plan_before_the_build(
    tmp_path: Path, mode: str
) -> None:
    made = built(tmp_path, MODES[mode])
    frame = known(made)["frame"]
    prompt = len(frame["prompt_ids"])
    for one in made.examples():
        assert one["input_ids"][: prompt + 1] == [*frame["prompt_ids"], frame["bos_id"]]
        assert one["loss_mask"] == [False] * prompt + [True] * (len(one["input_ids"]) - prompt)
        assert one["input_ids"][-1] == frame["eos_id"]
    assert TOKENIZER.decode(frame["prompt_ids"], skip_special_tokens=False) == frame["prompt_text"]
    plan, facts = planned(made.project), made.manifest("rows", "tokenized_examples").facts
    train = plan.facts["train"]
    assert (train["examples"], train["tokens"]) == (facts["examples"], facts["tokens"])
    sizes = plan.splits[0].sizes["example_tokens"]
    lengths = Counter(len(one["input_ids"]) for one in made.examples())
    assert dict(sizes) == lengths
    assert facts["accounted"] == 0


@pytest.mark.parametrize(
    ("mode", "said"), [("tabular", "at most 3 records each"), ("grouped", "at most 3 groups each")]
)
def test_plan_says_what_the_cap_of_an_example_counts(tmp_path: Path, mode: str, said: str) -> None:
    form = {**MODES[mode], "data": {**MODES[mode].get("data", {}), "max_sequences_per_example": 3}}
    project = table(Workspace(tmp_path), as_csv(purchases(20)), form).project
    screen = Console(file=io.StringIO(), width=200)
    screen.print(render_table_plans(inspect.plan_tables(project)))

    assert isinstance(screen.file, io.StringIO)
    assert said in screen.file.getvalue()


def planned(project: steps.Project) -> TablePlan:
    [one] = inspect.plan_tables(project)
    assert isinstance(one.plan, TablePlan), one.overflow
    return one.plan


def test_spans_of_an_example_distinguish_prompt_delimiters_and_records(tmp_path: Path) -> None:
    made = built(tmp_path, {"data": {"max_sequences_per_example": 3}})

    for one in made.examples():
        kinds = one["span_kinds"]
        assert kinds == [7, 6, *[8] * len(one["row_ids"]), 6]
        assert one["span_messages"] == [-1, -1, *range(len(one["row_ids"])), -1]
        assert one["trained_tokens"] + one["context_tokens"] == one["tokens"] == len(one["input_ids"])


def test_grouped_examples_keep_groups_whole_ordered_and_named(tmp_path: Path) -> None:
    made = built(tmp_path, grouped(max_sequences_per_example=2))
    for one, text in zip(made.examples(), trained_texts(made, TOKENIZER), strict=True):
        units = [unit.removesuffix("<|im_end|>") for unit in text.split("<|im_start|>")[1:]]
        assert len(units) == len(one["group_keys"]) <= 2
        for unit, key in zip(units, one["group_keys"], strict=True):
            rows = [json.loads(line) for line in unit.splitlines()]
            assert {row["customer"] for row in rows} == {json.loads(key)}
            assert len(rows) == 5
            assert [row["day"] for row in rows] == sorted(row["day"] for row in rows)


def test_sequential_examples_lead_with_group_and_order_and_count_their_records(tmp_path: Path) -> None:
    made = built(tmp_path, {**SERIES, "data": {**SERIES["data"], "max_sequences_per_example": 2}})

    assert schema_of(made).names[:2] == ("customer", "day")
    starts: dict[str, list[tuple[int, int]]] = {}
    for one in made.examples():
        [key] = one["group_keys"]
        starts.setdefault(key, []).append((one["record_start"], one["record_stop"]))
    assert all(sorted(found) == [(0, 2), (2, 4), (4, 5)] for found in starts.values())


def test_prefill_holds_the_first_records_of_every_train_series_as_trained(tmp_path: Path) -> None:
    made = built(tmp_path, SERIES)
    prefill = made.rows_of("rows", "tokenized_examples", file="prefill")
    text = "".join(trained_texts(made, TOKENIZER))
    assert [one["group_key"] for one in prefill] == [f'"C-{i:03d}"' for i in range(12)]
    assert all(len(one["records"]) == 3 and "".join(one["records"]) in text for one in prefill)
    assert all(one["start"] <= one["stop"] and one["length"] == 5 for one in prefill)


def test_numbers_beyond_64_bits_and_float64_are_compared_advised_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = 10**25
    rows = [{"t": huge + i, "x": "1e999" if i == 7 else i % 9, "k": huge + i % 3, "v": i} for i in range(60)]
    form = {"data": {"order_training_examples_by": "t"}, "time_series": {"is_timeseries": True}, "generation": {}}
    workspace = table(Workspace(tmp_path), as_csv(rows), form)
    text = "\n".join(f'{{"t":{huge + i},"x":{x},"k":{huge + i % 3},"v":{i}}}' for i, x in enumerate((0, "1e999", 2)))
    (tmp_path / "generated/mini/rows").mkdir(parents=True)
    (tmp_path / "generated/mini/rows/one.txt").write_text(text)
    made = workspace.build(only=(*TO_EXAMPLES, "parsed_records"))
    [prefill] = made.rows_of("rows", "tokenized_examples", file="prefill")

    assert (prefill["start"], prefill["stop"]) == (str(huge), str(huge + 59))
    assert made.manifest("rows", "parsed_records").facts["exact_copies"] == pytest.approx(2 / 3)

    assert main.main(["advise", str(workspace.config)]) == 0
    assert " k 3 20 0 20 " in " ".join(capsys.readouterr().out.split())

    form = grouped("k", "v")
    with pytest.raises(ContextOverflowError, match=f"k={huge + 1} needs .* k={huge} needs"):
        built_of(tmp_path / "groups", "rows.jsonl", lines({**row, "x": 0} for row in rows), records(**form))


@pytest.mark.parametrize("mode", ["grouped", "sequential"])
def test_numbers_of_any_exponent_order_records(tmp_path: Path, mode: str) -> None:
    values = ["4", "2.5", "1e-2000000", "-1e-99999999", "-1", "0"]
    content = "".join(f'{{"g":"a","t":{value},"v":{i}}}\n' for i, value in enumerate(values)).encode()
    form = {**grouped("g", "t"), "time_series": {"is_timeseries": mode == "sequential"}}
    made = built_of(tmp_path, "rows.jsonl", content, records(**form))
    [parsed] = read_back(made, TOKENIZER, form)

    assert [record["v"] for record in parsed.records] == [4, 3, 5, 2, 1, 0]


# ── Types ──────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.slow
def test_types_of_cells_are_decided_over_all_parts(tmp_path: Path) -> None:
    made = built(tmp_path, {}, count=1200)
    types = {one.name: (one.type, one.nullable) for one in schema_of(made).columns}
    assert types == {
        "customer": ("string", False), "day": ("string", False), "amount": ("decimal", False),
        "items": ("integer", False), "kind": ("string", False), "note": ("string", True),
    }  # fmt: skip
    assert len(made.manifest("rows", "canonical_rows").parts) > 1


@pytest.mark.slow
def test_new_row_that_changes_a_type_moves_no_row_to_another_split(tmp_path: Path) -> None:
    rows = [{"a": str(i), "b": f"{i}.5"} for i in range(700)]
    workspace = table(Workspace(tmp_path), as_csv(rows), {}, seq_len=256, splits={"test": 0.3})
    before = [row["split"] for row in rows_of(workspace.build(only=TO_EXAMPLES))]
    workspace.write("table.csv", as_csv([*rows, {"a": "01", "b": "1e5"}]))
    made = workspace.build(only=TO_ROWS)
    columns = made.manifest("rows", "canonical_rows").details["records"]["schema"]["columns"]
    assert [one["type"] for one in columns] == ["string", "decimal"]
    assert [row["split"] for row in rows_of(made)][: len(rows)] == before


def test_json_numbers_keep_their_digits_and_absent_keys_stay_absent(tmp_path: Path) -> None:
    content = b'{"a":42.50,"b":1180591620717411303424}\n{"a":1,"b":null,"c":[1,2.50]}\n'
    made = built_of(tmp_path, "rows.jsonl", content, records())
    records_of = [row["record"] for row in rows_of(made)]
    assert records_of == ['{"a":42.50,"b":1180591620717411303424}', '{"a":1,"b":null,"c":[1,2.50]}']
    assert [(one.type, one.nullable, one.required) for one in schema_of(made).columns] == [
        ("decimal", False, True), ("integer", True, True), ("json", False, False),
    ]  # fmt: skip


def test_parquet_keeps_its_types(tmp_path: Path) -> None:
    columns = {
        "i": pa.array([1, None], pa.int64()),
        "f": pa.array([18.0, 1e-12]),
        "d": pa.array([Decimal("42.50"), Decimal("1.00")], pa.decimal128(9, 2)),
        "t": pa.array([dt.date(2024, 1, 15), dt.date(2024, 1, 16)]).cast(pa.timestamp("us")),
        "l": pa.array([[1, 2], []], pa.list_(pa.int32())),
    }
    made = built_of(tmp_path, "rows.parquet", as_parquet(**columns), records())
    assert [one.type for one in schema_of(made).columns] == ["integer", "float", "decimal", "datetime", "list"]
    first, second = (row["record"] for row in rows_of(made))
    assert first == '{"i":1,"f":18.0,"d":42.50,"t":"2024-01-15T00:00:00","l":[1,2]}'
    assert second == '{"i":null,"f":1e-12,"d":1.00,"t":"2024-01-16T00:00:00","l":[]}'


# ── Rejects and the ledger ─────────────────────────────────────────────────────────────────────────
def test_rows_without_group_or_readable_order_are_rejected_with_their_reasons(tmp_path: Path) -> None:
    rows = [
        {"g": "a", "t": 1}, {"g": None, "t": 2}, {"t": 3}, {"g": "a", "t": None}, {"g": "a", "t": "soon"},
        {"g": "a", "t": 4},
    ]  # fmt: skip
    form = records(**grouped("g", "t"), time_series={"is_timeseries": True, "timestamp_format": "elapsed_seconds"})
    made = built_of(tmp_path, "rows.jsonl", rows, form)
    assert made.rejects() == [(1, "group_missing"), (2, "group_missing"), (3, "order_missing"), (4, "order_unparsable")]


@pytest.mark.parametrize("word", ["inf", "-Infinity", " INF "])
@pytest.mark.parametrize("by", ["order", "split"])
def test_infinite_time_of_a_cell_is_not_called_missing(tmp_path: Path, word: str, by: str) -> None:
    rows = [{"g": f"g{i // 6}", "t": str(60 * (i % 6)), "v": "x"} for i in range(12)]
    cells = as_csv([*rows, {"g": "g0", "t": word, "v": "x"}, {"g": "g0", "t": "NA", "v": "x"}])
    form, splits = (
        (records(**grouped("g", "t")), {"test": 0})
        if by == "order"
        else (records(), {"time_key": "t", "boundaries": {"test": 200}})
    )
    made = Workspace(tmp_path).one("rows.csv", cells, form, splits=splits).build(only=TO_ROWS)
    assert made.rejects() == [(12, "order_unparsable"), (13, "order_missing")]
    assert word in made.details()[0]


def test_infinite_time_of_a_float_is_not_called_missing(tmp_path: Path) -> None:
    times = pa.array([1.5, math.inf, None, 2.5], from_pandas=False)
    content = as_parquet(g=["a"] * 4, t=times)
    made = built_of(tmp_path, "rows.parquet", content, records(**grouped("g", "t")))
    assert made.rejects() == [(1, "order_unparsable"), (2, "order_missing")]


@pytest.mark.parametrize("name", ["table.csv", "rows.jsonl"])
def test_group_that_its_column_reads_as_null_is_missing(tmp_path: Path, name: str) -> None:
    rows = [{"g": 1, "v": 1}, {"g": "guest", "v": 2}, {"g": "?", "v": 3}]
    columns = {"g": {"type": "integer", "na": ["?"], "on_mismatch": "na"}, "v": {"type": "integer"}}
    form = records(**grouped("g", None), table={"columns": columns})
    made = built_of(tmp_path, name, as_csv(rows) if name == "table.csv" else rows, form)

    assert made.rejects() == [(1, "group_missing"), (2, "group_missing")]


def test_row_is_assembled_left_out_or_rejected_and_tokens_add_up(tmp_path: Path) -> None:
    assembly = {"on_overflow": "reject", "max_seq_length": 400}
    form = {"training": {"num_input_records_to_sample": 25}, "assembly": assembly}
    rows = [*purchases(60), {**purchases(1)[0], "note": "word " * 300}]
    made = table(Workspace(tmp_path), as_csv(rows), form).build(only=TO_EXAMPLES)
    manifest = made.manifest("rows", "tokenized_examples")
    assert sorted(manifest.ledger) == [("kept", "", 25), ("not_sampled", "", 35), ("rejected", "record_overflow", 1)]
    assert made.rejects() == [(60, "record_overflow")]
    shown = [row for one in made.examples() for row in one["row_ids"]]
    assert len(shown) == len(set(shown)) == 25
    assert sum(tokens for _, _, tokens in manifest.token_ledger) == sum(one["tokens"] for one in made.examples())
    assert {name: count for _, name, count in manifest.token_ledger if count}.keys() == {"trained", "context"}


def test_resampled_rows_are_shown_again_under_names_of_their_own(tmp_path: Path) -> None:
    made = built(tmp_path, {"training": {"num_input_records_to_sample": 150}, "data": {"max_sequences_per_example": 1}})
    examples = made.examples()
    names = [one["example_id"] for one in examples]
    assert len(names) == len(set(names)) == 150
    assert {name.rsplit("#", 1)[1] for name in names} == {"0", "1", "2"}
    assert sorted({one["pass"] for one in examples}) == [0, 1, 2]


# ── What does not fit ──────────────────────────────────────────────────────────────────────────────
def test_group_that_does_not_fit_stops_the_build_before_any_file_of_tokens(tmp_path: Path) -> None:
    form = grouped() | {"assembly": {"max_seq_length": 300}}
    workspace = table(Workspace(tmp_path), as_csv(purchases(60, customers=6)), form)
    with pytest.raises(ContextOverflowError, match="6 groups do not fit: customer='C-00") as caught:
        workspace.build(only=TO_EXAMPLES)

    assert isinstance(caught.value, GenerationError)
    assert "limit 300" in str(caught.value)
    assert "; raise format.assembly.max_seq_length (at most seq_len), or choose a finer" in str(caught.value)
    assert "format.assembly.on_overflow: split" in str(caught.value)
    written = [path for path in (workspace.store / "mini" / "rows" / "tokenized_examples").rglob("*") if path.is_file()]
    # The ids of the records are kept, which are those of any plan, and the plan with what does not fit.
    assert sorted(path.name for path in written) == [".lock", "part.json", "part.json", "states.arrow", "tokens.arrow"]


@pytest.mark.slow
def test_build_after_one_that_did_not_fit_encodes_nothing_again(tmp_path: Path) -> None:
    def made_in(folder: Path, **assembly: Any) -> Built:
        form = grouped() | {"assembly": {"max_seq_length": 300, **assembly}}
        return table(Workspace(folder), as_csv(purchases(60, customers=6)), form).build(only=TO_EXAMPLES)

    with pytest.raises(ContextOverflowError):
        made_in(tmp_path)
    again, fresh = (made_in(folder, on_overflow="split") for folder in (tmp_path, tmp_path / "fresh"))
    key = ("rows", "tokenized_examples")
    assert (again.report(*key).rows_made, fresh.report(*key).rows_made) == (0, 60)
    assert again.manifest(*key).version == fresh.manifest(*key).version
    assert again.examples() == fresh.examples()


def test_overflow_names_the_group_its_tokens_and_the_limit_to_the_token(tmp_path: Path) -> None:
    rows = [{"customer": "C-001", "n": "1"}, *({"customer": "C-002", "n": str(n)} for n in range(40))]
    form = grouped(order=None) | {"prompt": {"style": "names"}}
    with pytest.raises(ContextOverflowError) as caught:
        table(Workspace(tmp_path), as_csv(rows), form, seq_len=300).build(only=TO_EXAMPLES)

    prompt = len(TOKENIZER.encode("customer, n\n").ids)
    tokens = sum(len(TOKENIZER.encode(f'{{"customer":"C-002","n":{n}}}\n').ids) for n in range(40))
    wanted = (
        f"1 group does not fit: customer='C-002' needs {prompt + 2 + tokens} tokens (prompt {prompt}, BOS/EOS 2, "
        f"40 records {tokens}), limit 300"
    )
    assert wanted in str(caught.value)


def test_group_too_large_is_cut_between_records_where_that_is_allowed(tmp_path: Path) -> None:
    form = {**grouped(), "assembly": {"on_overflow": "split", "max_seq_length": 300}}
    made = built(tmp_path, form)
    assert max(one["tokens"] for one in made.examples()) <= 300
    parsed = read_back(made, TOKENIZER, form)
    assert as_written(parsed, schema_of(made)) == cells(purchases(60), schema_of(made).names)


def test_prompt_that_leaves_no_tokens_names_its_widest_columns(tmp_path: Path) -> None:
    rows = [{"a": "1", "a column with a very long name that nobody reads": "2"}]
    with pytest.raises(ContextOverflowError, match="widest columns are a column with a very long name") as caught:
        table(Workspace(tmp_path), as_csv(rows), {}, seq_len=24).build(only=TO_EXAMPLES)
    remedies = "; raise seq_len, or shorten these names, or set format.prompt.style: names"
    assert str(caught.value).endswith(remedies)


# ── Order and time ─────────────────────────────────────────────────────────────────────────────────
def series(folder: Path, times: list[str], **time_series: Any) -> Built:
    rows = [{"t": time, "v": str(i)} for i, time in enumerate(times)]
    form = records(data={"order_training_examples_by": "t"}, time_series={"is_timeseries": True, **time_series})
    return Workspace(folder).one("table.csv", as_csv(rows), form).build(only=TO_EXAMPLES)


@pytest.mark.slow
def test_interval_is_found_where_it_is_constant_and_its_breach_fails_a_check(tmp_path: Path) -> None:
    hours = [f"2024-01-01T{hour:02d}:00:00" for hour in range(10)]
    with_a_gap = [*hours, "2024-01-02T00:00:00"]
    broken = series(tmp_path / "broken", with_a_gap, timestamp_interval_seconds=3600)
    assert known(series(tmp_path / "found", hours))["interval_seconds"] == "3600"
    assert facts_of(broken)["interval_mismatch"] == 0.1
    assert known(series(tmp_path / "no", with_a_gap))["interval_seconds"] is None


def test_lone_series_stays_in_train(tmp_path: Path) -> None:
    rows = [{"g": "only", "t": str(i)} for i in range(50)]
    form = records(**grouped("g", "t"), time_series={"is_timeseries": True})
    assert facts_of(built_of(tmp_path, "table.csv", as_csv(rows), form, test=0.99))["splits"] == {"train": 50}


# ── Splits ─────────────────────────────────────────────────────────────────────────────────────────
def splits_of(made: Built, by: str = "group_key") -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in rows_of(made):
        found.setdefault(row[by], set()).add(row["split"])
    return found


@pytest.mark.slow
def test_groups_are_never_in_two_splits_and_exact_splits_have_their_rows(tmp_path: Path) -> None:
    by_hash = built(tmp_path / "hash", grouped(), 600, seq_len=8192, splits={"test": 0.25})
    exact = built(tmp_path / "exact", grouped(), 600, seq_len=8192, splits={"test": 100, "validation": 50})

    assert all(len(splits) == 1 for splits in {**splits_of(by_hash), **splits_of(exact)}.values())
    assert facts_of(exact)["splits"] == {"test": 100, "train": 450, "validation": 50}
    assert len(read_back(exact, TOKENIZER, grouped())) == len(exact.examples())


def test_equal_rows_of_a_table_stay_in_one_split_and_are_no_copies(tmp_path: Path) -> None:
    rows = [{"a": str(i % 100)} for i in range(400)]
    made = built_of(tmp_path, "table.csv", as_csv(rows), records(), test=0.3)
    assert facts_of(made)["kept"] == 400
    assert {len(splits) for splits in splits_of(made, "record").values()} == {1}


# ── Privacy ────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_private_examples_hold_one_unit_and_sequences_one_example(tmp_path: Path, mode: str) -> None:
    made = built(tmp_path, {**MODES[mode], "privacy": {"dp_enabled": True}}, only=())
    units = [one["input_ids"].count(known(made)["frame"]["bos_id"]) for one in made.examples()]
    assert set(units) == {1}
    assert mode == "grouped" or {len(one["row_ids"]) for one in made.examples()} == {1}
    facts = made.manifest("rows", "packed_shards").facts
    assert facts["sequences"] == facts["segments"] == len(made.examples())
    assert made.manifest("rows", "tokenized_examples").files("prefill") == []
    assert planned(made.project).options["privacy_unit"] == ("group" if mode == "grouped" else "record")


def test_private_resampling_beyond_the_records_is_refused(tmp_path: Path) -> None:
    form = {"privacy": {"dp_enabled": True}, "training": {"num_input_records_to_sample": 61}}
    with pytest.raises(ConfigError, match="61 of 60 train records under privacy"):
        built(tmp_path, form)


# ── Reuse and determinism ──────────────────────────────────────────────────────────────────────────
@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    datasets = {
        mode: {"source": {"train_urls": [f"data/{mode}.csv"]}, "format": records(**form), "filters": ALL_ROWS}
        for mode, form in MODES.items()
    }
    versions: list[dict[str, str]] = []
    for workers in (1, 2):
        workspace = Workspace(tmp_path / str(workers))
        for mode in MODES:
            workspace.write(f"{mode}.csv", as_csv([{**row, "kind": mode} for row in purchases(1200, customers=60)]))
        workspace.recipe(datasets, seq_len=4096, execution={"workers": workers})
        versions.append(workspace.build().versions())
    assert versions[0] == versions[1]


@pytest.mark.slow
def test_appended_rows_are_encoded_and_earlier_ones_are_not(tmp_path: Path) -> None:
    workspace = table(Workspace(tmp_path), as_csv(purchases(1500)), {})
    first = workspace.build(only=TO_EXAMPLES).report("rows", "tokenized_examples")
    workspace.write("table.csv", as_csv(purchases(1510)))
    made = workspace.build(only=TO_EXAMPLES)
    assert first.rows_made == 1500
    assert 10 <= made.report("rows", "tokenized_examples").rows_made <= 512 + 10
    assert sum(len(one["row_ids"]) for one in made.examples()) == 1510


@pytest.mark.slow
def test_another_seed_gives_other_examples_of_the_same_ids(tmp_path: Path) -> None:
    one, other = built(tmp_path, {}, 600), built(tmp_path, {}, 600, seed=1)

    assert other.report("rows", "tokenized_examples").rows_made == 0
    assert [e["row_ids"] for e in one.examples()] != [e["row_ids"] for e in other.examples()]
    assert not other.report("rows", "tokenized_examples").reused


def test_budgets_of_train_series_are_between_seven_tenths_and_the_record_budget(tmp_path: Path) -> None:
    rows = [{"g": f"g{i // 200}", "t": str(i), "v": f"{i * 37 % 100}.5"} for i in range(1000)]
    form = records(**grouped("g", "t", max_sequences_per_example=None), time_series={"is_timeseries": True})
    made = built_of(tmp_path, "table.csv", as_csv(rows), form)
    room = made.manifest("rows", "tokenized_examples").facts["record_room"]
    budgets = np.array([one["budget"] for one in made.examples()])
    assert ((budgets >= -(-7 * room // 10)) & (budgets <= room)).all()
    assert len(set(budgets.tolist())) > 10


# ── The wire ───────────────────────────────────────────────────────────────────────────────────────
def test_reference_wire_prints_as_the_original_and_counts_what_it_changes(tmp_path: Path) -> None:
    content = lines([{"a": 42.5, "b": 1}, {"a": 1, "b": None}]) + b'{"a":0.000000000001,"b":3}\n'
    form = records(codec={"wire": "reference"}, data={"max_sequences_per_example": 1})
    made = built_of(tmp_path, "rows.jsonl", content, form)
    texts = sorted(text.split("<|im_start|>")[1].split("<|im_end|>")[0] for text in trained_texts(made, TOKENIZER))
    assert texts == ['{"a":0.0,"b":3.0}\n', '{"a":1.0,"b":null}\n', '{"a":42.5,"b":1.0}\n']
    assert made.manifest("rows", "tokenized_examples").facts["changed_by_wire"] == 1


def test_gate_of_rejects_names_the_reasons_and_a_line_of_the_commonest(tmp_path: Path) -> None:
    form = records(data={"group_training_examples_by": "g"})
    content = b"g,t\n" + b"".join(b"%s,%d\n" % (b"" if i in (3, 5) else b"a", i) for i in range(8))
    workspace = Workspace(tmp_path).one(
        "rows.csv", content, form, splits={"test": 0}, gates={"rejects": {"at_most": 0.05}}
    )

    with pytest.raises(GateError, match=r"rejects.*\n  group_missing: 2, the first is \S*rows\.csv line 5 \(\w+:3\)"):
        workspace.build(only=TO_EXAMPLES)
