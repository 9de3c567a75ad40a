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
from typing import Any, Final, TypeAlias

import dagster as dg
import yaml

from dagster_rowmill.resources import GATES_RESOURCE
from rowmill.build import comparison
from rowmill.build.comparison import BuildChanges
from rowmill.build.gate import propose_run_waiver
from rowmill.build.runner import StepReport
from rowmill.build.steps import Project
from rowmill.checks import expectation_suite
from rowmill.checks.judge import CheckResult
from rowmill.core import arrays
from rowmill.core.stage_names import GPU_PARTITIONS, RAW_DATASET
from rowmill.core.storage import Store
from rowmill.reports import alert_text, build_record, build_view, console, plots, report_page
from rowmill.reports.links import ROW_ID, PageLinks
from rowmill.schema.examples import COLUMN_DOCS
from rowmill.schema.manifest import DisplayTable, Manifest, get_stage_folder
from rowmill.schema.rank_counts import RankCounts, RankDetails
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
MAX_SAMPLE_LINKS: Final = 10
"""Rows that a check's page links: Dagster shows Markdown of fewer than 1,000 characters inline."""
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
VIEWER_KEY = "viewer"
"""Metadata key of the viewer's list of the rows that a stage made, or on which a check failed."""
SAMPLE_ROWS_KEY = "sample_rows"
"""Metadata key of a check's samples as links to their rows in the viewer."""
THRESHOLD_KEY = "threshold_digest"
"""Metadata key of the digest of the threshold that a check was judged under."""


def make_stage_page(
    project: Project,
    report: StepReport,
    reports_url: str = "",
    results: Sequence[CheckResult] = (),
    viewer_url: str = "",
) -> MetadataPage:
    """Return the page of a stage that was just run or reused.

    `reports_url` is the base URL of served reports, `viewer_url` that of a viewer, each empty if there is none.
    A page shows entries in this order: what a reader asks first comes first, and bookkeeping last.
    """
    output, store = report.manifest, project.store
    is_new_build = output.stage == GPU_PARTITIONS and not report.reused
    build_changes = build_view.load_build_view(project).changes if is_new_build else None
    link = link_report(store, f"{report_page.report_path(output.key[0])}#{'/'.join(output.key[1:])}", reports_url)
    answer = describe_results(results)
    if output.stage == GPU_PARTITIONS:
        is_read = alert_text.find_published_version(project) == output.version
        answer.append(f"**Trainers {'read' if is_read else 'do not read'} this version**")
    rows_url = PageLinks(output.key[0], base=viewer_url).of_stage(output.key) if viewer_url else ""
    addresses = {"report": str(link.value) if reports_url else "", "rows": rows_url}
    if any(addresses.values()):
        answer.append(" · ".join(f"[{name}]({address})" for name, address in addresses.items() if address))
    summary = write_summary(output, answer, describe_changes(project, report, build_changes))
    page: MetadataPage = {SUMMARY_KEY: dg.MetadataValue.md(summary)}
    if build_changes is not None and (table := build_view.tabulate_changes(build_changes)).rows:
        page[CHANGES_KEY] = _make_table_entry(table)
    if rows_url:
        page[VIEWER_KEY] = dg.MetadataValue.url(rows_url)
    page |= {"report": link, **show_trackers(build_record.load_log_results(project, output).values())}
    # The rows, the facts that are numbers, the tokens that a model sees, and the share that is trained.
    rows = catalog.count_output_rows(output)
    if rows is not None:
        page["dagster/row_count"] = dg.MetadataValue.int(rows.count)
    page |= _show_numbers(output.facts)
    counts = build_view.sum_token_classes(output)
    if tokens := sum(counts.get(name, 0) for name in ("trained", "context", "template")):
        page |= _show_numbers({"trained_share": counts.get("trained", 0) / tokens, "tokens": tokens})
    page |= {f"plot {name}": _show_plot(name, svg) for name, svg in plots.draw_plots(output).items()}
    for name, table, about in build_view.list_tables(output):
        page[f"table {name}"] = _make_table_entry(table)
        if about:
            page[f"about {name}"] = dg.MetadataValue.text(about)
    if names := ", ".join(name for name, value in output.values.items() if value is None):
        page["not_applicable"] = dg.MetadataValue.text(names)
    if output.schema:
        # The columns of a source are the user's own.
        docs = {} if output.stage == RAW_DATASET else COLUMN_DOCS
        columns = [dg.TableColumn(name, type=kind, description=docs.get(name)) for name, kind in output.schema]
        page[COLUMNS_KEY] = dg.MetadataValue.table_schema(dg.TableSchema(columns=columns))
    if report.held is not None:
        page[HELD_KEY] = dg.MetadataValue.text(report.held.sentence)
    return page | _show_run(report, store.path(get_stage_folder(output.key)))


