"""The runner: nothing is built twice, and the same recipe gives the same bytes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rowmill.build import gate, prepare, runner, steps
from rowmill.build.runner import BackgroundStatistics
from rowmill.checks.gates import list_thresholds
from rowmill.cli import main
from rowmill.core.errors import ConfigError, GateError, IntegrityError
from rowmill.core.storage import Store
from rowmill.executors import local
from rowmill.schema import manifest
from rowmill.stages import catalog
from rowmill.stats.views import query_views
from tests.support.recipes import CHAT, LENIENT, PAIR, Built, Workspace, chat, flip_bit, lines, pair

ROOT = Path(__file__).resolve().parents[2]
BEFORE_THE_ORDER = ("raw_dataset", "canonical_rows", "tokenized_examples", "truncation_stats", "packed_shards")
DATASETS: dict[str, dict[str, Any]] = {
    "chats": {"source": {"train_urls": ["data/chats.jsonl"]}, "format": CHAT},
    "tasks": {"source": {"train_urls": ["data/tasks.jsonl"]}, "format": PAIR, "splits": {"validation": 0.2}},
}
"""Two datasets of two kinds, one of them with a validation split."""


def with_data(workspace: Workspace, rows: int = 60) -> Workspace:
    workspace.write("chats.jsonl", [chat(i, turns=1 + i % 3) for i in range(rows)])
    workspace.write("tasks.jsonl", [pair(i) for i in range(rows)])
    return workspace.recipe(DATASETS)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Return a project in which nothing was built."""
    return with_data(Workspace(tmp_path))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the project once; `ready` is a copy of it with the same versions and digests."""
    return with_data(Workspace(tmp_path_factory.mktemp("first"))).build()


@pytest.fixture
def ready(first: Built, tmp_path: Path) -> Workspace:
    """Return a project in which everything was built."""
    shutil.copytree(first.project.base, tmp_path, dirs_exist_ok=True)
    return Workspace(tmp_path)


def changed(dataset: str, **groups: Any) -> dict[str, dict[str, Any]]:
    """Return the datasets with option groups of one of them replaced."""
    return {**DATASETS, dataset: {**DATASETS[dataset], **groups}}


def times(workspace: Workspace) -> dict[Path, int]:
    """Return when each file below `parts/` and `manifests/` was written, in nanoseconds."""
    return {
        path: path.stat().st_mtime_ns
        for kind in ("parts", "manifests")
        for path in workspace.store.rglob(f"{kind}/**/*")
        if path.is_file()
    }


# ── Twice, and elsewhere ───────────────────────────────────────────────────────────────────────────
def test_second_build_reuses_every_step_and_writes_no_part(first: Built, ready: Workspace) -> None:
    written = times(ready)
    second = ready.build()
    assert len(first.made()) == len(DATASETS) * len(catalog.list_stages("dataset")) + len(catalog.list_stages("recipe"))
    assert second.made() == set()
    assert second.versions() == first.versions()
    assert times(ready) == written
    os.utime(ready.folder / "data/chats.jsonl", (1, 1))
    assert ready.build().made() == set()


def test_steps_of_a_recipe_are_made_once_however_many_ask(ready: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str | None]] = []

    def counted(options: Any, stage: str, dataset: str | None, **kinds: Any) -> Any:
        made.append((stage, dataset))
        return list_thresholds(options, stage, dataset, **kinds)

    monkeypatch.setattr(steps, "list_thresholds", counted)
    project = ready.project
    runner.build(project)
    gate.open_inputs(replace(project, store=Store(str(ready.store))), steps.plan_steps(project)[-1])

    assert sorted(made, key=str) == sorted(((step.name, step.dataset) for step in steps.plan_steps(project)), key=str)


def test_steps_follow_a_replaced_recipe(ready: Workspace) -> None:
    project = ready.project
    tasks = {"tasks": project.recipe.datasets["tasks"]}
    alone = replace(project, recipe=project.recipe.model_copy(update={"datasets": tasks}))
    assert {step.dataset for step in steps.plan_steps(project)} == {"chats", "tasks", None}
    assert {step.dataset for step in steps.plan_steps(alone)} == {"tasks", None}


def test_build_without_changes_does_not_import_great_expectations(ready: Workspace) -> None:
    script = (
        "import sys; from rowmill.cli import main as cli; status = cli.main(['build', sys.argv[1]]); "
        "print(status, sorted({'pandas', 'great_expectations', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script, str(ready.config)]
    # The first writes the report and the views, which a build by the engine alone does not.
    said = [subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT) for _ in range(2)][-1]

    assert said.stdout.splitlines()[-1] == f"{main.ExitStatus.SUCCESS} []"


def require_same(built: Built, expected: Built) -> None:
    assert built.versions() == expected.versions()
    assert built.digests() == expected.digests()


def test_build_in_another_folder_gives_the_same_bytes(first: Built, workspace: Workspace) -> None:
    require_same(workspace.build(), first)


def test_build_of_little_data_starts_no_process(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker costs more than all of it; what a task is told to read must follow from what it reads."""
    started: list[int] = []
    monkeypatch.setattr(local, "start_processes", lambda workers, *_: started.append(workers))

    workspace.recipe(DATASETS, execution={"workers": 2}).build()

    assert started == []


