"""Lengths of examples of records, and the result at other maximum lengths: planned again, not estimated.

An example of records is complete or not made, and at another maximum length it would contain other records. So instead
of truncation, records that are too large for an example are counted, and a what-if plans all records at each length.
"""

from typing import Any

import numpy as np

from rowmill import stats
from rowmill.core.arrays import Ints
from rowmill.core.concurrent_reads import read_tables
from rowmill.core.stage_names import CANONICAL_ROWS, TOKENIZED_EXAMPLES
from rowmill.packing.layout import measure_padded_room
from rowmill.packing.plan import plan_slices
from rowmill.packing.slicing import keep_examples_whole
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.facts import TokenizedExamplesFacts, read_facts, require_counted
from rowmill.schema.ledger import REJECTED, sum_counts
from rowmill.schema.manifest import NOT_APPLICABLE, DisplayTable, Manifest
from rowmill.stages.base import StageContext, StageOutput, compute_share
from rowmill.stages.reject_samples import describe_rejects
from rowmill.stages.table_inputs import IndexOptions, get_table_options, load_observed_table
from rowmill.stages.table_plan import ReplannedTable, TablePlanRequest
from rowmill.stages.truncation_stats.facts import TruncationStatsFacts
from rowmill.stages.truncation_stats.replanned_partitions import replan_table
from rowmill.tabular.assembly import ExampleLimits

VERSION = 1
"""Increase it when facts of records are counted differently."""

OVERFLOW_REASONS = ("record_overflow", "group_overflow")
"""Reasons of records that are too large for an example."""
HIGH_PROMPT_SHARE = 0.25
"""Share of all tokens from which the prompt is mentioned."""


