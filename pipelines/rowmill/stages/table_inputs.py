"""What several stages read of a table: its schema and order as `canonical_rows` noted them, and its rows as integers.

What belongs here: recovering what is known of a table from manifests and files. What does not: deciding it
(`canonical_rows/table_schema.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rowmill.core.storage import Store
from rowmill.formats import Records
from rowmill.schema.manifest import File, Part
from rowmill.stages.base import Work
from rowmill.tabular import row_index
from rowmill.tabular.assembly import Ints
from rowmill.tabular.row_index import Index
from rowmill.tabular.schema import RecordSchema
from rowmill.tabular.table_contract import Evidence, TableContract
from rowmill.tabular.time_order import Order


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a dataset once all its parts were observed.

    `contract` is the one in force: the recipe's, else that of the last build, else the one that the data proposes.
    """

    schema: RecordSchema
    order: Order | None
    contract: TableContract | None = None
    evidence: Evidence = field(default_factory=lambda: Evidence(0, {}))
    proposed: TableContract | None = None
    earlier: Mapping[str, Any] | None = None
    observed: tuple[str, ...] = ()
    """Fingerprints of the parts that say what was seen, in the order of the parts; the next build reads them again."""

    def to_json(self) -> dict[str, Any]:
        """Return what parsing and generation read of it, for the manifest."""
        return {"schema": self.schema.to_json(), "order": None if self.order is None else self.order.name}


def known_of(details: dict[str, Any]) -> Known:
    """Recover what a `canonical_rows` manifest says of its dataset."""
    told = details["records"]
    return Known(RecordSchema.from_json(told["schema"]), None if told["order"] is None else Order(told["order"]))


def form_of(work: Work) -> Records:
    """Return the dataset's options of records."""
    form = work.dataset.format
    assert isinstance(form, Records)
    return form


# ── After rows are made ────────────────────────────────────────────────────────────────────────────


def index_of(work: Work, parts: Sequence[Part], known: Known) -> Index:
    """Return the rows of some parts as integers."""
    return index_of_files(work, [part.files["rows"] for part in parts], known)


def index_of_files(work: Work, files: Sequence[File], known: Known) -> Index:
    """Return the rows of some files as integers."""
    form = form_of(work)
    return row_index.load(
        work.store,
        files,
        known.order,
        is_grouped=form.is_grouped,
        is_series=form.mode == "sequential",
    )


def lengths_of(store: Store, files: Sequence[File]) -> Ints:
    """Return each row's tokens, −1 of a row that was rejected, from the kept ids of all parts of rows."""
    lengths = [store.table(file, ["length"]).column(0).to_numpy() for file in files]
    return np.concatenate([np.empty(0, np.int64), *lengths]).astype(np.int64)
