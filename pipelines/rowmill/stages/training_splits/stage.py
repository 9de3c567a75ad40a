"""Sequences of all datasets → the training order, and leaks between splits.

The order is one line per place: dataset, sequence, pass, step. It does not depend on the world size: rank r of W takes
every W-th place. Validation and test sets are not mixed or shuffled; their order is their plan's.

It is written in blocks of about a million places, one task each.

    steps of the order     │ 0 … 4095 │ 4096 … 8191 │ …      a block's steps have places, and the positions of the mixed
    positions of the mix   │ 0 ………… n │ n + 1 ………… m │ …      order from its first one to the next block's

A block needs nothing of the others, so no process holds the order. What it reads of a train sequence is 24 bytes; a
million of them are sent to the workers, more are a file that the workers of a host map.

    dataset  state          sequences  tokens
    chats    kept                 461  235,002     shown at least once
    chats    repeated               0        0     shown again, in later passes: no state of a sequence
    chats    remainder              0        0     left out because a last step or epoch was incomplete
    chats    not_scheduled          5    2,559     never reached
"""

import math
import shutil
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, Ints, compute_offsets, format_count, read_lists
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.stage_names import CANONICAL_ROWS, PACKED_SHARDS, TRAINING_SPLITS
from rowmill.core.storage import Store, digest_json
from rowmill.packing import rank_assignment
from rowmill.packing.mixture import SampleSchedule, compute_wanted_shares, measure_share_error, schedule_sequences
from rowmill.packing.rank_assignment import FILLER, StepPlan
from rowmill.parts.context import StageOutput, open_host_scratch
from rowmill.parts.functions import PartInputs, PartPlace, PartResult, part_function
from rowmill.recipe.recipe import Recipe
from rowmill.schema.counts import CountSet, compute_share
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import DisplayTable, File, Histogram, Manifest, Part, add_up_counts
from rowmill.schema.order_counts import CostCounts, OrderBlockDetails, OrderCounts
from rowmill.shards.host_scratch import HostScratch
from rowmill.stages.base import ComparedNumber, PreparedStage, StageContext, StageDeclaration
from rowmill.stages.inputs import count_train_sequences, list_train_shards, open_joined_shards
from rowmill.stages.training_splits import leakage
from rowmill.stats.tables import StatsInputs, count_rows_of

SENT_SEQUENCES: Final = 1 << 20
"""As many sequences are sent to the workers, 24 MB; more are in a file."""

SEQUENCE_DTYPE = np.dtype(
    [
        ("tokens", np.int32),
        ("trained_tokens", np.int32),
        ("segments", np.int32),
        ("longest_segment", np.int32),
        ("flops", np.int64),
    ]
)
"""A train sequence. `flops` is what it costs; 0 unless ranks are balanced by it."""

_FILE = "sequences.bin"


@dataclass(frozen=True, slots=True, eq=False)
class SequenceTable:
    """The train sequences of all datasets, in recipe order, as an array of `SEQUENCE_DTYPE`, or in a file of a host."""

    count: int
    held: NDArray[Any] | None
    scratch: HostScratch
    stored: tuple[str, str] | None = None
    """The storage root and the path of the copy that other hosts fetch."""

    def load(self) -> NDArray[Any]:
        """Return the sequences; those of a file are read where they are asked for."""
        if self.held is not None:
            return self.held
        if self.stored is not None:
            self.scratch.require({_FILE: partial(_fetch, *self.stored)})
        return np.memmap(self.scratch.locate(_FILE), SEQUENCE_DTYPE, "r", shape=(self.count,))


def _fetch(root: str, relative: str, path: str) -> None:
    with Store(root).open(relative) as stored, Path(path).open("wb") as file:
        shutil.copyfileobj(stored, file)


