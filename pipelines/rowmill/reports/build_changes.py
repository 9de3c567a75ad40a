"""What changed since the last build: sentences for the terminal, alerts and Dagster, and a table for pages.

since 2026-11-26 02:03 UTC: files: 1 new, 1 changed; rows +120 -3, 4 in another split; tokens +9,120 -310
chats: drift 0.12, languages: English 100 % → 95 %, German 0 % → 5 %
chats/canonical_rows: rejects fails now, 3.3 %
"""

from collections.abc import Iterator

from rowmill.build.comparison import BuildChanges, DatasetChanges, FileChanges, Moves
from rowmill.checks.drift import Shift
from rowmill.core.arrays import format_count, format_percent
from rowmill.schema.manifest import DisplayTable

NAMED_DATASETS = 5
"""Datasets and checks that are named in sentences: those with the largest drift."""

_FILES = ("new", "gone", "changed")


def count_changes(changes: BuildChanges) -> str:
    """Return the files, rows and tokens that changed in all datasets; empty if none did."""
    datasets = changes.datasets
    new, gone, changed = (sum(getattr(one.files, name) for one in datasets) for name in _FILES)
    rows, tokens = (_sum_moves([getattr(one, name) for one in datasets]) for name in ("rows", "tokens"))
    files = _format_files(FileChanges(new, gone, changed))
    return "; ".join(fact for fact in (files, _format_moves("rows", rows), _format_moves("tokens", tokens)) if fact)


def describe_changes(changes: BuildChanges, *, names_bins: bool = True) -> list[str]:
    """Return the sentence of all datasets, then the drift of each dataset, then the checks whose result changed.

    Names of bins are text from data; without them, no sentence has any.
    """
    most = [(one.dataset, one.shifts[0]) for one in changes.datasets if one.shifts]
    drifted = [(name, shift) for name, shift in most if shift.index is not None and shift.bins]
    lines = [
        f"{name}: drift {shift.index:.2g}, {_format_shift(shift, names_bins=names_bins)}"
        for name, shift in sorted(drifted, key=lambda pair: -(pair[1].index or 0))
    ]
    checks = [
        f"{one.stage}: {one.check} {f'fails now, {one.after}' if one.after else f'passes again, after {one.before}'}"
        for one in changes.checks
    ]
    since = f"since {changes.published_at[:16].replace('T', ' ')} UTC"
    counts = count_changes(changes) or "the same files, rows and tokens"
    return [f"{since}: {counts}", *_take_first(lines, "dataset"), *_take_first(checks, "check")]


def tabulate_changes(changes: BuildChanges) -> DisplayTable:
    """Return a row for each dataset that changed; the widest columns, which a narrow page cuts, are the last."""
    return DisplayTable(
        ("dataset", "rows", "tokens", "drift", "of", "files", "moved most"),
        tuple(_list_cells(one) for one in changes.datasets),
    )


def _list_cells(changed: DatasetChanges) -> tuple[str, ...]:
    files = ", ".join(changed.files.named) or _format_files(changed.files)
    more = changed.files.new + changed.files.gone + changed.files.changed - len(changed.files.named)
    counts = (_format_counts(changed.rows), _format_counts(changed.tokens))
    shift = changed.shifts[0] if changed.shifts else None
    drift = "" if shift is None else "too few rows" if shift.index is None else f"{shift.index:.3f}"
    return (
        changed.dataset,
        *counts,
        drift,
        shift.distribution if shift is not None else "",
        f"{files} and {more:,} more" if more else files,
        ", ".join(_list_bins(shift)) if shift is not None else "",
    )


def _take_first(lines: list[str], noun: str) -> list[str]:
    rest = len(lines) - NAMED_DATASETS
    return [*lines[:NAMED_DATASETS], *([f"and {format_count(rest, noun)} more"] if rest > 0 else [])]


def _sum_moves(several: list[Moves]) -> Moves:
    return Moves(*(sum(getattr(one, name) for one in several) for name in ("added", "removed", "moved")))


def _format_files(files: FileChanges) -> str:
    counts = [f"{getattr(files, name):,} {name}" for name in _FILES if getattr(files, name)]
    return f"files: {', '.join(counts)}" if counts else ""


def _format_moves(noun: str, moves: Moves) -> str:
    counts = _format_counts(moves)
    return f"{noun} {counts}" if counts else ""


def _format_counts(moves: Moves) -> str:
    moved = f", {moves.moved:,} in another split" if moves.moved else ""
    return f"+{moves.added:,} -{moves.removed:,}{moved}" if moves != Moves() else ""


def _format_shift(shift: Shift, *, names_bins: bool) -> str:
    return f"{shift.distribution}: {', '.join(_list_bins(shift))}" if names_bins else shift.distribution


def _list_bins(shift: Shift) -> Iterator[str]:
    for name, before, after in shift.bins:
        yield f"{name} {format_percent(before)} → {format_percent(after)}"