def _show_plot(name: str, svg: str) -> dg.MetadataValue[Any]:
    if len(svg) > MAX_PLOT_BYTES:
        return dg.MetadataValue.text("too large for this page; see the stage's report")
    encoded = base64.b64encode(svg.encode()).decode()
    return dg.MetadataValue.md(f"![{name.replace('_', ' ')}](data:image/svg+xml;base64,{encoded})")


def _show_run(report: StepReport, folder: str) -> MetadataPage:
    """Return what the run made, and the identities of its output.

    Separate from the facts: the number of parts is one thing, the number that this build made another.
    """
    output = report.manifest
    return {
        "build_reused": dg.MetadataValue.bool(report.reused),
        "build_parts": dg.MetadataValue.int(report.parts),
        "build_parts_reused": dg.MetadataValue.int(report.parts_reused),
        "build_rows": dg.MetadataValue.int(report.rows_made),
        "build_seconds": dg.MetadataValue.float(round(report.seconds, 3)),
        "folder": dg.MetadataValue.path(folder),
        "fingerprint": dg.MetadataValue.text(output.fingerprint),
        VERSION_KEY: dg.MetadataValue.text(output.version),
    }


def write_summary(output: Manifest, answer: Sequence[str], changes: Sequence[str]) -> str:
    """Return the first entry of a page as Markdown: the answer, three counts, and the changes, each from a new line."""
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
    texts = (LINE_BREAK.join(answer), between.join(f"**{count}**" for count in counts), LINE_BREAK.join(lines))
    return "\n\n".join(text for text in texts if text)


def describe_results(results: Sequence[CheckResult]) -> list[str]:
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


def describe_changes(project: Project, report: StepReport, changes: BuildChanges | None) -> list[str]:
    """Return what is new since the version before this one, and of the ranks since the last build, in short lines."""
    output = report.manifest
    notes = [report.held.sentence] if report.held is not None else []
    if changes is not None:
        counts = build_view.list_counts(changes) or [build_view.NOTHING_CHANGED]
        others = build_view.list_shifts_and_checks(changes, names_bins=False)
        return [*notes, f"Since {arrays.format_time(changes.published_at)}:", *counts, *others]
    if report.reused:
        return [f"Unchanged since {arrays.format_time(output.built_at)}", *notes]
    before = comparison.find_previous_version(project, output)
    if before is None:
        return ["The first version", *notes]
    numbers = [
        f"{number.name} {console.format_change(number)}" for number in comparison.compare_stage_facts(before, output)
    ]
    return [f"Since {arrays.format_time(before.built_at)}: {', '.join(numbers) or 'the same numbers'}", *notes]


def link_report(store: Store, path: str, reports_url: str) -> dg.MetadataValue:
    """Link a page under `reports/`: by URL if reports are served, else by path."""
    if reports_url:
        return dg.MetadataValue.url(f"{reports_url.rstrip('/')}/{path.removeprefix('reports/')}")
    return dg.MetadataValue.path(store.path(path.partition("#")[0]))


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
    counts, details = ranks[rank].get_counts(RankCounts), ranks[rank].get_details(RankDetails)
    numbers = {
        "rank sequences": counts.sequences,
        "rank fillers": counts.fillers,
        "rank tokens": counts.tokens,
        "rank trained_tokens": counts.trained_tokens,
        "rank padding": counts.padding,
    }
    return _show_numbers(numbers) | {"rank content": dg.MetadataValue.text(details.content_hash)}


