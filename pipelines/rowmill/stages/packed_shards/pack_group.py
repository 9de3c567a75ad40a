"""One pack group: read its parts once, plan, write its shards, read them back.

    its parts ─► tokens, end to end ─► a plan per split ─► shards, lineage, left_out
                                                            └► read again: digest, then content hash

    example   ids of chosen and rejected, end to end     side_lengths 3 4     sides 1 0
    segments  0 1 2 │ 0 1 2 3                            an attention span each, always in one sequence

    segment_lengths 3 2     seq_lengths 3 2     position_ids 0 1 2 0 1     or with open attention  5  and  0 1 2 3 4

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
from enum import StrEnum
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import (
    Bools,
    Ints,
    Numbers,
    Runs,
    Tokens,
    compute_offsets,
    flatten_lists,
    make_list_array,
    make_position_ids,
    make_zeros,
    read_lists,
    sum_by_span,
)
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.errors import DamagedFileError
from rowmill.core.segment_trees import make_tree_positions
from rowmill.core.storage import Store, digest_bytes
from rowmill.kinds.preference import ShardPairCounts
from rowmill.packing import pack_plan
from rowmill.packing.options import Packing
from rowmill.packing.pack_plan import ExampleSlices, PlannedTrees, SequencePlan, StreamStretch, count_best_fit
from rowmill.packing.prefix_trees import SPAN_COLUMNS, SortedPieces, find_cuts, sort_by_tokens
from rowmill.parts.functions import PartInputs, PartPlace, PartResult, part_function, write_table
from rowmill.schema.content_hash import format_content_hash
from rowmill.schema.examples import IGNORED_LABEL, WEIGHT_COLUMN, RolloutFields
from rowmill.schema.indexed_shards import ExampleReferences, drop_tokens, list_token_columns, read_sequences
from rowmill.schema.ledger import KEPT, REJECTED
from rowmill.schema.manifest import File, Part
from rowmill.schema.rows import DOMAIN_COLUMN, DOMAIN_FIELD, PADDING_COLUMN, PARENTS_COLUMN, ROW_KINDS, SPLITS
from rowmill.schema.shard_counts import (
    FILL_BINS,
    PackGroupDetails,
    PackingCounts,
    ShardDetails,
    SharedPrefixCounts,
    name_fill_bin,
)
from rowmill.shards import native
from rowmill.shards.native import drop_padding, list_padding_tokens
from rowmill.shards.prefix_trees import ExampleTrees, TargetRuns
from rowmill.shards.sequences import SEQUENCE_HASHES, join_hashes, tabulate_hashes
from rowmill.stages.packed_shards.split_plans import (
    SIDE_LENGTHS,
    SURPLUS_CODE,
    ExampleLengths,
    LeftOutExample,
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

VALIDATION_CODE = SPLITS.index("validation")

LEFT_OUT = make_required_schema(
    example_id=pa.string(),
    row_id=pa.string(),
    split=pa.string(),
    state=pa.string(),
    reason=pa.string(),
    tokens=pa.int64(),
    of_tokens=pa.int64(),
)
"""One line per example that is not whole in the sequences: `tokens` of its `of_tokens` are in none."""


class GroupMode(StrEnum):
    """What a group packs."""

    ALL = "all"
    """All of its examples."""
    SET_ASIDE = "set_aside"
    """All but those of validation, which go to the file `held`: a number of the dataset's sequences is held out."""
    HELD_OUT = "held_out"
    """What the other groups set aside, by a plan of all of it."""


@dataclass(frozen=True, slots=True, eq=False)
class PackGroupInputs(PartInputs):
    """A group to pack: the files of its examples, the first `own` of which are its own.

    The others are those of the following parts from which its last sequences take tokens (`stretches`, if documents are
    joined). In the modes `SET_ASIDE` and `HELD_OUT`, `splits` int8[N] replaces the examples' splits. `planned` is the
    plan of `HELD_OUT`.
    """

    mode: GroupMode
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
    token_types: Mapping[str, pa.DataType] = field(compare=False)
    """What the shards have of each token beside its id, label and position."""
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
        return self.tokens


