"""What commands print: text for a terminal, aligned and coloured, and with `--json` an object for programs."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from rowmill.checks.judge import format_recipe_argument
from rowmill.core.arrays import NO_NUMBER, format_count, format_percent, format_seconds, format_size, join_facts
from rowmill.core.console import BAD, DIM, GOOD, HEAD, LOOK, escape_control_characters, join_side_by_side, make_grid
from rowmill.core.stage_names import TRUNCATION_STATS
from rowmill.reports.links import ROW_ID, PageLinks
from rowmill.schema.counts import CountSet
from rowmill.stages import catalog

if TYPE_CHECKING:
    from rowmill.build.comparison import NumberComparison, ScopeComparison
    from rowmill.build.gc import GarbageItem
    from rowmill.build.preflight import Finding
    from rowmill.build.prepare import StepForecast
    from rowmill.build.runner import StepReport
    from rowmill.build.steps import Project, Step
    from rowmill.checks.judge import CheckResult
    from rowmill.inspection.generated_output import ParsedFiles
    from rowmill.inspection.inspect import DatasetTablePlan
    from rowmill.inspection.verify import StageVerification
    from rowmill.kinds.joint_rows import DatasetAdvice
    from rowmill.reports.build_view import BuildView
    from rowmill.schema.manifest import DisplayTable, Manifest


def format_key(key: Sequence[str]) -> str:
    """Return a stage's name within its recipe: `chats/canonical_rows`."""
    return "/".join(key[1:])


def render_manifest_table(table: "DisplayTable", *, indent: int = 2) -> RenderableType:
    """Show a manifest's table."""
    return make_grid([name.replace("_", " ") for name in table.columns], list(table.rows), indent=indent)


# ── plan ───────────────────────────────────────────────────────────────────────────────────────────


_ACTIONS = {
    "reuse": ("=", DIM, "reused"),
    "make": ("+", GOOD, "to make"),
    "make if changed": ("~", LOOK, "to make if their input changes"),
    "held": ("■", LOOK, "held"),
    "leave out": ("✗", BAD, "left out behind a failed check"),
    "on request": ("·", DIM, "on request"),
}
"""What a build does with a step: its mark, its colour, and what is said of their number."""


def render_plan(project: "Project", forecasts: "Sequence[StepForecast]") -> RenderableType:
    """Show what a build would do, dataset by dataset."""
    width = max(len(forecast.action) for forecast in forecasts)
    counts = Counter(forecast.action for forecast in forecasts)
    summary = join_facts(f"{counts[action]} {named}" for action, (_, _, named) in _ACTIONS.items() if counts[action])
    lines: list[RenderableType] = [render_title(project, summary)]
    for scope, group in groupby(forecasts, key=lambda planned: planned.step.dataset):
        lines.append(render_scope(scope))
        for planned in group:
            mark, style, _ = _ACTIONS[planned.action]
            line = Text.assemble(
                (f"  {mark} ", style), (f"{planned.step.label:<20}", ""), (f"{planned.action:<{width}}  ", style)
            )
            lines.append(line.append(escape_control_characters(planned.why), DIM))
    return Group(*lines)


def render_remarks(remarks: "Sequence[Finding]") -> RenderableType:
    """Show what a pre-flight noticed that stops no build."""
    marks = {True: ("!", LOOK), False: ("·", DIM)}
    lines = ((*marks[remark.is_warning], escape_control_characters(remark.text)) for remark in remarks)
    return Group(*(join_side_by_side(Text(mark, style), Text(text, style)) for mark, style, text in lines))


def render_scope(dataset: str | None) -> Text:
    """Return the heading of a dataset's steps, or of those of all datasets."""
    return Text(f"\n{dataset or 'all datasets'}", HEAD)


def render_title(project: "Project", rest: str) -> Text:
    """Return a title line: the recipe, a remark, and its storage root."""
    return Text.assemble((project.recipe.name, HEAD), "  ", (f"{rest} · {project.store.path('')}", DIM))


# ── after training ─────────────────────────────────────────────────────────────────────────────────


def render_outdated_builds(names: Sequence[str]) -> RenderableType:
    """Warn that the recipe changed after the model was trained; its outputs stay as they are until a build."""
    warning = "was built with other options than the recipe has now, and the model was trained on that build"
    return Group(*(Text(f"! {name} {warning}; run `rowmill build` to update it", LOOK) for name in names))


