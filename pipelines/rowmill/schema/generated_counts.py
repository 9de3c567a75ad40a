"""What generated records are counted by: texts that were parsed, and records that a backend generated.

    text      …, {"a": 1}, {"a": }, {"b"      spans    record 1 · invalid:not_json 1 · truncated 1 · prose 1

How generated records differ from those of train is counted by the kind of data.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rowmill.schema.counts import Counts, compute_share, find_share, keep_any, keep_samples
from rowmill.schema.ledger import KEPT, REJECTED, sum_counts


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """Numbers of spans and characters by class: a kind, or `invalid:` and the reason.

    A report contains no data: no value of a record, and no name that a model made up.
    """

    items: Mapping[str, int] = field(default_factory=dict[str, int])
    characters: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def valid(self) -> int:
        """Accepted records."""
        return self.items.get("record", 0)

    @property
    def invalid(self) -> int:
        """Rejected objects."""
        return sum(self.reasons.values())

    @property
    def valid_fraction(self) -> float:
        """Share of valid objects; 0 without objects."""
        return self.valid / (self.valid + self.invalid) if self.valid else 0.0

    @property
    def reasons(self) -> dict[str, int]:
        return {
            name.removeprefix("invalid:"): count for name, count in self.items.items() if name.startswith("invalid:")
        }


def merge_span_counts(reports: Iterable[SpanCounts]) -> SpanCounts:
    """Add up the counts of several texts."""
    every = list(reports)
    return SpanCounts(sum_counts(one.items for one in every), sum_counts(one.characters for one in every))


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedCounts(Counts):
    """What generated records are counted by, wherever they are from."""

    kept: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rejected objects, and records that hold no text, by reason."""
    samples_of_rejects: Mapping[str, tuple[str, ...]] = keep_samples()

    @property
    def rejected(self) -> int:
        """Rejected objects, and records that hold no text."""
        return sum(self.reasons.values())

    def list_ledger(self) -> list[tuple[str, str, int]]:
        """Return the lines of the ledger."""
        return [(KEPT, "", self.kept), *((REJECTED, reason, count) for reason, count in self.reasons.items())]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTextCounts(Counts):
    """What parsed texts are counted by."""

    files: int = 0
    texts: int = 0
    items_by_class: Mapping[str, int] = field(default_factory=dict[str, int])
    """Spans of the texts, by the classes of `SpanCounts`."""
    characters_by_class: Mapping[str, int] = field(default_factory=dict[str, int])
    """Characters of these spans."""

    @property
    def truncated(self) -> int:
        """Objects that end with their text."""
        return self.items_by_class.get("truncated", 0)

    @property
    def characters(self) -> int:
        return sum(self.characters_by_class.values())

    @property
    def classified(self) -> float:
        return compute_share(self.characters_by_class.get("record", 0), self.characters)

    def report(self) -> SpanCounts:
        """Return the counts of all texts together."""
        return SpanCounts(self.items_by_class, self.characters_by_class)

    def share_valid(self) -> float | None:
        """Return the share of objects that are records, 0 for texts without an object; None without texts."""
        report = self.report()
        return compute_share(report.valid, report.valid + report.invalid) if self.texts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCounts(Counts):
    """What a run of a backend is counted by."""

    valid_objects: int = 0
    invalid_objects: int = 0
    """Objects that are no records; those that were only not chosen, or not needed, are none of them."""
    series: int = 0
    unfinished_series: int = 0
    """Series that ended before their stop."""
    rounds: int = 0
    """Rounds of all series."""
    is_empty: bool = keep_any()
    """Whether records or groups were asked for, and none was generated."""

    def share_valid(self) -> float:
        """Return the share of objects that are records; 0 without objects."""
        return compute_share(self.valid_objects, self.valid_objects + self.invalid_objects)

    def share_unfinished(self) -> float:
        """Return the share of series that ended before their stop; without series, 1 if nothing was generated."""
        share = find_share(self.unfinished_series, self.series)
        return float(self.is_empty) if share is None else share
