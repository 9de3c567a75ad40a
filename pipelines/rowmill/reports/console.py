"""Reports and manifests as text for a terminal: calm, aligned, coloured where there is someone to see it.

What belongs here: wording what the engine returns. What does not: computing a number that is not in a report
already, layout (`core/console.py`), the live line of a running build (`progress.py`), single rows
(`row_view.py`).
"""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from rowmill import stats
from rowmill.build.gc import CollectedGarbage
from rowmill.build.plan import StepForecast
from rowmill.build.runner import StepReport
from rowmill.build.steps import Project, Step, find_downstream_steps, plan_steps
from rowmill.checks.judge import CheckResult, run_checks
from rowmill.core.console import (
    BAD,
    DIM,
    GOOD,
    HEAD,
    LOOK,
    escape_control_characters,
    format_value,
    join_side_by_side,
    label_value,
    make_grid,
    render_text,
)
from rowmill.core.number_text import NO_NUMBER, format_count, format_percent, format_seconds, format_size, join_facts
from rowmill.exports import Export
from rowmill.inspection.diff import NumberComparison, ScopeComparison
from rowmill.inspection.generated_output import ParsedFiles
from rowmill.inspection.verify import StageVerification
from rowmill.reports import plots
from rowmill.schema import manifest
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import EXPORTS, DisplayTable, Manifest, get_stage_folder
from rowmill.schema.rows import NORMALIZATION_COLUMNS
from rowmill.stages import catalog, exports, gpu_partitions
from rowmill.stages.base import StageDeclaration
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.packed_shards import stage as packed_shards
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.stages.training_splits import stage as training_splits
from rowmill.stages.truncation_stats import stage as truncation_stats


def format_key(key: Sequence[str]) -> str:
    """Name a stage within its recipe: `chats/canonical_rows`."""
    return "/".join(key[1:])


def render_manifest_table(table: DisplayTable, *, indent: int = 2) -> RenderableType:
    """Show a manifest's table."""
    return make_grid([name.replace("_", " ") for name in table.columns], list(table.rows), indent=indent)


# ── plan ───────────────────────────────────────────────────────────────────────────────────────────


_ACTION_MARKS = {"reuse": ("=", DIM), "make": ("+", GOOD), "make if changed": ("~", LOOK), "on request": ("·", DIM)}


def render_plan(project: Project, forecasts: Sequence[StepForecast]) -> RenderableType:
    """Show what a build would do, dataset by dataset."""
    wide = max(len(one.action) for one in forecasts)
    lines: list[RenderableType] = [_render_title(project, _count_actions(forecasts))]
    for scope, own in groupby(forecasts, key=lambda one: one.step.dataset):
        lines.append(_render_scope(project, scope))
        for one in own:
            mark, style = _ACTION_MARKS[one.action]
            line = Text.assemble(
                (f"  {mark} ", style), (f"{one.step.label:<20}", ""), (f"{one.action:<{wide}}  ", style)
            )
            lines.append(line.append(escape_control_characters(one.why), DIM))
    return Group(*lines)


def _count_actions(forecasts: Sequence[StepForecast]) -> str:
    names = {
        "reuse": "reused",
        "make": "to make",
        "make if changed": "to make if what they read changes",
        "on request": "on request",
    }
    counts = {action: sum(one.action == action for one in forecasts) for action in names}
    return join_facts(f"{count} {names[action]}" for action, count in counts.items() if count)


def _render_title(project: Project, rest: str) -> Text:
    return Text.assemble((project.recipe.name, HEAD), "  ", (f"{rest} · {project.store.path('')}", DIM))


def _render_scope(project: Project, dataset: str | None) -> Text:
    return Text(f"\n{dataset or 'all datasets'}", HEAD)


# ── after training ─────────────────────────────────────────────────────────────────────────────────


def render_outdated_builds(names: Sequence[str]) -> RenderableType:
    """Warn that a model was trained on other options than those of the recipe, which are left alone until a build."""
    words = "was built with other options than the recipe has now; what a model was trained on is that build's to say"
    return Group(*(Text(f"! {name} {words}; run `rowmill build` to change it", LOOK) for name in names))


