"""What structured truncation keeps that a plain cut loses: `python benchmarks/truncation_study.py ../shared/data`.

uncut      S T U1 A1 U2 A2 … U8 call result A8 U9
plain                          call result A8 U9      the last `limit` tokens
structured S T           U7 A7 U8 call result A8      system and tools, then the last exchanges that fit
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rowmill.build import runner  # noqa: E402  (the path must be set first)
from rowmill.build.steps import Project  # noqa: E402
from rowmill.core.storage import Store  # noqa: E402
from rowmill.recipe.recipe import parse_recipe  # noqa: E402
from rowmill.schema.examples import SPAN_KINDS  # noqa: E402
from rowmill.schema.manifest import load_current  # noqa: E402

LIMITS = (2048, 4096, 8192)
UNCUT = 40960
ROWS = "tools/tau_airline_gpt4o.messages.jsonl"
TOKENIZER, TEMPLATE = "tokenizers/qwen3", "templates/llamacpp__Qwen-Qwen3-0.6B.jinja"
STAGES = ("raw_dataset", "canonical_rows", "tokenized_examples", "truncation_stats")
KEPT = ("system text", "tools", "last question", "last answer", "all results with their calls")
BEGINS, ENDS = "<!-- truncation study: written by benchmarks/truncation_study.py -->", "<!-- end of the study -->"
PICTURE = "docs/images/truncation.svg"


@dataclass(frozen=True)
class Uncut:
    """A whole row: its tokens, where its parts stand, and which tokens train."""

    ids: list[int]
    mask: list[bool]
    system: tuple[int, int]
    tools_end: int
    question: tuple[int, int]
    answer: tuple[int, int]
    calls: tuple[int, ...]
    results: tuple[int, ...]
    """The last token of the call of every result, and the first token of every result."""


def project(data: Path, root: Path, limit: int, overlong: str) -> Project:
    """Return a project that tokenizes the dialogues at one limit."""
    values = {
        "tokenizer": str(data / TOKENIZER),
        "seq_len": limit,
        "datasets": {
            "tau": {
                "source": {"train_urls": [str(data / ROWS)]},
                "format": {"kind": "chat"},
                "template": {"chat_template": {"file": str(data / TEMPLATE)}},
                "truncation": {"overlong": overlong},
                "splits": {"validation": 0},
            }
        },
        "gates": {name: {"at_most": 1} for name in ("context_overflow", "rejects", "zero_loss_rows")},
        "execution": {"workers": 1},
    }
    return Project(parse_recipe(values, name=f"study-{limit}", where="study"), Store(str(root)), ROOT)


def examples_of(one: Project) -> tuple[list[dict[str, Any]], Mapping[str, Sequence[Any]]]:
    """Build; return the examples, and what each stage of truncation took."""
    runner.build(one, only=STAGES)
    made = load_current(one.store, (one.recipe.name, "tau", "tokenized_examples"))
    lengths = load_current(one.store, (one.recipe.name, "tau", "truncation_stats"))
    assert made is not None
    assert lengths is not None
    tables = [one.store.table(file) for file in made.files("examples")]
    rows = [row for table in tables for row in table.to_pylist()]
    return rows, {line[0]: line[1:] for line in lengths.tables["stages"].rows}


def spans_of(example: Mapping[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    """Yield kind, message, start and stop of every span of tokens."""
    stops = [*example["span_starts"][1:], len(example["input_ids"])]
    for kind, message, start, stop in zip(
        example["span_kinds"], example["span_messages"], example["span_starts"], stops, strict=True
    ):
        yield SPAN_KINDS[kind], message, start, stop


def uncut(example: Mapping[str, Any]) -> Uncut:
    """Find the parts of a whole row that a cut should spare."""
    spans = [span for span in spans_of(example) if span[1] >= 0]
    mask: list[bool] = example["loss_mask"]
    answer = next(span for span in reversed(spans) if any(mask[span[2] : span[3]]))
    question = next(span for span in reversed(spans) if span[0] == "user" and span[1] < answer[1])
    system = next(span for span in spans if span[0] == "system")
    first = next(span for span in spans if span[0] == "user")
    results = [span for span in spans if span[0] == "tool_result" and span[1] < answer[1]]
    ends = {message: stop for kind, message, _, stop in spans if kind == "tool_call"}
    calls = [max(stop for message, stop in ends.items() if message < result[1]) for result in results]
    return Uncut(
        example["input_ids"], mask, system[2:], first[2], question[2:], answer[2:],
        tuple(calls), tuple(result[2] for result in results),
    )  # fmt: skip


def plain(row: Uncut, limit: int) -> tuple[bool, ...]:
    """Say what the last `limit` tokens hold."""
    cut = max(len(row.ids) - limit, 0)
    whole = all(not call <= cut <= result for call, result in zip(row.calls, row.results, strict=True)) or cut == 0
    return cut <= row.system[0], cut <= row.system[1], cut <= row.question[0], cut <= row.answer[0], whole


def structured(row: Uncut, example: Mapping[str, Any]) -> tuple[bool, ...]:
    """Say what a truncated example holds of the whole row, token by token."""
    spans = list(spans_of(example))
    texts = [(kind, tuple(example["input_ids"][start:stop])) for kind, message, start, stop in spans if message >= 0]
    head = example["input_ids"][: row.tools_end] == row.ids[: row.tools_end]
    named = {"system": row.system, "user": row.question, "assistant": row.answer}
    holds = {kind: (kind, tuple(row.ids[start:stop])) in texts for kind, (start, stop) in named.items()}
    # Structure goes by whole rounds; only a cut of tokens can part a result from its call.
    orphans = [i for i, (kind, *_) in enumerate(spans) if kind == "tool_result" and not _called(spans, i)]
    return holds["system"], head, holds["user"], _answered(row, example), not orphans


def _called(spans: Sequence[tuple[str, int, int, int]], at: int) -> bool:
    return any(kind == "tool_call" and message < spans[at][1] for kind, message, _, _ in spans[:at])


def _answered(row: Uncut, example: Mapping[str, Any]) -> bool:
    """Tell whether the last trained stretch of the example is that of the whole row."""
    wanted = row.ids[row.answer[0] : row.answer[1]]
    spans = [span for span in spans_of(example) if span[1] >= 0 and any(example["loss_mask"][span[2] : span[3]])]
    return any(example["input_ids"][start:stop] == wanted for _, _, start, stop in spans)


# ── Tables and picture ─────────────────────────────────────────────────────────────────────────────


def study(data: Path, root: Path) -> dict[int, dict[str, Any]]:
    """Compare both ways at every limit."""
    whole, _ = examples_of(project(data, root, UNCUT, "keep"))
    rows = {example["row_ids"][0]: uncut(example) for example in whole}
    found: dict[int, dict[str, Any]] = {}
    for limit in LIMITS:
        made, stages = examples_of(project(data, root, limit, "truncate"))
        pieces, _ = examples_of(project(data, root, limit, "split"))
        found[limit] = {
            "rows": len(rows),
            "head": [
                sum(end) // len(rows) for end in zip(*((r.system[1], r.tools_end) for r in rows.values()), strict=True)
            ],
            "pieces": len(pieces),
            "over": sum(len(row.ids) > limit for row in rows.values()),
            "stages": stages,
            "plain": _sums([plain(row, limit) for row in rows.values()]),
            "structured": _sums([structured(rows[example["row_ids"][0]], example) for example in made]),
            "trained": {
                "uncut": sum(sum(row.mask) for row in rows.values()),
                "plain": sum(sum(row.mask[max(len(row.ids) - limit, 0) :]) for row in rows.values()),
                "structured": sum(example["trained_tokens"] for example in made),
                "split": sum(example["trained_tokens"] for example in pieces),
            },
        }
    return found


def _sums(rows: Sequence[tuple[bool, ...]]) -> list[int]:
    return [sum(row[i] for row in rows) for i in range(len(KEPT))]


def page(found: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the study as Markdown."""
    total = next(iter(found.values()))["rows"]
    head = next(iter(found.values()))["head"]
    over = ", ".join(f"{one['over']} over {limit:,}" for limit, one in found.items())
    lines = [
        BEGINS,
        "",
        f"{total} dialogues of an airline's help desk with tools, printed by Qwen3's template: {over} tokens.",
        f"On average the system text ends at token {head[0]:,} and the tools at token {head[1]:,}.",
        "`plain` keeps the last tokens; `structured` is what a build does; `split` makes several examples of a row.",
        "Rows that keep each part whole:",
        "",
        f"| limit | way | {' | '.join(KEPT)} | trained tokens kept |",
        f"|---|---|{'---|' * len(KEPT)}---|",
    ]
    for limit, one in found.items():
        for way in ("plain", "structured"):
            share = 100 * one["trained"][way] / one["trained"]["uncut"]
            counts = " | ".join(str(count) for count in one[way])
            lines.append(f"| {limit:,} | {way} | {counts} | {one['trained'][way]:,} ({share:.0f} %) |")
        share, empty = 100 * one["trained"]["split"] / one["trained"]["uncut"], " |" * len(KEPT)
        lines.append(
            f"| {limit:,} | split, {one['pieces']} examples |{empty} {one['trained']['split']:,} ({share:.0f} %) |"
        )
    picture_link = f"![Rows that keep each part whole]({PICTURE.removeprefix('docs/')})"
    return "\n".join([*lines, "", picture_link, "", ENDS])


