"""Every packed sequence is scheduled, a remainder, or not scheduled; the bytes do not depend on the workers."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rowmill.core.errors import ConfigError, GateError
from rowmill.executors import local
from rowmill.reader import Reader
from rowmill.schema.shard_counts import PackingCounts
from tests.support.recipes import LENIENT, PAIR, TO_SHARDS, Built, Workspace, pair

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("ledger"))


def order_of(
    workspace: Workspace, mixture: dict[str, Any], remainder: str | None, gates: Any = None, **changes: Any
) -> Workspace:
    """Write a recipe of 44 sequences whose gates, unless given, are the defaults with some changes."""
    packing = {"pack": False}
    datasets = {
        name: workspace.dataset(f"{name}.jsonl", [pair(k + i) for i in range(22)], PAIR, packing=packing)
        for name, k in (("a", 0), ("b", 500))
    }
    strict = {"fill": {"at_least": 0}, "rank_balance": {"at_most": 9}} | changes
    partitions = {"remainder": remainder} if remainder else {}
    return workspace.recipe(datasets, mixture=mixture, partitions=partitions, gates=gates or strict)


# Four passes over a, one over a half of b.
WEIGHTED = {"batch_size": 11, "steps": 9, "train_weights": {"a": 8, "b": 1}, "mixture_block_size": 9}


@pytest.mark.parametrize(
    ("mixture", "remainder", "wanted"),
    [
        ({"batch_size": 8}, "pad", {"kept": 44}),
        ({"batch_size": 8}, "drop", {"kept": 40, "remainder": 4}),
        ({"batch_size": 8, "steps": 3}, None, {"kept": 24, "not_scheduled": 20}),
        (WEIGHTED, None, {"kept": 22 + 11, "not_scheduled": 11}),
        ({"batch_size": 2, "max_train_batches": {"b": 3}}, None, {"kept": 22 + 6, "not_scheduled": 16}),
        ({"batch_size": 2, "target_budget": 10, "experiment_budget": 5}, None, {"kept": 22, "not_scheduled": 22}),
    ],
)
def test_sequences_are_scheduled_by_dataset_or_in_the_ledger(
    workspace: Workspace, mixture: dict[str, Any], remainder: str | None, wanted: dict[str, int]
) -> None:
    made = order_of(workspace, mixture, remainder, LENIENT).build().manifest("training_splits")

    found = {row[:2]: row[2:] for row in made.tables["schedule"].rows}
    states = Counter[str]()
    for (_, state), (sequences, _, _) in found.items():
        states[state] += sequences
    shown = [counts for (_, state), counts in found.items() if state in ("kept", "repeated")]
    assert {state: count for state, _, count in made.ledger} == wanted
    assert {state: n for state, n in states.items() if n and state != "repeated"} == wanted
    assert sum(wanted.values()) == made.facts["sequences"] == 44
    assert [sum(column) for column in zip(*shown, strict=True)] == [
        made.facts["places"] - made.facts["fillers"], made.facts["tokens"], made.facts["trained_tokens"],
    ]  # fmt: skip
    if mixture is WEIGHTED:
        assert {key: counts[0] for key, counts in found.items() if counts[0]} == {
            ("a", "kept"): 22, ("a", "repeated"): 66, ("b", "kept"): 11, ("b", "not_scheduled"): 11,
        }  # fmt: skip


# ── An order that lost data ────────────────────────────────────────────────────────────────────


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
    tokens = sum(one.get_counts(PackingCounts).tokens for one in packed)
    steps = built.rows_of("training_splits", file="rank_steps")

    assert ranks.facts["fillers"] == order.facts["fillers"] == 256 - 44
    assert tokens == ranks.facts["tokens"] == order.facts["tokens"] == sum(row["tokens"] for row in steps)
    assert {name: count for _, name, count in ranks.token_ledger}["padding"] == 2 * (256 - 44)


def test_changed_mixture_rebuilds_the_order_and_nothing_before_it(workspace: Workspace) -> None:
    order_of(workspace, {"batch_size": 8}, None, LENIENT).build()
    built = order_of(workspace, {"batch_size": 8, "shuffle": False}, None, LENIENT).build()

    assert built.made() == {"training_splits", "gpu_partitions"}


def test_two_workers_hold_out_the_same_rows_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "INLINE_BELOW_BYTES", 0)
    rows = [pair(i) | {"user": f"u{i % 9}", "when": i} for i in range(60)]
    builds: list[Built] = []
    for workers in (1, 2):
        workspace = Workspace(tmp_path / str(workers))
        contents = {f"{i}.jsonl": [*rows[20 * i : 20 * i + 20], rows[0]] for i in range(3)}
        by_time = {"time_key": "when", "group_key": "user", "boundaries": {"validation": 55}}
        datasets = {
            "numbered": workspace.files(contents, PAIR, splits={"group_key": "user"}),
            "timed": workspace.dataset("t.jsonl", rows[30:], PAIR, splits=by_time),
        }
        mixture = {"num_validation_sequences": {"numbered": 1}}
        recipe = workspace.recipe(datasets, seq_len=64, mixture=mixture, execution={"workers": workers})
        builds.append(recipe.build(only=TO_SHARDS))

    assert builds[0].digests() == builds[1].digests()
    assert builds[0].versions() == builds[1].versions()
