"""Rows from validation sources: every kind of data is split by the same rule."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from rowmill.sources.reading import load_source_parts
from rowmill.stages import catalog
from rowmill.stages.training_splits import stage as training_splits
from tests.support.recipes import CHAT, PAIR, TEXT, TO_ROWS, Workspace, chat, document, pair

pytestmark = pytest.mark.slow

GROUPED = {"kind": "records", "data": {"group_training_examples_by": "who", "max_sequences_per_example": 1}}
SERIES = {"kind": "records", "data": {"order_training_examples_by": "time"}, "time_series": {"is_timeseries": True}}
TRAIN, HELD = 400, 40


def record(i: int) -> dict[str, Any]:
    return {"who": i // 4, "time": i, "amount": i * i % 97, "what": f"thing {i}"}


KINDS: dict[str, tuple[Mapping[str, Any], Any]] = {
    "chats": (CHAT, chat),
    "pairs": (PAIR, pair),
    "texts": (TEXT, document),
    "table": ({"kind": "records"}, record),
    "groups": (GROUPED, record),
    "series": (SERIES, record),
}


def splits_of(
    tmp_path: Path, form: Mapping[str, Any], train: Sequence[Any], held: Sequence[Any], **splits: Any
) -> dict[str, Counter[str]]:
    """Build canonical rows; return the number of rows of each split, by the source they came from."""
    workspace = Workspace(tmp_path)
    filters = {"deduplicate": "off"}
    built = workspace.one("train.jsonl", train, form, held=held, splits=splits, filters=filters).build(only=TO_ROWS)
    hint = {part.part_id: str(part.split_hint) for part in load_source_parts(built.manifest("rows", "raw_dataset"))}
    found: dict[str, Counter[str]] = {"train": Counter(), "validation": Counter()}
    for row in built.rows_of("rows", "canonical_rows", file="rows"):
        found[hint[row["row_id"].split(":")[0]]][row["split"]] += 1
    return found


@pytest.mark.parametrize("name", KINDS)
def test_validation_source_replaces_the_validation_share(tmp_path: Path, name: str) -> None:
    form, make = KINDS[name]
    rows = [make(i) for i in range(TRAIN + HELD)]

    found = splits_of(tmp_path, form, rows[:TRAIN], rows[TRAIN:], validation=0.2, test=0)

    assert found == {"train": {"train": TRAIN}, "validation": {"validation": HELD}}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"test": 0.1}) for name in KINDS if name != "series"),
        ("table", {"test": 0.1, "method": "exact"}),
        ("table", {"validation": 60, "test": 40}),
        ("groups", {"test": 0.1, "method": "exact"}),
        ("groups", {"validation": 60, "test": 40}),
    ],
)
def test_test_share_is_taken_only_from_the_train_source(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    form, make = KINDS[name]
    rows = [make(i) for i in range(TRAIN + HELD)]

    found = splits_of(tmp_path, form, rows[:TRAIN], rows[TRAIN:], **{"validation": 0.2} | options)

    assert found["validation"] == {"validation": HELD}
    assert found["train"].keys() == {"train", "test"}
    is_exact = "method" in options or "validation" in options
    assert found["train"]["test"] == (40 if is_exact else pytest.approx(40, abs=24))


def test_groups_of_records_stay_whole_with_a_validation_source(tmp_path: Path) -> None:
    rows, shares = [record(i) for i in range(TRAIN + HELD)], {"validation": 0.2, "test": 0.2}
    workspace = Workspace(tmp_path).one("train.jsonl", rows[:TRAIN], GROUPED, held=rows[TRAIN:], splits=shares)
    built = workspace.build(only=TO_ROWS)

    splits: dict[str, set[str]] = {}
    for row in built.rows_of("rows", "canonical_rows", file="rows"):
        splits.setdefault(row["group_key"], set()).add(row["split"])
    assert {len(one) for one in splits.values()} == {1}
    assert set.union(*splits.values()) == {"train", "validation", "test"}


def test_real_problems_are_held_out_alike_as_chats_pairs_and_records(tmp_path: Path, real_data: Path) -> None:
    lines = (real_data / "math" / "gsm8k_test.jsonl").read_bytes().splitlines()
    problems = [orjson.loads(line) for line in lines[:600]]
    as_chats = [{"messages": [{"role": "user", "content": one["question"]},
                              {"role": "assistant", "content": one["answer"]}]} for one in problems]  # fmt: skip
    shapes: dict[str, tuple[Mapping[str, Any], Sequence[Any]]] = {
        "chats": (CHAT, as_chats),
        "pairs": (PAIR | {"input_field": "question"}, problems),
        "records": ({"kind": "records"}, problems),
    }

    found = {
        name: splits_of(tmp_path / name, form, rows[:500], rows[500:], validation=0.2, test=0)
        for name, (form, rows) in shapes.items()
    }

    assert list(found.values()) == [{"train": {"train": 500}, "validation": {"validation": 100}}] * 3


def test_test_share_is_relative_to_the_rows_it_applies_to(tmp_path: Path) -> None:
    rows = [pair(i) for i in range(1200)]
    workspace = Workspace(tmp_path).one("train.jsonl", rows[:400], PAIR, held=rows[400:], splits={"test": 0.3})
    made = workspace.build(only=catalog.list_stages_up_to(training_splits.STAGE))

    # 0.3 of 400 rows is a tenth of all 1,200.
    assert made.facts("training_splits")["split_share"] < 0.06
