"""Records of chats read as rows, and columns of plain chats.

Recognizes plain messages and plain chats: known roles and text, with nothing to read, move or reject.

{"role": "user", "content": "Hi"}                   plain
{"from": "human", "value": "Hi"}                    plain under another name
{"role": "assistant", "content": "<think>…"}        not plain: its reasoning must be found
{"role": "user", "content": "Hi", "name": "Ann"}    not plain: a third key

Reads conversations: detects a record's shape, then reads each message into its canonical form.

    record ──detect──► messages as written ──roles, content, calls, reasoning, flags──► canonical messages
           └─tools──► tools ─────────────────────────────────────────────────────────► Row | Rejected

Most messages are plain, and taken as they are (`conversation_rows.py`). Only the others are read key by key.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rowmill.core.config import describe_type
from rowmill.core.json import Json, to_json
from rowmill.kinds.shared.canonicalization import RecordReader, RowOptions
from rowmill.kinds.shared.columns import KNOWN_ROLES, MAPPED_ROLES, MessageColumns
from rowmill.kinds.shared.detection import DetectedMessages
from rowmill.kinds.shared.messages import (
    OfferedTools,
    ToolCalls,
    get_at_path,
    has_typed_parts,
    is_list,
    is_mapping,
    link_calls,
    read_calls,
    read_flags,
    read_kwargs,
    read_parts,
    read_tools,
    split_tool_results,
)
from rowmill.kinds.shared.prompt_columns import PROMPT_COLUMNS, list_prompt_columns
from rowmill.kinds.shared.reasoning import (
    DETAILS_KEY,
    REASONING_KEY,
    REASONING_SEPARATOR,
    ThinkTagReader,
    join_reasoning,
    join_reasoning_details,
    move_reasoning_keys,
    remove_keys,
)
from rowmill.schema.rows import Message, ParseReport, PlainChat, Rejected, Row, make_plain_report

_KEYS = 2
"""Keys of a plain message: its role and its content."""


class PlainMessages:
    """Recognizes the plain messages of one dataset.

    `roles` are the template's roles by those of the source; `speakers` are the model's, whose messages must have text
    and no tag of reasoning.
    """

    def __init__(self, roles: Mapping[str, str], speakers: frozenset[str], tags: ThinkTagReader) -> None:
        """Store the arguments."""
        self._roles = roles
        self._speakers = speakers
        self._hints = tags.hints

    def take(self, found: DetectedMessages, start: int, out: list[Message], *, is_reasoning_open: bool = False) -> int:
        """Append the plain messages from `start` on, up to the first other one; return that one's place.

        While reasoning waits for the model's next message, that message is not plain.
        """
        roles, speakers, hints = self._roles, self._speakers, self._hints
        _, messages, role_key, content_key, *_ = found
        renames = role_key != "role" or content_key != "content"
        for place in range(start, len(messages)):
            message = messages[place]
            if type(message) is not dict or len(message) != _KEYS:
                return place
            source, content = message.get(role_key), message.get(content_key)
            role = roles.get(source) if type(source) is str else None
            if role is None or type(content) is not str:
                return place
            if role in speakers:
                if is_reasoning_open or not content or content.isspace():
                    return place
                # As `ThinkTagReader.may_contain_tag` says, without a call.
                for hint in hints:
                    if hint in content:
                        return place
            out.append({"role": role, "content": content} if renames or role != source else message)
        return len(messages)


# ── Reads conversations: detects a record's shape, then reads each message into its canonical form ──


ShapeDetector = Callable[[Mapping[str, Json]], DetectedMessages | Rejected]
"""Finds a record's messages as in the source."""

FUNCTION_CALL = "function_call"
"""The one role that is not mapped but read: its content is a call by the assistant."""
_MESSAGE_KEYS = ("role", "content")
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

    def report(self, schema: str, offered: OfferedTools) -> ParseReport:
        return ParseReport(
            schema=schema,
            extracted_think_from_content=self.extracted,
            moved_reasoning_keys=self.moved,
            dropped_think_messages=self.dropped_thoughts,
            tools_present=offered.present,
            tools_parsed_from_string=offered.from_text,
            unknown_roles=tuple(self.unknown_roles),
            notes=tuple(self.notes),
        )


