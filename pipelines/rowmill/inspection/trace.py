"""Where a token came from, and where a row went: lineage through the versions that manifests name.

What belongs here: walking from a place in a shard to its source line, from a row to all of its places, and
showing both. What does not: writing lineage down; the stages do (`segments` beside each shard, the order).

    shard ─ sequence ─ segment ─► example ─► row `<part>:<number>` ─► part of a file ─► line
    row ─► its fate at each stage ─► examples ─► segments ─► places in the order ─► rank, step, file

Only versions that were made of each other are joined: the walk starts at the current shards and follows the
inputs that each manifest names, so a half-finished rebuild cannot mix two lineages.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill import sources
from rowmill.build.steps import Project
from rowmill.core.errors import ConfigError, IntegrityError, SourceError, suggest_name
from rowmill.core.number_text import format_count
from rowmill.core.storage import File, Store
from rowmill.schema import manifest
from rowmill.schema.examples import SPAN_KINDS, WEIGHT_COLUMN
from rowmill.schema.manifest import Manifest
from rowmill.schema.rows import is_row_id, parse_row_id
from rowmill.sources import SourcePart
from rowmill.stages import gpu_partitions, inputs, raw_dataset
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.packed_shards import stage as packed_shards
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.stages.training_splits import stage as training_splits
from rowmill.tokenization import tokenizer
from rowmill.tokenization.encoder import Encoder

STAGES_BACKWARDS = (
    packed_shards.STAGE.name,
    tokenized_examples.STAGE.name,
    canonical_rows.STAGE.name,
    raw_dataset.STAGE.name,
)
NEIGHBOR_TOKENS = 12
"""Tokens shown on each side of a traced one."""


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """Where a row stands in its source; `problem` says why line and raw record are unknown."""

    url: str
    reader: str
    record: int
    line: int | None = None
    raw: bytes = b""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SequenceOccurrence:
    """One time at which a sequence is shown: the rank, the step, the pass, and the row of the rank's file."""

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


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """What a stage did with a row."""

    stage: str
    state: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class RowTrace:
    """A row from its source to everywhere its tokens stand; examples as `(id, tokens, trained)`."""

    dataset: str
    row_id: str
    origin: RowOrigin
    fates: tuple[StageOutcome, ...]
    examples: tuple[tuple[str, int, int], ...]
    places: tuple[SegmentLocation, ...]
    order_note: str = ""


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """One token of a sequence: `at` counts in the sequence, `in_example` in the example as tokenized.

    `weight` is its loss weight; null where the recipe has none.
    """

    at: int
    token_id: int
    text: str
    before: str
    after: str
    trained: bool
    weight: float | None
    kind: str
    message: int
    in_example: int


@dataclass(frozen=True, slots=True)
class SequenceTrace:
    """A sequence: its segments, and the origin of each; one token of it, if one was asked for."""

    dataset: str
    split: str
    sequence: int
    tokens: int
    trained_tokens: int
    places: tuple[SegmentLocation, ...]
    origins: tuple[RowOrigin, ...]
    token: TokenTrace | None = None
    order_note: str = ""


# ── Lineage ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Lineage:
    """The manifests of one dataset that were made of each other, as far as there are any."""

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
        return list(inputs.number_source_parts(raw.details)) if raw else []

    def made_of(self, stage: str, index: int) -> manifest.Part | None:
        """Return the part of `canonical_rows` or `tokenized_examples` that has the rows of a source part.

        None if the stage was not made.
        """
        made = self.made.get(stage)
        return made.parts[self._numbered_parts[index][0]] if made else None

    def table(self, stage: str, index: int, name: str, columns: Sequence[str]) -> pa.Table | None:
        """Read columns of a file of what a stage made of a source part; None if the stage was not made."""
        made = self.made_of(stage, index)
        return self.project.store.table(made.files[name], columns) if made else None


def _load_lineage(project: Project, dataset: str) -> _Lineage:
    found: dict[str, Manifest] = {}
    for stage in STAGES_BACKWARDS:
        key = (project.recipe.name, dataset, stage)
        named = next((v for one in found.values() if (v := one.inputs.get("/".join(key)))), None)
        made = manifest.load_version(project.store, key, named) if named else manifest.load_current(project.store, key)
        if made is not None:
            found[stage] = made
    return _Lineage(project, dataset, found)


