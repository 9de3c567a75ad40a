"""Every packed sequence is scheduled, a remainder, or not scheduled; whoever splits and mixes, the bytes are one."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.executors import local
from tests.recipes import PAIR, Built, Road, pair

ALL_STAGES_BELOW = {"training_splits", "gpu_partitions"}


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Road:
    return Road(tmp_path_factory.mktemp("ledger"))


def ledger(road: Road, mixture: dict[str, Any], **partitions: Any) -> tuple[dict[str, int], int, Built]:
    """Build; return the order's ledger by state, the sequences there are, and the build."""
    files = {name: road.write(f"{name}.jsonl", [pair(k + i) for i in range(22)]) for name, k in (("a", 0), ("b", 500))}
    common = {"format": PAIR, "packing": {"pack": False}}
    datasets = {name: {"source": {"train_urls": [url]}, **common} for name, url in files.items()}
    built = road.recipe(datasets, mixture=mixture, partitions=partitions).build()
    made = built.manifest("training_splits")
    return {state: count for state, _, count in made.ledger}, int(made.facts["sequences"]), built


@pytest.mark.parametrize(
    ("mixture", "partitions", "wanted"),
    [
        ({"batch_size": 8}, {"remainder": "pad"}, {"kept": 44}),
        ({"batch_size": 8}, {"remainder": "drop"}, {"kept": 40, "remainder": 4}),
        ({"batch_size": 8, "steps": 3}, {}, {"kept": 24, "not_scheduled": 20}),
        # Four passes over a, one over a half of b.
        (
            {"batch_size": 11, "steps": 9, "train_weights": {"a": 8, "b": 1}, "mixture_block_size": 9},
            {},
            {"kept": 22 + 11, "not_scheduled": 11},
        ),
        ({"batch_size": 2, "max_train_batches": {"b": 3}}, {}, {"kept": 22 + 6, "not_scheduled": 16}),
        ({"batch_size": 2, "target_budget": 10, "experiment_budget": 5}, {}, {"kept": 22, "not_scheduled": 22}),
    ],
)
def test_sequences_are_scheduled_or_in_the_ledger(
    road: Road, mixture: dict[str, Any], partitions: dict[str, Any], wanted: dict[str, int]
) -> None:
    found, sequences, _ = ledger(road, mixture, **partitions)

    assert found == wanted
    assert sum(found.values()) == sequences == 44


def test_another_mixture_makes_the_order_anew_and_nothing_above_it(road: Road) -> None:
    ledger(road, {"batch_size": 8})
    _, _, built = ledger(road, {"batch_size": 8, "shuffle": False})

    assert built.made() <= ALL_STAGES_BELOW


@pytest.mark.slow
def test_two_workers_hold_out_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "INLINE_BELOW_BYTES", 0)
    rows = [pair(i) | {"user": f"u{i % 9}", "when": i} for i in range(60)]
    builds: list[Built] = []
    for workers in (1, 2):
        road = Road(tmp_path / str(workers))
        urls = [road.write(f"{i}.jsonl", [*rows[20 * i : 20 * i + 20], rows[0]]) for i in range(3)]
        dataset = {"source": {"train_urls": urls}, "format": PAIR}
        by_time = {"time_key": "when", "group_key": "user", "boundaries": {"validation": 55}}
        datasets = {
            "numbered": {**dataset, "splits": {"group_key": "user"}},
            "timed": {**dataset, "splits": by_time, "source": {"train_urls": [road.write("t.jsonl", rows[30:])]}},
        }
        mixture = {"num_validation_sequences": {"numbered": 1}}
        recipe = road.recipe(datasets, seq_len=64, mixture=mixture, execution={"workers": workers})
        stages = ("raw_dataset", "canonical_rows", "tokenized_examples", "truncation_stats", "packed_shards")
        builds.append(recipe.build(only=stages))

    assert builds[0].digests() == builds[1].digests()
    assert builds[0].versions() == builds[1].versions()
