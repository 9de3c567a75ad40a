"""A recipe's current build on one screen: a line per dataset, rejects, failed checks, next commands."""

from collections.abc import Collection, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from rowmill.build.held_versions import HeldVersion, find_held_version
from rowmill.build.steps import Project, Step, find_downstream_steps, plan_steps
from rowmill.checks.judge import CheckResult, run_checks
from rowmill.core.console import DIM, GOOD, HEAD, LOOK, label_value, make_grid, render_text
from rowmill.core.number_text import NO_NUMBER, format_count, format_percent, join_facts
from rowmill.core.stage_names import EXPORTS
from rowmill.exports import Export
from rowmill.reports.console import format_key, render_check_result, render_title
from rowmill.reports.statistics import load_current
from rowmill.schema import manifest
from rowmill.schema.facts import (
    CanonicalRowsFacts,
    FactsT,
    PackedShardsFacts,
    TokenizedExamplesFacts,
    TrainingSplitsFacts,
    read_facts,
)
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import Manifest, StageKey, get_stage_folder
from rowmill.stages.base import StageDeclaration
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.exports import stage as exports
from rowmill.stages.gpu_partitions import stage as gpu_partitions
from rowmill.stages.gpu_partitions.rank_parts import GpuPartitionsFacts
from rowmill.stages.packed_shards import stage as packed_shards
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.stages.training_splits import stage as training_splits


def summarize_recipe(project: Project, *, shown: Collection[StageKey] = ()) -> str:
    """Return a recipe's summary: rows in and out, tokens, fill, paths of the shards, failed checks, next commands.

    The failed checks of the stages in `shown`, which were printed before in full, are only named.
    """
    return render_text(Group(*_render_summary(project, shown)))


def _render_summary(project: Project, shown: Collection[StageKey]) -> list[RenderableType]:
    datasets: list[tuple[object, ...]] = [
        (Text(name), *list_summary_cells(project, name)[1:]) for name in project.recipe.datasets
    ]
    if len(datasets) > 1:
        datasets.append(_total_summary_cells(project))
    last = len(datasets) - 1 if len(datasets) > 1 else None
    lines: list[RenderableType] = [
        render_title(project, "current build"),
        Text(""),
        make_grid(SUMMARY_COLUMNS, datasets, marked=last),
    ]
    lines += _render_summary_rejects(project)
    lines += _render_summary_places(project)
    lines += _render_failed_checks(project, shown)
    lines += _render_next_commands(project)
    return lines


SUMMARY_COLUMNS = ("dataset", "records", "rows", "rejected", "examples", "tokens", "trained", "sequences", "fill")


def list_summary_cells(project: Project, name: str) -> tuple[object, ...]:
    """Return a dataset's line of the summary, in the order of `SUMMARY_COLUMNS`."""
    rows = _read_current(project, name, canonical_rows.STAGE, CanonicalRowsFacts)
    examples = _read_current(project, name, tokenized_examples.STAGE, TokenizedExamplesFacts)
    packed = _read_current(project, name, packed_shards.STAGE, PackedShardsFacts)
    return (
        name,
        rows and rows.records,
        rows and rows.kept,
        (rows.rejected if rows else 0) + (examples.rejected if examples else 0),
        examples and examples.examples,
        examples and examples.tokens,
        _format_share(examples.trained_share if examples else None),
        packed and packed.sequences,
        _format_share(packed.fill if packed else None),
    )


def _read_current(project: Project, name: str, stage: StageDeclaration, kind: type[FactsT]) -> FactsT | None:
    """Return the facts of a dataset's current output; None if it was never built."""
    made = load_current(project, name, stage)
    return None if made is None else read_facts(kind, made.facts)


def _total_summary_cells(project: Project) -> tuple[object, ...]:
    """Sum the datasets; the shares are of all tokens, and of the capacity of all sequences."""

    def read_built(stage: StageDeclaration, kind: type[FactsT]) -> list[FactsT]:
        found = (_read_current(project, name, stage, kind) for name in project.recipe.datasets)
        return [one for one in found if one is not None]

    rows = read_built(canonical_rows.STAGE, CanonicalRowsFacts)
    examples = read_built(tokenized_examples.STAGE, TokenizedExamplesFacts)
    packed = read_built(packed_shards.STAGE, PackedShardsFacts)
    tokens, sequences = sum(example.tokens for example in examples), sum(one.sequences for one in packed)
    return (
        Text("all"),
        sum(row.records for row in rows),
        sum(row.kept for row in rows),
        sum(one.rejected for one in (*rows, *examples)),
        sum(example.examples for example in examples),
        tokens,
        format_percent(sum(example.trained_tokens for example in examples), tokens),
        sequences,
        format_percent(sum(one.tokens for one in packed), sequences * project.recipe.seq_len),
    )


