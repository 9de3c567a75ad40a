"""One raw record to one canonical row: formats, tools and reasoning put together in their order.

What belongs here: the order of the steps, and what the row's report says about them. What does not: any of
the steps; each is its room's. This is a hall of the corridor, one of the few modules that may import rooms.

    record ──detect──► messages as written ──roles, content, calls, reasoning, flags──► canonical messages
           └─tools──► tools ─────────────────────────────────────────────────────────► Row | Rejected

Most messages are a known role and some plain text: they are recognised in a few dictionary look-ups and
handed on as they are. Only the others are read key by key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rowmill.conversation.rendering.renderer import Template
from rowmill.core.config import describe_type
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json, canonical_json
from rowmill.formats import Auto, Chat, Format, Python, Records, Supervised, Text
from rowmill.formats.columns import KNOWN_ROLES, MAPPED_ROLES, ConversationColumns
from rowmill.formats.detection import DetectedMessages, detect_messages
from rowmill.formats.filters import Filters, check_length
from rowmill.formats.media_placeholders import reject_placeholders
from rowmill.formats.messages import read_flags, read_kwargs, read_parts
from rowmill.formats.preference import find_unread_columns
from rowmill.formats.reasoning import (
    REASONING_KEY,
    REASONING_SEPARATOR,
    Reasoning,
    ThinkTagReader,
    join_reasoning,
    move_reasoning_keys,
    remove_keys,
)
from rowmill.formats.record_values import get_at_path, is_list, is_mapping
from rowmill.formats.supervised import read_pair
from rowmill.formats.text import read_text
from rowmill.formats.tool_calls import OfferedTools, ToolCalls, Tools, link_calls, read_calls, read_tools
from rowmill.schema.rows import Message, ParseReport, Rejected, Row

DEFAULT_DOMAIN = "__default__"
FUNCTION_CALL = "function_call"
"""The one role that is not renamed but read: its content is an assistant's call."""
_MESSAGE_KEYS = ("role", "content")
NO_CALLS = ToolCalls([], [])
NO_REASONING: Sequence[str] = ()


class RowOptions(Protocol):
    """The groups of a dataset's options that decide its canonical rows."""

    @property
    def format(self) -> Format:
        """Which columns, which shape."""
        ...

    @property
    def reasoning(self) -> Reasoning:
        """Where reasoning is found."""
        ...

    @property
    def tools(self) -> Tools:
        """Where tools are found."""
        ...

    @property
    def template(self) -> Template:
        """Which column holds a row's own template variables."""
        ...

    @property
    def filters(self) -> Filters:
        """How long a document may be."""
        ...


@dataclass(frozen=True, slots=True)
class RowOptionValues:
    """`RowOptions` put together by hand; a group left out has its defaults."""

    format: Format
    reasoning: Reasoning = field(default_factory=Reasoning)
    tools: Tools = field(default_factory=Tools)
    template: Template = field(default_factory=Template)
    filters: Filters = field(default_factory=Filters)


def canonicalize_row(record: Json, config: RowOptions, *, arrow: bool = False) -> Row | Rejected:
    """Turn one record into its canonical row, report included; for many records keep a `Canonicalizer`."""
    return Canonicalizer(config)(record, arrow=arrow)


@dataclass(slots=True)
class _ConversationTally:
    """What is noticed on the way through one conversation."""

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


