"""Examples → packed shards: one integer plan per split, then every token moves once.

What belongs here: gathering lengths, holding out a number of sequences, planning, what no sequence shows. What does
not: the plan (`plan.py`), moving tokens (`shard_files.py`), the files (`shards/`).

    lengths of all examples ─► validation carved ─► slices ─► plan ─► shard borders ─► shards
                                                                   └► left_out: what is cut, dropped or surplus

An example has its tokens in sequences, or a line in `left_out` that says how many are not and why.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.number_text import format_percent
from rowmill.core.stage_names import PACKED_SHARDS, RAW_DATASET, TOKENIZED_EXAMPLES, TRUNCATION_STATS
from rowmill.core.storage import Store, digest_bytes, digest_json
from rowmill.packing.plan import count_best_fit, count_left_out_tokens
from rowmill.recipe.recipe import Recipe
from rowmill.schema.facts import PackedShardsFacts
from rowmill.schema.ledger import KEPT, REJECTED
from rowmill.schema.manifest import NOT_APPLICABLE, DisplayTable, File, Histogram, Manifest, Part
from rowmill.shards import native
from rowmill.shards.native import find_content_damage
from rowmill.sources import SourcePart
from rowmill.stages import inputs
from rowmill.stages.base import (
    ComparedFact,
    PreparedStage,
    StageContext,
    StageDeclaration,
    StageOutput,
    compute_share,
    part_folder,
    scratch_folder,
)
from rowmill.stages.packed_shards.pack_plans import (
    SPLITS,
    SURPLUS_CODE,
    DatasetPackPlans,
    ExampleLengths,
    SplitPackPlan,
    get_holdout_size,
    plan_splits,
)
from rowmill.stages.packed_shards.shard_files import (
    ExampleScratchTask,
    ReadBackTask,
    ShardTask,
    read_back,
    write_example_scratch,
    write_shard,
)
from rowmill.stats import StatsInputs, count_rows_by_fact

VERSION = 4
"""Raise it when any shard may hold other bytes, or other facts are counted on the way."""

SHARD_TOKENS = 2 << 20
"""Tokens per shard at most: some 60 MB while a worker gathers and writes it."""

LEFT_OUT = pa.schema(
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("of_tokens", pa.int64(), nullable=False),
    ]
)
"""One line per example that is not whole in the sequences: `tokens` of its `of_tokens` stand in none."""


def identify_packed_shards(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide shards; all have weights as soon as one dataset of the recipe has."""
    dataset = recipe.datasets[name]
    carved = get_holdout_size(recipe, name)
    return {
        "versions": [VERSION],
        "packing": dataset.packing.model_dump(mode="json"),
        "row_kind": dataset.row_kind,
        "seq_len": recipe.seq_len,
        "carved": None if carved is None else [carved, dataset.splits.model_dump(mode="json")],
        "weights": [dataset.loss.weights, recipe.has_loss_weights],
    }


def make_packed_shards(work: StageContext) -> StageOutput:
    """Plan each split, write its shards, read them back, and say what stands in none."""
    plans = plan_splits(work)
    with scratch_folder(work) as scratch:
        files, expected = _write_scratch_files(work, plans.lengths, plans.splits, scratch)
        shards = _write_shards(work, plans.lengths, plans.splits, files)
    tasks = [ReadBackTask(work.store.root, part.files["shard"], part.files["segments"]) for part in shards]
    back = list(work.pool.map(read_back, tasks, size_bytes=sum(task.shard.bytes for task in tasks)))
    left = _find_left_out(plans.lengths, plans.splits)
    return _build_shards_output(
        work, plans, [*shards, *_write_side_tables(work, plans, left)], left, _ReadBackSums.of(back, expected)
    )


