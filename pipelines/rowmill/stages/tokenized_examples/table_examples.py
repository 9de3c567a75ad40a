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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from rowmill.core.arrays import Ints
from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.core.storage import digest_json
from rowmill.formats import Records
from rowmill.recipe.recipe import Recipe
from rowmill.schema.facts import TokenizedExamplesFacts
from rowmill.schema.ledger import KEPT, REJECTED, count_unaccounted, sum_counts
from rowmill.schema.manifest import NOT_APPLICABLE, DisplayTable, File, Histogram, Part
from rowmill.stages import table_partitions
from rowmill.stages.base import (
    StageContext,
    StageOutput,
    compute_share,
    make_parts,
    require_all_shares,
    select_own_parts,
)
from rowmill.stages.part_files import describe_rejects, open_host_scratch
from rowmill.stages.table_partitions import (
    IndexOptions,
    ObservedTable,
    RowPart,
    choose_borders,
    get_table_options,
    hold_partitions,
    index_parts,
    join_lengths,
    load_observed_table,
)
from rowmill.stages.table_plan import (
    OverflowFacts,
    SplitFacts,
    TablePlan,
    TablePlanRequest,
    ValueCounts,
    join_split_facts,
    require_record_room,
)
from rowmill.stages.tokenized_examples import table_tokens
from rowmill.stages.tokenized_examples.table_plans import (
    TablePlanning,
    account_part,
    plan_held_partitions,
    plan_partitions,
    plan_whole_table,
)
from rowmill.stages.tokenized_examples.table_tokens import RECORD_EXAMPLES, VERSION, EncodedPart, EncodeTask
from rowmill.stages.tokenizer_files import open_reference_encoder
from rowmill.tabular import prompt
from rowmill.tabular.assembly import ExampleLimits
from rowmill.tabular.prompt import PromptFrame
from rowmill.tabular.row_index import SPLITS, RowIndex
from rowmill.tokenization import tokenizer
from rowmill.tokenization.reference_sample import divide_minimum
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


