"""What the order of training is counted by, block by block, and the leaks between splits.

    block 0 of the order  {OrderCounts, OrderBlockDetails} ┐
    block 1               {OrderCounts, OrderBlockDetails} ┼─ add up ─► {OrderCounts, RowLeakCounts, …} of the stage
    the splits            {RowLeakCounts, GroupLeakCounts} ┘

A leak that no dataset of a recipe can have, such as one of groups, has no counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rowmill.schema.counts import Counts, Details, add_floats, compute_share, keep_any, keep_largest


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderCounts(Counts):
    """What the order of training is counted by."""

    sequences: int = 0
    """Train sequences, in the order or not."""
    places: int = 0
    """Places of the order: of sequences, each as often as it is shown, and of fillers."""
    fillers: int = 0
    dropped_places: int = 0
    """Places that the order lacks because a last step or epoch was incomplete."""
    steps: int = 0
    tokens: int = 0
    """Tokens of all places."""
    places_by_dataset: Mapping[str, int] = field(default_factory=dict[str, int])
    tokens_by_dataset: Mapping[str, int] = field(default_factory=dict[str, int])
    trained_tokens_by_dataset: Mapping[str, int] = field(default_factory=dict[str, int])
    excess_load: float = add_floats()
    """Sum over steps of the excess of the largest rank's load over the mean, as a share of the mean."""
    has_targets: bool = keep_any()
    """Whether sequences have trained tokens: those of prompts have none."""
    untrained_rank_steps: int = 0
    """Pairs of a step and a rank without a trained token."""
    largest_share_error: float = keep_largest()
    """The largest distance, in sequences, of a dataset from its share at the end of a block of the mixture."""

    @property
    def trained_tokens(self) -> int:
        return sum(self.trained_tokens_by_dataset.values())

    def count_shown(self) -> int:
        """Return the places that hold a sequence."""
        return self.places - self.fillers

    def share_dropped(self) -> float:
        """Return the share of the scheduled places that the order lacks."""
        return compute_share(self.dropped_places, self.count_shown() + self.dropped_places)

    def average_excess(self) -> float:
        """Return the mean over steps of the excess of the largest rank's load over the mean."""
        return round(self.excess_load / self.steps, 9) if self.steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCounts(Counts):
    """What the order costs, counted where ranks are balanced by it."""

    flops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderBlockDetails(Details):
    """Which datasets the positions of a block are of: a block of the order may begin and end within one of the mixture.

    `labels` has the positions of each dataset, in recipe order, in one block of the mixture after the other, the first
    of which is number `first_block`.
    """

    first_block: int
    labels: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLeakCounts(Counts):
    """Rows of two splits, and the sizes of splits."""

    contents_in_two_splits: int = 0
    """Contents that rows of two splits have."""
    largest_split_error: float = keep_largest()
    """The largest distance between a split's share of rows and the configured share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLeakCounts(Counts):
    """Groups of rows, where a dataset has groups."""

    groups_in_two_splits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLeakCounts(Counts):
    """Prompts of rows that share no examples."""

    compared_rows: int = 0
    """Rows outside train."""
    rows_with_train_prompt: int = 0
    """Those of them whose prompt also opens a train row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeakCounts(Counts):
    """Times of rows, where a dataset is split by them."""

    early_rows: int = 0
    """Rows in an earlier split than their time belongs to, or inside the gap between two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearDuplicateLeakCounts(Counts):
    """Examples outside train, or records of tables, compared with those in train."""

    compared_examples: int = 0
    near_train_examples: int = 0
    """Those of them that resemble one in train."""
