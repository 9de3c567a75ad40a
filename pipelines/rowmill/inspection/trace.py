"""Traces a row from its source line through every stage to its places in shards, order and ranks, and a token back.

    shard ─ sequence ─ segment ─► example ─► row `<part>:<number>` ─► part of a file ─► line
    row ─► its outcome at each stage ─► examples ─► segments ─► places in the order ─► rank, step, file

Only versions that were built from each other are joined: the trace starts at the current shards and follows the
inputs that each manifest names, so a half-finished rebuild cannot mix two lineages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill import sources
from rowmill.build.steps import Project
from rowmill.core.arrays import Ints, find_distinct, format_count, join_facts, make_array, view_numbers
from rowmill.core.errors import ConfigError, DamagedFileError, IntegrityError, SourceError, hint_at_name
from rowmill.core.stage_names import (
    CANONICAL_ROWS,
    GPU_PARTITIONS,
    PACKED_SHARDS,
    RAW_DATASET,
    TOKENIZED_EXAMPLES,
    TRAINING_SPLITS,
)
from rowmill.core.storage import File, Store
from rowmill.schema import manifest
from rowmill.schema.examples import IGNORED_LABEL, SPAN_KINDS
from rowmill.schema.indexed_shards import read_sequences
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.schema.order_counts import OrderCounts
from rowmill.schema.rank_counts import RankCounts
from rowmill.schema.rows import PARENTS_COLUMN, is_row_id, parse_row_id
from rowmill.schema.shard_counts import ShardDetails
from rowmill.shards.native import drop_padding
from rowmill.sources import SourcePart
from rowmill.sources.reading import number_source_parts
from rowmill.stages import inputs
from rowmill.stages.gpu_partitions import is_index, load_packed_inputs
from rowmill.stages.inputs import list_train_shards
from rowmill.tokenization import stored_tokenizers
from rowmill.tokenization.tokenizer import Encoder


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
    row_id: str
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
    def parts(self) -> Mapping[str, tuple[int, SourcePart]]:
        """The source's parts by id, each with the number of the part of later stages that was built from it."""
        raw = self.made.get(RAW_DATASET)
        return {part.part_id: (number, part) for number, part in number_source_parts(raw)} if raw else {}

    @property
    def shards(self) -> list[manifest.Part]:
        """The parts of the packed dataset that are shards, not plans; empty if it is not packed."""
        packed = self.made.get(PACKED_SHARDS)
        return [part for part in packed.parts if "shard" in part.files] if packed else []

    def find_files(self, stage: str, part_id: str) -> Mapping[str, File]:
        """Return the files that a stage built from a source part; empty if the stage is not built."""
        made = self.made.get(stage)
        return made.parts[self.parts[part_id][0]].files if made else {}

    def find_example_files(self, part_id: str) -> list[File]:
        """Return the files of examples that may hold a source part's rows: its own, or all where examples mix parts."""
        files, made = self.find_files(TOKENIZED_EXAMPLES, part_id), self.made.get(TOKENIZED_EXAMPLES)
        return [files["examples"]] if "examples" in files else made.files("examples") if made else []

    def find_origin(self, row_id: str) -> RowOrigin:
        """Find a record's line by reading its part; if the source changed since, the line is unknown."""
        part_id, at = parse_row_id(row_id)
        _, part = self.parts[part_id]
        record = part.first_record + at
        try:
            for one in sources.read_records(part, self.project.base):
                if one.number == at:
                    return RowOrigin(part.url, part.reader, record, one.line, one.raw)
        except (SourceError, IntegrityError) as error:
            return RowOrigin(part.url, part.reader, record, problem=str(error))
        raise AssertionError(row_id)


