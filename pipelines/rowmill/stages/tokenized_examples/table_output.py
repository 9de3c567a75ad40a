"""Output of a table's examples: facts, ledgers, tables and histograms, summed over parts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.schema.facts import TokenizedExamplesFacts
from rowmill.schema.ledger import KEPT, REJECTED, count_unaccounted, sum_counts
from rowmill.schema.manifest import NOT_APPLICABLE, DisplayTable, Histogram, Part
from rowmill.stages.base import StageContext, StageOutput, compute_share
from rowmill.stages.reject_samples import describe_rejects
from rowmill.stages.table_inputs import ObservedTable, get_table_options
from rowmill.stages.table_plan_facts import TablePlan, ValueCounts
from rowmill.stages.tokenized_examples.table_tokens import RECORD_EXAMPLES
from rowmill.tabular.prompt import PromptFrame
from rowmill.tokenization.tokenizer_card import LoadedTokenizer


def build_table_output(
    context: StageContext,
    observed: ObservedTable,
    frame: PromptFrame,
    plan: TablePlan,
    accounts: list[Part],
    built: list[Part],
    tokenizer: LoadedTokenizer,
    *,
    reused: int,
    rows_made: int,
    made_of: Sequence[str],
) -> StageOutput:
    """Sum the counts of a table's rows (`accounts`) and examples (`built`)."""
    examples = [part for part in built if "examples" in part.files]
    reasons = sum_counts(p.facts["reasons"] for p in accounts)
    left_out = sum_counts(p.facts["left_out"] for p in accounts)
    rows, kept = (sum(int(p.facts[name]) for p in accounts) for name in ("rows", "kept"))
    by_split = {
        split: sum_counts(p.facts["tokens_by_split"].get(split, {}) for p in examples)
        for split in sorted({str(p.facts["split"]) for p in examples})
    }
    classes = sum_counts(by_split.values())
    ledger = [
        (KEPT, "", kept),
        *((REJECTED, r, n) for r, n in reasons.items()),
        *((s, "", n) for s, n in left_out.items()),
    ]
    made = sum(int(p.facts["examples"]) for p in examples)
    verified, untrained = (sum(int(p.facts[name]) for p in examples) for name in ("verified", "untrained"))
    tokens = sum(classes.get(name, 0) for name in ("trained", "context", "template"))
    planned = sum(one.counts["tokens"] for one in plan.splits)
    expected = sum(one.count_expected_tokens(plan.limits) for one in plan.splits)
    altered = sum(int(p.facts["altered"]) for p in accounts)
    of_length = sum(n for r, n in reasons.items() if r.endswith("_overflow"))
    longest = plan.longest
    facts = TokenizedExamplesFacts(
        nonempty=made,
        accounted=count_unaccounted(rows, ledger) + abs(tokens - planned) + abs(tokens - expected),
        rejects=compute_share(sum(reasons.values()) - of_length, rows),
        mask_verified=compute_share(verified, made) if made else NOT_APPLICABLE,
        zero_loss_rows=compute_share(untrained, made),
        control_strings=compute_share(sum(int(p.facts["escaped"]) for p in accounts), rows),
        text_roundtrip=compute_share(altered, rows),
        prompt_parity=0 if frame.is_parity else 1,
        token_ids=sum(int(p.facts["outside_vocabulary"]) for p in examples),
        rows=rows,
        kept=kept,
        rejected=sum(reasons.values()),
        examples=made,
        tokens=tokens,
        trained_tokens=classes.get("trained", 0),
        trained_share=compute_share(classes.get("trained", 0), tokens),
        reference_path_texts=sum(int(p.facts["reference_path_texts"]) for p in accounts),
        fast_path_mismatches=sum(int(p.facts["fast_path_mismatches"]) for p in accounts),
        changed_by_wire=plan.changed,
        prompt_tokens=plan.limits.prompt,
        limit=plan.limits.limit,
        record_room=plan.limits.records,
        longest_example=longest["longest_example"],
        longest_group=longest["longest_group"],
        # Records have no chat template.
        render_equal=NOT_APPLICABLE,
        content_dropped=NOT_APPLICABLE,
        reasoning_dropped=NOT_APPLICABLE,
        contract=NOT_APPLICABLE,
        prompt_match=NOT_APPLICABLE,
        date_pinned=NOT_APPLICABLE,
        short_documents=NOT_APPLICABLE,
    )
    return StageOutput(
        parts=[*accounts, *built],
        facts=facts,
        ledger=ledger,
        token_ledger=[(split, name, count) for split, own in by_split.items() for name, count in own.items()],
        tables=_build_table_tables(plan, reasons, frame),
        histograms=_draw_length_histograms(plan),
        samples={
            "rejects": describe_rejects(
                context, accounts, {r: n for r, n in reasons.items() if not r.endswith("_overflow")}
            ),
            "text_roundtrip": tuple(i for p in accounts for i in p.facts["altered_rows"])[:10],
        },
        schema=tuple((f.name, str(f.type)) for f in RECORD_EXAMPLES),
        card=_build_table_card(tokenizer),
        details={
            "records": _describe_table_model(context, observed, frame, plan),
            "made_of": sorted(made_of),
        },
        parts_reused=reused,
        rows_made=rows_made,
    )


