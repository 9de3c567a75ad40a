"""What only some shards have: values per segment, and the two sides of a pair as segments.

example   ids of chosen and rejected, end to end     side_lengths 3 4     sides 1 0
segments  0 1 2 │ 0 1 2 3                            an attention span each, always in one sequence
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Ints
from rowmill.packing.layout import SequencePlan

SIDE_LENGTHS = "side_lengths"


def part_sides(plan: SequencePlan, examples: pa.Table) -> SequencePlan:
    """Return a plan whose segments are the sides of its examples; plans of examples without sides are unchanged."""
    if SIDE_LENGTHS not in examples.column_names:
        return plan
    lengths = examples.column(SIDE_LENGTHS).combine_chunks()
    counts = lengths.value_lengths().to_numpy()[plan.examples].astype(np.int64)
    chosen = lengths.take(pa.array(plan.examples)).flatten().to_numpy().astype(np.int64)
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    starts = np.cumsum(chosen) - chosen
    ranges = np.stack((starts - np.repeat(starts[before[:-1]], counts), chosen), axis=1).astype(np.int32)
    return SequencePlan(before[plan.sequence_offsets], np.repeat(plan.examples, counts), ranges)


def make_segment_columns(columns: Iterable[pa.Field], examples: pa.Table, plan: SequencePlan) -> dict[str, pa.Array]:
    """Return the values of each segment of a plan whose sides are parted, by column."""
    return {field.name: _take(examples, field.name, plan).cast(field.type) for field in columns}


_SINGULAR = {"prompt_lengths": "prompt_length", "margins": "margin"}


def _take(examples: pa.Table, name: str, plan: SequencePlan) -> pa.Array:
    column = examples.column(_SINGULAR.get(name, name)).combine_chunks()
    if name != "sides":
        return column.take(pa.array(plan.examples))
    places: Ints = np.asarray(column.offsets, np.int64)[plan.examples] + (plan.ranges[:, 0] > 0)
    return column.values.take(pa.array(places))


def count_damaged_pairs(shard: pa.Table, examples: pa.Table) -> dict[str, int]:
    """Return how many pairs of a shard are not whole in one sequence, and how many have two prompts.

    Empty for shards of other rows. `examples` are the columns of the group's examples.
    """
    if SIDE_LENGTHS not in examples.column_names:
        return {}
    lengths = examples.column(SIDE_LENGTHS).combine_chunks()
    is_paired = len(lengths) > 0 and int(lengths.value_lengths().to_numpy().max()) > 1
    if not is_paired or not shard.num_rows:
        return {"pair_intact": 0, "prompt_identical": 0}
    sequences, names, sides, ids, sizes, prompts = _flatten_segments(shard)
    follows = np.flatnonzero((sequences[1:] == sequences[:-1]) & (names[1:] == names[:-1]))
    whole = follows[(sides[follows] == 1) & (sides[follows + 1] == 0)]
    ends = np.cumsum(sizes)
    differ = 0
    for first in whole.tolist():
        size = int(prompts[first])
        one, other = (int(ends[k] - sizes[k]) for k in (first, first + 1))
        same = size == prompts[first + 1] and np.array_equal(ids[one : one + size], ids[other : other + size])
        differ += not same
    return {"pair_intact": len(names) - 2 * len(whole), "prompt_identical": differ}


def _flatten_segments(shard: pa.Table) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
    """Return each segment's sequence, example by number, side, then all ids, and each segment's length and prompt."""
    names = shard.column("example_ids").combine_chunks()
    flat = {
        name: shard.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
        for name in ("sides", "input_ids", "segment_lengths", "prompt_lengths")
    }
    sequences = np.repeat(np.arange(len(names)), names.value_lengths().to_numpy())
    examples = names.flatten().dictionary_encode().indices.to_numpy()
    return sequences, examples, flat["sides"], flat["input_ids"], flat["segment_lengths"], flat["prompt_lengths"]
