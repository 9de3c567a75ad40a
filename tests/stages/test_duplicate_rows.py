"""`filters.deduplicate` over many parts: buckets of many blocks find what one process finds that holds all rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.executors import LocalPool
from rowmill.parts.accounts import rewrite_parts
from rowmill.schema.counts import compute_share
from rowmill.schema.manifest import Part
from rowmill.stages.base import StageContext
from rowmill.stages.canonical_rows import duplicate_rows
from rowmill.stages.canonical_rows.duplicate_rows import match_repeats
from tests.support.recipes import CHAT, TEXT, TO_ROWS, Built, Workspace, lines

pytestmark = [pytest.mark.usefixtures("small_parts"), pytest.mark.slow]

FILES = 4


def text(i: int) -> dict[str, Any]:
    """Return a document of 5 KB: 40 of them are a file that has parts of its own."""
    return {"text": f"document {i} " * 400}


ROWS = [text(i * i % 60) for i in range(40 * FILES)]
"""Most rows repeat an earlier one: of their own file, of the one before, or of the first."""
CONTENTS = [lines(ROWS[begin : begin + 40]) for begin in range(0, len(ROWS), 40)]


def build(folder: Path, contents: Sequence[bytes], kind: Any = TEXT, **filters: Any) -> Built:
    workspace = Workspace(folder)
    ending = "json" if contents[0].startswith(b"[") else "jsonl"
    named = {f"{number}.{ending}": content for number, content in enumerate(contents)}
    return workspace.recipe({"rows": workspace.files(named, kind, filters=filters)}).build(only=TO_ROWS)


def list_hashes(folder: Path) -> set[Path]:
    return set((folder / ".rowmill").rglob("bucket-*.arrow"))


@pytest.mark.parametrize("deduplicate", ["exact", "prefix200"])
def test_buckets_of_many_blocks_write_what_one_block_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deduplicate: str
) -> None:
    whole = build(tmp_path / "whole", CONTENTS, deduplicate=deduplicate)
    monkeypatch.setattr(duplicate_rows, "DUPLICATE_BLOCK_ROWS", 30)
    in_blocks = build(tmp_path / "blocks", CONTENTS, deduplicate=deduplicate)

    texts = [row["text"] for row in in_blocks.rows_of("rows", "canonical_rows", file="rows")]
    assert texts == list(dict.fromkeys(row["text"] for row in ROWS))
    # Fingerprints, paths and bytes are the same, so a dataset that grows past a block keeps its parts.
    assert in_blocks.digests() == whole.digests()
    assert in_blocks.versions() == whole.versions()
    assert len(list_hashes(tmp_path / "blocks")) > FILES
    assert len(list_hashes(tmp_path / "whole")) == 1


def test_appended_rows_leave_the_hashes_of_other_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicate_rows, "DUPLICATE_BLOCK_ROWS", 30)
    first = build(tmp_path, CONTENTS[:3], deduplicate="exact")
    hashed = list_hashes(tmp_path)
    second = build(tmp_path, CONTENTS, deduplicate="exact")

    assert hashed < list_hashes(tmp_path)
    made_of = [set(built.manifest("rows", "canonical_rows").details["made_of"]) for built in (first, second)]
    # Garbage collection spares what a manifest names here.
    assert {path.parent.name for path in hashed} <= made_of[0]
    assert {path.parent.name for path in list_hashes(tmp_path)} <= made_of[1]
    kept = [built.facts("rows", "canonical_rows")["kept"] for built in (first, second)]
    assert kept == [len({row["text"] for row in ROWS[:end]}) for end in (120, 160)]


def test_part_that_stays_is_not_read(tmp_path: Path) -> None:
    project = Workspace(tmp_path).one("rows.jsonl", CONTENTS[0], TEXT).project
    key = ("mini", "rows", "canonical_rows")
    context = StageContext(project.store, project.base, key, "rows", {}, LocalPool(1), recipe=project.recipe)
    part = Part("of which nothing is kept", {}, {})

    assert rewrite_parts(context, [part], [None], context.dataset.format) == [part]


@given(st.lists(st.tuples(st.sampled_from((0, 1, 1 << 63)), st.integers(0, 2)), max_size=30))
def test_repeats_are_matched_with_the_first_of_a_plain_loop(pairs: list[tuple[int, int]]) -> None:
    """Few values, so that hashes agree in one half only, too."""
    hashes = np.array(pairs, np.uint64).reshape(-1, 2)
    expected = [(place, pairs.index(pair)) for place, pair in enumerate(pairs) if pair in pairs[:place]]

    assert [*zip(*(found.tolist() for found in match_repeats(hashes)), strict=True)] == expected


@pytest.mark.real_data
def test_a_second_copy_of_real_dialogues_goes_whole(
    tmp_path: Path, real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (real_data / "tools/glaive_toolcall_en_demo.json").read_bytes()
    once = build(tmp_path / "once", [content], CHAT).facts("rows", "canonical_rows")
    monkeypatch.setattr(duplicate_rows, "DUPLICATE_BLOCK_ROWS", 100)
    twice = build(tmp_path / "twice", [content, content], CHAT).facts("rows", "canonical_rows")

    assert (once["records"], once["kept"], once["rejected"]) == (300, 265, 35)
    assert (twice["records"], twice["kept"], twice["rejected"]) == (600, 265, 335)


def test_numbers_of_rows_and_parts_are_those_of_the_rows_that_are_left(tmp_path: Path) -> None:
    """Three hundred equal chats are one row, so two with an unknown role are two of three."""
    said = {"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "Yes."}
    others = [{"messages": [{"role": "critic", "content": f"Hm {i}."}, *said]} for i in range(2)]
    built = build(tmp_path, [lines([{"messages": list(said)}] * 300), lines(others)], CHAT)

    made = built.manifest("rows", "canonical_rows")
    unknown = built.result("unknown_roles", "rows", "canonical_rows")

    assert (made.facts["kept"], made.facts["rejected"]) == (3, 299)
    assert made.facts["unknown_roles"] == unknown.value == pytest.approx(2 / 3)
    assert made.tables["schemas"].rows == (("messages", 3),)
    assert made.tables["unknown_roles"].rows == (("critic", 2),)
    assert dict(made.tables["roles"].rows) == {"assistant": 3, "critic": 2, "user": 3}

    rows = [
        {"messages": [{"role": role, "content": f"{role} {i % 7}"} for role in ("User", "assistant")]}
        for i in range(20)
    ]
    whole = build(tmp_path / "whole", [lines(rows)], CHAT)
    distinct = build(tmp_path / "distinct", [lines(rows[:7])], CHAT)

    found = [one.facts("rows", "canonical_rows") for one in (whole, distinct)]
    same = ("kept", "notes", "splits", "messages", "user_messages", "unknown_roles", "tools_present")

    assert found[0]["notes"] == {"role_name_case": 7}
    assert [found[0][name] for name in same] == [found[1][name] for name in same]


@pytest.mark.parametrize(("count", "total"), [(3, 2), (1, 0)])
def test_share_above_one_is_a_mistake_of_ours(count: int, total: int) -> None:
    with pytest.raises(ValueError, match="is no share"):
        compute_share(count, total)
