"""A build of the command line, as Dagster shows it afterwards."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

# What the marks of the pages are made of; there is no public name for it.
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from dagster_rowmill.definitions import build_definitions
from dagster_rowmill.factory import find_checked_version, open_asset_inputs
from rowmill.build.steps import open_project, plan_steps
from rowmill.cli.error_boundary import ExitStatus
from rowmill.cli.projects import find_dagster_home
from rowmill.cli.ui import default_settings
from rowmill.stages.gpu_partitions import rank_names
from tests.support.cli_project import RECIPE, CliProject

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the project's own home of Dagster, as `rowmill ui` makes it."""
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    folder = tmp_path / ".dagster"
    folder.mkdir()
    (folder / "dagster.yaml").write_bytes(default_settings().read_bytes())
    return folder


@pytest.fixture
def instance(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.DagsterInstance]:
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    with dg.DagsterInstance.from_config(str(home)) as found:
        yield found


@pytest.fixture
def project(tmp_path: Path) -> CliProject:
    return CliProject(tmp_path).write()


def test_builds_of_the_command_line_stand_in_dagster_with_their_checks_and_leave_nothing_unsynced(
    project: CliProject, instance: dg.DagsterInstance
) -> None:
    project.run("build")
    steps = plan_steps(project.project)
    for step in steps:
        assert find_checked_version(instance, step.key) == project.current(*step.key[1:]).version
    ranks = instance.get_materialized_partitions(dg.AssetKey(["small", "ranks"]))
    assert ranks == set(rank_names(project.project.recipe.partitions.world_size))
    # The gate before the ranks reads the same events as after a run of Dagster.
    last = next(step for step in steps if step.name == "gpu_partitions")
    assert set(open_asset_inputs(instance, project.project, last)) == set(last.inputs)
    assert list_unsynced(project, instance) == {}
    project.run("build")
    project.append_chat(1000)
    project.run("build", "--only", "raw_dataset")
    # What a change of the input leaves to be built again is marked, and only that.
    assert list_unsynced(project, instance) == {"small/chats.canonical_rows": ["has a new dependency data version"]}
    project.run("build")
    assert list_unsynced(project, instance) == {}
    # The build in which nothing changed has added no events.
    keys = [dg.AssetKey(["small", f"{name}.canonical_rows"]) for name in ("chats", "notes")]
    assert [len(instance.fetch_materializations(key, limit=100).records) for key in keys] == [2, 1]


def list_unsynced(project: CliProject, instance: dg.DagsterInstance) -> dict[str, list[str]]:
    """Return the assets that Dagster marks as unsynced, with its reasons."""
    graph = build_definitions([Path(project.recipe)], project.project.store.root).resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    return {
        key.to_user_string(): [cause.reason for cause in resolver.get_stale_causes(key)]
        for key in graph.materializable_asset_keys
        if resolver.get_status(key) is not StaleStatus.FRESH
    }


def test_version_that_rowmill_use_holds_is_shown_as_held_until_it_is_released(
    project: CliProject, instance: dg.DagsterInstance
) -> None:
    def read_page() -> Mapping[str, Any]:
        event = instance.get_latest_materialization_event(dg.AssetKey(["small", "gpu_partitions"]))
        assert event is not None
        assert event.asset_materialization is not None
        return event.asset_materialization.metadata

    project.run("build")
    project.run("use", "gpu_partitions", project.current("gpu_partitions").version)
    held = read_page()
    assert "held at version" in str(held["held"].value)
    assert "held at version" in str(held["summary"].value)
    project.run("use", "gpu_partitions", "--release")
    assert "held" not in read_page()


def test_steps_before_a_closed_gate_stand_in_dagster_too(project: CliProject, instance: dg.DagsterInstance) -> None:
    project.write_recipe(gates=RECIPE["gates"] | {"rejects": {"at_most": 0}})
    project.run("build", "--skip-preflight", status=ExitStatus.GATE_CLOSED)
    check = dg.AssetCheckKey(dg.AssetKey(["small", "chats.canonical_rows"]), "rejects")
    [record] = instance.event_log_storage.get_asset_check_execution_history(check, limit=5)
    assert record.event is not None
    evaluation = record.event.dagster_event
    assert evaluation is not None
    assert not evaluation.asset_check_evaluation_data.passed


def test_history_that_cannot_be_written_does_not_fail_the_build(project: CliProject, home: Path) -> None:
    (home / "dagster.yaml").write_text("storage: nonsense\n", encoding="utf-8")
    assert "Dagster's history could not be written" in project.run("build").err


def test_home_is_the_project_s_own_and_another_root_is_not_what_dagster_shows(project: CliProject, home: Path) -> None:
    assert find_dagster_home(project.project) == str(home)
    project.run("build", "--only", "raw_dataset")
    assert (home / "storage").exists() or any(home.rglob("*.db"))
    assert "DAGSTER_HOME" not in os.environ
    assert find_dagster_home(open_project(project.recipe, str(project.folder / "elsewhere"))) is None
