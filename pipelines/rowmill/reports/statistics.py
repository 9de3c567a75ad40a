"""`rowmill stats` for a terminal: a recipe's datasets with their rejects, lengths, truncation and what-if table."""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from rowmill import stats
from rowmill.build.steps import Project
from rowmill.core.console import DIM, HEAD, LOOK, make_grid
from rowmill.core.number_text import format_count, format_percent
from rowmill.reports import plots
from rowmill.reports.console import render_manifest_table
from rowmill.schema import manifest
from rowmill.schema.facts import CanonicalRowsFacts, TokenizedExamplesFacts, read_facts, require_counted
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import Manifest
from rowmill.schema.rows import NORMALIZATION_COLUMNS
from rowmill.stages.base import StageDeclaration
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.stages.truncation_stats import stage as truncation_stats
from rowmill.stages.truncation_stats.facts import TruncationStatsFacts


def render_statistics(project: Project) -> RenderableType:
    """Show each dataset's lengths, truncation, rejects, dropped text and the effect of other limits."""
    return Group(*(_render_dataset_statistics(project, name) for name in project.recipe.datasets))


def list_hints(project: Project) -> list[str]:
    """Return the hints of all datasets, each with its dataset's name."""
    found: list[str] = []
    for name in project.recipe.datasets:
        made = load_current(project, name, truncation_stats.STAGE)
        found += [f"{name}: {hint}" for hint in (describe_hints(project, name, made) if made else [])]
    return found


def describe_hints(project: Project, name: str, output: Manifest) -> list[str]:
    """Return a dataset's hints; the limit in them is the option that sets it, `seq_len` if the dataset has none."""
    dataset = project.recipe.datasets[name]
    option, value = dataset.format.get_length_limit(dataset)
    return [
        hint.replace("max_length", "seq_len" if value is None else option) for hint in _read_truncation(output).hints
    ]


def load_current(project: Project, dataset: str | None, stage: StageDeclaration) -> Manifest | None:
    """Return the current output of a stage, of a dataset or of the recipe, or None."""
    key = (project.recipe.name, *(() if dataset is None else (dataset,)), stage.name)
    return manifest.load_current(project.store, key)


def _render_dataset_statistics(project: Project, name: str) -> RenderableType:
    rows, examples = (
        load_current(project, name, canonical_rows.STAGE),
        load_current(project, name, tokenized_examples.STAGE),
    )
    lengths = load_current(project, name, truncation_stats.STAGE)
    lines: list[RenderableType] = [Text(f"\n{name}", HEAD).append(f"  {_format_row_counts(rows, examples)}", DIM)]
    if rows is not None:
        lines += _render_notices(rows)
    if examples is not None:
        lines += _render_tools(read_facts(TokenizedExamplesFacts, examples.facts))
    if lengths is not None:
        lines += _render_lengths(lengths)
        lines += [Text(f"\n  ! {hint}", LOOK) for hint in describe_hints(project, name, lengths)]
    lines += _render_rejects(rows, examples)
    dropped = examples.tables.get("dropped") if examples is not None else None
    if dropped is not None and dropped.rows:
        lines += [
            _render_label("text of rows that the template did not print"),
            render_manifest_table(dropped, indent=4),
        ]
    weights = examples.tables.get("loss_weights") if examples is not None else None
    if weights is not None:
        lines += [_render_label("trained tokens by loss weight"), render_manifest_table(weights, indent=4)]
    return Group(*lines)


def _format_row_counts(rows: Manifest | None, examples: Manifest | None) -> str:
    if rows is None:
        return "not built"
    made = "not tokenized"
    if examples is not None:
        made = format_count(read_facts(TokenizedExamplesFacts, examples.facts).examples, "example")
    facts = read_facts(CanonicalRowsFacts, rows.facts)
    return f"{format_count(facts.records, 'record')} → {format_count(facts.kept, 'row')} → {made}"


