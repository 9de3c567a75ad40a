"""Render probe conversations, whose texts are sentinels, to find the form of messages that a template reads.

What belongs here: the probe conversations, the adaptation that follows from them, and the generation prompt. What does
not: rendering (passed in as `ProbeRenderer`), the template's other properties (`template_observation.py`), applying an
adaptation (`adaptation.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from jinja2 import nodes

from rowmill.conversation.adaptation import Adaptation
from rowmill.conversation.template_frames import find_common_start, split_into_units
from rowmill.core.json import Json
from rowmill.schema.rows import Message, Rejected


class ProbeRenderer(Protocol):
    """Renders one probe on the reference path."""

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None = None,
        kwargs: Mapping[str, Json] | None = None,
        *,
        adaptation: Adaptation | None = None,
    ) -> str | Rejected:
        """Render the probe with the given adaptation; None: the one found so far."""
        ...


SENTINEL_TOOL: dict[str, Json] = {
    "type": "function",
    "function": {
        "name": "qztool",
        "description": "Qzdescribed",
        "parameters": {
            "type": "object",
            "properties": {"qzkey": {"type": "string", "description": "Qzparameter"}},
            "required": ["qzkey"],
        },
    },
}


def make_user_message(text: str) -> Message:
    """Build a user message."""
    return {"role": "user", "content": text}


def make_assistant_message(text: str, **more: Json) -> Message:
    """Build an assistant message."""
    return {"role": "assistant", "content": text, **more}


def make_system_message(text: str) -> Message:
    """Build a system message."""
    return {"role": "system", "content": text}


def make_tool_call(name: str, arguments: Json, identifier: str = "call_00000001") -> Json:
    """Build one tool call."""
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def make_tool_result(text: str, identifier: str = "call_00000001", name: str = "qztool") -> Message:
    """Build a tool result."""
    return {"role": "tool", "content": text, "tool_call_id": identifier, "name": name}


_TOOL_CALLS = [make_tool_call("qztool", {"qzkey": "Qzvalue"})]


PLAIN_PROBE = (
    make_user_message("Qzuone"),
    make_assistant_message("Qzaone"),
    make_user_message("Qzutwo"),
    make_assistant_message("Qzatwo"),
)


TOOL_PROBE = (
    make_user_message("Qzuone"),
    make_assistant_message("", tool_calls=_TOOL_CALLS),
    make_tool_result("Qzresult"),
    make_assistant_message("Qzaone"),
    make_user_message("Qzutwo"),
    make_assistant_message("Qzatwo"),
)


REASONING_PROBE = (
    make_user_message("Qzuone"),
    make_assistant_message("Qzaone", reasoning_content="Qzrone"),
    make_user_message("Qzutwo"),
    make_assistant_message("Qzatwo", reasoning_content="Qzrtwo"),
)


def find_reasoning_keys(tree: nodes.Template) -> tuple[str, ...]:
    """Return the keys under which reasoning is passed, from the names that occur in the template."""
    read = {one.attr for one in tree.find_all(nodes.Getattr)}
    read |= {one.value for one in tree.find_all(nodes.Const) if isinstance(one.value, str)}
    keys = ["thinking", "reasoning_content"]
    if "reasoning" in read and "reasoning_content" not in read and "thinking" not in read:
        keys.append("reasoning")
    return tuple(keys)


# ── the form of messages ──


def probe_adaptation(renderer: ProbeRenderer, base: Adaptation) -> Adaptation:
    """Find the form of contents, tools, ids and arguments that the template reads."""
    found = base
    if not shows_text(renderer(PLAIN_PROBE, adaptation=found), "Qzuone"):
        parts = replace(found, content_form="parts")
        if shows_text(renderer(PLAIN_PROBE, adaptation=parts), "Qzuone"):
            found = parts
    if isinstance(renderer(PLAIN_PROBE, adaptation=found), Rejected):
        listed = replace(found, no_tools="[]")
        if isinstance(renderer(PLAIN_PROBE, adaptation=listed), str):
            found = listed
    found = replace(found, reasoning_keys=_probe_reasoning_key(renderer, found))
    found = replace(found, tool_ids=_probe_id_form(renderer, found))
    forms = probe_argument_forms(renderer, found)
    return replace(found, arguments="string" if forms == "string" else "object", takes_text=forms != "object")


def _probe_reasoning_key(renderer: ProbeRenderer, base: Adaptation) -> tuple[str, ...]:
    """Return the key that the template reads, or all candidates if no probe shows reasoning."""
    calling: list[Message] = [
        make_user_message("Qzuone"),
        make_assistant_message("", tool_calls=_TOOL_CALLS, reasoning_content="Qzrtwo"),
        make_tool_result("Qzresult"),
    ]
    for key in ("reasoning_content", "thinking", "reasoning"):
        only = replace(base, reasoning_keys=(key,))
        if any(
            shows_text(renderer(messages, tools, adaptation=only), "Qzrtwo")
            for messages, tools in ((REASONING_PROBE, None), (calling, [SENTINEL_TOOL]))
        ):
            return (key,)
    return base.reasoning_keys


def _probe_id_form(renderer: ProbeRenderer, base: Adaptation) -> Literal["any", "nine_alphanumeric"]:
    nine = replace(base, tool_ids="nine_alphanumeric")
    short: list[Message] = [
        make_user_message("Qzuone"),
        make_assistant_message("", tool_calls=[make_tool_call("qztool", {"qzkey": "Qzvalue"}, "call_1")]),
        make_tool_result("Qzresult", "call_1"),
        make_assistant_message("Qzaone"),
    ]
    for arguments in ("object", "string"):
        free = [
            renderer(messages, [SENTINEL_TOOL], adaptation=replace(base, arguments=arguments))
            for messages in (TOOL_PROBE, short)
        ]
        if all(isinstance(one, str) for one in free):
            return "any"
        if isinstance(renderer(TOOL_PROBE, [SENTINEL_TOOL], adaptation=replace(nine, arguments=arguments)), str):
            return "nine_alphanumeric"
    return "any"


def probe_argument_forms(
    renderer: ProbeRenderer, base: Adaptation
) -> Literal["object", "string", "either", "dropped", "refused"]:
    """Find the form in which the template prints call arguments unchanged."""
    printed = {form: _probe_arguments(renderer, replace(base, arguments=form)) for form in ("object", "string")}
    if printed["object"] == "yes":
        return "either" if printed["string"] == "yes" else "object"
    if printed["string"] == "yes":
        return "string"
    return "refused" if set(printed.values()) == {"refused"} else "dropped"


def _probe_arguments(renderer: ProbeRenderer, adaptation: Adaptation) -> Literal["yes", "no", "refused"]:
    arguments = {"qzkey": 'Qz"value', "qznumber": [1, {"qzdeep": True}]}
    conversation = [
        make_user_message("Qzuone"),
        make_assistant_message("", tool_calls=[make_tool_call("qztool", arguments)]),
        make_tool_result("Qzresult"),
    ]
    rendered = renderer([*conversation, make_assistant_message("Qzaone")], [SENTINEL_TOOL], adaptation=adaptation)
    if isinstance(rendered, Rejected):
        return "refused"
    # The `repr` of a dict, or text that is escaped twice, does not count as unchanged.
    twice = r"\"qzkey\"" in rendered or r"Qz\\\"value" in rendered
    python = "'qzkey': " in rendered
    once = 'Qz\\"value' in rendered or 'Qz"value' in rendered
    return "yes" if once and "qzkey" in rendered and not twice and not python else "no"


def shows_text(rendered: str | Rejected, text: str) -> bool:
    """Return whether a probe was rendered and its render contains a text."""
    return isinstance(rendered, str) and text in rendered


# ── the generation prompt ──

ENDING_PROBES: dict[str, tuple[Sequence[Message], ...]] = {
    "user": ([make_user_message("Qzuone")],),
    "system": (
        [make_system_message("Qzsystem")],
        [make_user_message("Qzuone"), make_assistant_message("Qzaone"), make_system_message("Qzsystem")],
    ),
    "assistant": ([make_user_message("Qzuone"), make_assistant_message("Qzaone")],),
    "tool": (
        [make_user_message("Qzuone"), make_assistant_message("", tool_calls=_TOOL_CALLS), make_tool_result("Qzresult")],
        [
            make_user_message("Qzuone"),
            make_assistant_message("Qzaone", tool_calls=_TOOL_CALLS),
            make_tool_result("Qzresult"),
        ],
    ),
}


def get_last_text(probe: Sequence[Message]) -> str:
    """Return the content of a probe's last message."""
    return str(probe[-1]["content"])


