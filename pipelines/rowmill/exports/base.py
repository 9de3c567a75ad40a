"""What every export has in common: its options, what it is told before tokens move, and where its files end.

What belongs here: the base classes of the kinds, the plan's borders, which recipes an export is possible for.
What does not: one format's files (one module per format), the identity card (`export_manifest.py`), moving tokens
(`exports.py`).

    Prospect   what the recipe alone tells        ─► refuse    when the recipe is loaded
    Shape      lengths and names, no token        ─► jobs      which segments go into which files
    Sequences  tokens, one chunk after the other  ─► write     files below one local folder
                                                  ─► finish    what is known when all are written

A job's files depend on the plan alone, so that they are the same for any number of workers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from rowmill.core.arrays import Ints
from rowmill.core.config import Config
from rowmill.core.errors import ConfigError
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.sequences import SequenceBatch

Split: TypeAlias = Literal["train", "validation", "test"]
Unit: TypeAlias = Literal["packed", "unpacked"]

TOKEN_BYTES = 4
CHUNK_TOKENS = 2 << 20
"""Tokens in hand at a time, unless a format's row groups ask for more: some 60 MB."""


# ── What an export is told ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """What a recipe says of one dataset that decides which exports are possible."""

    kind: str
    is_joined: bool
    """Its documents are joined and cut every `seq_len` tokens."""
    is_open: bool
    """Attention crosses from one of its segments to the next."""
    has_weights: bool


@dataclass(frozen=True, slots=True)
class RecipeSummary:
    """What a recipe says that decides which exports are possible, before any data is read."""

    seq_len: int
    datasets: Mapping[str, DatasetSummary]


@dataclass(frozen=True, slots=True, eq=False)
class ExportIndex:
    """What is to be exported, without its tokens.

    Segments have numbers in the order of the export: `lengths` int64[K], `sequence_offsets` int64[S + 1] cut
    them into sequences. `domains` int64[K] index `domain_values`; None is a row without one. `name_of` finds a
    segment's example; `best_fit(lengths, limit)` plans sequences: (numbers of the lengths, offsets).
    """

    seq_len: int
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    kinds: frozenset[str]
    lengths: Ints
    sequence_offsets: Ints
    domains: Ints
    domain_values: tuple[str | None, ...]
    name_of: Callable[[int], str]
    best_fit: Callable[[Ints, int], tuple[Ints, Ints]]

    @property
    def tokens(self) -> Ints:
        """Tokens per sequence."""
        before = np.concatenate((np.zeros(1, np.int64), np.cumsum(self.lengths)))
        return np.diff(before[self.sequence_offsets])


@dataclass(frozen=True, slots=True, eq=False)
class ExportJob:
    """One unit of work: the segments that go into one group of files, and how they stand in sequences."""

    name: str
    segments: Ints
    sequence_offsets: Ints
    tokens: int = 0
    """How many there are, for formats that state it before the first."""

    def chunks(self, rows: int) -> Iterator[tuple[Ints, Ints]]:
        """Cut the job into runs of `rows` sequences: segment numbers, and their offsets from 0."""
        count = len(self.sequence_offsets) - 1
        for first in range(0, count, rows):
            offsets = self.sequence_offsets[first : min(first + rows, count) + 1]
            yield self.segments[offsets[0] : offsets[-1]], offsets - offsets[0]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file below the export's folder and what it holds; a file beside the one with the tokens holds nothing."""

    path: str
    sequences: int = 0
    segments: int = 0
    tokens: int = 0
    trained_tokens: int = 0


