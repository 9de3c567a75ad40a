"""What each split packs, and what validation holds back.

    tokens, splits ─► slices, those without a target rejected ─► plan: sequences, and what is in none

A number of validation sequences is held out as whole groups, in the order of a hash, until they fill enough:

    groups by u     g7 │ g2  │ g9  │ g1  │ …        wanted: 1,500 tokens
    their tokens   300 │ 900 │ 500 │ 400 │ …
                   └── validation ──┘└─ train …     300 + 900 + 500 reach it

None is on both sides; the plan's first sequences are validation, the others surplus. New rows can shift the margin,
because a count says nothing about one row alone; that is why shares are the better choice where a number is not needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Integers, Ints, are_among, compute_offsets, find_distinct, read_lists
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.errors import ConfigError
from rowmill.core.stage_names import CANONICAL_ROWS, RAW_DATASET, TOKENIZED_EXAMPLES
from rowmill.core.storage import read_tables
from rowmill.kinds.shared.splits import Splitter
from rowmill.packing import pack_plan
from rowmill.packing.options import Packing, Strategy
from rowmill.packing.pack_plan import ExampleSlices, SequencePlan, StreamStretch
from rowmill.packing.prefix_trees import SortedPieces, plan_trees
from rowmill.recipe.recipe import Recipe
from rowmill.schema.ledger import KEPT, REJECTED
from rowmill.schema.manifest import File
from rowmill.schema.rows import ROW_KINDS, SPLITS, RowKind
from rowmill.sources.reading import load_source_parts
from rowmill.stages.base import StageContext
from rowmill.stages.inputs import load_origin

SIDE_LENGTHS = "side_lengths"
"""The column of the lengths of a pair's sides."""

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
        return self.packing.strategy_for(self.row_kind)

    def measure_room(self, lengths: "ExampleLengths", numbers: Ints, tokens: Integers) -> Integers:
        """Return the tokens that pieces of some examples take in a sequence, padding after each segment included.

        A pair has two segments, and is never cut.
        """
        multiple = self.packing.room_multiple
        if multiple == 1:
            return tokens
        if lengths.sides is None or not len(numbers):
            return pack_plan.round_up(tokens, multiple)
        sides = lengths.sides.take(pa.array(numbers))
        rounded = pack_plan.round_up(sides.flatten().to_numpy(), multiple)
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
        first_rows=compute_offsets(counts),
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


def plan_split(
    rules: PackingRules,
    lengths: ExampleLengths,
    split: str,
    numbers: Ints,
    sort_pieces: Callable[[ExampleSlices], SortedPieces] | None = None,
) -> SplitPlan:
    """Plan some examples, by their numbers over all splits.

    With `sort_pieces`, which sorts pieces of examples by their tokens, those that begin alike become trees.

    Raises ContextOverflowError if one is longer than a sequence and `packing.slice_strategy` is `error`.
    """
    pieces, rejected, trained_lost = slice_examples(rules, lengths, numbers)
    if sort_pieces is None:
        plan = pack_plan.plan_slices(
            pieces,
            limit=rules.seq_len,
            strategy=rules.strategy,
            max_segments=rules.packing.segment_limit,
            tail=rules.packing.tail,
            room=rules.measure_room(lengths, numbers[pieces.examples], pieces.lengths),
        )
    else:
        by_tokens = sort_pieces(replace(pieces, examples=numbers[pieces.examples]))
        plan = plan_trees(pieces, by_tokens, rules.seq_len)
    left = pack_plan.count_left_out_tokens(plan.whole, lengths.tokens[numbers])
    return SplitPlan(split, plan.renumber(numbers), numbers, left, rejected, trained_lost)


