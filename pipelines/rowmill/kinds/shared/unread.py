"""What nothing reads of a record: text in its columns, what belongs to a prompt, and preference data by its columns.

    {"question": "…", "response": "…", "hint": "…"}      read: question, response      unread: hint
    {"messages": […], "label": false}                    a bad answer, marked as such
    {"messages": […], "rejected_response": "…"}          an answer with a worse one

Text that a row holds anyway, such as a prompt that is repeated beside the messages, counts as read. Without the columns
of preference data, bad answers would be trained like good ones; names find them, not values, since only the data's
author knows what a `label` means. What belongs to a prompt (a system message, context, earlier turns) is read in every
shape of a record, or the record is refused: a prompt without its context asks something else.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from rowmill.core.config import describe_type
from rowmill.core.json import Json
from rowmill.kinds.shared.messages import RejectError, is_list, is_mapping, strip_speaker
from rowmill.schema.rows import PlainChat, Row

IDENTIFIER_CHARS = 40
"""A text of one word up to this length is a name, a link or a hash, not text that could be trained."""

_LEAST_CHARS = 4
"""Shorter texts stand in others by chance."""


def iterate_texts(value: Json) -> Iterator[str]:
    """Yield the texts inside a value, without names and links."""
    if type(value) is str:
        is_name = len(value) <= IDENTIFIER_CHARS and " " not in value.strip()
        if not is_name and not value.startswith(("http://", "https://")):
            yield value
    elif type(value) is dict or type(value) is list:
        for inner in value.values() if type(value) is dict else value:
            yield from iterate_texts(inner)


def measure_row_text(row: Row) -> int:
    """Count the characters that a row holds."""
    return sum(map(len, _list_row_texts(row))) + sum(map(len, iterate_texts(list(row.tools or ()))))


def measure_unread_text(record: Mapping[str, Json], row: Row, read: Collection[str]) -> dict[str, int]:
    """Return the characters of each column that is not read and that the row does not hold."""
    found: dict[str, int] = {}
    held: list[str] = []
    for name, value in record.items():
        if value is None or name in read:
            continue
        for text in iterate_texts(value):
            held = held or _list_row_texts(row)
            if any(text.strip() in one for one in held):
                continue
            # A text that repeats the row, as Alpaca's `text` does, holds nothing else.
            repeated = sum(len(one) for one in held if len(one) >= _LEAST_CHARS and one in text)
            found[name] = found.get(name, 0) + max(0, len(text) - repeated)
    return found


class UnreadTextCounter:
    """Sums, over the records of a part, the share of each record's text that a column holds and nothing reads."""

    def __init__(self, read_elsewhere: Collection[str] | None) -> None:
        """Take the columns that other options read; None counts nothing, as where the reader is the user's."""
        self._read_elsewhere = None if read_elsewhere is None else frozenset(read_elsewhere)
        self.rows = 0
        self.columns: Counter[str] = Counter()
        """Millionths of a record's text by column, summed: whole numbers are the same in any order."""

    def add(self, record: Json, made: "Row | PlainChat") -> None:
        """Count one record, which became a row."""
        if self._read_elsewhere is None or type(record) is not dict:
            return
        self.rows += 1
        read = made.read_columns
        # Types are compared without calls: most records have nothing but what is read.
        names = [
            name
            for name, value in record.items()
            if type(value) is str and name not in read and name not in self._read_elsewhere
        ]
        if not names:
            return
        row = made if isinstance(made, Row) else Row("conversation", tuple(made.messages))
        unread = measure_unread_text({name: record[name] for name in names}, row, ())
        if unread:
            total = measure_row_text(row) + sum(unread.values())
            self.columns.update({name: round(1e6 * size / total) for name, size in unread.items()})


def holds_text(row: Row, text: str) -> bool:
    """Return whether a text is part of what a row says, as the first message is in some datasets of messages."""
    wanted = text.strip()
    return any(wanted in one for one in _list_row_texts(row))


