"""Lengths of all examples → one plan per split, with validation held out by number where the recipe asks.

What belongs here: which examples a split has, what of each is packed, the plan. What does not: the planner
(`plan.py`), the choice of groups (`validation_holdout.py`), tokens (`shard_files.py`).

    tokens, splits ─► (validation carved from train) ─► slices, those without a target rejected ─► plan
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.errors import ConfigError
from rowmill.core.stage_names import CANONICAL_ROWS, RAW_DATASET, TOKENIZED_EXAMPLES
from rowmill.core.storage import File
from rowmill.formats.splits import Splitter
from rowmill.packing import plan as packing
from rowmill.packing import slicing
from rowmill.packing.layout import SequencePlan
from rowmill.packing.slicing import ExampleSlices
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.stages import inputs
from rowmill.stages.base import StageContext
from rowmill.stages.packed_shards import validation_holdout

SPLITS = ("train", "validation", "test")
SURPLUS_CODE = -1
"""The split of an example whose group was held out and whose sequence was not needed."""

MOVED_SCHEMA = pa.schema(
    [pa.field("row_id", pa.string(), nullable=False), pa.field("split", pa.string(), nullable=False)]
)
"""Rows that `mixture.num_validation_sequences` took from train: `validation`, or `surplus`, which is no split."""


@dataclass(frozen=True, slots=True)
class ExampleLengths:
    """The columns of all examples that planning sees, and where each part's examples begin."""

    tokens: Ints
    trained: Ints
    splits: NDArray[np.int8]
    first_rows: Ints
    files: tuple[File, ...]


@dataclass(frozen=True, slots=True)
class SplitPackPlan:
    """A split's plan; `plan.examples` number examples over all splits. `rejected` are examples by reason."""

    split: str
    plan: SequencePlan
    rejected: dict[str, Ints]
    trained_lost: int = 0
    """Trained tokens of its examples that were cut off or dropped for their length."""


@dataclass(frozen=True, slots=True)
class DatasetPackPlans:
    """The plans of all splits that have examples, each example's length and split, and the rows that left train."""

    lengths: ExampleLengths
    splits: tuple[SplitPackPlan, ...]
    moved: pa.Table


def plan_splits(work: StageContext) -> DatasetPackPlans:
    """Plan every split of a dataset."""
    lengths, held, moved = _hold_out_validation(work, _read_example_lengths(work))
    planned = (held if split == "validation" and held else _plan_split(work, lengths, split) for split in SPLITS)
    return DatasetPackPlans(lengths, tuple(plan for plan in planned if plan is not None), moved)


def get_holdout_size(recipe: Recipe, name: str) -> int | None:
    """Return how many validation sequences are carved out of a dataset; None where shares decide."""
    return (recipe.mixture.num_validation_sequences or {}).get(name)


def _read_example_lengths(work: StageContext) -> ExampleLengths:
    files = work.input(TOKENIZED_EXAMPLES).files("examples")
    tables = [work.store.table(file, ["tokens", "trained_tokens", "split"]) for file in files]
    counts = [table.num_rows for table in tables]
    if not tables:
        nothing = np.empty(0, np.int64)
        return ExampleLengths(nothing, nothing, np.empty(0, np.int8), np.zeros(1, np.int64), ())
    joined = pa.concat_tables(tables)
    return ExampleLengths(
        tokens=joined.column("tokens").to_numpy().astype(np.int64),
        trained=joined.column("trained_tokens").to_numpy().astype(np.int64),
        splits=pc.index_in(joined.column("split"), pa.array(SPLITS)).to_numpy().astype(np.int8),
        first_rows=np.concatenate((np.zeros(1, np.int64), np.cumsum(counts))),
        files=tuple(files),
    )


# ── Plans ──────────────────────────────────────────────────────────────────────────────────────────


def _plan_split(work: StageContext, lengths: ExampleLengths, split: str) -> SplitPackPlan | None:
    numbers = np.flatnonzero(lengths.splits == SPLITS.index(split))
    return _plan_examples(work, lengths, split, numbers) if len(numbers) else None


