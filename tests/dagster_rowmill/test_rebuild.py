"""Materializing a recipe through Dagster: everything once, then only what changed."""

import json
from typing import Any

import dagster as dg
import duckdb
import pytest

from dagster_rowmill import materialize
from rowmill.build import gate
from tests.support.tiny_project import Tiny, built, chat, refusals, reused

pytestmark = pytest.mark.slow
RANKS = ("rank-00000-of-00002", "rank-00001-of-00002")


def made_by(result: dg.ExecuteInProcessResult) -> set[str]:
    """Return the steps that a run did not find made."""
    return {name for name, was_there in reused(result).items() if not was_there}


def test_first_run_builds_everything_passes_every_blocking_check_and_the_second_reuses_it(tiny: Tiny) -> None:
    first = tiny.run()
    versions = {key: tiny.version(*key[1:]) for key in built(first)}
    ranks = tiny.instance.get_materialized_partitions(tiny.key("ranks"))
    second = tiny.run()

    assert ranks == set(RANKS)
    evaluations = first.get_asset_check_evaluations()
    failed = [one for one in evaluations if not one.passed and one.severity == dg.AssetCheckSeverity.ERROR]
    assert [one.description for one in failed] == []
    assert {one.asset_key for one in evaluations} == set(tiny.step_keys())
    assert refusals(first) == {}
    assert set(reused(first).values()) == {False}
    assert len(versions) == 12
    assert second.success
    assert set(reused(second).values()) == {True}
    assert {key: tiny.version(*key[1:]) for key in built(second)} == versions


def test_run_leaves_statistics_and_the_versions_of_the_engine_and_refuses_others(materialized: Tiny) -> None:

    with duckdb.connect(f"{materialized.store}/stats.duckdb", read_only=True) as reader:
        counted = reader.execute("select dataset, count(*) from rows group by all order by all").fetchall()
    assert counted == [("chats", 60), ("tasks", 60)]
    packed = ("chats", "packed_shards")
    assert materialized.version(*packed) == materialized.current(*packed).version
    rows = ("chats", "canonical_rows")
    result = materialized.run_asset(*rows, config=config_of(materialized, "no-such-version", *rows))
    assert "version no-such-version is not kept" in refusals(result)["tiny__chats_canonical_rows"]


def test_changed_rows_options_and_world_sizes_rebuild_what_reads_them(materialized: Tiny) -> None:
    materialized.append("chats", chat(1000))
    result = materialized.run()
    made = made_by(result)
    assert result.success
    assert "chats/tokenized_examples" in made
    assert "gpu_partitions" in made
    assert not any(name.startswith("tasks/") for name in made)
    result = materialized.write_recipe(mixture={"batch_size": 4, "shuffle": False}).run()
    assert made_by(result) == {"training_splits", "gpu_partitions"}
    result = materialized.write_recipe(partitions={"world_size": 4}).run()
    ranks = materialized.instance.get_materialized_partitions(materialized.key("ranks"))
    assert result.success
    assert made_by(result) <= {"training_splits", "gpu_partitions"}
    assert {f"rank-{rank:05d}-of-00004" for rank in range(4)} <= ranks


def config_of(tiny: Tiny, version: str, *steps: str) -> dict[str, Any]:
    """Return the configuration of a run that makes a kept version of an asset current."""
    return {"ops": {tiny.key(*steps).to_python_identifier(): {"config": {"version": version}}}}


def test_restored_version_becomes_current_and_opens_the_gate_at_once(materialized: Tiny) -> None:
    old = materialized.version("chats", "canonical_rows")
    materialized.append("chats", chat(1000))
    materialized.run()
    rows = ("chats", "canonical_rows")
    restored = materialized.run_asset(*rows, without_checks=True, config=config_of(materialized, old, *rows))
    following = materialized.run_asset("chats", "tokenized_examples", without_checks=True)
    assert restored.success
    assert materialized.version("chats", "canonical_rows") == old
    assert refusals(following) == {}
    assert reused(following) == {"chats/tokenized_examples": True}


@pytest.mark.campaign
def test_version_that_rowmill_use_holds_survives_the_next_nights(materialized: Tiny) -> None:
    """A rollback of the ranks and of an order: what follows a held stage is made of what it was made of."""
    store = materialized.project.store
    order, ranks = materialized.current("training_splits"), materialized.current("gpu_partitions")
    for i in range(100, 130):
        materialized.append("chats", chat(i))
    assert materialized.run().success
    newer = materialized.version("training_splits")
    assert newer != order.version

    for held in (ranks, order):
        gate.hold_version(store, held)
    materialized.append("chats", chat(200))
    night = materialized.run()

    assert night.success, refusals(night)
    assert materialized.version("training_splits") == order.version
    assert materialized.current("gpu_partitions").version == ranks.version
    assert json.loads(store.read("tiny/gpu_partitions/current.json"))["version"] == ranks.version
    # The order alone: new ranks of it take the shards that it orders, not the current ones.
    gate.release_version(store, ranks.key)
    night = materialized.run()
    assert night.success, refusals(night)
    assert materialized.current("gpu_partitions").inputs == ranks.inputs
    gate.release_version(store, order.key)
    assert materialized.run().success
    assert materialized.version("training_splits") not in (order.version, newer)


def test_missing_source_fails_once_with_the_engine_s_sentence(tiny: Tiny) -> None:
    (tiny.folder / "data" / "tasks.jsonl").unlink()
    result = tiny.run()
    said = materialize.list_failures(result)
    assert not result.success
    assert [line for line in said if "tasks_raw_dataset" in line and "found no data at data/tasks.jsonl" in line]
    assert ("tiny", "chats", "packed_shards") in built(result)
    assert ("tiny", "training_splits") not in built(result)
