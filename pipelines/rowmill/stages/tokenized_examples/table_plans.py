"""The plan of a table's examples, partition by partition, and the ledger of its records.

Ledgers of the parts of a table's rows: what became of each row in the plan.

A part of rows has rows of many partitions. A partition of several writes the states of its rows that are not kept, and
the task of a part reads those of its own rows; a table that is one partition hands each task the states themselves.

Plans of a table's partitions, each made by a task, and their sum.

    partition ─► plan ─┬─► a file per slice of examples          read by the task that writes this part of examples
                       ├─► prefills of series                    read where series are generated
                       ├─► states of rows that are not kept      read by the tasks of the ledgers
                       └─► counts, sizes, overflows              added up by the calling process

The calling process holds no number per row: of a part of examples it knows the fingerprint and the size. A table that
is one partition is planned by the calling process, which then hands each task its own slice and states.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.stage_names import TOKENIZED_EXAMPLES
from rowmill.core.storage import File, Store, digest_bytes, digest_json
from rowmill.schema.manifest import Part
from rowmill.schema.rows import Rejected
from rowmill.shards.host_scratch import HostScratch
from rowmill.stages.base import PartTask, StageContext, make_parts, part_folder
from rowmill.stages.part_files import RejectLog, count_accounts, row_as_bytes, write_accounts, write_table
from rowmill.stages.table_partitions import (
    HeldPartition,
    IndexOptions,
    PartitionBorders,
    PartitionRows,
    RowPart,
    TablePartition,
    partition_rows,
    read_partition,
)
from rowmill.stages.table_plan import (
    KEPT,
    OverflowFacts,
    PartitionPlan,
    SplitFacts,
    TablePlanRequest,
    count_sampled_rows,
    join_split_facts,
    plan_partition,
    require_fitting_units,
    require_single_use,
)
from rowmill.stages.tokenized_examples import table_tokens
from rowmill.stages.tokenized_examples.overflow_names import make_overflow_naming
from rowmill.stages.tokenized_examples.table_tokens import (
    VERSION,
    BuildExamplesTask,
    EncodedPart,
    ExampleSlice,
    PrefillOptions,
    RecordSource,
    cut_slices,
    save_slice,
    write_prefill,
)
from rowmill.tabular.prompt import PromptFrame
from rowmill.tabular.row_index import SPLITS, RowIndex, share_sample
from rowmill.tabular.schema import RecordSchema

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


# ── Plans of a table's partitions, each made by a task, and their sum ──


@dataclass(frozen=True, slots=True)
class TablePlanning:
    """What all partitions of a table are planned with; the request has the sample of the whole table."""

    request: TablePlanRequest
    options: IndexOptions
    schema: RecordSchema
    frame: PromptFrame
    vocab_size: int

    @property
    def prefill(self) -> PrefillOptions:
        """How the records of initial prefills are written."""
        return PrefillOptions(self.request.form, self.schema, self.frame)

    def divide_sample(self, counts: Sequence[int]) -> list[int | None]:
        """Return the share of each partition in the sample, given its train records."""
        request = self.request
        if request.wanted is None:
            return [None] * len(counts)
        require_single_use(request.dataset, request.form, request.wanted, sum(counts))
        return [*share_sample(request.wanted, counts)]


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """The plan of a table: facts, the tasks of its ledgers and examples, and the prefills of its series.

    `made_of` are the fingerprints of what else was written for it.
    """

    splits: tuple[SplitFacts, ...]
    overflows: OverflowFacts
    ledgers: Sequence[PartTask]
    examples: Sequence[PartTask]
    prefills: Sequence[Part]
    made_of: Sequence[str] = ()


# ── In the calling process ─────────────────────────────────────────────────────────────────────────


def plan_held_partitions(
    store: Store, planning: TablePlanning, partitions: Sequence[HeldPartition]
) -> list[PartitionPlan]:
    """Plan partitions that are in memory.

    Raises
    ------
    ContextOverflowError
        If a unit does not fit and the recipe makes this an error.
    ConfigError
        If privacy forbids the requested number of records.

    """
    request = planning.request
    counts = [] if request.wanted is None else [
        count_sampled_rows(request, one.rows.index, one.rows.lengths) for one in partitions
    ]  # fmt: skip
    shares = planning.divide_sample(counts) if counts else [None] * len(partitions)
    plans = [
        _plan_rows(store, replace(request, partition=one.name, wanted=share), one.rows, one.files)
        for one, share in zip(partitions, shares, strict=True)
    ]
    overflows = OverflowFacts.join([OverflowFacts.of(plan.overflows) for plan in plans])
    require_fitting_units(request.dataset, request.form, overflows)
    return plans


def _plan_rows(store: Store, request: TablePlanRequest, rows: PartitionRows, files: Sequence[File]) -> PartitionPlan:
    naming = make_overflow_naming(store, files, rows.index)
    return plan_partition(request, rows.index, rows.lengths, naming=naming)


def plan_whole_table(
    context: StageContext,
    planning: TablePlanning,
    whole: HeldPartition,
    parts: Sequence[RowPart],
    encoded: Sequence[EncodedPart],
    scratch: HostScratch,
) -> PlannedTable:
    """Plan a table that is one partition, and hand each task its own slice and states."""
    [plan] = plan_held_partitions(context.store, planning, [whole])
    sources = _list_sources(parts)
    examples = [
        _plan_examples(context, planning, scratch, tuple(sources[n] for n in piece.parts.tolist()), piece)
        for piece in cut_slices(plan, whole.rows.index, parts, planning.frame)
    ]
    ledgers = plan_ledgers(context, plan, whole.rows.index, parts, encoded)
    overflows = OverflowFacts.of(plan.overflows)
    prefills = write_prefill(context.store, context.folder, planning.prefill, whole.files, whole.rows.index, plan)
    return PlannedTable(plan.summarize_splits(), overflows, ledgers, examples, prefills)


def _list_sources(parts: Sequence[RowPart]) -> tuple[RecordSource, ...]:
    return tuple(RecordSource(part.rows, part.tokens) for part in parts)


def _plan_examples(
    context: StageContext,
    planning: TablePlanning,
    scratch: HostScratch,
    sources: tuple[RecordSource, ...],
    piece: "ExampleSlice | SavedSlice",
) -> PartTask:
    task = BuildExamplesTask(
        root=context.store.root,
        folder=context.folder,
        fingerprint=piece.fingerprint,
        sources=sources,
        piece=piece if isinstance(piece, ExampleSlice) else piece.file,
        frame=planning.frame,
        is_grouped=planning.request.form.mode == "grouped",
        vocab_size=planning.vocab_size,
        scratch=scratch,
    )
    return PartTask(piece.fingerprint, task, piece.records, 4 * piece.tokens)


# ── By tasks ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SavedSlice:
    """A slice in a file: the fingerprint of its part of examples, and its sizes."""

    fingerprint: str
    records: int
    tokens: int
    file: File


@dataclass(frozen=True, slots=True)
class PartitionPlanTask:
    """A partition to plan; its request has the partition's share of the sample."""

    root: str
    folder: str
    fingerprint: str
    partition: TablePartition
    options: IndexOptions
    request: TablePlanRequest
    prefill: PrefillOptions


