r"""A record and its schema: columns in the order in which they are written, their values, and what orders records.

| type | value in a record | in JSON |
|---|---|---|
| integer | `int`, at most 4,300 digits | `1180591620717411303424` |
| float | `float` | `18.0`, `1e-12`, `"NaN"`, `"-Infinity"` |
| decimal | `Decimal`, digits and scale kept | `42.50` |
| boolean | `bool` | `true` |
| string | `str`, lone surrogates too | `"漢"` |
| datetime | `str`, canonical ISO 8601: `2024-01-15T00:00:00+02:00` | the same, quoted |
| date, time | `str`: `2024-01-15`; `01:02:03` | the same, quoted |
| duration | `Decimal` of seconds, no trailing zeros: `90`, `0.000000001` | a number |
| bytes | `bytes` | base64: `"AAE="` |
| list, struct | `list`, `dict` of the above | nested |
| json | `None`, `bool`, `int`, `Decimal`, `str`, `list`, `dict` with string keys | nested |

A null is `None`; an absent key is absent from the `dict`. Times are text because `datetime` has no nanoseconds
and sources have them; the canonical text of an instant with its offset is unique, so equal text is equal value.

The exact position of a record in its group or series is read from its order column.

| order | values | position |
|---|---|---|
| `elapsed_seconds` | numbers, durations | the number, exact |
| `iso8601`, other dates | text, dates, datetimes | seconds since 1970, exact; without an offset, UTC |
| time of day | `23:00`, times | seconds since midnight, plus 86,400 for each day passed |
| `text` | other text | the text itself, ordered by code points |

Positions of one column compare with each other; those of times are `int` or `Decimal`, so that steps are exact.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeAlias, get_args

from pydantic import TypeAdapter

from rowmill.core.errors import ConfigError
from rowmill.core.json import Json

ColumnType = Literal[
    "integer", "float", "decimal", "boolean", "string", "datetime", "date", "time", "duration", "bytes", "list",
    "struct", "json",
]  # fmt: skip
TYPES: tuple[ColumnType, ...] = get_args(ColumnType)
Value: TypeAlias = Any
"""A value of the types in the table above."""
Record: TypeAlias = dict[str, Value]
MAX_DIGITS = 4300
"""Maximum digits of an integer, Python's own limit: parsing takes time quadratic in them."""
MAX_DEPTH = 64
"""Maximum nesting of objects and lists, counting the record itself."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table, or a field or item inside one.

    `nullable`: its value may be `None`. `required`: every record has its key. `item` is the column of a list's items
    (its name is not written), `fields` are the columns of a struct.
    """

    name: str
    type: ColumnType
    nullable: bool = False
    required: bool = True
    item: "Column | None" = None
    fields: tuple["Column", ...] = ()

    def __post_init__(self) -> None:
        """Check that the inner columns fit the type."""
        assert (self.item is not None) == (self.type == "list"), (
            f"{self.name}: an item belongs to a list, and only to a list"
        )
        assert not self.fields or self.type == "struct", f"{self.name}: only a struct has fields"

    def to_json(self) -> dict[str, Json]:
        """Return the column as a JSON value."""
        result: dict[str, Json] = {
            "name": self.name, "type": self.type, "nullable": self.nullable, "required": self.required,
        }  # fmt: skip
        if self.item is not None:
            result["item"] = self.item.to_json()
        if self.type == "struct":
            result["fields"] = [field.to_json() for field in self.fields]
        return result


_COLUMNS = TypeAdapter(tuple[Column, ...])


@dataclass(frozen=True)
class RecordSchema:
    """The columns of a dataset's records, in the order in which their keys are written."""

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        """Check that names are unique."""
        assert len({column.name for column in self.columns}) == len(self.columns), "two columns have the same name"

    @cached_property
    def by_name(self) -> dict[str, Column]:
        return {column.name: column for column in self.columns}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def to_json(self) -> dict[str, Json]:
        """Return the schema as a JSON value."""
        return {"columns": [column.to_json() for column in self.columns]}

    @classmethod
    def from_json(cls, stored: Mapping[str, Json]) -> "RecordSchema":
        """Read what `to_json` returned."""
        return cls(_COLUMNS.validate_python(stored["columns"]))


Mode = Literal["tabular", "grouped", "sequential"]


# ── Canonical texts of times ───────────────────────────────────────────────────────────────────────


