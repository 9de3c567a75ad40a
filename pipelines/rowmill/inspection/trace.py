"""Traces a row from its source line through every stage to its places in shards, order and ranks.

    shard ─ sequence ─ segment ─► example ─► row `<part>:<number>` ─► part of a file ─► line
    row ─► its outcome at each stage ─► examples ─► segments ─► places in the order ─► rank, step, file

Only versions that were built from each other are joined: the trace starts at the current shards and follows the
inputs that each manifest names, so a half-finished rebuild cannot mix two lineages.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill import sources
from rowmill.build.steps import Project
from rowmill.core.arrays import find_distinct, format_count
from rowmill.core.errors import ConfigError, IntegrityError, SourceError, suggest_name
from rowmill.core.storage import File, Store
from rowmill.schema import manifest
from rowmill.schema.facts import read_facts
from rowmill.schema.manifest import Manifest
from rowmill.schema.rows import is_row_id, parse_row_id
from rowmill.sources import SourcePart
from rowmill.sources.reading import number_source_parts
from rowmill.stages import gpu_partitions, inputs, raw_dataset
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.gpu_partitions import GpuPartitionsFacts, is_index, list_train_shards, load_packed_inputs
from rowmill.stages.packed_shards import stage as packed_shards
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.stages.training_splits import stage as training_splits

STAGES_BACKWARDS = (
    packed_shards.STAGE.name,
    tokenized_examples.STAGE.name,
    canonical_rows.STAGE.name,
    raw_dataset.STAGE.name,
)


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """A row's position in its source; `problem` explains why line and raw record are unknown."""

    url: str
    reader: str
    record: int
    line: int | None = None
    raw: bytes = b""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SequenceOccurrence:
    """One occurrence of a sequence in training: its rank, step, pass, and row in the rank's file."""

    rank: int
    step: int
    passed: int
    file: str
    file_row: int


@dataclass(frozen=True, slots=True)
class SegmentLocation:
    """One segment: tokens `[start, start + length)` of an example, at `offset` in a sequence of a shard."""

    split: str
    sequence: int
    segment: int
    example_id: str
    start: int
    length: int
    offset: int
    shard: str
    shard_row: int
    showings: tuple[SequenceOccurrence, ...] = ()


@dataclass(frozen=True)
class Lineage:
    """The manifests of one dataset that were built from each other, as far as they exist."""

    project: Project
    dataset: str
    made: Mapping[str, Manifest]

    @cached_property
    def parts(self) -> list[SourcePart]:
        """The source's parts."""
        return [part for _, part in self._numbered_parts]

    @cached_property
    def _numbered_parts(self) -> list[tuple[int, SourcePart]]:
        raw = self.made.get(raw_dataset.STAGE.name)
        return list(number_source_parts(raw)) if raw else []

    def made_of(self, stage: str, index: int) -> manifest.Part | None:
        """Return the part of `canonical_rows` or `tokenized_examples` that was built from a source part.

        None if the stage is not built.
        """
        made = self.made.get(stage)
        return made.parts[self._numbered_parts[index][0]] if made else None

    def table(self, stage: str, index: int, name: str, columns: Sequence[str]) -> pa.Table | None:
        """Read columns of a file that a stage built from a source part; None if the stage is not built."""
        made = self.made_of(stage, index)
        return self.project.store.table(made.files[name], columns) if made else None


def load_lineage(project: Project, dataset: str) -> Lineage:
    """Load the outputs that a dataset's current shards were built from, as far as they exist."""
    found: dict[str, Manifest] = {}
    for stage in STAGES_BACKWARDS:
        key = (project.recipe.name, dataset, stage)
        named = next((v for one in found.values() if (v := one.inputs.get("/".join(key)))), None)
        made = manifest.load_version(project.store, key, named) if named else manifest.load_current(project.store, key)
        if made is not None:
            found[stage] = made
    return Lineage(project, dataset, found)


def find_origin(lineage: Lineage, part: SourcePart, at: int) -> RowOrigin:
    """Find a record's line by reading its part; if the source changed since, the line is unknown."""
    record = part.first_record + at
    try:
        for one in sources.read_records(part, lineage.project.base):
            if one.number == at:
                return RowOrigin(part.url, part.reader, record, one.line, one.raw)
    except (SourceError, IntegrityError) as error:
        return RowOrigin(part.url, part.reader, record, problem=str(error))
    raise AssertionError((part.part_id, at))


