"""The report of a recipe: one HTML file that shows what was built, opened with nothing but a browser.

What belongs here: choosing what a reader sees of each stage (pictures, tables, findings, samples, rejects) and
keeping the file small. What does not: the page around it (`html.py`), pictures (`plots.py`), counting;
a number that is missing here is missing in a manifest.

    reports/<recipe>/report.html               `#<dataset>/<stage>` leads to a stage
    reports/<recipe>/expectations/….html       what was asked of each stage's facts (`expectations_page.py`)

Samples are rows from the data, so whoever may read the report may read them. The file stays under
`MOST_BYTES` however many datasets there are: samples and rejects share fixed budgets, and pictures stop after
`MOST_DRAWN` datasets.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import numpy as np

from rowmill import stats
from rowmill.build.runner import Project, Step, road
from rowmill.checks import expectations_page
from rowmill.checks.judge import Verdict, judged
from rowmill.core import html, number_text
from rowmill.core.html import clipped, element, text
from rowmill.core.storage import digest
from rowmill.executors import LocalPool
from rowmill.inspection import inspect
from rowmill.reports import console, plots
from rowmill.schema import manifest
from rowmill.schema.examples import KINDS
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import File, Manifest, Table
from rowmill.stages import tokenizer_files
from rowmill.stages.base import Work
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.tokenization.tokenizer import Encoder

VERSION = 1
"""Raise it when the page changes; reports that say the same are not written again."""
MOST_BYTES = 2_000_000
SAMPLE_BYTES, REJECT_BYTES = 500_000, 500_000
"""What all samples, and all rejects, may take together."""
MOST_DRAWN = 16
"""Datasets that are drawn: four pictures take some 40 kB."""
SAMPLES = 10
"""Examples of a dataset that are shown, spread over its first, middle and last part."""
SAMPLE_TOKENS = 4096
"""Tokens of an example that are looked at."""
REJECTS_OF_A_REASON = 20
TABLE_ROWS = 60

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


def path_of(recipe: str) -> str:
    """Return where a recipe's report lies, relative to the storage root."""
    return f"reports/{recipe}/report.html"


def write(project: Project) -> str:
    """Write the report of what is current; return its path or URL."""
    store, path = project.store, path_of(project.recipe.name)
    made = {step.key: manifest.current(store, step.key) for step in road(project)}
    told = f"<!-- {_told(project, made)} -->"
    if not (store.exists(path) and store.read(path).decode().endswith(f"{told}\n")):
        store.write(path, f"{page(project, made, written=datetime.now(UTC))}{told}\n".encode())
    return store.path(path)


def _told(project: Project, made: "_Made") -> str:
    """Identify what a report tells: the versions that are current and what is known of them."""
    versions = [one.version if one is not None else "" for one in made.values()]
    verdicts = [(verdict.law, verdict.terms) for step in road(project) for verdict in _verdicts(project, step, made)]
    return digest(VERSION, versions, [step.code_version for step in road(project)], verdicts)


def page(project: Project, made: "_Made", *, written: datetime) -> str:
    """Return the report of what is current."""
    body = [
        *_head(project, made, written),
        *_overview(project, made),
        *(
            line
            for number, name in enumerate(project.recipe.datasets)
            for line in _dataset(project, made, name, number)
        ),
        *_whole(project, made),
        *_rejects(project, made),
    ]
    return html.page(f"{project.recipe.name}: report", body, style=STYLE, script=SCRIPT)


_Made = Mapping[manifest.Key, Manifest | None]


# ── Head and overview ──────────────────────────────────────────────────────────────────────────────


def _head(project: Project, made: _Made, written: datetime) -> Iterator[str]:
    runs = sorted({one.run_id for one in made.values() if one is not None and one.run_id})
    yield f"<h1>{text(project.recipe.name)}</h1>"
    about = number_text.dotted(
        [
            f"written {written:%Y-%m-%d %H:%M} UTC",
            project.store.path(""),
            f"{number_text.counted(len(runs), 'run')}: {', '.join(runs[:4])}" if runs else "",
        ]
    )
    yield f'<p class="dim">{text(about)}</p>'
    links = [*project.recipe.datasets, "order and ranks", "rejects"]
    yield element("nav", "".join(element("a", text(name), href=f"#{_slug(name)}") for name in links))


def _slug(name: str) -> str:
    return name.replace(" ", "-")


def _overview(project: Project, made: _Made) -> Iterator[str]:
    rows = [console.summary_cells(project, name) for name in project.recipe.datasets]
    yield html.table(
        console.SUMMARY_COLUMNS, [[str(cell) if i == 0 else cell for i, cell in enumerate(row)] for row in rows]
    )
    waivers = sorted({waiver for one in made.values() if one is not None for waiver in one.waivers})
    if waivers:
        yield '<h3 class="look">Waived</h3>'
        yield html.table(["waiver"], [[waiver] for waiver in waivers])
    failed = [verdict for step in road(project) for verdict in _verdicts(project, step, made) if verdict.failed]
    missing = [step for step in road(project) if made[step.key] is None and not step.on_demand]
    if failed:
        blocking = any(verdict.blocking for verdict in failed)
        yield f"<h3>{'Findings that failed' if blocking else 'Warnings: nothing is blocked'}</h3>"
        yield from (_finding(verdict, whole_key=True) for verdict in failed)
    if missing:
        names = ", ".join(console.key_text(step.key) for step in missing)
        yield f'<p class="look">Not built: {text(names)}</p>'
    if not failed and not missing:
        yield '<p class="good">✓ everything is built and every finding that applies passed</p>'