@pytest.mark.slow
@pytest.mark.usefixtures("small_parts")
def test_two_workers_give_the_bytes_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, workspace = (with_data(Workspace(tmp_path / name), rows=400) for name in ("one", "two"))
    expected = alone.build()
    # As if the data were large: every map goes to worker processes.
    monkeypatch.setattr(local, "INLINE_BELOW_BYTES", 0)
    together = workspace.recipe(DATASETS, execution={"workers": 2}).build()
    assert together.report("chats", "canonical_rows").parts > 1
    require_same(together, expected)


def test_source_renamed_but_equal_stops_at_the_rows(first: Built, ready: Workspace) -> None:
    """Rows are named by content, so only the scan, and the lineage of the shards, knows the new name."""
    (ready.folder / "data/chats.jsonl").rename(ready.folder / "data/talks.jsonl")
    after = ready.recipe(changed("chats", source={"train_urls": ["data/talks.jsonl"]})).build()
    assert "chats/raw_dataset" in after.made()
    assert after.report("chats", "canonical_rows").rows_made == 0
    assert after.report("chats", "tokenized_examples").rows_made == 0
    assert after.versions()["chats/tokenized_examples"] == first.versions()["chats/tokenized_examples"]


def test_data_put_back_makes_the_earlier_version_current_again(first: Built, ready: Workspace) -> None:
    ready.write("tasks.jsonl", [pair(i) for i in range(30)])
    assert ready.build().versions() != first.versions()

    ready.write("tasks.jsonl", [pair(i) for i in range(60)])
    third = ready.build()
    assert third.made() == set()
    assert third.versions() == first.versions()


# ── New rows ───────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.slow
def test_one_percent_of_new_rows_tokenises_about_one_percent(tmp_path: Path) -> None:
    """On a file of more than 25 MB; the bound is the budget: at most 3 % of the rows are made again."""
    rows = [chat(i, words=240) for i in range(7600)]
    workspace = Workspace(tmp_path).one("a.jsonl", rows, seq_len=2048)
    assert (workspace.folder / "data/a.jsonl").stat().st_size > 25 << 20
    full = workspace.build()
    with (workspace.folder / "data/a.jsonl").open("ab") as file:
        file.write(lines(chat(i, words=240) for i in range(7600, 7676)))

    again = workspace.build()

    for stage in ("canonical_rows", "tokenized_examples"):
        report = again.report("rows", stage)
        assert full.report("rows", stage).rows_made == 7600
        assert 76 <= report.rows_made <= 0.03 * 7676
        assert report.parts - report.parts_reused <= 2
    assert len(again.segments()) == 7676
    kept, now = ({row["example_id"] for row in built.examples(columns=["example_id"])} for built in (full, again))
    assert len(kept - now) <= 0.02 * 7600


@pytest.mark.slow
def test_rows_built_after_the_first_build_are_those_of_one_build(tmp_path: Path) -> None:
    grown = Workspace(tmp_path / "grown").one("a.jsonl", [chat(i) for i in range(900)])
    grown.build()
    grown.write("a.jsonl", [chat(i) for i in range(1000)])
    at_once = Workspace(tmp_path / "once").one("a.jsonl", [chat(i) for i in range(1000)])

    assert grown.build().digests() == at_once.build().digests()


