"""Words for terminals: numbers, durations, what is harmless to print, the short report, and progress."""

import io
import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from rowmill.build import runner
from rowmill.build.gc import GarbageItem
from rowmill.build.steps import open_project, plan_steps
from rowmill.core import arrays
from rowmill.core.console import PIPE_WIDTH, escape_control_characters, format_value, make_grid
from rowmill.reports import console, progress, summary
from rowmill.reports.build_view import load_build_view
from tests.support.cli_project import CHATS, NOTES, RECIPE, TASKS, CliProject


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=PIPE_WIDTH, markup=False, emoji=False, highlight=False)


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def said(screen: Console) -> list[str]:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


# ── Numbers and words ──


@pytest.mark.parametrize(
    ("write", "numbers"),
    [
        (format_value, {0: "0", 1342: "1,342", 0.05466: "0.05466", None: "", True: "True", "a\x1bb": "a␛b"}),
        (arrays.format_seconds, {0.04: "0.0 s", 59.9: "59.9 s", 61: "1 min 01 s", 3600 * 3 + 600: "3 h 10 min"}),
        (arrays.format_size, {0: "0 bytes", 999: "999 bytes", 1000: "1.0 kB", 2_500_000_000: "2.5 GB",
                              3e15: "3000.0 TB"}),
        (progress.format_short_number, {0: "0", 999.4: "999", 999.6: "1k", 12_340: "12.3k", 1.24e6: "1.24M",
                                        7e9: "7G"}),
    ],
)  # fmt: skip
def test_numbers_are_written_for_people(write: Callable[[Any], str], numbers: dict[Any, str]) -> None:
    assert {number: write(number) for number in numbers} == numbers
    assert format_value(1342.0) == "1,342"
    assert (arrays.format_percent(0, 0), arrays.format_percent(1, 3)) == (arrays.NO_NUMBER, "33.3 %")


def test_row_ids_are_links_on_a_terminal_that_a_viewer_serves_and_plain_text_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row_id = f"{'0a' * 8}:12"

    def print_on(screen: Console) -> str:
        screen.print(console.link_rows(f"see {row_id}#0, and \x1b[2J", "demo"))
        return "\n".join(said(screen))

    def make_terminal() -> Console:
        return Console(file=io.StringIO(), force_terminal=True, width=200, color_system="truecolor")

    assert print_on(make_terminal()) == f"see {row_id}#0, and ␛[2J"
    monkeypatch.setenv("ROWMILL_VIEWER_URL", "http://127.0.0.1:3001")
    linked = re.sub(r"id=\d+", "", print_on(make_terminal()))
    assert f"\x1b]8;;http://127.0.0.1:3001/demo/rows/{row_id}\x1b\\{row_id}#0\x1b]8;;\x1b\\" in linked
    assert print_on(plain_console()) == f"see {row_id}#0, and ␛[2J"


@given(st.text())
def test_visible_text_moves_no_cursor_and_keeps_every_line(text: str) -> None:
    shown = escape_control_characters(text)
    assert {character for character in shown if unicodedata.category(character) == "Cc"} <= {"\n", "\t"}
    assert shown.count("\n") == text.count("\n")
    assert escape_control_characters(shown) == shown


def test_grid_sets_numbers_to_the_right_and_cuts_nothing_in_a_pipe() -> None:
    screen = plain_console()
    long = "x" * 3000
    screen.print(make_grid(["name", "count", "share"], [("a", 5, "1.0 %"), (long, 1234, "100.0 %")], indent=0))
    head, first, second = said(screen)
    assert second.split() == [long, "1,234", "100.0 %"[:5], "%"]
    assert first.index("5") == head.index("count") + 4
    assert first.rstrip().endswith("  1.0 %")
    screen = plain_console()
    screen.print(make_grid(["reason"], [("[red]no[/red] :smile:",)], indent=0))
    assert said(screen)[1].strip() == "[red]no[/red] :smile:"


def test_several_things_to_remove_have_their_plural() -> None:
    kinds = ("staged copy", "note of changes", "share's versions", "part")
    garbage = [GarbageItem(("mini", "rows", "raw_dataset"), kind, kind, 1) for kind in kinds for _ in range(2)]
    screen = Console(file=io.StringIO(), width=200)
    screen.print(console.render_collected(garbage, dry_run=True))

    assert isinstance(screen.file, io.StringIO)
    assert "2 staged copies · 2 notes of changes · 2 shares' versions · 2 parts" in screen.file.getvalue()


