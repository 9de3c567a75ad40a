"""Plan examples that begin with the same tokens as trees, in which every shared token stands once.

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

from rowmill.core.arrays import Ints, compute_offsets, expand_ranges, find_distinct
from rowmill.packing.layout import PlannedTrees, SequencePlan
from rowmill.packing.pack_plan import ExampleSlices, count_sequences, plan_best_fit

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
    # A piece continues what the last one before it added that had less in common with its predecessor.
    owners = _find_owners(before)[branches]
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


def _find_owners(before: Ints) -> Ints:
    """Return for each piece the last one before it that shares less with its own predecessor; 0 at the latest.

    before 0 3 4 3 ─► - 0 1 0
    """
    owners = np.arange(len(before)) - 1
    active = np.flatnonzero(before)
    while len(active):
        # All between a piece and its owner share at least as much: the owner of an owner is skipped to at once.
        active = active[before[owners[active]] >= before[active]]
        owners[active] = owners[owners[active]]
    return owners
