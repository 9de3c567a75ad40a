"""Assign the order to ranks: whole steps with balanced loads, of which rank r takes every W-th position.

What belongs here: the options of `partitions`, the remainder of a step, the position of each sequence in its step, and
the totals of a rank in each step. What does not: which sequences the order has (`mixture.py`), or files (`shards/`).

    trained tokens of a step   9 1 5 7 3 8 2 6
    balanced                   9 8 6 7 1 2 5 3     2 ranks: 21 and 20; 4 ranks: 10, 10, 11, 10
    as step 1, rotated right   3 9 8 6 7 1 2 5     so that no rank always gets the largest

The order does not depend on the world size: it is balanced for every number of ranks that divides `balance_ranks`, and
a run that resumes with another number of ranks has the same steps. Rejected: balancing over a window of several steps,
which moves sequences between optimizer steps.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rowmill.core.arrays import Integers
from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, join_choices

FILLER = -1
"""The entry of a position that no sequence fills."""

_FULL_LOAD = 1 << 62
# Steps are balanced in batches; a million members at a time need less than 100 MB of memory.
_MEMBERS_AT_ONCE = 1 << 20


class Partitions(Config):
    """The options of the group `partitions`: how the order is divided among data-parallel ranks."""

    world_size: Annotated[int, Field(ge=1)] = 1
    """Number of ranks; must divide every batch size."""

    remainder: Literal["pad", "drop", "carry"] = "pad"
    """What happens to sequences that do not fill a step: `pad` adds fillers at the end of each epoch, `drop` leaves
    them out, `carry` moves them into the next epoch and pads only the last step."""

    balance: Literal["trained_tokens", "flops", "none"] = "trained_tokens"
    """What ranks get nearly equal amounts of in a step: `trained_tokens`, so that each weighs alike; `flops`, so that
    each takes as long, which differs where long and short examples are mixed. `none` keeps the order."""

    flops_linear: Annotated[int, Field(ge=0)] = 49_152
    """For `balance: flops`: a span of n tokens costs n² + flops_linear · n. It is a layer's weights by heads times
    head size; 12 times the hidden size for a dense model: the default is that of 4,096, 24,576 that of 2,048."""

    balance_ranks: Annotated[int, Field(ge=1)] = 192
    """Loads are balanced for every world size that divides this number."""

    @model_validator(mode="after")
    def _require_use_of_flops(self) -> "Partitions":
        is_default = self.flops_linear == type(self).model_fields["flops_linear"].default
        if self.balance != "flops" and not is_default:
            raise ValueError(
                f"flops_linear is set, but balance is {self.balance}, which does not read it; it needs balance: flops; "
                "set that, or delete flops_linear"
            )
        return self


@dataclass(frozen=True, slots=True, eq=False)
class RankOrder:
    """The final order: position p has position `order[p]` of the mixed order, or a filler (-1).

    order int64[P] · step_offsets int64[T + 1]: step s is `[step_offsets[s], step_offsets[s + 1])` · dropped
    int64, positions of the mixed order that `drop` left out · not_scheduled int64, positions beyond `steps`.
    `has_steps` is False without a batch size; then windows of `balance_ranks` serve as steps.
    """

    order: NDArray[np.int64]
    step_offsets: NDArray[np.int64]
    dropped: NDArray[np.int64]
    not_scheduled: NDArray[np.int64]
    has_steps: bool


@dataclass(frozen=True, slots=True, eq=False)
class StepFacts:
    """The totals of one rank by step, int64[T] each; `step_trained_tokens` are of the whole step over all ranks.

    A filler counts in `sequences`; its two pad tokens do not count anywhere.
    """

    sequences: NDArray[np.int64]
    fillers: NDArray[np.int64]
    segments: NDArray[np.int64]
    tokens: NDArray[np.int64]
    trained_tokens: NDArray[np.int64]
    flops: NDArray[np.int64]
    longest_segment: NDArray[np.int64]
    step_trained_tokens: NDArray[np.int64]


def check_world_size(world_size: int, batch_sizes: Sequence[tuple[int, int]]) -> None:
    """Refuse a world size that does not divide every batch size, suggesting two that do."""
    common = gcd(*(size for _, size in batch_sizes))
    if common % world_size:
        sizes = join_choices(dict.fromkeys(size for _, size in batch_sizes))
        raise ConfigError(
            f"partitions.world_size: {world_size} does not divide batch_size {sizes}; every rank must get the same "
            f"number of sequences of a step; choose {join_choices(_find_nearest_divisors(common, world_size))}, or "
            "another batch_size"
        )


def assign_ranks(
    partitions: Partitions,
    epoch_offsets: Integers,
    loads: Integers,
    *,
    batch_sizes: Sequence[tuple[int, int]],
    steps: int | None,
) -> RankOrder:
    """Cut the mixed order into whole steps and balance the loads within each.

    `epoch_offsets` int64[E + 1] are the epochs of the mixed order, `loads` int64[N] what each of its sequences weighs:
    its targets, or its `compute_flops`. `batch_sizes` are `(first step, size)`; if empty, windows of `balance_ranks`
    serve as steps, and each epoch is padded or cut to a multiple of `world_size`. `steps` ends the order.

    Raises
    ------
    ConfigError
        If the world size does not divide every batch size.

    """
    check_world_size(partitions.world_size, batch_sizes)
    laid = _cut_steps(partitions, epoch_offsets, batch_sizes, steps)
    if partitions.balance == "none":
        return laid
    of_places = np.where(laid.order == FILLER, 0, np.append(loads, 0)[laid.order])
    order = _balance_steps(laid.order, laid.step_offsets, of_places, partitions.balance_ranks)
    return RankOrder(order, laid.step_offsets, laid.dropped, laid.not_scheduled, laid.has_steps)


def compute_flops(spans: Integers, offsets: Integers, linear: int) -> NDArray[np.int64]:
    """Return what each sequence costs, in a layer's floating point operations up to a factor.

    Sequence s has the attention spans `spans[offsets[s]:offsets[s + 1]]`, in tokens; one of n costs n² + linear · n.

    linear 10, spans 4 4 ─► 112, span 8 ─► 144
    """
    lengths = spans.astype(np.int64)
    before = np.concatenate([[0], np.cumsum(lengths * lengths + linear * lengths, dtype=np.int64)])
    return np.diff(before[offsets])


def find_rank_positions(dealt: RankOrder, rank: int, world_size: int) -> NDArray[np.int64]:
    """Return the positions of the final order that a rank takes: all p with p mod W = rank, ascending.

    Raises
    ------
    ConfigError
        If `world_size` does not divide every step (without steps: the whole order).

    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of {world_size}; ranks are 0 to {world_size - 1}; correct the rank")
    ends = dealt.step_offsets if dealt.has_steps else dealt.step_offsets[-1:]
    common = int(np.gcd.reduce(ends))
    if common % world_size:
        raise ConfigError(
            f"world_size {world_size} does not divide every step of this build; ranks must get equal numbers of "
            f"sequences; choose {join_choices(_find_nearest_divisors(common, world_size))}, or build with "
            f"partitions.world_size {world_size}"
        )
    return np.arange(rank, len(dealt.order), world_size, dtype=np.int64)


