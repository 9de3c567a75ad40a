"""One record to one canonical row, the row's identity, and what nothing reads: what kinds share around their readers.

    {"question": "…", "response": "…", "hint": "…"}      read: question, response      unread: hint
    {"messages": […], "label": false}                    a bad answer, marked as such
    {"messages": […], "rejected_response": "…"}          an answer with a worse one

Text that a row holds anyway, such as a prompt that is repeated beside the messages, counts as read. Without the columns
of preference data, bad answers would be trained like good ones; names find them, not values, since only the data's
author knows what a `label` means. What belongs to a prompt (a system message, context, earlier turns) is read in every
shape of a record, or the record is refused: a prompt without its context asks something else.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from rowmill.core.config import describe_type
from rowmill.core.errors import PipelineError
from rowmill.core.json import Json, canonical_json, is_nested_deeper, to_json
from rowmill.kinds.base import DatasetOptions, DatasetReader, RecordReader
from rowmill.kinds.reading.conversation_rows import ConversationReader
from rowmill.kinds.shared.filters import CONTENT_HASH_BYTES
from rowmill.kinds.shared.messages import (
    MEDIA_COLUMNS,
    PLACEHOLDERS,
    PROMPT_COLUMNS,
    RejectError,
    get_at_path,
    has_media,
    is_list,
    is_mapping,
    iterate_texts,
    list_prompt_columns,
)
from rowmill.kinds.shared.training_flags import (
    NO_FLAGS,
    has_scalars,
    is_binary_list,
    is_weight_name,
    looks_like_flag,
    may_be_flag,
    note_unread_flag,
)
from rowmill.schema.rows import (
    CANONICAL_FLAGS,
    ROW_KINDS,
    Message,
    PlainChat,
    Rejected,
    Row,
    RowKind,
)

DEFAULT_DOMAIN = "__default__"


class PlainChatReader:
    """Says which records are plain chats, and reads them: there is nothing to do but to take their messages.

        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "id": "7"}

    1. No column belongs to media, to preference data that nothing reads, to tools or to template arguments.
    2. No column looks as if it said what trains, by its name or as a list of numbers.
    3. The messages are found, with no system message beside them, and each has a known role and text alone, without
       reasoning (`ConversationReader.take_plain`).
    4. No other column belongs to the prompt.

    `Canonicalizer.row` makes the same row of such a record, and notes nothing. A dataset that reads a group, an order
    or a domain of its records, or reshapes their messages, has no plain chats.
    """

    def __init__(self, chats: ConversationReader, other_columns: frozenset[str], flag_names: frozenset[str]) -> None:
        """Prepare for a dataset.

        No plain chat has one of `other_columns`; `flag_names` are the columns that the dataset's options say are flags.
        """
        assert chats.detect is not None
        self._detect = chats.detect
        self._take_messages = chats.take_plain
        self._other_columns = other_columns | chats.columns_beside_messages
        self._flag_names = flag_names
        self._seen_names: set[str] = set()
        """Columns that do not look like flags, whatever their values."""

    def read(self, record: Mapping[str, Json]) -> PlainChat | None:
        """Return a record's chat if it is plain, else None."""
        if not self._other_columns.isdisjoint(record):
            return None
        if not self._seen_names.issuperset(record):
            self._seen_names.update(name for name in record if name not in self._flag_names and not may_be_flag(name))
            if not self._seen_names.issuperset(record):
                return None
        if True in map(has_scalars, record.values()):
            return None
        try:
            found = self._detect(record)
        except RejectError:
            return None
        if found.system is not None or not found.messages:
            return None
        messages: list[Message] = []
        if self._take_messages(found, 0, messages) < len(found.messages):
            return None
        if not PROMPT_COLUMNS.isdisjoint(record) and list_prompt_columns(record, found.columns):
            return None
        return PlainChat(found.schema, messages, found.columns)


