"""The report of a recipe: one self-contained HTML file that shows the current build.

What belongs here: choosing what the page shows of each stage (plots, tables, check results, samples, rejects) and
keeping the file small. What does not: the page's frame (`html.py`), plots (`plots.py`), counting; a number that is
missing here is missing in a manifest.

    reports/<recipe>/report.html               `#<dataset>/<stage>` links to a stage
    reports/<recipe>/expectations/….html       the expectations on each stage's facts (`expectations_page.py`)

Samples are rows of the data: whoever may read the report may read them. The file stays under `MAX_PAGE_BYTES` for any
number of datasets: samples and rejects share fixed budgets, and only the first `MAX_DRAWN_DATASETS` datasets get
plots.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import numpy as np

from rowmill import stats
from rowmill.build.steps import Project, Step, plan_steps
from rowmill.checks import expectations_page
from rowmill.checks.judge import CheckResult, load_check_results
from rowmill.core import html, number_text
from rowmill.core.html import clip_text, escape_text, render_element
from rowmill.core.storage import digest_json
from rowmill.executors import LocalPool
from rowmill.inspection import inspect
from rowmill.reports import console, plots, summary
from rowmill.schema import manifest
from rowmill.schema.examples import SPAN_KINDS
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import DisplayTable, File, Manifest
from rowmill.stages import tokenizer_files
from rowmill.stages.base import StageContext
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.tokenization.encoder import Encoder

PAGE_VERSION = 1
"""Increase it when the page's layout changes; a report with equal content is not written again."""
MAX_PAGE_BYTES = 2_000_000
MAX_SAMPLE_BYTES, MAX_REJECT_BYTES = 500_000, 500_000
"""Total size of all samples, and of all rejects."""
MAX_DRAWN_DATASETS = 16
"""Datasets that get plots: four plots take some 40 kB."""
SAMPLES_PER_DATASET = 10
"""Examples shown per dataset, spread over its first, middle and last part."""
MAX_SAMPLE_TOKENS = 4096
"""Tokens shown of an example."""
MAX_REJECTS_PER_REASON = 20
MAX_TABLE_ROWS = 60

STYLE = """
.system { background: #b4a7d633 } .user { background: #4c78a833 } .assistant { background: #54a24b3d }
.reasoning { background: #eeca3b4d } .tool_call { background: #f5851840 } .tool_result { background: #9d755d40 }
.template { color: var(--dim) } .prompt { background: #4c78a833 } .record { background: #54a24b3d }
.trained { text-decoration: underline; text-decoration-color: var(--good); text-decoration-thickness: 2px;
  text-underline-offset: 3px }
.legend span { padding: 0 .4rem; margin-right: .4rem; border-radius: 3px }
.tools input, .tools select { font: inherit; padding: .25rem .5rem; margin-right: .5rem; color: inherit;
  background: var(--soft); border: 1px solid var(--line); border-radius: 4px }
#rejects-list td { overflow-wrap: anywhere } #rejects-list code { white-space: pre-wrap }
@media print { .system, .user, .assistant, .reasoning, .tool_call, .tool_result, .prompt, .record
  { print-color-adjust: exact; -webkit-print-color-adjust: exact } }
"""

SCRIPT = """
const rows = [...document.querySelectorAll('#rejects-list tbody tr')];
const word = document.getElementById('word'), reason = document.getElementById('reason');
const shown = document.getElementById('shown');
function search() {
  const wanted = word.value.toLowerCase();
  let count = 0;
  for (const row of rows) {
    const named = !reason.value || row.dataset.reason === reason.value;
    const fits = named && row.textContent.toLowerCase().includes(wanted);
    row.hidden = !fits;
    count += fits;
  }
  shown.textContent = `${count} of ${rows.length} shown`;
}
if (word) { word.addEventListener('input', search); reason.addEventListener('change', search); search(); }
"""


def report_path(recipe: str) -> str:
    """Return the path of a recipe's report, relative to the storage root."""
    return f"reports/{recipe}/report.html"


def write_report(project: Project) -> str:
    """Write the report of the current build; return its path or URL."""
    store, path = project.store, report_path(project.recipe.name)
    made = {step.key: manifest.load_current(store, step.key) for step in plan_steps(project)}
    digest_comment = f"<!-- {_digest_content(project, made)} -->"
    if not (store.exists(path) and store.read(path).decode().endswith(f"{digest_comment}\n")):
        store.write(path, f"{render_report(project, made, written=datetime.now(UTC))}{digest_comment}\n".encode())
    return store.path(path)