@dataclass(frozen=True, slots=True)
class _ReadBackSums:
    """What reading the shards again came to: damaged files, their content hash, and the one to be expected."""

    damaged: int
    found: int
    expected: int

    @classmethod
    def of(cls, back: Sequence[tuple[int, int]], expected: int) -> "_ReadBackSums":
        found = sum(value for _, value in back) % native.HASH_MODULUS
        return cls(sum(damaged for damaged, _ in back), found, expected)


# ── What no sequence shows ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _LeftOutExamples:
    """Examples that are not whole in the sequences: number, tokens left out, `(split, state, reason)` of each."""

    examples: Ints
    tokens: Ints
    fates: list[tuple[str, str, str]]

    def count(self, state: str, reason: str) -> int:
        """Count the examples of one fate."""
        return sum(1 for _, own_state, own_reason in self.fates if (own_state, own_reason) == (state, reason))


def _find_left_out(lengths: ExampleLengths, plans: Sequence[SplitPackPlan]) -> _LeftOutExamples:
    planned = np.zeros(len(lengths.tokens), np.int64)
    reasons: dict[int, str] = {}
    for one in plans:
        planned += lengths.tokens - count_left_out_tokens(one.plan, lengths.tokens)
        reasons |= {number: reason for reason, numbers in one.rejected.items() for number in numbers.tolist()}
    examples = np.flatnonzero(planned < lengths.tokens)

    def fate(number: int) -> tuple[str, str, str]:
        split = int(lengths.splits[number])
        if split == SURPLUS_CODE:
            return ("", "validation_surplus", "")
        if planned[number]:
            return (SPLITS[split], KEPT, "")
        # Only concat leaves whole documents out without rejecting them.
        return (SPLITS[split], REJECTED, reasons[number]) if number in reasons else (SPLITS[split], "tail", "")

    fates = [fate(number) for number in examples.tolist()]
    return _LeftOutExamples(examples, (lengths.tokens - planned)[examples], fates)


def _write_side_tables(work: StageContext, plans: DatasetPackPlans, left: _LeftOutExamples) -> list[Part]:
    """Write what stands beside the shards: what is left out, and the rows that were held out by number."""
    tables: dict[str, pa.Table] = {}
    if len(left.examples):
        names = _read_example_ids(work, plans.lengths, left.examples)
        row_ids = [name.rsplit("#", 1)[0] for name in names]
        fates = [list(column) for column in zip(*left.fates, strict=True)]
        columns = [names, row_ids, *fates, left.tokens, plans.lengths.tokens[left.examples]]
        tables["left_out"] = pa.table(columns, schema=LEFT_OUT)
    if get_holdout_size(work.recipe, work.dataset_name or "") is not None:
        tables["moved"] = plans.moved
    at = part_folder(work.folder, _digest_plans(work, plans.lengths, plans.splits))
    files: dict[str, File] = {}
    for name, table in tables.items():
        sink = BytesIO()
        pq.write_table(table, sink, compression="zstd")
        content = sink.getvalue()
        work.store.write(f"{at}/{name}.parquet", content)
        files[name] = File(f"{at}/{name}.parquet", len(content), digest_bytes(content), table.num_rows)
    return [Part(digest_json([file.digest for file in files.values()]), files, {"split": ""})] if files else []


def _read_example_ids(work: StageContext, lengths: ExampleLengths, numbers: Ints) -> list[str]:
    """Return the ids of some examples, in ascending number."""
    which = np.searchsorted(lengths.first_rows, numbers, "right") - 1
    names: list[str] = []
    for part in np.unique(which).tolist():
        column = work.store.table(lengths.files[part], ["example_id"]).column(0)
        names += column.take(pa.array(numbers[which == part] - lengths.first_rows[part])).to_pylist()
    return names


# ── Tokens to shards ───────────────────────────────────────────────────────────────────────────────


