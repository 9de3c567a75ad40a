"""What several stages read of an input's manifest: source parts, and the packed shards of all datasets.

What belongs here: recovering values from manifests. What does not: what only one stage reads.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any

from rowmill import sources
from rowmill.schema.manifest import Manifest
from rowmill.sources import FileScan, Group
from rowmill.stages.base import Work


def parts_of(details: Mapping[str, Any]) -> list[sources.Part]:
    """Recover the source's parts from a `raw_dataset` manifest's details."""
    return [part for one in details["scans"] for part in FileScan.from_json(one).parts]


def numbered_parts(details: Mapping[str, Any]) -> Iterator[tuple[int, sources.Part]]:
    """Yield the source's parts, each with the number of its group: of the part of `canonical_rows` with its rows."""
    for number, group in enumerate(groups_of(details)):
        for part in group:
            yield number, part


def groups_of(details: Mapping[str, Any]) -> list[Group]:
    """Recover the groups that rows are made of: one for each part of `canonical_rows`, in its order."""
    parts = parts_of(details)
    # A manifest of before files shared groups has each part alone.
    ends = list(accumulate(details.get("groups", [1] * len(parts)), initial=0))
    return [tuple(parts[begin:end]) for begin, end in pairwise(ends)]


def packed_of(work: Work) -> dict[str, Manifest]:
    """Return the packed shards of each dataset, in recipe order."""
    return {name: work.inputs[(work.recipe.name, name, "packed_shards")] for name in work.recipe.datasets}
