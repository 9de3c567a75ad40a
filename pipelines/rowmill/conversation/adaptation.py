"""The form of messages that a template reads: arguments as object or text, call ids, key of reasoning, form of content.

Rows are in one canonical form (`schema/rows.py`); probes show which form prints them unchanged.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Literal

from jinja2 import nodes

from rowmill.conversation.probe_conversations import SENTINELS
from rowmill.core.json import Json
from rowmill.schema.rows import Message, Rejected

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_INTERNAL_KEYS = ("train", "weight", "inline_reasoning", "arguments_source")
"""Keys of canonical messages that are not passed to the template."""
_ADAPTED_KEYS = frozenset((*_INTERNAL_KEYS, "tool_calls", "tool_call_id", "reasoning_content"))


class BadArgumentsError(ValueError):
    """A call's arguments are unparsed text, and the template prints only objects."""


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The form of messages that one template reads."""

    arguments: Literal["object", "string"] = "object"
    tool_ids: Literal["any", "nine_alphanumeric"] = "any"
    content_form: Literal["string", "parts"] = "string"
    reasoning_keys: tuple[str, ...] = ("thinking", "reasoning_content")
    no_tools: Literal["null", "[]"] = "null"
    takes_text: bool = True
    """Whether arguments that could not be parsed are passed as text."""

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages as the template reads them; unchanged messages are the same objects."""
        if self.content_form == "parts":
            return [self._adapt_message(message) for message in messages]
        return [m if _ADAPTED_KEYS.isdisjoint(m) else self._adapt_message(m) for m in messages]

    def tools(self, tools: Sequence[Json] | None) -> Sequence[Json] | None:
        """Return the tools, or the value that the template expects without tools."""
        if tools:
            return tools
        return None if self.no_tools == "null" else []

    def _adapt_message(self, message: Message) -> Message:
        adapted = message.copy()
        for key in _INTERNAL_KEYS:
            adapted.pop(key, None)
        reasoning = adapted.get("reasoning_content")
        if reasoning is not None and self.reasoning_keys != ("reasoning_content",):
            adapted = self._rename_reasoning(adapted, reasoning)
        calls: list[Json] | None = adapted.get("tool_calls")
        if isinstance(calls, list):
            sources: list[str | None] = message.get("arguments_source") or [None] * len(calls)
            adapted["tool_calls"] = list(map(self._adapt_call, calls, sources))
        identifier = adapted.get("tool_call_id")
        if self.tool_ids != "any" and isinstance(identifier, str):
            adapted["tool_call_id"] = make_nine_character_id(identifier)
        if self.content_form == "parts" and isinstance(adapted.get("content"), str):
            adapted["content"] = [{"type": "text", "text": adapted["content"]}]
        return adapted

    def _rename_reasoning(self, message: Message, reasoning: Json) -> Message:
        """Move reasoning to the keys that the template reads, keeping the order of keys."""
        renamed: Message = {}
        for key, value in message.items():
            if key == "reasoning_content":
                renamed |= dict.fromkeys(self.reasoning_keys, reasoning)
            elif key not in self.reasoning_keys:
                renamed[key] = value
        return renamed

    def _adapt_call(self, call: Any, source: str | None) -> Any:
        function = call.get("function")
        arguments = function.get("arguments")
        if self.arguments == "string" and not isinstance(arguments, str):
            text = source if source is not None else json.dumps(arguments, ensure_ascii=False)
            call = {**call, "function": {**function, "arguments": text}}
        elif isinstance(arguments, str) and not self.takes_text:
            # A reject's detail, so other words would change the bytes of a build.
            raise BadArgumentsError(f"{function.get('name')}: arguments are no JSON object, and the template needs one")
        if self.tool_ids != "any" and isinstance(call.get("id"), str):
            call = {**call, "id": make_nine_character_id(call["id"])}
        return call


def make_nine_character_id(identifier: str) -> str:
    """Return the id if it has nine ASCII alphanumeric characters, else nine derived from its hash.

    Equal ids stay equal, so a call and its result stay paired.
    """
    if len(identifier) == 9 and identifier.isalnum() and identifier.isascii():
        return identifier
    number = int.from_bytes(sha256(identifier.encode()).digest()[:8])
    digits: list[str] = []
    for _ in range(9):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(digits)


# ── finding the form ──