def render_generated(made: Sequence[Manifest]) -> RenderableType:
    """Show what generated texts came to: classes, and how each series went."""
    lines: list[RenderableType] = []
    for one in made:
        for name in ("classes", "series"):
            if name in one.tables and one.tables[name].rows:
                lines += [Text(f"\n{format_key(one.key)}", HEAD), render_manifest_table(one.tables[name])]
    return Group(*lines)


def render_parsed_files(parsed: ParsedFiles) -> RenderableType:
    """Show what files hold that were parsed off the road."""
    report = parsed.report
    told = join_facts(
        [
            format_count(parsed.texts, "text"),
            format_count(report.valid, "record"),
            f"{format_percent(report.valid_fraction)} valid" if report.valid + report.invalid else "",
            f"{parsed.unreadable:,} without a text" if parsed.unreadable else "",
        ]
    )
    return Group(Text(told, HEAD), render_manifest_table(parsed.table))


# ── build ──────────────────────────────────────────────────────────────────────────────────────────


def render_build_title(project: Project, steps: Sequence[Step]) -> RenderableType:
    """Show the head of a build."""
    sets = format_count(len(project.recipe.datasets), "dataset")
    return _render_title(project, join_facts([sets, format_count(len(steps), "step")]))


def render_scope_title(project: Project, step: Step) -> RenderableType:
    """Show the head of a dataset's steps."""
    return _render_scope(project, step.dataset)


def render_step(step: Step, report: StepReport, results: Sequence[CheckResult]) -> RenderableType:
    """Show one finished step: how long it took, what came out, and the checks that failed."""
    mark, style = choose_result_mark(results)
    time = "reused" if report.reused else format_seconds(report.seconds)
    line = Text.assemble((f"  {mark} ", style), f"{step.label:<20}", (f"{time:>9}  ", DIM))
    line.append(join_facts([summarize_output(report.manifest), _format_reuse(report)]), DIM if report.reused else "")
    return Group(line, *(render_check_result(one, indent=4) for one in results if one.failed))


def choose_result_mark(results: Iterable[CheckResult]) -> tuple[str, str]:
    """Return a mark and its colour for some results: the worst of them counts."""
    failed = [one for one in results if one.failed]
    if any(one.blocking for one in failed):
        return "✗", BAD
    return ("!", LOOK) if failed else ("✓", GOOD)


def _format_reuse(report: StepReport) -> str:
    if report.reused or not report.parts_reused:
        return ""
    return f"{report.parts_reused} of {report.parts} parts reused, {format_count(report.rows_made, 'row')} read"


def summarize_output(made: Manifest) -> str:
    """Say in one line what a stage's output holds."""
    held = catalog.count_output_rows(made)
    rows = format_count(held.count, held.noun) if held else ""
    return join_facts(catalog.find_stage(made.stage).summarize(made.facts, rows))


# ── check results ───────────────────────────────────────────────────────────────────────────────────────


def render_check_result(one: CheckResult, *, indent: int = 2) -> RenderableType:
    """Show one check result; a failed one with what to do and rows to look at."""
    if one.outcome == "not_applicable":
        line = Text(f"{NO_NUMBER} {one.check:<18}{'not applicable':>16}  applies to {one.applies_to}", DIM)
        return Padding(line, (0, 0, 0, indent), expand=False)
    mark, style = choose_result_mark([one])
    shown = "not measured" if one.value is None else format_value(one.value)
    value = Text.assemble((f"{mark} ", style), f"{one.check:<18}", (f"{shown:>10}", "" if one.passed else style))
    line = join_side_by_side(value, Text(f"{one.wanted}  {one.what}", DIM))
    lines: list[RenderableType] = [line]
    if not one.passed and one.waiver and not one.blocking:
        lines.append(Text(f"  waived: {escape_control_characters(one.waiver)}", DIM))
    elif not one.passed:
        lines.append(Text(f"  → {one.remedy}", style))
    if not one.passed and one.samples:
        lines.append(Text(f"  look at {escape_control_characters(', '.join(one.samples[:3]))}", DIM))
    return Padding(Group(*lines), (0, 0, 0, indent), expand=False)


