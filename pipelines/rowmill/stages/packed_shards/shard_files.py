"""Files of shards: their rows, the columns of their segments, their lineage, and what was written, read back.

example   ids of chosen and rejected, end to end     side_lengths 3 4     sides 1 0
segments  0 1 2 │ 0 1 2 3                            an attention span each, always in one sequence

segment_lengths 3 2     seq_lengths 3 2     position_ids 0 1 2 0 1     or with open attention  5  and  0 1 2 3 4
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.core.arrays import (
    Bools,
    Ints,
    Numbers,
    Runs,
    Tokens,
    Weights,
    compute_offsets,
    flatten_lists,
    make_list_array,
    make_position_ids,
    read_lists,
    sum_by_span,
)
from rowmill.core.errors import DamagedFileError
from rowmill.core.segment_trees import make_tree_positions
from rowmill.core.storage import Store, digest_bytes
from rowmill.packing import pack_plan
from rowmill.packing.options import Packing
from rowmill.packing.pack_plan import ExampleSlices, PlannedTrees, SequencePlan
from rowmill.packing.prefix_trees import SortedPieces, sort_by_tokens
from rowmill.parts.functions import write_table
from rowmill.schema.examples import IGNORED_LABEL, WEIGHT_COLUMN
from rowmill.schema.indexed_shards import ExampleReferences, drop_tokens, list_token_columns, read_sequences
from rowmill.schema.manifest import File
from rowmill.schema.rows import DOMAIN_COLUMN, PADDING_COLUMN, PARENTS_COLUMN
from rowmill.shards import native
from rowmill.shards.native import count_padding_tokens
from rowmill.shards.prefix_trees import ExampleTrees, TargetRuns
from rowmill.shards.sequences import SEQUENCE_HASHES, tabulate_hashes

SIDE_LENGTHS = "side_lengths"


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
    return {"pair_intact": len(names) - 2 * len(whole), "prompt_identical": differ}


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

SEGMENTS = pa.schema(
    [
        pa.field("shard_row", pa.int32(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("record", pa.int64(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
    ]
)
"""Lineage next to each shard: which record of which file is in which segment. `record` counts from 1 in the file."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupTokens:
    """The examples of a group end to end: `offsets` int64[N + 1] cut their tokens.

    `weights` are None if the recipe has none; `fields` are its further numbers of each token, by name. The arrays may
    be mapped from a file.
    """

    ids: Tokens
    mask: Bools
    weights: Weights | None
    fields: Mapping[str, Numbers]
    offsets: Ints
    example_ids: pa.Array
    own: pa.Table
    """The columns that only examples of one kind of rows have, and the fields of rows; mostly without columns."""
    cuts: Bools | None = None
    """Whether a message does not go on after a token, for conversations that share prefixes."""
    min_shared: int = 0
    """The least tokens that examples share, if they do."""

    def weights_at(self, runs: Runs, targets: Bools) -> Weights | None:
        """Return the weights of some tokens, 0 on those that are no `targets`."""
        return None if self.weights is None else np.where(targets, runs.take(self.weights), np.float32(0))

    def fields_at(self, runs: Runs) -> dict[str, Numbers]:
        """Return the further numbers of some tokens."""
        return {name: runs.take(values) for name, values in self.fields.items()}

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
        }
        if self.weights is not None:
            columns[WEIGHT_COLUMN] = make_list_array(cut, runs.take(self.weights))
        columns |= {name: make_list_array(cut, runs.take(values)) for name, values in self.fields.items()}
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
            tokens.weights_at(runs, targets),
            tokens.fields_at(runs),
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
    """A shard, its lineage, and its counts."""

    shard: File
    segments: File
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class ShardWriter:
    """Writes the shards of one group into `folder`; `sources` maps parts to their file and first record."""

    store: Store
    folder: str
    tokens: GroupTokens
    dataset: str
    sources: Mapping[str, tuple[str, int]]
    card: Mapping[str, str]
    packing: Packing
    columns: Sequence[pa.Field]
    group_rows: int
    pad_id: int | None
    """None: the recipe does not pad segments."""
    files: Sequence[File]
    first_rows: Ints
    """The group's files of examples, and where the rows of each begin: int64[F + 1]."""

    def write_shard(self, cut: tuple[str, str, SequencePlan]) -> WrittenShard:
        """Write one shard of a split, by name, and its lineage; several may be written at once."""
        split, name, plan = cut
        table = self._gather(plan)
        if self.packing.layout == "copied":
            content = native.encode_native_shard(table, self.card, group_rows=self.group_rows)
        else:
            numbers = np.searchsorted(self.first_rows, plan.examples, "right") - 1
            used, files = np.unique(numbers, return_inverse=True)
            references = ExampleReferences(
                files=tuple(self.files[number] for number in used.tolist()),
                weighted=self.tokens.weights is not None,
                token_fields=tuple(
                    (name, str(values.dtype), values.shape[1] if values.ndim == 2 else 0)
                    for name, values in self.tokens.fields.items()
                ),
                ignore_token_id=self.packing.ignore_token_id,
                pad_id=self.pad_id,
            )
            names = list_token_columns(weighted=references.weighted, token_fields=self.tokens.fields)
            index = drop_tokens(table, files, plan.examples - self.first_rows[numbers], names)
            content = native.encode_native_shard(index, self.card, group_rows=self.group_rows, references=references)
        shard = self.store.put(f"{self.folder}/data/{split}/{name}.parquet", content, table.num_rows)
        example_ids = table.column("example_ids").combine_chunks().flatten()
        numbers, starts = np.arange(len(plan.examples)), plan.ranges[:, 0]
        if plan.trees is not None:
            # A segment has a line for each example that holds it.
            numbers, examples, before = ExampleTrees.of(table).list_memberships()
            example_ids = example_ids.take(pa.array(examples))
            starts = (plan.trees.leaves.ranges[examples, 0] + before).astype(np.int32)
        row_ids, parts, records = pc.extract_regex(example_ids, _EXAMPLE_ID_PATTERN).flatten()
        named = parts.dictionary_encode()
        found = [self.sources[part] for part in named.dictionary.to_pylist()]
        urls = pa.array([url for url, _ in found], pa.string())
        firsts = np.array([first for _, first in found], np.int64)
        rows = np.searchsorted(plan.sequence_offsets, numbers, "right") - 1
        columns = [
            pa.array(rows.astype(np.int32)), pa.array((numbers - plan.sequence_offsets[rows]).astype(np.int32)),
            example_ids, row_ids, urls.take(named.indices),
            pa.array(firsts[named.indices.to_numpy()] + records.cast(pa.int64()).to_numpy()),
            pa.array(starts), pa.array(plan.ranges[numbers, 1]), pa.repeat(pa.scalar(split), len(row_ids)),
        ]  # fmt: skip
        lineage = pa.Table.from_arrays(columns, schema=SEGMENTS)
        segments = write_table(self.store, f"{self.folder}/segments/{split}-{name}.arrow", lineage)
        facts = {
            "split": split,
            "sequences": table.num_rows,
            "segments": len(plan.examples),
            "tokens": int(plan.ranges[:, 1].sum()),
            "trained_tokens": int(table.column("trained_tokens").to_numpy().sum()),
            "padding": 0 if self.pad_id is None else count_padding_tokens(table),
        }
        if DOMAIN_COLUMN in table.column_names:
            domains = table.column(DOMAIN_COLUMN).combine_chunks().flatten().unique().drop_null()
            facts["domains"] = sorted(domains.to_pylist())
        return WrittenShard(shard, segments, facts)

    def _gather(self, plan: SequencePlan) -> pa.Table:
        if plan.trees is not None:
            ignored = self.packing.ignore_token_id
            return gather_trees(self.tokens, plan, plan.trees, dataset=self.dataset, ignore_token_id=ignored)
        tokens = self.tokens
        starts, lengths = plan.ranges[:, 0], plan.ranges[:, 1]
        runs = native.locate_tokens(tokens.offsets, plan.examples, starts, lengths)
        cut_ids = runs.take(tokens.ids)
        blocked = self.packing.block_cross_document_attention
        span_lengths, span_offsets = pack_plan.attention_spans(plan, block_cross_document_attention=blocked)
        ignored = self.packing.ignore_token_id
        trained = pack_plan.mark_targets(cut_ids, runs.take(tokens.mask), span_lengths, ignore_token_id=ignored)
        segments = native.Segments(
            ids=cut_ids,
            trained=trained,
            offsets=compute_offsets(lengths),
            sequence_offsets=plan.sequence_offsets,
            example_ids=tokens.example_ids.take(pa.array(plan.examples)),
            starts=starts,
            weights=tokens.weights_at(runs, trained),
            token_fields=tokens.fields_at(runs),
            columns={field.name: _take(tokens.own, field.name, plan).cast(field.type) for field in self.columns},
        )
        padding = None
        if self.pad_id is not None:
            multiple = self.packing.segment_multiple_of
            own = pack_plan.count_padding(plan, multiple, block_cross_document_attention=blocked)
            span_lengths = span_lengths + sum_by_span(own, plan.sequence_offsets, span_offsets)
            padding = native.Padding(own, self.pad_id)
        return native.make_shard_table(segments, span_lengths, span_offsets, dataset=self.dataset, padding=padding)


def gather_trees(
    tokens: GroupTokens, plan: SequencePlan, planned: PlannedTrees, *, dataset: str, ignore_token_id: int | None
) -> pa.Table:
    """Return planned sequences of shared segments, in which a token has the weights of all examples that train it."""
    leaves = planned.leaves
    ids = native.locate_tokens(tokens.offsets, plan.examples, plan.ranges[:, 0], plan.ranges[:, 1]).take(tokens.ids)
    # An example's first token follows no other one.
    begins = np.ones(len(leaves.examples), np.bool_)
    runs, bounds, _, targets = _take_targets(tokens, leaves.examples, leaves.ranges, begins, ignore_token_id)
    of_leaves = tokens.weights_at(runs, targets)
    assert of_leaves is not None, "a recipe that shares prefixes has weights"
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
        weights=weights,
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
