"""Examples of a table's records: the order of the steps, and what the stage puts out.

Examples of records: encode each part once, plan all partitions, then write examples in parts.

    parts of rows ─encode─► ids, lengths ─► plans of partitions ─► overflow: stop, no example was written
                                                        │
                              ids, ledger, rejects per part of rows  +  examples in parts of about a million tokens

Of the whole table are decided: the schema and with it prompt and limits, the number of partitions, whether everything
fits, the size of a sample and each partition's share of it. Of a partition alone: the order of its groups or records,
the examples that these form, and the parts that these are written in.

The ids of a part are stored under the digest of its texts and tokenizer, so a part is encoded only once. A part of
examples is stored under the digest of its content; one new row changes the shuffle of its own partition and most of the
examples of this, which are then assembled from the stored ids.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from rowmill.core.arrays import Ints
from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.core.storage import read_tables
from rowmill.kinds.joint_rows import KindContext
from rowmill.kinds.tables import prompt, record_tokens
from rowmill.kinds.tables.assembly import ExampleLimits
from rowmill.kinds.tables.options import Records
from rowmill.kinds.tables.partition_plan import (
    TablePlan,
    TablePlanRequest,
    ValueCounts,
    require_record_room,
)
from rowmill.kinds.tables.partitions import (
    IndexOptions,
    ObservedTable,
    RowIndex,
    RowPart,
    choose_borders,
    get_table_options,
    index_parts,
    join_lengths,
    load_observed_table,
)
from rowmill.kinds.tables.prompt import PromptFrame
from rowmill.kinds.tables.record_tokens import RECORD_EXAMPLES, VERSION, EncodeInputs
from rowmill.kinds.tables.table_plans import (
    PlannedTable,
    TablePlanning,
    account_part,
    plan_partitions,
)
from rowmill.parts.accounts import describe_rejects
from rowmill.parts.context import StageOutput, compute_share, open_host_scratch
from rowmill.parts.functions import MappedParts
from rowmill.schema.facts import TokenizedExamplesFacts
from rowmill.schema.ledger import KEPT, REJECTED, count_unaccounted, sum_counts
from rowmill.schema.manifest import NOT_APPLICABLE, DisplayTable, Histogram, Part
from rowmill.shards.host_scratch import HostScratch
from rowmill.tokenization.reference_sample import divide_minimum
from rowmill.tokenization.stored_tokenizers import open_reference_encoder
from rowmill.tokenization.tokenizer import TOKENIZATION_VERSION
from rowmill.tokenization.tokenizer_card import LoadedTokenizer


def build_table_output(
    context: KindContext,
    observed: ObservedTable,
    frame: PromptFrame,
    plan: TablePlan,
    accounts: list[Part],
    built: list[Part],
    tokenizer: LoadedTokenizer,
    *,
    reused: int,
    rows_made: int,
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
    planned = sum(split.counts["tokens"] for split in plan.splits)
    expected = sum(split.count_expected_tokens(plan.limits) for split in plan.splits)
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
        token_ledger=[(split, name, count) for split, classes in by_split.items() for name, count in classes.items()],
        tables=_build_table_tables(plan, reasons, frame),
        histograms=_draw_length_histograms(plan),
        samples={
            "rejects": describe_rejects(
                context, accounts, {r: n for r, n in reasons.items() if not r.endswith("_overflow")}
            ),
            "text_roundtrip": tuple(i for p in accounts for i in p.facts["altered_rows"])[:10],
        },
        schema=tuple((f.name, str(f.type)) for f in RECORD_EXAMPLES),
        card={**tokenizer.card.describe(), "template_digest": None},
        details={
            "records": _describe_table_model(context, observed, frame, plan),
        },
        parts_reused=reused,
        rows_made=rows_made,
    )


def _describe_table_model(
    context: KindContext, observed: ObservedTable, frame: PromptFrame, plan: TablePlan
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


# ── Examples of records: encode each part once, plan all partitions, then write examples in parts ──


def resolve_prompt_frame(
    context: KindContext, tokenizer: LoadedTokenizer, path: str, observed: ObservedTable
) -> PromptFrame:
    """Return the prompt and delimiters of the dataset."""
    form, card = get_table_options(context), tokenizer.card
    encoder = open_reference_encoder(context.store.root, path)
    vocabulary = prompt.Vocabulary(
        name=context.tokenizer_choice.name,
        size=context.vocab_size or card.vocab_size,
        bos_id=card.bos_id,
        eos_id=card.eos_id,
        adds_bos=card.adds_bos,
        special={content: number for number, content, special in card.added if special and content},
    )
    return prompt.build_prompt_frame(
        observed.schema,
        vocabulary,
        lambda text: encoder.reference.encode(text, add_special_tokens=False).ids,
        style=form.prompt.style,
        template=form.prompt.template,
        add_bos=form.prompt.add_bos,
        add_eos=form.prompt.add_eos,
        bos=form.tokens.bos,
        eos=form.tokens.eos,
        is_grouped=form.mode == "grouped",
        where=f"datasets.{context.dataset_name}.format",
    )


# ── Encoding and planning ──────────────────────────────────────────────────────────────────────────


def _list_encode_inputs(
    context: KindContext, observed: ObservedTable, tokenizer: LoadedTokenizer, path: str, frame: PromptFrame
) -> list[EncodeInputs]:
    """Return what the ids of each part of rows are made of."""
    rows = context.input(CANONICAL_ROWS).files("rows")
    return [
        EncodeInputs(
            versions=(VERSION, TOKENIZATION_VERSION),
            tokenizer_digest=tokenizer.card.digest,
            rows=file,
            schema=orjson.dumps(observed.schema.to_json()).decode(),
            wire=get_table_options(context).codec.wire,
            special_tokens=frame.special_tokens,
            tokenizer=path,
            min_compared_chars=divide_minimum(len(rows)),
        )
        for file in rows
    ]


def _describe_options(
    context: KindContext, observed: ObservedTable, frame: PromptFrame, limits: ExampleLimits
) -> dict[str, Any]:
    form = get_table_options(context)
    return {
        "mode": form.mode, "bos_id": frame.bos_id, "bos": frame.bos_text, "eos_id": frame.eos_id, "eos": frame.eos_text,
        "prompt": len(frame.prompt_ids), "limit": limits.limit, "records": limits.records, "cap": limits.cap,
        "wanted": form.wanted, "prompt_text": frame.prompt_text,
        "order": None if observed.order is None else observed.order.name,
        "privacy_unit": ("group" if form.mode == "grouped" else "record") if form.privacy.dp_enabled else None,
        "widest_names": _list_widest_names(observed),
    }  # fmt: skip


def _list_widest_names(observed: ObservedTable) -> str:
    return ", ".join(sorted(observed.schema.names, key=lambda name: -len(name))[:5])


def _prepare_planning(
    context: KindContext, observed: ObservedTable, frame: PromptFrame, tokenizer: LoadedTokenizer
) -> TablePlanning:
    """Return what the table is planned with.

    Raises
    ------
    ContextOverflowError
        If no record can fit.

    """
    form, limits = get_table_options(context), _get_example_limits(context, frame)
    name = context.dataset_name or ""
    require_record_room(name, form, limits, _list_widest_names(observed))
    # What is generated later decides nothing.
    trained = form.model_copy(update={"generation": None})
    request = TablePlanRequest(dataset=name, seed=context.seed, form=trained, limits=limits, wanted=form.wanted)
    vocab_size = context.vocab_size or tokenizer.card.vocab_size
    return TablePlanning(request, IndexOptions.of(context, observed), observed.schema, frame, vocab_size)


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """A dataset with its records encoded: `lengths` are each row's tokens (−1: rejected)."""

    form: Records
    limits: ExampleLimits
    index: RowIndex
    lengths: Ints


