"""What comes before what: the exact position of a record in its group or series, from its order column.

What belongs here: which way of writing times a column keeps to, found over all its values; reading a value to a
position; days that roll over midnight. What does not: which column orders (`formats/`), sorting and cutting
(`assembly/`), checking generated records (`parsing/`). Assembly, parsing and generation read the same positions.

| order | values | position |
|---|---|---|
| `elapsed_seconds` | numbers, durations | the number, exact |
| `iso8601`, other dates | text, dates, moments | seconds since 1970, exact; no offset counts as UTC |
| time of day | `23:00`, times | seconds since midnight, plus 86,400 for each day passed |
| `text` | other text | itself: code points |

Positions of one column compare with each other; those of times are `int` or `Decimal`, so that steps are exact.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from pipelines.errors import ConfigError
from pipelines.iso8601 import canonical_date, canonical_datetime, canonical_time
from pipelines.records import Column, Value

Position: TypeAlias = Any
"""Where a value stands: `int` or `Decimal`, or `str` for text; only positions of one column are compared."""

DAY = 86400
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_MONTHS = {
    name: number
    for number, name in enumerate("jan feb mar apr may jun jul aug sep oct nov dec".split(), start=1)
}  # fmt: skip
_CLOCK = r"(?:[T ](\d{1,2}:\d\d(?::\d\d(?:\.\d{1,9})?)?))?"
_SLASHED = re.compile(rf"(\d{{1,2}})/(\d{{1,2}})/(\d{{4}}){_CLOCK}", re.ASCII)
_NAMED = re.compile(rf"([A-Za-z]{{3}}) (\d{{1,2}}) (\d{{4}}){_CLOCK}", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d{1,400}(?:\.\d{1,400})?", re.ASCII)


@dataclass(frozen=True)
class Order:
    """How a column's values are read to positions: `elapsed_seconds`, `iso8601`, `text` or a strptime text."""

    name: str

    def __reduce__(self) -> tuple[type["Order"], tuple[str]]:
        """Go to another process by name; functions cannot."""
        return (Order, (self.name,))

    @property
    def is_time(self) -> bool:
        """Whether positions are seconds, so that intervals mean something."""
        return self.name != "text"

    @cached_property
    def is_time_of_day(self) -> bool:
        """Whether a decrease is the next day."""
        return self.name == TIME_OF_DAY.name or ("%" in self.name and not _DATED.search(self.name))

    @cached_property
    def _read(self) -> Callable[[Value], Position | None]:
        return _READERS[self.name] if self.name in _READERS else _strptime(self.name, dated=not self.is_time_of_day)

    def read(self, value: Value) -> Position | None:
        """Return a value's position, or nothing if it is null or cannot be read."""
        return None if value is None else self._read(value)

    def following(self, previous: Position | None, value: Value) -> Position | None:
        """Return a value's position after another one's: a time of day that would decrease is the next day's."""
        position = self.read(value)
        if not self.is_time_of_day or previous is None or position is None:
            return position
        position += previous // DAY * DAY
        return position if position >= previous else position + DAY

    def series(self, values: Iterable[Value]) -> list[Position]:
        """Return the positions of a series in its own order, midnights passed included; `None` where there is none."""
        if not self.is_time_of_day:
            return [self.read(value) for value in values]
        positions: list[Position] = []
        previous: Position | None = None
        for value in values:
            position = self.following(previous, value)
            positions.append(position)
            previous = previous if position is None else position
        return positions


def find_order(
    column: Column,
    values: Iterable[Value],
    *,
    timestamp_format: str = "auto",
    must_be_time: bool = False,
    where: str = "time_series.timestamp_format",
) -> Order:
    """Return how a column's values are read; with `auto` the one format that reads every value that is not null.

    Text that is in no known format is ordered by code points, unless it `must_be_time`.

    Raises
    ------
    ConfigError
        If the column cannot order, no format reads all values, or two do and disagree on a value.

    """
    if timestamp_format == "auto":
        return _found(column, values, must_be_time=must_be_time, where=where)
    return named_order(timestamp_format, column, where=where)


def named_order(timestamp_format: str, column: Column, *, where: str = "time_series.timestamp_format") -> Order:
    """Return the order that a set format means: `iso8601`, `elapsed_seconds` or a strptime text.

    Raises
    ------
    ConfigError
        If it is none of these, or is not for a column of this type.

    """
    if column.type == "time" and timestamp_format == "iso8601":
        return TIME_OF_DAY
    if timestamp_format in _READERS:
        return Order(timestamp_format)
    if "%" not in timestamp_format:
        raise ConfigError(
            f"{where}: {timestamp_format!r} is no format; auto, iso8601, elapsed_seconds or a strptime text such as "
            "%Y-%m-%d %H:%M is; write one"
        )
    return Order(timestamp_format)


def _found(column: Column, values: Iterable[Value], *, must_be_time: bool, where: str) -> Order:
    match column.type:
        case "integer" | "float" | "decimal" | "duration":
            return ELAPSED
        case "datetime" | "date":
            return ISO8601
        case "time":
            return TIME_OF_DAY
        case "string":
            return _found_in_text([one for one in values if one is not None], column.name, must_be_time, where)
        case "boolean" | "bytes" | "list" | "struct" | "json":
            raise ConfigError(
                f"{where}: column {column.name!r} is {column.type}, which has no order; numbers, times and text have; "
                "name another order column"
            )