_OFFSET = r"(?:Z|[+-]\d\d:?\d\d(?::\d\d)?)"
_DATETIME = re.compile(rf"(\d{{4}}-\d\d-\d\d)[T ](\d\d:\d\d(?::\d\d)?)(?:[.,](\d{{1,9}}))?({_OFFSET})?", re.ASCII)
_TIME = re.compile(r"(\d\d:\d\d(?::\d\d)?)(?:[.,](\d{1,9}))?", re.ASCII)


def canonical_datetime(text: str) -> str | None:
    """Return the canonical form of an ISO 8601 datetime, or None if the text is not one.

    Seconds are always written, the fraction without trailing zeros, the offset unchanged except `Z` as `+00:00`.
    """
    found = _DATETIME.fullmatch(text)
    if found is None:
        return None
    day, clock, fraction, offset = found.groups()
    written = canonical_time(clock if fraction is None else f"{clock}.{fraction}")
    if written is None or canonical_date(day) is None:
        return None
    zone = "" if offset is None else "+00:00"
    if offset is not None and offset != "Z":
        digits = offset[1:].replace(":", "")
        parts = [digits[start : start + 2] for start in range(0, len(digits), 2)]
        if int(parts[0]) > 23 or any(int(part) > 59 for part in parts[1:]):
            return None
        if any(map(int, parts)):
            zone = offset[0] + ":".join(parts)
    return f"{day}T{written}{zone}"


def canonical_date(text: str) -> str | None:
    """Return a calendar date such as `2024-01-15`, or None if the text is not one."""
    try:
        return text if len(text) == 10 and text.isascii() and date.fromisoformat(text).isoformat() == text else None
    except ValueError:
        return None


def canonical_time(text: str) -> str | None:
    """Return the canonical form of a time of day (`01:02` is `01:02:00`), or None if the text is not one."""
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    clock, fraction = found.groups()
    try:
        written = time.fromisoformat(clock).isoformat()
    except ValueError:
        return None
    if fraction is not None and len(clock) == 5:
        return None
    digits = (fraction or "").rstrip("0")
    return f"{written}.{digits}" if digits else written


def canonical_duration(seconds: Decimal) -> Decimal:
    """Return the same number of seconds without trailing zeros and without an exponent above zero."""
    text = format(seconds, "f")
    trimmed = text.rstrip("0").rstrip(".") if "." in text else text
    return Decimal(0) if trimmed in {"-0", ""} else Decimal(trimmed)


CANONICAL: dict[str, Callable[[str], str | None]] = {
    "datetime": canonical_datetime,
    "date": canonical_date,
    "time": canonical_time,
}
"""Normalizer of each temporal column type."""


# ── Sort keys ──────────────────────────────────────────────────────────────────────────────────────


Position: TypeAlias = Any
"""Position of a value: `int` or `Decimal`, `str` for text; only positions of the same column are compared."""

DAY = 86400
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_MONTHS = {
    name: number
    for number, name in enumerate("jan feb mar apr may jun jul aug sep oct nov dec".split(), start=1)
}  # fmt: skip
_CLOCK = r"\d{1,2}:\d\d(?::\d\d(?:\.\d{1,9})?)?"
_DAY, _MONTH, _YEAR, _NAME = r"(?P<day>\d{1,2})", r"(?P<month>\d{1,2})", r"(?P<year>\d{4})", r"(?P<name>[A-Za-z]{3})"
_DATES = {
    "%d/%m/%Y": f"{_DAY}/{_MONTH}/{_YEAR}",
    "%m/%d/%Y": f"{_MONTH}/{_DAY}/{_YEAR}",
    "%Y/%m/%d": f"{_YEAR}/{_MONTH}/{_DAY}",
    "%d.%m.%Y": rf"{_DAY}\.{_MONTH}\.{_YEAR}",
    "%d-%b-%Y": f"{_DAY}-{_NAME}-{_YEAR}",
    "%d %b %Y": f"{_DAY} {_NAME} {_YEAR}",
    "%b %d %Y": f"{_NAME} {_DAY} {_YEAR}",
    "%b %Y": f"{_NAME} {_YEAR}",
}
"""Date formats; a time of day may follow each."""
_NUMBER = re.compile(r"[+-]?\d{1,400}(?:\.\d{1,400})?", re.ASCII)


