"""Flags of training that nothing reads: a check that blocks until the recipe says what they mean."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

from rowmill.build import preflight
from rowmill.checks.judge import CheckResult
from rowmill.core.errors import GateError
from rowmill.recipe.new_project import create_project
from tests.support.recipes import CHAT, PAIR, Workspace, chat, lines, pair, tokenizer_json, write_tokenizer
from tests.support.tables import as_csv, records

ROWS = ("raw_dataset", "canonical_rows")


def result_on(workspace: Workspace) -> CheckResult:
    _, results = workspace.build(only=ROWS).steps["rows", "canonical_rows"]
    return next(one for one in results if one.check == "unread_flags")


def flagged(i: int, **answer: Any) -> dict[str, Any]:
    row = chat(i, turns=2)
    row["messages"][1] |= answer
    return row


def test_flag_that_nothing_reads_blocks_and_names_key_value_place_and_options(tmp_path: Path) -> None:
    rows = [chat(0), *(flagged(i, masked=i % 2 == 1) for i in range(1, 9))]
    workspace = Workspace(tmp_path).one("a.jsonl", rows)
    one = result_on(workspace)

    assert (one.value, one.blocking) == (8, True)
    wanted = (
        r"messages have `masked` in 8 rows, true in data/a\.jsonl line 2 \(\w+:1\): format\.message_flags: "
        r"\{masked: mask\} if true does not train, or \{masked: train\} if true trains; format\.message_flags: "
        r"\{masked: ignore\} leaves it out, if it says nothing of training"
    )
    assert re.fullmatch(wanted, one.causes[0])
    with pytest.raises(GateError, match="unread_flags is 8"):
        preflight.require_no_mistakes(workspace.project)


@pytest.mark.parametrize("options", [{"message_flags": {"masked": "mask"}}, {"message_flags": {"masked": "ignore"}}])
def test_flag_with_a_meaning_passes(options: dict[str, Any], tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one("a.jsonl", [flagged(i, masked=True) for i in range(4)], {**CHAT, **options})

    assert result_on(workspace).value == 0


@pytest.mark.parametrize(
    ("row", "form", "said"),
    [
        ({**chat(1), "weight": 0}, CHAT, "loss.weights: true reads it as the row's weight"),
        ({**chat(1), "mask_history": True}, CHAT, "loss.supervise: last_assistant trains the last answer only"),
        ({**pair(1), "weight": 2.0}, PAIR, "trains whole rows and reads none; format.ignore_columns: [weight]"),
    ],
)
def test_column_that_nothing_reads_names_its_option(
    row: dict[str, Any], form: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in result_on(Workspace(tmp_path).one("a.jsonl", [row, {**row, "x": 1}], form)).causes[0]


def test_columns_of_tables_are_data(tmp_path: Path) -> None:
    rows = [{"weight": i / 2, "loss": i, "train": i % 2} for i in range(12)]
    workspace = Workspace(tmp_path).one("a.csv", as_csv(rows), records())

    assert result_on(workspace).note == "not_applicable"


def _init(folder: Path, rows: list[dict[str, Any]]) -> tuple[Workspace, dict[str, Any]]:
    write_tokenizer(folder / "tokenizer")
    (folder / "data").mkdir()
    (folder / "data" / "rows.jsonl").write_bytes(lines(rows))
    create_project(folder, ["data/rows.jsonl"], name="mini", tokenizer="tokenizer", seq_len=256)
    workspace = Workspace(folder)
    recipe = yaml.safe_load(workspace.config.read_text(encoding="utf-8"))
    return workspace, recipe["datasets"]["rows"]


@pytest.mark.parametrize(
    ("rows", "written"),
    [
        ([flagged(i, trainable=False) for i in range(4)], {"message_flags": {"trainable": "train"}}),
        ([flagged(i, masked=True) for i in range(4)], {"message_flags": {"masked": "mask"}}),
        ([{**chat(i, turns=2), "message_loss_mask": [0, 0, 0, 1]} for i in range(4)],
         {"message_flags": {"message_loss_mask": "train"}}),
    ],
)  # fmt: skip
def test_init_writes_what_the_name_of_a_flag_says(
    rows: list[dict[str, Any]], written: dict[str, Any], tmp_path: Path
) -> None:
    workspace, dataset = _init(tmp_path, rows)
    [(option, value)] = written.items()

    assert dataset["format"][option] == value
    assert result_on(workspace).value == 0
    for i, example in enumerate(workspace.examples()):
        trained = decode_trained(example)
        assert chat(i, turns=2)["messages"][3]["content"] in trained
        assert chat(i, turns=2)["messages"][1]["content"] not in trained


def test_init_reads_weights_of_rows_and_leaves_out_those_of_zero(tmp_path: Path) -> None:
    workspace, dataset = _init(tmp_path, [{**chat(i), "weight": (0.0, 1.0, 2.5)[i % 3]} for i in range(12)])

    assert dataset["loss"] == {"weights": True}
    examples = workspace.examples()
    assert sorted(max(example["loss_weights"]) for example in examples) == [1.0] * 4 + [2.5] * 4


def test_init_reads_weights_of_messages_between_0_and_1(tmp_path: Path) -> None:
    _, dataset = _init(tmp_path, [flagged(i, weight=0.5) for i in range(4)])

    assert (dataset["format"], dataset["loss"]) == ({"kind": "chat"}, {"weights": True})


def test_init_says_what_must_be_decided(tmp_path: Path) -> None:
    workspace, dataset = _init(tmp_path, [{**chat(i), "mask_history": i % 2 == 0} for i in range(4)])

    text = " ".join(workspace.config.read_text(encoding="utf-8").replace("#", "").split())
    assert "decide before a build what `mask_history` means, which nothing reads: loss.supervise" in text
    assert dataset["format"] == {"kind": "chat"}
    assert result_on(workspace).blocking


def decode_trained(example: dict[str, Any]) -> str:
    """Return the trained text of an example."""
    pairs = zip(example["input_ids"], example["loss_mask"], strict=True)
    return Tokenizer.from_str(tokenizer_json()).decode([token for token, trains in pairs if trains])


REPORTS = ("part_flags", "row_loss_mask", "trainable_false", "masked_true", "openai_weights")


@pytest.mark.parametrize("name", REPORTS)
def test_reported_files_train_what_they_say(name: str, real_data: Path, tmp_path: Path) -> None:
    """`init` writes the recipe; what is named WRONG or BAD never trains, what is RIGHT or GOOD always does."""
    source = real_data / "reports" / f"{name}.jsonl"
    if not source.is_file():
        pytest.skip(f"no {source}; the real data is older than this test")
    write_tokenizer(tmp_path / "tokenizer")
    create_project(tmp_path, [str(source)], name="mini", tokenizer="tokenizer", seq_len=256)
    examples = Workspace(tmp_path).examples(name)

    assert len(examples) == 12
    for example in examples:
        trained = decode_trained(example)
        assert re.search("GOOD|RIGHT", trained)
        assert not re.search("BAD|WRONG|Q|again", trained)
