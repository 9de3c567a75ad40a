"""Metadata of a stage's page: the view of its output as numbers, tables and plots for Dagster.

    **Blocked** · 1 of 14 checks failed                          the first entry: what was built, and is it good
    `unknown_roles` 14.96 %
    [report](http://127.0.0.1:3001/demo/report.html#chats/canonical_rows)

    **1,304 rows** · **39 rejected** · **369.9 kB**

    Since 2026-03-01 02:00 UTC: rows +12,
    rejected records -1

Four properties of Dagster's pages decide the form. Numbers are plotted over time, so their keys never change. Markdown
is shown inline below 1,000 characters and behind a button above, so plots are a click away, and the summary has none.
Markdown may contain image links that make requests, so text from data never enters it: it goes into table cells, which
are shown as plain text, and into plots, encoded. A schema under Dagster's own key is shown above all metadata, a screen
high or more, so the columns have a key of ours and their place below (docs/explanation/dagster-pages.md).
"""

import base64
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import dagster as dg

from dagster_rowmill.resources import write_waiver_config
from rowmill.build import comparison
from rowmill.build.comparison import BuildChanges, NumberComparison
from rowmill.build.gate import propose_run_waiver
from rowmill.build.runner import StepReport
from rowmill.build.steps import Project
from rowmill.checks import expectation_suite
from rowmill.checks.judge import CheckResult
from rowmill.core import arrays
from rowmill.core.stage_names import GPU_PARTITIONS, RAW_DATASET
from rowmill.core.storage import Store
from rowmill.reports import alert_text, build_view, console, plots, report_page
from rowmill.reports.build_changes import describe_changes as describe_build_changes
from rowmill.reports.build_changes import tabulate_changes
from rowmill.schema.examples import COLUMN_DOCS
from rowmill.schema.manifest import NOT_APPLICABLE, DisplayTable, Manifest, get_stage_folder
from rowmill.stages import catalog
from rowmill.tracking.delivery import LogResult

MetadataPage: TypeAlias = dict[str, Any]
"""Metadata entries by key; every value is one of Dagster's metadata values."""

MAX_TABLE_ROWS: Final = 30
"""Rows of a table on a page: the event log keeps every page."""
MAX_PLOT_BYTES: Final = 64 << 10
MAX_LINE_CHARS: Final = 40
"""What fits beside the longest key in a window of 1440 pixels; Dagster cuts longer lines."""
LINE_BREAK: Final = "\\\n"
"""Markdown's line break within a paragraph."""
NAMED_FAILURES: Final = 3
CHECK_NAME: Final = re.compile(r"[A-Za-z0-9_]+")

SUMMARY_KEY = "summary"
"""Metadata key of the first entry of every stage's page."""
CHANGES_KEY = "since the last build"
"""Metadata key of the table of what the ranks changed, dataset by dataset."""
COLUMNS_KEY = "columns"
"""Metadata key of the columns; under `dagster/column_schema`, they would come before all other metadata."""
HELD_KEY = "held"
"""Metadata key of a version that `rowmill use` holds."""
LOGGED_KEY = "logged to"
"""First words of the metadata keys of trackers, before the tracker's kind."""
VERSION_KEY = "version"
"""Metadata key of the manifest version, in every materialization and check result."""
THRESHOLD_KEY = "threshold_digest"
"""Metadata key of the digest of the threshold that a check was judged under."""