ProbeRenderer = Callable[..., str | Rejected]
"""Renders one probe on the reference path: messages, tools, template values and an `adaptation`, else the one found
so far."""

_TOOLS: Sequence[Json] = (SENTINELS.tool,)


def probe_adaptation(render: ProbeRenderer, tree: nodes.Template) -> Adaptation:
    """Find the form of contents, tools, ids and arguments that the template reads."""
    # The keys of reasoning are among the names that occur in the template.
    read = {one.attr for one in tree.find_all(nodes.Getattr)}
    read |= {one.value for one in tree.find_all(nodes.Const) if isinstance(one.value, str)}
    only_short = "reasoning" in read and read.isdisjoint(("reasoning_content", "thinking"))
    found = Adaptation(reasoning_keys=("thinking", "reasoning_content", *(("reasoning",) if only_short else ())))
    plain = SENTINELS.make("uaua")
    if not shows_text(render(plain, adaptation=found), plain[0]["content"]):
        parts = replace(found, content_form="parts")
        if shows_text(render(plain, adaptation=parts), plain[0]["content"]):
            found = parts
    if isinstance(render(plain, adaptation=found), Rejected):
        listed = replace(found, no_tools="[]")
        if isinstance(render(plain, adaptation=listed), str):
            found = listed
    found = replace(found, reasoning_keys=_probe_reasoning_key(render, found))
    found = replace(found, tool_ids=_probe_id_form(render, found))
    forms = probe_argument_forms(render, found)
    return replace(found, arguments="string" if forms == "string" else "object", takes_text=forms != "object")


def _probe_reasoning_key(render: ProbeRenderer, base: Adaptation) -> tuple[str, ...]:
    """Return the key that the template reads, or all candidates if no probe shows reasoning."""
    probes = [(SENTINELS.make("urur"), None), (SENTINELS.make("uet"), _TOOLS)]
    for key in ("reasoning_content", "thinking", "reasoning"):
        only = replace(base, reasoning_keys=(key,))
        for messages, tools in probes:
            last = [one["reasoning_content"] for one in messages if "reasoning_content" in one][-1]
            if shows_text(render(messages, tools, adaptation=only), last):
                return (key,)
    return base.reasoning_keys


def _probe_id_form(render: ProbeRenderer, base: Adaptation) -> Literal["any", "nine_alphanumeric"]:
    long = SENTINELS.make("uctaua")
    short = SENTINELS.make("ucta")
    short[1]["tool_calls"][0]["id"] = short[2]["tool_call_id"] = "call_1"
    for arguments in ("object", "string"):
        given = replace(base, arguments=arguments)
        if all(isinstance(render(messages, _TOOLS, adaptation=given), str) for messages in (long, short)):
            return "any"
        if isinstance(render(long, _TOOLS, adaptation=replace(given, tool_ids="nine_alphanumeric")), str):
            return "nine_alphanumeric"
    return "any"


def probe_argument_forms(
    render: ProbeRenderer, base: Adaptation
) -> Literal["object", "string", "either", "dropped", "refused"]:
    """Find the form in which the template prints call arguments unchanged."""
    arguments = {"qzkey": 'qz"value', "qznumber": [1, {"qzdeep": True}]}
    called = SENTINELS.make("ucta", arguments=lambda _, __: arguments)
    printed: dict[str, Literal["yes", "no", "refused"]] = {}
    for form in ("object", "string"):
        rendered = render(called, _TOOLS, adaptation=replace(base, arguments=form))
        if isinstance(rendered, Rejected):
            printed[form] = "refused"
            continue
        # The `repr` of a dict, or text that is escaped twice, does not count as unchanged.
        twice = r"\"qzkey\"" in rendered or r"qz\\\"value" in rendered
        python = "'qzkey': " in rendered
        once = 'qz\\"value' in rendered or 'qz"value' in rendered
        printed[form] = "yes" if once and "qzkey" in rendered and not twice and not python else "no"
    if printed["object"] == "yes":
        return "either" if printed["string"] == "yes" else "object"
    if printed["string"] == "yes":
        return "string"
    return "refused" if set(printed.values()) == {"refused"} else "dropped"


def shows_text(rendered: str | Rejected, text: str) -> bool:
    """Return whether a probe was rendered and its render contains a text."""
    return isinstance(rendered, str) and text in rendered
