"""A recipe's current build as text for a terminal: its summary on one screen, its statistics, and its exports."""

from collections import Counter
from collections.abc import Collection, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from rowmill.build.gate import HeldVersion, find_held_version
from rowmill.build.steps import Project, Step, find_downstream_steps
from rowmill.checks.judge import CheckResult, run_checks
from rowmill.core.arrays import format_count, format_percent, format_size, join_facts
from rowmill.core.console import DIM, GOOD, HEAD, LOOK, label_value, make_grid, render_text
from rowmill.core.stage_names import CANONICAL_ROWS, GPU_PARTITIONS, PACKED_SHARDS, TOKENIZED_EXAMPLES, TRUNCATION_STATS
from rowmill.reports import plots
from rowmill.reports.build_view import SUMMARY_COLUMNS, BuildView, describe_changes, load_build_view
from rowmill.reports.console import format_key, render_check_result, render_manifest_table, render_title
from rowmill.schema.example_counts import ExampleCounts, RowExampleCounts, TemplateCounts
from rowmill.schema.length_counts import LengthCounts
from rowmill.schema.manifest import Manifest, StageKey, get_stage_folder
from rowmill.schema.rank_counts import RankCounts
from rowmill.schema.row_counts import MessageCounts, RowCounts
from rowmill.schema.rows import NORMALIZATION_COLUMNS
from rowmill.schema.shard_counts import PackingCounts, SharedPrefixCounts
from rowmill.stages import exports
from rowmill.stages.packed_shards.stage import SHARED_TOKEN_BYTES
from rowmill.stats.views import describe_estimate

SHOWN_REASONS = 8
REJECTS_QUERY = "from rejects select reason, count(*) group by 1"


# ── Summary ────────────────────────────────────────────────────────────────────────────────────────


def summarize_recipe(project: Project, *, shown: Collection[StageKey] = ()) -> str:
    """Return a recipe's summary: rows in and out, tokens, fill, paths of the shards, failed checks, next commands.

    The failed checks of the stages in `shown`, which were printed before in full, are only named.
    """
    build = load_build_view(project)
    counts = build.dataset_counts.rows
    # A dataset may be named like a number, which would be set to the right.
    datasets = [(Text(str(name)), *cells) for name, *cells in counts]
    total = len(counts) - 1 if len(counts) > 1 else None
    arguments = _format_arguments(project)
    commands = [
        (f"rowmill inspect {arguments} -n 2", "show rows as the model sees them, trained tokens marked"),
        (f"rowmill view {arguments}", "look at the rows behind each number, in a browser"),
        (f"rowmill stats {arguments}", "show lengths, and the effect of another seq_len"),
        (f'rowmill sql "{REJECTS_QUERY}" {arguments}', "count rejects by reason"),
        ("rowmill ui", "open this in Dagster, on http://127.0.0.1:3000"),
    ]
    if build.find_output(None, GPU_PARTITIONS) is None:
        commands.insert(0, (f"rowmill build {arguments}", "build the remaining stages"))
    return render_text(
        Group(
            render_title(project, "current build"),
            Text(""),
            make_grid(SUMMARY_COLUMNS, datasets, marked=total),
            Text(""),
            *_render_facts(build),
            *_render_failed_checks(build, shown),
            Text("\nnext", HEAD),
            *(Text.assemble((f"  {why}\n", DIM), (f"    {command}", "cyan")) for command, why in commands),
        )
    )


def _render_facts(build: BuildView) -> Iterator[RenderableType]:
    """Yield what was left out, shared and changed, and where the shards, ranks and exports are."""
    project = build.project
    counts = Counter[str]()
    for name in project.recipe.datasets:
        for _, state, reason, count in build.list_left_out(name):
            counts[reason or state] += count
    most = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    if most:
        named = ", ".join(f"{count:,} {reason}" for reason, count in most[:SHOWN_REASONS])
        rest = sum(count for _, count in most[SHOWN_REASONS:])
        further = f", {rest:,} for {len(most) - SHOWN_REASONS} other reasons" if rest else ""
        yield label_value("left out", f"{named}{further}")
    packed = {
        name: output
        for name in project.recipe.datasets
        if (output := build.find_output(name, PACKED_SHARDS)) is not None
    }
    shared = sum(output.get_counts(SharedPrefixCounts).tokens_shared for output in packed.values())
    if shared:
        # What `packing.share_prefixes` saves over all datasets.
        stored = sum(output.get_counts(PackingCounts).tokens for output in packed.values())
        yield label_value(
            "shared",
            f"{shared:,} tokens, {format_size(SHARED_TOKEN_BYTES * shared)} before compression, are saved where "
            f"examples begin alike: {stored:,} are stored, {(stored + shared) / stored:.1f} × fewer",
        )
    if build.changes is not None:
        yield label_value("changed", "\n".join(describe_changes(build.changes)))
    if packed:
        shown = next(iter(packed)) if len(packed) == 1 else f"{{{','.join(packed)}}}"
        yield label_value("shards", project.store.path(f"{project.recipe.name}/{shown}/{PACKED_SHARDS}"))
    if training := build.describe_training():
        yield label_value("training", "\n".join(training))
    ranks = build.find_output(None, GPU_PARTITIONS)
    if ranks is not None:
        where = project.store.path(f"{get_stage_folder(ranks.key)}/current.json")
        counted = ranks.get_counts(RankCounts)
        counts = [format_count(counted.ranks, "rank"), format_count(counted.tokens, "token"), f"opened through {where}"]
        yield label_value("ranks", join_facts(counts))
    for step in build.steps:
        held_version = find_held_version(project.store, step.key)
        if held_version is not None:
            yield label_value("held", f"{format_key(held_version.key)}: {held_version.sentence}", LOOK)
    for export, output in build.find_exports():
        yield label_value("export", f"{export.name}: {project.store.path(exports.locate_export(output))}")


