"""Counts, shares, durations and sizes as people write them, in a terminal, on a page and in a log.

What belongs here: text of numbers, without layout or colour. What does not: a terminal (`core/console.py`).
"""

from collections.abc import Iterable

NO_NUMBER = "–"
"""What is shown where there is no number."""


def format_percent(part: float, whole: float = 1.0) -> str:
    """Write a share: `38.1 %`; a share of nothing is nothing."""
    return f"{100 * part / whole:.1f} %" if whole else NO_NUMBER


def format_count(count: int, one: str, many: str = "") -> str:
    """Write a count with its noun: `1 row`, `1,342 rows`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def format_seconds(seconds: float) -> str:
    """Write a duration: `0.4 s`, `2 min 05 s`, `3 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_size(size_bytes: float) -> str:
    """Write a size in bytes: `1.2 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "bytes" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def join_facts(words: Iterable[str]) -> str:
    """Join facts on one line; empty ones are left out."""
    return " · ".join(word for word in words if word)
