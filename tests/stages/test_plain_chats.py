"""Plain chats of a part, whose columns are made together: the same files and facts as from one record at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rowmill.kinds.reading.canonicalization import Canonicalizer
from rowmill.stages.canonical_rows.text_rows import RowColumns
from tests.support.recipes import CHAT, TO_ROWS, Built, Workspace, chat, lines

pytestmark = pytest.mark.slow


def other(i: int) -> dict[str, Any]:
    """Return a record that is no plain chat: it has reasoning, tools, an unknown role, or is rejected."""
    messages = chat(i)["messages"]
    return (
        {"messages": [messages[0], {"role": "assistant", "content": f"<think>well</think>{i} İstanbul"}]},
        {"messages": messages, "tools": [{"name": "f", "parameters": {}}]},
        {"messages": [*messages, {"role": "critic", "content": "hm"}]},
        {"messages": [messages[0], {"role": "assistant", "content": " "}]},
        {"messages": messages, "label": False},
    )[i % 5]


def shaped(i: int) -> dict[str, Any]:
    """Return a plain chat in one of the shapes, some with a prompt that is hard to fold or escape."""
    asked, answer = f'ẞtraße\u2003 \t{i}\x1c"\\\u2028 İ ﬁ \x7f', f"answer {i} 😀"
    return (
        chat(i, turns=2),
        {"messages": [{"content": asked, "role": "user"}, {"content": answer, "role": "assistant"}], "id": i},
        {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]},
        {"prompt": asked, "response": answer},
        {"messages": [{"role": "system", "content": ""}, {"role": "assistant", "content": answer}]},
    )[i % 5]


def build(folder: Path, pick: Callable[[int], dict[str, Any]], **groups: Any) -> Built:
    return Workspace(folder).one("rows.jsonl", lines(map(pick, range(150))), CHAT, **groups).build(only=TO_ROWS)


@pytest.mark.parametrize(
    "pick",
    [shaped, other, lambda i: other(i) if i % 3 else shaped(i), lambda i: shaped(i // 2)],
    ids=["plain", "others", "both", "repeated"],
)
@pytest.mark.parametrize(
    "groups",
    [
        {"splits": {"validation": 0.2, "test": 0.1}},
        {"splits": {"validation": 0, "max_rows": None}, "filters": {"deduplicate": "prefix200"}},
        pytest.param({"filters": {"max_items": 100}}, marks=pytest.mark.campaign),
        pytest.param({"reasoning": {"extract_think_tags": False}}, marks=pytest.mark.campaign),
    ],
    ids=["splits", "prefix200", "max_items", "literal_tags"],
)
def test_rows_and_facts_are_those_of_one_record_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pick: Any, groups: dict[str, Any]
) -> None:
    together = build(tmp_path / "together", pick, **groups)
    monkeypatch.setattr(Canonicalizer, "read_plain", lambda *_: None)
    monkeypatch.setattr(RowColumns, "add_plain", None)
    one_by_one = build(tmp_path / "one_by_one", pick, **groups)

    assert together.digests() == one_by_one.digests()
    assert together.versions() == one_by_one.versions()
    assert together.facts("rows", "canonical_rows") == one_by_one.facts("rows", "canonical_rows")


def test_plain_chats_are_not_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one: list[object] = []
    monkeypatch.setattr(RowColumns, "add", lambda *_: one_by_one.append(_))
    built = build(tmp_path, shaped)

    assert one_by_one == []
    assert built.facts("rows", "canonical_rows")["kept"] == 150
