"""Garbage collection keeps what the next build reuses, and removes what killed builds left."""

import json
import shutil
import signal
from itertools import count
from pathlib import Path

import orjson
import pytest

from rowmill.build import gate, runner, share, steps
from rowmill.build.gc import collect_garbage
from rowmill.core.errors import IntegrityError
from rowmill.inspection import verify
from rowmill.reader import Reader
from rowmill.schema import manifest
from rowmill.stats.tables import split_stage_key
from tests.support.cli_project import CliProject
from tests.support.random_life import PATIENCE_S, PROCESSES, run_and_die
from tests.support.recipes import PAIR, Workspace, pair
from tests.support.tiers import mark_all_but


def collect(workspace: Workspace) -> None:
    collect_garbage(workspace.project, keep=1, dry_run=False)


def test_unfinished_files_are_removed_and_finished_ones_stay(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [pair(i) for i in range(5)], PAIR)
    built = workspace.build()
    (part,) = built.manifest("rows", "canonical_rows").parts
    beside = workspace.store / f"{part.files['rows'].path}.0123abcd.tmp"
    alone = workspace.store / "mini" / "gpu_partitions" / "current.json.4567.tmp"
    for path in (beside, alone):
        path.write_bytes(b"half")
    named = collect_garbage(workspace.project, keep=1, dry_run=True)
    assert sorted((one.kind, one.path, one.size_bytes) for one in named) == sorted(
        ("unfinished file", str(path.relative_to(workspace.store)), 4) for path in (beside, alone)
    )
    assert beside.exists()
    collect(workspace)
    assert not beside.exists()
    assert not alone.exists()
    assert not any(one.fails for one in verify.verify_recipe(workspace.project, deep=True))
    assert workspace.build().made() == set()


