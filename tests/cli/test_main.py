"""`rowmill …` as a user types it: what it prints, what it leaves behind, and its exit status."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml

from rowmill.build import runner
from rowmill.cli import main
from rowmill.cli.error_boundary import ExitStatus
from rowmill.core.errors import IntegrityError
from rowmill.schema import manifest
from tests.support.cli_project import CHATS, NOTES, RECIPE, ROOT, TASKS, CliProject, list_files, run
from tests.support.recipes import PAIR, Workspace, flip_bit, pair

STEPS = 3 * 5 + 2


@pytest.fixture
def copied(small: CliProject, tmp_path: Path) -> CliProject:
    """Return a copy of the built project, to be changed."""
    shutil.copytree(small.folder, tmp_path / "copied")
    return CliProject(tmp_path / "copied")


def at_most(rejects: float, **gates: Any) -> dict[str, Any]:
    """Return the recipe's gates with another bound of its rejects, of which there is one in 41 chats."""
    return RECIPE["gates"] | {"rejects": {"at_most": rejects}} | gates


def rows_of(project: CliProject, query: str, *options: str) -> list[dict[str, object]]:
    return json.loads(run("sql", query, project.recipe, "--format", "json", *options).out)


# ── plan, build ──
@pytest.mark.slow
def test_plan_of_new_project_makes_the_first_stages_and_writes_no_output(tmp_path: Path) -> None:
    project = CliProject(tmp_path).write()
    out = project.run("plan").out
    assert out.count("never built") == 3
    assert out.count("make if changed") == STEPS - 3
    assert manifest.load_current(project.project.store, ("small", "chats", "raw_dataset")) is None


@pytest.mark.slow
def test_plan_after_build_reuses_every_stage(small: CliProject) -> None:
    assert f"{STEPS} reused" in small.run("plan").out


@pytest.mark.slow
def test_waivers_that_excuse_nothing_are_named_by_plan_and_build(tmp_path: Path) -> None:
    waivers = [
        {"check": check, "dataset": dataset, "at_most": 0.9, "reason": "looked at by hand"}
        for check, dataset in (("rejects", "chats"), ("rejects", "tasks"), ("table_drift", "chats"))
    ]
    project = CliProject(tmp_path).write(gates=at_most(0.001, waivers=waivers))

    def list_unused(text: str) -> list[str]:
        return re.findall(r"gates\.waivers: (\w+ on \w+ (?:excuses no failure: [^;]*|matches no check result))", text)

    matches_none = "table_drift on chats matches no check result"
    stages = ("canonical_rows", "tokenized_examples")
    excuses_none = f"rejects on tasks excuses no failure: {', '.join(f'tasks/{one} passed with 0 %' for one in stages)}"
    # Before the build nothing is known of the rows.
    assert list_unused(unfold(project.run("plan").out)) == [matches_none]
    assert list_unused(unfold(project.run("build").err)) == [excuses_none, matches_none]
    assert list_unused(unfold(project.run("plan").out)) == [excuses_none, matches_none]
    assert list_unused(unfold(project.run("build", "--json").err)) == [excuses_none, matches_none]


def unfold(text: str) -> str:
    """Return text without the line breaks of a narrow terminal."""
    return " ".join(text.split())


def test_plan_after_changed_option_names_the_stages_that_read_it(copied: CliProject) -> None:
    lines = copied.write_recipe(mixture={"batch_size": 4}).run("plan").out.splitlines()
    made = [line.split()[1] for line in lines if line.startswith(("  + ", "  ~ "))]
    assert made == ["training_splits", "gpu_partitions"]


