"""Broken records for the demo, one or two of every kind, so that rejects, findings and ledger have something to say.

What belongs here: records that a real collection might hold and that must not stop a build. What does not: good
records (`generate.py`). Each flaw is written as it is, some as bytes that no JSON writer would produce.

Each record carries the reason under which it is rejected; `tests/repository/test_demo_data.py` checks it.
"""

import json
from typing import Any

Flaw = tuple[str, bytes]
"""The reason of the closed list, and the line that earns it."""

_USER = {"role": "user", "content": "When does the market open?"}
_ANSWER = {"role": "assistant", "content": "At eight, on every day but Sunday."}
_TOOL = {"type": "function", "function": {"name": "opening_hours", "parameters": {"type": "object", "properties": {}}}}
_CALL = {"id": "call_1", "type": "function"}


def _record(number: int, messages: Any, **more: Any) -> dict[str, Any]:
    return {"conversation_id": f"flaw-{number:03d}", "topic": "flaws", "source": "office", "messages": messages} | more


def _spoken(number: int, content: Any, **more: Any) -> dict[str, Any]:
    """Return a conversation whose assistant message says `content`."""
    return _record(number, [_USER, {"role": "assistant", "content": content, **more}])


def _calling(number: int, call: Any) -> dict[str, Any]:
    """Return a conversation with one tool call, its result and an answer."""
    result = {"role": "tool", "tool_call_id": "call_1", "content": '{"opens": "08:00"}'}
    return _record(
        number, [_USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result, _ANSWER], tools=[_TOOL]
    )


def _records() -> list[tuple[str, dict[str, Any]]]:
    nested: Any = "deep"
    for _ in range(80):
        nested = {"inside": nested}
    return [
        (
            "unknown_schema",
            {"conversation_id": "flaw-001", "note": "somebody's shopping list", "items": ["leeks", "rice"]},
        ),
        ("unknown_schema", _record(2, None)),
        ("bad_messages", _record(3, "When does the market open?")),
        ("bad_messages", _record(4, [1, 2, 3])),
        ("bad_messages", _record(5, [{"content": "Who said this?"}, _ANSWER])),
        ("bad_messages", _record(6, [{"role": 7, "content": "Seven speaking."}, _ANSWER])),
        ("empty_conversation", _record(7, [])),
        ("empty_assistant", _spoken(8, "")),
        ("empty_assistant", _spoken(9, None)),
        ("content_not_text", _spoken(10, 42)),
        (
            "multimodal_content",
            _record(
                11,
                [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "What is on this picture?"},
                            {"type": "image_url", "image_url": {"url": "file:market.png"}},
                        ],
                    },
                    _ANSWER,
                ],
            ),
        ),
        (
            "unknown_content_part",
            _record(12, [{"role": "user", "content": [{"type": "scent", "scent": "fresh bread"}]}, _ANSWER]),
        ),
        ("unclosed_think", _spoken(13, "<think>The market opens at eight, unless it is Sunday, in which case")),
        ("orphan_think", _record(14, [_USER, _ANSWER, {"role": "think", "content": "Was that right?"}])),
        ("bad_tools", _record(15, [_USER, _ANSWER], tools='[{"type": "function", "function": {"name": "opening')),
        (
            "bad_tools",
            _record(16, [_USER, _ANSWER], tools=[{"type": "function", "function": {"description": "has no name"}}]),
        ),
        ("bad_tool_call", _calling(17, _CALL | {"function": {"arguments": "{}"}})),
        (
            "bad_tool_arguments",
            _calling(18, _CALL | {"function": {"name": "opening_hours", "arguments": '{"day": "Sat'}}),
        ),
        ("flag_conflict", _spoken(19, "At eight.", train=True, weight=0)),
        ("bad_weight", _spoken(20, "At eight.", weight=-1)),
        ("bad_template_kwargs", _record(21, [_USER, _ANSWER], chat_template_kwargs={"messages": []})),
        ("group_missing", {**_record(22, [_USER, _ANSWER]), "conversation_id": None}),
        ("no_assistant", _record(23, [_USER])),
        ("no_loss_tokens", _spoken(24, "At eight.", weight=0)),
        (
            "template_error",
            _record(25, [_USER, _ANSWER, {"role": "system", "content": "Answer in one word."}, _USER, _ANSWER]),
        ),
        ("content_dropped", _record(27, [_USER, {"role": "note", "content": "Hours checked by Ines."}, _ANSWER])),
        ("too_deep", _record(26, [_USER, _ANSWER], metadata=nested)),
    ]


def chat_flaws() -> list[Flaw]:
    """Return the broken lines of `chats-*.jsonl`."""
    lines = [(reason, json.dumps(record, ensure_ascii=False).encode()) for reason, record in _records()]
    good = json.dumps(_record(30, [_USER, _ANSWER]), ensure_ascii=False)
    return [
        *lines,
        ("invalid_json", good[: len(good) // 2].encode()),
        ("invalid_json", good.replace('"', "'").encode()),
        ("not_utf8", good.replace("market", "café").encode("latin-1")),
        ("not_an_object", b'["a", "list", "of", "words"]'),
        ("not_an_object", b"42"),
    ]


SHAREGPT_FLAWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("empty_conversation", {"conversation_id": "flaw-101", "topic": "flaws", "source": "office", "conversations": []}),
    ("bad_messages", {"conversation_id": "flaw-102", "topic": "flaws", "source": "office",
                      "conversations": [{"from": "human", "value": "Hello?"}, {"value": "Who is speaking?"}]}),
)  # fmt: skip
"""Broken elements of `sharegpt.json`."""

CSV_FLAWS: tuple[Flaw, ...] = (
    ("empty_text", b"Name a colour.,,\n"),
    ("empty_text", b'Calculate.,2 + 2,"  "\n'),
    ("not_an_object", b"Too few cells.,only two\n"),
    ("not_an_object", b"Too,many,cells,in,this,row\n"),
    ("not_utf8", "Translate into French.,coffee,café\n".encode("latin-1")),
)
"""Broken records of `instructions.csv`, with their line ends."""

DOCUMENT_FLAWS: tuple[Flaw, ...] = (
    ("empty_text", b'{"text": ""}'),
    ("empty_text", b'{"text": " \\n\\t "}'),
    ("missing_field", b'{"text": null, "title": "Lost"}'),
    ("missing_field", b'{"body": "In the wrong column."}'),
    ("content_not_text", b'{"text": {"paragraphs": 3}}'),
    ("too_short", b'{"text": "See above."}'),
    ("invalid_json", b'{"text": "The file ends in the middle of'),
)
"""Broken lines of `documents.jsonl.zst`."""
