"""Finished parts of canonical rows, rewritten: without some rows, or with other splits.

Rewrites a finished part of canonical rows: rejects some rows, moves some to another split.

    rows of the part   a  b  c  d          drop b: duplicate      rows a c d, rejects + b, ledger b: rejected
    splits             0  0  0  0          splits 0 0 1 0         c is validation

The original part is kept as well: the next build starts from it.

Splits by time that need all rows: boundaries from shares, and groups on both sides of a boundary.

    group  times          boundary at 10          later                 reject
    a      3  7                 │                 train                 train
    b      8 12            ─────┼─────            validation, both      straddles_split, both

Times are parsed once per distinct value of a part; memory holds one code per row and one line per group.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.json import from_json
from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.core.storage import File
from rowmill.formats.splits import Boundaries, Splitter, compute_boundaries
from rowmill.parts.accounts import RejectLog, row_as_bytes
from rowmill.parts.functions import PartInputs, PartPlace, PartResult, part_function
from rowmill.schema.ledger import LEDGER_SCHEMA, REJECTED
from rowmill.schema.manifest import Part
from rowmill.schema.rows import Rejected, subtract_messages
from rowmill.stages.base import StageContext
from rowmill.stages.canonical_rows.text_rows import count_rows

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


def rewrite_parts(context: StageContext, parts: Sequence[Part], changes: Sequence[RewriteInputs | None]) -> list[Part]:
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
    samples = {reason: list(ids) for reason, ids in part.facts["examples_of_rejects"].items()}
    for row_id, reason in zip(log.row_ids, log.reasons, strict=True):
        first_ids = samples.setdefault(reason, [])
        if len(first_ids) < 3:
            first_ids.append(row_id)
    facts = part.facts | {
        **{name: count for name, count in count_rows(kept).items() if name in part.facts},
        **subtract_messages(part.facts, (from_json(row["messages"] or "[]") for row in dropped)),
        "reasons": dict(sorted((Counter(part.facts["reasons"]) + Counter(log.counts())).items())),
        "examples_of_rejects": dict(sorted(samples.items())),
    }
    return PartResult(files, facts)


# ── Splits by time that need all rows: boundaries from shares, and groups on both sides of a boundary ──


@dataclass(frozen=True, slots=True)
class _SplitDecisions:
    """A part's decisions: the code of each row's split, -1 if rejected, and the rejects."""

    codes: NDArray[np.int8]
    rejected: dict[int, Rejected]


def split_by_time(context: StageContext, parts: list[Part]) -> tuple[list[Part], Boundaries | None]:
    """Put every row of a dataset into its split by time; parts without changes are kept.

    Return all parts, and the boundaries if they were computed from shares.
    """
    splits = context.dataset.splits
    if not splits.needs_all_rows or not parts:
        return parts, None
    resolved = compute_boundaries(splits, _count_times(context, parts)) if splits.boundaries is None else None
    boundaries = splits.boundaries or resolved
    if boundaries is None:
        return parts, None
    splitter = Splitter(splits.model_copy(update={"boundaries": boundaries}))
    decided = [_decide_by_time(context, part, splitter) for part in parts]
    if splits.group_key is not None:
        decided = _reconcile_groups(context, parts, decided, later=splits.crossing_groups == "later")
    changes = [_plan_rewrite(context, part, decisions) for part, decisions in zip(parts, decided, strict=True)]
    return rewrite_parts(context, parts, changes), resolved


def _count_times(context: StageContext, parts: Sequence[Part]) -> Iterator[tuple[str, int]]:
    counted: Counter[str] = Counter()
    for part in parts:
        counted.update(context.store.table(part.files["rows"], ["order_key"]).column(0).to_pylist())
    yield from counted.items()


def _decide_by_time(context: StageContext, part: Part, splitter: Splitter) -> _SplitDecisions:
    column = context.store.table(part.files["rows"], ["order_key"]).column(0).combine_chunks().dictionary_encode()
    outcomes = [splitter.assign_by_time(value) for value in column.dictionary.to_pylist()]
    codes = np.array([-1 if isinstance(outcome, Rejected) else SPLITS.index(outcome) for outcome in outcomes], np.int8)
    which = column.indices.to_numpy(zero_copy_only=False)
    of_rows = codes[which] if len(codes) else np.empty(0, np.int8)
    reasons = {place: outcomes[which[place]] for place in np.flatnonzero(of_rows < 0).tolist()}
    return _SplitDecisions(of_rows, {place: one for place, one in reasons.items() if isinstance(one, Rejected)})


def _reconcile_groups(
    context: StageContext, parts: Sequence[Part], decided: Sequence[_SplitDecisions], *, later: bool
) -> list[_SplitDecisions]:
    """Move each group to its latest split, or reject the rows of groups in several splits."""
    frames = [_read_groups(context, part, one) for part, one in zip(parts, decided, strict=True)]
    ranges = [frame.filter(pl.col("code") >= 0).group_by("group").agg(_FIRST_SPLIT, _LAST_SPLIT) for frame in frames]
    merged = pl.concat(ranges).group_by("group").agg(pl.col("first").min(), pl.col("last").max())
    spanning = merged.filter(pl.col("first") < pl.col("last"))
    if spanning.is_empty():
        return list(decided)
    return [_reconcile_part(one, frame, spanning, later=later) for one, frame in zip(decided, frames, strict=True)]


_FIRST_SPLIT, _LAST_SPLIT = pl.col("code").min().alias("first"), pl.col("code").max().alias("last")


def _read_groups(context: StageContext, part: Part, decided: _SplitDecisions) -> pl.DataFrame:
    groups = context.store.table(part.files["rows"], ["group_key"]).column(0)
    return pl.DataFrame(
        {"group": groups.to_pylist(), "code": decided.codes}, schema={"group": pl.String, "code": pl.Int8}
    )


def _reconcile_part(
    decided: _SplitDecisions, rows: pl.DataFrame, spanning: pl.DataFrame, *, later: bool
) -> _SplitDecisions:
    last = rows.join(spanning, on="group", how="left", maintain_order="left")["last"].fill_null(-1).to_numpy()
    moves = (last >= 0) & (decided.codes >= 0)
    if later:
        return replace(decided, codes=np.where(moves, last, decided.codes).astype(np.int8))
    groups = rows["group"].to_list()
    rejected = {place: Rejected("straddles_split", str(groups[place])[:80]) for place in np.flatnonzero(moves).tolist()}
    return _SplitDecisions(np.where(moves, -1, decided.codes).astype(np.int8), decided.rejected | rejected)


def _plan_rewrite(context: StageContext, part: Part, decided: _SplitDecisions) -> RewriteInputs | None:
    before = context.store.table(part.files["rows"], ["split"]).column(0).to_pylist()
    if [SPLITS.index(name) for name in before] == decided.codes.tolist():
        return None
    # A dropped row is written with an arbitrary split, which its reject does not show.
    return RewriteInputs(part, tabulate_removed(decided.rejected), np.maximum(decided.codes, 0).tobytes())
