"""Small files share a piece of work: which source parts are made into rows together, and reading them as one.

What belongs here: cutting a list of parts into groups. What does not: cutting a file (`parts.py`), or what is done
with a group (`canonical_rows/stage.py`).

    files    a.json  b.json  c.json | d.json … | large.jsonl part 0 | large.jsonl part 1 | e.json …
    groups   └───────── 0 ────────┘ └── 1 ───┘ └──────── 2 ───────┘ └──────── 3 ───────┘ └── 4 ──

Every part of a later stage costs some 40 ms and a handful of files, however few rows it has. So files that are smaller
than the least part of a large file go into one group, in the order of the recipe. Rows keep the names, the file and the
line of their own source part: a group is a unit of work, and nothing about a record tells which group it was in.

A group ends behind a part whose digest says so, not after a number of parts: a file that is added, removed or changed
moves the ends beside it alone. Why, and at what price: `docs/decisions/0022`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from rowmill.sources.parts import FileScan, SourcePart, part_bytes
from rowmill.sources.reading import RawRecord, read_records

GROUPING_VERSION = 1
"""Raised whenever the same files would be grouped otherwise."""

PartGroup: TypeAlias = tuple[SourcePart, ...]
"""Source parts of which rows are made together: one part of a large file, or small files that follow each other."""

TakenGroup: TypeAlias = tuple[tuple[SourcePart, int | None], ...]
"""A group, each part with how many of its records are taken (None: all)."""

SMALL_FILE_BYTES = part_bytes(0)
"""A file below the least size of a part does not fill one."""

MEAN_GROUP_BYTES = 1 << 20
"""What a group of small files comes to on average."""

MAX_GROUP_BYTES = 16 << 20
"""What a group of small files holds at most, as a part of a large file; next to no group comes near it."""

FILE_OVERHEAD_BYTES = 4 << 10
"""What a file counts beside its content: to find, open and check it takes as long as to read so much."""


def group_parts(scans: Sequence[FileScan]) -> list[PartGroup]:
    """Cut the parts of a source, in its order, into the groups that rows are made of."""
    groups: list[PartGroup] = []
    held: list[SourcePart] = []
    size = 0
    for part, is_small in _list_parts(scans):
        cost = _measure_part_cost(part) if is_small else 0
        if held and not (is_small and _can_share_group(held[-1], part) and size + cost <= MAX_GROUP_BYTES):
            groups.append(tuple(held))
            held, size = [], 0
        held.append(part)
        size += cost
        if not is_small or _ends_group(part, cost):
            groups.append(tuple(held))
            held, size = [], 0
    return [*groups, tuple(held)] if held else groups


def _list_parts(scans: Sequence[FileScan]) -> Iterator[tuple[SourcePart, bool]]:
    """Yield all parts, and whether each is a small file by itself."""
    for scan in scans:
        is_alone = len(scan.parts) == 1 and scan.reader != "huggingface"
        for part in scan.parts:
            yield part, is_alone and part.content_bytes is not None and part.content_bytes < SMALL_FILE_BYTES


def _measure_part_cost(part: SourcePart) -> int:
    return (part.content_bytes or 0) + FILE_OVERHEAD_BYTES


def _can_share_group(one: SourcePart, other: SourcePart) -> bool:
    """Tell whether two parts are of one split and one kind of file; what is said of rows by file kind stays true."""
    return (one.split_hint, one.reader, one.arrow) == (other.split_hint, other.reader, other.arrow)


def _ends_group(part: SourcePart, cost: int) -> bool:
    """Tell whether a group ends behind a small file: as likely as it is large, so that groups have one mean size."""
    return int(part.sha256[:16], 16) * MEAN_GROUP_BYTES < cost << 64


def read_taken_records(
    taken: TakenGroup, base: Path, not_taken: list[str]
) -> Iterator[tuple[SourcePart, str, RawRecord]]:
    """Yield the records that are taken, each with its part and its row's id; the ids of others join `not_taken`.

    Raises
    ------
    SourceError, IntegrityError
        As `read` does.

    """
    for part, take in taken:
        for record in read_records(part, base):
            row_id = f"{part.part_id}:{record.number}"
            if take is not None and record.number >= take:
                not_taken.append(row_id)
            else:
                yield part, row_id, record


def count_group_records(taken: TakenGroup) -> int:
    """Return how many records a group has, taken or not."""
    return sum(part.records for part, _ in taken)


def estimate_group_bytes(taken: TakenGroup) -> int:
    """Estimate how many bytes a group has; parts of row formats know their rows alone."""
    return sum(max(part.length, part.records * 200) for part, _ in taken)
