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
from rowmill.build.gc import Collected
from rowmill.build.runner import Forecast, Project, Report, Step, followers, road
from rowmill.checks.judge import Verdict, judge
from rowmill.core.console import BAD, DIM, GOOD, HEAD, LOOK, beside, grid, labelled, number, text_of, visible
from rowmill.core.number_text import NOTHING, counted, dotted, percent, seconds_text, size_text
from rowmill.exports import Export
from rowmill.inspection.diff import Compared, Line
from rowmill.inspection.generated_output import ParsedFiles
from rowmill.inspection.verify import Checked
from rowmill.reports import plots
from rowmill.schema import manifest
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import EXPORTS, Manifest, Table, folder
from rowmill.schema.rows import NOTICED
from rowmill.stages import catalog, exports, gpu_partitions
from rowmill.stages.base import StageDeclaration
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.packed_shards import stage as packed_shards
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.stages.training_splits import stage as training_splits
from rowmill.stages.truncation_stats import stage as truncation_stats


def key_text(key: Sequence[str]) -> str:
    """Name a stage within its recipe: `chats/canonical_rows`."""
    return "/".join(key[1:])


def small_table(table: Table, *, indent: int = 2) -> RenderableType:
    """Show a manifest's table."""
    return grid([name.replace("_", " ") for name in table.columns], list(table.rows), indent=indent)


# ── plan ───────────────────────────────────────────────────────────────────────────────────────────


_ACTIONS = {"reuse": ("=", DIM), "make": ("+", GOOD), "make if changed": ("~", LOOK), "on request": ("·", DIM)}


def plan(project: Project, forecasts: Sequence[Forecast]) -> RenderableType:
    """Show what a build would do, dataset by dataset."""
    wide = max(len(one.action) for one in forecasts)
    lines: list[RenderableType] = [_title(project, _plan_counts(forecasts))]
    for scope, own in groupby(forecasts, key=lambda one: one.step.dataset):
        lines.append(_scope(project, scope))
        for one in own:
            mark, style = _ACTIONS[one.action]
            line = Text.assemble(
                (f"  {mark} ", style), (f"{one.step.label:<20}", ""), (f"{one.action:<{wide}}  ", style)
            )
            lines.append(line.append(visible(one.why), DIM))
    return Group(*lines)


def _plan_counts(forecasts: Sequence[Forecast]) -> str:
    names = {
        "reuse": "reused",
        "make": "to make",
        "make if changed": "to make if what they read changes",
        "on request": "on request",
    }
    counts = {action: sum(one.action == action for one in forecasts) for action in names}
    return dotted(f"{count} {names[action]}" for action, count in counts.items() if count)


def _title(project: Project, rest: str) -> Text:
    return Text.assemble((project.recipe.name, HEAD), "  ", (f"{rest} · {project.store.path('')}", DIM))


def _scope(project: Project, dataset: str | None) -> Text:
    return Text(f"\n{dataset or 'all datasets'}", HEAD)


# ── after training ─────────────────────────────────────────────────────────────────────────────────


def differing_builds(names: Sequence[str]) -> RenderableType:
    """Warn that a model was trained on other options than those of the recipe, which are left alone until a build."""
    words = "was built with other options than the recipe has now; what a model was trained on is that build's to say"
    return Group(*(Text(f"! {name} {words}; run `rowmill build` to change it", LOOK) for name in names))


def generated(made: Sequence[Manifest]) -> RenderableType:
    """Show what generated texts came to: classes, and how each series went."""
    lines: list[RenderableType] = []
    for one in made:
        for name in ("classes", "series"):
            if name in one.tables and one.tables[name].rows:
                lines += [Text(f"\n{key_text(one.key)}", HEAD), small_table(one.tables[name])]
    return Group(*lines)


def parsed_files(parsed: ParsedFiles) -> RenderableType:
    """Show what files hold that were parsed off the road."""
    report = parsed.report
    told = dotted(
        [
            counted(parsed.texts, "text"),
            counted(report.valid, "record"),
            f"{percent(report.valid_fraction)} valid" if report.valid + report.invalid else "",
            f"{parsed.unreadable:,} without a text" if parsed.unreadable else "",
        ]
    )
    return Group(Text(told, HEAD), small_table(parsed.table))


# ── build ──────────────────────────────────────────────────────────────────────────────────────────


def build_title(project: Project, steps: Sequence[Step]) -> RenderableType:
    """Show the head of a build."""
    sets = counted(len(project.recipe.datasets), "dataset")
    return _title(project, dotted([sets, counted(len(steps), "step")]))