def _format_share(share: float | None) -> str:
    return NO_NUMBER if share is None else format_percent(share)


def _render_summary_rejects(project: Project) -> list[RenderableType]:
    counts: dict[str, int] = {}
    for name in project.recipe.datasets:
        for stage in (canonical_rows.STAGE, tokenized_examples.STAGE):
            made = load_current(project, name, stage)
            for state, reason, count in made.ledger if made else ():
                if state != KEPT:
                    counts[reason or state] = counts.get(reason or state, 0) + count
    if not counts:
        return [Text("")]
    most = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    named = ", ".join(f"{count:,} {reason}" for reason, count in most[:8])
    rest = sum(count for _, count in most[8:])
    return [
        Text(""),
        label_value("left out", f"{named}{f', {rest:,} for {len(most) - 8} other reasons' if rest else ''}"),
    ]


def _render_summary_places(project: Project) -> list[RenderableType]:
    packed = [name for name in project.recipe.datasets if load_current(project, name, packed_shards.STAGE) is not None]
    splits, ranks = (
        load_current(project, None, training_splits.STAGE),
        load_current(project, None, gpu_partitions.STAGE),
    )
    lines: list[RenderableType] = []
    if packed:
        shown = packed[0] if len(packed) == 1 else f"{{{','.join(packed)}}}"
        lines.append(
            label_value("shards", project.store.path(f"{project.recipe.name}/{shown}/{packed_shards.STAGE.name}"))
        )
    if splits is not None:
        lines.append(label_value("training", "\n".join(describe_training(project, splits))))
    if ranks is not None:
        where = project.store.path(f"{get_stage_folder(ranks.key)}/current.json")
        facts = read_facts(GpuPartitionsFacts, ranks.facts)
        held = join_facts(
            [
                format_count(facts.ranks, "rank"),
                format_count(facts.tokens, "token"),
                f"opened through {where}",
            ]
        )
        lines.append(label_value("ranks", held))
    held = (find_held_version(project.store, step.key) for step in plan_steps(project))
    lines += [label_value("held", f"{format_key(one.key)}: {one.sentence}", LOOK) for one in held if one is not None]
    lines += [
        label_value("export", f"{export.name}: {project.store.path(exports.locate_export(made))}")
        for export, made in find_built_exports(project)
    ]
    return lines


def describe_training(project: Project, splits: Manifest) -> list[str]:
    """Describe what training on an order will see: steps, padding, epochs, and sequences that it never sees."""
    order = read_facts(TrainingSplitsFacts, splits.facts)
    shown = f"{format_count(order.places, 'sequence')} in {format_count(order.steps, 'step')}"
    padding = 1 - order.tokens / max(order.places * project.recipe.seq_len, 1)
    fillers = f", {format_count(order.fillers, 'filler sequence')} included" if order.fillers else ""
    lines = [f"{shown}; {format_percent(padding)} of their positions are padding{fillers}"]
    available = {row[0]: int(row[3]) for row in splits.tables["splits"].rows if row[1] == "train"}
    for dataset, _, _, epochs, _, _ in splits.tables["mixture"].rows:
        sequences = available.get(dataset, 0)
        unseen = round(sequences * max(1 - epochs, 0))
        rest = f"; {unseen:,} of its {format_count(sequences, 'sequence')} are never scheduled" if unseen else ""
        lines.append(f"{dataset}: {epochs:,.2f} {'epoch' if epochs == 1 else 'epochs'}{rest}")
    return lines


def find_built_exports(project: Project, names: Collection[str] = ()) -> list[tuple[Export, Manifest]]:
    """Return the recipe's exports that are built, or only those of the given names."""
    name = project.recipe.name
    found = [
        (one, manifest.load_current(project.store, (name, EXPORTS, one.name)))
        for one in project.recipe.exports
        if not names or one.name in names
    ]
    return [(export, made) for export, made in found if made is not None]