# ── Files of shards ──


def part_sides(plan: SequencePlan, examples: pa.Table) -> SequencePlan:
    """Return a plan whose segments are the sides of its examples; plans of examples without sides are unchanged."""
    if SIDE_LENGTHS not in examples.column_names:
        return plan
    lengths = examples.column(SIDE_LENGTHS).combine_chunks()
    counts = lengths.value_lengths().to_numpy()[plan.examples].astype(np.int64)
    chosen = lengths.take(pa.array(plan.examples)).flatten().to_numpy().astype(np.int64)
    before = compute_offsets(counts)
    starts = np.cumsum(chosen) - chosen
    ranges = np.stack((starts - np.repeat(starts[before[:-1]], counts), chosen), axis=1).astype(np.int32)
    return SequencePlan(before[plan.sequence_offsets], np.repeat(plan.examples, counts), ranges)


_SINGULAR = {"prompt_lengths": "prompt_length", "margins": "margin", DOMAIN_COLUMN: "domain"}


def _take(examples: pa.Table, name: str, plan: SequencePlan) -> pa.Array:
    column = examples.column(_SINGULAR.get(name, name)).combine_chunks()
    if name != "sides":
        return column.take(pa.array(plan.examples))
    places: Ints = np.asarray(column.offsets, np.int64)[plan.examples] + (plan.ranges[:, 0] > 0)
    return column.values.take(pa.array(places))


def count_damaged_pairs(shard: pa.Table, examples: pa.Table) -> ShardPairCounts | None:
    """Count the pairs of a shard that are not whole in one sequence, and those with two prompts.

    None for shards of other rows. `examples` are the columns of the group's examples.
    """
    if SIDE_LENGTHS not in examples.column_names:
        return None
    lengths = examples.column(SIDE_LENGTHS).combine_chunks()
    is_paired = len(lengths) > 0 and int(lengths.value_lengths().to_numpy().max()) > 1
    if not is_paired or not shard.num_rows:
        return ShardPairCounts()
    examples_of = shard.column("example_ids").combine_chunks()
    sequences = np.repeat(np.arange(len(examples_of)), examples_of.value_lengths().to_numpy())
    names = examples_of.flatten().dictionary_encode().indices.to_numpy()
    sides, ids, sizes, prompts = (
        shard.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
        for name in ("sides", "input_ids", "segment_lengths", "prompt_lengths")
    )
    follows = np.flatnonzero((sequences[1:] == sequences[:-1]) & (names[1:] == names[:-1]))
    whole = follows[(sides[follows] == 1) & (sides[follows + 1] == 0)]
    ends = np.cumsum(sizes)
    differ = 0
    for first in whole.tolist():
        size = int(prompts[first])
        begin, other = (int(ends[k] - sizes[k]) for k in (first, first + 1))
        same = size == prompts[first + 1] and np.array_equal(ids[begin : begin + size], ids[other : other + size])
        differ += not same
    return ShardPairCounts(separated_sides=len(names) - 2 * len(whole), pairs_with_two_prompts=differ)


# ── Whether the spans and positions of a written shard follow from its segments ──


