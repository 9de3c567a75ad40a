"""Publishing ranks: `current.json`, which trainers open."""

from collections.abc import Sequence
from typing import Any

from rowmill.checks import cross_stage
from rowmill.checks.judge import CheckResult
from rowmill.core.stage_names import PACKED_SHARDS, TRAINING_SPLITS
from rowmill.schema.facts import TrainingSplitsFacts, read_facts
from rowmill.schema.manifest import Manifest, Part
from rowmill.stages.base import (
    StageContext,
)
from rowmill.stages.gpu_partitions.rank_parts import GpuPartitionsFacts, is_index, rank_names


def publish_gpu_partitions(
    context: StageContext, output: Manifest, results: Sequence[CheckResult], loosened: Sequence[str]
) -> None:
    """Write `current.json` for trainers, once every rank of this order is built and its tokens are conserved.

    `results` are the check results of the output, `loosened` the bounds of the recipe that are wider than the defaults:
    readers of the ranks can see under which thresholds they were built.

    Its content comes from the output, not from the recipe, since a kept version may be from an older recipe.
    """
    facts = read_facts(GpuPartitionsFacts, output.facts)
    if facts.conservation or facts.ranks != facts.world_size:
        return
    splits = context.inputs[(context.recipe.name, TRAINING_SPLITS)]
    ranks = {name: _describe_rank(part) for name, part in zip(rank_names(facts.world_size), output.parts, strict=True)}
    order = read_facts(TrainingSplitsFacts, splits.facts)
    packed = {name: context.inputs[(context.recipe.name, name, PACKED_SHARDS)] for name in splits.card["datasets"]}
    first = next(iter(packed.values()))
    content = {
        "version": output.version,
        "recipe": context.recipe.name,
        "order": splits.card["order"],
        "order_file": splits.parts[0].files["order"].path,
        # An order of more than a million places has several files, of which the one above is the first.
        "order_files": [file.path for file in splits.files("order")],
        "datasets": splits.card["datasets"],
        "world_size": facts.world_size,
        "layout": "index" if is_index(output) else "copied",
        "seq_len": int(first.card["seq_len"]),
        "places": order.places,
        "steps": order.steps,
        # Orders kept from a VERSION before 3 do not record it.
        "has_steps": splits.card["has_steps"]
        if "has_steps" in splits.card
        else bool(context.recipe.mixture.batch_sizes),
        "sets": {name: _describe_evaluation_set(context, name, one) for name, one in packed.items()},
        "inputs": output.inputs,
        "waivers": list(output.waivers),
        "loosened": list(loosened),
        "checks": [
            {
                "name": result.check,
                "value": result.value,
                "wanted": result.wanted,
                "severity": result.severity,
                "outcome": result.outcome,
                "waiver": result.waiver,
                "threshold_digest": result.threshold_digest,
            }
            for result in results
        ],
        "card": {k: v for k, v in first.card.items() if k != "dataset"},
        "ranks": ranks,
    }
    context.store.write_sealed(f"{context.folder}/current.json", content)
    cross_stage.write_published_counts(context.store, output)


def _describe_rank(part: Part) -> dict[str, Any]:
    """Describe a rank's files: its shards, or its index and the filler that the index may name."""
    described = {name: [file.path, file.rows, file.digest] for name, file in part.files.items()}
    return {
        "folder": part.files["facts"].path.rsplit("/", 1)[0],
        "files": [one for name, one in described.items() if name == "index" or name.startswith("data/")],
        "sequences": part.facts["sequences"],
        **({"filler": described["filler"]} if "filler" in described else {}),
    }


def _describe_evaluation_set(context: StageContext, name: str, packed: Manifest) -> dict[str, Any]:
    """Describe a dataset's shards by split, in the order of its plans, and its tags, for evaluation."""
    shards: dict[str, list[list[Any]]] = {}
    for part in packed.parts:
        if "shard" in part.files:
            file = part.files["shard"]
            shards.setdefault(part.facts["split"], []).append([file.path, file.rows, file.digest])
    dataset = context.recipe.datasets.get(name)
    tags = dataset.source.tags if dataset is not None else ()
    return {"tags": list(dict.fromkeys([*tags, name])), "shards": shards}
