"""What a stage's page shows: a report of the engine as numbers, tables and plots for Dagster.

What belongs here: turning a manifest into metadata entries, drawing its histograms. What does not:
computing any of the numbers; a number that is missing here is missing in the manifest.

Three habits of Dagster's pages decide the shapes. Numbers are drawn over time, so their keys never change.
Markdown shows inline below 1,000 characters and behind a button above, so a plot is two entries: a
sparkline of one path with integer steps, and the full picture. Markdown may hold image links that call
out, so text from data never enters it: it goes into table cells, which are shown as plain text.
"""

import base64
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias
from xml.sax.saxutils import escape

import dagster as dg

from pipelines.build import Report
from pipelines.findings import Verdict
from pipelines.manifest import Histogram, Manifest, Table, folder
from pipelines.storage import Store

Page: TypeAlias = dict[str, Any]
"""Metadata entries by key; every value is one of Dagster's metadata values."""

MOST_ROWS = 30
"""Rows of a table on a page: the event log keeps every page for ever."""
INLINE_CHARACTERS = 1000
"""Dagster's user interface shows shorter Markdown in place, and hides the rest behind a button."""
LARGEST_PLOT_BYTES = 64 << 10
SPARK_BARS = 48
PLOT_BARS = 96

VERSION = "version"
"""The key under which every materialization and every verdict names the version of the manifest it speaks of."""


def of(report: Report, store: Store) -> Page:
    """Return the page of a stage that was just run or reused."""
    manifest = report.manifest
    return {
        **_numbers(manifest),
        **_tokens(manifest),
        **_plots(manifest.histograms),
        **_tables(manifest),
        **_schema(manifest),
        "built/reused": dg.MetadataValue.bool(report.reused),
        "built/parts": dg.MetadataValue.int(report.parts),
        "built/parts_reused": dg.MetadataValue.int(report.parts_reused),
        "built/rows_made": dg.MetadataValue.int(report.rows_made),
        "built/seconds": dg.MetadataValue.float(round(report.seconds, 3)),
        "built/folder": dg.MetadataValue.path(store.path(folder(manifest.key))),
        "built/fingerprint": dg.MetadataValue.text(manifest.fingerprint),
        VERSION: dg.MetadataValue.text(manifest.version),
    }


def of_rank(manifest: Manifest, rank: str) -> Page:
    """Return what is shown beside one rank: the row of the stage's `ranks` table that bears its folder's name."""
    table = manifest.tables.get("ranks")
    if table is None or "rank" not in table.columns:
        return {}
    rows = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    mine = next((row for row in rows if row["rank"] == rank), {})
    return {f"rank/{name}": _number_or_text(value) for name, value in mine.items() if name != "rank"}


def of_verdict(verdict: Verdict) -> Page:
    """Return what is shown beside a check's verdict; the gate reads `version` and `terms` from it."""
    return {
        "law": dg.MetadataValue.text(verdict.law),
        "value": dg.MetadataValue.text("not measured")
        if verdict.value is None
        else dg.MetadataValue.float(verdict.value),
        "wanted": dg.MetadataValue.text(verdict.wanted),
        "remedy": dg.MetadataValue.text(verdict.remedy),
        "waiver": dg.MetadataValue.text(verdict.waiver or "none"),
        "rows_to_look_at": dg.MetadataValue.text(" ".join(verdict.samples[:10]) or "none"),
        VERSION: dg.MetadataValue.text(verdict.version),
        "terms": dg.MetadataValue.text(verdict.terms),
    }


def _numbers(manifest: Manifest) -> Page:
    page: Page = {
        name: _metadata_number(value) for name, value in manifest.facts.items() if _is_number(value)
    }
    rows = _row_count(manifest)
    return page if rows is None else {"dagster/row_count": dg.MetadataValue.int(rows), **page}


def _row_count(manifest: Manifest) -> int | None:
    """Return the rows of the stage's main output: the first of these counts that the stage keeps."""
    for name in ("sequences", "examples", "rows", "records"):
        if isinstance(manifest.facts.get(name), int):
            return manifest.facts[name]
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _metadata_number(value: float) -> dg.MetadataValue:
    return dg.MetadataValue.int(value) if isinstance(value, int) else dg.MetadataValue.float(value)


def _number_or_text(value: object) -> dg.MetadataValue:
    return _metadata_number(value) if _is_number(value) else dg.MetadataValue.text(str(value))  # pyright: ignore[reportArgumentType]