class Canonicalizer:
    """Turns records of one dataset into canonical rows; what the options decide is worked out once.

    `weighted`: messages may weigh other than 0 and 1 (the recipe's `loss.weights`). `group_key` is a path
    or a list of paths into the record, `order_key` a path; null values there reject the row.
    """

    def __init__(
        self,
        config: RowOptions,
        *,
        weighted: bool = False,
        group_key: str | Sequence[str] | None = None,
        order_key: str | None = None,
    ) -> None:
        self._config: RowOptions = config
        self._weighted: bool = weighted
        self._group_paths: tuple[str, ...] = (group_key,) if isinstance(group_key, str) else tuple(group_key or ())
        self._many_groups: bool = not isinstance(group_key, str)
        self._order_path: str | None = order_key
        self._domain_key: str | None = config.format.domain_key
        self.unread_preferences: frozenset[str] = find_unread_columns(config.format, self._list_other_columns())
        """Columns of preference data that nothing of this dataset's options reads."""
        self._places: bool = bool(self._group_paths) or order_key is not None or self._domain_key is not None
        reasoning = config.reasoning
        # The canonical key always counts as one: reasoning found elsewhere must not overwrite what stands there.
        self._reasoning_keys: list[str] = list(dict.fromkeys([*reasoning.reasoning_keys, REASONING_KEY]))
        self._tags: ThinkTagReader = ThinkTagReader(reasoning.think_tags if reasoning.extract_think_tags else [])
        self._drops: bool = reasoning.think_mode == "drop"
        self._think_role: str | None = reasoning.think_role
        self._roles: dict[str, str] = {}
        self._speakers: frozenset[str] = frozenset()
        self._flags: frozenset[str] = frozenset()
        if isinstance(config.format, ConversationColumns):
            self._speakers = frozenset({"assistant", *config.format.assistant_roles})
            self._flags = frozenset(config.format.message_flags)
            own = {name: name for name in (*KNOWN_ROLES, *self._speakers, FUNCTION_CALL)}
            self._roles = {**MAPPED_ROLES, **own, **config.format.role_map}
        known = {*KNOWN_ROLES, *self._speakers}
        self._known: frozenset[str] = frozenset({*known, self._think_role or "assistant", FUNCTION_CALL})
        self._plain_roles: dict[str, str] = {
            source: role for source, role in self._roles.items() if role in known and role != self._think_role
        }
        self._plain_reports: dict[str, ParseReport] = {}

    def _list_other_columns(self) -> list[str]:
        """Return the columns that are read besides those of the format."""
        kwargs, order = self._config.template.chat_template_kwargs, self._order_path
        named = [*self._config.tools.tools_fields, *self._group_paths, kwargs, order]
        return [name for name in named if name is not None]

    def __call__(self, record: Json, *, arrow: bool = False) -> Row | Rejected:
        """Return the record's row, or why it has none.

        With `arrow`, the record comes from a table that gave every mapping the keys of all the others:
        nulls are removed at every level. A column of JSON text keeps its own.
        """
        if not is_mapping(record):
            return Rejected("not_an_object", f"the record is {describe_type(record)}, expected a mapping")
        if arrow:
            record = remove_nulls(record)
        row = self.row(record)
        return self.add_keys(row, record) if self._places and isinstance(row, Row) else row

    def row(self, record: Mapping[str, Json]) -> Row | Rejected:
        """Return a record's row without its place: group, order and domain."""
        row = self._read_row(record)
        return row if isinstance(row, Rejected) else reject_placeholders(row, record) or row

    def _read_row(self, record: Mapping[str, Json]) -> Row | Rejected:
        """Read the columns that the format names."""
        match self._config.format:
            case Supervised() as pair:
                return self._make_pair_row(record, pair)
            case Text() as text:
                return self._make_text_row(record, text.text_key)
            case Chat() | Auto() as columns:
                return self._make_conversation_row(record, columns)
            case Python() as own:
                raise ConfigError(
                    f"format.class: {own.class_name} makes its rows itself; a kind with columns is needed here; "
                    "call own_rows.OwnRows"
                )
            case Records():
                raise AssertionError("records have their own way to rows, `table_rows.py`")

    def _make_pair_row(self, record: Mapping[str, Json], options: Supervised) -> Row | Rejected:
        pair = read_pair(record, options)
        if isinstance(pair, Rejected):
            return pair
        return Row("pair", text=pair[1], output=pair[2], report=self._get_plain_report(pair[0]))

    def _make_text_row(self, record: Mapping[str, Json], column: str) -> Row | Rejected:
        text = read_text(record, column)
        if isinstance(text, Rejected):
            return text
        return check_length(text, self._config.filters) or Row("text", text=text, report=self._get_plain_report("text"))

    def _get_plain_report(self, schema: str) -> ParseReport:
        """Return the report of a row about which there is nothing to say."""
        report = self._plain_reports.get(schema)
        if report is None:
            report = self._plain_reports[schema] = ParseReport(schema=schema)
        return report

    def _make_conversation_row(self, record: Mapping[str, Json], columns: Chat | Auto) -> Row | Rejected:
        found = detect_messages(record, columns)
        if isinstance(found, Rejected):
            return found
        if found.schema == "text" and isinstance(columns, Auto):
            return self._make_text_row(record, columns.text_key)
        if columns.system_prompt is not None or found.system is not None or columns.single_turn:
            found = self._reshape_messages(record, found, columns)
            if isinstance(found, Rejected):
                return found
        if not found.messages:
            return Rejected("empty_conversation", "no messages")
        tally = _ConversationTally()
        messages = self._read_messages(found, columns, tally)
        if isinstance(messages, Rejected):
            return messages
        offered = read_tools(record, self._config.tools.tools_fields)
        if isinstance(offered, Rejected):
            return offered
        kwargs = self._read_template_kwargs(record, tally)
        if isinstance(kwargs, Rejected):
            return kwargs
        report = self._get_plain_report(found.schema)
        if tally.noticed or offered.present:
            report = tally.report(found.schema, offered)
        return Row("conversation", tuple(messages), offered.tools, kwargs, report=report)

    def _read_template_kwargs(
        self, record: Mapping[str, Json], tally: _ConversationTally
    ) -> dict[str, Json] | Rejected:
        column = self._config.template.chat_template_kwargs
        value = None if column is None else record.get(column)
        if value is None:
            return {}
        kwargs = read_kwargs(value)
        if isinstance(kwargs, Rejected):
            return kwargs
        if kwargs[1]:
            tally.note("ignored_add_generation_prompt")
        return kwargs[0]

    def _read_messages(
        self, found: DetectedMessages, columns: ConversationColumns, tally: _ConversationTally
    ) -> list[Message] | Rejected:
        """Read every message; what is a known role and some text, and nothing more, is taken as it stands."""
        roles, speakers, may_tag = self._plain_roles, self._speakers, self._tags.may_contain_tag
        role_key, content_key = found.role_key, found.content_key
        renames = role_key != "role" or content_key != "content"
        out: list[Message] = []
        for message in found.messages:
            if not is_mapping(message):
                return Rejected("bad_messages", f"message {len(out)} is {describe_type(message)}, expected a mapping")
            source, content = message.get(role_key), message.get(content_key)
            role = roles.get(source) if type(source) is str else None
            if (
                role is None
                or len(message) != 2
                or type(content) is not str
                or (role in speakers and (not content or content.isspace() or tally.thoughts or may_tag(content)))
            ):
                tally.noticed = True
                read = self._read_message(message, found, columns, tally)
                if isinstance(read, Rejected):
                    return read
                if read is not None:
                    out.append(read)
            else:
                out.append({"role": role, "content": content} if renames or role != source else message)
        if tally.thoughts:
            return Rejected("orphan_think", f"{len(tally.thoughts)} with no assistant's message after")
        if tally.noticed:
            link_calls(out)
        return out or Rejected("empty_conversation", "no messages but reasoning")

    def _read_message(
        self, raw: Mapping[str, Json], found: DetectedMessages, columns: ConversationColumns, tally: _ConversationTally
    ) -> Message | Rejected | None:
        """Read one message key by key; null: it was reasoning, now in the tally or dropped."""
        role = self._read_role(raw.get(found.role_key), columns, tally)
        if isinstance(role, Rejected):
            return role
        value = raw.get(found.content_key)
        own = (found.role_key, found.content_key, *_MESSAGE_KEYS)
        extras = {key: one for key, one in raw.items() if one is not None and key not in own}
        called = extras.pop("function_call", None)
        given: list[Json] = [extras.pop("tool_calls", called)] if "tool_calls" in extras or called is not None else []
        if role == FUNCTION_CALL:
            role, value, given = "assistant", "", [value, *given]
        speaks = role in self._speakers
        content, reasoning = "" if value is None else value, NO_REASONING
        if type(content) is not str:
            parts = read_parts(content, speaks=speaks)
            if isinstance(parts, Rejected):
                return parts
            content, reasoning, given = "".join(parts.text), parts.reasoning, [*parts.calls, *given]
        if role == self._think_role:
            return self._hold_reasoning(content, tally)
        calls = read_calls(given, self._config.tools.arguments) if given else NO_CALLS
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

    def _read_role(self, source: Json, columns: ConversationColumns, tally: _ConversationTally) -> str | Rejected:
        if type(source) is not str or not source:
            return Rejected("bad_messages", f"a message's role is {describe_type(source)}, expected a word")
        role = self._roles.get(source, source)
        if role not in self._known:
            if columns.unknown_roles == "reject":
                return Rejected("unknown_role", f"{role!r}; name it in format.role_map, or set unknown_roles: warn")
            if role not in tally.unknown_roles:
                tally.unknown_roles.append(role)
        return role

    def _hold_reasoning(self, content: str, tally: _ConversationTally) -> None:
        """Keep a think message for the next assistant, or drop it."""
        if self._drops:
            tally.dropped_thoughts += 1
        elif content.strip():
            tally.thoughts.append(content)

    def _finish_assistant(
        self,
        role: str,
        content: str,
        in_parts: Sequence[str],
        calls: ToolCalls,
        extras: Message,
        tally: _ConversationTally,
    ) -> Message | Rejected:
        """Finish a message of the model: its reasoning comes together, and something must be left to learn."""
        text, extras, moved, others = move_reasoning_keys(extras, self._reasoning_keys)
        tally.moved += moved
        tally.note("extra_reasoning_key", others)
        blocks: Sequence[str] = ()
        if self._tags.may_contain_tag(content):
            extracted = self._tags.extract(content)
            if extracted is None:
                return Rejected("unclosed_think", "the reasoning is never closed, the text was cut off")
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
        self, record: Mapping[str, Json], found: DetectedMessages, columns: Chat | Auto
    ) -> DetectedMessages | Rejected:
        """Put the system messages of other columns before the messages, then keep a single turn if that is asked."""
        values = [found.system] if columns.system_prompt != "system" else []
        if columns.system_prompt is not None:
            values.append(get_at_path(record, columns.system_prompt))
        messages = found.messages
        for value in values:
            text = _read_system_text(value)
            if isinstance(text, Rejected):
                return text
            if text.strip():
                led = self._insert_system(messages, text, found, columns.on_existing_system)
                if isinstance(led, Rejected):
                    return led
                messages = led
        if columns.single_turn:
            messages = self._keep_single_turn(messages, found)
        return found._replace(messages=messages)

    def _insert_system(
        self, messages: list[Json], text: str, found: DetectedMessages, policy: str
    ) -> list[Json] | Rejected:
        """Put a system message before others, or settle it with the one that is there."""
        system: Json = {found.role_key: "system", found.content_key: text}
        if not messages or self._get_role_name(messages[0], found) != "system":
            return [system, *messages]
        existing: Json = messages[0].get(found.content_key)
        match policy:
            case "keep":
                return messages
            case "replace":
                return [system, *messages[1:]]
            case "reject":
                return Rejected("bad_system_prompt", "a system message is there already, and two are not allowed")
            case _:
                return [{**messages[0], found.content_key: _merge_system_text(text, existing)}, *messages[1:]]

    def _get_role_name(self, message: Json, found: DetectedMessages) -> str | None:
        source = message.get(found.role_key) if is_mapping(message) else None
        return self._roles.get(source, source) if type(source) is str else None

    def _keep_single_turn(self, messages: list[Json], found: DetectedMessages) -> list[Json]:
        """Keep what leads, the first user message, and the model's next; think messages between belong to it."""
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

    def add_keys(self, row: Row, record: Mapping[str, Json]) -> Row | Rejected:
        """Add group, order and domain, each read from the record as it came."""
        if not self._places:
            return row
        group = order = domain = None
        if self._group_paths:
            values = [canonical_json(get_at_path(record, path)).decode() for path in self._group_paths]
            if "null" in values:
                return Rejected("group_missing", f"{self._group_paths[values.index('null')]} is absent or null")
            group = f"[{','.join(values)}]" if self._many_groups else values[0]
        if self._order_path is not None:
            value = get_at_path(record, self._order_path)
            if value is None:
                return Rejected("order_missing", f"{self._order_path} is absent or null")
            order = value if type(value) is str else canonical_json(value).decode()
        if self._domain_key is not None:
            value = get_at_path(record, self._domain_key)
            domain = value if type(value) is str and value.strip() else DEFAULT_DOMAIN
        return replace(row, group_key=group, order_key=order, domain=domain)


