"""An order that is written in many blocks is the one that is written at once, and has the same facts."""

from pathlib import Path
from typing import Any

import pytest

from rowmill.schema.manifest import remove_output
from rowmill.stages.training_splits import stage
from tests.support.recipes import TEXT, TO_EXAMPLES, Built, Workspace, document

ROWS = {"a": 90, "b": 40}
UP_TO_ORDER = (
    *TO_EXAMPLES,
    *("truncation_stats", "packed_shards", "training_splits"),
)
COUNTED = (
    *("order_nonempty", "filler_share", "dropped_share", "mixture_share", "rank_balance", "empty_step"),
    *("sequences", "places", "fillers", "steps", "tokens", "trained_tokens"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a project whose sequences are packed once, for all tests."""
    return tmp_path_factory.mktemp("blocks")


def build(folder: Path, mixture: dict[str, Any], partitions: dict[str, Any]) -> Built:
    workspace = Workspace(folder)
    datasets = {
        name: workspace.dataset(
            f"{name}.jsonl",
            [document(i, words=5 + i % 30) for i in range(count)],
            TEXT,
            filters={"deduplicate": "off"},
            packing={"pack": False},
        )
        for name, count in ROWS.items()
    }
    return workspace.recipe(datasets, mixture=mixture, partitions=partitions).build(only=UP_TO_ORDER)


def describe(built: Built) -> dict[str, Any]:
    made = built.manifest("training_splits")
    rank_steps = built.rows_of("training_splits", file="rank_steps")
    return {
        "order": built.rows_of("training_splits", file="order"),
        "rank_steps": sorted(rank_steps, key=lambda row: (row["rank"], row["step"])),
        "facts": {name: made.facts[name] for name in COUNTED},
        "ledger": made.ledger,
        "tables": {name: made.tables[name] for name in ("mixture", "schedule")},
        "histograms": made.histograms,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixture", "partitions"),
    [
        ({"batch_size": 6, "epochs": 2}, {"remainder": "pad"}),
        # The last two of each epoch are in no step, and most of the order is beyond the last step.
        ({"batch_size": 8, "epochs": 3}, {"remainder": "drop"}),
        ({"batch_size": 6, "steps": 6}, {"balance": "flops"}),
        ({}, {"world_size": 3, "balance_ranks": 4}),
        (
            {
                "batch_size": 6,
                "train_weights": {"a": 1, "b": 3},
                "mixture_block_size": 10,
                "stop_strategy": "all_exhausted",
            },
            {"balance": "none"},
        ),
    ],
)
def test_many_blocks_are_one_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mixture: dict[str, Any], partitions: dict[str, Any]
) -> None:
    whole = build(folder, mixture, partitions)
    expected = describe(whole)
    assert len(whole.manifest("training_splits").parts) == 1

    monkeypatch.setattr(stage, "BLOCK_PLACES", 20)
    monkeypatch.setattr(stage, "SENT_SEQUENCES", 10)
    remove_output(whole.project.store, whole.manifest("training_splits"))
    in_blocks = build(folder, mixture, partitions)

    assert describe(in_blocks) == expected
    made = in_blocks.manifest("training_splits")
    assert len(made.parts) > 1
    assert made.card["order"] != whole.manifest("training_splits").card["order"]
