"""What scanned source files are counted by."""

from dataclasses import dataclass

from rowmill.schema.counts import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounts(Counts):
    """What the files of a source are counted by."""

    records: int = 0
    files: int = 0
    files_without_records: int = 0
    parts: int = 0
    """Ranges of files that are read together."""

    def count_output(self) -> int:
        """Return how many records came out."""
        return self.records
