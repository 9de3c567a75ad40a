"""Canonical rows of a part, column by column: their JSON text, hashes and splits.

What belongs here: the values of `ROW_SCHEMA` from rows. What does not: reading records, and files (`text_rows.py`).
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import orjson
import pyarrow as pa

from rowmill import sources
from rowmill.core.json import Json, to_json
from rowmill.formats import filters
from rowmill.formats.splits import Splitter, assign_split
from rowmill.schema.rows import ROW_SCHEMA, ParseReport, Rejected, Row
from rowmill.sources.parts import SplitHint


class RowColumns:
    """Canonical rows of a part, column by column."""

    def __init__(
        self, dataset: str, schema: pa.Schema, part: sources.SourcePart, splitter: Splitter, *, by_prefix: bool
    ) -> None:
        self.dataset = dataset
        self.schema = schema
        self.by_prefix = by_prefix
        self.hint: SplitHint | None = part.split_hint
        self.splitter = splitter
        self.ids: list[str] = []
        self.rows: list[Row] = []
        self.texts: list[tuple[str | None, ...]] = []
        self.hashes: list[bytes] = []
        self.dedupe_keys: list[bytes | None] = []
        self.splits: list[str] = []
        self.roles: Counter[str] = Counter()
        self.with_unknown_roles: list[str] = []
        self.preferences: Counter[str] = Counter()
        self.with_preferences: list[str] = []

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
        self.rows.append(row)
        self.texts.append(texts)
        self.hashes.append(content)
        self.dedupe_keys.append(filters.hash_record_prefix(record) if self.by_prefix else None)
        self.splits.append(split)
        if row.report.unknown_roles:
            self.with_unknown_roles.append(row_id)
            self.roles.update(row.report.unknown_roles)
        return None

    def table(self) -> pa.Table:
        """Return the rows in the dataset's schema."""
        rows = self.rows
        messages, tools, kwargs, records = zip(*self.texts, strict=True) if rows else ((), (), (), ())
        columns: list[Any] = [
            self.ids, self.hashes, self.dedupe_keys, pa.repeat(self.dataset, len(rows)), [r.kind for r in rows],
            self.splits, [r.group_key for r in rows], [r.order_key for r in rows], [r.domain for r in rows],
            messages, tools, kwargs, [r.text for r in rows], [r.output for r in rows], records,
            [_hash_prompt(r) for r in rows],
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
        level = [one for one in inner if isinstance(one, dict | list | tuple)]
        if not level:
            return False
    return True


def _hash_prompt(row: Row) -> bytes | None:
    """Hash a row's prompt, case-folded with collapsed spaces: an equal prompt in two splits is a leak."""
    prompt = row.text if row.kind == "pair" else next((m["content"] for m in row.messages if m["role"] == "user"), None)
    if not prompt:
        return None
    return hashlib.blake2b(" ".join(prompt.casefold().split()).encode(errors="surrogatepass"), digest_size=8).digest()


def _report_columns(reports: Sequence[ParseReport]) -> list[pa.Array]:
    names = ("schema", "extracted_think_from_content", "moved_reasoning_keys", "dropped_think_messages",
             "tools_present", "tools_parsed_from_string", "unknown_roles", "notes")  # fmt: skip
    # Rows of one schema without notes share one report object.
    each = {id(report): report for report in reports}
    places = {key: place for place, key in enumerate(each)}
    rows = pa.array([places[id(report)] for report in reports], pa.int32())
    return [
        pa.array([getattr(report, name) for report in each.values()], ROW_SCHEMA.field(name).type).take(rows)
        for name in names
    ]