def _render_notices(rows: Manifest) -> list[RenderableType]:
    """Show what canonicalization noted about the rows that it kept."""
    facts = read_facts(CanonicalRowsFacts, rows.facts)
    found = [(name.replace("_", " "), count) for name in NORMALIZATION_COLUMNS if (count := getattr(facts, name))]
    found += [(f"{name.replace('_', ' ')} (counted)", count) for name, count in (facts.notes or {}).items()]
    return [_render_label("noted in the rows"), make_grid(["", "times"], found, indent=4)] if found else []


def _render_tools(facts: TokenizedExamplesFacts) -> list[RenderableType]:
    """Show the cost of tool schemas: every example of a row repeats them, and truncation never removes them."""
    if not facts.rows_with_tools:
        return []
    rows, tokens = facts.rows_with_tools, require_counted(facts.tool_tokens)
    summary = (
        f"{format_count(rows, 'row')}, {tokens:,} tokens, {tokens // rows:,} per row, "
        f"at most {facts.most_tool_tokens:,}"
    )
    return [_render_label("tool schemas"), Text(f"    {summary}")]


def _render_label(label: str) -> Text:
    return Text(f"\n  {label}", "cyan")


LENGTH_BUCKETS = {
    "under_25": "under 25 %",
    "25_to_50": "25 to 50",
    "50_to_75": "50 to 75",
    "75_to_100": "75 to 100",
    "at_max": "at max",
}


TRUNCATION_COLUMNS = ("stage", "examples", "", "messages", "tokens", "trained of them")


def _read_truncation(output: Manifest) -> TruncationStatsFacts:
    return read_facts(TruncationStatsFacts, output.facts)


def _render_lengths(output: Manifest) -> list[RenderableType]:
    facts = _read_truncation(output)
    quantiles = "   ".join(f"{name} {value:,}" for name, value in facts.quantiles.items())
    total = sum(facts.buckets.values())
    counts = [facts.buckets[name] for name in LENGTH_BUCKETS]
    buckets = make_grid(
        list(LENGTH_BUCKETS.values()), [counts, [format_percent(count, total) for count in counts]], indent=4
    )
    drawn = plots.draw_histogram_text(output.histograms["lengths"], width=72, lines=12).splitlines()
    lines: list[RenderableType] = [
        _render_label(f"{output.histograms['lengths'].title} in tokens"), Text(f"    {quantiles}"),
        *(Text(f"    {line}", DIM if line.startswith("──") else "") for line in drawn[1:]),
        _render_label(f"length as a share of the limit of {facts.limit:,}"), buckets,
    ]  # fmt: skip
    if "stages" in output.tables:
        taken = [
            (stage, touched, format_percent(touched, total), messages, tokens, trained)
            for stage, touched, messages, tokens, trained in output.tables["stages"].rows
        ]
        lines += [_render_label("what truncation removed"), make_grid(TRUNCATION_COLUMNS, taken, indent=4)]
    if facts.dropped_for_length:
        lines.append(Text(f"    dropped for length: {format_count(facts.dropped_for_length, 'row')}"))
    return [*lines, *_render_what_if(output)]


def _render_what_if(output: Manifest) -> list[RenderableType]:
    """Show the effect of other limits, and whether it is estimated or planned."""
    table, facts = output.tables["what_if"], _read_truncation(output)
    is_planned = "examples" in table.columns
    headings = WHAT_IF_TABLE_COLUMNS if is_planned else WHAT_IF_COLUMNS
    # A plan makes different examples at each limit, so records are counted instead.
    total, place = (require_counted(facts.records), 2) if is_planned else (facts.examples, 1)
    lines = [(*row[: place + 1], format_percent(row[place], total), *row[place + 1 :]) for row in table.rows]
    marked = next((i for i, row in enumerate(lines) if row[0] == facts.limit), None)
    return [
        _render_label("effect of other limits" + ("" if is_planned else " (estimated)")),
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