def _found_in_text(texts: Sequence[str], name: str, must_be_time: bool, where: str) -> Order:
    fitting = [order for order in _CANDIDATES if texts and all(order.read(text) is not None for text in texts)]
    if not fitting and not must_be_time:
        return TEXT
    if not fitting:
        tried = max(_CANDIDATES, key=lambda order: sum(order.read(text) is not None for text in texts))
        worst = next((text for text in texts if tried.read(text) is None), "")
        raise ConfigError(
            f"{where}: auto: no known format reads every value of column {name!r}; {tried.name} comes nearest and does "
            f"not read {worst!r:.60}; ISO 8601, d/m/Y, m/d/Y, %b %d %Y and %H:%M[:%S] are known; write the format as a "
            "strptime text"
        )
    for other in fitting[1:]:
        example = next((text for text in texts if fitting[0].read(text) != other.read(text)), None)
        if example is not None:
            raise ConfigError(
                f"{where}: auto: {fitting[0].name} and {other.name} both read every value of column {name!r} and "
                f"disagree on {example!r:.60}; one must be meant; write it"
            )
    return fitting[0]


# ── Formats ────────────────────────────────────────────────────────────────────────────────────────


def _elapsed(value: Value) -> Position | None:
    if type(value) is int:
        return value
    if type(value) is float:
        # The text that a float is written as is what it means: steps of 0.1 are steps of a tenth.
        return Decimal(repr(value)) if math.isfinite(value) else None
    if type(value) is Decimal:
        return value if value.is_finite() else None
    return Decimal(value) if type(value) is str and _NUMBER.fullmatch(value) else None


def _iso8601(value: Value) -> Position | None:
    if type(value) is not str:
        return None
    if len(value) == 10:
        return _day_seconds(value)
    text = canonical_datetime(value)
    if text is None:
        return None
    day, clock = _day_seconds(text[:10]), text[11:]
    sign = max(clock.rfind("+"), clock.rfind("-"))
    offset = _offset_seconds(clock[sign:]) if sign >= 0 else 0
    assert day is not None
    return _whole(day + _clock_seconds(clock[:sign] if sign >= 0 else clock) - offset)


def _day_seconds(text: str) -> int | None:
    return None if canonical_date(text) is None else (date.fromisoformat(text).toordinal() - _EPOCH_DAY) * DAY


def _offset_seconds(text: str) -> int:
    parts = [int(part) for part in text[1:].split(":")]
    seconds = sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    return -seconds if text[0] == "-" else seconds


def _clock_seconds(text: str) -> int | Decimal:
    """Return the seconds since midnight of `01:02:03.5`."""
    seconds = int(text[:2]) * 3600 + int(text[3:5]) * 60 + int(text[6:8])
    return seconds + Decimal(text[8:]) if len(text) > 8 else seconds


def _whole(seconds: int | Decimal) -> int | Decimal:
    return int(seconds) if seconds == int(seconds) else seconds


def _time_of_day(value: Value) -> Position | None:
    if type(value) is not str:
        return None
    text = canonical_time(value if value[1:2] != ":" else f"0{value}")
    return None if text is None else _whole(_clock_seconds(text))


def _on_day(year: str, month: int, day: str, clock: str | None) -> Position | None:
    midnight = _day_seconds(f"{year}-{month:02d}-{int(day):02d}")
    passed = 0 if clock is None else _time_of_day(clock)
    if midnight is None or passed is None:
        return None
    return midnight + passed


def _day_first(value: Value) -> Position | None:
    found = _SLASHED.fullmatch(value) if type(value) is str else None
    return None if found is None else _on_day(found[3], int(found[2]), found[1], found[4])


def _month_first(value: Value) -> Position | None:
    found = _SLASHED.fullmatch(value) if type(value) is str else None
    return None if found is None else _on_day(found[3], int(found[1]), found[2], found[4])


def _month_named(value: Value) -> Position | None:
    found = _NAMED.fullmatch(value) if type(value) is str else None
    month = None if found is None else _MONTHS.get(found[1].lower())
    return None if found is None or month is None else _on_day(found[3], month, found[2], found[4])


def _code_points(value: Value) -> Position | None:
    return value if type(value) is str else None


def _strptime(pattern: str, *, dated: bool) -> Callable[[Value], Position | None]:
    """Return a reader by `strptime`; a pattern without year, month and day is one of times of day."""

    @lru_cache(maxsize=1 << 16)
    def read_text(text: str) -> Position | None:
        try:
            moment = datetime.strptime(text, pattern)  # noqa: DTZ007  (no offset counts as UTC)
        except ValueError:
            return None
        if not dated:
            clock = moment.hour * 3600 + moment.minute * 60 + moment.second
            return _whole(clock + Decimal(moment.microsecond).scaleb(-6))
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        passed = aware - datetime(1970, 1, 1, tzinfo=UTC)
        return _whole(passed.days * DAY + passed.seconds + Decimal(passed.microseconds).scaleb(-6))

    return lambda value: read_text(value) if type(value) is str else None


ELAPSED = Order("elapsed_seconds")
ISO8601 = Order("iso8601")
TEXT = Order("text")
TIME_OF_DAY = Order("%H:%M[:%S]")
_CANDIDATES = (ISO8601, Order("%d/%m/%Y"), Order("%m/%d/%Y"), Order("%b %d %Y"), TIME_OF_DAY)
"""What `auto` tries on text; these dates may be followed by a time of day."""
_READERS: dict[str, Callable[[Value], Position | None]] = {
    ELAPSED.name: _elapsed,
    ISO8601.name: _iso8601,
    TEXT.name: _code_points,
    "%d/%m/%Y": _day_first,
    "%m/%d/%Y": _month_first,
    "%b %d %Y": _month_named,
    TIME_OF_DAY.name: _time_of_day,
}
_DATED = re.compile(r"(?<!%)(?:%%)*%-?[YymbBdjDFcxGVuUWs]")