def _write_scratch_files(
    work: StageContext, lengths: ExampleLengths, plans: Sequence[SplitPackPlan], scratch: Path
) -> tuple[list[str], int]:
    examples, starts, sizes, begins = _collect_segments(work, plans)
    order = np.argsort(examples, kind="stable")
    examples, starts, sizes, begins = examples[order], starts[order], sizes[order], begins[order]
    cuts = np.searchsorted(examples, lengths.first_rows)
    targets = [str(scratch / f"{i:06d}.arrow") for i in range(len(lengths.files))]
    tasks = [
        ExampleScratchTask(
            root=work.store.root,
            source=file,
            target=targets[i],
            rows=examples[cuts[i] : cuts[i + 1]] - lengths.first_rows[i],
            starts=starts[cuts[i] : cuts[i + 1]],
            lengths=sizes[cuts[i] : cuts[i + 1]],
            span_begins=begins[cuts[i] : cuts[i + 1]],
            ignore_token_id=work.dataset.packing.ignore_token_id,
            stores_weights=work.dataset.loss.weights,
            weighted=work.recipe.has_loss_weights,
        )
        for i, file in enumerate(lengths.files)
    ]
    sums = work.pool.map(write_example_scratch, tasks, size_bytes=int(lengths.tokens.sum()))
    return targets, sum(sums) % native.HASH_MODULUS


def _collect_segments(
    work: StageContext, plans: Sequence[SplitPackPlan]
) -> "tuple[Ints, Ints, Ints, NDArray[np.bool_]]":
    examples = [p.plan.examples for p in plans] or [np.empty(0, np.int64)]
    ranges = [p.plan.ranges for p in plans] or [np.empty((0, 2), np.int32)]
    begins: list[NDArray[np.bool_]] = [np.empty(0, bool)]
    for one in plans:
        first = np.ones(len(one.plan.examples), bool)
        if not work.dataset.packing.block_cross_document_attention:
            first[:] = False
            first[one.plan.sequence_offsets[:-1]] = True
        begins.append(first)
    both = np.concatenate(ranges).astype(np.int64)
    return np.concatenate(examples), both[:, 0], both[:, 1], np.concatenate(begins)


def _write_shards(
    work: StageContext, lengths: ExampleLengths, plans: Sequence[SplitPackPlan], files: list[str]
) -> list[Part]:
    scanned = inputs.load_source_parts(work.input(RAW_DATASET))
    at = part_folder(work.folder, _digest_plans(work, lengths, plans))
    card = {k: str(v) for k, v in _build_shard_card(work).items()}
    tasks = [task for one in plans for task in _plan_shard_tasks(work, lengths, one, files, scanned, at, card)]
    return list(work.pool.map(write_shard, tasks, size_bytes=int(lengths.tokens.sum())))


def _digest_plans(work: StageContext, lengths: ExampleLengths, plans: Sequence[SplitPackPlan]) -> str:
    examples = [file.digest for file in work.input(TOKENIZED_EXAMPLES).files("examples")]
    arrays = [[p.split, digest_bytes(p.plan.examples.tobytes()), digest_bytes(p.plan.ranges.tobytes())] for p in plans]
    name = work.dataset_name or ""
    # The card stands in every shard: another one must not take the place of files that a kept version names.
    return digest_json(
        PACKED_SHARDS, name, identify_packed_shards(work.recipe, name), _build_shard_card(work), examples, arrays
    )


def _build_shard_card(work: StageContext) -> dict[str, Any]:
    blocked = work.dataset.packing.block_cross_document_attention
    own = {
        "format": "native",
        "format_version": VERSION,
        "seq_len": work.recipe.seq_len,
        "attention": "blocked" if blocked else "open",
        "recipe": work.recipe.name,
        "dataset": work.dataset_name or "",
    }
    return work.input(TOKENIZED_EXAMPLES).card | own