def has_whole_spans(shard: pa.Table) -> bool:
    """Return whether each attention span of a shard is a segment or a sequence, and positions count from 0 in it."""
    if not shard.num_rows:
        return True
    if PARENTS_COLUMN in shard.column_names:
        # Spans are segments, positions continue those of parents, and weights are sums over examples.
        trees = ExampleTrees.of(shard)
        (ids, tokens), (labels, _), (positions, _), (spans, span_offsets), (weights, _) = (
            read_lists(shard.column(name))
            for name in ("input_ids", "labels", "position_ids", "seq_lengths", WEIGHT_COLUMN)
        )
        trained, sums = trees.sum_targets()
        return (
            np.array_equal(spans, trees.lengths)
            and np.array_equal(span_offsets, trees.segment_offsets)
            and np.array_equal(tokens, compute_offsets(spans)[span_offsets])
            and np.array_equal(positions, make_tree_positions(trees.joined_parents, trees.lengths))
            and np.array_equal(labels, np.where(trained, ids, IGNORED_LABEL))
            and np.array_equal(weights, sums)
        )
    lengths, segments = read_lists(shard.column("segment_lengths"))
    if PADDING_COLUMN in shard.column_names:
        lengths = lengths + flatten_lists(shard.column(PADDING_COLUMN))
    found, spans = read_lists(shard.column("seq_lengths"))
    positions, tokens = read_lists(shard.column("position_ids"))
    return (
        np.array_equal(found, sum_by_span(lengths, segments, spans))
        and np.array_equal(tokens, compute_offsets(found)[spans])
        and np.array_equal(positions, make_position_ids(found))
    )


HASH_TOKENS = 2 << 20
"""Tokens that are gathered at a time to hash the segments of a plan."""

SEGMENTS = make_required_schema(
    shard_row=pa.int32(),
    segment=pa.int32(),
    example_id=pa.string(),
    row_id=pa.string(),
    source=pa.string(),
    record=pa.int64(),
    start=pa.int32(),
    length=pa.int32(),
    split=pa.string(),
)
"""Lineage next to each shard: which record of which file is in which segment. `record` counts from 1 in the file."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupTokens:
    """The examples of a group end to end: `offsets` int64[N + 1] cut their tokens.

    `values` are the loss weights and the fields of each token, if the recipe has such. The arrays may be mapped from a
    file.
    """

    ids: Tokens
    mask: Bools
    values: Mapping[str, Numbers]
    offsets: Ints
    example_ids: pa.Array
    own: pa.Table
    """The columns that only examples of one kind of rows have, and the fields of rows; mostly without columns."""
    cuts: Bools | None = None
    """Whether a message does not go on after a token, for conversations that share prefixes."""
    min_shared: int = 0
    """The least tokens that examples share, if they do."""

    def values_at(self, runs: Runs, targets: Bools) -> dict[str, Numbers]:
        """Return the weights of some tokens, 0 on those that are no `targets`, and their fields."""
        found = {name: runs.take(values) for name, values in self.values.items()}
        if WEIGHT_COLUMN in found:
            found[WEIGHT_COLUMN] = np.where(targets, found[WEIGHT_COLUMN], np.float32(0))
        return found

    def sort_pieces(self, pieces: ExampleSlices) -> SortedPieces:
        """Sort pieces of examples by their tokens."""
        runs = native.locate_tokens(self.offsets, pieces.examples, pieces.starts, pieces.lengths)
        cuts = None if self.cuts is None else runs.take(self.cuts)
        return sort_by_tokens(runs.take(self.ids), cuts, compute_offsets(pieces.lengths), min_shared=self.min_shared)

    def take(self, numbers: Ints, trained: Ints) -> pa.Table:
        """Return some examples as a table that can be packed like a part; `trained` int64[N] are their targets."""
        lengths = np.diff(self.offsets)[numbers]
        runs = native.locate_tokens(self.offsets, numbers, np.zeros_like(numbers), lengths)
        cut = compute_offsets(lengths)
        columns: dict[str, Any] = {
            "example_id": self.example_ids.take(pa.array(numbers)),
            "split": pa.repeat(pa.scalar("validation"), len(numbers)),
            "tokens": lengths,
            "trained_tokens": trained[numbers],
            "input_ids": make_list_array(cut, runs.take(self.ids)),
            "loss_mask": make_list_array(cut, runs.take(self.mask)),
            **{name: make_list_array(cut, runs.take(values)) for name, values in self.values.items()},
        }
        own = self.own.take(pa.array(numbers))
        return pa.table(columns | {name: own.column(name) for name in own.column_names})


def hash_planned_segments(tokens: GroupTokens, plan: SequencePlan, packing: Packing) -> int:
    """Return the sum of the content hashes of a plan's segments, from the examples, in their order."""
    begins = np.ones(len(plan.examples), np.bool_)
    if not packing.block_cross_document_attention:
        begins[:] = False
        begins[plan.sequence_offsets[:-1]] = True
    order = np.argsort(plan.examples, kind="stable")
    before = np.cumsum(plan.ranges[order, 1], dtype=np.int64)
    blocks = np.searchsorted(before, np.arange(0, int(before[-1]) if len(before) else 0, HASH_TOKENS))
    total = 0
    for some in np.split(order, blocks[1:]):
        examples, ranges = plan.examples[some], plan.ranges[some]
        ignored = packing.ignore_token_id
        runs, bounds, ids, targets = _take_targets(tokens, examples, ranges, begins[some], ignored)
        segments = native.Segments(
            ids,
            targets,
            bounds,
            np.array([0, len(some)]),
            tokens.example_ids.take(pa.array(examples)),
            ranges[:, 0],
            tokens.values_at(runs, targets),
        )
        total += sum(native.hash_segments(segments))
    return total