def _digest_content(project: Project, made: "_CurrentManifests") -> str:
    """Return a digest of a report's content: the current versions and their check results."""
    versions = [one.version if one is not None else "" for one in made.values()]
    results = [
        (result.check, result.threshold_digest, result.message)
        for step in plan_steps(project)
        for result in _load_results(project, step, made)
    ]
    return digest_json(PAGE_VERSION, versions, [step.code_version for step in plan_steps(project)], results)


def render_report(project: Project, made: "_CurrentManifests", *, written: datetime) -> str:
    """Return the report of the current build as HTML."""
    body = [
        *_render_head(project, made, written),
        *_render_overview(project, made),
        *(
            line
            for number, name in enumerate(project.recipe.datasets)
            for line in _render_dataset(project, made, name, number)
        ),
        *_render_recipe_stages(project, made),
        *_render_reject_section(project, made),
    ]
    return html.render_page(f"{project.recipe.name}: report", body, style=STYLE, script=SCRIPT)


_CurrentManifests = Mapping[manifest.StageKey, Manifest | None]


# ── Head and overview ──────────────────────────────────────────────────────────────────────────────


def _render_head(project: Project, made: _CurrentManifests, written: datetime) -> Iterator[str]:
    runs = sorted({one.run_id for one in made.values() if one is not None and one.run_id})
    yield f"<h1>{escape_text(project.recipe.name)}</h1>"
    about = number_text.join_facts(
        [
            f"written {written:%Y-%m-%d %H:%M} UTC",
            project.store.path(""),
            f"{number_text.format_count(len(runs), 'run')}: {', '.join(runs[:4])}" if runs else "",
        ]
    )
    yield f'<p class="dim">{escape_text(about)}</p>'
    links = [*project.recipe.datasets, "order and ranks", "rejects"]
    yield render_element(
        "nav", "".join(render_element("a", escape_text(name), href=f"#{_make_anchor(name)}") for name in links)
    )


def _make_anchor(name: str) -> str:
    return name.replace(" ", "-")


def _render_overview(project: Project, made: _CurrentManifests) -> Iterator[str]:
    rows = [summary.list_summary_cells(project, name) for name in project.recipe.datasets]
    yield html.render_table(
        summary.SUMMARY_COLUMNS, [[str(cell) if i == 0 else cell for i, cell in enumerate(row)] for row in rows]
    )
    waivers = sorted({waiver for one in made.values() if one is not None for waiver in one.waivers})
    if waivers:
        yield '<h3 class="look">Waived</h3>'
        yield html.render_table(["waiver"], [[waiver] for waiver in waivers])
    failed = [result for step in plan_steps(project) for result in _load_results(project, step, made) if result.failed]
    missing = [step for step in plan_steps(project) if made[step.key] is None and not step.on_demand]
    if failed:
        blocking = any(result.blocking for result in failed)
        yield f"<h3>{'Checks that failed' if blocking else 'Warnings: nothing is blocked'}</h3>"
        yield from (_render_result(result, whole_key=True) for result in failed)
    if missing:
        names = ", ".join(console.format_key(step.key) for step in missing)
        yield f'<p class="look">Not built: {escape_text(names)}</p>'
    if not failed and not missing:
        yield '<p class="good">✓ everything is built, and every applicable check passed</p>'


def _load_results(project: Project, step: Step, made: _CurrentManifests) -> list[CheckResult]:
    one = made[step.key]
    return [] if one is None else load_check_results(project.store, one, step.thresholds)


def _render_result(result: CheckResult, *, whole_key: bool = False) -> str:
    where = f"{console.format_key(result.key)} " if whole_key else ""
    page = f"expectations/{'-'.join(result.key[1:])}.html#{result.check}"
    return (
        f"<p>{expectations_page.render_result_mark(result)} {escape_text(where)}<a "
        f'href="{escape_text(page)}">{escape_text(result.sentence)}</a></p>'
        + "".join(f'<p class="cause">{escape_text(cause)}</p>' for cause in result.causes)
    )


# ── A dataset ──────────────────────────────────────────────────────────────────────────────────────


def _render_dataset(project: Project, made: _CurrentManifests, name: str, number: int) -> Iterator[str]:
    yield f'<h2 id="{_make_anchor(name)}">{escape_text(name)}</h2>'
    for step in plan_steps(project):
        if step.dataset == name:
            yield from _render_stage(project, step, made, drawn=number < MAX_DRAWN_DATASETS)
            one = made[step.key]
            if step.name == tokenized_examples.STAGE.name and one is not None:
                yield from _render_samples(project, name, one)