# ── Options ────────────────────────────────────────────────────────────────────────────────────────

ALL_BELOW = {
    "canonical_rows": {"canonical_rows", "tokenized_examples", "truncation_stats", "packed_shards"},
    "tokenized_examples": {"tokenized_examples", "truncation_stats", "packed_shards"},
    "packed_shards": {"truncation_stats", "packed_shards"},
}


@pytest.mark.parametrize(
    ("stage", "groups"),
    [
        ("canonical_rows", {"splits": {"validation": 0.3}}),
        ("tokenized_examples", {"loss": {"supervise": "last_assistant"}}),
        ("tokenized_examples", {"truncation": {"max_length": 40}}),
        ("tokenized_examples", {"template": {"chat_template": "chatml"}}),
        ("packed_shards", {"packing": {"max_segments_per_example": 2}}),
    ],
    ids=["splits", "loss", "max_length", "template", "packing"],
)
def test_changed_option_rebuilds_its_stage_and_later_ones(
    ready: Workspace, stage: str, groups: Mapping[str, Any]
) -> None:
    made = ready.recipe(changed("chats", **groups)).build().made()
    allowed = {f"chats/{name}" for name in ALL_BELOW[stage]} | {"training_splits", "gpu_partitions"}
    assert {f"chats/{stage}", "chats/packed_shards", "training_splits", "gpu_partitions"} <= made <= allowed


@pytest.mark.parametrize(
    ("changes", "made"),
    [
        ({"execution": {"workers": 1, "cron": "0 3 * * *"}}, set()),
        ({"gates": {**LENIENT, "fill": {"at_least": 0.1}}}, set()),
        ({"partitions": {"world_size": 4}}, {"training_splits", "gpu_partitions"}),
        ({"seed": 7}, {"training_splits", "gpu_partitions"}),
    ],
    ids=["execution", "gates", "world-size", "seed"],
)
def test_changed_recipe_rebuilds_only_stages_that_read_the_change(
    ready: Workspace, changes: dict[str, Any], made: set[str]
) -> None:
    assert ready.recipe(DATASETS, **changes).build().made() == made


def test_changed_rows_of_one_dataset_leave_the_other_alone(ready: Workspace) -> None:
    ready.write("tasks.jsonl", lines(pair(i) for i in range(60)) + b"{\n")
    made = ready.build().made()
    assert "tasks/canonical_rows" in made
    assert not {name for name in made if name.startswith("chats/")}


# ── Files that go missing ──────────────────────────────────────────────────────────────────────────

KEYS = [
    ("chats", "canonical_rows"),
    ("chats", "tokenized_examples"),
    ("chats", "packed_shards"),
    ("training_splits",),
    ("gpu_partitions",),
]


@pytest.mark.parametrize("key", KEYS, ids=["-".join(key) for key in KEYS])
def test_deleted_part_file_is_made_again_and_nothing_else(first: Built, ready: Workspace, key: tuple[str, ...]) -> None:
    part = first.manifest(*key).parts[-1]
    (ready.store / next(iter(part.files.values())).path).unlink()
    after = ready.build()
    assert after.made() == {"/".join(key)}
    require_same(after, first)


def test_late_statistics_leave_the_version_that_another_build_made_current(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Callable[[], None]] = []
    with monkeypatch.context() as patched:
        patched.setattr(BackgroundStatistics, "submit", lambda _, __, write: late.append(write))
        first = workspace.build()
    second = workspace.recipe(DATASETS, seq_len=128).build()
    for write in late:
        write()
    shown = query_views(second.project.store, "SELECT version FROM current_versions WHERE scope = 'chats'")[1]
    replaced, current = (built.manifest("chats", "packed_shards").version for built in (first, second))
    assert (replaced,) not in shown
    assert (current,) in shown


def test_damaged_part_file_is_found_by_its_digest(first: Built, ready: Workspace) -> None:
    made = first.manifest("chats", "packed_shards")
    flip_bit(ready.store / made.parts[0].files["shard"].path)

    with pytest.raises(IntegrityError, match=r"it was written with digest"):
        manifest.verify_files(ready.project.store, made)