def _take_targets(
    tokens: GroupTokens, examples: Ints, ranges: Tokens, begins: Bools, ignore_token_id: int | None
) -> tuple[Runs, Ints, Tokens, Bools]:
    """Return where segments are, the offsets of their tokens, their ids, and which of them are targets.

    Whether a segment's first token is one depends on the attention spans: it is not where `begins` is true.
    """
    runs = native.locate_tokens(tokens.offsets, examples, ranges[:, 0], ranges[:, 1])
    ids, targets, bounds = runs.take(tokens.ids), runs.take(tokens.mask).copy(), compute_offsets(ranges[:, 1])
    targets[bounds[:-1][begins]] = False
    if ignore_token_id is not None:
        targets &= ids != ignore_token_id
    return runs, bounds, ids, targets


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """A shard, its lineage, and what describes it."""

    shard: File
    segments: File
    details: ShardDetails


@dataclass(frozen=True, slots=True, eq=False)
class ShardCut:
    """The plan of one shard of a split, its name, and the number of its first sequence among those of the group."""

    split: str
    name: str
    first_sequence: int
    plan: SequencePlan


@dataclass(frozen=True, slots=True, eq=False)
class ShardWriter:
    """Writes the shards of one group; `first_rows` int64[F + 1] is where the rows of each of its files begin."""

    inputs: PackGroupInputs
    place: PartPlace
    tokens: GroupTokens
    first_rows: Ints

    def write_shard(self, cut: ShardCut) -> WrittenShard:
        """Write one shard and its lineage; several may be written at once."""
        store, folder, plan = self.place.store, self.place.folder, cut.plan
        table = self._gather(plan)
        shard = store.put(f"{folder}/data/{cut.split}/{cut.name}.parquet", self._encode(table, plan), table.num_rows)
        lineage = self._list_segments(table, cut)
        segments = write_table(store, f"{folder}/segments/{cut.split}-{cut.name}.arrow", lineage)
        domains: list[str] = []
        if DOMAIN_COLUMN in table.column_names:
            domains = table.column(DOMAIN_COLUMN).combine_chunks().flatten().unique().drop_null().to_pylist()
        details = ShardDetails(
            split=cut.split,
            first_sequence=cut.first_sequence,
            sequences=table.num_rows,
            segments=len(plan.examples),
            tokens=int(plan.ranges[:, 1].sum()),
            trained_tokens=int(table.column("trained_tokens").to_numpy().sum()),
            padding=int(list_padding_tokens(table).sum()),
            domains=tuple(sorted(domains)),
        )
        return WrittenShard(shard, segments, details)

    def _encode(self, table: pa.Table, plan: SequencePlan) -> bytes:
        """Encode a shard by `packing.layout`: with its tokens, or with references to the files that have them."""
        inputs, packing = self.inputs, self.inputs.rules.packing
        group_rows = native.count_group_rows(inputs.rules.seq_len)
        if packing.layout == "copied":
            return native.encode_native_shard(table, inputs.card, group_rows=group_rows)
        numbers = np.searchsorted(self.first_rows, plan.examples, "right") - 1
        used, files = np.unique(numbers, return_inverse=True)
        references = ExampleReferences(
            files=tuple(inputs.files[number] for number in used.tolist()),
            weighted=WEIGHT_COLUMN in self.tokens.values,
            token_fields=tuple(
                (name, str(values.dtype), values.shape[1] if values.ndim == 2 else 0)
                for name, values in self.tokens.values.items()
                if name != WEIGHT_COLUMN
            ),
            ignore_token_id=packing.ignore_token_id,
            pad_id=inputs.pad_id,
        )
        names = list_token_columns(self.tokens.values)
        index = drop_tokens(table, files, plan.examples - self.first_rows[numbers], names)
        return native.encode_native_shard(index, inputs.card, group_rows=group_rows, references=references)

    def _list_segments(self, table: pa.Table, cut: ShardCut) -> pa.Table:
        """Return the lineage of a shard: the source record of each segment."""
        inputs, plan = self.inputs, cut.plan
        example_ids = table.column("example_ids").combine_chunks().flatten()
        numbers, starts = np.arange(len(plan.examples)), plan.ranges[:, 0]
        if plan.trees is not None:
            # A segment has a line for each example that holds it.
            numbers, examples, before = ExampleTrees.of(table).list_memberships()
            example_ids = example_ids.take(pa.array(examples))
            starts = (plan.trees.leaves.ranges[examples, 0] + before).astype(np.int32)
        row_ids, parts, records = pc.extract_regex(example_ids, _EXAMPLE_ID_PATTERN).flatten()
        named = parts.dictionary_encode()
        found = [inputs.sources[part] for part in named.dictionary.to_pylist()]
        urls = pa.array([url for url, _ in found], pa.string())
        firsts = np.array([first for _, first in found], np.int64)
        rows = np.searchsorted(plan.sequence_offsets, numbers, "right") - 1
        columns = [
            pa.array(rows.astype(np.int32)), pa.array((numbers - plan.sequence_offsets[rows]).astype(np.int32)),
            example_ids, row_ids, urls.take(named.indices),
            pa.array(firsts[named.indices.to_numpy()] + records.cast(pa.int64()).to_numpy()),
            pa.array(starts), pa.array(plan.ranges[numbers, 1]), pa.repeat(pa.scalar(cut.split), len(row_ids)),
        ]  # fmt: skip
        return pa.Table.from_arrays(columns, schema=SEGMENTS)

    def _gather(self, plan: SequencePlan) -> pa.Table:
        tokens, inputs, packing = self.tokens, self.inputs, self.inputs.rules.packing
        if plan.trees is not None:
            ignored = packing.ignore_token_id
            return gather_trees(tokens, plan, plan.trees, dataset=inputs.dataset, ignore_token_id=ignored)
        starts, lengths = plan.ranges[:, 0], plan.ranges[:, 1]
        runs = native.locate_tokens(tokens.offsets, plan.examples, starts, lengths)
        cut_ids = runs.take(tokens.ids)
        blocked = packing.block_cross_document_attention
        span_lengths, span_offsets = pack_plan.attention_spans(plan, block_cross_document_attention=blocked)
        ignored = packing.ignore_token_id
        trained = pack_plan.mark_targets(cut_ids, runs.take(tokens.mask), span_lengths, ignore_token_id=ignored)
        segments = native.Segments(
            ids=cut_ids,
            trained=trained,
            offsets=compute_offsets(lengths),
            sequence_offsets=plan.sequence_offsets,
            example_ids=tokens.example_ids.take(pa.array(plan.examples)),
            starts=starts,
            token_values=tokens.values_at(runs, trained),
            columns={field.name: _take(tokens.own, field.name, plan).cast(field.type) for field in inputs.columns},
        )
        padding = None
        if inputs.pad_id is not None:
            multiple = packing.segment_multiple_of
            own = pack_plan.count_padding(plan, multiple, block_cross_document_attention=blocked)
            span_lengths = span_lengths + sum_by_span(own, plan.sequence_offsets, span_offsets)
            padding = native.Padding(own, inputs.pad_id)
        return native.make_shard_table(segments, span_lengths, span_offsets, dataset=inputs.dataset, padding=padding)