def render_export_pointers(project: Project, names: Collection[str], copied_to: str | None = None) -> RenderableType:
    """Show the path of each export, or of its copy, and the lines that load it in its trainer."""
    lines: list[RenderableType] = []
    for export, made in find_built_exports(project, names):
        head = Text.assemble(
            (f"\n{export.name}", HEAD), (f"  {export.kind_name}, label convention {export.label_convention}", DIM)
        )
        at = copied_to or project.store.path(exports.locate_export(made))
        lines += [head, Text(f"  {at}")]
        lines += [Text(f"    {line}", "cyan") for line in exports.format_trainer_pointer(export, made, at).splitlines()]
    return Group(*lines)


def find_failed_checks(project: Project) -> list[CheckResult]:
    """Return the checks that fail on the current versions."""
    found: list[CheckResult] = []
    for step in plan_steps(project):
        made = manifest.load_current(project.store, step.key)
        if made is not None:
            found += [one for one in run_checks(project.store, made, step.thresholds) if one.failed]
    return found


def _render_failed_checks(project: Project, shown: Collection[StageKey]) -> list[RenderableType]:
    failed = find_failed_checks(project)
    if not failed:
        return [label_value("checks", "every applicable check passed", GOOD)]
    above, below = [one for one in failed if one.key in shown], [one for one in failed if one.key not in shown]
    lines: list[RenderableType] = [label_value("checks", _name_failed_checks(above), LOOK)] if above else []
    lines += [Text("")] * bool(below)
    for one in below:
        lines += [Text(f"  {format_key(one.key)}", DIM), render_check_result(one, indent=4)]
    return lines


def _name_failed_checks(failed: Sequence[CheckResult]) -> str:
    count = format_count(len(failed), "failed check" if any(one.blocking for one in failed) else "warning")
    return f"{count}, shown above: {', '.join(f'{format_key(one.key)} {one.check} {one.shown}' for one in failed)}"


REJECTS_QUERY = "from rejects select reason, count(*) group by 1"


def _format_arguments(project: Project) -> str:
    """Return a command's arguments for the recipe and its storage root."""
    name, root = project.recipe.name, project.store.root
    return name if root == str(project.base / ".rowmill") else f"{name} --root {root}"


def render_used_version(project: Project, step: Step, version: str) -> RenderableType:
    """Show the version at which a stage is held now, and how to rebuild the stages after it."""
    lines = [Text(f"{format_key(step.key)} is held at version {version}; builds keep it, nightly ones too")]
    labels = dict.fromkeys(one.label for one in find_downstream_steps(project, step.key) if not one.on_demand)
    if labels:
        only = " ".join(f"--only {label}" for label in labels)
        lines.append(Text("  the stages after it were built from another version; rebuild them from this one", DIM))
        lines.append(Text(f"    rowmill build {_format_arguments(project)} {only}", "cyan"))
    lines.append(Text("  to let builds make it again", DIM))
    key = format_key(step.key)
    lines.append(Text(f"    rowmill use {_format_arguments(project)} {key} --release", "cyan"))
    return Group(*lines)


def render_released_version(project: Project, step: Step, held: HeldVersion | None) -> RenderableType:
    """Show that a stage is no longer held, and what makes its newest version current."""
    key = format_key(step.key)
    if held is None:
        return Text(f"{key} is not held at a version; nothing to release")
    lines = [
        Text(f"{key} is released; it stays at version {held.version} until the next build, which goes forward"),
        Text(f"    rowmill build {_format_arguments(project)}", "cyan"),
    ]
    return Group(*lines)


def _render_next_commands(project: Project) -> list[RenderableType]:
    name = _format_arguments(project)
    built = load_current(project, None, gpu_partitions.STAGE) is not None
    pairs = [
        (f"rowmill inspect {name} -n 2", "show rows as the model sees them, trained tokens marked"),
        (f"rowmill stats {name}", "show lengths, and the effect of another seq_len"),
        (f'rowmill sql "{REJECTS_QUERY}" {name}', "count rejects by reason"),
        ("rowmill ui", "open this in Dagster, on http://127.0.0.1:3000"),
    ]
    if not built:
        pairs.insert(0, (f"rowmill build {name}", "build the remaining stages"))
    lines = [Text.assemble((f"  {why}\n", DIM), (f"    {command}", "cyan")) for command, why in pairs]
    return [Text("\nnext", HEAD), *lines]
