"""Canonical rows of a part, column by column: their JSON text, hashes and splits."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from rowmill import sources
from rowmill.core.json import Json, to_json
from rowmill.formats import filters
from rowmill.formats.splits import SPLITS, Splitter, assign_content_splits, assign_split
from rowmill.schema.rows import (
    ROW_SCHEMA,
    Message,
    ParseReport,
    PlainChat,
    Rejected,
    Row,
    count_messages,
    make_plain_report,
)
from rowmill.sources.parts import SplitHint
from rowmill.stages.canonical_rows.prompt_hashes import hash_prompts

REPORT_COLUMNS = ("schema", "extracted_think_from_content", "moved_reasoning_keys", "dropped_think_messages",
                  "tools_present", "tools_parsed_from_string", "unknown_roles", "notes")  # fmt: skip
"""The columns of `ParseReport`."""


class RowColumns:
    """Canonical rows of a part, column by column.

    Plain chats are only collected, and their columns made together, which takes less time than row by row.
    """

    def __init__(
        self, dataset: str, schema: pa.Schema, part: sources.SourcePart, splitter: Splitter, *, by_prefix: bool
    ) -> None:
        self.chats: list[list[Message]] = []
        self.chat_ids: list[str] = []
        self.chat_schemas: list[str] = []
        self.dataset = dataset
        self.schema = schema
        self.by_prefix = by_prefix
        self.hint: SplitHint | None = part.split_hint
        self.splitter = splitter
        self.ids: list[str] = []
        self.rows: list[Row] = []
        self.row_places: list[int] = []
        self.texts: list[tuple[str | None, ...]] = []
        self.hashes: list[bytes] = []
        self.dedupe_keys: list[bytes | None] = []
        self.splits: list[str] = []
        self.preferences: Counter[str] = Counter()
        self.with_preferences: list[str] = []

    def count(self) -> dict[str, Any]:
        """Return the part's facts about its records and messages, which its table does not show."""
        conversations = chain((row.messages for row in self.rows), self.chats)
        return {
            "preference_columns": dict(sorted(self.preferences.items())),
            "rows_with_preferences": len(self.with_preferences),
            "examples_of_preferences": {"": self.with_preferences[:3]},
            **count_messages(conversations),
        }

    def note_preferences(self, row_id: str, names: Sequence[str]) -> None:
        """Count a record's columns of preference data, whether or not the record is rejected."""
        if names:
            self.preferences.update(names)
            self.with_preferences.append(row_id)

    def add(self, row_id: str, row: Row, record: Json) -> Rejected | None:
        """Add a row, or return the reject if it cannot be stored or has no split."""
        texts = _row_to_json(row)
        if isinstance(texts, Rejected):
            return texts
        content = filters.hash_row_content(row)
        split = assign_split(
            self.splitter,
            source=self.hint,
            group_key=row.group_key,
            order_key=row.order_key,
            content_hash=content,
        )
        if isinstance(split, Rejected):
            return split
        self.ids.append(row_id)
        self.row_places.append(len(self.chats) + len(self.rows))
        self.rows.append(row)
        self.texts.append(texts)
        self.hashes.append(content)
        self.dedupe_keys.append(filters.hash_record_prefix(record) if self.by_prefix else None)
        self.splits.append(split)
        return None

    def add_plain(self, row_id: str, chat: PlainChat) -> None:
        """Add a plain chat."""
        self.chat_schemas.append(chat.schema)
        self.chats.append(chat.messages)
        self.chat_ids.append(row_id)

    def table(self) -> pa.Table:
        """Return the rows in the dataset's schema, in the order in which they were added."""
        if not self.chats:
            return self._tabulate_rows()
        chats = self._tabulate_chats()
        if not self.rows:
            return chats
        is_row = np.zeros(len(self.chats) + len(self.rows), np.bool_)
        is_row[self.row_places] = True
        places = np.where(is_row, len(self.chats) + np.cumsum(is_row) - 1, np.cumsum(~is_row) - 1)
        return pa.concat_tables([chats, self._tabulate_rows()]).take(pa.array(places))

    def _tabulate_chats(self) -> pa.Table:
        chats, schema = self.chats, self.schema
        hashes = filters.hash_plain_contents(chats)
        splits = assign_content_splits(self.splitter, hashes, source=self.hint)
        columns: dict[str, pa.Array] = {
            "row_id": pa.array(self.chat_ids, pa.string()),
            "content_hash": pa.array(hashes, schema.field("content_hash").type),
            "dataset": pa.repeat(self.dataset, len(chats)),
            "kind": pa.repeat("conversation", len(chats)),
            "split": pa.array(SPLITS).take(pa.array(splits)),
            # JSON is UTF-8 already.
            "messages": pa.array(list(map(orjson.dumps, chats)), pa.binary()).view(pa.string()),
            "prompt_hash": pa.array(hash_prompts(_find_prompts(chats)), schema.field("prompt_hash").type),
            **dict(zip(REPORT_COLUMNS, _report_schemas(self.chat_schemas), strict=True)),
        }
        empty = {field.name: pa.nulls(len(chats), field.type) for field in schema if field.name not in columns}
        return pa.Table.from_arrays([*map((empty | columns).__getitem__, schema.names)], schema=schema)

    def _tabulate_rows(self) -> pa.Table:
        rows = self.rows
        messages, tools, kwargs, records = zip(*self.texts, strict=True) if rows else ((), (), (), ())
        columns: list[Any] = [
            self.ids, self.hashes, self.dedupe_keys, pa.repeat(self.dataset, len(rows)), [r.kind for r in rows],
            self.splits, [r.group_key for r in rows], [r.order_key for r in rows], [r.domain for r in rows],
            messages, tools, kwargs, [r.text for r in rows], [r.output for r in rows], records,
            hash_prompts(_list_prompts(rows)),
            *_report_columns([row.report for row in rows]),
        ]  # fmt: skip
        schema = self.schema
        own = schema.names[len(columns) :]
        columns += [pa.array([row.columns.get(name) for row in rows], schema.field(name).type) for name in own]
        return pa.table(columns, schema=schema)


