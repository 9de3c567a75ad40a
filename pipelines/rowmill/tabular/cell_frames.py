"""The cells of records as columns of text, and hashes of them, so that tables are compared fast.

A cell is the text of its JSON value, for a string the string itself; null and an absent key are null. Polars reads all
columns of a batch at once; a batch that it cannot read is read record by record.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.tabular.serialization import read_json


def read_cells(records: pa.ChunkedArray, names: Sequence[str]) -> pl.DataFrame:
    """Return the cells of the named columns, String[N] each."""
    texts: list[str] = records.to_pylist()
    schema = dict.fromkeys(names, pl.String())
    if not texts:
        return pl.DataFrame(schema=schema)
    try:
        return pl.read_ndjson("\n".join(texts).encode(), schema=schema)
    except (pl.exceptions.PolarsError, UnicodeEncodeError):
        # A lone surrogate, which JSON can escape but UTF-8 cannot encode.
        read = [read_json(text) for text in texts]
        return pl.DataFrame({name: [_format_cell(one.get(name)) for one in read] for name in names}, schema=schema)


def _format_cell(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    return text.encode("utf-8", "backslashreplace").decode()


def hash_cells(cells: pl.DataFrame) -> NDArray[np.uint64]:
    """Return the hash of each cell, uint64[N, K]; seeded by column, so equal texts in two columns differ."""
    columns = [column.hash(seed=number).to_numpy() for number, column in enumerate(cells.iter_columns())]
    return np.stack(columns, axis=1) if columns else np.empty((len(cells), 0), np.uint64)
