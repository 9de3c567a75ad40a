"""Writes the walkthrough, docs/walk.md: one row of the demo through every stage, with its bytes.

Times, local paths and fingerprints (which depend on library versions) are omitted, so that the page is the same on
every machine.
"""

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from rowmill.build import runner, steps
from rowmill.build.steps import Project
from rowmill.cli import main
from rowmill.conversation.loss_mask import Masker
from rowmill.core.json import from_json
from rowmill.executors import LocalPool
from rowmill.inspection.trace import RowTrace, SegmentLocation, trace_source
from rowmill.schema import manifest
from rowmill.schema.examples import SPAN_KINDS
from rowmill.schema.manifest import Manifest
from rowmill.schema.rows import Conversation, MaskedConversation, Rejected
from rowmill.sources.reading import load_source_parts, number_source_parts
from rowmill.stages import raw_dataset
from rowmill.stages.base import StageContext
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.stages.tokenized_examples.text_parts import ExampleBuilder
from rowmill.stages.training_splits import stage as training_splits
from rowmill.tokenization import stored_tokenizers
from rowmill.tokenization.tokenizer import Encoder

DEMO_RECIPE = Path("configs/demo/demo.yaml")
DEMO_DATASET = "chats"
RECORD_FILE, RECORD_LINE = "configs/demo/data/chats-1.jsonl", 40
"""A short conversation with a system message, and with its reasoning under a key that must be moved."""

DEMO_NOTICE = "<!-- Written by `make docs` from a build of the demo; changes by hand are lost. -->"
INTRODUCTION = """
This page follows one record of the demo from its line in a source file to a row on a GPU, and back.
Everything below is read from a build of `configs/demo/demo.yaml`; `make demo` builds the same.
"""


@dataclass(frozen=True, slots=True)
class _TracedRow:
    """A built project, and the trace of its row."""

    project: Project
    trace: RowTrace
    part: int

    @property
    def context(self) -> StageContext:
        """The stage context of tokenization, to open the same tokenizer and template as the build."""
        key = (self.project.recipe.name, DEMO_DATASET, tokenized_examples.STAGE.name)
        return StageContext(
            self.project.store, self.project.base, key, DEMO_DATASET, {}, LocalPool(1), recipe=self.project.recipe
        )

    def made(self, *key: str) -> Manifest:
        """Return the current output of a stage, given its key without the recipe."""
        found = manifest.load_current(self.project.store, (self.project.recipe.name, *key))
        assert found is not None
        return found

    def one(self, stage: str, name: str, column: str, value: str) -> dict[str, Any]:
        """Return the only line of a file of the row's part that has a value in a column."""
        numbered = list(number_source_parts(self.made(DEMO_DATASET, raw_dataset.STAGE.name)))
        table = self.project.store.table(self.made(DEMO_DATASET, stage).parts[numbered[self.part][0]].files[name])
        [found] = table.filter(pc.equal(table.column(column), value)).to_pylist()
        return found


def capture_command(*words: str, columns: int | None = None) -> str:
    """Return what a command prints into a pipe, or on a terminal of so many columns.

    The page must not depend on the writer's terminal; rich and argparse take the width from an environment variable.
    """
    captured, before = io.StringIO(), os.environ.pop("COLUMNS", None)
    try:
        if columns is not None:
            os.environ["COLUMNS"] = str(columns)
        with contextlib.redirect_stdout(captured), contextlib.suppress(SystemExit):
            main.main(words)
    finally:
        os.environ.pop("COLUMNS", None)
        if before is not None:
            os.environ["COLUMNS"] = before
    return "\n".join(line.rstrip() for line in captured.getvalue().strip("\n").splitlines())


@contextlib.contextmanager
def build_demo(root: Path) -> Generator[Project, None, None]:
    """Yield a build of the demo of the project in `root`, in a temporary storage root."""
    with tempfile.TemporaryDirectory() as folder:
        project = steps.open_project(root / DEMO_RECIPE, folder)
        runner.build(project)
        yield project


