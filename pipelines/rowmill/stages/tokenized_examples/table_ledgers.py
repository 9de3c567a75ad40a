"""Ledgers of the parts of a table's rows: what became of each row in the plan.

A part of rows has rows of many partitions. A partition of several writes the states of its rows that are not kept, and
the task of a part reads those of its own rows; a table that is one partition hands each task the states themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.stage_names import TOKENIZED_EXAMPLES
from rowmill.core.storage import Store, digest_bytes, digest_json
from rowmill.schema.manifest import File, Part
from rowmill.schema.rows import Rejected
from rowmill.stages.base import PartTask, StageContext
from rowmill.stages.part_files import RejectLog, count_accounts, row_as_bytes, write_accounts, write_table
from rowmill.stages.table_partitions import RowPart
from rowmill.stages.table_plan import KEPT, PartitionPlan
from rowmill.stages.tokenized_examples.table_tokens import EncodedPart
from rowmill.tabular.row_index import RowIndex

ROW_STATES = ("kept", "not_sampled", "record_overflow", "group_overflow", "unserialisable", "control_token_in_content")
"""States of rows, indexed by plans and ledger tasks; from `FIRST_REASON` on, reject reasons."""

_COUNTED_FACTS = ("changed", "escaped", "altered", "altered_rows", "reference_path_texts", "fast_path_mismatches")
"""Facts of a part of rows in addition to the states of its rows."""

_STATE_SCHEMA = pa.schema(
    [
        pa.field("part", pa.int32(), nullable=False),
        pa.field("place", pa.int32(), nullable=False),
        pa.field("state", pa.int8(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)
"""A row that is not kept: row `place` of part `part` of its partition. In the order of the source."""


# ── States of a partition ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class PartStates:
    """States of a part's rows that are not kept: a digest of them, their file, and the part's number in this file."""

    digest: str
    file: File
    number: int


def save_states(store: Store, path: str, plan: PartitionPlan, index: RowIndex) -> tuple[File, dict[str, str]]:
    """Write the states of a partition's rows that are not kept; return the file, and a digest for each part with any.

    Parts are numbered as in the index, so that the file does not depend on other partitions.
    """
    rows = np.flatnonzero(plan.states != KEPT)
    which, places = index.locate_rows(rows)
    details, texts = _OverflowDetails.of(plan), np.full(len(rows), "", object)
    texts[np.searchsorted(rows, details.rows)] = np.array(details.sentences, object)[details.which]
    table = pa.table([which, places, plan.states[rows], texts], schema=_STATE_SCHEMA)
    numbers, begins = np.unique(which, return_index=True)
    borders = pairwise([*begins.tolist(), len(rows)])
    digests = {
        str(number): _digest_states(table.slice(begin, end - begin))
        for number, (begin, end) in zip(numbers.tolist(), borders, strict=True)
    }
    return write_table(store, path, table), digests


def _digest_states(table: pa.Table) -> str:
    places, states = (digest_bytes(table.column(name).to_numpy().tobytes()) for name in ("place", "state"))
    return digest_json(places, states, table.column("detail").to_pylist())


@dataclass(frozen=True, slots=True, eq=False)
class _OverflowDetails:
    """Why rows do not fit: `rows` ascend, each with the index of its message."""

    rows: Ints
    which: Ints
    sentences: tuple[str, ...]

    @classmethod
    def of(cls, plan: PartitionPlan) -> "_OverflowDetails":
        rows = np.concatenate([np.empty(0, np.int64), *plan.overflow_rows])
        which = np.repeat(np.arange(len(plan.overflows)), [len(row) for row in plan.overflow_rows])
        order = np.argsort(rows, kind="stable")
        return cls(rows[order], which[order], tuple(overflow.description for overflow in plan.overflows))

    def between(self, first: int, last: int) -> dict[int, str]:
        """Return the messages of consecutive rows, by their index among these."""
        begin, end = np.searchsorted(self.rows, (first, last)).tolist()
        places = (self.rows[begin:end] - first).tolist()
        return {place: self.sentences[i] for place, i in zip(places, self.which[begin:end].tolist(), strict=True)}


# ── Ledgers of parts ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LedgerTask:
    """A part of rows after planning; `states[i]` indexes `ROW_STATES`: kept, left out, or a reject reason.

    Without `states`, all rows are kept except those that `partitions` say, and those whose reasons are in the part's
    facts. `tokens` are its stored ids.
    """

    root: str
    folder: str
    fingerprint: str
    rows: File
    tokens: File
    facts: dict[str, Any]
    states: bytes | None
    details: Mapping[int, str]
    partitions: tuple[PartStates, ...] = ()


def plan_ledgers(
    context: StageContext,
    plan: PartitionPlan,
    index: RowIndex,
    parts: Sequence[RowPart],
    encoded: Sequence[EncodedPart],
) -> list[PartTask]:
    """Return the tasks of the ledgers of a table that is one partition."""
    overflows = _OverflowDetails.of(plan)
    planned: list[PartTask] = []
    for number, (part, one) in enumerate(zip(parts, encoded, strict=True)):
        first, last = int(index.first_rows[number]), int(index.first_rows[number + 1])
        states, details = plan.states[first:last].copy(), overflows.between(first, last)
        _note_rejects(states, details, one.facts)
        held = states.tobytes()
        fingerprint = digest_json(part.fingerprint, "account", held.hex(), details)
        planned.append(_plan_ledger(context, part, one, fingerprint, held, details))
    return planned


def plan_joined_ledgers(
    context: StageContext,
    parts: Sequence[RowPart],
    encoded: Sequence[EncodedPart],
    states: Mapping[int, Sequence[PartStates]],
) -> list[PartTask]:
    """Return the tasks of the ledgers of a table in partitions; `states` are those of each part, by partition."""
    planned: list[PartTask] = []
    for number, (part, one) in enumerate(zip(parts, encoded, strict=True)):
        own = tuple(states.get(number, ()))
        fingerprint = digest_json(part.fingerprint, "joined account", [found.digest for found in own])
        planned.append(_plan_ledger(context, part, one, fingerprint, None, {}, own))
    return planned


def _plan_ledger(
    context: StageContext,
    part: RowPart,
    one: EncodedPart,
    fingerprint: str,
    states: bytes | None,
    details: Mapping[int, str],
    partitions: tuple[PartStates, ...] = (),
) -> PartTask:
    task = LedgerTask(
        context.store.root, context.folder, fingerprint, part.rows, part.tokens, one.facts, states, details, partitions,
    )  # fmt: skip
    return PartTask(fingerprint, task, part.rows.rows, 4 * part.rows.bytes)


def _note_rejects(states: NDArray[np.int8], details: dict[int, str], facts: Mapping[str, Any]) -> None:
    """Set the states and details of records that were rejected when they were encoded."""
    for place, reason, detail in facts["rejects"]:
        states[place] = ROW_STATES.index(reason)
        details[place] = detail


def _join_states(store: Store, task: LedgerTask) -> tuple[NDArray[np.int8], Mapping[int, str]]:
    """Return the states of a part's rows, and why they were rejected, by row."""
    if task.states is not None:
        return np.frombuffer(task.states, np.int8), task.details
    states, details = np.zeros(task.rows.rows, np.int8), dict[int, str]()
    for found in task.partitions:
        table = store.table(found.file)
        begin, end = np.searchsorted(table.column("part").to_numpy(), (found.number, found.number + 1)).tolist()
        own = table.slice(begin, end - begin)
        places = own.column("place").to_numpy()
        states[places] = own.column("state").to_numpy()
        texts = zip(places.tolist(), own.column("detail").to_pylist(), strict=True)
        details |= {place: text for place, text in texts if text}
    _note_rejects(states, details, task.facts)
    return states, details


