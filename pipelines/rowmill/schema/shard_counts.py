"""What packed shards are counted by, and what describes one shard.

    pack group 1  {PackingCounts}, its shards 0 1 ┐                      {PackingCounts} of the stage
    pack group 2  {PackingCounts}, its shards 0   ┴─ add up, number ───► a part per shard, with {ShardDetails}

What only shards of pairs are counted by stands with the kind `preference`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from rowmill.schema.content_hash import add_content_hashes
from rowmill.schema.counts import Counts, Details, compute_share, keep_any
from rowmill.schema.ledger import KEPT, REJECTED
from rowmill.schema.manifest import Part

FILL_BINS: Final = 20
"""Bins of equal width by which sequences are counted: by the share of their capacity that holds tokens."""


def name_fill_bin(number: int) -> str:
    """Return a bin's lower edge, by which sequences are counted."""
    return f"{number / FILL_BINS:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingCounts(Counts):
    """What packed shards of all kinds of data are counted by."""

    pack_groups: int = 0
    """Groups of parts that were packed apart from each other."""
    examples: int = 0
    """Examples, those in no sequence among them."""
    examples_by_split: Mapping[str, int] = field(default_factory=dict[str, int])
    """Those of them that entered packing, by split."""
    entered_examples: int = 0
    """All of these: without those that were held out for validation and then not needed."""
    entered_trained_tokens: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict[str, int])
    """Examples rejected by packing, by reason."""
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    """Other examples without a token in any sequence, by state."""
    lost_trained_tokens: int = 0
    """Trained tokens in no sequence, or no longer trained where a sequence begins."""
    tokens_left_out: int = 0
    """Tokens of examples that are in no sequence."""
    sequences: int = 0
    segments: int = 0
    tokens: int = 0
    """Tokens of the sequences, without padding."""
    trained_tokens: int = 0
    capacity: int = 0
    """Tokens that the sequences could hold."""
    sequences_by_fill: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sequences by the share of their capacity that holds tokens: by the lower edge of its bin."""
    unlimited_sequences: int = 0
    """Sequences that there would be if one could have any number of segments."""
    is_padded: bool = keep_any()
    """Whether segments are padded."""
    padding: int = 0
    """Pad tokens after segments."""
    damaged_files: int = 0
    """Files that hold something else than what was written."""
    content_hash: str = add_content_hashes()
    """The hash of the segments as they were read back."""
    planned_hash: str = add_content_hashes()
    """The hash of the segments as they were planned."""

    @property
    def rejected(self) -> int:
        return sum(self.reasons.values())

    def count_tokens(self) -> int:
        """Return the tokens of the sequences."""
        return self.tokens

    def count_unconserved(self) -> int:
        """Return 1 if the segments read back are not those that were planned."""
        return int(self.content_hash != self.planned_hash)

    def share_filled(self) -> float:
        """Return the share of the capacity that holds tokens; 1 without sequences."""
        return compute_share(self.tokens, self.capacity) if self.sequences else 1.0

    def count_losses(self) -> dict[str, tuple[int, int]]:
        """Return what is in no sequence and what entered, of examples and of trained tokens."""
        lost = min(self.entered_trained_tokens, self.lost_trained_tokens)
        return {
            "examples": (self.rejected, self.entered_examples),
            "trained_tokens": (lost, self.entered_trained_tokens),
        }

    def share_lost(self) -> float | None:
        """Return the larger of the shares that are in no sequence; None if no example entered."""
        return max(compute_share(*of) for of in self.count_losses().values()) if self.entered_examples else None

    def share_padding(self) -> float | None:
        """Return the share of pad tokens among all tokens; None if segments are not padded."""
        return compute_share(self.padding, self.tokens + self.padding) if self.is_padded else None

    def list_ledger(self) -> list[tuple[str, str, int]]:
        """Return the lines of the ledger of examples."""
        kept = self.examples - self.rejected - sum(self.left_out.values())
        return [
            (KEPT, "", kept),
            *((REJECTED, reason, count) for reason, count in self.reasons.items()),
            *((state, "", count) for state, count in self.left_out.items()),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixCounts(Counts):
    """What examples save that share the tokens of their beginnings."""

    tokens_shared: int = 0
    """Tokens of examples that are stored once with those of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDetails(Details):
    """What describes one shard."""

    split: str
    first_sequence: int
    """The number of its first sequence in the split; in a pack group, among the group's own."""
    sequences: int
    segments: int
    tokens: int
    trained_tokens: int
    padding: int
    domains: tuple[str, ...] = ()
    """The domains of its segments, where shards store them."""

    def count(self, *, seq_len: int) -> PackingCounts:
        """Return what its sequences are counted by, each of which could hold `seq_len` tokens."""
        return PackingCounts(
            sequences=self.sequences,
            segments=self.segments,
            tokens=self.tokens,
            trained_tokens=self.trained_tokens,
            padding=self.padding,
            capacity=self.sequences * seq_len,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackGroupDetails(Details):
    """The shards of a pack group, in the order of the files that are named by their numbers."""

    shards: tuple[ShardDetails, ...]

    @classmethod
    def parse(cls, stored: Mapping[str, Any]) -> Self:
        """Return what `to_json` described."""
        return cls(shards=tuple(ShardDetails.parse(own) for own in stored["shards"]))


def select_shards(parts: Iterable[Part], split: str) -> list[Part]:
    """Return the parts that are shards of a split."""
    return [part for part in parts if (shard := part.find_details(ShardDetails)) is not None and shard.split == split]
