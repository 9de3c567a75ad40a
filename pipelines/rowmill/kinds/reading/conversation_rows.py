r"""Chat records into conversations: which of the known shapes a record has, and the reading of each.

    messages         {"messages": [{"role": …, "content": …}, …]}, or the list as JSON text; `contents` with `parts`
    sharegpt         {"conversations": [{"from": …, "value": …}, …], "system": …}
    exchanges        {"conversation": [{"input": …, "output": …}, …]}, or a list of pairs of texts
    turns            {"conversations": ["…", "…"]}: texts of user and model in turn
    transcript       {"chat": "USER: …\nASSISTANT: …"}
    alpaca           {"instruction": …, "input": …, "output": …, "system": …, "history": [[…, …], …]}
    calls            {"query": …, "answers": "[{\"name\": …}]", "tools": "…"}
    prompt_response  {"prompt": …, "response": …}, each text, messages or one message
    text             {"text": …}, for `auto` only

The first shape that matches wins. What belongs to a prompt is read in every shape: a system message in a column of its
own, text in `context_fields` after the prompt, earlier turns in `history`. A column of such a name that a shape cannot
use rejects the record, so nothing of a prompt is left out silently. A list of messages is looked for in
`messages_field`, and, while that is not set, in the columns that public datasets use for it.

Most messages are plain: a known role and text, with nothing to read, move or reject. They are taken as they are, whole
columns at once; only the others are read key by key (`messages.py`).

    {"role": "user", "content": "Hi"}                   plain
    {"from": "human", "value": "Hi"}                    plain under another name
    {"role": "assistant", "content": "<think>…"}        not plain: its reasoning must be found
    {"role": "user", "content": "Hi", "name": "Ann"}    not plain: a third key
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from types import NoneType
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field, field_validator

from rowmill.conversation.options import MAX_WEIGHT, MIN_WEIGHT
from rowmill.core.config import describe_type
from rowmill.core.errors import find_mistyped_names
from rowmill.core.json import Json, to_json
from rowmill.core.python_literals import begins_like_literal
from rowmill.kinds.base import PAIR_SIDES, DatasetKind, DatasetOptions, RecordReader, refuse_mask_names
from rowmill.kinds.shared.filters import Filters
from rowmill.kinds.shared.messages import (
    ASKING_COLUMNS,
    CONTEXT_COLUMNS,
    FUNCTION_CALL,
    KNOWN_ROLES,
    LIST_COLUMNS,
    MAPPED_ROLES,
    PROMPT_COLUMNS,
    REFUSAL_KEY,
    SYSTEM_COLUMNS,
    RejectError,
    ToolCalls,
    find_first_column,
    find_system,
    fold_role,
    get_at_path,
    is_list,
    is_mapping,
    iterate_texts,
    join_context,
    link_calls,
    list_prompt_columns,
    pair_history,
    parse_conversation,
    parse_messages,
    part_from_calls,
    read_calls,
    read_flags,
    read_history,
    read_kwargs,
    read_parts,
    read_tools,
    read_value,
    split_open_transcript,
    split_tool_results,
    split_transcript,
    write_number,
)
from rowmill.kinds.shared.reasoning import (
    REASONING_SEPARATOR,
    ThinkTagReader,
    join_reasoning,
    join_reasoning_parts,
    move_reasoning_keys,
    read_thoughts,
    remove_keys,
)
from rowmill.kinds.shared.training_flags import (
    KNOWN_FLAGS,
    FlagMeaning,
    is_flag_list,
    is_weight_name,
    looks_like_flag,
    may_be_flag,
    name_flags,
    note_unread_flag,
)
from rowmill.schema.rows import (
    CANONICAL_FLAGS,
    MESSAGE_KEYS,
    REASONING_KEY,
    Message,
    ParseReport,
    Rejected,
    Row,
    RowKind,
    make_plain_report,
)

RESPONSE_COLUMNS = ("response", "completion", "answer", "output", "outputs", "targets", "target", "solution")
"""Columns that hold a response, in the order in which they are tried."""

# ── Options ──


class MessageColumns(DatasetKind):
    """Keys of a message, the mapping of its role, and the system message: what every kind with messages reads."""

    ROW_KIND: ClassVar[RowKind] = "conversation"

    role_field: str | None = None
    """Key of a message's role; null: `role`, and `from` in ShareGPT."""
    content_field: str | None = None
    """Key of a message's content; null: `content`, and `value` in ShareGPT."""
    role_map: dict[str, str] = Field(default={})
    """Role of the source → role of the template; adds to the built-in names (human, gpt, observation, …)."""
    unknown_roles: Literal["warn", "reject"] = "warn"
    """How to treat a role that no template is known to print: keep and list it, or reject the row."""
    system_prompt: str | None = None
    """Column whose text, or whose mapping's `content`, is the system message; null: `system` or `system_prompt`, if the
    record has one."""
    on_existing_system: Literal["merge", "replace", "keep", "reject"] = "merge"
    """If the conversation already has a system message; merge: the column's text, a blank line, the existing one."""
    assistant_roles: list[str] = Field(default=["assistant"], min_length=1)
    """Roles of the model's messages."""
    message_flags: list[str] | dict[str, FlagMeaning] = Field(default=[*KNOWN_FLAGS])
    """Keys of a message or of a part of its content that decide whether it is trained (true, false), or with which
    weight (a number; 0: not); chats have such columns too, a value of the row or a list with one of each message or
    answer. A mapping adds to these: `{trainable: train, masked: mask, skip: ignore}`, where true trains, or masks, or
    says nothing."""
    ignore_columns: list[str] = Field(default=[])
    """Columns that are left out on purpose; others of text that nothing reads are reported, and refused if their name
    says that they belong to the prompt, or what trains."""
    domain_key: str | None = None
    """Column that names the row's domain; a row without text there is in `__default__`."""
    add_bos: Literal["auto"] | bool = "auto"
    """Whether the beginning-of-text token starts a row; auto: as the template prints it."""

    @field_validator("role_map")
    @classmethod
    def _check_role_names(cls, role_map: dict[str, str]) -> dict[str, str]:
        blank = sorted(source for source, role in role_map.items() if not role.strip())
        if blank:
            raise ValueError(f"{blank[0]!r} is mapped to a blank role; expected a role name, such as user")
        return role_map

    def check_options(self, options: DatasetOptions) -> None:
        """Refuse a mask that names the sides of a pair, unless they are roles of this dataset."""
        roles = {*self.assistant_roles, *self.role_map.values()}
        wrong = (set(options.loss.mask) & PAIR_SIDES) - roles
        refuse_mask_names(self.get_name(), wrong, "roles, such as user and assistant")
        super().check_options(options)


