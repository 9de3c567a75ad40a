"""Canonical rows → tokenized examples, over all parts: the tokenizer and template are opened once, parts in workers.

What belongs here: finding tokenizer and template, which parts to make, adding up. What does not: one row's
way to tokens (`text_examples.py`), one part's (`parts.py`).

The tokenizer is loaded through `transformers` once and kept as data under the storage root, so that workers
and later builds need neither that library nor its two seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rowmill.conversation import masking
from rowmill.conversation.rendering import renderer
from rowmill.conversation.rendering.renderer import RendererSpec
from rowmill.core.errors import ConfigError
from rowmill.core.number_text import counted, percent
from rowmill.core.storage import digest
from rowmill.formats import Records
from rowmill.recipe.recipe import Dataset, Recipe
from rowmill.schema.examples import examples_schema
from rowmill.schema.ledger import KEPT, REJECTED, add_up, unaccounted
from rowmill.schema.manifest import NOT_APPLICABLE, Manifest, Part, Table
from rowmill.stages.base import (
    Draft,
    Figure,
    Planned,
    Prepared,
    StageDeclaration,
    Work,
    count_rejected,
    first_samples,
    make_parts,
    name_rejects,
    share,
)
from rowmill.stages.tokenized_examples import table_examples, text_parts
from rowmill.stages.tokenizer_files import find_tokenizer, open_tokenizer
from rowmill.stats import Feeds, by_fact
from rowmill.tokenization import tokenizer, tokenizer_source
from rowmill.tokenization.tokenizer import LoadedTokenizer

VERSION = 5
"""Raise it when any row may become another example, or other facts are counted."""


LENGTH_REASONS = frozenset({"overlong", "overlong_after_structure"})


NO_TARGET = frozenset({"no_loss_tokens", "no_assistant", "assistant_untrained"})


UNVERIFIED = frozenset({"span_not_found", "own_text_untrained", "foreign_text_trained", "reasoning_not_located"})


def origin_of(work: Work, loaded: LoadedTokenizer) -> dict[str, Any]:
    """Say under which name and at which commit the tokenizer was found: a note, no part of what is made with it."""
    found = find_tokenizer(work)
    return {
        "name": found.choice.name,
        "revision": found.choice.revision,
        "commit": found.commit,
        "digest": loaded.card.digest,
    }


def tokenizer_change(work: Work, earlier: Manifest) -> str | None:
    """Say how the tokenizer differs from the one that earlier examples were made with, the recipe being the same."""
    was: dict[str, Any] = earlier.details.get("tokenizer", {})
    now = origin_of(work, open_tokenizer(work)[0])
    if (was.get("name"), was.get("revision")) != (now["name"], now["revision"]):
        return None
    if was["commit"] != now["commit"]:
        of = tokenizer_source.described(work.recipe.tokenizer_choice)
        return f"{of} moved from {str(was['commit'])[:12]} to {str(now['commit'])[:12]} on the hub"
    return "its tokenizer's files changed" if was["digest"] != now["digest"] else None


def renderer_spec(work: Work, loaded: LoadedTokenizer) -> RendererSpec | None:
    """Return what the dataset's chat template is; None for kinds that have no template."""
    return spec_of_dataset(work.dataset, work.base, loaded)


def spec_of_dataset(dataset: Dataset, base: Path, loaded: LoadedTokenizer) -> RendererSpec | None:
    """Return what a dataset's chat template is; None for kinds that have no template."""
    card, options = loaded.card, dataset.template
    if dataset.format.kind not in ("chat", "auto", "python"):
        return None
    if dataset.format.kind == "python" and options.chat_template is None and not card.chat_template:
        # A class of one's own may make no conversation at all.
        return None
    source = renderer.resolve(
        _at_base(options, base), tokenizer_chat_template=card.chat_template, special_tokens=card.special_tokens
    )
    control = tokenizer.ControlStrings(card, source.text)
    tools = dataset.tools
    return renderer.spec_of(
        options,
        source,
        control_tokens=control.strings,
        adds_bos=card.adds_bos,
        arguments=tools.arguments,
        tool_ids=tools.tool_ids,
    )


def _at_base(options: renderer.Template, base: Path) -> renderer.Template:
    """Resolve a template file's path against the project."""
    choice = options.chat_template
    if isinstance(choice, str) or choice is None or choice.file is None:
        return options
    return options.model_copy(update={"chat_template": choice.model_copy(update={"file": str(base / choice.file)})})