def gather_trees(
    tokens: GroupTokens, plan: SequencePlan, planned: PlannedTrees, *, dataset: str, ignore_token_id: int | None
) -> pa.Table:
    """Return planned sequences of shared segments, in which a token has the weights of all examples that train it."""
    leaves = planned.leaves
    ids = native.locate_tokens(tokens.offsets, plan.examples, plan.ranges[:, 0], plan.ranges[:, 1]).take(tokens.ids)
    # An example's first token follows no other one.
    begins = np.ones(len(leaves.examples), np.bool_)
    runs, bounds, _, targets = _take_targets(tokens, leaves.examples, leaves.ranges, begins, ignore_token_id)
    # A recipe that shares prefixes has weights.
    of_leaves = tokens.values_at(runs, targets)[WEIGHT_COLUMN]
    trees = ExampleTrees(
        lengths=plan.ranges[:, 1],
        parents=planned.parents,
        segment_offsets=plan.sequence_offsets,
        ends=planned.ends,
        example_offsets=leaves.sequence_offsets,
        targets=TargetRuns.of(targets, of_leaves, bounds),
    )
    trained, weights = trees.sum_targets()
    segments = native.Segments(
        ids=ids,
        trained=trained,
        offsets=compute_offsets(trees.lengths),
        sequence_offsets=plan.sequence_offsets,
        example_ids=tokens.example_ids.take(pa.array(leaves.examples)),
        starts=leaves.ranges[:, 0],
        token_values={WEIGHT_COLUMN: weights},
        trees=trees,
    )
    return native.make_shard_table(segments, trees.lengths, plan.sequence_offsets, dataset=dataset)


