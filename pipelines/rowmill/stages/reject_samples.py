"""Sentences on the rows behind a failed check: how often each reason is, an offending value, and where one record is.

The sentences become `Manifest.samples`, which are not part of a version: they name paths, on which no output depends.
Only a few rows are looked up, and the source is read again for one row at most.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import cast

import polars as pl
import pyarrow.compute as pc

from rowmill import sources
from rowmill.core.number_text import format_count
from rowmill.core.stage_names import RAW_DATASET
from rowmill.core.storage import Store
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, Part
from rowmill.schema.rows import is_row_id, parse_row_id
from rowmill.stages import inputs
from rowmill.stages.base import StageContext

SHOWN_REASONS = 3
"""Maximum number of reasons or values that a check lists."""
MAX_VALUE_CHARS = 200
"""Longer values of the data are cut."""


def describe_rejects(context: StageContext, parts: Sequence[Part], reasons: Mapping[str, int]) -> tuple[str, ...]:
    """Describe the most frequent reject reasons: count, and the first record's place and detail."""
    most_first = sort_by_count(reasons)
    locator, lines = RowLocator(context), list[str]()
    for rank, (reason, count) in enumerate(most_first[:SHOWN_REASONS]):
        line = f"{reason}: {count:,}"
        first = _find_first_reject(context.store, parts, reason)
        if first is not None:
            row_id, detail = first
            line += f", the first is {locator.locate(row_id, reads_lines=rank == 0)}"
            line += f": {clean_value(detail)}" if detail else ""
        lines.append(line)
    rest = most_first[SHOWN_REASONS:]
    if rest:
        lines.append(f"{format_count(len(rest), 'other reason')}: {sum(count for _, count in rest):,}")
    return tuple(lines)


def describe_values(noun: str, counts: Mapping[str, int], first: str) -> tuple[str, ...]:
    """Describe the most frequent values: `role 'narrator': 54`; `first` is a place of the most frequent one."""
    most_first = sort_by_count(counts)
    lines = [f"{noun} {clean_value(value)!r}: {count:,}" for value, count in most_first[:SHOWN_REASONS]]
    if lines and first:
        lines[0] += f", the first is {first}"
    rest = most_first[SHOWN_REASONS:]
    if rest:
        lines.append(f"{format_count(len(rest), f'other {noun}')}: {sum(count for _, count in rest):,}")
    return tuple(lines)


def find_first_row(store: Store, parts: Iterable[Part], column: str, value: str) -> str:
    """Return the id of the first row with a value in a column of lists; empty if there is none."""
    for part in parts:
        frame = cast("pl.DataFrame", pl.from_arrow(store.table(part.files["rows"], ["row_id", column])))
        found = frame.filter(pl.col(column).list.contains(value))["row_id"]
        if len(found):
            return str(found[0])
    return ""


def sort_by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return names and counts, the most frequent first."""
    return sorted(counts.items(), key=lambda one: (-one[1], one[0]))


def clean_value(text: str) -> str:
    """Return text from data on one line, short, without characters that move a terminal's cursor."""
    line = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in " ".join(text.split()))
    return line if len(line) <= MAX_VALUE_CHARS else f"{line[: MAX_VALUE_CHARS - 1]}…"


def _find_first_reject(store: Store, parts: Sequence[Part], reason: str) -> tuple[str, str] | None:
    """Return the id and detail of the first reject of a reason."""
    for part in parts:
        ids = part.facts.get("examples_of_rejects", {}).get(reason)
        if ids:
            table = store.table(part.files["rejects"], ["row_id", "reason", "detail"])
            of_row = pc.and_(pc.equal(table.column("row_id"), ids[0]), pc.equal(table.column("reason"), reason))
            details = table.filter(of_row).column("detail").to_pylist()
            return ids[0], details[0] if details else ""
    return None


class RowLocator:
    """Finds the place of rows in their source: `data/sales.csv line 20002 (3f0c…:17)`."""

    def __init__(self, context: StageContext) -> None:
        self._work = context

    def locate(self, name: str, *, reads_lines: bool) -> str:
        """Describe the place of a row or example; finding its line requires reading the file, unlike its number."""
        row_id = name.partition("#")[0]
        if not is_row_id(row_id):
            return name
        part_id, number = parse_row_id(row_id)
        if part_id not in self._owners:
            return name
        part, scan = self._owners[part_id]
        return f"{sources.describe_place(part, scan, self._work.base, number, reads_lines=reads_lines)} ({name})"

    @cached_property
    def _owners(self) -> dict[str, tuple[sources.SourcePart, sources.FileScan]]:
        scans = inputs.load_scans(_find_scanned(self._work))
        return {part.part_id: (part, scan) for scan in scans for part in scan.parts}


def _find_scanned(context: StageContext) -> Manifest | None:
    """Return the `raw_dataset` manifest that a stage's inputs were built from."""
    key = (*context.dataset_key, RAW_DATASET)
    known = dict(context.inputs)
    while known and key not in known:
        known = {
            name: made for one in known.values() for name, made in manifest.load_inputs(context.store, one).items()
        }
    return known.get(key)
