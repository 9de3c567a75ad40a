"""The report of a recipe: one self-contained HTML file that shows the current build.

    reports/<recipe>/report.html               `#<dataset>/<stage>` links to a stage
    reports/<recipe>/expectations/….html       the expectations on each stage's facts (`expectation_suite.py`)

`report.html.jinja` has the markup; this module gathers what the view of the build does not hold: packed sequences,
sampled examples and rejects. Samples are rows of the data: whoever may read the report may read them. The file stays
under `MAX_PAGE_BYTES` for any number of datasets: sequences, samples and rejects share fixed budgets, and only the
first `MAX_DRAWN_DATASETS` datasets get plots and a sequence. It depends on the build alone, not on when or where it is
written.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import resources
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from rowmill.build import runner
from rowmill.build.steps import Project
from rowmill.checks import expectation_suite
from rowmill.core import html
from rowmill.core.arrays import NO_NUMBER, format_count, format_percent, format_seconds, format_time, join_facts
from rowmill.core.console import escape_control_characters
from rowmill.core.html import clip_text
from rowmill.core.stage_names import GPU_PARTITIONS, RAW_DATASET, TOKENIZED_EXAMPLES, TRAINING_SPLITS, TRUNCATION_STATS
from rowmill.core.storage import digest_json
from rowmill.executors import LocalPool
from rowmill.inspection import inspect
from rowmill.inspection.trace import SequenceTrace, describe_segment, view_sequence
from rowmill.reports import console, flows, plots
from rowmill.reports.build_view import BuildView, describe_changes, list_tables, load_build_view, tabulate_changes
from rowmill.reports.links import ReportLinks
from rowmill.schema.examples import IGNORED_LABEL, SPAN_KINDS, WEIGHT_COLUMN
from rowmill.schema.manifest import DisplayTable, Manifest, StageKey
from rowmill.schema.order_counts import OrderCounts
from rowmill.schema.rank_counts import RankCounts
from rowmill.stages.base import StageContext
from rowmill.tokenization import stored_tokenizers
from rowmill.tokenization.tokenizer import Encoder

if TYPE_CHECKING:
    from jinja2 import Environment

PAGE_VERSION = 6
"""Increase it when the page's layout changes; a report with equal content is not written again."""
MAX_PAGE_BYTES = 2_000_000
MAX_SEQUENCE_BYTES = 250_000
"""Total size of all packed sequences."""
MAX_SEQUENCE_TOKENS = 1024
"""Tokens shown of a packed sequence."""
SHOWN_TOKEN_BYTES = 48
"""Markup and numbers of a token of a packed sequence, on average."""
MAX_DRAWN_DATASETS = 16
"""Datasets that get plots and a packed sequence: four plots and two flows take some 40 kB."""
MAX_SAMPLE_BYTES, MAX_REJECT_BYTES = 400_000, 400_000
"""Total size of all samples, and of all rejects."""
SAMPLES_PER_DATASET = 10
"""Examples shown per dataset, spread over its first, middle and last part."""
MAX_SAMPLE_TOKENS = 4096
"""Tokens shown of an example."""
SPAN_BYTES = 64
"""Markup of a stretch of an example."""
MAX_REJECTS_PER_REASON = 20
MAX_LINE_BYTES = 240
"""Size of the beginning of a row's text in its folded line."""
MAX_TABLE_ROWS = 60
PLOT_WIDTH = 520
CARD_WIDTH, CARD_HEIGHT = 300, 130
LENGTH_HISTOGRAMS = ((TRUNCATION_STATS, "lengths"), (TOKENIZED_EXAMPLES, "example_tokens"))
"""Where a dataset's lengths are counted, by stage and histogram."""
SHARE_COLUMNS = ("fill", "wanted", "got", "share")
KEPT_REASON = "kept"


def report_path(recipe: str) -> str:
    """Return the path of a recipe's report, relative to the storage root."""
    return f"reports/{recipe}/report.html"