_EXAMPLE_ID_PATTERN = "^(?P<row_id>(?P<part>.*):(?P<record>[0-9]+)[.0-9]*)#[0-9]+$"
"""An example's id taken apart as `rows.parse_row_id` does with a row's, for a whole column at once."""


def read_back(store: Store, shard: File, segments: File) -> tuple[int, pa.Table]:
    """Return how many of a shard's files are not what was written, and the hashes of its sequences.

    A damaged shard has no content: no sequence of it has a hash.
    """
    damaged = int(digest_bytes(store.read(segments.path)) != segments.digest)
    try:
        table = read_sequences(store, shard).combine_chunks()
    except DamagedFileError:
        return damaged + 1, SEQUENCE_HASHES.empty_table()
    # Hashes hold tokens, targets and lengths of segments; what else a trainer reads follows from these.
    if not has_whole_spans(table):
        return damaged + 1, SEQUENCE_HASHES.empty_table()
    return damaged, tabulate_hashes(table)


# ── The group ──


def is_intact(part: Part) -> bool:
    """Whether what was read back is what was to be written; later builds do not reuse other groups."""
    counts = part.get_counts(PackingCounts)
    return not counts.damaged_files and not counts.count_unconserved()


@part_function(version=2, is_reusable=is_intact, uses_threads=True)
def pack_group(inputs: PackGroupInputs, place: PartPlace) -> PartResult:
    """Pack one group; the part describes its shards, and has a file, a lineage file and hashes of each."""
    store = place.store
    with _read_group(inputs, place) as (tokens, lengths):
        own_examples = int(lengths.first_rows[inputs.own])
        plans = _plan_group(inputs, lengths, own_examples, tokens)
        surplus = np.flatnonzero(lengths.splits[:own_examples] == SURPLUS_CODE)
        left = find_left_out(lengths, plans, surplus)
        writer = ShardWriter(inputs, place, tokens, lengths.first_rows)
        parted = [(plan.split, part_sides(plan.plan, tokens.own)) for plan in plans]
        cuts: list[ShardCut] = []
        for split, plan in parted:
            per_shard = _count_shard_sequences(inputs, plan)
            for number, first in enumerate(range(0, plan.sequences, per_shard)):
                chosen = plan.select(first, min(first + per_shard, plan.sequences))
                cuts.append(ShardCut(split, f"part-{number:05d}", first, chosen))
        shards = _map_in_threads(place.threads, writer.write_shard, cuts)
        expected = sum(hash_planned_segments(tokens, plan.whole, inputs.rules.packing) for _, plan in parted)
        files: dict[str, File] = {}
        if left:
            numbers, *columns = map(list, zip(*left, strict=True))
            names: list[str] = tokens.example_ids.take(pa.array(numbers)).to_pylist()
            row_ids = [name.rsplit("#", 1)[0] for name in names]
            table = pa.table([names, row_ids, *columns, lengths.tokens[numbers]], schema=LEFT_OUT)
            files["left_out"] = place.write("left_out", table)
        if inputs.mode is GroupMode.SET_ASIDE:
            held_out = np.flatnonzero(lengths.splits[:own_examples] == VALIDATION_CODE)
            if len(held_out):
                files["held"] = place.write("held", tokens.take(held_out, lengths.trained))
        back = _map_in_threads(place.threads, lambda written: read_back(store, written.shard, written.segments), shards)
        # Only pairs are read once more; what is damaged cannot be read, and is counted as such.
        intact = [written.shard for written, (damaged, _) in zip(shards, back, strict=True) if not damaged]
        paired = intact if SIDE_LENGTHS in tokens.own.column_names else []
        again = (drop_padding(read_sequences(store, shard)) for shard in paired)
        pairs = [counts for table in again if (counts := count_damaged_pairs(table, tokens.own)) is not None]
    joined = join_hashes([hashes for _, hashes in back])
    details = tuple(written.details for written in shards)
    shared = sum(int(one.plan.whole.tokens.sum() - one.plan.tokens.sum()) for one in plans)
    counts = replace(
        _count_examples(inputs, lengths, plans, left, stored_tokens=sum(shard.tokens for shard in details) + shared),
        damaged_files=sum(damaged for damaged, _ in back),
        content_hash=format_content_hash(joined.sum_content(np.arange(len(joined.tokens)))),
        planned_hash=format_content_hash(expected),
    )
    of_shards = [shard.count(seq_len=inputs.rules.seq_len) for shard in details]
    saved = [SharedPrefixCounts(tokens_shared=shared)] if inputs.rules.packing.share_prefixes else []
    for i, (cut, written, (_, table)) in enumerate(zip(cuts, shards, back, strict=True)):
        hashes = write_table(store, f"{place.folder}/sequences/{cut.split}-{cut.name}.arrow", table)
        files |= {f"shard-{i:05d}": written.shard, f"segments-{i:05d}": written.segments, f"sequences-{i:05d}": hashes}
    return PartResult(files, counts=[counts, *of_shards, *saved, *pairs], details=[PackGroupDetails(shards=details)])


