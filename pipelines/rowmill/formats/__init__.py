"""The public names for a format of one's own: extend `RowFormat`, and register it; see `kinds/python.py`."""

from rowmill.kinds.catalog import register_format
from rowmill.kinds.python import RowFormat

__all__ = ["RowFormat", "register_format"]