@pytest.mark.slow
def test_build_again_makes_nothing_and_proposes_commands_as_they_are_typed(
    small: CliProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    out = small.run("build").out
    assert out.count(" reused ") == STEPS
    assert "checks     every applicable check passed" in out
    proposed = out.partition("\nnext\n")[2].partition("\nreport")[0]
    commands = [line.strip() for line in proposed.splitlines() if line.startswith("    ")]
    assert len(commands) == 5
    assert "rowmill view small" in commands
    assert all(command.startswith("rowmill ") for command in commands)


@pytest.mark.slow
def test_build_of_one_stage_makes_it_of_every_dataset_in_the_root_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWMILL_STORE", str(tmp_path / "elsewhere"))
    out = CliProject(tmp_path / "project").write().run("build", "--only", "raw_dataset").out
    assert out.count("raw_dataset") == 3
    assert (tmp_path / "elsewhere" / "small" / "tasks" / "raw_dataset" / "pointer.json").is_file()
    assert not (tmp_path / "elsewhere" / "small" / "chats" / "canonical_rows").exists()
    assert not (tmp_path / "project" / ".rowmill").exists()


@pytest.mark.slow
def test_build_until_a_stage_or_an_export_makes_that_and_those_before_it(tmp_path: Path) -> None:
    project = CliProject(tmp_path).write()

    def count_made(*options: str) -> dict[str, int]:
        made = re.findall(r"^  [✓!] (\w+) +(\S+)", project.run("build", *options).out, re.MULTILINE)
        return Counter(stage for stage, time in made if time != "reused")

    refused = project.run("build", "--only", "packed_shards", status=ExitStatus.INVALID)
    assert "run `rowmill build small --until packed_shards`" in refused.err
    assert count_made("--until", "canonical_rows") == {"raw_dataset": 3, "canonical_rows": 3}
    assert count_made("--until", "packed_shards") == {
        "tokenized_examples": 3, "truncation_stats": 3, "packed_shards": 3,
    }  # fmt: skip
    assert count_made("--until", "training_splits") == {"training_splits": 1}
    assert not (tmp_path / ".rowmill" / "small" / "gpu_partitions").exists()
    project.write_recipe(exports=[{"kind": "native", "name": one} for one in ("one", "other")])
    out = project.run("build", "--until", "exports/one").out
    assert "✓ exports/one" in out
    assert "exports/other" not in out


@pytest.mark.slow
def test_build_past_a_closed_gate_says_why_and_shows_each_step_below_its_dataset_and_as_json(
    copied: CliProject,
) -> None:
    printed = copied.write_recipe(gates=at_most(0.001)).run("build", status=ExitStatus.GATE_CLOSED)

    assert f"small/chats/canonical_rows: rejects: {100 / (CHATS + 1):.4g} %" in printed.err
    assert "wanted at most 0.1 %; correct the data" in printed.err
    assert "✗ canonical_rows" in printed.out
    lines = printed.out.splitlines()
    below: dict[str, list[str]] = {}
    for line in lines[2:-1]:
        if line and not line.startswith(" "):
            below[line] = []
        elif line[2:4].strip() in ("✓", "!", "✗"):
            below[list(below)[-1]].append(line.split()[1])
    assert below["chats"] == ["raw_dataset", "canonical_rows"]
    assert below["tasks"] == below["notes"] == [
        "raw_dataset", "canonical_rows", "tokenized_examples", "truncation_stats", "packed_shards",
    ]  # fmt: skip
    assert Path(lines[-1].removeprefix("report").strip()).is_file()
    printed = copied.run("build", "--json", status=ExitStatus.GATE_CLOSED)
    found = json.loads(printed.out)
    failed = [one for step in found["steps"] for one in step["checks"] if one["blocking"]]
    assert found["closed"] is True
    assert [(one["check"], one["value"]) for one in failed] == [("rejects", pytest.approx(1 / (CHATS + 1)))]
    assert "data/chats.jsonl line 3" in failed[0]["causes"][0]
    assert "not built because of that: chats/tokenized_examples" in printed.err
    assert Path(found["report"]).is_file()


@pytest.mark.slow
def test_command_that_a_closed_gate_prints_answers_for_its_recipe_dataset_and_root(tmp_path: Path) -> None:
    project = CliProject(tmp_path).write(gates=at_most(0.001))
    project.write_data("tasks.csv", "prompt,response\n,\nq,a\n")
    said = project.run("build", "--root", str(tmp_path / "other place"), status=ExitStatus.GATE_CLOSED).err
    [command] = re.findall(r"small/chats/canonical_rows: rejects: .*`(rowmill sql [^`]+)`", said)
    name, *arguments = shlex.split(command)
    arguments[arguments.index("small")] = project.recipe
    [line] = json.loads(run(*arguments, "--format", "json").out)
    assert (name, line["reason"], line["records"]) == ("rowmill", "invalid_json", 1)


# ── stats ──
@pytest.mark.slow
def test_stats_show_what_build_counts_with_quantiles_rejects_and_other_limits(
    small: CliProject, tmp_path: Path
) -> None:
    root = str(tmp_path / "other")
    query = "select dataset, original_tokens from examples order by all"
    out = small.run("stats", "--root", root).out
    assert f"chats  {CHATS + 1} records → {CHATS} rows → {CHATS} examples" in out
    assert f"tasks  {TASKS} records → {TASKS} rows → {TASKS} examples" in out
    assert not (tmp_path / "other" / "small" / "chats" / "packed_shards").exists()
    assert rows_of(small, query, "--root", root) == rows_of(small, query)
    [what_if] = rows_of(small, "select * from what_if where dataset = 'notes' and seq_len = 128")
    out = small.run("stats").out
    assert "p25 " in out
    assert "invalid_json" in out
    lines = [line.split() for line in out.split("\nnotes ")[1].splitlines()]
    [line] = [words for words in lines if words[:1] == ["128"] and "to" not in words]
    assert (line[1], line[-1]) == (str(NOTES), str(what_if["sequences"]))


@pytest.mark.slow
def test_stats_with_a_hint_exit_3_only_when_strict(tmp_path: Path) -> None:
    project = CliProject(tmp_path).write(seq_len=4096)
    for options, status in ((), ExitStatus.SUCCESS), (("--strict",), ExitStatus.PROBLEM_FOUND):
        assert "lower seq_len to reduce VRAM usage" in project.run("stats", *options, status=status).out
    project.write_recipe(seq_len=40, datasets={"tasks": RECIPE["datasets"]["tasks"]})
    assert "max_length to" not in project.run("stats", "--strict").out


@pytest.mark.slow
def test_stats_after_a_closed_gate_still_show_the_numbers(copied: CliProject) -> None:
    printed = copied.write_recipe(gates=at_most(0)).run("stats", status=ExitStatus.GATE_CLOSED)
    assert "original length in tokens" in printed.out
    assert "wanted at most 0" in printed.err


# ── verify ──
@pytest.mark.slow
def test_verify_prints_what_failed_and_how_many_passed_and_with_all_every_check(small: CliProject) -> None:
    counts = rows_of(small, "select outcome, count(*) as n from check_results group by 1")
    of = {str(one["outcome"]): one["n"] for one in counts}
    short, whole = small.run("verify").out, small.run("verify", "--all").out

    def count_marks(text: str) -> dict[str, int]:
        marks = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and line.strip()]
        return {mark: marks.count(mark) for mark in ("✓", "!", "✗", "–")}

    assert count_marks(short) == {"✓": 0, "!": of.get("failed", 0), "✗": 0, "–": 0}
    assert count_marks(whole) == {
        "✓": of["passed"], "!": of.get("failed", 0), "✗": 0, "–": of["not_applicable"],
    }  # fmt: skip
    assert short.splitlines()[0] == whole.splitlines()[0]
    assert re.search(r"✓ rejects +2\.439 %  at most 5 %", whole)
    [results] = rows_of(small, "select count(*) as n, sum(passed::int)::int as passed from check_results")
    out = small.run("verify", "--deep", "--facts").out
    assert f"{results['passed']} passed" in out
    assert "every digest matches" in out
    assert "trained_share" in out


