"""One pack group: read its parts once, plan, write its shards, read them back.

    its parts ─► tokens, end to end ─► a plan per split ─► shards, lineage, left_out
                                                            └► read again: digest, then content hash

Conservation: the content hashes of the segments are added up from the examples, in their order, and again from the
files that were written. The two sums must be equal. Reading back begins when the last file is written, so that whatever
overwrote or cut short a file meanwhile is noticed, too.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Numbers, compute_offsets, flatten_lists, make_list_array, make_zeros
from rowmill.core.storage import Store
from rowmill.packing.pack_plan import SequencePlan, StreamStretch, count_best_fit
from rowmill.packing.prefix_trees import SPAN_COLUMNS, find_cuts
from rowmill.parts.functions import PartInputs, PartPlace, PartResult, part_function, write_table
from rowmill.schema.examples import WEIGHT_COLUMN, RolloutFields
from rowmill.schema.indexed_shards import read_sequences
from rowmill.schema.ledger import REJECTED, sum_counts
from rowmill.schema.manifest import File, Part
from rowmill.schema.rows import DOMAIN_FIELD, EXAMPLE_COLUMNS
from rowmill.shards import native
from rowmill.shards.native import drop_padding
from rowmill.shards.sequences import join_hashes
from rowmill.stages.packed_shards.shard_files import (
    SIDE_LENGTHS,
    GroupTokens,
    ShardWriter,
    count_damaged_pairs,
    hash_planned_segments,
    part_sides,
    read_back,
)
from rowmill.stages.packed_shards.split_plans import (
    SPLITS,
    SURPLUS_CODE,
    ExampleLengths,
    PackingRules,
    SplitPlan,
    find_left_out,
    make_lengths,
    plan_split,
    plan_stretch,
)

SHARD_TOKENS = 2 << 20
"""Maximum tokens of a shard: some 60 MB while a thread gathers and writes it."""

IN_MEMORY_TOKENS = 64 << 20
"""Tokens of larger groups are mapped from a scratch file: in memory they would take 5 to 9 bytes each."""

FILL_BINS = 20

VALIDATION_CODE = SPLITS.index("validation")

LEFT_OUT = pa.schema(
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("of_tokens", pa.int64(), nullable=False),
    ]
)
"""One line per example that is not whole in the sequences: `tokens` of its `of_tokens` are in none."""


@dataclass(frozen=True, slots=True, eq=False)
class PackGroupInputs(PartInputs):
    """A group to pack: the files of its examples, the first `own` of which are its own.

    The others are those of the following parts from which its last sequences take tokens (`stretches`, if documents are
    joined). `splits` int8[N] replaces the examples' splits if a number of validation sequences is held out: validation
    is then set aside in the file `held`. `planned` is the plan of those, if this is the group that packs them.
    """

    options: Mapping[str, Any]
    """Everything in the recipe that decides shards, and their card."""
    dataset: str
    files: tuple[File, ...]
    own: int
    sources: Mapping[str, tuple[str, int]]
    stores_weights: bool
    rules: PackingRules = field(compare=False)
    tokens: int = field(compare=False)
    card: Mapping[str, str] = field(compare=False)
    weighted: bool = field(compare=False)
    fields: RolloutFields = field(compare=False)
    columns: tuple[pa.Field, ...] = field(compare=False)
    """What the shards have of each segment beside its tokens."""
    stretches: Mapping[str, StreamStretch] | None = None
    splits: "NDArray[np.int8] | None" = None
    planned: SplitPlan | None = None
    pad_id: int | None = field(default=None, compare=False)
    """Set if segments are padded."""

    @property
    def input_rows(self) -> int:
        """Examples of the group's own files."""
        return sum(file.rows for file in self.files[: self.own])

    @property
    def input_bytes(self) -> int:
        """Tokens of the files."""
        return self.tokens


def is_intact(part: Part) -> bool:
    """Whether what was read back is what was to be written; later builds do not reuse other groups."""
    return not part.facts["damaged"] and part.facts["expected"] == part.facts["found"]