def filter_rows(table: pa.Table, column: str, value: object) -> list[dict[str, Any]]:
    """Return the rows of a table that have a value in a column."""
    return table.filter(pc.equal(table.column(column), value)).to_pylist()


def locate_examples(lineage: Lineage, examples: Collection[str]) -> tuple[list[SegmentLocation], str]:
    """Return the segments of some examples, and, if they are not in the order, the reason."""
    packed = lineage.made.get(packed_shards.STAGE.name)
    if packed is None:
        return [], "not packed yet"
    order, note = load_order(lineage)
    found: list[SegmentLocation] = []
    for part in (part for part in packed.parts if "segments" in part.files):
        segments = lineage.project.store.table(part.files["segments"])
        holding = pc.is_in(segments.column("example_id"), pa.array(sorted(examples), pa.string()))
        for row in segments.filter(holding).column("shard_row").unique().to_pylist():
            sequence = row + int(part.facts["first_sequence"])
            of_sequence = (place for _, place in locate_segments(lineage, part, sequence, order))
            found += [place for place in of_sequence if place.example_id in examples]
    return found, note


def locate_segments(
    lineage: Lineage, part: manifest.Part, sequence: int, order: "_TrainingOrder | None"
) -> Iterator[tuple[str, SegmentLocation]]:
    """Yield the segments of a sequence, each with its row's id; one that examples share is yielded for each of them."""
    segments = lineage.project.store.table(part.files["segments"])
    split = str(part.facts["split"])
    occurrences = tuple(order.showings(sequence)) if order is not None and split == "train" else ()
    offset, end, current = 0, 0, -1
    shard_row = sequence - int(part.facts["first_sequence"])
    for one in sorted(filter_rows(segments, "shard_row", shard_row), key=lambda one: one["segment"]):
        if one["segment"] != current:
            offset, end, current = end, end + one["length"], one["segment"]
        place = SegmentLocation(
            split=split,
            sequence=sequence,
            segment=one["segment"],
            example_id=one["example_id"],
            start=one["start"],
            length=one["length"],
            offset=offset,
            shard=lineage.project.store.path(part.files["shard"].path),
            shard_row=shard_row,
            showings=occurrences,
        )
        yield one["row_id"], place


@dataclass(frozen=True, slots=True)
class _TrainingOrder:
    """The order of training for one dataset, and where the ranks have its sequences if they are built."""

    sequences: "np.ndarray[Any, np.dtype[np.int64]]"
    steps: "np.ndarray[Any, np.dtype[np.int64]]"
    passes: "np.ndarray[Any, np.dtype[np.int64]]"
    world_size: int
    locate: Callable[[int, int], tuple[str, int]]
    """Return the file, and the row in it, of a row of a rank; no file if the ranks are not built."""

    def showings(self, sequence: int) -> Iterator[SequenceOccurrence]:
        """Yield every occurrence of a sequence: place p of the order is row p // W of rank p % W."""
        for place in np.flatnonzero(self.sequences == sequence).tolist():
            rank, row = place % self.world_size, place // self.world_size
            file, file_row = self.locate(rank, row)
            yield SequenceOccurrence(rank, int(self.steps[place]), int(self.passes[place]), file, file_row)


def load_order(lineage: Lineage) -> tuple[_TrainingOrder | None, str]:
    """Return the order that was built from these shards, or the reason why there is none."""
    project, name = lineage.project, lineage.project.recipe.name
    splits = manifest.load_current(project.store, (name, training_splits.STAGE.name))
    packed = lineage.made[packed_shards.STAGE.name]
    if splits is None:
        return None, "the order of training is not built yet"
    if splits.inputs.get("/".join(packed.key)) != packed.version:
        return None, "the order of training was built from other shards: run rowmill build"
    table = inputs.load_order(project.store, splits)
    number = list(splits.card["datasets"]).index(lineage.dataset)
    own = table.column("dataset").to_numpy() == number
    ranks = manifest.load_current(project.store, (name, gpu_partitions.STAGE.name))
    fits = ranks is not None and ranks.inputs.get("/".join(splits.key)) == splits.version
    return _TrainingOrder(
        sequences=np.where(own, table.column("sequence_id").to_numpy(), -1),
        steps=table.column("step").to_numpy(),
        passes=table.column("pass").to_numpy(),
        world_size=read_facts(GpuPartitionsFacts, ranks.facts).world_size
        if ranks is not None and fits
        else project.recipe.partitions.world_size,
        locate=_make_rank_locator(project.store, ranks if fits else None),
    ), "" if fits else "the ranks are not built from this order yet"


