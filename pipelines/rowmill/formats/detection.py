"""Detects which of the known conversation shapes a record has, and returns its messages.

What belongs here: the order in which shapes are tried, and each shape's columns. What does not: reading a
message (`messages.py`).

    messages         {"messages": [{"role": …, "content": …}, …]}, or the list as JSON text
    sharegpt         {"conversations": [{"from": …, "value": …}, …], "system": …}
    alpaca           {"instruction": …, "input": …, "output": …, "system": …, "history": [[…, …], …]}
    prompt_response  {"prompt": …, "response": …}, each text, messages or one message;
                     a prompt column `instruction` joins `input` as Alpaca does
    text             {"text": …}, for `auto` only

The first shape that matches wins. `instruction` with a response column but without `output` is not a known shape:
whether other columns (`input`, `context`) belong to the prompt is unknown, so such a record is rejected, unless
`dataset_schema: alpaca` is set.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from rowmill.core.config import describe_type
from rowmill.core.json import Json, from_json
from rowmill.formats.columns import ConversationColumns
from rowmill.formats.record_values import is_list, is_mapping
from rowmill.schema.rows import Rejected


class DetectedMessages(NamedTuple):
    """A record's messages as in the source, and their keys for role and content."""

    schema: str
    messages: list[Json]
    role_key: str = "role"
    content_key: str = "content"
    system: Json = None
    """A system message outside the list of messages."""


_PAIR_LENGTH = 2
_ShapeReader = Callable[[Mapping[str, Json], ConversationColumns], DetectedMessages | Rejected | None]


def detect_messages(
    record: Mapping[str, Json], columns: ConversationColumns, *, text_key: str | None = None
) -> DetectedMessages | Rejected:
    """Return the record's messages in the first shape that matches; null counts as absent.

    A record without a conversation's shape that has a value under `text_key` is a document.
    """
    wanted = columns.dataset_schema
    if wanted != "auto":
        return SHAPE_DETECTORS[wanted](record, columns) or _explain_mismatch(record, columns)
    for shape in SHAPE_DETECTORS.values():
        found = shape(record, columns)
        if found is not None:
            return found
    if text_key is not None and record.get(text_key) is not None:
        return DetectedMessages("text", [])
    return _explain_unknown_shape(record, columns)


def _detect_message_list(record: Mapping[str, Json], columns: ConversationColumns) -> DetectedMessages | None:
    value = record.get(columns.messages_field)
    if type(value) is str:
        value = _parse_list(value)
    return _read_message_list("messages", value, columns)


def _detect_sharegpt(record: Mapping[str, Json], columns: ConversationColumns) -> DetectedMessages | None:
    value = record.get("conversations")
    if type(value) is str:
        value = _parse_list(value)
    found = _read_message_list("sharegpt", value, columns)
    if found is None or (found.messages and found.role_key == "role" and columns.role_field is None):
        return None
    return found._replace(system=record.get("system"))


def _detect_alpaca(record: Mapping[str, Json], columns: ConversationColumns) -> DetectedMessages | Rejected | None:
    if record.get("instruction") is None:
        return None
    response = record.get("output")
    if response is None and columns.dataset_schema == "alpaca":
        _, response = _find_first_column(record, columns.response_fields)
    return None if response is None else _read_alpaca_turns(record, response)


def _detect_prompt_response(
    record: Mapping[str, Json], columns: ConversationColumns
) -> DetectedMessages | Rejected | None:
    prompt_field, prompt = _find_first_column(record, columns.prompt_fields)
    response_field, response = _find_first_column(record, columns.response_fields)
    if prompt is None or response is None:
        return None
    if prompt_field == "instruction" and type(prompt) is str and response_field != "input":
        prompt = join_alpaca_prompt(record)
        if isinstance(prompt, Rejected):
            return prompt
    role_key, content_key = columns.role_field or "role", columns.content_field or "content"
    turns: list[Json] = []
    for role, value in (("user", prompt), ("assistant", response)):
        if type(value) is str:
            turns.append({role_key: role, content_key: value})
        elif is_list(value):
            turns.extend(value)
        elif is_mapping(value):
            turns.append(value)
        else:
            return Rejected(
                "content_not_text", f"the {role}'s side is {describe_type(value)}, expected text or messages"
            )
    return DetectedMessages("prompt_response", turns, role_key, content_key)