def identify_table_examples(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide examples; those of generation do not."""
    return {
        "versions": [VERSION, tokenizer.TOKENIZATION_VERSION, table_partitions.VERSION],
        "format": recipe.datasets[name].format.model_dump(mode="json", exclude={"generation"}),
        "limit": recipe.limit_of(name),
        "seed": recipe.seed,
        "vocab_size": recipe.vocab_size,
    }


def _list_row_files(context: StageContext) -> list[File]:
    return [part.files["rows"] for part in context.input(CANONICAL_ROWS).parts]


def resolve_prompt_frame(
    context: StageContext, tokenizer: LoadedTokenizer, path: str, observed: ObservedTable
) -> PromptFrame:
    """Return the prompt and delimiters of the dataset."""
    form, card = get_table_options(context), tokenizer.card
    encoder = open_reference_encoder(context.store.root, path)
    vocabulary = prompt.Vocabulary(
        name=context.recipe.tokenizer_choice.name,
        size=context.recipe.vocab_size or card.vocab_size,
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


def _fingerprint_tokens(
    context: StageContext, observed: ObservedTable, loaded: LoadedTokenizer, frame: PromptFrame, rows: File
) -> str:
    wire = get_table_options(context).codec.wire
    return digest_json(
        "tokens", VERSION, tokenizer.TOKENIZATION_VERSION, loaded.card.digest, wire, observed.schema.to_json(),
        frame.special_tokens,
        rows.digest,
    )  # fmt: skip


def _encode_parts(
    context: StageContext,
    observed: ObservedTable,
    tokenizer: LoadedTokenizer,
    path: str,
    frame: PromptFrame,
    *,
    keep: bool,
    returns_lengths: bool,
) -> tuple[list[EncodedPart], list[str], list[bool]]:
    """Encode all parts of rows; return their lengths and facts, the fingerprints of their ids, and which are new.

    With `keep`, ids are stored part by part before planning, so that the build after an overflow or a kill reuses them.
    Lengths are returned only where the calling process plans.
    """
    rows = _list_row_files(context)
    names = [_fingerprint_tokens(context, observed, tokenizer, frame, file) for file in rows]
    schema = orjson.dumps(observed.schema.to_json()).decode()
    made_by = table_tokens.encode_part.__name__
    kept = context.part_lists.find_parts(context.store, context.folder, made_by, names)
    tasks = [
        EncodeTask(
            context.store.root, context.folder if keep else None, name, path, file, schema,
            get_table_options(context).codec.wire, frame.special_tokens, kept.get(name), returns_lengths,
            divide_minimum(len(rows)),
        )
        for file, name in zip(rows, names, strict=True)
    ]  # fmt: skip
    missing = [task for task in tasks if task.kept is None]
    own = select_own_parts(context, missing)
    wanted = tasks if len(own) == len(missing) else own
    size = sum(4 * task.rows.bytes for task in own)
    encoded = list(context.pool.map(table_tokens.encode_part, wanted, size_bytes=size))
    require_all_shares(own, missing)
    if keep and context.share is None:
        context.part_lists.add_parts(context.store, context.folder, made_by, [one.require_kept() for one in encoded])
    return encoded, names, [task.kept is None for task in tasks]


def _describe_options(
    context: StageContext, observed: ObservedTable, frame: PromptFrame, limits: ExampleLimits
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
    context: StageContext, observed: ObservedTable, frame: PromptFrame, tokenizer: LoadedTokenizer
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
    request = TablePlanRequest(dataset=name, seed=context.recipe.seed, form=form, limits=limits, wanted=form.wanted)
    vocab_size = context.recipe.vocab_size or tokenizer.card.vocab_size
    return TablePlanning(request, IndexOptions.of(context, observed), observed.schema, frame, vocab_size)


def _join_plan(
    context: StageContext,
    observed: ObservedTable,
    planning: TablePlanning,
    splits: tuple[SplitFacts, ...],
    overflows: OverflowFacts,
    encoded: Sequence[EncodedPart],
) -> TablePlan:
    limits = planning.request.limits
    options = _describe_options(context, observed, planning.frame, limits)
    changed = sum(int(one.facts["changed"]) for one in encoded)
    return TablePlan(planning.request.form.mode, limits, options, splits, overflows, changed)


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """A dataset with its records encoded: `lengths` are each row's tokens (−1: rejected)."""

    form: Records
    limits: ExampleLimits
    index: RowIndex
    lengths: Ints


def dry_run_table(context: StageContext, tokenizer: LoadedTokenizer, path: str) -> TablePlan:
    """Plan as a build would, without writing to the store.

    Raises
    ------
    ContextOverflowError
        If a unit does not fit and the recipe makes this an error, or if no record can fit.

    """
    known = load_observed_table(context.input(CANONICAL_ROWS).details)
    frame = resolve_prompt_frame(context, tokenizer, path, known)
    encoded, _, _ = _encode_parts(context, known, tokenizer, path, frame, keep=False, returns_lengths=True)
    planning = _prepare_planning(context, known, frame, tokenizer)
    files = _list_row_files(context)
    lengths = [one.require_lengths() for one in encoded]
    held = list(hold_partitions(context.store, files, lengths, choose_borders(context, files), planning.options))
    plans = plan_held_partitions(context.store, planning, held)
    splits = join_split_facts([plan.summarize_splits() for plan in plans], SPLITS)
    overflows = OverflowFacts.join([OverflowFacts.of(plan.overflows) for plan in plans])
    return _join_plan(context, known, planning, splits, overflows, encoded)


def measure_table(context: StageContext, tokenizer: LoadedTokenizer, path: str) -> MeasuredTable:
    """Encode all records and return their lengths, without writing to the store."""
    known = load_observed_table(context.input(CANONICAL_ROWS).details)
    frame = resolve_prompt_frame(context, tokenizer, path, known)
    index = index_parts(context, context.input(CANONICAL_ROWS).parts, known)
    encoded, _, _ = _encode_parts(context, known, tokenizer, path, frame, keep=False, returns_lengths=True)
    lengths = join_lengths([one.require_lengths() for one in encoded])
    return MeasuredTable(get_table_options(context), _get_example_limits(context, frame), index, lengths)


def _get_example_limits(context: StageContext, frame: PromptFrame) -> ExampleLimits:
    return ExampleLimits(
        context.recipe.limit_of(context.dataset_name or ""), len(frame.prompt_ids), get_table_options(context).cap
    )


def make_table_examples(context: StageContext, tokenizer: LoadedTokenizer, path: str) -> StageOutput:
    """Encode, plan, and write examples; if planning fails, no examples are written."""
    known = load_observed_table(context.input(CANONICAL_ROWS).details)
    frame = resolve_prompt_frame(context, tokenizer, path, known)
    files = _list_row_files(context)
    borders = choose_borders(context, files)
    encoded, names, fresh = _encode_parts(
        context, known, tokenizer, path, frame, keep=True, returns_lengths=borders.is_whole
    )
    parts = [
        RowPart(file, one.require_kept().files["tokens"], name)
        for file, one, name in zip(files, encoded, names, strict=True)
    ]
    planning = _prepare_planning(context, known, frame, tokenizer)
    with open_host_scratch(context) as scratch:
        if borders.is_whole:
            lengths = [one.require_lengths() for one in encoded]
            [whole] = hold_partitions(context.store, files, lengths, borders, planning.options)
            planned = plan_whole_table(context, planning, whole, parts, encoded, scratch)
        else:
            planned = plan_partitions(context, planning, borders, parts, encoded, scratch)
        accounts = make_parts(context, account_part, planned.ledgers)[0]
        built, reused, _ = make_parts(context, table_tokens.build_part, planned.examples)
    rows_made = sum(file.rows for file, is_fresh in zip(files, fresh, strict=True) if is_fresh)
    joined = _join_plan(context, known, planning, planned.splits, planned.overflows, encoded)
    return build_table_output(
        context, known, frame, joined, accounts, [*built, *planned.prefills], tokenizer,
        reused=reused, rows_made=rows_made, made_of=planned.made_of,
    )  # fmt: skip
