"""Assembly of records into examples, planned on token counts alone.

    lengths 85 80 79 80, prompt 36, at most 282 tokens, cap 3

    tabular      prompt BOS r0 r1 r2 EOS      36 + 2 + 244 = 282, then 36 + 2 + 80
    grouped      prompt (BOS group EOS)+      a group is never split
    sequential   as tabular, one group, in order; each example draws its token budget

Records are numbered 0 … n−1, sorted by group key and then by position; callers map the numbers to rows. Loops run per
example, never per record, so planning is linear in the records whatever the cap.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets, expand_ranges

Flush = Literal["restart", "group_change", "max_records", "budget", "end"]
FLUSHES: tuple[Flush, ...] = ("restart", "group_change", "max_records", "budget", "end")
"""Why an example ended: a new pass, another group, the cap, the budget, no more records. Stored as an index."""

DELIMITERS_PER_UNIT = 2
"""One BOS before and one EOS after every unit."""


@dataclass(frozen=True, slots=True)
class ExampleLimits:
    """Limits of an example: `limit` tokens in all, `prompt` of them for the prompt, at most `cap` units."""

    limit: int
    prompt: int
    cap: int | None

    @property
    def records(self) -> int:
        """Tokens left for records after the prompt, one BOS and one EOS; may be negative."""
        return self.limit - self.prompt - DELIMITERS_PER_UNIT

    @property
    def min_budget(self) -> int:
        """The smallest budget that an example of a series may draw: seven tenths of `records`, rounded up."""
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
    """A full or partial pass over the records, as runs `[first, last)` of records that stay together in order.

    In tabular mode a run is one record, otherwise a group (a partial pass may cut a series to a prefix).
    """

    number: int
    firsts: Ints
    lasts: Ints

    @property
    def records(self) -> Ints:
        """Record numbers in the order of the pass."""
        return expand_ranges(self.firsts, self.lasts - self.firsts)


@dataclass(frozen=True, slots=True, eq=False)
class AssembledExamples:
    """The examples of one split, as three levels of offsets.

    Unit u is records `[units[u], units[u + 1])` of `records` between a BOS and an EOS; example e is units
    `[examples[e], examples[e + 1])` after one prompt. `budgets` are tokens of records, `flushes` index `FLUSHES`.
    """

    records: Ints
    units: Ints
    examples: Ints
    passes: Ints
    budgets: Ints
    flushes: NDArray[np.int8]

    @property
    def record_offsets(self) -> Ints:
        """Offsets of the examples in `records`, the end included."""
        return self.units[self.examples]

    def lengths(self, tokens: Ints, limits: ExampleLimits) -> Ints:
        """Return the tokens of every example: the prompt, and per unit its records, BOS and EOS."""
        ends = compute_offsets(tokens[self.records])
        own = ends[self.record_offsets]
        return limits.prompt + np.diff(own) + DELIMITERS_PER_UNIT * np.diff(self.examples)


BudgetSampler = Callable[[int, int], Callable[[int], int]]
"""Samples the budgets of a series' examples: (pass, group) → index of the example in the group → tokens of records."""


def find_run_ends(costs: Ints, starts: Ints, budget: int, cap: int | None) -> Ints:
    """Return for every index i the end of the longest run from i that fits into one example.

    `costs[i]` is at most `budget`; a run also ends after `cap` elements and where the next pass begins (`starts` are
    the offsets of the passes, the end included). One search over cumulative sums, no loop.
    """
    count = len(costs)
    sums = compute_offsets(costs)
    ends = np.searchsorted(sums, sums[:-1] + budget, "right") - 1
    if cap is not None:
        ends = np.minimum(ends, np.arange(count) + cap)
    return np.minimum(ends, starts[np.searchsorted(starts, np.arange(count), "right")])


def chain_run_ends(ends: Ints) -> Ints:
    """Return 0, the end of the run from 0, the end of the run from there, and so on up to the end."""
    jump: list[int] = ends.tolist()
    offsets, position = [0], 0
    while position < len(jump):
        position = jump[position]
        offsets.append(position)
    return np.array(offsets, np.int64)


def explain_flushes(offsets: Ints, starts: Ints, cap: int | None) -> NDArray[np.int8]:
    """Return why each example `[offsets[e], offsets[e + 1])` ended: by a pass, the cap or the budget."""
    ends = offsets[1:]
    found = np.full(len(ends), FLUSHES.index("budget"), np.int8)
    if cap is not None:
        found[np.diff(offsets) == cap] = FLUSHES.index("max_records")
    found[np.isin(ends, starts)] = FLUSHES.index("restart")
    found[-1:] = FLUSHES.index("end")
    return found


def join_passes(passes: "list[RecordPass]") -> tuple[Ints, Ints, Ints]:
    """Return the concatenated runs of all passes, and the passes' offsets (the end included)."""
    none = np.empty(0, np.int64)
    firsts = np.concatenate([none, *(one.firsts for one in passes)])
    lasts = np.concatenate([none, *(one.lasts for one in passes)])
    starts = compute_offsets([len(one.firsts) for one in passes])
    return firsts, lasts, starts