def _verdicts(project: Project, step: Step, made: _Made) -> list[Verdict]:
    one = made[step.key]
    return [] if one is None else judged(project.store, one, step.terms)


def _finding(verdict: Verdict, *, whole_key: bool = False) -> str:
    where = f"{console.key_text(verdict.key)} " if whole_key else ""
    page = f"expectations/{'-'.join(verdict.key[1:])}.html#{verdict.law}"
    return f'<p>{expectations_page.mark(verdict)} {text(where)}<a href="{text(page)}">{text(verdict.sentence)}</a></p>'


# ── A dataset ──────────────────────────────────────────────────────────────────────────────────────


def _dataset(project: Project, made: _Made, name: str, number: int) -> Iterator[str]:
    yield f'<h2 id="{_slug(name)}">{text(name)}</h2>'
    for step in road(project):
        if step.dataset == name:
            yield from _stage(project, step, made, drawn=number < MOST_DRAWN)
            one = made[step.key]
            if step.name == tokenized_examples.STAGE.name and one is not None:
                yield from _samples(project, name, one)


def _whole(project: Project, made: _Made) -> Iterator[str]:
    yield element("h2", "Order and ranks", id=_slug("order and ranks"))
    for step in road(project):
        if step.dataset is None:
            yield from _stage(project, step, made, drawn=True)


def _stage(project: Project, step: Step, made: _Made, *, drawn: bool) -> Iterator[str]:
    one = made[step.key]
    name = console.key_text(step.key)
    if one is None:
        yield f'<h3 id="{text(name)}">{text(step.name)} <span class="look">not built</span></h3>'
        return
    yield f'<h3 id="{text(name)}">{text(step.name)} <span class="dim">{text(console.outcome(one))}</span></h3>'
    about = number_text.dotted(
        [f"version {one.version}", f"built {one.built_at[:19]} UTC", number_text.seconds_text(one.seconds), one.run_id]
    )
    yield f'<p class="dim">{text(about)}</p>'
    if one.code_version != step.code_version:
        yield '<p class="look">! its options changed since: build again</p>'
    verdicts = _verdicts(project, step, made)
    idle = sum(verdict.outcome == "not_applicable" for verdict in verdicts)
    counts = f"{sum(verdict.passed for verdict in verdicts)} of {len(step.terms) - idle} findings passed"
    counts += f", {idle} not applicable" if idle else ""
    link = expectations_page.path_of(step.key).removeprefix(f"reports/{project.recipe.name}/")
    yield f'<p><a href="{text(link)}">{counts}</a></p>'
    yield from (_finding(verdict) for verdict in verdicts if verdict.failed)
    if drawn:
        yield from _pictures(one)
    yield from _tables(one)


def _pictures(one: Manifest) -> Iterator[str]:
    drawn = [
        plots.histogram_svg(histogram, width=520) for histogram in one.histograms.values() if sum(histogram.counts)
    ]
    counts: dict[str, int] = {}
    for _, token_class, tokens in one.token_ledger:
        counts[token_class] = counts.get(token_class, 0) + tokens
    if counts:
        drawn.append(plots.bars_svg("Tokens by class", list(counts.items()), width=520))
    if drawn:
        yield f'<div class="plots">{"".join(drawn)}</div>'


def _tables(one: Manifest) -> Iterator[str]:
    ledger = [line for line in one.ledger if line[0] != KEPT]
    left_out = Table(("state", "reason", "records"), tuple(sorted(ledger, key=lambda line: (-line[2], line))))
    tables = {name: table for name, table in one.tables.items() if name not in ("lengths", "rejects", "tokens")}
    for name, table in (tables | {"left out": left_out}).items():
        if table.rows:
            yield f'<p class="dim">{text(name.replace("_", " "))}</p>'
            yield html.table(table.columns, table.rows[:TABLE_ROWS])
            if (about := stats.about(name, table)) is not None:
                yield f'<p class="dim">{text(about)}</p>'


# ── Samples ────────────────────────────────────────────────────────────────────────────────────────


def _samples(project: Project, name: str, made: Manifest) -> Iterator[str]:
    key = (project.recipe.name, name, tokenized_examples.STAGE.name)
    work = Work(project.recipe, project.store, project.base, key, name, {}, LocalPool(1))
    loaded, _ = tokenizer_files.open_tokenizer(work)
    if loaded.card.digest != made.card.get("tokenizer_digest"):
        yield '<p class="look">The tokenizer changed since these examples were made, so none is shown.</p>'
        return
    files = [file for file in made.files("examples") if file.rows]
    if not files:
        return
    encoder = Encoder(loaded)
    budget = SAMPLE_BYTES // max(len(project.recipe.datasets), 1) // SAMPLES
    yield '<p class="dim">samples, every token by what it is; underlined ones train</p>'
    yield element("p", "".join(element("span", kind.replace("_", " "), class_=kind) for kind in KINDS), class_="legend")
    for example in _spread(project, files):
        yield from _sample(example, encoder, budget)