def test_kept_version_can_be_made_current_again(first: Built, ready: Workspace) -> None:
    wanted, project = first.manifest("tasks", "canonical_rows"), ready.project
    ready.write("tasks.jsonl", [pair(i) for i in range(30)])
    later = ready.build(only=("raw_dataset", "canonical_rows")).manifest("tasks", "canonical_rows")
    step = steps.find_step(project, wanted.key)
    report = runner.run_step(project, step, gate.open_inputs(project, step), version=wanted.version)
    current = manifest.load_current(project.store, wanted.key)
    assert report.reused
    assert current is not None
    assert current.version == wanted.version != later.version


# ── Gates and waivers ──────────────────────────────────────────────────────────────────────────────

WAIVER: dict[str, Any] = {"check": "rejects", "dataset": "tasks", "at_most": 0.5, "reason": "half of the file is notes"}


def gated(workspace: Workspace, **gates: Any) -> Workspace:
    """Give the tasks a reject in three rows and gates that see it."""
    workspace.write("tasks.jsonl", lines(pair(i) for i in range(40)) + b"{\n" * 20)
    return workspace.recipe(DATASETS, gates={**LENIENT, "rejects": {"at_most": 0.05}, **gates})


def built_steps(workspace: Workspace) -> set[str]:
    return {str(path.parent.relative_to(workspace.store / "mini")) for path in workspace.store.rglob("pointer.json")}


def test_failed_gate_names_check_number_threshold_and_remedy_and_refuses_later_steps(workspace: Workspace) -> None:
    said = r"mini/tasks/canonical_rows: rejects: 33.33 % .*wanted at most 5 %; .*correct the data"
    with pytest.raises(GateError, match=said):
        gated(workspace).build()
    assert "tasks/canonical_rows" in built_steps(workspace)
    assert not {"tasks/tokenized_examples", "training_splits", "gpu_partitions"} & built_steps(workspace)
    project = workspace.project
    with pytest.raises(GateError, match=r"rejects: 33.33 %"):
        gate.open_inputs(project, steps.find_step(project, ("mini", "tasks", "tokenized_examples")))


def test_waiver_opens_the_gate_is_shown_on_later_stages_and_closes_it_when_withdrawn(workspace: Workspace) -> None:
    built = gated(workspace, waivers=[WAIVER]).build()
    named = {"/".join(key) for key, (report, _) in built.steps.items() if report.manifest.waivers}
    assert named == {
        "tasks/tokenized_examples", "tasks/truncation_stats", "tasks/packed_shards",
        "training_splits", "gpu_partitions",
    }  # fmt: skip
    assert WAIVER["reason"] in built.manifest("gpu_partitions").waivers[0]
    # The same bytes under another waiver are another version: readers must see the waiver.
    other = gated(workspace, waivers=[{**WAIVER, "reason": "the notes are kept on purpose"}]).build()
    assert built.versions()["tasks/canonical_rows"] == other.versions()["tasks/canonical_rows"]
    assert built.versions()["gpu_partitions"] != other.versions()["gpu_partitions"]
    with pytest.raises(GateError, match=r"rejects: 33.33 %"):
        gated(workspace, waivers=[{**WAIVER, "at_most": 0.2}]).build()
    with pytest.raises(GateError, match="rejects"):
        gated(workspace).build()


# ── Forecasts ──────────────────────────────────────────────────────────────────────────────────────
def forecasts(workspace: Workspace) -> dict[str, tuple[str, str]]:
    return {"/".join(one.step.key[1:]): (one.action, one.why) for one in prepare.forecast_steps(workspace.project)}


def test_plan_of_a_new_project_says_what_must_be_made_and_builds_nothing(workspace: Workspace) -> None:
    found = forecasts(workspace)
    assert found["chats/raw_dataset"] == ("make", "never built")
    assert {action for name, (action, _) in found.items() if not name.endswith("raw_dataset")} == {"make if changed"}
    assert built_steps(workspace) == set()


