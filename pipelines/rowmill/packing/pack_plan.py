"""Plan which examples share a sequence, from their lengths alone, and lay out the planned sequences.

    parts      p0 p1 p2 │ p3 p4 p5 p6 │ p7 p8      a group is a run of whole parts, for all splits
                     └ its digest ends a group
    lengths 4 8 1 4 2 1, limit 10 ─ best fit ─► sequence_offsets 0      4   6
                                                examples         0 2 3 5 1 4       4+1+4+1, 8+2
    position_ids                                0 1 2 3 0 0 1 2 3 0 │ 0 1 2 …

Best fit decreasing works on the histogram of lengths: all bins with the same free space (and segments left) are filled
in one move, so millions of examples take thousands of moves, and the plan is that of a loop over examples. Rejected:
packing in shards or with shuffled look-ahead windows, which leaves 10 to 25 % of every sequence empty.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, Integers, expand_ranges
from rowmill.core.errors import ContextOverflowError
from rowmill.packing.options import Strategy
from rowmill.schema.rows import SliceStrategy

# ── The plan ──


@dataclass(frozen=True, slots=True, eq=False)
class SequencePlan:
    """The tokens of every sequence, and the examples that they come from.

    Sequence s has segments `[sequence_offsets[s], sequence_offsets[s + 1])`; segment k is tokens
    `[ranges[k, 0], ranges[k, 0] + ranges[k, 1])` of example `examples[k]`. Segments are sorted by example number,
    sequences by their first example.

    sequence_offsets int64[S + 1] · examples int64[K] · ranges int32[K, 2] (start, length in tokens)

    If examples share prefixes (`prefix_trees.py`), a segment is a stretch of an example that others may share,
    `examples[k]` the first of them; segments are depth first, trees sorted by their lowest example.
    """

    sequence_offsets: NDArray[np.int64]
    examples: NDArray[np.int64]
    ranges: NDArray[np.int32]
    trees: "PlannedTrees | None" = None

    @property
    def sequences(self) -> int:
        return len(self.sequence_offsets) - 1

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens of each sequence, int64[S]."""
        before = np.concatenate([[0], np.cumsum(self.ranges[:, 1], dtype=np.int64)])
        return np.diff(before[self.sequence_offsets])

    @property
    def whole(self) -> "SequencePlan":
        """The same sequences with a segment for each example, which shares no token."""
        return self if self.trees is None else self.trees.leaves

    def select(self, first: int, end: int) -> "SequencePlan":
        """Return the sequences `[first, end)`."""
        offsets = self.sequence_offsets[first : end + 1]
        begin, last = int(offsets[0]), int(offsets[-1])
        trees = None if self.trees is None else self.trees.select(first, end, slice(begin, last))
        return SequencePlan(offsets - begin, self.examples[begin:last], self.ranges[begin:last], trees)

    def renumber(self, numbers: NDArray[np.int64]) -> "SequencePlan":
        """Return the plan with example `numbers[i]` in the place of example i."""
        trees = None if self.trees is None else replace(self.trees, leaves=self.trees.leaves.renumber(numbers))
        return replace(self, examples=numbers[self.examples], trees=trees)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTrees:
    """Where K segments continue others, and where the examples of the same sequences, the leaves, end.

    `parents` int32[K] are segments of the same sequence, -1 for none. `leaves` has a segment for each of M examples, or
    piece of one, and its own order of them; `ends` int32[M] are the segments that they end with, within their sequence.
    """

    parents: NDArray[np.int32]
    leaves: SequencePlan
    ends: NDArray[np.int32]

    def select(self, first: int, end: int, segments: slice) -> "PlannedTrees":
        """Return those of the sequences `[first, end)`, which have these segments."""
        offsets = self.leaves.sequence_offsets
        return PlannedTrees(
            self.parents[segments], self.leaves.select(first, end), self.ends[offsets[first] : offsets[end]]
        )


# ── Arrays of planned sequences ──


