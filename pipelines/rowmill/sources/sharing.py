"""Groups small files, so that their rows are made together, and reads a group as one.

    files    a.json  b.json  c.json | d.json … | large.jsonl part 0 | large.jsonl part 1 | e.json …
    groups   └───────── 0 ────────┘ └── 1 ───┘ └──────── 2 ───────┘ └──────── 3 ───────┘ └── 4 ──

Every part of a later stage costs some 30 ms and a handful of files, however few rows it has. So small files are
grouped, in the order of the recipe. Rows keep the id, the file and the line of their own source part: a group is a unit
of work, and no record depends on its group.

A group ends after a part whose digest decides so, not after a number of parts: a file that is added, removed or changed
affects only the neighbouring group ends. Why, and at what price: `docs/decisions/0002`.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeAlias

from rowmill.schema.manifest import Manifest
from rowmill.sources.parts import FileScan, SourcePart
from rowmill.sources.reading import RawRecord, read_records

GROUPING_VERSION = 1
"""Increased whenever the same files would be grouped differently."""

PartGroup: TypeAlias = tuple[SourcePart, ...]
"""Source parts whose rows are made together: one part of a large file, or consecutive small files."""

TakenGroup: TypeAlias = tuple[tuple[SourcePart, int | None], ...]
"""A group; each part with the number of its records that are taken (None: all)."""

SMALL_FILE_BYTES = 128 << 10
"""Files below this size are grouped."""

MEAN_GROUP_BYTES = 1 << 20
"""Average size of a group of small files."""

MAX_GROUP_BYTES = 16 << 20
"""Maximum size of a group of small files, the same as of a part of a large file; hardly any group gets near it."""

FILE_OVERHEAD_BYTES = 4 << 10
"""Size that each file counts in addition to its content: opening and checking it takes as long as reading that much."""


def group_parts(scans: Sequence[FileScan]) -> list[PartGroup]:
    """Cut the parts of a source, in its order, into the groups that rows are made of."""
    groups: list[PartGroup] = []
    group: list[SourcePart] = []
    size = 0
    for part, is_small in _list_parts(scans):
        cost = part.content_bytes + FILE_OVERHEAD_BYTES if is_small else 0
        # A group has one split and one file format.
        fits = is_small and size + cost <= MAX_GROUP_BYTES
        if group and not (
            fits
            and (group[-1].split_hint, group[-1].reader, group[-1].arrow) == (part.split_hint, part.reader, part.arrow)
        ):
            groups.append(tuple(group))
            group, size = [], 0
        group.append(part)
        size += cost
        # After a small file, a group ends with a probability that is proportional to the file's size.
        if not is_small or int(part.sha256[:16], 16) * MEAN_GROUP_BYTES < cost << 64:
            groups.append(tuple(group))
            group, size = [], 0
    return [*groups, tuple(group)] if group else groups


def _list_parts(scans: Sequence[FileScan]) -> Iterator[tuple[SourcePart, bool]]:
    """Yield all parts, and whether each is a small file by itself."""
    for scan in scans:
        is_alone = len(scan.parts) == 1 and scan.reader != "huggingface"
        for part in scan.parts:
            yield part, is_alone and part.content_bytes < SMALL_FILE_BYTES


def read_taken_records(
    group: TakenGroup, base: Path, not_taken: list[str]
) -> Iterator[tuple[SourcePart, str, RawRecord]]:
    """Yield the taken records, each with its part and row id; append the ids of the others to `not_taken`.

    Raises
    ------
    SourceError, IntegrityError
        As `read_records` does.

    """
    for part, take in group:
        for record in read_records(part, base):
            row_id = f"{part.part_id}:{record.number}"
            if take is not None and record.number >= take:
                not_taken.append(row_id)
            else:
                yield part, row_id, record


def count_group_records(group: TakenGroup) -> int:
    """Return the number of records of a group, taken or not."""
    return sum(part.records for part, _ in group)


def estimate_group_bytes(group: TakenGroup) -> int:
    """Estimate the bytes of a group; parts of row formats record only their number of rows."""
    return sum(max(part.length, part.records * 200) for part, _ in group)


def load_scans(output: Manifest | None) -> list[FileScan]:
    """Recover the file scans of a manifest; empty if the stage was never built, or scanned nothing."""
    return [] if output is None else [FileScan.from_json(values) for values in output.details.get("scans", ())]


def load_source_parts(scanned: Manifest) -> list[SourcePart]:
    """Recover the source's parts from a `raw_dataset` manifest."""
    return [part for scan in load_scans(scanned) for part in scan.parts]


def number_source_parts(scanned: Manifest) -> Iterator[tuple[int, SourcePart]]:
    """Yield the source's parts, each with its group number: the part of `canonical_rows` that contains its rows."""
    for number, group in enumerate(load_part_groups(scanned)):
        for part in group:
            yield number, part


def load_part_groups(scanned: Manifest) -> list[PartGroup]:
    """Recover the groups of parts whose rows are made together: one per part of `canonical_rows`, in order."""
    parts = load_source_parts(scanned)
    ends = list(accumulate(scanned.details["groups"], initial=0))
    return [tuple(parts[begin:end]) for begin, end in pairwise(ends)]