SHAPE_DETECTORS: dict[str, _ShapeReader] = {
    "messages": _detect_message_list,
    "sharegpt": _detect_sharegpt,
    "alpaca": _detect_alpaca,
    "prompt_response": _detect_prompt_response,
}


def join_alpaca_prompt(record: Mapping[str, Json]) -> str | Rejected:
    """Append `input` to `instruction` on a new line, unless it is blank."""
    instruction, extra = record.get("instruction"), record.get("input")
    if type(instruction) is not str:
        return Rejected("content_not_text", f"instruction is {describe_type(instruction)}")
    if extra is None or extra == "":
        return instruction
    if type(extra) is not str:
        return Rejected("content_not_text", f"input is {describe_type(extra)}")
    return instruction if extra.isspace() else f"{instruction}\n{extra}"


def _read_alpaca_turns(record: Mapping[str, Json], response: Json) -> DetectedMessages | Rejected:
    prompt = join_alpaca_prompt(record)
    if isinstance(prompt, Rejected):
        return prompt
    turns: list[Json] = []
    history = record.get("history")
    for pair in history if is_list(history) else [] if history is None else [history]:
        if not is_list(pair) or len(pair) != _PAIR_LENGTH:
            return Rejected("bad_messages", "history is not a list of [user, assistant] pairs")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return DetectedMessages("alpaca", turns, system=record.get("system"))


def _read_message_list(schema: str, value: Json, columns: ConversationColumns) -> DetectedMessages | None:
    """Accept a list whose first item is a mapping; the other items are checked when they are read."""
    # Types are compared without calls: this is done for every record.
    if type(value) is not list:
        return None
    first: Json = value[0] if value else {}
    if type(first) is not dict:
        return None
    role_key, content_key = "role", "content"
    # ShareGPT's keys in the messages column: users often set `messages_field: conversations`.
    if "from" in first and "role" not in first:
        schema, role_key, content_key = "sharegpt", "from", "value"
    return DetectedMessages(schema, value, columns.role_field or role_key, columns.content_field or content_key)


def _parse_list(text: str) -> Json:
    if not text.lstrip().startswith("["):
        return None
    try:
        return from_json(text)
    except ValueError:
        return None


def _find_first_column(record: Mapping[str, Json], names: Iterable[str]) -> tuple[str, Json]:
    """Return the name and the value of the first column that is not null; if there is none, an empty name and None."""
    return next(((name, value) for name in names if (value := record.get(name)) is not None), ("", None))


def _explain_mismatch(record: Mapping[str, Json], columns: ConversationColumns) -> Rejected:
    """Return the reject of a record that does not have the recipe's shape."""
    for name, shape in SHAPE_DETECTORS.items():
        if name != columns.dataset_schema and shape(record, columns) is not None:
            return Rejected("unknown_schema", f"the record is {name}, expected {columns.dataset_schema}")
    return _explain_unknown_shape(record, columns)


def _explain_unknown_shape(record: Mapping[str, Json], columns: ConversationColumns) -> Rejected:
    """Return the reject of a record without a known shape: a messages column that is invalid or missing, or none."""
    present = ", ".join(sorted(record)[:20]) or "no column"
    value = record.get(columns.messages_field)
    if value is not None:
        expected = "expected a list of mappings, each with a role"
        return Rejected("bad_messages", f"{columns.messages_field} is {describe_type(value)}, {expected}")
    if columns.dataset_schema != "auto" or columns.messages_field != "messages":
        wanted = columns.messages_field if columns.dataset_schema in ("auto", "messages") else columns.dataset_schema
        return Rejected("missing_field", f"{wanted} is absent or null; the record has {present}")
    hint = ""
    if is_list(record.get("conversations")):
        hint = "; set format.messages_field: conversations to read its list"
    elif record.get("instruction") is not None:
        hint = "; dataset_schema: alpaca reads instruction, input and a response column"
    return Rejected("unknown_schema", f"no known shape in {present}{hint}")