def test_rewritten_part_is_reused_by_the_next_build(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    # Small files of another kind than their neighbours share no part with them.
    between = json.dumps([pair(1), pair(7)]).encode()
    contents = {"a.jsonl": [pair(0), pair(1), pair(2)], "b.json": between, "c.jsonl": [pair(8)]}
    workspace.recipe({"rows": workspace.files(contents, PAIR)})
    before = workspace.build(only=TO_ROWS).manifest("rows", "canonical_rows")
    collect(workspace)
    workspace.write("c.jsonl", [pair(9)])
    after = workspace.build(only=TO_ROWS).report("rows", "canonical_rows")
    # Of three parts only the one whose file changed is read. Beside b's part without its duplicate there is the whole
    # one, and the hashes, their comparison, and what it removes.
    assert len(before.details["made_of"]) == 4
    assert (after.parts, after.parts_reused, after.rows_made) == (3, 2, 1)


def test_removed_versions_take_their_intermediate_parts_along(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one("a.jsonl", [pair(0), pair(0)], PAIR)
    workspace.build(only=TO_ROWS)
    workspace.write("a.jsonl", [pair(1), pair(1), pair(2)])
    kept = workspace.build(only=TO_ROWS).manifest("rows", "canonical_rows")
    folder = workspace.store / "mini" / "rows" / "canonical_rows" / "parts"
    # Of each version a part with the duplicate and one without, and the hashes, their comparison, and its result.
    assert len(list(folder.iterdir())) == 2 * 5

    collect(workspace)
    remaining = {path.name for path in folder.iterdir()}
    assert remaining == {*(part.fingerprint for part in kept.parts), *kept.details["made_of"]}


# ── Killed collections ─────────────────────────────────────────────────────────────────────────────

KILLS_APART = 8
"""A collection is killed before each change of a file or folder, in CI before every eighth one."""


def list_tree(folder: Path) -> set[str]:
    names = (share.LOCK_NAME, ".lock")
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name not in names}


def list_tables(folder: Path, output: manifest.Manifest) -> set[str]:
    """Return the files of an output's statistics."""
    recipe, scope = split_stage_key(output.key)
    files = folder.glob(f"stats/*/recipe={recipe}/scope={scope}/version={output.version}/*.parquet")
    return {str(path.relative_to(folder)) for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("first", mark_all_but([1], range(1, KILLS_APART + 1)))
def test_killed_collection_leaves_whole_versions_and_the_next_one_finishes(tmp_path: Path, first: int) -> None:
    workspace = Workspace(tmp_path / "project").one("rows.jsonl", [pair(i) for i in range(20)], PAIR)
    workspace.build()
    workspace.write("rows.jsonl", [pair(i) for i in range(25)])
    workspace.build()
    project, folder, before = workspace.project, workspace.store, tmp_path / "before"
    shutil.copytree(folder, before)
    collect(workspace)
    collected = list_tree(folder)
    assert len(list_tree(before) - collected) > 50

    kills = 0
    for last in count(first, KILLS_APART):
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        process = PROCESSES.Process(target=run_and_die, args=(workspace.config, str(folder), "gc", last))
        process.start()
        process.join(PATIENCE_S)
        if process.exitcode == 0:
            break

        assert process.exitcode == -signal.SIGKILL
        kills += 1
        outputs = [one for step in steps.plan_steps(project) for one in manifest.list_outputs(project.store, step.key)]
        assert [one.key for one in outputs if list_tables(folder, one) != list_tables(before, one)] == []
        files = [file for one in outputs for part in one.parts for file in part.files.values()]
        assert [file.path for file in files if not project.store.has(file)] == []
        collect(workspace)
        assert list_tree(folder) == collected
    assert kills > 10


def test_statistics_without_an_output_are_removed_and_those_of_a_stage_the_recipe_lost_stay(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [pair(i) for i in range(5)], PAIR)
    workspace.build()
    stats = workspace.store / "stats" / "builds" / "recipe=mini" / "scope=rows"
    names = [stats / f"version={'0123abcd' * 4}", stats / f"version={'4567cdef' * 4}"]
    for path in names:
        shutil.copytree(next(stats.iterdir()), path)
    other = workspace.store / "mini" / "rows" / "generated_series" / "versions"
    other.mkdir(parents=True)
    (other / f"{'4567cdef' * 4}-{'0' * 32}.json").write_bytes(b"{}")

    collect(workspace)

    assert [path.exists() for path in names] == [False, True]


# ── What trainers open ─────────────────────────────────────────────────────────────────────────────

RANKS = "gpu_partitions"
TO_ROWS = ("raw_dataset", "canonical_rows")
BEFORE_RANKS = (*TO_ROWS, "tokenized_examples", "truncation_stats", "packed_shards", "training_splits")


def night(workspace: Workspace, rows: range, *ranks: str) -> None:
    """Set the data to these rows and build everything, or only the named ranks."""
    workspace.one("rows.jsonl", [pair(i) for i in rows], PAIR, splits={"validation": 0.3}).build(only=BEFORE_RANKS)
    step = steps.find_step(workspace.project, ("mini", RANKS))
    runner.run_step(workspace.project, step, gate.open_inputs(workspace.project, step), ranks=ranks)


def read_by_trainers(workspace: Workspace) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids of the sequences in the order of training and of the held-out ones; every digest is compared."""
    reader = Reader(workspace.store, "mini", rank=0, world_size=1, as_torch=False, verify=True)
    held_out = reader.validation_set("rows")
    trained = [batch["input_ids"].tolist() for batch in reader]
    return trained, [held_out[i].input_ids.tolist() for i in range(len(held_out))]


def test_ranks_that_trainers_open_stay_while_one_newer_rank_is_current(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    night(workspace, range(40))
    published = read_by_trainers(workspace)
    names = orjson.loads((workspace.store / "mini" / RANKS / "current.json").read_bytes())
    night(workspace, range(20, 70), "rank-00000-of-00002")
    assert read_by_trainers(workspace) == published

    collect(workspace)
    assert read_by_trainers(workspace) == published
    assert (workspace.store / names["order_file"]).exists()
    # All their inputs, back to the source: a row that a trainer sees can still be traced.
    versions, store = {f"mini/{RANKS}": names["version"]}, workspace.project.store
    while versions:
        key, version = versions.popitem()
        made = runner.manifest.load_version(store, tuple(key.split("/")), version)
        assert all(store.exists(file.path) for part in made.parts for file in part.files.values())
        versions |= made.inputs


def test_ranks_that_trainers_no_longer_open_are_removed(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    night(workspace, range(40))
    first = orjson.loads((workspace.store / "mini" / RANKS / "current.json").read_bytes())
    night(workspace, range(20, 70))
    now = read_by_trainers(workspace)
    collect(workspace)
    assert read_by_trainers(workspace) == now
    assert not (workspace.store / first["order_file"]).exists()
    assert not any((workspace.store / one["folder"]).exists() for one in first["ranks"].values())


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}"])
def test_nothing_is_removed_while_the_ranks_that_trainers_open_are_unknown(tmp_path: Path, content: bytes) -> None:
    workspace = Workspace(tmp_path)
    night(workspace, range(10))
    (workspace.store / "mini" / RANKS / "current.json").write_bytes(content)
    before = set(workspace.store.rglob("*"))
    with pytest.raises(IntegrityError, match=r"current\.json: truncated, or changed .*; copy it again, or build"):
        collect(workspace)
    assert {path for path in workspace.store.rglob("*") if path.name != share.LOCK_NAME} == before


def test_shards_that_are_current_again_keep_the_statistics_that_their_gate_asks_for(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [pair(i) for i in range(40)], PAIR)
    old = workspace.build().manifest("rows", "packed_shards")
    workspace.write("rows.jsonl", [pair(i) for i in range(60)])
    workspace.build()
    project = workspace.project
    runner.run_step(project, steps.find_step(project, old.key), {}, version=old.version)
    collect(workspace)
    again = runner.build(project, only=["training_splits", "gpu_partitions"])
    assert [step.name for step, _, _ in again] == ["training_splits", "gpu_partitions"]
    assert again[0][1].manifest.inputs == {"mini/rows/packed_shards": old.version}


def test_next_build_removes_what_killed_ones_left_anywhere(tmp_path: Path) -> None:
    project = CliProject(tmp_path).write()
    project.run("build")
    store = Path(project.project.store.root)
    name = f"{'0123abcd' * 4}.tmp"
    left = [store / place / f"file.{name}" for place in ("", "stats/rows", "tokenizers", "small/chats/raw_dataset")]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    project.run("verify", "--deep")
    project.run("build")
    assert [path for path in left if path.exists()] == []
