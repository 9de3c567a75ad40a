"""Values that several stages read from an input's manifest: packed shards, the order of training."""

from collections.abc import Sequence

import pyarrow as pa

from rowmill.core.stage_names import PACKED_SHARDS
from rowmill.core.storage import Store, read_tables
from rowmill.recipe.recipe import Recipe
from rowmill.schema.manifest import Manifest
from rowmill.schema.rows import PADDING_FIELD, SEGMENT_COLUMNS, TREE_FIELDS, RowKind
from rowmill.stages.base import StageContext


def load_order(store: Store, splits: Manifest, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the order of training, a line for each place."""
    return pa.concat_tables(read_tables(store, splits.files("order"), columns))


def load_rank_steps(store: Store, splits: Manifest) -> pa.Table:
    """Return the totals of each rank and step; those of a rank are in order of steps."""
    return pa.concat_tables(read_tables(store, splits.files("rank_steps")))


def list_segment_columns(recipe: Recipe, kind: RowKind) -> list[pa.Field]:
    """Return what shards have of each segment: columns of its kind, declared fields, and padding or trees."""
    padding = [PADDING_FIELD] if recipe.segment_multiple_of > 1 else []
    trees = TREE_FIELDS if recipe.shares_prefixes else ()
    return [*SEGMENT_COLUMNS.get(kind, ()), *recipe.rollout_fields.row_columns, *padding, *trees]


def get_packed_shards(context: StageContext) -> dict[str, Manifest]:
    """Return the packed shards of each dataset, in recipe order."""
    return {name: context.inputs[(context.recipe.name, name, PACKED_SHARDS)] for name in context.recipe.datasets}