def scope_title(project: Project, step: Step) -> RenderableType:
    """Show the head of a dataset's steps."""
    return _scope(project, step.dataset)


def step_line(step: Step, report: Report, verdicts: Sequence[Verdict]) -> RenderableType:
    """Show one finished step: how long it took, what came out, and the findings that failed."""
    mark, style = verdict_mark(verdicts)
    time = "reused" if report.reused else seconds_text(report.seconds)
    line = Text.assemble((f"  {mark} ", style), f"{step.label:<20}", (f"{time:>9}  ", DIM))
    line.append(dotted([outcome(report.manifest), _reuse(report)]), DIM if report.reused else "")
    return Group(line, *(finding(one, indent=4) for one in verdicts if one.failed))


def verdict_mark(verdicts: Iterable[Verdict]) -> tuple[str, str]:
    """Return a mark and its colour for some findings: the worst of them counts."""
    failed = [one for one in verdicts if one.failed]
    if any(one.blocking for one in failed):
        return "✗", BAD
    return ("!", LOOK) if failed else ("✓", GOOD)


def _reuse(report: Report) -> str:
    if report.reused or not report.parts_reused:
        return ""
    return f"{report.parts_reused} of {report.parts} parts reused, {counted(report.rows_made, 'row')} read"


def outcome(made: Manifest) -> str:
    """Say in one line what a stage's output holds."""
    held = catalog.rows_of(made)
    rows = counted(held.count, held.noun) if held else ""
    return dotted(catalog.find_stage(made.stage).summarize(made.facts, rows))


# ── findings ───────────────────────────────────────────────────────────────────────────────────────


def finding(one: Verdict, *, indent: int = 2) -> RenderableType:
    """Show one finding; a failed one with what to do and rows to look at."""
    if one.outcome == "not_applicable":
        line = Text(f"{NOTHING} {one.law:<18}{'not applicable':>16}  applies to {one.applies_to}", DIM)
        return Padding(line, (0, 0, 0, indent), expand=False)
    mark, style = verdict_mark([one])
    shown = "not measured" if one.value is None else number(one.value)
    value = Text.assemble((f"{mark} ", style), f"{one.law:<18}", (f"{shown:>10}", "" if one.passed else style))
    line = beside(value, Text(f"{one.wanted}  {one.what}", DIM))
    lines: list[RenderableType] = [line]
    if not one.passed and one.waiver and not one.blocking:
        lines.append(Text(f"  waived: {visible(one.waiver)}", DIM))
    elif not one.passed:
        lines.append(Text(f"  → {one.remedy}", style))
    if not one.passed and one.samples:
        lines.append(Text(f"  look at {visible(', '.join(one.samples[:3]))}", DIM))
    return Padding(Group(*lines), (0, 0, 0, indent), expand=False)


def verification(project: Project, checked: Sequence[Checked], *, facts: bool, deep: bool) -> RenderableType:
    """Show the findings of every stage, and what a deep reading found."""
    lines: list[RenderableType] = [_title(project, _verdict_counts(checked))]
    for one in checked:
        lines.append(_stage_head(one))
        lines += [finding(verdict) for verdict in one.verdicts]
        lines += [Text(f"  ✗ {visible(line)}", BAD) for line in one.damage]
        if deep and one.files and not one.damage:
            said = f"  ✓ {counted(one.files, 'file')}, {size_text(one.size_bytes)} read again: every digest holds"
            lines.append(Text.assemble((said[:4], GOOD), said[4:]))
        if facts and one.manifest is not None:
            lines.append(grid(["fact", "value"], _facts(one.manifest), indent=4))
    return Group(*lines)


def discarded(project: Project, lines: Sequence[str] | None) -> RenderableType:
    """Say what was taken away because of damage, or how to; null where nothing was."""
    name = project.recipe.name
    if lines is None:
        return Text(f"\n→ rowmill verify {name} --deep --discard   removes the damage, and what was made of it", LOOK)
    shown = [Text(f"  {visible(line)}", DIM) for line in lines]
    return Group(Text("\ndamaged files removed", LOOK), *shown, Text(f"→ rowmill build {name}   makes them again"))


def _facts(made: Manifest) -> list[tuple[object, ...]]:
    """List a stage's facts; only numbers can be named in `gates.expectations`, other facts are context."""
    return [(name, value) for name, value in made.facts.items() if isinstance(value, int | float)]


