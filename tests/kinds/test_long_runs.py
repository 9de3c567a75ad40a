"""`source.limits.max_run_chars`: rows with a text in which a run of one class of characters is too long."""

import base64
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.kinds.shared.filters import find_long_run, reject_long_run
from tests.support.recipes import CHAT, PAIR, TEXT, TO_ROWS, Built, Workspace, chat, document, lines, pair
from tests.support.tables import RECORDS, as_csv

LIMIT = 1000
LETTERS, BLANKS, SIGNS, HAN = "a" * 1001, " " * 1001, "-" * 1001, "一" * 1001
CHINESE = "机器学习是人工智能的一个分支，其目的是让计算机从数据中学习。" * 900
THAI = "ภาษาไทยเป็นภาษาที่มีระดับเสียงของคำแน่นอนหรือวรรณยุกต์เช่นเดียวกับภาษาจีนและออกเสียงแยกคำต่อคำ" * 300
BASE64 = base64.b64encode(random.Random(1).randbytes(60_000)).decode()
MINIFIED = "function f(a,b){return a+b*g(a)};" * 900


def scan(text: str, limit: int) -> tuple[int, int] | None:
    """Find the first run that is too long, character by character."""
    begin, of = 0, ""
    for at, char in enumerate([*text, ""]):
        now = "space" if char.isspace() else "word" if char.isalnum() or char == "_" else "sign"
        if at and (now != of or not char):
            if at - begin > limit:
                return begin, at - begin
            begin = at
        of = now
    return None


@given(
    st.lists(st.tuples(st.sampled_from("aé一 \n-。"), st.integers(1, 12))).map(
        lambda runs: "".join(c * n for c, n in runs)
    ),
    st.integers(2, 9),
)
def test_first_run_over_the_limit_is_found(text: str, limit: int) -> None:
    assert find_long_run(text, limit) == scan(text, limit)


@pytest.mark.parametrize("text", [LETTERS, BLANKS, SIGNS, HAN, f"x {LETTERS[:-1]}1 y", f"{CHINESE}{HAN}{CHINESE}"])
def test_text_without_a_border_is_rejected(text: str) -> None:
    found = reject_long_run([{"content": [{"text": text}]}], LIMIT)

    assert found is not None
    assert found.reason == "too_long_run"
    assert "source.limits.max_run_chars is 1,000" in found.detail


@pytest.mark.parametrize("text", [CHINESE, THAI, BASE64, MINIFIED, f"{LETTERS[:-1]} {LETTERS[:-1]}"])
def test_long_texts_with_borders_are_kept(text: str) -> None:
    assert len(text) > LIMIT
    assert reject_long_run([text], LIMIT) is None


SIDES: dict[str, Any] = {"prompt": "Why?", "chosen": "It is so.", "rejected": "It is not."}
TABLE: list[dict[str, Any]] = [{"a": "x", "b": "1"}, {"a": "y", "b": "2"}]
KINDS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "chat": ({"messages": [*chat(0)["messages"][:1], {"role": "assistant", "content": LETTERS}]}, chat(1), CHAT),
    "chat-with-system": ({"system": LETTERS, **chat(0)}, chat(1), CHAT),
    "pair": ({**pair(0), "answer": SIGNS}, pair(1), PAIR),
    "text": ({"text": f"one{BLANKS}two"}, document(1), TEXT),
    "preference": ({**SIDES, "rejected": f"No.{chr(10) * 1001}No."}, SIDES, {"kind": "preference"}),
    "table": ({"a": HAN, "b": "1"}, TABLE[1], RECORDS),
}


def limited(workspace: Workspace, name: str, content: bytes, form: Mapping[str, Any]) -> Built:
    return workspace.one(name, content, form, source={"limits": {"max_run_chars": LIMIT}}).build(only=TO_ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_row_with_a_long_run_is_rejected_and_its_record_kept(tmp_path: Path, kind: str) -> None:
    bad, good, form = KINDS[kind]
    built = limited(Workspace(tmp_path), "rows.jsonl", lines([bad, good]), form)

    assert built.rejects() == [(0, "too_long_run")]
    assert orjson.loads(built.rejected_rows()[0]["raw"]) == bad
    assert len(built.rows_of("rows", "canonical_rows", file="rows")) == 1


def test_cell_of_a_csv_file_may_have_no_long_run_and_a_column_that_is_not_read_may(tmp_path: Path) -> None:
    cells = limited(Workspace(tmp_path), "rows.csv", as_csv([*TABLE, {"a": LETTERS, "b": "3"}]), RECORDS)
    unread = limited(Workspace(tmp_path), "a.jsonl", lines([{**document(0), "image": LETTERS}, document(1)]), TEXT)

    assert (cells.rejects(), unread.rejects()) == ([(2, "too_long_run")], [])


def test_limit_decides_rows_and_reads_no_file_again(tmp_path: Path) -> None:
    workspace, rows = Workspace(tmp_path), lines([document(0), {"text": LETTERS}])
    before = workspace.one("rows.jsonl", rows, TEXT).build(only=TO_ROWS)
    after = limited(workspace, "rows.jsonl", rows, TEXT)

    assert before.rejects() == []
    assert after.made() == {"rows/canonical_rows"}
    assert after.rejects() == [(1, "too_long_run")]
