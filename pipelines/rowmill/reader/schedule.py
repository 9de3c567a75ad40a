"""Which sequences make a batch of a rank, one batch after the other: integers, without a file.

place     0 1 2 3 | 4 5 6 7      steps of 4 places
rank 1    · 1 · 3 | · 5 · 7      this rank's sequence n is at place rank + n · world_size
number      0   1     2   3
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from rowmill.core.arrays import Ints
from rowmill.core.errors import ConfigError, join_choices


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The sequences `[begin, end)` of this rank; `following` is the number at which its next batch begins."""

    begin: int
    end: int
    following: int


@dataclass(frozen=True, slots=True, eq=False)
class RankSchedule:
    """The batches of one rank.

    Step s is the places `[step_offsets[s], step_offsets[s + 1])`; without steps, the offsets are the start and the end
    of the whole order. `batch_size` None is the rank's share of a step. No batch is of a step in `skipped`.
    """

    rank: int
    world_size: int
    step_offsets: Ints
    has_steps: bool
    batch_size: int | None
    skipped: frozenset[int] = frozenset()

    def __len__(self) -> int:
        """Return the number of this rank's sequences."""
        return self.find_number(int(self.step_offsets[-1]))

    def find_number(self, place: int) -> int:
        """Return the number of this rank's first sequence at or after a place."""
        return (place - self.rank + self.world_size - 1) // self.world_size

    def find_step(self, number: int) -> int:
        """Return the step of a sequence; without steps, 0."""
        return int(np.searchsorted(self.step_offsets, self.rank + number * self.world_size, "right")) - 1

    def find_step_end(self, number: int) -> int:
        """Return the number that follows the last sequence of this rank in a sequence's step."""
        return self.find_number(int(self.step_offsets[self.find_step(number) + 1]))

    def find_kept(self, number: int) -> int:
        """Return the first number from this one on that is not of a skipped step, or the number of sequences."""
        while number < len(self) and self.skipped and self.find_step(number) in self.skipped:
            number = self.find_step_end(number)
        return number

    def skip_batches(self, number: int, batches: int) -> int:
        """Return the number at which the batch `batches` later begins, at most the end."""
        number = self.find_kept(number)
        for _ in range(batches):
            if number >= len(self):
                break
            number = self.find_kept(self._find_batch_end(number))
        return number

    def plan_batches(self, number: int, every: int) -> Iterator[PlannedBatch]:
        """Yield the batches from a number on, and of these every `every`-th."""
        number = self.find_kept(number)
        while number < len(self):
            end = self._find_batch_end(number)
            following = self.skip_batches(end, every - 1)
            yield PlannedBatch(number, end, following)
            number = following

    def plan_passes(self, number: int, first: int, every: int) -> Iterator[Iterator[PlannedBatch]]:
        """Yield the batches from a number on to the end, then those of whole passes from batch `first` on, for ever."""
        yield self.plan_batches(number, every)
        while (begin := self.skip_batches(0, first)) < len(self):
            yield self.plan_batches(begin, every)

    def _find_batch_end(self, begin: int) -> int:
        """Return the number that follows the last sequence of the batch that begins at a number."""
        step_end = self.find_step_end(begin)
        if self.batch_size is None and self.has_steps:
            return step_end
        return min(begin + (self.batch_size or 1), step_end)

    def require_steps(self, steps: Iterable[int]) -> None:
        """Refuse numbers that are not of a step; raises ConfigError with the numbers that are."""
        count = len(self.step_offsets) - 1 if self.has_steps else 0
        wrong = sorted(step for step in steps if not 0 <= step < count)
        if wrong:
            has = f"steps are 0 to {count - 1}" if count else "the recipe has no mixture.batch_size, so it has no steps"
            raise ConfigError(f"reader: step {join_choices(wrong)}; {has}; correct the number")

    def require_equal_shares(self, position: int) -> None:
        """Refuse a world size that gives ranks unequal shares of a step at or after a place.

        Raises ConfigError with the nearest world sizes that divide all of them.
        """
        offsets = self.step_offsets
        remaining = np.diff(offsets)[offsets[:-1] >= position] if self.has_steps else offsets[-1:] - position
        common = int(np.gcd.reduce(remaining)) if len(remaining) else 0
        if common % self.world_size:
            below = next(d for d in range(self.world_size, 0, -1) if common % d == 0)
            above = next((d for d in range(self.world_size, common + 1) if common % d == 0), below)
            raise ConfigError(
                f"world_size: {self.world_size} does not divide the steps from place {position} on; every rank takes "
                f"equally many sequences of a step; choose {join_choices(dict.fromkeys((below, above)))}, or build "
                "with another batch_size"
            )