@part_function(version=1, is_reusable=is_intact, uses_threads=True)
def pack_group(inputs: PackGroupInputs, place: PartPlace) -> PartResult:
    """Pack one group; the part names its shards in `facts["shards"]`, with a file and a lineage file each."""
    store = place.store
    with _read_group(inputs, place) as (tokens, lengths):
        own_examples = int(lengths.first_rows[inputs.own])
        plans = _plan_group(inputs, lengths, own_examples, tokens)
        surplus = np.flatnonzero(lengths.splits[:own_examples] == SURPLUS_CODE)
        left = find_left_out(lengths, plans, surplus)
        writer = ShardWriter(
            store=store,
            folder=place.folder,
            tokens=tokens,
            dataset=inputs.dataset,
            sources=inputs.sources,
            card=inputs.card,
            packing=inputs.rules.packing,
            columns=inputs.columns,
            group_rows=native.count_group_rows(inputs.rules.seq_len),
            pad_id=inputs.pad_id,
            files=inputs.files,
            first_rows=lengths.first_rows,
        )
        parted = [(plan.split, part_sides(plan.plan, tokens.own)) for plan in plans]
        cuts: list[tuple[str, str, SequencePlan]] = []
        for split, plan in parted:
            per_shard = _count_shard_sequences(inputs, plan)
            for number, first in enumerate(range(0, plan.sequences, per_shard)):
                chosen = plan.select(first, min(first + per_shard, plan.sequences))
                cuts.append((split, f"part-{number:05d}", chosen))
        shards = _map_in_threads(place.threads, writer.write_shard, cuts)
        expected = sum(hash_planned_segments(tokens, plan.whole, inputs.rules.packing) for _, plan in parted)
        files: dict[str, File] = {}
        if len(left.examples):
            names: list[str] = tokens.example_ids.take(pa.array(left.examples)).to_pylist()
            row_ids = [name.rsplit("#", 1)[0] for name in names]
            columns = [list(column) for column in zip(*left.fates, strict=True)]
            table = pa.table([names, row_ids, *columns, left.tokens, lengths.tokens[left.examples]], schema=LEFT_OUT)
            files["left_out"] = place.write("left_out", table)
        if inputs.splits is not None and inputs.planned is None:
            held_out = np.flatnonzero(lengths.splits[:own_examples] == VALIDATION_CODE)
            if len(held_out):
                files["held"] = place.write("held", tokens.take(held_out, lengths.trained))
        back = _map_in_threads(place.threads, lambda written: read_back(store, written.shard, written.segments), shards)
        # Only pairs are read once more; what is damaged cannot be read, and is counted as such.
        intact = [written.shard for written, (damaged, _) in zip(shards, back, strict=True) if not damaged]
        paired = intact if SIDE_LENGTHS in tokens.own.column_names else []
        again = (drop_padding(read_sequences(store, shard)) for shard in paired)
        pairs = sum_counts(count_damaged_pairs(table, tokens.own) for table in again)
    joined = join_hashes([hashes for _, hashes in back])
    fates = Counter(f"{state}/{reason}" for _, state, reason in left.fates)
    splits = lengths.splits[:own_examples]
    # What is set aside is counted by the group that packs it.
    entered = splits != SURPLUS_CODE
    if inputs.splits is not None and inputs.planned is None:
        entered &= splits != VALIDATION_CODE
    tails = sum(
        min(int(lengths.trained[number]), tokens)
        for number, tokens, (_, state, _) in zip(left.examples.tolist(), left.tokens.tolist(), left.fates, strict=True)
        if state == "tail"
    )
    counted = entered | (splits == SURPLUS_CODE)
    fills = np.concatenate([plan.plan.tokens for plan in plans] or [np.empty(0, np.int64)]) / inputs.rules.seq_len
    shared = sum(int(one.plan.whole.tokens.sum() - one.plan.tokens.sum()) for one in plans)
    fill_counts, _ = np.histogram(fills, bins=FILL_BINS, range=(0.0, 1.0))
    facts = {
        "tokens": int(lengths.tokens[:own_examples].sum()),
        "shards": [written.facts for written in shards],
        "expected": f"{expected % native.HASH_MODULUS:032x}",
        "found": f"{joined.sum_content(np.arange(len(joined.tokens))):032x}",
        "damaged": sum(damaged for damaged, _ in back),
        "tokens_read": int(lengths.tokens[:own_examples][counted].sum()),
        "examples": int(counted.sum()),
        "entered": [int(entered.sum()), int(lengths.trained[:own_examples][entered].sum())],
        "rejected": sum(count for fate, count in fates.items() if fate.startswith(f"{REJECTED}/")),
        "trained_lost": sum(plan.trained_lost for plan in plans) + tails,
        "left_out": dict(sorted(fates.items())),
        "splits": {split: int((splits[entered] == code).sum()) for code, split in enumerate(SPLITS)},
        "unlimited": sum(_count_unlimited(inputs.rules, lengths, plan) for plan in plans),
        "fill": [int(count) for count in fill_counts],
        # Tokens of examples that are not stored, as others share them.
        **({"shared": shared} if inputs.rules.packing.share_prefixes else {}),
        "pairs": pairs,
    }
    named = {f"shard-{i:05d}": written.shard for i, written in enumerate(shards)}
    lineage = {f"segments-{i:05d}": written.segments for i, written in enumerate(shards)}
    hashes: dict[str, File] = {}
    for i, (written, (_, table)) in enumerate(zip(shards, back, strict=True)):
        # `…/data/train/part-00000.parquet` has `…/sequences/train-part-00000.arrow`.
        folder, split, name = written.shard.path.rsplit("/", 2)
        path = f"{folder.removesuffix('/data')}/sequences/{split}-{name.removesuffix('.parquet')}.arrow"
        hashes[f"sequences-{i:05d}"] = write_table(store, path, table)
    return PartResult(named | lineage | hashes | files, facts)


ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def _map_in_threads(threads: int, function: Callable[[ItemT], ResultT], items: Sequence[ItemT]) -> list[ResultT]:
    """Return a function's results in order. Most of a shard's time is spent in libraries that release the lock."""
    if min(threads, len(items)) <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(function, items))