class ConversationColumns(MessageColumns):
    """Columns of a whole conversation, in any known shape."""

    ALIASES: ClassVar[Mapping[str, str]] = {"messages_key": "messages_field"}
    READS_FLAG_COLUMNS: ClassVar[bool] = True

    dataset_schema: Literal[
        "auto", "messages", "prompt_response", "sharegpt", "alpaca", "exchanges", "turns", "transcript", "calls"
    ] = "auto"
    """Shape of every record; `auto` decides per record. A record of another shape is rejected as `unknown_schema`."""
    messages_field: str = "messages"
    """Column with the list of messages, its JSON text, or a transcript; `messages` is also looked for under the names
    that public datasets use, such as `conversations`."""
    prompt_fields: list[str] = Field(default=[*ASKING_COLUMNS], min_length=1)
    """Columns that may hold the prompt, as text or messages; the first that is not null is used."""
    context_fields: list[str] = Field(default=[*CONTEXT_COLUMNS])
    """Columns whose text belongs to a prompt that is text: each is appended to it on a new line."""
    response_fields: list[str] = Field(default=[*RESPONSE_COLUMNS], min_length=1)
    """Columns that may hold the response, as text or messages; the first that is not null is used."""
    single_turn: bool = False
    """Keep only the system message, the first user message and the next assistant message."""

    def list_answer_paths(self) -> Sequence[str]:
        """Return the columns of responses."""
        return self.response_fields

    def list_answer_columns(self) -> Sequence[str | None]:
        """Return the columns of messages, prompts and responses."""
        return [self.messages_field, *self.prompt_fields, *self.response_fields, self.system_prompt, self.domain_key]


# ── Shapes of records ──

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


_SYSTEM_COLUMNS = frozenset(SYSTEM_COLUMNS)


def detect_messages(
    record: Mapping[str, Json], columns: ConversationColumns, *, text_key: str | None = None
) -> DetectedMessages:
    """Return the record's messages in the first shape that matches; null counts as absent.

    A record without a conversation's shape that has a value under `text_key` is a document.
    """
    wanted = columns.dataset_schema
    found = _detect_list(record, columns)
    if found is None or wanted not in ("auto", found.schema):
        found = _detect_pair(record, columns, wanted)
    if found is not None:
        is_alone = _SYSTEM_COLUMNS.isdisjoint(record)
        return found if is_alone else add_system(record, found, columns.system_prompt)
    if wanted != "auto":
        with suppress(RejectError):
            found = _detect_list(record, columns) or _detect_pair(record, columns, "auto")
        if found is not None:
            raise RejectError("unknown_schema", f"the record is {found.schema}, expected {wanted}")
    document = None if text_key is None else record.get(text_key)
    if document is None or wanted != "auto":
        raise _explain_unknown_shape(record, columns)
    if type(document) is str and (messages := split_transcript(document)) is not None:
        found = DetectedMessages("transcript", messages, columns=(str(text_key),))
        return add_system(record, found, columns.system_prompt)
    if tree := explain_tree(record):
        raise RejectError("unknown_schema", tree)
    return DetectedMessages("text", [], columns=(str(text_key),))


def _detect_pair(record: Mapping[str, Json], columns: ConversationColumns, wanted: str) -> DetectedMessages | None:
    for name, shape in _PAIR_SHAPES.items():
        if wanted in ("auto", name) and (found := shape(record, columns)) is not None:
            return found
    return None


def explain_tree(record: Mapping[str, Json]) -> str:
    """Return why a record that is one message of a conversation, or of OASST's trees, has no row; empty for others."""
    role = record.get("role")
    if type(role) is not str:
        return ""
    if "parent_id" in record:
        return (
            "the record is one message of a tree, linked by parent_id; a conversation is a path from its root: join "
            "the messages of each path to a list"
        )
    folded = fold_role(role)
    if MAPPED_ROLES.get(folded, folded) in ("user", "assistant") and ("content" in record or "text" in record):
        return (
            "the record is one message, with its role; a conversation is several: join the messages of each to a list"
        )
    return ""


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
    # A message of several keys is what it seems to be.
    if type(value) is not list or (value and (type(value[0]) is not dict or len(value[0]) == 1)):
        value = parse_conversation(value, {*columns.role_map, *columns.assistant_roles})
    if type(value) is str:
        messages = split_transcript(value)
        return None if messages is None else DetectedMessages("transcript", messages, columns=(name,))
    if type(value) is not list:
        return None
    first: Json = value[0] if value else {}
    if type(first) is str:
        # MT-Bench's `turns` are prompts alone.
        if name == "turns" or len(value) < 2 or any(type(text) is not str for text in value):
            return None
        turns: list[Json] = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(value)]
        return DetectedMessages("turns", turns, columns=(name,))
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
        keys = next((keys for keys in EXCHANGE_KEYS if keys[0] in first and keys[1] in first), None)
        if keys is not None:
            # An item that is something else is left to whoever reads messages.
            pairs = [_read_exchange(item, *keys) if is_mapping(item) else [item] for item in value]
            return DetectedMessages("exchanges", list(chain.from_iterable(pairs)), columns=(name,))
    if "parts" in first and "content" not in first and columns.content_field is None:
        value = [message for item in value for message in _read_gemini(item)]
    return DetectedMessages(
        schema, value, columns.role_field or role_key, columns.content_field or content_key, columns=(name,)
    )


