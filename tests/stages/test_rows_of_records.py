"""The rows of a part, plain chats and others, in the order of their records: what each record gives by itself."""

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from rowmill.core.json import to_json
from rowmill.kinds.shared.canonicalization import Canonicalizer, hash_row_content
from rowmill.kinds.shared.filters import hash_record_prefix
from rowmill.kinds.shared.splits import Splitter, assign_split
from rowmill.schema.rows import ParseReport, Row
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
def test_rows_are_those_that_each_record_gives_by_itself(tmp_path: Path, pick: Any, groups: dict[str, Any]) -> None:
    built = build(tmp_path, pick, **groups)
    options = built.project.recipe.datasets["rows"]
    by_prefix = options.filters.deduplicate == "prefix200"
    splitter = Splitter(options.splits)
    expected: dict[bytes, tuple[Any, ...]] = {}
    for record in map(pick, range(options.filters.max_items or 150)):
        row = Canonicalizer(options)(record)
        if isinstance(row, Row):
            content = hash_row_content(row)
            report = asdict(row.report) | {name: list(getattr(row.report, name)) for name in ("unknown_roles", "notes")}
            split = assign_split(splitter, source=None, group_key=None, order_key=None, content_hash=content)
            texts = to_json(list(row.messages)), None if row.tools is None else to_json(list(row.tools))
            # Of equal rows the first is kept.
            key = hash_record_prefix(record) if by_prefix else content
            expected.setdefault(key, (content, key if by_prefix else None, row.kind, split, *texts, report))

    rows = built.rows_of("rows", "canonical_rows", file="rows")
    names = ("content_hash", "dedupe_key", "kind", "split", "messages", "tools")
    reports = [{field.name: row[field.name] for field in fields(ParseReport)} for row in rows]
    found = [(*(row[name] for name in names), report) for row, report in zip(rows, reports, strict=True)]
    assert found == list(expected.values())
    assert built.facts("rows", "canonical_rows")["kept"] == len(expected)
