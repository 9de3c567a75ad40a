"""The schedule of a dataset says how often its sequences are shown, in the states of the order's ledger."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.recipes import PAIR, Built, Workspace, pair


def build_order(folder: Path, mixture: dict[str, Any], **partitions: Any) -> Built:
    workspace = Workspace(folder)
    files = {
        name: workspace.write(f"{name}.jsonl", [pair(k + i) for i in range(22)]) for name, k in (("a", 0), ("b", 500))
    }
    common = {"format": PAIR, "packing": {"pack": False}}
    datasets = {name: {"source": {"train_urls": [url]}, **common} for name, url in files.items()}
    return workspace.recipe(datasets, mixture=mixture, partitions=partitions).build()


def lines_of(built: Built) -> dict[tuple[str, str], tuple[int, int, int]]:
    return {row[:2]: row[2:] for row in built.manifest("training_splits").tables["schedule"].rows}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixture", "partitions", "wanted"),
    [
        # Four passes over a, one over a half of b.
        (
            {"batch_size": 11, "steps": 9, "train_weights": {"a": 8, "b": 1}, "mixture_block_size": 9},
            {},
            {("a", "kept"): 22, ("a", "repeated"): 66, ("b", "kept"): 11, ("b", "not_scheduled"): 11},
        ),
        ({"batch_size": 8}, {"remainder": "drop"}, None),
    ],
)
def test_schedule_by_dataset_adds_up_to_ledger_and_order(
    tmp_path: Path, mixture: dict[str, Any], partitions: dict[str, Any], wanted: dict[tuple[str, str], int] | None
) -> None:
    built = build_order(tmp_path, mixture, **partitions)
    made, found = built.manifest("training_splits"), lines_of(built)
    states = Counter[str]()
    for (_, state), (sequences, _, _) in found.items():
        states[state] += sequences
    shown = [counts for (_, state), counts in found.items() if state in ("kept", "repeated")]

    assert {state: n for state, n in states.items() if n and state != "repeated"} == {
        state: n for state, _, n in made.ledger
    }
    assert [sum(column) for column in zip(*shown, strict=True)] == [
        made.facts["places"] - made.facts["fillers"], made.facts["tokens"], made.facts["trained_tokens"],
    ]  # fmt: skip
    if wanted is not None:
        assert {key: counts[0] for key, counts in found.items() if counts[0]} == wanted
    else:
        assert states["remainder"] == 4