def plan_partitions(
    context: StageContext,
    planning: TablePlanning,
    borders: PartitionBorders,
    parts: Sequence[RowPart],
    encoded: Sequence[EncodedPart],
    scratch: HostScratch,
) -> PlannedTable:
    """Plan the partitions of a table by a map; errors as in `plan_held_partitions`."""
    partitions, blocks = partition_rows(context, borders, parts)
    plain = [
        PartitionPlanTask(
            context.store.root, context.folder, "", partition, planning.options,
            replace(planning.request, partition=partition.name), planning.prefill,
        )
        for partition in partitions
    ]  # fmt: skip
    shares: list[int | None] = [None] * len(partitions)
    if planning.request.wanted is not None:
        size = sum(partition.bytes for partition in partitions)
        shares = planning.divide_sample([*context.pool.map(count_partition_rows, plain, size_bytes=size)])
    tasks = [_identify_plan(task, share) for task, share in zip(plain, shares, strict=True)]
    planned = [PartTask(task.fingerprint, task, 0, task.partition.bytes) for task in tasks]
    written = make_parts(context, plan_partition_part, planned)[0]
    overflows = OverflowFacts.join([OverflowFacts.from_json(part.facts["overflows"]) for part in written])
    require_fitting_units(planning.request.dataset, planning.request.form, overflows)
    examples = [
        _plan_examples(context, planning, scratch, sources, SavedSlice(*facts, file=part.files[facts[0]]))
        for partition, part in zip(partitions, written, strict=True)
        for sources in [_list_sources(partition.parts)]
        for facts in part.facts["slices"]
    ]
    states: defaultdict[int, list[PartStates]] = defaultdict(list)
    for partition, part in zip(partitions, written, strict=True):
        for number, digest in part.facts["states"].items():
            states[partition.first + int(number)].append(PartStates(digest, part.files["states"], int(number)))
    splits = [[SplitFacts.from_json(facts) for facts in part.facts["splits"]] for part in written]
    return PlannedTable(
        join_split_facts(splits, SPLITS),
        overflows,
        plan_joined_ledgers(context, parts, encoded, states),
        examples,
        [Part(name, {"prefill": part.files[name]}) for part in written for name in part.facts["prefills"]],
        made_of=[*blocks, *(part.fingerprint for part in written)],
    )


