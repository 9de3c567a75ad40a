"""Writes the order of training in blocks of about a million places, one task each.

    steps of the order     │ 0 … 4095 │ 4096 … 8191 │ …      a block's steps have places, and the positions of the mixed
    positions of the mix   │ 0 ………… n │ n + 1 ………… m │ …      order from its first one to the next block's

A block needs nothing of the others, so no process holds the order. One block is written by the calling process.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets
from rowmill.core.storage import Store, digest_json
from rowmill.packing import rank_assignment
from rowmill.packing.mixture import SampleOrder, SampleSchedule
from rowmill.packing.rank_assignment import FILLER, RankOrder, StepPlan
from rowmill.schema.manifest import Part
from rowmill.stages import part_files
from rowmill.stages.base import PartTask, StageContext, make_parts
from rowmill.stages.kept_parts import part_folder
from rowmill.stages.training_splits.sequence_facts import SequenceTable

BLOCK_PLACES: Final = 1 << 20
"""Places of a block, but for its last step; a task holds some 200 bytes of each."""

ORDER_SCHEMA = pa.schema(
    [
        pa.field("dataset", pa.int32(), nullable=False),
        pa.field("sequence_id", pa.int64(), nullable=False),
        pa.field("pass", pa.int32(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("filler", pa.bool_(), nullable=False),
    ]
)
"""A line is a place, in order. `dataset` is its number in recipe order; a filler has dataset and sequence −1."""


@dataclass(frozen=True, slots=True, eq=False)
class OrderSource:
    """What all blocks are made of; `sizes` are the train sequences of each dataset."""

    root: str
    folder: str
    schedule: SampleSchedule
    steps: StepPlan
    sequences: SequenceTable
    sizes: Sequence[int]
    world_size: int
    load: str
    """The column of `rank_steps` that ranks are balanced by."""


@dataclass(frozen=True, slots=True)
class BlockTask:
    """Some steps, and the positions of the mixed order that are in no other block."""

    fingerprint: str
    first_step: int
    end_step: int
    begin: int
    end: int
    has_files: bool = True
    """False: it is only counted, for its positions are beyond the last step."""


@dataclass(frozen=True, slots=True, eq=False)
class WrittenOrder:
    """The parts with the order's files, and counts over all blocks.

    sequences int64[D], places of each dataset · tokens, trained_tokens int64[D], of these places · labels int64[B, D],
    positions of each dataset in each block of the mixture, as they were made
    """

    parts: Sequence[Part]
    sequences: Ints
    tokens: Ints
    trained_tokens: Ints
    labels: Ints


def write_order(context: StageContext, source: OrderSource, identity: Sequence[Any]) -> WrittenOrder:
    """Write the order; `identity` is what decides it."""
    tasks = list(_cut_order(source, identity))
    if len(tasks) == 1:
        made = [write_order_block(tasks[0], source)]
    else:
        planned = [PartTask(task.fingerprint, task, task.end - task.begin, 64 * BLOCK_PLACES) for task in tasks]
        made = make_parts(context, write_order_block, planned, shared=source)[0]
    labels = np.zeros((len(source.schedule.block_offsets) - 1, len(source.sizes)), np.int64)
    for part in made:
        counts = np.array(part.facts["labels"], np.int64).reshape(-1, len(source.sizes))
        first = int(part.facts["first_block"])
        labels[first : first + len(counts)] += counts
    counted = ("sequences", "tokens", "trained_tokens")
    sums = {name: np.sum([part.facts["of_datasets"][name] for part in made], axis=0) for name in counted}
    kept = ("places", "fillers")
    parts = [Part(one.fingerprint, one.files, {k: one.facts[k] for k in kept}) for one in made if one.files]
    return WrittenOrder(parts, labels=labels, **sums)


def _cut_order(source: OrderSource, identity: Sequence[Any]) -> Iterator[BlockTask]:
    """Cut the steps into blocks, then the positions that no step has; an order that fits one block is one."""
    steps, length = source.steps, source.schedule.length
    whole = digest_json(*identity)
    count = len(steps.step_offsets) - 1
    if max(steps.places, length) <= BLOCK_PLACES:
        yield BlockTask(whole, 0, count, 0, length)
        return
    borders = np.searchsorted(steps.step_offsets, np.arange(0, max(steps.places, 1), BLOCK_PLACES)).tolist()
    ends = list(dict.fromkeys([*borders[1:], count]))
    begins = [0, *(steps.find_position(int(steps.step_offsets[step])) for step in ends)]
    blocks = [(*one, True) for one in zip([0, *ends], ends, begins, begins[1:], strict=False)]
    rest = range(begins[-1], length, BLOCK_PLACES)
    blocks += [(count, count, begin, min(begin + BLOCK_PLACES, length), False) for begin in rest]
    for number, block in enumerate(blocks):
        yield BlockTask(digest_json(whole, "block", number, block), *block)


def write_order_block(task: BlockTask, source: OrderSource) -> Part:
    """Write the places of a block, and the totals of each rank and step; a block without steps is only counted."""
    order = source.schedule.take(task.begin, task.end)
    first_block, labels = source.schedule.count_datasets(task.begin, order.datasets)
    facts = source.sequences.load()[compute_offsets(source.sizes)[order.datasets] + order.items]
    dealt = rank_assignment.assign_places(
        source.steps, task.first_step, task.end_step, lambda positions: facts[source.load][positions - task.begin]
    )
    is_filler = dealt.order == FILLER
    shown = dealt.order[~is_filler] - task.begin
    width = len(source.sizes)
    counted = {
        "places": len(dealt.order),
        "fillers": int(is_filler.sum()),
        "first_block": first_block,
        "labels": labels.ravel().tolist(),
        "of_datasets": {
            "sequences": np.bincount(order.datasets[shown], minlength=width).tolist(),
            "tokens": _sum_by_dataset(order.datasets[shown], facts["tokens"][shown], width),
            "trained_tokens": _sum_by_dataset(order.datasets[shown], facts["trained_tokens"][shown], width),
        },
    }
    if not task.has_files:
        return Part(task.fingerprint, {}, counted)
    store, at = Store(source.root), part_folder(source.folder, task.fingerprint)
    files = {
        "order": part_files.write_parquet(store, f"{at}/order.parquet", _tabulate_order(task, order, dealt)),
        "rank_steps": part_files.write_parquet(
            store, f"{at}/rank_steps.parquet", _tabulate_steps(task, source, dealt, facts)
        ),
    }
    return Part(task.fingerprint, files, counted)


def _sum_by_dataset(datasets: NDArray[np.int32], values: NDArray[np.int32], width: int) -> list[int]:
    return [int(values[datasets == number].sum(dtype=np.int64)) for number in range(width)]


def _tabulate_order(task: BlockTask, order: SampleOrder, dealt: RankOrder) -> pa.Table:
    is_filler = dealt.order == FILLER
    shown = dealt.order[~is_filler] - task.begin

    def fill(values: NDArray[Any], filler: int) -> NDArray[Any]:
        column = np.full(len(is_filler), filler, values.dtype)
        column[~is_filler] = values[shown]
        return column

    step = task.first_step + np.repeat(np.arange(len(dealt.step_offsets) - 1), np.diff(dealt.step_offsets))
    columns = [fill(order.datasets, -1), fill(order.items, -1), fill(order.passes, 0), step, is_filler]
    return pa.table(columns, schema=ORDER_SCHEMA)


def _tabulate_steps(task: BlockTask, source: OrderSource, dealt: RankOrder, facts: NDArray[Any]) -> pa.Table:
    """Return the totals of the block's steps for each rank, the ranks one after the other."""
    world = source.world_size
    is_filler = dealt.order == FILLER
    by_place = np.zeros(len(is_filler), facts.dtype)
    by_place[~is_filler] = facts[dealt.order[~is_filler] - task.begin]
    tables: list[pa.Table] = []
    for rank in range(world):
        totals = rank_assignment.summarize_steps(
            dealt, rank, world, tokens=by_place["tokens"], trained_tokens=by_place["trained_tokens"],
            segments=by_place["segments"], flops=by_place["flops"], longest_segments=by_place["longest_segment"],
        )  # fmt: skip
        count = len(totals.sequences)
        tables.append(
            pa.table(
                {
                    "rank": np.full(count, rank),
                    "world_size": np.full(count, world),
                    "step": task.first_step + np.arange(count),
                    "sequences": totals.sequences,
                    "fillers": totals.fillers,
                    "segments": totals.segments,
                    "tokens": totals.tokens,
                    "trained_tokens": totals.trained_tokens,
                    "longest_segment": totals.longest_segment,
                    "step_trained_tokens": totals.step_trained_tokens,
                    "flops": totals.flops,
                }
            )
        )
    return pa.concat_tables(tables)