def _describe_table_model(
    context: StageContext, observed: ObservedTable, frame: PromptFrame, plan: TablePlan
) -> dict[str, Any]:
    """Return the details that parsing and generation read."""
    earlier = context.input(CANONICAL_ROWS).details["records"]
    return {
        **earlier,
        "frame": frame.to_json(),
        "wire": get_table_options(context).codec.wire,
        "options": plan.options,
        **plan.longest,
    }


def _build_table_card(tokenizer: LoadedTokenizer) -> dict[str, Any]:
    return {**tokenizer.card.describe(), "template_digest": None}


def _build_table_tables(plan: TablePlan, reasons: dict[str, int], frame: PromptFrame) -> dict[str, DisplayTable]:
    options = [(name, value) for name, value in plan.options.items() if value is not None and name != "widest_names"]
    overflow = [(one.kind, one.name, one.tokens, one.limit, one.widest) for one in plan.overflows.first]
    tables = {
        "plan": plan.table(),
        "options": DisplayTable(("option", "value"), tuple((name, str(value)) for name, value in options)),
        "rejects": DisplayTable(("reason", "rows"), tuple(sorted(reasons.items(), key=lambda r: (-r[1], r[0]))[:30])),
    }
    if overflow:
        tables["overflow"] = DisplayTable(("kind", "name", "tokens", "limit", "widest_column"), tuple(overflow))
    return tables


def _draw_length_histograms(plan: TablePlan) -> dict[str, Histogram]:
    """Return histograms of the tokens of examples and of whole groups, with the limits of an example."""
    drawn: dict[str, Histogram] = {}
    lengths = ValueCounts.join([split.sizes["example_tokens"] for split in plan.splits])
    if len(lengths.values):
        drawn["example_tokens"] = _draw_histogram("tokens per example", lengths, plan.limits.limit)
    if plan.mode == "grouped":
        tokens = ValueCounts.join([split.sizes["group_tokens"] for split in plan.splits])
        if len(tokens.values):
            drawn["group_tokens"] = _draw_histogram("tokens per group", tokens, plan.limits.records)
    return drawn


def _draw_histogram(title: str, sizes: ValueCounts, limit: int) -> Histogram:
    counts, edges = np.histogram(sizes.values, bins=24, range=(0, max(sizes.largest, limit) + 1), weights=sizes.counts)
    return Histogram(
        title, "tokens", tuple(round(float(e), 1) for e in edges), tuple(int(c) for c in counts), float(limit)
    )