def _read_exchange(item: Mapping[str, Json], asked: str, answered: str) -> list[Json]:
    """Return the messages of one exchange: its system text, the question, and the answer with all other keys."""
    name, system = find_first_column(item, SYSTEM_COLUMNS)
    if unread := list_prompt_columns(item, (asked, answered, name)):
        raise RejectError("unread_prompt", f"an exchange holds {unread[0]}, which belongs to its prompt by its name")
    others = {key: value for key, value in item.items() if key not in (asked, answered, name)}
    turns: list[Json] = [
        {"role": "user", "content": item.get(asked)},
        {**others, "role": "assistant", "content": write_number(item.get(answered))},
    ]
    return [{"role": "system", "content": system}, *turns] if system else turns


def _read_gemini(item: Json) -> list[Json]:
    """Return the messages of one entry of `contents`, whose parts are text, calls and their results."""
    if not is_mapping(item) or not is_list(parts := item.get("parts")):
        return [item]
    others = {key: value for key, value in item.items() if key not in ("role", "parts")}
    results: list[Json] = []
    calls: list[Json] = []
    content: list[Json] = []
    for part in parts:
        named = part if is_mapping(part) else {}
        _, call = find_first_column(named, ("functionCall", "function_call"))
        _, result = find_first_column(named, ("functionResponse", "function_response"))
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


def _detect_alpaca(record: Mapping[str, Json], columns: ConversationColumns) -> DetectedMessages | None:
    if record.get("instruction") is None:
        return None
    response_field, response = "output", record.get("output")
    if response is None and columns.dataset_schema == "alpaca":
        response_field, response = find_first_column(record, columns.response_fields)
    if response is None:
        return None
    prompt, used = join_context(record, "instruction", columns.context_fields, response_field)
    history = read_history(record)
    turns = [*history, *read_exchange(prompt, write_number(response))]
    used = (*used, response_field, *(("history",) if history else ()))
    return DetectedMessages("alpaca", turns, columns=used)


def read_exchange(prompt: str, response: Json) -> list[Json]:
    """Return the messages of a prompt, which may be a transcript that ends with the model's name, and its response."""
    turns = split_open_transcript(prompt)
    if turns is None:
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return [*turns, {"role": "assistant", "content": response.strip() if type(response) is str else response}]


def _detect_calls(record: Mapping[str, Json], columns: ConversationColumns) -> DetectedMessages | None:
    """Return a prompt whose answer is nothing but calls, beside the tools that are called."""
    if not any(record.get(name) for name in ("tools", "functions")):
        return None
    prompt_field, prompt = find_first_column(record, columns.prompt_fields)
    response_field, response = find_first_column(record, CALL_COLUMNS)
    before = ""
    if type(response) is str and len((parted := part_from_calls(response))[1]) == 1:
        before, [response] = parted
    calls = _parse_list(response) if type(response) is str else response
    if type(prompt) is not str or not is_list(calls) or not calls or response_field == prompt_field:
        return None
    if not all(is_mapping(call) and ("name" in call or "function" in call) for call in calls):
        return None
    answer = {"role": "assistant", "content": before, "tool_calls": response}
    turns: list[Json] = [{"role": "user", "content": prompt}, answer]
    return DetectedMessages("calls", turns, columns=(prompt_field, response_field))


def _detect_prompt_response(record: Mapping[str, Json], columns: ConversationColumns) -> DetectedMessages | None:
    prompt_field, prompt = find_first_column(record, columns.prompt_fields)
    response_field, response = find_first_column(
        record, [name for name in columns.response_fields if name != prompt_field]
    )
    if prompt is None or response is None:
        return None
    prompt, response = parse_messages(prompt), parse_messages(write_number(response))
    used: tuple[str, ...] = (prompt_field, response_field)
    if type(prompt) is str:
        prompt, used = join_context(record, prompt_field, columns.context_fields, response_field)
        used = (*used, response_field)
    role_key, content_key = columns.role_field or "role", columns.content_field or "content"
    turns: list[Json] = []
    has_own_keys = (role_key, content_key) != ("role", "content")
    if type(prompt) is str and type(response) is str and not has_own_keys:
        turns = read_exchange(prompt, response)
    for role, value in (("user", prompt), ("assistant", response)) if not turns else ():
        if type(value) is str:
            turns.append({role_key: role, content_key: value})
        elif is_list(value):
            turns.extend(value)
        elif is_mapping(value):
            turns.append(value)
        else:
            raise RejectError(
                "content_not_text", f"the {role}'s side is {describe_type(value)}, expected text or messages"
            )
    history = read_history(record)
    if history and not has_own_keys:
        turns, used = [*history, *turns], (*used, "history")
    return DetectedMessages("prompt_response", turns, role_key, content_key, columns=used)


_PAIR_SHAPES = {"alpaca": _detect_alpaca, "calls": _detect_calls, "prompt_response": _detect_prompt_response}


# ── Beside the messages ────────────────────────────────────────────────────────────────────────────


def add_system(record: Mapping[str, Json], found: DetectedMessages, system_prompt: str | None) -> DetectedMessages:
    """Add the system message of a column that is not `system_prompt`, unless the messages begin with the same text."""
    read = (*found.columns, system_prompt)
    name, value = find_system(record, read, found.messages, found.role_key, found.content_key)
    return found if name is None else found._replace(system=value, columns=(*found.columns, name))


def _parse_list(text: str) -> Json:
    if not begins_like_literal(text):
        return None
    try:
        return read_value(text)
    except ValueError:
        return None


