"""Conversations of every shape: templates are learned from them, and engines compared on them.

A shape has one letter per message; the texts of a use are a `ProbeTexts`. Those on which masks are proven
(`inspection/chat_templates.py`) are made here as well.

    u user   s system   t tool result   a answer   c call   d two calls   b text beside a call
    r reasoning and answer   o reasoning alone   e reasoning and call   f reasoning, text and call
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from rowmill.core.json import Json
from rowmill.schema.rows import Message


@dataclass(frozen=True, slots=True)
class ProbeTexts:
    """The texts of probe conversations, each made from the number of its message."""

    user: Callable[[int], str]
    system: Callable[[int], str]
    answer: Callable[[int], str]
    reasoning: Callable[[int], str]
    result: Callable[[int], str]
    arguments: Callable[[int, int], Json]
    """From the numbers of the message and of its call."""
    tool: Json

    def make(
        self, letters: str, *, role: str = "assistant", arguments: Callable[[int, int], Json] | None = None
    ) -> list[Message]:
        """Make the conversation of a shape; `role` is the model's."""
        messages: list[Message] = []
        waiting: list[str] = []
        name = self.tool["function"]["name"]
        for number, letter in enumerate(letters):
            if letter == "u":
                messages.append({"role": "user", "content": self.user(number)})
            elif letter == "s":
                messages.append({"role": "system", "content": self.system(number)})
            elif letter == "t":
                identifier = waiting.pop(0) if waiting else "call_00000000"
                messages.append(
                    {"role": "tool", "content": self.result(number), "tool_call_id": identifier, "name": name}
                )
            else:
                message: Message = {"role": role, "content": self.answer(number) if letter in "arbf" else ""}
                if letter in "refo":
                    message["reasoning_content"] = self.reasoning(number)
                if letter in "cdbef":
                    message["tool_calls"] = [
                        make_call(name, (arguments or self.arguments)(number, index), f"call_{number:04}{index:04}")
                        for index in range(2 if letter == "d" else 1)
                    ]
                    waiting = [call["id"] for call in message["tool_calls"]]
                messages.append(message)
        return messages


def make_call(name: str, arguments: Json, identifier: str = "call_00000001") -> Json:
    """Make one tool call."""
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def make_tool(name: str, description: str, properties: Json, required: Sequence[str], **more: Json) -> Json:
    """Make the schema of a tool."""
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    function = {"name": name, "description": description, "parameters": parameters, **more}
    return {"type": "function", "function": function}


# ── to learn from: all texts have `qz`, in lower case for templates that lower-case them ──

SENTINELS = ProbeTexts(
    user="qzuser number {}".format,
    system="qzsystem number {}".format,
    answer="qzanswer number {}".format,
    reasoning="qzthought number {}".format,
    result="qzresult number {}".format,
    arguments=lambda _, __: {"qzplace": "qzvalue one"},
    tool=make_tool(
        "qzlookup", "qzlooks things up", {"qzplace": {"type": "string", "description": "qzplace"}}, ["qzplace"]
    ),
)

ENDING_SHAPES: Mapping[str, Sequence[str]] = {
    "user": ("u",),
    "system": ("s", "uas"),
    "assistant": ("ua",),
    "tool": ("uct", "ubt"),
}
"""By role: shapes that end with it, tried in turn."""
_LEARNED_ARGUMENTS: tuple[Json, ...] = (
    {"qzplace": "qzvalue one"},
    {"qzplace": "qzvalue two", "qzcount": 12, "qzname": "qzname"},
    {"qzcount": 12, "qzother": True},
    {},
    {"qzlist": ["qzfirst", "qzsecond"], "qzmap": {"qzinner": "qzdeep"}},
    {"qzmap": {"qzinner": "qzdeep"}, "qznone": None, "qzshare": 1.5},
    {"qzlist": ["qzfirst", "qzsecond"]},
    {"qzlist": [1, 2]},
    {"qzmaps": [{"qzinner": "qzdeep"}, {"qzinner": "qzdeeper"}]},
    {"qzempty": "", "qzplace": "qzvalue", "qzlast": ""},
)
"""Arguments of calls: strings, numbers, none, and nested values."""

_PLAIN_SHAPES = (
    "ua uaua uauaua suaua aua saua aaua uaa uaaua uua uuaua uasua uausa ssua "
    "ur urur uarua surur uru urr rur uo uoua urour uouo".split()
)
_TOOL_SHAPES = (
    "ucta uctaua sucta ucta uctcta uctauctaua udtta udttaua ubta ubtbta uc ub ud uauc uauctuc uct udtt ucua ubua cta "
    "ctaua uacta uactaua uaca uctra uea ueta ue uetetra uft uf ufta uftaua uctua uctuca uetuaueta ucto uoct".split()
)
_ARGUMENT_SHAPES = "ucta uc udtta ubta ueta uctctaua ub ud ue uf".split()


