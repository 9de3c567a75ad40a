"""Lengths of examples → the plan of a split: slices, sequences, and what is in none.

tokens, splits ─► slices, those without a target rejected ─► plan
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, Integers, Ints, are_among, compute_offsets, find_distinct
from rowmill.packing import layout, slicing
from rowmill.packing import plan as packing
from rowmill.packing.groups import StreamStretch
from rowmill.packing.layout import SequencePlan
from rowmill.packing.options import Packing, Strategy
from rowmill.packing.slicing import ExampleSlices
from rowmill.schema.ledger import KEPT, REJECTED
from rowmill.schema.rows import RowKind
from rowmill.stages.packed_shards.segment_columns import SIDE_LENGTHS

SPLITS = ("train", "validation", "test")

SURPLUS_CODE = -1
"""The split of an example whose group was held out and whose sequence was not needed."""


@dataclass(frozen=True, slots=True)
class PackingRules:
    """Everything of a recipe that decides a plan, and what to say of an example that stops the build."""

    packing: Packing
    row_kind: RowKind
    seq_len: int
    where: str
    remedies: str

    @property
    def strategy(self) -> Strategy:
        """The strategy for the dataset's rows."""
        return self.packing.strategy_for(self.row_kind)

    def measure_room(self, lengths: "ExampleLengths", numbers: Ints, tokens: Integers) -> Integers:
        """Return the tokens that pieces of some examples take in a sequence, padding after each segment included.

        A pair has two segments, and is never cut.
        """
        multiple = self.packing.room_multiple
        if multiple == 1:
            return tokens
        if lengths.sides is None or not len(numbers):
            return layout.round_up(tokens, multiple)
        sides = lengths.sides.take(pa.array(numbers))
        rounded = layout.round_up(sides.flatten().to_numpy(), multiple)
        return np.add.reduceat(rounded, compute_offsets(sides.value_lengths().to_numpy())[:-1])


@dataclass(frozen=True, slots=True, eq=False)
class ExampleLengths:
    """The columns of examples that planning reads, and the number of each part's first example.

    tokens, trained int64[N] · splits int8[N], indices in `SPLITS` · first_rows int64[P + 1]. `read_column` returns a
    column of part p, which is read for examples that are cut. `sides` are the lengths of each example's sides; None
    for examples without sides.
    """

    tokens: Ints
    trained: Ints
    splits: NDArray[np.int8]
    first_rows: Ints
    read_column: Callable[[int, str], pa.Array]
    sides: pa.ListArray | None = None

    def find_part(self, numbers: "Ints | int") -> Any:
        """Return the part of some examples, by their numbers."""
        return np.searchsorted(self.first_rows, numbers, "right") - 1

    def name(self, number: int) -> str:
        """Return an example's id."""
        part = int(self.find_part(number))
        return str(self.read_column(part, "example_id")[number - int(self.first_rows[part])].as_py())


def make_lengths(columns: pa.Table, counts: "list[int]", read_column: Callable[[int, str], pa.Array]) -> ExampleLengths:
    """Return the lengths of parts with `counts` examples each, from their columns, joined."""
    return ExampleLengths(
        tokens=columns.column("tokens").to_numpy().astype(np.int64),
        trained=columns.column("trained_tokens").to_numpy().astype(np.int64),
        splits=pc.index_in(columns.column("split"), pa.array(SPLITS)).to_numpy().astype(np.int8),
        first_rows=np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64))),
        read_column=read_column,
        sides=columns.column(SIDE_LENGTHS).combine_chunks() if SIDE_LENGTHS in columns.column_names else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class SplitPlan:
    """A split's plan; `plan.examples` number examples over all splits. `rejected` are examples by reason.

    `left` int64 are the tokens of `numbers` that are in no sequence.
    """

    split: str
    plan: SequencePlan
    numbers: Ints
    left: Ints
    rejected: dict[str, Ints] = field(default_factory=dict[str, Ints])
    trained_lost: int = 0
    """Trained tokens of its examples that were cut off or dropped for their length."""


def plan_split(rules: PackingRules, lengths: ExampleLengths, split: str, numbers: Ints) -> SplitPlan:
    """Plan some examples, by their numbers over all splits.

    Raises
    ------
    ContextOverflowError
        If one is longer than a sequence and `packing.slice_strategy` is `error`.

    """
    pieces, rejected, trained_lost = slice_examples(rules, lengths, numbers)
    plan = packing.plan_slices(
        pieces,
        limit=rules.seq_len,
        strategy=rules.strategy,
        max_segments=rules.packing.segment_limit,
        tail=rules.packing.tail,
        room=rules.measure_room(lengths, numbers[pieces.examples], pieces.lengths),
    )
    left = packing.count_left_out_tokens(plan, lengths.tokens[numbers])
    return SplitPlan(split, _renumber(plan, numbers), numbers, left, rejected, trained_lost)