@contextmanager
def open_sequences(context: StageContext, packed: Mapping[str, Manifest]) -> Generator[SequenceTable]:
    """Lend all train sequences."""
    partitions = context.recipe.partitions
    shards = [part.files["shard"] for part in list_train_shards(packed)]
    count, size = sum(shard.rows for shard in shards), sum(shard.bytes for shard in shards)
    linear = partitions.flops_linear if partitions.balance == "flops" else None
    found = context.pool.map(partial(read_shard_sequences, context.store, linear), shards, size_bytes=size)
    with open_host_scratch(context) as scratch:
        if count <= SENT_SEQUENCES:
            yield SequenceTable(count, np.concatenate([np.empty(0, SEQUENCE_DTYPE), *found]), scratch)
            return
        scratch.require({_FILE: partial(_write_sequences, found)})
        if not context.pool.spans_hosts or context.store.is_local:
            yield SequenceTable(count, None, scratch)
            return
        relative = f"{context.folder}/{scratch.name}/{_FILE}"
        try:
            with Path(scratch.locate(_FILE)).open("rb") as file, context.store.create(relative) as stored:
                shutil.copyfileobj(file, stored)
            yield SequenceTable(count, None, scratch, (context.store.root, relative))
        finally:
            context.store.remove(relative)


def _write_sequences(found: Iterator[NDArray[Any]], path: str) -> None:
    with Path(path).open("wb") as file:
        file.writelines(one.tobytes() for one in found)


def read_shard_sequences(store: Store, flops_linear: int | None, shard: File) -> NDArray[Any]:
    """Return the sequences of a shard, in `SEQUENCE_DTYPE`; costs only with `flops_linear`."""
    columns = ("tokens", "trained_tokens", "segment_lengths", *(() if flops_linear is None else ("seq_lengths",)))
    table = store.table(shard, columns).combine_chunks()
    lengths, offsets = read_lists(table.column("segment_lengths"))
    found = np.zeros(len(table), SEQUENCE_DTYPE)
    for name in ("tokens", "trained_tokens"):
        found[name] = table.column(name).to_numpy()
    found["segments"] = np.diff(offsets)
    found["longest_segment"] = np.maximum.reduceat(lengths, offsets[:-1]) if len(found) else 0
    if flops_linear is not None:
        # The spans that a trainer's kernels see: with open attention whole sequences, and with their padding.
        found["flops"] = rank_assignment.compute_flops(*read_lists(table.column("seq_lengths")), flops_linear)
    return found


BLOCK_PLACES: Final = 1 << 20
"""Places of a block, but for its last step; a task holds some 200 bytes of each."""

PLACE_BYTES: Final = 64
"""About what a place takes in the order's files before they are compressed, and in what they are made of."""

ORDER_SCHEMA = make_required_schema(
    dataset=pa.int32(), sequence_id=pa.int64(), **{"pass": pa.int32()}, step=pa.int64(), filler=pa.bool_()
)
"""A line is a place, in order. `dataset` is its number in recipe order; a filler has dataset and sequence −1."""


Load = Literal["tokens", "trained_tokens", "flops"]
"""What the ranks of a step are balanced by."""


@dataclass(frozen=True, slots=True, eq=False)
class OrderSource:
    """What all blocks are made of; `sizes` are the train sequences of each dataset, in recipe order."""

    schedule: SampleSchedule
    steps: StepPlan
    sequences: SequenceTable
    sizes: Mapping[str, int]
    world_size: int
    load: Load
    """The column of `rank_steps` that ranks are balanced by."""

    @property
    def first_sequences(self) -> Ints:
        """The number of each dataset's first sequence among those of all, and the end: int64[D + 1]."""
        return compute_offsets([*self.sizes.values()])


@dataclass(frozen=True, slots=True)
class BlockInputs(PartInputs):
    """Some steps, and the positions of the mixed order that are in no other block; `order` identifies the order."""

    order: str
    first_step: int
    end_step: int
    begin: int
    end: int
    has_files: bool = True
    """False: it is only counted, for its positions are beyond the last step."""

    @property
    def input_rows(self) -> int:
        """Positions of the block."""
        return self.end - self.begin

    @property
    def input_bytes(self) -> int:
        """About what the places of the block take."""
        return PLACE_BYTES * self.input_rows