def account_part(task: LedgerTask) -> Part:
    """Write a part's ledger and rejects."""
    store = Store(task.root)
    row_ids: list[str] = store.table(task.rows, ["row_id"]).column(0).to_pylist()
    states, details = _join_states(store, task)
    log = RejectLog(TOKENIZED_EXAMPLES)
    places = np.flatnonzero(states > 1).tolist()
    raw = store.table(task.rows).take(pa.array(places, pa.int64())).to_pylist() if places else []
    for place, row in zip(places, raw, strict=True):
        reason = ROW_STATES[int(states[place])]
        log.add(row_ids[place], Rejected(reason, details.get(place, "")), row_as_bytes(row))
    shown = [row_ids[place] for place in np.flatnonzero(states == 0).tolist()]
    left_out = [row_ids[place] for place in np.flatnonzero(states == 1).tolist()]
    kept = pa.chunked_array([shown], pa.string())
    files = {
        "tokens": task.tokens,
        **write_accounts(store, task.folder, task.fingerprint, kept, log, left_out, ROW_STATES[1]),
    }
    facts: dict[str, Any] = {
        "rows": len(row_ids),
        "kept": len(shown),
        **count_accounts(log, left_out, ROW_STATES[1]),
        **{name: task.facts[name] for name in _COUNTED_FACTS},
    }
    return Part(task.fingerprint, files, facts)
