"""Splits by time over whole builds: boundaries from shares, groups across a boundary, nothing later in train."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowmill.core.errors import ConfigError
from tests.support.recipes import TO_ROWS, Built, Workspace, chat


def dated(i: int, when: object, group: str | None = None) -> dict[str, Any]:
    return chat(i) | {"when": when, "user": group}


def split_of(built: Built) -> dict[int, str]:
    """Return the split of each record by its number in the one source file."""
    rows = built.rows_of("rows", "canonical_rows", file="rows")
    return {int(row["row_id"].rsplit(":", 1)[1]): row["split"] for row in rows}


def built_of(folder: Path, rows: list[dict[str, Any]], **splits: Any) -> Built:
    return Workspace(folder).one("rows.jsonl", rows, splits={"time_key": "when", **splits}).build(only=TO_ROWS)


def test_shares_of_time_are_resolved_recorded_and_split_like_boundaries_that_are_pinned(tmp_path: Path) -> None:
    rows = [dated(i, f"2024-01-{1 + (i * 7) % 20:02d}") for i in range(20)]
    built = built_of(tmp_path / "shares", rows, validation=0.1, test=0.15)
    facts = built.facts("rows", "canonical_rows")
    (_, results) = built.steps[("rows", "canonical_rows")]

    assert facts["boundaries"] == {"validation": "2024-01-16", "test": "2024-01-18"}
    assert facts["splits"] == {"test": 3, "train": 15, "validation": 2}
    assert [(one.check, one.value) for one in results if one.failed] == [("unpinned_boundaries", 2)]
    assert all((rows[i]["when"] >= "2024-01-18") is (split == "test") for i, split in split_of(built).items())

    pinned = built_of(tmp_path / "pinned", rows, boundaries=facts["boundaries"])

    assert split_of(pinned) == split_of(built)
    assert pinned.facts("rows", "canonical_rows")["unpinned_boundaries"] == 0


def test_gap_and_groups_on_both_sides_of_a_boundary_are_rejected_if_configured(tmp_path: Path) -> None:
    built = built_of(tmp_path, [dated(i, i) for i in range(20)], validation=0, test=0.25, gap=3)

    assert built.facts("rows", "canonical_rows")["boundaries"] == {"test": 15}
    assert built.rejects() == [(13, "split_gap"), (14, "split_gap")]

    built = built_of(tmp_path, STRADDLING, boundaries=BOUNDARIES, group_key="user", crossing_groups="reject")

    assert split_of(built) == {0: "train", 1: "train", 4: "validation"}
    assert built.rejects() == [(i, "straddles_split") for i in (2, 3, 5, 6)]
    assert built.facts("rows", "canonical_rows")["accounted"] == 0
    # Configured, so not a defect of the data.
    assert built.facts("rows", "canonical_rows")["rejects"] == 0


STRADDLING = [
    dated(0, 1, "early"),
    dated(1, 3, "early"),
    dated(2, 8, "torn"),
    dated(3, 12, "torn"),
    dated(4, 15, "late"),
    dated(5, 4, "far"),
    dated(6, 25, "far"),
]
BOUNDARIES = {"validation": 10, "test": 20}
BY_TIME_AND_USER = {"time_key": "when", "boundaries": BOUNDARIES, "group_key": "user"}


@pytest.mark.slow
def test_group_on_both_sides_of_a_boundary_goes_to_the_later_split(tmp_path: Path) -> None:
    built = Workspace(tmp_path).one("rows.jsonl", STRADDLING, splits=BY_TIME_AND_USER).build()
    splits = split_of(built)

    assert [splits[i] for i in range(7)] == ["train", "train", *["validation"] * 3, "test", "test"]
    assert built.facts("training_splits")["same_group"] == 0
    assert built.facts("training_splits")["time_order"] == 0


def test_group_across_two_files_gets_one_split(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    dataset = workspace.files({f"{i}.jsonl": [row] for i, row in enumerate(STRADDLING)}, splits=BY_TIME_AND_USER)
    built = workspace.recipe({"rows": dataset}).build(only=TO_ROWS)
    found: dict[str, set[str]] = {}
    for row in built.rows_of("rows", "canonical_rows", file="rows"):
        found.setdefault(row["group_key"], set()).add(row["split"])

    assert found == {'"early"': {"train"}, '"torn"': {"validation"}, '"late"': {"validation"}, '"far"': {"test"}}


def test_time_key_with_a_validation_source_is_refused(tmp_path: Path) -> None:
    splits = {"time_key": "when", "boundaries": {"test": 5}}

    with pytest.raises(ConfigError, match="one of the two may say what is held out"):
        Workspace(tmp_path).one("a.jsonl", [dated(0, 1)], held=[dated(1, 2)], splits=splits).build()


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abcdef")), min_size=1, max_size=12),
    crossing_groups=st.sampled_from(["later", "reject"]),
)
def test_no_group_leaks_and_no_later_row_trains(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, str]], crossing_groups: str
) -> None:
    source = [dated(i, when, group) for i, (when, group) in enumerate(rows)]
    options = {"boundaries": BOUNDARIES, "group_key": "user", "crossing_groups": crossing_groups}
    splits = split_of(built_of(tmp_path_factory.mktemp("time"), source, **options))
    by_group = {
        group: {splits[i] for i, (_, own) in enumerate(rows) if own == group and i in splits} for _, group in rows
    }

    assert all(len(found) <= 1 for found in by_group.values())
    assert all(rows[i][0] < BOUNDARIES["validation"] for i, split in splits.items() if split == "train")
    assert all(rows[i][0] < BOUNDARIES["test"] for i, split in splits.items() if split == "validation")