def _plan_examples(work: StageContext, lengths: ExampleLengths, split: str, numbers: Ints) -> SplitPackPlan:
    """Plan some examples, by their numbers over all splits."""
    options = work.dataset.packing
    pieces, rejected, trained_lost = _slice_examples(work, lengths, numbers)
    plan = packing.plan_slices(
        pieces,
        limit=work.recipe.seq_len,
        strategy=options.strategy_for(work.dataset.row_kind),
        max_segments=options.segment_limit,
        tail=options.tail,
    )
    return SplitPackPlan(
        split, SequencePlan(plan.sequence_offsets, numbers[plan.examples], plan.ranges), rejected, trained_lost
    )


def _slice_examples(
    work: StageContext, lengths: ExampleLengths, numbers: Ints
) -> tuple[ExampleSlices, dict[str, Ints], int]:
    """Return the pieces to pack (numbered within `numbers`), the rejected examples, and the trained tokens lost."""
    options, kind = work.dataset.packing, work.dataset.row_kind
    own = lengths.tokens[numbers]
    if options.strategy_for(kind) == "concat":
        return slicing.keep_examples_whole(own), {}, 0
    pieces = slicing.slice_too_long(
        own,
        work.recipe.seq_len,
        options.slice_strategy_for(kind),
        name_of=lambda i: _name_example(work, lengths, int(numbers[i])),
    )
    # What was not cut had its targets counted when it was tokenized.
    was_cut = pieces.lengths < own[pieces.examples]
    trains = np.ones(len(pieces.examples), np.bool_)
    targets = _count_targets(work, lengths, numbers, pieces, np.flatnonzero(was_cut))
    trains[was_cut] = targets > 0
    kept = slicing.keep_pieces(pieces, trains)
    untrained = np.setdiff1d(pieces.examples[~trains], kept.examples)
    trained = lengths.trained[numbers]
    left = np.bincount(pieces.examples[was_cut], weights=targets, minlength=len(own)).astype(np.int64)
    cut = np.unique(pieces.examples[was_cut])
    lost = int(np.maximum(trained[cut] - left[cut], 0).sum()) + int(trained[pieces.dropped].sum())
    return kept, {"overlong": numbers[pieces.dropped], "no_loss_tokens": numbers[untrained]}, lost


def _count_targets(
    work: StageContext, lengths: ExampleLengths, numbers: Ints, pieces: ExampleSlices, wanted: Ints
) -> Ints:
    """Count the targets of some pieces; the masks are read part by part, and only of parts that have such pieces."""
    examples = numbers[pieces.examples[wanted]]
    which = np.searchsorted(lengths.first_rows, examples, "right") - 1
    counts = np.zeros(len(wanted), np.int64)
    for part in np.unique(which).tolist():
        here = which == part
        masks = work.store.table(lengths.files[part], ["loss_mask"]).column(0).combine_chunks()
        mine = ExampleSlices(
            examples[here] - lengths.first_rows[part],
            pieces.starts[wanted[here]],
            pieces.lengths[wanted[here]],
            np.empty(0, np.int64),
        )
        offsets = np.asarray(masks.offsets, np.int64)
        flags = masks.flatten().to_numpy(zero_copy_only=False)
        counts[here] = slicing.count_piece_targets(mine, flags, offsets - offsets[0])
    return counts


def _name_example(work: StageContext, lengths: ExampleLengths, number: int) -> str:
    which = int(np.searchsorted(lengths.first_rows, number, "right")) - 1
    column = work.store.table(lengths.files[which], ["example_id"]).column(0)
    return str(column[number - int(lengths.first_rows[which])].as_py())


# ── Validation by number of sequences ──────────────────────────────────────────────────────────────