def plan_stretch(
    rules: PackingRules, lengths: ExampleLengths, split: str, numbers: Ints, stretch: StreamStretch
) -> SplitPlan:
    """Plan a stretch of joined documents: the examples of a group, and of the following parts as far as needed.

    Documents with padding after each are joined, so `stretch` counts it, too.
    """
    own = lengths.tokens[numbers]
    room = rules.measure_room(lengths, numbers, own)
    plan = packing.leave_out_padding(packing.plan_stream(room, rules.seq_len, stretch.begin, stretch.end), own)
    begins = np.cumsum(room) - room
    left = np.minimum(begins + own, stretch.left_until) - np.maximum(begins, stretch.end)
    return SplitPlan(split, _renumber(plan, numbers), numbers, np.maximum(left, 0))


def _renumber(plan: SequencePlan, numbers: Ints) -> SequencePlan:
    return SequencePlan(plan.sequence_offsets, numbers[plan.examples], plan.ranges)


def slice_examples(
    rules: PackingRules, lengths: ExampleLengths, numbers: Ints
) -> tuple[ExampleSlices, dict[str, Ints], int]:
    """Return the pieces to pack (numbered within `numbers`), the rejected examples, and the trained tokens lost."""
    own = lengths.tokens[numbers]
    if rules.strategy == "concat":
        return slicing.keep_examples_whole(own), {}, 0
    pieces = slicing.slice_too_long(
        own,
        rules.seq_len,
        rules.packing.slice_strategy_for(rules.row_kind),
        name_of=lambda i: f"{rules.where}: example {lengths.name(int(numbers[i]))}",
        remedies=rules.remedies,
    )
    # What was not cut had its targets counted when it was tokenized.
    was_cut = pieces.lengths < own[pieces.examples]
    trains = np.ones(len(pieces.examples), np.bool_)
    targets = _count_targets(lengths, numbers, pieces, np.flatnonzero(was_cut))
    trains[was_cut] = targets > 0
    kept = slicing.keep_pieces(pieces, trains)
    untrained = find_distinct(pieces.examples[~trains])
    # With nothing to look for, the search would still sort all pieces.
    untrained = untrained[~are_among(untrained, find_distinct(kept.examples))] if len(untrained) else untrained
    trained = lengths.trained[numbers]
    left = np.bincount(pieces.examples[was_cut], weights=targets, minlength=len(own)).astype(np.int64)
    cut = find_distinct(pieces.examples[was_cut])
    lost = int(np.maximum(trained[cut] - left[cut], 0).sum()) + int(trained[pieces.dropped].sum())
    return kept, {"overlong": numbers[pieces.dropped], "no_loss_tokens": numbers[untrained]}, lost


def _count_targets(lengths: ExampleLengths, numbers: Ints, pieces: ExampleSlices, wanted: Ints) -> Ints:
    """Count the targets of some pieces; the masks are read part by part, and only of parts that have such pieces."""
    examples = numbers[pieces.examples[wanted]]
    which = lengths.find_part(examples)
    counts = np.zeros(len(wanted), np.int64)
    for part in find_distinct(which).tolist():
        here = which == part
        masks: Any = lengths.read_column(part, "loss_mask")
        mine = ExampleSlices(
            examples[here] - lengths.first_rows[part],
            pieces.starts[wanted[here]],
            pieces.lengths[wanted[here]],
            np.empty(0, np.int64),
        )
        offsets = np.asarray(masks.offsets, np.int64)
        flags: Bools = masks.flatten().to_numpy(zero_copy_only=False)
        counts[here] = slicing.count_piece_targets(mine, flags, offsets - offsets[0])
    return counts


# ── What is in no sequence ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class LeftOutExamples:
    """Examples that are not whole in the sequences: number, tokens left out, `(split, state, reason)` of each."""

    examples: Ints
    tokens: Ints
    fates: list[tuple[str, str, str]]


def find_left_out(lengths: ExampleLengths, plans: "list[SplitPlan]", surplus: Ints) -> LeftOutExamples:
    """Find the examples with tokens in no sequence, and the state of each; `surplus` were held out and not needed."""
    fates: list[tuple[str, str, str]] = []
    numbers: list[Ints] = []
    tokens: list[Ints] = []
    for plan in plans:
        reasons = {number: reason for reason, some in plan.rejected.items() for number in some.tolist()}
        here = np.flatnonzero(plan.left)
        numbers.append(plan.numbers[here])
        tokens.append(plan.left[here])
        for number, left in zip(numbers[-1].tolist(), tokens[-1].tolist(), strict=True):
            if left < lengths.tokens[number]:
                fates.append((plan.split, KEPT, ""))
            else:
                # Only concat leaves whole documents out without rejecting them.
                is_rejected = number in reasons
                fates.append((plan.split, REJECTED, reasons[number]) if is_rejected else (plan.split, "tail", ""))
    numbers.append(surplus)
    tokens.append(lengths.tokens[surplus])
    fates += [("", "validation_surplus", "")] * len(surplus)
    joined = np.concatenate(numbers)
    order = np.argsort(joined, kind="stable")
    return LeftOutExamples(joined[order], np.concatenate(tokens)[order], [fates[i] for i in order.tolist()])
