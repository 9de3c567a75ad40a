"""Records → examples, planned on token counts alone: which records stand together, in which order, and why one ended.

What belongs here: the nouns of a plan, and the choice of the way: tabular, grouped or sequential. What does not:
tokens (they move once, by the plan), reading columns, what a recipe may say (`records.py`).

    lengths 85 80 79 80, prompt 36, at most 282 tokens, cap 3

    tabular      prompt BOS r0 r1 r2 EOS      36 + 2 + 244 = 282, then 36 + 2 + 80
    grouped      prompt (BOS group EOS)+      a group is never cut
    sequential   as tabular, one group, in order; each example draws how full it may become

Records are numbered 0 … n−1 in the order in which their groups stand sorted by key, and sorted within each
group; callers map the numbers to rows. One step of a loop makes one example, never one record, so a plan takes
time in the number of records whatever the cap.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets, expand_ranges

Flush = Literal["restart", "group_change", "max_records", "budget", "end"]
FLUSHES: tuple[Flush, ...] = ("restart", "group_change", "max_records", "budget", "end")
"""Why an example ended: a new pass, another group, the cap, the budget, nothing more to come. Stored by place."""

EDGES = 2
"""Tokens around every unit: one BOS, one EOS."""


@dataclass(frozen=True, slots=True)
class ExampleLimits:
    """What an example may hold: `limit` tokens in all, `prompt` of them the prompt's, at most `cap` units."""

    limit: int
    prompt: int
    cap: int | None

    @property
    def records(self) -> int:
        """Tokens that are left for records beside the prompt and one pair of BOS and EOS; may be negative."""
        return self.limit - self.prompt - EDGES

    @property
    def min_budget(self) -> int:
        """The smallest budget that an example of a series may draw: seven tenths of the room, rounded up."""
        return -(-7 * self.records // 10)


@dataclass(frozen=True, slots=True, eq=False)
class RecordLengths:
    """Token counts of the records of one split; group g owns records `[groups[g], groups[g + 1])`."""

    tokens: Ints
    groups: Ints

    @property
    def group_tokens(self) -> Ints:
        """Tokens of each group's records."""
        ends = compute_offsets(self.tokens)
        return ends[self.groups[1:]] - ends[self.groups[:-1]]

    @property
    def group_sizes(self) -> Ints:
        """Records of each group."""
        return np.diff(self.groups)


@dataclass(frozen=True, slots=True, eq=False)
class RecordPass:
    """One walk over the records, whole or partial: `[first, last)` are runs of records that stay together in order.

    Of tabular data a run is one record, of the others a group (a partial pass may cut a series to a prefix).
    """

    number: int
    firsts: Ints
    lasts: Ints

    @property
    def records(self) -> Ints:
        """The records in the order of the pass."""
        return expand_ranges(self.firsts, self.lasts - self.firsts)


@dataclass(frozen=True, slots=True, eq=False)
class AssembledExamples:
    """The examples of one split, as three levels of offsets.

    Unit u is records `[units[u], units[u + 1])` of `records` between a BOS and an EOS; example e is units
    `[examples[e], examples[e + 1])` behind one prompt. `budgets` are tokens of records, `flushes` index `FLUSHES`.
    """

    records: Ints
    units: Ints
    examples: Ints
    passes: Ints
    budgets: Ints
    flushes: NDArray[np.int8]

    @property
    def record_offsets(self) -> Ints:
        """Where each example's records begin in `records`, and where the last one's end."""
        return self.units[self.examples]

    def lengths(self, tokens: Ints, room: ExampleLimits) -> Ints:
        """Return the tokens of every example: prompt, and per unit its records and two edges."""
        ends = compute_offsets(tokens[self.records])
        own = ends[self.record_offsets]
        return room.prompt + np.diff(own) + EDGES * np.diff(self.examples)


BudgetSampler = Callable[[int, int], Callable[[int], int]]
"""Hands out budgets of a series' examples: (pass, group) → which example of the group → tokens of records."""


def find_run_ends(costs: Ints, starts: Ints, budget: int, cap: int | None) -> Ints:
    """Return for every place i the end of the longest run from i that one example can hold.

    `costs[i]` is at most `budget`; a run also ends after `cap` places and where the next pass begins (`starts`
    are the places where passes begin, and the end). One search over cumulative sums, no loop.
    """
    count = len(costs)
    sums = compute_offsets(costs)
    ends = np.searchsorted(sums, sums[:-1] + budget, "right") - 1
    if cap is not None:
        ends = np.minimum(ends, np.arange(count) + cap)
    return np.minimum(ends, starts[np.searchsorted(starts, np.arange(count), "right")])


def chain_run_ends(ends: Ints) -> Ints:
    """Return 0, the end of the run from 0, the end of the run from there, and so on, up to the last place."""
    jump: list[int] = ends.tolist()
    found, here = [0], 0
    while here < len(jump):
        here = jump[here]
        found.append(here)
    return np.array(found, np.int64)


def explain_flushes(offsets: Ints, starts: Ints, cap: int | None) -> NDArray[np.int8]:
    """Say why each example `[offsets[e], offsets[e + 1])` ended, where only passes, the cap and the budget can."""
    ends = offsets[1:]
    found = np.full(len(ends), FLUSHES.index("budget"), np.int8)
    if cap is not None:
        found[np.diff(offsets) == cap] = FLUSHES.index("max_records")
    found[np.isin(ends, starts)] = FLUSHES.index("restart")
    found[-1:] = FLUSHES.index("end")
    return found


def join_passes(passes: "list[RecordPass]") -> tuple[Ints, Ints, Ints]:
    """Return the runs of all passes end to end, and where each pass's runs begin (the end included)."""
    none = np.empty(0, np.int64)
    firsts = np.concatenate([none, *(one.firsts for one in passes)])
    lasts = np.concatenate([none, *(one.lasts for one in passes)])
    starts = compute_offsets([len(one.firsts) for one in passes])
    return firsts, lasts, starts