def write_report(project: Project) -> str:
    """Write the report of the current build; return its path or URL."""
    store, path = project.store, report_path(project.recipe.name)
    build = load_build_view(project)
    # What the report shows: the current versions and their check results.
    digest = digest_json(
        PAGE_VERSION,
        [output.version if output is not None else "" for output in build.made.values()],
        [step.code_version for step in build.steps],
        [(one.check, one.threshold_digest, one.message) for results in build.results.values() for one in results],
        None if build.changes is None else asdict(build.changes),
        build.undelivered,
    )
    digest_comment = f"<!-- {digest} -->"
    if not (store.exists(path) and store.read(path).decode().endswith(f"{digest_comment}\n")):
        store.write(path, f"{render_report(build)}{digest_comment}\n".encode())
    return store.path(path)


def write_build_report(project: Project) -> str:
    """Write the report at the end of a build, and make damaged files again that it shows."""
    return runner.read_and_repair(project, partial(write_report, project))


def render_report(build: BuildView) -> str:
    """Return the report of a build as one HTML file."""
    body = render_report_body(build, ReportLinks())
    title = f"{build.project.recipe.name}: report"
    return html.render_page(title, [body], style=read_asset("report.css"), script=read_asset("report.js"))


def render_report_body(build: BuildView, links: ReportLinks) -> str:
    """Return the markup of a report, in which numbers lead where `links` says."""
    recipe, encoders = build.project.recipe, _open_encoders(build)
    # What training will see, as pairs of a value and its name.
    headline: list[tuple[str, str]] = []
    order = build.find_counts(None, TRAINING_SPLITS, OrderCounts)
    ranks = build.find_counts(None, GPU_PARTITIONS, RankCounts)
    if order is not None:
        headline = [
            (f"{order.tokens:,}", "tokens to train on"),
            (format_percent(order.trained_tokens, order.tokens), "of them trained"),
            (f"{order.places:,}", f"sequences of {recipe.seq_len:,}"),
            (f"{order.steps:,}", "step" if order.steps == 1 else "steps"),
            *([(f"{ranks.ranks:,}", "rank" if ranks.ranks == 1 else "ranks")] if ranks is not None else []),
        ]
    # The tokenizer, the dates of the data and of the build, and the version.
    facts = [format_count(len(recipe.datasets), "dataset"), f"tokenizer {recipe.tokenizer_choice.name}"]
    built = [output for output in build.made.values() if output is not None]
    read = [output for output in built if output.stage == RAW_DATASET]
    for label, outputs in (("data read", read), ("built", built)):
        if outputs:
            facts.append(f"{label} {format_time(max(output.built_at for output in outputs))}")
    last = build.find_output(None, GPU_PARTITIONS) or build.find_output(None, TRAINING_SPLITS)
    facts.append(f"version {last.version[:12]}" if last is not None else "")
    rows = [*_iterate_samples(build, encoders), *_list_rejects(build)]
    reasons = Counter(row.reason for row in rows)
    has_findings = build.waivers or build.failed or build.missing or build.undelivered
    changes = [] if build.changes is None else ["since the last build"]
    sections = [*changes, *(["findings"] if has_findings else []), *(["flow"] if any(build.flows.values()) else [])]
    return (
        open_templates()
        .get_template("report.html.jinja")
        .render(
            to=links,
            build=build,
            links=["summary", *sections, *recipe.datasets, "order and ranks", "rows"],
            headline=headline,
            build_facts=join_facts(facts),
            changes=None if build.changes is None else tabulate_changes(build.changes),
            changed=[] if build.changes is None else describe_changes(build.changes),
            cards=[_make_card(build, at, name, links) for at, name in enumerate(recipe.datasets)],
            all_flows=[flows.sum_flows([pair[i] for pair in build.flows.values()]) for i in (0, 1)],
            max_drawn=MAX_DRAWN_DATASETS,
            sequences=_describe_sequences(build, encoders),
            rows=rows,
            reasons=sorted(reasons.items(), key=lambda pair: (pair[0] != KEPT_REASON, pair)),
            max_rejects=MAX_REJECTS_PER_REASON,
            span_kinds=SPAN_KINDS,
        )
    )


@cache
def read_asset(name: str) -> str:
    """Return a file of this package: a template, a style or a script."""
    return resources.files("rowmill.reports").joinpath(name).read_text(encoding="utf-8")


