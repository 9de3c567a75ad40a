"""Tasks of a table's plan: runs of examples with their records, each with its fingerprint.

What belongs here: which examples form a part, and what decides its bytes. What does not: the plan (`table_plan.py`),
laying tokens out (`table_tokens.py`).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.core.storage import digest_bytes, digest_json
from rowmill.shards.host_scratch import HostScratch
from rowmill.stages.base import PartTask, StageContext
from rowmill.stages.table_plan import SplitTablePlan, TablePlan
from rowmill.stages.tokenized_examples.record_copies import RecordSource
from rowmill.stages.tokenized_examples.table_tokens import VERSION, BuildExamplesTask, EncodedPart
from rowmill.tabular.prompt import PromptFrame
from rowmill.tabular.row_index import RowIndex
from rowmill.tokenization.tokenizer_card import LoadedTokenizer

PART_TOKENS = 1 << 20
"""Tokens of a part of examples; a worker needs about 20 MB to lay it out."""


def plan_example_tasks(
    work: StageContext,
    frame: PromptFrame,
    plan: TablePlan,
    index: RowIndex,
    encoded: Sequence[EncodedPart],
    names: Sequence[str],
    loaded: LoadedTokenizer,
    scratch: HostScratch,
) -> list[PartTask]:
    """Divide the plan of each split into tasks."""
    numbers = _number_examples(plan)
    sources = [
        RecordSource(part.files["rows"], one.require_kept().files["tokens"])
        for part, one in zip(work.input(CANONICAL_ROWS).parts, encoded, strict=True)
    ]
    planned: list[PartTask] = []
    for one, own in zip(plan.splits, numbers, strict=True):
        for first, last in _cut_parts(one.lengths):
            task = _make_build_task(work, frame, plan, one, own, index, sources, names, loaded, scratch, first, last)
            planned.append(PartTask(task.fingerprint, task, len(task.rows), 4 * int(one.lengths[first:last].sum())))
    return planned


def _number_examples(plan: TablePlan) -> list[Ints]:
    """Return the numbers of the examples of each split that begin with the same row, in plan order."""
    counted: list[Ints] = []
    for one in plan.splits:
        firsts = one.rows[one.assembled.records[one.assembled.record_offsets[:-1]]]
        order = np.argsort(firsts, kind="stable")
        ordered = firsts[order]
        begins = np.flatnonzero(np.diff(ordered, prepend=-1))
        numbers = np.empty(len(firsts), np.int64)
        numbers[order] = np.arange(len(firsts)) - np.repeat(begins, np.diff(np.append(begins, len(firsts))))
        counted.append(numbers)
    return counted


def _cut_parts(lengths: Ints) -> list[tuple[int, int]]:
    """Divide examples into runs of about `PART_TOKENS`; later examples do not affect earlier boundaries."""
    part = np.cumsum(lengths) // PART_TOKENS
    borders = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(lengths)]
    return [(first, last) for first, last in pairwise(borders) if first < last]


def _make_build_task(
    work: StageContext,
    frame: PromptFrame,
    plan: TablePlan,
    one: SplitTablePlan,
    numbers: Ints,
    index: RowIndex,
    sources: Sequence[RecordSource],
    names: Sequence[str],
    loaded: LoadedTokenizer,
    scratch: HostScratch,
    first: int,
    last: int,
) -> BuildExamplesTask:
    made = one.assembled
    units = made.examples[first : last + 1]
    records = made.units[units[0] : units[-1] + 1]
    places = made.records[records[0] : records[-1]]
    rows = one.rows[places]
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
    fingerprint = digest_json(
        "examples", VERSION, frame.to_json(), one.split, plan.mode, _identify_records(index, names, rows),
        {name: digest_bytes(values.tobytes()) for name, values in arrays.items()},
    )  # fmt: skip
    which = np.searchsorted(index.first_rows, rows, "right") - 1
    used, places_in_used = np.unique(which, return_inverse=True)
    first_rows = np.concatenate(([0], np.cumsum(np.diff(index.first_rows)[used])))
    return BuildExamplesTask(
        root=work.store.root,
        folder=work.folder,
        fingerprint=fingerprint,
        sources=tuple(sources[number] for number in used.tolist()),
        first_rows=first_rows,
        frame=frame,
        split=one.split,
        is_grouped=plan.mode == "grouped",
        rows=rows - index.first_rows[which] + first_rows[places_in_used],
        scratch=scratch,
        vocab_size=work.recipe.vocab_size or loaded.card.vocab_size,
        **arrays,
    )


def _identify_records(index: RowIndex, names: Sequence[str], rows: Ints) -> list[object]:
    """Identify rows by the fingerprints of their parts and their indices in these."""
    which = np.searchsorted(index.first_rows, rows, "right") - 1
    used, local = np.unique(which, return_inverse=True)
    places = rows - index.first_rows[which]
    return [
        [names[i] for i in used.tolist()],
        digest_bytes(local.astype(np.int64).tobytes()),
        digest_bytes(places.tobytes()),
    ]