def plan_stretch(
    rules: PackingRules, lengths: ExampleLengths, split: str, numbers: Ints, stretch: StreamStretch
) -> SplitPlan:
    """Plan a stretch of joined documents: the examples of a group, and of the following parts as far as needed.

    Documents with padding after each are joined, so `stretch` counts it, too.
    """
    own = lengths.tokens[numbers]
    room = rules.measure_room(lengths, numbers, own)
    plan = pack_plan.leave_out_padding(pack_plan.plan_stream(room, rules.seq_len, stretch.begin, stretch.end), own)
    begins = np.cumsum(room) - room
    left = np.minimum(begins + own, stretch.left_until) - np.maximum(begins, stretch.end)
    return SplitPlan(split, plan.renumber(numbers), numbers, np.maximum(left, 0))


def slice_examples(
    rules: PackingRules, lengths: ExampleLengths, numbers: Ints
) -> tuple[ExampleSlices, dict[str, Ints], int]:
    """Return the pieces to pack (numbered within `numbers`), the rejected examples, and the trained tokens lost."""
    own = lengths.tokens[numbers]
    if rules.strategy == "concat":
        return pack_plan.keep_examples_whole(own), {}, 0
    pieces = pack_plan.slice_too_long(
        own,
        rules.seq_len,
        rules.packing.slice_strategy_for(rules.row_kind),
        name_of=lambda i: f"{rules.where}: example {lengths.name(int(numbers[i]))}",
        remedies=rules.remedies,
    )
    # What was not cut had its targets counted when it was tokenized.
    was_cut = pieces.lengths < own[pieces.examples]
    wanted = np.flatnonzero(was_cut)
    examples, targets = numbers[pieces.examples[wanted]], np.zeros(len(wanted), np.int64)
    which = lengths.find_part(examples)
    # Masks are read part by part, and only of parts that have such pieces.
    for part in find_distinct(which).tolist():
        here = which == part
        masks: Any = lengths.read_column(part, "loss_mask")
        mine = ExampleSlices(
            examples[here] - lengths.first_rows[part],
            pieces.starts[wanted[here]],
            pieces.lengths[wanted[here]],
            np.empty(0, np.int64),
        )
        flags, offsets = read_lists(masks)
        targets[here] = pack_plan.count_piece_targets(mine, flags, offsets)
    trains = np.ones(len(pieces.examples), np.bool_)
    trains[was_cut] = targets > 0
    kept = pieces.select(trains)
    untrained = find_distinct(pieces.examples[~trains])
    # With nothing to look for, the search would still sort all pieces.
    untrained = untrained[~are_among(untrained, find_distinct(kept.examples))] if len(untrained) else untrained
    trained = lengths.trained[numbers]
    left = np.bincount(pieces.examples[was_cut], weights=targets, minlength=len(own)).astype(np.int64)
    cut = find_distinct(pieces.examples[was_cut])
    lost = int(np.maximum(trained[cut] - left[cut], 0).sum()) + int(trained[pieces.dropped].sum())
    return kept, {"overlong": numbers[pieces.dropped], "no_loss_tokens": numbers[untrained]}, lost


# ── What is in no sequence ─────────────────────────────────────────────────────────────────────────


class LeftOutExample(NamedTuple):
    """An example, by its number, that is not whole in the sequences: how many of its tokens are in none, and why."""

    number: int
    split: str
    state: str
    reason: str
    tokens: int


def find_left_out(lengths: ExampleLengths, plans: Sequence[SplitPlan], surplus: Ints) -> list[LeftOutExample]:
    """Return the examples with tokens in no sequence by their numbers; `surplus` were held out and not needed."""
    found = [
        LeftOutExample(number, "", "validation_surplus", "", tokens)
        for number, tokens in zip(surplus.tolist(), lengths.tokens[surplus].tolist(), strict=True)
    ]
    for plan in plans:
        reasons = {number: reason for reason, some in plan.rejected.items() for number in some.tolist()}
        here = np.flatnonzero(plan.left)
        for number, left in zip(plan.numbers[here].tolist(), plan.left[here].tolist(), strict=True):
            # Only concat leaves whole documents out without rejecting them.
            state, reason = (REJECTED, reasons[number]) if number in reasons else ("tail", "")
            if left < lengths.tokens[number]:
                state, reason = KEPT, ""
            found.append(LeftOutExample(number, plan.split, state, reason, left))
    return sorted(found)


