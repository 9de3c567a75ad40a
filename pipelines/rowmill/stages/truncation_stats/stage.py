"""What truncation removed, and the effect of other context lengths, computed from lengths; no token is read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow.compute as pc

from rowmill import stats
from rowmill.core.arrays import Integers, format_percent
from rowmill.core.stage_names import TOKENIZED_EXAMPLES, TRUNCATION_STATS
from rowmill.packing.layout import measure_padded_room, round_up
from rowmill.packing.pack_plan import count_sequences, slice_too_long
from rowmill.parts.accounts import RowLocator, describe_rejects
from rowmill.parts.context import StageOutput, compute_share
from rowmill.recipe.recipe import Recipe
from rowmill.schema.facts import TruncationStatsFacts
from rowmill.schema.manifest import DisplayTable, Histogram, Manifest
from rowmill.stages.base import ComparedFact, PreparedStage, StageContext, StageDeclaration
from rowmill.stages.truncation_stats.measured_lengths import (
    SHARE_BINS,
    STAGES,
    MeasuredExamples,
    measure_examples,
)
from rowmill.stats import StatsInputs, count_rows_by_fact

VERSION = 2

DROPPED = ("overlong", "overlong_after_structure")
"""Reject reasons about length."""

DOMAINS_SHOWN = 30


def identify_truncation_stats(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide the facts; the effect of other limits also depends on truncation and packing."""
    dataset = recipe.datasets[name]
    joint = dataset.format.get_joint_rows()
    own = {} if joint is None else joint.identify_lengths(dataset, recipe.seed, recipe.seq_len)
    return {
        "versions": [VERSION],
        "limit": recipe.limit_of(name),
        "row_kind": dataset.row_kind,
        **own,
        "truncation": dataset.truncation.model_dump(mode="json"),
        "packing": dataset.packing.model_dump(mode="json"),
    }


def make_truncation_stats(context: StageContext) -> StageOutput:
    """Measure the dataset's lengths."""
    joint = context.dataset.format.get_joint_rows()
    if joint is not None:
        return joint.measure_lengths(context)
    manifest = context.input(TOKENIZED_EXAMPLES)
    limit = _limit_examples(context)
    measured = measure_examples(context.store, manifest.files("examples"), context.pool)
    original = measured.original
    dropped = sum(n for _, r, n in manifest.ledger if r in DROPPED)
    rows = len(original) + dropped
    buckets = stats.count_length_buckets(original, limit)
    hints = stats.suggest_limits(buckets)
    by_split = {
        name: stats.make_length_histogram(measured.select_split(name), limit) for name in measured.list_splits()
    }
    whole = stats.make_length_histogram(original, limit)
    what_if = _compare_seq_lens(context, measured, limit)
    # The examples that lost tokens, by their lengths before, and the rows dropped for their length.
    shortened = (_describe_shortened(context, manifest, measured),) if measured.shortened else ()
    dropped_rows = {reason: count for _, reason, count in manifest.ledger if reason in DROPPED}
    share_edges = np.linspace(0, 1, SHARE_BINS + 1)
    share_counts = tuple(measured.trained_shares.tolist())
    stage_rows = [(stage, *sums) for (stage, _, _), sums in zip(STAGES, measured.stages.tolist(), strict=True)]
    return StageOutput(
        facts=TruncationStatsFacts(
            context_overflow=compute_share(measured.shortened + dropped, rows),
            limit=limit,
            examples=len(original),
            shortened=measured.shortened,
            dropped_for_length=dropped,
            tokens_removed=measured.tokens_removed,
            trained_removed=measured.trained_removed,
            quantiles=stats.compute_length_quantiles(original),
            buckets=buckets,
            hints=list(hints),
        ),
        tables={
            "what_if": what_if,
            "lengths": stats.make_lengths_table(by_split),
            "quantiles": DisplayTable(("quantile", "tokens"), tuple(stats.compute_length_quantiles(original).items())),
            "stages": DisplayTable(
                ("stage", "examples", "messages_removed", "tokens_removed", "trained_removed"), tuple(stage_rows)
            ),
            **_tabulate_domains(measured),
            "advice": DisplayTable(("hint",), tuple((hint,) for hint in hints)),
        },
        histograms={
            "lengths": whole,
            "trained_share": Histogram(
                "trained share", "share of tokens", tuple(round(float(e), 2) for e in share_edges), share_counts
            ),
        },
        samples={"context_overflow": (*shortened, *describe_rejects(context, manifest.parts, dropped_rows))},
    )


def _limit_examples(context: StageContext) -> int:
    """Return the most tokens of an example; that of a pair is shared by its sides."""
    return context.recipe.limit_of(context.dataset_name or "") * context.dataset.format.count_sides()


