"""Sequences of all datasets → the training order, and leaks between splits.

The order is one line per place: dataset, sequence, pass, step. It does not depend on the world size: rank r of W takes
every W-th place. Validation and test sets are not mixed or shuffled; their order is their plan's.
"""

from collections import Counter
from fractions import Fraction
from typing import Any, cast

import numpy as np
import polars as pl

from rowmill.core.arrays import format_count
from rowmill.core.errors import IntegrityError
from rowmill.core.stage_names import PACKED_SHARDS, TRAINING_SPLITS
from rowmill.core.storage import digest_json
from rowmill.packing import rank_assignment
from rowmill.packing.mixture import compute_wanted_shares, measure_share_error, schedule_sequences
from rowmill.parts.context import StageOutput, compute_share
from rowmill.recipe.recipe import Recipe
from rowmill.schema.facts import TrainingSplitsFacts
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import NOT_APPLICABLE, DisplayTable, Histogram
from rowmill.stages.base import ComparedFact, PreparedStage, StageContext, StageDeclaration
from rowmill.stages.inputs import get_packed_shards
from rowmill.stages.training_splits import leakage
from rowmill.stages.training_splits.sequence_order import (
    NOT_SCHEDULED,
    ORDER_SCHEMA,
    REMAINDER,
    OrderSource,
    WrittenOrder,
    find_sequence_states,
    open_sequences,
    tabulate_schedule,
    write_order,
)
from rowmill.stats import StatsInputs, count_rows_by_fact

VERSION = 4
"""Increase it when any recipe's order, or facts, may change."""


