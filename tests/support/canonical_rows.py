"""Canonical rows of single records."""

from rowmill.core.json import Json
from rowmill.kinds.base import DatasetOptions
from rowmill.kinds.shared.canonicalization import Canonicalizer
from rowmill.schema.rows import Rejected, Row


def canonicalize_row(record: Json, config: DatasetOptions, *, arrow: bool = False) -> Row | Rejected:
    """Turn one record into its canonical row, report included; for many records keep a `Canonicalizer`."""
    return Canonicalizer(config)(record, arrow=arrow)
