"""What exports have in common: the base class of the kinds, and the identity card and manifest of an export.

    RecipeSummary  the recipe alone                  ─► refuse    when the recipe is loaded
    ExportIndex    lengths and names, no token       ─► lay_out   which segments go into which files
    SequenceBatch  tokens, one chunk after another   ─► write     files below one local folder
                                                     ─► finish    files that need all others

    <export>/
    ├── data/            the folder that a trainer reads; it holds only the format's files
    ├── card.json        which recipe, tokenizer and template made the tokens
    └── manifest.json    written last: if it exists, every file it names is complete

A job's files depend on the plan alone, so that they are the same for any number of workers.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from rowmill.core.arrays import Ints, compute_offsets
from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, IntegrityError, join_choices
from rowmill.core.installation import format_install_command
from rowmill.schema.examples import Objective
from rowmill.schema.recipe_summary import RecipeSummary
from rowmill.schema.rows import RowKind, Split
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.native import ROW_GROUP
from rowmill.shards.sequences import SequenceBatch

Unit: TypeAlias = Literal["packed", "unpacked"]

TOKEN_BYTES = 4
CHUNK_TOKENS = 2 << 20
"""Tokens per chunk, unless a format's row groups need more: some 60 MB."""


# ── Inputs of an export ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ExportContext:
    """Facts of a build that decide files besides the tokens; `card` is the identity card as text."""

    seq_len: int
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    kinds: frozenset[RowKind]
    card: str = "{}"
    pad_id: int | None = None
    objective: Objective = "next_token"
    segment_multiple_of: int = 1
    """What the recipe pads its segments to a multiple of."""


@dataclass(frozen=True, slots=True, eq=False)
class ExportIndex:
    """The segments to export, without their tokens.

    Segments have numbers in the order of the export: `lengths` int64[K], `sequence_offsets` int64[S + 1] cut
    them into sequences. `domains` int64[K] index `domain_values`; None is a row without a domain. `name_of` returns the
    name of a segment's example.
    """

    context: ExportContext
    lengths: Ints
    sequence_offsets: Ints
    domains: Ints
    domain_values: tuple[str | None, ...]
    name_of: Callable[[int], str]

    @property
    def tokens(self) -> Ints:
        """Tokens per sequence."""
        before = compute_offsets(self.lengths)
        return np.diff(before[self.sequence_offsets])


@dataclass(frozen=True, slots=True, eq=False)
class ExportJob:
    """One unit of work: the segments of one group of files, and their grouping into sequences."""

    name: str
    segments: Ints
    sequence_offsets: Ints
    tokens: int = 0
    """The number of tokens, for formats that write it before the first token."""
    first_sequence: int = 0
    """The number of the first sequence in the order of the export, for formats that number their rows."""

    def chunks(self, rows: int) -> Iterator[tuple[Ints, Ints]]:
        """Cut the job into runs of `rows` sequences: segment numbers, and their offsets from 0."""
        count = len(self.sequence_offsets) - 1
        for first in range(0, count, rows):
            offsets = self.sequence_offsets[first : min(first + rows, count) + 1]
            yield self.segments[offsets[0] : offsets[-1]], offsets - offsets[0]


@dataclass(slots=True)
class WrittenFile:
    """A file below the export's folder, counted while it is written; counts are 0 for files that hold no tokens.

    `note` is what `finish` needs to know of it, and nobody else: the jobs of an export may run on several hosts.
    """

    path: str
    first_sequence: int = 0
    """The number of the file's first sequence in the order of the export."""
    sequences: int = 0
    segments: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    note: Any = field(default=None, compare=False, repr=False)
    size_bytes: int = 0
    sha256: str = ""
    """For users; `digest`, BLAKE2b, is that of rowmill's manifests. Both are set by `compute_digests`."""
    digest: str = ""

    def add(self, sequences: SequenceBatch, *, trained: int, tokens: int | None = None) -> None:
        """Count a chunk; `trained` are the targets and `tokens` the tokens that the format stores."""
        self.sequences += len(sequences)
        self.segments += len(sequences.offsets) - 1
        self.tokens += len(sequences.ids) if tokens is None else tokens
        self.trained_tokens += trained

    def compute_digests(self, folder: Path) -> None:
        """Read the file once, and set its size and digests."""
        sha, blake, self.size_bytes = sha256(), blake2b(digest_size=16), 0
        with (folder / self.path).open("rb") as handle:
            while block := handle.read(_BLOCK_BYTES):
                self.size_bytes += len(block)
                sha.update(block)
                blake.update(block)
        self.sha256, self.digest = sha.hexdigest(), blake.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class ExportLayout:
    """The files of an export, and what the format cannot hold.

    `left_out` counts segments without a job, by the ledger's state; `notes` go to the card.
    """

    jobs: Sequence[ExportJob]
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    notes: Mapping[str, Any] = field(default_factory=dict[str, Any])