@cache
def open_templates() -> "Environment":
    """Return the templates' environment: they escape what they do not call safe, with control characters as symbols."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    def show(value: object) -> object:
        return value if hasattr(value, "__html__") else escape_control_characters(str(value))

    def describe_output(output: Manifest) -> str:
        built = f"built {output.built_at[:19].replace('T', ' ')} UTC"
        return join_facts([f"version {output.version}", built, format_seconds(output.seconds), output.run_id])

    def link_expectations(key: StageKey) -> str:
        return expectation_suite.expectations_page_path(key).removeprefix(f"reports/{key[0]}/")

    def list_stage_tables(output: Manifest, links: ReportLinks) -> Iterator[tuple[str, str, list[str]]]:
        for name, table, about in list_tables(output):
            if not says_something(table):
                continue
            is_share = [column in SHARE_COLUMNS or column.endswith("_share") for column in table.columns]
            rows = [
                [
                    format_percent(cell) if share and isinstance(cell, float) and 0 <= cell <= 1 else cell
                    for cell, share in zip(row, is_share, strict=True)
                ]
                for row in table.rows[:MAX_TABLE_ROWS]
            ]
            cut = f"the first {MAX_TABLE_ROWS} of {len(table.rows):,}" if len(table.rows) > MAX_TABLE_ROWS else ""
            link = partial(links.of_cell, output, name)
            markup = html.render_table(table.columns, rows, link=link, show=links.mention_rows)
            yield name.replace("_", " "), markup, [note for note in (cut, about) if note]

    environment = Environment(
        loader=FunctionLoader(read_asset),
        autoescape=True,
        finalize=show,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    functions: dict[str, Any] = {
        "describe_output": describe_output,
        "draw_flow": flows.draw_flow_svg,
        "draw_plots": lambda output, links: plots.draw_plots(
            output, width=PLOT_WIDTH, link=partial(links.of_bin, output), link_bar=partial(links.of_bar, output)
        ).values(),
        "link": lambda text, address: Markup(html.link_text(html.escape_text(text), address)),  # noqa: S704  (escaped)
        "partial": partial,
        "format_key": console.format_key,
        "link_expectations": link_expectations,
        "list_stage_tables": list_stage_tables,
        "make_anchor": lambda name: name.replace(" ", "-").lower(),
        "mark": expectation_suite.render_result_mark,
        "mark_code": html.mark_code,
        "summarize_output": console.summarize_output,
        "table": html.render_table,
    }
    environment.globals.update(functions)
    return environment


# ── Cards and tables ───────────────────────────────────────────────────────────────────────────────


def _make_card(build: BuildView, at: int, name: str, links: ReportLinks) -> dict[str, Any]:
    """Return a dataset's card: four numbers, its lengths, and the most severe failure, else what is missing."""
    counts = dict(zip(build.dataset_counts.columns, build.dataset_counts.rows[at], strict=True))
    shown = {label: counts[label] for label in ("rows", "tokens", "trained", "fill")}
    histograms = (
        (output, histogram)
        for stage, histogram in LENGTH_HISTOGRAMS
        if (output := build.find_output(name, stage)) is not None
        and histogram in output.histograms
        and sum(output.histograms[histogram].counts)
    )
    lengths = ""
    if at < MAX_DRAWN_DATASETS and (found := next(histograms, None)) is not None:
        output, histogram = found
        link = partial(links.of_bin, output, histogram)
        drawn = output.histograms[histogram]
        lengths = plots.draw_histogram_svg(drawn, width=CARD_WIDTH, height=CARD_HEIGHT, link=link)
    dataset_steps = [step for step in build.steps if step.dataset == name]
    passed = sum(result.passed for step in dataset_steps for result in build.results[step.key])
    return {
        "name": name,
        "numbers": [
            (f"{value:,}" if isinstance(value, int) else value or NO_NUMBER, label) for label, value in shown.items()
        ],
        "lengths": lengths,
        "failed": [result for result in build.failed if result.key[1] == name and len(result.key) > 2],
        "missing": next((step.name for step in build.missing if step.dataset == name), ""),
        "passed": format_count(passed, "check"),
    }


def says_something(table: DisplayTable) -> bool:
    """Return whether a table has rows, and not only counts of zero; a measure of 0.0 says something."""
    numbers = [cell for row in table.rows for cell in row if isinstance(cell, int | float)]
    return bool(table.rows) and (not numbers or any(isinstance(cell, float) or cell for cell in numbers))