def render_generated(manifests: "Sequence[Manifest]") -> RenderableType:
    """Show the counts of generated text by class, the outcome of each series, and the requests that failed."""
    lines: list[RenderableType] = []
    for manifest in manifests:
        for name in ("classes", "series", "failed_requests"):
            if name in manifest.tables and manifest.tables[name].rows:
                lines += [Text(f"\n{format_key(manifest.key)}", HEAD), render_manifest_table(manifest.tables[name])]
    return Group(*lines)


def render_parsed_files(parsed: "ParsedFiles") -> RenderableType:
    """Show the counts of files that were parsed without storing anything."""
    report = parsed.report
    summary = join_facts(
        [
            format_count(parsed.texts, "text"),
            format_count(report.valid, "record"),
            f"{format_percent(report.valid_fraction)} valid" if report.valid + report.invalid else "",
            f"{parsed.unreadable:,} without a text" if parsed.unreadable else "",
        ]
    )
    return Group(Text(summary, HEAD), render_manifest_table(parsed.table))


# ── build ──────────────────────────────────────────────────────────────────────────────────────────


def render_step(
    project: "Project", step: "Step", report: "StepReport", results: "Sequence[CheckResult]"
) -> RenderableType:
    """Show one finished step: its duration, its output, and the checks that failed."""
    mark, style = choose_result_mark(results)
    time = "held" if report.held else "reused" if report.reused else format_seconds(report.seconds)
    line = Text.assemble((f"  {mark} ", style), f"{step.label:<20}", (f"{time:>9}  ", DIM))
    facts = [summarize_output(report.manifest)]
    if report.parts_reused and not report.reused:
        read = format_count(report.rows_made, "row")
        facts.append(f"{report.parts_reused} of {report.parts} parts reused, {read} read")
    line.append(join_facts(facts), DIM if report.reused else "")
    notes = [Text(f"    {report.held.sentence}", LOOK)] if report.held else []
    return Group(line, *notes, *(render_check_result(project, result, indent=4) for result in results if result.failed))


def choose_result_mark(results: "Iterable[CheckResult]") -> tuple[str, str]:
    """Return the mark and colour of the worst result."""
    failed = [result for result in results if result.failed]
    if any(failure.blocking for failure in failed):
        return "✗", BAD
    return ("!", LOOK) if failed else ("✓", GOOD)


def summarize_output(manifest: "Manifest") -> str:
    """Summarize a stage's output in one line."""
    output = catalog.count_output_rows(manifest)
    rows = format_count(output.count, output.noun) if output else ""
    stage = catalog.find_stage(manifest.stage)
    return join_facts(stage.summarize(CountSet.parse(manifest.counts), rows))


# ── check results ──────────────────────────────────────────────────────────────────────────────────


def render_check_result(project: "Project", result: "CheckResult", *, indent: int = 2) -> RenderableType:
    """Show one check result; a failed one with its remedy, sample rows, and the command that shows the first."""
    if result.outcome == "not_applicable":
        line = Text(f"{NO_NUMBER} {result.check:<18}{'not applicable':>16}  applies to {result.applies_to}", DIM)
        return Padding(line, (0, 0, 0, indent), expand=False)
    mark, style = choose_result_mark([result])
    value = Text.assemble(
        (f"{mark} ", style), f"{result.check:<18}", (f"{result.shown:>12}", "" if result.passed else style)
    )
    line = join_side_by_side(value, Text(f"{result.wanted}  {result.what}", DIM))
    causes = [link_rows(cause, result.key[0]) for cause in result.causes]
    lines: list[RenderableType] = [line, *(Padding(cause, (0, 0, 0, 4), expand=False) for cause in causes)]
    if not result.passed and result.waiver and not result.blocking:
        lines.append(Text(f"  waived: {escape_control_characters(result.waiver)}", DIM))
    elif not result.passed:
        lines.append(join_side_by_side(Text("  → ", style), Text(result.remedy, style), cells=4))
    if not result.passed and result.samples and not result.causes:
        lines.append(link_rows(f"  see {', '.join(result.samples[:3])}", result.key[0], DIM))
    if not result.passed and (named := ROW_ID.search(" ".join(result.samples))) is not None:
        lines.append(Text(f"  {format_view_command(project, named.group())}", DIM))
    return Padding(Group(*lines), (0, 0, 0, indent), expand=False)


