"""A user's format class at work: its records become rows like any others, or tokens that are checked before they count.

What belongs here: calling the class, what it may return, one word for every way in which it fails. What does
not: finding it (`custom.py`), checking what it built (`built_examples.py`), lengths (`text_examples.py`).

    record ──rows──► Row(s) ──canonicalisation──► canonical rows
           └─build─► ids, loss_mask, domain ──checked──► Built
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rowmill.conversation.rendering.options import Template
from rowmill.core.config import describe_type
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.formats.canonicalization import Canonicalizer, RowOptionValues, remove_nulls
from rowmill.formats.chat import Chat
from rowmill.formats.custom import BuildContext, RowFormat, find_format, get_format_method
from rowmill.formats.kind import DatasetOptions
from rowmill.formats.record_values import is_mapping
from rowmill.formats.supervised import Supervised
from rowmill.formats.text import Text
from rowmill.formats.tool_calls import Tools
from rowmill.schema.rows import Rejected, Row

SCHEMA = "python"
"""What the report of such a row says of its shape."""


def open_row_format(class_name: str, arguments: Mapping[str, Any], base: Path) -> RowFormat:
    """Return a user's format, made with the arguments that the recipe gives.

    Raises
    ------
    ConfigError
        If the class cannot be found or made.

    """
    where = "format.class"
    cls = find_format(class_name, base, where)
    try:
        return cls(**arguments)
    except Exception as error:
        raise ConfigError(
            f"{where}: {class_name} cannot be made with options {arguments} "
            f"({type(error).__name__}: {error}); the constructor's arguments are needed; correct format.options"
        ) from error


class CustomRowReader:
    """Turns records into canonical rows by a user's format class."""

    unread_preferences: frozenset[str] = frozenset()
    """None: which columns the class reads is not known."""

    def __init__(self, row_format: RowFormat, chat: Chat, options: DatasetOptions) -> None:
        """Read conversations again as if a source had held them, whatever shape their calls, parts and flags have."""
        self._format = row_format
        self._builds = get_format_method(type(row_format)) == "build"
        tools, template = Tools(tools_fields=["tools"]), Template(chat_template_kwargs="kwargs")
        self._readers: dict[str, Canonicalizer] = {
            kind: Canonicalizer(
                RowOptionValues(form, options.reasoning, tools, template, options.loss, options.filters),
                group_key=options.splits.group_key,
                order_key=options.splits.time_key,
            )
            for kind, form in (
                ("conversation", chat),
                ("pair", Supervised(domain_key=chat.domain_key)),
                ("text", Text(domain_key=chat.domain_key)),
            )
        }

    def read(self, record: Json, *, arrow: bool) -> list[Row | Rejected]:
        """Return what becomes of one record: at least one row or reject."""
        if not is_mapping(record):
            return [Rejected("not_an_object", f"the record is {describe_type(record)}, expected a mapping")]
        if arrow:
            record = remove_nulls(record)
        if self._builds:
            # Tokens are made where the tokenizer is; the record waits as it came.
            return [self._add_keys(Row("record", record=record), record)]
        try:
            made: Any = self._format.rows(record)
        except Exception as error:  # noqa: BLE001  (whatever a class of one's own raises is that record's reject)
            return [reject_format_error(error)]
        rows: list[Any] = [] if made is None else list(made) if isinstance(made, list | tuple) else [made]
        return [self._canonicalize_row(row, record) for row in rows] or [Rejected("skipped_by_format")]

    def _canonicalize_row(self, row: Any, record: Mapping[str, Json]) -> Row | Rejected:
        if not isinstance(row, Row) or row.kind not in self._readers:
            what = f"a Row of kind {row.kind}" if isinstance(row, Row) else type(row).__name__
            return Rejected("format_error", f"rows returned {what}, expected a Row: conversation, pair or text")
        given: dict[str, Json]
        match row.kind:
            case "conversation":
                kwargs = row.template_kwargs or None
                given = {"messages": list(row.messages), "tools": row.tools and list(row.tools), "kwargs": kwargs}
            case "pair":
                given = {"prompt": row.text, "response": row.output}
            case _:
                given = {"text": row.text}
        read = self._readers[row.kind].row(given)
        return read if isinstance(read, Rejected) else self._add_keys(read, record, row)

    def _add_keys(self, row: Row, record: Mapping[str, Json], given: Row | None = None) -> Row | Rejected:
        """Add group, order and domain: the class's own, else the record's."""
        reader = self._readers["conversation"]
        placed = reader.add_keys(row, record)
        if isinstance(placed, Rejected):
            return placed
        report = replace(placed.report, schema=SCHEMA)
        if given is None:
            return replace(placed, report=report)
        return replace(
            placed,
            report=report,
            group_key=given.group_key or placed.group_key,
            order_key=given.order_key or placed.order_key,
            domain=given.domain or placed.domain,
        )


def build_tokens(
    row_format: RowFormat, record: Mapping[str, Json], context: BuildContext[Any]
) -> Mapping[str, Any] | Rejected | None:
    """Return what a user's class builds of a record, unchecked."""
    try:
        return row_format.build(record, context)
    except Exception as error:  # noqa: BLE001  (whatever a user's class raises is that record's reject)
        return reject_format_error(error)


def reject_format_error(error: Exception) -> Rejected:
    """Word what a class raised."""
    return Rejected("format_error", f"{type(error).__name__}: {error}")