def _find_origin(lineage: _Lineage, part: SourcePart, at: int) -> RowOrigin:
    """Find a record's line by reading its part; a source that changed meanwhile has no line any more."""
    record = part.first_record + at
    try:
        for one in sources.read_records(part, lineage.project.base):
            if one.number == at:
                return RowOrigin(part.url, part.reader, record, one.line, one.raw)
    except (SourceError, IntegrityError) as error:
        return RowOrigin(part.url, part.reader, record, problem=str(error))
    raise AssertionError((part.part_id, at))


# ── From a row ─────────────────────────────────────────────────────────────────────────────────────


def trace_row(project: Project, row_id: str) -> list[RowTrace]:
    """Trace a row by its id, or an example by its; a part may stand in several datasets.

    Raises
    ------
    ConfigError
        If no dataset has it.

    """
    name = row_id.split("#", 1)[0]
    found: list[RowTrace] = []
    for dataset in project.recipe.datasets:
        lineage = _load_lineage(project, dataset)
        for index, part in enumerate(lineage.parts):
            if is_row_id(name) and parse_row_id(name)[0] == part.part_id and parse_row_id(name)[1] < part.records:
                found.append(_make_row_trace(lineage, index, name))
    if not found:
        raise ConfigError(
            f"{row_id}: no row of {project.recipe.name} has this id; an id as in the table rows, <part>:<number>, is "
            f'needed; see `rowmill sql "from rows select row_id limit 10" {project.recipe.name}`'
        )
    return found


def trace_source(project: Project, place: str) -> list[RowTrace]:
    """Trace the record on a line of a source file, `FILE:LINE`; in files without lines, LINE is the record.

    Raises
    ------
    ConfigError
        If no dataset reads the file, or no record stands on the line.

    """
    file, _, line = place.rpartition(":")
    if not file or not line.isdecimal():
        raise ConfigError(
            f"--source {place}: not FILE:LINE; a file of the recipe and a line number are needed; "
            "such as chats.jsonl:14"
        )
    lineages = [_load_lineage(project, dataset) for dataset in project.recipe.datasets]
    found: list[RowTrace] = []
    files: dict[str, list[SourcePart]] = {}
    for lineage in lineages:
        for index, part in enumerate(lineage.parts):
            if _is_source_file(project, part.url, file):
                files.setdefault(part.url, []).append(part)
                found += _trace_line(lineage, index, part, int(line))
            else:
                files.setdefault(part.url, [])
    if not found:
        raise _explain_missing_record(project, file, int(line), files)
    return found


def _is_source_file(project: Project, url: str, file: str) -> bool:
    return (
        url == sources.public_url(file)
        or url.endswith(f"/{file}")
        or (project.base / url).resolve() == Path(file).resolve()
    )


def _trace_line(lineage: _Lineage, index: int, part: SourcePart, line: int) -> Iterator[RowTrace]:
    """Trace the record of a part on a line; a part begins where the one before it ends."""
    following = next((p.first_line for p in lineage.parts[index + 1 : index + 2] if p.url == part.url), None)
    if part.first_line <= line and (following is None or line < following):
        number = next(
            (one.number for one in sources.read_records(part, lineage.project.base) if one.line == line), None
        )
        if number is not None:
            yield from (_make_row_trace(lineage, index, row_id) for row_id in _list_record_rows(lineage, index, number))


def _list_record_rows(lineage: _Lineage, index: int, number: int) -> list[str]:
    """Return the ids of a record's rows: one, unless a format of one's own made more of it."""
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
        return ConfigError(f"{file}: no dataset of {project.recipe.name} reads this file; built were {names}; {hint}")
    lines = [one.line for part in matching for one in sources.read_records(part, project.base)]
    before = max((one for one in lines if one < line), default=None)
    after = min((one for one in lines if one > line), default=None)
    near = " and ".join(f"line {one}" for one in (before, after) if one is not None)
    count = format_count(len(lines), "record")
    return ConfigError(
        f"{file}:{line}: no record stands on this line; of {count} the nearest stand on {near}; name one of these"
    )


def _make_row_trace(lineage: _Lineage, index: int, row_id: str) -> RowTrace:
    examples = tuple(_iterate_row_examples(lineage, index, row_id))
    places, note = _locate_examples(lineage, {name for name, _, _ in examples})
    return RowTrace(
        dataset=lineage.dataset,
        row_id=row_id,
        origin=_find_origin(lineage, lineage.parts[index], parse_row_id(row_id)[1]),
        fates=tuple(_iterate_stage_outcomes(lineage, index, row_id)),
        examples=examples,
        places=tuple(places),
        order_note=note,
    )


