"""What starts runs by itself: the night, changed files, changed inputs; driven tick by tick."""

import os
from datetime import UTC, datetime
from typing import Any

import dagster as dg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_rowmill.automation import SourceWatchState, update_watch
from rowmill.core.errors import ConfigError
from tests.support.tiny_project import RECIPE, Tiny, chat

# Conditions are beta by name in the pinned release; these tests are how we notice a change.
pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")


@pytest.mark.slow
def test_schedule_asks_for_one_run_each_night_that_succeeds(tiny: Tiny) -> None:
    definitions = tiny.definitions()
    schedule, job = definitions.resolve_schedule_def("nightly_tiny"), definitions.resolve_job_def("rebuild_tiny")
    context = dg.build_schedule_context(tiny.instance, scheduled_execution_time=datetime(2026, 3, 1, 2, 0, tzinfo=UTC))
    [request] = list(schedule.evaluate_tick(context).run_requests or ())
    assert schedule.cron_schedule == "0 2 * * *"
    assert request.run_key == "tiny:2026-03-01T02:00"
    # No choice of partitions is needed.
    assert not any(name.startswith("dagster/") and "partition" in name for name in request.tags)
    assert job.execute_in_process(instance=tiny.instance, tags=request.tags).success


def test_sensor_fires_once_when_files_changed_and_settled_and_again_when_one_is_restored(tiny: Tiny) -> None:
    file = tiny.folder / "data" / "chats.jsonl"
    ticks = _Ticks(tiny)
    original = file.read_bytes()

    assert [ticks.run_keys() for _ in range(3)] == [0, 1, 0]
    tiny.append("chats", chat(1000))
    first_look = ticks.run_keys()
    tiny.append("chats", chat(1001))  # still being written
    second_look = ticks.run_keys()
    assert (first_look, second_look) == (0, 0)
    assert [ticks.run_keys() for _ in range(2)] == [1, 0]
    file.write_bytes(original)
    assert [ticks.run_keys() for _ in range(2)] == [0, 1]
    assert len(set(ticks.keys)) == 3


def test_sensor_waits_for_missing_files_and_says_which(tiny: Tiny) -> None:
    os.unlink(tiny.folder / "data" / "tasks.jsonl")
    data = _Ticks(tiny).evaluate()
    assert not data.run_requests
    assert "data/tasks.jsonl" in (data.skip_message or "")


@pytest.mark.slow
def test_dataset_after_an_asset_depends_on_it_and_the_sensor_follows_it_instead_of_the_files(tiny: Tiny) -> None:
    upstream = dg.AssetKey(["raw", "conversations"])
    source = RECIPE["datasets"]["chats"]["source"] | {"after": ["raw/conversations"]}
    plain = tiny.code_versions()
    tiny.write_recipe(datasets=RECIPE["datasets"] | {"chats": RECIPE["datasets"]["chats"] | {"source": source}})

    @dg.asset(key=upstream)
    def conversations() -> None: ...

    def upstream_is_materialized(version: str) -> None:
        tags = {"dagster/data_version": version}
        tiny.instance.report_runless_asset_event(dg.AssetMaterialization(upstream, tags=tags))

    graph = dg.Definitions.merge(tiny.definitions(), dg.Definitions([conversations])).resolve_asset_graph()
    ticks = _Ticks(tiny)
    missing = ticks.evaluate().skip_message or ""

    assert graph.get(tiny.key("chats", "raw_dataset")).parent_keys == {upstream}
    assert tiny.code_versions()["tiny/chats.raw_dataset"] == plain["tiny/chats.raw_dataset"]
    assert "datasets.chats.source.after: raw/conversations was never materialized" in missing
    upstream_is_materialized("1")
    assert [ticks.run_keys() for _ in range(3)] == [0, 1, 0]
    tiny.append("chats", chat(1000))  # by the asset, which is still running
    upstream_is_materialized("1")
    assert [ticks.run_keys() for _ in range(2)] == [0, 0]
    upstream_is_materialized("2")
    assert [ticks.run_keys() for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("key", ["", "raw//rows", "raw/ rows"])
def test_key_of_no_asset_is_refused_with_an_example(tiny: Tiny, key: str) -> None:
    source = RECIPE["datasets"]["chats"]["source"] | {"after": [key]}
    tiny.write_recipe(datasets={"chats": RECIPE["datasets"]["chats"] | {"source": source}})
    with pytest.raises(ConfigError, match=r"source\.after: expected an asset's key such as raw/conversations"):
        _ = tiny.project


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30))
def test_looks_fire_exactly_once_per_settled_change_with_keys_that_never_repeat(states: list[str]) -> None:
    watch, keys, fired, previous = SourceWatchState(), [], "", ""
    for now in states:
        watch, key = update_watch(watch, now)
        assert (key is not None) == (now == previous and now != fired)
        if key is not None:
            keys.append(key)
            fired = now
        previous = now
    assert len(set(keys)) == len(keys)


def test_conditions_are_off_unless_the_recipe_asks(tiny: Tiny) -> None:
    graph = tiny.definitions().resolve_asset_graph()
    assert {graph.get(key).automation_condition for key in graph.get_all_asset_keys()} == {None}


@pytest.mark.slow
def test_conditions_follow_a_change_one_stage_at_a_time(tiny: Tiny) -> None:
    definitions = tiny.write_recipe(execution={"automation": "on_change", "workers": 1}).definitions()
    switched_on = dg.evaluate_automation_conditions(definitions, instance=tiny.instance)
    tiny.run_asset("tasks", "raw_dataset")
    raw_built = dg.evaluate_automation_conditions(definitions, instance=tiny.instance, cursor=switched_on.cursor)
    handled = dg.evaluate_automation_conditions(definitions, instance=tiny.instance, cursor=raw_built.cursor)

    # What was missing before they were switched on is no change; the first build is somebody's decision.
    assert switched_on.total_requested == 0
    assert raw_built.get_num_requested(tiny.key("tasks", "canonical_rows")) == 1
    assert raw_built.total_requested == 1
    assert handled.total_requested == 0


@pytest.mark.slow
def test_conditions_launch_nothing_behind_a_failed_blocking_check(tiny: Tiny) -> None:
    tiny.write(unknown_roles=12, execution={"automation": "on_change", "workers": 1})
    definitions = tiny.definitions()
    rows, examples = tiny.key("chats", "canonical_rows"), tiny.key("chats", "tokenized_examples")
    before = dg.evaluate_automation_conditions(definitions, instance=tiny.instance)
    tiny.run_only(dg.AssetSelection.assets(tiny.key("chats", "raw_dataset"), rows))
    after = dg.evaluate_automation_conditions(definitions, instance=tiny.instance, cursor=before.cursor)

    assert after.get_num_requested(examples) == 0


class _Ticks:
    """A sensor with its cursor; counts what it asks for."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny
        self.definitions = tiny.definitions()
        self.cursor: str | None = None
        self.keys: list[str | None] = []

    def evaluate(self) -> Any:
        sensor = self.definitions.resolve_sensor_def("raw_files_tiny")
        context = dg.build_sensor_context(
            instance=self.tiny.instance, cursor=self.cursor, definitions=self.definitions, sensor_name=sensor.name
        )
        return sensor.evaluate_tick(context)

    def run_keys(self) -> int:
        data = self.evaluate()
        self.cursor = data.cursor
        self.keys += [request.run_key for request in data.run_requests or ()]
        return len(data.run_requests or ())
