"""The order of sequences over datasets and epochs, written in blocks of about a million places, one task each.

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

import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, Ints, compute_offsets
from rowmill.core.storage import Store, digest_json
from rowmill.packing import rank_assignment
from rowmill.packing.mixture import SampleSchedule
from rowmill.packing.rank_assignment import FILLER, StepPlan
from rowmill.parts.context import open_host_scratch
from rowmill.parts.functions import PartInputs, PartPlace, PartResult, part_function
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import DisplayTable, File, Manifest, Part
from rowmill.shards.host_scratch import HostScratch
from rowmill.stages.base import StageContext

SENT_SEQUENCES: Final = 1 << 20
"""As many sequences are sent to the workers, 24 MB; the facts of more are in a file."""

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
    """Lend the facts of all train sequences."""
    partitions = context.recipe.partitions
    shards = [
        part.files["shard"] for output in packed.values() for part in output.parts if part.facts["split"] == "train"
    ]
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
    lists = table.column("segment_lengths").combine_chunks()
    offsets = np.asarray(lists.offsets, np.int64)
    offsets = offsets - offsets[0]
    lengths = lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    found = np.zeros(len(table), SEQUENCE_DTYPE)
    for name in ("tokens", "trained_tokens"):
        found[name] = table.column(name).to_numpy()
    found["segments"] = np.diff(offsets)
    found["longest_segment"] = np.maximum.reduceat(lengths, offsets[:-1]) if len(found) else 0
    if flops_linear is not None:
        # The spans that a trainer's kernels see: with open attention whole sequences, and with their padding.
        spans = table.column("seq_lengths").combine_chunks()
        bounds = np.asarray(spans.offsets, np.int64)
        costs = rank_assignment.compute_flops(spans.flatten().to_numpy(), bounds - bounds[0], flops_linear)
        found["flops"] = costs
    return found


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

    schedule: SampleSchedule
    steps: StepPlan
    sequences: SequenceTable
    sizes: Sequence[int]
    world_size: int
    load: str
    """The column of `rank_steps` that ranks are balanced by."""


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
        """About what the places of a block take."""
        return 64 * BLOCK_PLACES


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
    made = context.map(write_order_block, list(_cut_order(source, digest_json(*identity))), shared=source).parts
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


@part_function(version=1)
def write_order_block(inputs: BlockInputs, place: PartPlace, source: OrderSource) -> PartResult:
    """Write the places of a block, and the totals of each rank and step; a block without steps is only counted."""
    order = source.schedule.take(inputs.begin, inputs.end)
    first_block, labels = source.schedule.count_datasets(inputs.begin, order.datasets)
    facts = source.sequences.load()[compute_offsets(source.sizes)[order.datasets] + order.items]
    dealt = rank_assignment.assign_places(
        source.steps, inputs.first_step, inputs.end_step, lambda positions: facts[source.load][positions - inputs.begin]
    )
    is_filler = dealt.order == FILLER
    shown = dealt.order[~is_filler] - inputs.begin
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
    files: dict[str, File] = {}
    if inputs.has_files:

        def fill(values: NDArray[Any], filler: int) -> NDArray[Any]:
            column = np.full(len(is_filler), filler, values.dtype)
            column[~is_filler] = values[shown]
            return column

        step = inputs.first_step + np.repeat(np.arange(len(dealt.step_offsets) - 1), np.diff(dealt.step_offsets))
        columns = [fill(order.datasets, -1), fill(order.items, -1), fill(order.passes, 0), step, is_filler]
        files["order"] = place.write_parquet("order", pa.table(columns, schema=ORDER_SCHEMA))
        world = source.world_size
        by_place = np.zeros(len(is_filler), facts.dtype)
        by_place[~is_filler] = facts[shown]
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
                        "step": inputs.first_step + np.arange(count),
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
        files["rank_steps"] = place.write_parquet("rank_steps", pa.concat_tables(tables))
    return PartResult(files, counted)


def _sum_by_dataset(datasets: NDArray[np.int32], values: NDArray[np.int32], width: int) -> list[int]:
    return [int(values[datasets == number].sum(dtype=np.int64)) for number in range(width)]


REPEATED, REMAINDER, NOT_SCHEDULED = "repeated", "remainder", "not_scheduled"


def find_sequence_states(store: Store, source: OrderSource, written: WrittenOrder) -> tuple[Bools, Bools]:
    """Return which sequences the order has, and which it lacks because a step was incomplete: bool[S] each.

    The order is read block by block.
    """
    firsts = compute_offsets(source.sizes)
    is_kept, is_left_out = (np.zeros(int(firsts[-1]), np.bool_) for _ in range(2))
    for part in written.parts:
        table = store.table(part.files["order"], ("dataset", "sequence_id", "filler"))
        table = table.filter(pc.invert(table.column("filler")))
        is_kept[firsts[table.column("dataset").to_numpy()] + table.column("sequence_id").to_numpy()] = True
    for left_out in source.steps.dropped:
        order = source.schedule.take(left_out.start, left_out.stop)
        is_left_out[firsts[order.datasets] + order.items] = True
    return is_kept, is_left_out & ~is_kept


def tabulate_schedule(
    names: Sequence[str], source: OrderSource, written: WrittenOrder, is_kept: Bools, is_remainder: Bools
) -> DisplayTable:
    """Tabulate sequences, tokens and trained tokens by dataset and state."""
    sequences = source.sequences.load()
    firsts = compute_offsets(source.sizes)
    rows: list[tuple[Any, ...]] = []
    for number, name in enumerate(names):
        own = slice(int(firsts[number]), int(firsts[number + 1]))
        kept, remainder = is_kept[own], is_remainder[own]
        shown = [int(column[number]) for column in (written.sequences, written.tokens, written.trained_tokens)]
        for state, chosen in ((KEPT, kept), (REMAINDER, remainder), (NOT_SCHEDULED, ~kept & ~remainder)):
            columns = (sequences[own][column] for column in ("tokens", "trained_tokens"))
            counts = [int(chosen.sum()), *(int(one.sum(dtype=np.int64, where=chosen)) for one in columns)]
            rows.append((name, state, *counts))
            if state == KEPT:
                rows.append((name, REPEATED, *(places - once for places, once in zip(shown, counts, strict=True))))
    return DisplayTable(("dataset", "state", "sequences", "tokens", "trained_tokens"), tuple(rows))
