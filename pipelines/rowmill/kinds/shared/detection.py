r"""Detects which of the known conversation shapes a record has, and returns its messages.

    messages         {"messages": [{"role": …, "content": …}, …]}, or the list as JSON text; `contents` with `parts`
    sharegpt         {"conversations": [{"from": …, "value": …}, …], "system": …}
    exchanges        {"conversation": [{"input": …, "output": …}, …]}, or a list of pairs of texts
    turns            {"conversations": ["…", "…"]}: texts of user and model in turn
    transcript       {"chat": "USER: …\nASSISTANT: …"} (`transcripts.py`)
    alpaca           {"instruction": …, "input": …, "output": …, "system": …, "history": [[…, …], …]}
    calls            {"query": …, "answers": "[{\"name\": …}]", "tools": "…"}
    prompt_response  {"prompt": …, "response": …}, each text, messages or one message
    text             {"text": …}, for `auto` only

The first shape that matches wins. What belongs to a prompt is read in every shape: a system message in a column of its
own, text in `context_fields` after the prompt, earlier turns in `history`. A column of such a name that a shape cannot
use rejects the record (`canonicalization.py`), so nothing of a prompt is left out silently.

A list of messages is looked for in `messages_field`, and, while that is not set, in the columns that public datasets
use for it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from rowmill.core.config import describe_type
from rowmill.core.json import Json, from_json
from rowmill.kinds.shared.columns import ConversationColumns
from rowmill.kinds.shared.messages import is_list, is_mapping, split_transcript
from rowmill.kinds.shared.prompt_columns import (
    SYSTEM_COLUMNS,
    begins_with_system,
    find_first_column,
    find_system,
    join_context,
    pair_history,
    read_history,
)
from rowmill.schema.rows import Rejected

LIST_COLUMNS = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "chat", "contents")
"""Columns that hold a conversation, in the order in which they are tried."""

EXCHANGE_KEYS = (
    *(("input", "output"), ("user", "assistant"), ("human", "assistant"), ("prompt", "response")),
    *(("question", "answer"), ("instruction", "output"), ("instruction", "response"), ("human", "bot")),
    *(("user", "bot"), ("human", "gpt"), ("prompt", "completion"), ("query", "response")),
)
"""Keys of a user's and a model's text in one item of a list."""

CALL_COLUMNS = ("answers", "answer", "calls", "tool_calls", "function_calls", "output", "response")
"""Columns whose JSON text may be the calls that answer a prompt."""


class DetectedMessages(NamedTuple):
    """A record's messages as in the source, and their keys for role and content."""

    schema: str
    messages: list[Json]
    role_key: str = "role"
    content_key: str = "content"
    system: Json = None
    """A system message outside the list of messages."""
    columns: tuple[str, ...] = ()
    """Columns of the record that hold the messages and the system message."""


_PAIR_LENGTH = 2
_SYSTEM_COLUMNS = frozenset(SYSTEM_COLUMNS)
_ShapeReader = Callable[[Mapping[str, Json], ConversationColumns], DetectedMessages | Rejected | None]


def detect_messages(
    record: Mapping[str, Json], columns: ConversationColumns, *, text_key: str | None = None
) -> DetectedMessages | Rejected:
    """Return the record's messages in the first shape that matches; null counts as absent.

    A record without a conversation's shape that has a value under `text_key` is a document.
    """
    wanted = columns.dataset_schema
    found = _detect_list(record, columns)
    if found is None or (wanted not in ("auto", found.schema) and isinstance(found, DetectedMessages)):
        found = _detect_pair(record, columns, wanted)
    if found is not None:
        is_alone = isinstance(found, Rejected) or _SYSTEM_COLUMNS.isdisjoint(record)
        return found if is_alone else add_system(record, found, columns.system_prompt)
    if wanted != "auto":
        other = _detect_list(record, columns) or _detect_pair(record, columns, "auto")
        if isinstance(other, DetectedMessages):
            return Rejected("unknown_schema", f"the record is {other.schema}, expected {wanted}")
        return _explain_unknown_shape(record, columns)
    document = None if text_key is None else record.get(text_key)
    if document is None:
        return _explain_unknown_shape(record, columns)
    if type(document) is str and (messages := split_transcript(document)) is not None:
        return add_system(
            record, DetectedMessages("transcript", messages, columns=(str(text_key),)), columns.system_prompt
        )
    return explain_tree(record) or DetectedMessages("text", [], columns=(str(text_key),))