def _render_recipe_stages(project: Project, made: _CurrentManifests) -> Iterator[str]:
    yield render_element("h2", "Order and ranks", id=_make_anchor("order and ranks"))
    for step in plan_steps(project):
        if step.dataset is None:
            yield from _render_stage(project, step, made, drawn=True)


def _render_stage(project: Project, step: Step, made: _CurrentManifests, *, drawn: bool) -> Iterator[str]:
    one = made[step.key]
    name = console.format_key(step.key)
    if one is None:
        yield f'<h3 id="{escape_text(name)}">{escape_text(step.name)} <span class="look">not built</span></h3>'
        return
    yield (
        f'<h3 id="{escape_text(name)}">{escape_text(step.name)} <span '
        f'class="dim">{escape_text(console.summarize_output(one))}</span></h3>'
    )
    about = number_text.join_facts(
        [
            f"version {one.version}",
            f"built {one.built_at[:19]} UTC",
            number_text.format_seconds(one.seconds),
            one.run_id,
        ]
    )
    yield f'<p class="dim">{escape_text(about)}</p>'
    if one.code_version != step.code_version:
        yield '<p class="look">! its options changed since: run rowmill build</p>'
    results = _load_results(project, step, made)
    idle = sum(result.outcome == "not_applicable" for result in results)
    counts = f"{sum(result.passed for result in results)} of {len(step.thresholds) - idle} checks passed"
    counts += f", {idle} not applicable" if idle else ""
    link = expectations_page.expectations_page_path(step.key).removeprefix(f"reports/{project.recipe.name}/")
    yield f'<p><a href="{escape_text(link)}">{counts}</a></p>'
    yield from (_render_result(result) for result in results if result.failed)
    if drawn:
        yield from _render_pictures(one)
    yield from _render_tables(one)


def _render_pictures(one: Manifest) -> Iterator[str]:
    drawn = [
        plots.draw_histogram_svg(histogram, width=520) for histogram in one.histograms.values() if sum(histogram.counts)
    ]
    counts: dict[str, int] = {}
    for _, token_class, tokens in one.token_ledger:
        counts[token_class] = counts.get(token_class, 0) + tokens
    if counts:
        drawn.append(plots.draw_bars_svg("Tokens by class", list(counts.items()), width=520))
    if drawn:
        yield f'<div class="plots">{"".join(drawn)}</div>'


def _render_tables(one: Manifest) -> Iterator[str]:
    ledger = [line for line in one.ledger if line[0] != KEPT]
    left_out = DisplayTable(("state", "reason", "records"), tuple(sorted(ledger, key=lambda line: (-line[2], line))))
    tables = {name: table for name, table in one.tables.items() if name not in ("lengths", "rejects", "tokens")}
    for name, table in (tables | {"left out": left_out}).items():
        if table.rows:
            yield f'<p class="dim">{escape_text(name.replace("_", " "))}</p>'
            yield html.render_table(table.columns, table.rows[:MAX_TABLE_ROWS])
            if (about := stats.describe_estimate(name, table)) is not None:
                yield f'<p class="dim">{escape_text(about)}</p>'


# ── Samples ────────────────────────────────────────────────────────────────────────────────────────


def _render_samples(project: Project, name: str, made: Manifest) -> Iterator[str]:
    key = (project.recipe.name, name, tokenized_examples.STAGE.name)
    work = StageContext(project.recipe, project.store, project.base, key, name, {}, LocalPool(1))
    loaded, _ = tokenizer_files.open_recipe_tokenizer(work)
    if loaded.card.digest != made.card.get("tokenizer_digest"):
        yield '<p class="look">The tokenizer changed since these examples were made, so none are shown.</p>'
        return
    files = [file for file in made.files("examples") if file.rows]
    if not files:
        return
    encoder = Encoder(loaded)
    budget = MAX_SAMPLE_BYTES // max(len(project.recipe.datasets), 1) // SAMPLES_PER_DATASET
    yield '<p class="dim">samples: every token coloured by its class; trained tokens are underlined</p>'
    yield render_element(
        "p",
        "".join(render_element("span", kind.replace("_", " "), class_=kind) for kind in SPAN_KINDS),
        class_="legend",
    )
    for example in _choose_samples(project, files):
        yield from _render_sample(example, encoder, budget)


