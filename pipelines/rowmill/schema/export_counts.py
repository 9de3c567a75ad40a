"""What an export is counted by, and the card that describes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rowmill.schema.content_hash import add_content_hashes
from rowmill.schema.counts import Counts, Details, keep_any
from rowmill.schema.ledger import KEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCounts(Counts):
    """What an export in any format is counted by."""

    sequences: int = 0
    segments: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    left_out_by_state: Mapping[str, int] = field(default_factory=dict[str, int])
    """Segments that the format cannot store, by their state in the ledger."""
    files: int = 0
    """Files that a trainer reads."""
    size_bytes: int = 0
    """Bytes of these files."""
    content_hash: str = add_content_hashes()
    """The hash of the segments in the shards."""
    is_unequal: bool = keep_any()
    """Whether the segments that were written are others than those in the shards."""

    @property
    def left_out(self) -> int:
        """Segments that the format cannot store."""
        return sum(self.left_out_by_state.values())

    def count_unconserved(self) -> int:
        """Return 1 if the export does not hold what the shards do."""
        return int(self.is_unequal)

    def list_ledger(self) -> list[tuple[str, str, int]]:
        """Return the lines of the ledger of segments."""
        left_out = ((state, "", count) for state, count in self.left_out_by_state.items() if count)
        return [(KEPT, "", self.segments), *left_out]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportDetails(Details):
    """What describes an export."""

    card: Mapping[str, Any]
    """The identity card that is written next to the files."""