def find_failed_checks(build: BuildView) -> list[CheckResult]:
    """Judge every check on the current versions that was not yet, and return those that fail."""
    built = [(step, build.made[step.key]) for step in build.steps]
    return [
        result
        for step, output in built
        if output is not None
        for result in run_checks(build.project.store, output, step.thresholds)
        if result.failed
    ]


def _render_failed_checks(build: BuildView, shown: Collection[StageKey]) -> Iterator[RenderableType]:
    failed = find_failed_checks(build)
    above, below = (
        [result for result in failed if result.key in shown],
        [result for result in failed if result.key not in shown],
    )
    if not failed:
        yield label_value("checks", "every applicable check passed", GOOD)
    if above:
        count = format_count(len(above), "failed check" if any(result.blocking for result in above) else "warning")
        names = ", ".join(f"{format_key(result.key)} {result.check} {result.shown}" for result in above)
        yield label_value("checks", f"{count}, shown above: {names}", LOOK)
    if below:
        yield Text("")
    for result in below:
        yield Text(f"  {format_key(result.key)}", DIM)
        yield render_check_result(build.project, result, indent=4)


def _format_arguments(project: Project) -> str:
    """Return a command's arguments for the recipe and its storage root."""
    name, root = project.recipe.name, project.store.root
    return name if root == str(project.base / ".rowmill") else f"{name} --root {root}"


# ── Exports and held versions ──────────────────────────────────────────────────────────────────────


def render_export_pointers(project: Project, names: Collection[str], copied_to: str | None = None) -> RenderableType:
    """Show the path of each export, or of its copy, and the lines that load it in its trainer."""
    lines: list[RenderableType] = []
    for export, output in load_build_view(project).find_exports(names):
        head = Text.assemble(
            (f"\n{export.name}", HEAD), (f"  {export.kind_name}, label convention {export.label_convention}", DIM)
        )
        at = copied_to or project.store.path(exports.locate_export(output))
        lines += [head, Text(f"  {at}")]
        lines += [
            Text(f"    {line}", "cyan") for line in exports.format_trainer_pointer(export, output, at).splitlines()
        ]
    return Group(*lines)


def render_used_version(project: Project, step: Step, version: str) -> RenderableType:
    """Show the version at which a stage is held now, and how to rebuild the stages after it."""
    lines = [Text(f"{format_key(step.key)} is held at version {version}; builds keep it, nightly ones too")]
    labels = dict.fromkeys(later.label for later in find_downstream_steps(project, step.key) if not later.on_demand)
    if labels:
        only = " ".join(f"--only {label}" for label in labels)
        lines.append(Text("  the stages after it were built from another version; rebuild them from this one", DIM))
        lines.append(Text(f"    rowmill build {_format_arguments(project)} {only}", "cyan"))
    lines.append(Text("  to let builds make it again", DIM))
    lines.append(Text(f"    rowmill use {_format_arguments(project)} {format_key(step.key)} --release", "cyan"))
    return Group(*lines)


def render_released_version(project: Project, step: Step, held_version: HeldVersion | None) -> RenderableType:
    """Show that a stage is no longer held, and what makes its newest version current."""
    key = format_key(step.key)
    if held_version is None:
        return Text(f"{key} is not held at a version; nothing to release")
    return Group(
        Text(f"{key} is released; it stays at version {held_version.version} until the next build, which goes forward"),
        Text(f"    rowmill build {_format_arguments(project)}", "cyan"),
    )


# ── Statistics ─────────────────────────────────────────────────────────────────────────────────────


LENGTH_BUCKETS = {
    "under_25": "under 25 %",
    "25_to_50": "25 to 50",
    "50_to_75": "50 to 75",
    "75_to_100": "75 to 100",
    "at_max": "at max",
}
TRUNCATION_COLUMNS = ("stage", "examples", "", "messages", "tokens", "trained of them")
WHAT_IF_COLUMNS = ("limit", "examples over", "", "trained tokens lost", "sequences")
WHAT_IF_TABLE_COLUMNS = ("limit", "examples", "records over", "", "trained tokens lost", "sequences")
EXAMPLE_TABLES = {
    "dropped": "text of rows that the template did not print",
    "loss_weights": "trained tokens by loss weight",
}
"""Tables of examples that `rowmill stats` shows, with their headings."""


