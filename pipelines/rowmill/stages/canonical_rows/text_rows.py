r"""Canonical rows of a part: records are read one by one, and their columns and counts are written.

How one record becomes a row, and what a row's identity is, stands in `kinds/reading/canonicalization.py`. A prompt's
hash tells whether it is in two splits; case and white space do not count:

    "Who are\n You? "  ─► "who are you?"  ─► BLAKE2b of 8 bytes
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from rowmill import sources
from rowmill.core.arrays import make_column
from rowmill.core.json import Json, to_json
from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.kinds.reading.canonicalization import (
    UnreadTextCounter,
    hash_plain_chat,
    hash_row_content,
    list_present_columns,
    open_dataset_reader,
    row_to_json,
)
from rowmill.kinds.shared import filters
from rowmill.kinds.shared.filters import list_row_texts, reject_long_run
from rowmill.kinds.shared.splits import Splitter, assign_split
from rowmill.kinds.shared.training_flags import find_value, parse_unread_flag
from rowmill.parts.accounts import RejectLog, write_accounts
from rowmill.parts.functions import PartInputs, PartPlace, PartResult, part_function
from rowmill.recipe.recipe import Dataset
from rowmill.schema.ledger import NO_RECORD_REASONS, NOT_TAKEN
from rowmill.schema.row_counts import (
    MessageCounts,
    RowCounts,
    UnreadCounts,
    count_messages,
    count_written_messages,
    count_written_rows,
)
from rowmill.schema.rows import (
    ROW_KINDS,
    ROW_SCHEMA,
    SPLITS,
    Message,
    ParseReport,
    PlainChat,
    Rejected,
    Row,
    Split,
    make_plain_report,
    make_row_schema,
)
from rowmill.sources.reading import TakenGroup, count_group_records, read_taken_records

PROMPT_HASH_BYTES = 8


def hash_prompts(prompts: Sequence[str | None]) -> list[bytes | None]:
    """Hash prompts in folded case and with single spaces; an absent or empty one has no hash."""
    return [
        blake2b(
            " ".join(prompt.casefold().split()).encode(errors="surrogatepass"), digest_size=PROMPT_HASH_BYTES
        ).digest()
        if prompt
        else None
        for prompt in prompts
    ]


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
        self.hint: Split | None = part.split_hint
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
        self.with_unread_flags = 0
        self.unread_flags: dict[str, list[str]] = {}
        """The first row with each flag that nothing reads, and the flag's value, by the row's note."""

    def count(self) -> MessageCounts:
        """Count the messages of all rows, which the table does not show."""
        return count_messages(chain((row.messages for row in self.rows), self.chats))

    def note_preferences(self, row_id: str, names: Sequence[str]) -> None:
        """Count a record's columns of preference data, whether or not the record is rejected."""
        if names:
            self.preferences.update(names)
            self.with_preferences.append(row_id)

    def note_unread_flags(self, row_id: str, row: Row, record: Json) -> None:
        """Count a row with flags that nothing reads."""
        unread = {note: found[1] for note in row.report.notes if (found := parse_unread_flag(note)) is not None}
        self.with_unread_flags += bool(unread)
        for note in unread.keys() - self.unread_flags.keys():
            self.unread_flags[note] = [row_id, to_json(find_value(record, unread[note]))]

    def add(self, row_id: str, row: Row, record: Json) -> Rejected | None:
        """Add a row, or return the reject if it cannot be stored or has no split."""
        texts = row_to_json(row)
        if isinstance(texts, Rejected):
            return texts
        content = hash_row_content(row)
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
        chats, schema = self.chats, self.schema
        hashes = list(map(hash_plain_chat, chats))
        splits = self.splitter.assign_by_contents(hashes, source=self.hint)
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
        table = pa.Table.from_arrays([*map((empty | columns).__getitem__, schema.names)], schema=schema)
        if not self.rows:
            return table
        is_row = np.zeros(len(self.chats) + len(self.rows), np.bool_)
        is_row[self.row_places] = True
        places = np.where(is_row, len(self.chats) + np.cumsum(is_row) - 1, np.cumsum(~is_row) - 1)
        return pa.concat_tables([table, self._tabulate_rows()]).take(pa.array(places))

    def _tabulate_rows(self) -> pa.Table:
        rows = self.rows
        messages, tools, kwargs, records = zip(*self.texts, strict=True) if rows else ((), (), (), ())
        reports = [row.report for row in rows]
        asked = _find_prompts(row.messages for row in rows)
        prompts = [
            row.text if ROW_KINDS[row.kind].asks_in_text else prompt for row, prompt in zip(rows, asked, strict=True)
        ]
        # Rows of one schema without notes share one report object.
        each = {id(report): report for report in reports}
        places = {key: place for place, key in enumerate(each)}
        columns: list[Any] = [
            self.ids, self.hashes, self.dedupe_keys, pa.repeat(self.dataset, len(rows)), [r.kind for r in rows],
            self.splits, [r.group_key for r in rows], [r.order_key for r in rows], [r.domain for r in rows],
            messages, tools, kwargs, [r.text for r in rows], [r.output for r in rows], records,
            hash_prompts(prompts),
            *_take_reports(list(each.values()), [places[id(report)] for report in reports]),
        ]  # fmt: skip
        schema = self.schema
        added = schema.names[len(columns) :]
        columns += [make_column([row.columns.get(name) for row in rows], schema.field(name).type) for name in added]
        return pa.table(columns, schema=schema)


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
    places = {schema: place for place, schema in enumerate(dict.fromkeys(schemas))}
    reports = [make_plain_report(schema) for schema in places]
    if len(reports) > 1:
        return _take_reports(reports, list(map(places.__getitem__, schemas)))
    columns: list[pa.Array] = []
    for name in REPORT_COLUMNS:
        value, kind, count = getattr(reports[0], name), ROW_SCHEMA.field(name).type, len(schemas)
        if value == ():
            buffers = [None, pa.py_buffer(np.zeros(count + 1, np.int32))]
            columns.append(pa.Array.from_buffers(kind, count, buffers, children=[pa.array([], kind.value_type)]))
        else:
            columns.append(pa.repeat(pa.scalar(value, kind), count))
    return columns