def _explain_unknown_shape(record: Mapping[str, Json], columns: ConversationColumns) -> RejectError:
    """Return the reject of a record without a known shape: a messages column that is invalid or missing, or none."""
    present = ", ".join(sorted(record)[:20]) or "no column"
    name, wanted = columns.messages_field, columns.dataset_schema
    if (value := record.get(name)) is not None:
        expected = "expected a list of mappings, each with a role"
        why = ""
        if type(value) is str and begins_like_literal(value):
            try:
                read_value(value)
            except ValueError as error:
                why = f"; it begins like a list, but is neither JSON nor Python ({error}): write it as JSON"
        return RejectError("bad_messages", f"{name} is {describe_type(value)}, {expected}{why}")
    hint = hint_at_columns(tuple(record), (name, *columns.prompt_fields, *columns.response_fields))
    if wanted != "auto" or name != "messages":
        missing = name if wanted in ("auto", "messages") else wanted
        return RejectError("missing_field", f"{missing} is absent or null; the record has {present}{hint}")
    return RejectError("unknown_schema", explain_tree(record) or f"no known shape in {present}{hint}")


HINTED_COLUMNS, HINTED_LENGTH = 20, 30
"""Columns of a record that are compared, and characters of the longest: a record may have any number of keys."""


def hint_at_columns(present: Sequence[str], known: Sequence[str] = (*ASKING_COLUMNS, *RESPONSE_COLUMNS)) -> str:
    """Return the end of a message about a record of unknown shape: `; did you mean messages?`, or an empty text.

    `known` are the columns of messages, prompts and responses that are read besides those of public datasets.
    """
    names = frozenset(present)
    meant = [_find_meant_column(name, tuple(known)) for name in sorted(names)[:HINTED_COLUMNS]]
    missing = [name for name in dict.fromkeys(meant) if name and name not in names]
    return f"; did you mean {' and '.join(missing)}?" if missing else ""


@lru_cache(maxsize=4096)
def _find_meant_column(name: str, known: Sequence[str]) -> str | None:
    columns = {*LIST_COLUMNS, *CALL_COLUMNS, "text", *known}
    if name in columns or len(name) > HINTED_LENGTH:
        return None
    # A further word is no typing error: conversation_id.
    return next((one for one in find_mistyped_names(name, columns) if one.count("_") == name.count("_")), None)


# ── Reading messages ───────────────────────────────────────────────────────────────────────────────


_MESSAGE_KEYS = ("role", "content")
RESULT_KEYS = ("output", "result", "response", "text")
"""Keys of a tool's message that hold its result where `content` does not."""
_ROLES_WITH_CONTENT = frozenset({"system", "user", "tool"})
"""Roles whose messages are nothing without content; others may be what only their template knows."""
NO_CALLS = ToolCalls([], [])
NO_REASONING: Sequence[str] = ()


@dataclass(slots=True)
class _ConversationTally:
    """Observations while reading one conversation; whatever changes it sets `noticed` too."""

    noticed: bool = False
    extracted: int = 0
    moved: int = 0
    dropped_thoughts: int = 0
    unknown_roles: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])

    def note(self, what: str, times: int = 1) -> None:
        if times:
            self.noticed = True
            self.notes += [what] * times

    def note_once(self, what: str) -> None:
        if what not in self.notes:
            self.note(what)