def make_stage_page(
    report: StepReport,
    store: Store,
    reports_url: str = "",
    *,
    results: Sequence[CheckResult] = (),
    changes: Sequence[str] = (),
    readers: str = "",
    build_changes: BuildChanges | None = None,
    logged: Mapping[str, LogResult] = MappingProxyType({}),
) -> MetadataPage:
    """Return the page of a stage that was just run or reused.

    `reports_url` is the base URL of served reports; `results`, `changes` and `readers` are for the summary;
    `build_changes` are shown as a table; `logged` is what became of logging the output to trackers.
    """
    manifest = report.manifest
    path = f"{report_page.report_path(manifest.key[0])}#{'/'.join(manifest.key[1:])}"
    link = link_report(store, path, reports_url)
    summary = write_summary(manifest, results, changes, str(link.value) if reports_url else "", readers)
    # A page shows entries in this order: what a reader asks first comes first, and bookkeeping last.
    names = ", ".join(name for name, value in manifest.facts.items() if value == NOT_APPLICABLE)
    table = None if build_changes is None else tabulate_changes(build_changes)
    return {
        SUMMARY_KEY: dg.MetadataValue.md(summary),
        **({CHANGES_KEY: _make_table_entry(table)} if table is not None and table.rows else {}),
        "report": link,
        **show_trackers(logged.values()),
        **_show_numbers(manifest),
        **{f"plot {name}": embed_plot(svg, name) for name, svg in plots.draw_plots(manifest).items()},
        **_show_tables(manifest),
        **({NOT_APPLICABLE: dg.MetadataValue.text(names)} if names else {}),
        **_show_schema(manifest),
        **_show_build(report, store),
    }


def write_summary(
    output: Manifest, results: Sequence[CheckResult], changes: Sequence[str], link: str, readers: str = ""
) -> str:
    """Return the first entry of a page as Markdown; `link` is the address of the report, empty if it is not served.

    Each of `changes` begins a line; `readers` says whether trainers read the output, empty where they read no such one.
    """
    size = sum(file.bytes for part in output.parts for file in part.files.values())
    counts = [
        *console.summarize_output(output).split(" · "),
        *([arrays.format_size(size)] if size else []),
        f"made in {arrays.format_seconds(output.seconds)}",
    ][:3]
    between = " · " if len(" · ".join(counts)) <= MAX_LINE_CHARS else LINE_BREAK
    lines = [
        line
        for change in changes
        for line in textwrap.wrap(change, MAX_LINE_CHARS, break_long_words=False, break_on_hyphens=False)
    ]
    answer = [*_describe_results(results), *([f"**{readers}**"] if readers else [])]
    texts = [
        LINE_BREAK.join([*answer, *([f"[report]({link})"] if link else [])]),
        between.join(f"**{count}**" for count in counts),
        LINE_BREAK.join(lines),
    ]
    return "\n\n".join(text for text in texts if text)


def _describe_results(results: Sequence[CheckResult]) -> list[str]:
    """Return lines: the verdict with the number of checks, and the first checks that failed with their values."""
    judged = [result for result in results if result.outcome != "not_applicable"]
    failed = sorted((failure for failure in judged if failure.failed), key=lambda failure: not failure.blocking)
    count = arrays.format_count(len(judged), "check")
    if not failed:
        return [f"**Passed** · {count}" if judged else "**Built**"]
    verdict, failing = ("**Blocked**", "failed") if failed[0].blocking else ("**Passed**", "warn")
    return [
        f"{verdict} · {len(failed)} of {count} {failing}",
        *(
            f"`{failure.check}` {failure.shown}{' (waived)' if failure.waiver else ''}"
            for failure in failed[:NAMED_FAILURES]
            if CHECK_NAME.fullmatch(failure.check) is not None
        ),
    ]


def find_build_changes(project: Project, report: StepReport) -> BuildChanges | None:
    """Return what changed since the last build, for the page of the ranks that were just made."""
    is_new = report.manifest.stage == GPU_PARTITIONS and not report.reused
    return build_view.load_build_view(project).changes if is_new else None


def describe_readers(project: Project, output: Manifest) -> str:
    """Return whether trainers read these ranks; empty for every other stage."""
    if output.stage != GPU_PARTITIONS:
        return ""
    is_read = alert_text.find_published_version(project) == output.version
    return "Trainers read this version" if is_read else "Trainers do not read this version"


