r"""Spans that partition generated text, and their counts.

{"g":"a","t":1}\n{"g":"a","t":tru
└── record ───┘└┘└── truncated ──┘
             delimiter
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rowmill.tabular.schema import Record
from rowmill.tabular.time_order import Position

SpanKind = Literal["record", "invalid", "delimiter", "prose", "truncated"]

REASONS = (
    # One object by itself, in order of precedence.
    "invalid_json number_too_large too_deep duplicate_column unknown_column missing_column null type order_missing "
    "timestamp "
    # An object in its group.
    "group_incomplete group_has_invalid group_mixed_key group_unordered "
    # An object in its series.
    "step order after_failure "
    # A completion that generation discarded.
    "not_chosen past_stop past_bound series_incomplete"
).split()
"""The closed list of reasons why an object of generated text is rejected."""


@dataclass(slots=True)
class TextSpan:
    """Characters `[start, end)` of a text with their kind; `reason` and `column` only if invalid.

    `record` is the object's record if it is valid by itself.
    """

    start: int
    end: int
    kind: SpanKind
    reason: str = ""
    column: str = ""
    record: Record | None = None

    def fail(self, reason: str, column: str = "") -> None:
        """Mark the span invalid."""
        self.kind, self.reason, self.column = "invalid", reason, column


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


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A parsed text: its spans in order, the accepted records, the counts.

    `positions` are the records' in sequential mode, empty in others. Records of a sorted group are in the new order,
    others in the order of the text.
    """

    spans: Sequence[TextSpan]
    records: Sequence[Record]
    report: SpanCounts
    positions: Sequence[Position] = ()


def count_spans(spans: Iterable[TextSpan]) -> SpanCounts:
    """Count spans and characters by class, sorted by class."""
    items: dict[str, int] = {}
    characters: dict[str, int] = {}
    for span in spans:
        name = f"invalid:{span.reason}" if span.reason else span.kind
        items[name] = items.get(name, 0) + 1
        characters[name] = characters.get(name, 0) + span.end - span.start
    return SpanCounts({name: items[name] for name in sorted(items)}, {name: characters[name] for name in sorted(items)})


def merge_span_counts(reports: Iterable[SpanCounts]) -> SpanCounts:
    """Add up the counts of several texts."""
    items: dict[str, int] = {}
    characters: dict[str, int] = {}
    for report in reports:
        for name, number in report.items.items():
            items[name] = items.get(name, 0) + number
            characters[name] = characters.get(name, 0) + report.characters[name]
    return SpanCounts({name: items[name] for name in sorted(items)}, {name: characters[name] for name in sorted(items)})