def _list_row_texts(row: Row) -> list[str]:
    texts = [row.text, row.output]
    for message in row.messages:
        texts += [value if type(value) is str else "".join(iterate_texts(value)) for value in message.values()]
    texts += [value for value in row.columns.values() if type(value) is str]
    return [one for one in texts if one]


# ── Preference columns ───────────────────────────────────────────────────────────────────────────────


ANSWER_LABELS = frozenset(
    "label kto_tag desirable is_desirable is_chosen is_rejected is_preferred is_good thumbs_up accepted".split()
)
"""Columns that rate one answer."""

ANSWER_PAIRS = frozenset(
    "chosen rejected chosen_messages rejected_messages chosen_response rejected_response response_chosen "
    "response_rejected chosen_conversations rejected_conversations chosen_answer rejected_answer response_j response_k "
    "chosen_score rejected_score score_chosen score_rejected chosen_rating rejected_rating chosen-rating "
    "rejected-rating preference preferred winner better_response_id safer_response_id".split()
)
"""Columns that hold a better and a worse answer, or compare two."""

PREFERENCE_COLUMNS = ANSWER_LABELS | ANSWER_PAIRS

_SHAPE_COLUMNS = frozenset("conversations system instruction input output history".split())
"""Columns of the known record shapes that are read without being named in the recipe (`conversation_rows.py`)."""


def find_unread_columns(named: Sequence[str | None] | None, others: Collection[str | None]) -> frozenset[str]:
    """Return the columns of preference data that a dataset does not read; none for kinds without answer columns.

    `named` are the kind's columns of answers and prompts, None for a kind without any; `others` are columns and paths
    that other option groups read. A dataset that trains on `chosen` has made the choice between a pair's answers, so
    the other columns of pairs need not be read.
    """
    if named is None:
        return frozenset()
    read = {*_SHAPE_COLUMNS, *(one for name in (*named, *others) if name for one in (name, name.split(".")[0]))}
    chosen = ANSWER_PAIRS if not read.isdisjoint(ANSWER_PAIRS) else frozenset[str]()
    return PREFERENCE_COLUMNS - read - chosen


def list_present_columns(record: Mapping[str, Json], unread: frozenset[str]) -> list[str]:
    """Return the unread columns in which a record has a value, in the record's order; an empty cell is not a value."""
    if unread.isdisjoint(record):
        return []
    return [name for name, value in record.items() if name in unread and value is not None and value != ""]


# ── Prompt columns ───────────────────────────────────────────────────────────────────────────────────


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
) -> tuple[str, tuple[str, ...]]:
    """Append the text of the context's columns to a prompt, each on a new line, unless it is blank.

    The columns of both are returned too.
    """
    prompt = record.get(prompt_field)
    if type(prompt) is not str:
        raise RejectError("content_not_text", f"{prompt_field} is {describe_type(prompt)}")
    text, used = prompt, [prompt_field]
    for name in context_fields:
        extra = record.get(name)
        if name in (prompt_field, response_field) or extra is None or extra == "":
            continue
        if type(extra) is not str:
            raise RejectError("content_not_text", f"{name} is {describe_type(extra)}")
        used.append(name)
        if not extra.isspace():
            text = f"{text}\n{extra}"
    return text, tuple(used)


def read_history(record: Mapping[str, Json]) -> list[Json]:
    """Return the turns before the prompt; none if `history` is absent, empty, or text, which is refused as unread."""
    history = record.get("history")
    if not history or type(history) is str:
        return []
    if is_list(history) and all(is_mapping(message) and "role" in message for message in history):
        return history
    is_one_pair = is_list(history) and len(history) == _PAIR_LENGTH and all(type(text) is str for text in history)
    turns = pair_history([history] if is_one_pair else history)
    if turns is None:
        raise RejectError("bad_messages", "history is not a list of [user, assistant] pairs")
    return turns


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
