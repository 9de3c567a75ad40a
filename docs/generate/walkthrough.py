"""The walk: one row of the demo through every door, with its bytes, as the page docs/walk.md.

What belongs here: choosing the row, asking each stage's own output for it, laying it out. What does not: any
stage's work; the demo is built in a temporary folder, and what is shown is read back from there.

Times, paths of this machine and fingerprints (they follow the versions of libraries) are left out, so that the
page is the same wherever it is written.
"""

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from rowmill.build import runner
from rowmill.build.runner import Project
from rowmill.cli import main
from rowmill.conversation.masking import Masker
from rowmill.core.json import from_json
from rowmill.executors import LocalPool
from rowmill.inspection.trace import Place, RowTrace, trace_source
from rowmill.schema import manifest
from rowmill.schema.conversation import Conversation
from rowmill.schema.examples import KINDS
from rowmill.schema.manifest import Manifest
from rowmill.schema.rows import Masked, Rejected
from rowmill.stages import inputs, raw_dataset, tokenizer_files
from rowmill.stages.base import Work
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.stages.tokenized_examples.text_examples import Preparer
from rowmill.stages.training_splits import stage as training_splits
from rowmill.tokenization.tokenizer import Encoder

RECIPE = Path("configs/demo/demo.yaml")
DATASET = "chats"
FILE, LINE = "configs/demo/data/chats-1.jsonl", 40
"""A short conversation with a system message, and with its reasoning under a key that must be moved."""

GENERATED = "<!-- Written by `make docs` from a build of the demo; changes by hand are lost. -->"
INTRODUCTION = """
One record of the demo, from its line in a file to a row on a GPU and back.
Everything below is read from a build of `configs/demo/demo.yaml`; `make demo` makes the same.
"""


@dataclass(frozen=True, slots=True)
class _Walker:
    """A built project, and where in it the row stands."""

    project: Project
    trace: RowTrace
    part: int

    @property
    def work(self) -> Work:
        """The work place of tokenizing, to open the rooms that the build used."""
        key = (self.project.recipe.name, DATASET, tokenized_examples.STAGE.name)
        return Work(self.project.recipe, self.project.store, self.project.base, key, DATASET, {}, LocalPool(1))

    def made(self, *key: str) -> Manifest:
        """Return the current output of a stage of the dataset, or of the recipe with a key of its own."""
        found = manifest.current(self.project.store, (self.project.recipe.name, *key))
        assert found is not None
        return found

    def one(self, stage: str, name: str, column: str, value: str) -> dict[str, Any]:
        """Return the only line of a file of the row's part that has a value in a column."""
        numbered = list(inputs.numbered_parts(self.made(DATASET, raw_dataset.STAGE.name).details))
        table = self.project.store.table(self.made(DATASET, stage).parts[numbered[self.part][0]].files[name])
        [found] = table.filter(pc.equal(table.column(column), value)).to_pylist()
        return found


