"""A recipe small enough to build in a second, with its own files; for tests that need a whole build."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dagster as dg
import yaml

from dagster_rowmill.definitions import build_definitions
from dagster_rowmill.materialize import materialize_recipe
from dagster_rowmill.names import make_asset_key
from dagster_rowmill.recipe_loading import open_projects
from rowmill.build.steps import Project, plan_steps
from rowmill.reader import Reader
from rowmill.schema.manifest import Manifest, StageKey
from tests.support.recipes import current

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "configs" / "demo" / "tokenizer"
RECIPE: dict[str, Any] = {
    "tokenizer": str(TOKENIZER),
    "seq_len": 128,
    "defaults": {"splits": {"validation": 0.1, "test": 0, "seed": 1}},
    "datasets": {
        "chats": {
            "source": {"train_urls": ["data/chats.jsonl"]},
            "format": {"kind": "chat", "unknown_roles": "warn"},
            "splits": {"group_key": "conversation_id"},
        },
        "tasks": {
            "source": {"train_urls": ["data/tasks.jsonl"]},
            "format": {"kind": "supervised", "input_field": "prompt", "output_field": "answer"},
        },
    },
    "mixture": {"batch_size": 4},
    "partitions": {"world_size": 2},
    # Few rows: shares mean little here.
    "gates": {
        "split_share": {"at_most": 1},
        "rank_balance": {"at_most": 1},
        "fill": {"at_least": 0},
        "filler_share": {"at_most": 1},
    },
    "execution": {"workers": 1},
}
"""Two datasets of two kinds; every path is relative to the project."""


@dataclass(frozen=True)
class Tiny:
    """A project in a folder: its recipe, its data, where it builds, and a Dagster instance that remembers."""

    folder: Path
    instance: dg.DagsterInstance
    name: str = "tiny"

    @property
    def path(self) -> Path:
        return self.folder / "configs" / f"{self.name}.yaml"

    @property
    def store(self) -> str:
        return str(self.folder / ".rowmill")

    @property
    def project(self) -> Project:
        [project] = open_projects([self.path], self.store)
        return project

    def write(self, *, rows: int = 60, unknown_roles: int = 0, **changes: Any) -> "Tiny":
        """Write data and recipe; `unknown_roles` of the chats have a role that no template knows."""
        self.write_rows("chats", [chat(i, role="narrator" if i < unknown_roles else "user") for i in range(rows)])
        self.write_rows("tasks", [task(i) for i in range(rows)])
        return self.write_recipe(**changes)

    def write_rows(self, dataset: str, rows: Iterable[Mapping[str, Any]]) -> None:
        file = self.folder / "data" / f"{dataset}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")

    def append(self, dataset: str, row: Mapping[str, Any]) -> None:
        with (self.folder / "data" / f"{dataset}.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")

    def write_recipe(self, **changes: Any) -> "Tiny":
        """Write the recipe with some top-level keys replaced."""
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(yaml.safe_dump(RECIPE | changes, sort_keys=False), encoding="utf-8")
        return self

    @contextmanager
    def lend_copy(self, folder: Path) -> Generator["Tiny"]:
        """Lend a copy in a new folder, with what it built and with an instance that remembers the same runs."""
        shutil.copytree(self.folder, folder)
        with dg.DagsterInstance.ephemeral() as instance:
            _copy_database(self.instance.event_log_storage, instance.event_log_storage)
            _copy_database(self.instance.run_storage, instance.run_storage)
            yield replace(self, folder=folder, instance=instance)

    def definitions(self) -> dg.Definitions:
        return build_definitions([self.path], self.store)

    def run(self) -> dg.ExecuteInProcessResult:
        """Run everything: every asset, every rank, every check."""
        return materialize_recipe(self.path, self.store, self.instance)

    def run_only(
        self, selection: dg.AssetSelection, *, config: Mapping[str, Any] | None = None
    ) -> dg.ExecuteInProcessResult:
        """Run a selection of assets and checks, as someone clicking in the user interface would."""
        job = dg.define_asset_job("picked", selection=selection, executor_def=dg.in_process_executor)
        merged = dg.Definitions.merge(self.definitions(), dg.Definitions(jobs=[job]))
        return merged.resolve_job_def("picked").execute_in_process(
            instance=self.instance, run_config=config, raise_on_error=False
        )

    def run_asset(
        self, *steps: str, without_checks: bool = False, config: Mapping[str, Any] | None = None
    ) -> dg.ExecuteInProcessResult:
        """Run one asset."""
        asset = dg.AssetSelection.assets(self.key(*steps))
        return self.run_only(asset.without_checks() if without_checks else asset, config=config)

    def shown(self, *steps: str) -> dg.AssetMaterialization:
        """Return the newest materialization of an asset, as its page shows it."""
        event = self.instance.get_latest_materialization_event(self.key(*steps))
        assert event is not None
        assert event.asset_materialization is not None
        return event.asset_materialization

    def version(self, *steps: str) -> str:
        """Return the data version that Dagster shows for an asset."""
        return (self.shown(*steps).tags or {})["dagster/data_version"]

    def current(self, *steps: str) -> Manifest:
        return current(self.project, *steps)

    def sequences(self) -> list[list[int]]:
        """Read all that a trainer would get, every file compared with its digest."""
        readers = [Reader(self.store, self.name, rank=rank, world_size=2, batch_size=2, verify=True) for rank in (0, 1)]
        return [reader[i].input_ids.tolist() for reader in readers for i in range(len(reader))]

    def start(self, *program: str) -> "subprocess.CompletedProcess[str]":
        """Run a program on the project in a process of its own."""
        home = str(self.folder / "home")
        places = {"ROWMILL_CONFIGS": str(self.path.parent), "ROWMILL_STORE": self.store, "DAGSTER_HOME": home}
        command, env = [sys.executable, *program], os.environ | places
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    def code_versions(self) -> dict[str, str | None]:
        """Return the code version of every asset."""
        graph = self.definitions().resolve_asset_graph()
        return {key.to_user_string(): graph.get(key).code_version for key in graph.get_all_asset_keys()}

    def step_keys(self) -> list[dg.AssetKey]:
        """Return the keys of all assets that a run can materialize."""
        return [make_asset_key(step.key) for step in plan_steps(self.project)]

    def key(self, *steps: str) -> dg.AssetKey:
        return make_asset_key((self.name, *steps))


def _copy_database(source: Any, target: Any) -> None:
    """Copy one of Dagster's stores in memory, which are SQLite databases, as SQLite copies a database."""
    # Dagster's interface lends connections that cannot be reached below SQLAlchemy.
    opened = [one._held_conn.connection.driver_connection for one in (source, target)]  # noqa: SLF001
    opened[0].backup(opened[1])


