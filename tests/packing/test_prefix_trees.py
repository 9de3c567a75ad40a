"""Examples that share prefixes: trees hold every example, each shared token once, in no more sequences than before."""

from collections.abc import Sequence
from itertools import pairwise
from os.path import commonprefix

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core import segment_trees
from rowmill.core.arrays import Ints
from rowmill.packing.pack_plan import SequencePlan, keep_examples_whole, plan_best_fit
from rowmill.packing.prefix_trees import SortedPieces, plan_trees, split_trees

Example = tuple[int, ...]

# Few ids and borrowed beginnings, so that many examples share something.
EXAMPLES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple), min_size=1, max_size=40)


def sort_pieces(examples: Sequence[Example], least: int = 1) -> SortedPieces:
    order = sorted(range(len(examples)), key=lambda i: (examples[i], i))
    shared = [len(commonprefix([examples[a], examples[b]])) for a, b in pairwise(order)]
    return SortedPieces(np.array(order), np.array([n if n >= least else 0 for n in shared], np.int64))


def plan(examples: Sequence[Example], limit: int, least: int = 1) -> SequencePlan:
    pieces = keep_examples_whole(np.array([len(one) for one in examples]))
    return plan_trees(pieces, sort_pieces(examples, least), limit)


def read_segments(examples: Sequence[Example], planned: SequencePlan) -> list[Example]:
    return [
        examples[number][start : start + length]
        for number, (start, length) in zip(planned.examples.tolist(), planned.ranges.tolist(), strict=True)
    ]


def read_leaves(examples: Sequence[Example], planned: SequencePlan) -> list[tuple[int, Example]]:
    """Return the number and the tokens of every example, read along the parents of its last segment."""
    assert planned.trees is not None
    segments, found = read_segments(examples, planned), list[tuple[int, Example]]()
    leaves = planned.trees.leaves
    for sequence, begin in enumerate(planned.sequence_offsets[:-1].tolist()):
        for leaf in range(leaves.sequence_offsets[sequence], leaves.sequence_offsets[sequence + 1]):
            at, tokens = int(planned.trees.ends[leaf]), ()
            while at >= 0:
                tokens, at = (*segments[begin + at], *tokens), int(planned.trees.parents[begin + at])
            found.append((int(leaves.examples[leaf]), tokens))
    return found


def count_trie(examples: Sequence[Example], least: int) -> int:
    """Return the tokens of a trie in which examples share nothing below `least` tokens."""
    longer = [one for one in examples if len(one) >= least]
    prefixes = {one[:end] for one in longer for end in range(least, len(one) + 1)}
    beginnings = {one[:least] for one in longer}
    return len(prefixes) + (least - 1) * len(beginnings) + sum(len(one) for one in examples if len(one) < least)


def test_examples_of_the_docstring_are_four_segments() -> None:
    examples = [(0, 1, 2, 3, 4), (0, 1, 2, 5), (0, 1, 2, 5, 6, 7)]

    planned = plan(examples, 20)

    assert planned.trees is not None
    assert read_segments(examples, planned) == [(0, 1, 2), (3, 4), (5,), (6, 7)]
    assert planned.trees.parents.tolist() == [-1, 0, 0, 2]
    assert planned.trees.ends.tolist() == [1, 2, 3]
    lengths = planned.ranges[:, 1]
    assert segment_trees.make_tree_positions(planned.trees.parents, lengths).tolist() == [0, 1, 2, 3, 4, 3, 4, 5]
    assert segment_trees.find_predecessors(planned.trees.parents, lengths).tolist() == [0, 0, 1, 2, 3, 2, 5, 6]


@given(EXAMPLES, st.integers(1, 4))
def test_leaves_are_the_examples_and_tokens_those_of_the_trie(examples: list[Example], least: int) -> None:
    planned = plan(examples, 10_000, least)

    assert sorted(read_leaves(examples, planned)) == list(enumerate(examples))
    assert int(planned.tokens.sum()) == count_trie(examples, least)
    assert planned.sequences == 1


@given(EXAMPLES, st.integers(12, 40))
def test_split_trees_hold_every_example_within_the_limit_in_no_more_sequences(
    examples: list[Example], limit: int
) -> None:
    planned = plan(examples, limit)

    assert sorted(read_leaves(examples, planned)) == list(enumerate(examples))
    assert int(planned.tokens.max()) <= limit
    assert planned.sequences <= plan_best_fit(np.array([len(one) for one in examples]), limit, None).sequences
    assert (planned.ranges[:, 1] > 0).all()


def test_trees_are_split_where_they_fill_sequences_worse_and_their_prefix_copied() -> None:
    # Two examples of 30 tokens with 9 in common: a tree of 51 has no second one beside it, three examples have.
    examples = [(tree, *range(8), branch, *range(20)) for tree in range(6) for branch in (100, 200)]

    whole, limited = plan(examples, 102), plan(examples, 100)

    assert (whole.sequences, int(whole.tokens.sum())) == (3, 6 * 51)
    assert limited.sequences == 4 == plan_best_fit(np.full(12, 30), 100, None).sequences
    assert sorted(read_leaves(examples, limited)) == list(enumerate(examples))

    lengths, before = np.array([10, 8, 8, 8, 5]), np.array([0, 6, 6, 6, 0])

    assert split_trees(lengths, before, 12).tolist() == [0, 6, 0, 6, 0]
    assert split_trees(lengths, before, 16).tolist() == [0, 6, 6, 6, 0]
    assert split_trees(lengths, before, 3).tolist() == [0, 0, 0, 0, 0]


@given(EXAMPLES)
def test_selected_and_renumbered_sequences_keep_their_leaves(examples: list[Example]) -> None:
    planned = plan(examples, 14).renumber(np.arange(len(examples)) + 3)
    shifted = [(), (), (), *examples]

    found = [
        leaf for first in range(planned.sequences) for leaf in read_leaves(shifted, planned.select(first, first + 1))
    ]

    assert found == read_leaves(shifted, planned)


@given(EXAMPLES)
def test_mask_allows_the_path_of_each_token_and_nothing_else(examples: list[Example]) -> None:
    planned = plan(examples, 10_000)
    assert planned.trees is not None
    parents, lengths = planned.trees.parents, planned.ranges[:, 1]
    before = segment_trees.find_predecessors(parents, lengths)

    allowed = segment_trees.mask_tree(segment_trees.find_token_subtree_ends(parents, lengths))

    assert [np.flatnonzero(row).tolist() for row in allowed] == [list_path(before, at) for at in range(len(before))]
    positions = segment_trees.make_tree_positions(parents, lengths)
    assert positions.tolist() == [len(list_path(before, at)) - 1 for at in range(len(before))]


def list_path(before: Ints, at: int) -> list[int]:
    path = [at]
    while before[at] != at:
        at = int(before[at])
        path.insert(0, at)
    return path
