"""What several stages read of a table: its schema and sort key from `canonical_rows`, and its rows as integers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Ints, find_distinct
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
    recorded = details["records"]
    return ObservedTable(
        RecordSchema.from_json(recorded["schema"]), None if recorded["order"] is None else SortKey(recorded["order"])
    )


def get_table_options(context: StageContext) -> Records:
    """Return the dataset's options of records."""
    return context.dataset.format.require_table()


# ── Rows ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """How rows are indexed: by groups or as series, and in which order."""

    order: SortKey | None
    is_grouped: bool
    is_series: bool

    @classmethod
    def of(cls, context: StageContext, observed: ObservedTable) -> "IndexOptions":
        """Return the options of the dataset."""
        form = get_table_options(context)
        return cls(observed.order, form.is_grouped, form.mode == "sequential")


def index_parts(context: StageContext, parts: Sequence[Part], observed: ObservedTable) -> RowIndex:
    """Index the rows of parts."""
    options = IndexOptions.of(context, observed)
    return row_index.load_row_index(
        context.store,
        [part.files["rows"] for part in parts],
        options.order,
        is_grouped=options.is_grouped,
        is_series=options.is_series,
    )


def read_row_column(store: Store, files: Sequence[File], index: RowIndex, rows: Ints, column: str) -> list[str]:
    """Return a column of the given rows, in their order, reading each file once; `files` are those of the index."""
    which, places = index.locate_rows(rows)
    found = np.empty(len(rows), object)
    for i in find_distinct(which).tolist():
        own = np.flatnonzero(which == i)
        cells = store.table(files[i], [column]).column(0)
        found[own] = cells.take(pa.array(places[own])).to_pylist()
    return found.tolist()