def _iterate_stage_outcomes(lineage: _Lineage, index: int, row_id: str) -> Iterator[StageOutcome]:
    for stage in (canonical_rows.STAGE.name, tokenized_examples.STAGE.name):
        ledger = lineage.table(stage, index, "ledger", ("row_id", "state", "reason"))
        rejects = lineage.table(stage, index, "rejects", ("row_id", "detail"))
        if ledger is None or rejects is None:
            return
        details = {one["row_id"]: one["detail"] for one in _filter_rows(rejects, "row_id", row_id)}
        for one in _filter_rows(ledger, "row_id", row_id):
            yield StageOutcome(stage, one["state"], one["reason"], details.get(row_id, ""))
    packed = lineage.made.get(packed_shards.STAGE.name)
    for file in packed.files("left_out") if packed else ():
        for one in _filter_rows(lineage.project.store.table(file), "row_id", row_id):
            share = f"{one['tokens']} of {format_count(one['of_tokens'], 'token')}"
            detail = f"{share} of {one['example_id']} stand in no sequence"
            yield StageOutcome(packed_shards.STAGE.name, one["state"], one["reason"], detail)


def _iterate_row_examples(lineage: _Lineage, index: int, row_id: str) -> Iterator[tuple[str, int, int]]:
    """Yield the examples that a row stands in; of records, these are all that name it."""
    columns = ("row_ids", "example_id", "tokens", "trained_tokens")
    for file in _find_example_files(lineage, index):
        table = lineage.project.store.table(file, columns)
        rows = table.column("row_ids").combine_chunks()
        found = pc.equal(rows.flatten(), row_id).to_numpy(zero_copy_only=False)
        mine = table.take(pa.array(np.unique(pc.list_parent_indices(rows).to_numpy()[found])))
        yield from ((one["example_id"], one["tokens"], one["trained_tokens"]) for one in mine.to_pylist())


def _find_example_files(lineage: _Lineage, index: int) -> list[File]:
    """Return the files of examples that may hold a source part's rows: its own, or all where examples mix parts."""
    made = lineage.made_of(tokenized_examples.STAGE.name, index)
    if made is None:
        return []
    own = made.files.get("examples")
    return lineage.made[tokenized_examples.STAGE.name].files("examples") if own is None else [own]


def _filter_rows(table: pa.Table, column: str, value: object) -> list[dict[str, Any]]:
    return table.filter(pc.equal(table.column(column), value)).to_pylist()


# ── Places in shards, in the order, on ranks ───────────────────────────────────────────────────────


def _locate_examples(lineage: _Lineage, examples: Collection[str]) -> tuple[list[SegmentLocation], str]:
    packed = lineage.made.get(packed_shards.STAGE.name)
    if packed is None:
        return [], "not packed yet"
    order, note = _load_order(lineage)
    found: list[SegmentLocation] = []
    for part in (part for part in packed.parts if "segments" in part.files):
        segments = lineage.project.store.table(part.files["segments"], ("example_id", "sequence_id"))
        holding = pc.is_in(segments.column("example_id"), pa.array(sorted(examples), pa.string()))
        for sequence in segments.filter(holding).column("sequence_id").unique().to_pylist():
            of_sequence = (place for _, place in _locate_segments(lineage, part, sequence, order))
            found += [place for place in of_sequence if place.example_id in examples]
    return found, note


def _locate_segments(
    lineage: _Lineage, part: manifest.Part, sequence: int, order: "_TrainingOrder | None"
) -> Iterator[tuple[str, SegmentLocation]]:
    """Yield the segments of a sequence, each with its row's id."""
    segments = lineage.project.store.table(part.files["segments"])
    split = str(part.facts["split"])
    shows = tuple(order.showings(sequence)) if order is not None and split == "train" else ()
    offset = 0
    for one in sorted(_filter_rows(segments, "sequence_id", sequence), key=lambda one: one["segment"]):
        place = SegmentLocation(
            split=split,
            sequence=sequence,
            segment=one["segment"],
            example_id=one["example_id"],
            start=one["start"],
            length=one["length"],
            offset=offset,
            shard=lineage.project.store.path(part.files["shard"].path),
            shard_row=sequence - int(part.facts["first_sequence"]),
            showings=shows,
        )
        offset += one["length"]
        yield one["row_id"], place