def _detect_pair(
    record: Mapping[str, Json], columns: ConversationColumns, wanted: str
) -> DetectedMessages | Rejected | None:
    for name, shape in _PAIR_SHAPES.items():
        if wanted in ("auto", name) and (found := shape(record, columns)) is not None:
            return found
    return None


def explain_tree(record: Mapping[str, Json]) -> Rejected | None:
    """Return the reject of a record that is one message of a tree of conversations, as in OASST."""
    if "parent_id" in record and type(record.get("role")) is str:
        return Rejected(
            "unknown_schema",
            "the record is one message of a tree, linked by parent_id; a conversation is a path from its root: join "
            "the messages of each path to a list",
        )
    return None


# ── Lists of messages ──────────────────────────────────────────────────────────────────────────────


def _detect_list(record: Mapping[str, Json], columns: ConversationColumns) -> DetectedMessages | None:
    # Messages in the column `messages` are what most records have.
    first = columns.messages_field
    value = record.get(first)
    if value is not None and (found := _read_list(first, value, columns)) is not None:
        return found
    for name in LIST_COLUMNS if first == "messages" else ("conversations",):
        value = record.get(name)
        if value is not None and (found := _read_list(name, value, columns)) is not None:
            return found
    return None


def _read_list(name: str, value: Json, columns: ConversationColumns) -> DetectedMessages | None:
    """Read a list by its first item; the other items are checked when they are read."""
    # Types are compared without calls: this is done for every record.
    if type(value) is str:
        parsed = _parse_list(value)
        if parsed is None:
            messages = split_transcript(value)
            return None if messages is None else DetectedMessages("transcript", messages, columns=(name,))
        value = parsed
    if type(value) is not list:
        return None
    first: Json = value[0] if value else {}
    if type(first) is str:
        # MT-Bench's `turns` are prompts alone.
        return None if name == "turns" else _read_turns(name, value)
    if type(first) is not dict:
        messages = pair_history(value) if type(first) is list else None
        return None if messages is None else DetectedMessages("exchanges", messages, columns=(name,))
    schema, role_key, content_key = "sharegpt" if name == "conversations" else "messages", "role", "content"
    if "role" in first or columns.role_field is not None or columns.content_field is not None:
        schema = "messages" if columns.role_field is None else schema
    # ShareGPT's keys in any column: users often set `messages_field: conversations`.
    elif "from" in first:
        schema, role_key, content_key = "sharegpt", "from", "value"
    else:
        for keys in EXCHANGE_KEYS:
            if keys[0] in first and keys[1] in first:
                return _read_exchanges(name, value, keys)
    if "parts" in first and "content" not in first and columns.content_field is None:
        value = [message for item in value for message in _read_gemini(item)]
    return DetectedMessages(
        schema, value, columns.role_field or role_key, columns.content_field or content_key, columns=(name,)
    )


def _read_exchanges(name: str, items: list[Json], keys: tuple[str, str]) -> DetectedMessages:
    """Return two messages for each item; one that is something else is left to whoever reads messages."""
    messages: list[Json] = []
    for item in items:
        if not is_mapping(item):
            messages.append(item)
            continue
        for role, key in zip(("user", "assistant"), keys, strict=True):
            messages.append({"role": role, "content": item.get(key)})
    return DetectedMessages("exchanges", messages, columns=(name,))


def _read_turns(name: str, texts: list[Json]) -> DetectedMessages | None:
    if len(texts) < _PAIR_LENGTH or any(type(text) is not str for text in texts):
        return None
    roles = ("user", "assistant")
    return DetectedMessages(
        "turns", [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], columns=(name,)
    )


def _read_gemini(item: Json) -> list[Json]:
    """Return the messages of one entry of `contents`, whose parts are text, calls and their results."""
    if not is_mapping(item) or not is_list(parts := item.get("parts")):
        return [item]
    others = {key: value for key, value in item.items() if key not in ("role", "parts")}
    results: list[Json] = []
    calls: list[Json] = []
    content: list[Json] = []
    for part in parts:
        call = _find_first_value(part, ("functionCall", "function_call")) if is_mapping(part) else None
        result = _find_first_value(part, ("functionResponse", "function_response")) if is_mapping(part) else None
        if is_mapping(call):
            calls.append({"name": call.get("name"), "arguments": call.get("args"), "id": call.get("id")})
        elif is_mapping(result):
            results.append({"role": "tool", "name": result.get("name"), "content": result.get("response")})
        elif is_mapping(part) and part.get("thought") is True:
            content.append({"type": "thinking", "thinking": part.get("text")})
        else:
            content.append(part)
    message = {"role": item.get("role"), "content": content, **others} | ({"tool_calls": calls} if calls else {})
    return [*results, message] if content or calls or not results else results


