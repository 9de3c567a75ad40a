"""Rules between generated records: complete groups in order, series that advance by their interval.

Each rule marks spans invalid, with the first reason that applies; the rest is accepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact

from rowmill.core.config import Config
from rowmill.kinds.tables.parsing.scanner import TextSpan
from rowmill.kinds.tables.schema import Record, Value
from rowmill.kinds.tables.time_order import Position, SortKey

_EXACT = Context(prec=60, traps=[Inexact])
"""Differences of positions; one that needs more digits cannot equal a configured interval."""


class Validation(Config):
    """Repairs of generated groups; turning one on never lowers the count of valid records."""

    group_by_accept_no_delineator: bool = False
    """Accept records without delimiters around them as a group; otherwise `group_incomplete`."""
    group_by_ignore_invalid_records: bool = False
    """Drop and count the invalid records of a group; otherwise the whole group is `group_has_invalid`."""
    group_by_fix_non_unique_value: bool = False
    """Give all records of a group the first valid one's key; otherwise they are `group_mixed_key`."""
    group_by_fix_unordered_records: bool = False
    """Sort a group by its order column; otherwise it is `group_unordered`."""


@dataclass(frozen=True, slots=True)
class DelimitedSpans:
    """The spans between two delimiters, and whether these begin and end a group."""

    spans: Sequence[TextSpan]
    is_begun: bool
    is_ended: bool


@dataclass(frozen=True, slots=True)
class PlacementColumns:
    """The columns that group and order records, and how the order column is read."""

    group_columns: Sequence[str] = ()
    order_column: str | None = None
    order: SortKey | None = None
    interval: int | Decimal | None = None

    def key(self, record: Record) -> list[Value]:
        """Return a record's typed group key: 1 is not `"1"`."""
        return [record[name] for name in self.group_columns]

    def find_problem(self, record: Record) -> tuple[str, str] | None:
        """Return the reason and column if a record cannot be ordered."""
        if self.order_column is None or self.order is None:
            return None
        value = record.get(self.order_column)
        if value is None:
            return "order_missing", self.order_column
        return ("timestamp", self.order_column) if self.order.read(value) is None else None


# ── Groups ─────────────────────────────────────────────────────────────────────────────────────────


def validate_group(piece: DelimitedSpans, place: PlacementColumns, options: Validation) -> list[Record]:
    """Accept all records of a piece or none; they are returned in the group's order.

    A span that is invalid by itself keeps its reason.
    """
    good = [span for span in piece.spans if span.kind == "record"]
    if not (piece.is_begun and piece.is_ended) and not options.group_by_accept_no_delineator:
        return _fail_spans(good, "group_incomplete")
    is_bad = any(span.kind in {"invalid", "truncated", "prose"} for span in piece.spans)
    if is_bad and not options.group_by_ignore_invalid_records:
        return _fail_spans(good, "group_has_invalid")
    records = [span.record for span in good if span.record is not None]
    if not records:
        return []
    key = place.key(records[0])
    if any(place.key(record) != key for record in records[1:]):
        if not options.group_by_fix_non_unique_value:
            return _fail_spans(good, "group_mixed_key")
        records = [{**record, **dict(zip(place.group_columns, key, strict=True))} for record in records]
    if place.order is None or place.order_column is None:
        return records
    positions = place.order.read_series([record[place.order_column] for record in records])
    by_position = sorted(range(len(records)), key=positions.__getitem__)
    if by_position == list(range(len(records))):
        return records
    if not options.group_by_fix_unordered_records:
        return _fail_spans(good, "group_unordered", place.order_column)
    return [records[index] for index in by_position]


def _fail_spans(good: Sequence[TextSpan], reason: str, column: str = "") -> list[Record]:
    for span in good:
        span.fail(reason, column)
    return []


# ── Series ─────────────────────────────────────────────────────────────────────────────────────────


def validate_series(
    pieces: Sequence[DelimitedSpans],
    place: PlacementColumns,
    *,
    group: Mapping[str, Value] | None,
    after: Position | None,
) -> tuple[list[Record], list[Position]]:
    """Accept records up to the first invalid one or the end of sequence; the rest is `after_failure`.

    `group` is the key that all must have (by default the first record's), `after` the position of the record before the
    first one.
    """
    records: list[Record] = []
    positions: list[Position] = []
    key = None if group is None else [group[name] for name in place.group_columns]
    has_ended = False
    for piece in pieces:
        for span in piece.spans:
            if span.kind not in {"record", "invalid"}:
                continue
            if has_ended or span.record is None:
                span.fail(*(("after_failure", "") if has_ended else (span.reason, span.column)))
                has_ended = True
                continue
            key = place.key(span.record) if key is None else key
            position = _advance_position(span, place, key, after)
            if span.kind == "invalid":
                has_ended = True
                continue
            records.append(span.record)
            if place.order is not None:
                positions.append(position)
                after = position
        has_ended = has_ended or piece.is_ended
    return records, positions


def _advance_position(
    span: TextSpan, place: PlacementColumns, key: Sequence[Value], after: Position | None
) -> Position | None:
    """Return the position of the next record, or mark its span invalid."""
    assert span.record is not None
    if place.key(span.record) != key:
        span.fail("group_mixed_key", next(name for name in place.group_columns))
        return None
    if place.order is None or place.order_column is None:
        return None
    position: Position = place.order.read_after(after, span.record[place.order_column])
    if after is None:
        return position
    if place.interval is not None:
        try:
            matches = _EXACT.subtract(position, after) == place.interval
        except Inexact:
            matches = False
        if not matches:
            span.fail("step", place.order_column)
    elif position < after:
        span.fail("order", place.order_column)
    return position
