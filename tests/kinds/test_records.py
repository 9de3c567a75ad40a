"""Options of records: defaults, refusals that say what is allowed, and options given on the command line."""

from pathlib import Path
from typing import Any

import pytest

from rowmill.cli import main
from rowmill.core.errors import ConfigError
from rowmill.recipe import recipe
from rowmill.recipe.recipe import Dataset
from tests.support.recipes import TO_ROWS, TO_SHARDS, Workspace
from tests.support.row_reading import load
from tests.support.tables import as_csv, grouped, purchases, records


def parsed(form: dict[str, Any], **groups: Any) -> Dataset:
    return load(records(**form), groups=groups).datasets["rows"]


def form_of(form: dict[str, Any], **groups: Any) -> Any:
    return parsed(form, **groups).format


# ── Defaults and what follows from them ────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        ({}, "tabular"),
        (grouped(order=None), "grouped"),
        ({"time_series": {"is_timeseries": True}}, "sequential"),
        ({**grouped(), "time_series": {"is_timeseries": True}}, "sequential"),
    ],
)
def test_mode_follows_from_the_options(form: dict[str, Any], mode: str) -> None:
    assert form_of(form).mode == mode


def test_defaults_of_records_are_their_own_and_follow_from_privacy_and_time() -> None:
    dataset = parsed({})

    assert (dataset.splits.validation, dataset.splits.test, dataset.splits.method) == (0, 0.05, "hash")
    assert dataset.filters.deduplicate == "off"
    assert (form_of({}).cap, form_of({}).wanted) == (10, None)
    assert form_of({"training": {"num_input_records_to_sample": "auto"}}).wanted == 25_000
    assert form_of({"data": {"max_sequences_per_example": None}}).cap is None

    dataset = parsed({"privacy": {"dp_enabled": True}})

    assert form_of({"privacy": {"dp_enabled": True}}).cap == 1
    assert dataset.packing.pack is False

    form = form_of({"time_series": {"is_timeseries": True, "timestamp_column": "when"}})

    assert (form.order_column, form.leading_columns) == ("when", ("when",))


# ── Refusals ───────────────────────────────────────────────────────────────────────────────────────

DP = {"privacy": {"dp_enabled": True}}


@pytest.mark.parametrize(
    ("form", "groups", "said"),
    [
        (
            {"data": {"max_sequences_per_example": 0}}, {},
            'format.data.max_sequences_per_example: expected "auto", null or an integer >= 1; got 0',
        ),
        ({"data": {"max_sequences_per_example": -1}}, {}, "got -1"),
        ({"data": {"max_sequences_per_example": True}}, {}, "got True"),
        ({"data": {"group_training_examples_by": ""}}, {}, "list of them, {file: true}, or null; got ''"),
        ({"data": {"group_training_examples_by": ["a", "a"]}}, {}, "names a column twice"),
        ({"data": {"order_training_examples_by": "day"}}, {}, "'day' without a group"),
        ({"data": {"max_sequence_per_example": 3}}, {}, "did you mean max_sequences_per_example?"),
        ({"assembly": {"max_seq_length": 65}}, {}, "max_seq_length is 65, seq_len 64 is the most allowed"),
        ({"assembly": {"on_overflow": "split"}}, {}, "split in tabular mode"),
        ({"prompt": {"template": "no place"}}, {}, "expected text with {schema}, or null"),
        ({"time_series": {"is_timeseries": True, "stop_timestamp": 5}}, {}, "without an order column"),
        ({"time_series": {"timestamp_interval_seconds": 5}}, {}, "without is_timeseries"),
        (grouped(order="customer"), {}, "both group and order column"),
        (grouped(), {"splits": {"group_key": "day"}}, "splits.group_key: in grouped mode"),
        (grouped(), {"splits": {"time_key": "day"}}, "splits.time_key: in grouped mode"),
        ({**DP, "data": {"max_sequences_per_example": None}}, {}, "null under privacy.dp_enabled"),
        ({**DP, "data": {"max_sequences_per_example": 2}}, {}, "2 under privacy.dp_enabled"),
        ({**DP, **grouped(), "assembly": {"on_overflow": "split"}}, {}, "split under privacy.dp_enabled"),
        (DP, {"packing": {"pack": True}}, "packing.pack: true under format.privacy.dp_enabled"),
        ({}, {"truncation": {"max_length": 5}}, "a records dataset does not read this group"),
    ],
)  # fmt: skip
def test_invalid_option_error_says_what_is_valid(form: dict[str, Any], groups: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(form, **groups)

    assert said in str(caught.value)


def test_numbers_of_rows_are_only_for_records_and_a_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are for records; a text dataset is split by hash"):
        load({"kind": "text"}, groups={"splits": {"test": 100}})

    workspace = Workspace(tmp_path).one("table.csv", as_csv(purchases(5)), records(**grouped(by="costumer")))

    with pytest.raises(
        ConfigError, match="group_training_examples_by: no record has a column 'costumer'; there are customer"
    ):
        workspace.build(only=TO_ROWS)


# ── The command line ───────────────────────────────────────────────────────────────────────────────


def overridden(datasets: dict[str, Any], **options: str) -> Any:
    return recipe.apply_overrides({"datasets": datasets}, options)["datasets"]


def test_option_on_the_command_line_is_the_only_records_dataset_s_or_needs_a_name() -> None:
    found = overridden(
        {"a": {"format": records()}, "b": {"format": {"kind": "text"}}}, data__max_sequences_per_example="3"
    )

    assert found["a"]["format"]["data"] == {"max_sequences_per_example": 3}
    assert found["b"]["format"] == {"kind": "text"}

    datasets = {"a": {"format": records()}, "b": {"format": records()}}

    found = overridden(
        datasets, b__data__group_training_examples_by="[x, y]", a__training__num_input_records_to_sample="null"
    )

    assert found["b"]["format"]["data"] == {"group_training_examples_by": ["x", "y"]}
    assert found["a"]["format"]["training"] == {"num_input_records_to_sample": None}
    with pytest.raises(ConfigError, match="write --NAME__data__x"):
        overridden(datasets, data__x="1")


@pytest.mark.slow
def test_plan_and_advice_of_a_table_are_printed_and_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace(tmp_path).one("table.csv", as_csv(purchases(60)), records(**grouped()), splits={"test": 0})

    status = main.main(["plan", str(workspace.config), "--assembly__max_seq_length", "200"])
    said = " ".join(capsys.readouterr().err.split())
    advised = main.main(["advise", str(workspace.config), "--data__max_sequences_per_example=3"])

    assert (status, advised) == (2, 0)
    # The first records show it already, before the whole table is read.
    assert "8 groups do not fit: customer='C-0" in said
    assert "Largest group: 5 records" in " ".join(capsys.readouterr().out.split())
    assert not list((workspace.store / "mini" / "rows").rglob("*.arrow"))


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["stats", "verify", "inspect"])
def test_inspection_commands_accept_records_like_other_kinds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    workspace = Workspace(tmp_path).one("table.csv", as_csv(purchases(30)), records(), splits={"test": 0})
    workspace.build(only=TO_SHARDS)

    assert main.main([verb, str(workspace.config)]) == 0
    assert "rows" in capsys.readouterr().out


def test_unknown_option_is_refused_by_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main.main(["verify", str(tmp_path / "mini.yaml"), "--data__max_sequences_per_example", "3"])
