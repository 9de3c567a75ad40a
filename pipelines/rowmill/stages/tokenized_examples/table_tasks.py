"""Slices of a partition's plan: runs of examples with their records, each with its fingerprint."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets
from rowmill.core.storage import digest_bytes, digest_json
from rowmill.stages.table_partitions import RowPart
from rowmill.stages.table_plan import PartitionPlan, SplitTablePlan
from rowmill.stages.tokenized_examples.table_slices import ExampleSlice
from rowmill.stages.tokenized_examples.table_tokens import VERSION
from rowmill.tabular.prompt import PromptFrame
from rowmill.tabular.row_index import RowIndex

PART_TOKENS = 1 << 20
"""Tokens of a part of examples; a worker needs about 20 MB to lay it out."""


def cut_slices(
    plan: PartitionPlan, index: RowIndex, parts: Sequence[RowPart], frame: PromptFrame
) -> Iterator[ExampleSlice]:
    """Yield the plan of each split in slices; `parts` are those that the index counts."""
    part_rows = np.array([part.rows.rows for part in parts], np.int64)
    fingerprints = [part.fingerprint for part in parts]
    for split in plan.splits:
        numbers = _number_examples(split)
        for first, last in _cut_parts(split.lengths):
            yield _cut_slice(plan, split, numbers, index, part_rows, fingerprints, frame, first, last)


def _number_examples(one: SplitTablePlan) -> Ints:
    """Return the numbers of the examples of a split that begin with the same row, in plan order."""
    firsts = one.rows[one.assembled.records[one.assembled.record_offsets[:-1]]]
    order = np.argsort(firsts, kind="stable")
    ordered = firsts[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    numbers = np.empty(len(firsts), np.int64)
    numbers[order] = np.arange(len(firsts)) - np.repeat(begins, np.diff(np.append(begins, len(firsts))))
    return numbers


def _cut_parts(lengths: Ints) -> list[tuple[int, int]]:
    """Divide examples into runs of about `PART_TOKENS`; later examples do not affect earlier boundaries."""
    part = np.cumsum(lengths) // PART_TOKENS
    borders = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(lengths)]
    return [(first, last) for first, last in pairwise(borders) if first < last]


def _cut_slice(
    plan: PartitionPlan,
    one: SplitTablePlan,
    numbers: Ints,
    index: RowIndex,
    part_rows: Ints,
    fingerprints: Sequence[str],
    frame: PromptFrame,
    first: int,
    last: int,
) -> ExampleSlice:
    made = one.assembled
    units = made.examples[first : last + 1]
    records = made.units[units[0] : units[-1] + 1]
    rows = one.rows[made.records[records[0] : records[-1]]]
    starts = made.record_offsets[first:last]
    if plan.mode == "sequential":
        own = made.records[starts]
        starts = own - one.records.groups[np.searchsorted(one.records.groups, own, "right") - 1]
    arrays: dict[str, NDArray[Any]] = {
        "units": records - records[0],
        "examples": units - units[0],
        "numbers": numbers[first:last],
        "starts": starts,
        "passes": made.passes[first:last],
        "budgets": made.budgets[first:last],
        "flushes": made.flushes[first:last],
    }
    which, places = index.locate_rows(rows)
    used, local = np.unique(which, return_inverse=True)
    # Rows are identified by the fingerprints of their parts and their places in these.
    identity = [
        [fingerprints[i] for i in used.tolist()],
        digest_bytes(local.astype(np.int64).tobytes()),
        digest_bytes(places.tobytes()),
    ]
    digests = {name: digest_bytes(values.tobytes()) for name, values in arrays.items()}
    fingerprint = digest_json("examples", VERSION, frame.to_json(), one.split, plan.mode, identity, digests)
    return ExampleSlice(
        fingerprint=fingerprint,
        split=one.split,
        tokens=int(one.lengths[first:last].sum()),
        parts=used,
        rows=places + compute_offsets(part_rows[used])[local],
        **arrays,
    )