def _count_examples(
    inputs: PackGroupInputs,
    lengths: ExampleLengths,
    plans: Sequence[SplitPlan],
    left: Sequence[LeftOutExample],
    *,
    stored_tokens: int,
) -> PackingCounts:
    """Count a group's own examples, and what of them is in no sequence; `stored_tokens` are in one."""
    own_examples = int(lengths.first_rows[inputs.own])
    is_rejected = [one.state == REJECTED for one in left]
    reasons = Counter(one.reason for one in compress(left, is_rejected))
    # Of those that are kept, only some tokens are left out.
    states = Counter(one.state for one in left if one.state not in (REJECTED, KEPT))
    splits = lengths.splits[:own_examples]
    # What is set aside is counted by the group that packs it.
    entered = splits != SURPLUS_CODE
    if inputs.mode is GroupMode.SET_ASIDE:
        entered &= splits != VALIDATION_CODE
    tails = sum(min(int(lengths.trained[one.number]), one.tokens) for one in left if one.state == "tail")
    counted = entered | (splits == SURPLUS_CODE)
    return PackingCounts(
        pack_groups=1,
        examples=int(counted.sum()),
        examples_by_split={split: int((splits[entered] == code).sum()) for code, split in enumerate(SPLITS)},
        entered_examples=int(entered.sum()),
        entered_trained_tokens=int(lengths.trained[:own_examples][entered].sum()),
        reasons=dict(sorted(reasons.items())),
        left_out=dict(sorted(states.items())),
        lost_trained_tokens=sum(plan.trained_lost for plan in plans) + tails,
        tokens_left_out=int(lengths.tokens[:own_examples][counted].sum()) - stored_tokens,
        sequences_by_fill=_count_fill(plans, inputs.rules.seq_len),
        unlimited_sequences=sum(_count_unlimited(inputs.rules, lengths, plan) for plan in plans),
        is_padded=inputs.pad_id is not None,
    )


