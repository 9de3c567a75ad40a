"""Preference data that comes as chats: a check that blocks until the recipe reads the results, or waives them."""

import re
from pathlib import Path
from typing import Any

import pytest

from rowmill.build import runner
from rowmill.checks.judge import CheckResult
from rowmill.core.errors import GateError
from tests.support.recipes import CHAT, PAIR, TEXT, Workspace, chat, document, pair
from tests.support.tables import as_csv, records

ROWS = ("raw_dataset", "canonical_rows")
REASON = "label is the topic of the chat"


def result_on(workspace: Workspace) -> CheckResult:
    _, results = workspace.build(only=ROWS).steps["rows", "canonical_rows"]
    return next(one for one in results if one.check == "preference_data")


@pytest.mark.slow
@pytest.mark.parametrize("column", ["label", "kto_tag", "chosen", "rejected_response", "winner"])
def test_column_of_preference_data_that_nothing_reads_blocks(tmp_path: Path, column: str) -> None:
    rows = [chat(i) | ({column: i % 4 == 0} if i % 2 else {column: None}) for i in range(20)]
    workspace = Workspace(tmp_path).one("a.jsonl", rows)
    one = result_on(workspace)

    assert (one.value, one.blocking) == (0.5, True)
    assert one.causes[0] == f"column '{column}': 10"
    assert re.fullmatch(r"the first record is data/a\.jsonl line 2 \(\w+:1\)", one.causes[1])
    assert "format.messages_field" in one.sentence
    made = workspace.build(only=ROWS).manifest("rows", "canonical_rows")
    assert made.tables["preference_columns"].rows == ((column, 10),)
    with pytest.raises(GateError, match=r"preference_data: 50 %"):
        workspace.build()


@pytest.mark.slow
def test_waiver_says_that_the_column_means_something_else(tmp_path: Path) -> None:
    waiver = {"check": "preference_data", "dataset": "rows", "at_most": 1, "reason": REASON}
    rows = [chat(i) | {"label": "travel"} for i in range(20)]
    workspace = Workspace(tmp_path).one("a.jsonl", rows, gates={"waivers": [waiver], "fill": {"at_least": 0}})
    one = result_on(workspace)

    assert (one.failed, one.blocking, one.waiver) == (True, False, REASON)
    assert len(workspace.build().examples()) == 20


@pytest.mark.parametrize(
    ("row", "groups"),
    [
        ({"label": "travel"}, {"format": {**CHAT, "domain_key": "label"}}),
        ({"label": "travel"}, {"splits": {"group_key": "label"}}),
        ({"label": {"of": "travel"}}, {"splits": {"group_key": "label.of"}}),
        ({"label": None, "rejected": ""}, {}),
        # Whoever trains on one answer of a pair has chosen.
        ({"chosen": chat(1)["messages"], "rejected": "no", "messages": None},
         {"format": {**CHAT, "messages_field": "chosen"}}),
        ({"chosen": "yes", "rejected": "no", "messages": None, "prompt": "why?"},
         {"format": {**CHAT, "response_fields": ["chosen"]}}),
    ],
)  # fmt: skip
def test_column_that_is_read_or_empty_passes(tmp_path: Path, row: dict[str, Any], groups: dict[str, Any]) -> None:
    form = groups.pop("format", CHAT)
    workspace = Workspace(tmp_path).one("a.jsonl", [chat(i) | row for i in range(4)], form, **groups)

    assert result_on(workspace).value == 0


def test_chosen_answers_with_labels_of_their_own_still_block(tmp_path: Path) -> None:
    rows = [{"prompt": f"why {i}?", "chosen": "yes", "rejected": "no", "label": i % 2} for i in range(4)]
    workspace = Workspace(tmp_path).one("a.jsonl", rows, {**CHAT, "response_fields": ["chosen"]})

    assert result_on(workspace).value == 1


def test_only_data_with_answers_is_checked(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    pairs = workspace.write("pairs.jsonl", [pair(i) | {"label": True} for i in range(4)])
    classes = workspace.write("classes.jsonl", [{"review": document(i)["text"], "label": "good"} for i in range(4)])
    texts = workspace.write("texts.jsonl", [document(i) | {"label": 1} for i in range(4)])
    table = workspace.write("table.csv", as_csv([{"size": str(i), "label": str(i % 2)} for i in range(20)]))
    forms: dict[str, tuple[str, dict[str, Any]]] = {
        "pairs": (pairs, PAIR),
        "classes": (classes, {"kind": "supervised", "input_field": "review", "output_field": "label"}),
        "texts": (texts, TEXT),
        "mixed": (texts, {"kind": "auto"}),
        "table": (table, records()),
    }
    datasets = {name: {"source": {"train_urls": [url]}, "format": form} for name, (url, form) in forms.items()}
    project = workspace.recipe(datasets).project
    found = {
        step.dataset: report.manifest.facts["preference_data"]
        for step, report, _ in runner.build(project, only=ROWS)
        if step.name == "canonical_rows"
    }

    assert found == {"pairs": 1, "classes": 0, "texts": None, "mixed": 0, "table": None}


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("file", "form", "share", "columns"),
    [
        ("kto_en_demo.json", CHAT, 1, {"label"}),
        ("dpo_en_demo.json", CHAT, 1, {"chosen", "rejected"}),
        ("v1_dpo_demo.jsonl", CHAT, 1, {"chosen_messages", "rejected_messages"}),
        ("v1_dpo_demo.jsonl", {**CHAT, "messages_field": "chosen_messages"}, 0, set()),
    ],
)
def test_real_preference_data_blocks_unless_its_answers_are_chosen(
    tmp_path: Path, real_data: Path, file: str, form: dict[str, Any], share: float, columns: set[str]
) -> None:
    source = {"train_urls": [str(real_data / "preference" / file)]}
    workspace = Workspace(tmp_path).recipe({"rows": {"source": source, "format": form}})
    one = result_on(workspace)

    assert (one.value, one.blocking) == (share, share == 1)
    table = workspace.build(only=ROWS).manifest("rows", "canonical_rows").tables.get("preference_columns")
    assert {name for name, _ in (table.rows if table else ())} == columns
