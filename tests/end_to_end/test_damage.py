"""Damage to the store: a flipped bit, a cut or an empty file, an edited number."""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowmill.build import gate, runner, steps
from rowmill.cli.error_boundary import ExitStatus
from rowmill.core.errors import DamagedFileError, GateError, IntegrityError
from rowmill.core.storage import digest_file
from rowmill.inspection import verify
from rowmill.schema import manifest
from rowmill.stats.views import query_views
from tests.support.cli_project import run
from tests.support.recipes import LENIENT, PAIR, Workspace, chat, current, flip_bit, pair
from tests.support.tables import RECORDS, as_csv, purchases
from tests.support.tiers import mark_all_but

pytestmark = pytest.mark.slow

CHANGED = {"seq_len": 200, "partitions": {"world_size": 1}}
"""What the second build asks for: every stage from the tokens on is made again."""


def write(workspace: Workspace, **changes: object) -> Workspace:
    datasets = {
        "chats": workspace.dataset("chats.jsonl", [chat(i, turns=2) for i in range(40)]),
        "tasks": workspace.dataset("tasks.jsonl", [pair(i) for i in range(40)], PAIR),
    }
    return workspace.recipe(datasets, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a project that was built without damage; tests copy it."""
    workspace = write(Workspace(tmp_path_factory.mktemp("whole")))
    workspace.build()
    return workspace


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the versions of every stage that the second build makes in an empty store."""
    return versions(write(Workspace(tmp_path_factory.mktemp("clean")), **CHANGED).build().project)


@pytest.fixture
def copy(whole: Workspace, tmp_path: Path) -> Workspace:
    shutil.copytree(whole.folder, tmp_path / "copy")
    return Workspace(tmp_path / "copy")


def versions(project: steps.Project) -> dict[str, str]:
    found = {"/".join(step.key): manifest.load_current(project.store, step.key) for step in steps.plan_steps(project)}
    return {key: made.version for key, made in found.items() if made is not None}


def damages(project: steps.Project) -> list[tuple[str, ...]]:
    """Return what `verify --deep` finds damaged, by step."""
    return [one.damage for one in verify.verify_recipe(project, deep=True)]


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


# ── tables of statistics ──
def flip_value(path: Path) -> None:
    """Flip the first bit that makes a table say something else: those of its end say little, and have no checksum."""
    content, before = path.read_bytes(), pq.read_table(path)
    for place in range(4, len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            if not pq.read_table(path).equals(before):
                return
        except (pa.ArrowException, OSError):
            return


@pytest.mark.parametrize("spoil", mark_all_but([flip_value], [flip_value, cut, empty]))
def test_damaged_statistics_are_named_and_written_again(copy: Workspace, spoil: Callable[[Path], None]) -> None:
    def tables() -> dict[str, list[tuple[object, ...]]]:
        return {
            name: sorted(query_views(copy.project.store, f"FROM {name}")[1], key=repr)
            for name in ("ledger", "token_ledger", "examples", "lengths", "what_if")
        }

    before = tables()
    spoilt = sorted(path for path in (copy.store / "stats").rglob("version=*/part-0.parquet") if "=_" not in str(path))
    for path in spoilt:
        spoil(path)
    checked = verify.verify_recipe(copy.project, deep=True)
    named = {path for one in checked for path in one.damaged}
    verify.discard_damage(copy.project, checked)
    copy.build()

    # A result's table is read, and made again, by whoever judges: here by `verify` itself.
    assert {f"{path.relative_to(copy.store)}" for path in spoilt if "stats/check_results" not in str(path)} <= named
    assert tables() == before
    assert not any(damages(copy.project))


def test_build_that_meets_a_damaged_table_of_statistics_writes_it_again(copy: Workspace) -> None:
    for path in (copy.store / "stats").rglob("part-0.parquet"):
        if "=_" not in str(path.relative_to(copy.store)):
            empty(path)
    copy.build()
    records = "SELECT sum(records) FROM ledger WHERE stage = 'canonical_rows'"
    assert query_views(copy.project.store, records)[1] == [(80,)]


def test_damage_that_the_thread_of_the_statistics_meets_is_repaired(copy: Workspace) -> None:
    made = copy.build().manifest("chats", "tokenized_examples")
    tables = f"stats/examples/**/version={made.version}/*.parquet"
    flip_bit(copy.store / made.files("examples")[0].path)
    for table in copy.store.glob(tables):
        table.unlink()

    assert copy.build().manifest("chats", "tokenized_examples") == made
    assert not any(damages(copy.project))
    assert list(copy.store.glob(tables))


def test_query_of_damaged_statistics_names_the_file_and_the_remedy(copy: Workspace) -> None:
    [made, *_] = (copy.store / "stats/builds/recipe=mini").rglob("made-*.parquet")
    empty(made)

    with pytest.raises(IntegrityError, match=rf"{made.name}: .*`rowmill verify RECIPE --deep --discard`"):
        query_views(copy.project.store, "FROM builds")
    verify.discard_damage(copy.project, verify.verify_recipe(copy.project, deep=True))
    assert len(query_views(copy.project.store, "FROM builds")[1]) > 0


# ── files that carry their own digest ──
SEALED = ("tokenizers/*.json", "mini/**/versions/*.json", "mini/**/manifests/*.json", "mini/**/check_results/*.json",
          "mini/**/part.json", "mini/chats/packed_shards/pointer.json")  # fmt: skip


@pytest.mark.parametrize("files", mark_all_but(SEALED[:1], SEALED))
def test_changed_file_that_carries_its_digest_is_named_and_made_again(copy: Workspace, files: str) -> None:
    before = versions(copy.project)
    spoilt = {str(path.relative_to(copy.store)) for path in copy.store.glob(files)}
    assert not any(damages(copy.project))
    for path in spoilt:
        flip_bit(copy.store / path)

    checked = verify.verify_recipe(copy.project, deep=True)
    assert {path for one in checked for path in one.damaged} == spoilt
    told = "cut, or changed since it was written; expected content of the digest that it carries"
    assert {sentence for one in checked for sentence in one.damage} == {f"{path}: {told}" for path in spoilt}
    verify.discard_damage(copy.project, checked)
    assert versions(copy.build().project) == before
    assert not any(damages(copy.project))


# ── files of parts ──
@pytest.mark.parametrize("spoil", mark_all_but([flip_bit], [flip_bit, cut, empty]))
def test_a_damaged_file_of_any_stage_leaves_what_a_clean_build_leaves(
    copy: Workspace, clean: dict[str, str], spoil: Callable[[Path], None]
) -> None:
    for step in steps.plan_steps(copy.project):
        for part in current(copy.project, *step.key[1:]).parts[:1]:
            for file in part.files.values():
                spoil(copy.store / file.path)

    assert versions(write(copy, **CHANGED).build().project) == clean
    # What nothing reads, such as a ledger, a build cannot notice.
    verify.discard_damage(copy.project, verify.verify_recipe(copy.project, deep=True))
    assert versions(copy.build().project) == clean
    assert damages(copy.project) == [()] * len(clean)


def test_a_damaged_part_alone_is_made_again(copy: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    damaged = current(copy.project, "chats", "canonical_rows").parts[0].files["rows"]
    flip_bit(copy.store / damaged.path)
    write(copy, **CHANGED).build()

    assert copy.project.store.content(damaged).size == damaged.bytes
    assert [re.search(r"canonical_rows.*rows\.arrow: digest .* made again", line) is not None
            for line in caplog.messages] == [True]  # fmt: skip


@pytest.mark.parametrize("spoil", mark_all_but([flip_bit], [flip_bit, cut, empty, Path.unlink]))
def test_build_in_which_nothing_changed_makes_again_what_its_report_shows(
    copy: Workspace, spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.folder)
    copy.write("chats.jsonl", [*(chat(i, turns=2) for i in range(40)), {"messages": []}])
    run("build", str(copy.config))
    page = copy.store / "reports/mini/report.html"
    whole = digest_store(copy)
    page.unlink()
    # A stage's files are damaged together with its input's.
    read = {"canonical_rows": "rejects", "tokenized_examples": "examples", "packed_shards": "segments shard"}
    for stage, name in ((stage, name) for stage, names in read.items() for name in names.split()):
        spoil(copy.store / current(copy.project, "chats", stage).files(name)[0].path)
    run("build", str(copy.config))
    assert digest_store(copy) == whole
    assert page.exists()


def digest_store(workspace: Workspace) -> dict[str, str]:
    """Return the digests of all files of parts."""
    return {str(path): digest_file(path) for path in workspace.store.rglob("parts/*/**/*.*") if path.suffix != ".json"}


def test_damage_that_cannot_be_made_again_has_its_own_status(copy: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy.folder)
    made = current(copy.project, "chats", "tokenized_examples")
    run("use", str(copy.config), "chats/tokenized_examples", made.version)
    flip_bit(copy.store / made.files("examples")[0].path)
    damaged = run("build", str(copy.config), status=ExitStatus.DAMAGED)
    assert "it cannot be made again: mini/chats/tokenized_examples is held" in damaged.err
    run("build", str(copy.config), status=ExitStatus.DAMAGED)


def test_damage_of_an_output_of_other_options_is_not_made_again_under_new_ones(copy: Workspace) -> None:
    made = current(copy.project, "chats", "tokenized_examples")
    damaged = made.files("examples")[0]
    flip_bit(copy.store / damaged.path)
    project = write(copy, seq_len=200).project

    with pytest.raises(DamagedFileError, match="the options of mini/chats/tokenized_examples changed since"):
        runner.read_and_repair(project, partial(project.store.content, damaged))
    assert manifest.is_current(project.store, made)


@pytest.mark.parametrize("spoil", mark_all_but([flip_bit], [flip_bit, cut, empty, Path.unlink]))
def test_damaged_staged_copies_are_made_again_by_a_step_with_other_options(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    workspace, rows = Workspace(tmp_path), ["raw_dataset", "canonical_rows"]
    items = workspace.write("items.csv", b"question\nzz yy xx ww vv uu tt ss rr qq pp oo nn mm\n")

    def build(name: str, most: int) -> list[str]:
        benchmark = {"name": name, "urls": [items], "fields": ["question"]}
        filters = {"decontaminate": {"benchmarks": [benchmark]}, "max_items": most}
        content = b"prompt,answer\na b c,d e f\ng h i,j k l\n"
        built = workspace.one("rows.csv", content, PAIR, filters=filters).build(only=rows)
        return [row["output"] for row in built.rows_of("rows", "canonical_rows", file="rows")]

    kept = build("first", 10)
    staged = {path: path.read_bytes() for path in workspace.store.rglob("staged/*.jsonl")}
    for path in staged:
        spoil(path)

    assert build("second", 20) == kept
    assert len(staged) == 2
    assert {path: path.read_bytes() for path in staged} == staged


@pytest.mark.parametrize("spoil", mark_all_but([flip_bit], [flip_bit, cut, empty]))
def test_damaged_evidence_of_a_table_is_made_again(
    tmp_path: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    def build(folder: Path, damage: Callable[[Path], None]) -> dict[str, str]:
        workspace, rows = Workspace(folder), ["raw_dataset", "canonical_rows"]
        workspace.write("a.csv", as_csv(purchases(60)))
        workspace.recipe({"rows": {"source": {"train_urls": ["data/*.csv"]}, "format": RECORDS}}).build(only=rows)
        for seen in workspace.store.rglob("seen.json"):
            damage(seen)
        workspace.write("b.csv", as_csv(purchases(70)[60:]))
        return workspace.build(only=rows).versions()

    assert build(tmp_path / "damaged", spoil) == build(tmp_path / "whole", lambda _: None)
    assert sum("seen.json" in line and "made again" in line for line in caplog.messages) == (spoil is flip_bit)


def test_changed_source_cannot_repair_its_damaged_outputs(copy: Workspace) -> None:
    flip_bit(copy.store / current(copy.project, "chats", "canonical_rows").parts[0].files["rows"].path)
    write(copy, **CHANGED).write("chats.jsonl", [chat(i) for i in range(5)])
    step = steps.find_step(copy.project, ("mini", "chats", "tokenized_examples"))
    inputs = gate.open_inputs(copy.project, step)
    runner.build(copy.project, only=["raw_dataset"])

    with pytest.raises(IntegrityError, match="made again"):
        runner.run_step(copy.project, step, inputs)


def test_discard_removes_outputs_of_damaged_inputs_and_the_next_build_is_complete(
    copy: Workspace, whole: Workspace
) -> None:
    published = copy.store / "mini/gpu_partitions/current.json"
    flip_bit(copy.store / current(copy.project, "chats", "canonical_rows").parts[0].files["rows"].path)
    lines = verify.discard_damage(copy.project, verify.verify_recipe(copy.project, deep=True))
    stages = ("tokenized_examples", "truncation_stats", "packed_shards", "training_splits", "gpu_partitions")
    assert [line.partition(":")[0].rpartition("/")[2] for line in lines] == list(stages)
    assert not published.exists()
    assert versions(copy.build().project) == versions(whole.project)
    assert published.exists()


# ── what is written about the parts ──
@pytest.mark.parametrize("spoil", [cut, empty])
@pytest.mark.parametrize("names", ["versions/*.json", "manifests/*.json", "pointer.json", "parts/*/part.json",
                                   "check_results/*.json"])  # fmt: skip
def test_a_truncated_or_empty_note_is_rewritten(
    copy: Workspace, whole: Workspace, spoil: Callable[[Path], None], names: str
) -> None:
    paths = [path for path in copy.store.glob(f"mini/**/{names}") if path.is_file()]
    assert paths
    for path in paths:
        spoil(path)
    assert versions(copy.build().project) == versions(whole.project)


def test_an_edited_fact_is_not_trusted(copy: Workspace) -> None:
    made, folder = current(copy.project, "chats", "canonical_rows"), copy.store / "mini/chats/canonical_rows"
    for path in (*folder.glob("versions/*.json"), *folder.glob("manifests/*.json")):
        content = path.read_bytes()
        assert b'"unknown_roles": 0' in content
        path.write_bytes(content.replace(b'"unknown_roles": 0', b'"unknown_roles": 9'))

    with pytest.raises(IntegrityError, match=r"canonical_rows/versions/.* is damaged or was edited"):
        manifest.load_version(copy.project.store, made.key, made.version)
    assert versions(copy.build().project)["mini/chats/canonical_rows"] == made.version


def test_an_edited_check_result_is_not_trusted(copy: Workspace) -> None:
    write(copy, gates={"rejects": {"at_most": 0}, "order_nonempty": {"at_least": 10_000}})
    with pytest.raises(GateError):
        copy.build()
    edited = 0
    for path in copy.store.glob("mini/training_splits/check_results/*.json"):
        saved = orjson.loads(path.read_bytes())
        blocking = [one for one in saved["results"].values() if one["blocking"]]
        edited += len(blocking)
        for one in blocking:
            one |= {"blocking": False, "passed": True}
        path.write_bytes(orjson.dumps(saved))

    assert edited == 1
    with pytest.raises(GateError, match="order_nonempty"):
        gate.open_inputs(copy.project, steps.find_step(copy.project, ("mini", "gpu_partitions")))


# ── publication ──
def test_ranks_that_fail_a_check_are_not_published(copy: Workspace) -> None:
    path = copy.store / "mini/gpu_partitions/current.json"
    before = path.read_bytes()
    rule = {"name": "enough", "type": "expect_column_min_to_be_between", "column": "tokens", "min_value": 10**9}
    gates = {**LENIENT, "expectations": {"gpu_partitions": [rule]}}
    done = runner.build(write(copy, gates=gates, seq_len=200).project)
    assert [one.check for one in done[-1][2] if one.blocking] == ["enough"]
    assert path.read_bytes() == before

    built = write(copy, gates={**LENIENT, "rejects": {"at_most": 0.9}}, seq_len=200).build()
    published = orjson.loads(path.read_bytes())
    assert published["version"] == built.manifest("gpu_partitions").version
    assert any("rejects at most 0.9 (error); the default is 0.05" in line for line in published["loosened"])
    assert {"conservation"} <= {one["name"] for one in published["checks"]}