def _stage_head(one: Checked) -> Text:
    line = Text(f"\n{key_text(one.step.key)}", HEAD)
    if one.manifest is None:
        return line.append("  not built", LOOK)
    line.append(f"  version {one.manifest.version[:12]}", DIM)
    if one.manifest.code_version != one.step.code_version:
        line.append("  its options changed since: build again", LOOK)
    return line


def _verdict_counts(checked: Sequence[Checked]) -> str:
    verdicts = [verdict for one in checked for verdict in one.verdicts]
    blocking = sum(verdict.blocking for verdict in verdicts)
    waived = sum(bool(verdict.waiver) and verdict.failed for verdict in verdicts)
    warned = sum(verdict.failed for verdict in verdicts) - blocking - waived
    passed = sum(verdict.passed for verdict in verdicts)
    damaged = sum(len(one.damage) for one in checked)
    counts = {"passed": passed, "to look at": warned, "waived": waived, "blocking": blocking, "damaged": damaged}
    counts["not applicable"] = sum(verdict.outcome == "not_applicable" for verdict in verdicts)
    return dotted(f"{count} {name}" for name, count in counts.items() if count or name == "passed")


# ── Answers of SQL, versions, what was collected ───────────────────────────────────────────────────


def answer(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> RenderableType:
    """Show a query's rows."""
    return Group(grid(columns, list(rows), indent=0), Text(f"\n{counted(len(rows), 'row')}", DIM))


def versions(project: Project, kept: Sequence[Manifest], current: Manifest | None) -> RenderableType:
    """Show the kept versions of a stage, newest first."""
    now = current.version if current else ""
    rows = [
        (
            Text("●" if one.version == now else "", GOOD),
            one.version,
            Text(one.built_at[:19].replace("T", " "), DIM),
            Text(outcome(one)),
            Text("waived: " + visible("; ".join(one.waivers)) if one.waivers else "", LOOK),
        )
        for one in reversed(kept)
    ]
    return grid(["", "version", "built (UTC)", "holds", ""], rows, indent=0)


def comparison(before: Manifest, after: Manifest, compared: Sequence[Compared]) -> RenderableType:
    """Show two versions side by side."""
    both = (("before", before), ("after ", after))
    lines: list[RenderableType] = [
        Text(f"{name}  {one.version}  {one.built_at[:19].replace('T', ' ')}", DIM) for name, one in both
    ]
    for one in compared:
        lines.append(Text(f"\n{one.scope or 'all datasets'}", HEAD))
        if one.added is not None:
            lines.append(Text(f"  rows by content: {one.added:,} added, {one.removed:,} removed"))
        rows = [(line.name, _shown(line, line.before), _shown(line, line.after), _change(line)) for line in one.lines]
        lines.append(grid(["", "before", "after", "change"], rows, indent=2))
    return Group(*lines)


def _shown(line: Line, value: float | None) -> object:
    return NOTHING if value is None else percent(value) if line.is_share else value


def _change(line: Line) -> str:
    if line.before is None or line.after is None or line.before == line.after:
        return ""
    change = line.after - line.before
    return f"{100 * change:+.2f} points" if line.is_share else f"{change:+,.6g}"


def collected(found: Collected, *, dry_run: bool) -> RenderableType:
    """Show what was removed, or would be, stage by stage."""
    if not found.items:
        return Text("nothing to remove", DIM)
    rows: list[Sequence[object]] = []
    for key in dict.fromkeys(item.key for item in found.items):
        own = [item for item in found.items if item.key == key]
        kinds = Counter(item.kind for item in own)
        named = dotted(counted(count, kind, PLURALS.get(kind, "")) for kind, count in kinds.items())
        rows.append((key_text(key), named, size_text(sum(item.size_bytes for item in own))))
    total = size_text(sum(item.size_bytes for item in found.items))
    return Group(grid(["", "would remove" if dry_run else "removed", total], rows, indent=0))


PLURALS = {"staged copy": "staged copies"}


# ── Statistics ─────────────────────────────────────────────────────────────────────────────────────


def statistics(project: Project) -> RenderableType:
    """Show each dataset's lengths, what truncation took, rejects, dropped kinds and what other limits would do."""
    return Group(*(_dataset_statistics(project, name) for name in project.recipe.datasets))


def hints(project: Project) -> list[str]:
    """Return the advice of all datasets, each with its dataset's name."""
    found: list[str] = []
    for name in project.recipe.datasets:
        made = _current(project, name, truncation_stats.STAGE)
        found += [f"{name}: {hint}" for hint in (made.facts["hints"] if made else [])]
    return found


def _current(project: Project, dataset: str | None, stage: StageDeclaration) -> Manifest | None:
    key = (project.recipe.name, *(() if dataset is None else (dataset,)), stage.name)
    return manifest.current(project.store, key)


def _dataset_statistics(project: Project, name: str) -> RenderableType:
    rows, examples = (
        _current(project, name, canonical_rows.STAGE),
        _current(project, name, tokenized_examples.STAGE),
    )
    lengths = _current(project, name, truncation_stats.STAGE)
    lines: list[RenderableType] = [Text(f"\n{name}", HEAD).append(f"  {_passage(rows, examples)}", DIM)]
    if rows is not None:
        lines += _noticed(rows)
    if examples is not None and examples.facts["rows_with_tools"]:
        lines += _tools(examples.facts)
    if lengths is not None:
        lines += _lengths(lengths)
    lines += _rejects(rows, examples)
    dropped = examples.tables.get("dropped") if examples is not None else None
    if dropped is not None and dropped.rows:
        lines += [_label("own text that the template did not print"), small_table(dropped, indent=4)]
    weights = examples.tables.get("loss_weights") if examples is not None else None
    if weights is not None:
        lines += [_label("trained tokens by loss weight"), small_table(weights, indent=4)]
    return Group(*lines)


def _passage(rows: Manifest | None, examples: Manifest | None) -> str:
    if rows is None:
        return "not built"
    made = counted(examples.facts["examples"], "example") if examples is not None else "not tokenized"
    return f"{counted(rows.facts['records'], 'record')} → {counted(rows.facts['kept'], 'row')} → {made}"


def _noticed(rows: Manifest) -> list[RenderableType]:
    """Show what canonicalisation noticed in the rows that it kept."""
    found = [(name.replace("_", " "), count) for name in NOTICED if (count := rows.facts.get(name))]
    found += [(f"{name.replace('_', ' ')} (counted)", count) for name, count in rows.facts["notes"].items()]
    return [_label("noticed in the rows"), grid(["", "times"], found, indent=4)] if found else []


def _tools(facts: Mapping[str, Any]) -> list[RenderableType]:
    """Show what tool schemas cost: they stand in every example of a row, and truncation never takes them."""
    rows, tokens = int(facts["rows_with_tools"]), int(facts["tool_tokens"])
    words = (
        f"{counted(rows, 'row')}, {tokens:,} tokens, {tokens // rows:,} a row, at most {facts['most_tool_tokens']:,}"
    )
    return [_label("tool schemas"), Text(f"    {words}")]


def _label(words: str) -> Text:
    return Text(f"\n  {words}", "cyan")


BUCKETS = {
    "under_25": "under 25 %",
    "25_to_50": "25 to 50",
    "50_to_75": "50 to 75",
    "75_to_100": "75 to 100",
    "at_max": "at max",
}


STAGE_COLUMNS = ("stage", "examples", "", "messages", "tokens", "trained of them")


def _lengths(made: Manifest) -> list[RenderableType]:
    facts, limit = made.facts, int(made.facts["limit"])
    quantiles = "   ".join(f"{name} {value:,}" for name, value in facts["quantiles"].items())
    total = sum(facts["buckets"].values())
    counts = [facts["buckets"][name] for name in BUCKETS]
    buckets = grid(list(BUCKETS.values()), [counts, [percent(count, total) for count in counts]], indent=4)
    drawn = plots.histogram_text(made.histograms["lengths"], width=72, lines=12).splitlines()
    lines: list[RenderableType] = [
        _label(f"{made.histograms['lengths'].title} in tokens"), Text(f"    {quantiles}"),
        *(Text(f"    {line}", DIM if line.startswith("──") else "") for line in drawn[1:]),
        _label(f"length as a share of max_length {limit:,}"), buckets,
    ]  # fmt: skip
    if "stages" in made.tables:
        taken = [
            (stage, touched, percent(touched, total), messages, tokens, trained)
            for stage, touched, messages, tokens, trained in made.tables["stages"].rows
        ]
        lines += [_label("what truncation took"), grid(STAGE_COLUMNS, taken, indent=4)]
    if facts["dropped_for_length"]:
        lines.append(Text(f"    dropped for their length: {counted(facts['dropped_for_length'], 'row')}"))
    return [*lines, *_what_if(made), *(Text(f"\n  ! {hint}", LOOK) for hint in facts["hints"])]


def _what_if(made: Manifest) -> list[RenderableType]:
    """Show what other limits would do, and how it is known: estimated, or planned anew."""
    table, limit = made.tables["what_if"], int(made.facts["limit"])
    is_planned = "examples" in table.columns
    headings = WHAT_IF_OF_RECORDS if is_planned else WHAT_IF
    # A plan has other examples at each length, so what is over are records.
    total, place = (made.facts["records"], 2) if is_planned else (made.facts["examples"], 1)
    lines = [(*row[: place + 1], percent(row[place], total), *row[place + 1 :]) for row in table.rows]
    marked = next((i for i, row in enumerate(lines) if row[0] == limit), None)
    return [
        _label("what another limit would do" + ("" if is_planned else " (estimated)")),
        grid(list(headings), lines, indent=4, marked=marked),
        Padding(Text(stats.about("what_if", table) or "", DIM), (0, 0, 0, 4), expand=False),
    ]


WHAT_IF = ("limit", "examples over", "", "trained tokens lost", "sequences")
WHAT_IF_OF_RECORDS = ("limit", "examples", "records over", "", "trained tokens lost", "sequences")


def _rejects(rows: Manifest | None, examples: Manifest | None) -> list[RenderableType]:
    lines = [
        (made.stage, reason or state, count)
        for made in (rows, examples)
        if made is not None
        for state, reason, count in sorted(made.ledger, key=lambda line: -line[2])
        if state != KEPT
    ]
    return [_label("left out"), grid(["stage", "reason", "rows"], lines, indent=4)] if lines else []


# ── The short report ───────────────────────────────────────────────────────────────────────────────


def summary(project: Project) -> str:
    """Return the short report of a recipe: rows in and out, tokens, fill, where the shards are, what to do next."""
    return text_of(Group(*_summary(project)))


def _summary(project: Project) -> list[RenderableType]:
    datasets: list[tuple[object, ...]] = [
        (Text(name), *summary_cells(project, name)[1:]) for name in project.recipe.datasets
    ]
    if len(datasets) > 1:
        datasets.append(_summary_total(project))
    last = len(datasets) - 1 if len(datasets) > 1 else None
    lines: list[RenderableType] = [
        _title(project, "what was built"),
        Text(""),
        grid(SUMMARY_COLUMNS, datasets, marked=last),
    ]
    lines += _summary_rejects(project)
    lines += _summary_places(project)
    lines += _summary_failed(project)
    lines += _summary_next(project)
    return lines


SUMMARY_COLUMNS = ("dataset", "records", "rows", "rejected", "examples", "tokens", "trained", "sequences", "fill")


def summary_cells(project: Project, name: str) -> tuple[object, ...]:
    """Return a dataset's line of the summary, in the order of `SUMMARY_COLUMNS`."""
    rows, examples = (
        _current(project, name, canonical_rows.STAGE),
        _current(project, name, tokenized_examples.STAGE),
    )
    packed = _current(project, name, packed_shards.STAGE)
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
        _share(of_examples.get("trained_share")),
        of_shards.get("sequences"),
        _share(of_shards.get("fill")),
    )