def picture(found: Mapping[int, Mapping[str, Any]]) -> str:
    """Draw, for every limit and part, the rows that keep it: plain beside structured."""
    total = next(iter(found.values()))["rows"]
    bar, left, top, line = 3.4, 190, 44, 15
    parts: list[str] = []
    y = top
    for limit, one in found.items():
        parts.append(f'<text x="12" y="{y + 4}" font-weight="bold">{limit:,} tokens</text>')
        y += 12
        for i, name in enumerate(KEPT):
            parts.append(f'<text x="{left - 8}" y="{y + 10}" text-anchor="end">{name}</text>')
            for k, (way, colour) in enumerate((("plain", "#b0b7c3"), ("structured", "#2a78d6"))):
                count, at = one[way][i], y + 7 * k
                parts.append(
                    f'<rect x="{left}" y="{at}" width="{bar * 100 * count / total:.1f}" height="6" fill="{colour}"/>'
                )
            counts = f"{one['plain'][i]} · {one['structured'][i]}"
            parts.append(f'<text x="{left + bar * 100 + 8}" y="{y + 10}" fill="#5b6472">{counts}</text>')
            y += line + 3
        y += 12
    head = (
        f'<text x="12" y="20" font-weight="bold">Rows of {total} that keep each part whole</text>'
        f'<rect x="{left + 190}" y="12" width="10" height="8" fill="#b0b7c3"/>'
        f'<text x="{left + 205}" y="20">plain</text>'
        f'<rect x="{left + 260}" y="12" width="10" height="8" fill="#2a78d6"/>'
        f'<text x="{left + 275}" y="20">structured</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{y}" viewBox="0 0 640 {y}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12"><title>What truncation keeps</title>'
        f'<rect width="640" height="{y}" fill="#ffffff"/>{head}{"".join(parts)}</svg>\n'
    )


def main(data: Path) -> None:
    """Run the study and write it."""
    with tempfile.TemporaryDirectory() as root:
        found = study(data.resolve(), Path(root))
    why = ROOT / "docs/why.md"
    text = why.read_text(encoding="utf-8")
    block = re.compile(re.escape(BEGINS) + ".*?" + re.escape(ENDS), re.DOTALL)
    why.write_text(block.sub(lambda _: page(found), text), encoding="utf-8")
    (ROOT / PICTURE).write_text(picture(found), encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
