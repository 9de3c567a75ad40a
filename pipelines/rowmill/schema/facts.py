"""What an output is counted by: the numbers that its checks hold against bounds, and that others read by name.

    ParsedRecordsFacts(kept=2, …) ─name_facts─► Manifest.values {"kept": 2, …} ─read_facts─► the same

A fact is a number that is compared, or a few more that people are shown. None says that its check has nothing to ask
of this output.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FactsT = TypeVar("FactsT", bound="DataclassInstance")


def name_facts(facts: "DataclassInstance") -> dict[str, Any]:
    """Return a stage's facts by name, in the order of its fields, as a manifest stores them."""
    return {field.name: getattr(facts, field.name) for field in fields(facts)}


def read_facts(kind: type[FactsT], stored: Mapping[str, Any]) -> FactsT:
    """Return the facts that a manifest stores, as a stage declares them."""
    return kind(**stored)


@dataclass(frozen=True, slots=True)
class ParsedRecordsFacts:
    """Facts of the stage's output."""

    valid_fraction: float | None
    files: int
    texts: int
    kept: int
    rejected: int
    truncated: int
    characters: int
    classified: float
    exact_copies: float | None
    repeated_records: float | None
    repeated_train_records: float | None
    column_distance: float | None
    association_distance: float | None


@dataclass(frozen=True, slots=True)
class GeneratedSeriesFacts:
    """Facts of the stage's output."""

    valid_fraction: float
    failed_series: float
    series: int
    kept: int
    rejected: int
    rounds: int
    exact_copies: float | None
    repeated_records: float | None
    repeated_train_records: float | None
    column_distance: float | None
    association_distance: float | None


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
        return sum(count for name, count in self.items.items() if name.startswith("invalid:"))

    @property
    def valid_fraction(self) -> float:
        """Share of valid objects; 0 without objects."""
        return self.valid / (self.valid + self.invalid) if self.valid else 0.0

    @property
    def reasons(self) -> dict[str, int]:
        """Invalid objects by reason."""
        return {
            name.removeprefix("invalid:"): count for name, count in self.items.items() if name.startswith("invalid:")
        }