def _summary_total(project: Project) -> tuple[object, ...]:
    """Add up the datasets; shares are those of all tokens and of all sequences' room."""

    def built(stage: StageDeclaration) -> list[Manifest]:
        found = (_current(project, name, stage) for name in project.recipe.datasets)
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
        percent(total(examples, "trained_tokens"), tokens),
        sequences,
        percent(total(packed, "tokens"), sequences * project.recipe.seq_len),
    )


def _share(share: float | None) -> str:
    return NOTHING if share is None else percent(share)


def _summary_rejects(project: Project) -> list[RenderableType]:
    counts: dict[str, int] = {}
    for name in project.recipe.datasets:
        for stage in (canonical_rows.STAGE, tokenized_examples.STAGE):
            made = _current(project, name, stage)
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
        labelled("left out", f"{named}{f', {rest:,} for {len(most) - 8} other reasons' if rest else ''}"),
    ]


def _summary_places(project: Project) -> list[RenderableType]:
    packed = [name for name in project.recipe.datasets if _current(project, name, packed_shards.STAGE) is not None]
    splits, ranks = (
        _current(project, None, training_splits.STAGE),
        _current(project, None, gpu_partitions.STAGE),
    )
    lines: list[RenderableType] = []
    if packed:
        shown = packed[0] if len(packed) == 1 else f"{{{','.join(packed)}}}"
        lines.append(
            labelled("shards", project.store.path(f"{project.recipe.name}/{shown}/{packed_shards.STAGE.name}"))
        )
    if splits is not None:
        lines.append(
            labelled(
                "order", dotted([counted(splits.facts["places"], "place"), counted(splits.facts["steps"], "step")])
            )
        )
    if ranks is not None:
        where = project.store.path(f"{folder(ranks.key)}/current.json")
        held = dotted(
            [counted(ranks.facts["ranks"], "rank"), counted(ranks.facts["tokens"], "token"), f"opened through {where}"]
        )
        lines.append(labelled("ranks", held))
    lines += [
        labelled("export", f"{export.name}: {project.store.path(exports.folder_of(made))}")
        for export, made in exported(project)
    ]
    return lines


