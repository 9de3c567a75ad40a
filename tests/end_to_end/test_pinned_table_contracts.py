"""Pinned table contracts: `rowmill advise` writes them, the recipe reads them, and builds follow them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rowmill.core.config import validate_options
from rowmill.core.errors import ConfigError, GateError
from rowmill.kinds.tables.table_contract import TableContract
from rowmill.parts import functions
from rowmill.recipe import recipe
from tests.end_to_end.test_table_drift import (
    GROUPED,
    facts_of,
    project,
    rows_of,
    sale,
    sales,
    splits_of,
    types_of,
)
from tests.support.cli_project import run
from tests.support.recipes import TO_EXAMPLES, TO_ROWS, Workspace
from tests.support.tables import as_csv


def pin(workspace: Workspace, **columns: Any) -> Path:
    """Let `advise` write the contract, and replace these columns of it."""
    path = recipe.table_contract_file(workspace.config, "rows")
    assert str(path) in run("advise", str(workspace.config), "--write").out
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if columns:
        values["columns"] |= columns
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


def test_advice_proposes_a_contract_with_its_evidence_and_writes_nothing(tmp_path: Path) -> None:
    rows = [*sales(), {**sale(1), "customer": "guest", "price": "NA"}]
    workspace = project(tmp_path, as_csv(rows))
    said = run("advise", str(workspace.config)).out
    assert "  # 1,501 values: 1,500 integers, 1 texts\n" in said
    assert "  # 1 do not fit, such as 'guest' (data/sales.csv line 1502)\n  customer: {type: integer}\n" in said
    assert '  price: {type: number, na: ["NA"]}\n' in said
    assert '  day: {type: date, format: "iso8601"}\n' in said
    assert not list(tmp_path.rglob("*.table.yaml"))
    assert not list(workspace.store.rglob("canonical_rows"))


def test_file_that_advice_writes_is_the_contract_that_a_build_would_propose(tmp_path: Path) -> None:
    rows = [{**one, "a, b": "1", "null": "x", 'quo"te': "2,5", "ümlaut": "?"} for one in sales(50)]
    workspace = project(tmp_path, as_csv(rows))
    free = workspace.build(only=TO_ROWS)
    values = yaml.safe_load(pin(workspace).read_text(encoding="utf-8"))
    pinned = workspace.build(only=TO_ROWS)
    contract = validate_options(TableContract, values, "file")
    assert workspace.project.recipe.datasets["rows"].format.model_dump()["table"] == contract.model_dump()
    assert (contract.delimiter, contract.group, contract.order) == (",", ("customer",), "day")
    assert [row["record"] for row in rows_of(pinned)] == [row["record"] for row in rows_of(free)]
    assert splits_of(pinned) == splits_of(free)


@pytest.mark.slow
def test_pinned_file_accepts_what_a_night_changed(tmp_path: Path) -> None:
    workspace = project(tmp_path, as_csv(sales(600)))
    workspace.build()
    workspace.write("sales.csv", as_csv([{**row, "channel": "web"} for row in sales(600)]))
    with pytest.raises(GateError, match="channel is new"):
        workspace.build()
    pin(workspace)
    accepted = workspace.build()
    assert types_of(accepted)["channel"] == "string"
    assert accepted.result("table_drift", "rows", "canonical_rows").outcome == "not_applicable"


def test_pinned_columns_decide_over_what_the_data_would_propose(tmp_path: Path) -> None:
    workspace = project(tmp_path, as_csv([*sales(40), {**sale(1), "price": "free"}, {**sale(2), "customer": "guest"}]))
    price, note = {"type": "number", "na": ["free"]}, {"type": "text", "use": False}
    pin(workspace, price=price, customer={"type": "integer"}, paid={"type": "text"}, note=note)
    made = workspace.build(only=TO_ROWS)
    assert types_of(made) == {"customer": "integer", "day": "string", "price": "decimal", "paid": "string"}
    assert '"price":null,"paid":"True"}' in rows_of(made)[-1]["record"]
    assert made.manifest("rows", "canonical_rows").ledger == (("kept", "", 41), ("rejected", "type_mismatch", 1))
    assert (facts_of(made)["table_contract"], facts_of(made)["type_mismatch"]) == (0, 1)


def test_value_that_does_not_fit_is_null_where_the_contract_says_so(tmp_path: Path) -> None:
    workspace = project(tmp_path, as_csv([*sales(40), {**sale(1), "price": "free"}]))
    pin(workspace, price={"type": "number", "on_mismatch": "na"})
    made = workspace.build(only=TO_ROWS)
    assert '"price":null' in rows_of(made)[-1]["record"]
    assert (facts_of(made)["kept"], facts_of(made)["type_mismatch"]) == (41, 1)


@pytest.mark.slow
def test_pinned_contract_moves_no_group_whatever_type_it_gives_them(tmp_path: Path) -> None:
    workspace = project(tmp_path, as_csv(sales()))
    before = splits_of(workspace.build(only=TO_ROWS))
    pin(workspace, customer={"type": "text"})
    after = workspace.build(only=TO_ROWS)
    assert types_of(after)["customer"] == "string"
    assert splits_of(after) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"channel": "web"}, "channel is new: the contract has no such column: 'web' (data/sales.csv line 2)"),
        ({"paid": None}, "paid is missing from every record (data/sales.csv line 2)"),
    ],
)
def test_column_that_a_pinned_contract_does_not_expect_stops_the_build(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    workspace = project(tmp_path, as_csv(sales(60)))
    pin(workspace)
    changed = [{name: value for name, value in {**row, **change}.items() if value is not None} for row in sales(60)]
    workspace.write("sales.csv", as_csv(changed))

    with pytest.raises(GateError) as caught:
        workspace.build(only=TO_EXAMPLES)
    assert said in str(caught.value)


def test_private_values_are_in_no_comment(tmp_path: Path) -> None:
    rows = [*sales(), {**sale(1), "customer": "guest"}]
    workspace = project(tmp_path, as_csv(rows), {**GROUPED, "privacy": {"dp_enabled": True}})
    text = pin(workspace).read_text(encoding="utf-8")
    assert "1 do not fit\n" in text
    assert "guest" not in text


# ── What cannot be ─────────────────────────────────────────────────────────────────────────────────
def load(folder: Path, table: Any = None, *, file: str | None = None, name: str = "rows") -> recipe.Recipe:
    workspace = project(folder, as_csv(sales(5)), GROUPED | ({} if table is None else {"table": table}))
    if file is not None:
        path = recipe.table_contract_file(workspace.config, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(file, encoding="utf-8")
    return recipe.load_recipe(workspace.config)


COLUMNS = {"customer": {"type": "integer"}, "day": {"type": "date", "format": "iso8601"}}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"columns": {}}, "format.table.columns"),
        ({"columns": COLUMNS, "group": ["who"]}, "table.group: ('who',), but data.group_training_examples_by is"),
        ({"columns": COLUMNS, "order": "time"}, "table.order: 'time', but data.order_training_examples_by is 'day'"),
        ({"columns": {"day": COLUMNS["day"]}}, "'customer' groups or orders the records"),
        ({"columns": {**COLUMNS, "customer": {"type": "integer", "use": False}}}, "'customer' groups or orders"),
        ({"columns": {**COLUMNS, "a": {"typ": "integer"}}}, "did you mean type?"),
    ],
)
def test_invalid_contract_is_refused_at_load(tmp_path: Path, table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, table)
    assert said in str(caught.value)


def test_file_with_a_mistake_of_no_dataset_or_beside_a_contract_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no records dataset 'other'"):
        load(tmp_path / "a", file="columns: {a: {type: text}}", name="other")
    with pytest.raises(ConfigError, match=r"rows\.format\.table: .*rows\.table\.yaml is its table contract, too"):
        load(tmp_path / "b", {"columns": COLUMNS}, file="columns: {a: {type: text}}")
    with pytest.raises(ConfigError, match=r"mini/rows\.table\.yaml: columns\.day: .*needs a format"):
        load(tmp_path / "c", file="columns: {day: {type: date}}")


def test_contract_files_are_not_recipes(tmp_path: Path) -> None:
    for name in ("a.yaml", "a/rows.table.yaml", "demo/b.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in recipe.find_recipes(tmp_path)] == ["a.yaml", "b.yaml"]


@pytest.mark.slow
@pytest.mark.parametrize("on_mismatch", ["na", "reject"])
def test_rows_are_the_same_whether_parts_are_made_together_or_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_mismatch: str
) -> None:
    unfit = {"price": "cheap", "customer": "", "day": "soon"}
    rows = sales(10_000)
    for place in range(500, len(rows), 1_700):
        for number, (name, cell) in enumerate(unfit.items()):
            rows[place + number][name] = cell
    table = {"columns": {
        "customer": {"type": "integer"},
        "day": {"type": "date", "format": "iso8601", "on_mismatch": on_mismatch},
        "price": {"type": "number", "on_mismatch": on_mismatch},
        "note": {"type": "text"},
    }}  # fmt: skip
    made: list[dict[str, bytes]] = []
    for name, size in (("together", 1 << 30), ("alone", 0)):
        monkeypatch.setattr(functions, "BATCH_BYTES", size)
        workspace = project(tmp_path / name, as_csv(rows), {**GROUPED, "table": table})
        workspace.build(only=TO_ROWS)
        folder = workspace.store / "mini" / "rows" / "canonical_rows"
        files = [*folder.glob("parts/*/*.arrow"), *folder.glob("parts/*/*.json")]
        made.append({str(path.relative_to(folder)): path.read_bytes() for path in files})

    assert len(made[0]) > 30
    assert made[0] == made[1]
