"""An output's ancestors are those that it was made from, although others of equal content were made from others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from rowmill.build import comparison, gate, runner, steps
from rowmill.build.gc import collect_garbage
from rowmill.core.errors import IntegrityError, SourceError
from rowmill.inspection import trace, verify
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest
from rowmill.stats.views import query_views
from tests.support.recipes import PAIR, Built, Workspace, pair

STATISTICS = ("mini", "rows", "truncation_stats")


def build(workspace: Workspace, validation: float, *, name: str = "rows.jsonl") -> Built:
    rows = [pair(i) for i in range(40)]
    return workspace.one(name, rows, PAIR, splits={"validation": validation}).build()


@pytest.fixture
def two_ways(tmp_path: Path) -> tuple[Workspace, Built, Built]:
    """Build with two splits of the same rows, of which the statistics of lengths are equal and the examples are not."""
    workspace = Workspace(tmp_path)
    first, second = build(workspace, 0.1), build(workspace, 0.2)
    statistics = [built.manifest("rows", "truncation_stats") for built in (first, second)]
    assert statistics[0].version == statistics[1].version
    assert statistics[0].inputs != statistics[1].inputs
    return workspace, first, second


def find_current(workspace: Workspace) -> dict[str, Manifest]:
    project = workspace.project
    made = {step.key: manifest.load_current(project.store, step.key) for step in steps.plan_steps(project)}
    return {"/".join(key[1:]): output for key, output in made.items() if output is not None}


def test_each_output_of_a_version_leads_to_its_own_inputs(two_ways: tuple[Workspace, Built, Built]) -> None:
    workspace, *builds = two_ways
    store = workspace.project.store
    for built in builds:
        (examples,) = manifest.load_inputs(store, built.manifest("rows", "truncation_stats")).values()
        assert examples.version == built.manifest("rows", "tokenized_examples").version
    assert len(manifest.list_outputs(store, STATISTICS)) == 2
    assert len(manifest.list_versions(store, STATISTICS)) == 1


def test_option_changed_back_publishes_the_first_build_again(two_ways: tuple[Workspace, Built, Built]) -> None:
    workspace, first, second = two_ways
    published = workspace.store / "mini/gpu_partitions/current.json"
    assert orjson.loads(published.read_bytes())["version"] == second.manifest("gpu_partitions").version
    again = build(workspace, 0.1)

    assert again.made() == set()
    assert orjson.loads(published.read_bytes())["version"] == first.manifest("gpu_partitions").version
    current = find_current(workspace)
    for output in current.values():
        for key, made in manifest.load_inputs(workspace.project.store, output).items():
            assert made == current["/".join(key[1:])]


def test_shards_that_are_used_again_are_judged_by_their_own_statistics(
    two_ways: tuple[Workspace, Built, Built],
) -> None:
    workspace, first, _ = two_ways
    project, old = workspace.project, first.manifest("rows", "packed_shards")
    step = steps.find_step(project, old.key)
    gate.hold_version(project.store, runner.run_step(project, step, {}, version=old.version).manifest)

    assert workspace.build().manifest("gpu_partitions").version == first.manifest("gpu_partitions").version


def test_garbage_collection_keeps_what_the_kept_outputs_were_made_from(
    two_ways: tuple[Workspace, Built, Built],
) -> None:
    workspace, first, second = two_ways
    project = workspace.project
    step = steps.find_step(project, ("mini", "rows", "packed_shards"))
    old = runner.run_step(project, step, {}, version=first.manifest("rows", "packed_shards").version).manifest
    gate.hold_version(project.store, old)
    collect_garbage(project, keep=1, dry_run=False)
    kept = {
        output.inputs["mini/rows/tokenized_examples"] for output in manifest.list_outputs(project.store, STATISTICS)
    }
    assert kept == {built.manifest("rows", "tokenized_examples").version for built in (first, second)}

    assert workspace.build().manifest("gpu_partitions").version == first.manifest("gpu_partitions").version
    assert not any(one.fails for one in verify.verify_recipe(project, deep=True))


def test_garbage_collection_removes_outputs_of_a_kept_version_that_nothing_was_made_from(
    two_ways: tuple[Workspace, Built, Built],
) -> None:
    workspace, _, second = two_ways
    collect_garbage(workspace.project, keep=1, dry_run=False)
    (statistics,) = manifest.list_outputs(workspace.project.store, STATISTICS)
    assert statistics == second.manifest("rows", "truncation_stats")


def test_comparison_of_builds_reads_the_statistics_of_each(two_ways: tuple[Workspace, Built, Built]) -> None:
    workspace, first, second = two_ways
    build(workspace, 0.1)
    for built in (first, second):
        lineage = comparison.collect_lineage(workspace.project, built.manifest("gpu_partitions"))
        assert lineage[STATISTICS].inputs == built.manifest("rows", "truncation_stats").inputs


def test_rows_of_a_file_that_has_its_old_name_again_are_traced_to_it(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    first = build(workspace, 0, name="a.jsonl")
    row = workspace.project.store.table(first.manifest("rows", "canonical_rows").files("rows")[0])["row_id"][0].as_py()
    for before, name in (("a.jsonl", "b.jsonl"), ("b.jsonl", "a.jsonl")):
        (workspace.folder / "data" / before).unlink()
        built = build(workspace, 0, name=name)
        assert built.manifest("rows", "canonical_rows").version == first.manifest("rows", "canonical_rows").version

        origin = trace.load_lineage(built.project, "rows").find_origin(row)
        assert (origin.url.rpartition("/")[2], origin.problem) == (name, "")
        shown = query_views(built.project.store, "SELECT DISTINCT source FROM rows")[1]
        assert [source.rpartition("/")[2] for (source,) in shown] == [name]


def test_either_copy_of_a_manifest_answers_for_the_other(two_ways: tuple[Workspace, Built, Built]) -> None:
    workspace, first, _ = two_ways
    store, statistics = workspace.project.store, first.manifest("rows", "truncation_stats")
    folder = workspace.store / "mini/rows/truncation_stats"
    copies = (
        folder / f"manifests/{statistics.fingerprint}.json",
        folder / f"versions/{statistics.version}-{statistics.fingerprint}.json",
    )
    for copy in copies:
        content = copy.read_bytes()
        copy.write_bytes(content[:-9])
        assert manifest.load_output(store, STATISTICS, statistics.version, statistics.fingerprint) == statistics
        copy.write_bytes(content)


def test_version_names_the_current_output_or_else_the_last_one(two_ways: tuple[Workspace, Built, Built]) -> None:
    workspace, first, second = two_ways
    store, statistics = workspace.project.store, first.manifest("rows", "truncation_stats")
    later = second.manifest("rows", "truncation_stats")
    assert manifest.load_version(store, STATISTICS, statistics.version) == later

    manifest.make_current(store, statistics)
    assert manifest.load_version(store, STATISTICS, statistics.version) == statistics


def test_doubtful_header_is_that_of_the_file_that_is_read_now(tmp_path: Path) -> None:
    workspace, content = Workspace(tmp_path), b"1,2\n3,4\n5,6\n"
    results = [
        workspace.one(name, content, {"kind": "records"})
        .build(only=("raw_dataset",))
        .result("doubtful_header", "rows", "raw_dataset")
        for name in ("a.csv", "b.csv")
    ]

    assert [result.what for result in results] == [
        f"the first line of data/{name} looks like the others" for name in ("a.csv", "b.csv")
    ]


STAGES = ("raw_dataset", "canonical_rows", "tokenized_examples", "truncation_stats", "packed_shards")


def test_held_shards_are_kept_where_their_examples_were_made_again_of_a_renamed_file(tmp_path: Path) -> None:
    """Equal examples lead to the source that they were made of last; the shards were made of it under its old name."""
    workspace = Workspace(tmp_path)
    first = build(workspace, 0.1)
    (workspace.folder / "data/rows.jsonl").rename(workspace.folder / "data/renamed.jsonl")
    second = build(workspace, 0.1, name="renamed.jsonl")
    assert second.versions()["rows/tokenized_examples"] == first.versions()["rows/tokenized_examples"]
    gate.hold_version(workspace.project.store, first.manifest("rows", "packed_shards"))

    held = workspace.build()

    assert held.versions()["rows/packed_shards"] == first.versions()["rows/packed_shards"]


@pytest.mark.parametrize("stage", STAGES)
def test_stages_after_a_held_one_are_made_of_what_it_was_made_of(tmp_path: Path, stage: str) -> None:
    workspace = Workspace(tmp_path)
    files = {f"{name}.jsonl": [pair(i + 10 * at) for i in range(9)] for at, name in enumerate("abc")}
    first = workspace.recipe({"rows": workspace.files(files, PAIR)}).build()
    project = workspace.project
    gate.hold_version(project.store, first.manifest("rows", stage))
    second = workspace.recipe({"rows": workspace.files({"b.jsonl": files["b.jsonl"]}, PAIR)}).build()
    gate.release_version(project.store, ("mini", "rows", stage))
    third = workspace.build()
    (tmp_path / "empty").mkdir()

    assert second.manifest("gpu_partitions").version == first.manifest("gpu_partitions").version
    assert third.versions() == Workspace(tmp_path, str(tmp_path / "empty")).build().versions()


WEIGHTED: dict[str, Any] = {"defaults": {"loss": {"prompt_weight": 0.5}}}


@pytest.mark.parametrize("layout", ["copied", "index"])
@pytest.mark.parametrize(
    ("held", "options", "problem"),
    [
        (("first", "packed_shards"), {"seq_len": 64}, r"2 lengths of sequences \(first with seq_len 128; second with "),
        (
            ("first", "packed_shards"),
            WEIGHTED,
            r"2 sets of columns \(first with no other columns; second with the columns loss_weights",
        ),
        (("training_splits",), {"seq_len": 64}, "packed with seq_len 128 and .*; the recipe has seq_len 64 and "),
        (
            ("training_splits",),
            WEIGHTED,
            "packed with seq_len 128 and no .*; the recipe has seq_len 128 and the columns loss_weights",
        ),
    ],
)
def test_held_shards_of_another_form_are_joined_with_no_others(
    tmp_path: Path, held: tuple[str, ...], options: dict[str, Any], problem: str, layout: str
) -> None:
    workspace = Workspace(tmp_path)
    datasets = {
        name: workspace.files({f"{name}.jsonl": [pair(i + 10 * at) for i in range(9)]}, PAIR)
        | {"packing": {"layout": layout}}
        for at, name in enumerate(("first", "second"))
    }
    own = {"seq_len": 128, "partitions": {"world_size": 1, "layout": layout}}
    first = workspace.recipe(datasets, **own).build()
    gate.hold_version(workspace.project.store, first.manifest(*held))

    workspace.recipe(datasets, **own | options)
    with pytest.raises(IntegrityError, match=f"{problem}.*; {'/'.join(held)} is held at version .* --release` lets"):
        workspace.build()
    assert workspace.recipe(datasets, **own).build().versions() == first.versions()


@pytest.mark.parametrize("names", [("second", "third"), ("first", "third"), ("third",)])
def test_held_order_of_other_datasets_is_refused_and_not_read_as_theirs(tmp_path: Path, names: Sequence[str]) -> None:
    workspace = Workspace(tmp_path)
    datasets = {
        name: workspace.files({f"{name}.jsonl": [pair(i + 10 * at) for i in range(9)]}, PAIR)
        for at, name in enumerate(("second", "first", "third"))
    }
    exports = [{"kind": "native", "name": "shards"}]
    first = workspace.recipe(datasets, exports=exports).build()
    gate.hold_version(workspace.project.store, first.manifest("training_splits"))

    workspace.recipe({name: datasets[name] for name in names}, exports=exports)
    held = "training_splits is held at version .* --release` lets"
    with pytest.raises(
        IntegrityError, match=rf"the order was made of the packed shards second .*; the recipe has .*{held}"
    ):
        workspace.build()
    gate.release_version(workspace.project.store, ("mini", "training_splits"))
    assert workspace.build().made()
    assert workspace.recipe(datasets, exports=exports).build().versions() == first.versions()


def test_error_of_a_held_source_whose_files_have_gone_names_the_hold(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    files = {f"{name}.jsonl": [pair(i + 10 * at) for i in range(9)] for at, name in enumerate("ab")}
    first = workspace.recipe({"rows": workspace.files(files, PAIR)}).build()
    gate.hold_version(workspace.project.store, first.manifest("rows", "raw_dataset"))
    remaining = workspace.files(
        {"b.jsonl": files["b.jsonl"]}, PAIR | {"input_field": "answer", "output_field": "prompt"}
    )
    workspace.recipe({"rows": remaining})
    (workspace.folder / "data" / "a.jsonl").unlink()

    with pytest.raises(
        SourceError, match=r"data/a\.jsonl: cannot be read.*; rows/raw_dataset is held at version .* --release` lets"
    ):
        workspace.build()


def test_shards_are_not_made_of_a_source_that_their_examples_were_not_made_of(tmp_path: Path) -> None:
    workspace, rows = Workspace(tmp_path), [pair(i) for i in range(9)]
    first = workspace.recipe({"rows": workspace.files({"a.jsonl": rows, "b.jsonl": [pair(20)]}, PAIR)}).build()
    version = first.manifest("rows", "raw_dataset").version
    workspace.write("b.jsonl", [pair(30)])
    workspace.build(only=("raw_dataset",))

    with pytest.raises(
        IntegrityError, match=rf"tokenized_examples: built from version {version[:12]} of mini/rows/raw"
    ):
        workspace.build(only=("packed_shards",))


def test_export_and_order_are_those_of_an_empty_store_where_only_what_lies_behind_their_inputs_changed(
    tmp_path: Path,
) -> None:
    workspace = Workspace(tmp_path)
    exports = [{"kind": "native", "name": "shards"}]
    for before, name in (("", "a.jsonl"), ("a.jsonl", "b.jsonl"), ("b.jsonl", "a.jsonl")):
        if before:
            (workspace.folder / "data" / before).unlink()
        built = workspace.one(name, [pair(i) for i in range(40)], PAIR, exports=exports).build()
        empty = tmp_path / f"empty-{name}-{bool(before)}"
        empty.mkdir()

        assert built.versions() == Workspace(tmp_path, str(empty)).build().versions()
