"""Canonical rows of single records."""

from typing import Any

from rowmill.core.json import Json
from rowmill.kinds.base import DatasetOptions
from rowmill.kinds.catalog import Chat
from rowmill.kinds.reading.canonicalization import Canonicalizer
from rowmill.schema.rows import Rejected, Row


def canonicalize_row(record: Json, config: DatasetOptions, *, arrow: bool = False) -> Row | Rejected:
    """Turn one record into its canonical row, report included; for many records keep a `Canonicalizer`."""
    return Canonicalizer(config)(record, arrow=arrow)


def kept(record: Json, form: Any = None, **groups: Any) -> Row:
    """Return the row of a record that a format, by default chats, keeps; `groups` are the dataset's options."""
    row = canonicalize_row(record, DatasetOptions(format=form or Chat(), **groups))
    assert isinstance(row, Row), row
    return row


def rejection(record: Json, form: Any = None, **groups: Any) -> Rejected:
    """Return why a record is rejected."""
    row = canonicalize_row(record, DatasetOptions(format=form or Chat(), **groups))
    assert isinstance(row, Rejected), row
    return row