# ── export ─────────────────────────────────────────────────────────────────────────────────────────


def exported(project: Project, names: Collection[str] = ()) -> list[tuple[Export, Manifest]]:
    """Return the exports of a recipe that are built, or those of them that are named."""
    name = project.recipe.name
    found = [
        (one, manifest.current(project.store, (name, EXPORTS, one.name)))
        for one in project.recipe.exports
        if not names or one.name in names
    ]
    return [(export, made) for export, made in found if made is not None]


def pointers(project: Project, names: Collection[str], copied_to: str | None = None) -> RenderableType:
    """Show where exports lie, or the copy of one, and the lines that point their trainer at them."""
    lines: list[RenderableType] = []
    for export, made in exported(project, names):
        head = Text.assemble((f"\n{export.name}", HEAD), (f"  {export.word}, letter {export.letter}", DIM))
        at = copied_to or project.store.path(exports.folder_of(made))
        lines += [head, Text(f"  {at}")]
        lines += [Text(f"    {line}", "cyan") for line in exports.pointer(export, made, at).splitlines()]
    return Group(*lines)


def failed_findings(project: Project) -> list[Verdict]:
    """Return the findings that failed on the current versions, as far as they were judged."""
    found: list[Verdict] = []
    for step in road(project):
        made = manifest.current(project.store, step.key)
        if made is not None:
            found += [one for one in judge(project.store, made, step.terms) if one.failed]
    return found