@dataclass(frozen=True)
class SortKey:
    """How a column's values are read as positions: `elapsed_seconds`, `iso8601`, `text` or a strptime format."""

    name: str

    def __reduce__(self) -> tuple[type["SortKey"], tuple[str]]:
        """Pickle by name: the reader functions cannot be pickled."""
        return (SortKey, (self.name,))

    @property
    def is_time(self) -> bool:
        """Whether positions are seconds, so that differences are intervals."""
        return self.name != "text"

    @cached_property
    def is_time_of_day(self) -> bool:
        """Whether a decrease means the next day."""
        return self.name == TIME_OF_DAY.name or ("%" in self.name and not _DATED.search(self.name))

    @property
    def is_date(self) -> bool:
        """Whether positions are those of dates, with or without a time of day."""
        return self.name not in (ELAPSED.name, TEXT.name) and not self.is_time_of_day

    @cached_property
    def _reader(self) -> Callable[[Value], Position | None]:
        return (
            _READERS[self.name]
            if self.name in _READERS
            else _make_strptime_reader(self.name, dated=not self.is_time_of_day)
        )

    def read(self, value: Value) -> Position | None:
        """Return a value's position, or None if it is `None` or cannot be read."""
        return None if value is None else self._reader(value)

    def read_after(self, previous: Position | None, value: Value) -> Position | None:
        """Return a value's position given the previous one: a time of day that decreases belongs to the next day."""
        position = self.read(value)
        if not self.is_time_of_day or previous is None or position is None:
            return position
        position += previous // DAY * DAY
        return position if position >= previous else position + DAY

    def read_series(self, values: Iterable[Value]) -> list[Position]:
        """Return the positions of a series in source order, rolled over at midnight; None if unreadable."""
        if not self.is_time_of_day:
            return [self.read(value) for value in values]
        positions: list[Position] = []
        previous: Position | None = None
        for value in values:
            position = self.read_after(previous, value)
            positions.append(position)
            previous = previous if position is None else position
        return positions


def resolve_sort_key(timestamp_format: str, column: Column, *, where: str = "time_series.timestamp_format") -> SortKey:
    """Return the sort key of a configured format: `iso8601`, `elapsed_seconds` or a strptime format."""
    if column.type == "time" and timestamp_format == "iso8601":
        return TIME_OF_DAY
    if timestamp_format in _READERS:
        return SortKey(timestamp_format)
    if "%" not in timestamp_format:
        raise ConfigError(
            f"{where}: unknown format {timestamp_format!r}; choose auto, iso8601, elapsed_seconds or a strptime format "
            "such as %Y-%m-%d %H:%M"
        )
    return SortKey(timestamp_format)


def _read_elapsed(value: Value) -> Position | None:
    if type(value) is int:
        return value
    if type(value) is float:
        # A float means the decimal that it prints as: steps of 0.1 are exact tenths.
        return Decimal(repr(value)) if math.isfinite(value) else None
    if type(value) is Decimal:
        return value if value.is_finite() else None
    return Decimal(value) if type(value) is str and _NUMBER.fullmatch(value) else None


def _read_iso8601(value: Value) -> Position | None:
    if type(value) is not str:
        return None
    if len(value) == 10:
        return _day_seconds(value)
    text = canonical_datetime(value)
    if text is None:
        return None
    day, clock = _day_seconds(text[:10]), text[11:]
    sign = max(clock.rfind("+"), clock.rfind("-"))
    offset = 0
    if sign >= 0:
        parts = [int(part) for part in clock[sign + 1 :].split(":")]
        seconds = sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
        offset = -seconds if clock[sign] == "-" else seconds
    assert day is not None
    return _drop_zero_fraction(day + _clock_seconds(clock[:sign] if sign >= 0 else clock) - offset)


# The values of a column repeat their days and times of day, if not these together.
@lru_cache(maxsize=1 << 13)
def _day_seconds(text: str) -> int | None:
    return None if canonical_date(text) is None else (date.fromisoformat(text).toordinal() - _EPOCH_DAY) * DAY


def _clock_seconds(text: str) -> int | Decimal:
    """Return the seconds since midnight of `01:02:03.5`."""
    seconds = int(text[:2]) * 3600 + int(text[3:5]) * 60 + int(text[6:8])
    return seconds + Decimal(text[8:]) if len(text) > 8 else seconds


