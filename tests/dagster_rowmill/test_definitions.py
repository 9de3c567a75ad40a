"""Dagster definitions of a recipe: keys, edges, groups, kinds, checks; and that loading them is cheap."""

import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rowmill.definitions import build_definitions
from dagster_rowmill.recipe_loading import configs_folder
from rowmill.cli.error_boundary import ExitStatus
from rowmill.core.errors import ConfigError
from tests.support.cli_project import run
from tests.support.tiny_project import RECIPE, Tiny

HEAVY = ("transformers", "torch", "great_expectations", "datasets", "ray", "pandas")


def test_definitions_of_a_recipe_are_this_graph(tiny: Tiny) -> None:
    graph = tiny.definitions().resolve_asset_graph()

    def short(key: dg.AssetKey) -> str:
        return "/".join(key.path[1:])

    parents = {short(key): graph.get(key).parent_keys for key in sorted(graph.get_all_asset_keys())}
    assert [f"{name} <- {', '.join(sorted(map(short, keys))) or '-'}" for name, keys in parents.items()] == [
        "chats.canonical_rows <- chats.raw_dataset",
        "chats.packed_shards <- chats.tokenized_examples, chats.truncation_stats",
        "chats.raw_dataset <- -",
        "chats.tokenized_examples <- chats.canonical_rows",
        "chats.truncation_stats <- chats.tokenized_examples",
        "gpu_partitions <- chats.packed_shards, tasks.packed_shards, training_splits",
        "ranks <- gpu_partitions",
        "tasks.canonical_rows <- tasks.raw_dataset",
        "tasks.packed_shards <- tasks.tokenized_examples, tasks.truncation_stats",
        "tasks.raw_dataset <- -",
        "tasks.tokenized_examples <- tasks.canonical_rows",
        "tasks.truncation_stats <- tasks.tokenized_examples",
        "training_splits <- chats.packed_shards, tasks.packed_shards",
    ]


def test_assets_have_their_group_kinds_pool_and_partitions_and_one_job_schedule_and_sensor(tiny: Tiny) -> None:
    definitions = tiny.definitions()
    graph = definitions.resolve_asset_graph()
    examples, ranks = graph.get(tiny.key("chats", "tokenized_examples")), graph.get(tiny.key("ranks"))

    assert {graph.get(key).group_name for key in graph.get_all_asset_keys()} == {"tiny"}
    assert examples.kinds == {"arrow"}
    assert examples.tags["rowmill/dataset"] == "chats"
    assert examples.pools == {"cores"}
    # A run that contains a partitioned asset begins with a choice of partitions: none of them can be in one.
    assert {key for key in graph.materializable_asset_keys if graph.get(key).partitions_def} == set()
    assert graph.materializable_asset_keys == set(tiny.step_keys())
    assert ranks.partitions_def is not None
    assert ranks.partitions_def.get_partition_keys() == ["rank-00000-of-00002", "rank-00001-of-00002"]
    assert [job.name for job in definitions.jobs or ()] == ["rebuild_tiny", "prune_history"]
    assert set(definitions.resolve_job_def("rebuild_tiny").asset_layer.executable_asset_keys) == set(tiny.step_keys())
    assert [schedule.name for schedule in definitions.schedules or ()] == ["nightly_tiny", "daily_prune_history"]
    assert [sensor.name for sensor in definitions.sensors or ()] == ["raw_files_tiny", "outside_builds"]
    assert definitions.resolve_schedule_def("nightly_tiny").default_status == dg.DefaultScheduleStatus.STOPPED
    assert definitions.resolve_sensor_def("raw_files_tiny").default_status == dg.DefaultSensorStatus.STOPPED


def test_checks_block_where_the_recipe_says_error_and_filters_have_theirs_where_asked_for(tiny: Tiny) -> None:
    tiny.write_recipe(gates={"unknown_roles": {"severity": "warn"}, "duplicates": {"severity": "error"}})
    specs = [spec for checks in tiny.definitions().asset_checks or () for spec in checks.check_specs]
    blocking = {spec.name: spec.blocking for spec in specs if spec.asset_key == tiny.key("chats", "canonical_rows")}
    warn = {"unknown_roles", "unpinned_boundaries", "group_advice", "interval_mismatch"}
    error = {
        "nonempty", "accounted", "group_size", "rejects", "duplicates", "shrunk", "preference_data",
        "unread_flags", "unread_text",
    }  # fmt: skip
    assert blocking == dict.fromkeys(warn, False) | dict.fromkeys(error, True)
    datasets = {**RECIPE["datasets"], "chats": {**RECIPE["datasets"]["chats"], "filters": {"near_duplicates": {}}}}
    keys = tiny.write_recipe(datasets=datasets).definitions().resolve_asset_graph().asset_check_keys
    assert {key.asset_key for key in keys if key.name == "near_duplicates"} == {tiny.key("chats", "canonical_rows")}
    assert not {key.name for key in keys} & {"contaminated", "decontamination_items", "padding_share"}


