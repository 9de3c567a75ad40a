"""Trees of segments: examples that begin with the same tokens share segments, and each segment continues its parent.

    examples   a b c d e     segments   a b c │ d e │ f │ g h     depth first: all that continue a segment follow it
               a b c f                    0      1    2    3
               a b c f g h   parents     -1      0    0    2
                             positions  0 1 2   3 4   3   4 5
    examples end with segments 1, 2 and 3

         query  a b c d e f g h      a token attends to those before it on its path, itself among them:
    key a       x x x x x x x x      keys up to the query whose segment has not ended, which a subtree's end says
        b         x x x x x x x
        c           x x x x x x
        d             x x . . .
        e               x . . .
        f                 x x x
        g                   x x
        h                     x

Segments without a parent have -1, so that segments that share nothing are trees of one each.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Integers, Ints, compute_offsets, expand_ranges


def sum_over_ancestors(parents: Integers, values: Integers) -> Ints:
    """Return for each segment the sum of the values of those that it continues, itself not among them: int64[K]."""
    root = len(parents)
    above = np.append(np.where(parents < 0, root, parents), root).astype(np.int64)
    sums = np.append(values, 0).astype(np.int64)[above]
    # Of 2^i ancestors after i rounds.
    while (above != root).any():
        sums += sums[above]
        above = above[above]
    return sums[:-1]


def list_paths(parents: Integers, ends: Integers) -> tuple[Ints, Ints]:
    """Return the segments from the root to each of some segments, joined, and the offsets of the M paths: int64[M + 1].

    parents -1 0 0 2, ends 1 3 ─► 0 1 │ 0 2 3
    """
    depths = sum_over_ancestors(parents, np.ones(len(parents), np.int64))
    offsets = compute_offsets(depths[ends] + 1)
    paths = np.empty(int(offsets[-1]), np.int64)
    segments, places = ends.astype(np.int64), offsets[1:] - 1
    while len(segments):
        paths[places] = segments
        above = parents[segments].astype(np.int64)
        segments, places = above[above >= 0], places[above >= 0] - 1
    return paths, offsets


def find_subtree_ends(parents: Integers) -> Ints:
    """Return for each segment the number of the first one after it that does not continue it: int64[K]."""
    numbers = np.arange(len(parents))
    # A segment is on the paths of all that continue it, which follow it.
    return numbers + np.bincount(list_paths(parents, numbers)[0], minlength=len(parents))


def make_tree_positions(parents: Integers, lengths: Integers) -> Ints:
    """Return the position of each token: that of its parent's last token is continued, int64[T]."""
    return expand_ranges(sum_over_ancestors(parents, lengths), lengths)


def find_predecessors(parents: Integers, lengths: Integers) -> Ints:
    """Return for each token the one before it on its path, int64[T]; a root's first token has itself.

    The logits at a token's predecessor predict it: lengths 2 1 1, parents -1 0 0 ─► 0 0 1 1
    """
    offsets = compute_offsets(lengths)
    before = np.arange(int(offsets[-1])) - 1
    is_root = parents < 0
    before[offsets[:-1]] = np.where(is_root, offsets[:-1], offsets[np.where(is_root, 0, parents) + 1] - 1)
    return before


def find_token_subtree_ends(parents: Integers, lengths: Integers) -> Ints:
    """Return for each token the number of the first one after it that is not below its segment: int64[T].

    Query q attends to key k if `k <= q < ends[k]`.
    """
    return np.repeat(compute_offsets(lengths)[find_subtree_ends(parents)], lengths)


def list_path_tokens(parents: Integers, lengths: Integers, ends: Integers) -> tuple[Ints, Ints]:
    """Return the tokens on the paths to some segments, joined, and the offsets of the M paths in them: int64[M + 1]."""
    segments, offsets = list_paths(parents, ends)
    tokens = expand_ranges(compute_offsets(lengths)[segments], lengths[segments])
    return tokens, compute_offsets(lengths[segments])[offsets]


def mask_tree(subtree_ends: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which keys each query attends to, bool[…, T, T], from the subtree ends of tokens, […, T]."""
    places = np.arange(subtree_ends.shape[-1])
    return (places <= places[:, None]) & (places[:, None] < subtree_ends[..., None, :])