def _drop_zero_fraction(seconds: int | Decimal) -> int | Decimal:
    return int(seconds) if seconds == int(seconds) else seconds


def _read_time_of_day(value: Value) -> Position | None:
    return _read_clock(value) if type(value) is str else None


@lru_cache(maxsize=1 << 13)
def _read_clock(value: str) -> Position | None:
    text = canonical_time(value if value[1:2] != ":" else f"0{value}")
    return None if text is None else _drop_zero_fraction(_clock_seconds(text))


def _make_date_reader(compiled: re.Pattern[str]) -> Callable[[Value], Position | None]:
    """Return a reader of dates for a pattern with the groups year, month or name, and optionally day."""

    def read_date(value: Value) -> Position | None:
        found = compiled.fullmatch(value) if type(value) is str else None
        if found is None:
            return None
        parts = found.groupdict()
        name = parts.get("name")
        month = int(parts["month"]) if name is None else _MONTHS.get(name.lower())
        if month is None:
            return None
        midnight = _day_seconds(f"{parts['year']}-{month:02d}-{int(parts.get('day', '1')):02d}")
        passed = 0 if parts["clock"] is None else _read_time_of_day(parts["clock"])
        return None if midnight is None or passed is None else midnight + passed

    return read_date


def _read_text(value: Value) -> Position | None:
    return value if type(value) is str else None


def _make_strptime_reader(pattern: str, *, dated: bool) -> Callable[[Value], Position | None]:
    """Return a `strptime` reader; a pattern without year, month and day reads times of day."""

    @lru_cache(maxsize=1 << 16)
    def read_text(text: str) -> Position | None:
        try:
            moment = datetime.strptime(text, pattern)  # noqa: DTZ007  (no offset counts as UTC)
        except ValueError:
            return None
        if not dated:
            clock = moment.hour * 3600 + moment.minute * 60 + moment.second
            return _drop_zero_fraction(clock + Decimal(moment.microsecond).scaleb(-6))
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        passed = aware - datetime(1970, 1, 1, tzinfo=UTC)
        return _drop_zero_fraction(passed.days * DAY + passed.seconds + Decimal(passed.microseconds).scaleb(-6))

    return lambda value: read_text(value) if type(value) is str else None


ELAPSED = SortKey("elapsed_seconds")
ISO8601 = SortKey("iso8601")
TEXT = SortKey("text")
TIME_OF_DAY = SortKey("%H:%M[:%S]")
CANDIDATES = (ISO8601, *(SortKey(name) for name in _DATES), TIME_OF_DAY)
"""Formats tried on text; a time of day may follow the dates."""
_DATE_PATTERNS = {
    name: re.compile(f"{pattern}(?:[T ](?P<clock>{_CLOCK}))?", re.ASCII) for name, pattern in _DATES.items()
}
_READERS: dict[str, Callable[[Value], Position | None]] = {
    ELAPSED.name: _read_elapsed,
    ISO8601.name: _read_iso8601,
    TEXT.name: _read_text,
    TIME_OF_DAY.name: _read_time_of_day,
    **{name: _make_date_reader(pattern) for name, pattern in _DATE_PATTERNS.items()},
}
_DIGITS_TO_ZEROS = str.maketrans("123456789", "000000000")
_VALID_CLOCK_BEHIND = re.compile(r"(.*[T ])((?:[01]?[0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9])?)")


def zero_time_of_day(text: str) -> str:
    """Return a text with zeros for the digits of a valid time of day that follows something else at its end.

    The same `CANDIDATES` read both texts, and they agree on both or on neither.
    """
    found = _VALID_CLOCK_BEHIND.fullmatch(text)
    return text if found is None else found[1] + found[2].translate(_DIGITS_TO_ZEROS)


def list_fitting_candidates(text: str) -> tuple[SortKey, ...]:
    """Return those of `CANDIDATES` that may read a text, judging by the positions of its digits only."""
    return _list_candidates_of_form(text.translate(_DIGITS_TO_ZEROS))


@lru_cache(maxsize=1 << 12)
def _list_candidates_of_form(form: str) -> tuple[SortKey, ...]:
    return tuple(
        candidate
        for candidate in CANDIDATES
        if candidate.name not in _DATE_PATTERNS or _DATE_PATTERNS[candidate.name].fullmatch(form)
    )


_DATED = re.compile(r"(?<!%)(?:%%)*%-?[YymbBdjDFcxGVuUWs]")
