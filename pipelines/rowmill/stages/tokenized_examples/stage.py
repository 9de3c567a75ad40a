"""Canonical rows → tokenized examples, over all parts: the tokenizer and template are opened once, parts in workers.

The tokenizer is loaded through `transformers` once and stored as data under the storage root, so that workers and later
builds need neither that library nor its two seconds.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
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
from rowmill.parts.accounts import describe_rejects, sort_by_count
from rowmill.parts.context import StageOutput, format_rejected
from rowmill.recipe.recipe import Dataset, Recipe
from rowmill.schema.counts import CountSet
from rowmill.schema.example_counts import (
    JUDGE_REASONS,
    NO_TARGET_REASONS,
    TEMPLATE_REASON,
    ControlStringCounts,
    ExampleCounts,
    PromptCounts,
    RowExampleCounts,
    TemplateCounts,
)
from rowmill.schema.examples import make_example_schema
from rowmill.schema.manifest import DisplayTable, Manifest, add_up_counts
from rowmill.schema.row_counts import RowCounts
from rowmill.schema.rows import ROW_KINDS, describe_columns
from rowmill.stages.base import ComparedNumber, PreparedStage, StageContext, StageDeclaration
from rowmill.stages.tokenized_examples import text_parts
from rowmill.stages.tokenized_examples.conversation_examples import share_template
from rowmill.stats.tables import StatsInputs, count_rows_of
from rowmill.tokenization import control_tokens, tokenizer, tokenizer_source
from rowmill.tokenization.reference_sample import divide_minimum
from rowmill.tokenization.stored_tokenizers import (
    find_recipe_tokenizer,
    identify_tokenizer,
    open_recipe_tokenizer,
    open_shared_encoder,
)
from rowmill.tokenization.tokenizer import LoadedTokenizer

VERSION = 10
"""Increase it when any row may become another example, or facts change."""


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
    identity = dataset.format.identify_examples(recipe, name, dataset)
    if identity is None:
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
            "columns": describe_columns(ROW_KINDS[dataset.row_kind].example_columns),
        }
    named = identify_tokenizer(recipe.tokenizer_choice)
    if dataset.format.reads_tokenizer_name():
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
    tokenize_parts = partial(_tokenize_parts, context, loaded, path)
    draft = context.dataset.format.make_examples(context, loaded, path, tokenize_parts)
    draft.details["tokenizer"] = describe_tokenizer_origin(context, loaded)
    card = loaded.card
    draft.details["engine"] = {"name": card.engine, "version": card.engine_version, "refused": card.refused}
    return draft


def _tokenize_parts(context: StageContext, tokenizer: LoadedTokenizer, path: str) -> StageOutput:
    spec = resolve_renderer_spec(context, tokenizer)
    rows = context.input(CANONICAL_ROWS).parts
    # Everything that decides the examples of a part, except its rows.
    identity = identify_tokenized_examples(context.recipe, context.dataset_name or "")["examples"]
    made = context.map(
        text_parts.tokenize_part,
        [
            text_parts.TokenizeInputs(
                options=digest_json(identity, tokenizer.card.digest, _spec_to_json(spec)),
                is_text_file=part.get_counts(RowCounts).is_text_file,
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
    counts = add_up_counts(made.parts, ExampleCounts(), RowExampleCounts())
    examples, dataset = counts.get(ExampleCounts), context.dataset
    if counts.get(RowExampleCounts).overlong_rows and dataset.truncation.overlong == "raise":
        form, limit = dataset.format, context.recipe.limit_of(context.dataset_name or "")
        remedies = f"{form.suggest_longer_examples(dataset)}, or {form.suggest_overlong_policies(dataset)}"
        where = f"datasets.{context.dataset_name}"
        raise text_parts.make_overlong_error(limit, counts.get(RowExampleCounts), where, remedies)
    columns = (*ROW_KINDS[dataset.row_kind].example_columns, *dataset.format.get_rollout_fields().columns)
    schema = make_example_schema(weighted=dataset.loss.has_weights, columns=columns)
    reasons = examples.reasons

    def describe(chosen: Collection[str]) -> tuple[str, ...]:
        return describe_rejects(context, made.parts, {one: reasons[one] for one in chosen if one in reasons})

    return StageOutput(
        parts=made.parts,
        counts=counts,
        ledger=examples.list_ledger(),
        token_ledger=examples.list_token_ledger(),
        tables=_tabulate_counts(counts),
        samples={
            "rejects": describe(examples.count_refused()),
            "content_dropped": describe((TEMPLATE_REASON,)),
            "reasoning_dropped": (f"{_name_template(dataset.template)} prints no reasoning",) if spec else (),
            "zero_loss_rows": describe(NO_TARGET_REASONS),
            "render_equal": tuple(
                row_id for reason in JUDGE_REASONS for row_id in examples.samples_of_rejects.get(reason, ())
            ),
            "prompt_parity": counts.get(PromptCounts).samples_of_prompts.get("", ()),
        },
        schema=tuple((f.name, str(f.type)) for f in schema),
        card={**tokenizer.card.describe(), "template_digest": digest_json(spec.text) if spec else None},
        parts_reused=made.reused,
        rows_made=made.rows_made,
    )


def _tabulate_counts(counts: CountSet) -> dict[str, DisplayTable]:
    """Return the tables of the stage's page; those that have no lines are left out."""
    examples, template = counts.get(ExampleCounts), counts.get(TemplateCounts)
    weights = sort_by_count(counts.get(RowExampleCounts).tokens_by_weight)[:30]
    strings = sort_by_count(counts.get(ControlStringCounts).control_string_occurrences)[:30]
    found: dict[str, tuple[tuple[str, ...], Iterable[tuple[object, ...]]]] = {
        "loss_weights": (("weight", "tokens"), ((float(weight), count) for weight, count in weights)),
        "control_strings": (
            ("role", "string", "occurrences"), ((*name.split(" ", 1), count) for name, count in strings)
        ),
        "template": (("warning",), ((warning,) for warning in template.template_warnings)),
        "dropped": (("kind", "pieces"), template.dropped_kinds.items()),
    }  # fmt: skip
    tables = {
        "rejects": DisplayTable(("reason", "rows"), tuple(sort_by_count(examples.reasons)[:30])),
        "tokens": DisplayTable(("class", "tokens"), tuple(examples.count_classes().items())),
    }
    return tables | {
        name: DisplayTable(columns, own) for name, (columns, lines) in found.items() if (own := tuple(lines))
    }


