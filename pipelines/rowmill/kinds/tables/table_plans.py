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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Ints
from rowmill.core.stage_names import TOKENIZED_EXAMPLES
from rowmill.core.storage import File, Store, digest_bytes, digest_json
from rowmill.kinds.joint_rows import KindContext
from rowmill.kinds.tables.partition_plan import (
    KEPT,
    OverflowFacts,
    OverflowNaming,
    PartitionPlan,
    SplitFacts,
    TablePlanRequest,
    count_sampled_rows,
    join_split_facts,
    plan_partition,
    require_fitting_units,
    require_single_use,
)
from rowmill.kinds.tables.partitions import (
    SPLITS,
    IndexOptions,
    PartitionBorders,
    RowIndex,
    RowPart,
    TablePartition,
    partition_rows,
    read_partition,
    read_row_column,
    share_sample,
)
from rowmill.kinds.tables.prompt import PromptFrame
from rowmill.kinds.tables.record_tokens import (
    BuildExamplesInputs,
    PrefillOptions,
    RecordSource,
    cut_slices,
    save_slice,
    write_prefill,
)
from rowmill.kinds.tables.schema import RecordSchema
from rowmill.kinds.tables.serialization import read_json
from rowmill.parts.accounts import RejectLog, count_accounts, row_as_bytes, write_accounts
from rowmill.parts.functions import PartInputs, PartPlace, PartResult, part_function, write_table
from rowmill.schema.manifest import Part
from rowmill.schema.rows import Rejected
from rowmill.shards.host_scratch import HostScratch

MAX_EXAMINED_ROWS = 100
"""Records of a group that are examined to find its widest column."""


def make_overflow_naming(store: Store, files: Sequence[File], index: RowIndex) -> OverflowNaming:
    """Return the lookups that name overflows among the rows of an index; `files` are its parts."""
    read = partial(read_row_column, store, files, index)
    return OverflowNaming(
        names_of=lambda rows: read(rows, "row_id"),
        widest_of=lambda units: _find_widest_columns(read, units),
    )


def _find_widest_columns(read: "partial[list[str]]", units: Sequence[Ints]) -> list[str]:
    """Return the column with the most characters for each set of rows."""
    looked_at = [rows[:MAX_EXAMINED_ROWS] for rows in units]
    texts = iter(read(np.concatenate([np.empty(0, np.int64), *looked_at]), "record"))
    widest: list[str] = []
    for rows in looked_at:
        sizes: dict[str, int] = {}
        for text in islice(texts, len(rows)):
            for name, value in read_json(text).items():
                sizes[name] = sizes.get(name, 0) + len(str(value))
        widest.append(max(sizes, key=sizes.__getitem__, default=""))
    return widest


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
    file: File = field(compare=False)
    number: int = field(compare=False)


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


# ── Ledgers of parts ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LedgerInputs(PartInputs):
    """A part of rows and of their ids after planning, with the states of those rows that are not kept."""

    rows: File
    encoded: Part
    partitions: tuple[PartStates, ...]

    @property
    def input_rows(self) -> int:
        """Rows of the part."""
        return self.rows.rows

    @property
    def input_bytes(self) -> int:
        """About the size of the rows' text, of which the file has a quarter."""
        return 4 * self.rows.bytes


@part_function(version=1)
def account_part(inputs: LedgerInputs, place: PartPlace) -> PartResult:
    """Write a part's ledger and rejects."""
    store = place.store
    # Indexes of `ROW_STATES`: kept, left out, or a reject reason, whose details are by row.
    states, details = np.zeros(inputs.rows.rows, np.int8), dict[int, str]()
    for partition in inputs.partitions:
        table = store.table(partition.file)
        begin, end = np.searchsorted(table.column("part").to_numpy(), (partition.number, partition.number + 1)).tolist()
        of_part = table.slice(begin, end - begin)
        places = of_part.column("place").to_numpy()
        states[places] = of_part.column("state").to_numpy()
        texts = zip(places.tolist(), of_part.column("detail").to_pylist(), strict=True)
        details |= {at: text for at, text in texts if text}
    for at, reason, detail in inputs.encoded.facts["rejects"]:
        states[at] = ROW_STATES.index(reason)
        details[at] = detail
    row_ids: list[str] = store.table(inputs.rows, ["row_id"]).column(0).to_pylist()
    log = RejectLog(TOKENIZED_EXAMPLES)
    places = np.flatnonzero(states > 1).tolist()
    raw = store.table(inputs.rows).take(pa.array(places, pa.int64())).to_pylist() if places else []
    for at, row in zip(places, raw, strict=True):
        reason = ROW_STATES[int(states[at])]
        log.add(row_ids[at], Rejected(reason, details.get(at, "")), row_as_bytes(row))
    shown = [row_ids[place] for place in np.flatnonzero(states == 0).tolist()]
    left_out = [row_ids[place] for place in np.flatnonzero(states == 1).tolist()]
    kept = pa.chunked_array([shown], pa.string())
    files = {
        "tokens": inputs.encoded.files["tokens"],
        **write_accounts(place, kept, log, left_out, ROW_STATES[1]),
    }
    facts: dict[str, Any] = {
        "rows": len(row_ids),
        "kept": len(shown),
        **count_accounts(log, left_out, ROW_STATES[1]),
        **{name: inputs.encoded.facts[name] for name in _COUNTED_FACTS},
    }
    return PartResult(files, facts)


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
    """The plan of a table: facts, the tasks of its ledgers and examples, and the prefills of its series."""

    splits: tuple[SplitFacts, ...]
    overflows: OverflowFacts
    ledgers: Sequence[LedgerInputs]
    examples: Sequence[BuildExamplesInputs]
    prefills: Sequence[Part]