def _assemble_message(role: str, content: str, reasoning: str, calls: ToolCalls, extras: Message) -> Message:
    message: Message = {"role": role, "content": content}
    if reasoning:
        message[REASONING_KEY] = reasoning
    if calls.calls:
        message["tool_calls"] = calls.calls
        if any(calls.sources):
            message["arguments_source"] = calls.sources
    return {**message, **extras}


def _read_system_text(value: Json) -> str | Rejected:
    """Read a system message that stands in a column; blank: there is none."""
    if is_mapping(value):
        value = value.get("content")
        if type(value) is not str:
            return Rejected("bad_system_prompt", "a mapping without a text in content")
    if value is None or type(value) is str:
        return value or ""
    return Rejected("bad_system_prompt", f"{describe_type(value)}, expected text or a mapping with content")


def _merge_system_text(text: str, existing: Json) -> Json:
    if is_list(existing):
        return [{"type": "text", "text": f"{text}{REASONING_SEPARATOR}"}, *existing]
    if existing is None or type(existing) is str:
        return f"{text}{REASONING_SEPARATOR}{existing}" if existing and not existing.isspace() else text
    return existing


def remove_nulls(value: Json) -> Json:
    """Remove every key whose value is null, at every level; nulls in lists are the source's own and stay."""
    if is_mapping(value):
        return {key: remove_nulls(one) for key, one in value.items() if one is not None}
    return [remove_nulls(one) for one in value] if is_list(value) else value
