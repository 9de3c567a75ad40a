"""Examples that begin with the same tokens: found, sorted, and planned as trees, in which a shared token stands once.

    spans    template │ user 0 │ template │ assistant 1 │ template │ user 2 │ …
    cuts     . . . .  .          . . . . .               . . . .  .              not within a message

A cut between two messages may be anywhere in what the template prints there, so that an example that ends after an
answer is a prefix of one that goes on. Examples are sorted by their bytes, in which equal beginnings are neighbors.

    sorted by their tokens    tokens   shared with the next      stored depth first
    a b c d e                      5   3                         a b c d e
    a b c f                        4   4                               f
    a b c f g h                    6   0                                 g h
    x y                            2                             x y

Of each example only what it does not share with the one before it is stored, cut where later ones branch off. So a tree
is a run of sorted examples, and splitting a tree means that some example shares nothing with the one before it.

Best fit packs trees whole. Larger pieces fill sequences worse, so trees are split into smaller ones if the examples
alone need fewer sequences.
"""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.core.arrays import Bools, Ints, Tokens, compute_offsets, expand_ranges, find_distinct, flatten_lists
from rowmill.packing.pack_plan import ExampleSlices, PlannedTrees, SequencePlan, count_sequences, plan_best_fit
from rowmill.schema.examples import SPAN_KINDS

MAX_HALVINGS = 5
"""How often the size of trees is halved before each example is a tree by itself."""


@dataclass(frozen=True, slots=True, eq=False)
class SortedPieces:
    """P pieces of examples in the order of their tokens, a prefix before what continues it.

    `order` int64[P] are their numbers; `shared` int64[P - 1] are how many tokens each has in common with the next: 0,
    or a number of tokens at which both may be cut.
    """

    order: Ints
    shared: Ints


def plan_trees(pieces: ExampleSlices, by_tokens: SortedPieces, limit: int) -> SequencePlan:
    """Plan pieces of examples into sequences of at most `limit` tokens, in which those that begin alike are trees.

    A tree is split where it would exceed a limit, and its prefix is in each of the parts. There are never more
    sequences than `plan_best_fit` makes of the pieces.
    """
    if not len(pieces.lengths):
        plan = plan_best_fit(pieces.lengths, limit, None)
        return replace(plan, trees=PlannedTrees(np.empty(0, np.int32), plan, np.empty(0, np.int32)))
    lengths = pieces.lengths[by_tokens.order].astype(np.int64)
    # What each piece has in common with the one before it.
    before = np.concatenate((np.zeros(1, np.int64), by_tokens.shared))
    most = count_sequences(pieces.lengths, limit, None)
    for size in (*(limit >> halvings for halvings in range(MAX_HALVINGS + 1)), 0):
        split = split_trees(lengths, before, size)
        starts = np.flatnonzero(split == 0)
        # Trees in the order of their lowest piece, as examples are without sharing.
        by_lowest = np.argsort(np.minimum.reduceat(by_tokens.order, starts))
        sizes = np.add.reduceat(lengths - split, starts)[by_lowest]
        if count_sequences(sizes, limit, None) <= most:
            break
    plan = plan_best_fit(sizes, limit, None)
    return _lay_out_trees(pieces, by_tokens.order, lengths, split, starts, plan, by_lowest[plan.examples])


def split_trees(lengths: Ints, before: Ints, limit: int) -> Ints:
    """Return what each piece shares with the one before it in trees of at most `limit` tokens, or of one piece.

    Pieces are added to a tree in their order as long as it has room for them.
    """
    if not limit:
        return np.zeros_like(before)
    ends = np.cumsum(lengths - before)
    starts = np.flatnonzero(before == 0)
    borders = np.append(starts[1:], len(lengths))
    is_large = (np.diff(ends[borders - 1], prepend=0) > limit) & (borders - starts > 1)
    split = before.copy()
    for start, border in zip(starts[is_large].tolist(), borders[is_large].tolist(), strict=True):
        at = start
        while True:
            fitting = int(np.searchsorted(ends, ends[at] + limit - lengths[at], "right"))
            at = max(fitting, at + 1)
            if at >= border:
                break
            split[at] = 0
    return split


