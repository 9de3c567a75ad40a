"""The public names for a format of one's own: extend `RowFormat`, and register it; see `kinds/custom.py`."""

from rowmill.kinds.custom import RowFormat, register_format

__all__ = ["RowFormat", "register_format"]
