"""Canonical rows → tokenized examples, over all parts: the tokenizer and template are opened once, parts in workers.

The tokenizer is loaded through `transformers` once and stored as data under the storage root, so that workers and later
builds need neither that library nor its two seconds.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rowmill.conversation import loss_mask, renderer
from rowmill.conversation.options import (
    RendererSpec,
    Template,
    TemplateChoice,
    make_renderer_spec,
    resolve_template,
)
from rowmill.conversation.template_registry import is_template_text
from rowmill.core.arrays import format_count, format_percent
from rowmill.core.errors import ConfigError
from rowmill.core.stage_names import CANONICAL_ROWS, TOKENIZED_EXAMPLES
from rowmill.core.storage import digest_json
from rowmill.executors import open_in_workers
from rowmill.kinds.joint_rows import find_joint_kind
from rowmill.parts.accounts import describe_rejects
from rowmill.parts.context import StageOutput, collect_samples, format_rejected
from rowmill.recipe.recipe import Dataset, Recipe
from rowmill.schema.counts import compute_share
from rowmill.schema.examples import make_example_schema
from rowmill.schema.facts import TokenizedExamplesFacts
from rowmill.schema.ledger import KEPT, REJECTED, count_unaccounted, sum_counts
from rowmill.schema.manifest import DisplayTable, Manifest, Part
from rowmill.schema.rows import EXAMPLE_COLUMNS, describe_columns
from rowmill.stages.base import ComparedFact, PreparedStage, StageContext, StageDeclaration
from rowmill.stages.tokenized_examples import text_parts
from rowmill.stages.tokenized_examples.conversation_examples import share_template
from rowmill.stats.tables import StatsInputs, count_rows_by_fact
from rowmill.tokenization import control_tokens, tokenizer, tokenizer_source
from rowmill.tokenization.reference_sample import divide_minimum
from rowmill.tokenization.stored_tokenizers import (
    find_recipe_tokenizer,
    identify_tokenizer,
    open_recipe_tokenizer,
    open_shared_encoder,
)
from rowmill.tokenization.tokenizer import LoadedTokenizer

VERSION = 9
"""Increase it when any row may become another example, or facts change."""


LENGTH_REASONS = frozenset({"overlong", "overlong_after_structure"})


NO_TARGET_REASONS = frozenset({"no_loss_tokens", "no_assistant", "assistant_untrained"})


def describe_tokenizer_origin(context: StageContext, tokenizer: LoadedTokenizer) -> dict[str, Any]:
    """Record the tokenizer's name and commit; they are not part of the output's identity."""
    found = find_recipe_tokenizer(context)
    return {
        "name": found.choice.name,
        "revision": found.choice.revision,
        "commit": found.commit,
        "digest": tokenizer.card.digest,
    }


def describe_tokenizer_change(context: StageContext, earlier: Manifest) -> str | None:
    """Describe how the tokenizer differs from that of earlier examples although the recipe is the same."""
    was: dict[str, Any] = earlier.details.get("tokenizer", {})
    now = describe_tokenizer_origin(context, open_recipe_tokenizer(context)[0])
    if (was.get("name"), was.get("revision")) != (now["name"], now["revision"]):
        return None
    if was["commit"] != now["commit"]:
        of = tokenizer_source.describe_tokenizer(context.recipe.tokenizer_choice)
        return f"{of} moved from {str(was['commit'])[:12]} to {str(now['commit'])[:12]} on the hub"
    return "its tokenizer's files changed" if was["digest"] != now["digest"] else None


def resolve_renderer_spec(context: StageContext, tokenizer: LoadedTokenizer) -> RendererSpec | None:
    """Return the spec of the chat template of a stage's dataset."""
    return build_renderer_spec(context.dataset, context.base, tokenizer)


def build_renderer_spec(dataset: Dataset, base: Path, tokenizer: LoadedTokenizer) -> RendererSpec | None:
    """Return the spec of a dataset's chat template; None for kinds without a template."""
    card, options = tokenizer.card, dataset.template
    if not dataset.format.uses_template():
        return None
    if not dataset.format.NEEDS_TEMPLATE and options.chat_template is None and not card.chat_template:
        return None
    choice, placed = options.chat_template, options
    if isinstance(choice, TemplateChoice) and choice.file is not None:
        file = choice.model_copy(update={"file": str(base / choice.file)})
        placed = options.model_copy(update={"chat_template": file})
    text = resolve_template(placed, tokenizer_chat_template=card.chat_template)
    return make_renderer_spec(
        options,
        text,
        special_tokens=card.special_tokens,
        control_tokens=control_tokens.ControlStrings(card, text).strings,
        adds_bos=card.adds_bos,
        arguments=dataset.tools.arguments,
        tool_ids=dataset.tools.tool_ids,
    )