def _make_rank_locator(store: Store, ranks: Manifest | None) -> Callable[[int, int], tuple[str, int]]:
    """Return a function that finds a rank's row: its file, and the row in it; no file if the ranks are not built."""
    if ranks is None:
        return lambda _, row: ("", row)
    parts = {int(name.split("-")[1]): part for name, part in zip(ranks.card["ranks"], ranks.parts, strict=True)}
    if is_index(ranks):
        shards = [part.files["shard"].path for part in list_train_shards(load_packed_inputs(store, ranks))]
        tables = {rank: store.table(part.files["index"], ("shard", "row")) for rank, part in parts.items()}

        def locate_indexed_row(rank: int, row: int) -> tuple[str, int]:
            if rank not in tables:
                return "", row
            shard, shard_row = (int(tables[rank].column(name)[row].as_py()) for name in ("shard", "row"))
            return store.path(shards[shard]), shard_row

        return locate_indexed_row

    def locate_copied_row(rank: int, row: int) -> tuple[str, int]:
        files = parts[rank].files if rank in parts else {}
        for _, file in sorted((name, file) for name, file in files.items() if name.startswith("data/")):
            if row < file.rows:
                return store.path(file.path), row
            row -= file.rows
        return "", row

    return locate_copied_row


# ── Rows ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """A row's outcome at a stage: its state in the ledger, with reason and detail."""

    stage: str
    state: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class RowTrace:
    """A row from its source to every place that holds its tokens; examples as `(id, tokens, trained)`."""

    dataset: str
    row_id: str
    origin: RowOrigin
    fates: tuple[StageOutcome, ...]
    examples: tuple[tuple[str, int, int], ...]
    places: tuple[SegmentLocation, ...]
    order_note: str = ""


def trace_row(project: Project, row_id: str) -> list[RowTrace]:
    """Trace a row by its id, or an example by its id; a part may belong to several datasets.

    Raises ConfigError if no dataset has it.
    """
    name = row_id.split("#", 1)[0]
    found: list[RowTrace] = []
    for dataset in project.recipe.datasets:
        lineage = load_lineage(project, dataset)
        for index, part in enumerate(lineage.parts):
            if is_row_id(name) and parse_row_id(name)[0] == part.part_id and parse_row_id(name)[1] < part.records:
                found.append(_make_row_trace(lineage, index, name))
    if not found:
        raise ConfigError(
            f"{row_id}: no row of {project.recipe.name} has this id; expected a row_id of the view rows, "
            f'<part>:<number>; see `rowmill sql "from rows select row_id limit 10" {project.recipe.name}`'
        )
    return found


def trace_source(project: Project, place: str) -> list[RowTrace]:
    """Trace the record on a line of a source file, `FILE:LINE`; in files without lines, LINE is the record number.

    Raises ConfigError if no dataset reads the file, or the line holds no record.
    """
    file, _, line = place.rpartition(":")
    if not file or not line.isdecimal():
        raise ConfigError(
            f"--source {place}: expected FILE:LINE, a file of the recipe and a line number, such as chats.jsonl:14"
        )
    lineages = [load_lineage(project, dataset) for dataset in project.recipe.datasets]
    found: list[RowTrace] = []
    files: dict[str, list[SourcePart]] = {}
    for lineage in lineages:
        for index, part in enumerate(lineage.parts):
            if (
                part.url == sources.public_url(file)
                or part.url.endswith(f"/{file}")
                or (project.base / part.url).resolve() == Path(file).resolve()
            ):
                files.setdefault(part.url, []).append(part)
                found += _trace_line(lineage, index, part, int(line))
            else:
                files.setdefault(part.url, [])
    if not found:
        raise _explain_missing_record(project, file, int(line), files)
    return found


def _trace_line(lineage: Lineage, index: int, part: SourcePart, line: int) -> Iterator[RowTrace]:
    """Trace the record on a line, if it is in this part; a part starts where the previous one ends."""
    following = next((p.first_line for p in lineage.parts[index + 1 : index + 2] if p.url == part.url), None)
    if part.first_line <= line and (following is None or line < following):
        number = next(
            (record.number for record in sources.read_records(part, lineage.project.base) if record.line == line), None
        )
        if number is not None:
            yield from (_make_row_trace(lineage, index, row_id) for row_id in _list_record_rows(lineage, index, number))