class ConversationReader:
    """Reads the conversations of one dataset; everything that depends only on options is computed once."""

    def __init__(self, columns: MessageColumns, options: DatasetOptions, *, text_key: str | None = None) -> None:
        self._columns = columns
        self.detect: Callable[[Mapping[str, Json]], DetectedMessages] | None = None
        """Finds a record's messages; None if the kind finds them itself."""
        self._single_turn = False
        if isinstance(columns, ConversationColumns):
            self.detect = partial(detect_messages, columns=columns, text_key=text_key)
            self._single_turn = columns.single_turn
        self._read_document = None if text_key is None else make_document_reader(text_key, options.filters)
        self._tally = _ConversationTally()
        self._tools = options.tools
        self._latest_texts: list[Json] = []
        self._latest_tools: tuple[tuple[Json, ...] | None, bool, bool] = None, False, False
        self._kwargs_column = options.template.chat_template_kwargs
        self._loss = options.loss
        reasoning = options.reasoning
        # The canonical key is always included: reasoning found elsewhere must not overwrite its value.
        self._reasoning_keys: list[str] = list(dict.fromkeys([*reasoning.reasoning_keys, REASONING_KEY]))
        self._reasoning_names = frozenset(self._reasoning_keys)
        self._tags = ThinkTagReader(reasoning.think_tags if reasoning.extract_think_tags else [])
        self._drops = reasoning.think_mode == "drop"
        self._think_role = reasoning.think_role
        self._speakers = frozenset({"assistant", *columns.assistant_roles})
        self._flags = name_flags(columns.message_flags)
        self._flag_names = frozenset(self._flags)
        self._not_kept = CANONICAL_FLAGS | {name for name, meaning in self._flags.items() if meaning != "ignore"}
        # Of a prompt nothing trains, whatever its flags say.
        self._searches_flags = columns.has_targets()
        own = {name: name for name in (*KNOWN_ROLES, *self._speakers, FUNCTION_CALL)}
        self._roles: dict[str, str] = {**MAPPED_ROLES, **own, **columns.role_map}
        known = {*KNOWN_ROLES, *self._speakers}
        self._known = frozenset({*known, self._think_role or "assistant", FUNCTION_CALL})
        plain = {source: role for source, role in self._roles.items() if role in known and role != self._think_role}
        self._plain_roles = plain
        self.reshapes: bool = columns.system_prompt is not None or self._single_turn
        """Whether it changes the messages that it finds."""
        read = (*options.tools.tools_fields, self._kwargs_column)
        self.columns_beside_messages: frozenset[str] = frozenset(name for name in read if name is not None)
        """The columns of tools and of template arguments."""

    def __call__(self, record: Mapping[str, Json]) -> Row | Rejected:
        """Return the row of one record."""
        assert self.detect is not None
        found = self.detect(record)
        if found.schema == "text" and self._read_document is not None:
            return self._read_document(record)
        return self.read_conversation(record, found)

    def take_plain(
        self, found: DetectedMessages, start: int, out: list[Message], *, is_reasoning_open: bool = False
    ) -> int:
        """Append the plain messages from `start` on, up to the first other one; return that one's place.

        While reasoning waits for the model's next message, that message is not plain.
        """
        roles, speakers, hints = self._plain_roles, self._speakers, self._tags.hints
        _, messages, role_key, content_key, *_ = found
        renames = role_key != "role" or content_key != "content"
        for place in range(start, len(messages)):
            message = messages[place]
            # A plain message has two keys: its role and its content.
            if type(message) is not dict or len(message) != 2:
                return place
            source, content = message.get(role_key), message.get(content_key)
            role = roles.get(source) if type(source) is str else None
            if role is None or type(content) is not str:
                return place
            if role in speakers:
                if is_reasoning_open or not content or content.isspace():
                    return place
                for hint in hints:
                    if hint in content:
                        return place
            out.append({"role": role, "content": content} if renames or role != source else message)
        return len(messages)

    def _read_tools(self, record: Mapping[str, Json]) -> tuple[tuple[Json, ...] | None, bool, bool]:
        """Return what `read_tools` returns; the tools of the record before are not parsed again if they are text."""
        given = [*map(record.get, self._tools.tools_fields)]
        if given != self._latest_texts:
            tools = read_tools(record, self._tools.tools_fields)
            if not {*map(type, given)} <= {str, NoneType}:
                return tools
            self._latest_texts, self._latest_tools = given, tools
        return self._latest_tools

    def read_conversation(self, record: Mapping[str, Json], found: DetectedMessages) -> Row:
        """Return the row of a record whose messages were found."""
        # One that noticed nothing is as good as new, and most rows have nothing to notice.
        tally = self._tally = _ConversationTally() if self._tally.noticed else self._tally
        row_flags: Mapping[str, Json] = {}
        if self.detect is not None and not self._flag_names.isdisjoint(record):
            found, row_flags = self._read_flag_columns(record, found)
        if self._columns.system_prompt is not None or found.system is not None or self._single_turn:
            found = self._reshape_messages(record, found)
        if not found.messages:
            raise RejectError("empty_conversation", "no messages")
        messages = self._read_messages(found)
        if row_flags:
            messages = [self._weigh_message(message, row_flags["weight"]) for message in messages]
        tools, has_tools, from_text = self._read_tools(record)
        kwargs: dict[str, Json] = {}
        value = None if self._kwargs_column is None else record.get(self._kwargs_column)
        if value is not None:
            kwargs, is_ignored = read_kwargs(value)
            if is_ignored:
                tally.note("ignored_add_generation_prompt")
        report = make_plain_report(found.schema)
        if tally.noticed or has_tools:
            report = ParseReport(
                schema=found.schema,
                extracted_think_from_content=tally.extracted,
                moved_reasoning_keys=tally.moved,
                dropped_think_messages=tally.dropped_thoughts,
                tools_present=has_tools,
                tools_parsed_from_string=from_text,
                unknown_roles=tuple(tally.unknown_roles),
                notes=tuple(tally.notes),
            )
        return Row("conversation", tuple(messages), tools, kwargs, report=report, read_columns=found.columns)

    def _read_messages(self, found: DetectedMessages) -> list[Message]:
        """Read every message; plain ones are taken as they are."""
        tally, messages, out = self._tally, found.messages, list[Message]()
        place = self.take_plain(found, 0, out)
        while place < len(messages):
            message = messages[place]
            if not is_mapping(message):
                raise RejectError("bad_messages", f"message {len(out)} is {describe_type(message)}, expected a mapping")
            tally.noticed = True
            pieces: Sequence[Mapping[str, Json]] = ()
            if type(message.get(found.content_key)) is list:
                pieces = split_tool_results(message, found.content_key)
            for piece in pieces or (message,):
                read = self._read_message(piece, found)
                if read is not None:
                    out.append(read)
            place = self.take_plain(found, place + 1, out, is_reasoning_open=bool(tally.thoughts))
        if tally.thoughts:
            raise RejectError("orphan_think", f"{len(tally.thoughts)} with no assistant's message after")
        if tally.noticed:
            link_calls(out)
        if not out:
            raise RejectError("empty_conversation", "no messages but reasoning")
        return out

    def _read_message(self, raw: Mapping[str, Json], found: DetectedMessages) -> Message | None:
        """Read one message key by key; return None if it was reasoning, which is now in the tally or dropped."""
        tally = self._tally
        role = self._read_role(raw.get(found.role_key))
        value = raw.get(found.content_key)
        read_keys = (found.role_key, found.content_key, *_MESSAGE_KEYS)
        extras = {key: extra for key, extra in raw.items() if extra is not None and key not in read_keys}
        called = extras.pop("function_call", None)
        given: list[Json] = [extras.pop("tool_calls", called)] if "tool_calls" in extras or called is not None else []
        is_call = role == FUNCTION_CALL
        if is_call:
            role, value, given = "assistant", "", [value, *given]
        speaks = role in self._speakers
        for text in given:
            if type(text) is not str:
                continue
            before, calls_alone = part_from_calls(text)
            given = [one for call in given for one in (calls_alone if call is text else [call])]
            if before and (value is None or type(value) is str):
                value = REASONING_SEPARATOR.join(filter(None, (value, before)))
            elif before:
                raise RejectError("bad_tool_call", "text before a call, beside content that is no text")
        if speaks and type(refusal := extras.get(REFUSAL_KEY)) is str:
            del extras[REFUSAL_KEY]
            if refusal and not refusal.isspace():
                value = _take_refusal(value, refusal)
                tally.note("refusal_as_answer")
        if role == "tool" and (value is None or value == ""):
            name, value = find_first_column(extras, RESULT_KEYS)
            extras.pop(name, None)
        may_be_elsewhere = role in _ROLES_WITH_CONTENT or not PROMPT_COLUMNS.isdisjoint(extras)
        if value is None and may_be_elsewhere and (unread := _list_unread_content(role, extras)):
            raise RejectError("unread_prompt", f"a message of {role} has no content, and nothing reads its {unread[0]}")
        if value is None and role == "user":
            raise RejectError("empty_user", "a user's message without content: an answer to it would answer nothing")
        content, reasoning = "" if value is None else value, NO_REASONING
        if role == "tool" and type(content) is not str:
            # A list of parts that say what they are is content; other lists and objects are JSON.
            has_types = is_list(content) and all(is_mapping(one) and type(one.get("type")) is str for one in content)
            tally.note("tool_result_as_json", int(not has_types))
            content = content if has_types else to_json(content)
        parts: list[Json] = content if is_list(content) else []
        thoughts: list[Json] = []
        has_parts = False
        for key in self._reasoning_keys if speaks and not self._reasoning_names.isdisjoint(extras) else ():
            thought = extras.get(key, "")
            has_parts = has_parts or type(thought) is not str
            thoughts += thought if is_list(thought) else []
        if type(content) is not str:
            content, reasoning, in_parts = read_parts(content, speaks=speaks)
            tally.note("redacted_reasoning", sum(not thought for thought in reasoning))
            given = [*in_parts, *given]
        is_analysis = speaks and extras.get("channel") == "analysis" and not given
        if role == self._think_role or is_analysis:
            if self._drops:
                tally.dropped_thoughts += 1
            else:
                tally.thoughts += [thought for thought in (*reasoning, content) if thought.strip()]
            return None
        calls = read_calls(given, self._tools.arguments) if given else NO_CALLS
        if is_call and content and not calls.calls:
            raise RejectError("bad_tool_call", "a turn of calls with text, and without a call")
        if has_parts:
            extras = join_reasoning_parts(extras, self._reasoning_keys)
        if extras:
            flags = self._read_flags("message", extras, speaks=speaks)
            extras = extras if self._not_kept.isdisjoint(extras) else {**remove_keys(extras, self._not_kept), **flags}
        if type(extras.get(REASONING_KEY, "")) is not str:
            raise RejectError("content_not_text", f"{REASONING_KEY} is {describe_type(extras[REASONING_KEY])}")
        if not speaks:
            message = _assemble_message(role, content, "", calls, extras)
        else:
            message = self._finish_assistant(role, content, reasoning, calls, extras)
        return self._read_part_flags(message, parts, thoughts, speaks=speaks) if parts or thoughts else message

    # ── what trains ──

    def _note_unread_flag(self, place: Literal["message", "part", "column"], name: str) -> None:
        if self._searches_flags:
            self._tally.note_once(note_unread_flag(place, name))

    def _read_flags(
        self, place: Literal["message", "part", "column"], holder: Mapping[str, Json], *, speaks: bool
    ) -> dict[str, Json]:
        """Read the flags of a message, a part or a row, and note those of its keys that nothing reads."""
        for name, value in holder.items():
            # By the name first, which is cached: nearly all keys end there.
            if name not in self._flags and may_be_flag(name) and looks_like_flag(name, value):
                self._note_unread_flag(place, name)
        if self._flag_names.isdisjoint(holder):
            return {}
        flags = read_flags(holder, self._flags, self._loss, speaks=speaks)
        if self._loss.trains_everything and (flags.get("train") is False or flags.get("weight", 1) != 1):
            named = [name for name in self._flags if holder.get(name) is not None]
            self._note_unread_flag(place, named[0])
        return flags

    def _read_flag_columns(
        self, record: Mapping[str, Json], found: DetectedMessages
    ) -> tuple[DetectedMessages, Mapping[str, Json]]:
        """Read the columns of flags: a list gives each message or answer its own, another value is the whole row's.

        Rejects a row that does not train. A weight of the row is returned.
        """
        messages, used = found.messages, list[str]()
        scalars: dict[str, Json] = {}
        for name, meaning in self._flags.items():
            value = record.get(name)
            if value is None or meaning == "ignore" or name in found.columns or name in self._columns.ignore_columns:
                continue
            if type(value) is str and is_flag_list(value):
                value = _parse_list(value)
            if is_list(value) and is_flag_list(value):
                messages = self._flag_messages(name, value, found._replace(messages=messages))
            elif type(value) in (bool, int, float):
                is_measure = type(value) is not bool and (is_weight_name(name) or value not in (0, 1))
                if is_measure and value != 1 and not self._loss.weights:
                    self._note_unread_flag("column", name)
                    continue
                scalars[name] = value
            else:
                continue
            used.append(name)
        flags = self._read_flags("column", scalars, speaks=True)
        found = found._replace(messages=messages, columns=(*found.columns, *used))
        if flags.get("train") is False and not self._loss.trains_everything:
            raise RejectError("untrained_row", f"{', '.join(scalars)}: the row does not train")
        return found, flags if flags.get("weight", 1) != 1 else {}

    def _flag_messages(self, name: str, values: list[Json], found: DetectedMessages) -> list[Json]:
        """Give each message, or each of the model's, its value of a column."""
        messages = found.messages
        answers = [
            place
            for place, message in enumerate(messages)
            if (role := self._get_role_name(message, found)) in self._speakers or role == FUNCTION_CALL
        ]
        places = range(len(messages)) if len(values) == len(messages) else answers
        if len(values) != len(places):
            raise RejectError(
                "length_mismatch",
                f"{name} has {len(values)} values, expected {len(messages)}, one of each message, or {len(answers)}, "
                "one of each answer",
            )
        flagged = [*messages]
        for place, value in zip(places, values, strict=True):
            message = messages[place]
            if value is None or not is_mapping(message):
                continue
            if message.get(name) not in (None, value):
                raise RejectError(
                    "flag_conflict", f"{name} of message {place} is {message[name]}, the column's {value}"
                )
            flagged[place] = {**message, name: value}
        return flagged

    def _weigh_message(self, message: Message, weight: float) -> Message:
        """Multiply the weight of a message of the model with that of its row."""
        if message["role"] not in self._speakers or message.get("train") is False:
            return message
        weighed = {**message, "weight": self._check_weight(message.get("weight", 1) * weight)}
        if "part_weights" in message:
            parts: dict[str, Json] = message["part_weights"]
            weighed["part_weights"] = {
                kind: self._check_weight(runs * weight)
                if kind == "calls"
                else [[length, self._check_weight(own * weight)] for length, own in runs]
                for kind, runs in parts.items()
            }
        return weighed

    def _check_weight(self, weight: float) -> float:
        if weight and not MIN_WEIGHT <= abs(weight) <= MAX_WEIGHT:
            raise RejectError("bad_weight", f"the weights of row and message give {weight}")
        return weight

    # ── parts of a message ──

    def _read_part_flags(
        self, message: Message, parts: Sequence[Json], thoughts: Sequence[Json], *, speaks: bool
    ) -> Message:
        """Return a message with the weights of its parts, if one of them has a flag of its own.

        `parts` are those of its content, `thoughts` those of a key of reasoning. A part without a flag trains as the
        message does. Template text trains with the part before it.
        """
        every = [*thoughts, *parts]
        flags = [self._read_flags("part", part, speaks=speaks) if is_mapping(part) else {} for part in every]
        given = [_find_part_weight(flag) for flag in flags]
        if all(weight is None for weight in given):
            return message
        # If a part of a prompt trains, its other parts do not.
        is_prompt = not speaks and not message.get("train") and any(given)
        base = 0.0 if message.get("train") is False or is_prompt else float(message.get("weight", 1))
        weights = [base if weight is None else weight for weight in given]
        texts, reasons = list[tuple[str, float]](), list[tuple[str, float]]()
        of_calls: set[float] = set()
        for place, (part, weight) in enumerate(zip(every, weights, strict=True)):
            if place < len(thoughts):
                reasons += [(thought, weight) for thought in read_thoughts(part) or ()]
                continue
            text, reasoning, calls = read_parts([part], speaks=speaks)
            texts += [(text, weight)] if text else []
            reasons += [(thought, weight) for thought in reasoning if thought]
            of_calls |= {weight for _ in calls}
        if not parts:
            texts = [(message["content"], base)]
        if message.get("tool_calls") and not of_calls:
            of_calls = {base}
        if len({*of_calls, *(weight for _, weight in (*texts, *reasons))}) == 1:
            others, weight = remove_keys(message, CANONICAL_FLAGS), weights[0]
            if not weight:
                return {**others, "train": False}
            return {**others, "train": True} | ({} if weight == 1 else {"weight": weight})
        if len(of_calls) > 1:
            raise RejectError("flag_conflict", "the calls of one message have different flags")
        runs: dict[str, Json] = _fit_parts(message, texts, reasons, base)
        runs |= {"calls": of_calls.pop()} if of_calls else {}
        return {**message, "part_weights": runs} | ({"train": True} if any(given) else {})

    def _read_role(self, source: Json) -> str:
        if type(source) is not str or not source:
            raise RejectError("bad_messages", f"a message's role is {describe_type(source)}, expected text")
        role = self._roles.get(source, source)
        if role not in self._known and (folded := self._roles.get(fold_role(source))) is not None:
            role = folded
            self._tally.note("role_name_case")
        if role not in self._known:
            if self._columns.unknown_roles == "reject":
                raise RejectError("unknown_role", f"{role!r}; name it in format.role_map, or set unknown_roles: warn")
            if role not in self._tally.unknown_roles:
                self._tally.unknown_roles.append(role)
        return role

    def _finish_assistant(
        self, role: str, content: str, in_parts: Sequence[str], calls: ToolCalls, extras: Message
    ) -> Message:
        """Finish a message of the model: join its reasoning, and reject it if it is empty."""
        tally = self._tally
        text, extras, moved, others = move_reasoning_keys(extras, self._reasoning_keys)
        tally.moved += moved
        tally.note("extra_reasoning_key", others)
        blocks: Sequence[str] = ()
        if any(hint in content for hint in self._tags.hints):
            extracted = self._tags.extract(content)
            if extracted is None:
                raise RejectError("unclosed_think", "the reasoning is never closed: the text is truncated")
            content, blocks, literal = extracted
            tally.extracted += len(blocks)
            tally.note("literal_think", literal)
        reasoning = join_reasoning([*tally.thoughts, text, *in_parts, *blocks])
        tally.thoughts.clear()
        if self._drops:
            tally.note("dropped_reasoning", int(bool(reasoning)))
            reasoning = ""
            extras = remove_keys(extras, [key for key in self._reasoning_keys if type(extras.get(key)) is str])
        if not reasoning and not calls.calls and not content.strip():
            raise RejectError("empty_assistant", f"{role} with no text, call or reasoning")
        return _assemble_message(role, content, reasoning, calls, extras)

    def _reshape_messages(self, record: Mapping[str, Json], found: DetectedMessages) -> DetectedMessages:
        """Insert the system messages of other columns, then keep a single turn if requested."""
        columns = self._columns
        values = [found.system] if columns.system_prompt != "system" else []
        if columns.system_prompt is not None:
            values.append(get_at_path(record, columns.system_prompt))
        messages = found.messages
        for value in values:
            text: Json = value
            if is_mapping(value):
                text = value.get("content")
                if type(text) is not str:
                    raise RejectError("bad_system_prompt", "a mapping without a text in content")
            if text is not None and type(text) is not str:
                raise RejectError(
                    "bad_system_prompt", f"{describe_type(text)}, expected text or a mapping with content"
                )
            if not text or text.isspace():
                continue
            system: Json = {found.role_key: "system", found.content_key: text}
            if not messages or self._get_role_name(messages[0], found) != "system":
                messages = [system, *messages]
                continue
            existing: Json = messages[0].get(found.content_key)
            match columns.on_existing_system:
                case "keep":
                    continue
                case "replace":
                    messages = [system, *messages[1:]]
                case "reject":
                    raise RejectError("bad_system_prompt", "there is already a system message, and two are not allowed")
                case _:
                    merged = existing
                    if is_list(existing):
                        merged = [{"type": "text", "text": f"{text}{REASONING_SEPARATOR}"}, *existing]
                    elif existing is None or type(existing) is str:
                        blank = not existing or existing.isspace()
                        merged = text if blank else f"{text}{REASONING_SEPARATOR}{existing}"
                    messages = [{**messages[0], found.content_key: merged}, *messages[1:]]
        return found._replace(messages=self._keep_single_turn(messages, found) if self._single_turn else messages)

    def _get_role_name(self, message: Json, found: DetectedMessages) -> str | None:
        source = message.get(found.role_key) if is_mapping(message) else None
        return self._roles.get(source, source) if type(source) is str else None

    def _keep_single_turn(self, messages: list[Json], found: DetectedMessages) -> list[Json]:
        """Keep the system message, the first user message, and the model's next, with think messages before it."""
        out: list[Json] = []
        asked = False
        for message in messages:
            role = self._get_role_name(message, found)
            if asked and (role in self._speakers or role == FUNCTION_CALL):
                return [*out, message]
            if role == "user" and not asked:
                asked = True
                out.append(message)
            elif role is None or role == (self._think_role if asked else "system"):
                out.append(message)
        return out