@pytest.mark.slow
def test_verify_under_stricter_threshold_exits_1_with_remedy_or_shows_the_waiver(copied: CliProject) -> None:
    out = copied.write_recipe(gates=at_most(0)).run("verify", status=ExitStatus.GATE_CLOSED).out
    assert "1 blocking" in out
    assert "✗ rejects" in out
    assert "→ correct the data or the format options" in out
    waiver = {"check": "rejects", "dataset": "chats", "at_most": 0.5, "reason": "one broken line, known"}
    out = copied.write_recipe(gates=at_most(0, waivers=[waiver])).run("verify").out
    assert "waived: one broken line, known" in out
    assert "1 waived" in out


@pytest.mark.slow
def test_verify_deep_names_the_file_with_one_changed_byte_and_the_missing_one(copied: CliProject) -> None:
    shard = copied.current("chats", "packed_shards").parts[0].files["shard"].path
    flip_bit(copied.folder / ".rowmill" / shard)

    assert re.search(r"\? [1-9]\d* files, \S+ kB not read: `rowmill verify small --deep`", copied.run("verify").out)
    assert f"✗ {shard}: digest" in copied.run("verify", "--deep", status=ExitStatus.DAMAGED).out
    rows = copied.current("tasks", "canonical_rows").parts[0].files["rows"].path
    (copied.folder / ".rowmill" / rows).unlink()
    assert f"✗ {rows}: missing" in copied.run("verify", "--deep", status=ExitStatus.DAMAGED).out


