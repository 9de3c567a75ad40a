"""Splits by time that need all rows: boundaries from shares, and groups on both sides of a boundary.

    group  times          boundary at 10          later                 reject
    a      3  7                 │                 train                 train
    b      8 12            ─────┼─────            validation, both      straddles_split, both

Times are parsed once per distinct value of a part; memory holds one code per row and one line per group.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rowmill.kinds.shared.splits import Boundaries, Splitter, compute_boundaries
from rowmill.parts.rewriting import SPLITS, RewriteInputs, rewrite_parts, tabulate_removed
from rowmill.schema.manifest import Part
from rowmill.schema.rows import Rejected
from rowmill.stages.base import StageContext


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
