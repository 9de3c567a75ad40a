"""What only tables are counted by, and the checks of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rowmill.schema.counts import Counts, Details, keep_largest, keep_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class TableExampleCounts(Counts):
    """What the examples of a table are counted by; the limits are those of all examples."""

    changed_by_wire: int = 0
    """Records whose text does not say all that they hold."""
    flushes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Examples by the reason that they ended."""
    prompt_tokens: int = keep_largest()
    """Tokens of the prompt that begins each example."""
    limit: int = keep_largest()
    """Tokens that an example may have."""
    record_room: int = keep_largest()
    """Tokens of an example that records may take."""
    longest_example: int = keep_largest()
    longest_group: int = keep_largest()
    """Records of the largest group."""
    samples_of_altered: Mapping[str, tuple[str, ...]] = keep_samples()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRecordDetails(Details):
    """The records of a part that could not be encoded."""

    rejects: tuple[tuple[int, str, str], ...]
    """Place, reason and detail of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlanDetails(Details):
    """What the plan of one partition names."""

    plan: tuple[Any, ...]
    """`PLAN_FACTS` as JSON."""
    slices: tuple[tuple[str, str, int, int], ...]
    """Fingerprint, split, records and tokens of each slice."""
    states: Mapping[str, str]
    """A digest of the states of the rows of each part that are not kept, by the part's number."""
    prefills: tuple[str, ...]
    """Fingerprints of the prefills of series."""