@dataclass(frozen=True, slots=True, eq=False)
class WrittenOrder:
    """The parts with the order's files, and counts over all blocks.

    `labels` int64[B, D] are the positions of each dataset in each block of the mixture, as they were made.
    """

    parts: Sequence[Part]
    counts: CountSet
    labels: Ints


def write_order(context: StageContext, source: OrderSource, identity: Sequence[Any]) -> WrittenOrder:
    """Write the order; `identity` is what decides it."""
    made = context.map(write_order_block, list(_cut_order(source, digest_json(*identity))), shared=source).parts
    labels = np.zeros((len(source.schedule.block_offsets) - 1, len(source.sizes)), np.int64)
    for part in made:
        block = part.get_details(OrderBlockDetails)
        own = np.array(block.labels, np.int64).reshape(-1, len(source.sizes))
        labels[block.first_block : block.first_block + len(own)] += own
    parts = [Part(one.fingerprint, one.files, counts=one.counts) for one in made if one.files]
    return WrittenOrder(parts, add_up_counts(made, OrderCounts()), labels)


def _cut_order(source: OrderSource, order: str) -> Iterator[BlockInputs]:
    """Cut the steps into blocks, then the positions that no step has; an order that fits one block is one."""
    steps, length = source.steps, source.schedule.length
    count = len(steps.step_offsets) - 1
    if max(steps.places, length) <= BLOCK_PLACES:
        yield BlockInputs(order, 0, count, 0, length)
        return
    borders = np.searchsorted(steps.step_offsets, np.arange(0, max(steps.places, 1), BLOCK_PLACES)).tolist()
    ends = list(dict.fromkeys([*borders[1:], count]))
    begins = [0, *(steps.find_position(int(steps.step_offsets[step])) for step in ends)]
    blocks = [(*one, True) for one in zip([0, *ends], ends, begins, begins[1:], strict=False)]
    rest = range(begins[-1], length, BLOCK_PLACES)
    blocks += [(count, count, begin, min(begin + BLOCK_PLACES, length), False) for begin in rest]
    for block in blocks:
        yield BlockInputs(order, *block)


@part_function(version=2)
def write_order_block(inputs: BlockInputs, place: PartPlace, source: OrderSource) -> PartResult:
    """Write the places of a block, and the totals of each rank and step; a block without steps is only counted."""
    order = source.schedule.take(inputs.begin, inputs.end)
    first_block, labels = source.schedule.count_datasets(inputs.begin, order.datasets)
    sequences = source.sequences.load()[source.first_sequences[order.datasets] + order.items]
    loads = sequences[source.load]
    dealt = rank_assignment.assign_places(
        source.steps, inputs.first_step, inputs.end_step, lambda positions: loads[positions - inputs.begin]
    )
    is_filler = dealt.order == FILLER
    shown = dealt.order[~is_filler] - inputs.begin
    details = OrderBlockDetails(first_block=first_block, labels=tuple(labels.ravel().tolist()))
    if not inputs.has_files:
        return PartResult({}, details=[details])

    def fill(values: NDArray[Any], filler: int) -> NDArray[Any]:
        column = np.full(len(is_filler), filler, values.dtype)
        column[~is_filler] = values[shown]
        return column

    step = inputs.first_step + np.repeat(np.arange(len(dealt.step_offsets) - 1), np.diff(dealt.step_offsets))
    columns = [fill(order.datasets, -1), fill(order.items, -1), fill(order.passes, 0), step, is_filler]
    files = {"order": place.write_parquet("order", pa.table(columns, schema=ORDER_SCHEMA))}
    world = source.world_size
    by_place = np.zeros(len(is_filler), sequences.dtype)
    by_place[~is_filler] = sequences[shown]
    totals = [rank_assignment.summarize_steps(dealt, rank, world, by_place) for rank in range(world)]
    step = inputs.first_step + np.arange(len(dealt.step_offsets) - 1)
    tables = [
        pa.table({"rank": np.full(len(step), rank), "world_size": np.full(len(step), world), "step": step} | of_rank)
        for rank, of_rank in enumerate(totals)
    ]
    files["rank_steps"] = place.write_parquet("rank_steps", pa.concat_tables(tables))

    of_datasets, names = order.datasets[shown], list(source.sizes)
    counts = OrderCounts(
        places=len(is_filler),
        fillers=int(is_filler.sum()),
        steps=len(step),
        tokens=sum(int(of_rank["tokens"].sum()) for of_rank in totals),
        places_by_dataset=_sum_by_dataset(of_datasets, np.ones_like(of_datasets), names),
        tokens_by_dataset=_sum_by_dataset(of_datasets, sequences["tokens"][shown], names),
        trained_tokens_by_dataset=_sum_by_dataset(of_datasets, sequences["trained_tokens"][shown], names),
        excess_load=_sum_excess(np.stack([of_rank[source.load] for of_rank in totals])),
        untrained_rank_steps=sum(int((of_rank["trained_tokens"] == 0).sum()) for of_rank in totals),
    )
    # Costs are in the table of sequences only where ranks are balanced by them.
    costs = [CostCounts(flops=sum(int(of_rank["flops"].sum()) for of_rank in totals))]
    return PartResult(files, counts=[counts, *(costs if source.load == "flops" else [])], details=[details])


