"""Columns that belong to a prompt, whatever holds the prompt itself: a system message, context, earlier turns.

They are read in every shape of a record, or the record is refused: a prompt without its context asks something else,
and nobody sees it in the numbers.
"""

from collections.abc import Iterable, Mapping, Sequence

from rowmill.core.config import describe_type
from rowmill.core.json import Json
from rowmill.kinds.shared.messages import is_list, is_mapping, strip_speaker
from rowmill.schema.rows import Rejected

SYSTEM_COLUMNS = ("system", "system_prompt", "system_message", "systemInstruction", "system_instruction")
"""Columns that hold a conversation's system message, the most likely first."""

CONTEXT_COLUMNS = ("input", "context")
"""Columns that hold text which belongs to the prompt and stands after it, the most likely first."""

PROMPT_COLUMNS = frozenset({*SYSTEM_COLUMNS, *CONTEXT_COLUMNS, "history", "instruction", "choices", "options"})
"""Columns whose name says that they belong to a prompt."""


def list_prompt_columns(record: Mapping[str, Json], read: Sequence[str]) -> list[str]:
    """Return the columns whose name says that they belong to a prompt, that hold something, and that are not read."""
    return [
        name
        for name in sorted(PROMPT_COLUMNS)
        if name not in read and (value := record.get(name)) and not (type(value) is str and value.isspace())
    ]


def find_first_column(record: Mapping[str, Json], names: Iterable[str]) -> tuple[str, Json]:
    """Return the name and the value of the first column that is not null; if there is none, an empty name and None."""
    return next(((name, value) for name in names if (value := record.get(name)) is not None), ("", None))


def find_system(record: Mapping[str, Json], read: Sequence[str | None] = ()) -> tuple[str | None, Json]:
    """Return the column of the system message and its value, as text if it is a list of parts."""
    for name in SYSTEM_COLUMNS:
        value = record.get(name)
        if value is None or value == "" or name in read:
            continue
        parts = value.get("parts") if is_mapping(value) else value
        if is_list(parts) and all(is_mapping(part) and type(part.get("text")) is str for part in parts):
            value = "".join(part["text"] for part in parts)
        return name, strip_speaker(value, "system") if type(value) is str else value
    return None, None


def begins_with_system(
    messages: Sequence[Json], text: Json, role_key: str = "role", content_key: str = "content"
) -> bool:
    """Return whether messages begin with a system message of this content, so that it need not be added."""
    opening = messages[0] if messages else None
    return is_mapping(opening) and opening.get(role_key) == "system" and opening.get(content_key) == text


def join_context(
    record: Mapping[str, Json], prompt_field: str, context_fields: Iterable[str], response_field: str = ""
) -> tuple[str, tuple[str, ...]] | Rejected:
    """Append the text of the context's columns to a prompt, each on a new line, unless it is blank.

    The columns of both are returned too.
    """
    prompt = record.get(prompt_field)
    if type(prompt) is not str:
        return Rejected("content_not_text", f"{prompt_field} is {describe_type(prompt)}")
    text, used = prompt, [prompt_field]
    for name in context_fields:
        extra = record.get(name)
        if name in (prompt_field, response_field) or extra is None or extra == "":
            continue
        if type(extra) is not str:
            return Rejected("content_not_text", f"{name} is {describe_type(extra)}")
        used.append(name)
        if not extra.isspace():
            text = f"{text}\n{extra}"
    return text, tuple(used)


def read_history(record: Mapping[str, Json]) -> list[Json] | Rejected:
    """Return the turns before the prompt; none if `history` is absent, empty, or text, which is refused as unread."""
    history = record.get("history")
    if not history or type(history) is str:
        return []
    if is_list(history) and all(is_mapping(message) and "role" in message for message in history):
        return history
    is_one_pair = is_list(history) and len(history) == _PAIR_LENGTH and all(type(text) is str for text in history)
    turns = pair_history([history] if is_one_pair else history)
    return Rejected("bad_messages", "history is not a list of [user, assistant] pairs") if turns is None else turns


def pair_history(value: Json) -> list[Json] | None:
    """Return the messages of a list of [user, assistant] pairs; None if it is something else."""
    if not is_list(value) or not all(is_list(pair) and len(pair) == _PAIR_LENGTH for pair in value):
        return None
    roles = ("user", "assistant")
    return [{"role": roles[i], "content": text} for pair in value for i, text in enumerate(pair)]


_PAIR_LENGTH = 2

PAIR_COLUMNS = (
    *(("prompt", "response"), ("prompt", "completion"), ("prompt", "answer"), ("question", "answer")),
    *(("question", "response"), ("instruction", "output"), ("instruction", "response"), ("query", "response")),
    *(("input", "output"), ("inputs", "targets"), ("source", "target"), ("prompt", "output")),
    *(("input", "target"), ("input", "response"), ("input", "completion"), ("query", "answer"), ("query", "output")),
    *(("instruction", "answer"), ("instruction", "completion"), ("question", "output"), ("question", "completion")),
    *(("problem", "solution"), ("problem", "generated_solution"), ("question", "generated_solution")),
    *(("question", "solution"), ("problem", "response"), ("problem", "answer"), ("prompt", "solution")),
    *(("prompt", "target"), ("prompt", "generation"), ("user", "assistant"), ("human", "assistant")),
    *(("document", "summary"), ("article", "highlights"), ("article", "summary"), ("article", "abstract")),
    *(("dialogue", "summary"), ("text", "summary"), ("question", "final_answer"), ("instruction", "code")),
)
"""Columns that hold a prompt and its response, the most likely first."""