class Canonicalizer:
    """Turns records of one dataset into canonical rows; everything that depends only on options is computed once.

    `group_key` is a path or a list of paths into the record, `order_key` a path; null values there reject the row.
    `read` takes the place of the kind's reader of records.
    """

    def __init__(
        self,
        options: DatasetOptions,
        *,
        group_key: str | Sequence[str] | None = None,
        order_key: str | None = None,
        read: RecordReader | None = None,
    ) -> None:
        self._read: RecordReader = read or options.format.make_record_reader(options)
        self._group_paths: tuple[str, ...] = (group_key,) if isinstance(group_key, str) else tuple(group_key or ())
        self._many_groups: bool = not isinstance(group_key, str)
        self._order_path: str | None = order_key
        self._domain_key: str | None = options.format.get_domain_key()
        self._has_keys: bool = bool(self._group_paths) or order_key is not None or self._domain_key is not None
        others = (*options.tools.tools_fields, *self._group_paths, options.template.chat_template_kwargs, order_key)
        self.read_elsewhere: tuple[str, ...] = (
            *(name.partition(".")[0] for name in (*others, self._domain_key) if name),
            *options.format.list_ignored_columns(),
        )
        self.unread_preferences: frozenset[str] = frozenset()
        """Columns of preference data that no option of this dataset reads; none for kinds without answer columns."""
        if (answers := options.format.list_answer_columns()) is not None:
            named = [name for name in (*answers, *others) if name]
            read_columns = {*_SHAPE_COLUMNS, *named, *(name.split(".")[0] for name in named)}
            # Who trains on `chosen` has made the choice between a pair's answers: its other columns need not be read.
            chosen = frozenset[str]() if read_columns.isdisjoint(ANSWER_PAIRS) else ANSWER_PAIRS
            self.unread_preferences = PREFERENCE_COLUMNS - read_columns - chosen
        flags = options.format.list_message_flags()
        self._flag_names = frozenset(flags)
        self._no_flags: frozenset[str] = frozenset(
            {*self.read_elsewhere, *(name for name, meaning in flags.items() if meaning == "ignore")}
        )
        self._plain_chats: PlainChatReader | None = None
        if isinstance(self._read, ConversationReader) and not (self._has_keys or self._read.reshapes):
            self._plain_chats = PlainChatReader(self._read, self.unread_preferences | MEDIA_COLUMNS, self._flag_names)
        self._answer_paths: Sequence[str] = options.format.list_answer_paths()

    def __call__(self, record: Json, *, arrow: bool = False) -> Row | Rejected:
        """Return the record's row, or why it has none.

        With `arrow`, the record comes from Arrow, which gives every mapping the union of all keys: nulls are removed at
        every level, except inside a column of JSON text.
        """
        if not is_mapping(record):
            return Rejected("not_an_object", f"the record is {describe_type(record)}, expected a mapping")
        if arrow:
            record = remove_nulls(record)
        row = self.row(record)
        return self.add_keys(row, record) if self._has_keys and isinstance(row, Row) else row

    def read(self, record: Json, *, arrow: bool) -> Sequence[Row | Rejected]:
        """Return the record's outcome: one row, or one reject."""
        return (self(record, arrow=arrow),)

    def read_plain(self, record: Mapping[str, Json]) -> PlainChat | None:
        """Return a record's chat if it is plain, so that `read` would return it and nothing else; else None."""
        return None if self._plain_chats is None else self._plain_chats.read(record)

    def restore_numbers(self, record: dict[str, Json], raw: bytes) -> dict[str, Json]:
        """Return a record with the answers that are numbers as its line writes them: 3.10 and 1e3 are no floats."""
        paths = [path for path in self._answer_paths if type(get_at_path(record, path)) is float]
        if not paths:
            return record
        written = json.loads(raw, parse_float=str, parse_constant=lambda _: None)
        names = (path if path in record else path.partition(".")[0] for path in paths)
        return record | {name: written[name] for name in names}

    def row(self, record: Mapping[str, Json]) -> Row | Rejected:
        """Return a record's row without its group, order and domain."""
        try:
            row = self._read(record)
        except RejectError as error:
            return error.rejected
        except (PipelineError, OSError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001  (a mistake of a kind's reader concerns its record, whatever it is)
            return reject_format_error(error)
        if isinstance(row, Rejected):
            return row
        if not PROMPT_COLUMNS.isdisjoint(record) and row.kind in _KINDS_WITH_PROMPT:
            for name in list_prompt_columns(record, (*row.read_columns, *self.read_elsewhere)):
                # The row may hold the text anyway, as the first message does in some datasets of messages.
                value = record[name]
                if type(value) is not str or not any(value.strip() in text for text in _list_row_texts(row)):
                    return Rejected(
                        "unread_prompt",
                        f"{name} holds {describe_type(value)}, which belongs to the prompt by its name, and nothing "
                        "reads it; name it in format.context_fields or format.system_prompt, or accept it in "
                        "format.ignore_columns",
                    )
        if unread := self._list_unread_flags(record, row):
            notes = (*row.report.notes, *(note_unread_flag("column", name) for name in unread))
            row = replace(row, report=replace(row.report, notes=notes))
        if not MEDIA_COLUMNS.isdisjoint(record):
            texts = [row.text or "", row.output or ""]
            texts += [text for one in row.messages for text in (one["content"], one.get("reasoning_content", ""))]
            for column, placeholder in PLACEHOLDERS.items():
                if has_media(record.get(column)) and any(placeholder in text for text in texts):
                    what = f"the text holds {placeholder}, and the column {column} is not empty"
                    return Rejected("multimodal_content", what)
        return row

    def _list_unread_flags(self, record: Mapping[str, Json], row: Row) -> list[str]:
        """Return the columns that look as if they said what trains, and that nothing reads."""
        found: list[str] = []
        for name, value in record.items():
            if name in self._no_flags or name in row.read_columns:
                continue
            is_flag = may_be_flag(name) and looks_like_flag(name, value)
            if not is_flag and has_scalars(value) and name not in NO_FLAGS:
                is_flag = is_binary_list(value, _list_sizes(row))
            # A weight of 1 says nothing.
            is_flag = is_flag and not (value == 1 and type(value) is not bool and is_weight_name(name))
            if is_flag and note_unread_flag("column", name) not in row.report.notes:
                found.append(name)
        return found

    def add_keys(self, row: Row, record: Mapping[str, Json]) -> Row | Rejected:
        """Add group, order and domain, each read from the original record."""
        if not self._has_keys:
            return row
        group, order, domain = row.group_key, row.order_key, row.domain
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
            domain = find_domain(record, self._domain_key)
        return replace(row, group_key=group, order_key=order, domain=domain)


def open_dataset_reader(options: DatasetOptions, base: Path, dataset: str) -> DatasetReader:
    """Return the reader of a dataset's records: the kind's own, or the one that makes one row of a record.

    `base` is the project's folder, `dataset` the dataset's name.
    """
    own = options.format.open_dataset_reader(options, base, dataset)
    return own or Canonicalizer(options, group_key=options.splits.group_key, order_key=options.splits.time_key)


def _list_sizes(row: Row) -> set[int]:
    """Return how many messages, answers and ids a row has: as long is a list that says what of them trains."""
    sizes = {len(row.messages), sum(message["role"] not in _ASKING_ROLES for message in row.messages)}
    sizes |= {sum(message["role"] != "system" for message in row.messages)}
    return sizes | ({len(row.columns["input_ids"])} if ROW_KINDS[row.kind].is_token_ids else set[int]())


_ASKING_ROLES = frozenset({"system", "user", "tool"})


# ── The identity of a row ──


CONTENT_KEYS = (
    *("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"),
    *sorted(CANONICAL_FLAGS),
)
"""Keys of a message that count for equality; other keys of a source (ids, times) do not."""
_PLAIN_MESSAGE_KEYS = 2


def hash_row_content(row: Row) -> bytes:
    """Return a digest of 16 bytes over a row's kind, roles, text, reasoning, calls, tools, flags and kwargs.

    The order of keys and other keys of the source do not count.
    """
    messages = [*row.messages]
    for place, message in enumerate(row.messages):
        if len(message) > _PLAIN_MESSAGE_KEYS:
            messages[place] = {key: message[key] for key in CONTENT_KEYS if key in message}
    own = ROW_KINDS[row.kind]
    content: list[Json] = [row.kind, messages, row.tools, row.template_kwargs, row.text, row.output, row.record]
    content += map(_digest_array, map(row.columns.__getitem__, own.content_columns))
    if own.columns:
        # Rows that differ in a field beside the columns of their kind are not duplicates.
        added = sorted(row.columns.keys() - {column.name for column in own.columns})
        content += [[name, _digest_array(row.columns[name])] for name in added]
    return hashlib.blake2b(canonical_json(content), digest_size=CONTENT_HASH_BYTES).digest()


def hash_plain_chat(messages: list[Message]) -> bytes:
    """Return `hash_row_content` of the row of a plain chat, in half the time because no row is made."""
    content: list[Json] = ["conversation", messages, None, {}, None, None, None]
    return hashlib.blake2b(canonical_json(content), digest_size=CONTENT_HASH_BYTES).digest()


def _digest_array(value: Json | NDArray[np.int32] | NDArray[np.bool_] | NDArray[np.float32]) -> Json:
    """Return the digest of an array, and any other value as it is."""
    if not isinstance(value, np.ndarray):
        return value
    return hashlib.blake2b(value.tobytes(), digest_size=CONTENT_HASH_BYTES).hexdigest()


# ── A row as it is stored ──


TEXT_DEPTH_LIMIT = 254
"""Limit of orjson. Records have a lower limit; JSON text inside them (arguments, tools) is parsed later."""


def row_to_json(row: Row) -> tuple[str | None, ...] | Rejected:
    """Return a row's messages, tools, template kwargs and record as JSON text, or the reject."""
    values = (row.messages or None, row.tools, row.template_kwargs or None, row.record)
    try:
        return tuple([None if value is None else orjson.dumps(value).decode() for value in values])
    except TypeError:
        # Integers beyond 64 bits are valid content; too deep nesting breaks later readers.
        if is_nested_deeper(values, TEXT_DEPTH_LIMIT + 1):
            return Rejected("too_deep", f"JSON text inside the record is nested in more than {TEXT_DEPTH_LIMIT} levels")
        return tuple(None if value is None else to_json(value) for value in values)


# ── One key of a record ──


def find_domain(record: Mapping[str, Json], domain_key: str) -> str:
    """Return a record's domain."""
    value = get_at_path(record, domain_key)
    return value if type(value) is str and value.strip() else DEFAULT_DOMAIN


def read_domain(domain_key: str, raw: bytes) -> str | None:
    """Return the domain of a rejected record; None if its bytes are no record."""
    try:
        record = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return find_domain(record, domain_key) if is_mapping(record) else None


_KINDS_WITH_PROMPT: frozenset[RowKind] = frozenset({"conversation", "pair", "preference", "prompt"})


def reject_format_error(error: Exception) -> Rejected:
    """Return the reject for an exception of a user's class, or of a kind's reader: neither ends a build."""
    return Rejected("format_error", f"{type(error).__name__}: {error}")


def remove_nulls(value: Json) -> Json:
    """Remove every key whose value is null, at every level; nulls in lists come from the source and are kept."""
    if is_mapping(value):
        return {key: remove_nulls(one) for key, one in value.items() if one is not None}
    return [remove_nulls(one) for one in value] if is_list(value) else value


# ── What nothing reads ──


_LEAST_CHARS = 4
"""Shorter texts stand in others by chance."""


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
        elsewhere = self._read_elsewhere
        names = [
            name for name, one in record.items() if type(one) is str and name not in read and name not in elsewhere
        ]
        if not names:
            return
        row = made if isinstance(made, Row) else Row("conversation", tuple(made.messages))
        unread = measure_unread_text({name: record[name] for name in names}, row, ())
        if unread:
            total = measure_row_text(row) + sum(unread.values())
            self.columns.update({name: round(1e6 * size / total) for name, size in unread.items()})


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


def list_present_columns(record: Mapping[str, Json], unread: frozenset[str]) -> list[str]:
    """Return the unread columns in which a record has a value, in the record's order.

    An empty cell is not a value, and what is no single value labels no answer.
    """
    if unread.isdisjoint(record):
        return []
    return [
        name
        for name, value in record.items()
        if name in unread
        and value is not None
        and value != ""
        and not (name in ANSWER_LABELS and (is_mapping(value) or is_list(value)))
    ]
