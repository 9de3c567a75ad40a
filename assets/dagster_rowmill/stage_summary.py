"""The first entry of an asset's page: one Markdown text that answers what was built and whether it is good.

    **Blocked** · 1 of 14 checks failed
    `unknown_roles` 14.96 %
    [report](http://127.0.0.1:3001/demo/report.html#chats/canonical_rows)

    (a picture of 340 pixels)

    **1,304 rows** · **39 rejected** · **369.9 kB**

    Since 2026-03-01 02:00 UTC: rows +12,
    rejected records -1

Dagster shows Markdown of less than 1,000 characters, and a button in place of longer texts, so the picture is drawn
with less detail until it fits. Other entries make the column of values wider than a window of 1440 pixels shows, so
lines are broken here, at the width of the picture. Names and numbers are the engine's; text from data is only inside
the picture, encoded.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rowmill.build.runner import StepReport
from rowmill.build.steps import Project, Step
from rowmill.checks import judge
from rowmill.checks.judge import CheckResult
from rowmill.core import number_text
from rowmill.inspection import diff
from rowmill.inspection.diff import NumberComparison
from rowmill.reports import console, inline_plots
from rowmill.schema.manifest import Histogram, Manifest

MAX_INLINE_CHARS: Final = 1000
"""Dagster's UI shows shorter Markdown inline, and longer Markdown behind a button."""

DETAILS: Final = ((48, 5), (40, 5), (32, 4), (24, 3), (16, 2))
"""Bars of a histogram and lines of a bar chart, from the most detailed picture to the coarsest."""

MAX_LINE_CHARS: Final = 40
"""What fits beside the longest key in a window of 1440 pixels, as the picture does."""

LINE_BREAK: Final = "\\\n"
"""Markdown's line break within a paragraph."""

NAMED_FAILURES: Final = 3
CHECK_NAME: Final = re.compile(r"[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True)
class StageSummary:
    """What the summary says beside the output itself."""

    results: Sequence[CheckResult] = ()
    changes: str = ""


def make_summary(project: Project, step: Step, report: StepReport) -> StageSummary:
    """Judge an output without saving the results, and compare it with the version before it."""
    results = judge.preview_checks(project.store, report.manifest, step.shown_thresholds)
    return StageSummary(results, describe_changes(project, report))


def write_summary(output: Manifest, summary: StageSummary, link: str) -> str:
    """Return the summary as Markdown; `link` is the address of the report, empty if it is not served."""
    first = [*describe_results(summary.results), *([f"[report]({link})"] if link else [])]
    counts = list_numbers(output)
    between = " · " if len(" · ".join(counts)) <= MAX_LINE_CHARS else LINE_BREAK
    numbers = between.join(f"**{count}**" for count in counts)
    changes = textwrap.wrap(summary.changes, MAX_LINE_CHARS, break_long_words=False, break_on_hyphens=False)
    texts = [one for one in (LINE_BREAK.join(first), numbers, LINE_BREAK.join(changes)) if one]
    for bars, lines in DETAILS:
        picture = draw_picture(output, bars, lines)
        shown = [texts[0], *([f"![]({picture})"] if picture else []), *texts[1:]]
        text = "\n\n".join(shown)
        if len(text) < MAX_INLINE_CHARS:
            return text
    return "\n\n".join(texts)


def describe_results(results: Sequence[CheckResult]) -> list[str]:
    """Return lines: the verdict with the number of checks, and the first checks that failed with their values."""
    judged = [result for result in results if result.outcome != "not_applicable"]
    failed = sorted((one for one in judged if one.failed), key=lambda one: not one.blocking)
    count = number_text.format_count(len(judged), "check")
    if not failed:
        return [f"**Passed** · {count}" if judged else "**Built**"]
    is_blocked = failed[0].blocking
    verdict = (
        f"**Blocked** · {len(failed)} of {count} failed"
        if is_blocked
        else f"**Passed** · {len(failed)} of {count} warn"
    )
    return [
        verdict,
        *(
            f"`{one.check}` {one.shown}{' (waived)' if one.waiver else ''}"
            for one in failed[:NAMED_FAILURES]
            if CHECK_NAME.fullmatch(one.check) is not None
        ),
    ]


def list_numbers(output: Manifest) -> list[str]:
    """Return three numbers with their units: the stage's own, then the size of the output and the time it took."""
    own = console.summarize_output(output).split(" · ")
    size = sum(file.bytes for part in output.parts for file in part.files.values())
    more = [number_text.format_size(size)] if size else []
    return [*own, *more, f"made in {number_text.format_seconds(output.seconds)}"][:3]


def describe_changes(project: Project, report: StepReport) -> str:
    """Return what is new since the version before this one."""
    made = report.manifest
    held = [report.held.sentence] if report.held is not None else []
    if report.reused:
        return "; ".join(["Unchanged since " + _format_time(made.built_at), *held])
    before = diff.find_previous_version(project, made)
    if before is None:
        return "; ".join(["The first version", *held])
    changed = [_format_change(one) for one in diff.compare_stage_facts(before, made)]
    return "; ".join([f"Since {_format_time(before.built_at)}: {', '.join(changed) or 'the same numbers'}", *held])


def _format_time(built_at: str) -> str:
    return f"{built_at[:16].replace('T', ' ')} UTC"


def _format_change(one: NumberComparison) -> str:
    if one.before is None or one.after is None:
        return f"{one.name} {'new' if one.before is None else 'gone'}"
    change = one.after - one.before
    return f"{one.name} {100 * change:+.2f} points" if one.is_share else f"{one.name} {change:+,.6g}"


def draw_picture(output: Manifest, bars: int, lines: int) -> str:
    """Return the data URI of the picture that says most about an output; empty if there is nothing to draw."""
    for found in _iterate_drawable(output):
        if isinstance(found, Histogram):
            return inline_plots.make_inline_uri(inline_plots.draw_inline_histogram(found, max_bars=bars))
        return inline_plots.make_inline_uri(inline_plots.draw_inline_bars(found, max_bars=lines))
    return ""


def _iterate_drawable(output: Manifest) -> Iterator[Histogram | list[tuple[str, float]]]:
    """Yield what can be drawn, the most telling first: a distribution, tokens by class, a table, reasons of rejects."""
    spread = [
        histogram
        for histogram in output.histograms.values()
        if sum(1 for count in histogram.counts if count) > NAMED_FAILURES
    ]
    if spread:
        yield spread[0]
    if tokens := _sum_by_name((name, count) for _, name, count in output.token_ledger):
        yield tokens
    for name, column in DRAWN_COLUMNS.items():
        table = output.tables.get(name)
        if table is not None and column in table.columns and table.rows:
            named = table.columns.index("split") if "split" in table.columns else 0
            yield [(str(row[named]), row[table.columns.index(column)]) for row in table.rows]
    if records := _sum_by_name((reason or state, count) for state, reason, count in output.ledger):
        yield records
    yield from output.histograms.values()


DRAWN_COLUMNS: Final[Mapping[str, str]] = {"ranks": "trained_tokens", "splits": "sequences", "files": "records"}
"""Tables that are drawn, one bar for each row, and the column that gives its length."""


def _sum_by_name(pairs: Iterator[tuple[str, int]]) -> list[tuple[str, float]]:
    sums: dict[str, float] = {}
    for name, count in pairs:
        if count:
            sums[name] = sums.get(name, 0) + count
    return sorted(sums.items(), key=lambda one: -one[1])