# ── The short report ──
@pytest.mark.slow
def test_summary_adds_up_every_dataset_and_says_why_where_and_what_next(small: CliProject, tmp_path: Path) -> None:
    text = summary.summarize_recipe(small.project)
    lines = [line.split() for line in text.splitlines()]
    rows = {line[0]: line[1:4] for line in lines if line and line[0] in ("chats", "tasks", "notes", "all")}

    assert rows == {
        "chats": [str(CHATS + 1), str(CHATS), "1"],
        "tasks": [str(TASKS), str(TASKS), "0"],
        "notes": [str(NOTES), str(NOTES), "0"],
        "all": [str(CHATS + 1 + TASKS + NOTES), str(CHATS + TASKS + NOTES), "1"],
    }
    assert "1 invalid_json" in text
    assert str(small.folder / ".rowmill" / "small" / "{chats,tasks,notes}" / "packed_shards") in text
    assert "every applicable check passed" in text
    assert "rowmill inspect small -n 2" in text
    assert "--root" not in text
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(small.folder / ".rowmill", elsewhere)
    text = summary.summarize_recipe(open_project(Path(small.recipe), str(elsewhere)))
    assert f"rowmill stats small --root {elsewhere}" in text


@pytest.mark.slow
def test_warning_of_a_build_is_printed_in_full_once(tmp_path: Path) -> None:
    project = CliProject(tmp_path).write(gates=RECIPE["gates"] | {"fill": {"at_least": 1}})
    out = " ".join(project.run("build").out.split())
    failed = summary.find_failed_checks(load_build_view(project.project))
    assert {one.check for one in failed} == {"fill"}
    assert out.count(failed[0].remedy) == len(failed)
    assert f"{len(failed)} warnings, shown above: chats/packed_shards fill {failed[0].shown}, " in out


@pytest.mark.slow
def test_summary_says_what_training_will_see(tmp_path: Path) -> None:
    mixture = {"batch_size": 4, "steps": 5, "train_weights": {"chats": 0.5, "tasks": 0.25, "notes": 0.25}}
    project = CliProject(tmp_path).write(mixture=mixture)
    project.run("build")
    splits = project.current("training_splits")
    first, *epochs = load_build_view(project.project).describe_training()
    shown = dict(re.findall(r"^(\w+): ([\d.]+) epoch", line)[0] for line in epochs)
    unseen = [int(found[1]) for line in epochs if (found := re.search(r"; (\d+) of its", line))]
    sequences = {row[0]: row[3] for row in splits.tables["splits"].rows if row[1] == "train"}
    assert {name: round(float(text) * sequences[name]) for name, text in shown.items()} == {
        "chats": 10, "tasks": 5, "notes": 5,
    }  # fmt: skip
    assert sum(unseen) == sum(count for state, _, count in splits.ledger if state == "not_scheduled") > 0
    assert first.startswith("20 sequences in 5 steps; ")


def test_step_s_line_does_not_deny_that_documents_are_longer_than_the_limit(small: CliProject) -> None:
    line = console.summarize_output(small.current("notes", "truncation_stats"))
    assert "over 128" not in line
    assert line.endswith("longer than 128 is cut by packing, not truncated")


@pytest.mark.slow
def test_summary_of_half_a_build_shows_what_is_there_and_how_to_go_on(tmp_path: Path) -> None:
    project = CliProject(tmp_path).write()
    project.run("build", "--only", "raw_dataset")
    text = summary.summarize_recipe(project.project)
    assert "rowmill build small" in text
    assert arrays.NO_NUMBER in text


# ── Progress ──
def test_rates_show_speed_and_remaining_time() -> None:
    meter = progress.RateMeter()
    # The first part took 20 s, 18 of which went to opening the tokenizer.
    said_of = [
        meter.describe("chats/tokenized_examples", rows=rows, total_rows=5000, tokens=50 * rows, seconds=seconds)
        for rows, seconds in [(0, 0.0), (200, 20.0), (1200, 30.0), (5000, 68.0)]
    ]
    next_stage = meter.describe("chats/packed_shards", rows=10, total_rows=40, tokens=0, seconds=2.0)

    assert said_of == [
        "starting",
        "10 rows/s, 500 tokens/s",
        "100 rows/s, 5k tokens/s, 38.0 s left",
        "100 rows/s, 5k tokens/s, 0.0 s left",
    ]
    assert next_stage == "5 rows/s"