MOVED_SCHEMA = make_required_schema(row_id=pa.string(), split=pa.string())
"""Rows that `mixture.num_validation_sequences` took from train: `validation`, or `surplus`, which is no split."""

_TRAIN, _VALIDATION = SPLITS.index("train"), SPLITS.index("validation")


@dataclass(frozen=True, slots=True, eq=False)
class HeldOutValidation:
    """The split of every example, the plan of validation, and the rows that left train.

    `plan` numbers the validation examples among themselves, in the order of all examples.
    """

    splits: NDArray[np.int8]
    first_rows: Ints
    tokens: Ints
    plan: SplitPlan
    moved: pa.Table


def get_holdout_size(recipe: Recipe, name: str) -> int | None:
    """Return how many validation sequences are held out of a dataset; None where shares decide."""
    return (recipe.mixture.num_validation_sequences or {}).get(name)


def hold_out_validation(context: StageContext, rules: PackingRules, wanted: int) -> HeldOutValidation:
    """Hold out `wanted` validation sequences of train: groups by their hash, the plan's first sequences of them.

    Raises ConfigError if the source has validation rows already, or train rows do not fill so many sequences.
    """
    parts = load_source_parts(context.input(RAW_DATASET))
    if any(part.split_hint == "validation" for part in parts):
        raise ConfigError(
            f"mixture.num_validation_sequences.{context.dataset_name}: the source has rows for validation of its own; "
            "one of the two may say what is held out; delete the number, or name a source without validation"
        )
    files = context.input(TOKENIZED_EXAMPLES).files("examples")
    lengths = _read_lengths(context, files, rules)
    rows = _read_part_rows(context, files)
    u = np.concatenate([np.empty(0, np.uint64), *(hashes[of_examples] for _, hashes, of_examples in rows)])
    in_train = lengths.splits == _TRAIN
    train = np.flatnonzero(in_train)
    pieces, _, _ = slice_examples(rules, lengths, train)
    alone = rules.strategy == "single"
    room = np.zeros(len(lengths.tokens), np.int64)
    filled = rules.measure_room(lengths, train[pieces.examples], pieces.lengths)
    np.add.at(room, train[pieces.examples], 1 if alone else filled)
    chosen = hold_out_groups(u, room, in_train, wanted if alone else wanted * rules.seq_len)
    if chosen is None:
        there = int(room.sum()) if alone else int(room.sum()) // context.recipe.seq_len
        raise ConfigError(
            f"mixture.num_validation_sequences.{context.dataset_name}: {wanted} sequences; all train rows together "
            f"fill {there}; lower it to less than that, or add rows"
        )
    whole = plan_split(rules, lengths, "validation", np.flatnonzero(chosen))
    end = int(whole.plan.sequence_offsets[wanted])
    first = SequencePlan(whole.plan.sequence_offsets[: wanted + 1], whole.plan.examples[:end], whole.plan.ranges[:end])
    splits = lengths.splits.copy()
    splits[chosen] = SURPLUS_CODE
    splits[first.examples] = _VALIDATION
    for rejected in whole.rejected.values():
        splits[rejected] = _VALIDATION
    # The examples of the plan are renumbered among those that are held out.
    held_examples = np.flatnonzero(splits == _VALIDATION)
    examples = np.searchsorted(held_examples, first.examples)
    planned = np.bincount(examples, weights=first.ranges[:, 1], minlength=len(held_examples)).astype(np.int64)
    held_rejects = {reason: np.searchsorted(held_examples, numbers) for reason, numbers in whole.rejected.items()}
    of_parts = np.split(splits, lengths.first_rows[1:-1])
    return HeldOutValidation(
        splits=splits,
        first_rows=lengths.first_rows,
        tokens=lengths.tokens,
        plan=replace(
            whole,
            plan=SequencePlan(first.sequence_offsets, examples, first.ranges),
            numbers=np.arange(len(held_examples)),
            left=lengths.tokens[held_examples] - planned,
            rejected=held_rejects,
        ),
        moved=_list_moved_rows(rows, of_parts, u[chosen].max()),
    )


