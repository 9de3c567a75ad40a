"""The current outputs of a dataset, and a row's location in them: source, shards, places in the order."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill import sources
from rowmill.build.steps import Project
from rowmill.core.errors import IntegrityError, SourceError
from rowmill.core.storage import Store
from rowmill.schema import manifest
from rowmill.schema.facts import read_facts
from rowmill.schema.manifest import Manifest
from rowmill.sources import SourcePart
from rowmill.stages import inputs, raw_dataset
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.gpu_partitions import stage as gpu_partitions
from rowmill.stages.gpu_partitions.rank_parts import GpuPartitionsFacts, is_index
from rowmill.stages.gpu_partitions.rank_sources import list_train_shards, load_packed_inputs
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
        return list(inputs.number_source_parts(raw)) if raw else []

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
    """Yield the segments of a sequence, each with its row's id."""
    segments = lineage.project.store.table(part.files["segments"])
    split = str(part.facts["split"])
    occurrences = tuple(order.showings(sequence)) if order is not None and split == "train" else ()
    offset = 0
    shard_row = sequence - int(part.facts["first_sequence"])
    for one in sorted(filter_rows(segments, "shard_row", shard_row), key=lambda one: one["segment"]):
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
        offset += one["length"]
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
        locate=_locate_nowhere if ranks is None or not fits else _make_rank_locator(project.store, ranks),
    ), "" if fits else "the ranks are not built from this order yet"


def _locate_nowhere(rank: int, row: int) -> tuple[str, int]:
    del rank
    return "", row


def _make_rank_locator(store: Store, ranks: Manifest) -> Callable[[int, int], tuple[str, int]]:
    parts = {int(name.split("-")[1]): part for name, part in zip(ranks.card["ranks"], ranks.parts, strict=True)}
    if not is_index(ranks):
        return partial(_locate_copied_row, store, parts)
    shards = [part.files["shard"].path for part in list_train_shards(load_packed_inputs(store, ranks))]
    tables = {rank: store.table(part.files["index"], ("shard", "row")) for rank, part in parts.items()}
    return partial(_locate_indexed_row, store, tables, shards)


def _locate_copied_row(store: Store, parts: Mapping[int, manifest.Part], rank: int, row: int) -> tuple[str, int]:
    files = parts[rank].files if rank in parts else {}
    for _, file in sorted((name, file) for name, file in files.items() if name.startswith("data/")):
        if row < file.rows:
            return store.path(file.path), row
        row -= file.rows
    return "", row


def _locate_indexed_row(
    store: Store, tables: Mapping[int, pa.Table], shards: Sequence[str], rank: int, row: int
) -> tuple[str, int]:
    if rank not in tables:
        return "", row
    shard, shard_row = (int(tables[rank].column(name)[row].as_py()) for name in ("shard", "row"))
    return store.path(shards[shard]), shard_row
