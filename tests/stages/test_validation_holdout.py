"""Validation by number of sequences: whole groups by hash until there are enough; the surplus trains nobody."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.errors import ConfigError
from rowmill.inspection import trace
from rowmill.kinds.shared.splits import Splits, Splitter
from rowmill.stages.packed_shards.split_plans import hold_out_groups
from rowmill.stats.views import query_views
from tests.support.recipes import CHAT, TEXT, Built, Workspace, chat, document, lines


def carved(groups: list[tuple[int, int]], wanted: int) -> list[int] | None:
    """Carve from examples given as (u, room); return the numbers of those chosen."""
    u = np.array([one for one, _ in groups], np.uint64)
    room = np.array([one for _, one in groups], np.int64)
    chosen = hold_out_groups(u, room, np.ones(len(groups), np.bool_), wanted)
    return None if chosen is None else np.flatnonzero(chosen).tolist()


def test_groups_enter_whole_in_ascending_hash_until_they_fill_enough() -> None:
    examples = [(13, 400), (2, 300), (11, 500), (5, 900)]

    assert carved(examples, 1500) == [1, 2, 3]
    assert carved(examples, 1200) == [1, 3]
    assert carved(examples, 1) == [1]
    assert carved(examples, 2101) is None

    assert carved([(7, 1), (3, 1), (7, 1), (9, 1)], 2) == [0, 1, 2]


@given(
    groups=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50)), min_size=1, max_size=40),
    wanted=st.integers(1, 300),
)
def test_carving_takes_the_fewest_first_groups_that_suffice(groups: list[tuple[int, int]], wanted: int) -> None:
    chosen = carved(groups, wanted)
    room: Counter[int] = Counter()
    for u, size in groups:
        room[u] += size

    if chosen is None:
        assert sum(room.values()) < wanted
        return
    taken = {groups[i][0] for i in chosen}
    assert taken == set(sorted(room)[: len(taken)])
    assert sum(room[u] for u in taken) >= wanted > sum(room[u] for u in taken if u != max(taken))
    assert chosen == [i for i, (u, _) in enumerate(groups) if u in taken]


# ── Whole builds ───────────────────────────────────────────────────────────────────────────────────

WANTED = {"packed": 3, "single": 6, "texts": 2}


def rows_of_users(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [chat(first + i, words=4 + i % 9) | {"user": f"u{i % 17}"} for i in range(count)]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("carved"))
    bad = {"messages": [{"role": "user", "content": "unanswered"}], "user": "u3"}
    by_user = {"splits": {"group_key": "user"}}
    others, alone = rows_of_users(60, first=500), {"pack": False}
    return workspace.recipe(
        {
            "packed": workspace.dataset("chats.jsonl", [*rows_of_users(120), bad], **by_user),
            "single": workspace.dataset("others.jsonl", others, **by_user, packing=alone),
            "texts": workspace.dataset("texts.jsonl", [document(i, words=30) for i in range(60)], TEXT),
        },
        defaults={"splits": {"validation": 0.3}},
        mixture={"num_validation_sequences": WANTED},
        partitions={"world_size": 1},
        exports=[{"name": "held", "kind": "astrai_bin", "split": "validation"}],
    )


@pytest.fixture(scope="module")
def built(workspace: Workspace) -> Built:
    return workspace.build()


def segments_of(built: Built, dataset: str, split: str) -> set[str]:
    rows = built.rows_of(dataset, "packed_shards", file="segments")
    return {row["example_id"] for row in rows if row["split"] == split}


@pytest.mark.slow
@pytest.mark.parametrize("dataset", list(WANTED))
def test_examples_fill_as_many_sequences_as_asked_for_and_are_in_one_split_or_left_out(
    built: Built, dataset: str
) -> None:
    splits = {row[1]: row[3] for row in built.manifest(dataset, "packed_shards").tables["splits"].rows}

    assert splits["validation"] == WANTED[dataset]
    assert splits["train"] > 0
    assert built.facts(dataset, "packed_shards")["conservation"] == 0

    examples = {row["example_id"] for row in built.examples(dataset)}
    train, held = segments_of(built, dataset, "train"), segments_of(built, dataset, "validation")
    gone = {
        row["example_id"] for row in built.rows_of(dataset, "packed_shards", file="left_out") if row["state"] != "kept"
    }

    assert train | held | gone == examples
    assert len(train) + len(held) + len(gone) == len(examples)
    assert sum(count for _, _, count in built.manifest(dataset, "packed_shards").ledger) == len(examples)


@pytest.mark.parametrize("dataset", ["packed", "single"])
def test_no_group_is_on_both_sides_and_the_surplus_on_none(built: Built, dataset: str) -> None:
    user = {row["row_id"]: row["group_key"] for row in built.rows_of(dataset, "canonical_rows", file="rows")}
    train, held = (
        {user[name.split("#")[0]] for name in segments_of(built, dataset, split)} for split in ("train", "validation")
    )
    left = built.rows_of(dataset, "packed_shards", file="left_out")
    surplus = [row for row in left if row["state"] == "validation_surplus"]

    assert train & held == set()
    assert {user[row["row_id"]] for row in surplus} & train == set()
    assert ("validation_surplus", "", len(surplus)) in built.manifest(dataset, "packed_shards").ledger
    assert all(row["tokens"] == row["of_tokens"] for row in surplus)
    # Taken in the order of the hash: all that are held out come before all that train.
    splitter = Splitter(Splits(group_key="user"))
    assert max(splitter.hash_unit(one, b"") for one in held) < min(splitter.hash_unit(one, b"") for one in train)


@pytest.mark.slow
def test_carved_validation_is_exported_leaks_nothing_and_its_surplus_is_traced_and_asked_for(built: Built) -> None:
    assert built.facts("exports", "held")["conservation"] == 0

    # A rejected row of a group that is held out is no row of train, so nothing seems to leak.
    facts = built.facts("training_splits")

    assert built.facts("packed", "tokenized_examples")["rejected"] == 1
    assert (facts["same_group"], facts["same_row"]) == (0, 0)

    left = built.rows_of("packed", "packed_shards", file="left_out")
    row_id = next(row["row_id"] for row in left if row["state"] == "validation_surplus")
    traces = [one for one in trace.trace_row(built.project, row_id) if one.dataset == "packed"]

    assert [(fate.stage, fate.state) for fate in traces[0].fates][-1] == ("packed_shards", "validation_surplus")
    assert traces[0].places == ()

    sql = "select state, count(*), sum(tokens) from left_out where state = 'validation_surplus' group by all"
    left = [row for name in WANTED for row in built.rows_of(name, "packed_shards", file="left_out")]
    surplus = [row["tokens"] for row in left if row["state"] == "validation_surplus"]

    assert query_views(built.project.store, sql)[1] == [("validation_surplus", len(surplus), sum(surplus))]


@pytest.mark.slow
def test_second_build_reuses_everything_and_another_number_only_packs_again(workspace: Workspace, built: Built) -> None:
    assert workspace.build().made() == set()

    other = Workspace(workspace.folder)
    values = dict(WANTED, packed=4)
    text = other.config.read_text(encoding="utf-8")
    other.config.write_text(text.replace("packed: 3", f"packed: {values['packed']}"), encoding="utf-8")
    assert other.build().made() == {"packed/packed_shards", "training_splits", "gpu_partitions", "exports/held"}


# ── What cannot be ─────────────────────────────────────────────────────────────────────────────────


def test_number_of_more_sequences_than_there_are_is_refused(tmp_path: Path) -> None:
    held = {"num_validation_sequences": {"rows": 90}}
    workspace = Workspace(tmp_path).one("chats.jsonl", rows_of_users(6), mixture=held)

    with pytest.raises(ConfigError, match=r"num_validation_sequences\.rows: 90 sequences; .* fill \d+; lower it"):
        workspace.build()


@pytest.mark.slow
def test_number_beside_a_validation_split_that_the_hub_has_is_refused(tmp_path: Path) -> None:
    """Whether a dataset has such a split is known only once it is read."""
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(lines(rows_of_users(4)))
    (folder / "validation.jsonl").write_bytes(lines(rows_of_users(2, first=50)))
    dataset = {"source": {"id": str(folder)}, "format": CHAT}
    workspace = Workspace(tmp_path).recipe({"rows": dataset}, mixture={"num_validation_sequences": {"rows": 1}})

    with pytest.raises(ConfigError, match="the source has rows for validation of its own"):
        workspace.build()