def describe_changes(project: Project, report: StepReport, changes: BuildChanges | None = None) -> list[str]:
    """Return what is new since the version before this one, and of the ranks since the last build, in short lines."""
    output = report.manifest
    notes = [report.held.sentence] if report.held is not None else []
    if changes is not None:
        first, *others = describe_build_changes(changes, names_bins=False)
        since, _, counts = first.partition(": ")
        return [*notes, f"S{since[1:]}:", *counts.split("; "), *others]
    if report.reused:
        return ["Unchanged since " + _format_time(output.built_at), *notes]
    before = comparison.find_previous_version(project, output)
    if before is None:
        return ["The first version", *notes]
    changed = [_format_change(change) for change in comparison.compare_stage_facts(before, output)]
    return [f"Since {_format_time(before.built_at)}: {', '.join(changed) or 'the same numbers'}", *notes]


def _format_time(built_at: str) -> str:
    return f"{built_at[:16].replace('T', ' ')} UTC"


def _format_change(comparison: NumberComparison) -> str:
    if comparison.before is None or comparison.after is None:
        return f"{comparison.name} {'new' if comparison.before is None else 'gone'}"
    change = comparison.after - comparison.before
    return (
        f"{comparison.name} {100 * change:+.2f} points" if comparison.is_share else f"{comparison.name} {change:+,.6g}"
    )


def link_report(store: Store, path: str, reports_url: str) -> dg.MetadataValue:
    """Link a page under `reports/`: by URL if reports are served, else by path."""
    if reports_url:
        return dg.MetadataValue.url(f"{reports_url.rstrip('/')}/{path.removeprefix('reports/')}")
    return dg.MetadataValue.path(store.path(path.partition("#")[0]))


def _show_build(report: StepReport, store: Store) -> MetadataPage:
    # Separate from the facts: the number of parts is one thing, the number that this build made another.
    manifest = report.manifest
    return {
        **({} if report.held is None else {HELD_KEY: dg.MetadataValue.text(report.held.sentence)}),
        "build_reused": dg.MetadataValue.bool(report.reused),
        "build_parts": dg.MetadataValue.int(report.parts),
        "build_parts_reused": dg.MetadataValue.int(report.parts_reused),
        "build_rows": dg.MetadataValue.int(report.rows_made),
        "build_seconds": dg.MetadataValue.float(round(report.seconds, 3)),
        "folder": dg.MetadataValue.path(store.path(get_stage_folder(manifest.key))),
        "fingerprint": dg.MetadataValue.text(manifest.fingerprint),
        VERSION_KEY: dg.MetadataValue.text(manifest.version),
    }


def show_trackers(logged: Iterable[LogResult]) -> MetadataPage:
    """Return an entry per tracker: where the build can be seen there, or why it is not logged."""
    page: MetadataPage = {}
    for result in logged:
        key = f"{LOGGED_KEY} {result.kind}"
        # Two trackers of one kind.
        key += f" {sum(name.startswith(key) for name in page) + 1}" if key in page else ""
        is_link = result.address.startswith("http")
        page[key] = dg.MetadataValue.url(result.address) if is_link else dg.MetadataValue.text(result.shown)
    return page


def make_rank_page(manifest: Manifest, rank: str) -> MetadataPage:
    """Return the metadata of one rank: its counts, and the digest of its content."""
    ranks = dict(zip(manifest.card.get("ranks", ()), manifest.parts, strict=False))
    if rank not in ranks:
        return {}
    facts = ranks[rank].facts
    counts = {f"rank {name}": _make_number_entry(value) for name, value in facts.items() if _is_number(value)}
    return counts | {"rank content": dg.MetadataValue.text(str(facts.get("content_hash", "")))}


def make_check_page(
    result: CheckResult, store: Store, reports_url: str = "", waivers: Sequence[Mapping[str, Any]] = ()
) -> MetadataPage:
    """Return the metadata of a check result; the gate reads the version and the threshold's digest.

    `waivers` are those with which a run would get past the stage's results.
    """
    # No entry if not measured or not applicable: Dagster cannot plot a key that is sometimes text.
    value = {} if result.value is None else {"value": dg.MetadataValue.float(result.value)}
    return {
        "check": dg.MetadataValue.text(result.check),
        "outcome": dg.MetadataValue.text(result.outcome.replace("_", " ")),
        **value,
        "threshold": dg.MetadataValue.text(result.wanted),
        "remedy": dg.MetadataValue.text(result.remedy),
        "waiver": dg.MetadataValue.text(result.waiver or "none"),
        **_show_waiver_config(result, waivers),
        "samples": dg.MetadataValue.text(("\n" if result.causes else " ").join(result.samples[:10]) or "none"),
        VERSION_KEY: dg.MetadataValue.text(result.version),
        THRESHOLD_KEY: dg.MetadataValue.text(result.threshold_digest),
        "expectations": link_report(
            store, f"{expectation_suite.expectations_page_path(result.key)}#{result.check}", reports_url
        ),
    }


