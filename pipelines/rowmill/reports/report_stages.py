"""A dataset's and a stage's section of the report: folded details with plots, tables and check results."""

from collections.abc import Iterator, Sequence

from rowmill import stats
from rowmill.build.steps import Step
from rowmill.checks import expectations_page
from rowmill.core import html, number_text
from rowmill.core.html import escape_text
from rowmill.reports import console, plots
from rowmill.reports.current_build import CurrentBuild
from rowmill.reports.report_overview import draw_flows, make_anchor, render_result
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import DisplayTable, Manifest

MAX_TABLE_ROWS = 60
PLOT_WIDTH = 520
DRAWN_ELSEWHERE = ("lengths", "rejects", "tokens")
"""Tables that a plot or another section shows."""
SHARE_COLUMNS = ("fill", "wanted", "got", "share")


def render_dataset(build: CurrentBuild, name: str, *, drawn: bool, sequence: Sequence[str]) -> Iterator[str]:
    """Yield a dataset's section: its flow, a packed sequence, its stages."""
    yield f'<section><h2 id="{make_anchor(name)}">{escape_text(name)}</h2>'
    yield from sequence
    rows, tokens = build.flows[name]
    if drawn and rows and len(build.flows) > 1:
        yield f'<details class="stage"><summary>flow of {escape_text(name)}</summary>'
        yield f"{draw_flows(rows, tokens, name)}</details>"
    for step in build.steps:
        if step.dataset == name:
            yield from _render_stage(build, step, drawn=drawn)
    yield "</section>"


def render_recipe_stages(build: CurrentBuild) -> Iterator[str]:
    """Yield the section of the stages that join all datasets."""
    yield f'<section><h2 id="{make_anchor("order and ranks")}">Order and ranks</h2>'
    for step in build.steps:
        if step.dataset is None:
            yield from _render_stage(build, step, drawn=True)
    yield "</section>"


def _render_stage(build: CurrentBuild, step: Step, *, drawn: bool) -> Iterator[str]:
    one = build.made[step.key]
    anchor = escape_text(console.format_key(step.key))
    label = f"<b>{escape_text(step.label)}</b>"
    if one is None:
        shown = "made on request" if step.on_demand else "not built"
        style = "dim" if step.on_demand else "look"
        yield f'<p class="unbuilt" id="{anchor}">{label} <span class="{style}">{shown}</span></p>'
        return
    failed = [result for result in build.results[step.key] if result.failed]
    marks = "".join(expectations_page.render_result_mark(result) for result in failed[:3])
    yield (
        f'<details class="stage" id="{anchor}"><summary>{marks} {label} <span '
        f'class="dim">{escape_text(console.summarize_output(one))}</span></summary>'
    )
    yield from _render_stage_facts(build, step, one)
    yield from (render_result(result) for result in failed)
    if drawn:
        yield from _render_plots(one)
    yield from _render_tables(one)
    yield "</details>"


def _render_stage_facts(build: CurrentBuild, step: Step, output: Manifest) -> Iterator[str]:
    built = f"built {output.built_at[:19].replace('T', ' ')} UTC"
    about = [f"version {output.version}", built, number_text.format_seconds(output.seconds), output.run_id]
    yield f'<p class="dim">{escape_text(number_text.join_facts(about))}</p>'
    if output.code_version != step.code_version:
        yield '<p class="look">! its options changed since: run rowmill build</p>'
    results = build.results[step.key]
    idle = sum(result.outcome == "not_applicable" for result in results)
    counts = f"{sum(result.passed for result in results)} of {len(step.shown_thresholds) - idle} checks passed"
    counts += f", {idle} not applicable" if idle else ""
    link = expectations_page.expectations_page_path(step.key).removeprefix(f"reports/{build.project.recipe.name}/")
    yield f'<p><a href="{escape_text(link)}">{counts}</a></p>'


def _render_plots(output: Manifest) -> Iterator[str]:
    drawn = [
        plots.draw_histogram_svg(histogram, width=PLOT_WIDTH)
        for histogram in output.histograms.values()
        if sum(histogram.counts)
    ]
    counts: dict[str, int] = {}
    for _, token_class, tokens in output.token_ledger:
        counts[token_class] = counts.get(token_class, 0) + tokens
    if any(counts.values()):
        drawn.append(plots.draw_bars_svg("Tokens by class", list(counts.items()), width=PLOT_WIDTH))
    if drawn:
        yield f'<div class="plots">{"".join(drawn)}</div>'


def _render_tables(output: Manifest) -> Iterator[str]:
    ledger = [line for line in output.ledger if line[0] != KEPT]
    left_out = DisplayTable(("state", "reason", "records"), tuple(sorted(ledger, key=lambda line: (-line[2], line))))
    tables = {name: table for name, table in output.tables.items() if name not in DRAWN_ELSEWHERE}
    for name, table in (tables | {"left out": left_out}).items():
        if says_something(table):
            yield f'<p class="dim">{escape_text(name.replace("_", " "))}</p>'
            yield html.render_table(table.columns, _format_shares(table)[:MAX_TABLE_ROWS])
            if len(table.rows) > MAX_TABLE_ROWS:
                yield f'<p class="dim">the first {MAX_TABLE_ROWS} of {len(table.rows):,}</p>'
            if (about := stats.describe_estimate(name, table)) is not None:
                yield f'<p class="dim">{escape_text(about)}</p>'


def says_something(table: DisplayTable) -> bool:
    """Return whether a table has rows, and not only counts of zero; a measure of 0.0 says something."""
    numbers = [cell for row in table.rows for cell in row if isinstance(cell, int | float)]
    return bool(table.rows) and (not numbers or any(isinstance(cell, float) or cell for cell in numbers))


def _format_shares(table: DisplayTable) -> list[list[object]]:
    """Return a table's rows with shares as per cent."""
    shares = {i for i, name in enumerate(table.columns) if name in SHARE_COLUMNS or name.endswith("_share")}
    return [
        [
            number_text.format_percent(cell) if i in shares and isinstance(cell, float) and 0 <= cell <= 1 else cell
            for i, cell in enumerate(row)
        ]
        for row in table.rows
    ]
