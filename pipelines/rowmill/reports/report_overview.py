"""The first screens of the report: verdict, what was built, a card per dataset, findings, and the flow."""

from collections.abc import Iterable, Iterator

from rowmill.checks import expectations_page
from rowmill.checks.judge import CheckResult
from rowmill.core import html, number_text
from rowmill.core.html import escape_text
from rowmill.core.number_text import NO_NUMBER, format_count, format_percent
from rowmill.core.stage_names import (
    GPU_PARTITIONS,
    RAW_DATASET,
    TOKENIZED_EXAMPLES,
    TRAINING_SPLITS,
    TRUNCATION_STATS,
)
from rowmill.reports import console, plots, sankey, summary
from rowmill.reports.current_build import CurrentBuild
from rowmill.reports.flows import Flow, sum_flows
from rowmill.schema.facts import TrainingSplitsFacts, read_facts
from rowmill.schema.manifest import Histogram, Manifest
from rowmill.stages.gpu_partitions.rank_parts import GpuPartitionsFacts

CARD_WIDTH, CARD_HEIGHT = 300, 130
LENGTH_HISTOGRAMS = ((TRUNCATION_STATS, "lengths"), (TOKENIZED_EXAMPLES, "example_tokens"))
"""Where a dataset's lengths are counted, by stage and histogram."""


def make_anchor(name: str) -> str:
    """Return the anchor of a section."""
    return name.replace(" ", "-").lower()


# ── Header ─────────────────────────────────────────────────────────────────────────────────────────


def render_header(build: CurrentBuild) -> Iterator[str]:
    """Yield the recipe's name, the verdict, and what was built of what."""
    verdict = build.verdict
    yield '<header id="summary">'
    yield f"<h1>{escape_text(build.project.recipe.name)}</h1>"
    yield f'<p class="verdict {verdict.style}">{verdict.mark} {escape_text(verdict.sentence)}</p>'
    if numbers := list(_list_headline_numbers(build)):
        yield '<dl class="numbers">'
        yield from (f"<div><dd>{escape_text(value)}</dd><dt>{escape_text(name)}</dt></div>" for value, name in numbers)
        yield "</dl>"
    yield f'<p class="dim">{escape_text(number_text.join_facts(_list_build_facts(build)))}</p>'
    yield "</header>"


def _list_headline_numbers(build: CurrentBuild) -> Iterator[tuple[str, str]]:
    """Yield what training will see, as pairs of a value and its name."""
    splits, ranks = build.find_output(None, TRAINING_SPLITS), build.find_output(None, GPU_PARTITIONS)
    if splits is None:
        return
    order = read_facts(TrainingSplitsFacts, splits.facts)
    yield f"{order.tokens:,}", "tokens to train on"
    yield format_percent(order.trained_tokens, order.tokens), "of them trained"
    yield f"{order.places:,}", f"sequences of {build.project.recipe.seq_len:,}"
    yield f"{order.steps:,}", "step" if order.steps == 1 else "steps"
    if ranks is not None:
        count = read_facts(GpuPartitionsFacts, ranks.facts).ranks
        yield f"{count:,}", "rank" if count == 1 else "ranks"


def _list_build_facts(build: CurrentBuild) -> Iterator[str]:
    """Yield the tokenizer, the dates of the data and of the build, and the version."""
    recipe = build.project.recipe
    yield format_count(len(recipe.datasets), "dataset")
    yield f"tokenizer {recipe.tokenizer_choice.name}"
    read = [one.built_at for step in build.steps if step.name == RAW_DATASET and (one := build.made[step.key])]
    made = [one.built_at for one in build.made.values() if one is not None]
    if read:
        yield f"data read {_format_time(max(read))}"
    if made:
        yield f"built {_format_time(max(made))}"
    last = build.find_output(None, GPU_PARTITIONS) or build.find_output(None, TRAINING_SPLITS)
    yield f"version {last.version[:12]}" if last is not None else ""


def _format_time(built_at: str) -> str:
    return f"{built_at[:16].replace('T', ' ')} UTC"


# ── Datasets ───────────────────────────────────────────────────────────────────────────────────────


def render_cards(build: CurrentBuild, *, drawn: int) -> Iterator[str]:
    """Yield a card per dataset, the first `drawn` with a histogram, and the table of all numbers."""
    yield '<section class="cards" aria-label="datasets">'
    for number, name in enumerate(build.project.recipe.datasets):
        yield from render_card(build, name, drawn=number < drawn)
    yield "</section>"
    rows = [summary.list_summary_cells(build.project, name) for name in build.project.recipe.datasets]
    table = html.render_table(
        summary.SUMMARY_COLUMNS, [[str(cell) if i == 0 else cell for i, cell in enumerate(row)] for row in rows]
    )
    yield f'<details class="table"><summary>all counts by dataset</summary>{table}</details>'


