"""Every packed sequence is scheduled, a remainder, or not scheduled; the bytes do not depend on the workers."""

from pathlib import Path
from typing import Any

import pytest

from rowmill.core.errors import ConfigError, GateError
from rowmill.executors import local
from rowmill.reader import Reader
from tests.support.recipes import PAIR, Built, Workspace, pair

pytestmark = pytest.mark.slow

ALL_STAGES_BELOW = {"training_splits", "gpu_partitions"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("ledger"))


def ledger(workspace: Workspace, mixture: dict[str, Any], **partitions: Any) -> tuple[dict[str, int], int, Built]:
    """Build; return the order's ledger by state, the sequences there are, and the build."""
    files = {
        name: workspace.write(f"{name}.jsonl", [pair(k + i) for i in range(22)]) for name, k in (("a", 0), ("b", 500))
    }
    common = {"format": PAIR, "packing": {"pack": False}}
    datasets = {name: {"source": {"train_urls": [url]}, **common} for name, url in files.items()}
    built = workspace.recipe(datasets, mixture=mixture, partitions=partitions).build()
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
    workspace: Workspace, mixture: dict[str, Any], partitions: dict[str, Any], wanted: dict[str, int]
) -> None:
    found, sequences, _ = ledger(workspace, mixture, **partitions)

    assert found == wanted
    assert sum(found.values()) == sequences == 44


# ── An order that lost data ────────────────────────────────────────────────────────────────────


def order_of(workspace: Workspace, mixture: dict[str, Any], remainder: str, **changes: Any) -> Workspace:
    """Write a recipe of 44 sequences whose gates are the defaults."""
    files = {
        name: workspace.write(f"{name}.jsonl", [pair(k + i) for i in range(22)]) for name, k in (("a", 0), ("b", 500))
    }
    datasets = {
        name: {"source": {"train_urls": [url]}, "format": PAIR, "packing": {"pack": False}}
        for name, url in files.items()
    }
    gates = {"fill": {"at_least": 0}, "rank_balance": {"at_most": 9}} | changes
    return workspace.recipe(datasets, mixture=mixture, partitions={"remainder": remainder}, gates=gates)


@pytest.mark.parametrize(
    ("batch_size", "remainder", "check", "value"),
    [
        (64, "drop", "order_nonempty", "0"),
        (64, "drop", "dropped_share", "100 %"),
        (24, "drop", "dropped_share", "45.45 %"),
        (256, "pad", "filler_share", "82.81 %"),
    ],
)
def test_order_that_lost_most_data_is_not_published(
    tmp_path: Path, batch_size: int, remainder: str, check: str, value: str
) -> None:
    workspace = order_of(Workspace(tmp_path), {"batch_size": batch_size}, remainder)

    with pytest.raises(GateError, match=rf"training_splits: {check}: {value} .*mixture.batch_size"):
        workspace.build()

    assert not list(workspace.store.glob("**/current.json"))


def test_order_that_lost_little_is_published_with_a_warning(tmp_path: Path) -> None:
    workspace = order_of(Workspace(tmp_path), {"batch_size": 14}, "drop")

    results = {one.check: one for one in workspace.build().steps[("training_splits",)][1]}

    assert results["dropped_share"].value == pytest.approx(2 / 44)
    assert (results["dropped_share"].passed, results["dropped_share"].blocking) == (False, False)
    assert results["order_nonempty"].passed
    assert list(workspace.store.glob("**/current.json"))


@pytest.mark.parametrize("is_waived", [False, True])
def test_reading_an_empty_order_is_an_error_unless_waived(tmp_path: Path, *, is_waived: bool) -> None:
    waiver = {"check": "order_nonempty", "at_least": 0, "reason": "only the held-out sets are read"}
    gates = {"waivers": [waiver]} if is_waived else {"order_nonempty": {"at_least": 0}}
    workspace = order_of(Workspace(tmp_path), {"batch_size": 64}, "drop", dropped_share={"at_most": 1}, **gates)
    workspace.build()

    def opened() -> Reader:
        return Reader(workspace.store, "mini", rank=0, world_size=1)

    if is_waived:
        assert len(opened()) == 0
    else:
        with pytest.raises(ConfigError, match=r"rank 0 has no sequence: the order has 0 places; .*; build with"):
            opened()


def test_fillers_are_not_counted_as_tokens_of_the_ranks(tmp_path: Path) -> None:
    built = order_of(Workspace(tmp_path), {"batch_size": 256}, "pad", filler_share={"at_most": 1}).build()
    ranks, order = built.manifest("gpu_partitions"), built.manifest("training_splits")
    packed = [built.manifest(name, "packed_shards") for name in ("a", "b")]
    tokens = sum(int(p.facts["tokens"]) for one in packed for p in one.parts if "shard" in p.files)
    steps = built.rows_of("training_splits", file="rank_steps")

    assert ranks.facts["fillers"] == order.facts["fillers"] == 256 - 44
    assert tokens == ranks.facts["tokens"] == order.facts["tokens"] == sum(row["tokens"] for row in steps)
    assert {name: count for _, name, count in ranks.token_ledger}["padding"] == 2 * (256 - 44)


def test_changed_mixture_rebuilds_the_order_and_nothing_before_it(workspace: Workspace) -> None:
    ledger(workspace, {"batch_size": 8})
    _, _, built = ledger(workspace, {"batch_size": 8, "shuffle": False})

    assert built.made() <= ALL_STAGES_BELOW


def test_two_workers_hold_out_the_same_rows_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "INLINE_BELOW_BYTES", 0)
    rows = [pair(i) | {"user": f"u{i % 9}", "when": i} for i in range(60)]
    builds: list[Built] = []
    for workers in (1, 2):
        workspace = Workspace(tmp_path / str(workers))
        urls = [workspace.write(f"{i}.jsonl", [*rows[20 * i : 20 * i + 20], rows[0]]) for i in range(3)]
        dataset = {"source": {"train_urls": urls}, "format": PAIR}
        by_time = {"time_key": "when", "group_key": "user", "boundaries": {"validation": 55}}
        datasets = {
            "numbered": {**dataset, "splits": {"group_key": "user"}},
            "timed": {**dataset, "splits": by_time, "source": {"train_urls": [workspace.write("t.jsonl", rows[30:])]}},
        }
        mixture = {"num_validation_sequences": {"numbered": 1}}
        recipe = workspace.recipe(datasets, seq_len=64, mixture=mixture, execution={"workers": workers})
        stages = ("raw_dataset", "canonical_rows", "tokenized_examples", "truncation_stats", "packed_shards")
        builds.append(recipe.build(only=stages))

    assert builds[0].digests() == builds[1].digests()
    assert builds[0].versions() == builds[1].versions()