def _spread(project: Project, files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Yield examples from the first, the middle and the last part, each spread over its part."""
    chosen = list({file.path: file for file in (files[0], files[len(files) // 2], files[-1])}.values())
    each = -(-SAMPLES // len(chosen))
    left = SAMPLES
    for file in chosen:
        table = project.store.table(file)
        places = sorted({int(at) for at in np.linspace(0, table.num_rows - 1, min(each, left, table.num_rows))})
        left -= len(places)
        yield from table.take(places).to_pylist()


def _sample(example: Mapping[str, Any], encoder: Encoder, budget: int) -> Iterator[str]:
    yield element("p", text(number_text.dotted([example["example_id"], _lengths_of(example)])), class_="dim")
    kinds = kinds_of(example)
    spans: list[str] = []
    for stretch in inspect.stretches(example["input_ids"][:SAMPLE_TOKENS], kinds[:SAMPLE_TOKENS], encoder):
        kind, trained = stretch.kind
        shown = text(clipped(stretch.text, budget))
        title = f"{stretch.tokens} tokens, {kind}{', trained' if trained else ''}"
        span = element("span", shown, class_=f"{kind} trained" if trained else kind, title=title)
        budget -= len(span.encode())
        spans.append(span)
        if budget <= 0:
            spans.append('<span class="dim"> … the rest is not shown</span>')
            break
    yield f'<div class="text">{"".join(spans)}</div>'


def _lengths_of(example: Mapping[str, Any]) -> str:
    tokens, trained, before = example["tokens"], example["trained_tokens"], example["original_tokens"]
    words = [example["split"], number_text.counted(tokens, "token"), f"{trained:,} trained"]
    return number_text.dotted([*words, f"{before:,} before truncation" if before != tokens else ""])


def kinds_of(example: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return what every token of a stored example is, and whether it trains."""
    sizes = np.diff([*example["span_starts"], len(example["input_ids"])])
    names = [KINDS[kind] for kind in np.repeat(example["span_kinds"], sizes).tolist()]
    return list(zip(names, example["loss_mask"], strict=True))


# ── Rejects ────────────────────────────────────────────────────────────────────────────────────────


def _rejects(project: Project, made: _Made) -> Iterator[str]:
    yield element("h2", "Rejects", id="rejects")
    found = [line for key, one in sorted(made.items()) if one is not None for line in _rejected(project, key, one)]
    if not found:
        yield '<p class="dim">none</p>'
        return
    budget = REJECT_BYTES // len(found)
    counts = {reason: len(list(own)) for reason, own in groupby(sorted(found, key=_reason), key=_reason)}
    options = "".join(f'<option value="{text(name)}">{text(name)} ({count})</option>' for name, count in counts.items())
    yield (
        '<p class="tools"><select id="reason" aria-label="reason"><option value="">every reason</option>'
        f'{options}</select><input id="word" type="search" placeholder="search" aria-label="search">'
        '<span id="shown" class="dim"></span></p>'
    )
    yield f'<p class="dim">At most {REJECTS_OF_A_REASON} of a reason, stage and dataset; the view rejects has all.</p>'
    head = "".join(f"<th>{name}</th>" for name in ("dataset", "stage", "reason", "detail", "row", "record"))
    yield f'<div class="scroll" id="rejects-list"><table><thead><tr>{head}</tr></thead><tbody>'
    yield from (_reject_row(line, min(budget, 2_000)) for line in found)
    yield "</tbody></table></div>"


def _reason(line: Mapping[str, Any]) -> str:
    return str(line["reason"])


def _rejected(project: Project, key: manifest.Key, one: Manifest) -> Iterator[dict[str, Any]]:
    """Yield the first rejects of each reason of a stage, from as few parts as it takes."""
    wanted = {reason: min(count, REJECTS_OF_A_REASON) for _, reason, count in one.ledger if reason}
    for file in one.files("rejects"):
        if not any(wanted.values()):
            return
        for line in project.store.table(file).to_pylist() if file.rows else ():
            if wanted.get(line["reason"], 0) > 0:
                wanted[line["reason"]] -= 1
                yield {**line, "dataset": key[1]}


def _reject_row(line: Mapping[str, Any], budget: int) -> str:
    raw = clipped(line["raw"].decode(errors="replace"), budget * 2 // 3)
    detail = clipped(line["detail"], budget // 4)
    cells = "".join(
        f"<td>{text(cell)}</td>" for cell in (line["dataset"], line["stage"], line["reason"], detail, line["row_id"])
    )
    return f'<tr data-reason="{text(line["reason"])}">{cells}<td><code>{text(raw)}</code></td></tr>'