def select_chain(outputs: Mapping[StageKey, Manifest | None], recipe: str, dataset: str) -> dict[str, Manifest]:
    """Return the outputs of a dataset, the order and the ranks that were built from each other, as far as they go."""
    chain: dict[str, Manifest] = {}
    earlier: Manifest | None = None
    of_dataset = [(recipe, dataset, stage) for stage in DATASET_CHAIN]
    for key in [*of_dataset, (recipe, TRAINING_SPLITS), (recipe, GPU_PARTITIONS)]:
        output = outputs.get(key)
        if output is None or (earlier and output.inputs.get("/".join(earlier.key)) != earlier.version):
            break
        chain[key[-1]] = earlier = output
    return chain


DATASET_CHAIN = (RAW_DATASET, CANONICAL_ROWS, TOKENIZED_EXAMPLES, PACKED_SHARDS)
"""A dataset's stages, each of which reads the one before."""


def load_lineage(project: Project, dataset: str) -> Lineage:
    """Load the outputs that a dataset's current shards were built from, as far as they exist, and the current order."""
    found: dict[str, Manifest] = {}
    for stage in (PACKED_SHARDS, TOKENIZED_EXAMPLES, CANONICAL_ROWS, RAW_DATASET):
        key = (project.recipe.name, dataset, stage)
        reader = next((one for one in found.values() if "/".join(key) in one.inputs), None)
        store = project.store
        made = manifest.load_current(store, key) if reader is None else manifest.load_input(store, reader, key)
        if made is not None:
            found[stage] = made
    for stage in (TRAINING_SPLITS, GPU_PARTITIONS):
        made = manifest.load_current(project.store, (project.recipe.name, stage))
        if made is not None:
            found[stage] = made
    return Lineage(project, dataset, found)


def filter_rows(table: pa.Table, column: str, value: str | int) -> list[dict[str, Any]]:
    """Return the rows of a table that have a value in a column."""
    wanted = make_array([value] if isinstance(value, str) else np.array([value], np.int64))
    return table.filter(pc.equal(table.column(column), wanted[0])).to_pylist()


def find_lists_with(lists: pa.ListArray, texts: Sequence[str]) -> Ints:
    """Return the places of the lists that hold one of some texts, ascending."""
    holding = pc.is_in(lists.flatten(), make_array(texts))
    parents = pc.list_parent_indices(lists).filter(holding)
    return find_distinct(view_numbers(parents)).astype(np.int64)


def locate_segments(
    lineage: Lineage, part: manifest.Part, sequence: int, list_occurrences: "ListOccurrences | None"
) -> Iterator[SegmentLocation]:
    """Yield the segments of a sequence; one that examples share is yielded for each of them."""
    segments = lineage.project.store.table(part.files["segments"])
    split, first = (shard := part.get_details(ShardDetails)).split, shard.first_sequence
    occurrences = list_occurrences(sequence) if list_occurrences is not None and split == "train" else ()
    offset, end, current = 0, 0, -1
    shard_row = sequence - first
    for one in sorted(filter_rows(segments, "shard_row", shard_row), key=lambda one: one["segment"]):
        if one["segment"] != current:
            offset, end, current = end, end + one["length"], one["segment"]
        yield SegmentLocation(
            split=split,
            sequence=sequence,
            segment=one["segment"],
            example_id=one["example_id"],
            row_id=one["row_id"],
            start=one["start"],
            length=one["length"],
            offset=offset,
            shard=lineage.project.store.path(part.files["shard"].path),
            shard_row=shard_row,
            showings=occurrences,
        )


ListOccurrences: TypeAlias = Callable[[int], tuple[SequenceOccurrence, ...]]
"""Returns every occurrence of a dataset's training sequence in the order."""