def _plan_shard_tasks(
    work: StageContext,
    lengths: ExampleLengths,
    one: SplitPackPlan,
    files: list[str],
    scanned: list[SourcePart],
    at: str,
    card: dict[str, str],
) -> list[ShardTask]:
    per_shard = max(1, SHARD_TOKENS // work.recipe.seq_len)
    options, plan = work.dataset.packing, one.plan
    sources = {p.part_id: (p.url, p.first_record) for p in scanned}
    tasks: list[ShardTask] = []
    for number, first in enumerate(range(0, plan.sequences, per_shard)):
        last = min(first + per_shard, plan.sequences)
        begin, end = int(plan.sequence_offsets[first]), int(plan.sequence_offsets[last])
        tasks.append(
            ShardTask(
                root=work.store.root,
                at=at,
                name=f"part-{number:05d}",
                split=one.split,
                dataset=work.dataset_name or "",
                files=tuple(files),
                first_rows=lengths.first_rows,
                examples=plan.examples[begin:end],
                ranges=plan.ranges[begin:end],
                sequence_offsets=plan.sequence_offsets[first : last + 1] - begin,
                first_sequence=first,
                blocked=options.block_cross_document_attention,
                ignore_token_id=options.ignore_token_id,
                sources=sources,
                card=card,
            )
        )
    return tasks


def _build_shards_output(
    work: StageContext, plans: DatasetPackPlans, made: list[Part], left: _LeftOutExamples, read: _ReadBackSums
) -> StageOutput:
    losses = _count_losses(plans, left)
    shards = [part for part in made if "shard" in part.files]
    planned = sum(int(p.plan.ranges[:, 1].sum()) for p in plans.splits)
    written = sum(int(p.facts["tokens"]) for p in shards)
    sequences = sum(p.plan.sequences for p in plans.splits)
    total = int(plans.lengths.tokens.sum())
    fates = {fate: left.count(*fate) for fate in _FATES}
    kept = len(plans.lengths.tokens) - sum(fates.values())
    return StageOutput(
        parts=made,
        facts=PackedShardsFacts(
            conservation=0 if read.found == read.expected and planned == written else 1,
            shard_digests=read.damaged,
            fill=compute_share(planned, sequences * work.recipe.seq_len) if sequences else 1,
            limit_cost=_measure_limit_cost(work, plans.splits),
            packing_loss=max(compute_share(*of) for of in losses.values()) if losses["examples"][1] else NOT_APPLICABLE,
            packing_losses=losses,
            sequences=sequences,
            segments=sum(len(p.plan.examples) for p in plans.splits),
            tokens=planned,
            trained_tokens=sum(int(p.facts["trained_tokens"]) for p in shards),
            tokens_left_out=total - planned,
            content_hash=f"{read.found:032x}",
        ),
        ledger=[(KEPT, "", kept), *((*fate, count) for fate, count in fates.items() if count)],
        token_ledger=[("all", "dropped", total - planned)] if total > planned else [],
        tables={"splits": _splits_table(work, plans, shards), "packing": _packing_table(work, plans, shards)},
        histograms={"fill": _fill_histogram(work, plans.splits)},
        schema=tuple((f.name, str(f.type)) for f in native.make_shard_schema(weighted=work.recipe.has_loss_weights)),
        card=_build_shard_card(work),
        rows_made=len(plans.lengths.tokens),
    )


_FATES = ((REJECTED, "overlong"), (REJECTED, "no_loss_tokens"), ("tail", ""), ("validation_surplus", ""))
"""How an example can end at this stage without a token in any sequence: state and reason."""


def _count_losses(plans: DatasetPackPlans, left: _LeftOutExamples) -> dict[str, tuple[int, int]]:
    """Return how many examples, and how many trained tokens, stand in no sequence, and how many entered.

    What was held out and then not needed counts as neither.
    """
    counts = plans.lengths.splits != SURPLUS_CODE
    examples, trained = int(counts.sum()), int(plans.lengths.trained[counts].sum())
    rejected = sum(state == REJECTED for _, state, _ in left.fates)
    tails = sum(
        min(int(plans.lengths.trained[number]), tokens)
        for number, tokens, (_, state, _) in zip(left.examples.tolist(), left.tokens.tolist(), left.fates, strict=True)
        if state == "tail"
    )
    lost = min(trained, sum(one.trained_lost for one in plans.splits) + tails)
    return {"examples": (rejected, examples), "trained_tokens": (lost, trained)}


def _measure_limit_cost(work: StageContext, plans: Sequence[SplitPackPlan]) -> float:
    """Return the share of all room that would be saved if a sequence could have any number of segments."""
    options = work.dataset.packing
    sequences = sum(one.plan.sequences for one in plans)
    limited = options.strategy_for(work.dataset.row_kind) == "best_fit" and options.segment_limit is not None
    if not limited or not sequences:
        return 0.0
    unlimited = sum(count_best_fit(one.plan.ranges[:, 1], work.recipe.seq_len) for one in plans)
    return compute_share(sequences - unlimited, sequences)


def _fill_histogram(work: StageContext, plans: Sequence[SplitPackPlan]) -> Histogram:
    fills = np.concatenate([p.plan.tokens for p in plans] or [np.empty(0, np.int64)]) / work.recipe.seq_len
    counts, edges = np.histogram(fills, bins=20, range=(0.0, 1.0))
    return Histogram(
        "fill", "share of seq_len", tuple(round(float(e), 2) for e in edges), tuple(int(c) for c in counts)
    )


def _packing_table(work: StageContext, plans: DatasetPackPlans, shards: Sequence[Part]) -> DisplayTable:
    """Say per split how full its sequences are, of how many segments they are made, and what of them trains."""
    rows: list[tuple[Any, ...]] = []
    for one in plans.splits:
        trained = sum(int(p.facts["trained_tokens"]) for p in shards if p.facts["split"] == one.split)
        tokens, sequences = int(one.plan.tokens.sum()), one.plan.sequences
        segments = round(len(one.plan.examples) / sequences, 2) if sequences else 0.0
        fill = compute_share(tokens, sequences * work.recipe.seq_len)
        rows.append((one.split, sequences, segments, tokens, fill, compute_share(trained, tokens)))
    return DisplayTable(("split", "sequences", "segments_each", "tokens", "fill", "trained_share"), tuple(rows))


def _splits_table(work: StageContext, plans: DatasetPackPlans, shards: Sequence[Part]) -> DisplayTable:
    rows: list[tuple[Any, ...]] = []
    for one in plans.splits:
        own = [p.facts for p in shards if p.facts["split"] == one.split]
        examples = int((plans.lengths.splits == SPLITS.index(one.split)).sum())
        rows.append(
            (work.dataset_name, one.split, examples, one.plan.sequences, sum(int(f["trained_tokens"]) for f in own))
        )
    return DisplayTable(("dataset", "split", "rows", "sequences", "trained_tokens"), tuple(rows))


def _find_shard_damage(store: Store, made: Manifest) -> Iterator[str]:
    return find_content_damage(store, "/".join(made.key), made.files("shard"), str(made.facts["content_hash"]))


STAGE = StageDeclaration(
    name=PACKED_SHARDS,
    facts=PackedShardsFacts,
    description="Examples packed into sequences of at most seq_len tokens, as Parquet.",
    identity=identify_packed_shards,
    prepare=lambda work: PreparedStage((), lambda: make_packed_shards(work)),
    inputs=(TOKENIZED_EXAMPLES, RAW_DATASET),
    # Shards are not packed past a failed check of the statistics.
    gates=(TRUNCATION_STATS,),
    uses_all_cores=True,
    feeds=StatsInputs(
        count_rows_by_fact("sequences", "sequence"),
        files={"shard": "sequences", "segments": "segments", "left_out": "left_out"},
    ),
    summarize=lambda facts, rows: (rows, f"{format_percent(facts.fill)} full"),
    compared=(ComparedFact("sequences", "sequences"), ComparedFact("fill", "fill", is_share=True)),
    find_content_damage=_find_shard_damage,
)