def format_view_command(project: "Project", row_id: str) -> str:
    """Return the command that shows a row, or an example's row, in the viewer."""
    argument = format_recipe_argument(project.recipe.name, project.store.root)
    return f"rowmill view {argument} {row_id.partition('#')[0]}"


def link_rows(text: str, recipe: str, style: str = "") -> Text:
    """Return text from data in which row ids are links, where $ROWMILL_VIEWER_URL says that a viewer runs.

    Only a terminal gets the links (OSC 8); one that does not know them shows the text alone.
    """
    shown = Text(escape_control_characters(text), style)
    if base := os.environ.get("ROWMILL_VIEWER_URL"):
        links = PageLinks(recipe, base=base)
        for found in ROW_ID.finditer(shown.plain):
            shown.stylize(f"link {links.of_row(found.group())}", *found.span())
    return shown


def render_verification(
    project: "Project", checked: "Sequence[StageVerification]", *, facts: bool, deep: bool, every: bool
) -> RenderableType:
    """Show the counts of results, the failed checks and what a deep verification found; with `every`, each check."""
    results = [result for stage in checked for result in stage.results]
    blocking = sum(result.blocking for result in results)
    waived = sum(bool(result.waiver) and result.failed for result in results)
    warned = sum(result.failed for result in results) - blocking - waived
    counts = {
        "passed": sum(result.passed for result in results),
        "warning" if warned == 1 else "warnings": warned,
        "waived": waived,
        "blocking": blocking,
        "damaged": sum(len(stage.damage) for stage in checked),
        "denied by Great Expectations": sum(len(stage.disagreements) for stage in checked),
        "not applicable": sum(result.outcome == "not_applicable" for result in results),
    }
    summary = join_facts(f"{count} {name}" for name, count in counts.items() if count or name == "passed")
    lines: list[RenderableType] = [render_title(project, summary)]
    for stage in checked:
        shown = [render_check_result(project, result) for result in stage.results if every or result.failed]
        shown += [Text(f"  ✗ {escape_control_characters(line)}", BAD) for line in (*stage.disagreements, *stage.damage)]
        if deep and every and stage.files and not stage.damage:
            shown.append(_render_read_again([stage]))
        if facts and stage.manifest is not None:
            # Only facts that are numbers can be named in `gates.expectations`.
            numbers = [(name, value) for name, value in stage.manifest.facts.items() if isinstance(value, int | float)]
            shown.append(make_grid(["fact", "value"], numbers, indent=4))
        if every or shown or stage.is_outdated:
            head = Text(f"\n{format_key(stage.step.key)}", HEAD)
            if stage.manifest is None:
                head.append("  not built", LOOK)
            else:
                head.append(f"  version {stage.manifest.version[:12]}", DIM)
            if stage.is_outdated:
                head.append("  its options changed since: run rowmill build", LOOK)
            lines += [head, *shown]
    missing = [format_key(stage.step.key) for stage in checked if stage.manifest is None and not stage.step.on_demand]
    if missing and not every:
        lines.append(Text(f"\nnot built: {', '.join(missing)}", LOOK))
    if deep and not every:
        lines += [Text(""), _render_read_again([stage for stage in checked if not stage.damage])]
    name, unread = project.recipe.name, sum(stage.unread_files for stage in checked)
    if unread:
        # Nothing is known of them.
        count = f"{format_count(unread, 'file')}, {format_size(sum(stage.unread_bytes for stage in checked))}"
        lines.append(
            Text(f"  ? {count} of earlier versions not read: they may be damaged", DIM)
            if deep
            else Text(f"\n  ? {count} not read: `rowmill verify {name} --deep` compares digests", DIM)
        )
    if not every:
        lines.append(Text(f"\n→ rowmill verify {name} --all   shows every check", DIM))
    return Group(*lines)


def _render_read_again(stages: "Sequence[StageVerification]") -> RenderableType:
    files, size = sum(stage.files for stage in stages), sum(stage.size_bytes for stage in stages)
    summary = f"{format_count(files, 'file')}, {format_size(size)} read again: every digest matches"
    return Text.assemble(("  ✓ ", GOOD), summary)