def identify_tokenized_examples(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide examples; a tokenizer folder is identified by its files, not its path."""
    dataset = recipe.datasets[name]
    joint = find_joint_kind(dataset.format)
    if joint is not None:
        identity = joint.identify_examples(dataset, recipe.limit_of(name), recipe.seed, recipe.vocab_size)
    else:
        groups = ("format", "template", "loss", "truncation", "reasoning", "tools")
        identity = {
            "versions": [
                VERSION,
                tokenizer.TOKENIZATION_VERSION,
                renderer.RENDERING_VERSION,
                loss_mask.MASKING_VERSION,
            ],
            **{group: getattr(dataset, group).model_dump(mode="json") for group in groups},
            "keeps_overlong": dataset.keeps_overlong,
            "limit": recipe.limit_of(name),
            "vocab_size": recipe.vocab_size,
            "columns": describe_columns(EXAMPLE_COLUMNS, dataset.row_kind),
        }
    named = identify_tokenizer(recipe.tokenizer_choice)
    if joint is not None and joint.reads_tokenizer_name():
        named = {**named, "name": recipe.tokenizer_choice.name}
    return {"tokenizer": named, "examples": identity}


def prepare_tokenized_examples(context: StageContext) -> PreparedStage:
    """Open tokenizer and template, which are identified by content."""
    loaded, path = open_recipe_tokenizer(context)
    open_in_workers(open_shared_encoder, context.store.root, path)
    spec = resolve_renderer_spec(context, loaded)
    outside = (loaded.card.digest, _spec_to_json(spec))
    return PreparedStage(outside, lambda: make_tokenized_examples(context))


def _spec_to_json(spec: RendererSpec | None) -> dict[str, Any] | None:
    return None if spec is None else asdict(spec) | {"now": spec.now.isoformat()}


def make_tokenized_examples(context: StageContext) -> StageOutput:
    """Tokenize all parts."""
    loaded, path = open_recipe_tokenizer(context)
    joint = find_joint_kind(context.dataset.format)
    make_examples = _tokenize_dataset if joint is None else joint.make_examples
    draft = make_examples(context, loaded, path)
    draft.details["tokenizer"] = describe_tokenizer_origin(context, loaded)
    card = loaded.card
    draft.details["engine"] = {"name": card.engine, "version": card.engine_version, "refused": card.refused}
    return draft


def _tokenize_dataset(context: StageContext, tokenizer: LoadedTokenizer, path: str) -> StageOutput:
    spec = resolve_renderer_spec(context, tokenizer)
    rows = context.input(CANONICAL_ROWS).parts
    # Everything that decides the examples of a part, except its rows.
    identity = identify_tokenized_examples(context.recipe, context.dataset_name or "")["examples"]
    made = context.map(
        text_parts.tokenize_part,
        [
            text_parts.TokenizeInputs(
                options=digest_json(identity, tokenizer.card.digest, _spec_to_json(spec)),
                rows=part.files["rows"],
                tokenizer=path,
                dataset=context.dataset,
                renderer=spec,
                limit=context.recipe.limit_of(context.dataset_name or ""),
                vocab_size=context.recipe.vocab_size or tokenizer.card.vocab_size,
                min_compared_chars=divide_minimum(len(rows)),
                base=context.base,
            )
            for part in rows
        ],
    )
    parts = made.parts
    found = [(str(row_id), int(length)) for part in parts for row_id, length in part.facts["overlong"]]
    total = sum(int(part.facts["overlong_rows"]) for part in parts)
    dataset = context.dataset
    if total and dataset.truncation.overlong == "raise":
        form, limit = dataset.format, context.recipe.limit_of(context.dataset_name or "")
        remedies = f"{form.suggest_longer_examples(dataset)}, or {form.suggest_overlong_policies(dataset)}"
        raise text_parts.make_overlong_error(limit, total, found, f"datasets.{context.dataset_name}", remedies)
    reasons = sum_counts(p.facts["reasons"] for p in parts)
    row_count = sum(int(p.facts["rows"]) for p in parts)
    kept = sum(int(p.facts["kept"]) for p in parts)
    examples = sum(int(p.facts["examples"]) for p in parts)
    classes = sum_counts(p.facts["tokens_by_class"] for p in parts)
    ledger = [(KEPT, "", kept), *((REJECTED, r, n) for r, n in reasons.items())]
    tokens = sum(classes.get(name, 0) for name in ("trained", "context", "template"))
    # Rows rejected for length, or without targets, have their own checks.
    refused = {r: n for r, n in reasons.items() if r not in {*LENGTH_REASONS, *NO_TARGET_REASONS, "content_dropped"}}
    summed = (*_SUMMED_FACTS, "verified", "outside_vocabulary", "altered", "original_tokens")
    counted: dict[str, Any] = {name: sum(int(p.facts[name]) for p in parts) for name in summed}
    # What only rows of one kind are counted by: ids that were ids already, and pairs.
    names = ("unknown_ids", "retokenized", "same_tokenization", "pairs", "longer_chosen")
    unknown, compared, same, pairs, longer = (sum(int(p.facts.get(name, 0)) for p in parts) for name in names)
    of_kind: dict[str, Any] = {}
    if context.dataset.row_kind == "tokens":
        same_share = compute_share(same, compared) if compared else None
        of_kind = {"unknown_ids": unknown, "same_tokenization": same_share}
    if context.dataset.row_kind == "preference":
        of_kind = {"length_bias": abs(compute_share(longer, pairs) - 0.5) if pairs else None}
    facts = TokenizedExamplesFacts(
        nonempty=examples,
        accounted=count_unaccounted(row_count, ledger) + abs(sum(classes.values()) - counted["original_tokens"]),
        rejects=compute_share(sum(refused.values()), row_count),
        mask_verified=compute_share(counted["verified"], examples) if examples else None,
        zero_loss_rows=None
        if context.recipe.objective == "prompts"
        else compute_share(sum(_select_reasons(reasons, NO_TARGET_REASONS).values()), row_count),
        token_ids=counted["outside_vocabulary"],
        rows=row_count,
        kept=kept,
        rejected=sum(reasons.values()),
        examples=examples,
        tokens=tokens,
        trained_tokens=classes.get("trained", 0),
        trained_share=compute_share(classes.get("trained", 0), tokens),
        dropped_kinds=sum_counts(p.facts["dropped"] for p in parts),
        # A row's text may be encoded several times, until it fits.
        text_roundtrip=compute_share(min(counted["altered"], row_count), row_count) if examples else None,
        control_strings=compute_share(sum(int(p.facts["controlled_rows"]) for p in parts), row_count)
        if dataset.format.has_control_strings()
        else None,
        short_documents=_compute_short_share(context.input(CANONICAL_ROWS).parts, parts),
        **_summarize_template(context, parts, spec, reasons, row_count),
        **of_kind,
        **{name: counted[name] for name in _SUMMED_FACTS},
        most_tool_tokens=max((int(p.facts["most_tool_tokens"]) for p in parts), default=0),
    )
    columns = (*EXAMPLE_COLUMNS.get(dataset.row_kind, ()), *dataset.format.get_rollout_fields().columns)
    schema = make_example_schema(weighted=dataset.loss.has_weights, columns=columns)
    token_ledger: list[tuple[str, str, int]] = []
    for split in sorted({split for p in parts for split in p.facts["tokens_by_split"]}):
        by_class = sum_counts(p.facts["tokens_by_split"].get(split, {}) for p in parts)
        token_ledger += [(split, name, count) for name, count in by_class.items()]
    if dropped := sum(int(p.facts["dropped_tokens"]) for p in parts):
        token_ledger.append(("rejected", "dropped", dropped))
    samples = collect_samples(parts, "examples_of_rejects")
    tables = {
        "rejects": DisplayTable(("reason", "rows"), tuple(sorted(reasons.items(), key=lambda r: (-r[1], r[0]))[:30])),
        "tokens": DisplayTable(
            ("class", "tokens"), tuple(sum_counts(p.facts["tokens_by_class"] for p in parts).items())
        ),
    }
    weights = sum_counts(p.facts.get("tokens_by_weight", {}) for p in parts)
    if weights:
        lines = sorted(weights.items(), key=lambda found: (-found[1], found[0]))[:30]
        tables["loss_weights"] = DisplayTable(
            ("weight", "tokens"), tuple((float(weight), count) for weight, count in lines)
        )
    controlled = sum_counts(p.facts["control_counts"] for p in parts)
    if controlled:
        lines = sorted(controlled.items(), key=lambda found: (-found[1], found[0]))[:30]
        tables["control_strings"] = DisplayTable(
            ("role", "string", "occurrences"), tuple((*name.split(" ", 1), count) for name, count in lines)
        )
    if facts.template_warnings:
        tables["template"] = DisplayTable(("warning",), tuple((warning,) for warning in facts.template_warnings))
    if facts.dropped_kinds:
        tables["dropped"] = DisplayTable(("kind", "pieces"), tuple(facts.dropped_kinds.items()))
    return StageOutput(
        parts=parts,
        facts=facts,
        ledger=ledger,
        token_ledger=token_ledger,
        tables=tables,
        samples={
            "rejects": describe_rejects(context, parts, refused),
            "content_dropped": describe_rejects(context, parts, _select_reasons(reasons, ("content_dropped",))),
            "reasoning_dropped": (f"{_name_template(context.dataset.template)} prints no reasoning",) if spec else (),
            "zero_loss_rows": describe_rejects(context, parts, _select_reasons(reasons, NO_TARGET_REASONS)),
            "render_equal": (*samples.get("render_mismatch", ()), *samples.get("mask_judged_wrong", ())),
            "prompt_parity": tuple(row_id for p in parts for row_id in p.facts["examples_of_prompts"])[:10],
        },
        schema=tuple((f.name, str(f.type)) for f in schema),
        card={**tokenizer.card.describe(), "template_digest": digest_json(spec.text) if spec else None},
        parts_reused=made.reused,
        rows_made=made.rows_made,
    )


def _name_template(template: Template) -> str:
    chosen = template.chat_template
    name = chosen.name or chosen.file or chosen.tokenizer if isinstance(chosen, TemplateChoice) else chosen
    is_name = name is not None and not is_template_text(name)
    return f"the template {name}" if is_name else "the template in the recipe" if chosen else "the tokenizer's template"


def _select_reasons(reasons: Mapping[str, int], names: Collection[str]) -> dict[str, int]:
    return {reason: count for reason, count in reasons.items() if reason in names}


_SUMMED_FACTS = ("trained_removed", "dropped_trained", "reference_path_texts", "fast_path_mismatches",
                 "boundary_tokens", "untrained_boundary_tokens", "prompts_compared", "rows_with_tools",
                 "tool_tokens")  # fmt: skip
"""Facts of the stage that are sums of those of its parts."""


TEMPLATE_FACTS = ("render_equal", "content_dropped", "reasoning_dropped", "contract", "prompt_match", "date_pinned",
               "prompt_parity")  # fmt: skip
"""Facts about how a chat template prints rows; not applicable to data without one."""


def _compute_short_share(rows: Sequence[Part], parts: Sequence[Part]) -> float | None:
    """Return the share of short documents of text files, which may be lines of longer documents."""
    of_files = [done for part, done in zip(rows, parts, strict=True) if part.facts["is_text_file"]]
    documents = sum(int(part.facts["documents"]) for part in of_files)
    short = sum(int(part.facts["short_documents"]) for part in of_files)
    return compute_share(short, documents) if documents else None


def _summarize_template(
    context: StageContext, parts: list[Part], spec: RendererSpec | None, reasons: dict[str, int], rows: int
) -> dict[str, Any]:
    """Return the template's facts for the checks; all parts have the same template."""
    found: dict[str, Any] = next((p.facts["template"] for p in parts if p.facts["template"]), {})
    named = {
        "template_warnings": list(found.get("warnings", ())),
        "mismatched_prompts": list(found.get("prompts", ())),
    }
    if spec is None:
        return dict.fromkeys(TEMPLATE_FACTS, None) | named
    compared, differ, losing = (
        sum(int(p.facts[name]) for p in parts)
        for name in ("prompts_compared", "prompts_that_differ", "rows_losing_reasoning")
    )
    is_compared = context.dataset.template.verify_render > 0
    return {
        "render_equal": reasons.get("render_mismatch", 0) + reasons.get("mask_judged_wrong", 0)
        if is_compared
        else None,
        "content_dropped": compute_share(reasons.get("content_dropped", 0) + losing, rows),
        "reasoning_dropped": compute_share(losing, rows),
        "contract": len(found.get("warnings", ())),
        "prompt_match": len(found.get("prompts", ())),
        "date_pinned": int(found.get("dated", False)),
        "prompt_parity": compute_share(differ, compared) if compared else None,
        **named,
    }


def require_tokenizer_ready(context: StageContext) -> None:
    """Open the tokenizer and find the template, or raise."""
    loaded, path = open_recipe_tokenizer(context)
    open_in_workers(open_shared_encoder, context.store.root, path)
    try:
        spec = resolve_renderer_spec(context, loaded)
    except ConfigError as error:
        raise ConfigError(f"datasets.{context.dataset_name}: {error}") from error
    if spec is not None:
        share_template(spec, context.dataset.format.get_token_options().assistant_roles)


STAGE = StageDeclaration(
    name=TOKENIZED_EXAMPLES,
    facts=TokenizedExamplesFacts,
    description="Token ids with a verified loss mask and the span of every token.",
    identity=identify_tokenized_examples,
    prepare=prepare_tokenized_examples,
    inputs=(CANONICAL_ROWS,),
    require_ready=require_tokenizer_ready,
    find_outside_change=describe_tokenizer_change,
    divides_into_shares=True,
    uses_all_cores=True,
    stats_inputs=StatsInputs(
        count_rows_by_fact("examples", "example"), files={"examples": "examples", "rejects": "rejects"}
    ),
    summarize=lambda facts, rows: (
        rows,
        format_count(facts.tokens, "token"),
        f"{format_percent(facts.trained_share)} trained",
        format_rejected(facts.rejected),
    ),
    compared=(
        ComparedFact("examples", "examples"),
        ComparedFact("tokens", "tokens"),
        ComparedFact("trained share", "trained_share", is_share=True),
    ),
)
