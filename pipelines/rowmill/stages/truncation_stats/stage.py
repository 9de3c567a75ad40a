"""What truncation removed, and the effect of other context lengths, computed from lengths; no token is read.

What belongs here: facts for the check of context overflow, histograms, the what-if table, hints. What does not:
truncating (`truncation.py`), examples planned from records, which are never truncated (`table_lengths.py`).
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill import stats
from rowmill.core.concurrent_reads import read_tables
from rowmill.core.number_text import format_percent
from rowmill.core.stage_names import TOKENIZED_EXAMPLES, TRUNCATION_STATS
from rowmill.core.storage import File
from rowmill.packing.layout import measure_padded_room, round_up
from rowmill.packing.plan import plan_best_fit
from rowmill.packing.slicing import slice_too_long
from rowmill.recipe.recipe import Recipe
from rowmill.schema.examples import EXAMPLE_SCHEMA
from rowmill.schema.manifest import DisplayTable, Histogram, Manifest
from rowmill.stages.base import ComparedFact, PreparedStage, StageContext, StageDeclaration, StageOutput, compute_share
from rowmill.stages.reject_samples import RowLocator, describe_rejects
from rowmill.stages.truncation_stats import table_lengths
from rowmill.stages.truncation_stats.facts import TruncationStatsFacts
from rowmill.stats import StatsInputs, count_rows_by_fact

VERSION = 2

DROPPED = ("overlong", "overlong_after_structure")
"""Reject reasons about length."""

COLUMNS = ("split", "original_tokens", "tokens", "trained_tokens", "messages_removed", "exchanges_removed",
           "reasoning_removed", "tokens_cut", "trained_removed", "exchanges_trained", "reasoning_trained",
           "cut_trained", "domain")  # fmt: skip
DOMAINS_SHOWN = 30


def identify_truncation_stats(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide the facts; the effect of other limits also depends on truncation and packing."""
    dataset = recipe.datasets[name]
    own = table_lengths.identify_table_lengths(recipe, name) if dataset.format.IS_TABLE else {}
    return {
        "versions": [VERSION],
        "limit": recipe.limit_of(name),
        "row_kind": dataset.row_kind,
        **own,
        "truncation": dataset.truncation.model_dump(mode="json"),
        "packing": dataset.packing.model_dump(mode="json"),
        # Recipes without padding keep their identity.
        **({"estimates": "padded"} if recipe.segment_multiple_of > 1 else {}),
    }


def make_truncation_stats(context: StageContext) -> StageOutput:
    """Measure the dataset's lengths."""
    if context.dataset.format.IS_TABLE:
        return table_lengths.make_table_lengths(context)
    manifest = context.input(TOKENIZED_EXAMPLES)
    limit = _limit_examples(context)
    columns = _read_length_columns(context, manifest.files("examples"))
    splits = columns.column("split").combine_chunks()
    original, removed = (
        _read_ints(columns, "original_tokens"),
        _read_ints(columns, "original_tokens") - _read_ints(columns, "tokens"),
    )
    trained = _read_ints(columns, "trained_tokens") + _read_ints(columns, "trained_removed")
    dropped = sum(n for _, r, n in manifest.ledger if r in DROPPED)
    shortened = removed > 0
    rows = len(original) + dropped
    buckets = stats.count_length_buckets(original, limit)
    hints = stats.suggest_limits(buckets)
    by_split = {
        name: stats.make_length_histogram(original[_is_split(splits, name)], limit)
        for name in sorted(splits.unique().to_pylist())
    }
    whole = stats.make_length_histogram(original, limit)
    what_if = _compare_seq_lens(context, original, trained, limit)
    return StageOutput(
        facts=TruncationStatsFacts(
            context_overflow=compute_share(int(shortened.sum()) + dropped, rows),
            limit=limit,
            examples=len(original),
            shortened=int(shortened.sum()),
            dropped_for_length=dropped,
            tokens_removed=int(removed.sum()),
            trained_removed=int(_read_ints(columns, "trained_removed").sum()),
            quantiles=stats.compute_length_quantiles(original),
            buckets=buckets,
            hints=list(hints),
        ),
        tables={
            "what_if": what_if,
            "lengths": stats.make_lengths_table(by_split),
            "quantiles": DisplayTable(("quantile", "tokens"), tuple(stats.compute_length_quantiles(original).items())),
            "stages": _stages_table(columns),
            **_domains_table(columns),
            "advice": DisplayTable(("hint",), tuple((hint,) for hint in hints)),
        },
        histograms={"lengths": whole, "trained_share": _trained_shares(columns)},
        samples={"context_overflow": _describe_overflow(context, original[shortened])},
    )


def _limit_examples(context: StageContext) -> int:
    """Return the most tokens of an example; that of a pair is shared by its sides."""
    return context.recipe.limit_of(context.dataset_name or "") * context.dataset.format.count_sides()


def _read_length_columns(context: StageContext, files: Sequence[File]) -> pa.Table:
    tables = read_tables(context.store, files, COLUMNS)
    return pa.concat_tables(tables or [EXAMPLE_SCHEMA.empty_table().select(list(COLUMNS))])