def _identify_plan(task: PartitionPlanTask, share: int | None) -> PartitionPlanTask:
    request = replace(task.request, wanted=share)
    form = request.form.model_dump(mode="json", exclude={"generation"})
    fingerprint = digest_json(
        "table plan", VERSION, table_tokens.PART_TOKENS, task.partition.content, task.prefill.frame.to_json(),
        request.dataset, request.seed, form, asdict(request.limits), share,
    )  # fmt: skip
    return replace(task, request=request, fingerprint=fingerprint)


def count_partition_rows(task: PartitionPlanTask) -> int:
    """Count the train records of a partition that fit."""
    rows = read_partition(Store(task.root), task.partition, task.options)
    return count_sampled_rows(task.request, rows.index, rows.lengths)


def plan_partition_part(task: PartitionPlanTask) -> Part:
    """Plan a partition, and write its slices and the states of its rows."""
    store, at = Store(task.root), part_folder(task.folder, task.fingerprint)
    parts = task.partition.parts
    rows = read_partition(store, task.partition, task.options)
    row_files = [part.rows for part in parts]
    plan = _plan_rows(store, task.request, rows, row_files)
    prefills = write_prefill(store, task.folder, task.prefill, row_files, rows.index, plan)
    files: dict[str, File] = {one.fingerprint: one.files["prefill"] for one in prefills}
    slices: list[tuple[str, int, int]] = []
    for number, piece in enumerate(cut_slices(plan, rows.index, parts, task.prefill.frame)):
        files[piece.fingerprint] = save_slice(store, f"{at}/slice-{number:05d}.arrow", piece)
        slices.append((piece.fingerprint, piece.records, piece.tokens))
    states, digests = save_states(store, f"{at}/states.arrow", plan, rows.index)
    facts: dict[str, Any] = {
        "splits": [one.to_json() for one in plan.summarize_splits()],
        "overflows": OverflowFacts.of(plan.overflows).to_json(),
        "slices": slices,
        "states": digests,
        "prefills": [one.fingerprint for one in prefills],
    }
    return Part(task.fingerprint, {**files, "states": states}, facts)
