"""Probe conversations of every shape, from whose renders the template text around own text is learned.

What belongs here: the shapes, written with one letter per message, and their messages. What does not: learning from
their renders (`frame_probes.py`).

    u user   s system   t tool result   a answer   c call   d two calls   b text beside a call
    r reasoning and answer   o reasoning alone   e reasoning and call   f reasoning, text and call

All own texts contain `qz` and are lower-case, so that frames are also learned from templates that lower-case them.
"""

from collections.abc import Iterator

from rowmill.core.json import Json
from rowmill.schema.rows import Message

PROBE_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "qzlookup",
        "description": "qzlooks things up",
        "parameters": {
            "type": "object",
            "properties": {"qzplace": {"type": "string", "description": "qzplace"}},
            "required": ["qzplace"],
        },
    },
}
_ARGUMENTS: tuple[Json, ...] = (
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

ProbeShape = tuple[list[Message], list[Json] | None]


def make_probe_shapes(role: str) -> Iterator[ProbeShape]:
    """Yield conversations of every shape, without and with tools; `role` is the model's role."""
    builder = _ProbeBuilder(role)
    for letters in ("ua", "uaua", "uauaua", "suaua", "aua", "saua", "aaua", "uaa", "uaaua", "uua", "uuaua", "uasua",
                    "uausa", "ssua"):  # fmt: skip
        yield builder.build(letters), None
    for letters in ("ur", "urur", "uarua", "surur", "uru", "urr", "rur", "uo", "uoua", "urour", "uouo"):
        yield builder.build(letters), None
    tools = [PROBE_TOOL]
    for letters in ("ua", "uaua", "suaua", "urur"):
        yield builder.build(letters), tools
    for letters in ("ucta", "uctaua", "sucta", "ucta", "uctcta", "uctauctaua", "udtta", "udttaua", "ubta", "ubtbta",
                    "uc", "ub", "ud", "uauc", "uauctuc", "uct", "udtt", "ucua", "ubua", "cta", "ctaua", "uacta",
                    "uactaua", "uaca", "uctra", "uea", "ueta", "ue", "uetetra", "uft", "uf", "ufta", "uftaua", "uctua",
                    "uctuca", "uetuaueta", "ucto", "uoct"):  # fmt: skip
        yield builder.build(letters), tools
        yield builder.build(letters), None
    for arguments in _ARGUMENTS:
        builder = _ProbeBuilder(role, arguments)
        for letters in ("ucta", "uc", "udtta", "ubta", "ueta", "uctctaua", "ub", "ud", "ue", "uf"):
            yield builder.build(letters), tools


class _ProbeBuilder:
    """Builds conversations from the letters of a shape."""

    def __init__(self, role: str, arguments: Json = None) -> None:
        self._role = role
        self._arguments: Json = _ARGUMENTS[0] if arguments is None else arguments

    def build(self, letters: str) -> list[Message]:
        messages: list[Message] = []
        waiting: list[Json] = []
        for number, letter in enumerate(letters):
            message = self._make_message(letter, number, waiting)
            messages.append(message)
            if message.get("tool_calls"):
                waiting = list(message["tool_calls"])
        return messages

    def _make_message(self, letter: str, number: int, waiting: list[Json]) -> Message:
        if letter in "us":
            role = "user" if letter == "u" else "system"
            return {"role": role, "content": f"qz{role} number {number}"}
        if letter == "t":
            call = waiting.pop(0) if waiting else {"id": "call_00000000"}
            return {"role": "tool", "content": f"qzresult number {number}", "tool_call_id": call["id"],
                    "name": "qzlookup"}  # fmt: skip
        message: Message = {"role": self._role, "content": f"qzanswer number {number}" if letter in "arbf" else ""}
        if letter in "refo":
            message["reasoning_content"] = f"qzthought number {number}"
        if letter in "cdbef":
            message["tool_calls"] = [self._make_call(number, index) for index in range(2 if letter == "d" else 1)]
        return message

    def _make_call(self, number: int, index: int) -> Json:
        function = {"name": "qzlookup", "arguments": self._arguments}
        return {"id": f"call_{number:04}{index:04}", "type": "function", "function": function}
