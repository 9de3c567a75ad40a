"""Near duplicates of held-out records in train: equal in all columns but one, not only by keys, prompt or chance."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.recipes import LENIENT, PAIR, Built, Workspace, pair
from tests.support.tables import as_csv, purchases, records

pytestmark = pytest.mark.slow

FIRST, SECOND = "measured_temperature_of_the_first_sensor", "measured_pressure_of_the_second_sensor"


def numbers(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of long names and random numbers, equal except for their values."""
    drawn = random.Random(seed)
    return [{name: f"{drawn.random():.9f}" for name in (FIRST, SECOND, "at")} for _ in range(count)]


def with_held(folder: Path, train: list[dict[str, Any]], held: list[dict[str, Any]], **form: Any) -> Workspace:
    gates = LENIENT | {"near_duplicate": {"at_most": 1}}
    kind, splits = records(**form), {"test": 0}
    return Workspace(folder).one(
        "train.csv", as_csv(train), kind, held=as_csv(held), splits=splits, seq_len=1024, gates=gates
    )


def near(built: Built) -> tuple[Any, tuple[str, ...]]:
    made = built.manifest("training_splits")
    return made.facts["near_duplicate"], made.samples.get("near_duplicate", ())


def test_records_that_share_keys_or_agree_by_chance_are_not_near_duplicates(tmp_path: Path) -> None:
    assert near(with_held(tmp_path / "keys", numbers(400), numbers(40, seed=1)).build()) == (0, ())

    drawn = random.Random(0)
    rows = [{name: str(drawn.randrange(6)) for name in "abcd"} | {"id": str(i)} for i in range(600)]

    assert near(with_held(tmp_path / "chance", rows[:500], rows[500:]).build()) == (0, ())


def test_record_that_differs_in_one_column_is_a_near_duplicate_and_is_named(tmp_path: Path) -> None:
    train, held = numbers(400), numbers(40, seed=1)
    one = {**train[7], "at": "0.5"}
    two = {**train[8], "at": "0.5", SECOND: "0.25"}
    made = with_held(tmp_path, train, [one, two, *held]).build()
    rows = made.rows_of("rows", "canonical_rows", file="rows")
    copies = [row["row_id"] for row in rows if row["split"] == "validation" and train[7][FIRST] in row["record"]]

    assert near(made) == (pytest.approx(1 / 42), tuple(copies))


def test_group_copied_under_another_key_is_found(tmp_path: Path) -> None:
    train = [{"patient": f"p{i // 4}", **one} for i, one in enumerate(numbers(400))]
    copied = [{**one, "patient": "q"} for one in train[:4]]
    made = with_held(tmp_path, train, copied, data={"group_training_examples_by": "patient"}).build()

    assert near(made)[0] == 1


def test_tables_and_other_data_are_compared_each_by_its_method(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    train = numbers(200)
    held, asked_again = [{**train[0], "at": "0.5"}, *numbers(10, seed=1)], {**pair(3), "answer": "another"}
    pairs, others = [pair(i) for i in range(40)], [asked_again, *map(pair, range(900, 908))]
    datasets = {
        "rows": workspace.dataset("t.csv", as_csv(train), records(), held=as_csv(held), splits={"test": 0}),
        "pairs": workspace.dataset("p.jsonl", pairs, PAIR, held=others),
    }
    gates = LENIENT | {"near_duplicate": {"at_most": 1}, "same_prompt": {"at_most": 1}}
    made = workspace.recipe(datasets, seq_len=1024, gates=gates).build().manifest("training_splits")
    near_rows = [name for name in made.samples["near_duplicate"] if "#" not in name]

    # Rows of tables are in neither: they have no prompts.
    assert made.facts["same_prompt"] == pytest.approx(1 / 9)
    assert len(near_rows) == 1
    assert made.facts["near_duplicate"] == pytest.approx(len(made.samples["near_duplicate"]) / 20)


def test_table_without_held_out_rows_is_not_compared(tmp_path: Path) -> None:
    facts = (
        Workspace(tmp_path)
        .one("table.csv", as_csv(purchases(60)), records(), splits={"test": 0}, seq_len=1024)
        .build()
        .manifest("training_splits")
        .facts
    )

    assert (facts["near_duplicate"], facts["same_prompt"]) == (None, None)
