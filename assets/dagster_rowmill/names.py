"""Names in Dagster: of assets, groups, jobs, schedules and sensors.

    ("demo", "chats", "canonical_rows")   demo / chats.canonical_rows
    ("demo", "gpu_partitions")            demo / gpu_partitions
    ("demo", "exports", "hf")             demo / exports.hf

A node of Dagster's graph shows only the last part of its asset's key, so that part names the dataset. No name of a
dataset, a stage or an export contains a dot.
"""

import hashlib
import re

import dagster as dg

from rowmill.core.storage import NAME_PATTERN
from rowmill.schema.manifest import StageKey
from rowmill.sources import GeneratedSource, Source


def make_asset_key(key: StageKey) -> dg.AssetKey:
    """Return the key of a stage's asset: the recipe, then everything that a graph must show."""
    return dg.AssetKey([key[0], ".".join(key[1:])])


def list_upstream_assets(source: Source) -> list[dg.AssetKey]:
    """Return the keys in `source.after`; generated records depend on their own stage instead."""
    return [] if isinstance(source, GeneratedSource) else [dg.AssetKey.from_user_string(key) for key in source.after]


def dagster_name(recipe: str) -> str:
    """Return a recipe's name in the form of Dagster's groups, jobs and schedules: without hyphens."""
    return recipe.replace("-", "_")


def name_group_of_file(stem: str) -> str:
    """Return the group of a recipe file that may have any name, such as `qwen2.5`, which no recipe can have.

    Its group has letters and digits that Dagster takes, and a digest, so that it is no other recipe's.
    """
    if NAME_PATTERN.fullmatch(stem):
        return dagster_name(stem)
    digest = hashlib.sha256(stem.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9]+', '_', stem).strip('_')[:40] or 'recipe'}_{digest}"