def _take_refusal(content: Json, refusal: str) -> Json:
    """Return the answer of a message with a refusal, which stands in the place of the content."""
    if not content or (type(content) is str and (content.isspace() or content.strip() == refusal.strip())):
        return refusal
    raise RejectError(
        "bad_messages", "a message has a refusal and other content; expected one answer; delete the one that is not it"
    )


def _list_unread_content(role: str, extras: Message) -> list[str]:
    """Return the keys under which a message without content may have it, by their name or by the text they hold."""
    named = list_prompt_columns(extras, ())
    if named or role not in _ROLES_WITH_CONTENT:
        return named
    others = [key for key in extras if key not in MESSAGE_KEYS and not key.endswith("id")]
    return [key for key in others if any(iterate_texts(extras[key]))]


def _find_part_weight(flags: Mapping[str, Json]) -> float | None:
    """Return the weight that a part's flags give it; None if it trains as its message does."""
    if "train" in flags:
        return float(flags.get("weight", flags["train"]))
    return 0.0 if flags.get("weight") == 0 else None


def _fit_parts(
    message: Message, texts: Sequence[tuple[str, float]], reasons: Sequence[tuple[str, float]], base: float
) -> dict[str, Json]:
    """Return the weights of the parts of a message's content and reasoning, in the form of `part_weights`.

    Rejects a message of which reading has left something else.
    """
    content, reasoning = message["content"], message.get(REASONING_KEY, "")
    joined = "".join(text for text, _ in texts)
    removed = len(joined) - len(content)
    runs: list[list[Json]] = []
    begin = 0
    of_head: set[float] = set()
    for text, weight in texts:
        end = begin + len(text)
        of_head |= {weight} if begin < removed else set()
        runs += [[end - max(begin, removed), weight]] if end > max(begin, removed) else []
        begin = end
    if not joined.endswith(content) or (removed and (reasons or len(of_head) > 1)):
        raise RejectError("flag_conflict", "reasoning in tags reaches over parts with different flags")
    if removed and reasoning:
        # Reasoning in tags, and white space behind it, was taken from the beginning.
        return {"content": runs, "reasoning": [[len(reasoning), of_head.pop()]]}
    found: list[list[Json]] = []
    position = 0
    for thought, weight in reasons or [(reasoning, base)]:
        start = reasoning.find(thought, position)
        if start < 0 or reasoning[position:start].strip() or (start and not found):
            raise RejectError("flag_conflict", "reasoning beside parts with flags of their own is in several places")
        if found:
            found[-1][0] += start - position
        found.append([len(thought), weight])
        position = start + len(thought)
    if reasoning[position:].strip():
        raise RejectError("flag_conflict", "reasoning beside parts with flags of their own is in several places")
    return {"content": runs} | ({"reasoning": found} if reasoning else {})