_PartRows = tuple[pa.Array, NDArray[np.uint64], Ints]
"""The ids of a part's rows, the numbers that `splits` gives their groups, and the row of each example."""


def _read_part_rows(context: StageContext, files: Sequence[File]) -> list[_PartRows]:
    """Read the rows of each part of the examples in `files`."""
    canonical = load_origin(context, context.input(TOKENIZED_EXAMPLES), CANONICAL_ROWS)
    splitter = Splitter(context.dataset.splits, by_group=context.dataset.format.has_groups(context.dataset))
    rows: list[_PartRows] = []
    for row_file, example_file in zip(canonical.files("rows"), files, strict=True):
        table = context.store.table(row_file, ["row_id", "group_key", "content_hash"])
        keys = zip(table.column("group_key").to_pylist(), table.column("content_hash").to_pylist(), strict=True)
        hashes = np.array([splitter.hash_unit(group, content) for group, content in keys], np.uint64)
        first_row = pc.list_element(context.store.table(example_file, ["row_ids"]).column(0).combine_chunks(), 0)
        row_ids = table.column("row_id").combine_chunks()
        row_of_example = pc.index_in(first_row, row_ids).to_numpy(zero_copy_only=False).astype(np.int64)
        rows.append((row_ids, hashes, row_of_example))
    return rows


def _list_moved_rows(rows: Sequence[_PartRows], splits: Sequence[NDArray[np.int8]], last_group: np.uint64) -> pa.Table:
    """List the rows of all groups up to `last_group`, rejected ones too: none of them may count as train.

    `splits` are those of each part's examples.
    """
    tables: list[pa.Table] = []
    for (row_ids, hashes, of_examples), own in zip(rows, splits, strict=True):
        shown = np.zeros(len(hashes), np.bool_)
        shown[of_examples[own == _VALIDATION]] = True
        gone = np.flatnonzero(hashes <= last_group)
        names = np.where(shown[gone], "validation", "surplus")
        tables.append(pa.table([row_ids.take(pa.array(gone)), pa.array(names, pa.string())], schema=MOVED_SCHEMA))
    return pa.concat_tables(tables)


def hold_out_groups(
    u: NDArray[np.uint64], room: NDArray[np.int64], candidates: NDArray[np.bool_], wanted: int
) -> NDArray[np.bool_] | None:
    """Mark the candidates of the first groups, in ascending `u`, whose room adds up to what is wanted.

    All [N]: `u` is one number per group, `room` what each example fills (tokens, or sequences where each has its
    own), `candidates` those that may be held out. None if all candidates together do not reach `wanted`.
    """
    numbers, group = np.unique(u[candidates], return_inverse=True)
    filled = np.cumsum(np.bincount(group, weights=room[candidates], minlength=len(numbers)))
    if not len(numbers) or filled[-1] < wanted:
        return None
    last = numbers[int(np.searchsorted(filled, wanted))]
    return candidates & (u <= last)


def _read_lengths(context: StageContext, files: Sequence[File], rules: PackingRules) -> ExampleLengths:
    own = [one.name for one in ROW_KINDS[rules.row_kind].example_columns if one.name == SIDE_LENGTHS]
    tables = read_tables(context.store, files, ["tokens", "trained_tokens", "split", *own])

    def read_column(part: int, name: str) -> Any:
        return context.store.table(files[part], [name]).column(0).combine_chunks()

    return make_lengths(pa.concat_tables(tables), [table.num_rows for table in tables], read_column)