def _count_shard_sequences(inputs: PackGroupInputs, plan: SequencePlan) -> int:
    """Return the sequences of a shard: as many as fit if all were full, or on average.

    Prompts are short, and of trees the examples count, whose masks are in memory.
    """
    if inputs.rules.row_kind != "prompt" and plan.trees is None:
        return max(1, SHARD_TOKENS // inputs.rules.seq_len)
    return max(1, SHARD_TOKENS * plan.sequences // max(1, int(plan.whole.tokens.sum())))


def _plan_group(inputs: PackGroupInputs, lengths: ExampleLengths, own: int, tokens: GroupTokens) -> list[SplitPlan]:
    if inputs.planned is not None:
        return [inputs.planned]
    plans: list[SplitPlan] = []
    for code, split in enumerate(SPLITS):
        if code == VALIDATION_CODE and inputs.splits is not None:
            continue
        numbers = np.flatnonzero(lengths.splits == code)
        if not len(numbers) or numbers[0] >= own:
            continue
        if inputs.stretches is None:
            sort_pieces = tokens.sort_pieces if inputs.rules.packing.share_prefixes else None
            plans.append(plan_split(inputs.rules, lengths, split, numbers, sort_pieces))
        else:
            plans.append(plan_stretch(inputs.rules, lengths, split, numbers, inputs.stretches[split]))
    return plans


# ── Examples in memory, or mapped ──────────────────────────────────────────────────────────────────


@contextmanager
def _read_group(inputs: PackGroupInputs, place: PartPlace) -> Generator[tuple[GroupTokens, ExampleLengths]]:
    store = place.store
    if inputs.tokens <= IN_MEMORY_TOKENS:
        yield _load_examples(inputs, store, None)
        return
    local = Path(store.path(place.stage_folder)) if store.is_local else None
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=local) as folder:
        yield _load_examples(inputs, store, Path(folder))


def _load_examples(inputs: PackGroupInputs, store: Store, scratch: Path | None) -> tuple[GroupTokens, ExampleLengths]:
    ids = _make_array(scratch, "ids", np.int32, inputs.tokens)
    mask = _make_array(scratch, "mask", np.bool_, inputs.tokens)
    weights = _make_array(scratch, "weights", np.float32, inputs.tokens) if inputs.weighted else None
    fields: dict[str, Numbers] = {}
    for name, kind in inputs.fields.per_token.items():
        like = make_zeros(0, kind)
        fields[name] = _make_array(scratch, name, like.dtype, inputs.tokens, *like.shape[1:])
    kind_columns = [field.name for field in EXAMPLE_COLUMNS.get(inputs.rules.row_kind, ())]
    kind_columns += ["domain"] if DOMAIN_FIELD in inputs.columns else []
    packing = inputs.rules.packing
    finds_cuts = packing.share_prefixes and inputs.rules.row_kind == "conversation"
    cuts = _make_array(scratch, "cuts", np.bool_, inputs.tokens) if finds_cuts else None
    small: list[pa.Table] = []
    at = 0
    for file in inputs.files:
        stored = [*_TOKEN_COLUMNS, *((WEIGHT_COLUMN,) if inputs.stores_weights else ()), *inputs.fields.names]
        # A field that a dataset does not declare is not in its examples, and not read.
        table = store.table(file, [*_SMALL_COLUMNS, *stored, *kind_columns, *(SPAN_COLUMNS if finds_cuts else ())])
        for declared in inputs.fields.row_columns:
            if declared.name not in table.column_names:
                table = table.append_column(declared, pa.nulls(table.num_rows, declared.type))
        small.append(table.select([*_SMALL_COLUMNS, *kind_columns, *inputs.fields.per_row]))
        flat = flatten_lists(table.column("input_ids"))
        end = at + len(flat)
        ids[at:end] = flat
        mask[at:end] = flatten_lists(table.column("loss_mask"))
        if weights is not None:
            # Examples of a dataset without loss weights weigh 1 where the mask is true.
            weights[at:end] = flatten_lists(table.column(WEIGHT_COLUMN if inputs.stores_weights else "loss_mask"))
        if cuts is not None:
            cuts[at:end] = find_cuts(table)
        for name, values in fields.items():
            values[at:end] = flatten_lists(table.column(name)) if name in table.column_names else 0
        at = end
    assert at == inputs.tokens, (at, inputs.tokens)
    columns = pa.concat_tables(small)
    offsets = compute_offsets(columns.column("tokens").to_numpy())
    example_ids = columns.column("example_id").combine_chunks()
    of_kind = columns.select([*kind_columns, *inputs.fields.per_row]).combine_chunks()
    tokens = GroupTokens(ids, mask, weights, fields, offsets, example_ids, of_kind, cuts, packing.min_shared)
    counts = [table.num_rows for table in small]
    firsts = compute_offsets(counts)

    def read_column(part: int, name: str) -> pa.Array:
        first, end = int(firsts[part]), int(firsts[part + 1])
        if name == "example_id":
            return example_ids.slice(first, end - first)
        cut = offsets[first : end + 1]
        return make_list_array(cut - cut[0], mask[cut[0] : cut[-1]])

    lengths = make_lengths(columns, counts, read_column)
    return tokens, lengths if inputs.splits is None else replace(lengths, splits=inputs.splits)


_SMALL_COLUMNS = ("example_id", "tokens", "trained_tokens", "split")

_TOKEN_COLUMNS = ("input_ids", "loss_mask")


def _make_array(scratch: Path | None, name: str, dtype: Any, *shape: int) -> "NDArray[Any]":
    if scratch is None or not shape[0]:
        return np.empty(shape, dtype)
    return np.memmap(scratch / name, dtype, "w+", shape=shape)


def _count_unlimited(rules: PackingRules, lengths: ExampleLengths, one: SplitPlan) -> int:
    """Return the number of sequences if one could have any number of segments."""
    if rules.strategy != "best_fit" or rules.packing.segment_limit is None:
        return one.plan.sequences
    return count_best_fit(rules.measure_room(lengths, one.plan.examples, one.plan.ranges[:, 1]), rules.seq_len)
