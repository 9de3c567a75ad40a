"""The size of an output: its rows with their noun, and its parts.

Summing the rows of a part's files gives no answer: a part holds other files next to its output, such as rejects, an
index of segments or a ledger, and two stages have an output without files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rowmill.schema.manifest import Manifest


@dataclass(frozen=True, slots=True)
class RowCount:
    """The number of rows of an output, and the noun for one of them."""

    count: int
    noun: str


CountRows = Callable[[Manifest], RowCount | None]
"""Returns the rows of an output; None if its manifest does not count them."""


def count_rows_by_fact(fact: str, noun: str) -> CountRows:
    """Return a function that reads the number of rows from a fact of the manifest."""

    def count(output: Manifest) -> RowCount | None:
        return RowCount(int(output.facts[fact]), noun) if fact in output.facts else None

    return count


def _count_no_rows(output: Manifest) -> RowCount | None:
    del output
    return None


@dataclass(frozen=True, slots=True)
class StatsInputs:
    """What a stage contributes to the statistics besides its ledgers."""

    rows: CountRows = _count_no_rows
    """Counts the rows shown in the view `builds` and on the stage's page."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of a part's file → the table of statistics that its rows are copied to."""
    tables: tuple[str, ...] = ()
    """Tables of statistics that the manifest holds completely; its other tables are for its page only."""


def count_parts(output: Manifest) -> int:
    """Return the number of parts of an output; for `raw_dataset`, the ranges of its source files."""
    return len(output.parts) or int(output.facts.get("parts", 0))
