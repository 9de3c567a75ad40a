"""What records must keep to among each other: whole groups in order, series that step on.

What belongs here: the laws of grouped and sequential text, over objects that are records by themselves. What does
not: what makes an object a record (`serialization/`), how values are read to positions (`time_order.py`).

Each law marks spans invalid, with the first reason that applies; what is left is accepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact

from rowmill.core.config import Config
from rowmill.tabular.parsing.spans import TextSpan
from rowmill.tabular.schema import Record, Value
from rowmill.tabular.time_order import Position, SortKey

_EXACT = Context(prec=60, traps=[Inexact])
"""Differences of positions; one that needs more digits is no interval that anyone set."""


class Validation(Config):
    """What becomes of groups with something wrong in them; turned on, none of these lowers the valid count."""

    group_by_accept_no_delineator: bool = False
    """Records between which the text has no delimiters are a group; otherwise `group_incomplete`."""
    group_by_ignore_invalid_records: bool = False
    """Bad records of a group are dropped, and still counted; otherwise all of it is `group_has_invalid`."""
    group_by_fix_non_unique_value: bool = False
    """All records of a group take the first valid one's key; otherwise they are `group_mixed_key`."""
    group_by_fix_unordered_records: bool = False
    """A group is sorted by its order column; otherwise it is `group_unordered`."""


@dataclass(frozen=True, slots=True)
class DelimitedSpans:
    """The spans between two delimiters, and whether these are the beginning and the end of a group."""

    spans: Sequence[TextSpan]
    is_begun: bool
    is_ended: bool


@dataclass(frozen=True, slots=True)
class PlacementColumns:
    """Which columns place a record: its group's, and its order's with the way to read it."""

    group_columns: Sequence[str] = ()
    order_column: str | None = None
    order: SortKey | None = None
    interval: int | Decimal | None = None

    def key(self, record: Record) -> list[Value]:
        """Return a record's typed group key: 1 is not `"1"`."""
        return [record[name] for name in self.group_columns]

    def find_problem(self, record: Record) -> tuple[str, str] | None:
        """Return the reason and column if a record has no place in any order."""
        if self.order_column is None or self.order is None:
            return None
        value = record.get(self.order_column)
        if value is None:
            return "order_missing", self.order_column
        return ("timestamp", self.order_column) if self.order.read(value) is None else None


# ── Groups ─────────────────────────────────────────────────────────────────────────────────────────


def validate_group(piece: DelimitedSpans, place: PlacementColumns, options: Validation) -> list[Record]:
    """Accept the records of a piece, or none of them; the records come in the group's order.

    A span that is bad by itself keeps its own reason.
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
    return _sort_group(good, records, place, options)


def _sort_group(
    good: Sequence[TextSpan], records: list[Record], place: PlacementColumns, options: Validation
) -> list[Record]:
    if place.order is None or place.order_column is None:
        return records
    positions = place.order.series([record[place.order_column] for record in records])
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
    """Accept records up to the first bad one or the end of sequence; the rest is `after_failure`.

    `group` is the key that all must have (without it, the first record's); `after` the position that the first
    record follows.
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
    """Return the position of a record that may come next; otherwise its span is made invalid."""
    assert span.record is not None
    if place.key(span.record) != key:
        span.fail("group_mixed_key", next(name for name in place.group_columns))
        return None
    if place.order is None or place.order_column is None:
        return None
    position = place.order.following(after, span.record[place.order_column])
    if after is None:
        return position
    if place.interval is not None:
        if not _matches_interval(after, position, place.interval):
            span.fail("step", place.order_column)
    elif position < after:
        span.fail("order", place.order_column)
    return position


def _matches_interval(after: Position, position: Position, interval: int | Decimal) -> bool:
    try:
        return _EXACT.subtract(position, after) == interval
    except Inexact:
        return False
