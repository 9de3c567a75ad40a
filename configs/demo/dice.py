"""Reproducible choices: a SplitMix64 generator of our own, so that no library's random numbers decide a byte.

What belongs here: drawing numbers, items and samples. What does not: what is drawn from.
"""

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")

_MASK = (1 << 64) - 1


class Dice:
    """A stream of choices that is the same on every machine and in every version of Python."""

    def __init__(self, seed: int) -> None:
        """Start the stream that `seed` names."""
        self._state = (seed * 0xD1342543DE82EF95 + 1) & _MASK

    def below(self, bound: int) -> int:
        """Draw an integer from `[0, bound)`; the bias of the remainder is under bound / 2**64."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        value = self._state
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        return (value ^ (value >> 31)) % bound

    def between(self, low: int, high: int) -> int:
        """Draw an integer from `[low, high]`."""
        return low + self.below(high - low + 1)

    def percent(self, chance: int) -> bool:
        """Come out true in `chance` of a hundred cases."""
        return self.below(100) < chance

    def pick(self, items: Sequence[Item]) -> Item:
        """Draw one item."""
        return items[self.below(len(items))]

    def some(self, items: Sequence[Item], count: int) -> list[Item]:
        """Draw `count` different places, in random order."""
        pool = list(items)
        for place in range(count):
            other = self.between(place, len(pool) - 1)
            pool[place], pool[other] = pool[other], pool[place]
        return pool[:count]
