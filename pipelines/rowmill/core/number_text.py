"""Format counts, shares, durations and sizes for people, in a terminal, on a page and in a log."""

from collections.abc import Iterable

NO_NUMBER = "–"
"""Shown in place of a missing number."""


def format_percent(part: float, whole: float = 1.0) -> str:
    """Format a share: `38.1 %`; a dash if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else NO_NUMBER


def format_count(count: int, one: str, many: str = "") -> str:
    """Format a count with its noun: `1 row`, `1,342 rows`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def format_seconds(seconds: float) -> str:
    """Format a duration: `0.4 s`, `2 min 05 s`, `3 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_size(size_bytes: float) -> str:
    """Format a size in bytes: `1.2 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "bytes" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def join_facts(facts: Iterable[str]) -> str:
    """Join facts on one line, without the empty ones."""
    return " · ".join(fact for fact in facts if fact)
