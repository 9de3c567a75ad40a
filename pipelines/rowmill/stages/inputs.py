"""What several stages read of an input's manifest: source parts, and the packed shards of all datasets.

What belongs here: recovering values from manifests. What does not: what only one stage reads.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise

from rowmill import sources
from rowmill.core.stage_names import PACKED_SHARDS
from rowmill.schema.manifest import Manifest
from rowmill.sources import FileScan, PartGroup
from rowmill.stages.base import StageContext


def load_scans(made: Manifest | None) -> list[FileScan]:
    """Recover what a stage that scans files found in each of them; nothing if it was never built."""
    return [] if made is None else [FileScan.from_json(one) for one in made.details["scans"]]


def load_source_parts(scanned: Manifest) -> list[sources.SourcePart]:
    """Recover the source's parts from a `raw_dataset` manifest."""
    return [part for scan in load_scans(scanned) for part in scan.parts]


def number_source_parts(scanned: Manifest) -> Iterator[tuple[int, sources.SourcePart]]:
    """Yield the source's parts, each with the number of its group: of the part of `canonical_rows` with its rows."""
    for number, group in enumerate(load_part_groups(scanned)):
        for part in group:
            yield number, part


def load_part_groups(scanned: Manifest) -> list[PartGroup]:
    """Recover the groups that rows are made of: one for each part of `canonical_rows`, in its order."""
    parts = load_source_parts(scanned)
    # A manifest of before files shared groups has each part alone.
    ends = list(accumulate(scanned.details.get("groups", [1] * len(parts)), initial=0))
    return [tuple(parts[begin:end]) for begin, end in pairwise(ends)]


def get_packed_shards(work: StageContext) -> dict[str, Manifest]:
    """Return the packed shards of each dataset, in recipe order."""
    return {name: work.inputs[(work.recipe.name, name, PACKED_SHARDS)] for name in work.recipe.datasets}
