"""Names of the records and groups that are too large for an example."""

from collections.abc import Sequence
from functools import partial
from itertools import islice

import numpy as np

from rowmill.core.arrays import Ints
from rowmill.core.storage import File, Store
from rowmill.kinds.tables.partition_plan import OverflowNaming
from rowmill.kinds.tables.partitions import read_row_column
from rowmill.kinds.tables.row_index import RowIndex
from rowmill.kinds.tables.serialization import read_json

MAX_EXAMINED_ROWS = 100
"""Records of a group that are examined to find its widest column."""


def make_overflow_naming(store: Store, files: Sequence[File], index: RowIndex) -> OverflowNaming:
    """Return the lookups that name overflows among the rows of an index; `files` are its parts."""
    read = partial(read_row_column, store, files, index)
    return OverflowNaming(
        names_of=lambda rows: read(rows, "row_id"),
        widest_of=lambda units: _find_widest_columns(read, units),
    )


def _find_widest_columns(read: "partial[list[str]]", units: Sequence[Ints]) -> list[str]:
    """Return the column with the most characters for each set of rows."""
    looked_at = [rows[:MAX_EXAMINED_ROWS] for rows in units]
    texts = iter(read(np.concatenate([np.empty(0, np.int64), *looked_at]), "record"))
    widest: list[str] = []
    for rows in looked_at:
        sizes: dict[str, int] = {}
        for text in islice(texts, len(rows)):
            for name, value in read_json(text).items():
                sizes[name] = sizes.get(name, 0) + len(str(value))
        widest.append(max(sizes, key=sizes.__getitem__, default=""))
    return widest