def test_plan_after_a_build_reuses_everything_but_what_has_new_rows(ready: Workspace) -> None:
    assert {action for action, _ in forecasts(ready).values()} == {"reuse"}
    ready.write("tasks.jsonl", [pair(i) for i in range(61)])
    found = forecasts(ready)
    assert found["tasks/raw_dataset"] == ("make", "its source files changed")
    assert {name for name, (action, _) in found.items() if action == "reuse"} == {
        f"chats/{stage.name}" for stage in catalog.list_stages("dataset")
    }


def test_plan_after_a_changed_option_names_the_option(ready: Workspace) -> None:
    ready.recipe(changed("chats", packing={"max_segments_per_example": 2}))
    found = forecasts(ready)
    assert found["chats/packed_shards"] == ("make", "its options changed")
    assert found["training_splits"][0] == "make if changed"


def test_plan_leaves_out_what_a_failed_check_keeps_from_being_built(workspace: Workspace) -> None:
    gated(workspace)
    with pytest.raises(GateError) as refused:
        workspace.build()
    found = forecasts(workspace)

    action, why = found["tasks/canonical_rows"]
    assert action == "reuse"
    assert why.endswith("; fails a check: rejects is 33.33 %, wanted at most 5 %")
    assert found["gpu_partitions"][1] == "tasks/canonical_rows fails the check rejects"
    assert str(refused.value).splitlines()[-1] == f"not built because of that: {', '.join(left_out_in_order(found))}"
    # The waiver lets it be made.
    assert not left_out_in_order(forecasts(gated(workspace, waivers=[WAIVER])))


def left_out_in_order(found: Mapping[str, tuple[str, str]]) -> list[str]:
    return [name for name, (action, _) in found.items() if action == "leave out"]


def test_plan_predicts_the_build(ready: Workspace) -> None:
    """Steps that it predicts as reused are reused, and the others are built."""
    ready.recipe(changed("chats", loss={"supervise": "last_assistant"}))
    found = forecasts(ready)
    made = ready.build().made()
    assert {name for name, (action, _) in found.items() if action == "make"} <= made
    assert not {name for name, (action, _) in found.items() if action == "reuse"} & made


# ── Steps ──────────────────────────────────────────────────────────────────────────────────────────


def test_unknown_steps_and_missing_inputs_are_refused_with_what_builds_them(workspace: Workspace) -> None:
    project = workspace.project
    every = [f"{dataset}/{stage}" for dataset in DATASETS for stage in BEFORE_THE_ORDER]

    def refusal(*key: str) -> str:
        with pytest.raises(IntegrityError) as refused:
            gate.open_inputs(project, steps.find_step(project, ("mini", *key)))
        return str(refused.value)

    assert refusal("chats", "canonical_rows").startswith("mini/chats/canonical_rows: chats/raw_dataset is not built; ")
    shards, order = refusal("chats", "packed_shards"), refusal("training_splits")
    command = "; a stage reads what the stages before it made; run `rowmill build mini --until"
    first, all_but_one = ", ".join(every[:3]), ", ".join(every[:-1])
    assert shards == f"mini/chats/packed_shards: {first} and {every[3]} are not built{command} packed_shards`"
    assert order == f"mini/training_splits: {all_but_one} and {every[-1]} are not built{command} training_splits`"
    workspace.build(only=["raw_dataset"])
    shards = refusal("chats", "packed_shards")
    assert ": chats/canonical_rows, chats/tokenized_examples and chats/truncation_stats are" in shards
    with pytest.raises(ConfigError, match=r"mini/chats/packed: no such asset; .*mini/chats/packed_shards"):
        steps.find_step(workspace.project, ("mini", "chats", "packed"))


def test_build_of_some_stages_makes_only_those(workspace: Workspace) -> None:
    built: Built = workspace.build(only=("raw_dataset", "canonical_rows"))
    assert {key[-1] for key in built.steps} == {"raw_dataset", "canonical_rows"}


def test_progress_names_the_dataset_beside_the_stage(workspace: Workspace) -> None:
    heard: list[str] = []
    workspace.build(progress=lambda where, *, done, total, **_: heard.append(f"{where} {done}/{total}"))
    assert "chats/canonical_rows 1/1" in heard
    assert {where.partition(" ")[0] for where in heard if where.count("/") == 1} == {"training_splits"}