@dataclass(slots=True)
class FileCounts:
    """Counts of a file while it is written."""

    sequences: int = 0
    segments: int = 0
    tokens: int = 0
    trained_tokens: int = 0

    def add(self, sequences: SequenceBatch, *, trained: int, tokens: int | None = None) -> None:
        """Count a chunk; `trained` are the targets as the format stores them, `tokens` those that it holds."""
        self.sequences += len(sequences)
        self.segments += len(sequences.offsets) - 1
        self.tokens += len(sequences.ids) if tokens is None else tokens
        self.trained_tokens += trained

    def written(self, path: str) -> WrittenFile:
        """Return the counts as those of a file."""
        return WrittenFile(path, self.sequences, self.segments, self.tokens, self.trained_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class ExportLayout:
    """Which files hold what, and what the format cannot hold.

    `left_out` counts segments that stand in no job, under the ledger's word for it; `notes` go to the card.
    """

    jobs: Sequence[ExportJob]
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    notes: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class ExportContext:
    """What a writer knows beside the tokens: the plan's length, the tokenizer's ids, kinds of datasets, the card."""

    seq_len: int
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    kinds: frozenset[str]
    card: str = "{}"


# ── The kinds' base ────────────────────────────────────────────────────────────────────────────────


class Export(Config):
    """A build in the form of one trainer."""

    LETTER: ClassVar[LabelConvention]
    BY_DOMAIN: ClassVar[bool] = False
    """Whether files depend on the domain of each row."""
    VERSION: ClassVar[int] = 1
    """Raise it when any file of this format may hold other bytes."""
    HOLDS_WEIGHTS: ClassVar[bool] = False
    """Whether a float per target has a place in the format."""
    NEEDS: ClassVar[tuple[str, str] | None] = None
    """A module that writing needs, and the extra of this project that installs it."""

    name: str
    """Names the export's folder and asset; a letter, then letters, digits, `_` and `-`."""
    split: Split = "train"
    """Which rows: `train` in the order of training, the others in the order of their plan."""
    passes: Literal["first", "all"] = "first"
    """`first`: every sequence of the order once, where it is first shown; `all`: as often as the mixture shows it."""

    @property
    def form(self) -> Unit:
        """Whether the format holds packed sequences or segments one by one."""
        return getattr(self, "unit", "unpacked")

    def refuse(self, prospect: RecipeSummary) -> None:
        """Raise ConfigError for what a recipe makes impossible; kinds add to it."""
        if self.NEEDS is not None and find_spec(self.NEEDS[0]) is None:
            module, extra = self.NEEDS
            raise ConfigError(
                f"kind {self.kind_name} is written with {module}, which is not installed here; it comes with the extra "
                f"{extra}; run pip install 'rowmill[{extra}]', or delete the export"
            )
        if self.passes == "all" and self.split != "train":
            raise ConfigError(
                f"passes: all with split: {self.split}, which is shown once; only train has passes; delete passes"
            )
        weighted = [name for name, one in prospect.datasets.items() if one.has_weights]
        if weighted and not self.HOLDS_WEIGHTS:
            raise ConfigError(
                f"kind {self.kind_name} has no place for the loss weights of datasets.{weighted[0]}; native, "
                "mds and tinker "
                "have; choose one of them, or set loss.weights: false"
            )
        opened = [f"datasets.{name}" for name, one in prospect.datasets.items() if one.is_open]
        if opened and self.form == "unpacked" and not self.allows_open_attention():
            raise ConfigError(
                f"kind {self.kind_name} holds segments one by one, but attention of {opened[0]} crosses from "
                "one to the "
                "next; only segments of their own can be parted; set packing.block_cross_document_attention: true, "
                "or choose a packed format"
            )

    def allows_open_attention(self) -> bool:
        """Tell whether segments that see each other may be stored one by one."""
        return False

    @property
    def label_convention(self) -> LabelConvention:
        """How this export stores targets."""
        return self.LETTER

    @property
    def kind_name(self) -> str:
        """The kind's name."""
        return str(getattr(self, "kind", ""))

    def rows_at_once(self, seq_len: int) -> int:
        """Return how many sequences a writer is handed at a time."""
        return max(1, CHUNK_TOKENS // seq_len)

    def lay_out(self, shape: ExportIndex) -> ExportLayout:
        """Say which segments go into which files."""
        raise NotImplementedError

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, terms: ExportContext
    ) -> list[WrittenFile]:
        """Write one job's files below a local folder, which has a `data` folder for what trainers see."""
        raise NotImplementedError

    def finish(self, folder: Path, written: Sequence[WrittenFile], terms: ExportContext) -> list[WrittenFile]:
        """Write what is known only when every job is done; return those files."""
        return []

    def pointer(self, data: str, terms: ExportContext) -> str:
        """Return the lines of a trainer's configuration that open this export; `data` is its data folder."""
        raise NotImplementedError


class Sharded(Export):
    """An export in files that follow each other in the order exported."""

    shard_sequences: Annotated[int, Field(ge=1)] | None = None
    """Packed sequences per file at most; null: `shard_bytes` decides alone."""
    shard_bytes: Annotated[int, Field(ge=1)] = 256 << 20
    """Bytes of token data per file at most, four to a token; a file holds at least one sequence."""

    def lay_out(self, shape: ExportIndex) -> ExportLayout:
        """Cut the order into files of whole sequences."""
        return ExportLayout(self.cut(shape.tokens, shape.sequence_offsets, np.arange(len(shape.lengths))))

    def cut(self, tokens: Ints, sequence_offsets: Ints, segments: Ints) -> list[ExportJob]:
        """Return one job per file; `tokens` are those of each sequence."""
        jobs: list[ExportJob] = []
        for first, last in split_into_runs(
            tokens, most=self.shard_sequences, most_tokens=self.shard_bytes // TOKEN_BYTES
        ):
            offsets = sequence_offsets[first : last + 1]
            jobs.append(ExportJob(f"part-{len(jobs):05d}", segments[offsets[0] : offsets[-1]], offsets - offsets[0]))
        return jobs


def split_into_runs(tokens: Ints, *, most: int | None, most_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield runs of sequences with at most so many sequences and tokens, at least one sequence each."""
    ends = np.cumsum(tokens)
    first = 0
    while first < len(tokens):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + most_tokens, "right")))
        last = min(last, first + most) if most is not None else last
        yield first, last
        first = last


def write_parquet(path: Path, tables: Iterator[pa.Table], schema: pa.Schema, *, rows: int) -> None:
    """Write tables as one Parquet file: zstd, row groups of `rows`; tables hold whole row groups but for the last."""
    coded = [one.name for one in schema if pa.types.is_dictionary(one.type)]
    with pq.ParquetWriter(str(path), schema, compression="zstd", use_dictionary=coded) as writer:
        for table in tables:
            writer.write_table(table.cast(schema), row_group_size=rows)