def said(*words: str, columns: int | None = None) -> str:
    """Return what a command prints into a pipe, or on a terminal of so many columns.

    The width of whoever writes the page must not decide it, and an environment variable is how rich and argparse
    are told one.
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
def demo(root: Path) -> Generator[Project, None, None]:
    """Lend a build of the demo of the project in `root`, made aside."""
    with tempfile.TemporaryDirectory() as folder:
        project = runner.open_project(root / RECIPE, folder)
        runner.build(project)
        yield project


def page(project: Project) -> str:
    """Return docs/walk.md from a build of the demo."""
    [trace] = trace_source(project, f"{FILE}:{LINE}")
    parts = inputs.parts_of(_made(project, raw_dataset.STAGE.name).details)
    part = next(i for i, one in enumerate(parts) if one.part_id == trace.row_id.rpartition(":")[0])
    walker = _Walker(project, trace, part)
    doors = (_source, _part, _row, _text, _tokens, _sequence, _shard, _order, _back)
    lines = ["# A walk", "", GENERATED, *INTRODUCTION.splitlines(), ""]
    for number, door in enumerate(doors, 1):
        title, *rest = door(walker)
        lines += [f"## {number}. {title}", "", *rest, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _made(project: Project, stage: str) -> Manifest:
    found = manifest.current(project.store, (project.recipe.name, DATASET, stage))
    assert found is not None
    return found


def _block(text: str, language: str = "") -> list[str]:
    return [f"```{language}", *text.splitlines(), "```"]


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


def _code(text: str) -> str:
    """Show text with its line ends in a cell of a table."""
    return f"`{json.dumps(text, ensure_ascii=False)[1:-1]}`"


# ── From the source to a row ───────────────────────────────────────────────────────────────────────


def _source(walker: _Walker) -> Iterator[str]:
    origin = walker.trace.origin
    yield "The source line"
    yield f"Line {origin.line} of `{origin.url}`, {len(origin.raw)} bytes, as `source.train_urls` found it:"
    yield ""
    yield from _block(origin.raw.decode(), "json")


def _part(walker: _Walker) -> Iterator[str]:
    part = inputs.parts_of(walker.made(DATASET, raw_dataset.STAGE.name).details)[walker.part]
    yield "A part, and an id (`raw_dataset`)"
    yield "Files are cut into parts, and a part is named by its bytes."
    yield f"This part is bytes {part.offset:,} to {part.offset + part.length:,} of the file, {part.records:,} records."
    yield ""
    row_id = walker.trace.row_id
    yield from _block(
        f"sha256 of the part   {part.sha256}\n"
        f"part id              {part.part_id:<22}its first 16 digits\n"
        f"row id               {row_id:<22}record {row_id.rpartition(':')[2]} of the part, counted from 0"
    )
    yield ""
    yield "Lines appended to the file rename no row, since a finished part keeps its bytes."


def _row(walker: _Walker) -> Iterator[str]:
    row = walker.one(canonical_rows.STAGE.name, "rows", "row_id", walker.trace.row_id)
    yield "The canonical row (`canonical_rows`)"
    yield "One shape for all sources: `thinking` became `reasoning_content`, and the report counts it."
    yield "Columns that are null, zero, false or empty are left out here."
    yield ""
    shown = {name: _plain(name, value) for name, value in row.items() if value or name == "messages"}
    yield from _block(json.dumps(shown, indent=2, ensure_ascii=False), "json")
    yield ""
    yield "`messages` is stored as JSON text, because Arrow would give every message the keys of all others."
    yield "The split follows from a hash of the group (`splits.group_key`), so that no other row can move it."


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return from_json(value) if name in ("messages", "tools", "template_kwargs") else value


# ── From the row to tokens ─────────────────────────────────────────────────────────────────────────


def _printed(walker: _Walker) -> Masked:
    """Print and mask the row with the rooms that the build used."""
    work = walker.work
    loaded, _ = tokenizer_files.open_tokenizer(work)
    spec = tokenized_examples.renderer_spec(work, loaded)
    printer = Preparer(Encoder(loaded), work.dataset, spec, work.recipe.limit_of(DATASET)).printer
    assert printer is not None
    row = walker.one(canonical_rows.STAGE.name, "rows", "row_id", walker.trace.row_id)
    masked = Masker(printer, work.dataset.loss).mask(Conversation(from_json(row["messages"])))
    assert not isinstance(masked, Rejected)
    return masked


def _text(walker: _Walker) -> Iterator[str]:
    masked = _printed(walker)
    yield "The text and its spans (`tokenized_examples`)"
    yield "The chat template prints the row with a mark before each message."
    yield "The marks, taken out again, give the spans."
    yield "The text is what `apply_chat_template` prints, and a sample of all rows is compared with it."
    yield ""
    yield from _block(masked.text)
    yield ""
    rows = [(f"message {s.message}", f"{s.start}–{s.end}", _code(masked.text[s.start : s.end])) for s in masked.spans]
    rows += [(f"{p.kind}, own text", f"{p.start}–{p.end}", _code(masked.text[p.start : p.end])) for p in masked.pieces]
    rows += [("**trained**", f"{t.start}–{t.end}", _code(masked.text[t.start : t.end])) for t in masked.trained]
    yield from _table(("span", "characters", "text"), rows)
    yield ""
    yield "Trained is what the model itself must write."
    yield "The header is not, since the prompt prints it at inference."
    yield "The end of turn is, or the model would never stop."


def _tokens(walker: _Walker) -> Iterator[str]:
    [(example_id, tokens, trained)] = walker.trace.examples
    example = walker.one(tokenized_examples.STAGE.name, "examples", "example_id", example_id)
    yield "Tokens and the loss mask (`tokenized_examples`)"
    yield f"Example `{example_id}`: {tokens} tokens, {trained} trained."
    yield "A token trains if all its bytes lie in a trained span."
    yield ""
    ids: list[int] = example["input_ids"]
    texts = _texts(Encoder(tokenizer_files.open_tokenizer(walker.work)[0]), ids)
    rows: list[tuple[object, ...]] = []
    for at, (token, text) in enumerate(zip(ids, texts, strict=True)):
        span = sum(1 for start in example["span_starts"] if start <= at) - 1
        message = example["span_messages"][span]
        where = KINDS[example["span_kinds"][span]] + (f" {message}" if message >= 0 else "")
        rows.append((at, token, _code(text), where, "**1**" if example["loss_mask"][at] else "0"))
    yield from _table(("token", "id", "text", "what it is", "loss mask"), rows)


def _texts(encoder: Encoder, ids: Sequence[int]) -> list[str]:
    """Decode token by token; a character of several tokens stands with its last one."""
    written = [encoder.decode(ids[:end]).rstrip("\ufffd") for end in range(len(ids) + 1)]
    return [after[len(before) :] for before, after in pairwise(written)]


# ── From tokens to a rank ──────────────────────────────────────────────────────────────────────────


def _stored(walker: _Walker) -> tuple[Place, dict[str, Any]]:
    [place] = walker.trace.places
    return place, pq.read_table(place.shard).slice(place.shard_row, 1).to_pylist()[0]


def _sequence(walker: _Walker) -> Iterator[str]:
    place, row = _stored(walker)
    end = place.offset + place.length
    yield "A packed sequence (`packed_shards`)"
    yield f"Best fit put the example into sequence {place.sequence} of the split {place.split}."
    yield f"It is segment {place.segment} of {len(row['example_ids'])}, tokens {place.offset}–{end} of {row['tokens']}."
    yield f"`seq_len` is {walker.project.recipe.seq_len}."
    yield ""
    ends = list(accumulate(row["segment_lengths"]))
    cells = zip(row["example_ids"], row["segment_lengths"], ends, strict=True)
    rows = [(i, f"`{name}`", f"{stop - size}–{stop}", size) for i, (name, size, stop) in enumerate(cells)]
    yield from _table(("segment", "example", "tokens", "length"), rows)
    yield ""
    yield "The columns of the shard, around the first trained token of this segment:"
    yield ""
    first = next(at for at in range(place.offset, end) if row["labels"][at] >= 0)
    yield from _block(_columns(row, slice(first - 4, first + 6)))
    yield ""
    yield "`labels` are unshifted: −100 has no loss, any other value is the token itself."


def _columns(row: Mapping[str, Any], window: slice) -> str:
    names = ("input_ids", "labels", "position_ids")
    lines = [f"{'token':<13}" + "".join(f"{at:>6}" for at in range(window.start, window.stop))]
    lines += [f"{name:<13}" + "".join(f"{value:>6}" for value in row[name][window]) for name in names]
    return "\n".join([*lines, f"seq_lengths  {row['seq_lengths']}"])


def _shard(walker: _Walker) -> Iterator[str]:
    place, row = _stored(walker)
    shard = Path(place.shard)
    yield "A shard (`packed_shards`)"
    yield f"It is row {place.shard_row} of `{'/'.join(shard.parts[-3:])}`."
    yield "Shards are Parquet files that `datasets` and `pyarrow` read with no glue."
    yield ""
    shown = {name: row[name] for name in ("dataset", "sequence_id", "tokens", "trained_tokens", "filler")}
    shown |= {"seq_lengths": row["seq_lengths"], "example_ids": row["example_ids"]}
    yield from _block("\n".join(f"{name:<15}{json.dumps(value)}" for name, value in shown.items()))


def _order(walker: _Walker) -> Iterator[str]:
    place, _ = _stored(walker)
    splits = walker.made(training_splits.STAGE.name)
    order = walker.project.store.table(splits.parts[0].files["order"])
    number = list(splits.card["datasets"]).index(DATASET)
    mine = pc.and_(pc.equal(order.column("dataset"), number), pc.equal(order.column("sequence_id"), place.sequence))
    places = [at for at, is_mine in enumerate(mine.to_pylist()) if is_mine]
    world = walker.project.recipe.partitions.world_size
    yield "The order, and a rank (`training_splits`, `gpu_partitions`)"
    yield f"The order has {order.num_rows} places, and shows this sequence at {len(places)}."
    yield f"Rank r of {world} takes the places p with p mod {world} = r, in their order."
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
    yield from _table(("place", "rank", "step", "pass", "file", "row of the file"), rows)


# ── And back ───────────────────────────────────────────────────────────────────────────────────────


def _back(walker: _Walker) -> Iterator[str]:
    place, row = _stored(walker)
    first = next(at for at in range(place.offset, place.offset + place.length) if row["labels"][at] >= 0)
    target = f"{DATASET}/{place.split}/{place.sequence}:{first + 7}"
    yield "Back to the source"
    yield "From a token of a shard to the line it came from:"
    yield ""
    shown = said(
        "trace", str(walker.project.base / RECIPE), "--sequence", target, "--root", walker.project.store.path("")
    )
    yield from _block(f"$ rowmill trace demo --sequence {target}\n{_without_places(shown, walker)}")


def _without_places(text: str, walker: _Walker) -> str:
    """Put a short name for the storage root and for fingerprints."""
    short = text.replace(walker.project.store.path("").rstrip("/"), ".rowmill")
    return re.sub(r"(?<=/parts/)[0-9a-f]{32}", "<fingerprint>", short)
