"""Metadata of a stage's page: the engine's report as numbers, tables and plots for Dagster.

Four properties of Dagster's pages decide the form. Numbers are plotted over time, so their keys never change. Markdown
is shown inline below 1,000 characters and behind a button above, so a plot is two entries: a small one, and the full
plot. Markdown may contain image links that make requests, so text from data never enters it: it goes into table cells,
which are shown as plain text. A schema under Dagster's own key is shown above all metadata, a screen high or more, so
the columns have a key of ours and their place below (docs/how-to/dagster-pages.md).
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import dagster as dg

from dagster_rowmill import stage_summary
from dagster_rowmill.resources import write_waiver_config
from dagster_rowmill.stage_summary import DETAILS, StageSummary
from rowmill import stats
from rowmill.build.run_waivers import propose_run_waiver
from rowmill.build.runner import StepReport
from rowmill.checks import expectations_page
from rowmill.checks.judge import CheckResult
from rowmill.core.stage_names import RAW_DATASET
from rowmill.core.storage import Store
from rowmill.reports import inline_plots, plots, report_page
from rowmill.schema.column_docs import COLUMN_DOCS
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import NOT_APPLICABLE, DisplayTable, Histogram, Manifest, get_stage_folder
from rowmill.stages import catalog

NO_SUMMARY = StageSummary()

MetadataPage: TypeAlias = dict[str, Any]
"""Metadata entries by key; every value is one of Dagster's metadata values."""

MAX_TABLE_ROWS = 30
"""Rows of a table on a page: the event log keeps every page."""
MAX_PLOT_BYTES = 64 << 10

SUMMARY_KEY = "summary"
"""Metadata key of the first entry of every stage's page."""
COLUMNS_KEY = "columns"
"""Metadata key of the columns; under `dagster/column_schema`, they would come before all other metadata."""
HELD_KEY = "held"
"""Metadata key of a version that `rowmill use` holds."""
VERSION_KEY = "version"
"""Metadata key of the manifest version, in every materialization and check result."""
THRESHOLD_KEY = "threshold_digest"
"""Metadata key of the digest of the threshold that a check was judged under."""


def make_stage_page(
    report: StepReport, store: Store, reports_url: str = "", summary: StageSummary = NO_SUMMARY
) -> MetadataPage:
    """Return the page of a stage that was just run or reused; `reports_url` is the base URL of served reports."""
    manifest = report.manifest
    path = f"{report_page.report_path(manifest.key[0])}#{'/'.join(manifest.key[1:])}"
    link = link_report(store, path, reports_url)
    # A page shows entries in this order: what a reader asks first comes first, and bookkeeping last.
    return {
        SUMMARY_KEY: dg.MetadataValue.md(
            stage_summary.write_summary(manifest, summary, str(link.value) if reports_url else "")
        ),
        "report": link,
        **_show_numbers(manifest),
        **_show_tokens(manifest),
        **_show_plots(manifest.histograms),
        **_show_bars(manifest.tables),
        **_show_tables(manifest),
        **_show_inapplicable_checks(manifest),
        **_show_schema(manifest),
        **_show_build(report, store),
    }


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
            store, f"{expectations_page.expectations_page_path(result.key)}#{result.check}", reports_url
        ),
    }


def _show_waiver_config(result: CheckResult, waivers: Sequence[Mapping[str, Any]]) -> MetadataPage:
    """Return what a person pastes into the launchpad to accept a blocking failure for one run."""
    if propose_run_waiver(result) is None:
        return {}
    # A code block by indentation: Dagster's button copies the Markdown, and this one is YAML as well.
    return {"waive_for_one_run": dg.MetadataValue.md(textwrap.indent(write_waiver_config(waivers), "    "))}


def _show_numbers(manifest: Manifest) -> MetadataPage:
    page: MetadataPage = {
        name: _make_number_entry(value) for name, value in manifest.facts.items() if _is_number(value)
    }
    rows = catalog.count_output_rows(manifest)
    return page if rows is None else {"dagster/row_count": dg.MetadataValue.int(rows.count), **page}


def _show_inapplicable_checks(manifest: Manifest) -> MetadataPage:
    """List the facts that do not apply to this data; a number would claim that something was measured."""
    names = ", ".join(name for name, value in manifest.facts.items() if value == NOT_APPLICABLE)
    return {NOT_APPLICABLE: dg.MetadataValue.text(names)} if names else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _make_number_entry(value: float) -> dg.MetadataValue:
    if isinstance(value, int):
        return dg.MetadataValue.int(value)
    # Dagster prints all digits of a number; a share needs four that say something.
    return dg.MetadataValue.float(float(f"{value:.4g}") if abs(value) < 1 else round(value, 4))