def _take_reports(reports: Sequence[ParseReport], places: Sequence[int]) -> list[pa.Array]:
    """Return the columns of rows, each of which has one of some reports."""
    rows = pa.array(places, pa.int32())
    return [
        pa.array([getattr(report, name) for report in reports], ROW_SCHEMA.field(name).type).take(rows)
        for name in REPORT_COLUMNS
    ]


@dataclass(frozen=True, slots=True)
class CanonicalInputs(PartInputs):
    """Source parts whose rows are made together; `options` identifies those of the dataset's options that are read."""

    options: str
    taken: TakenGroup
    dataset: Dataset = field(compare=False)
    dataset_name: str = field(compare=False)
    base: Path = field(compare=False)

    @property
    def input_rows(self) -> int:
        return count_group_records(self.taken)

    @property
    def input_bytes(self) -> int:
        """About the size of their records; parts of row formats record only their number of rows."""
        return sum(max(part.length, part.records * 200) for part, _ in self.taken)


@part_function(version=2)
def canonicalize_part(inputs: CanonicalInputs, place: PartPlace) -> PartResult:
    """Make canonical rows of some source parts; a kind may make several of one record."""
    # A user's class may keep state: every part gets a new reader.
    reader = open_dataset_reader(inputs.dataset, inputs.base, inputs.dataset_name)
    splitter = Splitter(inputs.dataset.splits, by_group=inputs.dataset.format.has_groups(inputs.dataset))
    log = RejectLog(CANONICAL_ROWS)
    by_prefix = inputs.dataset.filters.deduplicate == "prefix200"
    schema = make_row_schema(inputs.dataset.row_kind, inputs.dataset.format.get_rollout_fields().columns)
    columns = RowColumns(inputs.dataset_name, schema, inputs.taken[0][0], splitter, by_prefix=by_prefix)
    unread = UnreadTextCounter(None if ROW_KINDS[inputs.dataset.row_kind].is_token_ids else reader.read_elsewhere)
    left_out: list[str] = []
    further, most_chars = 0, inputs.dataset.source.limits.max_run_chars
    for part, row_id, record in read_taken_records(inputs.taken, inputs.base, left_out):
        may_have_long_run = len(record.raw) > most_chars
        plain = None
        if record.value is not None and not (by_prefix or may_have_long_run):
            plain = reader.read_plain(record.value)
        if plain is not None:
            columns.add_plain(row_id, plain)
            unread.add(record.value, plain)
            continue
        value = record.value
        if value is not None:
            value = reader.restore_numbers(value, record.raw)
        made = (record.rejected,) if record.rejected else reader.read(value, arrow=part.arrow)
        if record.value is not None and not (isinstance(made[0], Row) and ROW_KINDS[made[0].kind].is_running_text):
            columns.note_preferences(row_id, list_present_columns(record.value, reader.unread_preferences))
        further += len(made) - 1
        for k, row in enumerate(made):
            name = f"{row_id}.{k}" if k else row_id
            # Rows of one record are not duplicates of each other, although its first 200 characters are equal.
            seen = [k, record.value] if k else record.value
            is_long = may_have_long_run and isinstance(row, Row)
            long_run = reject_long_run(list_row_texts(row), most_chars) if is_long else None
            refused = row if isinstance(row, Rejected) else long_run or columns.add(name, row, seen)
            if refused is not None:
                log.add(name, refused, record.raw)
            elif isinstance(row, Row):
                unread.add(record.value, row)
                if row.report.notes:
                    columns.note_unread_flags(name, row, record.value)
    table = columns.table()
    form, reasons = inputs.dataset.format, log.counts()
    read = count_group_records(inputs.taken) - sum(reasons.get(reason, 0) for reason in NO_RECORD_REASONS)
    counted = (
        count_written_rows(table)
        + RowCounts(
            further_rows=further,
            reasons=reasons,
            left_out={NOT_TAKEN: len(left_out)} if left_out else {},
            is_text_file=sources.find_file_format(inputs.taken[0][0].reader).has_documents,
            samples_of_rejects=log.find_samples(),
        ),
        count_written_messages(table, holds_messages=ROW_KINDS[inputs.dataset.row_kind].has_messages) + columns.count(),
        UnreadCounts(
            answer_records=0 if form.list_answer_columns() is None else read,
            records_with_preferences=len(columns.with_preferences),
            preference_columns=dict(sorted(columns.preferences.items())),
            rows_with_unread_flags=columns.with_unread_flags,
            rows_searched=unread.rows,
            unread_millionths=dict(sorted(unread.columns.items())),
            samples_of_preferences={"": tuple(columns.with_preferences[:3])} if columns.with_preferences else {},
            samples_of_unread_flags={note: tuple(found) for note, found in sorted(columns.unread_flags.items())},
        ),
        *form.count_rows(table),
    )
    files = {
        "rows": place.write("rows", table),
        **write_accounts(place, table.column("row_id"), log, left_out),
    }
    return PartResult(files, counts=counted)
