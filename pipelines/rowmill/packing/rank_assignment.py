"""Assign the order to ranks: whole steps with balanced loads, of which rank r takes every W-th position.

    trained tokens of a step   9 1 5 7 3 8 2 6
    balanced                   9 8 6 7 1 2 5 3     2 ranks: 21 and 20; 4 ranks: 10, 10, 11, 10
    as step 1, rotated right   3 9 8 6 7 1 2 5     so that no rank always gets the largest

The order does not depend on the world size: it is balanced for every number of ranks that divides `balance_ranks`, and
a run that resumes with another number of ranks has the same steps. Rejected: balancing over a window of several steps,
which moves sequences between optimizer steps.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rowmill.core.arrays import Integers, Ints, compute_offsets, find_distinct
from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, join_choices
from rowmill.schema.recipe_summary import RecipeSummary

FILLER = -1
"""The entry of a position that no sequence fills."""

_FULL_LOAD = 1 << 62
# Steps are balanced in batches; a million members at a time need less than 100 MB of memory.
_MEMBERS_AT_ONCE = 1 << 20

RankLayout: TypeAlias = Literal["copied", "index"]


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
    """For `balance: flops`: a span of n tokens, padding included, costs n² + flops_linear · n. It is a layer's weights
    by heads times head size; 12 times the hidden size for a dense model: the default is that of 4,096, 24,576 that of
    2,048."""

    balance_ranks: Annotated[int, Field(ge=1)] = 192
    """Loads are balanced for every world size that divides this number."""

    layout: RankLayout = "copied"
    """What a rank's files hold: `copied` its sequences, so that the folder of a rank can be moved; `index` only which
    rows of the packed shards they are, so that tokens are stored once and another world size is made in no time. The
    reader gives the same batches for both."""

    @model_validator(mode="after")
    def _require_use_of_flops(self) -> "Partitions":
        is_default = self.flops_linear == type(self).model_fields["flops_linear"].default
        if self.balance != "flops" and not is_default:
            raise ValueError(
                f"flops_linear is set, but balance is {self.balance}, which does not read it; it needs balance: flops; "
                "set that, or delete flops_linear"
            )
        return self

    def check_recipe(self, recipe: RecipeSummary) -> None:
        """Refuse a world size that divides no step, and balancing by a cost that is not known of trees."""
        if self.balance == "flops" and any(dataset.shares_prefixes for dataset in recipe.datasets.values()):
            raise ValueError(
                "partitions.balance: flops with packing.share_prefixes, which does not count what a tree costs; "
                "trained_tokens and none are allowed; choose one of them"
            )
        check_world_size(self.world_size, recipe.batch_sizes)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The whole steps of an order: step s has the places `[step_offsets[s], step_offsets[s + 1])`, int64[T + 1].

    Each line of `runs` int64[R, 3] is a first place, the position of the mixed order there, and how many sequences
    follow; the places from there to the next run are fillers. `dropped` are positions of the mixed order that
    `remainder: drop` left out, and `not_scheduled` those beyond `steps`, both as ranges. Without a batch size, windows
    of `balance_ranks` serve as steps.
    """

    step_offsets: NDArray[np.int64]
    runs: NDArray[np.int64]
    dropped: Sequence[range]
    not_scheduled: Sequence[range]
    balance_ranks: int | None
    """Loads are balanced for every world size that divides it; None: not at all."""

    @property
    def places(self) -> int:
        return int(self.step_offsets[-1])

    def locate(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the positions of the mixed order at the places `[begin, end)` before balancing, or fillers."""
        places = np.arange(begin, end, dtype=np.int64)
        firsts, positions, counts = self.runs[np.searchsorted(self.runs[:, 0], places, "right") - 1].T
        return np.where(places - firsts < counts, positions + places - firsts, FILLER)

    def find_position(self, place: int) -> int:
        """Return the position of the mixed order at a place, or, for a filler, the first one behind it."""
        run = int(np.searchsorted(self.runs[:, 0], place, "right")) - 1
        first, position, count = self.runs[run].tolist()
        return position + min(place - first, count)


@dataclass(frozen=True, slots=True, eq=False)
class RankOrder:
    """The final order of some consecutive steps: place `first_place + i` has position `order[i]` of the mixed order.

    order int64[P], -1 for a filler · step_offsets int64[T + 1], where steps begin in it
    """

    order: NDArray[np.int64]
    step_offsets: NDArray[np.int64]
    first_place: int


def check_world_size(world_size: int, batch_sizes: Sequence[tuple[int, int]]) -> None:
    """Refuse a world size that does not divide every batch size, suggesting two that do."""
    common = gcd(*(size for _, size in batch_sizes))
    if common % world_size:
        divisors = [d for d in range(1, common + 1) if common % d == 0]
        nearest = sorted(sorted(divisors, key=lambda d: (abs(d - world_size), d))[:2])
        sizes = join_choices(dict.fromkeys(size for _, size in batch_sizes))
        raise ConfigError(
            f"partitions.world_size: {world_size} does not divide batch_size {sizes}; every rank must get the same "
            f"number of sequences of a step; choose {join_choices(nearest)}, or another batch_size"
        )


def plan_steps(
    partitions: Partitions, epoch_offsets: Integers, *, batch_sizes: Sequence[tuple[int, int]], steps: int | None
) -> StepPlan:
    """Cut the mixed order into whole steps; where an epoch ends within a step, add fillers or leave out its rest.

    `epoch_offsets` int64[E + 1] are the epochs of the mixed order. `batch_sizes` are `(first step, size)`; if empty,
    windows of `balance_ranks` serve as steps, and each epoch is padded or cut to a multiple of `world_size`. `steps`
    ends the order. Raises ConfigError if the world size does not divide every batch size.
    """
    check_world_size(partitions.world_size, batch_sizes)
    offsets: list[int] = epoch_offsets.tolist()
    if partitions.remainder == "carry":
        offsets = [offsets[0], offsets[-1]]
    dropped: list[range] = []
    not_scheduled: list[range] = []
    runs: list[tuple[int, int, int]] = []
    lengths: list[int] = []
    place = 0
    for start, end in pairwise(offsets):
        count = end - start
        added = _plan_step_lengths(partitions, count, batch_sizes, len(lengths), steps)
        lengths += added
        shown = min(count, sum(added))
        runs.append((place, start, shown))
        place += sum(added)
        is_over = steps is not None and len(lengths) >= steps
        (not_scheduled if is_over else dropped).append(range(start + shown, end))
    return StepPlan(
        step_offsets=compute_offsets(lengths),
        runs=np.array(runs, np.int64).reshape(-1, 3),
        dropped=dropped,
        not_scheduled=not_scheduled,
        balance_ranks=None if partitions.balance == "none" else partitions.balance_ranks,
    )


def assign_places(plan: StepPlan, first_step: int, end_step: int, load_of: Callable[[Ints], Integers]) -> RankOrder:
    """Return the final order of the steps `[first_step, end_step)`, the loads within each balanced.

    `load_of` returns what the sequences at some positions of the mixed order weigh: their targets, or their
    `compute_flops`.
    """
    offsets = plan.step_offsets[first_step : end_step + 1]
    first = int(offsets[0])
    laid, local_offsets = plan.locate(first, int(offsets[-1])), offsets - first
    if plan.balance_ranks is None:
        return RankOrder(laid, local_offsets, first)
    loads = np.zeros(len(laid), np.int64)
    loads[laid != FILLER] = load_of(laid[laid != FILLER])
    dealt, lengths = np.empty_like(laid), np.diff(local_offsets)
    # Steps of the same length are rows of a matrix.
    for length in find_distinct(lengths).tolist():
        factors = _prime_factors(gcd(length, plan.balance_ranks))
        alike = np.flatnonzero(lengths == length)
        together = max(1, _MEMBERS_AT_ONCE // length)
        for start in range(0, len(alike), together):
            steps = alike[start : start + together]
            places = local_offsets[steps][:, None] + np.arange(length)
            # Rotated right by the step's number: position i of step s has the member of position i - s.
            turned = (np.arange(length) - first_step - steps[:, None]) % length
            in_steps = loads[places]
            heaviest_first = np.argsort(-in_steps, axis=1, kind="stable")
            sorted_loads = np.take_along_axis(in_steps, heaviest_first, axis=1)
            chosen = np.take_along_axis(_spread_members(heaviest_first, sorted_loads, factors), turned, axis=1)
            dealt[places] = np.take_along_axis(laid[places], chosen, axis=1)
    return RankOrder(dealt, local_offsets, first)


def compute_flops(spans: Integers, offsets: Integers, linear: int) -> NDArray[np.int64]:
    """Return what each sequence costs, in a layer's floating point operations up to a factor.

    Sequence s has the attention spans `spans[offsets[s]:offsets[s + 1]]`, in tokens; one of n costs n² + linear · n.

    linear 10, spans 4 4 ─► 112, span 8 ─► 144
    """
    lengths = spans.astype(np.int64)
    return np.diff(compute_offsets(lengths * lengths + linear * lengths)[offsets])


def summarize_steps(
    dealt: RankOrder, rank: int, world_size: int, sequences: "Mapping[str, Integers] | NDArray[Any]"
) -> dict[str, Ints]:
    """Sum the sequences of a rank by step, int64[T] each: places p with p mod W = rank.

    `sequences` have segments, tokens, targets, flops and the longest segment by place of `dealt`; those of fillers do
    not count. A filler counts in `sequences`, its two pad tokens nowhere. `step_trained_tokens` are of the whole step
    over all ranks.
    """
    # Steps need not begin at a multiple of the world size if windows serve as steps.
    positions = np.arange((rank - dealt.first_place) % world_size, len(dealt.order), world_size)
    begins = np.searchsorted(positions, dealt.step_offsets)
    is_shown = dealt.order != FILLER
    shown = {
        name: np.where(is_shown, sequences[name], 0).astype(np.int64) for name in (*_SUMMED, "flops", "longest_segment")
    }

    def sum_by_step(values: Ints) -> Ints:
        return np.diff(compute_offsets(values[positions])[begins])

    longest = np.zeros(len(begins) - 1, np.int64)
    steps = np.repeat(np.arange(len(begins) - 1), np.diff(begins))
    np.maximum.at(longest, steps, shown["longest_segment"][positions])
    return {
        "sequences": np.diff(begins).astype(np.int64),
        "fillers": sum_by_step((~is_shown).astype(np.int64)),
        **{name: sum_by_step(shown[name]) for name in _SUMMED},
        "longest_segment": longest,
        "step_trained_tokens": np.diff(compute_offsets(shown["trained_tokens"])[dealt.step_offsets]),
        "flops": sum_by_step(shown["flops"]),
    }


_SUMMED = ("segments", "tokens", "trained_tokens")


# ── Whole steps ──


def _plan_step_lengths(
    partitions: Partitions, count: int, batch_sizes: Sequence[tuple[int, int]], first_step: int, steps: int | None
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


# ── Positions within a step ──


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
