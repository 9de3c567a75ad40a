"""How much an output holds: its rows, what one of them is called, and its parts.

What belongs here: the forms in which a stage declares what the statistics take from it, and the one answer that its
page, a line of the terminal and the view `builds` give. What does not: any stage's declaration, and counting; whoever
writes an output counts what it holds into the manifest's facts.

The rows of a part's files are no answer: a part holds other files beside its output, such as rejects, an index of
segments or a ledger, and two stages have an output without files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rowmill.schema.manifest import Manifest


@dataclass(frozen=True, slots=True)
class RowCount:
    """How many rows an output holds, and what one of them is called."""

    count: int
    noun: str


CountRows = Callable[[Manifest], RowCount | None]
"""Returns what an output holds; None if its manifest does not say."""


def count_rows_by_fact(fact: str, noun: str) -> CountRows:
    """Return what reads the number of rows from a fact of the manifest, and calls one of them `noun`."""

    def count(made: Manifest) -> RowCount | None:
        return RowCount(int(made.facts[fact]), noun) if fact in made.facts else None

    return count


def _count_no_rows(made: Manifest) -> RowCount | None:
    del made
    return None


@dataclass(frozen=True, slots=True)
class StatsInputs:
    """What the statistics take from a stage's output, beside its ledgers: declared by the stage."""

    rows: CountRows = _count_no_rows
    """How many rows the view `builds` and the stage's page give."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of a part's file → the table of statistics that its rows are copied to."""
    tables: tuple[str, ...] = ()
    """Tables of statistics that the manifest holds whole; its other tables are for its page only."""


def count_parts(made: Manifest) -> int:
    """Return how many parts an output has; those of `raw_dataset` are ranges of source files, and counted alone."""
    return len(made.parts) or int(made.facts.get("parts", 0))