def make_learning_probes(role: str) -> Iterator[tuple[list[Message], list[Json] | None]]:
    """Yield conversations of every shape, without and with tools; `role` is the model's role."""
    tools = [SENTINELS.tool]
    for letters in _PLAIN_SHAPES:
        yield SENTINELS.make(letters, role=role), None
    for letters in ("ua", "uaua", "suaua", "urur"):
        yield SENTINELS.make(letters, role=role), tools
    for letters in _TOOL_SHAPES:
        yield SENTINELS.make(letters, role=role), tools
        yield SENTINELS.make(letters, role=role), None
    for arguments in _LEARNED_ARGUMENTS:
        for letters in _ARGUMENT_SHAPES:
            yield SENTINELS.make(letters, role=role, arguments=lambda _, __, given=arguments: given), tools


# ── to compare engines on: scripts, escapes, white space, every type of argument ──

_RICH_TEXTS = (
    "Grüße, 世界 🙂 <b>&'\"</b>",
    "line\nbreak\ttab \\ \u2028",
    "  spaced  \n",
    "5 < 6 {{ x }} {% y %}",
    "a",
)
_RICH_ARGUMENTS: tuple[Json, ...] = (
    {
        "s": _RICH_TEXTS[0],
        "i": 3,
        "f": 1.5,
        "e": 0.25,
        "big": 10**12,
        "t": True,
        "n": None,
        "l": [1, _RICH_TEXTS[0], []],
        "o": {"z": 1, "a": {}},
    },
    {},
    {"only": "text"},
)
_WHOLE_FLOATS: Json = {"whole": 1.0, "wide": 1e22, "deep": [2.0, {"k": -3.0}]}
WHOLE_FLOATS = "whole floats"
"""Prefix of the names of probes whose arguments contain floats such as 1.0, which the fast engine may print as 1."""


def _get_rich_text(number: int) -> str:
    return _RICH_TEXTS[number % len(_RICH_TEXTS)]


_RICH = ProbeTexts(
    user=_get_rich_text,
    system=_get_rich_text,
    answer=_get_rich_text,
    reasoning=lambda number: _get_rich_text(number + 2),
    result='{{"r": "{}"}}'.format,
    arguments=lambda _, __: _RICH_ARGUMENTS[0],
    tool=make_tool(
        "rich",
        "Rich & <long>",
        {
            "z": {"type": "array", "items": {"type": "string"}, "description": _RICH_TEXTS[1]},
            "a": {"type": ["integer", "null"], "enum": [1, 2], "default": 1},
            "o": {"type": "object", "properties": {"k": {"type": "number"}}, "description": "d"},
            "b": {"type": "boolean", "description": _RICH_TEXTS[0]},
        },
        ["z"],
        **{"return": {"type": "string", "description": "r"}},
    ),
)


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
    both = [SENTINELS.tool, _RICH.tool]
    for shape in ("uaua", "ua", "ua" * 12, "suaua", "uau", "uuaa", "aua", "uasua", "urur"):
        yield shape, _RICH.make(shape), None
    for shape in ("uaua", "suaua", "uaua"):
        yield f"{shape} with tools", _RICH.make(shape), both
    for arguments in (*_RICH_ARGUMENTS, _WHOLE_FLOATS):
        name = WHOLE_FLOATS if arguments is _WHOLE_FLOATS else f"{len(arguments)} arguments"
        for shape in ("uctaucta", "ubtaubta", "udttaudtta", "uetruetr"):
            messages = _RICH.make(shape, arguments=lambda _, __, given=arguments: given)
            yield f"{name}, {shape}", messages, both[:1] if shape[1] == "c" else both[1:]
    a, b, c, d, _ = _RICH_TEXTS
    for name, texts in {
        "empty": ("", "", a, b),
        "tags": (a, f"<think>\n{b}\n</think>\n\n{d}", c, "x</think>y"),
        "equal messages": (a, b, a, b, a, d),
    }.items():
        messages = [{"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), texts)]
        yield name, messages, None
        yield f"{name}, tools", messages, both[:1]
    question, answer = islice(_RICH.make("ua"), 2)
    yield "odd role", [question, {"role": "critic", "content": b}, answer], None
    yield "extras", [{**question, "name": "Ann", "note": None, "score": 1.5, "flag": True}, answer], None