def make_check_page(
    result: CheckResult,
    store: Store,
    reports_url: str = "",
    waivers: Sequence[Mapping[str, Any]] = (),
    viewer_url: str = "",
) -> MetadataPage:
    """Return the metadata of a check result; the gate reads the version and the threshold's digest.

    `waivers` are those with which a run would get past the stage's results. With a viewer, samples are also links.
    """
    rows: MetadataPage = {}
    if viewer_url:
        links = PageLinks(result.key[0], base=viewer_url)
        rows[VIEWER_KEY] = dg.MetadataValue.url(links.of_check(result))
        # Only ids are written into Markdown, never the words of data around them.
        named = dict.fromkeys(ROW_ID.findall(" ".join(result.samples)))
        if named:
            listed = "\n".join(f"- [{name}]({links.of_row(name)})" for name in list(named)[:MAX_SAMPLE_LINKS])
            rows[SAMPLE_ROWS_KEY] = dg.MetadataValue.md(listed)
    # No entry if not measured or not applicable: Dagster cannot plot a key that is sometimes text.
    value = {} if result.value is None else {"value": dg.MetadataValue.float(result.value)}
    waiving: MetadataPage = {}
    if propose_run_waiver(result) is not None:
        # What a person pastes into the launchpad to accept a blocking failure for one run. A code block by indentation:
        # Dagster's button copies the Markdown, and this one is YAML as well.
        config = {"resources": {GATES_RESOURCE: {"config": {"waivers": [dict(waiver) for waiver in waivers]}}}}
        text = textwrap.indent(yaml.safe_dump(config, sort_keys=False), "    ")
        waiving["waive_for_one_run"] = dg.MetadataValue.md(text)
    return {
        "check": dg.MetadataValue.text(result.check),
        "outcome": dg.MetadataValue.text(result.outcome.replace("_", " ")),
        **value,
        "threshold": dg.MetadataValue.text(result.wanted),
        "remedy": dg.MetadataValue.text(result.remedy),
        "waiver": dg.MetadataValue.text(result.waiver or "none"),
        **waiving,
        "samples": dg.MetadataValue.text(("\n" if result.causes else " ").join(result.samples[:10]) or "none"),
        **rows,
        VERSION_KEY: dg.MetadataValue.text(result.version),
        THRESHOLD_KEY: dg.MetadataValue.text(result.threshold_digest),
        "expectations": link_report(
            store, f"{expectation_suite.expectations_page_path(result.key)}#{result.check}", reports_url
        ),
    }


def _show_numbers(facts: Mapping[str, object]) -> MetadataPage:
    """Return an entry for each finite number: Dagster prints all digits, and a share needs four that say something."""
    page: MetadataPage = {}
    for name, value in facts.items():
        if isinstance(value, int) and not isinstance(value, bool):
            page[name] = dg.MetadataValue.int(value)
        elif isinstance(value, float) and math.isfinite(value):
            page[name] = dg.MetadataValue.float(float(f"{value:.4g}") if abs(value) < 1 else round(value, 4))
    return page


def _make_table_entry(table: DisplayTable) -> dg.MetadataValue:
    shown = [[_format_cell(value) for value in row] for row in table.rows[:MAX_TABLE_ROWS]]
    columns: list[dg.TableColumn] = []
    for i, name in enumerate(table.columns):
        kinds = {type(row[i]) for row in shown if row[i] is not None}
        kind = "string" if not kinds or kinds - {int, float} else "int" if kinds == {int} else "float"
        columns.append(dg.TableColumn(name, type=kind))
    records = [dg.TableRecord(dict(zip(table.columns, row, strict=True))) for row in shown]
    return dg.MetadataValue.table(records, schema=dg.TableSchema(columns=columns))


def _format_cell(value: object) -> str | int | float | bool | None:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, str | int) else str(value)