def _show_tokens(manifest: Manifest) -> MetadataPage:
    """Return the tokens by class, and the trained share of the tokens that a model sees."""
    counts: dict[str, int] = {}
    for _, token_class, tokens in manifest.token_ledger:
        counts[token_class] = counts.get(token_class, 0) + tokens
    seen = sum(counts.get(name, 0) for name in ("trained", "context", "template"))
    if not seen:
        return {}
    large = plots.draw_bars_svg("Tokens by class", list(counts.items()))
    return {
        "trained_share": _make_number_entry(counts.get("trained", 0) / seen),
        "tokens": dg.MetadataValue.int(seen),
        "plot token_classes": _embed_inline_bars(list(counts.items()), "tokens by class"),
        "plot token_classes (large)": embed_picture(large, "tokens by class"),
    }


def _show_plots(histograms: Mapping[str, Histogram]) -> MetadataPage:
    page: MetadataPage = {}
    for name, histogram in histograms.items():
        if sum(histogram.counts):
            page[f"plot {name}"] = _embed_inline(
                (inline_plots.draw_inline_histogram(histogram, max_bars=bars) for bars, _ in DETAILS),
                name,
            )
            page[f"plot {name} (large)"] = embed_picture(plots.draw_histogram_svg(histogram), name)
    return page


DRAWN_COLUMNS = {"files": "records", "ranks": "trained_tokens"}
"""Tables that are drawn as well, one bar for each row, and the column that gives its length."""


def _show_bars(tables: Mapping[str, DisplayTable]) -> MetadataPage:
    page: MetadataPage = {}
    for name, column in DRAWN_COLUMNS.items():
        table = tables.get(name)
        if table is None or column not in table.columns or not table.rows:
            continue
        shown = [(str(row[0]), row[table.columns.index(column)]) for row in table.rows[:MAX_TABLE_ROWS]]
        title = f"{column.replace('_', ' ')} of {name}"
        page[f"plot {name}"] = _embed_inline_bars(shown, name)
        page[f"plot {name} (large)"] = embed_picture(plots.draw_bars_svg(title, shown), name)
    return page


def embed_picture(svg: str, name: str) -> dg.MetadataValue:
    """Wrap a plot as Markdown; one that is too large for the event log is only in the report."""
    if len(svg) > MAX_PLOT_BYTES:
        return dg.MetadataValue.text("too large for this page; see the stage's report")
    return dg.MetadataValue.md(f"![{name.replace('_', ' ')}]({plots.make_data_uri(svg)})")


def _embed_inline_bars(items: Sequence[tuple[str, float]], name: str) -> dg.MetadataValue:
    drawn = (inline_plots.draw_inline_bars(items, max_bars=lines) for _, lines in DETAILS)
    return _embed_inline(drawn, name)


def _embed_inline(drawn: Iterable[str], name: str) -> dg.MetadataValue:
    """Wrap the most detailed drawing that Dagster shows inline."""
    texts = (f"![{name.replace('_', ' ')}]({inline_plots.make_inline_uri(svg)})" for svg in drawn)
    found = next((text for text in texts if len(text) < stage_summary.MAX_INLINE_CHARS), "")
    return dg.MetadataValue.md(found)


_NO_TABLE = DisplayTable((), ())


def _show_tables(manifest: Manifest) -> MetadataPage:
    """Return the stage's tables, without those that a plot or a ledger already shows."""
    ledgers = {
        "ledger": DisplayTable(("state", "reason", "records"), _sort_ledger(manifest.ledger)),
        "token_ledger": DisplayTable(("split", "class", "tokens"), manifest.token_ledger),
        "waivers": DisplayTable(("waiver",), tuple((waiver,) for waiver in manifest.waivers)),
    }
    shown_elsewhere = {
        *manifest.histograms,
        # A table of rejects with sample rows shows more than the ledger.
        *(["rejects"] if manifest.ledger and len(manifest.tables.get("rejects", _NO_TABLE).columns) == 2 else []),
        *(["tokens"] if manifest.token_ledger else []),
    }
    own = {name: table for name, table in manifest.tables.items() if name not in shown_elsewhere}
    page: MetadataPage = {}
    for name, table in (own | ledgers).items():
        if table.rows:
            page[f"table {name}"] = _make_table_entry(table)
            if (about := stats.describe_estimate(name, table)) is not None:
                page[f"about {name}"] = dg.MetadataValue.text(about)
    return page


def _sort_ledger(ledger: Sequence[tuple[str, str, int]]) -> tuple[tuple[str, str, int], ...]:
    """Put what was kept first and then the most frequent reasons: a page may not show all of them."""
    return tuple(sorted(ledger, key=lambda line: (line[0] != KEPT, -line[2], line)))


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
