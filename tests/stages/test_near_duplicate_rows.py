"""`filters.near_duplicates` in a build: which rows go, in any order of files, and what is said of them."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rowmill.stages.canonical_rows import near_duplicate_rows
from rowmill.stats.views import query_views
from tests.support.recipes import CHAT, TEXT, TO_ROWS, Built, Workspace, sentence

SMALL = {"ngram": 2, "min_words": 1}


def text(i: int, *, changed: int = 0, more: int = 0) -> dict[str, Any]:
    """Return a document of 60 words, `changed` of which are replaced, and `more` at its end."""
    words = [f"w{(i * 31 + k * k) % 997}" for k in range(60)]
    for k in range(changed):
        words[k * 20] = f"other{k}"
    return {"text": " ".join([*words, *(f"more{k}" for k in range(more))])}


def build(folder: Path, rows: Sequence[Any], *, kind: Any = TEXT, **options: Any) -> Built:
    filters = {"deduplicate": "off", "near_duplicates": options}
    return Workspace(folder).one("rows.jsonl", rows, kind, filters=filters).build(only=TO_ROWS)


def kept_texts(built: Built) -> list[str]:
    return [row["text"] for row in built.rows_of("rows", "canonical_rows", file="rows")]


def test_the_shorter_of_two_similar_rows_goes_from_the_threshold_on(tmp_path: Path) -> None:
    built = build(tmp_path, [{"text": "a b c d e f"}, {"text": "a b c d e"}, {"text": "a b c d f"}], **SMALL)

    [row_id] = [row["row_id"] for row in built.rows_of("rows", "canonical_rows", file="rows")][:1]
    assert built.rejects() == [(1, "near_duplicate")]
    assert [json.loads(detail) for detail in built.details()] == [{"row_id": row_id, "similarity": 0.8}]
    facts = built.facts("rows", "canonical_rows")
    assert (facts["near_duplicates"], facts["displaced"], facts["rejects"], facts["accounted"]) == (
        pytest.approx(1 / 3),
        0,
        0,
        0,
    )


@pytest.mark.slow
def test_the_same_rows_stay_in_any_order_of_files_and_a_second_time(tmp_path: Path) -> None:
    rows = [text(i, changed=changed, more=more) for i in range(3) for changed, more in ((0, 0), (1, 0), (0, 3), (3, 1))]
    orders = [rows, rows[::-1], rows[5:] + rows[:5]]

    kept = [kept_texts(build(tmp_path / str(k), one)) for k, one in enumerate(orders)]

    assert 3 < len(kept[0]) < len(rows)
    assert {frozenset(one) for one in kept} == {frozenset(kept[0])}
    again = build(tmp_path / "again", [{"text": one} for one in kept[0]])
    assert (again.rejects(), kept_texts(again)) == ([], kept[0])


@pytest.mark.slow
def test_files_in_another_order_and_many_parts_leave_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [text(i // 2, changed=i % 2) for i in range(60)]
    filters = {"near_duplicates": {}}
    found: list[set[str]] = []
    # Small buckets: what one bucket finds is found in many.
    for lines, order in itertools.product((1 << 22, 16), ((0, 1, 2), (2, 0, 1))):
        monkeypatch.setattr(near_duplicate_rows, "BLOCK_LINES", lines)
        workspace = Workspace(tmp_path / f"{lines}-{order[0]}")
        contents = {f"{place}-{k}.jsonl": rows[k::3] for place, k in enumerate(order)}
        workspace.recipe({"rows": workspace.files(contents, TEXT, filters=filters)})
        found.append(set(kept_texts(workspace.build(only=TO_ROWS))))

    assert len(found[0]) == 30
    assert all(one == found[0] for one in found)


def test_an_appended_longer_copy_takes_the_place_of_an_earlier_row(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [text(0), text(1)], TEXT, filters={"near_duplicates": {}})
    first = workspace.build(only=TO_ROWS)

    workspace.write("rows.jsonl", [text(0), text(1), text(0, more=4)])
    second = workspace.build(only=TO_ROWS)

    assert (first.rejects(), second.rejects()) == ([], [(0, "near_duplicate")])
    facts = [built.facts("rows", "canonical_rows") for built in (first, second)]
    assert [one["displaced"] for one in facts] == [0, 1]


def test_short_rows_are_left_alone(tmp_path: Path) -> None:
    rows = [{"text": sentence(1, 18)}, {"text": sentence(1, 18).upper()}]

    assert len(kept_texts(build(tmp_path / "short", rows))) == 2
    assert len(kept_texts(build(tmp_path / "long", rows, min_words=19))) == 1


@pytest.mark.slow
def test_view_and_page_show_what_goes_beside_what_stays(tmp_path: Path) -> None:
    rows = [text(0, more=2), text(1), text(0, more=1), text(0)]
    built = build(tmp_path, rows)

    ids = [f"{row['row_id']}" for row in built.rows_of("rows", "canonical_rows", file="rows")]
    select = "select kept_row_id, count(*), bool_or(displaced) from near_duplicate_groups group by all"
    assert query_views(built.project.store, select)[1] == [(ids[0], 2, False)]
    table = built.manifest("rows", "canonical_rows").tables["near_duplicates"]
    assert table.columns == ("row_id", "text", "kept_row_id", "kept_text", "similarity")
    assert [(line[2], line[4]) for line in table.rows] == [(ids[0], 0.9655), (ids[0], 0.9828)]
    assert [line[1][:5] for line in table.rows] == [rows[3]["text"][:5], rows[2]["text"][:5]]


def test_messages_are_one_text_and_tools_do_not_count(tmp_path: Path) -> None:
    turns = [{"role": role, "content": sentence(k, 12)} for k, role in enumerate(("user", "assistant") * 3)]
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
    swapped = [turns[2], turns[1], turns[0], turns[3], turns[4], turns[5]]
    rows = [{"messages": turns}, {"messages": turns, "tools": [tool]}, {"messages": swapped}]

    built = build(tmp_path, rows, kind=CHAT)

    assert [reason for _, reason in built.rejects()] == ["near_duplicate"]
    assert built.rejects()[0][0] in (0, 1)


@pytest.mark.slow
def test_another_threshold_or_a_report_does_not_sign_the_parts_again(tmp_path: Path) -> None:
    def list_signed() -> set[Path]:
        return set((tmp_path / ".rowmill").rglob("bands.arrow"))

    rows = [text(0), text(0, changed=1)]
    first = build(tmp_path, rows)
    signed = list_signed()
    second = build(tmp_path, rows, threshold=1.0)

    assert [built.facts("rows", "canonical_rows")["kept"] for built in (first, second)] == [1, 2]
    assert len(signed) == 1
    assert list_signed() == signed

    built = build(tmp_path, rows, action="report")

    made = built.manifest("rows", "canonical_rows")
    assert (built.rejects(), made.facts["kept"], made.facts["near_duplicates"]) == ([], 2, 0.5)
    assert query_views(built.project.store, "select count(*) from near_duplicate_groups")[1] == [(1,)]


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize(
    ("file", "rows", "gone"),
    [("tools/glaive_toolcall_en_demo.json", 300, 40), ("chat/fastchat_dummy_conversation.json", 500, 29)],
)
def test_real_dialogues_lose_their_variants(tmp_path: Path, real_data: Path, file: str, rows: int, gone: int) -> None:
    workspace = Workspace(tmp_path)
    workspace.one(
        "rows.json", (real_data / file).read_bytes(), CHAT, filters={"deduplicate": "off", "near_duplicates": {}}
    )
    facts = workspace.build(only=TO_ROWS).facts("rows", "canonical_rows")

    assert (facts["kept"], facts["rejected"]) == (rows - gone, gone)
