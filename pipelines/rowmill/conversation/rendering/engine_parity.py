"""The conversations on which the fast engine must agree with the reference before a template may use it.

What belongs here: conversations that between them use everything templates look at: every role, calls with
every kind of argument, reasoning, tags in content, tools, empty texts, scripts of all kinds. What does not:
the comparison (`Renderer`), or probes of the contract (`probes.py`), whose texts are sentinels.
"""

from collections.abc import Iterator

from rowmill.conversation.rendering.probes import TOOL, assistant, call, result, system, user
from rowmill.core.json import Json
from rowmill.schema.rows import Message

_TRUSTED = ("Grüße, 世界 🙂 <b>&'\"</b>", "line\nbreak\ttab \\ \u2028", "  spaced  \n", "5 < 6 {{ x }} {% y %}", "a")


WHOLE_NUMBERS = "whole floats"
"""How the names of probes begin whose arguments hold floats such as 1.0, which the fast engine may print as 1."""


def trust_set() -> Iterator[tuple[str, list[Message], list[Json] | None, dict[str, Json]]]:
    """Yield conversations that between them use everything templates look at."""
    for name, messages, tools in _trusted_conversations():
        for suffix, kwargs in (
            ("", {}),
            ("/prompt", {"add_generation_prompt": True}),
            ("/off", {"enable_thinking": False}),
        ):
            yield name + suffix, messages, tools, kwargs


def _trusted_conversations() -> Iterator[tuple[str, list[Message], list[Json] | None]]:
    a, b, c, d, e = _TRUSTED
    talk = [user(a), assistant(b), user(c), assistant(d)]
    yield "plain", talk, None
    yield "one", [user(e), assistant(a)], None
    yield "long", talk * 6, None
    yield "system", [system(b), *talk], None
    yield "system with tools", [system(d), *talk], [TOOL]
    yield "tools", talk, [TOOL, _rich_tool()]
    yield "trailing user", talk[:3], None
    yield "two users", [user(a), user(b), assistant(c), assistant(d)], None
    yield "leading assistant", [assistant(a), user(b), assistant(c)], None
    yield "empty", [user(""), assistant(""), user(a), assistant(b)], None
    yield "late system", [user(a), assistant(b), system(c), user(d), assistant(e)], None
    yield "reasoning", [user(a), assistant(b, reasoning_content=c), user(d), assistant(e, reasoning_content=a)], None
    yield "tags", [user(a), assistant("<think>\n" + b + "\n</think>\n\n" + d), user(c), assistant("x</think>y")], None
    whole = {"whole": 1.0, "wide": 1e22, "deep": [2.0, {"k": -3.0}]}
    for form in (_rich_arguments(), {}, {"only": "text"}, whole):
        calls = [call("one_tool", form), call("two", {"k": a}, "call_00000002")]
        what = WHOLE_NUMBERS if form is whole else f"{len(form)} arguments"
        yield f"{what}, call", _tool_talk("", calls[:1]), [TOOL]
        yield f"{what}, two calls", _tool_talk(b, calls), [_rich_tool()]
        yield f"{what}, reasoned call", _tool_talk("", calls[:1], reasoning_content=d), [TOOL]
    yield "equal messages", [user(a), assistant(b), user(a), assistant(b), user(a), assistant(d)], None
    yield "equal messages and tools", [user(a), assistant(b), user(a), assistant(b)], [TOOL]
    yield "odd role", [user(a), {"role": "critic", "content": b}, assistant(c)], None
    yield "extras", [{**user(a), "name": "Ann", "note": None, "score": 1.5, "flag": True}, assistant(b)], None


def _tool_talk(text: str, calls: list[Json], **more: Json) -> list[Message]:
    a, b, _, d, _ = _TRUSTED
    results = [result(f'{{"r": "{index}"}}', one["id"]) for index, one in enumerate(calls)]
    return [
        user(a),
        assistant(text, tool_calls=calls, **more),
        *results,
        assistant(d),
        user(b),
        assistant("", tool_calls=calls[:1], **more),
        {**results[0], "content": "again"},
        assistant(b, **more),
    ]


def _rich_arguments() -> dict[str, Json]:
    text = _TRUSTED[0]
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


def _rich_tool() -> Json:
    properties = {
        "z": {"type": "array", "items": {"type": "string"}, "description": _TRUSTED[1]},
        "a": {"type": ["integer", "null"], "enum": [1, 2], "default": 1},
        "o": {"type": "object", "properties": {"k": {"type": "number"}}, "description": "d"},
        "b": {"type": "boolean", "description": _TRUSTED[0]},
    }
    parameters = {"type": "object", "properties": properties, "required": ["z"]}
    function = {
        "name": "rich",
        "description": "Rich & <long>",
        "parameters": parameters,
        "return": {"type": "string", "description": "r"},
    }
    return {"type": "function", "function": function}
