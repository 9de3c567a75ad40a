"""What several stages read of a table: its schema and order as `canonical_rows` noted them, and its rows as integers.

What belongs here: recovering what is known of a table from manifests and files. What does not: deciding it
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
    """What is known of a dataset once all its parts were observed.

    `contract` is the one in force: the recipe's, else that of the last build, else the one that the data proposes.
    """

    schema: RecordSchema
    order: SortKey | None
    contract: TableContract | None = None
    evidence: TableEvidence = field(default_factory=lambda: TableEvidence(0, {}))
    proposed: TableContract | None = None
    earlier: Mapping[str, Any] | None = None
    observed: tuple[str, ...] = ()
    """Fingerprints of the parts that say what was seen, in the order of the parts; the next build reads them again."""

    def to_json(self) -> dict[str, Any]:
        """Return what parsing and generation read of it, for the manifest."""
        return {"schema": self.schema.to_json(), "order": None if self.order is None else self.order.name}


def load_observed_table(details: dict[str, Any]) -> ObservedTable:
    """Recover what a `canonical_rows` manifest says of its dataset."""
    told = details["records"]
    return ObservedTable(
        RecordSchema.from_json(told["schema"]), None if told["order"] is None else SortKey(told["order"])
    )


def get_table_options(work: StageContext) -> Records:
    """Return the dataset's options of records."""
    return work.dataset.format.require_table()


# ── After rows are made ────────────────────────────────────────────────────────────────────────────


def index_parts(work: StageContext, parts: Sequence[Part], known: ObservedTable) -> RowIndex:
    """Return the rows of some parts as integers."""
    return index_files(work, [part.files["rows"] for part in parts], known)


def index_files(work: StageContext, files: Sequence[File], known: ObservedTable) -> RowIndex:
    """Return the rows of some files as integers."""
    form = get_table_options(work)
    return row_index.load_row_index(
        work.store,
        files,
        known.order,
        is_grouped=form.is_grouped,
        is_series=form.mode == "sequential",
    )


def read_token_lengths(store: Store, files: Sequence[File]) -> Ints:
    """Return each row's tokens, −1 of a row that was rejected, from the kept ids of all parts of rows."""
    lengths = [store.table(file, ["length"]).column(0).to_numpy() for file in files]
    return np.concatenate([np.empty(0, np.int64), *lengths]).astype(np.int64)


def read_row_column(work: StageContext, index: RowIndex, rows: Ints, column: str) -> list[str]:
    """Return one column of some rows, in their order, reading each part once."""
    files = [part.files["rows"] for part in work.input(CANONICAL_ROWS).parts]
    which = np.searchsorted(index.first_rows, rows, "right") - 1
    found = np.empty(len(rows), object)
    for i in np.unique(which).tolist():
        own = np.flatnonzero(which == i)
        cells = work.store.table(files[i], [column]).column(0)
        found[own] = cells.take(pa.array(rows[own] - index.first_rows[i])).to_pylist()
    return found.tolist()