# ── The kinds' base ────────────────────────────────────────────────────────────────────────────────


class Export(Config):
    """A build in the format of one trainer."""

    CONVENTION: ClassVar[LabelConvention]
    BY_DOMAIN: ClassVar[bool] = False
    """Whether files depend on the domain of each row."""
    VERSION: ClassVar[int] = 1
    """Increase it when the bytes of any file of this format may change."""
    OBJECTIVES: ClassVar[frozenset[Objective]] = frozenset({"next_token"})
    """The objectives whose examples the format can hold."""
    HOLDS_WEIGHTS: ClassVar[bool] = False
    """Whether the format can store a float per target."""
    HOLDS_FIELDS: ClassVar[bool] = False
    """Whether the format can store the fields that token rows carry."""
    NEEDS: ClassVar[tuple[str, str] | None] = None
    """A module that writing needs, and the extra of rowmill that installs it."""

    name: str
    """Names the export's folder and asset; a letter, then letters, digits, `_` and `-`."""
    split: Split = "train"
    """Which rows: `train` in training order, the others in the order of their plan."""
    passes: Literal["first", "all"] = "first"
    """`first`: every sequence of the order once, at its first place; `all`: as often as the mixture shows it."""

    @property
    def form(self) -> Unit:
        """Whether the format stores packed sequences or single segments."""
        return getattr(self, "unit", "unpacked")

    def check_recipe(self, recipe: RecipeSummary) -> None:
        """Refuse an export that the recipe makes impossible."""
        try:
            self.refuse(recipe)
        except ConfigError as error:
            raise ValueError(f"exports.{self.name}: {error}") from error

    def refuse(self, summary: RecipeSummary) -> None:
        """Raise ConfigError if the recipe makes this export impossible; kinds add checks."""
        if self.NEEDS is not None and find_spec(self.NEEDS[0]) is None:
            module, extra = self.NEEDS
            raise ConfigError(
                f"kind {self.kind_name} is written with {module}, which is not installed here; it comes with the extra "
                f"{extra}; run {format_install_command(extra)}, or delete the export"
            )
        if self.passes == "all" and self.split != "train":
            raise ConfigError(
                f"passes: all with split: {self.split}, which has one pass; only train has several; delete passes"
            )
        foreign = [name for name, dataset in summary.datasets.items() if dataset.objective not in self.OBJECTIVES]
        if foreign:
            raise ConfigError(
                f"kind {self.kind_name} cannot hold datasets.{foreign[0]}, whose objective is "
                f"{summary.datasets[foreign[0]].objective}; it holds {join_choices(sorted(self.OBJECTIVES))}; choose "
                "another kind of export, or delete it"
            )
        sharing = [name for name, dataset in summary.datasets.items() if dataset.shares_prefixes]
        if sharing:
            raise ConfigError(
                f"kind {self.kind_name} cannot store the trees of datasets.{sharing[0]}, which has "
                "packing.share_prefixes; only the ranks hold them, and rowmill.Reader reads them; delete the export, "
                "or set packing.share_prefixes: false"
            )
        weighted = [name for name, dataset in summary.datasets.items() if dataset.has_weights]
        if weighted and not self.HOLDS_WEIGHTS:
            raise ConfigError(
                f"kind {self.kind_name} cannot store the loss weights of datasets.{weighted[0]}; "
                f"{_join_kinds('HOLDS_WEIGHTS')} can; choose one of them, or set loss.weights: false and "
                "loss.prompt_weight: 0"
            )
        carrying = [(name, dataset.fields) for name, dataset in summary.datasets.items() if dataset.fields]
        if carrying and not self.HOLDS_FIELDS:
            name, fields = carrying[0]
            raise ConfigError(
                f"kind {self.kind_name} cannot store {fields[0]}, a field of the rows of datasets.{name}; "
                f"{_join_kinds('HOLDS_FIELDS')} can; choose one of them, or take it off format.token_fields and "
                "format.row_fields"
            )
        opened = [f"datasets.{name}" for name, dataset in summary.datasets.items() if dataset.is_open]
        if opened and self.form == "unpacked" and not self.allows_open_attention():
            raise ConfigError(
                f"kind {self.kind_name} stores single segments, but attention of {opened[0]} crosses from one to the "
                "next; only segments that do not see each other can be separated; set "
                "packing.block_cross_document_attention: true, or choose a packed format"
            )

    def allows_open_attention(self) -> bool:
        """Return whether segments that see each other may be stored as single segments."""
        return False

    @property
    def label_convention(self) -> LabelConvention:
        return self.CONVENTION

    @property
    def kind_name(self) -> str:
        return str(getattr(self, "kind", ""))

    def rows_at_once(self, context: ExportContext) -> int:
        """Return the number of sequences per chunk."""
        return max(1, CHUNK_TOKENS // context.seq_len)

    def lay_out(self, index: ExportIndex) -> ExportLayout:
        """Assign segments to files."""
        raise NotImplementedError

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write one job's files below a local folder, whose `data` folder is for the files that trainers read."""
        raise NotImplementedError

    def finish(self, folder: Path, written: Sequence[WrittenFile], context: ExportContext) -> list[WrittenFile]:
        """Write the files that need all jobs to be done, from the notes on the `written` ones; return them.

        The folder holds none of the written files.
        """
        return []

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the lines of a trainer's configuration that open this export; `data` is its data folder."""
        raise NotImplementedError


def _join_kinds(flag: Literal["HOLDS_WEIGHTS", "HOLDS_FIELDS"]) -> str:
    """Return the kinds of exports that have a flag, in the order of their declarations: `native, mds and tinker`."""
    kinds, waiting = list[str](), [Export]
    while waiting:
        one = waiting.pop()
        waiting += reversed(one.__subclasses__())
        if getattr(one, flag) and "kind" in one.model_fields:
            kinds.append(str(one.model_fields["kind"].default))
    return " and ".join([", ".join(kinds[:-1]), kinds[-1]])


class Sharded(Export):
    """An export in consecutive files."""

    shard_sequences: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of packed sequences per file; null: only `shard_bytes` limits it."""
    shard_bytes: Annotated[int, Field(ge=1)] = 256 << 20
    """Maximum bytes of token data per file, four per token; a file holds at least one sequence."""

    def count_together(self, objective: Objective) -> int | None:
        """Return how many segments stay together, as pairs do in `trl_preference.py`; None: those of a sequence."""
        return None

    def rows_at_once(self, context: ExportContext) -> int:
        """Return the number of sequences, or of blocks of segments, per chunk."""
        return max(1, CHUNK_TOKENS // (context.seq_len * (self.count_together(context.objective) or 1)))

    def lay_out(self, index: ExportIndex) -> ExportLayout:
        """Cut the order into files of whole sequences, or of whole blocks of segments."""
        count, together = len(index.lengths), self.count_together(index.context.objective)
        if together is None:
            return ExportLayout(self.cut(index.tokens, index.sequence_offsets, np.arange(count)))
        offsets = np.append(np.arange(0, count, together), count)
        tokens = np.add.reduceat(index.lengths, offsets[:-1]) if count else index.lengths
        return ExportLayout(self.cut(tokens, offsets, np.arange(count)))

    def cut(self, tokens: Ints, sequence_offsets: Ints, segments: Ints) -> list[ExportJob]:
        """Return one job per file; `tokens` are the counts per sequence."""
        jobs: list[ExportJob] = []
        for first, last in split_into_runs(
            tokens, most=self.shard_sequences, most_tokens=self.shard_bytes // TOKEN_BYTES
        ):
            offsets = sequence_offsets[first : last + 1]
            chosen = segments[offsets[0] : offsets[-1]]
            jobs.append(ExportJob(f"part-{len(jobs):05d}", chosen, offsets - offsets[0], first_sequence=first))
        return jobs


def split_into_runs(tokens: Ints, *, most: int | None, most_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield runs of at most `most` sequences and `most_tokens` tokens, each of at least one sequence."""
    ends = np.cumsum(tokens)
    first = 0
    while first < len(tokens):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + most_tokens, "right")))
        last = min(last, first + most) if most is not None else last
        yield first, last
        first = last