# ── A prompt and a response ────────────────────────────────────────────────────────────────────────


def _detect_alpaca(record: Mapping[str, Json], columns: ConversationColumns) -> DetectedMessages | Rejected | None:
    if record.get("instruction") is None:
        return None
    response_field, response = "output", record.get("output")
    if response is None and columns.dataset_schema == "alpaca":
        response_field, response = find_first_column(record, columns.response_fields)
    if response is None:
        return None
    joined = join_context(record, "instruction", columns.context_fields, response_field)
    if isinstance(joined, Rejected):
        return joined
    prompt, used = joined
    history = read_history(record)
    if isinstance(history, Rejected):
        return history
    turns = [*history, {"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    used = (*used, response_field, *(("history",) if history else ()))
    return DetectedMessages("alpaca", turns, columns=used)


def _detect_calls(record: Mapping[str, Json], columns: ConversationColumns) -> DetectedMessages | Rejected | None:
    """Return a prompt whose answer is nothing but calls, beside the tools that are called."""
    if not any(record.get(name) for name in ("tools", "functions")):
        return None
    prompt_field, prompt = find_first_column(record, columns.prompt_fields)
    response_field, response = find_first_column(record, CALL_COLUMNS)
    calls = _parse_list(response) if type(response) is str else response
    if type(prompt) is not str or not is_list(calls) or not calls or response_field == prompt_field:
        return None
    if not all(is_mapping(call) and ("name" in call or "function" in call) for call in calls):
        return None
    turns: list[Json] = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": "", "tool_calls": response},
    ]
    return DetectedMessages("calls", turns, columns=(prompt_field, response_field))


def _detect_prompt_response(
    record: Mapping[str, Json], columns: ConversationColumns
) -> DetectedMessages | Rejected | None:
    prompt_field, prompt = find_first_column(record, columns.prompt_fields)
    response_field, response = find_first_column(
        record, [name for name in columns.response_fields if name != prompt_field]
    )
    if prompt is None or response is None:
        return None
    used: tuple[str, ...] = (prompt_field, response_field)
    if type(prompt) is str:
        joined = join_context(record, prompt_field, columns.context_fields, response_field)
        if isinstance(joined, Rejected):
            return joined
        prompt, used = joined[0], (*joined[1], response_field)
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
    history = read_history(record)
    if isinstance(history, Rejected):
        return history
    if history and (role_key, content_key) == ("role", "content"):
        turns, used = [*history, *turns], (*used, "history")
    return DetectedMessages("prompt_response", turns, role_key, content_key, columns=used)


_PAIR_SHAPES: dict[str, _ShapeReader] = {
    "alpaca": _detect_alpaca,
    "calls": _detect_calls,
    "prompt_response": _detect_prompt_response,
}


# ── Beside the messages ────────────────────────────────────────────────────────────────────────────


def add_system(record: Mapping[str, Json], found: DetectedMessages, system_prompt: str | None) -> DetectedMessages:
    """Add the system message of a column that is not `system_prompt`, unless the messages begin with the same text."""
    name, value = find_system(record, (*found.columns, system_prompt))
    if name is None:
        return found
    is_repeated = begins_with_system(found.messages, value, found.role_key, found.content_key)
    return found._replace(system=None if is_repeated else value, columns=(*found.columns, name))


def _parse_list(text: str) -> Json:
    if not text.lstrip().startswith("["):
        return None
    try:
        return from_json(text)
    except ValueError:
        return None


def _find_first_value(value: Mapping[str, Json], keys: Iterable[str]) -> Json:
    return next((one for key in keys if (one := value.get(key)) is not None), None)


# ── What is wrong ──────────────────────────────────────────────────────────────────────────────────


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
    return explain_tree(record) or Rejected("unknown_schema", f"no known shape in {present}")