def summarize_steps(
    dealt: RankOrder,
    rank: int,
    world_size: int,
    *,
    tokens: Integers,
    trained_tokens: Integers,
    segments: Integers,
    flops: Integers,
    longest_segments: Integers,
) -> StepFacts:
    """Sum the sequences and tokens of a rank by step; the five arrays are [N], by position of the mixed order."""
    positions = find_rank_positions(dealt, rank, world_size)
    # Steps need not begin at a multiple of the world size if windows serve as steps.
    begins = np.searchsorted(positions, dealt.step_offsets)
    mine = dealt.order[positions]

    def summed(values: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        before = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
        return np.diff(before[offsets])

    longest = np.zeros(len(begins) - 1, dtype=np.int64)
    steps = np.repeat(np.arange(len(begins) - 1), np.diff(begins))
    np.maximum.at(longest, steps, _take_values(longest_segments, mine))
    return StepFacts(
        sequences=np.diff(begins).astype(np.int64),
        fillers=summed((mine == FILLER).astype(np.int64), begins),
        segments=summed(_take_values(segments, mine), begins),
        tokens=summed(_take_values(tokens, mine), begins),
        trained_tokens=summed(_take_values(trained_tokens, mine), begins),
        flops=summed(_take_values(flops, mine), begins),
        longest_segment=longest,
        step_trained_tokens=summed(_take_values(trained_tokens, dealt.order), dealt.step_offsets),
    )


def _take_values(values: Integers, places: NDArray[np.int64]) -> NDArray[np.int64]:
    # Index -1, a filler, selects the 0 at the end.
    return np.append(values, 0).astype(np.int64)[places]


def _find_nearest_divisors(number: int, wanted: int) -> list[int]:
    """Return the two divisors of a number that are nearest to `wanted`."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return sorted(sorted(divisors, key=lambda d: (abs(d - wanted), d))[:2])


# --- whole steps ---


def _cut_steps(
    partitions: Partitions, epoch_offsets: Integers, batch_sizes: Sequence[tuple[int, int]], steps: int | None
) -> RankOrder:
    """Cut the mixed order into whole steps; where an epoch ends within a step, add fillers or leave out its rest."""
    offsets: list[int] = epoch_offsets.tolist()
    if partitions.remainder == "carry":
        offsets = [offsets[0], offsets[-1]]
    nothing = np.empty(0, dtype=np.int64)
    order, dropped, not_scheduled = [nothing], [nothing], [nothing]
    lengths: list[int] = []
    for start, end in pairwise(offsets):
        count = end - start
        added = _plan_step_lengths(partitions, count, batch_sizes, len(lengths), steps)
        lengths += added
        shown = min(count, sum(added))
        order += [np.arange(start, start + shown), np.full(sum(added) - shown, FILLER)]
        is_over = steps is not None and len(lengths) >= steps
        (not_scheduled if is_over else dropped).append(np.arange(start + shown, end))
    return RankOrder(
        order=np.concatenate(order),
        step_offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        dropped=np.concatenate(dropped),
        not_scheduled=np.concatenate(not_scheduled),
        has_steps=bool(batch_sizes),
    )


def _plan_step_lengths(
    partitions: Partitions,
    count: int,
    batch_sizes: Sequence[tuple[int, int]],
    first_step: int,
    steps: int | None,
) -> list[int]:
    """Return the lengths of the steps for `count` sequences, after padding or cutting."""
    drops = partitions.remainder == "drop"
    if not batch_sizes:
        world, window = partitions.world_size, partitions.balance_ranks
        whole = (count if drops else count + world - 1) // world * world
        return [min(window, whole - at) for at in range(0, whole, window)]
    starts = [step for step, _ in batch_sizes]
    lengths: list[int] = []
    while count > 0 and (steps is None or first_step + len(lengths) < steps):
        size = batch_sizes[bisect_right(starts, first_step + len(lengths)) - 1][1]
        if drops and size > count:
            break
        lengths.append(size)
        count -= size
    return lengths


# --- positions within a step ---


def _balance_steps(
    order: NDArray[np.int64], step_offsets: NDArray[np.int64], loads: NDArray[np.int64], balance_ranks: int
) -> NDArray[np.int64]:
    """Balance the loads within every step; steps of the same length are rows of a matrix."""
    dealt = np.empty_like(order)
    lengths = np.diff(step_offsets)
    for length in np.unique(lengths).tolist():
        factors = _prime_factors(gcd(length, balance_ranks))
        alike = np.flatnonzero(lengths == length)
        together = max(1, _MEMBERS_AT_ONCE // length)
        for start in range(0, len(alike), together):
            steps = alike[start : start + together]
            places = step_offsets[steps][:, None] + np.arange(length)
            # Rotated right by the step's number: position i of step s has the member of position i - s.
            turned = (np.arange(length) - steps[:, None]) % length
            chosen = np.take_along_axis(_balance_members(loads[places], factors), turned, axis=1)
            dealt[places] = np.take_along_axis(order[places], chosen, axis=1)
    return dealt


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number, largest first: 12 gives 3, 2, 2."""
    factors: list[int] = []
    candidate = 2
    while number > 1:
        while number % candidate == 0:
            factors.insert(0, candidate)
            number //= candidate
        candidate += 1
    return factors


def _balance_members(loads: NDArray[np.int64], factors: Sequence[int]) -> NDArray[np.int64]:
    """Return the member at each position of each step; `loads` is [steps, members]."""
    heaviest_first = np.argsort(-loads, axis=1, kind="stable")
    return _spread_members(heaviest_first, np.take_along_axis(loads, heaviest_first, axis=1), factors)


def _spread_members(members: NDArray[np.int64], loads: NDArray[np.int64], factors: Sequence[int]) -> NDArray[np.int64]:
    """Distribute sorted members to f parts of equal size and nearly equal load; part j gets positions j, j + f, ….

    Each member in turn goes to the lightest part with room, ties to the lowest number; a part stays sorted, so it can
    be distributed with the next factor. The loop is over members, for all rows at once.
    """
    if not factors:
        return members
    rows, count = loads.shape
    parts = factors[0]
    room = count // parts
    part_loads, filled = np.zeros((rows, parts), dtype=np.int64), np.zeros((rows, parts), dtype=np.int64)
    every = np.arange(rows)
    slots = np.empty((rows, count), dtype=np.int64)
    for i in range(count):
        part = np.argmin(part_loads, axis=1)
        slots[:, i] = part * room + filled[every, part]
        part_loads[every, part] += loads[:, i]
        filled[every, part] += 1
        # Makes a full part heavier than any load.
        part_loads[every, part] += np.where(filled[every, part] == room, _FULL_LOAD, 0)
    dealt_members, dealt_loads = np.empty_like(members), np.empty_like(loads)
    np.put_along_axis(dealt_members, slots, members, axis=1)
    np.put_along_axis(dealt_loads, slots, loads, axis=1)
    inner = _spread_members(dealt_members.reshape(-1, room), dealt_loads.reshape(-1, room), factors[1:])
    return inner.reshape(rows, parts, room).transpose(0, 2, 1).reshape(rows, count)