class TableExport(Sharded):
    """An export whose chunks are tables, written as consecutive Parquet files."""

    SUFFIX: ClassVar[str] = "parquet"
    STORES_CARD: ClassVar[bool] = True
    """Whether files have the card in their schema."""

    def make_table(self, chunk: SequenceBatch, file: WrittenFile, context: ExportContext) -> pa.Table:
        """Return a chunk's rows, and count them."""
        raise NotImplementedError

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write one file: zstd, row groups of `ROW_GROUP`; all chunks but the last hold whole ones."""
        file = WrittenFile(f"data/{job.name}.{self.SUFFIX}", job.first_sequence)
        tables = (self.make_table(chunk, file, context) for chunk in chunks)
        first = next(tables)
        schema = first.schema.with_metadata({"rowmill": context.card}) if self.STORES_CARD else first.schema
        coded = [column.name for column in schema if pa.types.is_dictionary(column.type)]
        with pq.ParquetWriter(str(folder / file.path), schema, compression="zstd", use_dictionary=coded) as writer:
            for table in chain([first], tables):
                writer.write_table(table.cast(schema), row_group_size=ROW_GROUP)
        return [file]


# ── The identity card and the manifest ──


CARD_FILE, MANIFEST_FILE, DATA_FOLDER = "card.json", "manifest.json", "data"
MANIFEST_VERSION = 1

_BLOCK_BYTES = 1 << 20


def describe_builder() -> str:
    """Return this project's name and version."""
    try:
        return f"rowmill {version('rowmill')}"
    except PackageNotFoundError:
        return "rowmill"