def render_statistics(build: BuildView) -> RenderableType:
    """Show each dataset's lengths, truncation, rejects, dropped text and the effect of other limits."""
    return Group(*(line for name in build.project.recipe.datasets for line in _render_dataset(build, name)))


def _render_dataset(build: BuildView, name: str) -> Iterator[RenderableType]:
    rows = build.find_counts(name, CANONICAL_ROWS, RowCounts)
    messages = build.find_counts(name, CANONICAL_ROWS, MessageCounts)
    examples = build.find_counts(name, TOKENIZED_EXAMPLES, ExampleCounts)
    template = build.find_counts(name, TOKENIZED_EXAMPLES, TemplateCounts)
    of_rows = build.find_counts(name, TOKENIZED_EXAMPLES, RowExampleCounts)
    counts = "not built"
    if rows is not None:
        example_text = "not tokenized" if examples is None else format_count(examples.examples, "example")
        counts = f"{format_count(rows.records, 'record')} → {format_count(rows.kept, 'row')} → {example_text}"
    yield Text(f"\n{name}", HEAD).append(f"  {counts}", DIM)
    if messages is not None:
        noted = [
            (column.replace("_", " "), count)
            for column in NORMALIZATION_COLUMNS
            if (count := getattr(messages, column))
        ]
        noted += [(f"{column.replace('_', ' ')} (counted)", count) for column, count in messages.notes.items()]
        if noted:
            yield from (_render_label("noted in the rows"), make_grid(["", "times"], noted, indent=4))
    if template is not None and template.rows_with_tools:
        # Every example of a row repeats its tool schemas, and truncation never removes them.
        count, tokens = template.rows_with_tools, template.tool_tokens
        cost = f"{tokens:,} tokens, {tokens // count:,} per row, at most {template.most_tool_tokens:,}"
        yield from (_render_label("tool schemas"), Text(f"    {format_count(count, 'row')}, {cost}"))
    if of_rows is not None and of_rows.untrained_boundary_tokens:
        held = format_count(of_rows.untrained_boundary_tokens, "token")
        what = "with trained text and text of another message: untrained"
        yield from (_render_label("tokens across messages"), Text(f"    {held} {what}"))
    lengths = build.find_output(name, TRUNCATION_STATS)
    if lengths is not None:
        yield from _render_lengths(lengths)
    yield from (Text(f"\n  ! {hint}", LOOK) for hint in build.list_hints(name))
    left_out = [(stage, reason or state, count) for stage, state, reason, count in build.list_left_out(name)]
    if left_out:
        yield from (_render_label("left out"), make_grid(["stage", "reason", "rows"], left_out, indent=4))
    output = build.find_output(name, TOKENIZED_EXAMPLES)
    for table, label in EXAMPLE_TABLES.items():
        if output is not None and table in output.tables and output.tables[table].rows:
            yield from (_render_label(label), render_manifest_table(output.tables[table], indent=4))


def _render_label(label: str) -> Text:
    return Text(f"\n  {label}", "cyan")


def _render_lengths(output: Manifest) -> Iterator[RenderableType]:
    counted = output.get_counts(LengthCounts)
    total = sum(counted.buckets.values())
    counts = [counted.buckets[name] for name in LENGTH_BUCKETS]
    yield _render_label(f"{output.histograms['lengths'].title} in tokens")
    yield Text("    " + "   ".join(f"{name} {value:,}" for name, value in counted.quantiles.items()))
    for line in plots.draw_histogram_text(output.histograms["lengths"], width=72, lines=12).splitlines()[1:]:
        yield Text(f"    {line}", DIM if line.startswith("──") else "")
    yield _render_label(f"length as a share of the limit of {counted.limit:,}")
    shares = [format_percent(count, total) for count in counts]
    yield make_grid(list(LENGTH_BUCKETS.values()), [counts, shares], indent=4)
    if "stages" in output.tables:
        removed = [
            (stage, touched, format_percent(touched, total), messages, tokens, trained)
            for stage, touched, messages, tokens, trained in output.tables["stages"].rows
        ]
        yield from (_render_label("what truncation removed"), make_grid(TRUNCATION_COLUMNS, removed, indent=4))
    if counted.dropped_for_length:
        yield Text(f"    dropped for length: {format_count(counted.dropped_for_length, 'row')}")
    table = output.tables["what_if"]
    is_planned = "examples" in table.columns
    # A plan makes different examples at each limit, so records are counted instead.
    whole, place = (counted.measured_rows, 2) if is_planned else (counted.examples, 1)
    lines = [(*row[: place + 1], format_percent(row[place], whole), *row[place + 1 :]) for row in table.rows]
    marked = next((i for i, row in enumerate(lines) if row[0] == counted.limit), None)
    yield _render_label("effect of other limits" + ("" if is_planned else " (estimated)"))
    yield make_grid(WHAT_IF_TABLE_COLUMNS if is_planned else WHAT_IF_COLUMNS, lines, indent=4, marked=marked)
    yield Padding(Text(describe_estimate("what_if", table) or "", DIM), (0, 0, 0, 4), expand=False)