def attention_spans(
    plan: SequencePlan, *, block_cross_document_attention: bool
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return span lengths int32[Q] (`seq_lengths` of all sequences, concatenated) and their offsets int64[S + 1].

    With blocked attention every segment is a span, with open attention every sequence. Padding is not included.
    """
    if block_cross_document_attention:
        return plan.ranges[:, 1].copy(), plan.sequence_offsets
    return plan.tokens.astype(np.int32), np.arange(plan.sequences + 1, dtype=np.int64)


def count_padding(plan: SequencePlan, multiple: int, *, block_cross_document_attention: bool) -> NDArray[np.int32]:
    """Return the pad tokens after each segment, int32[K], that make its attention span a multiple of `multiple`.

    Multiple of 4, lengths 3 5 ─► 1 3; with open attention, where only the sequence counts, 0 0.
    """
    if block_cross_document_attention:
        return -plan.ranges[:, 1] % np.int32(multiple)
    padding = np.zeros(len(plan.ranges), np.int32)
    padding[plan.sequence_offsets[1:] - 1] = -plan.tokens % multiple
    return padding


def round_up(lengths: Integers, multiple: int) -> NDArray[np.int64]:
    """Return lengths rounded up to multiples: multiple of 4, lengths 3 5 8 ─► 4 8 8."""
    return -(-lengths.astype(np.int64) // multiple) * multiple


def measure_padded_room(lengths: Integers, seq_len: int, multiple: int) -> tuple[Integers, int]:
    """Return the room that segments take in sequences of some length, and what a sequence holds, padding included.

    For estimates: a length that is no multiple holds as many whole multiples as fit, or one.

    Multiple of 4, lengths 3 5 6 in 10 ─► 4 8 8 in 8
    """
    capacity = max(seq_len // multiple, 1) * multiple
    # Without padding no copy of eight bytes a length is made.
    return np.minimum(lengths if multiple == 1 else round_up(lengths, multiple), capacity), capacity


def mark_targets(
    input_ids: NDArray[np.int32], loss_mask: Bools, span_lengths: Integers, *, ignore_token_id: int | None
) -> Bools:
    """Return which positions are targets: those of the mask except the first position of each span.

    This defines the loss: position i predicts i + 1 iff both are in one attention span and `loss_mask[i + 1]`, and the
    token there is not `ignore_token_id`. Masks 0 1 1 | 1 1 ─► 0 1 1 0 1.
    """
    predicted = loss_mask.copy()
    ends = np.cumsum(span_lengths, dtype=np.int64)
    predicted[ends - span_lengths] = False
    if ignore_token_id is not None:
        predicted &= input_ids != ignore_token_id
    return predicted


GROUP_SEQUENCES: Final = 2048
"""Sequences of a group by default. With log-normal lengths it loses 0.04 % of the tokens per sequence against one plan
over 512 Mi tokens, at 4,096 and at 32,768; 1,024 sequences lose 0.05 % at 262,144."""

LEAST_GROUP_TOKENS: Final = 8 << 20
MOST_GROUP_TOKENS: Final = 256 << 20
"""Limits of the default: smaller tasks cost more to start than they save, larger ones need more scratch space."""


def choose_group_tokens(seq_len: int, chosen: int | None) -> int:
    """Return the target size of a group in tokens; it depends on the recipe alone."""
    return chosen or min(max(GROUP_SEQUENCES * seq_len, LEAST_GROUP_TOKENS), MOST_GROUP_TOKENS)


def cut_groups(tokens: Sequence[int], digests: Sequence[str], target: int) -> list[tuple[int, int]]:
    """Cut parts into groups of about `target` tokens; return the first part and the end of each.

    `tokens` and `digests` (at least 16 hexadecimal digits) have one entry per part. A group has at least half of the
    target, except the last one, and at most twice the target, unless it is a single part. Whether it ends after a part
    follows from the part's digest, so appended parts change the last group, and a changed part the groups around it.
    Rejected: cutting every `target` tokens, where one inserted part moves all later borders.
    """
    groups: list[tuple[int, int]] = []
    first, size = 0, 0
    for number, (part_tokens, digest) in enumerate(zip(tokens, digests, strict=True)):
        if number > first and size + part_tokens > 2 * target:
            groups.append((first, number))
            first, size = number, 0
        size += part_tokens
        # The mean size of a group is the target: half of it, and then half of it on average until a part ends it.
        if 2 * size >= target and int(digest[:16], 16) * target < part_tokens << 65:
            groups.append((first, number + 1))
            first, size = number + 1, 0
    return [*groups, (first, len(tokens))] if first < len(tokens) else groups


@dataclass(frozen=True, slots=True)
class StreamStretch:
    """The tokens of one split that a group's sequences hold if documents are joined, counted from its first token.

    Its sequences hold `[begin, end)`; tokens before `begin` are in the last sequence of an earlier group, tokens from
    its own end up to `end` are those of the following parts. `[end, left_until)` are in no sequence: a dropped tail.
    """

    begin: int
    end: int
    left_until: int


def find_stretch(before: int, group_tokens: int, total: int, limit: int, *, keeps_tail: bool) -> StreamStretch:
    """Return the stretch of a group with `group_tokens` tokens after `before` others, of a stream of `total` tokens.

    Sequences are cut every `limit` tokens from the stream's beginning; each belongs to the group of its first token.
    """
    begin = -(-before // limit) * limit
    end = min(-(-(before + group_tokens) // limit) * limit, total)
    if begin >= before + group_tokens:
        return StreamStretch(group_tokens, group_tokens, group_tokens)
    planned = end if keeps_tail or end < total else total // limit * limit
    return StreamStretch(begin - before, planned - before, end - before)


# ── Examples that are longer than a sequence ──


@dataclass(frozen=True, slots=True, eq=False)
class ExampleSlices:
    """Pieces of examples, in example order.

    Piece p is tokens `[starts[p], starts[p] + lengths[p])` of example `examples[p]`; `dropped` are the numbers of
    examples that were dropped because they are too long.
    """

    examples: NDArray[np.int64]
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    dropped: NDArray[np.int64]

    def select(self, kept: Bools) -> "ExampleSlices":
        """Return the pieces for which `kept` is true, with `dropped` unchanged."""
        return ExampleSlices(self.examples[kept], self.starts[kept], self.lengths[kept], self.dropped)


def keep_examples_whole(lengths: Integers) -> ExampleSlices:
    """Return every example as one piece, of any length."""
    require_positive(lengths)
    count = len(lengths)
    return ExampleSlices(
        examples=np.arange(count, dtype=np.int64),
        starts=np.zeros(count, dtype=np.int32),
        lengths=lengths.astype(np.int32),
        dropped=np.empty(0, dtype=np.int64),
    )


def slice_too_long(
    lengths: Integers, limit: int, strategy: SliceStrategy, *, name_of: Callable[[int], str], remedies: str
) -> ExampleSlices:
    """Cut, split or drop the examples of more than `limit` tokens; the others stay whole.

    Raises ContextOverflowError with `error`; names the first example that is too long (`name_of` its number), its
    length, the limit, and the `remedies`.
    """
    pieces = keep_examples_whole(lengths)
    long = np.flatnonzero(lengths > limit)
    if not long.size:
        return pieces
    match strategy:
        case "error":
            first = int(long[0])
            raise ContextOverflowError(
                f"{name_of(first)} has {int(lengths[first])} tokens "
                f"({long.size} {'example is' if long.size == 1 else 'examples are'} too long); "
                f"at most {limit} fit a sequence; {remedies}"
            )
        case "drop":
            return replace(pieces.select(lengths <= limit), dropped=long)
        case "keep_start" | "keep_end":
            kept = np.minimum(pieces.lengths, np.int32(limit))
            starts = pieces.lengths - kept if strategy == "keep_end" else pieces.starts
            return ExampleSlices(pieces.examples, starts, kept, pieces.dropped)
        case "split":
            counts = -(-pieces.lengths // limit)
            number = expand_ranges(np.zeros_like(counts), counts)
            starts = (number * limit).astype(np.int32)
            cut = np.minimum(np.repeat(pieces.lengths, counts) - starts, np.int32(limit))
            return ExampleSlices(np.repeat(pieces.examples, counts), starts, cut, pieces.dropped)


def count_piece_targets(slices: ExampleSlices, loss_mask: Bools, offsets: Integers) -> NDArray[np.int64]:
    """Count the targets of each piece as a separate span, whose first token is not a target.

    `loss_mask`: the masks of all examples, concatenated; example e is `[offsets[e], offsets[e + 1])`. The caller
    rejects a piece without targets as `no_loss_tokens`.
    """
    before = np.concatenate([[0], np.cumsum(loss_mask, dtype=np.int64)])
    begin = offsets[slices.examples] + slices.starts
    return before[begin + slices.lengths] - before[begin + 1]


def require_positive(lengths: Integers) -> None:
    """Raise ValueError if an example is empty, which is a defect of the caller."""
    if len(lengths) and int(lengths.min()) < 1:
        raise ValueError(f"example {int(lengths.argmin())} has {int(lengths.min())} tokens; a segment is never empty")


# ── Sequences ──


def plan_slices(
    slices: ExampleSlices,
    *,
    limit: int,
    strategy: Strategy,
    max_segments: int | None,
    tail: Literal["keep", "drop"],
    room: Integers | None = None,
) -> SequencePlan:
    """Plan the pieces of examples into sequences of at most `limit` tokens and `max_segments` segments.

    `room` are the tokens that each piece takes in a sequence if padding follows it; None: its length. `concat` takes
    pieces of any length and has no segment limit; `single` puts one piece into each sequence.
    """
    room = slices.lengths if room is None else room
    match strategy:
        case "best_fit":
            plan = plan_best_fit(room, limit, max_segments)
        case "greedy":
            plan = plan_greedy(room, limit, max_segments)
        case "concat":
            plan = plan_concat(room, limit, tail)
        case "single":
            plan = plan_single(room, limit)
    plan = leave_out_padding(plan, slices.lengths)
    ranges = plan.ranges.copy()
    ranges[:, 0] += slices.starts[plan.examples]
    return SequencePlan(plan.sequence_offsets, slices.examples[plan.examples], ranges)


def leave_out_padding(plan: SequencePlan, lengths: Integers) -> SequencePlan:
    """Return a plan of the room of examples as one of their tokens; padding is at the end of each example."""
    ranges = plan.ranges.copy()
    ranges[:, 1] = np.minimum(ranges[:, 1], lengths[plan.examples] - ranges[:, 0])
    return SequencePlan(plan.sequence_offsets, plan.examples, ranges)


def plan_best_fit(lengths: Integers, limit: int, max_segments: int | None) -> SequencePlan:
    """Pack into few sequences by best fit decreasing.

    Examples are placed longest first, ties by number, each into the smallest sufficient space; among bins with equal
    space the one with the fewest segments left is filled first, then the one that has been in that state longest. If
    the segment limit costs sequences, bins are filled evenly as well (`_make_even_moves`), and the plan with fewer
    sequences is taken. If the plan exceeds `bound_sequence_count` by more than a thousandth, `plan_greedy` is tried
    too. If short examples exist, the number of sequences is within a thousandth of that bound without a binding
    segment limit, and within two hundredths with one.
    """
    if not len(lengths):
        return _plan_whole_examples(np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int64), lengths)
    moves = _choose_moves(lengths, limit, max_segments)
    if _may_be_improved(moves.made, lengths, limit, max_segments):
        greedy = plan_greedy(lengths, limit, max_segments)
        if greedy.sequences < moves.made:
            return greedy
    shortfall = limit - lengths
    if limit < 1 << 16:
        # NumPy sorts 16-bit integers by radix, four times as fast as wider ones by merging.
        shortfall = shortfall.astype(np.uint16)
    # The moves, applied to the examples: the members of all bins one after the other, and the bins' sizes.
    bins = expand_ranges(moves.first, moves.bins)
    each = np.repeat(moves.each, moves.bins)
    sizes = np.bincount(bins, weights=each).astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    slots = expand_ranges(starts[bins] + np.repeat(moves.filled, moves.bins), each)
    # 32 bits if they suffice, because their rows sort eight times as fast.
    grouped = np.empty(len(lengths), dtype=np.int32 if len(lengths) < 1 << 31 else np.int64)
    # Longest first, ties by number.
    grouped[slots] = np.argsort(shortfall, kind="stable")
    return _plan_whole_examples(*_sort_bins(grouped, sizes), lengths)


def _sort_bins(grouped: Integers, sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort the members of each bin, and the bins by their first member; return offsets and members.

    Bins of the same size are rows of a matrix, so there is no loop over bins.
    """
    starts = np.cumsum(sizes) - sizes
    by_size = np.argsort(sizes, kind="stable")
    classes = np.split(by_size, np.flatnonzero(np.diff(sizes[by_size])) + 1)
    rows = [np.sort(grouped[starts[some][:, None] + np.arange(int(sizes[some[0]]))], axis=1) for some in classes]
    is_first = np.zeros(len(grouped), dtype=np.bool_)
    for members in rows:
        is_first[members[:, 0]] = True
    # First members are distinct, so a sequence's number is the number of smaller first members.
    rank = np.cumsum(is_first) - 1
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    for members in rows:
        offsets[rank[members[:, 0]] + 1] = members.shape[1]
    np.cumsum(offsets, out=offsets)
    examples = np.empty(len(grouped), dtype=np.int64)
    for members in rows:
        examples[offsets[rank[members[:, 0]]][:, None] + np.arange(members.shape[1])] = members
    return offsets, examples


def count_sequences(lengths: Integers, limit: int, max_segments: int | None) -> int:
    """Return how many sequences `plan_best_fit` makes, without placing examples."""
    if not len(lengths):
        return 0
    sequences = _choose_moves(lengths, limit, max_segments).made
    if not _may_be_improved(sequences, lengths, limit, max_segments):
        return sequences
    return min(sequences, _count_greedy(lengths, limit, max_segments))


def count_best_fit(lengths: Integers, limit: int) -> int:
    """Return how many sequences best fit needs without a segment limit, without placing examples."""
    if not len(lengths):
        return 0
    _require_fitting(lengths, limit)
    return _make_best_fit_moves(np.bincount(lengths, minlength=limit + 1).tolist(), limit, None).made


def plan_greedy(lengths: Integers, limit: int, max_segments: int | None) -> SequencePlan:
    """Pack in example order: an example joins the open sequence if it fits, else it opens the next one."""
    _require_fitting(lengths, limit)
    count = len(lengths)
    jump = _find_greedy_ends(lengths, limit, max_segments)
    starts, at = [0], 0
    while at < count:
        at = jump[at]
        starts.append(at)
    return _plan_whole_examples(np.array(starts, dtype=np.int64), np.arange(count, dtype=np.int64), lengths)


def _find_greedy_ends(lengths: Integers, limit: int, max_segments: int | None) -> memoryview:
    """Return for each example the one before which a sequence that starts at it ends."""
    ends = np.cumsum(lengths, dtype=np.int64)
    following = np.searchsorted(ends, ends - lengths + limit, side="right")
    if max_segments is not None:
        following = np.minimum(following, np.arange(len(lengths)) + max_segments)
    # A memoryview gives Python integers four times as fast as indexing the array does.
    return memoryview(following.astype(np.int64))  # pyrefly: ignore[bad-argument-type]


def _count_greedy(lengths: Integers, limit: int, max_segments: int | None, window: int = 1 << 20) -> int:
    """Return how many sequences `plan_greedy` makes, from a window of examples at a time."""
    sequences, begin = 0, 0
    # No sequence of a window is as long as the window, so each window has a whole one.
    window = max(window, limit + 1)
    while begin < len(lengths):
        some = lengths[begin : begin + window]
        jump, at, is_last = _find_greedy_ends(some, limit, max_segments), 0, begin + len(some) == len(lengths)
        while at < len(some) and (is_last or jump[at] < len(some)):
            at = jump[at]
            sequences += 1
        begin += at
    return sequences


def plan_concat(lengths: Integers, limit: int, tail: Literal["keep", "drop"]) -> SequencePlan:
    """Join the examples in order and cut every `limit` tokens; `drop` leaves out the last sequence if it is shorter."""
    total = int(lengths.sum(dtype=np.int64))
    return plan_stream(lengths, limit, 0, total if tail == "keep" else total // limit * limit)


def plan_stream(lengths: Integers, limit: int, begin: int, end: int) -> SequencePlan:
    """Join the examples in order and cut the tokens `[begin, end)` of the whole every `limit` tokens."""
    require_positive(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    windows = np.arange(begin, end, limit, dtype=np.int64)
    inner = starts[:-1][(starts[:-1] > begin) & (starts[:-1] < end)]
    # Two sorted runs: a stable sort merges them in one pass.
    cuts = np.sort(np.concatenate([inner, windows]), kind="stable")
    cuts = cuts[np.diff(cuts, prepend=-1) > 0]
    examples = np.searchsorted(starts, cuts, side="right") - 1
    ranges = np.stack([cuts - starts[examples], np.diff(cuts, append=max(begin, end))], axis=1).astype(np.int32)
    return SequencePlan(np.append(np.searchsorted(cuts, windows), len(cuts)), examples, ranges)


def plan_single(lengths: Integers, limit: int) -> SequencePlan:
    """Put each example in a separate sequence."""
    _require_fitting(lengths, limit)
    numbers = np.arange(len(lengths) + 1, dtype=np.int64)
    return _plan_whole_examples(numbers, numbers[:-1], lengths)


def bound_sequence_count(lengths: Integers, limit: int, max_segments: int | None) -> int:
    """Return a lower bound of the number of sequences: tokens / limit or examples / segments, rounded up."""
    by_tokens = -(-int(lengths.sum(dtype=np.int64)) // limit)
    return by_tokens if max_segments is None else max(by_tokens, -(-len(lengths) // max_segments))


def count_left_out_tokens(plan: SequencePlan, lengths: Integers) -> NDArray[np.int64]:
    """Count the tokens of each example that are in no sequence: those cut, dropped, or in a dropped tail."""
    planned = np.bincount(plan.examples, weights=plan.ranges[:, 1], minlength=len(lengths))
    return lengths.astype(np.int64) - planned.astype(np.int64)


def _plan_whole_examples(offsets: NDArray[np.int64], examples: NDArray[np.int64], lengths: Integers) -> SequencePlan:
    ranges = np.zeros((len(examples), 2), dtype=np.int32)
    ranges[:, 1] = lengths[examples]
    return SequencePlan(offsets, examples, ranges)


def _choose_moves(lengths: Integers, limit: int, max_segments: int | None) -> "_BinMoves":
    """Fill bins by best fit, and evenly if the segment limit costs bins; return the moves that need fewer bins."""
    _require_fitting(lengths, limit)
    histogram: list[int] = np.bincount(lengths, minlength=limit + 1).tolist()
    moves = _make_best_fit_moves(histogram, limit, max_segments)
    if max_segments is None or moves.made == _make_best_fit_moves(histogram, limit, None).made:
        return moves
    even = _make_even_moves(histogram, limit, max_segments)
    return even if even.made < moves.made else moves


def _may_be_improved(sequences: int, lengths: Integers, limit: int, max_segments: int | None) -> bool:
    return sequences > bound_sequence_count(lengths, limit, max_segments) * 1.001


# ── Best fit on the histogram of lengths ──


@dataclass(frozen=True, slots=True, eq=False)
class _BinMoves:
    """Moves in order: `bins` bins from number `first` on, each with `filled` segments, take `each` more."""

    first: NDArray[np.int64]
    bins: NDArray[np.int64]
    each: NDArray[np.int64]
    filled: NDArray[np.int64]

    @property
    def made(self) -> int:
        return int((self.first + self.bins).max())


def _make_best_fit_moves(histogram: Sequence[int], limit: int, max_segments: int | None) -> _BinMoves:
    """Fill bins by length, descending; `histogram[l]` counts the examples of length l.

    A state is (free space, segments left); its bins are runs `(first bin, bins, segments in each)` in order of arrival.
    The bins of a run have the same lengths and consecutive numbers, so a move takes the first k of them.
    """
    states: dict[int, dict[int, deque[tuple[int, int, int]]]] = {}
    moves: list[tuple[int, int, int, int]] = []
    spend = 0 if max_segments is None else 1  # without a limit all bins of a free space are one state
    # Bit r is set if some open bin has r free tokens, so the best fit is the lowest set bit after a shift.
    free_spaces, bin_count = 0, 0
    for length in range(limit, 0, -1):
        remaining = histogram[length]
        while remaining:
            sufficient = free_spaces >> length
            if sufficient:
                free = length + (sufficient & -sufficient).bit_length() - 1
                free_segments = min(states[free])
                first, bins, filled = states[free][free_segments].popleft()
            else:
                free, free_segments, first, bins, filled = limit, max_segments or 1, bin_count, remaining, 0
            each = min(free // length, remaining, free_segments if spend else remaining)
            moved = min(bins, remaining // each)
            moves.append((first, moved, each, filled))
            remaining -= moved * each
            if not sufficient:
                bin_count += moved
            elif moved < bins:
                states[free][free_segments].appendleft((first + moved, bins - moved, filled))
            elif not states[free][free_segments]:
                del states[free][free_segments]
                if not states[free]:
                    del states[free]
                    free_spaces ^= 1 << free
            free -= each * length
            free_segments -= each * spend
            if free and free_segments:
                if free not in states:
                    states[free] = {}
                    free_spaces |= 1 << free
                states[free].setdefault(free_segments, deque()).append((first, moved, filled + each))
    return _BinMoves(*np.array(moves, dtype=np.int64).reshape(-1, 4).T)


def _make_even_moves(histogram: Sequence[int], limit: int, max_segments: int) -> _BinMoves:
    """Fill one bin after the other so that its space and its segments run out together.

    Best fit decreasing puts the short examples into separate bins, which reach the segment limit while nearly empty.
    Here each bin takes the longest example left, then repeatedly the longest of at most its free space divided by its
    segments left. Bins with the same lengths are filled at once, until some length runs out.
    """
    counts = {length: count for length, count in enumerate(histogram) if count}
    available = sorted(counts)
    moves: list[tuple[int, int, int, int, int]] = []
    bin_count = 0
    while available:
        # How many examples of each length one bin takes.
        longest = available[-1]
        members = {longest: 1}
        free, free_segments = limit - longest, max_segments - 1
        while free_segments and available[0] <= free:
            share, sufficient = (bisect_right(available, most) for most in (free // free_segments, free))
            # The longest of at most a share of the free space, then the shortest that fits.
            order = (
                chain(range(share - 1, -1, -1), range(share, sufficient)) if share else range(sufficient - 1, -1, -1)
            )
            lengths = (available[i] for i in order)
            length = next((one for one in lengths if members.get(one, 0) < counts[one]), None)
            if length is None:
                break
            members[length] = members.get(length, 0) + 1
            free, free_segments = free - length, free_segments - 1
        bins = min(counts[length] // each for length, each in members.items())
        filled = 0
        for length, each in members.items():
            moves.append((length, bin_count, bins, each, filled))
            filled += each
            counts[length] -= bins * each
            if not counts[length]:
                del available[bisect_left(available, length)]
        bin_count += bins
    moves.sort(key=lambda move: -move[0])
    return _BinMoves(*np.array([move[1:] for move in moves], dtype=np.int64).reshape(-1, 4).T)


def _require_fitting(lengths: Integers, limit: int) -> None:
    require_positive(lengths)
    if len(lengths) and int(lengths.max()) > limit:
        longest = int(lengths.argmax())
        raise ValueError(f"example {longest} has {int(lengths[longest])} tokens, the limit is {limit}; slice it first")
