"""The partitions of an output that consists of independent pieces: the ranks of `gpu_partitions`.

    gpu_partitions (makes and publishes all ranks) ──► ranks [rank-00000-of-00008, …]

The stage's asset has no partitions: Dagster asks for a choice of partitions before it starts a run that contains a
partitioned asset, so a first click on "Materialize all" would end in a dialog (docs/decisions/0030). The partitioned
asset cannot be materialized by itself, so it is in no run's way; the stage's asset materializes it.
"""

from collections.abc import Iterator
from typing import Final

import dagster as dg

from dagster_rowmill import metadata
from dagster_rowmill.names import dagster_name, make_asset_key
from rowmill.build.steps import Project, Step
from rowmill.schema.manifest import Manifest

PARTITIONED_ASSET: Final = "ranks"
"""The last part of the partitioned asset's key; no stage has this name."""


def make_partitions_key(step: Step) -> dg.AssetKey:
    """Return the key of the asset that shows a step's partitions."""
    return make_asset_key((*step.key[:-1], PARTITIONED_ASSET))


def make_partitions_spec(project: Project, step: Step) -> dg.AssetSpec:
    """Return the asset that shows a step's partitions."""
    assert step.stage.partitions is not None
    return dg.AssetSpec(
        make_partitions_key(step),
        deps=[make_asset_key(step.key)],
        group_name=dagster_name(step.recipe),
        partitions_def=dg.StaticPartitionsDefinition(list(step.stage.partitions(project.recipe))),
        kinds={"parquet"},
        owners=list(project.recipe.execution.owners),
        tags={"rowmill/stage": step.name},
        description="One partition per data-parallel rank, with its counts. All of them are made, checked and "
        f"published together by {step.name}.",
    )


def iterate_materializations(step: Step, output: Manifest) -> Iterator[dg.AssetMaterialization]:
    """Yield a materialization of each partition of an output; none for a stage without partitions."""
    if step.stage.partitions is not None:
        for rank in output.card.get("ranks", ()):
            page = metadata.make_rank_page(output, rank)
            tags = {"dagster/data_version": str(page["rank content"].value)} if page else None
            yield dg.AssetMaterialization(make_partitions_key(step), partition=rank, metadata=page, tags=tags)