def _hold_out_validation(
    work: StageContext, lengths: ExampleLengths
) -> tuple[ExampleLengths, SplitPackPlan | None, pa.Table]:
    """Carve `num_validation_sequences` from train: groups by their hash, the plan's first sequences of them.

    Returns the lengths with each example's split, the plan of validation, and the rows that left train.
    """
    wanted = get_holdout_size(work.recipe, work.dataset_name or "")
    if wanted is None:
        return lengths, None, MOVED_SCHEMA.empty_table()
    _require_no_other_validation(work)
    rows = _hash_rows(work, lengths)
    u = np.concatenate([one.of_examples for one in rows]) if rows else np.empty(0, np.uint64)
    train = np.flatnonzero(lengths.splits == SPLITS.index("train"))
    pieces, _, _ = _slice_examples(work, lengths, train)
    alone = work.dataset.packing.strategy_for(work.dataset.row_kind) == "single"
    room = np.zeros(len(lengths.tokens), np.int64)
    np.add.at(room, train[pieces.examples], 1 if alone else pieces.lengths)
    chosen = validation_holdout.hold_out_groups(
        u, room, lengths.splits == SPLITS.index("train"), wanted if alone else wanted * work.recipe.seq_len
    )
    if chosen is None:
        raise _make_shortage_error(work, wanted, int(room.sum()), alone=alone)
    whole = _plan_examples(work, lengths, "validation", np.flatnonzero(chosen))
    plan = _take_first_sequences(whole.plan, wanted)
    splits = lengths.splits.copy()
    splits[chosen] = SURPLUS_CODE
    splits[plan.examples] = SPLITS.index("validation")
    for rejected in whole.rejected.values():
        splits[rejected] = SPLITS.index("validation")
    last = u[chosen].max()
    return (
        replace(lengths, splits=splits),
        replace(whole, plan=plan),
        _list_moved_rows(rows, last, splits, lengths.first_rows),
    )


def _take_first_sequences(plan: SequencePlan, count: int) -> SequencePlan:
    end = int(plan.sequence_offsets[count])
    return SequencePlan(plan.sequence_offsets[: count + 1], plan.examples[:end], plan.ranges[:end])


def _require_no_other_validation(work: StageContext) -> None:
    parts = inputs.load_source_parts(work.input(RAW_DATASET))
    if any(part.split_hint == "validation" for part in parts):
        raise ConfigError(
            f"mixture.num_validation_sequences.{work.dataset_name}: the source has rows for validation of its own; one "
            "of the two may say what is held out; delete the number, or name a source without validation"
        )


def _make_shortage_error(work: StageContext, wanted: int, room: int, *, alone: bool) -> ConfigError:
    there = room if alone else room // work.recipe.seq_len
    return ConfigError(
        f"mixture.num_validation_sequences.{work.dataset_name}: {wanted} sequences; all train rows together fill "
        f"{there}; lower it to less than that, or add rows"
    )


@dataclass(frozen=True, slots=True)
class _HashedRows:
    """A part's rows with the numbers that `splits` gives their groups, and the row of each example."""

    row_ids: pa.Array
    u: NDArray[np.uint64]
    row_of_example: Ints

    @property
    def of_examples(self) -> NDArray[np.uint64]:
        return self.u[self.row_of_example]


def _hash_rows(work: StageContext, lengths: ExampleLengths) -> list[_HashedRows]:
    """Return the hashes of the rows that the examples were made of, part by part."""
    name = (*work.dataset_key, CANONICAL_ROWS)
    canonical = manifest.load_version(work.store, name, work.input(TOKENIZED_EXAMPLES).inputs.get("/".join(name)))
    splitter = Splitter(work.dataset.splits)
    found: list[_HashedRows] = []
    for rows, examples in zip(canonical.files("rows"), lengths.files, strict=True):
        table = work.store.table(rows, ["row_id", "group_key", "content_hash"])
        keys = zip(table.column("group_key").to_pylist(), table.column("content_hash").to_pylist(), strict=True)
        u = np.array([splitter.hash_unit(group, content) for group, content in keys], np.uint64)
        first = pc.list_element(work.store.table(examples, ["row_ids"]).column(0).combine_chunks(), 0)
        row_ids = table.column("row_id").combine_chunks()
        found.append(
            _HashedRows(row_ids, u, pc.index_in(first, row_ids).to_numpy(zero_copy_only=False).astype(np.int64))
        )
    return found


def _list_moved_rows(
    rows: Sequence[_HashedRows], last: np.uint64, splits: NDArray[np.int8], first_rows: Ints
) -> pa.Table:
    """Name the rows of all groups that were held out, rejected ones too: none of them may count as train."""
    tables: list[pa.Table] = []
    for number, one in enumerate(rows):
        own = splits[first_rows[number] : first_rows[number + 1]]
        shown = np.zeros(len(one.u), np.bool_)
        shown[one.row_of_example[own == SPLITS.index("validation")]] = True
        gone = np.flatnonzero(one.u <= last)
        names = np.where(shown[gone], "validation", "surplus")
        tables.append(pa.table([one.row_ids.take(pa.array(gone)), pa.array(names, pa.string())], schema=MOVED_SCHEMA))
    return pa.concat_tables(tables) if tables else MOVED_SCHEMA.empty_table()