def render_discarded(project: "Project", lines: Sequence[str] | None) -> RenderableType:
    """Show what was removed because of damage; with None, show the command that removes it."""
    name = project.recipe.name
    if lines is None:
        return Text(
            f"\n→ rowmill verify {name} --deep --discard   removes damaged files and everything built from them", LOOK
        )
    shown = [Text(f"  {escape_control_characters(line)}", DIM) for line in lines]
    return Group(Text("\ndamaged files removed", LOOK), *shown, Text(f"→ rowmill build {name}   rebuilds them"))


# ── versions, garbage collection ───────────────────────────────────────────────────────────────────


def render_versions(project: "Project", kept: "Sequence[Manifest]", current: "Manifest | None") -> RenderableType:
    """Show the kept versions of a stage, newest first."""
    current_version = current.version if current else ""
    rows = [
        (
            Text("●" if output.version == current_version else "", GOOD),
            output.version,
            Text(output.built_at[:19].replace("T", " "), DIM),
            Text(summarize_output(output)),
            Text("waived: " + escape_control_characters("; ".join(output.waivers)) if output.waivers else "", LOOK),
        )
        for output in reversed(kept)
    ]
    return make_grid(["", "version", "built (UTC)", "holds", ""], rows, indent=0)


def render_comparison(before: "Manifest", after: "Manifest", compared: "Sequence[ScopeComparison]") -> RenderableType:
    """Show two versions side by side."""
    sides = (("before", before), ("after ", after))
    lines: list[RenderableType] = [
        Text(f"{name}  {output.version}  {output.built_at[:19].replace('T', ' ')}", DIM) for name, output in sides
    ]
    for scope in compared:
        lines.append(Text(f"\n{scope.scope or 'all datasets'}", HEAD))
        for name, moves in (("rows", scope.rows), ("tokens", scope.tokens)):
            if moves is not None:
                counts = f"{moves.added:,} added, {moves.removed:,} removed, {moves.moved:,} in another split"
                lines.append(Text(f"  {name} by content: {counts}"))
        rows = [
            (
                line.name,
                *(
                    NO_NUMBER if value is None else format_percent(value) if line.is_share else value
                    for value in (line.before, line.after)
                ),
                "" if line.before is None or line.after is None or line.before == line.after else format_change(line),
            )
            for line in scope.lines
        ]
        lines.append(make_grid(["", "before", "after", "change"], rows, indent=2))
    return Group(*lines)


def format_change(line: "NumberComparison") -> str:
    """Return by how much a number changed, or that one of the two versions lacks it."""
    if line.before is None or line.after is None:
        return "new" if line.before is None else "gone"
    change = line.after - line.before
    return f"{100 * change:+.2f} points" if line.is_share else f"{change:+,.6g}"


def render_collected(garbage: "Sequence[GarbageItem]", *, dry_run: bool) -> RenderableType:
    """Show what was removed, or would be removed, stage by stage."""
    if not garbage:
        return Text("nothing to remove", DIM)
    rows: list[Sequence[object]] = []
    for key in dict.fromkeys(item.key for item in garbage):
        items = [item for item in garbage if item.key == key]
        kinds = Counter(item.kind for item in items)
        named = join_facts(format_count(count, kind, ITEM_PLURALS.get(kind, "")) for kind, count in kinds.items())
        rows.append((format_key(key), named, format_size(sum(item.size_bytes for item in items))))
    total = format_size(sum(item.size_bytes for item in garbage))
    return Group(make_grid(["", "would remove" if dry_run else "removed", total], rows, indent=0))


ITEM_PLURALS = {
    "staged copy": "staged copies",
    "note of changes": "notes of changes",
    "share's versions": "shares' versions",
}


# ── records datasets ───────────────────────────────────────────────────────────────────────────────


MAX_SHOWN_OVERFLOWS = 20
_SIZE_NAMES = {
    "record_tokens": "tokens per record",
    "group_tokens": "tokens per group",
    "example_tokens": "tokens per example",
    "example_records": "records per example",
    "example_groups": "groups per example",
}
_SIZE_STATISTICS = ("mean", "std", "min", "p25", "p50", "p75", "max")