@pytest.mark.slow
def test_verify_deep_says_that_files_of_earlier_versions_were_not_read(copied: CliProject) -> None:
    assert "not read" not in copied.run("verify", "--deep").out
    older = copied.current("chats", "canonical_rows").parts[0].files["rows"].path
    copied.append_chat(1000)
    copied.run("build")
    (copied.folder / ".rowmill" / older).write_bytes(b"")

    out = copied.run("verify", "--deep").out
    assert "read again: every digest matches" in out
    assert re.search(r"\? [1-9]\d* files, \S+ kB of earlier versions not read: they may be damaged", out)


@pytest.mark.slow
def test_verify_after_a_changed_option_was_built_knows_no_changed_options(copied: CliProject) -> None:
    copied.write_recipe(seq_len=160)
    assert "its options changed since: run rowmill build" in copied.run("verify").out
    copied.run("build")
    assert "its options changed" not in copied.run("verify").out


def test_verify_of_nothing_built_is_an_error(tmp_path: Path) -> None:
    assert "nothing is built" in CliProject(tmp_path).write().run("verify", status=ExitStatus.INVALID).err


# ── sql ──
@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ("csv", f"dataset,n\nchats,{CHATS}\nnotes,{NOTES}\n"),
        ("json", json.dumps([{"dataset": "chats", "n": CHATS}, {"dataset": "notes", "n": NOTES}], indent=2) + "\n"),
        ("table", f"dataset   n\nchats    {CHATS}\nnotes     {NOTES}\n2 rows\n"),
    ],
)
def test_sql_answers_in_each_form(small: CliProject, form: str, wanted: str) -> None:
    query = "select dataset, count(*) as n from rows where dataset <> 'tasks' group by 1 order by 1"
    shown = [line.strip() for line in run("sql", query, small.recipe, "--format", form).out.splitlines()]
    assert [line for line in shown if line] == [line.strip() for line in wanted.splitlines()]


@pytest.mark.slow
def test_sql_with_a_recipe_answers_for_that_recipe_alone(copied: CliProject) -> None:
    other = Path(copied.recipe).with_name("other.yaml")
    of_notes = RECIPE | {"datasets": {"notes": RECIPE["datasets"]["notes"]}}
    other.write_text(yaml.safe_dump(of_notes, sort_keys=False), encoding="utf-8")
    run("build", str(other))
    query = "select dataset, count(*) as n from rows group by all order by all"
    chats, notes, tasks = ({"dataset": name, "n": n} for name, n in
                           (("chats", CHATS), ("notes", NOTES), ("tasks", TASKS)))  # fmt: skip

    assert rows_of(copied, query) == [chats, notes, tasks]
    assert json.loads(run("sql", query, str(other), "--format", "json").out) == [notes]
    assert rows_of(copied, query, "--all-recipes") == [chats, notes | {"n": 2 * NOTES}, tasks]
    by_root = run("sql", query, "--root", str(copied.folder / ".rowmill"), "--format", "csv")
    assert f"notes,{2 * NOTES}\n" in by_root.out


