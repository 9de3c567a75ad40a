"""The order and the shards → one partition per data-parallel rank.

Trainers open `current.json`. It is written once all ranks of one order are built.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from rowmill.core.arrays import format_count
from rowmill.core.stage_names import GPU_PARTITIONS, PACKED_SHARDS, TRAINING_SPLITS
from rowmill.core.storage import Store
from rowmill.packing.rank_assignment import RankLayout
from rowmill.parts.context import StageOutput, compute_share
from rowmill.parts.functions import load_kept_part, save_kept_part
from rowmill.schema import manifest
from rowmill.schema.manifest import DisplayTable, Manifest, Part
from rowmill.shards import native
from rowmill.shards.native import find_content_damage
from rowmill.stages.base import ComparedFact, PreparedStage, StageContext, StageDeclaration
from rowmill.stages.gpu_partitions.rank_files import (
    RANK_INDEX_SCHEMA,
    GpuPartitionsFacts,
    find_index_damage,
    fingerprint_rank,
    identify_gpu_partitions,
    is_index,
    make_rank_schema,
    publish_gpu_partitions,
    rank_names,
    write_copied_ranks,
    write_rank_indexes,
)
from rowmill.stats import StatsInputs, count_rows_by_fact


def prepare_gpu_partitions(context: StageContext) -> PreparedStage:
    """Determine the ranks of the output: one can be built without the others."""
    return PreparedStage(list_ranks(context), lambda: make_gpu_partitions(context))


def list_ranks(context: StageContext) -> tuple[str, ...]:
    """Return the ranks that the manifest will name: the wanted ones and those already built."""
    names = rank_names(context.recipe.partitions.world_size)
    wanted = set(context.ranks or names)
    return tuple(
        name
        for name in names
        if name in wanted or load_kept_part(context.store, context.folder, fingerprint_rank(context, name))
    )


def count_stale_ranks(context: StageContext, present: Sequence[str]) -> int:
    """Count partitions kept for an older order or other shards.

    Ranks can be built one at a time; the others are then still from an older order, and must not be mixed with it.
    """
    known = {name for one in manifest.list_versions(context.store, context.key) for name in one.card.get("ranks", ())}
    return len(known & set(rank_names(context.recipe.partitions.world_size)) - set(present))


def make_gpu_partitions(context: StageContext) -> StageOutput:
    """Write the wanted ranks that do not exist yet, and describe all."""
    present = list_ranks(context)
    kept = {name: load_kept_part(context.store, context.folder, fingerprint_rank(context, name)) for name in present}
    missing = [name for name, part in kept.items() if part is None]
    if missing:
        write_ranks = _RANK_WRITERS[context.recipe.partitions.layout]
        for name, part in zip(missing, write_ranks(context, missing), strict=True):
            save_kept_part(context.store, context.folder, part)
            kept[name] = part
    ranks = [part for part in kept.values() if part is not None]
    return _build_ranks_output(context, list(present), ranks, reused=len(present) - len(missing))


_RANK_WRITERS: Mapping[RankLayout, Callable[[StageContext, Sequence[str]], Iterator[Part]]] = {
    "copied": write_copied_ranks,
    "index": write_rank_indexes,
}


# ── The manifest, and publishing for trainers ──────────────────────────────────────────────────────


def _build_ranks_output(context: StageContext, names: list[str], ranks: list[Part], *, reused: int) -> StageOutput:
    trained = [int(part.facts["trained_tokens"]) for part in ranks]
    rows = [
        (name, *(int(p.facts[f]) for f in ("sequences", "fillers", "tokens", "trained_tokens")))
        for name, p in zip(names, ranks, strict=True)
    ]
    # Shards store labels but not span kinds, so unlabeled tokens are context.
    tokens, trained_tokens = (sum(int(part.facts[name]) for part in ranks) for name in ("tokens", "trained_tokens"))
    padding = sum(native.FILLER_TOKENS * int(part.facts["fillers"]) + part.facts["padding"] for part in ranks)
    # Each dataset's contribution to the ranks.
    sums = {
        name: [sum(int(part.facts["datasets"].get(name, (0, 0, 0))[i]) for part in ranks) for i in range(3)]
        for name in context.recipe.datasets
    }
    totals = [sum(values[i] for values in sums.values()) for i in range(3)]
    measures = ("sequences", "tokens", "trained_tokens")
    dataset_rows = [
        (name, *values, *(compute_share(value, total) for value, total in zip(values, totals, strict=True)))
        for name, values in sums.items()
    ]
    return StageOutput(
        parts=ranks,
        facts=GpuPartitionsFacts(
            conservation=sum(not part.facts["conserved"] for part in ranks),
            stale_rank=count_stale_ranks(context, names),
            ranks=len(ranks),
            world_size=context.recipe.partitions.world_size,
            sequences=sum(int(p.facts["sequences"]) for p in ranks),
            fillers=sum(int(p.facts["fillers"]) for p in ranks),
            tokens=sum(int(p.facts["tokens"]) for p in ranks),
            trained_tokens=sum(trained),
            trained_spread=compute_share(max(trained) - min(trained), max(trained)) if trained else 0.0,
        ),
        token_ledger=[
            ("train", "trained", trained_tokens),
            ("train", "context", tokens - trained_tokens),
            ("train", "padding", padding),
        ],
        tables={
            "ranks": DisplayTable(("rank", "sequences", "fillers", "tokens", "trained_tokens"), tuple(rows[:30])),
            "datasets": DisplayTable(
                ("dataset", *measures, *(f"{measure}_share" for measure in measures)), tuple(dataset_rows)
            ),
        },
        schema=tuple(
            (f.name, str(f.type))
            for f in (make_rank_schema(context) if context.recipe.partitions.layout == "copied" else RANK_INDEX_SCHEMA)
        ),
        card={"order": context.inputs[(context.recipe.name, TRAINING_SPLITS)].card["order"], "ranks": names},
        parts_reused=reused,
        rows_made=sum(int(p.facts["sequences"]) for p in ranks),
    )


def _find_rank_damage(store: Store, output: Manifest) -> Iterator[str]:
    if is_index(output):
        yield from find_index_damage(store, output)
        return
    for part in output.parts:
        data = [file for name, file in part.files.items() if name.startswith("data/")]
        rank = part.files["facts"].path.rsplit("/", 1)[0]
        yield from find_content_damage(store, rank, data, str(part.facts["content_hash"]))


STAGE = StageDeclaration(
    name=GPU_PARTITIONS,
    facts=GpuPartitionsFacts,
    description="One folder of shards, or one index of shards, per data-parallel rank, in training order.",
    scope="recipe",
    identity=identify_gpu_partitions,
    prepare=prepare_gpu_partitions,
    inputs=(TRAINING_SPLITS, PACKED_SHARDS),
    gates_on_every_dataset=True,
    publish=publish_gpu_partitions,
    list_shared_inputs=lambda made: (PACKED_SHARDS,) if is_index(made) else (),
    partitions=lambda recipe: rank_names(recipe.partitions.world_size),
    # No tables: ranks hold the same sequences as the shards, whose statistics are recorded already.
    stats_inputs=StatsInputs(count_rows_by_fact("sequences", "sequence")),
    summarize=lambda facts, rows: (format_count(facts.ranks, "rank"), rows),
    compared=(
        ComparedFact("ranks", "ranks"),
        ComparedFact("sequences of all ranks", "sequences"),
        ComparedFact("tokens of all ranks", "tokens"),
    ),
    find_content_damage=_find_rank_damage,
)