def _assemble_message(role: str, content: str, reasoning: str, calls: ToolCalls, extras: Message) -> Message:
    message: Message = {"role": role, "content": content}
    if reasoning:
        message[REASONING_KEY] = reasoning
    if calls.calls:
        message["tool_calls"] = calls.calls
        if any(calls.sources):
            message["arguments_source"] = calls.sources
    return {**message, **extras}


def make_document_reader(column: str, filters: Filters) -> RecordReader:
    """Return a function that reads a column into a row of text, and rejects lengths outside the limits."""
    report = make_plain_report("text")

    def read(record: Mapping[str, Json]) -> Row | Rejected:
        text = record.get(column)
        if text is None:
            return Rejected("missing_field", f"{column} is absent or null")
        if type(text) is not str:
            return Rejected("content_not_text", f"{column} is {describe_type(text)}")
        if not text or text.isspace():
            return Rejected("empty_text", f"{column} is blank")
        if len(text) < filters.min_chars:
            return Rejected("too_short", f"{len(text)} characters, at least {filters.min_chars}")
        if filters.max_chars is not None and len(text) > filters.max_chars:
            return Rejected("too_long", f"{len(text)} characters, at most {filters.max_chars}")
        return Row("text", text=text, report=report, read_columns=(column,))

    return read