def encode_json(value: object) -> bytes:
    """Encode a card or manifest: UTF-8, indented, sorted keys."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


def encode_manifest(files: Sequence[WrittenFile], card: bytes) -> bytes:
    """Return the manifest of some files and their card."""
    counts = ("sha256", "sequences", "segments", "tokens", "trained_tokens")
    named = {file.path: {"bytes": file.size_bytes} | {name: getattr(file, name) for name in counts} for file in files}
    return encode_json({"version": MANIFEST_VERSION, "card_sha256": sha256(card).hexdigest(), "files": named})


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Exported:
    """A complete export: its folder, its card, and per file its size, digest and counts."""

    folder: Path
    card: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]

    @property
    def data(self) -> Path:
        """The folder that a trainer reads."""
        return self.folder / DATA_FOLDER

    def count(self, name: str) -> int:
        """Return a count over all files: `sequences`, `segments`, `tokens` or `trained_tokens`."""
        return sum(int(file[name]) for file in self.files.values())


def open_export(
    folder: str | Path, *, tokenizer: str | Path | None = None, verify: bool = False, kind: str | None = None
) -> Exported:
    """Open an export's folder after checking that a trainer may read it.

    `tokenizer` is a folder whose files must be those that made the tokens; `verify` reads every file and compares
    digests; `kind` is the format that the export must have.

    Raises
    ------
    IntegrityError
        If the manifest or a file is missing, a size or digest differs, or the tokenizer or format is another one.
    """
    at = Path(folder)
    at = at.parent if at.name == DATA_FOLDER and not (at / MANIFEST_FILE).is_file() else at
    if not (at / MANIFEST_FILE).is_file():
        raise IntegrityError(
            f"{at}: no {MANIFEST_FILE}; it is written last, so without it an export is incomplete; export again, or "
            "name the folder that holds it"
        )
    card_bytes = _read_export_file(at / CARD_FILE)
    stored, card = _parse_export_json(at / MANIFEST_FILE), _parse_export_json(at / CARD_FILE)
    if sha256(card_bytes).hexdigest() != stored.get("card_sha256"):
        raise IntegrityError(
            f"{at / CARD_FILE}: not the card that {MANIFEST_FILE} names; card and files must belong to one "
            "export; export again"
        )
    exported = Exported(at, card, cast("dict[str, dict[str, Any]]", stored["files"]))
    for name, expected in exported.files.items():
        path = at / name
        if not path.is_file():
            raise IntegrityError(f"{path}: missing; {MANIFEST_FILE} names it; copy the whole folder, or export again")
        if path.stat().st_size != expected["bytes"]:
            raise IntegrityError(
                f"{path}: {path.stat().st_size} bytes; {MANIFEST_FILE} says {expected['bytes']}; copy it again, or "
                "export again"
            )
        if verify and _digest_file(path) != expected["sha256"]:
            raise IntegrityError(f"{path}: its SHA-256 is not that of {MANIFEST_FILE}; copy it again, or export again")
    if kind is not None and card.get("format") != kind:
        raise IntegrityError(f"{at}: its format is {card.get('format')}, not {kind}; name another export")
    expected = {} if tokenizer is None else cast("dict[str, str]", card["tokenizer_files"])
    for name, digest in expected.items():
        path = Path(tokenizer or "") / name
        actual = _digest_file(path) if path.is_file() else None
        if actual != digest:
            what = "missing" if actual is None else f"SHA-256 {actual[:16]}…"
            raise IntegrityError(
                f"{path}: {what}; {at} was made with a file of SHA-256 {digest[:16]}…; train with that tokenizer, or "
                "export with this one"
            )
    return exported


def _read_export_file(path: Path) -> bytes:
    if not path.is_file():
        raise IntegrityError(f"{path}: missing; every export has one; copy the whole folder, or export again")
    return path.read_bytes()


def _parse_export_json(path: Path) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", orjson.loads(_read_export_file(path)))
    except ValueError as error:
        raise IntegrityError(f"{path}: not JSON ({error}); expected it as it was written; export again") from error