def _count_fill(plans: Sequence[SplitPlan], seq_len: int) -> dict[str, int]:
    """Count sequences by the share of their capacity that holds tokens."""
    fills = np.concatenate([plan.plan.tokens for plan in plans] or [np.empty(0, np.int64)]) / seq_len
    counted, _ = np.histogram(fills, bins=FILL_BINS, range=(0.0, 1.0))
    return {name_fill_bin(number): count for number, count in enumerate(counted.tolist()) if count}


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
    if ROW_KINDS[inputs.rules.row_kind].fills_sequences and plan.trees is None:
        return max(1, SHARD_TOKENS // inputs.rules.seq_len)
    return max(1, SHARD_TOKENS * plan.sequences // max(1, int(plan.whole.tokens.sum())))


def _plan_group(inputs: PackGroupInputs, lengths: ExampleLengths, own: int, tokens: GroupTokens) -> list[SplitPlan]:
    if inputs.mode is GroupMode.HELD_OUT:
        assert inputs.planned is not None
        return [inputs.planned]
    plans: list[SplitPlan] = []
    for code, split in enumerate(SPLITS):
        if code == VALIDATION_CODE and inputs.mode is GroupMode.SET_ASIDE:
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
    values: dict[str, Numbers] = {}
    for name, kind in inputs.token_types.items():
        like = make_zeros(0, kind)
        values[name] = _make_array(scratch, name, like.dtype, inputs.tokens, *like.shape[1:])
    kind_columns = [field.name for field in ROW_KINDS[inputs.rules.row_kind].example_columns]
    kind_columns += ["domain"] if DOMAIN_FIELD in inputs.columns else []
    packing = inputs.rules.packing
    finds_cuts = packing.share_prefixes and ROW_KINDS[inputs.rules.row_kind].has_messages
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
        if cuts is not None:
            cuts[at:end] = find_cuts(table)
        for name, numbers in values.items():
            # Examples of a dataset without loss weights weigh 1 where the mask is true.
            held = "loss_mask" if name == WEIGHT_COLUMN and not inputs.stores_weights else name
            numbers[at:end] = flatten_lists(table.column(held)) if held in table.column_names else 0
        at = end
    assert at == inputs.tokens, (at, inputs.tokens)
    columns = pa.concat_tables(small)
    offsets = compute_offsets(columns.column("tokens").to_numpy())
    example_ids = columns.column("example_id").combine_chunks()
    of_kind = columns.select([*kind_columns, *inputs.fields.per_row]).combine_chunks()
    tokens = GroupTokens(ids, mask, values, offsets, example_ids, of_kind, cuts, packing.min_shared)
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