def _describe_shortened(context: StageContext, manifest: Manifest, measured: MeasuredExamples) -> str:
    """Describe the first example that lost tokens, read from as few parts as possible, and the longest one."""
    limit = _limit_examples(context)
    for file in manifest.files("examples"):
        table = context.store.table(file, ("example_id", "original_tokens", "tokens"))
        over = table.filter(pc.greater(table.column("original_tokens"), table.column("tokens")))
        if over.num_rows:
            first = over.slice(0, 1).to_pylist()[0]
            place = RowLocator(context).locate(first["example_id"], reads_lines=True)
            tokens = f"{first['original_tokens']:,} tokens, at most {limit:,}"
            longest = measured.longest_shortened
            longer = f"; the longest has {longest:,}" if longest > first["original_tokens"] else ""
            return f"truncated: {measured.shortened:,}, the first is {place}: {tokens}{longer}"
    raise AssertionError(context.key)


def _compare_seq_lens(context: StageContext, measured: MeasuredExamples, limit: int) -> DisplayTable:
    """Tabulate the effect of other limits; documents that are cut into pieces lose nothing at any limit."""
    original = measured.original
    candidates = stats.choose_candidate_seq_lens(limit)
    if not _cuts_into_pieces(context):
        return stats.estimate_seq_len_effects(
            original, measured.trained, candidates, plan=_make_sequence_counter(context)
        )
    joined = context.dataset.packing.strategy_for(context.dataset.row_kind) == "concat"
    rows: list[tuple[int, int, int, int]] = []
    for seq_len in candidates:
        pieces = original
        if len(original):
            pieces = slice_too_long(original, seq_len, "split", name_of=str, remedies="").lengths
        room = int(round_up(original, context.dataset.packing.room_multiple).sum())
        sequences = -(-room // seq_len) if joined else _make_sequence_counter(context)(pieces, seq_len)
        rows.append((seq_len, int((original > seq_len).sum()), 0, sequences))
    return DisplayTable(("seq_len", "examples_over", "trained_lost", "sequences"), tuple(rows))


def _cuts_into_pieces(context: StageContext) -> bool:
    dataset = context.dataset
    policy = dataset.truncation.policy(dataset.row_kind, sliced=dataset.keeps_overlong)
    if policy == "keep":
        joined = dataset.packing.strategy_for(dataset.row_kind) == "concat"
        return joined or dataset.packing.slice_strategy_for(dataset.row_kind) == "split"
    return policy == "split" and dataset.row_kind == "text"


def _make_sequence_counter(context: StageContext) -> Any:
    options = context.dataset.packing

    def count(lengths: Integers, limit: int) -> int:
        if options.segment_limit == 1:
            return len(lengths)
        room, capacity = measure_padded_room(lengths, limit, options.room_multiple)
        return count_sequences(room, capacity, options.segment_limit)

    return count


def _tabulate_domains(measured: MeasuredExamples) -> dict[str, DisplayTable]:
    """Tabulate what truncation removed per domain, most first; nothing if no row has a domain."""
    if not len(measured.domains) or measured.domains["domain"].null_count() == len(measured.domains):
        return {}
    share = (pl.col("tokens_removed") / pl.col("original_tokens")).round(6).alias("share_removed")
    by_domain = measured.domains.with_columns(share).drop("original_tokens")
    most_first = by_domain.sort(["tokens_removed", "domain"], descending=[True, False], nulls_last=True)
    return {"domains": DisplayTable(tuple(most_first.columns), tuple(most_first.head(DOMAINS_SHOWN).iter_rows()))}


def _summarize_truncation_stats(facts: TruncationStatsFacts, rows: str) -> Sequence[str]:
    del rows
    quantiles = [f"{name} {facts.quantiles[name]:,}" for name in ("p50", "p95", "max")]
    if facts.quantiles["max"] > facts.limit and not facts.context_overflow:
        return *quantiles, f"longer than {facts.limit:,} is cut by packing, not truncated"
    return *quantiles, f"{format_percent(facts.context_overflow)} over {facts.limit:,}"


STAGE = StageDeclaration(
    name=TRUNCATION_STATS,
    facts=TruncationStatsFacts,
    description="Length distribution, what truncation removed, and the effect of other context lengths.",
    identity=identify_truncation_stats,
    prepare=lambda context: PreparedStage((), lambda: make_truncation_stats(context)),
    inputs=(TOKENIZED_EXAMPLES,),
    # It writes no rows; these are the measured ones.
    stats_inputs=StatsInputs(count_rows_by_fact("examples", "example"), tables=("lengths", "what_if")),
    summarize=_summarize_truncation_stats,
    compared=(
        ComparedFact("longer than the context", "context_overflow", is_share=True),
        ComparedFact("tokens truncated", "tokens_removed"),
    ),
)