def identify_table_lengths(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide the facts of records, in addition to those of all kinds."""
    format_options = recipe.datasets[name].format.model_dump(mode="json", exclude={"generation"})
    return {"records": VERSION, "format": format_options, "seed": recipe.seed, "seq_len": recipe.seq_len}


def make_table_lengths(context: StageContext) -> StageOutput:
    """Measure the examples, and plan the records at other lengths."""
    made = context.input(TOKENIZED_EXAMPLES)
    limit = context.recipe.limit_of(context.dataset_name or "")
    columns = {part.files["examples"]: str(part.facts["split"]) for part in made.parts if "examples" in part.files}
    tables = read_tables(context.store, columns, ["tokens"])
    own = [table.column(0).to_numpy().astype(np.int64) for table in tables]
    lengths = np.concatenate([np.empty(0, np.int64), *own])
    records = sum(count for _, _, count in made.ledger)
    overflows = {
        reason: count for state, reason, count in made.ledger if state == REJECTED and reason in OVERFLOW_REASONS
    }
    over = sum(overflows.values())
    by_split: dict[str, list[Ints]] = {}
    for split, tokens in zip(columns.values(), own, strict=True):
        by_split.setdefault(split, []).append(tokens)
    drawn = {
        split: stats.make_length_histogram(np.concatenate(tokens), limit, title="example length")
        for split, tokens in sorted(by_split.items())
    }
    quantiles = stats.compute_length_quantiles(lengths)
    hints = _advise_assembly(made, records, over, quantiles["p50"], limit)
    what_if, made_of = _compare_table_seq_lens(context, made, limit)
    return StageOutput(
        facts=TruncationStatsFacts(
            context_overflow=compute_share(over, records),
            limit=limit,
            examples=len(lengths),
            records=records,
            dropped_for_length=over,
            shortened=NOT_APPLICABLE,
            tokens_removed=NOT_APPLICABLE,
            trained_removed=NOT_APPLICABLE,
            quantiles=quantiles,
            buckets=stats.count_length_buckets(lengths, limit),
            hints=list(hints),
        ),
        tables={
            "what_if": what_if,
            "lengths": stats.make_lengths_table(drawn),
            "quantiles": DisplayTable(("quantile", "tokens"), tuple(quantiles.items())),
            "advice": DisplayTable(("hint",), tuple((hint,) for hint in hints)),
        },
        histograms={"lengths": stats.make_length_histogram(lengths, limit, title="example length")},
        samples={"context_overflow": describe_rejects(context, made.parts, overflows)},
        details={"made_of": made_of},
    )


# ── Other lengths ──────────────────────────────────────────────────────────────────────────────────


def _compare_table_seq_lens(context: StageContext, output: Manifest, limit: int) -> tuple[DisplayTable, list[str]]:
    """Return the result at each length: examples, records in no example, and packed sequences.

    Followed by the fingerprints of what was written to find out.
    """
    limits = stats.choose_candidate_seq_lens(limit)
    form = get_table_options(context)
    own = ExampleLimits(limit, _read_prompt_tokens(output), form.cap)
    request = TablePlanRequest(context.dataset_name or "", context.recipe.seed, form, own, form.wanted)
    key = (*context.dataset_key, CANONICAL_ROWS)
    rows = manifest.load_version(context.store, key, output.inputs["/".join(key)])
    options = IndexOptions.of(context, load_observed_table(output.details))
    replanned, made_of = replan_table(context, request, options, rows.files("rows"), output.files("tokens"), limits)
    lines: list[tuple[int, ...]] = []
    for one in replanned:
        examples = sum(len(split) for split in one.lengths)
        lines.append((one.limit, examples, one.records_over, one.tokens_over, _count_sequences(context, one)))
    columns = ("seq_len", "examples", "examples_over", "trained_lost", "sequences")
    return DisplayTable(columns, tuple(lines)), made_of


def _read_prompt_tokens(output: Manifest) -> int:
    return require_counted(read_facts(TokenizedExamplesFacts, output.facts).prompt_tokens)


def _count_sequences(context: StageContext, planned: ReplannedTable) -> int:
    """Pack examples of another length; `seq_len` changes with it unless the dataset sets its own length."""
    options = context.dataset.packing
    has_own_limit = get_table_options(context).assembly.max_seq_length is not None
    seq_len = max(planned.limit, context.recipe.seq_len) if has_own_limit else planned.limit
    measured = (measure_padded_room(lengths, seq_len, options.room_multiple) for lengths in planned.lengths)
    plans = (
        plan_slices(
            keep_examples_whole(room),
            limit=capacity,
            strategy=options.strategy_for(context.dataset.row_kind),
            max_segments=options.segment_limit,
            tail=options.tail,
        )
        for room, capacity in measured
        if len(room)
    )
    return sum(plan.sequences for plan in plans)


# ── Advice ─────────────────────────────────────────────────────────────────────────────────────────


def _advise_assembly(output: Manifest, records: int, over: int, median: int, limit: int) -> tuple[str, ...]:
    """Return advice for better examples of this table."""
    flushes = sum_counts(part.facts["flushes"] for part in output.parts if "flushes" in part.facts)
    facts = read_facts(TokenizedExamplesFacts, output.facts)
    examples, tokens = facts.examples, facts.tokens
    cap, prompt = output.details["records"]["options"]["cap"], _read_prompt_tokens(output) * examples
    hints: list[str] = []
    if over:
        hints.append(
            f"{over:,} of {records:,} records are in no example: they, or their groups, need more than {limit:,} "
            "tokens; raise seq_len or format.assembly.max_seq_length, or choose a finer group column"
        )
    if cap is not None and flushes.get("max_records", 0) > examples / 2 > 0 and 2 * median < limit:
        hints.append(
            f"most examples end at max_sequences_per_example {cap} and fill less than half of {limit:,} tokens; raise "
            "it, or lower seq_len or format.assembly.max_seq_length"
        )
    if tokens and prompt > HIGH_PROMPT_SHARE * tokens:
        hints.append(
            f"the prompt is {prompt / tokens:.0%} of all tokens; raise max_sequences_per_example, or set "
            "format.prompt.style: names"
        )
    return tuple(hints)