def _name_template(template: Template) -> str:
    chosen = template.chat_template
    name = chosen.name or chosen.file or chosen.tokenizer if isinstance(chosen, TemplateChoice) else chosen
    is_name = name is not None and not is_template_text(name)
    return f"the template {name}" if is_name else "the template in the recipe" if chosen else "the tokenizer's template"


def require_tokenizer_ready(context: StageContext) -> None:
    """Open the tokenizer and find the template, or raise."""
    loaded, path = open_recipe_tokenizer(context)
    for module in context.dataset.format.WORKER_MODULES:
        open_in_workers(import_module, module)
    open_in_workers(open_shared_encoder, context.store.root, path)
    try:
        spec = resolve_renderer_spec(context, loaded)
    except ConfigError as error:
        raise ConfigError(f"datasets.{context.dataset_name}: {error}") from error
    if spec is not None:
        share_template(spec, context.dataset.format.get_token_options().assistant_roles)


def _summarize_examples(counts: CountSet, rows: str) -> Sequence[str]:
    examples = counts.get(ExampleCounts)
    tokens, trained = format_count(examples.tokens, "token"), f"{format_percent(examples.trained_share)} trained"
    return rows, tokens, trained, format_rejected(examples.rejected)


STAGE = StageDeclaration(
    name=TOKENIZED_EXAMPLES,
    counts=ExampleCounts,
    description="Token ids with a verified loss mask and the span of every token.",
    identity=identify_tokenized_examples,
    prepare=prepare_tokenized_examples,
    inputs=(CANONICAL_ROWS,),
    require_ready=require_tokenizer_ready,
    find_outside_change=describe_tokenizer_change,
    divides_into_shares=True,
    uses_all_cores=True,
    stats_inputs=StatsInputs(
        count_rows_of(ExampleCounts, lambda counts: counts.examples, "example"),
        files={"examples": "examples", "rejects": "rejects"},
    ),
    summarize=_summarize_examples,
    compared=(
        ComparedNumber("examples", ExampleCounts, lambda counts: counts.examples),
        ComparedNumber("tokens", ExampleCounts, lambda counts: counts.tokens),
        ComparedNumber("trained share", ExampleCounts, lambda counts: counts.trained_share, is_share=True),
    ),
)