# ── Packed sequences ───────────────────────────────────────────────────────────────────────────────


def _open_encoders(build: BuildView) -> dict[str, Encoder]:
    """Open the tokenizer of each dataset whose examples were made with the recipe's current one."""
    encoders: dict[str, Encoder] = {}
    project = build.project
    for name in project.recipe.datasets:
        output = build.find_output(name, TOKENIZED_EXAMPLES)
        if output is not None:
            context = StageContext(
                project.store, project.base, output.key, name, {}, LocalPool(1), recipe=project.recipe
            )
            loaded, path = stored_tokenizers.open_recipe_tokenizer(context)
            if loaded.card.digest == output.card.get("tokenizer_digest"):
                encoders[name] = stored_tokenizers.open_encoder(project.store.root, path)
    return encoders


def _describe_sequences(build: BuildView, encoders: Mapping[str, Encoder]) -> dict[str, Any]:
    """Return a packed sequence of each dataset, "outdated" if the tokenizer is another one now, None if it has none."""
    described: dict[str, Any] = dict.fromkeys(build.project.recipe.datasets)
    most = MAX_SEQUENCE_BYTES // max(min(len(encoders), MAX_DRAWN_DATASETS), 1) // SHOWN_TOKEN_BYTES
    for name in list(described)[:MAX_DRAWN_DATASETS]:
        if name in encoders:
            sequence = view_sequence(build.project, name, encoders[name], max_tokens=min(most, MAX_SEQUENCE_TOKENS))
            described[name] = None if sequence is None else describe_sequence(sequence)
        elif build.find_output(name, TOKENIZED_EXAMPLES) is not None:
            described[name] = "outdated"
    return described


def describe_sequence(sequence: SequenceTrace) -> dict[str, Any]:
    """Return what the template shows of a sequence: every token's class, and its numbers by column.

    Tokens are coloured by class and underlined where the loss is taken, so the page says the most important without a
    script. Numbers are lists of the whole sequence, since an attribute per token would be ten times as large.
    """
    segments = [place.segment for place in sequence.segments for _ in range(place.length)]
    columns: dict[str, Sequence[object]] = {
        "ids": sequence.read("input_ids"),
        # An ignored label is left empty.
        "labels": ["" if label == IGNORED_LABEL else label for label in sequence.read("labels")],
        "positions": sequence.read("position_ids"),
        "segments": segments[: len(sequence.texts)],
        "messages": ["" if message < 0 else message for message in sequence.messages],
    }
    if weights := sequence.read(WEIGHT_COLUMN):
        columns["weights"] = [f"{weight:g}" for weight in weights]
    # Line ends are marked; a token that only completes a later character is a small square.
    texts = [text.replace("\n", "↵\n") or "▫" for text in sequence.texts]
    styles = [f"{kind} trained" if trained else kind for kind, trained in sequence.classes]
    shown: list[tuple[str, list[tuple[str, list[str]]], str]] = []
    for place in sequence.segments:
        places = range(place.offset, min(place.offset + place.length, len(texts)))
        spans = [(style, [texts[at] for at in run]) for style, run in groupby(places, key=styles.__getitem__)]
        shown.append((describe_segment(sequence, place), spans, place.row_id))
    counts = [
        f"packed sequence {sequence.dataset}/{sequence.split}/{sequence.sequence}",
        format_count(sequence.tokens, "token"),
        f"the first {len(texts):,} of them" if len(texts) < sequence.tokens else "",
        format_count(len(sequence.segments), "segment"),
        f"shared by {format_count(len(sequence.tree.examples), 'example')}" if sequence.tree else "",
    ]
    kinds = [kind for kind in SPAN_KINDS if kind in sequence.kinds]
    place = sequence.dataset, sequence.split, sequence.sequence
    return {"columns": columns, "caption": join_facts(counts), "kinds": kinds, "segments": shown, "place": place}


# ── Rows that can be searched ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Row:
    """A sampled example, or a reject (`detail` is not None): what is searched, its folded line, and its text.

    `spans` are `(style, title, text)`.
    """

    dataset: str
    reason: str
    tokens: int | None
    characters: int
    title: str
    start: str
    detail: str | None
    facts: str
    spans: Sequence[tuple[str, str, str]]
    row_id: str