def test_version_of_a_renamed_dataset_is_checked_against_current_bounds(tmp_path: Path) -> None:
    rows = [chat(i) for i in range(8)]
    odd = [{"messages": [{"role": "narrator", "content": f"Scene {i}."}, *chat(70 + i)["messages"]]} for i in range(2)]
    workspace = Workspace(tmp_path)
    options = workspace.dataset("rows.jsonl", [*rows, *odd], template={"chat_template": "chatml"})
    older = workspace.recipe({"chats": options}).build().manifest("gpu_partitions").version
    workspace.write("rows.jsonl", rows)
    strict = {name: bound for name, bound in LENIENT.items() if name != "unknown_roles"}
    workspace.recipe({"talks": options}, gates=strict).build()
    project = workspace.project

    with pytest.raises(GateError, match=r"mini/chats/canonical_rows, version .*unknown_roles: 20 %"):
        runner.run_step(project, steps.find_step(project, ("mini", "gpu_partitions")), {}, version=older)


def test_version_of_a_renamed_table_is_checked_with_table_checks(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)

    contract = {"columns": {name: {"type": "integer"} for name in ("a", "b")}}

    def builds(dataset: str, more: str, **gates: Any) -> str:
        content = (f"a,b{more}\n" + "".join(f"{i},{i % 3}{more}\n" for i in range(30))).encode()
        options = workspace.dataset("table.csv", content, {"kind": "records", "table": contract})
        workspace.recipe({dataset: options}, gates=LENIENT | gates)
        return workspace.build().manifest("gpu_partitions").version

    waiver = {"check": "table_contract", "at_most": 9, "reason": "looked at the one column"}
    differs = builds("table", ",c", waivers=[waiver])
    builds("sheet", "")
    project = workspace.project

    with pytest.raises(GateError, match=r"mini/table/canonical_rows, version .*table_contract: 1"):
        runner.run_step(project, steps.find_step(project, ("mini", "gpu_partitions")), {}, version=differs)


# ── A closed gate ──────────────────────────────────────────────────────────────────────────────────


def with_wizards(workspace: Workspace, **gates: Any) -> Workspace:
    """Give the chats a role that nobody knows, and gates that see it."""
    wizard = {"role": "wizard", "content": "x"}
    workspace.write("chats.jsonl", [{"messages": [wizard, *chat(i)["messages"]]} for i in range(20)])
    return workspace.recipe(DATASETS, gates={**LENIENT, "unknown_roles": {"at_most": 0.05}, **gates})


def test_closed_gate_of_one_dataset_leaves_the_others_built(workspace: Workspace) -> None:
    with pytest.raises(GateError) as refused:
        with_wizards(workspace).build()

    *closed, left_out = str(refused.value).splitlines()
    assert sum("unknown_roles" in line for line in closed) == 1
    assert left_out == (
        "not built because of that: chats/tokenized_examples, chats/truncation_stats, chats/packed_shards, "
        "training_splits, gpu_partitions"
    )
    store = workspace.project.store
    built = {step.key[1:] for step in steps.plan_steps(workspace.project) if manifest.load_current(store, step.key)}
    assert built == {("chats", "raw_dataset"), ("chats", "canonical_rows"), *(("tasks", n) for n in BEFORE_THE_ORDER)}


def test_two_closed_gates_are_one_error(workspace: Workspace) -> None:
    workspace.write("tasks.jsonl", [{"nothing": 1}, *map(pair, range(9))])
    with pytest.raises(GateError, match=r"(?s)unknown_roles.*tasks/canonical_rows: rejects"):
        with_wizards(workspace, rejects={"at_most": 0.05}).build()


def test_trial_has_the_outputs_of_a_build_and_no_statistics(first: Built) -> None:
    project = first.project
    with runner.open_trial(project) as trial:
        made = runner.run_stages(project, trial, "tasks", catalog.find_stage("packed_shards"))
        folders = trial.store.list("")

    assert {key[-1]: one.version for key, one in made.items()} == {
        stage: first.manifest("tasks", stage).version for stage in BEFORE_THE_ORDER
    }
    assert folders == [project.recipe.name, "tokenizers"]
