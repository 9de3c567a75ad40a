"""Two versions side by side: which rows came and went, and which numbers they moved."""

import html
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.build import comparison
from rowmill.build.comparison import BuildChanges, CheckChange, Moves, ScopeComparison
from rowmill.cli.error_boundary import ExitStatus
from rowmill.core.errors import GateError
from rowmill.core.storage import File
from rowmill.reports import report_page, summary
from rowmill.reports.build_view import describe_changes, load_build_view
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest
from tests.support.cli_project import run
from tests.support.recipes import CHAT, LENIENT, PAIR, Workspace, chat, lines, pair


def versions(workspace: Workspace, *key: str) -> list[Manifest]:
    return manifest.list_versions(workspace.project.store, ("mini", *key))


def compared(workspace: Workspace, *key: str) -> dict[str | None, ScopeComparison]:
    """Compare a stage's oldest version with its newest."""
    kept = versions(workspace, *key)
    return {one.scope: one for one in comparison.compare_versions(workspace.project, kept[0], kept[-1])}


def numbers(one: ScopeComparison) -> dict[str, tuple[float | None, float | None]]:
    return {line.name: (line.before, line.after) for line in one.lines}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Build two datasets, then again with three other chats, two copies of one more, and shorter rows allowed."""
    workspace = Workspace(tmp_path_factory.mktemp("versions"))
    chats, filters = [chat(i, turns=3) for i in range(30)], {"deduplicate": "off"}
    datasets = {
        "chats": workspace.dataset("chats.jsonl", chats, filters=filters),
        "pairs": workspace.dataset("pairs.jsonl", [pair(i) for i in range(20)], PAIR),
    }
    workspace.recipe(datasets).build()
    workspace.write("chats.jsonl", [chat(i, turns=3) for i in [*range(3, 30), 100, 101, 101]])
    workspace.recipe(datasets, seq_len=128).build()
    return workspace


@pytest.mark.slow
def test_orders_of_two_builds_show_added_and_removed_rows_and_shares_of_each_dataset(workspace: Workspace) -> None:
    found = compared(workspace, "training_splits")
    assert {name: one.rows and (one.rows.added, one.rows.removed) for name, one in found.items()} == {
        "chats": (3, 3), "pairs": (0, 0), None: None,
    }  # fmt: skip
    shares = [numbers(one)["share of the order"] for name, one in found.items() if name is not None]
    for which in (0, 1):
        assert sum(one[which] or 0 for one in shares) == pytest.approx(1)
    assert set(compared(workspace, "chats", "packed_shards")) == {"chats"}
    newest = versions(workspace, "training_splits")[-1]
    for one in comparison.compare_versions(workspace.project, newest, newest):
        assert one.rows in (Moves(), None)
        assert one.tokens in (Moves(), None)
        assert all(line.before == line.after for line in one.lines)


def test_numbers_are_those_of_both_manifests(workspace: Workspace) -> None:
    found = {name: numbers(one) for name, one in compared(workspace, "gpu_partitions").items()}
    stats = versions(workspace, "chats", "truncation_stats")
    packed = versions(workspace, "pairs", "packed_shards")
    truncated = tuple(one.facts["context_overflow"] for one in stats)
    assert found["chats"]["longer than the context"] == truncated
    assert truncated[0] < truncated[1]
    assert found["pairs"]["fill"] == tuple(one.facts["fill"] for one in packed)
    assert found[None]["ranks"] == (2, 2)


def test_collected_inputs_are_left_out(workspace: Workspace) -> None:
    old, rows = versions(workspace, "chats", "packed_shards")[0], versions(workspace, "chats", "canonical_rows")[0]
    copies = {path: path.read_bytes() for path in workspace.store.glob(f"mini/*/*/*/*{rows.fingerprint}.json")}
    assert len(copies) == 2
    for path in copies:
        path.unlink()
    try:
        [found] = comparison.compare_versions(workspace.project, old, versions(workspace, "chats", "packed_shards")[-1])
    finally:
        for path, content in copies.items():
            path.write_bytes(content)

    assert found.rows is None
    assert numbers(found)["rows"][0] is None
    assert numbers(found)["sequences"][0] == old.facts["sequences"]


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=6), st.lists(st.integers(0, 4), max_size=6))
def test_rows_added_and_removed_are_the_difference_of_what_was_read(
    tmp_path_factory: pytest.TempPathFactory, before: list[int], after: list[int]
) -> None:
    workspace = Workspace(tmp_path_factory.mktemp("any"))
    made: list[Manifest] = []
    for rows in (before, after):
        workspace.one("rows.jsonl", [chat(9), *(chat(i) for i in rows)], filters={"deduplicate": "off"})
        built = workspace.build(only=["raw_dataset", "canonical_rows"])
        made.append(built.manifest("rows", "canonical_rows"))
    [found] = comparison.compare_versions(workspace.project, *made)
    assert found.rows is not None
    assert found.rows.added == (Counter(after) - Counter(before)).total()
    assert found.rows.removed == (Counter(before) - Counter(after)).total()


def test_diff_shows_both_versions_by_the_beginning_of_their_names(workspace: Workspace) -> None:
    old, new = versions(workspace, "training_splits")
    names = [str(workspace.config), "training_splits", old.version[:8], new.version[:8]]
    shown = run("diff", *names).out
    assert f"before  {old.version}" in shown
    assert f"after   {new.version}" in shown
    assert "rows by content: 3 added, 3 removed" in shown
    assert run("diff", *names[:3]).out == shown
    refused = run("diff", *names[:2], "zzzz", status=ExitStatus.INVALID)
    assert old.version in refused.err


def test_folder_of_a_project_is_not_needed_by_the_comparison_itself(workspace: Workspace, tmp_path: Path) -> None:
    """Versions are compared from what is kept: the source files may be gone."""
    source = workspace.folder / "data" / "chats.jsonl"
    aside = tmp_path / "aside"
    source.rename(aside)
    try:
        found = compared(workspace, "training_splits")
    finally:
        aside.rename(source)

    assert found["chats"].rows == Moves(3, 3, 0)


# ── Since the last build ───────────────────────────────────────────────────────────────────────────


def find_changes(workspace: Workspace) -> BuildChanges:
    changes = load_build_view(workspace.project).changes
    assert changes is not None
    return changes


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Publish a build of two datasets, then one with a new, a changed and a gone file, then one without changes."""
    workspace = Workspace(tmp_path_factory.mktemp("nights"))
    for name, first in (("a", 0), ("b", 10), ("c", 20)):
        workspace.write(f"chats/{name}.jsonl", [chat(i) for i in range(first, first + 10)])
    workspace.write("pairs.jsonl", [pair(i) for i in range(20)])
    datasets: dict[str, dict[str, Any]] = {
        "chats": {"source": {"train_urls": ["data/chats/*.jsonl"]}, "format": CHAT},
        "pairs": {"source": {"train_urls": ["data/pairs.jsonl"]}, "format": PAIR},
    }
    workspace.recipe(datasets).build()
    assert load_build_view(workspace.project).changes is None
    workspace.write("chats/b.jsonl", [chat(i) for i in range(12, 20)])
    workspace.write("chats/d.jsonl", [chat(i) for i in range(40, 45)])
    (workspace.folder / "data/chats/c.jsonl").unlink()
    workspace.build()
    workspace.build()
    return workspace


