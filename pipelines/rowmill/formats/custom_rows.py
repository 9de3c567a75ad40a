"""Runs a user's format class: its records become canonical rows, or tokens that are validated.

record ──rows──► Row(s) ──canonicalisation──► canonical rows
       └─build─► ids, loss_mask, domain ──checked──► BuiltExample
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rowmill.conversation.options import Template
from rowmill.core.config import describe_type
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.formats.canonicalization import Canonicalizer, RowOptionValues, reject_format_error, remove_nulls
from rowmill.formats.chat import Chat
from rowmill.formats.custom import BuildContext, RowFormat, find_format, get_format_method
from rowmill.formats.kind import DatasetOptions
from rowmill.formats.record_values import is_mapping
from rowmill.formats.supervised import Supervised
from rowmill.formats.text import Text
from rowmill.formats.tool_calls import Tools
from rowmill.schema.rows import Rejected, Row

SCHEMA = "python"
"""The schema in the report of such a row."""


def open_row_format(class_name: str, arguments: Mapping[str, Any], base: Path) -> RowFormat:
    """Return an instance of a user's format class, with the recipe's arguments.

    Raises
    ------
    ConfigError
        If the class cannot be found or instantiated.

    """
    where = "format.class"
    cls = find_format(class_name, base, where)
    try:
        return cls(**arguments)
    except Exception as error:
        raise ConfigError(
            f"{where}: {class_name} cannot be instantiated with options {arguments} "
            f"({type(error).__name__}: {error}); expected the constructor's arguments; correct format.options"
        ) from error


class CustomRowReader:
    """Turns records into canonical rows by a user's format class."""

    unread_preferences: frozenset[str] = frozenset()
    """Empty, because the columns that the class reads are unknown."""

    def __init__(self, row_format: RowFormat, chat: Chat, options: DatasetOptions) -> None:
        """Prepare a reader per row kind, so that the class may return calls, parts and flags in any known shape."""
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

    def read_plain(self, record: Mapping[str, Json]) -> None:
        """Return nothing: the class reads every record."""

    def read(self, record: Json, *, arrow: bool) -> list[Row | Rejected]:
        """Return a record's outcomes: at least one row or reject."""
        if not is_mapping(record):
            return [Rejected("not_an_object", f"the record is {describe_type(record)}, expected a mapping")]
        if arrow:
            record = remove_nulls(record)
        if self._builds:
            # Tokens are built in a later stage, which has the tokenizer; the row keeps the original record.
            return [self._add_keys(Row("record", record=record), record)]
        try:
            made: Any = self._format.rows(record)
        except Exception as error:  # noqa: BLE001  (any exception of a user's class rejects its record)
            return [reject_format_error(error)]
        rows: list[Any] = [] if made is None else list(made) if isinstance(made, (list, tuple)) else [made]
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
        """Add group, order and domain: those that the class set, else the record's."""
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
    """Return what a user's class builds from a record, not validated."""
    try:
        return row_format.build(record, context)
    except Exception as error:  # noqa: BLE001  (any exception of a user's class rejects its record)
        return reject_format_error(error)