def render_card(build: CurrentBuild, name: str, *, drawn: bool) -> Iterator[str]:
    """Yield a dataset's card: four numbers, its lengths, and the most severe finding."""
    cells = dict(zip(summary.SUMMARY_COLUMNS, summary.list_summary_cells(build.project, name), strict=True))
    yield f'<article class="card"><h3><a href="#{make_anchor(name)}">{escape_text(name)}</a></h3>'
    yield '<dl class="numbers">'
    for label in ("rows", "tokens", "trained", "fill"):
        value = cells[label]
        shown = f"{value:,}" if isinstance(value, int) else NO_NUMBER if value is None else str(value)
        yield f"<div><dd>{escape_text(shown)}</dd><dt>{label}</dt></div>"
    yield "</dl>"
    lengths = _find_lengths(build, name)
    if drawn and lengths is not None:
        yield plots.draw_histogram_svg(lengths, width=CARD_WIDTH, height=CARD_HEIGHT)
    yield f"<p>{_render_worst_finding(build, name)}</p></article>"


def _find_lengths(build: CurrentBuild, name: str) -> Histogram | None:
    for stage, histogram in LENGTH_HISTOGRAMS:
        made = build.find_output(name, stage)
        if made is not None and histogram in made.histograms and sum(made.histograms[histogram].counts):
            return made.histograms[histogram]
    return None


def _render_worst_finding(build: CurrentBuild, name: str) -> str:
    """Return the most severe failed check of a dataset; else what is missing, or that all passed."""
    own = [one for one in build.failed if one.key[1] == name and len(one.key) > 2]
    if own:
        worst = own[0]
        more = f" and {len(own) - 1} more" if len(own) > 1 else ""
        text = f"{worst.check} {worst.shown}, wanted {worst.wanted}{more}"
        return f'{expectations_page.render_result_mark(worst)} <a href="#findings">{escape_text(text)}</a>'
    missing = [step.name for step in build.missing if step.dataset == name]
    if missing:
        return f'<span class="look">! {escape_text(missing[0])} is not built</span>'
    judged = sum(result.passed for step in build.steps if step.dataset == name for result in build.results[step.key])
    return f'<span class="good">✓</span> {format_count(judged, "check")} passed'


# ── Findings ───────────────────────────────────────────────────────────────────────────────────────


def render_findings(build: CurrentBuild) -> Iterator[str]:
    """Yield waivers, failed checks with their causes, and what is not built."""
    if not (build.waivers or build.failed or build.missing):
        return
    yield '<section id="findings">'
    if build.failed:
        blocking = any(result.blocking for result in build.failed)
        yield f"<h2>{'Checks that failed' if blocking else 'Warnings: nothing is blocked'}</h2>"
        yield from (render_result(result, whole_key=True) for result in build.failed)
    if build.missing:
        names = ", ".join(console.format_key(step.key) for step in build.missing)
        yield f'<p class="look">Not built: {escape_text(names)}</p>'
    if build.waivers:
        yield '<h3 class="look">Waived</h3>'
        yield html.render_table(["waiver"], [[waiver] for waiver in build.waivers])
    yield "</section>"


def render_result(result: CheckResult, *, whole_key: bool = False) -> str:
    """Return a failed check in one paragraph, its causes below."""
    where = f"{console.format_key(result.key)} " if whole_key else ""
    page = f"expectations/{'-'.join(result.key[1:])}.html#{result.check}"
    rest = result.sentence.removeprefix(result.check)
    return (
        f"<p>{expectations_page.render_result_mark(result)} {escape_text(where)}<a "
        f'href="{escape_text(page)}">{escape_text(result.check)}</a>{escape_text(rest)}</p>'
        + "".join(f'<p class="cause">{escape_text(cause)}</p>' for cause in result.causes)
    )


# ── Flow ───────────────────────────────────────────────────────────────────────────────────────────


def render_flow(build: CurrentBuild) -> Iterator[str]:
    """Yield the flow of all datasets' rows and tokens, and what training will see."""
    rows, tokens = (sum_flows([pair[i] for pair in build.flows.values()]) for i in (0, 1))
    if not rows:
        return
    many = len(build.flows) > 1
    yield '<section id="flow"><h2>Flow</h2>'
    yield (
        f'<p class="dim">Where every row and every token {"of all datasets " if many else ""}went. '
        "Widths are proportional to counts; the counts are those of the stages' ledgers, and add up.</p>"
    )
    yield draw_flows(rows, tokens, "all datasets" if many else next(iter(build.flows)))
    splits = build.find_output(None, TRAINING_SPLITS)
    if splits is not None:
        yield from _render_training(build, splits)
    yield "</section>"


def draw_flows(rows: Flow, tokens: Flow, name: str) -> str:
    """Return the diagrams of rows and tokens side by side."""
    drawn = ((rows, "Rows"), (tokens, "Tokens"))
    figures = [
        f"<figure><figcaption>{title}</figcaption>{sankey.draw_flow_svg(flow, f'{title} of {name}')}</figure>"
        for flow, title in drawn
        if flow
    ]
    return f'<div class="flows">{"".join(figures)}</div>'


def _render_training(build: CurrentBuild, splits: Manifest) -> Iterator[str]:
    lines: Iterable[str] = summary.describe_training(build.project, splits)
    yield "<h3>What training will see</h3><ul>"
    yield from (f"<li>{escape_text(line)}</li>" for line in lines)
    yield "</ul>"