@dataclass(frozen=True, slots=True)
class _TrainingOrder:
    """The order of training as far as one dataset is concerned, and the ranks' files if they are built."""

    sequences: "np.ndarray[Any, np.dtype[np.int64]]"
    steps: "np.ndarray[Any, np.dtype[np.int64]]"
    passes: "np.ndarray[Any, np.dtype[np.int64]]"
    world_size: int
    files: Mapping[int, Sequence[tuple[str, int]]]

    def showings(self, sequence: int) -> Iterator[SequenceOccurrence]:
        """Yield every place at which a sequence is shown: place p is row p // W of rank p % W."""
        for place in np.flatnonzero(self.sequences == sequence).tolist():
            rank, row = place % self.world_size, place // self.world_size
            file, file_row = self._locate_file(rank, row)
            yield SequenceOccurrence(rank, int(self.steps[place]), int(self.passes[place]), file, file_row)

    def _locate_file(self, rank: int, row: int) -> tuple[str, int]:
        for path, rows in self.files.get(rank, ()):
            if row < rows:
                return path, row
            row -= rows
        return "", row


def _load_order(lineage: _Lineage) -> tuple[_TrainingOrder | None, str]:
    """Return the order that was made of these shards, or why there is none."""
    project, name = lineage.project, lineage.project.recipe.name
    splits = manifest.load_current(project.store, (name, training_splits.STAGE.name))
    packed = lineage.made[packed_shards.STAGE.name]
    if splits is None:
        return None, "the order of training is not made yet"
    if splits.inputs.get("/".join(packed.key)) != packed.version:
        return None, "the order of training was made of other shards: build again"
    table = project.store.table(splits.parts[0].files["order"])
    number = list(splits.card["datasets"]).index(lineage.dataset)
    own = table.column("dataset").to_numpy() == number
    ranks = manifest.load_current(project.store, (name, gpu_partitions.STAGE.name))
    fits = ranks is not None and ranks.inputs.get("/".join(splits.key)) == splits.version
    return _TrainingOrder(
        sequences=np.where(own, table.column("sequence_id").to_numpy(), -1),
        steps=table.column("step").to_numpy(),
        passes=table.column("pass").to_numpy(),
        world_size=int(ranks.facts["world_size"])
        if ranks is not None and fits
        else project.recipe.partitions.world_size,
        files=_list_rank_files(project.store, ranks) if ranks is not None and fits else {},
    ), "" if fits else "the ranks are not built from this order yet"


def _list_rank_files(store: Store, ranks: Manifest) -> dict[int, list[tuple[str, int]]]:
    return {
        int(name.split("-")[1]): [
            (store.path(f.path), f.rows) for key, f in sorted(part.files.items()) if key.startswith("data/")
        ]
        for name, part in zip(ranks.card["ranks"], ranks.parts, strict=True)
    }


# ── From a sequence ────────────────────────────────────────────────────────────────────────────────


def trace_sequence(project: Project, place: str) -> SequenceTrace:
    """Trace `DATASET/SPLIT/N`, or one token of it with `:TOKEN`, to the source.

    Raises
    ------
    ConfigError
        If there is no such dataset, sequence or token.

    """
    dataset, split, sequence, token = _parse_sequence_place(project, place)
    lineage = _load_lineage(project, dataset)
    part = _find_shard_part(lineage, split, sequence, place)
    order, note = _load_order(lineage)
    named = list(_locate_segments(lineage, part, sequence, order))
    row = project.store.table(part.files["shard"]).slice(sequence - int(part.facts["first_sequence"]), 1).to_pylist()[0]
    if token is not None and token >= row["tokens"]:
        raise ConfigError(
            f"--sequence {place}: the sequence has {row['tokens']} tokens, 0 to {row['tokens'] - 1} are "
            "allowed; name one of them"
        )
    numbered = {one.part_id: one for one in lineage.parts}
    origins = [
        _find_origin(lineage, numbered[part_id], at) for part_id, at in (parse_row_id(name) for name, _ in named)
    ]
    return SequenceTrace(
        dataset=dataset,
        split=split,
        sequence=sequence,
        tokens=row["tokens"],
        trained_tokens=row["trained_tokens"],
        places=tuple(place for _, place in named),
        origins=tuple(origins),
        token=None if token is None else _trace_token(lineage, row, [place for _, place in named], token),
        order_note=note,
    )