def _summary_failed(project: Project) -> list[RenderableType]:
    failed = failed_findings(project)
    if not failed:
        return [labelled("findings", "all that apply passed", GOOD)]
    lines: list[RenderableType] = [Text("")]
    for one in failed:
        lines += [Text(f"  {key_text(one.key)}", DIM), finding(one, indent=4)]
    return lines


WHY_REJECTED = "from rejects select reason, count(*) group by 1"


def _command() -> str:
    """Return how the reader can call us: by name where that is on the path, else by the environment's own script."""
    beside = Path(sys.executable).parent / "rowmill"
    return "rowmill" if shutil.which("rowmill") or not beside.is_file() else os.path.relpath(beside)


def _arguments(project: Project) -> str:
    """Return how a command names the recipe and its storage."""
    name, root = project.recipe.name, project.store.root
    return name if root == str(project.base / ".rowmill") else f"{name} --root {root}"


def used(project: Project, step: Step, version: str) -> RenderableType:
    """Say that a stage is at a kept version, and what becomes of the stages after it."""
    lines = [Text(f"{key_text(step.key)} is at version {version}")]
    labels = dict.fromkeys(one.label for one in followers(project, step.key) if not one.on_demand)
    if labels:
        only = " ".join(f"--only {label}" for label in labels)
        lines.append(Text("  what follows was made of another version; make it of this one", DIM))
        lines.append(Text(f"    {_command()} build {_arguments(project)} {only}", "cyan"))
    lines.append(
        Text("  a build of everything, such as the nightly one, makes what the recipe says current again", LOOK)
    )
    return Group(*lines)


def _summary_next(project: Project) -> list[RenderableType]:
    name = _arguments(project)
    built = _current(project, None, gpu_partitions.STAGE) is not None
    rowmill = _command()
    pairs = [
        (f"{rowmill} inspect {name} -n 2", "rows as the model sees them, trained tokens marked"),
        (f"{rowmill} stats {name}", "lengths, and what another seq_len would do"),
        (f'{rowmill} sql "{WHY_REJECTED}" {name}', "why rows were left out"),
        (f"{rowmill} ui", "the same in Dagster, on http://127.0.0.1:3000"),
    ]
    if not built:
        pairs.insert(0, (f"{rowmill} build {name}", "go on from what is there"))
    lines = [Text.assemble((f"  {why}\n", DIM), (f"    {command}", "cyan")) for command, why in pairs]
    return [Text("\nnext", HEAD), *lines]
