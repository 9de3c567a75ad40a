"""Rows of shards whose examples share segments: what each example trains, and what that makes of the stored tokens.

    segments         a b c │ d e │ f │ g h      segment_parents -1 0 0 2
    examples         abcde trains d e, abcf trains f, abcfgh trains g and h twice as much
    example_ends     1 2 3
    target_examples  0  1  2        target_starts  3 3 4     target_lengths  2 1 2     target_weights  1 1 2
    loss_weights     0 0 0   1 1   1   2 2

A token that several examples train has the sum of their weights, so that its loss counts as often as it would in
examples by themselves. What each of them trains cannot be told from the sums, so it is stored as runs.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rowmill.core import segment_trees
from rowmill.core.arrays import (
    Bools,
    Ints,
    Tokens,
    Weights,
    compute_offsets,
    expand_ranges,
    flatten_lists,
    make_list_array,
    mark_changes,
    read_lists,
)
from rowmill.schema.rows import TREE_COLUMNS


@dataclass(frozen=True, slots=True, eq=False)
class TargetRuns:
    """The targets of M examples: run r is `lengths[r]` tokens from `starts[r]` on, each with `weights[r]`.

    `offsets` int64[M + 1] cut the R runs into examples; starts and lengths are int32[R], weights float32[R].
    """

    offsets: Ints
    starts: Tokens
    lengths: Tokens
    weights: Weights

    @classmethod
    def of(cls, targets: Bools, weights: Weights, offsets: Ints) -> "TargetRuns":
        """Find the runs of equal weight among the targets of examples, of which `offsets` int64[M + 1] cut the tokens.

        No example is empty.
        """
        begins = mark_changes(targets, weights)
        begins[offsets[:-1]] = True
        firsts = np.flatnonzero(begins)
        lengths = np.diff(firsts, append=len(targets))
        firsts, lengths = firsts[targets[firsts]], lengths[targets[firsts]]
        examples = np.searchsorted(offsets, firsts, "right") - 1
        return cls(
            compute_offsets(np.bincount(examples, minlength=len(offsets) - 1)),
            (firsts - offsets[examples]).astype(np.int32),
            lengths.astype(np.int32),
            weights[firsts],
        )


@dataclass(frozen=True, slots=True, eq=False)
class ExampleTrees:
    """S sequences of K segments that M examples share.

    lengths, parents int32[K], parents in the sequence · segment_offsets int64[S + 1] · ends int32[M], the segment of
    the sequence that each example ends with · example_offsets int64[S + 1]
    """

    lengths: Tokens
    parents: Tokens
    segment_offsets: Ints
    ends: Tokens
    example_offsets: Ints
    targets: TargetRuns

    @classmethod
    def of(cls, table: pa.Table) -> "ExampleTrees":
        """Read them from rows of a shard."""
        lengths, segment_offsets = read_lists(table.column("segment_lengths"))
        ends, example_offsets = read_lists(table.column("example_ends"))
        of_runs, run_offsets = read_lists(table.column("target_examples"))
        # Runs number the examples of their sequence.
        examples = of_runs + np.repeat(example_offsets[:-1], np.diff(run_offsets))
        starts, run_lengths, weights, parents = (
            flatten_lists(table.column(name))
            for name in ("target_starts", "target_lengths", "target_weights", "segment_parents")
        )
        counts = np.bincount(examples, minlength=len(ends))
        targets = TargetRuns(compute_offsets(counts), starts, run_lengths, weights)
        return cls(lengths, parents, segment_offsets, ends, example_offsets, targets)

    def to_columns(self) -> dict[str, pa.ListArray]:
        """Return the columns of `rows.TREE_FIELDS`, a list for each sequence."""
        runs = np.diff(self.targets.offsets)
        run_offsets = self.targets.offsets[self.example_offsets]
        numbers = np.arange(len(self.ends)) - np.repeat(self.example_offsets[:-1], np.diff(self.example_offsets))
        columns = (
            make_list_array(self.segment_offsets, self.parents),
            make_list_array(self.example_offsets, self.ends),
            make_list_array(run_offsets, np.repeat(numbers, runs).astype(np.int32)),
            make_list_array(run_offsets, self.targets.starts),
            make_list_array(run_offsets, self.targets.lengths),
            make_list_array(run_offsets, self.targets.weights),
        )
        return dict(zip(TREE_COLUMNS, columns, strict=True))

    @property
    def joined_parents(self) -> Ints:
        """The parents among the segments of all sequences, int64[K]."""
        firsts = np.repeat(self.segment_offsets[:-1], np.diff(self.segment_offsets))
        return np.where(self.parents < 0, -1, self.parents + firsts)

    @property
    def joined_ends(self) -> Ints:
        """The last segment of each example among those of all sequences, int64[M]."""
        return self.ends + np.repeat(self.segment_offsets[:-1], np.diff(self.example_offsets))

    def list_example_tokens(self) -> tuple[Ints, Ints]:
        """Return the places of each example's tokens among the stored ones, joined, and offsets int64[M + 1]."""
        return segment_trees.list_path_tokens(self.joined_parents, self.lengths, self.joined_ends)

    def list_memberships(self) -> tuple[Ints, Ints, Ints]:
        """Return every example of every segment, by segment: segment and example, and the example's tokens before it.

        Segments and examples are numbered over all sequences.
        """
        parents = self.joined_parents
        paths, offsets = segment_trees.list_paths(parents, self.joined_ends)
        by_segment = np.argsort(paths, kind="stable")
        segments = paths[by_segment]
        examples = np.repeat(np.arange(len(self.ends)), np.diff(offsets))[by_segment]
        return segments, examples, segment_trees.sum_over_ancestors(parents, self.lengths)[segments]

    def list_target_tokens(self, offsets: Ints) -> tuple[Ints, Weights]:
        """Return the places of all targets among the joined tokens of examples, cut by `offsets`, and their weights."""
        targets = self.targets
        firsts = np.repeat(offsets[:-1], np.diff(targets.offsets)) + targets.starts
        return expand_ranges(firsts, targets.lengths), np.repeat(targets.weights, targets.lengths)

    def sum_targets(self) -> tuple[Bools, Weights]:
        """Return whether an example trains each stored token, and the sum of its weights: bool[T], float32[T]."""
        places, offsets = self.list_example_tokens()
        targets, weights = self.list_target_tokens(offsets)
        count = int(self.lengths.sum(dtype=np.int64))
        trained = np.zeros(count, np.bool_)
        trained[places[targets]] = True
        sums = np.bincount(places[targets], weights=weights, minlength=count)
        return trained, sums.astype(np.float32)
