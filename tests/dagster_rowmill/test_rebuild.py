"""Materializing a recipe through Dagster: everything once, then only what changed."""

import json
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import duckdb
import pytest

from dagster_rowmill import materialize
from rowmill.build import share_versions
from rowmill.core.storage import Store
from rowmill.schema import manifest
from tests.support.tiny_project import FOREIGN_WARNINGS, Tiny, built, chat, refusals, reused

pytestmark = [*FOREIGN_WARNINGS, pytest.mark.slow]
RANKS = ("rank-00000-of-00002", "rank-00001-of-00002")


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Tiny]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Tiny(tmp_path, instance).write()


def test_first_run_builds_everything_and_the_second_reuses_it(tiny: Tiny) -> None:
    first = tiny.run()
    versions = {key: tiny.version(*key[1:]) for key in built(first)}
    second = tiny.run()

    assert refusals(first) == {}
    assert set(reused(first).values()) == {False}
    assert len(versions) == 12
    assert second.success
    assert set(reused(second).values()) == {True}
    assert {key: tiny.version(*key[1:]) for key in built(second)} == versions


def test_run_materializes_every_rank_and_passes_every_blocking_check(tiny: Tiny) -> None:
    result = tiny.run()

    ranks = tiny.instance.get_materialized_partitions(tiny.key("ranks"))
    evaluations = result.get_asset_check_evaluations()
    assert ranks == set(RANKS)
    assert [
        one.description for one in evaluations if not one.passed and one.severity == dg.AssetCheckSeverity.ERROR
    ] == []
    assert {one.asset_key for one in evaluations} == set(tiny.step_keys())


def test_statistics_file_answers_after_a_run(materialized: Tiny) -> None:

    with duckdb.connect(f"{materialized.store}/stats.duckdb", read_only=True) as reader:
        counted = reader.execute("select dataset, count(*) from rows group by all order by all").fetchall()
    assert counted == [("chats", 60), ("tasks", 60)]


def test_data_version_is_the_version_that_the_engine_keeps(materialized: Tiny) -> None:

    packed = manifest.load_current(Store(materialized.store), ("tiny", "chats", "packed_shards"))
    assert packed is not None
    assert materialized.version("chats", "packed_shards") == packed.version


def test_one_more_source_row_rebuilds_its_dataset_and_what_follows(materialized: Tiny) -> None:
    materialized.append("chats", chat(1000))

    result = materialized.run()

    assert result.success
    made = {name for name, was_there in reused(result).items() if not was_there}
    assert "chats/tokenized_examples" in made
    assert "gpu_partitions" in made
    assert not any(name.startswith("tasks/") for name in made)


def test_one_changed_option_rebuilds_only_the_stages_that_read_it(materialized: Tiny) -> None:
    materialized.write_recipe(mixture={"batch_size": 4, "shuffle": False})

    result = materialized.run()

    made = {name for name, was_there in reused(result).items() if not was_there}
    assert made == {"training_splits", "gpu_partitions"}


def test_another_world_size_has_other_ranks_and_builds_no_dataset_again(materialized: Tiny) -> None:
    materialized.write_recipe(partitions={"world_size": 4})

    result = materialized.run()

    made = {name for name, was_there in reused(result).items() if not was_there}
    ranks = materialized.instance.get_materialized_partitions(materialized.key("ranks"))
    assert result.success
    assert made <= {"training_splits", "gpu_partitions"}
    assert {f"rank-{rank:05d}-of-00004" for rank in range(4)} <= ranks


def test_restored_version_becomes_current_and_opens_the_gate_at_once(materialized: Tiny) -> None:
    old = materialized.version("chats", "canonical_rows")
    materialized.append("chats", chat(1000))
    materialized.run()
    rows, examples = materialized.key("chats", "canonical_rows"), materialized.key("chats", "tokenized_examples")
    config = {"ops": {rows.to_python_identifier(): {"config": {"version": old}}}}

    restored = materialized.run_only(dg.AssetSelection.assets(rows).without_checks(), config=config)
    following = materialized.run_only(dg.AssetSelection.assets(examples).without_checks())

    assert restored.success
    assert materialized.version("chats", "canonical_rows") == old
    assert refusals(following) == {}
    assert reused(following) == {"chats/tokenized_examples": True}


def current(tiny: Tiny, stage: str) -> manifest.Manifest:
    found = manifest.load_current(tiny.project.store, ("tiny", stage))
    assert found is not None
    return found


@pytest.mark.campaign
def test_version_that_rowmill_use_holds_survives_the_next_nights(materialized: Tiny) -> None:
    """A rollback of the ranks and of an order: what follows a held stage is made of what it was made of."""
    store = materialized.project.store
    order, ranks = current(materialized, "training_splits"), current(materialized, "gpu_partitions")
    for i in range(100, 130):
        materialized.append("chats", chat(i))
    assert materialized.run().success
    newer = materialized.version("training_splits")
    assert newer != order.version

    for held in (ranks, order):
        share_versions.hold_version(store, held)
    materialized.append("chats", chat(200))
    night = materialized.run()

    assert night.success, refusals(night)
    assert materialized.version("training_splits") == order.version
    assert current(materialized, "gpu_partitions").version == ranks.version
    assert json.loads(store.read("tiny/gpu_partitions/current.json"))["version"] == ranks.version
    # The order alone: new ranks of it take the shards that it orders, not the current ones.
    share_versions.release_version(store, ranks.key)
    night = materialized.run()
    assert night.success, refusals(night)
    assert current(materialized, "gpu_partitions").inputs == ranks.inputs
    share_versions.release_version(store, order.key)
    assert materialized.run().success
    assert materialized.version("training_splits") not in (order.version, newer)


def test_unknown_version_is_refused_by_name(materialized: Tiny) -> None:
    rows = materialized.key("chats", "canonical_rows")
    config = {"ops": {rows.to_python_identifier(): {"config": {"version": "no-such-version"}}}}

    result = materialized.run_only(dg.AssetSelection.assets(rows), config=config)

    assert "version no-such-version is not kept" in refusals(result)[rows.to_python_identifier()]


def test_missing_source_fails_once_with_the_engine_s_sentence(tiny: Tiny) -> None:
    (tiny.folder / "data" / "tasks.jsonl").unlink()

    result = tiny.run()

    said = materialize.list_failures(result)
    assert not result.success
    assert [line for line in said if "tasks_raw_dataset" in line and "found no data at data/tasks.jsonl" in line]
    assert ("tiny", "chats", "packed_shards") in built(result)
    assert ("tiny", "training_splits") not in built(result)


def test_unknown_recipe_is_refused_with_the_names_there_are(tiny: Tiny) -> None:
    with pytest.raises(materialize.ConfigError, match="choose tiny"):
        materialize.find_recipe("tinny", tiny.path.parent)