def _choose_samples(project: Project, files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Yield examples from the first, the middle and the last part, each spread over its part."""
    chosen = list({file.path: file for file in (files[0], files[len(files) // 2], files[-1])}.values())
    each = -(-SAMPLES_PER_DATASET // len(chosen))
    left = SAMPLES_PER_DATASET
    for file in chosen:
        table = project.store.table(file)
        places = sorted({int(at) for at in np.linspace(0, table.num_rows - 1, min(each, left, table.num_rows))})
        left -= len(places)
        yield from table.take(places).to_pylist()


def _render_sample(example: Mapping[str, Any], encoder: Encoder, budget: int) -> Iterator[str]:
    yield render_element(
        "p", escape_text(number_text.join_facts([example["example_id"], _format_lengths(example)])), class_="dim"
    )
    kinds = list_token_kinds(example)
    spans: list[str] = []
    for stretch in inspect.split_by_class(example["input_ids"][:MAX_SAMPLE_TOKENS], kinds[:MAX_SAMPLE_TOKENS], encoder):
        kind, trained = stretch.kind
        shown = escape_text(clip_text(stretch.text, budget))
        title = f"{stretch.tokens} tokens, {kind}{', trained' if trained else ''}"
        span = render_element("span", shown, class_=f"{kind} trained" if trained else kind, title=title)
        budget -= len(span.encode())
        spans.append(span)
        if budget <= 0:
            spans.append('<span class="dim"> … truncated</span>')
            break
    yield f'<div class="text">{"".join(spans)}</div>'


def _format_lengths(example: Mapping[str, Any]) -> str:
    tokens, trained, before = example["tokens"], example["trained_tokens"], example["original_tokens"]
    lengths = [example["split"], number_text.format_count(tokens, "token"), f"{trained:,} trained"]
    return number_text.join_facts([*lengths, f"{before:,} before truncation" if before != tokens else ""])


def list_token_kinds(example: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return the span kind of every token of a stored example, and whether it is trained."""
    sizes = np.diff([*example["span_starts"], len(example["input_ids"])])
    names = [SPAN_KINDS[kind] for kind in np.repeat(example["span_kinds"], sizes).tolist()]
    return list(zip(names, example["loss_mask"], strict=True))


# ── Rejects ────────────────────────────────────────────────────────────────────────────────────────


def _render_reject_section(project: Project, made: _CurrentManifests) -> Iterator[str]:
    yield render_element("h2", "Rejects", id="rejects")
    found = [
        line for key, one in sorted(made.items()) if one is not None for line in _iterate_rejects(project, key, one)
    ]
    if not found:
        yield '<p class="dim">none</p>'
        return
    budget = MAX_REJECT_BYTES // len(found)
    counts = {reason: len(list(own)) for reason, own in groupby(sorted(found, key=_get_reason), key=_get_reason)}
    options = "".join(
        f'<option value="{escape_text(name)}">{escape_text(name)} ({count})</option>' for name, count in counts.items()
    )
    yield (
        '<p class="tools"><select id="reason" aria-label="reason"><option value="">every reason</option>'
        f'{options}</select><input id="word" type="search" placeholder="search" aria-label="search">'
        '<span id="shown" class="dim"></span></p>'
    )
    yield (
        f'<p class="dim">At most {MAX_REJECTS_PER_REASON} per reason, stage and dataset; '
        "the SQL view rejects has all.</p>"
    )
    head = "".join(f"<th>{name}</th>" for name in ("dataset", "stage", "reason", "detail", "row", "record"))
    yield f'<div class="scroll" id="rejects-list"><table><thead><tr>{head}</tr></thead><tbody>'
    yield from (_render_reject_row(line, min(budget, 2_000)) for line in found)
    yield "</tbody></table></div>"


def _get_reason(line: Mapping[str, Any]) -> str:
    return str(line["reason"])


def _iterate_rejects(project: Project, key: manifest.StageKey, one: Manifest) -> Iterator[dict[str, Any]]:
    """Yield the first rejects of each reason of a stage, reading as few parts as possible."""
    wanted = {reason: min(count, MAX_REJECTS_PER_REASON) for _, reason, count in one.ledger if reason}
    for file in one.files("rejects"):
        if not any(wanted.values()):
            return
        for line in project.store.table(file).to_pylist() if file.rows else ():
            if wanted.get(line["reason"], 0) > 0:
                wanted[line["reason"]] -= 1
                yield {**line, "dataset": key[1]}


def _render_reject_row(line: Mapping[str, Any], budget: int) -> str:
    raw = clip_text(line["raw"].decode(errors="replace"), budget * 2 // 3)
    detail = clip_text(line["detail"], budget // 4)
    cells = "".join(
        f"<td>{escape_text(cell)}</td>"
        for cell in (line["dataset"], line["stage"], line["reason"], detail, line["row_id"])
    )
    return f'<tr data-reason="{escape_text(line["reason"])}">{cells}<td><code>{escape_text(raw)}</code></td></tr>'