def render_table_plans(planned: "Iterable[DatasetTablePlan]") -> RenderableType:
    """Show the plan of each records dataset."""
    lines: list[RenderableType] = []
    for dataset_plan in planned:
        head, plan = Text(f"\n{dataset_plan.dataset}", HEAD), dataset_plan.plan
        if plan is None:
            lines += [head, Text(f"  ✗ {escape_control_characters(dataset_plan.overflow)}", BAD)]
            continue
        options = plan.options
        capped = "group" if plan.mode == "grouped" else "record"
        cap = "no cap" if options["cap"] is None else f"at most {format_count(options['cap'], capped)} each"
        terms = [
            f"limit {options['limit']:,} tokens", f"prompt {options['prompt']:,}",
            f"left for records {options['records']:,}", cap,
            f"BOS {options['bos']} {options['bos_id']}", f"EOS {options['eos']} {options['eos_id']}",
            *([f"order {options['order']}"] if options["order"] is not None else []),
            *([f"{options['wanted']:,} records wanted"] if options["wanted"] is not None else []),
            *([f"privacy unit {options['privacy_unit']}"] if options["privacy_unit"] else []),
        ]  # fmt: skip
        counted: list[tuple[object, ...]] = []
        sizes: list[tuple[object, ...]] = []
        for split, counts in plan.facts.items():
            flushes = join_facts(
                f"{name.removeprefix('flush_')} {count:,}"
                for name, count in counts.items()
                if name.startswith("flush_") and count
            )
            totals = (counts[name] for name in ("records", "groups", "examples", "tokens"))
            counted.append((split, *totals, flushes))
            for name, label in _SIZE_NAMES.items():
                if counts[f"{name}_max"]:
                    values = (counts[f"{name}_{statistic}"] for statistic in ("min", "mean", "max", "std"))
                    shown = (f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" for value in values)
                    sizes.append((split, label, *shown))
        lines += [
            head.append(f"  {plan.mode}", DIM),
            Text(f"  {escape_control_characters(join_facts(terms))}", DIM),
            make_grid(["split", "records", "groups", "examples", "tokens", "why examples ended"], counted),
            make_grid(["", "", "min", "mean", "max", "std"], sizes),
        ]
        lines += [
            Text(f"  ! {over.kind} {escape_control_characters(over.description)}", LOOK)
            for over in plan.overflows.first[:MAX_SHOWN_OVERFLOWS]
        ]
        if plan.overflows.count > MAX_SHOWN_OVERFLOWS:
            lines.append(Text(f"  ! and {plan.overflows.count - MAX_SHOWN_OVERFLOWS} more", LOOK))
        if plan.changed:
            changed = format_count(plan.changed, "record")
            lines.append(Text(f"  ! the reference serialization changes {changed}", LOOK))
    return Group(*lines)


def render_advice(advised: "Iterable[DatasetAdvice]") -> RenderableType:
    """Show how well each column groups records, and the estimated length of examples."""
    lines: list[RenderableType] = []
    for advice in advised:
        size = advice.estimate
        estimates = [
            f"{size.unit_tokens:,} tokens per {'record' if advice.mode == 'tabular' else 'group'} on average",
            f"{size.example_tokens:,} per example, which {'fits' if size.fits else 'does not fit'}",
            f"at most {size.units:,} {'groups' if advice.mode == 'grouped' else 'records'} in one",
            *size.advice,
        ]
        rows: list[tuple[object, ...]] = []
        notes: list[Text] = []
        for column in advice.columns:
            mark = Text("✗", BAD) if column.unsuitable else Text("!", LOOK) if column.warnings else Text("✓", GOOD)
            name, sizes = escape_control_characters(column.column), column.sizes
            objections = {**column.unsuitable, **column.warnings}
            rows.append(
                (mark, name, "chosen" if column.column in advice.chosen else "", int(sizes["count"]),
                 *(f"{sizes[statistic]:g}" for statistic in _SIZE_STATISTICS), ", ".join(objections))
            )  # fmt: skip
            notes.append(Text(f"\n  {name}  {escape_control_characters(column.largest)}", DIM))
            notes += [
                Text(f"    {key}: {escape_control_characters(why)}", BAD if key in column.unsuitable else LOOK)
                for key, why in objections.items()
            ]
        if not rows:
            notes.append(Text("  no column groups records: each column's values are all different, or all equal", DIM))
        lines += [
            Text(f"\n{advice.dataset}", HEAD).append(f"  {advice.mode}", DIM),
            Text(f"  {join_facts(estimates)}", DIM),
            make_grid(["", "column", "", "groups", *_SIZE_STATISTICS, "objections"], rows),
            *notes,
        ]
    return Group(*lines)


# ── JSON ───────────────────────────────────────────────────────────────────────────────────────────
#
# Every object has `recipe` and `store`. Shares are numbers from 0 to 1. Fields may be added; a field that is there
# keeps its name and meaning.


def format_object(project: "Project", fields: dict[str, Any]) -> str:
    """Return a command's answer as JSON text."""
    whole = {"recipe": project.recipe.name, "store": project.store.path(""), **fields}
    return orjson.dumps(whole, option=orjson.OPT_INDENT_2).decode()


def describe_plan(forecasts: "Sequence[StepForecast]", remarks: "Sequence[Finding]") -> dict[str, Any]:
    """Describe what a build would do: `steps`, each with its action and why, and the remarks of the pre-flight."""
    steps = [
        {"stage": format_key(forecast.step.key), "action": forecast.action, "why": forecast.why}
        for forecast in forecasts
    ]
    return {"steps": steps, "remarks": [{"warning": remark.is_warning, "text": remark.text} for remark in remarks]}


def describe_steps(built: "Iterable[tuple[Step, StepReport, Sequence[CheckResult]]]") -> list[dict[str, Any]]:
    """Describe the steps that a build ran, each with its version, time, facts and check results."""
    return [
        {
            "stage": format_key(step.key),
            "version": report.version,
            "reused": report.reused,
            "parts": report.parts,
            "parts_reused": report.parts_reused,
            "seconds": round(report.seconds, 3),
            "facts": report.manifest.facts,
            "checks": [_describe_result(result) for result in results],
        }
        for step, report, results in built
    ]


def describe_statistics(build: "BuildView") -> dict[str, Any]:
    """Describe each dataset: the facts of its stages up to the lengths, its ledger, the what-if table, and hints."""
    datasets: dict[str, Any] = {}
    hints: list[str] = []
    for name in build.project.recipe.datasets:
        outputs = build.find_counted_outputs(name)
        what_if = outputs[TRUNCATION_STATS].tables.get("what_if") if TRUNCATION_STATS in outputs else None
        datasets[name] = {
            "facts": {stage: output.facts for stage, output in outputs.items()},
            "left_out": [
                dict(zip(("stage", "state", "reason", "records"), line, strict=True))
                for line in build.list_left_out(name)
            ],
            "what_if": [dict(zip(what_if.columns, row, strict=True)) for row in what_if.rows] if what_if else [],
        }
        hints += [f"{name}: {hint}" for hint in build.list_hints(name)]
    return {"datasets": datasets, "hints": hints}


def describe_verification(checked: "Sequence[StageVerification]") -> dict[str, Any]:
    """Describe each stage: its version, whether its options changed since, its check results and its damage."""
    return {
        "fails": any(stage.fails for stage in checked),
        "stages": [
            {
                "stage": format_key(stage.step.key),
                "version": None if stage.manifest is None else stage.manifest.version,
                "outdated": stage.is_outdated,
                "checks": [_describe_result(result) for result in stage.results],
                "damage": list(stage.damage),
                "disagreements": list(stage.disagreements),
                "files_read": stage.files,
                "bytes_read": stage.size_bytes,
                "files_not_read": stage.unread_files,
                "bytes_not_read": stage.unread_bytes,
            }
            for stage in checked
        ],
    }


def describe_versions(kept: "Sequence[Manifest]", current: "Manifest | None") -> dict[str, Any]:
    """Describe the kept versions of a stage, newest first."""
    return {
        "current": None if current is None else current.version,
        "versions": [
            {
                "version": output.version,
                "built_at": output.built_at,
                "run_id": output.run_id,
                "facts": output.facts,
                "waivers": list(output.waivers),
            }
            for output in reversed(kept)
        ],
    }


RESULT_FIELDS = ("check", "outcome", "blocking", "severity", "value", "wanted", "what", "remedy", "waiver")


def _describe_result(result: "CheckResult") -> dict[str, Any]:
    rest = {"causes": list(result.causes), "samples": [] if result.causes else list(result.samples)}
    return {name: getattr(result, name) for name in RESULT_FIELDS} | rest
