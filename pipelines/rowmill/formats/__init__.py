"""How records of each kind become canonical rows; `kinds/catalog.py` lists the kinds.

A user's own format extends `RowFormat`; see `custom.py`.
"""

from rowmill.formats.custom import RowFormat, register_format

__all__ = ["RowFormat", "register_format"]
