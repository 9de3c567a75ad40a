"""Adapt canonical messages to one template: arguments as object or text, call ids, reasoning key, form of content.

What belongs here: applying the settings that probes found. What does not: the probes (`probes.py`), or the canonical
form (`schema/rows.py`).
"""

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Literal

from rowmill.core.frozen_classes import frozen_dataclass
from rowmill.core.json import Json
from rowmill.schema.rows import Message

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_INTERNAL_KEYS = ("train", "weight", "inline_reasoning", "arguments_source")
"""Keys of canonical messages that are not passed to the template."""
_ADAPTED_KEYS = frozenset((*_INTERNAL_KEYS, "tool_calls", "tool_call_id", "reasoning_content"))


class BadArgumentsError(ValueError):
    """A call's arguments are unparsed text, and the template prints only objects."""


@frozen_dataclass
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
        adapted = {key: value for key, value in message.items() if key not in _INTERNAL_KEYS}
        reasoning = adapted.get("reasoning_content")
        if reasoning is not None and self.reasoning_keys != ("reasoning_content",):
            adapted = self._rename_reasoning(adapted, reasoning)
        calls: list[Json] | None = adapted.get("tool_calls")
        if isinstance(calls, list):
            sources: list[str | None] = message.get("arguments_source") or [None] * len(calls)
            adapted["tool_calls"] = [
                self._adapt_call(call, source) for call, source in zip(calls, sources, strict=False)
            ]
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
