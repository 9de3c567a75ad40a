"""Two versions side by side: which rows came and went, and which numbers they moved."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.build import comparison
from rowmill.build.comparison import ScopeComparison
from rowmill.cli.error_boundary import ExitStatus
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest
from tests.support.cli_project import run
from tests.support.recipes import CHAT, PAIR, Workspace, chat, pair


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
    workspace.write("chats.jsonl", [chat(i, turns=3) for i in range(30)])
    workspace.write("pairs.jsonl", [pair(i) for i in range(20)])
    datasets = {
        "chats": {"source": {"train_urls": ["data/chats.jsonl"]}, "format": CHAT, "filters": {"deduplicate": "off"}},
        "pairs": {"source": {"train_urls": ["data/pairs.jsonl"]}, "format": PAIR},
    }
    workspace.recipe(datasets).build()
    workspace.write("chats.jsonl", [chat(i, turns=3) for i in [*range(3, 30), 100, 101, 101]])
    workspace.recipe(datasets, seq_len=128).build()
    return workspace


@pytest.mark.slow
def test_orders_of_two_builds_show_added_and_removed_rows_of_each_dataset(workspace: Workspace) -> None:
    found = compared(workspace, "training_splits")
    assert {name: (one.added, one.removed) for name, one in found.items()} == {
        "chats": (3, 3), "pairs": (0, 0), None: (None, None),
    }  # fmt: skip


def test_numbers_are_those_of_both_manifests(workspace: Workspace) -> None:
    found = {name: numbers(one) for name, one in compared(workspace, "gpu_partitions").items()}
    stats = versions(workspace, "chats", "truncation_stats")
    packed = versions(workspace, "pairs", "packed_shards")

    truncated = tuple(one.facts["context_overflow"] for one in stats)
    assert found["chats"]["longer than the context"] == truncated
    assert truncated[0] < truncated[1]
    assert found["pairs"]["fill"] == tuple(one.facts["fill"] for one in packed)
    assert found[None]["ranks"] == (2, 2)


def test_shares_of_the_order_add_up_to_one_in_each_version(workspace: Workspace) -> None:
    found = [numbers(one) for name, one in compared(workspace, "training_splits").items() if name is not None]
    for which in (0, 1):
        assert sum(one["share of the order"][which] or 0 for one in found) == pytest.approx(1)


def test_versions_of_one_dataset_compare_only_that_dataset(workspace: Workspace) -> None:
    assert set(compared(workspace, "chats", "packed_shards")) == {"chats"}


def test_version_compared_with_itself_has_no_difference(workspace: Workspace) -> None:
    newest = versions(workspace, "training_splits")[-1]
    for one in comparison.compare_versions(workspace.project, newest, newest):
        assert one.added in (0, None)
        assert one.removed in (0, None)
        assert all(line.before == line.after for line in one.lines)


def test_collected_inputs_are_left_out(workspace: Workspace) -> None:
    old, rows = versions(workspace, "chats", "packed_shards")[0], versions(workspace, "chats", "canonical_rows")[0]
    path = workspace.store / f"mini/chats/canonical_rows/versions/{rows.version}.json"
    content = path.read_bytes()
    path.unlink()
    try:
        [found] = comparison.compare_versions(workspace.project, old, versions(workspace, "chats", "packed_shards")[-1])
    finally:
        path.write_bytes(content)

    assert found.added is None
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
    assert found.added == (Counter(after) - Counter(before)).total()
    assert found.removed == (Counter(before) - Counter(after)).total()


def test_diff_shows_both_versions_by_the_beginning_of_their_names(workspace: Workspace) -> None:
    old, new = versions(workspace, "training_splits")
    names = [str(workspace.config), "training_splits", old.version[:8], new.version[:8]]

    shown = run("diff", *names).out
    assert f"before  {old.version}" in shown
    assert f"after   {new.version}" in shown
    assert "rows by content: 3 added, 3 removed" in shown
    assert run("diff", *names[:3]).out == shown


def test_diff_with_an_unknown_version_names_those_there_are(workspace: Workspace) -> None:
    refused = run("diff", str(workspace.config), "training_splits", "zzzz", status=ExitStatus.INVALID)
    assert versions(workspace, "training_splits")[0].version in refused.err


def test_folder_of_a_project_is_not_needed_by_the_comparison_itself(workspace: Workspace, tmp_path: Path) -> None:
    """Versions are compared from what is kept: the source files may be gone."""
    source = workspace.folder / "data" / "chats.jsonl"
    aside = tmp_path / "aside"
    source.rename(aside)
    try:
        found = compared(workspace, "training_splits")
    finally:
        aside.rename(source)

    assert found["chats"].added == 3