def test_progress_without_terminal_prints_every_five_seconds(small: CliProject) -> None:
    project, screen, aside = small.project, plain_console(), plain_console()
    steps = plan_steps(project)
    with progress.BuildProgress(project, steps, screen, aside) as watch:
        watch.begin(steps[0])
        for second in range(1, 13):
            rows, seconds = 100 * second, float(second)
            watch("chats/raw_dataset", done=second, total=24, rows=rows, total_rows=2400, tokens=0, seconds=seconds)

    assert said(aside) == [
        "chats/raw_dataset: 5 of 24 parts, 100 rows/s, 19.0 s left",
        "chats/raw_dataset: 10 of 24 parts, 100 rows/s, 14.0 s left",
    ]
    assert [line.strip() for line in said(screen) if "chats" in line] == ["chats"]


def show_lines(lines: progress.DatasetLines, width: int) -> list[str]:
    """Return the live lines that a terminal would show now."""
    screen = Console(file=io.StringIO(), width=width, color_system=None)
    screen.print(lines.live.get_renderable())
    return [line.strip() for line in said(screen)]


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_has_a_line_for_each_dataset_until_its_last_step(small: CliProject, width: int) -> None:
    steps = [step for step in plan_steps(small.project) if step.dataset in ("chats", "notes")]
    steps = [step for step in steps if step.name in ("raw_dataset", "canonical_rows")]
    lines = progress.DatasetLines(steps, terminal(width))
    waiting = show_lines(lines, width)
    lines.begin("chats", "raw_dataset")
    begun = show_lines(lines, width)
    lines.update("chats/raw_dataset", 500, 1000, "830 rows/s, 12.3k tokens/s, 4.0 s left")
    running = show_lines(lines, width)
    lines.finish(steps[0])
    lines.begin("chats", "canonical_rows")
    second = show_lines(lines, width)
    lines.finish(steps[1])
    lines.begin("notes", "raw_dataset")
    last = show_lines(lines, width)

    assert [line.split() for line in waiting] == [[name, "waits", "0", "of", "2"] for name in ("chats", "notes")]
    assert begun[0].split()[1:6] == ["chats", "raw_dataset", "0", "of", "2"]
    assert running[0].endswith("830 rows/s, 12.3k tokens/s, 4.0 s left")
    assert ("━" in running[0]) == (width == 120)
    assert running[1].split() == ["notes", "waits", "0", "of", "2"]
    assert second[0].split()[1:6] == ["chats", "canonical_rows", "1", "of", "2"]
    assert [line.split()[1:3] for line in last] == [["notes", "raw_dataset"]]


def test_line_appears_for_progress_of_a_step_that_was_not_begun(small: CliProject) -> None:
    steps = [step for step in plan_steps(small.project) if step.name in ("raw_dataset", "training_splits")]
    lines, of_one = (progress.DatasetLines(shown, terminal(100)) for shown in (steps, steps[:1]))
    lines.update("notes/raw_dataset", 1, 2, "5 rows/s")
    one = show_lines(lines, 100)
    lines.update("training_splits", 1, 2, "7 rows/s")
    other = show_lines(lines, 100)
    of_one.update("training_splits", 1, 2, "7 rows/s")

    assert [line.split() for line in show_lines(of_one, 100)] == [["chats", "waits", "0", "of", "1"]]
    assert [line.split()[1:3] for line in one if "rows/s" in line] == [["notes", "raw_dataset"]]
    assert [line.split()[1:4] for line in other if "rows/s" in line] == [["all", "datasets", "training_splits"]]


def test_progress_on_a_terminal_leaves_only_finished_steps(small: CliProject) -> None:
    project, screen = small.project, terminal(120)
    steps = plan_steps(project)[:1]
    with progress.BuildProgress(project, steps, screen, plain_console()) as watch:
        watch.begin(steps[0])
        watch("chats/raw_dataset", done=1, total=2, rows=10, total_rows=20, tokens=0, seconds=1.0)
        report = runner.run_step(project, steps[0], {})
        watch.finish(steps[0], report, runner.check_step(project, steps[0], report.manifest))
    shown = Text.from_ansi("\n".join(said(screen))).plain
    assert f"reused  {CHATS + 1} records · 1 file · 1 part" in shown