def _tokens(manifest: Manifest) -> Page:
    """Return the tokens by class, and the share of a sequence's tokens that are trained."""
    counts: dict[str, int] = {}
    for _, token_class, tokens in manifest.token_ledger:
        counts[token_class] = counts.get(token_class, 0) + tokens
    kept = sum(counts.get(name, 0) for name in ("trained", "context", "template"))
    if not kept:
        return {}
    return {
        "trained_share": dg.MetadataValue.float(counts.get("trained", 0) / kept),
        "tokens": dg.MetadataValue.int(kept),
        "token_classes": _markdown(draw_shares("tokens by class", counts), alt="tokens by class"),
    }


def _plots(histograms: Mapping[str, Histogram]) -> Page:
    page: Page = {}
    for name, histogram in histograms.items():
        if sum(histogram.counts):
            page[f"plot/{name}"] = _markdown(sparkline(histogram), alt=name)
            page[f"plot/{name}_large"] = _markdown(draw(histogram), alt=name)
    return page


def _markdown(svg: str, alt: str) -> dg.MetadataValue:
    """Wrap a picture; one too large for the event log is left to the report."""
    if len(svg) > LARGEST_PLOT_BYTES:
        return dg.MetadataValue.text("too large for this page; see the stage's report")
    return dg.MetadataValue.md(
        f"![{alt.replace('_', ' ')}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"
    )


def _tables(manifest: Manifest) -> Page:
    tables: dict[str, Table] = dict(manifest.tables)
    if manifest.ledger:
        tables["ledger"] = Table(("state", "reason", "records"), manifest.ledger)
    if manifest.token_ledger:
        tables["token_ledger"] = Table(("split", "class", "tokens"), manifest.token_ledger)
    if manifest.waivers:
        tables["waivers"] = Table(("waiver",), tuple((waiver,) for waiver in manifest.waivers))
    return {f"table/{name}": _table(table) for name, table in tables.items() if table.rows}


def _table(table: Table) -> dg.MetadataValue:
    shown = [[_cell(value) for value in row] for row in table.rows[:MOST_ROWS]]
    columns = [
        dg.TableColumn(name, type=_column_type(row[i] for row in shown))
        for i, name in enumerate(table.columns)
    ]
    records = [dg.TableRecord(dict(zip(table.columns, row, strict=True))) for row in shown]
    return dg.MetadataValue.table(records, schema=dg.TableSchema(columns=columns))


def _cell(value: object) -> str | int | float | bool | None:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, str | int) else str(value)


def _column_type(values: Iterable[object]) -> str:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int} and kinds:
        return "int"
    return "float" if kinds <= {int, float} and kinds else "string"


def _schema(manifest: Manifest) -> Page:
    if not manifest.schema:
        return {}
    columns = [dg.TableColumn(name, type=kind) for name, kind in manifest.schema]
    return {"dagster/column_schema": dg.MetadataValue.table_schema(dg.TableSchema(columns=columns))}


# Pictures. A background of their own, because the page around them may be light or dark.

INK, BAR, LIMIT, GRID, PAPER = "#334155", "#4f46e5", "#dc2626", "#e2e8f0", "#ffffff"
SHARES = {
    "trained": "#16a34a", "context": "#64748b", "template": "#cbd5e1",
    "truncated": "#f59e0b", "dropped": "#dc2626", "padding": "#f1f5f9",
}  # fmt: skip


def rebin(counts: Sequence[int], most: int) -> list[int]:
    """Add up neighbouring bins until at most `most` are left; the sum is kept."""
    step = max(1, math.ceil(len(counts) / most))
    return [sum(counts[i : i + step]) for i in range(0, len(counts), step)]


def sparkline(histogram: Histogram) -> str:
    """Draw a histogram as one path with integer steps, small enough to stand inline in a page.

    The limit is a thin full-height line of the same path: a second element would cost 90 characters.
    """
    counts = rebin(histogram.counts, SPARK_BARS)
    tallest = max(counts)
    width, height = 5, 40
    # A bin with anything in it stays visible: the rare long rows are what the reader looks for.
    tops = [height - max(round(height * count / tallest), 1 if count else 0) for count in counts]
    steps = "".join(f"V{top}h{width}" for top in tops)
    at = _position(histogram, len(histogram.counts))
    bins_per_bar = max(1, math.ceil(len(histogram.counts) / SPARK_BARS))
    limit = "" if at is None else f"M{round(at / bins_per_bar * width)} 0h1v{height}h-1z"
    span = width * len(counts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {span + 1} {height}" width="{span + 1}" height="{height}">'
        f'<path fill="{BAR}" d="M0 {height}{steps}V{height}z{limit}"/></svg>'
    )


