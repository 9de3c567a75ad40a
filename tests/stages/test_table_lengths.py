"""Lengths of tables' examples: other maximum lengths, overflow, advice."""

from pathlib import Path
from typing import Any

import pytest

from rowmill.build import comparison
from rowmill.core.console import render_text
from rowmill.core.errors import GateError
from rowmill.reports.build_view import load_build_view
from rowmill.reports.summary import render_statistics
from rowmill.stats.views import ESTIMATE_NOTES, PLANNED_NOTE
from tests.support.recipes import LENIENT, TO_ROWS, Built, Workspace
from tests.support.tables import as_csv, grouped, purchases, records

pytestmark = pytest.mark.slow

SERIES = {**grouped(), "time_series": {"is_timeseries": True}}
MODES: dict[str, dict[str, Any]] = {"tabular": {}, "grouped": grouped(), "sequential": SERIES}


def workspace_of(
    folder: Path, form: dict[str, Any], rows: list[dict[str, Any]], seq_len: int, **changes: Any
) -> Workspace:
    workspace = Workspace(folder)
    splits = changes.pop("splits", {"test": 0.2, "method": "exact"})
    return workspace.one("table.csv", as_csv(rows), records(**form), splits=splits, seq_len=seq_len, **changes)


# ── Other lengths ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", MODES)
def test_what_if_of_records_equals_a_build_at_that_length(tmp_path: Path, mode: str) -> None:
    form = {**MODES[mode], "assembly": {"on_overflow": "reject"}}
    rows = purchases(120)
    made = workspace_of(tmp_path / "made", form, rows, 1024).build()
    table = made.manifest("rows", "truncation_stats").tables["what_if"]
    assert table.columns == ("seq_len", "examples", "examples_over", "trained_lost", "sequences")
    assert [row[0] for row in table.rows] == [256, 512, 1024, 2048, 4096]

    for seq_len, examples, over, lost, sequences in (table.rows[0], table.rows[2], table.rows[3]):
        other = workspace_of(tmp_path / str(seq_len), form, rows, seq_len).build()
        facts = other.facts("rows", "tokenized_examples")
        packed = other.facts("rows", "packed_shards")
        assert (examples, over, sequences) == (facts["examples"], facts["rejected"], packed["sequences"])
        assert (lost > 0) is (over > 0)


def test_what_if_of_records_that_fit_loses_no_token_and_of_long_prompts_fits_no_record(tmp_path: Path) -> None:
    made = workspace_of(tmp_path, {}, purchases(120), 2048).build()

    table = made.manifest("rows", "truncation_stats").tables["what_if"]

    assert table.rows[0][0] == 512
    assert [row[2:4] for row in table.rows] == [(0, 0)] * len(table.rows)
    assert table.rows[0][1] > table.rows[-1][1]

    made = workspace_of(tmp_path, {"assembly": {"max_seq_length": 200}}, purchases(60), 512, splits={"test": 0}).build()
    prompt = made.facts("rows", "tokenized_examples")["prompt_tokens"]

    table = made.manifest("rows", "truncation_stats").tables["what_if"]

    assert table.rows[0][0] < prompt + 2
    assert (table.rows[0][1], table.rows[0][2], table.rows[0][4]) == (0, 60, 0)


# ── Overflow ───────────────────────────────────────────────────────────────────────────────────


def test_overflow_is_a_share_of_records_and_names_them(tmp_path: Path) -> None:
    rows = purchases(100, customers=50)
    large = [{**one, "customer": "C-large"} for one in purchases(25)]
    form = {**grouped(), "assembly": {"on_overflow": "reject", "max_seq_length": 900}}
    made = workspace_of(tmp_path, form, [*rows, *large], 1024, splits={"test": 0}).build()
    statistics = made.manifest("rows", "truncation_stats")

    assert made.facts("rows", "tokenized_examples")["rejected"] == 25
    assert statistics.facts["context_overflow"] == 0.2
    [cause] = statistics.samples["context_overflow"]
    first = made.rows_of("rows", "tokenized_examples", file="rejects")[0]
    assert cause.startswith(f"{first['reason']}: 25, the first is ")
    assert f"({first['row_id']}): " in cause


def test_pages_of_records_do_not_mention_truncation(tmp_path: Path) -> None:
    made = workspace_of(tmp_path, grouped(), purchases(120), 2048).build()

    shown = " ".join(render_text(render_statistics(load_build_view(made.project))).split())
    facts = made.facts("rows", "truncation_stats")

    assert "what truncation removed" not in shown
    assert PLANNED_NOTE in shown
    assert ESTIMATE_NOTES["what_if"] not in shown
    assert facts["measured_rows"] == 120
    assert not {"shortened", "tokens_removed", "trained_removed"} & facts.keys()
    assert None not in facts.values()
    packed = made.manifest("rows", "packed_shards")
    compared = comparison.compare_versions(made.project, packed, packed)
    assert "tokens truncated" not in [line.name for one in compared for line in one.lines]


def test_advice_on_tables_is_about_caps_prompts_and_groups(tmp_path: Path) -> None:
    crowded_form = {**grouped(), "assembly": {"on_overflow": "reject", "max_seq_length": 200}}
    capped = workspace_of(tmp_path / "capped", {"data": {"max_sequences_per_example": 1}}, purchases(60), 2048).build()
    crowded = workspace_of(tmp_path / "crowded", crowded_form, purchases(60), 2048).build()

    def hints(made: Built) -> str:
        return " ".join(made.facts("rows", "truncation_stats")["hints"])

    assert "most examples end at max_sequences_per_example 1" in hints(capped)
    assert "the prompt is" in hints(capped)
    assert "60 of 60 records are in no example" in hints(crowded)
    assert "pre-filter" not in hints(capped) + hints(crowded)


def test_remedies_of_tables_are_options_of_tables_and_split_groups_have_no_size_check(tmp_path: Path) -> None:
    form = {**grouped(), "assembly": {"on_overflow": "reject", "max_seq_length": 200}}
    gates = LENIENT | {"context_overflow": {"at_most": 0.1}}
    with pytest.raises(GateError, match=r"format\.assembly\.on_overflow: split"):
        workspace_of(tmp_path, form, purchases(60), 2048, gates=gates).build()

    form = {**grouped(), "assembly": {"on_overflow": "split"}}
    gates = LENIENT | {"group_size": {"at_most": 3}}
    made = workspace_of(tmp_path, form, purchases(60), 2048, gates=gates).build(only=TO_ROWS)

    assert made.facts("rows", "canonical_rows")["group_size"] is None