def render_verification(
    project: Project, checked: Sequence[StageVerification], *, facts: bool, deep: bool
) -> RenderableType:
    """Show the check results of every stage, and what a deep reading found."""
    lines: list[RenderableType] = [_render_title(project, _count_results(checked))]
    for one in checked:
        lines.append(_render_stage_head(one))
        lines += [render_check_result(result) for result in one.results]
        lines += [Text(f"  ✗ {escape_control_characters(line)}", BAD) for line in one.damage]
        if deep and one.files and not one.damage:
            said = (
                f"  ✓ {format_count(one.files, 'file')}, {format_size(one.size_bytes)} read again: every digest holds"
            )
            lines.append(Text.assemble((said[:4], GOOD), said[4:]))
        if facts and one.manifest is not None:
            lines.append(make_grid(["fact", "value"], _list_facts(one.manifest), indent=4))
    return Group(*lines)


def render_discarded(project: Project, lines: Sequence[str] | None) -> RenderableType:
    """Say what was taken away because of damage, or how to; null where nothing was."""
    name = project.recipe.name
    if lines is None:
        return Text(f"\n→ rowmill verify {name} --deep --discard   removes the damage, and what was made of it", LOOK)
    shown = [Text(f"  {escape_control_characters(line)}", DIM) for line in lines]
    return Group(Text("\ndamaged files removed", LOOK), *shown, Text(f"→ rowmill build {name}   makes them again"))


def _list_facts(made: Manifest) -> list[tuple[object, ...]]:
    """List a stage's facts; only numbers can be named in `gates.expectations`, other facts are context."""
    return [(name, value) for name, value in made.facts.items() if isinstance(value, int | float)]


def _render_stage_head(one: StageVerification) -> Text:
    line = Text(f"\n{format_key(one.step.key)}", HEAD)
    if one.manifest is None:
        return line.append("  not built", LOOK)
    line.append(f"  version {one.manifest.version[:12]}", DIM)
    if one.manifest.code_version != one.step.code_version:
        line.append("  its options changed since: build again", LOOK)
    return line


def _count_results(checked: Sequence[StageVerification]) -> str:
    results = [result for one in checked for result in one.results]
    blocking = sum(result.blocking for result in results)
    waived = sum(bool(result.waiver) and result.failed for result in results)
    warned = sum(result.failed for result in results) - blocking - waived
    passed = sum(result.passed for result in results)
    damaged = sum(len(one.damage) for one in checked)
    counts = {"passed": passed, "to look at": warned, "waived": waived, "blocking": blocking, "damaged": damaged}
    counts["not applicable"] = sum(result.outcome == "not_applicable" for result in results)
    return join_facts(f"{count} {name}" for name, count in counts.items() if count or name == "passed")


# ── Answers of SQL, versions, what was collected ───────────────────────────────────────────────────