def _list_record_rows(lineage: Lineage, index: int, number: int) -> list[str]:
    """Return the ids of a record's rows: one, unless a custom format made several of it."""
    row_id = f"{lineage.parts[index].part_id}:{number}"
    ledger = lineage.table(canonical_rows.STAGE.name, index, "ledger", ("row_id",))
    if ledger is None:
        return [row_id]
    column = ledger.column("row_id")
    further: list[str] = column.filter(pc.starts_with(column, f"{row_id}.")).to_pylist()
    return [row_id, *sorted(further, key=lambda one: (len(one), one))]


def _explain_missing_record(
    project: Project, file: str, line: int, files: Mapping[str, list[SourcePart]]
) -> ConfigError:
    matching = [part for parts in files.values() for part in parts]
    if not matching:
        guess = suggest_name(file, files)
        hint = f"did you mean {guess}?" if guess else "name one of them, or build the recipe first"
        names = ", ".join(list(files)[:10]) or "none"
        return ConfigError(
            f"{file}: no dataset of {project.recipe.name} reads this file; the build read {names}; {hint}"
        )
    lines = [one.line for part in matching for one in sources.read_records(part, project.base)]
    before = max((one for one in lines if one < line), default=None)
    after = min((one for one in lines if one > line), default=None)
    near = " and ".join(f"line {one}" for one in (before, after) if one is not None)
    count = format_count(len(lines), "record")
    return ConfigError(
        f"{file}:{line}: no record on this line; of {count}, the nearest are on {near}; name one of these"
    )


def _make_row_trace(lineage: Lineage, index: int, row_id: str) -> RowTrace:
    examples = tuple(_iterate_row_examples(lineage, index, row_id))
    places, note = locate_examples(lineage, {name for name, _, _ in examples})
    return RowTrace(
        dataset=lineage.dataset,
        row_id=row_id,
        origin=find_origin(lineage, lineage.parts[index], parse_row_id(row_id)[1]),
        fates=tuple(_iterate_stage_outcomes(lineage, index, row_id)),
        examples=examples,
        places=tuple(places),
        order_note=note,
    )


def _iterate_stage_outcomes(lineage: Lineage, index: int, row_id: str) -> Iterator[StageOutcome]:
    for stage in (canonical_rows.STAGE.name, tokenized_examples.STAGE.name):
        ledger = lineage.table(stage, index, "ledger", ("row_id", "state", "reason"))
        rejects = lineage.table(stage, index, "rejects", ("row_id", "detail"))
        if ledger is None or rejects is None:
            return
        details = {one["row_id"]: one["detail"] for one in filter_rows(rejects, "row_id", row_id)}
        for one in filter_rows(ledger, "row_id", row_id):
            yield StageOutcome(stage, one["state"], one["reason"], details.get(row_id, ""))
    packed = lineage.made.get(packed_shards.STAGE.name)
    for file in packed.files("left_out") if packed else ():
        for one in filter_rows(lineage.project.store.table(file), "row_id", row_id):
            share = f"{one['tokens']} of {format_count(one['of_tokens'], 'token')}"
            detail = f"{share} of {one['example_id']} are in no sequence"
            yield StageOutcome(packed_shards.STAGE.name, one["state"], one["reason"], detail)


def _iterate_row_examples(lineage: Lineage, index: int, row_id: str) -> Iterator[tuple[str, int, int]]:
    """Yield the examples that contain a row; for a records dataset, all examples that name it."""
    columns = ("row_ids", "example_id", "tokens", "trained_tokens")
    for file in find_example_files(lineage, index):
        table = lineage.project.store.table(file, columns)
        rows = table.column("row_ids").combine_chunks()
        found = pc.equal(rows.flatten(), row_id).to_numpy(zero_copy_only=False)
        matching = table.take(pa.array(find_distinct(pc.list_parent_indices(rows).to_numpy()[found])))
        yield from ((one["example_id"], one["tokens"], one["trained_tokens"]) for one in matching.to_pylist())


def find_example_files(lineage: Lineage, index: int) -> list[File]:
    """Return the files of examples that may hold a source part's rows: the part's, or all where examples mix parts."""
    made = lineage.made_of(tokenized_examples.STAGE.name, index)
    if made is None:
        return []
    own = made.files.get("examples")
    return lineage.made[tokenized_examples.STAGE.name].files("examples") if own is None else [own]