def test_sql_finds_the_storage_by_root_alone_and_makes_no_folder(small: CliProject, tmp_path: Path) -> None:
    query, root = "select count(*) as n from rejects", str(small.folder / ".rowmill")
    assert run("sql", query, "--root", root, "--format", "csv").out == "n\n1\n"
    refused = run("sql", "select 1", "--root", str(tmp_path / "none"), status=ExitStatus.INVALID)
    assert "no statistics here" in refused.err
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_sql_of_a_storage_root_imports_no_engine(small: CliProject) -> None:
    code = (
        "import sys; from rowmill.cli import main\n"
        f"main.main(['sql', 'select 7 as n', '--root', {str(small.folder / '.rowmill')!r}])\n"
        "heavy = ('polars', 'pydantic', 'rowmill.build', 'rowmill.checks', 'rowmill.recipe', 'rowmill.stages')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert print_of(code).split() == ["n", "7", "1", "row", "[]"]


def print_of(code: str) -> str:
    """Return what a program prints that is run in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def rows_in_statistics(project: CliProject) -> int:
    """Count the rows of a dataset in `stats.duckdb`, as any program that opens the file would."""
    with duckdb.connect(project.project.store.path("stats.duckdb"), read_only=True) as reader:
        [count] = reader.execute("select count(*) from rows where dataset = 'chats'").fetchone() or (0,)
    return int(count)


@pytest.mark.slow
def test_statistics_file_answers_after_a_build_and_is_made_again_by_use(small: CliProject, copied: CliProject) -> None:
    assert rows_in_statistics(small) == CHATS
    Path(copied.project.store.path("stats.duckdb")).unlink()
    copied.run("use", "chats/raw_dataset", copied.current("chats", "raw_dataset").version)
    assert rows_in_statistics(copied) == CHATS


@pytest.mark.slow
def test_statistics_file_answers_after_a_closed_gate(tmp_path: Path) -> None:
    project = CliProject(tmp_path).write(gates=at_most(0))
    project.run("build", "--skip-preflight", status=ExitStatus.GATE_CLOSED)
    assert rows_in_statistics(project) == CHATS


# ── versions, use, gc ──


@pytest.mark.slow
def test_use_holds_an_older_version_until_it_is_released_and_says_how_to_go_on(copied: CliProject) -> None:
    first = copied.current("chats", "raw_dataset").version
    copied.append_chat(1000)
    copied.run("build")
    second = copied.current("chats", "raw_dataset").version
    said = copied.run("use", "chats/raw_dataset", first[:8]).out
    listed = copied.run("versions", "chats/raw_dataset").out

    assert first != second
    assert [line.split()[1] for line in listed.splitlines() if line.lstrip().startswith("●")] == [first]
    assert second in listed
    # The printed command makes what follows of the version in use, as a build of everything does.
    [stages] = re.findall(r"build small((?: --only \S+)+)", " ".join(said.split()))
    copied.run("build", *stages.split())
    assert copied.current("chats", "canonical_rows").inputs["small/chats/raw_dataset"] == first
    copied.append_chat(2000)
    planned = re.sub(" +", " ", copied.run("plan").out)
    assert f"raw_dataset held held at version {first[:12]}" in planned
    said = copied.run("build").out
    assert copied.current("chats", "raw_dataset").version == first
    assert said.count(f"held at version {first[:12]}") == 2, "with its step, and at the end"
    assert "chats/raw_dataset is released" in copied.run("use", "chats/raw_dataset", "--release").out
    copied.run("build")
    assert copied.current("chats", "raw_dataset").version not in (first, second)


@pytest.mark.slow
def test_use_of_older_ranks_publishes_them_until_they_are_released(copied: CliProject) -> None:
    published = Path(copied.project.store.path("small/gpu_partitions/current.json"))
    before = json.loads(published.read_bytes())
    for number in range(1000, 1030):
        copied.append_chat(number)
    copied.run("build")
    assert json.loads(published.read_bytes())["order"] != before["order"]

    copied.run("use", "gpu_partitions", before["version"])
    assert json.loads(published.read_bytes()) == before
    # The next nights keep it, and garbage collection too.
    copied.append_chat(2000)
    copied.run("build")
    copied.run("gc", "--keep", "1")
    assert json.loads(published.read_bytes()) == before
    copied.run("use", "gpu_partitions", "--release")
    copied.run("build")
    assert json.loads(published.read_bytes())["order"] != before["order"]


@pytest.mark.slow
def test_ranks_of_a_held_order_are_made_of_the_shards_that_it_orders(copied: CliProject) -> None:
    order = copied.current("training_splits")
    for number in range(1000, 1030):
        copied.append_chat(number)
    copied.run("build")
    newer = copied.current("chats", "packed_shards").version
    assert order.inputs["small/chats/packed_shards"] != newer

    copied.run("use", "training_splits", order.version)
    copied.run("build")
    ranks = copied.current("gpu_partitions")
    assert ranks.inputs["small/training_splits"] == order.version
    assert ranks.inputs["small/chats/packed_shards"] == order.inputs["small/chats/packed_shards"]
    assert copied.current("chats", "packed_shards").version == newer


@pytest.mark.slow
def test_damage_to_a_held_version_is_an_error_that_names_the_way_out(copied: CliProject) -> None:
    held = copied.current("chats", "canonical_rows")
    copied.run("use", "chats/canonical_rows", held.version)
    for file in held.files("rows"):
        Path(copied.project.store.path(file.path)).unlink()
    copied.write_recipe(seq_len=64)

    with pytest.raises(IntegrityError, match=r"cannot be made again: .*chats/canonical_rows is held at version"):
        runner.build(copied.project)


@pytest.mark.slow
def test_use_of_unknown_version_and_release_of_what_is_not_held_say_so(copied: CliProject, small: CliProject) -> None:
    refused = copied.run("use", "chats/raw_dataset", "zzz", status=ExitStatus.INVALID)
    assert copied.current("chats", "raw_dataset").version in refused.err
    assert "is not held at a version" in small.run("use", "chats/raw_dataset", "--release").out


@pytest.mark.slow
def test_gc_keeps_what_is_current_and_what_that_was_made_of(copied: CliProject) -> None:
    old = copied.current("chats", "tokenized_examples")
    for number in (1000, 1001):
        copied.append_chat(number)
        copied.run("build")
    kept = {stage: [copied.current("chats", stage).version] for stage in ("canonical_rows", "packed_shards")}
    store = copied.project.store
    copied.run("gc", "--keep", "1")
    for stage, versions in kept.items():
        assert [one.version for one in manifest.list_versions(store, ("small", "chats", stage))] == versions
    # All but the one file that every part without rejects shares.
    shared = "small/chats/tokenized_examples/no_rejects.arrow"
    own = {file.path for part in old.parts for file in part.files.values()} - {shared}
    assert own
    assert not any(map(store.exists, own))
    copied.run("verify", "--deep")
    assert copied.run("build").out.count(" reused ") == STEPS
    assert rows_of(copied, "select distinct version from history.examples where dataset = 'chats'") == [
        {"version": copied.current("chats", "tokenized_examples").version}
    ]


@pytest.mark.slow
def test_gc_names_what_would_go_and_keeps_an_old_version_that_was_made_current(copied: CliProject) -> None:
    first = copied.current("chats", "canonical_rows").version
    copied.append_chat(1000)
    copied.run("build")
    before = list_files(copied.folder)
    assert "would remove" in copied.run("gc", "--keep", "1", "--dry-run").out
    assert list_files(copied.folder) == before
    copied.run("use", "chats/canonical_rows", first)

    copied.run("gc", "--keep", "1")
    kept = {one.version for one in manifest.list_versions(copied.project.store, ("small", "chats", "canonical_rows"))}
    assert first in kept
    assert len(kept) == 2
    copied.run("verify", "--deep")


# ── Finding recipes, wrong input ──
def test_recipe_is_found_by_name_and_the_nearest_one_is_named(
    small: CliProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small.folder / "data")
    monkeypatch.delenv("ROWMILL_CONFIGS", raising=False)
    assert f"{STEPS} reused" in run("plan", "small").out
    monkeypatch.chdir(small.folder)
    err = run("build", "smalll", status=ExitStatus.INVALID).err
    assert "smalll: no recipe of this name; there are small in" in err
    assert "did you mean small?" in err


def test_commands_that_a_build_of_a_file_prints_find_the_file_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROWMILL_CONFIGS", raising=False)
    monkeypatch.chdir(tmp_path)
    project = Workspace(tmp_path).one("rows.jsonl", [pair(i) for i in range(9)], PAIR)
    shutil.move(project.config, tmp_path / "own.yaml")
    project.config.parent.rmdir()
    printed = run("build", "own.yaml").out
    [inspect] = re.findall(r"rowmill (inspect own -n 2)", printed)

    assert "row_id" in run("sql", "from rows limit 1", "own").out
    assert "trained" in run(*inspect.split()).out
    assert "owm: no such recipe; there is no configs folder" in run("plan", "owm", status=ExitStatus.INVALID).err


def test_broken_recipe_says_where_what_allowed_and_what_to_do(tmp_path: Path) -> None:
    project = CliProject(tmp_path).write(seq_length=128)
    printed = project.run("build", status=ExitStatus.INVALID)
    where, allowed, remedy = printed.err.strip().split("; ")
    assert where in (f"{project.recipe}.seq_length: unknown key", f"{project.recipe}: seq_length: unknown key")
    assert allowed.startswith("allowed here: ")
    assert remedy == "did you mean seq_len?"
    assert printed.out == ""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("build RECIPE --only packed_shard", r"^--only packed_shard: no such stage; .*did you mean packed_shards\?"),
        ("build RECIPE --until packed_shard", r"^--until packed_shard: no such stage; .*did you mean packed_shards\?"),
        ("sql 'select * from row' RECIPE", "the views are builds, check_results"),
        ("use RECIPE chats/raw_dataset", "use takes a version, or --release"),
        ("versions RECIPE chats/rows", "small/chats/canonical_rows"),
    ],
)
def test_what_a_command_does_not_know_is_answered_with_what_it_knows(
    small: CliProject, command: str, said: str
) -> None:
    words = [small.recipe if word == "RECIPE" else word for word in shlex.split(command)]
    assert re.search(said, run(*words, status=ExitStatus.INVALID).err, re.DOTALL)


@pytest.mark.parametrize(
    "arguments", [["build", "small", "--workers", "0"], ["inspect", "small", "-n", "-1"], ["bild"]]
)
def test_wrong_arguments_exit_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main(arguments)
    assert stopped.value.code == ExitStatus.INVALID


def test_help_imports_nothing_that_takes_time() -> None:
    code = (
        "import contextlib, io, sys; from rowmill.cli import main as cli\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): cli.main(['--help'])\n"
        "heavy = ('pydantic', 'numpy', 'pyarrow', 'duckdb', 'rich', 'yaml', 'asyncio')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert print_of(code).strip() == "[]"


@pytest.mark.slow
def test_plan_of_a_built_recipe_imports_what_forecasts_need_and_nothing_of_other_commands(small: CliProject) -> None:
    code = (
        "import contextlib, io, sys; from rowmill.cli import main as cli\n"
        f"with contextlib.redirect_stdout(io.StringIO()): cli.main(['plan', {small.recipe!r}])\n"
        "heavy = ('asyncio', 'duckdb', 'gigatoken', 'pandas', 'tokenizers', 'transformers', 'rowmill.build.gc',\n"
        "  'rowmill.build.comparison', 'rowmill.inspection.verify', 'rowmill.reader', 'rowmill.reports.statistics')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert print_of(code).strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["plan", "build", "stats", "verify"])
def test_output_for_a_pipe_has_no_escape_sequences(small: CliProject, verb: str) -> None:
    assert "\x1b" not in small.run(verb).out


# ── --json ──
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (("plan",), {"steps", "remarks"}),
        (("build",), {"closed", "report", "steps"}),
        (("build", "--only", "raw_dataset"), {"closed", "report", "steps"}),
        (("stats",), {"datasets", "hints"}),
        (("verify", "--deep"), {"fails", "stages"}),
        (("versions", "chats/canonical_rows"), {"stage", "current", "versions"}),
    ],
)
def test_json_is_one_object_and_nothing_else_on_stdout(
    arguments: tuple[str, ...], fields: set[str], small: CliProject
) -> None:
    found = json.loads(small.run(*arguments, "--json").out)
    assert set(found) == {"recipe", "store", *fields}
    assert found["recipe"] == "small"


@pytest.mark.slow
def test_json_of_verify_and_versions_agrees_with_the_views(small: CliProject) -> None:
    counts = rows_of(small, "select outcome, count(*) as n from check_results group by 1 order by 1")
    stages = json.loads(small.run("verify", "--json").out)["stages"]
    versions = json.loads(small.run("versions", "tasks/canonical_rows", "--json").out)
    outcomes = [one["outcome"] for stage in stages for one in stage["checks"]]
    assert [{"outcome": name, "n": outcomes.count(name)} for name in sorted(set(outcomes))] == counts
    assert versions["current"] == versions["versions"][0]["version"]
    assert versions["versions"][0]["facts"]["kept"] == TASKS
