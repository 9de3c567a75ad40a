"""Sequences of all datasets → the training order, and leaks between splits.

What belongs here: sizes for the mixture, rank assignment. What does not: the order itself (`mixture.py`,
`rank_assignment.py`), tokens, leaks between splits (`leakage.py`).

The order is one line per place: dataset, sequence, pass, step. It does not depend on the world size: rank r of W takes
every W-th place. Validation and test sets are not mixed or shuffled; their order is their plan's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from rowmill.core.arrays import Ints, compute_offsets
from rowmill.core.errors import IntegrityError
from rowmill.core.number_text import format_count
from rowmill.core.stage_names import PACKED_SHARDS, TRAINING_SPLITS
from rowmill.core.storage import digest_json
from rowmill.packing import rank_assignment
from rowmill.packing.mixture import SampleOrder, compute_wanted_shares, measure_share_error, schedule_sequences
from rowmill.packing.rank_assignment import FILLER, RankOrder
from rowmill.recipe.recipe import Recipe
from rowmill.schema.facts import UNCOUNTED, TrainingSplitsFacts
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import NOT_APPLICABLE, DisplayTable, Histogram, Manifest, Part
from rowmill.stages import part_files
from rowmill.stages.base import ComparedFact, PreparedStage, StageContext, StageDeclaration, StageOutput, compute_share
from rowmill.stages.inputs import get_packed_shards
from rowmill.stages.kept_parts import part_folder
from rowmill.stages.training_splits import leakage, table_leakage
from rowmill.stages.training_splits.schedule import tabulate_schedule
from rowmill.stats import StatsInputs, count_rows_by_fact

VERSION = 4
"""Increase it when any recipe's order, or facts, may change."""