def _start_text(text: str) -> str:
    """Return the beginning of a row's text for its folded line."""
    return clip_text(" ".join(text[:MAX_LINE_BYTES].split()), MAX_LINE_BYTES).partition(" … (")[0]


def _iterate_samples(build: BuildView, encoders: Mapping[str, Encoder]) -> Iterator[_Row]:
    """Yield examples from the first, the middle and the last part of each dataset, each spread over its part."""
    budget = MAX_SAMPLE_BYTES // max(len(encoders), 1) // SAMPLES_PER_DATASET
    for name, encoder in encoders.items():
        output = build.find_output(name, TOKENIZED_EXAMPLES)
        files = [file for file in output.files("examples") if file.rows] if output is not None else []
        chosen = {files[at].path: files[at] for at in (0, len(files) // 2, -1)} if files else {}
        remaining = SAMPLES_PER_DATASET
        for file in chosen.values():
            table = build.project.store.table(file)
            count = min(-(-SAMPLES_PER_DATASET // len(chosen)), remaining, table.num_rows)
            places = sorted({int(at) for at in np.linspace(0, table.num_rows - 1, count)})
            remaining -= len(places)
            # `take` would make pyarrow import pandas first: half of what a page costs.
            for example in (line for at in places for line in table.slice(at, 1).to_pylist()):
                yield _make_sample(name, example, encoder, budget)


def _make_sample(name: str, example: Mapping[str, Any], encoder: Encoder, budget: int) -> _Row:
    kinds = inspect.list_token_kinds(example)[:MAX_SAMPLE_TOKENS]
    spans: list[tuple[str, str, str]] = []
    characters, text = 0, ""
    for stretch in inspect.split_by_class(example["input_ids"][:MAX_SAMPLE_TOKENS], kinds, encoder):
        kind, trained = stretch.kind
        characters += len(stretch.text)
        text += f" {stretch.text}" if len(text) < MAX_LINE_BYTES and kind != "template" else ""
        if budget <= 0:
            continue
        clipped = clip_text(stretch.text, budget)
        title = f"{stretch.tokens} tokens, {kind}{', trained' if trained else ''}"
        spans.append((f"{kind} trained" if trained else kind, title, clipped))
        budget -= len(html.escape_text(clipped).encode()) + SPAN_BYTES
        if budget <= 0:
            spans.append(("dim", "", " … truncated"))
    tokens, trained, before = example["tokens"], example["trained_tokens"], example["original_tokens"]
    lengths = [format_count(tokens, "token"), f"{trained:,} trained"]
    cut = f"{before:,} before truncation" if before != tokens else ""
    facts = join_facts([example["example_id"], example["split"], *lengths, cut])
    title = join_facts([name, *lengths])
    return _Row(
        name, KEPT_REASON, tokens, characters, title, _start_text(text), None, facts, spans, example["example_id"]
    )


def _list_rejects(build: BuildView) -> Iterator[_Row]:
    """Yield the first rejects of each reason of each stage, reading as few parts as possible."""
    rejects: list[tuple[str, dict[str, Any]]] = []
    for key, output in sorted(build.made.items()):
        ledger = () if output is None else output.ledger
        remaining = {reason: min(count, MAX_REJECTS_PER_REASON) for _, reason, count in ledger if reason}
        for file in () if output is None else output.files("rejects"):
            if not any(remaining.values()):
                break
            for line in build.project.store.table(file).to_pylist() if file.rows else ():
                if remaining.get(line["reason"], 0) > 0:
                    remaining[line["reason"]] -= 1
                    rejects.append((key[1], line))
    budget = min(MAX_REJECT_BYTES // max(len(rejects), 1), 2_000)
    for dataset, line in rejects:
        raw, reason = line["raw"].decode(errors="replace"), line["reason"]
        title, start = join_facts([dataset, reason]), _start_text(line["detail"] or raw)
        detail, shown = clip_text(line["detail"], budget // 4), clip_text(raw, budget // 2)
        facts = join_facts([f"rejected at {line['stage']}", f"row {line['row_id']}"])
        yield _Row(dataset, reason, None, len(raw), title, start, detail, facts, [("", "", shown)], line["row_id"])
