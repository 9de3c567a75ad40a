"""The rows of the report that can be searched: sampled examples and rejects, each folded behind one line."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rowmill.core import number_text
from rowmill.core.html import clip_text, escape_text, render_element
from rowmill.core.stage_names import TOKENIZED_EXAMPLES
from rowmill.core.storage import File
from rowmill.inspection import inspect
from rowmill.reports.current_build import CurrentBuild
from rowmill.reports.sequence_view import render_legend
from rowmill.schema import manifest
from rowmill.schema.examples import SPAN_KINDS
from rowmill.schema.manifest import Manifest
from rowmill.tokenization.encoder import Encoder

MAX_SAMPLE_BYTES, MAX_REJECT_BYTES = 400_000, 400_000
"""Total size of all samples, and of all rejects."""
SAMPLES_PER_DATASET = 10
"""Examples shown per dataset, spread over its first, middle and last part."""
MAX_SAMPLE_TOKENS = 4096
"""Tokens shown of an example."""
MAX_REJECTS_PER_REASON = 20
MAX_LINE_BYTES = 240
"""Size of the beginning of a row's text in its folded line."""
KEPT_REASON = "kept"


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the page: what it is searched by, the line that is always shown, and what is folded."""

    dataset: str
    reason: str
    tokens: int | None
    characters: int
    line: str
    body: str


def render_rows(build: CurrentBuild, encoders: Mapping[str, Encoder]) -> Iterator[str]:
    """Yield the section of rows; `encoders` are those of the datasets whose examples are shown."""
    yield '<section><h2 id="rows">Rows</h2>'
    rows = [*_iterate_samples(build, encoders), *_list_rejects(build)]
    if not rows:
        yield '<p class="dim">none</p></section>'
        return
    yield from _render_search(rows)
    yield (
        f'<p class="dim">Samples of each dataset, and at most {MAX_REJECTS_PER_REASON} rejects per reason, stage and '
        "dataset; the SQL views examples and rejects have all.</p>"
    )
    yield render_legend()
    yield '<div id="rows-list">'
    yield from (_render_row(row) for row in rows)
    yield "</div></section>"


def _render_search(rows: Sequence[_Row]) -> Iterator[str]:
    counts = Counter(row.reason for row in rows)
    reasons = "".join(
        f'<option value="{escape_text(name)}">{escape_text(name)} ({count})</option>'
        for name, count in sorted(counts.items(), key=lambda pair: (pair[0] != KEPT_REASON, pair))
    )
    datasets = "".join(
        f'<option value="{escape_text(name)}">{escape_text(name)}</option>'
        for name in dict.fromkeys(row.dataset for row in rows)
    )
    yield (
        '<div class="tools search" role="search">'
        '<input id="search-text" type="search" placeholder="search text, id, detail" aria-label="text">'
        f'<select id="search-dataset" aria-label="dataset"><option value="">every dataset</option>{datasets}</select>'
        f'<select id="search-reason" aria-label="reason"><option value="">kept and rejected</option>{reasons}</select>'
        '<span class="length"><input id="search-min" type="number" min="0" placeholder="from" '
        'aria-label="shortest"><input id="search-max" type="number" min="0" placeholder="to" aria-label="longest">'
        '<select id="search-unit" aria-label="unit of length"><option value="characters">characters</option>'
        '<option value="tokens">tokens</option></select></span>'
        '<output id="search-count" class="dim"></output></div>'
    )


def _render_row(row: _Row) -> str:
    tokens = "" if row.tokens is None else f' data-tokens="{row.tokens}"'
    return (
        f'<details class="row" data-dataset="{escape_text(row.dataset)}" data-reason="{escape_text(row.reason)}" '
        f'data-characters="{row.characters}"{tokens}><summary>{row.line}</summary>{row.body}</details>'
    )


def _render_line(mark: str, facts: Sequence[str], text: str) -> str:
    start = clip_text(" ".join(text[:MAX_LINE_BYTES].split()), MAX_LINE_BYTES).partition(" … (")[0]
    return f'{mark} {escape_text(number_text.join_facts(facts))} <span class="start">{escape_text(start)}</span>'


# ── Samples ────────────────────────────────────────────────────────────────────────────────────────


def _iterate_samples(build: CurrentBuild, encoders: Mapping[str, Encoder]) -> Iterator[_Row]:
    budget = MAX_SAMPLE_BYTES // max(len(encoders), 1) // SAMPLES_PER_DATASET
    for name, encoder in encoders.items():
        made = build.find_output(name, TOKENIZED_EXAMPLES)
        files = [file for file in made.files("examples") if file.rows] if made is not None else []
        for example in _choose_samples(build, files) if files else ():
            yield _make_sample(name, example, encoder, budget)


def _choose_samples(build: CurrentBuild, files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Yield examples from the first, the middle and the last part, each spread over its part."""
    chosen = list({file.path: file for file in (files[0], files[len(files) // 2], files[-1])}.values())
    each = -(-SAMPLES_PER_DATASET // len(chosen))
    left = SAMPLES_PER_DATASET
    for file in chosen:
        table = build.project.store.table(file)
        places = sorted({int(at) for at in np.linspace(0, table.num_rows - 1, min(each, left, table.num_rows))})
        left -= len(places)
        yield from table.take(places).to_pylist()


def _make_sample(name: str, example: Mapping[str, Any], encoder: Encoder, budget: int) -> _Row:
    kinds = list_token_kinds(example)[:MAX_SAMPLE_TOKENS]
    spans: list[str] = []
    characters, text = 0, ""
    for stretch in inspect.split_by_class(example["input_ids"][:MAX_SAMPLE_TOKENS], kinds, encoder):
        kind, trained = stretch.kind
        characters += len(stretch.text)
        text += f" {stretch.text}" if len(text) < MAX_LINE_BYTES and kind != "template" else ""
        if budget <= 0:
            continue
        title = f"{stretch.tokens} tokens, {kind}{', trained' if trained else ''}"
        style = f"{kind} trained" if trained else kind
        span = render_element("span", escape_text(clip_text(stretch.text, budget)), class_=style, title=title)
        budget -= len(span.encode())
        spans.append(span)
        if budget <= 0:
            spans.append('<span class="dim"> … truncated</span>')
    tokens, trained = number_text.format_count(example["tokens"], "token"), f"{example['trained_tokens']:,} trained"
    line = _render_line('<span class="good">✓</span>', [name, tokens, trained], text)
    facts = number_text.join_facts([example["example_id"], *_list_lengths(example)])
    body = f'<p class="dim">{escape_text(facts)}</p><div class="text">{"".join(spans)}</div>'
    return _Row(name, KEPT_REASON, example["tokens"], characters, line, body)


def _list_lengths(example: Mapping[str, Any]) -> list[str]:
    tokens, trained, before = example["tokens"], example["trained_tokens"], example["original_tokens"]
    lengths = [example["split"], number_text.format_count(tokens, "token"), f"{trained:,} trained"]
    return [*lengths, f"{before:,} before truncation" if before != tokens else ""]


def list_token_kinds(example: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return the span kind of every token of a stored example, and whether it is trained."""
    sizes = np.diff([*example["span_starts"], len(example["input_ids"])])
    names = [SPAN_KINDS[kind] for kind in np.repeat(example["span_kinds"], sizes).tolist()]
    return list(zip(names, example["loss_mask"], strict=True))


# ── Rejects ────────────────────────────────────────────────────────────────────────────────────────


def _list_rejects(build: CurrentBuild) -> list[_Row]:
    made = [(key, one) for key, one in sorted(build.made.items()) if one is not None]
    found = [line for key, one in made for line in _iterate_rejects(build, key, one)]
    budget = min(MAX_REJECT_BYTES // max(len(found), 1), 2_000)
    return [_make_reject(line, budget) for line in found]


def _iterate_rejects(build: CurrentBuild, key: manifest.StageKey, output: Manifest) -> Iterator[dict[str, Any]]:
    """Yield the first rejects of each reason of a stage, reading as few parts as possible."""
    wanted = {reason: min(count, MAX_REJECTS_PER_REASON) for _, reason, count in output.ledger if reason}
    for file in output.files("rejects"):
        if not any(wanted.values()):
            return
        for line in build.project.store.table(file).to_pylist() if file.rows else ():
            if wanted.get(line["reason"], 0) > 0:
                wanted[line["reason"]] -= 1
                yield {**line, "dataset": key[1]}


def _make_reject(line: Mapping[str, Any], budget: int) -> _Row:
    raw = line["raw"].decode(errors="replace")
    detail = clip_text(line["detail"], budget // 4)
    shown = _render_line('<span class="bad">✗</span>', [line["dataset"], line["reason"]], line["detail"] or raw)
    facts = [f"rejected at {line['stage']}", f"row {line['row_id']}"]
    body = (
        f'<p>{escape_text(detail)}</p><p class="dim">{escape_text(number_text.join_facts(facts))}</p>'
        f'<div class="text">{escape_text(clip_text(raw, budget // 2))}</div>'
    )
    return _Row(line["dataset"], line["reason"], None, len(raw), shown, body)
