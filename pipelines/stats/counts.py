"""How much an output holds: its rows, what one of them is called, and its parts.

What belongs here: the one answer that a stage's page, a line of the terminal and the view `builds` give. What does not:
counting; whoever writes an output counts what it holds into the manifest's facts.

The rows of a part's files are no answer: a part holds other files beside its output, such as rejects, an index of
segments or a ledger, and two stages have an output without files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipelines.manifest import EXPORTS, Manifest


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows an output holds, and what one of them is called."""

    count: int
    noun: str


_COUNTED: Final[Mapping[str, tuple[str, str]]] = {
    "raw_dataset": ("records", "record"),
    "canonical_rows": ("kept", "row"),
    "tokenized_examples": ("examples", "example"),
    # It writes no rows; these are those that it measures.
    "truncation_stats": ("examples", "example"),
    "packed_shards": ("sequences", "sequence"),
    "training_splits": ("places", "place"),
    "gpu_partitions": ("sequences", "sequence"),
    "parsed_records": ("kept", "record"),
    "generated_series": ("kept", "record"),
}
"""Stage → the fact that counts its rows, and their name."""

_OF_EXPORTS: Final[Mapping[str, tuple[str, str]]] = {
    "packed": ("sequences", "sequence"),
    "unpacked": ("segments", "segment"),
}
"""The unit of an export → the same."""


def rows_of(made: Manifest) -> Rows | None:
    """Return what an output holds; None if its manifest does not tell."""
    is_export = made.stage == EXPORTS
    fact, noun = _OF_EXPORTS[made.card.get("unit", "unpacked")] if is_export else _COUNTED.get(made.stage, ("", ""))
    return Rows(int(made.facts[fact]), noun) if fact in made.facts else None


def parts_of(made: Manifest) -> int:
    """Return how many parts an output has; those of `raw_dataset` are ranges of source files, and counted alone."""
    return len(made.parts) or int(made.facts.get("parts", 0))
