"""What every topic is written with: turns, calls, tables in text, and the small words around numbers.

What belongs here: anything two topics share. What does not: a topic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One use of a tool, and what the tool answered."""

    name: str
    arguments: dict[str, Any]
    result: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer; reasoning where there is something to think about, calls where a tool helps."""

    question: str
    answer: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


def words(text: str) -> tuple[str, ...]:
    """Read a list written as text: items between commas, on as many lines as they need."""
    return tuple(item.strip() for item in text.replace("\n", " ").split(","))


def table(text: str) -> tuple[tuple[str, ...], ...]:
    """Read a table written as text: a row on each line, cells between bars."""
    return tuple(tuple(cell.strip() for cell in line.split("|")) for line in text.strip().splitlines())


def blocks(text: str) -> list[str]:
    """Read texts that are parted by blank lines."""
    return text.strip().split("\n\n")


def number(numerator: int, denominator: int = 1) -> str:
    """Write a fraction as a decimal without trailing zeros."""
    return f"{round(numerator / denominator, 2):g}" if numerator % denominator else str(numerator // denominator)


def clock(minutes: int) -> str:
    """Write minutes since midnight as HH:MM."""
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def listing(items: Sequence[str]) -> str:
    """Join items as prose: `a, b and c`."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def numbered(items: Sequence[str]) -> str:
    """Write items as a numbered list, one per line."""
    return "\n".join(f"{place}. {item}" for place, item in enumerate(items, 1))


NAMES = words("""
    Amara, Bilal, Chiara, Dmitri, Elif, Farid, Greta, Hana, Ines, Jonas, Kofi, Lena, Mateo, Noor, Oskar, Priya, Quentin,
    Rosa, Sven, Tariq, Uma, Viktor, Wanda, Yuki, Zoé
""")
MONTHS = words("""
    January, February, March, April, May, June, July, August, September, October, November, December
""")
WEEKDAYS = words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
