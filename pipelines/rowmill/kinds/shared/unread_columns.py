"""Finds columns of some records that no option of their dataset reads.

A column is unread if every record without it gives the same row. So no list of columns has to be kept for each kind,
and a column that only sometimes matters counts as read as soon as one of the records shows that. Rejected records show
nothing: what rejects them may hide that an option reads a column.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rowmill.core.json import Json
from rowmill.kinds.shared.canonicalization import Canonicalizer
from rowmill.schema.rows import Row

MAX_COLUMNS = 200
"""Records with more columns are compared in their first ones only."""


@dataclass(frozen=True, slots=True)
class UnreadColumn:
    """A column that changes no row: in how many of the rows' records it has a value, and in how many it is false."""

    name: str
    records: int
    present: int
    false: int
    is_preference: bool


def detect_unread_columns(reader: Canonicalizer, records: Sequence[Mapping[str, Json]]) -> list[UnreadColumn]:
    """Return the columns with values that can be removed from every record without another row, in their order.

    An empty value (null, "", [], {}) says nothing: it may be the same as none for an option that reads the column.
    """
    made = [(record, row) for record in records if (row := _read_row(reader, record)) is not None]
    present = Counter(name for record, _ in made for name, value in record.items() if not _is_empty(value))
    return [
        UnreadColumn(
            name,
            len(made),
            count,
            sum(record.get(name) is False for record, _ in made),
            name in reader.unread_preferences,
        )
        for name, count in list(present.items())[:MAX_COLUMNS]
        if not any(_changes_row(reader, record, row, name) for record, row in made)
    ]


def _is_empty(value: Json) -> bool:
    return value is None or value in ("", [], {})


def _changes_row(reader: Canonicalizer, record: Mapping[str, Json], row: Row, name: str) -> bool:
    """Return whether a record gives another row than this without a column."""
    if _is_empty(record.get(name)):
        return False
    try:
        return _read_row(reader, {key: value for key, value in record.items() if key != name}) != row
    except Exception:  # noqa: BLE001  (a kind that demands the column reads it)
        return True


def _read_row(reader: Canonicalizer, record: Mapping[str, Json]) -> Row | None:
    """Return a record's row; None if it is rejected."""
    row = reader(dict(record))
    return row if isinstance(row, Row) else None