def probe_generation_prompt(
    renderer: ProbeRenderer, role: str, has_tools: bool, kwargs: Mapping[str, Json], control_tokens: tuple[str, ...]
) -> str:
    """Return the generation prompt after a message of that role: what the template adds for it.

    Empty if the template prints none, or refuses every probe that ends with the role.
    """
    tools = [SENTINEL_TOOL] if has_tools else None
    for probe in ENDING_PROBES.get(role, ([make_user_message("Qzuone"), {"role": role, "content": "Qzother"}],)):
        prompted = renderer(probe, tools, {**kwargs, "add_generation_prompt": True})
        unprompted = renderer(probe, tools, {**kwargs, "add_generation_prompt": False})
        if isinstance(prompted, str):
            last = get_last_text(probe)
            after, without = (one.rpartition(last)[2] if isinstance(one, str) else "" for one in (prompted, unprompted))
            added = after[len(find_common_start(after, without, control_tokens)) :]
            return _remove_turn_end(renderer, added, kwargs, control_tokens)
    return ""


def _remove_turn_end(
    renderer: ProbeRenderer, added: str, kwargs: Mapping[str, Json], control_tokens: tuple[str, ...]
) -> str:
    """Return a generation prompt without the end of the last turn, which a template may print only with it.

    A chat that begins with an answer shows the header without such an end.
    """
    alone = renderer([make_assistant_message("Qzaone")], None, kwargs)
    units = split_into_units(added, control_tokens)
    header = "" if isinstance(alone, Rejected) else alone.partition("Qzaone")[0]
    if not header or not units or units[0] in header:
        return added
    starts = [i for i, unit in enumerate(units) if unit in control_tokens]
    return next((rest for i in starts if (rest := "".join(units[i:])) in header), added)