def render_walkthrough(project: Project) -> str:
    """Return docs/walk.md from a build of the demo."""
    [trace] = trace_source(project, f"{RECORD_FILE}:{RECORD_LINE}")
    parts = load_source_parts(_load_current(project, raw_dataset.STAGE.name))
    part = next(i for i, one in enumerate(parts) if one.part_id == trace.row_id.rpartition(":")[0])
    walker = _TracedRow(project, trace, part)
    sections = (
        _describe_source_line,
        _describe_part,
        _describe_row,
        _describe_text,
        _describe_tokens,
        _describe_sequence,
        _describe_shard,
        _describe_order,
        _describe_trace_back,
    )
    lines = ["# Walkthrough", "", DEMO_NOTICE, *INTRODUCTION.splitlines(), ""]
    for number, section in enumerate(sections, 1):
        title, *rest = section(walker)
        lines += [f"## {number}. {title}", "", *rest, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _load_current(project: Project, stage: str) -> Manifest:
    found = manifest.load_current(project.store, (project.recipe.name, DEMO_DATASET, stage))
    assert found is not None
    return found


def _render_block(text: str, language: str = "") -> list[str]:
    return [f"```{language}", *text.splitlines(), "```"]


def _render_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


def _render_code(text: str) -> str:
    """Show text with its line ends in a cell of a table."""
    return f"`{json.dumps(text, ensure_ascii=False)[1:-1]}`"


# ── From the source to a row ───────────────────────────────────────────────────────────────────────


def _describe_source_line(walker: _TracedRow) -> Iterator[str]:
    origin = walker.trace.origin
    yield "The source line"
    yield f"Line {origin.line} of `{origin.url}`, {len(origin.raw)} bytes, found through `source.train_urls`:"
    yield ""
    yield from _render_block(origin.raw.decode(), "json")


def _describe_part(walker: _TracedRow) -> Iterator[str]:
    part = load_source_parts(walker.made(DEMO_DATASET, raw_dataset.STAGE.name))[walker.part]
    yield "The part, and the row id (`raw_dataset`)"
    yield "Files are divided into parts, and a part is named by the digest of its bytes."
    yield f"This part is bytes {part.offset:,} to {part.offset + part.length:,} of the file, {part.records:,} records."
    yield ""
    row_id = walker.trace.row_id
    yield from _render_block(
        f"sha256 of the part   {part.sha256}\n"
        f"part id              {part.part_id:<22}its first 16 digits\n"
        f"row id               {row_id:<22}record {row_id.rpartition(':')[2]} of the part, counted from 0"
    )
    yield ""
    yield "Lines appended to the file do not change existing row ids, since a finished part keeps its bytes."


def _describe_row(walker: _TracedRow) -> Iterator[str]:
    row = walker.one(canonical_rows.STAGE.name, "rows", "row_id", walker.trace.row_id)
    yield "The canonical row (`canonical_rows`)"
    yield "All sources get the same shape: here `thinking` became `reasoning_content`, and the report counts it."
    yield "Columns that are null, zero, false or empty are omitted here."
    yield ""
    shown = {name: _decode_value(name, value) for name, value in row.items() if value or name == "messages"}
    yield from _render_block(json.dumps(shown, indent=2, ensure_ascii=False), "json")
    yield ""
    yield "`messages` is stored as JSON text, because Arrow would give every message the union of all keys."
    yield "The split follows from a hash of the group (`splits.group_key`), so that it does not depend on other rows."


def _decode_value(name: str, value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return from_json(value) if name in ("messages", "tools", "template_kwargs") else value


# ── From the row to tokens ─────────────────────────────────────────────────────────────────────────


def _mask_row(walker: _TracedRow) -> MaskedConversation:
    """Render and mask the row as the build did."""
    context = walker.context
    loaded, _ = stored_tokenizers.open_recipe_tokenizer(context)
    spec = tokenized_examples.resolve_renderer_spec(context, loaded)
    renderer = ExampleBuilder(Encoder(loaded), context.dataset, spec, context.recipe.limit_of(DEMO_DATASET)).renderer
    assert renderer is not None
    row = walker.one(canonical_rows.STAGE.name, "rows", "row_id", walker.trace.row_id)
    masked = Masker(renderer, context.dataset.loss).mask(Conversation(from_json(row["messages"])))
    assert not isinstance(masked, Rejected)
    return masked


def _describe_text(walker: _TracedRow) -> Iterator[str]:
    masked = _mask_row(walker)
    yield "The text, and whose it is (`tokenized_examples`)"
    yield "The chat template renders the row as it is, and once more with its own texts covered by private characters."
    yield "So each character of the render has a proven owner."
    yield "The text is what `apply_chat_template` returns; a sample of all rows is compared with it."
    yield ""
    yield from _render_block(masked.text)
    yield ""
    rows = [
        (f"message {p.message}: {p.kind}, own text", f"{p.start}–{p.end}", _render_code(masked.text[p.start : p.end]))
        for p in masked.pieces
    ]
    rows += [("**trained**", f"{t.start}–{t.end}", _render_code(masked.text[t.start : t.end])) for t in masked.trained]
    yield from _render_table(("span", "characters", "text"), rows)
    yield ""
    yield "The text that the model must write is trained, its end of turn too; the header belongs to the prompt."


def _describe_tokens(walker: _TracedRow) -> Iterator[str]:
    [(example_id, tokens, trained)] = walker.trace.examples
    example = walker.one(tokenized_examples.STAGE.name, "examples", "example_id", example_id)
    yield "Tokens and the loss mask (`tokenized_examples`)"
    yield f"Example `{example_id}`: {tokens} tokens, {trained} trained."
    yield "A token is trained if all its bytes are in a trained span; here the tokens of a span are on one line."
    yield ""
    ids: list[int] = example["input_ids"]
    texts = _decode_tokens(Encoder(stored_tokenizers.open_recipe_tokenizer(walker.context)[0]), ids)
    spans = [sum(1 for start in example["span_starts"] if start <= at) - 1 for at in range(len(ids))]
    rows: list[tuple[object, ...]] = []
    for (span, is_trained), places in groupby(range(len(ids)), key=lambda at: (spans[at], example["loss_mask"][at])):
        first, *rest = places
        last = rest[-1] if rest else first
        message = example["span_messages"][span]
        owner = SPAN_KINDS[example["span_kinds"][span]] + (f" {message}" if message >= 0 else "")
        text = _render_code("".join(texts[first : last + 1]))
        shown = " ".join(map(str, ids[first : last + 1][:4])) + (" …" if last - first > 3 else "")
        rows.append((f"{first}–{last}" if rest else first, shown, text, owner, "**1**" if is_trained else "0"))
    yield from _render_table(("tokens", "ids", "text", "span", "loss mask"), rows)


def _decode_tokens(encoder: Encoder, ids: Sequence[int]) -> list[str]:
    """Decode token by token; a character of several tokens is shown with its last one."""
    written = [encoder.decode(ids[:end]).rstrip("\ufffd") for end in range(len(ids) + 1)]
    return [after[len(before) :] for before, after in pairwise(written)]


# ── From tokens to a rank ──────────────────────────────────────────────────────────────────────────


def _read_sequence(walker: _TracedRow) -> tuple[SegmentLocation, dict[str, Any]]:
    [place] = walker.trace.places
    return place, pq.read_table(place.shard).slice(place.shard_row, 1).to_pylist()[0]


def _describe_sequence(walker: _TracedRow) -> Iterator[str]:
    place, row = _read_sequence(walker)
    end = place.offset + place.length
    yield "The packed sequence (`packed_shards`)"
    yield f"Best-fit packing put the example into sequence {place.sequence} of the split {place.split}."
    yield f"It is segment {place.segment} of {len(row['example_ids'])}, tokens {place.offset}–{end} of {row['tokens']}."
    yield f"`seq_len` is {walker.project.recipe.seq_len}."
    yield ""
    ends = list(accumulate(row["segment_lengths"]))
    cells = zip(row["example_ids"], row["segment_lengths"], ends, strict=True)
    rows = [(i, f"`{name}`", f"{stop - size}–{stop}", size) for i, (name, size, stop) in enumerate(cells)]
    yield from _render_table(("segment", "example", "tokens", "length"), rows)
    yield ""
    yield "The columns of the shard, around the first trained token of this segment:"
    yield ""
    first = next(at for at in range(place.offset, end) if row["labels"][at] >= 0)
    yield from _render_block(_format_columns(row, slice(first - 4, first + 6)))
    yield ""
    yield "`labels` are unshifted: −100 means no loss, any other value is the token itself."


def _format_columns(row: Mapping[str, Any], window: slice) -> str:
    names = ("input_ids", "labels", "position_ids")
    lines = [f"{'token':<13}" + "".join(f"{at:>6}" for at in range(window.start, window.stop))]
    lines += [f"{name:<13}" + "".join(f"{value:>6}" for value in row[name][window]) for name in names]
    return "\n".join([*lines, f"seq_lengths  {row['seq_lengths']}"])


def _describe_shard(walker: _TracedRow) -> Iterator[str]:
    place, row = _read_sequence(walker)
    shard = Path(place.shard)
    yield "The shard (`packed_shards`)"
    yield f"Sequence {place.sequence} of the split is row {place.shard_row} of `{'/'.join(shard.parts[-3:])}`."
    yield "Shards are Parquet files that `datasets` and `pyarrow` read directly."
    yield ""
    shown = {name: row[name] for name in ("dataset", "tokens", "trained_tokens", "filler")}
    shown |= {"seq_lengths": row["seq_lengths"], "example_ids": row["example_ids"]}
    yield from _render_block("\n".join(f"{name:<15}{json.dumps(value)}" for name, value in shown.items()))


def _describe_order(walker: _TracedRow) -> Iterator[str]:
    place, _ = _read_sequence(walker)
    splits = walker.made(training_splits.STAGE.name)
    order = walker.project.store.table(splits.parts[0].files["order"])
    number = list(splits.card["datasets"]).index(DEMO_DATASET)
    mine = pc.and_(pc.equal(order.column("dataset"), number), pc.equal(order.column("sequence_id"), place.sequence))
    places = [at for at, is_mine in enumerate(mine.to_pylist()) if is_mine]
    world = walker.project.recipe.partitions.world_size
    yield "The training order, and the rank (`training_splits`, `gpu_partitions`)"
    yield f"The order has {order.num_rows} positions; this sequence is at {len(places)} of them."
    yield f"Rank r of {world} takes the positions p with p mod {world} = r, in their order."
    yield ""
    rows = [
        (
            p,
            f"{p} mod {world} = {one.rank}",
            one.step,
            one.passed,
            f"`{'/'.join(Path(one.file).parts[-3:])}`",
            one.file_row,
        )
        for p, one in zip(places, place.showings, strict=True)
    ]
    yield from _render_table(("position", "rank", "step", "pass", "file", "row of the file"), rows)


# ── And back ───────────────────────────────────────────────────────────────────────────────────────


def _describe_trace_back(walker: _TracedRow) -> Iterator[str]:
    place, row = _read_sequence(walker)
    first = next(at for at in range(place.offset, place.offset + place.length) if row["labels"][at] >= 0)
    target = f"{DEMO_DATASET}/{place.split}/{place.sequence}:{first + 7}"
    yield "Back to the source"
    yield "`rowmill trace` leads from a token of a shard to its source line:"
    yield ""
    shown = capture_command(
        "trace", str(walker.project.base / DEMO_RECIPE), "--sequence", target, "--root", walker.project.store.path("")
    )
    yield from _render_block(f"$ rowmill trace demo --sequence {target}\n{_shorten_paths(shown, walker)}")


def _shorten_paths(text: str, walker: _TracedRow) -> str:
    """Replace the storage root and fingerprints by short names."""
    short = text.replace(walker.project.store.path("").rstrip("/"), ".rowmill")
    return re.sub(r"(?<=/parts/)[0-9a-f]{32}", "<fingerprint>", short)
