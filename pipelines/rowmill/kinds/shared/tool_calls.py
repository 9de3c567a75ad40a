"""Reads tools and calls into one shape, whatever library wrote them.

    tools    [{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}]
    calls    [{"id": "call_0", "type": "function", "function": {"name": …, "arguments": {…}}}]

`arguments` are an object in the source's key order. If they came as text, the message also keeps that text in
`arguments_source` (one per call, null if there was none), so that a template which prints strings gets the source's
text, including its spaces.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple, TypeGuard

from pydantic import Field

from rowmill.core.config import Config, describe_type
from rowmill.core.json import Json, from_json, from_json_without_repeats
from rowmill.kinds.shared.messages import is_list, is_mapping
from rowmill.schema.rows import Message, Rejected

ARGUMENT_KEYS = ("arguments", "parameters", "input")


class Tools(Config):
    """How tools and calls are read and passed to the template."""

    tools_fields: list[str] = Field(default=["tools", "tool_schemas", "functions", "function_schemas"])
    """Columns that may hold the row's tools; the first with a value that is neither null nor blank is used."""
    arguments: Literal["auto", "object", "string"] = "auto"
    """Form in which the template receives a call's arguments; auto: the form that it prints correctly; string: their
    text, even if it is no JSON object, for which rows are rejected otherwise."""
    tool_ids: Literal["auto", "keep"] = "auto"
    """Whether call ids may be rewritten (to nine letters and digits) for a template that requires it."""


class OfferedTools(NamedTuple):
    """A row's tools; `present`: a column had a value; `from_text`: the value was JSON text."""

    tools: tuple[Json, ...] | None = None
    present: bool = False
    from_text: bool = False


NO_TOOLS_OFFERED = OfferedTools()


def read_tools(record: Mapping[str, Json], fields: Iterable[str]) -> OfferedTools | Rejected:
    """Return the tools of the first column that holds any."""
    for name in fields:
        value = record.get(name)
        if not value or (type(value) is str and value.isspace()):
            continue
        from_text = type(value) is str
        if from_text:
            try:
                value = from_json(value)
            except ValueError as error:
                return Rejected("bad_tools", f"{name} is not JSON: {error}")
            if value is None or value == []:
                continue
        if is_list(value):
            schemas = value
        elif not is_mapping(value):
            return Rejected("bad_tools", f"{name}: {describe_type(value)}, expected a list or a mapping")
        elif is_mapping(value.get("function")) or type(value.get("name")) is str:
            schemas = [value]
        else:
            # The key of a schema without a name is its name.
            schemas = [
                schema
                if not is_mapping(schema) or is_mapping(schema.get("function")) or "name" in schema
                else {"name": key, **schema}
                for key, schema in value.items()
            ]
        tools: list[Json] = []
        for schema in schemas:
            tool = _wrap_schema(schema)
            if tool is None:
                return Rejected("bad_tools", f"{name}: tool {len(tools)} ({describe_type(schema)}) has no name")
            tools.append(tool)
        return OfferedTools(tuple(tools) or None, present=True, from_text=from_text)
    return NO_TOOLS_OFFERED


def _wrap_schema(value: Json) -> Json:
    """Wrap a bare schema; None if it has no name."""
    if type(value) is str:
        try:
            value = from_json(value)
        except ValueError:
            return None
    if not is_mapping(value):
        return None
    function = value.get("function")
    if is_mapping(function):
        if not _is_name(function.get("name")):
            return None
        return value if type(value.get("type")) is str else {**value, "type": "function"}
    return {"type": "function", "function": value} if _is_name(value.get("name")) else None


def _is_name(value: Json) -> TypeGuard[str]:
    return type(value) is str and bool(value) and not value.isspace()


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """The calls of one message, and the source text of each call's arguments, if it was text."""

    calls: list[Json]
    sources: list[str | None]


def read_calls(values: Iterable[Json], arguments: str = "auto") -> ToolCalls | Rejected:
    """Read calls into one shape; each value is a call, a list of calls, or the JSON text of either.

    Arguments that are text, but no JSON object, are rejected unless `arguments` is `string`: a model that is trained
    on them learns to write what no parser reads.
    """
    calls: list[Json] = []
    sources: list[str | None] = []
    for value in values:
        given = value
        if type(given) is str:
            if not given or given.isspace():
                continue
            try:
                given = from_json_without_repeats(given)
            except ValueError as error:
                return Rejected("bad_tool_call", f"not JSON: {error}")
        if given is None:
            continue
        if not is_list(given) and not is_mapping(given):
            return Rejected("bad_tool_call", f"{describe_type(given)}, expected calls")
        for item in given if is_list(given) else [given]:
            call = _read_call(item, arguments)
            if isinstance(call, Rejected):
                return call
            calls.append(call[0])
            sources.append(call[1])
    return ToolCalls(calls, sources)


def _read_call(value: Json, form: str) -> tuple[Json, str | None] | Rejected:
    if type(value) is str:
        try:
            value = from_json_without_repeats(value)
        except ValueError as error:
            return Rejected("bad_tool_call", f"not JSON: {error}")
    if not is_mapping(value):
        return Rejected("bad_tool_call", f"a call is {describe_type(value)}, expected a mapping")
    function = value.get("function")
    body = function if is_mapping(function) else value
    name = body.get("name")
    if not _is_name(name):
        return Rejected("bad_tool_call", "a call has no name")
    given: Json = next((body[key] for key in ARGUMENT_KEYS if body.get(key) is not None), None)
    arguments = _parse_arguments(given)
    if arguments is None:
        if form != "string" or type(given) is not str:
            return Rejected("bad_tool_arguments", f"{name}: arguments are not a JSON object")
        arguments = given
    call_id = value.get("id")
    call = {
        "id": call_id if _is_name(call_id) else None,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return call, given if _is_name(given) else None


def _parse_arguments(value: Json) -> dict[str, Json] | None:
    """Read arguments that may be JSON text, or text of text; None if the result is not an object, or repeats a key."""
    for _ in range(2):
        if type(value) is not str:
            break
        if not value or value.isspace():
            return {}
        try:
            value = from_json_without_repeats(value)
        except ValueError:
            return None
    if value is None:
        return {}
    return value if is_mapping(value) else None


def link_calls(messages: list[Message]) -> None:
    """Assign ids in place: a new one to each call without an id, and to each result the next open call's.

    A user message closes open calls: a result after it cannot answer a call before it.
    """
    taken = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    names = (name for name in map("call_{}".format, count()) if name not in taken)
    waiting: list[str] = []
    for index, message in enumerate(messages):
        if message["role"] == "user":
            waiting.clear()
        for call in message.get("tool_calls", ()):
            if call["id"] is None:
                call["id"] = next(names)
            waiting.append(call["id"])
        if message["role"] != "tool":
            continue
        answered = message.get("tool_call_id")
        if _is_name(answered):
            if answered in waiting:
                waiting.remove(answered)
        elif waiting:
            messages[index] = {**message, "tool_call_id": waiting.pop(0)}
        else:
            messages[index] = {key: value for key, value in message.items() if key != "tool_call_id"}