def _lay_out_trees(
    pieces: ExampleSlices,
    order: Ints,
    lengths: Ints,
    before: Ints,
    starts: Ints,
    plan: SequencePlan,
    trees: Ints,
) -> SequencePlan:
    """Return the segments of all trees in the order of `plan`, whose k-th one is tree `trees[k]`.

    Piece i adds the tokens `[before[i], lengths[i])` to its tree; trees begin at the pieces `starts`.
    """
    added = lengths - before
    # Where the tokens that each piece adds are, if the trees are stored one after the other.
    firsts = np.cumsum(added) - added
    branches = np.flatnonzero(before)
    # A piece continues what the last one before it added that had less in common with its predecessor:
    # before 0 3 4 3 ─► - 0 1 0
    owners, active = np.arange(len(before)) - 1, branches
    while len(active):
        # All between a piece and its owner share at least as much: the owner of an owner is skipped to at once.
        active = active[before[owners[active]] >= before[active]]
        owners[active] = owners[owners[active]]
    owners = owners[branches]
    borders = firsts[owners] + before[branches] - before[owners]
    ends = find_distinct(np.concatenate((firsts + added, borders)))
    ends = ends[ends > 0]
    segment_firsts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))[: len(ends)]
    # Of several pieces with the same first token, the last one adds it: others add none.
    piece_of = np.searchsorted(firsts, segment_firsts, "right") - 1
    parents = np.where(segment_firsts == firsts[piece_of], -1, np.arange(len(ends)) - 1)
    continued = np.full(len(lengths), -1, np.int64)
    continued[branches] = np.searchsorted(ends, borders)
    is_first = parents < 0
    parents[is_first] = continued[piece_of[is_first]]
    last = np.where(added > 0, np.searchsorted(ends, firsts + added), continued)

    tree_segments = np.append(np.searchsorted(segment_firsts, firsts[starts]), len(ends))
    tree_pieces = np.append(starts, len(lengths))
    counts, piece_counts = np.diff(tree_segments)[trees], np.diff(tree_pieces)[trees]
    chosen, chosen_pieces = (
        expand_ranges(tree_segments[trees], counts),
        expand_ranges(tree_pieces[trees], piece_counts),
    )
    # Segments before the first one of each tree, in its sequence.
    sequence_offsets = compute_offsets(counts)[plan.sequence_offsets]
    per_sequence = np.diff(plan.sequence_offsets)
    shift = compute_offsets(counts)[:-1] - np.repeat(sequence_offsets[:-1], per_sequence) - tree_segments[trees]
    parents = np.where(parents[chosen] < 0, -1, parents[chosen] + np.repeat(shift, counts)).astype(np.int32)
    owner = piece_of[chosen]
    depths = before[owner] + segment_firsts[chosen] - firsts[owner]
    numbers, leaf_numbers = order[owner], order[chosen_pieces]
    leaf_ranges = np.stack((pieces.starts[leaf_numbers], pieces.lengths[leaf_numbers]), axis=1)
    ranges = np.stack((pieces.starts[numbers] + depths, (ends - segment_firsts)[chosen]), axis=1)
    leaves = SequencePlan(
        compute_offsets(piece_counts)[plan.sequence_offsets],
        pieces.examples[leaf_numbers],
        leaf_ranges.astype(np.int32),
    )
    leaf_ends = (last[chosen_pieces] + np.repeat(shift, piece_counts)).astype(np.int32)
    planned = PlannedTrees(parents, leaves, leaf_ends)
    return SequencePlan(sequence_offsets, pieces.examples[numbers], ranges.astype(np.int32), planned)


# ── Sorting examples by their tokens ──


SPAN_COLUMNS = ("span_starts", "span_messages", "span_kinds")

COMPARED_TOKENS = 1 << 20
"""Tokens of neighbors that are compared at a time."""

_CUT_BIT = np.int32(1 << 30)
"""Set in the code of a token after which its example may be cut; ids are below it."""

_TEMPLATE = SPAN_KINDS.index("template")