def _sum_by_dataset(datasets: NDArray[np.int32], values: NDArray[np.int32], names: Sequence[str]) -> dict[str, int]:
    return {name: int(values[datasets == number].sum(dtype=np.int64)) for number, name in enumerate(names)}


def _sum_excess(loads: Ints) -> float:
    """Return the sum over steps of how far the largest rank is above the mean, loads int64[W, T]; 0 without load."""
    most, mean = loads.max(axis=0), loads.mean(axis=0)
    excess = np.divide(most, mean, out=np.ones_like(mean), where=mean > 0) - 1
    # Exactly rounded, so that it is equal on every machine.
    return math.fsum(excess.tolist())


REPEATED, REMAINDER, NOT_SCHEDULED = "repeated", "remainder", "not_scheduled"


def find_sequence_states(store: Store, source: OrderSource, written: WrittenOrder) -> tuple[Bools, Bools]:
    """Return which sequences the order has, and which it lacks because a step was incomplete: bool[S] each.

    The order is read block by block.
    """
    firsts = source.first_sequences
    is_kept, is_left_out = (np.zeros(int(firsts[-1]), np.bool_) for _ in range(2))
    for part in written.parts:
        table = store.table(part.files["order"], ("dataset", "sequence_id", "filler"))
        table = table.filter(pc.invert(table.column("filler")))
        is_kept[firsts[table.column("dataset").to_numpy()] + table.column("sequence_id").to_numpy()] = True
    for left_out in source.steps.dropped:
        order = source.schedule.take(left_out.start, left_out.stop)
        is_left_out[firsts[order.datasets] + order.items] = True
    return is_kept, is_left_out & ~is_kept


def tabulate_schedule(source: OrderSource, written: WrittenOrder, is_kept: Bools, is_remainder: Bools) -> DisplayTable:
    """Tabulate sequences, tokens and trained tokens by dataset and state."""
    sequences = source.sequences.load()
    firsts, counts = source.first_sequences, written.counts.get(OrderCounts)
    rows: list[tuple[Any, ...]] = []
    for number, name in enumerate(source.sizes):
        own = slice(int(firsts[number]), int(firsts[number + 1]))
        kept, remainder = is_kept[own], is_remainder[own]
        every = (counts.places_by_dataset, counts.tokens_by_dataset, counts.trained_tokens_by_dataset)
        shown = [by_dataset.get(name, 0) for by_dataset in every]
        for state, chosen in ((KEPT, kept), (REMAINDER, remainder), (NOT_SCHEDULED, ~kept & ~remainder)):
            columns = (sequences[own][column] for column in ("tokens", "trained_tokens"))
            once = [int(chosen.sum()), *(int(one.sum(dtype=np.int64, where=chosen)) for one in columns)]
            rows.append((name, state, *once))
            if state == KEPT:
                rows.append((name, REPEATED, *(places - alone for places, alone in zip(shown, once, strict=True))))
    return DisplayTable(("dataset", "state", "sequences", "tokens", "trained_tokens"), tuple(rows))