def draw(histogram: Histogram) -> str:
    """Draw a histogram with its axis and its limit."""
    counts = rebin(histogram.counts, PLOT_BARS)
    merged = max(1, math.ceil(len(histogram.counts) / PLOT_BARS))
    left, top, width, height = 64, 40, 640, 180
    bar = width / len(counts)
    tallest = max(counts)
    parts = [_text(left, 20, histogram.title, size=14, weight=600), *_grid(left, top, width, height, tallest)]
    for i, count in enumerate(counts):
        if count:
            tall = max(height * count / tallest, 1)
            parts.append(_rect(left + i * bar, top + height - tall, max(bar - 0.6, 0.6), tall, BAR))
    parts += _ticks(histogram, left, top + height, width)
    parts.append(_text(left + width, top + height + 36, histogram.unit, anchor="end"))
    at = _position(histogram, len(histogram.counts))
    if at is not None:
        x = left + min(at / merged * bar, width)
        parts.append(
            f'<path d="M{x:.1f} {top - 8}V{top + height}" stroke="{LIMIT}" stroke-width="1.5" stroke-dasharray="4 3"/>'
        )
        label = f"limit {histogram.limit:,.6g}"
        anchor = "end" if x > left + width / 2 else "start"
        parts.append(_text(x + (-6 if anchor == "end" else 6), top - 2, label, anchor=anchor, fill=LIMIT))
    return _svg(left + width + 24, top + height + 48, parts)


def draw_shares(title: str, counts: Mapping[str, int]) -> str:
    """Draw one bar that is divided by class, with a legend of absolute numbers."""
    total = sum(counts.values())
    left, width = 12, 680
    parts = [_text(left, 20, title, size=14, weight=600)]
    x = float(left)
    for name, colour in SHARES.items():
        wide = width * counts.get(name, 0) / total
        parts.append(_rect(x, 32, wide, 28, colour))
        x += wide
    parts.append(f'<rect x="{left}" y="32" width="{width}" height="28" fill="none" stroke="{GRID}"/>')
    shown = [(name, counts[name]) for name in SHARES if counts.get(name)]
    for i, (name, count) in enumerate(shown):
        column, line = i % 3, i // 3
        x, y = left + column * 230, 84 + line * 22
        parts.append(_rect(x, y - 10, 11, 11, SHARES[name]))
        parts.append(_text(x + 18, y, f"{name} {count:,} · {count / total:.1%}"))
    return _svg(left + width + 12, 100 + 22 * ((len(shown) - 1) // 3), parts)


def _position(histogram: Histogram, bins: int) -> float | None:
    """Return where the limit lies on the axis, in bins; None without one, and past the end if it is beyond."""
    if histogram.limit is None:
        return None
    edges = histogram.edges
    i = bisect_right(edges, histogram.limit) - 1
    if i < 0:
        return 0.0
    if i >= len(edges) - 1:
        return float(bins)
    return i + (histogram.limit - edges[i]) / (edges[i + 1] - edges[i])


def _grid(left: float, top: float, width: float, height: float, tallest: int) -> list[str]:
    parts: list[str] = []
    for quarter in range(5):
        y = top + height * quarter / 4
        parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="{GRID}"/>')
        if quarter in (0, 2):
            parts.append(_text(left - 8, y + 4, f"{tallest * (4 - quarter) / 4:,.4g}", anchor="end"))
    return parts


def _ticks(histogram: Histogram, left: float, base: float, width: float) -> list[str]:
    bins = len(histogram.counts)
    step = max(1, math.ceil(bins / 8))
    places = range(0, bins + 1, step)
    return [
        _text(left + width * i / bins, base + 18, f"{histogram.edges[i]:,.6g}", anchor="middle")
        for i in places
        if i < len(histogram.edges)
    ]


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    weight: int = 400,
    anchor: str = "start",
    fill: str = INK,
) -> str:
    # Dagster's pages show it as an image: no script of a title could run, and none could break the picture either.
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}">'
        f"{escape(text)}</text>"
    )


def _svg(width: float, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui,sans-serif"><rect width="100%" height="100%" fill="{PAPER}"/>{"".join(parts)}</svg>'
    )