ORDER_SCHEMA = pa.schema(
    [
        pa.field("dataset", pa.int32(), nullable=False),
        pa.field("sequence_id", pa.int64(), nullable=False),
        pa.field("pass", pa.int32(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("filler", pa.bool_(), nullable=False),
    ]
)
"""Line p is place p. `dataset` is its number in recipe order; a filler has dataset and sequence −1."""


@dataclass(frozen=True, slots=True)
class SequenceFacts:
    """The train sequences of one dataset, int64[S] each."""

    tokens: Ints
    trained: Ints
    segments: Ints
    longest: Ints
    flops: Ints
    """What each costs; 0 unless ranks are balanced by it."""


def identify_training_splits(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide the order (`order`), and the splits that it is compared with."""
    tables = [name for name, dataset in recipe.datasets.items() if dataset.format.IS_TABLE]
    by_flops = recipe.partitions.balance == "flops"
    return {
        # Recipes without records datasets keep their identity.
        **({"tables": [table_leakage.VERSION, tables]} if tables else {}),
        "order": {
            "versions": [VERSION],
            "mixture": recipe.mixture.model_dump(mode="json"),
            "partitions": recipe.partitions.model_dump(mode="json", exclude=None if by_flops else {"flops_linear"}),
            # Recipes that are balanced otherwise keep their identity.
            **({"open_attention": _list_open_datasets(recipe)} if by_flops else {}),
            "seed": recipe.seed,
            "datasets": list(recipe.datasets),
            # Recipes that train tokens keep their identity.
            **({} if recipe.objective == "next_token" else {"objective": recipe.objective}),
        },
        "splits": {name: dataset.splits.model_dump(mode="json") for name, dataset in recipe.datasets.items()},
        "grouped": [name for name, dataset in recipe.datasets.items() if leakage.has_groups(dataset)],
    }


def _list_open_datasets(recipe: Recipe) -> list[str]:
    """Return the datasets in which attention crosses segments, so that a sequence is one span of attention."""
    return [name for name, one in recipe.datasets.items() if not one.packing.block_cross_document_attention]


def make_training_splits(work: StageContext) -> StageOutput:
    """Mix the datasets, assign ranks, and measure leaks."""
    packed = get_packed_shards(work)
    _require_one_tokenizer(work, packed)
    sequences = {name: _read_sequences(work, name, one) for name, one in packed.items()}
    sizes = {name: len(one.tokens) for name, one in sequences.items()}
    order = schedule_sequences(work.recipe.mixture, sizes, work.recipe.seed)
    by_place = _gather_by_place(order, list(sequences.values()))
    mixture = work.recipe.mixture
    dealt = rank_assignment.assign_ranks(
        work.recipe.partitions,
        order.epoch_offsets,
        getattr(by_place, LOAD_COLUMNS[_name_load(work.recipe)]),
        batch_sizes=mixture.batch_sizes,
        steps=mixture.steps,
    )
    steps = _rank_steps(work, dealt, by_place)
    part = _save_order(work, order, dealt, steps)
    schedule = tabulate_schedule(order, dealt, {name: (one.tokens, one.trained) for name, one in sequences.items()})
    return _build_order_output(work, packed, sizes, order, dealt, by_place, steps, part, schedule)


def _require_one_tokenizer(work: StageContext, packed: Mapping[str, Manifest]) -> None:
    """Refuse datasets tokenized with different tokenizers: the tokenizer changed, or an old version is in use."""
    made_with: dict[str, list[str]] = {}
    for name, one in packed.items():
        made_with.setdefault(str(one.card["tokenizer_digest"]), []).append(name)
    if len(made_with) > 1:
        found = "; ".join(f"{', '.join(names)} with {which[:12]}" for which, names in made_with.items())
        raise IntegrityError(
            f"{'/'.join(work.key)}: its datasets were tokenized with {len(made_with)} tokenizers ({found}); the ids of "
            "one order must come from one; build the recipe again, and pin tokenizer.revision if it is on the hub"
        )


LOAD_COLUMNS = {"tokens": "tokens", "trained_tokens": "trained", "flops": "flops"}
"""Columns of `rank_steps` that ranks may be balanced by, and the field of `SequenceFacts` that each sums."""


def _name_load(recipe: Recipe) -> str:
    """Return the column of `rank_steps` that ranks are balanced by; prompts have no targets, so all tokens count."""
    if recipe.partitions.balance == "flops":
        return "flops"
    return "tokens" if recipe.objective == "prompts" else "trained_tokens"


def _read_sequences(work: StageContext, name: str, packed: Manifest) -> SequenceFacts:
    shards = [p.files["shard"] for p in packed.parts if p.facts["split"] == "train"]
    if not shards:
        return SequenceFacts(*(np.empty(0, np.int64) for _ in range(5)))
    table = pa.concat_tables(
        [work.store.table(file, ("tokens", "trained_tokens", "segment_lengths")) for file in shards]
    ).combine_chunks()
    lists = table.column("segment_lengths").combine_chunks()
    offsets = np.asarray(lists.offsets, np.int64)
    lengths = lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    starts = offsets[:-1] - offsets[0]
    tokens = table.column("tokens").to_numpy().astype(np.int64)
    return SequenceFacts(
        tokens=tokens,
        trained=table.column("trained_tokens").to_numpy().astype(np.int64),
        segments=np.diff(offsets),
        longest=np.maximum.reduceat(lengths, starts),
        flops=_compute_flops(work.recipe, name, tokens, lengths, offsets - offsets[0]),
    )


def _compute_flops(recipe: Recipe, name: str, tokens: Ints, lengths: Ints, offsets: Ints) -> Ints:
    """Return what each sequence of a dataset costs; 0 unless ranks are balanced by it."""
    partitions = recipe.partitions
    if partitions.balance != "flops":
        return np.zeros(len(tokens), np.int64)
    if name in _list_open_datasets(recipe):
        return rank_assignment.compute_flops(tokens, np.arange(len(tokens) + 1), partitions.flops_linear)
    return rank_assignment.compute_flops(lengths, offsets, partitions.flops_linear)


def _gather_by_place(order: SampleOrder, sequences: list[SequenceFacts]) -> SequenceFacts:
    """Return the facts of the sequence at each place of the mixed order."""
    firsts = compute_offsets([len(one.tokens) for one in sequences])
    index = firsts[order.datasets] + order.items

    def at(name: str) -> Ints:
        joined = np.concatenate([getattr(one, name) for one in sequences])
        return joined[index]

    return SequenceFacts(at("tokens"), at("trained"), at("segments"), at("longest"), at("flops"))


def _rank_steps(work: StageContext, dealt: RankOrder, by_place: SequenceFacts) -> pa.Table:
    world = work.recipe.partitions.world_size
    tables: list[pa.Table] = []
    for rank in range(world):
        facts = rank_assignment.summarize_steps(
            dealt, rank, world, tokens=by_place.tokens, trained_tokens=by_place.trained, segments=by_place.segments,
            flops=by_place.flops, longest_segments=by_place.longest,
        )  # fmt: skip
        count = len(facts.sequences)
        tables.append(
            pa.table(
                {
                    "rank": np.full(count, rank),
                    "world_size": np.full(count, world),
                    "step": np.arange(count),
                    "sequences": facts.sequences,
                    "fillers": facts.fillers,
                    "segments": facts.segments,
                    "tokens": facts.tokens,
                    "trained_tokens": facts.trained_tokens,
                    "longest_segment": facts.longest_segment,
                    "step_trained_tokens": facts.step_trained_tokens,
                    # Recipes that are balanced otherwise keep their files.
                    **({"flops": facts.flops} if _name_load(work.recipe) == "flops" else {}),
                }
            )
        )
    return pa.concat_tables(tables)


def _save_order(work: StageContext, order: SampleOrder, dealt: RankOrder, steps: pa.Table) -> Part:
    filler = dealt.order == FILLER
    place = np.where(filler, 0, dealt.order)
    empty = not len(order.items)
    columns = [
        np.full(len(filler), -1) if empty else np.where(filler, -1, values[place])
        for values in (order.datasets, order.items)
    ]
    passes = np.zeros(len(filler), np.int32) if empty else np.where(filler, 0, order.passes[place])
    step = np.repeat(np.arange(len(dealt.step_offsets) - 1), np.diff(dealt.step_offsets))
    table = pa.table(
        [columns[0].astype(np.int32), columns[1], passes.astype(np.int32), step, filler], schema=ORDER_SCHEMA
    )
    packed = [one.version for one in get_packed_shards(work).values()]
    fingerprint = digest_json(TRAINING_SPLITS, identify_training_splits(work.recipe, "")["order"], packed)
    at = part_folder(work.folder, fingerprint)
    files = {
        "order": part_files.write_parquet(work.store, f"{at}/order.parquet", table),
        "rank_steps": part_files.write_parquet(work.store, f"{at}/rank_steps.parquet", steps),
    }
    return Part(fingerprint, files, {"places": len(filler), "fillers": int(filler.sum())})


def _build_order_output(
    work: StageContext,
    packed: dict[str, Manifest],
    sizes: dict[str, int],
    order: SampleOrder,
    dealt: RankOrder,
    by_place: SequenceFacts,
    steps: pa.Table,
    part: Part,
    schedule: DisplayTable,
) -> StageOutput:
    shown = np.unique(_number_globally(order, sizes))
    total = sum(sizes.values())
    scheduled = np.unique(_number_globally(order, sizes)[dealt.order[dealt.order != FILLER]]) if total else shown
    dropped = (
        np.setdiff1d(np.unique(_number_globally(order, sizes)[dealt.dropped]), scheduled)
        if len(dealt.dropped)
        else np.empty(0, np.int64)
    )
    left = total - len(scheduled) - len(dropped)
    lines = [(KEPT, "", len(scheduled)), ("remainder", "", len(dropped)), ("not_scheduled", "", left)]
    leaking = leakage.find_leaks(work, packed)
    balance, empty_pairs = _measure_balance(work, steps)
    places, fillers = int(part.facts["places"]), int(part.facts["fillers"])
    held = places - fillers
    rows = [row for one in packed.values() for row in one.tables["splits"].rows]
    return StageOutput(
        parts=[part],
        facts=TrainingSplitsFacts(
            **leaking.facts,
            mixture_share=round(measure_share_error(work.recipe.mixture, sizes, order), 6),
            order_nonempty=held,
            dropped_share=compute_share(len(dealt.dropped), held + len(dealt.dropped)),
            filler_share=compute_share(fillers, places),
            rank_balance=balance,
            empty_step=empty_pairs,
            sequences=total,
            places=places,
            fillers=fillers,
            steps=len(dealt.step_offsets) - 1,
            tokens=int(by_place.tokens[dealt.order[dealt.order != FILLER]].sum()),
            trained_tokens=int(by_place.trained[dealt.order[dealt.order != FILLER]].sum()),
            flops=(
                int(by_place.flops[dealt.order[dealt.order != FILLER]].sum())
                if work.recipe.partitions.balance == "flops"
                else UNCOUNTED
            ),
        ),
        ledger=[line for line in lines if line[2] or line[0] == KEPT],
        tables={
            "splits": DisplayTable(("dataset", "split", "rows", "sequences", "trained_tokens"), tuple(rows)),
            "shares": _shares_table(work, rows),
            "mixture": _mixture_table(work, order, dealt, by_place, sizes),
            "schedule": schedule,
        },
        histograms=_step_histogram(steps),
        samples=leaking.samples,
        schema=tuple((f.name, str(f.type)) for f in ORDER_SCHEMA),
        card={
            "order": part.files["order"].digest,
            "datasets": list(sizes),
            "packed": {name: one.version for name, one in packed.items()},
            "has_steps": bool(work.recipe.mixture.batch_sizes),
        },
        rows_made=total,
    )


def _shares_table(work: StageContext, rows: Sequence[tuple[Any, ...]]) -> DisplayTable:
    """Tabulate each split's share of examples with the configured share, if there is one."""
    lines: list[tuple[Any, ...]] = []
    for name, dataset in work.recipe.datasets.items():
        own = {str(row[1]): int(row[2]) for row in rows if row[0] == name}
        asked = {split: getattr(dataset.splits, split) for split in ("validation", "test")}
        shares = {split: float(value) for split, value in asked.items() if isinstance(value, float)}
        if len(shares) == len(asked):
            shares["train"] = 1 - sum(shares.values())
        total = sum(own.values())
        lines += [(name, split, shares.get(split), compute_share(count, total), count) for split, count in own.items()]
    return DisplayTable(("dataset", "split", "wanted", "got", "examples"), tuple(lines))


def _number_globally(order: SampleOrder, sizes: dict[str, int]) -> Ints:
    firsts = compute_offsets(list(sizes.values()))
    return firsts[order.datasets] + order.items


def _measure_balance(work: StageContext, steps: pa.Table) -> tuple[float, int | str]:
    """Return the mean excess of the largest rank over the mean, and the number of (step, rank) without targets.

    Prompts have no targets.
    """
    load = _name_load(work.recipe)
    frame = pl.DataFrame(steps.select(["step", *{load, "trained_tokens"}]).to_pydict())
    if not len(frame):
        return 0.0, 0
    per_step = frame.group_by("step", maintain_order=True).agg(
        pl.col(load).max().alias("most"), pl.col(load).mean().alias("mean")
    )
    above = (per_step["most"] / per_step["mean"] - 1).fill_nan(0).mean()
    has_targets = work.recipe.objective != "prompts"
    empty = int((frame["trained_tokens"] == 0).sum()) if has_targets else NOT_APPLICABLE
    return round(float(above or 0.0), 9), empty  # pyright: ignore[reportArgumentType]


def _step_histogram(steps: pa.Table) -> dict[str, Histogram]:
    trained = steps.column("trained_tokens").to_numpy()
    if not len(trained):
        return {}
    counts, edges = np.histogram(trained, bins=min(20, max(1, len(np.unique(trained)))))
    return {
        "rank_load": Histogram(
            "trained tokens per rank and step",
            "tokens",
            tuple(round(float(e), 1) for e in edges),
            tuple(int(c) for c in counts),
        )
    }


def _mixture_table(
    work: StageContext, order: SampleOrder, dealt: RankOrder, by_place: SequenceFacts, sizes: dict[str, int]
) -> DisplayTable:
    places = dealt.order[dealt.order != FILLER]
    shares = compute_wanted_shares(work.recipe.mixture, sizes, order)
    first = work.recipe.mixture.stages
    weights = first[0][1] if first else {name: Fraction(size) for name, size in sizes.items()}
    rows: list[tuple[Any, ...]] = []
    for number, (name, size) in enumerate(sizes.items()):
        mine = places[order.datasets[places] == number]
        rows.append(
            (
                name,
                round(float(weights.get(name, Fraction(0))), 6),
                round(shares[number], 6),
                round(len(mine) / size, 4) if size else 0.0,
                len(mine),
                int(by_place.trained[mine].sum()),
            )
        )
    return DisplayTable(("dataset", "weight", "wanted_share", "passes", "sequences", "trained_tokens"), tuple(rows))


STAGE = StageDeclaration(
    name=TRAINING_SPLITS,
    facts=TrainingSplitsFacts,
    description="The training order of all sequences, mixed by weight, with checks of leaks between splits.",
    scope="recipe",
    identity=identify_training_splits,
    prepare=lambda work: PreparedStage((), lambda: make_training_splits(work)),
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
