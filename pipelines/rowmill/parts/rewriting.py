"""Finished parts of canonical rows, rewritten: without some rows, or with other splits.

    rows of the part   a  b  c  d          drop b: duplicate      rows a c d, rejects + b, ledger b: rejected
    splits             0  0  0  0          splits 0 0 1 0         c is validation

The original part is kept as well: the next build starts from it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.core.json import from_json
from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.core.storage import File
from rowmill.parts.accounts import RejectLog, row_as_bytes
from rowmill.parts.context import WorkContext
from rowmill.parts.functions import PartInputs, PartPlace, PartResult, part_function
from rowmill.schema.ledger import LEDGER_SCHEMA, REJECTED
from rowmill.schema.manifest import Part
from rowmill.schema.rows import NORMALIZATION_COLUMNS, Rejected, subtract_messages

SPLITS = ("train", "validation", "test")
"""Meaning of the codes in `RewriteInputs.splits`."""

REMOVED_SCHEMA = pa.schema(
    [
        pa.field("place", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)
"""A row of a part that goes, and why."""


@dataclass(frozen=True, slots=True)
class RewriteInputs(PartInputs):
    """A part, the rows to remove in `REMOVED_SCHEMA`, and each row's split (None: unchanged).

    Removed rows are a table, or a file if a worker chose them: the inputs of all parts are in memory at once.
    """

    part: Part
    removed: "File | pa.Table"
    splits: bytes | None = None

    @property
    def input_bytes(self) -> int:
        """Size of the rows."""
        return self.part.files["rows"].bytes


def rewrite_parts(context: WorkContext, parts: Sequence[Part], changes: Sequence[RewriteInputs | None]) -> list[Part]:
    """Return the parts after what is to change in each of them; None: it stays as it is."""
    rewritten = iter(context.map(rewrite_rows, [change for change in changes if change is not None]).parts)
    return [part if change is None else next(rewritten) for part, change in zip(parts, changes, strict=True)]


def plan_removal(part: Part, removed: Mapping[int, Rejected]) -> RewriteInputs | None:
    """Return what rejects some rows of a part; None if there are none."""
    return RewriteInputs(part, tabulate_removed(removed)) if removed else None


def tabulate_removed(removed: Mapping[int, Rejected]) -> pa.Table:
    """Return rows of a part that go, by their places, for `RewriteInputs.removed`."""
    places = sorted(removed)
    reasons, details = [removed[place].reason for place in places], [removed[place].detail for place in places]
    return pa.table([places, reasons, details], schema=REMOVED_SCHEMA)


@part_function(version=1)
def rewrite_rows(inputs: RewriteInputs, place: PartPlace) -> PartResult:
    """Rewrite a part; dropped rows are added to its rejects."""
    store, part = place.store, inputs.part
    rows = store.table(part.files["rows"])
    if inputs.splits is not None:
        names = np.array(SPLITS)[np.frombuffer(inputs.splits, np.int8)]
        rows = rows.set_column(rows.schema.get_field_index("split"), rows.schema.field("split"), pa.array(names))
    log = RejectLog(CANONICAL_ROWS)
    removed = store.table(inputs.removed) if isinstance(inputs.removed, File) else inputs.removed
    drop, why, details = (column.to_pylist() for column in removed.columns)
    dropped = rows.take(pa.array(drop, pa.int64())).to_pylist()
    for row, reason, detail in zip(dropped, why, details, strict=True):
        log.add(row["row_id"], Rejected(reason, detail), row_as_bytes(row))
    keep = np.ones(rows.num_rows, bool)
    keep[drop] = False
    kept = rows.filter(pa.array(keep))
    rejects = pa.concat_tables([store.table(part.files["rejects"]), log.table()])
    before = store.table(part.files["ledger"])
    states, reasons = before.column("state").to_pylist(), before.column("reason").to_pylist()
    gone = dict(zip(log.row_ids, log.reasons, strict=True))
    for i, row_id in enumerate(before.column("row_id").to_pylist()):
        if row_id in gone:
            states[i], reasons[i] = REJECTED, gone[row_id]
    ledger = pa.table([before.column("row_id"), before.column("stage"), states, reasons], schema=LEDGER_SCHEMA)
    files = {
        "rows": place.write("rows", kept),
        "rejects": place.write("rejects", rejects),
        "ledger": place.write("ledger", ledger),
    }
    samples = log.add_samples(part.facts["examples_of_rejects"])
    facts = part.facts | {
        **{name: count for name, count in count_rows(kept).items() if name in part.facts},
        **subtract_messages(part.facts, (from_json(row["messages"] or "[]") for row in dropped)),
        "reasons": dict(sorted((Counter(part.facts["reasons"]) + Counter(log.counts())).items())),
        "examples_of_rejects": samples,
    }
    return PartResult(files, facts)


def count_rows(table: pa.Table) -> dict[str, Any]:
    """Return the facts of a part that its rows show.

    They are counted from the table that is written, here and again after rows were removed: a number that was counted
    on the way would describe rows that are gone.
    """
    roles = table.column("unknown_roles")
    return {
        "kept": table.num_rows,
        "splits": _count_values(table.column("split")),
        "schemas": _count_values(table.column("schema")),
        "roles": _count_values(pc.list_flatten(roles)),
        "rows_with_unknown_roles": int(pc.sum(pc.greater(pc.list_value_length(roles), 0)).as_py() or 0),
        "notes": _count_values(pc.list_flatten(table.column("notes"))),
        "noticed": {name: int(pc.sum(table.column(name)).as_py() or 0) for name in NORMALIZATION_COLUMNS},
    }


def _count_values(column: pa.ChunkedArray) -> dict[str, int]:
    counted = column.value_counts()
    return dict(sorted(zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True)))