VERSION = 5
"""Increase it when any recipe's order, or facts, may change."""


def identify_training_splits(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide the order (`order`), and the splits that it is compared with."""
    return {
        "tables": [leakage.NEAR_ROWS_VERSION, leakage.list_datasets_of_compared_rows(recipe)],
        "order": {
            "versions": [VERSION],
            "mixture": recipe.mixture.model_dump(mode="json"),
            # The order is the same for both layouts of ranks.
            "partitions": recipe.partitions.model_dump(mode="json", exclude={"layout"}),
            "open_attention": [
                name for name, one in recipe.datasets.items() if not one.packing.block_cross_document_attention
            ],
            "segment_multiple_of": recipe.segment_multiple_of,
            "seed": recipe.seed,
            "datasets": list(recipe.datasets),
            "objective": recipe.objective,
        },
        "splits": {name: dataset.splits.model_dump(mode="json") for name, dataset in recipe.datasets.items()},
        "grouped": [name for name, dataset in recipe.datasets.items() if dataset.format.has_groups(dataset)],
    }


def make_training_splits(context: StageContext) -> StageOutput:
    """Mix the datasets, assign ranks, and measure leaks."""
    packed = open_joined_shards(context)
    sizes = dict(zip(packed, count_train_sequences(packed), strict=True))
    mixture = context.recipe.mixture
    schedule = schedule_sequences(mixture, sizes, context.recipe.seed)
    steps = rank_assignment.plan_steps(
        context.recipe.partitions, schedule.epoch_offsets, batch_sizes=mixture.batch_sizes, steps=mixture.steps
    )
    order = identify_training_splits(context.recipe, "")["order"]
    with open_sequences(context, packed) as sequences:
        source = OrderSource(
            schedule=schedule,
            steps=steps,
            sequences=sequences,
            sizes=sizes,
            world_size=context.recipe.partitions.world_size,
            load=_name_load(context.recipe),
        )
        identity = (TRAINING_SPLITS, order, [shards.version for shards in packed.values()])
        written = write_order(context, source, identity)
        total = sum(sizes.values())
        is_kept, is_remainder = find_sequence_states(context.store, source, written)
        leaks = leakage.find_leaks(context, packed)
        counts = written.counts + CountSet.of(
            OrderCounts(
                sequences=total,
                dropped_places=sum(map(len, source.steps.dropped)),
                has_targets=context.recipe.has_targets,
                largest_share_error=round(measure_share_error(source.schedule, written.labels), 6),
            ),
            *leaks.counts,
        )
        rows = [row for one in packed.values() for row in one.tables["splits"].rows]
        orders = [part.files["order"].digest for part in written.parts]
        return StageOutput(
            parts=written.parts,
            counts=counts,
            ledger=_list_ledger(is_kept, is_remainder),
            tables={
                "splits": DisplayTable(("dataset", "split", "rows", "sequences", "trained_tokens"), tuple(rows)),
                "shares": _tabulate_shares(context.recipe, rows),
                "mixture": _tabulate_mixture(context, source, written.counts.get(OrderCounts)),
                "schedule": tabulate_schedule(source, written, is_kept, is_remainder),
            },
            histograms=_draw_loads(context.store, written),
            samples=leaks.samples,
            schema=tuple((f.name, str(f.type)) for f in ORDER_SCHEMA),
            card={
                "order": orders[0] if len(orders) == 1 else digest_json(orders),
                "datasets": list(sizes),
                "packed": {name: one.version for name, one in packed.items()},
                "has_steps": bool(context.recipe.mixture.batch_sizes),
            },
            rows_made=total,
        )


def _list_ledger(is_kept: Bools, is_remainder: Bools) -> list[tuple[str, str, int]]:
    """Return the ledger of sequences: in the order, left out with an incomplete step, or in no place of the mixture."""
    by_state = {
        KEPT: int(is_kept.sum()),
        REMAINDER: int(is_remainder.sum()),
        NOT_SCHEDULED: int((~is_kept & ~is_remainder).sum()),
    }
    return [(state, "", count) for state, count in by_state.items() if count or state == KEPT]


def _name_load(recipe: Recipe) -> Load:
    """Return the column of `rank_steps` that ranks are balanced by; prompts have no targets, so all tokens count."""
    if recipe.partitions.balance == "flops":
        return "flops"
    return "trained_tokens" if recipe.has_targets else "tokens"


def _draw_loads(store: Store, written: WrittenOrder) -> dict[str, Histogram]:
    """Draw how many trained tokens the ranks have in each step, as their files say."""
    loads = Counter[int]()
    for part in written.parts:
        column = store.table(part.files["rank_steps"], ("trained_tokens",)).column(0)
        values, times = np.unique(column.to_numpy(), return_counts=True)
        loads.update(dict(zip(values.tolist(), times.tolist(), strict=True)))
    if not loads:
        return {}
    values, times = np.array([*zip(*sorted(loads.items()), strict=True)])
    counts, edges = np.histogram(values, bins=min(20, len(values)), weights=times)
    bars = tuple(round(float(e), 1) for e in edges), tuple(int(c) for c in counts)
    return {"rank_load": Histogram("trained tokens per rank and step", "tokens", *bars)}


def _tabulate_shares(recipe: Recipe, splits: Sequence[Sequence[Any]]) -> DisplayTable:
    """Tabulate the wanted and the actual share of each split; `splits` are lines of dataset, split and rows."""
    lines: list[tuple[Any, ...]] = []
    for name, dataset in recipe.datasets.items():
        own = {str(row[1]): int(row[2]) for row in splits if row[0] == name}
        asked = {split: getattr(dataset.splits, split) for split in ("validation", "test")}
        shares = {split: float(value) for split, value in asked.items() if isinstance(value, float)}
        if len(shares) == len(asked):
            shares["train"] = 1 - sum(shares.values())
        examples = sum(own.values())
        lines += [(name, split, shares.get(split), compute_share(n, examples), n) for split, n in own.items()]
    return DisplayTable(("dataset", "split", "wanted", "got", "examples"), tuple(lines))


def _tabulate_mixture(context: StageContext, source: OrderSource, counts: OrderCounts) -> DisplayTable:
    shares = compute_wanted_shares(source.schedule)
    first = context.recipe.mixture.stages
    weights = first[0][1] if first else {name: Fraction(size) for name, size in source.sizes.items()}
    rows: list[tuple[Any, ...]] = []
    for number, (name, size) in enumerate(source.sizes.items()):
        mine = counts.places_by_dataset.get(name, 0)
        rows.append(
            (
                name,
                round(float(weights.get(name, Fraction(0))), 6),
                round(shares[number], 6),
                round(mine / size, 4) if size else 0.0,
                mine,
                counts.trained_tokens_by_dataset.get(name, 0),
            )
        )
    return DisplayTable(("dataset", "weight", "wanted_share", "passes", "sequences", "trained_tokens"), tuple(rows))


STAGE = StageDeclaration(
    name=TRAINING_SPLITS,
    counts=OrderCounts,
    description="The training order of all sequences, mixed by weight, with checks of leaks between splits.",
    scope="recipe",
    identity=identify_training_splits,
    prepare=lambda context: PreparedStage((), lambda: make_training_splits(context)),
    inputs=(PACKED_SHARDS,),
    origins=(CANONICAL_ROWS,),
    shows_overdue=True,
    stats_inputs=StatsInputs(
        count_rows_of(OrderCounts, lambda counts: counts.places, "place"),
        files={"rank_steps": "rank_steps"},
        tables=("splits", "mixture"),
    ),
    summarize=lambda counts, rows: (rows, format_count(counts.get(OrderCounts).steps, "step")),
    compared=(
        ComparedNumber("places", OrderCounts, lambda counts: counts.places),
        ComparedNumber("steps", OrderCounts, lambda counts: counts.steps),
        ComparedNumber("rank balance", OrderCounts, lambda counts: counts.average_excess(), is_share=True),
    ),
)
