"""Hold out a number of validation sequences: whole groups, in the order of a hash, until they fill enough.

    groups by u     g7 │ g2  │ g9  │ g1  │ …        wanted: 1,500 tokens
    their tokens   300 │ 900 │ 500 │ 400 │ …
                   └── validation ──┘└─ train …     300 + 900 + 500 reach it

A group is taken whole or not at all, so none is on both sides; the plan's first sequences are validation, the others
surplus. New rows can shift the margin, because a count says nothing about one row alone; that is why shares are the
better choice where a number is not needed. This needs the lengths of all examples at once, and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.concurrent_reads import read_tables
from rowmill.core.errors import ConfigError
from rowmill.core.stage_names import CANONICAL_ROWS, RAW_DATASET, TOKENIZED_EXAMPLES
from rowmill.formats.splits import Splitter
from rowmill.packing.layout import SequencePlan
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.manifest import File
from rowmill.schema.rows import EXAMPLE_COLUMNS
from rowmill.stages import inputs
from rowmill.stages.base import StageContext
from rowmill.stages.packed_shards.segment_columns import SIDE_LENGTHS
from rowmill.stages.packed_shards.split_plans import (
    SPLITS,
    SURPLUS_CODE,
    ExampleLengths,
    PackingRules,
    SplitPlan,
    make_lengths,
    plan_split,
    slice_examples,
)

MOVED_SCHEMA = pa.schema(
    [pa.field("row_id", pa.string(), nullable=False), pa.field("split", pa.string(), nullable=False)]
)
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

    Raises
    ------
    ConfigError
        If the source has validation rows already, or train rows do not fill so many sequences.

    """
    _require_no_other_validation(context)
    files = context.input(TOKENIZED_EXAMPLES).files("examples")
    lengths = _read_lengths(context, files, rules)
    rows = _hash_rows(context, files)
    u = np.concatenate([row.of_examples for row in rows]) if rows else np.empty(0, np.uint64)
    in_train = lengths.splits == _TRAIN
    train = np.flatnonzero(in_train)
    pieces, _, _ = slice_examples(rules, lengths, train)
    alone = rules.strategy == "single"
    room = np.zeros(len(lengths.tokens), np.int64)
    filled = rules.measure_room(lengths, train[pieces.examples], pieces.lengths)
    np.add.at(room, train[pieces.examples], 1 if alone else filled)
    chosen = hold_out_groups(u, room, in_train, wanted if alone else wanted * rules.seq_len)
    if chosen is None:
        raise _make_shortage_error(context, wanted, int(room.sum()), alone=alone)
    whole = plan_split(rules, lengths, "validation", np.flatnonzero(chosen))
    first = _take_first_sequences(whole.plan, wanted)
    splits = lengths.splits.copy()
    splits[chosen] = SURPLUS_CODE
    splits[first.examples] = _VALIDATION
    for rejected in whole.rejected.values():
        splits[rejected] = _VALIDATION
    return HeldOutValidation(
        splits=splits,
        first_rows=lengths.first_rows,
        tokens=lengths.tokens,
        plan=_renumber_held(whole, first, np.flatnonzero(splits == _VALIDATION), lengths.tokens),
        moved=_list_moved_rows(rows, u[chosen].max(), splits, lengths.first_rows),
    )


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


def _take_first_sequences(plan: SequencePlan, count: int) -> SequencePlan:
    end = int(plan.sequence_offsets[count])
    return SequencePlan(plan.sequence_offsets[: count + 1], plan.examples[:end], plan.ranges[:end])


def _renumber_held(whole: SplitPlan, first: SequencePlan, held: Ints, tokens: Ints) -> SplitPlan:
    """Renumber the examples of a plan among those that are held out."""
    examples = np.searchsorted(held, first.examples)
    planned = np.bincount(examples, weights=first.ranges[:, 1], minlength=len(held)).astype(np.int64)
    rejected = {reason: np.searchsorted(held, numbers) for reason, numbers in whole.rejected.items()}
    return replace(
        whole,
        plan=SequencePlan(first.sequence_offsets, examples, first.ranges),
        numbers=np.arange(len(held)),
        left=tokens[held] - planned,
        rejected=rejected,
    )


def _read_lengths(context: StageContext, files: Sequence[File], rules: PackingRules) -> ExampleLengths:
    own = [one.name for one in EXAMPLE_COLUMNS.get(rules.row_kind, ()) if one.name == SIDE_LENGTHS]
    tables = read_tables(context.store, files, ["tokens", "trained_tokens", "split", *own])

    def read_column(part: int, name: str) -> Any:
        return context.store.table(files[part], [name]).column(0).combine_chunks()

    return make_lengths(pa.concat_tables(tables), [table.num_rows for table in tables], read_column)


def _require_no_other_validation(context: StageContext) -> None:
    parts = inputs.load_source_parts(context.input(RAW_DATASET))
    if any(part.split_hint == "validation" for part in parts):
        raise ConfigError(
            f"mixture.num_validation_sequences.{context.dataset_name}: the source has rows for validation of its own; "
            "one of the two may say what is held out; delete the number, or name a source without validation"
        )


def _make_shortage_error(context: StageContext, wanted: int, room: int, *, alone: bool) -> ConfigError:
    there = room if alone else room // context.recipe.seq_len
    return ConfigError(
        f"mixture.num_validation_sequences.{context.dataset_name}: {wanted} sequences; all train rows together fill "
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


def _hash_rows(context: StageContext, files: Sequence[File]) -> list[_HashedRows]:
    """Return the hashes of the rows that the examples were made of, part by part."""
    name = (*context.dataset_key, CANONICAL_ROWS)
    canonical = manifest.load_version(context.store, name, context.input(TOKENIZED_EXAMPLES).inputs.get("/".join(name)))
    splitter = Splitter(context.dataset.splits, by_group=context.dataset.format.has_groups(context.dataset))
    found: list[_HashedRows] = []
    for rows, examples in zip(canonical.files("rows"), files, strict=True):
        table = context.store.table(rows, ["row_id", "group_key", "content_hash"])
        keys = zip(table.column("group_key").to_pylist(), table.column("content_hash").to_pylist(), strict=True)
        u = np.array([splitter.hash_unit(group, content) for group, content in keys], np.uint64)
        first = pc.list_element(context.store.table(examples, ["row_ids"]).column(0).combine_chunks(), 0)
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
        shown[one.row_of_example[own == _VALIDATION]] = True
        gone = np.flatnonzero(one.u <= last)
        names = np.where(shown[gone], "validation", "surplus")
        tables.append(pa.table([one.row_ids.take(pa.array(gone)), pa.array(names, pa.string())], schema=MOVED_SCHEMA))
    return pa.concat_tables(tables) if tables else MOVED_SCHEMA.empty_table()
