"""Conversations on which the fast engine must agree with the reference engine before a template may use it.

What belongs here: conversations that together cover everything that templates read: every role, calls with
every kind of argument, reasoning, tags in content, tools, empty texts, many scripts. What does not: rendering them
(`renderer.py`), or the probes of a template's behavior (`probes.py`), whose texts are sentinels.
"""

from collections.abc import Iterator

from rowmill.conversation.probes import (
    SENTINEL_TOOL,
    make_assistant_message,
    make_system_message,
    make_tool_call,
    make_tool_result,
    make_user_message,
)
from rowmill.core.json import Json
from rowmill.schema.rows import Message

_SAMPLE_TEXTS = (
    "Grüße, 世界 🙂 <b>&'\"</b>",
    "line\nbreak\ttab \\ \u2028",
    "  spaced  \n",
    "5 < 6 {{ x }} {% y %}",
    "a",
)


WHOLE_FLOATS = "whole floats"
"""Prefix of the names of probes whose arguments contain floats such as 1.0, which the fast engine may print as 1."""


def make_parity_probes() -> Iterator[tuple[str, list[Message], list[Json] | None, dict[str, Json]]]:
    """Yield (name, messages, tools, template values) of every probe."""
    for name, messages, tools in _make_parity_conversations():
        for suffix, kwargs in (
            ("", {}),
            ("/prompt", {"add_generation_prompt": True}),
            ("/off", {"enable_thinking": False}),
        ):
            yield name + suffix, messages, tools, kwargs


def _make_parity_conversations() -> Iterator[tuple[str, list[Message], list[Json] | None]]:
    a, b, c, d, e = _SAMPLE_TEXTS
    chat = [make_user_message(a), make_assistant_message(b), make_user_message(c), make_assistant_message(d)]
    yield "plain", chat, None
    yield "one", [make_user_message(e), make_assistant_message(a)], None
    yield "long", chat * 6, None
    yield "system", [make_system_message(b), *chat], None
    yield "system with tools", [make_system_message(d), *chat], [SENTINEL_TOOL]
    yield "tools", chat, [SENTINEL_TOOL, _make_rich_tool()]
    yield "trailing user", chat[:3], None
    yield (
        "two users",
        [make_user_message(a), make_user_message(b), make_assistant_message(c), make_assistant_message(d)],
        None,
    )
    yield "leading assistant", [make_assistant_message(a), make_user_message(b), make_assistant_message(c)], None
    yield (
        "empty",
        [make_user_message(""), make_assistant_message(""), make_user_message(a), make_assistant_message(b)],
        None,
    )
    yield (
        "late system",
        [
            make_user_message(a),
            make_assistant_message(b),
            make_system_message(c),
            make_user_message(d),
            make_assistant_message(e),
        ],
        None,
    )
    yield (
        "reasoning",
        [
            make_user_message(a),
            make_assistant_message(b, reasoning_content=c),
            make_user_message(d),
            make_assistant_message(e, reasoning_content=a),
        ],
        None,
    )
    yield (
        "tags",
        [
            make_user_message(a),
            make_assistant_message("<think>\n" + b + "\n</think>\n\n" + d),
            make_user_message(c),
            make_assistant_message("x</think>y"),
        ],
        None,
    )
    whole = {"whole": 1.0, "wide": 1e22, "deep": [2.0, {"k": -3.0}]}
    for form in (_make_rich_arguments(), {}, {"only": "text"}, whole):
        calls = [make_tool_call("one_tool", form), make_tool_call("two", {"k": a}, "call_00000002")]
        what = WHOLE_FLOATS if form is whole else f"{len(form)} arguments"
        yield f"{what}, call", _make_tool_conversation("", calls[:1]), [SENTINEL_TOOL]
        yield f"{what}, two calls", _make_tool_conversation(b, calls), [_make_rich_tool()]
        yield f"{what}, reasoned call", _make_tool_conversation("", calls[:1], reasoning_content=d), [SENTINEL_TOOL]
    yield (
        "equal messages",
        [
            make_user_message(a),
            make_assistant_message(b),
            make_user_message(a),
            make_assistant_message(b),
            make_user_message(a),
            make_assistant_message(d),
        ],
        None,
    )
    yield (
        "equal messages and tools",
        [make_user_message(a), make_assistant_message(b), make_user_message(a), make_assistant_message(b)],
        [SENTINEL_TOOL],
    )
    yield "odd role", [make_user_message(a), {"role": "critic", "content": b}, make_assistant_message(c)], None
    yield (
        "extras",
        [{**make_user_message(a), "name": "Ann", "note": None, "score": 1.5, "flag": True}, make_assistant_message(b)],
        None,
    )


def _make_tool_conversation(text: str, calls: list[Json], **more: Json) -> list[Message]:
    a, b, _, d, _ = _SAMPLE_TEXTS
    results = [make_tool_result(f'{{"r": "{index}"}}', one["id"]) for index, one in enumerate(calls)]
    return [
        make_user_message(a),
        make_assistant_message(text, tool_calls=calls, **more),
        *results,
        make_assistant_message(d),
        make_user_message(b),
        make_assistant_message("", tool_calls=calls[:1], **more),
        {**results[0], "content": "again"},
        make_assistant_message(b, **more),
    ]


def _make_rich_arguments() -> dict[str, Json]:
    text = _SAMPLE_TEXTS[0]
    return {
        "s": text,
        "i": 3,
        "f": 1.5,
        "e": 0.25,
        "big": 10**12,
        "t": True,
        "n": None,
        "l": [1, text, []],
        "o": {"z": 1, "a": {}},
    }


def _make_rich_tool() -> Json:
    properties = {
        "z": {"type": "array", "items": {"type": "string"}, "description": _SAMPLE_TEXTS[1]},
        "a": {"type": ["integer", "null"], "enum": [1, 2], "default": 1},
        "o": {"type": "object", "properties": {"k": {"type": "number"}}, "description": "d"},
        "b": {"type": "boolean", "description": _SAMPLE_TEXTS[0]},
    }
    parameters = {"type": "object", "properties": properties, "required": ["z"]}
    function = {
        "name": "rich",
        "description": "Rich & <long>",
        "parameters": parameters,
        "return": {"type": "string", "description": "r"},
    }
    return {"type": "function", "function": function}