@dataclass(frozen=True, slots=True)
class _EncodedTable:
    """A table with the ids of its records, and what its examples are planned with."""

    observed: ObservedTable
    frame: PromptFrame
    encoded: MappedParts
    parts: list[RowPart]


def _encode_table(context: KindContext, tokenizer: LoadedTokenizer, path: str) -> _EncodedTable:
    observed = load_observed_table(context.input(CANONICAL_ROWS).details)
    frame = resolve_prompt_frame(context, tokenizer, path, observed)
    encoded = context.map(record_tokens.encode_part, _list_encode_inputs(context, observed, tokenizer, path, frame))
    files = context.input(CANONICAL_ROWS).files("rows")
    parts = [
        RowPart(file, ids.files["tokens"], ids.fingerprint) for file, ids in zip(files, encoded.parts, strict=True)
    ]
    return _EncodedTable(observed, frame, encoded, parts)


def _plan_table(
    context: KindContext, tokenizer: LoadedTokenizer, table: _EncodedTable, scratch: HostScratch
) -> tuple[TablePlan, PlannedTable]:
    """Plan the examples, in numbers and as the tasks that make them."""
    planning = _prepare_planning(context, table.observed, table.frame, tokenizer)
    borders = choose_borders(context, [part.rows for part in table.parts])
    planned = plan_partitions(context, planning, borders, table.parts, table.encoded.parts, scratch)
    limits = planning.request.limits
    options = _describe_options(context, table.observed, table.frame, limits)
    changed = sum(int(ids.facts["changed"]) for ids in table.encoded.parts)
    plan = TablePlan(planning.request.form.mode, limits, options, planned.splits, planned.overflows, changed)
    return plan, planned


def plan_table(context: KindContext, tokenizer: LoadedTokenizer, path: str) -> TablePlan:
    """Plan the examples without making them.

    Raises
    ------
    ContextOverflowError
        If a unit does not fit and the recipe makes this an error, or if no record can fit.

    """
    with open_host_scratch(context) as scratch:
        return _plan_table(context, tokenizer, _encode_table(context, tokenizer, path), scratch)[0]


def measure_table(context: KindContext, tokenizer: LoadedTokenizer, path: str) -> MeasuredTable:
    """Encode all records and return their lengths."""
    table = _encode_table(context, tokenizer, path)
    index = index_parts(context, context.input(CANONICAL_ROWS).parts, table.observed)
    tokens = read_tables(context.store, [part.tokens for part in table.parts], ("length",))
    lengths = join_lengths([one.column(0).to_numpy() for one in tokens])
    return MeasuredTable(get_table_options(context), _get_example_limits(context, table.frame), index, lengths)


def _get_example_limits(context: KindContext, frame: PromptFrame) -> ExampleLimits:
    return ExampleLimits(context.limit, len(frame.prompt_ids), get_table_options(context).cap)


def make_table_examples(context: KindContext, tokenizer: LoadedTokenizer, path: str) -> StageOutput:
    """Encode, plan, and write examples; if planning fails, no examples are written."""
    table = _encode_table(context, tokenizer, path)
    with open_host_scratch(context) as scratch:
        plan, planned = _plan_table(context, tokenizer, table, scratch)
        accounts = context.map(account_part, planned.ledgers).parts
        built = context.map(record_tokens.build_part, planned.examples)
    return build_table_output(
        context, table.observed, table.frame, plan, accounts, [*built.parts, *planned.prefills], tokenizer,
        reused=built.reused, rows_made=table.encoded.rows_made,
    )  # fmt: skip