def chat(i: int, *, role: str = "user") -> dict[str, Any]:
    turns = [
        {"role": role, "content": f"What is {i} plus {i % 7}?"},
        {"role": "assistant", "content": f"{i} plus {i % 7} is {i + i % 7}."},
    ]
    return {"conversation_id": f"c{i}", "messages": turns}


def task(i: int) -> dict[str, Any]:
    return {"prompt": f"Name a number above {i}.", "answer": f"{i + 1} is above {i}."}


def built(result: dg.ExecuteInProcessResult) -> set[StageKey]:
    """Return the keys of the stages that a run materialized."""
    return {read_stage_key(event.asset_key) for event in _list_stage_events(result) if event.asset_key}


def read_stage_key(key: dg.AssetKey) -> StageKey:
    """Return the stage's key of an asset's."""
    recipe, rest = key.path
    return (recipe, *rest.split("."))


def reused(result: dg.ExecuteInProcessResult) -> dict[str, bool]:
    """Return for each materialized asset whether the engine found it made."""
    return {
        "/".join(read_stage_key(one.asset_key)[1:]): bool(one.metadata["build_reused"].value)
        for event in _list_stage_events(result)
        if (one := event.step_materialization_data.materialization)
    }


def _list_stage_events(result: dg.ExecuteInProcessResult) -> list[dg.DagsterEvent]:
    """Return the materializations of a run without those of partitions, which only show what a stage made."""
    return [event for event in result.get_asset_materialization_events() if event.partition is None]


def refusals(result: dg.ExecuteInProcessResult) -> dict[str, str]:
    """Return what each failed step said."""
    return {
        event.step_key: (data.description or "") if (data := event.step_failure_data.user_failure_data) else ""
        for event in result.all_events
        if event.is_step_failure and event.step_key
    }
