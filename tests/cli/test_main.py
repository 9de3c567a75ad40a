"""`rowmill …` as a user types it: what it prints, what it leaves behind, and its exit status."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import duckdb
import pytest
import yaml

from rowmill.build import runner
from rowmill.cli import main
from rowmill.core.errors import IntegrityError
from rowmill.schema import manifest
from tests.support.cli_project import CHATS, FOREIGN_WARNINGS, NOTES, RECIPE, ROOT, TASKS, CliProject

pytestmark = FOREIGN_WARNINGS
STEPS = 3 * 5 + 2


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> CliProject:
    """Return a project that is built and that no test changes."""
    project = CliProject(tmp_path_factory.mktemp("built")).write()
    assert project.rowmill("build") == main.ExitStatus.SUCCESS
    return project


@pytest.fixture
def copied(built: CliProject, tmp_path: Path) -> CliProject:
    """Return a copy of the built project, to be changed."""
    shutil.copytree(built.folder, tmp_path / "copied")
    return CliProject(tmp_path / "copied")


def current(project: CliProject, *stage: str) -> manifest.Manifest:
    found = manifest.load_current(project.project.store, ("small", *stage))
    assert found is not None
    return found


def rows_of(
    project: CliProject, query: str, capsys: pytest.CaptureFixture[str], *options: str
) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main.main(["sql", query, project.recipe, "--format", "json", *options]) == main.ExitStatus.SUCCESS
    return json.loads(capsys.readouterr().out)


# ── plan, build ──


@pytest.mark.slow
def test_plan_of_new_project_makes_the_first_stages_and_writes_no_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = CliProject(tmp_path).write()

    assert project.rowmill("plan") == main.ExitStatus.SUCCESS
    out = capsys.readouterr().out
    assert out.count("never built") == 3
    assert out.count("make if changed") == STEPS - 3
    assert manifest.load_current(project.project.store, ("small", "chats", "raw_dataset")) is None


@pytest.mark.slow
def test_plan_after_build_reuses_every_stage(built: CliProject, capsys: pytest.CaptureFixture[str]) -> None:
    assert built.rowmill("plan") == main.ExitStatus.SUCCESS
    assert f"{STEPS} reused" in capsys.readouterr().out


def test_plan_after_changed_option_names_the_stages_that_read_it(
    copied: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    copied.write_recipe(mixture={"batch_size": 4})

    assert copied.rowmill("plan") == main.ExitStatus.SUCCESS
    lines = capsys.readouterr().out.splitlines()
    made = [line.split()[1] for line in lines if line.startswith(("  + ", "  ~ "))]
    assert made == ["training_splits", "gpu_partitions"]


def test_build_again_makes_nothing_and_says_so(built: CliProject, capsys: pytest.CaptureFixture[str]) -> None:
    assert built.rowmill("build") == main.ExitStatus.SUCCESS
    out = capsys.readouterr().out
    assert out.count(" reused ") == STEPS
    assert "checks     every applicable check passed" in out


@pytest.mark.slow
def test_commands_that_a_build_proposes_are_written_as_they_are_typed(
    built: CliProject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")

    assert built.rowmill("build") == 0

    proposed = capsys.readouterr().out.partition("\nnext\n")[2].partition("\nreport")[0]
    commands = [line.strip() for line in proposed.splitlines() if line.startswith("    ")]
    assert len(commands) == 4
    assert all(command.startswith("rowmill ") for command in commands)


def test_build_of_one_stage_makes_that_stage_of_every_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = CliProject(tmp_path).write()

    assert project.rowmill("build", "--only", "raw_dataset") == main.ExitStatus.SUCCESS
    assert capsys.readouterr().out.count("raw_dataset") == 3
    assert not (tmp_path / ".rowmill" / "small" / "chats" / "canonical_rows").exists()


@pytest.mark.slow
def test_build_until_a_stage_makes_that_stage_and_those_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = CliProject(tmp_path).write()

    def run(*options: str) -> dict[str, int]:
        assert project.rowmill("build", *options) == main.ExitStatus.SUCCESS
        made = re.findall(r"^  [✓!] (\w+) +(\S+)", capsys.readouterr().out, re.MULTILINE)
        return Counter(stage for stage, time in made if time != "reused")

    assert project.rowmill("build", "--only", "packed_shards") == main.ExitStatus.INVALID
    assert "run `rowmill build small --until packed_shards`" in capsys.readouterr().err
    assert run("--until", "canonical_rows") == {"raw_dataset": 3, "canonical_rows": 3}
    assert run("--until", "packed_shards") == {"tokenized_examples": 3, "truncation_stats": 3, "packed_shards": 3}
    assert run("--until", "training_splits") == {"training_splits": 1}
    assert not (tmp_path / ".rowmill" / "small" / "gpu_partitions").exists()


@pytest.mark.slow
def test_build_until_an_export_makes_no_other_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = CliProject(tmp_path).write(exports=[{"kind": "native", "name": one} for one in ("one", "other")])

    assert project.rowmill("build", "--until", "exports/one") == main.ExitStatus.SUCCESS
    out = capsys.readouterr().out
    assert "✓ exports/one" in out
    assert "exports/other" not in out


@pytest.mark.parametrize("option", ["--only", "--until"])
def test_build_of_unknown_stage_names_the_nearest(
    built: CliProject, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert built.rowmill("build", option, "packed_shard") == main.ExitStatus.INVALID
    said = capsys.readouterr().err
    assert said.startswith(f"{option} packed_shard: no such stage; ")
    assert "did you mean packed_shards?" in said


@pytest.mark.slow
def test_build_with_a_failed_check_stops_with_number_threshold_and_remedy(
    copied: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    copied.write_recipe(gates=RECIPE["gates"] | {"rejects": {"at_most": 0.001}})

    assert copied.rowmill("build") == main.ExitStatus.GATE_CLOSED
    captured = capsys.readouterr()
    share = f"{100 / (CHATS + 1):.4g} %"
    assert f"small/chats/canonical_rows: rejects: {share}" in captured.err
    assert "wanted at most 0.1 %; correct the data" in captured.err
    assert "✗ canonical_rows" in captured.out


@pytest.mark.slow
def test_build_past_closed_gate_puts_each_step_below_its_dataset_and_writes_the_report(
    copied: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    copied.write_recipe(gates=RECIPE["gates"] | {"rejects": {"at_most": 0.001}})

    assert copied.rowmill("build") == main.ExitStatus.GATE_CLOSED
    lines = capsys.readouterr().out.splitlines()
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


@pytest.mark.slow
def test_command_that_a_closed_gate_prints_answers_for_its_recipe_dataset_and_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = CliProject(tmp_path).write(gates=RECIPE["gates"] | {"rejects": {"at_most": 0.001}})
    project.write_data("tasks.csv", "prompt,response\n,\nq,a\n")
    assert project.rowmill("build", "--root", str(tmp_path / "other place")) == main.ExitStatus.GATE_CLOSED
    found = re.search(r"small/chats/canonical_rows: rejects: .*`(rowmill sql [^`]+)`", capsys.readouterr().err)
    assert found is not None
    name, *arguments = shlex.split(found.group(1))
    arguments[arguments.index("small")] = project.recipe

    assert main.main([*arguments, "--format", "json"]) == main.ExitStatus.SUCCESS
    [line] = json.loads(capsys.readouterr().out)
    assert (name, line["reason"], line["records"]) == ("rowmill", "invalid_json", 1)


@pytest.mark.slow
def test_build_into_another_root_leaves_the_project_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = CliProject(tmp_path / "project").write()
    monkeypatch.setenv("ROWMILL_STORE", str(tmp_path / "elsewhere"))

    assert project.rowmill("build", "--only", "raw_dataset") == main.ExitStatus.SUCCESS
    assert (tmp_path / "elsewhere" / "small" / "tasks" / "raw_dataset" / "pointer.json").is_file()
    assert not (tmp_path / "project" / ".rowmill").exists()


# ── stats ──


@pytest.mark.slow
def test_stats_counts_what_build_counts_and_packs_nothing(
    built: CliProject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path / "other")
    assert built.rowmill("stats", "--root", root) == main.ExitStatus.SUCCESS
    out = capsys.readouterr().out
    query = "select dataset, original_tokens from examples order by all"

    assert f"chats  {CHATS + 1} records → {CHATS} rows → {CHATS} examples" in out
    assert f"tasks  {TASKS} records → {TASKS} rows → {TASKS} examples" in out
    assert not (tmp_path / "other" / "small" / "chats" / "packed_shards").exists()
    assert rows_of(built, query, capsys, "--root", root) == rows_of(built, query, capsys)


@pytest.mark.slow
def test_stats_show_quantiles_rejects_and_other_limits(built: CliProject, capsys: pytest.CaptureFixture[str]) -> None:
    assert built.rowmill("stats") == main.ExitStatus.SUCCESS
    out = capsys.readouterr().out
    what_if = rows_of(built, "select * from what_if where dataset = 'notes' and seq_len = 128", capsys)

    assert "p25 " in out
    assert "invalid_json" in out
    lines = [line.split() for line in out.split("\nnotes ")[1].splitlines()]
    [line] = [words for words in lines if words[:1] == ["128"] and "to" not in words]
    assert line[-1] == str(what_if[0]["sequences"])
    assert line[1] == str(NOTES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "status"), [((), main.ExitStatus.SUCCESS), (("--strict",), main.ExitStatus.PROBLEM_FOUND)]
)
def test_stats_with_hint_exit_3_only_when_strict(
    tmp_path: Path, options: tuple[str, ...], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    project = CliProject(tmp_path).write(seq_len=4096)

    assert project.rowmill("stats", *options) == status
    assert "lower seq_len to reduce VRAM usage" in capsys.readouterr().out


@pytest.mark.slow
def test_stats_strict_without_hint_exits_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = {"tasks": RECIPE["datasets"]["tasks"]}
    project = CliProject(tmp_path).write(seq_len=40, datasets=tasks)

    assert project.rowmill("stats", "--strict") == main.ExitStatus.SUCCESS
    assert "max_length to" not in capsys.readouterr().out


@pytest.mark.slow
def test_stats_after_a_closed_gate_still_show_the_numbers(
    copied: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    copied.write_recipe(gates=RECIPE["gates"] | {"rejects": {"at_most": 0}})

    assert copied.rowmill("stats") == main.ExitStatus.GATE_CLOSED
    captured = capsys.readouterr()
    assert "original length in tokens" in captured.out
    assert "wanted at most 0" in captured.err


# ── verify ──


@pytest.mark.slow
def test_verify_prints_failed_checks_and_counts_and_with_all_every_check(
    built: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = rows_of(built, "select outcome, count(*) as n from check_results group by 1", capsys)
    of = {str(one["outcome"]): one["n"] for one in counts}

    assert built.rowmill("verify") == main.ExitStatus.SUCCESS
    short = capsys.readouterr().out
    assert built.rowmill("verify", "--all") == main.ExitStatus.SUCCESS
    whole = capsys.readouterr().out

    def count_marks(text: str) -> dict[str, int]:
        marks = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and line.strip()]
        return {mark: marks.count(mark) for mark in ("✓", "!", "✗", "–")}

    assert count_marks(short) == {"✓": 0, "!": of.get("failed", 0), "✗": 0, "–": 0}
    assert count_marks(whole) == {
        "✓": of["passed"], "!": of.get("failed", 0), "✗": 0, "–": of["not_applicable"],
    }  # fmt: skip
    assert short.splitlines()[0] == whole.splitlines()[0]
    assert re.search(r"✓ rejects +2\.439 %  at most 5 %", whole)


@pytest.mark.slow
def test_verify_prints_every_check_and_exits_0(built: CliProject, capsys: pytest.CaptureFixture[str]) -> None:
    assert built.rowmill("verify", "--deep", "--facts") == main.ExitStatus.SUCCESS
    out = capsys.readouterr().out
    results = rows_of(built, "select count(*) as n, sum(passed::int)::int as passed from check_results", capsys)

    assert f"{results[0]['passed']} passed" in out
    assert "every digest matches" in out
    assert "trained_share" in out


@pytest.mark.slow
def test_verify_under_stricter_threshold_exits_1_with_remedy(
    copied: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    copied.write_recipe(gates=RECIPE["gates"] | {"rejects": {"at_most": 0}})

    assert copied.rowmill("verify") == main.ExitStatus.GATE_CLOSED
    out = capsys.readouterr().out
    assert "1 blocking" in out
    assert "✗ rejects" in out
    assert "→ correct the data or the format options" in out


@pytest.mark.slow
def test_verify_shows_waiver_instead_of_remedy(copied: CliProject, capsys: pytest.CaptureFixture[str]) -> None:
    waiver = {"check": "rejects", "dataset": "chats", "at_most": 0.5, "reason": "one broken line, known"}
    copied.write_recipe(gates=RECIPE["gates"] | {"rejects": {"at_most": 0}, "waivers": [waiver]})

    assert copied.rowmill("verify") == main.ExitStatus.SUCCESS
    out = capsys.readouterr().out
    assert "waived: one broken line, known" in out
    assert "1 waived" in out


@pytest.mark.slow
def test_verify_deep_names_the_file_with_one_changed_byte(
    copied: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = current(copied, "chats", "packed_shards").parts[0].files["shard"].path
    path = copied.folder / ".rowmill" / shard
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

    assert copied.rowmill("verify") == main.ExitStatus.SUCCESS
    assert re.search(r"\? [1-9]\d* files, \S+ kB not read: `rowmill verify small --deep`", capsys.readouterr().out)
    assert copied.rowmill("verify", "--deep") == main.ExitStatus.DAMAGED
    assert f"✗ {shard}: digest" in capsys.readouterr().out


@pytest.mark.slow
def test_verify_deep_says_that_files_of_earlier_versions_were_not_read(
    copied: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    assert copied.rowmill("verify", "--deep") == main.ExitStatus.SUCCESS
    assert "not read" not in capsys.readouterr().out
    older = current(copied, "chats", "canonical_rows").parts[0].files["rows"].path
    copied.append_chat(1000)
    assert copied.rowmill("build") == main.ExitStatus.SUCCESS
    (copied.folder / ".rowmill" / older).write_bytes(b"")
    capsys.readouterr()

    assert copied.rowmill("verify", "--deep") == main.ExitStatus.SUCCESS
    out = capsys.readouterr().out
    assert "read again: every digest matches" in out
    assert re.search(r"\? [1-9]\d* files, \S+ kB of earlier versions not read: they may be damaged", out)


@pytest.mark.slow
def test_verify_after_a_changed_option_was_built_knows_no_changed_options(
    copied: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    copied.write_recipe(seq_len=160)
    assert copied.rowmill("verify") == main.ExitStatus.SUCCESS
    assert "its options changed since: run rowmill build" in capsys.readouterr().out

    assert copied.rowmill("build") == main.ExitStatus.SUCCESS
    capsys.readouterr()
    assert copied.rowmill("verify") == main.ExitStatus.SUCCESS
    assert "its options changed" not in capsys.readouterr().out


@pytest.mark.slow
def test_verify_deep_names_a_missing_file(copied: CliProject, capsys: pytest.CaptureFixture[str]) -> None:
    rows = current(copied, "tasks", "canonical_rows").parts[0].files["rows"].path
    (copied.folder / ".rowmill" / rows).unlink()

    assert copied.rowmill("verify", "--deep") == main.ExitStatus.DAMAGED
    assert f"✗ {rows}: missing" in capsys.readouterr().out


def test_verify_of_nothing_built_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert CliProject(tmp_path).write().rowmill("verify") == main.ExitStatus.INVALID
    assert "nothing is built" in capsys.readouterr().err


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
def test_sql_answers_in_each_form(
    built: CliProject, form: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    query = "select dataset, count(*) as n from rows where dataset <> 'tasks' group by 1 order by 1"

    assert main.main(["sql", query, built.recipe, "--format", form]) == main.ExitStatus.SUCCESS
    shown = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in shown if line] == [line.strip() for line in wanted.splitlines()]


@pytest.mark.slow
def test_sql_with_a_recipe_answers_for_that_recipe_alone(
    copied: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(copied.recipe).with_name("other.yaml")
    other.write_text(
        yaml.safe_dump(RECIPE | {"datasets": {"notes": RECIPE["datasets"]["notes"]}}, sort_keys=False), encoding="utf-8"
    )
    assert main.main(["build", str(other)]) == main.ExitStatus.SUCCESS
    query = "select dataset, count(*) as n from rows group by all order by all"
    notes = [{"dataset": "notes", "n": NOTES}]

    assert rows_of(copied, query, capsys) == [
        {"dataset": "chats", "n": CHATS},
        *notes,
        {"dataset": "tasks", "n": TASKS},
    ]
    assert main.main(["sql", query, str(other), "--format", "json"]) == main.ExitStatus.SUCCESS
    assert json.loads(capsys.readouterr().out) == notes
    assert rows_of(copied, query, capsys, "--all-recipes") == [
        {"dataset": "chats", "n": CHATS},
        {"dataset": "notes", "n": 2 * NOTES},
        {"dataset": "tasks", "n": TASKS},
    ]
    assert (
        main.main(["sql", query, "--root", str(copied.folder / ".rowmill"), "--format", "csv"])
        == main.ExitStatus.SUCCESS
    )
    assert f"notes,{2 * NOTES}\n" in capsys.readouterr().out


def test_sql_finds_the_storage_by_root_alone(built: CliProject, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(built.folder / ".rowmill")

    assert (
        main.main(["sql", "select count(*) as n from rejects", "--root", root, "--format", "csv"])
        == main.ExitStatus.SUCCESS
    )
    assert capsys.readouterr().out == "n\n1\n"


@pytest.mark.slow
def test_sql_of_a_storage_root_imports_no_engine(built: CliProject) -> None:
    code = (
        "import sys; from rowmill.cli import main\n"
        f"main.main(['sql', 'select 7 as n', '--root', {str(built.folder / '.rowmill')!r}])\n"
        "heavy = ('polars', 'pydantic', 'rowmill.build', 'rowmill.checks', 'rowmill.recipe', 'rowmill.stages')\n"
        "print([name for name in heavy if name in sys.modules])"
    )

    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert shown.split() == ["n", "7", "1", "row", "[]"]


def test_sql_that_duckdb_refuses_names_the_views(built: CliProject, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["sql", "select * from row", built.recipe]) == main.ExitStatus.INVALID
    assert "the views are builds, check_results" in capsys.readouterr().err


def test_sql_without_statistics_makes_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["sql", "select 1", "--root", str(tmp_path / "none")]) == main.ExitStatus.INVALID
    assert "no statistics here" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def rows_in_statistics(project: CliProject) -> int:
    """Count the rows of a dataset in `stats.duckdb`, as any program that opens the file would."""
    with duckdb.connect(project.project.store.path("stats.duckdb"), read_only=True) as reader:
        [count] = reader.execute("select count(*) from rows where dataset = 'chats'").fetchone() or (0,)
    return int(count)


def test_statistics_file_answers_after_a_build(built: CliProject) -> None:
    assert rows_in_statistics(built) == CHATS


@pytest.mark.slow
def test_statistics_file_answers_after_a_closed_gate(tmp_path: Path) -> None:
    project = CliProject(tmp_path).write(gates=RECIPE["gates"] | {"rejects": {"at_most": 0}})

    assert project.rowmill("build", "--skip-preflight") == main.ExitStatus.GATE_CLOSED
    assert rows_in_statistics(project) == CHATS


@pytest.mark.slow
def test_statistics_file_that_is_gone_is_made_again_by_use(copied: CliProject) -> None:
    Path(copied.project.store.path("stats.duckdb")).unlink()
    version = current(copied, "chats", "raw_dataset").version

    assert copied.rowmill("use", "chats/raw_dataset", version) == main.ExitStatus.SUCCESS
    assert rows_in_statistics(copied) == CHATS


# ── versions, use, gc ──


@pytest.mark.slow
def test_use_holds_an_older_version_until_it_is_released_and_says_how_to_go_on(
    copied: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    first = current(copied, "chats", "raw_dataset").version
    copied.append_chat(1000)
    copied.rowmill("build")
    second = current(copied, "chats", "raw_dataset").version
    assert copied.rowmill("use", "chats/raw_dataset", first[:8]) == main.ExitStatus.SUCCESS
    said = capsys.readouterr().out
    assert copied.rowmill("versions", "chats/raw_dataset") == main.ExitStatus.SUCCESS
    out = capsys.readouterr().out

    assert first != second
    assert [line.split()[1] for line in out.splitlines() if line.lstrip().startswith("●")] == [first]
    assert second in out
    # The printed command makes what follows of the version in use, as a build of everything does.
    [stages] = re.findall(r"build small((?: --only \S+)+)", " ".join(said.split()))
    assert copied.rowmill("build", *stages.split()) == main.ExitStatus.SUCCESS
    assert current(copied, "chats", "canonical_rows").inputs["small/chats/raw_dataset"] == first
    copied.append_chat(2000)
    assert copied.rowmill("plan") == main.ExitStatus.SUCCESS
    assert f"raw_dataset held held at version {first[:12]}" in re.sub(" +", " ", capsys.readouterr().out)
    assert copied.rowmill("build") == main.ExitStatus.SUCCESS
    said = capsys.readouterr().out
    assert current(copied, "chats", "raw_dataset").version == first
    assert said.count(f"held at version {first[:12]}") == 2, "with its step, and at the end"
    assert copied.rowmill("use", "chats/raw_dataset", "--release") == main.ExitStatus.SUCCESS
    assert "chats/raw_dataset is released" in capsys.readouterr().out
    assert copied.rowmill("build") == main.ExitStatus.SUCCESS
    assert current(copied, "chats", "raw_dataset").version not in (first, second)


def test_use_without_a_version_or_release_says_what_it_takes(
    built: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    assert built.rowmill("use", "chats/raw_dataset") == main.ExitStatus.INVALID
    assert "use takes a version, or --release" in capsys.readouterr().err
    assert built.rowmill("use", "chats/raw_dataset", "--release") == main.ExitStatus.SUCCESS
    assert "is not held at a version" in capsys.readouterr().out


@pytest.mark.slow
def test_use_of_older_ranks_publishes_them_until_they_are_released(copied: CliProject) -> None:
    published = Path(copied.project.store.path("small/gpu_partitions/current.json"))
    before = json.loads(published.read_bytes())
    for number in range(1000, 1030):
        copied.append_chat(number)
    assert copied.rowmill("build") == main.ExitStatus.SUCCESS
    assert json.loads(published.read_bytes())["order"] != before["order"]

    assert copied.rowmill("use", "gpu_partitions", before["version"]) == main.ExitStatus.SUCCESS

    assert json.loads(published.read_bytes()) == before
    # The next nights keep it, and garbage collection too.
    copied.append_chat(2000)
    assert copied.rowmill("build") == main.ExitStatus.SUCCESS
    assert copied.rowmill("gc", "--keep", "1") == main.ExitStatus.SUCCESS
    assert json.loads(published.read_bytes()) == before
    assert copied.rowmill("use", "gpu_partitions", "--release") == main.ExitStatus.SUCCESS
    assert copied.rowmill("build") == main.ExitStatus.SUCCESS
    assert json.loads(published.read_bytes())["order"] != before["order"]


@pytest.mark.slow
def test_ranks_of_a_held_order_are_made_of_the_shards_that_it_orders(copied: CliProject) -> None:
    order = current(copied, "training_splits")
    for number in range(1000, 1030):
        copied.append_chat(number)
    assert copied.rowmill("build") == main.ExitStatus.SUCCESS
    newer = current(copied, "chats", "packed_shards").version
    assert order.inputs["small/chats/packed_shards"] != newer
    assert copied.rowmill("use", "training_splits", order.version) == main.ExitStatus.SUCCESS

    assert copied.rowmill("build") == main.ExitStatus.SUCCESS

    ranks = current(copied, "gpu_partitions")
    assert ranks.inputs["small/training_splits"] == order.version
    assert ranks.inputs["small/chats/packed_shards"] == order.inputs["small/chats/packed_shards"]
    assert current(copied, "chats", "packed_shards").version == newer


@pytest.mark.slow
def test_damage_to_a_held_version_is_an_error_that_names_the_way_out(copied: CliProject) -> None:
    held = current(copied, "chats", "canonical_rows")
    assert copied.rowmill("use", "chats/canonical_rows", held.version) == main.ExitStatus.SUCCESS
    for file in held.files("rows"):
        Path(copied.project.store.path(file.path)).unlink()
    copied.write_recipe(seq_len=64)

    with pytest.raises(IntegrityError, match=r"cannot be made again: .*chats/canonical_rows is held at version"):
        runner.build(copied.project)


@pytest.mark.slow
def test_use_of_unknown_version_lists_the_versions(copied: CliProject, capsys: pytest.CaptureFixture[str]) -> None:
    assert copied.rowmill("use", "chats/raw_dataset", "zzz") == main.ExitStatus.INVALID
    assert current(copied, "chats", "raw_dataset").version in capsys.readouterr().err


SHARED = "small/chats/tokenized_examples"


@pytest.mark.slow
def test_gc_keeps_what_is_current_and_what_that_was_made_of(
    copied: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    old = current(copied, "chats", "tokenized_examples")
    for number in (1000, 1001):
        copied.append_chat(number)
        assert copied.rowmill("build") == main.ExitStatus.SUCCESS
    kept = {stage: current(copied, "chats", stage).version for stage in ("canonical_rows", "packed_shards")}
    assert copied.rowmill("gc", "--keep", "1") == main.ExitStatus.SUCCESS
    store = copied.project.store

    assert [one.version for one in manifest.list_versions(store, ("small", "chats", "canonical_rows"))] == [
        kept["canonical_rows"]
    ]
    assert [one.version for one in manifest.list_versions(store, ("small", "chats", "packed_shards"))] == [
        kept["packed_shards"]
    ]
    # All but the one file that every part without rejects shares.
    own = {file.path for part in old.parts for file in part.files.values()} - {f"{SHARED}/no_rejects.arrow"}
    assert own
    assert not any(map(store.exists, own))
    assert copied.rowmill("verify", "--deep") == main.ExitStatus.SUCCESS
    capsys.readouterr()
    assert copied.rowmill("build") == main.ExitStatus.SUCCESS
    assert capsys.readouterr().out.count(" reused ") == STEPS
    assert rows_of(copied, "select distinct version from history.examples where dataset = 'chats'", capsys) == [
        {"version": current(copied, "chats", "tokenized_examples").version}
    ]


@pytest.mark.slow
def test_gc_keeps_an_old_version_that_was_made_current(copied: CliProject) -> None:
    first = current(copied, "chats", "canonical_rows").version
    copied.append_chat(1000)
    copied.rowmill("build")
    copied.rowmill("use", "chats/canonical_rows", first)

    assert copied.rowmill("gc", "--keep", "1") == main.ExitStatus.SUCCESS
    kept = {one.version for one in manifest.list_versions(copied.project.store, ("small", "chats", "canonical_rows"))}
    assert first in kept
    assert len(kept) == 2
    assert copied.rowmill("verify", "--deep") == main.ExitStatus.SUCCESS


@pytest.mark.slow
def test_gc_dry_run_names_what_would_go_and_removes_nothing(
    copied: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    copied.append_chat(1000)
    copied.rowmill("build")
    before = files_in(copied.folder)
    capsys.readouterr()

    assert copied.rowmill("gc", "--keep", "1", "--dry-run") == main.ExitStatus.SUCCESS
    assert "would remove" in capsys.readouterr().out
    assert files_in(copied.folder) == before


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ── Finding recipes, wrong input ──


def test_recipe_is_found_by_name_from_below_the_project(
    built: CliProject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(built.folder / "data")
    monkeypatch.delenv("ROWMILL_CONFIGS", raising=False)

    assert main.main(["plan", "small"]) == main.ExitStatus.SUCCESS
    assert f"{STEPS} reused" in capsys.readouterr().out


def test_unknown_recipe_error_lists_the_recipes_and_the_nearest(
    built: CliProject, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(built.folder)
    monkeypatch.delenv("ROWMILL_CONFIGS", raising=False)

    assert main.main(["build", "smalll"]) == main.ExitStatus.INVALID
    err = capsys.readouterr().err
    assert "smalll: no recipe of this name; there are small in" in err
    assert "did you mean small?" in err


def test_broken_recipe_says_where_what_allowed_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = CliProject(tmp_path).write(seq_length=128)

    assert project.rowmill("build") == main.ExitStatus.INVALID
    captured = capsys.readouterr()
    where, allowed, remedy = captured.err.strip().split("; ")
    assert where in (f"{project.recipe}.seq_length: unknown key", f"{project.recipe}: seq_length: unknown key")
    assert allowed.startswith("allowed here: ")
    assert remedy == "did you mean seq_len?"
    assert captured.out == ""


def test_unknown_stage_key_names_the_stages(built: CliProject, capsys: pytest.CaptureFixture[str]) -> None:
    assert built.rowmill("versions", "chats/rows") == main.ExitStatus.INVALID
    assert "small/chats/canonical_rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["build", "small", "--workers", "0"], ["inspect", "small", "-n", "-1"], ["bild"]]
)
def test_wrong_arguments_exit_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main(arguments)

    assert stopped.value.code == main.ExitStatus.INVALID


def test_help_imports_nothing_that_takes_time() -> None:
    code = (
        "import contextlib, io, sys; from rowmill.cli import main as cli\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): cli.main(['--help'])\n"
        "heavy = ('pydantic', 'numpy', 'pyarrow', 'duckdb', 'rich', 'yaml', 'asyncio')\n"
        "print([name for name in heavy if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_plan_of_a_built_recipe_imports_what_forecasts_need_and_nothing_of_other_commands(built: CliProject) -> None:
    code = (
        "import contextlib, io, sys; from rowmill.cli import main as cli\n"
        f"with contextlib.redirect_stdout(io.StringIO()): cli.main(['plan', {built.recipe!r}])\n"
        "heavy = ('asyncio', 'duckdb', 'gigatoken', 'pandas', 'tokenizers', 'transformers', 'rowmill.build.gc',\n"
        "  'rowmill.inspection.diff', 'rowmill.inspection.verify', 'rowmill.reader', 'rowmill.reports.statistics')\n"
        "print([name for name in heavy if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_output_for_a_pipe_has_no_escape_sequences(built: CliProject, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("plan", "build", "stats", "verify"):
        built.rowmill(verb)

    assert "\x1b" not in capsys.readouterr().out


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
    arguments: tuple[str, ...], fields: set[str], built: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    assert built.rowmill(*arguments, "--json") == main.ExitStatus.SUCCESS

    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"recipe", "store", *fields}
    assert found["recipe"] == "small"


@pytest.mark.slow
def test_json_of_a_build_past_a_closed_gate_has_its_steps_and_causes(
    copied: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    copied.write_recipe(gates=RECIPE["gates"] | {"rejects": {"at_most": 0.001}})

    assert copied.rowmill("build", "--json") == main.ExitStatus.GATE_CLOSED
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    failed = [one for step in found["steps"] for one in step["checks"] if one["blocking"]]
    assert found["closed"] is True
    assert [(one["check"], one["value"]) for one in failed] == [("rejects", pytest.approx(1 / (CHATS + 1)))]
    assert "data/chats.jsonl line 3" in failed[0]["causes"][0]
    assert "not built because of that: chats/tokenized_examples" in captured.err
    assert Path(found["report"]).is_file()


@pytest.mark.slow
def test_json_of_verify_and_versions_agrees_with_the_views(
    built: CliProject, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = rows_of(built, "select outcome, count(*) as n from check_results group by 1 order by 1", capsys)
    assert built.rowmill("verify", "--json") == main.ExitStatus.SUCCESS
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert built.rowmill("versions", "tasks/canonical_rows", "--json") == main.ExitStatus.SUCCESS
    versions = json.loads(capsys.readouterr().out)

    outcomes = [one["outcome"] for stage in stages for one in stage["checks"]]
    assert [{"outcome": name, "n": outcomes.count(name)} for name in sorted(set(outcomes))] == counts
    assert versions["current"] == versions["versions"][0]["version"]
    assert versions["versions"][0]["facts"]["kept"] == TASKS