@dataclass(frozen=True, slots=True)
class PartitionPlanInputs(PartInputs):
    """A partition to plan; its request has the partition's share of the sample."""

    partition: TablePartition
    options: IndexOptions
    request: TablePlanRequest
    prefill: PrefillOptions

    @property
    def input_bytes(self) -> int:
        """Size of the partition's files."""
        return self.partition.bytes


def plan_partitions(
    context: KindContext,
    planning: TablePlanning,
    borders: PartitionBorders,
    parts: Sequence[RowPart],
    encoded: Sequence[Part],
    scratch: HostScratch,
) -> PlannedTable:
    """Plan the partitions of a table by a map.

    Raises
    ------
    ContextOverflowError
        If a unit does not fit and the recipe makes this an error.
    ConfigError
        If privacy forbids the requested number of records.

    """
    partitions = partition_rows(context, borders, parts)
    plans = [
        PartitionPlanInputs(
            partition, planning.options, replace(planning.request, partition=partition.name), planning.prefill
        )
        for partition in partitions
    ]
    shares: list[int | None] = [None] * len(partitions)
    if planning.request.wanted is not None:
        count, size = partial(count_partition_rows, context.store), sum(partition.bytes for partition in partitions)
        shares = planning.divide_sample([*context.pool.map(count, plans, size_bytes=size)])
    plans = [
        replace(plan, request=replace(plan.request, wanted=share)) for plan, share in zip(plans, shares, strict=True)
    ]
    written = context.map(plan_partition_part, plans).parts
    overflows = OverflowFacts.join([OverflowFacts.from_json(part.facts["overflows"]) for part in written])
    require_fitting_units(planning.request.dataset, planning.request.form, overflows)
    examples = [
        BuildExamplesInputs(
            slice_fingerprint=fingerprint,
            is_grouped=planning.request.form.mode == "grouped",
            vocab_size=planning.vocab_size,
            records=records,
            tokens=tokens,
            sources=sources,
            piece=part.files[fingerprint],
            frame=planning.frame,
            scratch=scratch,
        )
        for partition, part in zip(partitions, written, strict=True)
        for sources in [tuple(RecordSource(part.rows, part.tokens) for part in partition.parts)]
        for fingerprint, records, tokens in part.facts["slices"]
    ]
    states: defaultdict[int, list[PartStates]] = defaultdict(list)
    for partition, part in zip(partitions, written, strict=True):
        for number, digest in part.facts["states"].items():
            states[partition.first + int(number)].append(PartStates(digest, part.files["states"], int(number)))
    splits = [[SplitFacts.from_json(facts) for facts in part.facts["splits"]] for part in written]
    return PlannedTable(
        join_split_facts(splits, SPLITS),
        overflows,
        [
            LedgerInputs(part.rows, ids, tuple(states.get(number, ())))
            for number, (part, ids) in enumerate(zip(parts, encoded, strict=True))
        ],
        examples,
        [Part(name, {"prefill": part.files[name]}) for part in written for name in part.facts["prefills"]],
    )


def count_partition_rows(store: Store, inputs: PartitionPlanInputs) -> int:
    """Count the train records of a partition that fit."""
    rows = read_partition(store, inputs.partition, inputs.options)
    return count_sampled_rows(inputs.request, rows.index, rows.lengths)


@part_function(version=1)
def plan_partition_part(inputs: PartitionPlanInputs, place: PartPlace) -> PartResult:
    """Plan a partition, and write its slices and the states of its rows."""
    store = place.store
    parts = inputs.partition.parts
    rows = read_partition(store, inputs.partition, inputs.options)
    row_files = [part.rows for part in parts]
    naming = make_overflow_naming(store, row_files, rows.index)
    plan = plan_partition(inputs.request, rows.index, rows.lengths, naming=naming)
    prefills = write_prefill(store, place.stage_folder, inputs.prefill, row_files, rows.index, plan)
    files: dict[str, File] = {one.fingerprint: one.files["prefill"] for one in prefills}
    slices: list[tuple[str, int, int]] = []
    for number, piece in enumerate(cut_slices(plan, rows.index, parts, inputs.prefill.frame)):
        files[piece.fingerprint] = save_slice(store, f"{place.folder}/slice-{number:05d}.arrow", piece)
        slices.append((piece.fingerprint, piece.records, piece.tokens))
    states, digests = save_states(store, f"{place.folder}/states.arrow", plan, rows.index)
    facts: dict[str, Any] = {
        "splits": [one.to_json() for one in plan.summarize_splits()],
        "overflows": OverflowFacts.of(plan.overflows).to_json(),
        "slices": slices,
        "states": digests,
        "prefills": [one.fingerprint for one in prefills],
    }
    return PartResult({**files, "states": states}, facts)