class ConversationReader:
    """Reads the conversations of one dataset; everything that depends only on options is computed once.

    `detect` finds a record's messages; `read_document` reads a record in which it finds a document.

    More than 250 lines, because each step of reading a record asks the same options and adds to the same report.
    """

    def __init__(
        self,
        columns: MessageColumns,
        options: RowOptions,
        detect: ShapeDetector,
        *,
        single_turn: bool = False,
        read_document: RecordReader | None = None,
    ) -> None:
        self._columns = columns
        self._detect = detect
        self._single_turn = single_turn
        self._read_document = read_document
        self._tally = _ConversationTally()
        self._tools = options.tools
        self._kwargs_column = options.template.chat_template_kwargs
        self._weighted = options.loss.weights
        reasoning = options.reasoning
        # The canonical key is always included: reasoning found elsewhere must not overwrite its value.
        self._reasoning_keys: list[str] = list(dict.fromkeys([*reasoning.reasoning_keys, REASONING_KEY]))
        self._tags = ThinkTagReader(reasoning.think_tags if reasoning.extract_think_tags else [])
        self._drops = reasoning.think_mode == "drop"
        self._think_role = reasoning.think_role
        self._speakers = frozenset({"assistant", *columns.assistant_roles})
        self._flags = frozenset(columns.message_flags)
        own = {name: name for name in (*KNOWN_ROLES, *self._speakers, FUNCTION_CALL)}
        self._roles: dict[str, str] = {**MAPPED_ROLES, **own, **columns.role_map}
        known = {*KNOWN_ROLES, *self._speakers}
        self._known = frozenset({*known, self._think_role or "assistant", FUNCTION_CALL})
        plain = {source: role for source, role in self._roles.items() if role in known and role != self._think_role}
        self._plain = PlainMessages(plain, self._speakers, self._tags)
        reshapes = columns.system_prompt is not None or single_turn
        read = (*options.tools.tools_fields, self._kwargs_column)
        self._read_beside_messages = None if reshapes else frozenset(name for name in read if name is not None)

    def __call__(self, record: Mapping[str, Json]) -> Row | Rejected:
        """Return the row of one record."""
        found = self._detect(record)
        if isinstance(found, Rejected):
            return found
        if found.schema == "text" and self._read_document is not None:
            return self._read_document(record)
        return self.read_conversation(record, found)

    def read_plain(self, record: Mapping[str, Json]) -> PlainChat | None:
        """Return a record's chat if there is nothing to read in it; None leaves it to `__call__`."""
        if self._read_beside_messages is None or not self._read_beside_messages.isdisjoint(record):
            return None
        found = self._detect(record)
        if isinstance(found, Rejected) or found.system is not None or not found.messages:
            return None
        messages: list[Message] = []
        if self._plain.take(found, 0, messages) < len(found.messages):
            return None
        if not PROMPT_COLUMNS.isdisjoint(record) and list_prompt_columns(record, found.columns):
            return None
        return PlainChat(found.schema, messages, found.columns)

    def read_conversation(self, record: Mapping[str, Json], found: DetectedMessages) -> Row | Rejected:
        """Return the row of a record whose messages were found."""
        columns = self._columns
        if columns.system_prompt is not None or found.system is not None or self._single_turn:
            reshaped = self._reshape_messages(record, found, columns)
            if isinstance(reshaped, Rejected):
                return reshaped
            found = reshaped
        if not found.messages:
            return Rejected("empty_conversation", "no messages")
        # One that noticed nothing is as good as new, and most rows have nothing to notice.
        tally = self._tally = _ConversationTally() if self._tally.noticed else self._tally
        messages = self._read_messages(found, columns, tally)
        if isinstance(messages, Rejected):
            return messages
        offered = read_tools(record, self._tools.tools_fields)
        if isinstance(offered, Rejected):
            return offered
        kwargs: dict[str, Json] = {}
        value = None if self._kwargs_column is None else record.get(self._kwargs_column)
        if value is not None:
            read = read_kwargs(value)
            if isinstance(read, Rejected):
                return read
            kwargs, is_ignored = read
            if is_ignored:
                tally.note("ignored_add_generation_prompt")
        report = make_plain_report(found.schema)
        if tally.noticed or offered.present:
            report = tally.report(found.schema, offered)
        return Row("conversation", tuple(messages), offered.tools, kwargs, report=report, read_columns=found.columns)

    def _read_messages(
        self, found: DetectedMessages, columns: MessageColumns, tally: _ConversationTally
    ) -> list[Message] | Rejected:
        """Read every message; plain ones are taken as they are."""
        messages, out = found.messages, list[Message]()
        place = self._plain.take(found, 0, out)
        while place < len(messages):
            message = messages[place]
            if not is_mapping(message):
                return Rejected("bad_messages", f"message {len(out)} is {describe_type(message)}, expected a mapping")
            tally.noticed = True
            pieces: Sequence[Mapping[str, Json]] = ()
            if type(message.get(found.content_key)) is list:
                pieces = split_tool_results(message, found.content_key)
            for piece in pieces or (message,):
                read = self._read_message(piece, found, columns, tally)
                if isinstance(read, Rejected):
                    return read
                if read is not None:
                    out.append(read)
            place = self._plain.take(found, place + 1, out, is_reasoning_open=bool(tally.thoughts))
        if tally.thoughts:
            return Rejected("orphan_think", f"{len(tally.thoughts)} with no assistant's message after")
        if tally.noticed:
            link_calls(out)
        return out or Rejected("empty_conversation", "no messages but reasoning")

    def _read_message(
        self, raw: Mapping[str, Json], found: DetectedMessages, columns: MessageColumns, tally: _ConversationTally
    ) -> Message | Rejected | None:
        """Read one message key by key; return None if it was reasoning, which is now in the tally or dropped."""
        role = self._read_role(raw.get(found.role_key), columns, tally)
        if isinstance(role, Rejected):
            return role
        value = raw.get(found.content_key)
        read_keys = (found.role_key, found.content_key, *_MESSAGE_KEYS)
        extras = {key: extra for key, extra in raw.items() if extra is not None and key not in read_keys}
        called = extras.pop("function_call", None)
        given: list[Json] = [extras.pop("tool_calls", called)] if "tool_calls" in extras or called is not None else []
        if role == FUNCTION_CALL:
            role, value, given = "assistant", "", [value, *given]
        speaks = role in self._speakers
        if value is None and role == "user":
            return Rejected("empty_user", "a user's message without content: an answer to it would answer nothing")
        content, reasoning = "" if value is None else value, NO_REASONING
        if role == "tool" and type(content) is not str and not has_typed_parts(content):
            tally.note("tool_result_as_json")
            content = to_json(content)
        if type(content) is not str:
            parts = read_parts(content, speaks=speaks)
            if isinstance(parts, Rejected):
                return parts
            content, reasoning, given = "".join(parts.text), parts.reasoning, [*parts.calls, *given]
        if role == self._think_role:
            if self._drops:
                tally.dropped_thoughts += 1
            elif content.strip():
                tally.thoughts.append(content)
            return None
        calls = read_calls(given, self._tools.arguments) if given else NO_CALLS
        if isinstance(calls, Rejected):
            return calls
        if not self._flags.isdisjoint(extras):
            flags = read_flags(extras, columns.message_flags, weighted=self._weighted)
            if isinstance(flags, Rejected):
                return flags
            extras = {**remove_keys(extras, columns.message_flags), **flags}
        if type(extras.get(REASONING_KEY, "")) is not str:
            return Rejected("content_not_text", f"{REASONING_KEY} is {describe_type(extras[REASONING_KEY])}")
        if not speaks:
            return _assemble_message(role, content, "", calls, extras)
        return self._finish_assistant(role, content, reasoning, calls, extras, tally)

    def _read_role(self, source: Json, columns: MessageColumns, tally: _ConversationTally) -> str | Rejected:
        if type(source) is not str or not source:
            return Rejected("bad_messages", f"a message's role is {describe_type(source)}, expected text")
        role = self._roles.get(source, source)
        if role not in self._known and (folded := self._roles.get(source.strip().lower())) is not None:
            role = folded
            tally.note("role_name_case")
        if role not in self._known:
            if columns.unknown_roles == "reject":
                return Rejected("unknown_role", f"{role!r}; name it in format.role_map, or set unknown_roles: warn")
            if role not in tally.unknown_roles:
                tally.unknown_roles.append(role)
        return role

    def _finish_assistant(
        self,
        role: str,
        content: str,
        in_parts: Sequence[str],
        calls: ToolCalls,
        extras: Message,
        tally: _ConversationTally,
    ) -> Message | Rejected:
        """Finish a message of the model: join its reasoning, and reject it if it is empty."""
        if DETAILS_KEY in extras:
            extras = join_reasoning_details(extras)
        text, extras, moved, others = move_reasoning_keys(extras, self._reasoning_keys)
        tally.moved += moved
        tally.note("extra_reasoning_key", others)
        blocks: Sequence[str] = ()
        if self._tags.may_contain_tag(content):
            extracted = self._tags.extract(content)
            if extracted is None:
                return Rejected("unclosed_think", "the reasoning is never closed: the text is truncated")
            content, blocks, literal = extracted
            tally.extracted += len(blocks)
            tally.note("literal_think", literal)
        reasoning = join_reasoning([*tally.thoughts, text, *in_parts, *blocks])
        tally.thoughts.clear()
        if self._drops:
            tally.note("dropped_reasoning", int(bool(reasoning)))
            reasoning, extras = (
                "",
                remove_keys(extras, [key for key in self._reasoning_keys if type(extras.get(key)) is str]),
            )
        if not reasoning and not calls.calls and not content.strip():
            return Rejected("empty_assistant", f"{role} with no text, call or reasoning")
        return _assemble_message(role, content, reasoning, calls, extras)

    def _reshape_messages(
        self, record: Mapping[str, Json], found: DetectedMessages, columns: MessageColumns
    ) -> DetectedMessages | Rejected:
        """Insert the system messages of other columns, then keep a single turn if requested."""
        values = [found.system] if columns.system_prompt != "system" else []
        if columns.system_prompt is not None:
            values.append(get_at_path(record, columns.system_prompt))
        messages = found.messages
        for value in values:
            text: Json = value
            if is_mapping(value):
                text = value.get("content")
                if type(text) is not str:
                    return Rejected("bad_system_prompt", "a mapping without a text in content")
            if text is not None and type(text) is not str:
                return Rejected("bad_system_prompt", f"{describe_type(text)}, expected text or a mapping with content")
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
                    return Rejected("bad_system_prompt", "there is already a system message, and two are not allowed")
                case _:
                    merged = existing
                    if is_list(existing):
                        merged = [{"type": "text", "text": f"{text}{REASONING_SEPARATOR}"}, *existing]
                    elif existing is None or type(existing) is str:
                        blank = not existing or existing.isspace()
                        merged = text if blank else f"{text}{REASONING_SEPARATOR}{existing}"
                    messages = [{**messages[0], found.content_key: merged}, *messages[1:]]
        if self._single_turn:
            messages = self._keep_single_turn(messages, found)
        return found._replace(messages=messages)

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


def _assemble_message(role: str, content: str, reasoning: str, calls: ToolCalls, extras: Message) -> Message:
    message: Message = {"role": role, "content": content}
    if reasoning:
        message[REASONING_KEY] = reasoning
    if calls.calls:
        message["tool_calls"] = calls.calls
        if any(calls.sources):
            message["arguments_source"] = calls.sources
    return {**message, **extras}