def identity_of(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide examples; of a tokenizer in a folder its files, wherever they lie."""
    dataset = recipe.datasets[name]
    if isinstance(dataset.format, Records):
        own = table_examples.identity_of(recipe, name)
    else:
        groups = ("format", "template", "loss", "truncation", "reasoning", "tools")
        own = {
            "versions": [VERSION, tokenizer.VERSION, renderer.VERSION, masking.VERSION],
            **{group: getattr(dataset, group).model_dump(mode="json") for group in groups},
            "keeps_overlong": dataset.keeps_overlong,
            "limit": recipe.limit_of(name),
            "vocab_size": recipe.vocab_size,
        }
    return {"tokenizer": _tokenizer_identity(recipe, name), "examples": own}


def _tokenizer_identity(recipe: Recipe, name: str) -> dict[str, Any]:
    choice, form = recipe.tokenizer_choice, recipe.datasets[name].format
    named = {"name": choice.name, "revision": choice.revision} if choice.content is None else {"files": choice.content}
    # The prompts of this style are chosen by what the tokenizer is called.
    is_by_name = isinstance(form, Records) and form.prompt.style == "reference"
    return {**named, "name": choice.name} if is_by_name else named


def prepare(work: Work) -> Prepared:
    """Open tokenizer and template: their content decides, wherever it lies."""
    loaded, _ = open_tokenizer(work)
    spec = renderer_spec(work, loaded)
    return Prepared((loaded.card.digest, _spec_values(spec)), lambda: make(work))


def _spec_values(spec: RendererSpec | None) -> dict[str, Any] | None:
    return None if spec is None else asdict(spec) | {"now": spec.now.isoformat()}


def _examples_digest(work: Work, loaded: LoadedTokenizer, spec: RendererSpec | None) -> str:
    """Identify what decides the examples of a part of rows, the rows themselves left out."""
    own = identity_of(work.recipe, work.dataset_name or "")["examples"]
    return digest("tokenized_examples", own, loaded.card.digest, _spec_values(spec))


def _vocabulary(work: Work, loaded: LoadedTokenizer) -> int:
    return work.recipe.vocab_size or loaded.card.vocab_size


def make(work: Work) -> Draft:
    """Tokenize all parts."""
    loaded, path = open_tokenizer(work)
    is_record = work.dataset.row_kind == "record"
    draft = table_examples.make(work, loaded, path) if is_record else _make(work, loaded, path)
    draft.details["tokenizer"] = origin_of(work, loaded)
    return draft


def _make(work: Work, loaded: LoadedTokenizer, path: str) -> Draft:
    spec = renderer_spec(work, loaded)
    rows = work.input("canonical_rows").parts
    options = _examples_digest(work, loaded, spec)
    planned = [_planned(work, path, spec, part, digest(options, part.files["rows"].digest), loaded) for part in rows]
    made, reused, rows_made = make_parts(work, text_parts.tokenize_part, planned)
    _raise_overlong(work, made)
    return _draft(work, made, loaded, spec, reused=reused, rows_made=rows_made)


def _planned(
    work: Work, path: str, spec: RendererSpec | None, part: Part, fingerprint: str, loaded: LoadedTokenizer
) -> Planned:
    task = text_parts.TokenizeTask(
        root=work.store.root,
        folder=work.folder,
        fingerprint=fingerprint,
        tokenizer=path,
        dataset=work.dataset,
        renderer=spec,
        limit=work.recipe.limit_of(work.dataset_name or ""),
        vocab_size=_vocabulary(work, loaded),
        rows=part.files["rows"],
        base=str(work.base),
    )
    # Compressed rows are about a quarter of their text.
    return Planned(fingerprint, task, part.files["rows"].rows, 4 * part.files["rows"].bytes)


def _raise_overlong(work: Work, made: list[Part]) -> None:
    found = [(str(row_id), int(length)) for part in made for row_id, length in part.facts["overlong"]]
    total = sum(int(part.facts["overlong_rows"]) for part in made)
    if total and work.dataset.truncation.overlong == "raise":
        raise text_parts.too_long(
            work.recipe.limit_of(work.dataset_name or ""), total, found, f"datasets.{work.dataset_name}"
        )


def _draft(
    work: Work, made: list[Part], loaded: LoadedTokenizer, spec: RendererSpec | None, *, reused: int, rows_made: int
) -> Draft:
    reasons = add_up(p.facts["reasons"] for p in made)
    rows = sum(int(p.facts["rows"]) for p in made)
    kept = sum(int(p.facts["kept"]) for p in made)
    examples = sum(int(p.facts["examples"]) for p in made)
    classes = add_up(p.facts["tokens_by_class"] for p in made)
    ledger = [(KEPT, "", kept), *((REJECTED, r, n) for r, n in reasons.items())]
    tokens = sum(classes.get(name, 0) for name in ("trained", "context", "template"))
    # What is cut for its length, or has nothing to train, has checks of its own.
    refused = {r: n for r, n in reasons.items() if r not in {*LENGTH_REASONS, *NO_TARGET, "content_dropped"}}
    counted = {name: sum(int(p.facts[name]) for p in made) for name in _COUNTED}
    facts: dict[str, Any] = {
        "nonempty": examples,
        "accounted": unaccounted(rows, ledger) + abs(sum(classes.values()) - counted["original_tokens"]),
        "rejects": share(sum(refused.values()), rows),
        "mask_verified": share(counted["verified"], examples) if examples else NOT_APPLICABLE,
        "zero_loss_rows": share(sum(n for r, n in reasons.items() if r in NO_TARGET), rows),
        "token_ids": counted["outside_vocabulary"],
        "rows": rows, "kept": kept, "rejected": sum(reasons.values()), "examples": examples,
        "tokens": tokens, "trained_tokens": classes.get("trained", 0),
        "trained_share": share(classes.get("trained", 0), tokens),
        "trained_removed": counted["trained_removed"], "dropped_trained": counted["dropped_trained"],
        "dropped_kinds": add_up(p.facts["dropped"] for p in made),
        "text_roundtrip": share(counted["altered"], examples) if examples else NOT_APPLICABLE,
        "short_documents": _short_documents(work.input("canonical_rows").parts, made),
        **_of_template(work, made, spec, reasons, rows),
        **{name: counted[name] for name in ("usual_way", "lane_differences", "straddles", "prompts_compared")},
        "rows_with_tools": counted["rows_with_tools"], "tool_tokens": counted["tool_tokens"],
        "most_tool_tokens": max((int(p.facts["most_tool_tokens"]) for p in made), default=0),
    }  # fmt: skip
    samples = first_samples(made, "examples_of_rejects")
    return Draft(
        parts=made,
        facts=facts,
        ledger=ledger,
        token_ledger=_token_ledger(made),
        tables=_tables(made, reasons, facts),
        samples={
            "rejects": name_rejects(refused, samples),
            "content_dropped": samples.get("content_dropped", ()),
            "zero_loss_rows": tuple(i for reason in sorted(NO_TARGET) for i in samples.get(reason, ()))[:10],
            "render_equal": samples.get("render_mismatch", ()),
            "prompt_parity": tuple(row_id for p in made for row_id in p.facts["examples_of_prompts"])[:10],
        },
        schema=tuple((f.name, str(f.type)) for f in examples_schema(weighted=work.dataset.loss.weights)),
        card=card_of(loaded, spec),
        parts_reused=reused,
        rows_made=rows_made,
    )


_COUNTED = ("verified", "outside_vocabulary", "usual_way", "lane_differences", "controlled_rows", "altered",
            "straddles", "original_tokens", "rows_with_tools", "tool_tokens", "prompts_compared",
            "prompts_that_differ", "trained_removed", "dropped_trained")  # fmt: skip


OF_TEMPLATE = ("render_equal", "content_dropped", "contract", "prompt_match", "date_pinned", "control_strings",
               "prompt_parity")  # fmt: skip
"""Facts about how a chat template prints rows; data without one has none of them."""


def _short_documents(rows: Sequence[Part], made: Sequence[Part]) -> float | str:
    """Return the share of short documents among those of text files, of which lines may have been made."""
    of_files = [done for part, done in zip(rows, made, strict=True) if part.facts["is_text_file"]]
    documents = sum(int(part.facts["documents"]) for part in of_files)
    short = sum(int(part.facts["short_documents"]) for part in of_files)
    return share(short, documents) if documents else NOT_APPLICABLE


def _of_template(
    work: Work, made: list[Part], spec: RendererSpec | None, reasons: dict[str, int], rows: int
) -> dict[str, Any]:
    """Return what the template makes of the laws; all parts were printed by the same one."""
    found: dict[str, Any] = next((p.facts["template"] for p in made if p.facts["template"]), {})
    named = {
        "template_warnings": list(found.get("warnings", ())),
        "mismatched_prompts": list(found.get("prompts", ())),
    }
    if spec is None:
        return dict.fromkeys(OF_TEMPLATE, NOT_APPLICABLE) | named
    compared, controlled, differ = (
        sum(int(p.facts[name]) for p in made) for name in ("prompts_compared", "controlled_rows", "prompts_that_differ")
    )
    is_compared = work.dataset.template.verify_render > 0
    return {
        "render_equal": reasons.get("render_mismatch", 0) if is_compared else NOT_APPLICABLE,
        "content_dropped": share(reasons.get("content_dropped", 0), rows),
        "contract": len(found.get("warnings", ())),
        "prompt_match": len(found.get("prompts", ())),
        "date_pinned": int(found.get("dated", False)),
        "control_strings": share(controlled, rows),
        "prompt_parity": share(differ, compared) if compared else NOT_APPLICABLE,
        **named,
    }


def card_of(loaded: LoadedTokenizer, spec: RendererSpec | None) -> dict[str, Any]:
    """Return the identity card that every shard bears."""
    card = loaded.card
    return {
        "tokenizer_digest": card.digest, "tokenizer_files": card.files,
        "vocab_size": card.vocab_size, "bos_id": card.bos_id, "eos_id": card.eos_id, "pad_id": card.pad_id,
        "fast_lane": card.fast, "why_usual_way": card.why_usual,
        "template_digest": digest(spec.text) if spec else None,
    }  # fmt: skip


def _token_ledger(made: list[Part]) -> list[tuple[str, str, int]]:
    splits = sorted({split for p in made for split in p.facts["tokens_by_split"]})
    lines: list[tuple[str, str, int]] = []
    for split in splits:
        classes = add_up(p.facts["tokens_by_split"].get(split, {}) for p in made)
        lines.extend((split, name, count) for name, count in classes.items())
    dropped = sum(int(p.facts["dropped_tokens"]) for p in made)
    return [*lines, *([("rejected", "dropped", dropped)] if dropped else [])]


def _tables(made: list[Part], reasons: dict[str, int], facts: dict[str, Any]) -> dict[str, Table]:
    tables = {
        "rejects": Table(("reason", "rows"), tuple(sorted(reasons.items(), key=lambda r: (-r[1], r[0]))[:30])),
        "tokens": Table(("class", "tokens"), tuple(add_up(p.facts["tokens_by_class"] for p in made).items())),
    }
    weights = add_up(p.facts.get("tokens_by_weight", {}) for p in made)
    if weights:
        lines = sorted(weights.items(), key=lambda found: (-found[1], found[0]))[:30]
        tables["loss_weights"] = Table(("weight", "tokens"), tuple((float(weight), count) for weight, count in lines))
    controlled = add_up(p.facts["control_counts"] for p in made)
    if controlled:
        lines = sorted(controlled.items(), key=lambda found: (-found[1], found[0]))[:30]
        tables["control_strings"] = Table(
            ("role", "string", "occurrences"), tuple((*name.split(" ", 1), count) for name, count in lines)
        )
    if facts["template_warnings"]:
        tables["template"] = Table(("warning",), tuple((one,) for one in facts["template_warnings"]))
    if facts["dropped_kinds"]:
        tables["dropped"] = Table(("kind", "pieces"), tuple(facts["dropped_kinds"].items()))
    return tables


def require_ready(work: Work) -> None:
    """Open the tokenizer and find the template.

    Raises
    ------
    ConfigError
        If one of them is not there.

    """
    loaded, _ = open_tokenizer(work)
    try:
        renderer_spec(work, loaded)
    except ConfigError as error:
        raise ConfigError(f"datasets.{work.dataset_name}: {error}") from error


def _summarize(facts: Mapping[str, Any], rows: str) -> Sequence[str]:
    trained = f"{percent(facts['trained_share'])} trained"
    return rows, counted(facts["tokens"], "token"), trained, count_rejected(facts)


STAGE = StageDeclaration(
    name="tokenized_examples",
    description="Token ids with a verified loss mask, and what every token is.",
    identity=identity_of,
    prepare=prepare,
    inputs=("canonical_rows",),
    require_ready=require_ready,
    find_outside_change=tokenizer_change,
    uses_all_cores=True,
    feeds=Feeds(by_fact("examples", "example"), files={"examples": "examples", "rejects": "rejects"}),
    summarize=_summarize,
    compared=(
        Figure("examples", "examples"),
        Figure("tokens", "tokens"),
        Figure("trained share", "trained_share", is_share=True),
    ),
)
