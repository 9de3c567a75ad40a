"""What the scores of a teacher's server are counted by."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rowmill.schema.counts import Counts, add_floats, compute_share, keep_samples
from rowmill.schema.ledger import KEPT, REJECTED


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCounts(Counts):
    """What scored examples are counted by."""

    kept: int = 0
    """Examples with scores."""
    reasons: Mapping[str, int] = field(default_factory=dict[str, int])
    """Examples without scores, by reason."""
    tokens: int = 0
    """Tokens with scores."""
    logprobs: float = add_floats()
    """Sum of the tokens' own log-probabilities."""
    mass: float = add_floats()
    """Sum over tokens of the probability of the likeliest ids together."""
    failed_requests: Mapping[str, int] = field(default_factory=dict[str, int])
    """Requests that failed, by kind of failure; most were sent again."""
    samples_of_rejects: Mapping[str, tuple[str, ...]] = keep_samples()

    @property
    def rejected(self) -> int:
        """Examples without scores."""
        return sum(self.reasons.values())

    @property
    def mean_logprob(self) -> float:
        return round(self.logprobs / self.tokens, 6) if self.tokens else 0.0

    @property
    def top_k_mass(self) -> float:
        """Mean probability of the likeliest ids of a token together."""
        return round(self.mass / self.tokens, 6) if self.tokens else 0.0

    def count_tokens(self) -> int:
        """Return the tokens with scores."""
        return self.tokens

    def share_unscored(self) -> float:
        """Return the share of examples without scores."""
        return compute_share(self.rejected, self.kept + self.rejected)

    def list_ledger(self) -> list[tuple[str, str, int]]:
        """Return the lines of the ledger."""
        return [(KEPT, "", self.kept), *((REJECTED, reason, count) for reason, count in self.reasons.items())]