def test_published_build_notes_files_rows_and_tokens_of_the_datasets_that_changed(nights: Workspace) -> None:
    changes = find_changes(nights)
    [chats] = changes.datasets

    assert chats.dataset == "chats"
    assert (chats.files.new, chats.files.gone, chats.files.changed) == (1, 1, 1)
    assert [f"{name.split()[0]} {Path(name).name}" for name in chats.files.named] == [
        "new d.jsonl", "gone c.jsonl", "changed b.jsonl",
    ]  # fmt: skip
    assert chats.rows == Moves(added=5, removed=12)
    # What went and came of the ids that a model sees, counted from the examples of both builds.
    tokens = [
        Counter(tuple(row["input_ids"]) for file in version.files("examples") for row in read_rows(nights, file))
        for version in versions(nights, "chats", "tokenized_examples")
    ]
    assert chats.tokens.added == sum(len(ids) for ids in tokens[1] - tokens[0])
    assert chats.tokens.removed == sum(len(ids) for ids in tokens[0] - tokens[1])
    assert {shift.distribution for shift in chats.shifts} >= {"lengths", "roles", "turns", "languages", "trained share"}


def test_changes_are_computed_once_and_stay_with_their_build(
    nights: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a published build is not compared again")

    before = find_changes(nights)
    monkeypatch.setattr(comparison, "_count_moves", refuse)
    nights.build()

    assert find_changes(nights) == before
    ranks = versions(nights, "gpu_partitions")[-1]
    assert (nights.store / f"mini/gpu_partitions/changes/{ranks.version}.json").stat().st_size < 4_000


def test_sentences_and_report_show_the_changes(nights: Workspace) -> None:
    [first, *_] = describe_changes(find_changes(nights))
    report_page.write_report(nights.project)
    page = nights.project.store.read(report_page.report_path("mini")).decode()

    assert ": files: 1 new, 1 gone, 1 changed; rows +5 -12; tokens +" in first
    assert "<h2>Since the last build</h2>" in page
    assert first in html.unescape(page)
    assert first in " ".join(summary.summarize_recipe(nights.project).split())


@pytest.mark.slow
def test_build_that_is_blocked_shows_what_changed_and_which_check_fails(tmp_path: Path) -> None:
    gates = LENIENT | {"rejects": {"at_most": 0.1}, "shrunk": {"at_most": 0.1, "severity": "warn"}}
    workspace = Workspace(tmp_path).one("rows.jsonl", [chat(i) for i in range(20)], gates=gates)
    workspace.build()
    published = versions(workspace, "gpu_partitions")[-1].version
    workspace.write("rows.jsonl", b"".join([lines([chat(i) for i in range(10)]), b'{"messages": [\n' * 10]))
    with pytest.raises(GateError):
        workspace.build()
    blocked = find_changes(workspace)
    workspace.write("rows.jsonl", [chat(i) for i in range(22)])
    workspace.build()
    mended = find_changes(workspace)

    assert blocked.version == mended.version == published
    assert blocked.datasets[0].rows == Moves(removed=10)
    assert blocked.datasets[0].tokens == Moves()
    assert blocked.checks == (
        CheckChange("rows/canonical_rows", "rejects", "", "50 %"),
        CheckChange("rows/canonical_rows", "shrunk", "", "50 % (a warning)"),
    )
    assert mended.datasets[0].rows == Moves(added=2)
    assert {one.stage for one in mended.checks} <= {"training_splits"}


@pytest.mark.slow
def test_rows_that_go_to_another_split_are_counted_as_moved(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    rows = [chat(i) for i in range(40)]
    for seed in (1, 2):
        workspace.one("rows.jsonl", rows, splits={"validation": 0.5, "test": 0, "seed": seed}).build()
    [changed] = find_changes(workspace).datasets
    in_split = [
        {row["content_hash"]: row["split"] for file in one.files("rows") for row in read_rows(workspace, file)}
        for one in versions(workspace, "rows", "canonical_rows")
    ]

    assert changed.rows == Moves(moved=sum(in_split[0][name] != in_split[1][name] for name in in_split[0]))
    assert changed.rows.moved > 5
    assert changed.tokens.moved > changed.rows.moved


def read_rows(workspace: Workspace, file: File) -> list[dict[str, Any]]:
    return workspace.project.store.table(file).to_pylist()


@pytest.mark.slow
def test_moves_are_the_same_however_many_rows_are_compared_at_once(
    nights: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = versions(nights, "gpu_partitions")
    whole = comparison.compare_versions(nights.project, kept[0], kept[-1])
    monkeypatch.setattr(comparison, "ROWS_AT_ONCE", 3)

    assert comparison.compare_versions(nights.project, kept[0], kept[-1]) == whole


@pytest.mark.slow
def test_damaged_file_of_the_last_build_hides_no_report_and_prevents_no_publication(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [chat(i) for i in range(20)])
    workspace.build()
    [rows] = versions(workspace, "rows", "canonical_rows")
    (workspace.store / rows.files("rows")[0].path).write_bytes(b"")
    workspace.write("rows.jsonl", [chat(i) for i in range(30, 50)])
    workspace.build(only=["raw_dataset", "canonical_rows"])
    report_page.write_report(workspace.project)
    page = workspace.project.store.read(report_page.report_path("mini")).decode()

    assert versions(workspace, "rows", "canonical_rows")[-1].version[:12] in page
    assert "Since the last build" not in page
    workspace.build()
    published = json.loads((workspace.store / "mini/gpu_partitions/current.json").read_text())
    assert str(versions(workspace, "gpu_partitions")[-1].version) in json.dumps(published)
    assert load_build_view(workspace.project).changes is None