DEPTH_LIMIT = 254
"""Limit of orjson. Records have a lower limit; JSON text inside them (arguments, tools) is parsed later."""


def _row_to_json(row: Row) -> tuple[str | None, ...] | Rejected:
    """Return a row's messages, tools, template kwargs and record as JSON text, or the reject."""
    values = (
        row.messages or None,
        row.tools,
        row.template_kwargs or None,
        row.record,
    )
    try:
        return tuple([None if value is None else orjson.dumps(value).decode() for value in values])
    except TypeError:
        # Integers beyond 64 bits are valid content; too deep nesting breaks later readers.
        if _is_deeper(values, DEPTH_LIMIT + 1):
            return Rejected("too_deep", f"JSON text inside the record is nested in more than {DEPTH_LIMIT} levels")
        return tuple(None if value is None else to_json(value) for value in values)


def _is_deeper(value: Json, limit: int) -> bool:
    """Return whether lists and objects are nested in more than `limit` levels."""
    level = [value]
    for _ in range(limit):
        inner = [one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer)]
        level = [one for one in inner if isinstance(one, (dict, list, tuple))]
        if not level:
            return False
    return True


def _list_prompts(rows: Sequence[Row]) -> list[str | None]:
    """Return the prompt of each row."""
    asked = _find_prompts(row.messages for row in rows)
    return [row.text if row.kind == "pair" else prompt for row, prompt in zip(rows, asked, strict=True)]


def _find_prompts(conversations: Iterable[Sequence[Message]]) -> list[str | None]:
    """Return the text of the first message of a user in each conversation."""
    found: list[str | None] = []
    for messages in conversations:
        for message in messages:
            if message["role"] == "user":
                found.append(message["content"])
                break
        else:
            found.append(None)
    return found


def _report_schemas(schemas: Sequence[str]) -> list[pa.Array]:
    """Return the report columns of rows without anything to note."""
    each = dict.fromkeys(schemas)
    reports = [make_plain_report(schema) for schema in each]
    if len(reports) == 1:
        return [_repeat_value(getattr(reports[0], name), len(schemas), name) for name in REPORT_COLUMNS]
    places = {schema: place for place, schema in enumerate(each)}
    return _take_reports(reports, list(map(places.__getitem__, schemas)))


def _repeat_value(value: Any, count: int, name: str) -> pa.Array:
    kind = ROW_SCHEMA.field(name).type
    if value == ():
        offsets = pa.py_buffer(np.zeros(count + 1, np.int32))
        return pa.Array.from_buffers(kind, count, [None, offsets], children=[pa.array([], kind.value_type)])
    return pa.repeat(pa.scalar(value, kind), count)


def _report_columns(reports: Sequence[ParseReport]) -> list[pa.Array]:
    # Rows of one schema without notes share one report object.
    each = {id(report): report for report in reports}
    places = {key: place for place, key in enumerate(each)}
    return _take_reports(list(each.values()), [places[id(report)] for report in reports])


def _take_reports(reports: Sequence[ParseReport], places: Sequence[int]) -> list[pa.Array]:
    """Return the columns of rows, each of which has one of some reports."""
    rows = pa.array(places, pa.int32())
    return [
        pa.array([getattr(report, name) for report in reports], ROW_SCHEMA.field(name).type).take(rows)
        for name in REPORT_COLUMNS
    ]