def test_code_version_changes_for_exactly_the_stages_that_read_an_option(tiny: Tiny) -> None:
    before = tiny.code_versions()
    tiny.write_recipe(execution={"schedule_on": True, "watch_sources": True, "owners": ["team:data"], "workers": 3})
    definitions = tiny.definitions()
    assert definitions.resolve_schedule_def("nightly_tiny").default_status == dg.DefaultScheduleStatus.RUNNING
    assert definitions.resolve_sensor_def("raw_files_tiny").default_status == dg.DefaultSensorStatus.RUNNING
    assert definitions.resolve_asset_graph().get(tiny.key("training_splits")).owners == ["team:data"]
    assert tiny.code_versions() == before
    after = tiny.write_recipe(partitions={"world_size": 4}).code_versions()
    changed = {key for key, version in after.items() if version != before[key]}
    assert changed == {"tiny/training_splits", "tiny/gpu_partitions"}


def test_order_of_training_is_overdue_after_the_hours_that_the_recipe_names(tiny: Tiny) -> None:
    splits = tiny.key("training_splits")
    assert tiny.definitions().resolve_asset_graph().get(splits).freshness_policy is None
    graph = tiny.write_recipe(execution={"freshness": {"hours": 26}}).definitions().resolve_asset_graph()
    assert graph.get(splits).freshness_policy == dg.FreshnessPolicy.time_window(fail_window=timedelta(hours=26))
    assert [key for key in graph.get_all_asset_keys() if graph.get(key).freshness_policy] == [splits]
    by_six = {"freshness": {"hours": 4, "deadline": "0 6 * * *"}}
    graph = tiny.write_recipe(execution=by_six).definitions().resolve_asset_graph()
    assert graph.get(splits).freshness_policy == dg.FreshnessPolicy.cron("0 6 * * *", timedelta(hours=4))


def named(tiny: Tiny, name: str, **changes: Any) -> Tiny:
    """Return another recipe of the same project."""
    return replace(tiny, name=name).write_recipe(**changes)


def test_recipe_with_a_hyphen_keeps_its_key_and_gets_a_group_without(tiny: Tiny) -> None:
    hyphened = named(tiny, "two-words")
    definitions = hyphened.definitions()
    assert definitions.resolve_asset_graph().get(hyphened.key("training_splits")).group_name == "two_words"
    assert [job.name for job in definitions.jobs or ()] == ["rebuild_two_words", "prune_history"]


def test_recipes_and_datasets_with_equal_dagster_names_are_errors(tiny: Tiny) -> None:
    recipes = [named(tiny, name).path for name in ("two-words", "two_words")]
    with pytest.raises(ConfigError, match="named like another one") as caught:
        build_definitions(recipes, tiny.store, strict=True)
    assert all(str(path) in str(caught.value) for path in recipes)
    chats = RECIPE["datasets"]["chats"]
    tiny.write_recipe(datasets={"a-b": chats, "a_b": chats})
    with pytest.raises(ConfigError, match="rename the dataset"):
        build_definitions([tiny.path], tiny.store, strict=True)


def test_every_bad_recipe_is_named_in_one_error(tiny: Tiny) -> None:
    good = named(tiny, "good").path
    bad = [named(tiny, "first", seq_length=128).path, named(tiny, "second", seq_len=1).path]
    with pytest.raises(ConfigError) as caught:
        build_definitions([good, *bad], tiny.store, strict=True)
    assert all(str(path) in str(caught.value) for path in bad)
    assert str(good) not in str(caught.value)


