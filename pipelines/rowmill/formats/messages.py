"""Reads parts of one message: content as text or typed parts, flags, and a row's template kwargs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rowmill.core.config import describe_type
from rowmill.core.json import Json, from_json
from rowmill.formats.record_values import is_list, is_mapping
from rowmill.schema.rows import Message, Rejected

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
REASONING_PARTS = frozenset({"reasoning", "thinking"})
CALL_PARTS = frozenset({"tool_call", "tool_use"})
MEDIA_PARTS = (
    "image",
    "audio",
    "video",
    "file",
    "document",
    "input_image",
    "input_audio",
    "input_video",
    "input_file",
)
MIN_WEIGHT = 2.0**-126
MAX_WEIGHT = (2 - 2.0**-23) * 2.0**127
"""Range of normal float32 values: outside it, a weight would become 0, imprecise or infinite."""
FORBIDDEN_KWARGS = frozenset({"messages", "tools", "tokenize", "chat_template"})


@dataclass(slots=True)
class ContentParts:
    """Typed content, sorted into text, reasoning and calls."""

    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[Json] = field(default_factory=list[Json])


def read_parts(content: Json, *, speaks: bool) -> ContentParts | Rejected:
    """Sort a list of typed parts; reasoning and call parts are allowed only if the model `speaks`."""
    if not is_list(content):
        return Rejected("content_not_text", f"content is {describe_type(content)}, expected text or a list of parts")
    parts = ContentParts()
    for part in content:
        problem = _sort_part(part, parts, speaks=speaks)
        if problem is not None:
            return problem
    return parts


def has_typed_parts(content: Json) -> bool:
    """Return whether content is a list of parts that say what they are; other lists and objects are JSON."""
    return is_list(content) and all(is_mapping(part) and type(part.get("type")) is str for part in content)


def split_tool_results(message: Mapping[str, Json], content_key: str) -> list[Message]:
    """Return a message whose parts hold results of tools as one message for each; none if it holds no results.

    Anthropic's results are parts of the user's next message, which may hold nothing else.
    """
    content = message.get(content_key)
    if not is_list(content) or not any(is_mapping(part) and part.get("type") == "tool_result" for part in content):
        return []
    results: list[Message] = []
    others: list[Json] = []
    for part in content:
        if not is_mapping(part) or part.get("type") != "tool_result":
            others.append(part)
            continue
        given = part.get("content")
        key = {} if part.get("tool_use_id") is None else {"tool_call_id": part["tool_use_id"]}
        role_key = "from" if "from" in message and "role" not in message else "role"
        results.append({role_key: "tool", content_key: "" if given is None else given, **key})
    return [*results, *([{**message, content_key: others}] if others else [])]


def _sort_part(part: Json, parts: ContentParts, *, speaks: bool) -> Rejected | None:
    if not is_mapping(part):
        return Rejected("unknown_content_part", f"a part is {describe_type(part)}, expected a mapping")
    kind = part.get("type")
    if kind is not None and type(kind) is not str:
        return Rejected("unknown_content_part", f"a part's type is {describe_type(kind)}")
    if kind is None or kind in TEXT_PARTS:
        text = _get_part_text(part, ("text", "value"))
        if text is None:
            return Rejected("unknown_content_part", "a text part without text")
        parts.text.append(text)
    elif speaks and kind in REASONING_PARTS:
        text = _get_part_text(part, (kind, "text", "value", "content"))
        if text is None:
            return Rejected("unknown_content_part", f"a {kind} part without text")
        parts.reasoning.append(text)
    elif speaks and kind in CALL_PARTS:
        parts.calls.append(part["value"] if part.get("value") is not None else part)
    elif kind.startswith(MEDIA_PARTS):
        return Rejected("multimodal_content", f"a part is {kind}")
    else:
        return Rejected("unknown_content_part", f"a part is {kind}")
    return None


def _get_part_text(part: Mapping[str, Json], keys: Iterable[str]) -> str | None:
    for key in keys:
        text = part.get(key)
        if type(text) is str:
            return text
    return None


def read_flags(message: Message, names: Iterable[str], *, weighted: bool) -> dict[str, Json] | Rejected:
    """Turn a message's flags into `train` and, if a number was given, `weight`.

    A boolean decides whether the message is trained, a number its weight. With `weighted` (the recipe's
    `loss.weights`), numbers other than 0 and 1 are allowed.
    """
    train: bool | None = None
    weight: float | None = None
    for name in names:
        value = message.get(name)
        if value is None:
            continue
        if type(value) is bool:
            trains = value
        elif type(value) in (int, float):
            if not (value in (0, 1) or (weighted and MIN_WEIGHT <= value <= MAX_WEIGHT)):
                return Rejected("bad_weight", f"{name} is {value}")
            if weight not in (None, float(value)):
                return Rejected("flag_conflict", f"{name} is {value}, but another flag is {weight}")
            weight, trains = float(value), value > 0
        else:
            return Rejected("bad_weight", f"{name} is {describe_type(value)}, expected a boolean or a number")
        if train not in (None, trains):
            return Rejected("flag_conflict", f"{name} is {value}, but another flag contradicts it")
        train = trains
    if train is None:
        return {}
    return {"train": train} if weight is None else {"train": train, "weight": weight}


_CANONICAL_FLAGS = frozenset({"train", "weight"})


def remove_flags(message: Message) -> Message:
    """Return a canonical message without the flags of its training: in a prompt they mean nothing."""
    if _CANONICAL_FLAGS.isdisjoint(message):
        return message
    return {key: value for key, value in message.items() if key not in _CANONICAL_FLAGS}


def read_kwargs(value: Json) -> tuple[dict[str, Json], bool] | Rejected:
    """Return a row's template variables, and whether an `add_generation_prompt` among them was ignored."""
    if type(value) is str:
        if not value or value.isspace():
            return {}, False
        try:
            value = from_json(value)
        except ValueError as error:
            return Rejected("bad_template_kwargs", f"not JSON: {error}")
    if value is None:
        return {}, False
    if not is_mapping(value):
        return Rejected("bad_template_kwargs", f"{describe_type(value)}, expected a mapping")
    for name in value:
        if name in FORBIDDEN_KWARGS or name.startswith("return_"):
            return Rejected("bad_template_kwargs", f"a row cannot set {name}")
    if "add_generation_prompt" not in value:
        return value, False
    return {name: one for name, one in value.items() if name != "add_generation_prompt"}, True