def render_query_rows(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> RenderableType:
    """Show a query's rows."""
    return Group(make_grid(columns, list(rows), indent=0), Text(f"\n{format_count(len(rows), 'row')}", DIM))


def render_versions(project: Project, kept: Sequence[Manifest], current: Manifest | None) -> RenderableType:
    """Show the kept versions of a stage, newest first."""
    now = current.version if current else ""
    rows = [
        (
            Text("●" if one.version == now else "", GOOD),
            one.version,
            Text(one.built_at[:19].replace("T", " "), DIM),
            Text(summarize_output(one)),
            Text("waived: " + escape_control_characters("; ".join(one.waivers)) if one.waivers else "", LOOK),
        )
        for one in reversed(kept)
    ]
    return make_grid(["", "version", "built (UTC)", "holds", ""], rows, indent=0)


def render_comparison(before: Manifest, after: Manifest, compared: Sequence[ScopeComparison]) -> RenderableType:
    """Show two versions side by side."""
    both = (("before", before), ("after ", after))
    lines: list[RenderableType] = [
        Text(f"{name}  {one.version}  {one.built_at[:19].replace('T', ' ')}", DIM) for name, one in both
    ]
    for one in compared:
        lines.append(Text(f"\n{one.scope or 'all datasets'}", HEAD))
        if one.added is not None:
            lines.append(Text(f"  rows by content: {one.added:,} added, {one.removed:,} removed"))
        rows = [
            (
                line.name,
                _format_compared_value(line, line.before),
                _format_compared_value(line, line.after),
                _format_change(line),
            )
            for line in one.lines
        ]
        lines.append(make_grid(["", "before", "after", "change"], rows, indent=2))
    return Group(*lines)


def _format_compared_value(line: NumberComparison, value: float | None) -> object:
    return NO_NUMBER if value is None else format_percent(value) if line.is_share else value


def _format_change(line: NumberComparison) -> str:
    if line.before is None or line.after is None or line.before == line.after:
        return ""
    change = line.after - line.before
    return f"{100 * change:+.2f} points" if line.is_share else f"{change:+,.6g}"


def render_collected(found: CollectedGarbage, *, dry_run: bool) -> RenderableType:
    """Show what was removed, or would be, stage by stage."""
    if not found.items:
        return Text("nothing to remove", DIM)
    rows: list[Sequence[object]] = []
    for key in dict.fromkeys(item.key for item in found.items):
        own = [item for item in found.items if item.key == key]
        kinds = Counter(item.kind for item in own)
        named = join_facts(format_count(count, kind, ITEM_PLURALS.get(kind, "")) for kind, count in kinds.items())
        rows.append((format_key(key), named, format_size(sum(item.size_bytes for item in own))))
    total = format_size(sum(item.size_bytes for item in found.items))
    return Group(make_grid(["", "would remove" if dry_run else "removed", total], rows, indent=0))


ITEM_PLURALS = {"staged copy": "staged copies"}


# ── Statistics ─────────────────────────────────────────────────────────────────────────────────────


def render_statistics(project: Project) -> RenderableType:
    """Show each dataset's lengths, what truncation took, rejects, dropped kinds and what other limits would do."""
    return Group(*(_render_dataset_statistics(project, name) for name in project.recipe.datasets))


def list_hints(project: Project) -> list[str]:
    """Return the advice of all datasets, each with its dataset's name."""
    found: list[str] = []
    for name in project.recipe.datasets:
        made = _load_current(project, name, truncation_stats.STAGE)
        found += [f"{name}: {hint}" for hint in (made.facts["hints"] if made else [])]
    return found


def _load_current(project: Project, dataset: str | None, stage: StageDeclaration) -> Manifest | None:
    key = (project.recipe.name, *(() if dataset is None else (dataset,)), stage.name)
    return manifest.load_current(project.store, key)


def _render_dataset_statistics(project: Project, name: str) -> RenderableType:
    rows, examples = (
        _load_current(project, name, canonical_rows.STAGE),
        _load_current(project, name, tokenized_examples.STAGE),
    )
    lengths = _load_current(project, name, truncation_stats.STAGE)
    lines: list[RenderableType] = [Text(f"\n{name}", HEAD).append(f"  {_format_row_counts(rows, examples)}", DIM)]
    if rows is not None:
        lines += _render_notices(rows)
    if examples is not None and examples.facts["rows_with_tools"]:
        lines += _render_tools(examples.facts)
    if lengths is not None:
        lines += _render_lengths(lengths)
    lines += _render_rejects(rows, examples)
    dropped = examples.tables.get("dropped") if examples is not None else None
    if dropped is not None and dropped.rows:
        lines += [_render_label("own text that the template did not print"), render_manifest_table(dropped, indent=4)]
    weights = examples.tables.get("loss_weights") if examples is not None else None
    if weights is not None:
        lines += [_render_label("trained tokens by loss weight"), render_manifest_table(weights, indent=4)]
    return Group(*lines)


def _format_row_counts(rows: Manifest | None, examples: Manifest | None) -> str:
    if rows is None:
        return "not built"
    made = format_count(examples.facts["examples"], "example") if examples is not None else "not tokenized"
    return f"{format_count(rows.facts['records'], 'record')} → {format_count(rows.facts['kept'], 'row')} → {made}"


def _render_notices(rows: Manifest) -> list[RenderableType]:
    """Show what canonicalisation noticed in the rows that it kept."""
    found = [(name.replace("_", " "), count) for name in NORMALIZATION_COLUMNS if (count := rows.facts.get(name))]
    found += [(f"{name.replace('_', ' ')} (counted)", count) for name, count in rows.facts["notes"].items()]
    return [_render_label("noticed in the rows"), make_grid(["", "times"], found, indent=4)] if found else []


def _render_tools(facts: Mapping[str, Any]) -> list[RenderableType]:
    """Show what tool schemas cost: they stand in every example of a row, and truncation never takes them."""
    rows, tokens = int(facts["rows_with_tools"]), int(facts["tool_tokens"])
    words = (
        f"{format_count(rows, 'row')}, {tokens:,} tokens, {tokens // rows:,} a row, at most "
        f"{facts['most_tool_tokens']:,}"
    )
    return [_render_label("tool schemas"), Text(f"    {words}")]


def _render_label(words: str) -> Text:
    return Text(f"\n  {words}", "cyan")


LENGTH_BUCKETS = {
    "under_25": "under 25 %",
    "25_to_50": "25 to 50",
    "50_to_75": "50 to 75",
    "75_to_100": "75 to 100",
    "at_max": "at max",
}


TRUNCATION_COLUMNS = ("stage", "examples", "", "messages", "tokens", "trained of them")


def _render_lengths(made: Manifest) -> list[RenderableType]:
    facts, limit = made.facts, int(made.facts["limit"])
    quantiles = "   ".join(f"{name} {value:,}" for name, value in facts["quantiles"].items())
    total = sum(facts["buckets"].values())
    counts = [facts["buckets"][name] for name in LENGTH_BUCKETS]
    buckets = make_grid(
        list(LENGTH_BUCKETS.values()), [counts, [format_percent(count, total) for count in counts]], indent=4
    )
    drawn = plots.draw_histogram_text(made.histograms["lengths"], width=72, lines=12).splitlines()
    lines: list[RenderableType] = [
        _render_label(f"{made.histograms['lengths'].title} in tokens"), Text(f"    {quantiles}"),
        *(Text(f"    {line}", DIM if line.startswith("──") else "") for line in drawn[1:]),
        _render_label(f"length as a share of max_length {limit:,}"), buckets,
    ]  # fmt: skip
    if "stages" in made.tables:
        taken = [
            (stage, touched, format_percent(touched, total), messages, tokens, trained)
            for stage, touched, messages, tokens, trained in made.tables["stages"].rows
        ]
        lines += [_render_label("what truncation took"), make_grid(TRUNCATION_COLUMNS, taken, indent=4)]
    if facts["dropped_for_length"]:
        lines.append(Text(f"    dropped for their length: {format_count(facts['dropped_for_length'], 'row')}"))
    return [*lines, *_render_what_if(made), *(Text(f"\n  ! {hint}", LOOK) for hint in facts["hints"])]


def _render_what_if(made: Manifest) -> list[RenderableType]:
    """Show what other limits would do, and how it is known: estimated, or planned anew."""
    table, limit = made.tables["what_if"], int(made.facts["limit"])
    is_planned = "examples" in table.columns
    headings = WHAT_IF_TABLE_COLUMNS if is_planned else WHAT_IF_COLUMNS
    # A plan has other examples at each length, so what is over are records.
    total, place = (made.facts["records"], 2) if is_planned else (made.facts["examples"], 1)
    lines = [(*row[: place + 1], format_percent(row[place], total), *row[place + 1 :]) for row in table.rows]
    marked = next((i for i, row in enumerate(lines) if row[0] == limit), None)
    return [
        _render_label("what another limit would do" + ("" if is_planned else " (estimated)")),
        make_grid(list(headings), lines, indent=4, marked=marked),
        Padding(Text(stats.describe_estimate("what_if", table) or "", DIM), (0, 0, 0, 4), expand=False),
    ]


WHAT_IF_COLUMNS = ("limit", "examples over", "", "trained tokens lost", "sequences")
WHAT_IF_TABLE_COLUMNS = ("limit", "examples", "records over", "", "trained tokens lost", "sequences")


def _render_rejects(rows: Manifest | None, examples: Manifest | None) -> list[RenderableType]:
    lines = [
        (made.stage, reason or state, count)
        for made in (rows, examples)
        if made is not None
        for state, reason, count in sorted(made.ledger, key=lambda line: -line[2])
        if state != KEPT
    ]
    return [_render_label("left out"), make_grid(["stage", "reason", "rows"], lines, indent=4)] if lines else []


# ── The short report ───────────────────────────────────────────────────────────────────────────────


def summarize_recipe(project: Project) -> str:
    """Return the short report of a recipe: rows in and out, tokens, fill, where the shards are, what to do next."""
    return render_text(Group(*_render_summary(project)))


def _render_summary(project: Project) -> list[RenderableType]:
    datasets: list[tuple[object, ...]] = [
        (Text(name), *list_summary_cells(project, name)[1:]) for name in project.recipe.datasets
    ]
    if len(datasets) > 1:
        datasets.append(_total_summary_cells(project))
    last = len(datasets) - 1 if len(datasets) > 1 else None
    lines: list[RenderableType] = [
        _render_title(project, "what was built"),
        Text(""),
        make_grid(SUMMARY_COLUMNS, datasets, marked=last),
    ]
    lines += _render_summary_rejects(project)
    lines += _render_summary_places(project)
    lines += _render_failed_checks(project)
    lines += _render_next_commands(project)
    return lines


SUMMARY_COLUMNS = ("dataset", "records", "rows", "rejected", "examples", "tokens", "trained", "sequences", "fill")


def list_summary_cells(project: Project, name: str) -> tuple[object, ...]:
    """Return a dataset's line of the summary, in the order of `SUMMARY_COLUMNS`."""
    rows, examples = (
        _load_current(project, name, canonical_rows.STAGE),
        _load_current(project, name, tokenized_examples.STAGE),
    )
    packed = _load_current(project, name, packed_shards.STAGE)
    of_rows = {} if rows is None else rows.facts
    of_examples = {} if examples is None else examples.facts
    of_shards = {} if packed is None else packed.facts
    rejected = of_rows.get("rejected", 0) + of_examples.get("rejected", 0)
    return (
        name,
        of_rows.get("records"),
        of_rows.get("kept"),
        rejected,
        of_examples.get("examples"),
        of_examples.get("tokens"),
        _format_share(of_examples.get("trained_share")),
        of_shards.get("sequences"),
        _format_share(of_shards.get("fill")),
    )


def _total_summary_cells(project: Project) -> tuple[object, ...]:
    """Add up the datasets; shares are those of all tokens and of all sequences' room."""

    def built(stage: StageDeclaration) -> list[Manifest]:
        found = (_load_current(project, name, stage) for name in project.recipe.datasets)
        return [one for one in found if one is not None]

    def total(made: Sequence[Manifest], fact: str) -> int:
        return sum(int(one.facts[fact]) for one in made)

    rows, examples, packed = (built(one.STAGE) for one in (canonical_rows, tokenized_examples, packed_shards))
    tokens, sequences = total(examples, "tokens"), total(packed, "sequences")
    return (
        Text("all"),
        total(rows, "records"),
        total(rows, "kept"),
        total(rows, "rejected") + total(examples, "rejected"),
        total(examples, "examples"),
        tokens,
        format_percent(total(examples, "trained_tokens"), tokens),
        sequences,
        format_percent(total(packed, "tokens"), sequences * project.recipe.seq_len),
    )


def _format_share(share: float | None) -> str:
    return NO_NUMBER if share is None else format_percent(share)


def _render_summary_rejects(project: Project) -> list[RenderableType]:
    counts: dict[str, int] = {}
    for name in project.recipe.datasets:
        for stage in (canonical_rows.STAGE, tokenized_examples.STAGE):
            made = _load_current(project, name, stage)
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
    packed = [name for name in project.recipe.datasets if _load_current(project, name, packed_shards.STAGE) is not None]
    splits, ranks = (
        _load_current(project, None, training_splits.STAGE),
        _load_current(project, None, gpu_partitions.STAGE),
    )
    lines: list[RenderableType] = []
    if packed:
        shown = packed[0] if len(packed) == 1 else f"{{{','.join(packed)}}}"
        lines.append(
            label_value("shards", project.store.path(f"{project.recipe.name}/{shown}/{packed_shards.STAGE.name}"))
        )
    if splits is not None:
        lines.append(
            label_value(
                "order",
                join_facts(
                    [format_count(splits.facts["places"], "place"), format_count(splits.facts["steps"], "step")]
                ),
            )
        )
    if ranks is not None:
        where = project.store.path(f"{get_stage_folder(ranks.key)}/current.json")
        held = join_facts(
            [
                format_count(ranks.facts["ranks"], "rank"),
                format_count(ranks.facts["tokens"], "token"),
                f"opened through {where}",
            ]
        )
        lines.append(label_value("ranks", held))
    lines += [
        label_value("export", f"{export.name}: {project.store.path(exports.locate_export(made))}")
        for export, made in find_built_exports(project)
    ]
    return lines


# ── export ─────────────────────────────────────────────────────────────────────────────────────────


def find_built_exports(project: Project, names: Collection[str] = ()) -> list[tuple[Export, Manifest]]:
    """Return the exports of a recipe that are built, or those of them that are named."""
    name = project.recipe.name
    found = [
        (one, manifest.load_current(project.store, (name, EXPORTS, one.name)))
        for one in project.recipe.exports
        if not names or one.name in names
    ]
    return [(export, made) for export, made in found if made is not None]


def render_export_pointers(project: Project, names: Collection[str], copied_to: str | None = None) -> RenderableType:
    """Show where exports lie, or the copy of one, and the lines that point their trainer at them."""
    lines: list[RenderableType] = []
    for export, made in find_built_exports(project, names):
        head = Text.assemble(
            (f"\n{export.name}", HEAD), (f"  {export.kind_name}, letter {export.label_convention}", DIM)
        )
        at = copied_to or project.store.path(exports.locate_export(made))
        lines += [head, Text(f"  {at}")]
        lines += [Text(f"    {line}", "cyan") for line in exports.format_trainer_pointer(export, made, at).splitlines()]
    return Group(*lines)


def find_failed_checks(project: Project) -> list[CheckResult]:
    """Return the checks that failed on the current versions, as far as they were judged."""
    found: list[CheckResult] = []
    for step in plan_steps(project):
        made = manifest.load_current(project.store, step.key)
        if made is not None:
            found += [one for one in run_checks(project.store, made, step.thresholds) if one.failed]
    return found


def _render_failed_checks(project: Project) -> list[RenderableType]:
    failed = find_failed_checks(project)
    if not failed:
        return [label_value("checks", "all that apply passed", GOOD)]
    lines: list[RenderableType] = [Text("")]
    for one in failed:
        lines += [Text(f"  {format_key(one.key)}", DIM), render_check_result(one, indent=4)]
    return lines


REJECTS_QUERY = "from rejects select reason, count(*) group by 1"


def _find_command() -> str:
    """Return how the reader can call us: by name where that is on the path, else by the environment's own script."""
    beside = Path(sys.executable).parent / "rowmill"
    return "rowmill" if shutil.which("rowmill") or not beside.is_file() else os.path.relpath(beside)


def _format_arguments(project: Project) -> str:
    """Return how a command names the recipe and its storage."""
    name, root = project.recipe.name, project.store.root
    return name if root == str(project.base / ".rowmill") else f"{name} --root {root}"


def render_used_version(project: Project, step: Step, version: str) -> RenderableType:
    """Say that a stage is at a kept version, and what becomes of the stages after it."""
    lines = [Text(f"{format_key(step.key)} is at version {version}")]
    labels = dict.fromkeys(one.label for one in find_downstream_steps(project, step.key) if not one.on_demand)
    if labels:
        only = " ".join(f"--only {label}" for label in labels)
        lines.append(Text("  what follows was made of another version; make it of this one", DIM))
        lines.append(Text(f"    {_find_command()} build {_format_arguments(project)} {only}", "cyan"))
    lines.append(
        Text("  a build of everything, such as the nightly one, makes what the recipe says current again", LOOK)
    )
    return Group(*lines)


def _render_next_commands(project: Project) -> list[RenderableType]:
    name = _format_arguments(project)
    built = _load_current(project, None, gpu_partitions.STAGE) is not None
    rowmill = _find_command()
    pairs = [
        (f"{rowmill} inspect {name} -n 2", "rows as the model sees them, trained tokens marked"),
        (f"{rowmill} stats {name}", "lengths, and what another seq_len would do"),
        (f'{rowmill} sql "{REJECTS_QUERY}" {name}', "why rows were left out"),
        (f"{rowmill} ui", "the same in Dagster, on http://127.0.0.1:3000"),
    ]
    if not built:
        pairs.insert(0, (f"{rowmill} build {name}", "go on from what is there"))
    lines = [Text.assemble((f"  {why}\n", DIM), (f"    {command}", "cyan")) for command, why in pairs]
    return [Text("\nnext", HEAD), *lines]
