"""The parts of the output, one per rank: their names and fingerprints."""

from dataclasses import dataclass
from typing import Any

from rowmill.core.stage_names import GPU_PARTITIONS, TRAINING_SPLITS
from rowmill.core.storage import digest_json
from rowmill.recipe.recipe import Recipe
from rowmill.schema.manifest import Manifest
from rowmill.stages import inputs
from rowmill.stages.base import (
    StageContext,
)

VERSION = 7
"""Increase it when the bytes of any rank, or facts, may change."""


@dataclass(frozen=True, slots=True)
class GpuPartitionsFacts:
    """Facts of the stage's output."""

    conservation: int
    stale_rank: int
    ranks: int
    world_size: int
    sequences: int
    fillers: int
    tokens: int
    trained_tokens: int
    trained_spread: float


def identify_gpu_partitions(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide ranks (`ranks`), and the tags for evaluation."""
    return {
        "ranks": {
            "versions": [VERSION],
            "world_size": recipe.partitions.world_size,
            "seq_len": recipe.seq_len,
            "weighted": recipe.has_loss_weights,
            "layout": recipe.partitions.layout,
            "rollout_fields": recipe.rollout_fields.describe(),
            "segment_multiple_of": recipe.segment_multiple_of,
        },
        "tags": {name: list(dataset.source.tags) for name, dataset in recipe.datasets.items()},
    }


def is_index(output: Manifest) -> bool:
    """Return whether the ranks of an output are indexes of the packed shards."""
    return any("index" in part.files for part in output.parts)


def rank_name(rank: int, world_size: int) -> str:
    """Return the folder name of a rank: `rank-00003-of-00008`; it includes the world size."""
    return f"rank-{rank:05d}-of-{world_size:05d}"


def rank_names(world_size: int) -> tuple[str, ...]:
    """Return the folder names of all ranks."""
    return tuple(rank_name(rank, world_size) for rank in range(world_size))


def fingerprint_rank(context: StageContext, name: str) -> str:
    """Return the fingerprint of a rank: the order, its sequences, the world size."""
    splits = context.inputs[(context.recipe.name, TRAINING_SPLITS)]
    # The order names sequences by number only, so the shards' content must be included.
    packed = [shard.version for shard in inputs.get_packed_shards(context).values()]
    return digest_json(
        GPU_PARTITIONS, identify_gpu_partitions(context.recipe, "")["ranks"], splits.version, packed, name
    )
