"""Values that several stages read from an input's manifest: source parts, packed shards, the order of training."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import pyarrow as pa

from rowmill import sources
from rowmill.core.stage_names import PACKED_SHARDS
from rowmill.core.storage import Store, read_tables
from rowmill.recipe.recipe import Recipe
from rowmill.schema.manifest import Manifest
from rowmill.schema.rows import PADDING_FIELD, SEGMENT_COLUMNS, RowKind
from rowmill.sources import FileScan, PartGroup
from rowmill.stages.base import StageContext


def load_scans(made: Manifest | None) -> list[FileScan]:
    """Recover the file scans of a manifest; empty if the stage was never built, or scanned nothing."""
    return [] if made is None else [FileScan.from_json(one) for one in made.details.get("scans", ())]


def load_source_parts(scanned: Manifest) -> list[sources.SourcePart]:
    """Recover the source's parts from a `raw_dataset` manifest."""
    return [part for scan in load_scans(scanned) for part in scan.parts]


def number_source_parts(scanned: Manifest) -> Iterator[tuple[int, sources.SourcePart]]:
    """Yield the source's parts, each with its group number: the part of `canonical_rows` that contains its rows."""
    for number, group in enumerate(load_part_groups(scanned)):
        for part in group:
            yield number, part


def load_part_groups(scanned: Manifest) -> list[PartGroup]:
    """Recover the groups of parts whose rows are made together: one per part of `canonical_rows`, in order."""
    parts = load_source_parts(scanned)
    ends = list(accumulate(scanned.details["groups"], initial=0))
    return [tuple(parts[begin:end]) for begin, end in pairwise(ends)]


def load_order(store: Store, splits: Manifest, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the order of training, a line for each place."""
    return pa.concat_tables(read_tables(store, splits.files("order"), columns))


def load_rank_steps(store: Store, splits: Manifest) -> pa.Table:
    """Return the totals of each rank and step; those of a rank are in order of steps."""
    return pa.concat_tables(read_tables(store, splits.files("rank_steps")))


def list_segment_columns(recipe: Recipe, kind: RowKind) -> list[pa.Field]:
    """Return what shards have of each segment: columns of its kind, declared fields, and padding if the recipe pads."""
    padding = [PADDING_FIELD] if recipe.segment_multiple_of > 1 else []
    return [*SEGMENT_COLUMNS.get(kind, ()), *recipe.rollout_fields.row_columns, *padding]


def get_packed_shards(context: StageContext) -> dict[str, Manifest]:
    """Return the packed shards of each dataset, in recipe order."""
    return {name: context.inputs[(context.recipe.name, name, PACKED_SHARDS)] for name in context.recipe.datasets}