def _is_split(splits: pa.Array, name: str) -> NDArray[np.bool_]:
    return pc.equal(splits, name).to_numpy(zero_copy_only=False)


def _describe_overflow(context: StageContext, shortened: NDArray[np.int64]) -> tuple[str, ...]:
    """Describe the examples that lost tokens, by their lengths before, and the rows dropped for their length."""
    manifest = context.input(TOKENIZED_EXAMPLES)
    dropped = {reason: count for _, reason, count in manifest.ledger if reason in DROPPED}
    lines = describe_rejects(context, manifest.parts, dropped)
    return lines if not len(shortened) else (_describe_shortened(context, manifest, shortened), *lines)


def _describe_shortened(context: StageContext, manifest: Manifest, shortened: NDArray[np.int64]) -> str:
    """Describe the first example that lost tokens, read from as few parts as possible, and the longest one."""
    limit = _limit_examples(context)
    for file in manifest.files("examples"):
        table = context.store.table(file, ("example_id", "original_tokens", "tokens"))
        over = table.filter(pc.greater(table.column("original_tokens"), table.column("tokens")))
        if over.num_rows:
            first = over.slice(0, 1).to_pylist()[0]
            place = RowLocator(context).locate(first["example_id"], reads_lines=True)
            tokens = f"{first['original_tokens']:,} tokens, at most {limit:,}"
            longest = int(shortened.max())
            longer = f"; the longest has {longest:,}" if longest > first["original_tokens"] else ""
            return f"truncated: {len(shortened):,}, the first is {place}: {tokens}{longer}"
    raise AssertionError(context.key)


def _read_ints(table: pa.Table, name: str) -> NDArray[np.int64]:
    return table.column(name).to_numpy(zero_copy_only=False).astype(np.int64)


def _compare_seq_lens(
    context: StageContext, original: NDArray[np.int64], trained: NDArray[np.int64], limit: int
) -> DisplayTable:
    """Tabulate the effect of other limits; documents that are cut into pieces lose nothing at any limit."""
    candidates = stats.choose_candidate_seq_lens(limit)
    if not _cuts_into_pieces(context):
        return stats.estimate_seq_len_effects(original, trained, candidates, plan=_make_sequence_counter(context))
    joined = context.dataset.packing.strategy_for(context.dataset.row_kind) == "concat"
    rows: list[tuple[int, int, int, int]] = []
    for seq_len in candidates:
        pieces = slice_too_long(original, seq_len, "split", name_of=str).lengths if len(original) else original
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

    def plan(lengths: NDArray[np.int64], limit: int) -> int:
        if options.segment_limit == 1:
            return len(lengths)
        room, capacity = measure_padded_room(lengths, limit, options.room_multiple)
        return plan_best_fit(room, capacity, options.segment_limit).sequences

    return plan


def _domains_table(columns: pa.Table) -> dict[str, DisplayTable]:
    """Tabulate what truncation removed per domain, most first; nothing if no row has a domain."""
    if columns.column("domain").null_count == len(columns):
        return {}
    frame = cast(
        "pl.DataFrame", pl.from_arrow(columns.select(["domain", "original_tokens", "tokens", "trained_removed"]))
    )
    lost = pl.col("original_tokens").cast(pl.Int64) - pl.col("tokens")
    by_domain = frame.group_by("domain").agg(
        pl.len().alias("examples"),
        (lost > 0).sum().alias("shortened"),
        lost.sum().alias("tokens_removed"),
        pl.col("trained_removed").cast(pl.Int64).sum(),
        (lost.sum() / pl.col("original_tokens").cast(pl.Int64).sum()).round(6).alias("share_removed"),
    )
    most_first = by_domain.sort(["tokens_removed", "domain"], descending=[True, False], nulls_last=True)
    return {"domains": DisplayTable(tuple(most_first.columns), tuple(most_first.head(DOMAINS_SHOWN).iter_rows()))}


def _stages_table(columns: pa.Table) -> DisplayTable:
    """Tabulate per stage of truncation the examples it changed, and the messages, tokens and trained tokens removed."""
    stages = (
        ("exchanges", "exchanges_removed", "exchanges_trained"),
        ("reasoning", "reasoning_removed", "reasoning_trained"),
        ("tokens", "tokens_cut", "cut_trained"),
    )
    messages = _read_ints(columns, "messages_removed")
    rows: list[tuple[str, int, int, int, int]] = []
    for stage, name, trained in stages:
        taken, gone = _read_ints(columns, name), messages if stage == "exchanges" else np.zeros(len(messages), np.int64)
        touched = int(((taken > 0) | (gone > 0)).sum())
        rows.append((stage, touched, int(gone.sum()), int(taken.sum()), int(_read_ints(columns, trained).sum())))
    return DisplayTable(("stage", "examples", "messages_removed", "tokens_removed", "trained_removed"), tuple(rows))


def _trained_shares(columns: pa.Table) -> Histogram:
    shares = _read_ints(columns, "trained_tokens") / np.maximum(_read_ints(columns, "tokens"), 1)
    counts, edges = np.histogram(shares, bins=20, range=(0.0, 1.0))
    return Histogram(
        "trained share", "share of tokens", tuple(round(float(e), 2) for e in edges), tuple(int(c) for c in counts)
    )


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
