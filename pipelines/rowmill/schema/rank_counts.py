"""What the partitions of an order are counted by, rank by rank, and what describes one rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rowmill.schema.counts import Counts, Details, compute_share, keep_largest, keep_smallest


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts(Counts):
    """What the ranks of an order are counted by, as they were read back."""

    ranks: int = 0
    """Ranks that are built."""
    world_size: int = keep_largest()
    """Ranks that the order is for."""
    stale_ranks: int = 0
    """Ranks that are built of another order only."""
    unequal_ranks: int = 0
    """Ranks whose segments are not those that the order names."""
    sequences: int = 0
    """Sequences, fillers among them."""
    fillers: int = 0
    tokens: int = 0
    """Tokens of the sequences, without fillers and padding."""
    trained_tokens: int = 0
    padding: int = 0
    """Pad tokens: of fillers, and after segments."""
    most_trained_tokens: int = keep_largest()
    """Trained tokens of the rank that has most."""
    least_trained_tokens: int | None = keep_smallest()
    """Trained tokens of the rank that has fewest."""
    sequences_by_dataset: Mapping[str, int] = field(default_factory=dict[str, int])
    tokens_by_dataset: Mapping[str, int] = field(default_factory=dict[str, int])
    trained_tokens_by_dataset: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def trained_spread(self) -> float:
        """How many trained tokens the rank with fewest lacks, as a share of those of the rank with most."""
        return compute_share(self.most_trained_tokens - (self.least_trained_tokens or 0), self.most_trained_tokens)

    def count_unconserved(self) -> int:
        """Return how many ranks do not hold what the order names."""
        return self.unequal_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDetails(Details):
    """What describes one rank."""

    content_hash: str
    """The hash of its segments as they were read back."""
