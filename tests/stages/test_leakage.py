"""Leakage from train into evaluation is counted in the written data, with ten ids of each kind."""

from pathlib import Path
from typing import Any

import pytest

from rowmill.core.errors import GateError
from rowmill.kinds.shared.splits import Splits, Splitter
from rowmill.schema.manifest import list_versions
from tests.support.recipes import LENIENT, PAIR, TEXT, TO_ROWS, Workspace, document, pair, sentence

ALL = {"same_prompt": {"at_most": 1}, "near_duplicate": {"at_most": 1}}


def held_out(folder: Path, train: list[dict[str, Any]], held: list[dict[str, Any]], kind: dict[str, Any]) -> Workspace:
    """Write a project whose train and validation rows come from different files."""
    workspace = Workspace(folder)
    filters = {"deduplicate": False}
    return workspace.one("train.jsonl", train, kind, held=held, filters=filters, gates=LENIENT | ALL)


def test_row_in_both_splits_closes_the_gate_and_is_named(tmp_path: Path) -> None:
    workspace = held_out(tmp_path, [pair(i) for i in range(20)], [pair(i) for i in range(18, 24)], PAIR)

    with pytest.raises(GateError, match="same_row: 2"):
        workspace.build()
    (made,) = [
        one for one in list_versions(workspace.project.store, ("mini", "training_splits")) if one.facts["same_row"]
    ]
    assert len(made.samples["same_row"]) == 2


def test_prompt_in_both_splits_is_reported_with_its_rows(tmp_path: Path) -> None:
    train = [pair(i) for i in range(20)]
    # Letter case and spaces do not make a different prompt; the answer differs, so the row does.
    shouted = [{"prompt": train[i]["prompt"].upper().replace(" ", "  "), "answer": f"other {i}"} for i in range(3)]
    built = held_out(tmp_path, train, [*shouted, pair(900)], PAIR).build()
    held = [row for row in built.rows_of("rows", "canonical_rows", file="rows") if row["split"] == "validation"]

    assert built.facts("training_splits")["same_prompt"] == 0.75
    assert built.facts("training_splits")["same_row"] == 0
    assert built.manifest("training_splits").samples["same_prompt"] == tuple(sorted(row["row_id"] for row in held[:3]))


def texts(first: int, count: int) -> list[dict[str, Any]]:
    return [{"text": " ".join(sentence(7 * i + k, 40) for k in range(12))} for i in range(first, first + count)]


@pytest.mark.slow
def test_text_half_of_which_is_in_train_is_a_near_duplicate(tmp_path: Path) -> None:
    train = texts(0, 30)
    fresh = [{"text": " ".join(f"{i}-{k} {k * i}" for k in range(400))} for i in range(91, 97)]
    words = train[5]["text"].split()
    mostly = {"text": " ".join([*words[: len(words) * 4 // 5], *fresh[0]["text"].split()[:60]])}
    barely = {"text": " ".join([*words[:40], *fresh[1]["text"].split()])}
    built = held_out(tmp_path, train, [mostly, barely, *fresh], TEXT).build()
    names = [row["example_id"] for row in built.examples() if row["split"] == "validation"]

    assert built.manifest("training_splits").samples["near_duplicate"] == (names[0],)
    assert built.facts("training_splits")["near_duplicate"] == pytest.approx(1 / 8)
    assert built.facts("training_splits")["same_row"] == 0


def test_without_held_out_rows_there_are_no_near_duplicates(tmp_path: Path) -> None:
    built = Workspace(tmp_path).one("rows.jsonl", [document(i) for i in range(5)], TEXT).build()

    assert built.facts("training_splits")["near_duplicate"] == 0


def test_groups_are_held_out_by_the_hash_that_orders_the_validation_holdout(tmp_path: Path) -> None:
    rows = [pair(i) | {"user": f"g{i % 12}"} for i in range(48)]
    splits = {"validation": 0.1, "test": 0.1, "group_key": "user"}
    built = Workspace(tmp_path).one("rows.jsonl", rows, PAIR, splits=splits).build(only=TO_ROWS)
    found: dict[str, set[str]] = {}
    for row in built.rows_of("rows", "canonical_rows", file="rows"):
        found.setdefault(row["split"], set()).add(row["group_key"])

    assert found["validation"] == {'"g2"', '"g8"'}
    assert found["test"] == {'"g4"'}

    splitter = Splitter(Splits(group_key="user", validation=0.5))

    assert [splitter(f'"g{i}"', None, b"") == "validation" for i in range(50)] == [
        splitter.hash_unit(f'"g{i}"', b"") < 1 << 63 for i in range(50)
    ]
