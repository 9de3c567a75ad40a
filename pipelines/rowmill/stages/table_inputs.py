"""What several stages read of a table: its schema and sort key from `canonical_rows`, and its rows as integers.

What belongs here: loading these from manifests and files. What does not: deciding them
(`canonical_rows/table_schema.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Ints
from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.core.storage import Store
from rowmill.formats import Records
from rowmill.schema.manifest import File, Part
from rowmill.stages.base import StageContext
from rowmill.tabular import row_index
from rowmill.tabular.row_index import RowIndex
from rowmill.tabular.schema import RecordSchema
from rowmill.tabular.table_contract import TableContract, TableEvidence
from rowmill.tabular.time_order import SortKey


@dataclass(frozen=True, slots=True)
class ObservedTable:
    """A table after all its parts were observed.

    `contract` is the one in force: the recipe's, else the last build's, else the one inferred from the data.
    """

    schema: RecordSchema
    order: SortKey | None
    contract: TableContract | None = None
    evidence: TableEvidence = field(default_factory=lambda: TableEvidence(0, {}))
    proposed: TableContract | None = None
    earlier: Mapping[str, Any] | None = None
    observed: tuple[str, ...] = ()
    """Fingerprints of the parts' evidence, in part order; the next build reads it again."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON for the manifest, which parsing and generation read."""
        return {"schema": self.schema.to_json(), "order": None if self.order is None else self.order.name}


def load_observed_table(details: dict[str, Any]) -> ObservedTable:
    """Load the table from the details of a `canonical_rows` manifest."""
    told = details["records"]
    return ObservedTable(
        RecordSchema.from_json(told["schema"]), None if told["order"] is None else SortKey(told["order"])
    )


def get_table_options(work: StageContext) -> Records:
    """Return the dataset's options of records."""
    return work.dataset.format.require_table()


# ── Rows ────────────────────────────────────────────────────────────────────────────


def index_parts(work: StageContext, parts: Sequence[Part], known: ObservedTable) -> RowIndex:
    """Index the rows of parts."""
    return index_files(work, [part.files["rows"] for part in parts], known)


def index_files(work: StageContext, files: Sequence[File], known: ObservedTable) -> RowIndex:
    """Index the rows of files."""
    form = get_table_options(work)
    return row_index.load_row_index(
        work.store,
        files,
        known.order,
        is_grouped=form.is_grouped,
        is_series=form.mode == "sequential",
    )


def read_token_lengths(store: Store, files: Sequence[File]) -> Ints:
    """Return each row's tokens, −1 if rejected, from the stored ids of all parts of rows."""
    lengths = [store.table(file, ["length"]).column(0).to_numpy() for file in files]
    return np.concatenate([np.empty(0, np.int64), *lengths]).astype(np.int64)


def read_row_column(work: StageContext, index: RowIndex, rows: Ints, column: str) -> list[str]:
    """Return a column of the given rows, in their order, reading each part once."""
    files = [part.files["rows"] for part in work.input(CANONICAL_ROWS).parts]
    which = np.searchsorted(index.first_rows, rows, "right") - 1
    found = np.empty(len(rows), object)
    for i in np.unique(which).tolist():
        own = np.flatnonzero(which == i)
        cells = work.store.table(files[i], [column]).column(0)
        found[own] = cells.take(pa.array(rows[own] - index.first_rows[i])).to_pylist()
    return found.tolist()
