"""What the lengths of examples are counted by, and what truncation removed of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rowmill.schema.counts import Counts, compute_share, keep_first, keep_largest


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCounts(Counts):
    """What the lengths of all kinds of examples are counted by."""

    limit: int = keep_largest()
    """Maximum tokens of an example."""
    examples: int = 0
    measured_rows: int = 0
    """Rows whose length is compared with the limit: examples and dropped rows, or the records that were planned."""
    overlong_rows: int = 0
    """Those of them that were longer, and lost tokens or were dropped."""
    dropped_for_length: int = 0
    quantiles: Mapping[str, int] = field(default_factory=dict[str, int])
    """Tokens of examples at some quantiles, of all examples together."""
    buckets: Mapping[str, int] = field(default_factory=dict[str, int])
    """Examples by their length as a share of the limit."""
    hints: tuple[str, ...] = keep_first()

    def share_overlong(self) -> float:
        """Return the share of rows that were longer than the limit."""
        return compute_share(self.overlong_rows, self.measured_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationCounts(Counts):
    """What truncation removed; examples assembled from records are never truncated."""

    shortened: int = 0
    """Examples that lost tokens."""
    tokens_removed: int = 0
    trained_removed: int = 0
