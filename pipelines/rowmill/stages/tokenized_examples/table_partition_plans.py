"""Plans of a table's partitions, each made by a task, and their sum.

    partition ─► plan ─┬─► a file per slice of examples          read by the task that writes this part of examples
                       ├─► prefills of series                    read where series are generated
                       ├─► states of rows that are not kept      read by the tasks of the ledgers
                       └─► counts, sizes, overflows              added up by the calling process

The calling process holds no number per row: of a part of examples it knows the fingerprint and the size. A table that
is one partition is planned by the calling process, which then hands each task its own slice and states.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rowmill.core.storage import File, Store, digest_json
from rowmill.schema.manifest import Part
from rowmill.shards.host_scratch import HostScratch
from rowmill.stages.base import PartTask, StageContext, make_parts
from rowmill.stages.kept_parts import part_folder
from rowmill.stages.table_inputs import IndexOptions
from rowmill.stages.table_partitions import (
    HeldPartition,
    PartitionBorders,
    PartitionRows,
    RowPart,
    TablePartition,
    partition_rows,
    read_partition,
)
from rowmill.stages.table_plan import (
    PartitionPlan,
    TablePlanRequest,
    count_sampled_rows,
    plan_partition,
    require_fitting_units,
    require_single_use,
)
from rowmill.stages.table_plan_facts import OverflowFacts, SplitFacts, join_split_facts
from rowmill.stages.tokenized_examples import table_tasks
from rowmill.stages.tokenized_examples.overflow_names import make_overflow_naming
from rowmill.stages.tokenized_examples.record_copies import RecordSource
from rowmill.stages.tokenized_examples.series_prefill import PrefillOptions, write_prefill
from rowmill.stages.tokenized_examples.table_ledgers import PartStates, plan_joined_ledgers, plan_ledgers, save_states
from rowmill.stages.tokenized_examples.table_slices import ExampleSlice, save_slice
from rowmill.stages.tokenized_examples.table_tasks import cut_slices
from rowmill.stages.tokenized_examples.table_tokens import VERSION, BuildExamplesTask, EncodedPart
from rowmill.tabular.prompt import PromptFrame
from rowmill.tabular.row_index import SPLITS
from rowmill.tabular.schema import RecordSchema
from rowmill.tabular.table_partitions import share_sample


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
    tasks = _list_plan_tasks(context, planning, partitions)
    planned = [PartTask(task.fingerprint, task, 0, task.partition.bytes) for task in tasks]
    made = make_parts(context, plan_partition_part, planned)[0]
    overflows = OverflowFacts.join([OverflowFacts.from_json(one.facts["overflows"]) for one in made])
    require_fitting_units(planning.request.dataset, planning.request.form, overflows)
    examples = [
        _plan_examples(context, planning, scratch, sources, SavedSlice(*facts, file=one.files[facts[0]]))
        for partition, one in zip(partitions, made, strict=True)
        for sources in [_list_sources(partition.parts)]
        for facts in one.facts["slices"]
    ]
    states: defaultdict[int, list[PartStates]] = defaultdict(list)
    for partition, one in zip(partitions, made, strict=True):
        for number, digest in one.facts["states"].items():
            states[partition.first + int(number)].append(PartStates(digest, one.files["states"], int(number)))
    splits = [[SplitFacts.from_json(facts) for facts in one.facts["splits"]] for one in made]
    return PlannedTable(
        join_split_facts(splits, SPLITS),
        overflows,
        plan_joined_ledgers(context, parts, encoded, states),
        examples,
        [Part(name, {"prefill": one.files[name]}) for one in made for name in one.facts["prefills"]],
        made_of=[*blocks, *(one.fingerprint for one in made)],
    )


def _list_plan_tasks(
    context: StageContext, planning: TablePlanning, partitions: Sequence[TablePartition]
) -> list[PartitionPlanTask]:
    plain = [
        PartitionPlanTask(
            context.store.root, context.folder, "", one, planning.options,
            replace(planning.request, partition=one.name), planning.prefill,
        )
        for one in partitions
    ]  # fmt: skip
    shares: list[int | None] = [None] * len(partitions)
    if planning.request.wanted is not None:
        size = sum(one.bytes for one in partitions)
        shares = planning.divide_sample([*context.pool.map(count_partition_rows, plain, size_bytes=size)])
    return [_identify_plan(task, share) for task, share in zip(plain, shares, strict=True)]


def _identify_plan(task: PartitionPlanTask, share: int | None) -> PartitionPlanTask:
    request = replace(task.request, wanted=share)
    form = request.form.model_dump(mode="json", exclude={"generation"})
    fingerprint = digest_json(
        "table plan", VERSION, table_tasks.PART_TOKENS, task.partition.content, task.prefill.frame.to_json(),
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
