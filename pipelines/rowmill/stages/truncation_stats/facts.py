"""The facts of truncation statistics, of records as of all other rows.

What belongs here: their names and types. What does not: counting them (`stage.py`, `table_lengths.py`).
"""

from dataclasses import dataclass

from rowmill.schema.facts import UNCOUNTED, Uncounted


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationStatsFacts:
    """What an output of the stage is counted by; nothing is truncated where examples are put together of records."""

    context_overflow: float
    limit: int
    """Tokens that an example may have."""
    examples: int
    records: int | Uncounted = UNCOUNTED
    """Records that examples were planned of."""
    shortened: int | str
    dropped_for_length: int
    tokens_removed: int | str
    trained_removed: int | str
    quantiles: dict[str, int]
    buckets: dict[str, int]
    hints: list[str]