@pytest.mark.parametrize(
    "option",
    [
        {"cron": "0 25 * * *"},
        {"owners": ["nonsense"]},
        {"freshness": {"hours": 25.0, "deadline": "0 6 * * *"}},
        {"freshness": {"hours": 2.0, "deadline": "nonsense"}},
    ],
)
def test_option_that_dagster_does_not_take_is_in_the_same_error(tiny: Tiny, option: dict[str, Any]) -> None:
    first, second = named(tiny, "first", execution={"workers": 1} | option), named(tiny, "second", seq_len=1)
    with pytest.raises(ConfigError) as caught:
        build_definitions([first.path, second.path], tiny.store, strict=True)
    assert "first: execution: Dagster refuses it: " in str(caught.value)
    assert str(next(iter(option.values()))).strip("[']") in str(caught.value)
    assert str(second.path) in str(caught.value)


def test_bad_recipe_is_one_asset_with_its_error_and_all_others_load(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = named(tiny, "good"), named(tiny, "bad-one", seq_length=128)
    refused = named(tiny, "late", execution={"workers": 1, "cron": "0 25 * * *"})
    definitions = build_definitions([bad.path, good.path, refused.path], tiny.store)
    graph = definitions.resolve_asset_graph()
    broken = {key.to_user_string() for key in graph.get_all_asset_keys() if key.path[-1] == "cannot_be_loaded"}
    assert broken == {"bad_one/cannot_be_loaded", "late/cannot_be_loaded"}
    node = graph.get(dg.AssetKey(["bad_one", "cannot_be_loaded"]))
    assert node.group_name == "bad_one"
    assert "did you mean seq_len?" in (node.description or "")
    assert graph.has(good.key("gpu_partitions"))
    assert [one.name for one in definitions.schedules or ()] == ["nightly_good", "daily_prune_history"]
    assert "did you mean seq_len?" in caplog.text
    # It runs as a failure that says the same, beside a whole run of the others.
    result = dg.materialize(
        [one for one in definitions.assets or () if isinstance(one, dg.AssetsDefinition) and one.key == node.key],
        instance=tiny.instance,
        raise_on_error=False,
    )
    assert not result.success
    [failure] = [event for event in result.all_events if event.is_step_failure]
    assert "did you mean seq_len?" in str(failure.step_failure_data.user_failure_data)


@pytest.mark.parametrize("stem", ["qwen2.5", "my recipe", "a[1]", "données", "数据", "-"])
def test_recipe_file_with_a_name_that_cannot_be_is_one_broken_recipe(tiny: Tiny, stem: str) -> None:
    good, bad = named(tiny, "qwen2_5"), named(tiny, stem)
    definitions = build_definitions([bad.path, good.path], tiny.store)
    graph = definitions.resolve_asset_graph()
    [key] = [key for key in graph.get_all_asset_keys() if key.path[-1] == "cannot_be_loaded"]
    assert f"{stem!r} cannot be a name; allowed are a letter followed by" in (graph.get(key).description or "")
    assert graph.has(good.key("gpu_partitions"))
    assert [one.name for one in definitions.schedules or ()] == ["nightly_qwen2_5", "daily_prune_history"]


def test_recipes_that_differ_in_a_hyphen_are_refused_alike_by_commands_and_pages(tiny: Tiny) -> None:
    alike = [named(tiny, name) for name in ("a-b", "a_b")]
    graph = build_definitions([one.path for one in alike], tiny.store).resolve_asset_graph()
    [broken] = [key for key in graph.get_all_asset_keys() if key.path[-1] == "cannot_be_loaded"]
    for one in alike:
        said = f"{one.path}: recipe {one.name!r} is named like "
        assert said in run("plan", str(one.path), status=ExitStatus.INVALID).err
        assert said in (graph.get(broken).description or "")


def test_missing_configs_folder_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWMILL_CONFIGS", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="nowhere: no such folder"):
        configs_folder()


@pytest.mark.slow
def test_importing_reads_nothing_and_loading_imports_no_heavy_library(tiny: Tiny) -> None:
    # The import comes before ROWMILL_CONFIGS names a folder that exists: work at import would fail there.
    program = f"""
import os, sys
os.environ["ROWMILL_CONFIGS"] = {str(tiny.folder / "nowhere")!r}
import dagster_rowmill.definitions
os.environ["ROWMILL_CONFIGS"] = {str(tiny.path.parent)!r}
assert len(dagster_rowmill.definitions.defs().resolve_all_asset_keys()) == 13
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_dagster_validates_the_workspace(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("ROWMILL_CONFIGS", str(tiny.path.parent))
    monkeypatch.setenv("DAGSTER_HOME", str(tiny.folder))
    monkeypatch.setenv("DAGSTER_DISABLE_TELEMETRY", "1")
    command = [sys.executable, "-m", "dagster", "definitions", "validate", "-w", "workspace.yaml"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
