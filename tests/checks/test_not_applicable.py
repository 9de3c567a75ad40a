"""Checks that do not apply to some data: which ones, for which kinds, and that they are not shown as passed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from dagster_rowmill import metadata
from dagster_rowmill.factory import make_asset_check_result
from rowmill.checks.catalog import CHECKS
from rowmill.checks.judge import CheckResult
from rowmill.cli import main
from rowmill.core import arrays
from rowmill.kinds.tables.record_tokens import count_verified
from rowmill.reports import report_page, summary
from rowmill.reports.build_view import load_build_view
from rowmill.stats.views import query_views
from tests.support.recipes import CHAT, CHATML, PAIR, TEXT, Built, Workspace, chat, document, pair
from tests.support.tables import as_csv, grouped, purchases, records

OTHERS = {
    *("render_equal", "content_dropped", "reasoning_dropped", "contract", "prompt_match", "date_pinned"),
    "short_documents",
}
IDLE: Mapping[str, set[str]] = {
    "chats": {"group_size", "group_advice", "interval_mismatch", "unpinned_boundaries", "short_documents",
              "doubtful_header"},
    "pairs": {"unknown_roles", "group_size", "group_advice", "interval_mismatch", "unpinned_boundaries",
              "prompt_parity", "doubtful_header", *OTHERS},
    "texts": {"unknown_roles", "group_size", "group_advice", "interval_mismatch", "unpinned_boundaries",
              "preference_data", "prompt_parity", "doubtful_header", *OTHERS},
    "table": {"unknown_roles", "group_size", "group_advice", "interval_mismatch", "unpinned_boundaries",
              "preference_data", "unread_flags", "unread_text", "ambiguous_times", "table_drift", *OTHERS},
    "groups": {"preference_data", "unread_flags", "unread_text", "unknown_roles", "table_drift",
               "interval_mismatch", "unpinned_boundaries", *OTHERS},
}  # fmt: skip
"""Dataset → the checks of its first stages that have nothing to ask it."""
ON_REQUEST = {check.name for check in CHECKS if check.requested_by and check.only_for is None}
"""The checks of options that no dataset here sets."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build a dataset of each kind."""
    workspace = Workspace(tmp_path_factory.mktemp("kinds"))
    table = workspace.write("table.csv", as_csv(purchases(60)))
    sources: dict[str, tuple[str, Mapping[str, Any]]] = {
        "chats": (workspace.write("chats.jsonl", [chat(i) for i in range(30)]), CHAT),
        "pairs": (workspace.write("pairs.jsonl", [pair(i) for i in range(30)]), PAIR),
        "texts": (workspace.write("texts.jsonl", [document(i) for i in range(30)]), TEXT),
        "table": (table, records()),
        "groups": (table, records(**grouped())),
    }
    datasets: dict[str, dict[str, Any]] = {
        name: {"source": {"train_urls": [url]}, "format": form, "splits": {"validation": 0, "test": 0}}
        for name, (url, form) in sources.items()
    }
    return workspace.recipe(datasets, seq_len=1024).build()


def results_of(built: Built, dataset: str) -> dict[str, CheckResult]:
    return {one.check: one for key, (_, results) in built.steps.items() if key[0] == dataset for one in results}


@pytest.mark.slow
@pytest.mark.parametrize("dataset", IDLE)
def test_checks_that_a_kind_of_data_has_no_meaning_for_are_not_applicable(built: Built, dataset: str) -> None:
    results = results_of(built, dataset)
    # Of a recipe that was never published, nothing can have shrunk or moved.
    idle = IDLE[dataset] | ON_REQUEST | {"shrunk", "drift"}
    assert {check for check, one in results.items() if one.outcome == "not_applicable"} == idle
    for check in IDLE[dataset]:
        one = results[check]
        assert (one.passed, one.failed, one.blocking, one.value) == (False, False, False, None)
        assert one.sentence.startswith(f"{check}: not applicable (")
    assert [one.check for one in results.values() if one.note == "not_measured"] == []


def test_order_without_groups_and_times_has_no_checks_of_them(built: Built, tmp_path: Path) -> None:
    with_groups = {one.check: one.outcome for one in built.steps["training_splits",][1]}
    chats = Workspace(tmp_path).one("a.jsonl", [chat(i) for i in range(30)]).build()
    without = {one.check: one.outcome for one in chats.steps["training_splits",][1]}

    assert (with_groups["same_group"], with_groups["time_order"]) == ("passed", "not_applicable")
    assert (without["same_group"], without["time_order"]) == ("not_applicable", "not_applicable")
    assert without["same_row"] == "passed"


