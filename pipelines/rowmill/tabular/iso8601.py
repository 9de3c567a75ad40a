"""Canonical ISO 8601 text of datetimes, dates, times and durations."""

import re
from collections.abc import Callable
from datetime import date, time
from decimal import Decimal

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
    zone = _canonical_offset(offset)
    return None if zone is None else f"{day}T{written}{zone}"


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


def _canonical_offset(offset: str | None) -> str | None:
    if offset is None:
        return ""
    if offset == "Z":
        return "+00:00"
    digits = offset[1:].replace(":", "")
    parts = [digits[start : start + 2] for start in range(0, len(digits), 2)]
    if int(parts[0]) > 23 or any(int(part) > 59 for part in parts[1:]):
        return None
    if not any(map(int, parts)):
        return "+00:00"
    return offset[0] + ":".join(parts)


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