def find_cuts(examples: pa.Table) -> Bools:
    """Return for each token of conversations, joined, whether a message does not go on after it: bool[T]."""
    starts, messages, kinds = (flatten_lists(examples.column(name)) for name in SPAN_COLUMNS)
    spans = compute_offsets(examples.column("span_starts").combine_chunks().value_lengths().to_numpy())
    tokens = compute_offsets(examples.column("tokens").to_numpy())
    per_example = np.diff(spans)
    begins = starts + np.repeat(tokens[:-1], per_example)
    lengths = np.diff(begins, append=tokens[-1])
    examples_of, numbers = np.repeat(np.arange(len(per_example)), per_example), np.arange(len(starts))
    is_own = (kinds != _TEMPLATE) & (lengths > 0)
    # The nearest span with text of the row, up to each span and from it on; in the same example or not.
    last = np.maximum.accumulate(np.where(is_own, numbers, -1))
    following = np.minimum.accumulate(np.where(is_own, numbers, len(numbers))[::-1])[::-1]

    def is_cut(before: Ints, after: Ints, at: Ints) -> Bools:
        """Return whether text of two messages, or of none on a side, is at the spans around a place of `at`."""
        inside = (before >= 0) & (after < len(numbers))
        before, after = np.where(inside, before, 0), np.where(inside, after, 0)
        same = (examples_of[before] == examples_of[at]) & (examples_of[after] == examples_of[at])
        return ~(inside & same & (messages[before] == messages[after]))

    cuts = np.repeat(~is_own & is_cut(last, following, numbers), lengths)
    own = numbers[is_own]
    after_own = np.append(following[1:], len(numbers))[own]
    cuts[begins[own] + lengths[own] - 1] = is_cut(own, after_own, own)
    cuts[tokens[1:] - 1] = True
    return cuts


def sort_by_tokens(ids: Tokens, cuts: Bools | None, offsets: Ints, *, min_shared: int) -> SortedPieces:
    """Sort pieces by their tokens, and return how many of these each shares with the next: 0, or at least `min_shared`.

    `offsets` int64[P + 1] cut `ids` int32[T] into pieces. With `cuts` bool[T], pieces share tokens as far as these and
    the places at which they may be cut are equal, up to such a place.
    """
    codes = np.ascontiguousarray(ids, np.int32)
    if cuts is not None:
        codes = codes | np.where(cuts, _CUT_BIT, np.int32(0))
        codes[offsets[1:] - 1] |= _CUT_BIT
    content = pa.py_buffer(codes.view(np.uint8))
    pieces = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(4 * offsets), content]
    )
    order: Ints = pc.array_sort_indices(pieces).to_numpy().astype(np.int64)
    lengths = np.diff(offsets)[order]
    most, begins = np.minimum(lengths[:-1], lengths[1:]), offsets[order]
    shared = np.zeros(len(most), np.int64)
    active, known, width = np.flatnonzero(most >= min_shared), 0, min_shared
    while len(active):
        # Twice as many tokens each time, of the pairs that have not differed: a pair costs what it has in common.
        counts = np.minimum(most[active] - known, width)
        borders = np.searchsorted(np.cumsum(counts), np.arange(COMPARED_TOKENS, int(counts.sum()), COMPARED_TOKENS))
        # The place of the first difference of each pair, or how many tokens of it were compared.
        found = np.empty_like(active)
        for run in np.split(np.arange(len(active)), borders):
            if len(run):
                some, lengths_of = active[run], counts[run]
                firsts, others = (expand_ranges(begins[some + side] + known, lengths_of) for side in (0, 1))
                places = expand_ranges(np.zeros_like(lengths_of), lengths_of)
                first_differences = np.where(codes[firsts] != codes[others], places, np.repeat(lengths_of, lengths_of))
                found[run] = np.minimum.reduceat(first_differences, np.cumsum(lengths_of) - lengths_of)
        shared[active] = known + found
        active = active[(found == width) & (most[active] > known + width)]
        known, width = known + width, 2 * width
    if cuts is not None:
        places, firsts = np.flatnonzero(codes & _CUT_BIT), begins[:-1]
        nearest = np.searchsorted(places, firsts + shared) - 1
        # Of the first piece, none may be before; of others, the end of the piece before.
        shared = np.where((shared > 0) & (nearest >= 0), np.maximum(places[nearest] + 1 - firsts, 0), 0)
    return SortedPieces(order, np.where(shared < min_shared, 0, shared))
