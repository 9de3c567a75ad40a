"""Dagster definitions of a recipe: keys, edges, groups, kinds, checks; and that loading them is cheap."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rowmill.definitions import build_definitions, configs_folder
from rowmill.cli import main
from rowmill.core.errors import ConfigError
from tests.support.tiny_project import RECIPE, Tiny

HEAVY = ("transformers", "torch", "great_expectations", "datasets", "ray", "pandas")


@pytest.fixture
def tiny(tmp_path: Path, instance: dg.DagsterInstance) -> Tiny:
    return Tiny(tmp_path, instance).write()


def test_definitions_of_a_recipe_are_this_graph(tiny: Tiny) -> None:
    graph = tiny.definitions().resolve_asset_graph()

    described = [
        f"{_short(key)} <- {', '.join(sorted(_short(parent) for parent in node.parent_keys)) or '-'}"
        for key, node in sorted((key, graph.get(key)) for key in graph.get_all_asset_keys())
    ]
    assert described == [
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


def test_assets_have_their_group_kinds_pool_and_partitions(tiny: Tiny) -> None:
    graph = tiny.definitions().resolve_asset_graph()
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


def test_checks_block_exactly_where_the_recipe_says_error(tiny: Tiny) -> None:
    tiny.write_recipe(gates={"unknown_roles": {"severity": "warn"}, "duplicates": {"severity": "error"}})
    definitions = tiny.definitions()

    rows = tiny.key("chats", "canonical_rows")
    blocking = {
        spec.name: spec.blocking
        for checks in definitions.asset_checks or ()
        for spec in checks.check_specs
        if spec.asset_key == rows
    }
    assert blocking == {
        "nonempty": True,
        "accounted": True,
        "unknown_roles": False,
        "group_size": True,
        "rejects": True,
        "duplicates": True,
        "shrunk": True,
        "unpinned_boundaries": False,
        "group_advice": False,
        "interval_mismatch": False,
        "preference_data": True,
        "unread_text": True,
    }


def test_checks_of_a_filter_are_there_where_a_dataset_asks_for_it(tiny: Tiny) -> None:
    datasets = {**RECIPE["datasets"], "chats": {**RECIPE["datasets"]["chats"], "filters": {"near_duplicates": {}}}}
    tiny.write_recipe(datasets=datasets)

    keys = tiny.definitions().resolve_asset_graph().asset_check_keys

    asked = {key.asset_key for key in keys if key.name == "near_duplicates"}
    assert asked == {tiny.key("chats", "canonical_rows")}
    assert not {key.name for key in keys} & {"contaminated", "decontamination_items", "padding_share"}


def test_a_recipe_has_one_job_one_schedule_one_sensor(tiny: Tiny) -> None:
    definitions = tiny.definitions()

    assert [job.name for job in definitions.jobs or ()] == ["rebuild_tiny", "prune_history"]
    assert set(definitions.resolve_job_def("rebuild_tiny").asset_layer.executable_asset_keys) == set(tiny.step_keys())
    assert [schedule.name for schedule in definitions.schedules or ()] == ["nightly_tiny", "daily_prune_history"]
    assert [sensor.name for sensor in definitions.sensors or ()] == ["raw_files_tiny", "outside_builds"]
    assert definitions.resolve_schedule_def("nightly_tiny").default_status == dg.DefaultScheduleStatus.STOPPED
    assert definitions.resolve_sensor_def("raw_files_tiny").default_status == dg.DefaultSensorStatus.STOPPED


def test_execution_options_reach_dagster_and_change_no_code_version(tiny: Tiny) -> None:
    before = _code_versions(tiny.definitions())

    tiny.write_recipe(execution={"schedule_on": True, "watch_sources": True, "owners": ["team:data"], "workers": 3})
    definitions = tiny.definitions()

    assert definitions.resolve_schedule_def("nightly_tiny").default_status == dg.DefaultScheduleStatus.RUNNING
    assert definitions.resolve_sensor_def("raw_files_tiny").default_status == dg.DefaultSensorStatus.RUNNING
    assert definitions.resolve_asset_graph().get(tiny.key("training_splits")).owners == ["team:data"]
    assert _code_versions(definitions) == before


def test_order_of_training_is_overdue_after_the_hours_that_the_recipe_names(tiny: Tiny) -> None:
    splits = tiny.key("training_splits")
    never = tiny.definitions().resolve_asset_graph().get(splits).freshness_policy

    tiny.write_recipe(execution={"overdue_hours": 26})
    graph = tiny.definitions().resolve_asset_graph()

    assert never is None
    assert graph.get(splits).freshness_policy == dg.FreshnessPolicy.time_window(fail_window=timedelta(hours=26))
    assert [key for key in graph.get_all_asset_keys() if graph.get(key).freshness_policy] == [splits]


def test_code_version_changes_for_exactly_the_stages_that_read_an_option(tiny: Tiny) -> None:
    before = _code_versions(tiny.definitions())

    tiny.write_recipe(partitions={"world_size": 4})

    changed = {key for key, version in _code_versions(tiny.definitions()).items() if version != before[key]}
    assert changed == {"tiny/training_splits", "tiny/gpu_partitions"}


def test_recipe_with_a_hyphen_keeps_its_key_and_gets_a_group_without(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    tiny = Tiny(tmp_path, instance, name="two-words").write()

    definitions = tiny.definitions()

    assert definitions.resolve_asset_graph().get(tiny.key("training_splits")).group_name == "two_words"
    assert [job.name for job in definitions.jobs or ()] == ["rebuild_two_words", "prune_history"]


def test_recipes_with_equal_dagster_names_are_one_error(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    recipes = [Tiny(tmp_path, instance, name=name).write().path for name in ("two-words", "two_words")]

    with pytest.raises(ConfigError, match="named like another one") as caught:
        build_definitions(recipes, str(tmp_path / "store"), strict=True)

    assert all(str(path) in str(caught.value) for path in recipes)


def test_datasets_with_equal_dagster_names_are_an_error(tiny: Tiny) -> None:
    chats = RECIPE["datasets"]["chats"]
    tiny.write_recipe(datasets={"a-b": chats, "a_b": chats})

    with pytest.raises(ConfigError, match="rename the dataset"):
        build_definitions([tiny.path], tiny.store, strict=True)


def test_every_bad_recipe_is_named_in_one_error(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    good = Tiny(tmp_path, instance, name="good").write()
    first = Tiny(tmp_path, instance, name="first").write_recipe(seq_length=128)
    second = Tiny(tmp_path, instance, name="second").write_recipe(seq_len=1)

    with pytest.raises(ConfigError) as caught:
        build_definitions([first.path, good.path, second.path], good.store, strict=True)

    assert str(first.path) in str(caught.value)
    assert str(second.path) in str(caught.value)
    assert str(good.path) not in str(caught.value)


@pytest.mark.parametrize("option", [{"cron": "0 25 * * *"}, {"owners": ["nonsense"]}])
def test_option_that_dagster_does_not_take_is_in_the_same_error(
    tmp_path: Path, instance: dg.DagsterInstance, option: dict[str, Any]
) -> None:
    first = Tiny(tmp_path, instance, name="first").write_recipe(execution={"workers": 1} | option)
    second = Tiny(tmp_path, instance, name="second").write_recipe(seq_len=1)

    with pytest.raises(ConfigError) as caught:
        build_definitions([first.path, second.path], first.store, strict=True)

    assert "first: execution: Dagster refuses it: " in str(caught.value)
    assert str(next(iter(option.values()))).strip("[']") in str(caught.value)
    assert str(second.path) in str(caught.value)


def test_bad_recipe_is_one_asset_with_its_error_and_all_others_load(
    tmp_path: Path, instance: dg.DagsterInstance, caplog: pytest.LogCaptureFixture
) -> None:
    good = Tiny(tmp_path, instance, name="good").write()
    bad = Tiny(tmp_path, instance, name="bad-one").write_recipe(seq_length=128)
    refused = Tiny(tmp_path, instance, name="late").write_recipe(execution={"workers": 1, "cron": "0 25 * * *"})

    definitions = build_definitions([bad.path, good.path, refused.path], good.store)

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
        instance=instance,
        raise_on_error=False,
    )
    assert not result.success
    [failure] = [event for event in result.all_events if event.is_step_failure]
    assert "did you mean seq_len?" in str(failure.step_failure_data.user_failure_data)


@pytest.mark.parametrize("stem", ["qwen2.5", "my recipe", "a[1]", "données", "数据", "-"])
def test_recipe_file_with_a_name_that_cannot_be_is_one_broken_recipe(
    tmp_path: Path, instance: dg.DagsterInstance, stem: str
) -> None:
    good = Tiny(tmp_path, instance, name="qwen2_5").write()
    bad = good.path.with_name(f"{stem}.yaml")
    bad.write_bytes(good.path.read_bytes())

    definitions = build_definitions([bad, good.path], good.store)

    graph = definitions.resolve_asset_graph()
    [key] = [key for key in graph.get_all_asset_keys() if key.path[-1] == "cannot_be_loaded"]
    assert f"{stem!r} cannot be a name; allowed are a letter followed by" in (graph.get(key).description or "")
    assert graph.has(good.key("gpu_partitions"))
    assert [one.name for one in definitions.schedules or ()] == ["nightly_qwen2_5", "daily_prune_history"]


def test_recipes_that_differ_in_a_hyphen_are_refused_alike_by_commands_and_pages(
    tmp_path: Path, instance: dg.DagsterInstance, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Tiny(tmp_path, instance, name="a-b").write()
    second = first.path.with_name("a_b.yaml")
    second.write_bytes(first.path.read_bytes())

    graph = build_definitions([first.path, second], first.store).resolve_asset_graph()

    [broken] = [key for key in graph.get_all_asset_keys() if key.path[-1] == "cannot_be_loaded"]
    shown = graph.get(broken).description or ""
    for path, name in ((first.path, "a-b"), (second, "a_b")):
        assert main.main(["plan", str(path)]) == main.ExitStatus.INVALID
        said = f"{path}: recipe {name!r} is named like "
        assert said in capsys.readouterr().err
        assert said in shown


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


def _short(key: dg.AssetKey) -> str:
    return "/".join(key.path[1:])


def _code_versions(definitions: dg.Definitions) -> dict[str, str | None]:
    graph = definitions.resolve_asset_graph()
    return {key.to_user_string(): graph.get(key).code_version for key in graph.get_all_asset_keys()}