def load_order(lineage: Lineage) -> tuple[ListOccurrences | None, str]:
    """Return the order that was built from these shards, or the reason why there is none."""
    project, packed, splits = lineage.project, lineage.made.get(PACKED_SHARDS), lineage.made.get(TRAINING_SPLITS)
    if packed is None:
        return None, "not packed yet"
    if splits is None:
        return None, "the order of training is not built yet"
    if splits.inputs.get("/".join(packed.key)) != packed.version:
        return None, "the order of training was built from other shards: run rowmill build"
    order = inputs.load_order(project.store, splits)
    dataset, sequences, steps, passes = (
        view_numbers(order.column(name)) for name in ("dataset", "sequence_id", "step", "pass")
    )
    is_own = dataset == list(splits.card["datasets"]).index(lineage.dataset)
    ranks = lineage.made.get(GPU_PARTITIONS)
    if ranks is not None and ranks.inputs.get("/".join(splits.key)) != splits.version:
        ranks = None
    built = () if ranks is None else zip(ranks.card["ranks"], ranks.parts, strict=True)
    parts = {int(name.split("-")[1]): part for name, part in built}
    shards = list_train_shards(load_packed_inputs(project.store, ranks)) if ranks and is_index(ranks) else []
    width = project.recipe.partitions.world_size if ranks is None else ranks.get_counts(RankCounts).world_size

    @cache
    def read_index(rank: int) -> pa.Table:
        return project.store.table(parts[rank].files["index"], ("shard", "row"))

    def locate(rank: int, row: int) -> tuple[str, int]:
        """Return the file of a rank's row, and the row in it; no file if the rank is not built."""
        files = parts[rank].files if rank in parts else {}
        if "index" in files:
            shard, shard_row = (int(read_index(rank).column(name)[row].as_py()) for name in ("shard", "row"))
            return project.store.path(shards[shard].files["shard"].path), shard_row
        for file in (files[name] for name in sorted(files) if name.startswith("data/")):
            if row < file.rows:
                return project.store.path(file.path), row
            row -= file.rows
        return "", row

    def list_occurrences(sequence: int) -> tuple[SequenceOccurrence, ...]:
        # Place p of the order is row p // W of rank p % W.
        places = np.flatnonzero(is_own & (sequences == sequence)).tolist()
        return tuple(
            SequenceOccurrence(at % width, int(steps[at]), int(passes[at]), *locate(at % width, at // width))
            for at in places
        )

    return list_occurrences, "the ranks are not built from this order yet" if ranks is None else ""


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
    """Trace a row by its id, or an example by its id; a part may belong to several datasets."""
    name = row_id.split("#", 1)[0]
    found: list[RowTrace] = []
    for dataset in project.recipe.datasets if is_row_id(name) else ():
        lineage, (part_id, number) = load_lineage(project, dataset), parse_row_id(name)
        if part_id in lineage.parts and number < lineage.parts[part_id][1].records:
            found.append(trace_row_of(lineage, name))
    if not found:
        raise ConfigError(
            f"{row_id}: no row of {project.recipe.name} has this id; expected a row_id of the view rows, "
            f'<part>:<number>; see `rowmill sql "from rows select row_id limit 10" {project.recipe.name}`, or, if its '
            f"file has changed since, find the new id by its line with `rowmill trace {project.recipe.name} --source "
            "FILE:LINE`"
        )
    return found


def trace_source(project: Project, place: str) -> list[RowTrace]:
    """Trace the record on a line of a source file, `FILE:LINE`; in files without lines, LINE is the record number."""
    lineages = [load_lineage(project, dataset) for dataset in project.recipe.datasets]
    return [trace_row_of(lineage, row_id) for lineage, row_id in find_rows_of_line(project, lineages, place)]


def find_rows_of_line(project: Project, lineages: Sequence[Lineage], place: str) -> list[tuple[Lineage, str]]:
    """Return the rows of the record on a line, `FILE:LINE`, each with its dataset's lineage."""
    file, _, line_text = place.rpartition(":")
    if not file or not line_text.isdecimal():
        raise ConfigError(
            f"--source {place}: expected FILE:LINE, a file of the recipe and a line number, such as chats.jsonl:14"
        )
    line = int(line_text)

    def is_named(url: str) -> bool:
        ends_alike = url == sources.public_url(file) or url.endswith(f"/{file}")
        return ends_alike or (project.base / url).resolve() == Path(file).resolve()

    found, matching = list[tuple[Lineage, str]](), list[SourcePart]()
    for lineage in lineages:
        parts = [part for _, part in lineage.parts.values() if is_named(part.url)]
        matching += parts
        for part, following in zip_longest(parts, parts[1:]):
            # A part starts where the previous one ends.
            end = following.first_line if following is not None and following.url == part.url else line + 1
            if part.first_line <= line < end:
                found += [(lineage, row_id) for row_id in _list_rows_of_line(lineage, part, line)]
    if found:
        return found
    if not matching:
        urls = dict.fromkeys(part.url for lineage in lineages for _, part in lineage.parts.values())
        hint = hint_at_name(file, urls, "name one of them, or build the recipe first")
        names = ", ".join(list(urls)[:10]) or "none"
        raise ConfigError(
            f"{file}: no dataset of {project.recipe.name} reads this file; the build read {names}; {hint}"
        )
    lines = [one.line for part in matching for one in sources.read_records(part, project.base)]
    before = max((one for one in lines if one < line), default=None)
    after = min((one for one in lines if one > line), default=None)
    near = " and ".join(f"line {one}" for one in (before, after) if one is not None)
    count = format_count(len(lines), "record")
    raise ConfigError(
        f"{file}:{line}: no record on this line; of {count}, the nearest are on {near}; name one of these"
    )


def _list_rows_of_line(lineage: Lineage, part: SourcePart, line: int) -> list[str]:
    """Return the ids of the rows of the record on a line: one, but a custom format may make several; or none."""
    records = sources.read_records(part, lineage.project.base)
    number = next((record.number for record in records if record.line == line), None)
    names = [] if number is None else [f"{part.part_id}:{number}"]
    kept = lineage.find_files(CANONICAL_ROWS, part.part_id)
    if names and kept:
        row_ids = lineage.project.store.table(kept["ledger"], ("row_id",)).column("row_id")
        further: list[str] = row_ids.filter(pc.starts_with(row_ids, f"{names[0]}.")).to_pylist()
        names += sorted(further, key=lambda one: (len(one), one))
    return names


def trace_row_of(lineage: Lineage, row_id: str) -> RowTrace:
    """Trace a row through what was built of its dataset."""
    store, fates, part_id = lineage.project.store, list[StageOutcome](), parse_row_id(row_id)[0]
    for stage in (CANONICAL_ROWS, TOKENIZED_EXAMPLES):
        if files := lineage.find_files(stage, part_id):
            rejects = filter_rows(store.table(files["rejects"], ("row_id", "detail")), "row_id", row_id)
            detail = rejects[-1]["detail"] if rejects else ""
            ledger = filter_rows(store.table(files["ledger"], ("row_id", "state", "reason")), "row_id", row_id)
            fates += [StageOutcome(stage, one["state"], one["reason"], detail) for one in ledger]
    # The examples that contain the row; for a records dataset, all examples that name it.
    examples: list[tuple[str, int, int]] = []
    for file in lineage.find_example_files(part_id):
        table = store.table(file, ("row_ids", "example_id", "tokens", "trained_tokens"))
        rows = table.column("row_ids").combine_chunks()
        matching = table.take(make_array(find_lists_with(rows, [row_id])))
        examples += [(one["example_id"], one["tokens"], one["trained_tokens"]) for one in matching.to_pylist()]
    packed = lineage.made.get(PACKED_SHARDS)
    for file in packed.files("left_out") if packed else ():
        for one in filter_rows(store.table(file), "row_id", row_id):
            share = f"{one['tokens']} of {format_count(one['of_tokens'], 'token')}"
            detail = f"{share} of {one['example_id']} are in no sequence"
            fates.append(StageOutcome(PACKED_SHARDS, one["state"], one["reason"], detail))
    list_occurrences, note = load_order(lineage)
    names = {name for name, _, _ in examples}
    places: list[SegmentLocation] = []
    for part in lineage.shards:
        segments = store.table(part.files["segments"])
        holding = pc.is_in(segments.column("example_id"), make_array(sorted(names)))
        first = part.get_details(ShardDetails).first_sequence
        for row in segments.filter(holding).column("shard_row").unique().to_pylist():
            of_sequence = locate_segments(lineage, part, row + first, list_occurrences)
            places += [place for place in of_sequence if place.example_id in names]
    origin = lineage.find_origin(row_id)
    return RowTrace(lineage.dataset, row_id, origin, tuple(fates), tuple(examples), tuple(places), note)


# ── Steps ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class StepSequence:
    """A sequence that a rank trains on in a step; a filler has no dataset."""

    rank: int
    dataset: str
    sequence: int
    passed: int


def list_step(store: Store, splits: Manifest, *, world_size: int, step: int) -> list[StepSequence]:
    """Return the sequences of a step, rank by rank; ConfigError if the order has no such step."""
    order = inputs.load_order(store, splits, ("dataset", "sequence_id", "pass", "step"))
    places = np.flatnonzero(view_numbers(order.column("step")) == step)
    if not len(places):
        steps = splits.get_counts(OrderCounts).steps
        raise ConfigError(
            f"step {step}: the order has {format_count(steps, 'step')}; expected 0 to {steps - 1}; name one"
        )
    names = [*splits.card["datasets"], ""]
    # Place p of the order is of rank p % W.
    sequences = [
        StepSequence(place % world_size, names[line["dataset"]], line["sequence_id"], line["pass"])
        for place, line in zip(places.tolist(), order.take(make_array(places)).to_pylist(), strict=True)
    ]
    return sorted(sequences, key=lambda one: one.rank)


# ── Packed sequences ───────────────────────────────────────────────────────────────────────────────
#
# ids        9707  11 151645 198 │ 151644 872 …      a segment per example
# labels     9707  11 151645 −100 │ −100 −100 …      unshifted, −100 where no loss is taken
# positions     0   1      2   3 │      0   1 …      begin anew in each segment, or go on where examples share prefixes


CANDIDATES = 64
"""Sequences at the beginning of a split among which one is chosen."""
WANTED_SEGMENTS = 3
"""Segments of the sequence that shows most: several, and none of them tiny."""
CONTEXT_TOKENS = 8
"""Tokens before one that are decoded with it: a character may span several tokens."""
NEIGHBOR_TOKENS = 12
"""Tokens shown on each side of a traced one."""


@dataclass(frozen=True, slots=True)
class TreeSegment:
    """A segment of a tree: its tokens begin at `offset` in the sequence and at `position` in each of its examples.

    `parent` is the segment that it continues, -1 for none; `trained_tokens` counts those that an example trains.
    """

    parent: int
    offset: int
    position: int
    length: int
    trained_tokens: int
    examples: range
    """The examples that hold it, which are neighbors in their sequence."""


@dataclass(frozen=True, slots=True)
class TreeExample:
    """An example of a tree: the segments from the root to its last one, and what it trains.

    `targets` are runs of equal weight: the position of the first token, the number of tokens, the weight of each.
    """

    example_id: str
    tokens: int
    segments: tuple[int, ...]
    targets: tuple[tuple[int, int, float], ...]

    def find_weight(self, position: int) -> float | None:
        """Return the weight with which it trains the token at a position; None if it does not."""
        return next((weight for first, count, weight in self.targets if first <= position < first + count), None)


@dataclass(frozen=True, slots=True)
class SequenceTree:
    """The segments and the examples of a sequence whose examples share prefixes, in the order of the shard."""

    segments: tuple[TreeSegment, ...]
    examples: tuple[TreeExample, ...]


def read_tree(row: Mapping[str, Any]) -> SequenceTree | None:
    """Return the tree of a row of a shard; None if its examples share no segments."""
    if PARENTS_COLUMN not in row:
        return None
    parents, lengths = row[PARENTS_COLUMN], row["segment_lengths"]
    holding: list[list[int]] = [[] for _ in parents]
    examples: list[TreeExample] = []
    targets: list[list[tuple[int, int, float]]] = [[] for _ in row["example_ids"]]
    runs = (row[f"target_{name}"] for name in ("examples", "starts", "lengths", "weights"))
    for example, *run in zip(*runs, strict=True):
        targets[example].append(tuple(run))
    for number, (name, end) in enumerate(zip(row["example_ids"], row["example_ends"], strict=True)):
        path: list[int] = [end]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        for segment in path:
            holding[segment].append(number)
        examples.append(TreeExample(name, sum(lengths[one] for one in path), tuple(path), tuple(targets[number])))
    segments: list[TreeSegment] = []
    offset = 0
    for parent, length, own in zip(parents, lengths, holding, strict=True):
        trained = sum(label != IGNORED_LABEL for label in row["labels"][offset : offset + length])
        position = row["position_ids"][offset]
        segments.append(TreeSegment(parent, offset, position, length, trained, range(own[0], own[-1] + 1)))
        offset += length
    return SequenceTree(tuple(segments), tuple(examples))


@dataclass(frozen=True, slots=True)
class SequenceTrace:
    """A packed sequence: its segments and, as far as they were asked for, their origins and the texts of its tokens.

    `texts`, `kinds` and `messages` have one entry for each of the tokens `shown`, and `texts` concatenate to the
    decoded text of a segment; a message is −1 for text of the template.
    """

    dataset: str
    split: str
    sequence: int
    row: Mapping[str, Any]
    """The row of the shard, without padding: ids, labels, positions and perhaps weights of all tokens."""
    places: tuple[SegmentLocation, ...]
    """Its segments; one that examples share is there for each of them."""
    tree: SequenceTree | None = None
    """What its examples share; None in recipes without `packing.share_prefixes`."""
    origins: tuple[RowOrigin, ...] = ()
    """Where the row of each place comes from."""
    order_note: str = ""
    token: int | None = None
    """The token that is traced, if not the whole sequence is."""
    shown: range = range(0)
    texts: Sequence[str] = ()
    kinds: Sequence[str] = ()
    messages: Sequence[int] = ()

    @property
    def tokens(self) -> int:
        return len(self.row["input_ids"])

    @property
    def segments(self) -> list[SegmentLocation]:
        """The segments of the shown tokens; one that examples share is a part of the first of them."""
        firsts = {place.segment: place for place in reversed(self.places)}
        places = (firsts[number] for number in sorted(firsts))
        shown = self.shown
        return [one for one in places if one.offset < shown.stop and one.offset + one.length > shown.start]

    @property
    def classes(self) -> list[tuple[str, bool]]:
        """The span kind of each shown token, and whether it is trained."""
        labels = self.read("labels")
        return [(kind, label != IGNORED_LABEL) for kind, label in zip(self.kinds, labels, strict=True)]

    def read(self, column: str) -> list[Any]:
        """Return a column of the shard for the shown tokens; empty if the shard does not have it."""
        return self.row.get(column, [])[self.shown.start : self.shown.stop]


def view_sequence(project: Project, dataset: str, encoder: Encoder, *, max_tokens: int) -> SequenceTrace | None:
    """Return a sequence of a dataset's current shards with its first tokens; None if it has no shards."""
    lineage = load_lineage(project, dataset)
    parts = [part for part in lineage.shards if part.files["shard"].rows]
    if not parts:
        return None
    shard = read_sequences(project.store, parts[0].files["shard"])
    at = choose_sequence(shard.column("starts")[:CANDIDATES].to_pylist())
    return _read_texts(lineage, _read_sequence(lineage, parts[0], shard, at, None), range(max_tokens), encoder)


def _read_sequence(
    lineage: Lineage, part: manifest.Part, shard: pa.Table, at: int, list_occurrences: ListOccurrences | None
) -> SequenceTrace:
    row: dict[str, Any] = drop_padding(shard.slice(at, 1)).to_pylist()[0]
    details = part.get_details(ShardDetails)
    sequence = at + details.first_sequence
    places = tuple(locate_segments(lineage, part, sequence, list_occurrences))
    return SequenceTrace(lineage.dataset, details.split, sequence, row, places, read_tree(row))


def _read_texts(lineage: Lineage, trace: SequenceTrace, shown: range, encoder: Encoder) -> SequenceTrace:
    """Return a sequence with the texts of some of its tokens, and the span kind and message that each is of."""
    trace = replace(trace, shown=range(shown.start, min(shown.stop, trace.tokens)))
    ids, segments, names = trace.row["input_ids"], trace.segments, {place.example_id for place in trace.segments}
    part_ids = dict.fromkeys(parse_row_id(place.row_id)[0] for place in segments)
    examples: dict[str, dict[str, Any]] = {}
    for file in dict.fromkeys(file for part_id in part_ids for file in lineage.find_example_files(part_id)):
        if wanted := names - examples.keys():
            table = lineage.project.store.table(file, ("example_id", "span_starts", "span_messages", "span_kinds"))
            is_wanted = pc.is_in(table.column("example_id"), make_array(sorted(wanted)))
            examples |= {one["example_id"]: one for one in table.filter(is_wanted).to_pylist()}
    texts, kinds, messages = list[str](), list[str](), list[int]()
    firsts = {place.segment: place for place in reversed(trace.places)}
    for place in segments:
        begin, end = max(place.offset, trace.shown.start), min(place.offset + place.length, trace.shown.stop)
        # A character may begin in the tokens before: of the segment, or of the one that it continues.
        before, until = place, begin
        parent = -1 if trace.tree is None else trace.tree.segments[place.segment].parent
        if begin == place.offset and parent >= 0:
            before, until = firsts[parent], firsts[parent].offset + firsts[parent].length
        texts += decode_each(encoder, ids[begin:end], ids[max(until - CONTEXT_TOKENS, before.offset) : until])
        example = examples[place.example_id]
        tokens = np.arange(begin, end) - place.offset + place.start
        spans = (np.searchsorted(example["span_starts"], tokens, "right") - 1).tolist()
        kinds += [SPAN_KINDS[example["span_kinds"][span]] for span in spans]
        messages += [example["span_messages"][span] for span in spans]
    return replace(trace, texts=texts, kinds=kinds, messages=messages)


def choose_sequence(starts: Sequence[Sequence[int]]) -> int:
    """Return the first sequence with about `WANTED_SEGMENTS` segments that begin where their examples do."""
    distances = [abs(len(of) - WANTED_SEGMENTS) + sum(start > 0 for start in of) for of in starts]
    return distances.index(min(distances))


def decode_each(encoder: Encoder, ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    """Return the text of each token; of a character that spans several, all of it at the last of them.

    A token is decoded behind some tokens before it, since decoding it alone would lose the space that SentencePiece
    strips from a beginning. `context` are tokens before all of them.
    """
    texts: list[str] = []
    joined = [*context, *ids]
    for at in range(len(context), len(joined)):
        first = max(0, at - CONTEXT_TOKENS)
        before, both = (encoder.decode(joined[first:end]).rstrip("\ufffd") for end in (at, at + 1))
        texts.append(both[len(before) :] if at > first else both)
    return texts


def describe_segment(sequence: SequenceTrace, place: SegmentLocation) -> str:
    """Say which segment it is, what it continues, and of which examples it is."""
    count = format_count(place.length, "token")
    if sequence.tree is None:
        cut = f"from its token {place.start:,}" if place.start else ""
        return join_facts([f"segment {place.segment}", place.example_id, count, cut])
    segment = sequence.tree.segments[place.segment]
    continued = f"continues segment {segment.parent}" if segment.parent >= 0 else ""
    holding = [sequence.tree.examples[number].example_id for number in segment.examples]
    others = f"shared by {format_count(len(holding), 'example')}" if len(holding) > 1 else ""
    positions = f"positions {format_range(segment.position, segment.length)}"
    return join_facts([f"segment {place.segment}", continued, holding[0], others, count, positions])


def format_range(first: int, count: int) -> str:
    """Format neighboring numbers: `3 to 7`, or `3`."""
    return str(first) if count == 1 else f"{first} to {first + count - 1}"


def trace_sequence(
    project: Project, place: str, *, whole: bool = False, lineages: Mapping[str, Lineage] | None = None
) -> SequenceTrace:
    """Trace `DATASET/SPLIT/N`, or one token of it with `:TOKEN`, to the source; in the current build, or in another.

    A token is shown with its neighbors; with `whole`, all tokens of the sequence are shown.
    """
    words, _, at = place.partition(":")
    pieces = words.split("/")
    if len(pieces) != 3 or not pieces[2].isdecimal() or (at and not at.isdecimal()):
        raise ConfigError(
            f"--sequence {place}: expected DATASET/SPLIT/N or DATASET/SPLIT/N:TOKEN, such as chats/train/12:40"
        )
    dataset, split, sequence, token = pieces[0], pieces[1], int(pieces[2]), int(at) if at else None
    known = project.recipe.datasets
    if dataset not in known:
        hint = hint_at_name(dataset, known)
        raise ConfigError(f"--sequence {place}: no dataset {dataset}; there are {', '.join(known)}; {hint}")
    lineage = load_lineage(project, dataset) if lineages is None else lineages[dataset]
    part = _find_shard_part(lineage, split, sequence, place)
    list_occurrences, note = load_order(lineage)
    shard = read_sequences(project.store, part.files["shard"])
    first = part.get_details(ShardDetails).first_sequence
    trace = _read_sequence(lineage, part, shard, sequence - first, list_occurrences)
    if token is not None and token >= trace.tokens:
        raise ConfigError(
            f"--sequence {place}: the sequence has {trace.tokens} tokens; expected a token from 0 to "
            f"{trace.tokens - 1}; name one of them"
        )
    # A segment is named once for each example that holds it, and a row may have many of both.
    found = {name: lineage.find_origin(name) for name in dict.fromkeys(one.row_id for one in trace.places)}
    origins = tuple(found[one.row_id] for one in trace.places)
    trace = replace(trace, origins=origins, order_note=note, token=token)
    if not whole and token is None:
        return trace
    shown = range(trace.tokens)
    if not whole and token is not None:
        own = next(one for one in trace.places if one.offset <= token < one.offset + one.length)
        first, last = token - NEIGHBOR_TOKENS, token + NEIGHBOR_TOKENS + 1
        shown = range(max(first, own.offset), min(last, own.offset + own.length))
    return _read_texts(lineage, trace, shown, open_encoder(lineage))


def _find_shard_part(lineage: Lineage, split: str, sequence: int, place: str) -> manifest.Part:
    counts: dict[str, int] = {}
    for part in lineage.shards:
        shard = part.get_details(ShardDetails)
        counts[shard.split] = end = shard.first_sequence + shard.sequences
        if shard.split == split and shard.first_sequence <= sequence < end:
            return part
    splits = ", ".join(f"{name} with {format_count(count, 'sequence')}" for name, count in counts.items()) or "none"
    raise ConfigError(
        f"--sequence {place}: no such sequence; {lineage.dataset} has the splits {splits}; "
        "name one of these; sequences count from 0"
    )


def open_encoder(lineage: Lineage) -> Encoder:
    """Open the tokenizer that the examples were made with; the storage keeps every one that was used."""
    return _find_encoder(lineage.project.store, lineage.made[TOKENIZED_EXAMPLES].card["tokenizer_digest"])


@lru_cache(maxsize=4)
def _find_encoder(store: Store, wanted: str) -> Encoder:
    for name in store.list("tokenizers"):
        # A damaged one is as good as none.
        with suppress(DamagedFileError):
            loaded = stored_tokenizers.read_tokenizer(store, f"tokenizers/{name}")
            if loaded.card.digest == wanted:
                return Encoder(loaded)
    raise IntegrityError(
        f"{store.path('tokenizers')}: the tokenizer of these shards is missing; every build keeps its tokenizer there; "
        "run rowmill build"
    )