def _show_waiver_config(result: CheckResult, waivers: Sequence[Mapping[str, Any]]) -> MetadataPage:
    """Return what a person pastes into the launchpad to accept a blocking failure for one run."""
    if propose_run_waiver(result) is None:
        return {}
    # A code block by indentation: Dagster's button copies the Markdown, and this one is YAML as well.
    return {"waive_for_one_run": dg.MetadataValue.md(textwrap.indent(write_waiver_config(waivers), "    "))}


def _show_numbers(manifest: Manifest) -> MetadataPage:
    """Return the rows, the facts that are numbers, the tokens that a model sees, and the share that is trained."""
    rows = catalog.count_output_rows(manifest)
    page: MetadataPage = {} if rows is None else {"dagster/row_count": dg.MetadataValue.int(rows.count)}
    page |= {name: _make_number_entry(value) for name, value in manifest.facts.items() if _is_number(value)}
    counts = build_view.sum_token_classes(manifest)
    tokens = sum(counts.get(name, 0) for name in ("trained", "context", "template"))
    if tokens:
        page["trained_share"] = _make_number_entry(counts.get("trained", 0) / tokens)
        page["tokens"] = dg.MetadataValue.int(tokens)
    return page


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _make_number_entry(value: float) -> dg.MetadataValue:
    if isinstance(value, int):
        return dg.MetadataValue.int(value)
    # Dagster prints all digits of a number; a share needs four that say something.
    return dg.MetadataValue.float(float(f"{value:.4g}") if abs(value) < 1 else round(value, 4))


def embed_plot(svg: str, name: str) -> dg.MetadataValue:
    """Wrap a plot as Markdown; one that is too large for the event log is only in the report."""
    if len(svg) > MAX_PLOT_BYTES:
        return dg.MetadataValue.text("too large for this page; see the stage's report")
    encoded = base64.b64encode(svg.encode()).decode()
    return dg.MetadataValue.md(f"![{name.replace('_', ' ')}](data:image/svg+xml;base64,{encoded})")


def _show_tables(manifest: Manifest) -> MetadataPage:
    page: MetadataPage = {}
    for name, table, about in build_view.list_tables(manifest):
        page[f"table {name}"] = _make_table_entry(table)
        if about:
            page[f"about {name}"] = dg.MetadataValue.text(about)
    return page


def _make_table_entry(table: DisplayTable) -> dg.MetadataValue:
    shown = [[_format_cell(value) for value in row] for row in table.rows[:MAX_TABLE_ROWS]]
    columns = [dg.TableColumn(name, type=_column_type(row[i] for row in shown)) for i, name in enumerate(table.columns)]
    records = [dg.TableRecord(dict(zip(table.columns, row, strict=True))) for row in shown]
    return dg.MetadataValue.table(records, schema=dg.TableSchema(columns=columns))


def _format_cell(value: object) -> str | int | float | bool | None:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, str | int) else str(value)


def _column_type(values: Iterable[object]) -> str:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int} and kinds:
        return "int"
    return "float" if kinds <= {int, float} and kinds else "string"


def _show_schema(manifest: Manifest) -> MetadataPage:
    if not manifest.schema:
        return {}
    # The columns of a source are the user's own.
    docs = {} if manifest.stage == RAW_DATASET else COLUMN_DOCS
    columns = [dg.TableColumn(name, type=kind, description=docs.get(name)) for name, kind in manifest.schema]
    return {COLUMNS_KEY: dg.MetadataValue.table_schema(dg.TableSchema(columns=columns))}