def identify_training_splits(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide the order (`order`), and the splits that it is compared with."""
    return {
        "tables": [leakage.NEAR_ROWS_VERSION, leakage.list_joint_datasets(recipe)],
        "order": {
            "versions": [VERSION],
            "mixture": recipe.mixture.model_dump(mode="json"),
            # The order is the same for both layouts of ranks.
            "partitions": recipe.partitions.model_dump(mode="json", exclude={"layout"}),
            "open_attention": [
                name for name, one in recipe.datasets.items() if not one.packing.block_cross_document_attention
            ],
            "segment_multiple_of": recipe.segment_multiple_of,
            "seed": recipe.seed,
            "datasets": list(recipe.datasets),
            "objective": recipe.objective,
        },
        "splits": {name: dataset.splits.model_dump(mode="json") for name, dataset in recipe.datasets.items()},
        "grouped": [name for name, dataset in recipe.datasets.items() if dataset.format.has_groups(dataset)],
    }


def make_training_splits(context: StageContext) -> StageOutput:
    """Mix the datasets, assign ranks, and measure leaks."""
    packed = get_packed_shards(context)
    made_with: dict[str, list[str]] = {}
    for name, one in packed.items():
        made_with.setdefault(str(one.card["tokenizer_digest"]), []).append(name)
    if len(made_with) > 1:
        found = "; ".join(f"{', '.join(names)} with {which[:12]}" for which, names in made_with.items())
        raise IntegrityError(
            f"{'/'.join(context.key)}: its datasets were tokenized with {len(made_with)} tokenizers ({found}); the ids "
            "of one order must come from one; build the recipe again, and pin tokenizer.revision if it is on the hub"
        )
    sizes = {
        name: sum(part.files["shard"].rows for part in shards.parts if part.facts["split"] == "train")
        for name, shards in packed.items()
    }
    mixture = context.recipe.mixture
    schedule = schedule_sequences(mixture, sizes, context.recipe.seed)
    steps = rank_assignment.plan_steps(
        context.recipe.partitions, schedule.epoch_offsets, batch_sizes=mixture.batch_sizes, steps=mixture.steps
    )
    order = identify_training_splits(context.recipe, "")["order"]
    with open_sequences(context, packed) as sequences:
        source = OrderSource(
            schedule=schedule,
            steps=steps,
            sequences=sequences,
            sizes=tuple(sizes.values()),
            world_size=context.recipe.partitions.world_size,
            load=_name_load(context.recipe),
        )
        identity = (TRAINING_SPLITS, order, [shards.version for shards in packed.values()])
        written = write_order(context, source, identity)
        total = sum(sizes.values())
        places, fillers = (sum(int(part.facts[name]) for part in written.parts) for name in ("places", "fillers"))
        load = _name_load(context.recipe)
        excess = [pl.Series([], dtype=pl.Float64)]
        loads = Counter[int]()
        tokens = flops = 0
        for part in written.parts:
            table = context.store.table(part.files["rank_steps"])
            frame = cast("pl.DataFrame", pl.from_arrow(table.select(["step", "tokens", "trained_tokens", "flops"])))
            per_step = frame.group_by("step", maintain_order=True).agg(
                pl.col(load).max().alias("most"), pl.col(load).mean().alias("mean")
            )
            excess.append((per_step["most"] / per_step["mean"] - 1).fill_nan(0))
            tokens += int(frame["tokens"].sum())
            flops += int(frame["flops"].sum())
            values, times = np.unique(table.column("trained_tokens").to_numpy(), return_counts=True)
            loads.update(dict(zip(values.tolist(), times.tolist(), strict=True)))
        above = pl.concat(excess)
        histograms: dict[str, Histogram] = {}
        if loads:
            values, times = np.array([*zip(*sorted(loads.items()), strict=True)])
            counts, edges = np.histogram(values, bins=min(20, len(values)), weights=times)
            bars = tuple(round(float(e), 1) for e in edges), tuple(int(c) for c in counts)
            histograms["rank_load"] = Histogram("trained tokens per rank and step", "tokens", *bars)
        is_kept, is_remainder = find_sequence_states(context.store, source, written)
        schedule = tabulate_schedule(list(sizes), source, written, is_kept, is_remainder)
        by_state = {
            KEPT: int(is_kept.sum()),
            REMAINDER: int(is_remainder.sum()),
            NOT_SCHEDULED: int((~is_kept & ~is_remainder).sum()),
        }
        dropped_places = sum(map(len, source.steps.dropped))
        leaking = leakage.find_leaks(context, packed)
        held = places - fillers
        rows = [row for one in packed.values() for row in one.tables["splits"].rows]
        orders = [part.files["order"].digest for part in written.parts]
        has_targets = context.recipe.objective != "prompts"
        lines: list[tuple[Any, ...]] = []
        for name, dataset in context.recipe.datasets.items():
            own = {str(row[1]): int(row[2]) for row in rows if row[0] == name}
            asked = {split: getattr(dataset.splits, split) for split in ("validation", "test")}
            shares = {split: float(value) for split, value in asked.items() if isinstance(value, float)}
            if len(shares) == len(asked):
                shares["train"] = 1 - sum(shares.values())
            examples = sum(own.values())
            lines += [
                (name, split, shares.get(split), compute_share(count, examples), count) for split, count in own.items()
            ]
        return StageOutput(
            parts=written.parts,
            facts=TrainingSplitsFacts(
                **leaking.facts,
                mixture_share=round(measure_share_error(source.schedule, written.labels), 6),
                order_nonempty=held,
                dropped_share=compute_share(dropped_places, held + dropped_places),
                filler_share=compute_share(fillers, places),
                # The mean excess of the largest rank over the mean; then the number of (step, rank) without targets.
                rank_balance=round(float(above.mean() or 0.0), 9),  # pyrefly: ignore[bad-argument-type]
                empty_step=loads[0] if has_targets or not len(above) else NOT_APPLICABLE,
                sequences=total,
                places=places,
                fillers=fillers,
                steps=len(source.steps.step_offsets) - 1,
                tokens=tokens,
                trained_tokens=int(written.trained_tokens.sum()),
                flops=flops if context.recipe.partitions.balance == "flops" else NOT_APPLICABLE,
            ),
            ledger=[(state, "", count) for state, count in by_state.items() if count or state == KEPT],
            tables={
                "splits": DisplayTable(("dataset", "split", "rows", "sequences", "trained_tokens"), tuple(rows)),
                "shares": DisplayTable(("dataset", "split", "wanted", "got", "examples"), tuple(lines)),
                "mixture": _mixture_table(context, source, written, sizes),
                "schedule": schedule,
            },
            histograms=histograms,
            samples=leaking.samples,
            schema=tuple((f.name, str(f.type)) for f in ORDER_SCHEMA),
            card={
                "order": orders[0] if len(orders) == 1 else digest_json(orders),
                "datasets": list(sizes),
                "packed": {name: one.version for name, one in packed.items()},
                "has_steps": bool(context.recipe.mixture.batch_sizes),
            },
            rows_made=total,
        )


def _name_load(recipe: Recipe) -> str:
    """Return the column of `rank_steps` that ranks are balanced by; prompts have no targets, so all tokens count."""
    if recipe.partitions.balance == "flops":
        return "flops"
    return "tokens" if recipe.objective == "prompts" else "trained_tokens"


def _mixture_table(
    context: StageContext, source: OrderSource, written: WrittenOrder, sizes: dict[str, int]
) -> DisplayTable:
    shares = compute_wanted_shares(source.schedule)
    first = context.recipe.mixture.stages
    weights = first[0][1] if first else {name: Fraction(size) for name, size in sizes.items()}
    rows: list[tuple[Any, ...]] = []
    for number, (name, size) in enumerate(sizes.items()):
        mine = int(written.sequences[number])
        rows.append(
            (
                name,
                round(float(weights.get(name, Fraction(0))), 6),
                round(shares[number], 6),
                round(mine / size, 4) if size else 0.0,
                mine,
                int(written.trained_tokens[number]),
            )
        )
    return DisplayTable(("dataset", "weight", "wanted_share", "passes", "sequences", "trained_tokens"), tuple(rows))


STAGE = StageDeclaration(
    name=TRAINING_SPLITS,
    facts=TrainingSplitsFacts,
    description="The training order of all sequences, mixed by weight, with checks of leaks between splits.",
    scope="recipe",
    identity=identify_training_splits,
    prepare=lambda context: PreparedStage((), lambda: make_training_splits(context)),
    inputs=(PACKED_SHARDS,),
    shows_overdue=True,
    stats_inputs=StatsInputs(
        count_rows_by_fact("places", "place"), files={"rank_steps": "rank_steps"}, tables=("splits", "mixture")
    ),
    summarize=lambda facts, rows: (rows, format_count(facts.steps, "step")),
    compared=(
        ComparedFact("places", "places"),
        ComparedFact("steps", "steps"),
        ComparedFact("rank balance", "rank_balance", is_share=True),
    ),
)