def _parse_sequence_place(project: Project, place: str) -> tuple[str, str, int, int | None]:
    words, _, at = place.partition(":")
    pieces = words.split("/")
    if len(pieces) != 3 or not pieces[2].isdecimal() or (at and not at.isdecimal()):
        raise ConfigError(
            f"--sequence {place}: not DATASET/SPLIT/N or DATASET/SPLIT/N:TOKEN; such as chats/train/12:40"
        )
    dataset, split, sequence = pieces
    if dataset not in project.recipe.datasets:
        known = project.recipe.datasets
        guess = suggest_name(dataset, known)
        hint = f"did you mean {guess}?" if guess else "name one of them"
        raise ConfigError(f"--sequence {place}: no dataset {dataset}; there are {', '.join(known)}; {hint}")
    return dataset, split, int(sequence), int(at) if at else None


def _find_shard_part(lineage: _Lineage, split: str, sequence: int, place: str) -> manifest.Part:
    packed = lineage.made.get(packed_shards.STAGE.name)
    counts: dict[str, int] = {}
    for part in (part for part in (packed.parts if packed else ()) if "shard" in part.files):
        first, count = int(part.facts["first_sequence"]), int(part.facts["sequences"])
        counts[part.facts["split"]] = first + count
        if part.facts["split"] == split and first <= sequence < first + count:
            return part
    there = ", ".join(f"{name} with {format_count(count, 'sequence')}" for name, count in counts.items()) or "none"
    raise ConfigError(
        f"--sequence {place}: no such sequence; {lineage.dataset} has the splits {there}; "
        "name one of these, counted from 0"
    )


def _trace_token(lineage: _Lineage, row: Mapping[str, Any], places: Sequence[SegmentLocation], at: int) -> TokenTrace:
    """Say what one token of a sequence is, from its example."""
    place = next(one for one in places if one.offset <= at < one.offset + one.length)
    example = _load_example(lineage, place.example_id)
    in_example = place.start + at - place.offset
    span = int(np.searchsorted(example["span_starts"], in_example, "right")) - 1
    first, last = max(place.offset, at - NEIGHBOR_TOKENS), min(place.offset + place.length, at + NEIGHBOR_TOKENS + 1)
    before, text, after = _decode_neighbors(_open_encoder(lineage), row["input_ids"][first:last], at - first)
    return TokenTrace(
        at=at,
        token_id=row["input_ids"][at],
        text=text,
        before=before,
        after=after,
        trained=row["labels"][at] >= 0,
        weight=row[WEIGHT_COLUMN][at] if WEIGHT_COLUMN in row else None,
        kind=SPAN_KINDS[example["span_kinds"][span]],
        message=example["span_messages"][span],
        in_example=in_example,
    )


def _decode_neighbors(encoder: Encoder, ids: Sequence[int], at: int) -> tuple[str, str, str]:
    """Decode a token with its neighbours, cut where the token begins and ends."""
    text = encoder.decode(ids)
    edges = [len(encoder.decode(ids[:end]).rstrip("\ufffd")) for end in (at, at + 1)]
    return text[: edges[0]], text[edges[0] : edges[1]], text[edges[1] :]


def _load_example(lineage: _Lineage, example_id: str) -> dict[str, Any]:
    part_id = example_id.split("#", 1)[0].rpartition(":")[0]
    index = next(i for i, part in enumerate(lineage.parts) if part.part_id == part_id)
    columns = ("example_id", "span_starts", "span_messages", "span_kinds")
    tables = (lineage.project.store.table(file, columns) for file in _find_example_files(lineage, index))
    return next(one for table in tables for one in _filter_rows(table, "example_id", example_id))


def open_shard_encoder(project: Project, dataset: str) -> Encoder:
    """Open the tokenizer that a dataset's current shards were made with.

    Raises
    ------
    IntegrityError
        If the storage, which keeps each tokenizer that was ever used, has lost it.

    """
    return _open_encoder(_load_lineage(project, dataset))


def _open_encoder(lineage: _Lineage) -> Encoder:
    """Open the tokenizer that the examples were made with; the storage keeps each that was ever used."""
    store, wanted = lineage.project.store, lineage.made[tokenized_examples.STAGE.name].card["tokenizer_digest"]
    for name in store.list("tokenizers"):
        loaded = tokenizer.deserialize_tokenizer(store.read(f"tokenizers/{name}"))
        if loaded.card.digest == wanted:
            return Encoder(loaded)
    raise IntegrityError(
        f"{store.path('tokenizers')}: the tokenizer of these shards is gone; it is kept there by every "
        "build; build again"
    )
