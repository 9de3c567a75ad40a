"""The facts of truncation statistics, for records datasets and all others."""

from dataclasses import dataclass

from rowmill.schema.facts import UNCOUNTED, Uncounted


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationStatsFacts:
    """Facts of the stage's output; examples assembled from records are never truncated."""

    context_overflow: float
    limit: int
    """Maximum tokens of an example."""
    examples: int
    records: int | Uncounted = UNCOUNTED
    """Records from which examples were planned."""
    shortened: int | str
    dropped_for_length: int
    tokens_removed: int | str
    trained_removed: int | str
    quantiles: dict[str, int]
    buckets: dict[str, int]
    hints: list[str]
