"""All stages, in the order in which they can run: the only list, which the rest of the engine and Dagster use."""

from rowmill.core.errors import IntegrityError
from rowmill.schema.manifest import Manifest
from rowmill.stages import (
    exports,
    generated_series,
    gpu_partitions,
    parsed_records,
    raw_dataset,
    teacher_scores,
    truncation_stats,
)
from rowmill.stages.base import Scope, StageDeclaration
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.packed_shards import stage as packed_shards
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.stages.training_splits import stage as training_splits
from rowmill.stats.tables import RowCount

STAGES: tuple[StageDeclaration, ...] = (
    raw_dataset.STAGE,
    canonical_rows.STAGE,
    tokenized_examples.STAGE,
    truncation_stats.STAGE,
    packed_shards.STAGE,
    training_splits.STAGE,
    gpu_partitions.STAGE,
    exports.STAGE,
    parsed_records.STAGE,
    generated_series.STAGE,
    teacher_scores.STAGE,
)


def find_stage(name: str) -> StageDeclaration:
    """Return the stage of a name.

    Raises IntegrityError if there is none: another version of rowmill wrote the manifest that names it.
    """
    for stage in STAGES:
        if stage.name == name:
            return stage
    names = ", ".join(stage.name for stage in STAGES)
    raise IntegrityError(f"{name}: no such stage; this version of rowmill has {names}; build again with it")


def list_stages(scope: Scope, *, on_demand: bool = False) -> tuple[StageDeclaration, ...]:
    """Return the stages of a scope in order: those that every build runs, or those that run on demand."""
    return tuple(stage for stage in STAGES if stage.scope == scope and stage.on_demand == on_demand)


def count_output_rows(output: Manifest) -> RowCount | None:
    """Return the rows of an output with their noun; None if its stage does not count them."""
    return find_stage(output.stage).stats_inputs.rows(output)


def list_stages_up_to(last: StageDeclaration) -> tuple[str, ...]:
    """Return the names of a dataset's stage and of all stages before it, in order."""
    wanted = {last.name}
    for stage in reversed(STAGES):
        if stage.name in wanted:
            wanted.update(stage.inputs, stage.gates)
    return tuple(stage.name for stage in STAGES if stage.name in wanted)