# ── How it is shown ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_terminal_and_report_say_not_applicable_and_count_it_apart(
    built: Built, capsys: pytest.CaptureFixture[str]
) -> None:
    every = [one for _, results in built.steps.values() for one in results]
    idle = sum(one.outcome == "not_applicable" for one in every)
    assert main.main(["verify", "--all", str(built.project.base / "configs/mini.yaml")]) == main.ExitStatus.SUCCESS
    shown = capsys.readouterr().out
    report_page.write_report(built.project)
    page = built.project.store.read(report_page.report_path("mini")).decode()

    assert f"{idle} not applicable" in shown
    assert f"{sum(one.passed for one in every)} passed" in shown
    line = next(line for line in shown.splitlines() if "contract" in line and "chat templates" in line)
    assert line.split()[:4] == [arrays.NO_NUMBER, "contract", "not", "applicable"]
    own = [one.outcome for one in results_of(built, "table").values() if one.key[-1] == "tokenized_examples"]
    counts = f"{own.count('passed')} of {len(own) - own.count('not_applicable')} checks passed"
    assert f"{counts}, {own.count('not_applicable')} not applicable" in page


@pytest.mark.slow
def test_sql_dagster_and_summary_tell_not_applicable_from_passed_and_failed(built: Built) -> None:
    _, answer = query_views(
        built.project.store,
        "SELECT check_name, outcome, passed, value FROM check_results "
        "WHERE dataset = 'table' AND stage = 'tokenized_examples'",
    )
    found = {check: (outcome, passed, value) for check, outcome, passed, value in answer}

    assert {check for check, line in found.items() if line == ("not_applicable", None, None)} == OTHERS | {"drift"}
    assert found["mask_verified"] == ("passed", True, 1)
    one = results_of(built, "table")["contract"]
    result = make_asset_check_result(one, dg.AssetKey(["mini"]), metadata.make_check_page(one, built.project.store))
    assert result.metadata["outcome"].value == "not applicable"
    assert "value" not in result.metadata
    assert (result.description or "").startswith("contract: not applicable")
    assert result.passed  # Dagster has two outcomes, and this is no alarm
    assert [one for one in summary.find_failed_checks(load_build_view(built.project)) if one.outcome != "failed"] == []


# ── Measured facts ────────────────────────────────────────────────────────────────


def test_mask_of_records_is_verified_from_what_is_stored(built: Built) -> None:
    table = pa.concat_tables(
        [built.project.store.table(one) for one in built.manifest("groups", "tokenized_examples").files("examples")]
    )
    masks: list[list[bool]] = table.column("loss_mask").to_pylist()

    def verified(changed: list[list[bool]]) -> int:
        column = pa.array(changed, table.schema.field("loss_mask").type)
        return count_verified(table.set_column(table.schema.get_field_index("loss_mask"), "loss_mask", column))

    assert verified(masks) == len(masks) > 1
    # Moved by one token, the prompt's last token trains; one record's token out; all out.
    assert verified([[*masks[0][1:], True], *masks[1:]]) == len(masks) - 1
    assert verified([[*masks[0][:-3], False, True, True], *masks[1:]]) == len(masks) - 1
    assert verified([[False] * len(mask) for mask in masks]) == 0
    assert built.manifest("groups", "tokenized_examples").facts["mask_verified"] == 1


SPACED = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
"""Ends its prompt with a space, which the tokenizer joins with the answer's first word."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "boundary", "share"), [(CHATML, "whole", 0.0), (SPACED, "whole", 1.0), (SPACED, "split", 0.0)]
)
def test_prompt_of_chats_is_encoded_alone_and_compared_with_training(
    tmp_path: Path, template: str, boundary: str, share: float
) -> None:
    groups: dict[str, Any] = {
        "template": {"chat_template": template, "verify_render": 1.0}, "loss": {"boundary": boundary}
    }  # fmt: skip
    built = Workspace(tmp_path).one("a.jsonl", [chat(i, turns=2) for i in range(20)], **groups).build()
    made = built.manifest("rows", "tokenized_examples")
    [result] = [one for one in built.steps["rows", "tokenized_examples"][1] if one.check == "prompt_parity"]

    assert (made.facts["prompts_compared"], made.facts["prompt_parity"]) == (20, share)
    assert result.outcome == ("failed" if share else "passed")
    assert len(result.samples) == (3 if share else 0)


def test_prompt_of_chats_is_compared_once_a_part_at_least(tmp_path: Path) -> None:
    groups = {"template": {"chat_template": SPACED, "verify_render": 0}}
    made = Workspace(tmp_path).one("a.jsonl", [chat(i) for i in range(20)], **groups).build()
    facts = made.manifest("rows", "tokenized_examples").facts

    assert (facts["prompts_compared"], facts["prompt_parity"], facts["render_equal"]) == (1, 1, None)


@pytest.mark.slow
@pytest.mark.real_data
def test_prompts_of_real_chats_are_compared_under_a_real_tokenizer(tmp_path: Path, real_data: Path) -> None:
    source = {"train_urls": [str(real_data / "chat/tinker_conversations.jsonl")]}
    workspace = Workspace(tmp_path).recipe(
        {"rows": {"source": source, "format": CHAT, "template": {"chat_template": "qwen3", "verify_render": 1.0}}},
        tokenizer=str(real_data / "tokenizers/qwen3"),
    )
    facts = (
        workspace.build(only=("raw_dataset", "canonical_rows", "tokenized_examples"))
        .manifest("rows", "tokenized_examples")
        .facts
    )

    assert facts["prompts_compared"] == 128
    assert facts["prompt_parity"] == 0
