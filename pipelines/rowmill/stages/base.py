"""The stages, one module each: what is done to all parts of a dataset, or to all datasets of a recipe.

What belongs here: the form in which a stage declares itself, composing libraries over parts, and adding up what they
counted. What does not: the list of stages (`catalog.py`), one part's work (`parts.py`), gates and reuse of whole stages
(`runner.py`). A stage may import what works on one part; nothing of that imports a stage.

| stage | per | reads | writes |
|---|---|---|---|
| `raw_dataset` | dataset | source files | scans: parts with digests |
| `canonical_rows` | dataset | parts | rows, rejects, ledger per part |
| `tokenized_examples` | dataset | rows | examples, rejects, ledger per part |
| `truncation_stats` | dataset | examples' lengths | histograms, what-if |
| `packed_shards` | dataset | examples | shards, segments, what is left out |
| `training_splits` | recipe | sequences' counts | the order |
| `gpu_partitions` | recipe | the order, shards | shards per rank |
| `exports` | export | the order, shards | a trainer's own files |
| `parsed_records` | dataset | files of generated text | records, refused objects |
| `generated_series` | dataset | examples, rows, a trained model | records |

What a stage grew too large to hold stands beside it: `time_splits` of canonical rows, `split_plans` and `shard_files`
of packed shards, `leaks` of training splits.
"""

import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import polars as pl

from rowmill.checks.judge import CheckResult
from rowmill.core.storage import File, Store, digest_json
from rowmill.executors import LocalPool
from rowmill.recipe.dataset import Dataset
from rowmill.recipe.recipe import Recipe
from rowmill.schema.manifest import (
    DisplayTable,
    Histogram,
    Manifest,
    Part,
    StageKey,
    get_stage_folder,
    get_stage_name,
    parse_part,
)
from rowmill.shards import gather
from rowmill.stats import StatsInputs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TaskT = TypeVar("TaskT")


class ProgressCallback(Protocol):
    """Who wants to hear how far a stage is."""

    def __call__(self, where: str, *, done: int, total: int, rows: int, tokens: int, seconds: float) -> None:
        """Hear that `done` of `total` parts of `chats/canonical_rows` are finished after so many rows and seconds."""
        ...


@dataclass(frozen=True, slots=True)
class StageContext:
    """What a stage is given: where it stands, what it reads, and who does the parts."""

    recipe: Recipe
    store: Store
    base: Path
    key: StageKey
    dataset_name: str | None
    inputs: Mapping[StageKey, Manifest]
    pool: LocalPool
    progress: ProgressCallback | None = None
    ranks: Sequence[str] = ()

    @property
    def stage(self) -> str:
        """The stage's name."""
        return get_stage_name(self.key)

    @property
    def folder(self) -> str:
        """The stage's folder, relative to the storage root."""
        return get_stage_folder(self.key)

    @property
    def dataset(self) -> Dataset:
        """The dataset's options; only for stages of one dataset."""
        assert self.dataset_name is not None
        return self.recipe.datasets[self.dataset_name]

    @property
    def dataset_key(self) -> tuple[str, str]:
        """The recipe and dataset, which begin the keys of this dataset's other stages."""
        assert self.dataset_name is not None
        return (self.recipe.name, self.dataset_name)

    def input(self, stage: str) -> Manifest:
        """Return the manifest of another stage of the same dataset."""
        return self.inputs[(*self.dataset_key, stage)]


@dataclass(slots=True)
class StageOutput:
    """What a stage made, before it is a manifest; the fields are those of `manifest.Manifest`."""

    facts: "DataclassInstance"
    """Its numbers by name, as the stage declares them."""
    parts: Sequence[Part] = ()
    ledger: Sequence[tuple[str, str, int]] = ()
    token_ledger: Sequence[tuple[str, str, int]] = ()
    tables: dict[str, DisplayTable] = field(default_factory=dict[str, DisplayTable])
    histograms: dict[str, Histogram] = field(default_factory=dict[str, Histogram])
    samples: dict[str, tuple[str, ...]] = field(default_factory=dict[str, "tuple[str, ...]"])
    schema: Sequence[tuple[str, str]] = ()
    card: dict[str, Any] = field(default_factory=dict[str, Any])
    details: dict[str, Any] = field(default_factory=dict[str, Any])
    parts_reused: int = 0
    rows_made: int = 0


# ── What a stage is ────────────────────────────────────────────────────────────────────────────────


def _accept_any(_: Manifest) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class PreparedStage:
    """A stage ready to run: `outside` identifies what it reads beside its recipe and inputs, `make` does the work.

    `outside` holds JSON values: digests of source files, of tokenizer files, of the template's text. `accepts` tells
    whether an output that is kept under the same fingerprint may be taken for one that is made now: not if it was made
    after another output than the current one, and reads that.
    """

    outside: tuple[Any, ...]
    make: Callable[[], StageOutput]
    accepts: Callable[[Manifest], bool] = _accept_any


Scope = Literal["dataset", "recipe", "export"]
"""What a stage is run for: each dataset, the recipe as a whole, or each of its exports."""


Publish = Callable[[StageContext, Manifest, Sequence[CheckResult], Sequence[str]], None]
"""Gives an output whose checks block nothing to trainers, with its results and the bounds that were loosened."""


@dataclass(frozen=True, slots=True)
class ComparedFact:
    """A number that is compared between two versions: its name for people, and the fact that holds it."""

    name: str
    fact: str
    is_share: bool = False


def _summarize_rows(facts: object, rows: str) -> Sequence[str]:
    del facts
    return (rows,)


def _applies_to_all(dataset: Dataset) -> bool:
    del dataset
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDeclaration:
    """All that is known of a stage without running it: the one place for it, in the stage's own module.

    `catalog.STAGES` lists the declarations in order. The graph, the plan, the runner and Dagster's assets are made
    from that list, so adding a stage takes its module and one line there.
    """

    name: str
    """The last word of its key, or the one before an export's name; a folder below the storage root."""
    description: str
    """One sentence for people: what an output holds."""
    identity: Callable[[Recipe, str], dict[str, Any]]
    """Every option that the stage reads, of the dataset or the export of that name, and the versions of the code that
    reads them, as explicit JSON values. Both identities below are computed from it, so that a build never remakes what
    Dagster calls fresh."""
    prepare: Callable[[StageContext], PreparedStage]
    """Find out what the stage reads beside its recipe and inputs, and return the function that runs it."""
    facts: "type[DataclassInstance]"
    """What an output is counted by, a frozen dataclass; every check of the stage is named after one of its fields."""
    scope: Scope = "dataset"
    inputs: tuple[str, ...] = ()
    """Names of the stages that it reads: of the same dataset, or for a stage of the recipe of every dataset. A stage
    without inputs reads source files."""
    gates: tuple[str, ...] = ()
    """Names of further stages of the dataset that it does not read, and whose checks must have passed before it."""
    gates_on_every_dataset: bool = False
    """Whether the checks of all stages of all datasets must have passed before it."""
    applies: Callable[[Dataset], bool] = _applies_to_all
    """Whether a dataset has the stage."""
    command: str = ""
    """The command that runs it, if no build does unless the stage is named: it needs a trained model."""

    # What the runner asks.
    require_ready: Callable[[StageContext], None] | None = None
    """Raise ConfigError if something outside the storage root that it needs is not there: asked before a build."""
    find_outside_change: Callable[[StageContext, Manifest], str | None] | None = None
    """Word what changed outside the recipe and the inputs since an earlier output; None if nothing did."""
    publish: Publish | None = None
    """Give an output to trainers; None for a stage that trainers do not read through rowmill."""

    # What people are shown.
    feeds: StatsInputs = field(default_factory=StatsInputs)
    """How many rows an output holds, what one of them is called, and the tables of statistics that it feeds."""
    summarize: Callable[[Any, str], Sequence[str]] = _summarize_rows
    """Word in a few phrases what an output holds, from its facts, of the type above, and its number of rows (`1,342
    rows`, or empty)."""
    compared: tuple[ComparedFact, ...] = ()
    """The numbers that a comparison of two versions shows."""
    find_content_damage: Callable[[Store, Manifest], Iterator[str]] | None = None
    """Compare what files hold with the hashes of content in the manifest; yield a sentence for each that differs."""

    # What Dagster shows and schedules.
    uses_all_cores: bool = False
    """Whether it runs its parts on all workers, so that two of it at once would take each other's cores."""
    partitions: Callable[[Recipe], tuple[str, ...]] | None = None
    """Names of the pieces of its output that can be made one without another; None if there is one piece."""
    find_data_version: Callable[[Recipe, Manifest], str] | None = None
    """Identify an output of which only some pieces were made; None: by its content."""
    shows_overdue: bool = False
    """Whether it stands for all that trainers read when a recipe says how old that may be."""

    @property
    def on_demand(self) -> bool:
        """Whether a build leaves it out unless it is named."""
        return bool(self.command)

    def code_version(self, recipe: Recipe, name: str, waivers: Sequence[str]) -> str:
        """Identify the options, waivers and code: what Dagster compares before anything is read."""
        return digest_json(self.name, name, self.identity(recipe, name), list(waivers))[:16]

    @staticmethod
    def fingerprint(
        code_version: str, inputs: Mapping[str, str], waivers: Sequence[str], outside: Sequence[Any]
    ) -> str:
        """Identify an output before it is made: the code version, and all that is not in the recipe.

        `inputs` are the content versions of its inputs by key, `waivers` all those it is built under.
        """
        return digest_json(code_version, dict(inputs), list(waivers), list(outside))


# ── Parts are kept under their own fingerprints ────────────────────────────────────────────────────


def part_folder(stage_folder: str, fingerprint: str) -> str:
    """Return the folder of a part's files."""
    return f"{stage_folder}/parts/{fingerprint}"


def load_kept_part(store: Store, stage_folder: str, fingerprint: str) -> Part | None:
    """Return a part that an earlier build finished, even one that was killed later."""
    raw = store.read_sealed(f"{part_folder(stage_folder, fingerprint)}/part.json")
    part = None if raw is None else parse_part(raw)
    return part if part is not None and all(store.has(file) for file in part.files.values()) else None


def save_kept_part(store: Store, stage_folder: str, part: Part) -> None:
    """Note that a part is whole; written after its files, so that it vouches for them."""
    store.write_sealed(f"{part_folder(stage_folder, part.fingerprint)}/part.json", asdict(part))


@dataclass(frozen=True, slots=True)
class PartTask:
    """A part to make or reuse: its fingerprint, its task, and the size of its input."""

    fingerprint: str
    task: Any
    rows: int
    size_bytes: int


def make_parts(
    work: StageContext, function: Callable[[Any], Part], planned: Sequence[PartTask]
) -> tuple[list[Part], int, int]:
    """Return all parts in order: kept ones as they are, the others made by the pool.

    Returns the parts, how many were reused, and how many rows were read to make the others.
    """
    kept = {p.fingerprint: part for p in planned if (part := load_kept_part(work.store, work.folder, p.fingerprint))}
    missing = [p for p in planned if p.fingerprint not in kept]
    make = partial(_make_and_keep, function, work.store, work.folder)
    made = work.pool.map(make, [p.task for p in missing], size_bytes=sum(p.size_bytes for p in missing))
    for part, plan in zip(_report_progress(work, made, missing), missing, strict=True):
        kept[plan.fingerprint] = part
    return [kept[p.fingerprint] for p in planned], len(planned) - len(missing), sum(p.rows for p in missing)


def _make_and_keep(function: Callable[[TaskT], Part], store: Store, stage_folder: str, task: TaskT) -> Part:
    part = function(task)
    save_kept_part(store, stage_folder, part)
    return part


def _report_progress(work: StageContext, made: Iterator[Part], planned: Sequence[PartTask]) -> Iterator[Part]:
    """Pass parts through and tell whoever listens how far the stage is."""
    begin, rows, tokens = time.monotonic(), 0, 0
    for done, part in enumerate(made, 1):
        rows += planned[done - 1].rows
        tokens += int(part.facts.get("tokens", 0))
        if work.progress is not None:
            seconds = time.monotonic() - begin
            where = "/".join(work.key[1:])
            work.progress(where, done=done, total=len(planned), rows=rows, tokens=tokens, seconds=seconds)
        yield part


@contextmanager
def scratch_folder(work: StageContext) -> Generator[Path]:
    """Lend a local folder for files that are mapped while tokens move; beside the stage if its store is local."""
    beside = Path(work.store.path(work.folder)) if work.store.is_local else None
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=beside) as name:
        try:
            yield Path(name)
        finally:
            gather.drop_scratch_maps()


def scan_rows(store: Store, files: Sequence[File], columns: Sequence[str]) -> pl.LazyFrame:
    """Return some columns of Parquet files as one lazy frame; read as it streams where the files are local."""
    if store.is_local:
        for file in files:
            store.content(file)
        return pl.scan_parquet([store.path(file.path) for file in files]).select(columns)
    tables = [cast("pl.DataFrame", pl.from_arrow(store.table(file, columns))) for file in files]
    return pl.concat(tables).lazy()


SHOWN_REASONS = 10
"""Reasons that the check on rejects names."""


def describe_rejects(
    reasons: Mapping[str, int], samples: Mapping[str, Sequence[str]], place_of: Callable[[int, str], str] | None = None
) -> tuple[str, ...]:
    """Word each reason of rejects with its count and its first row, the commonest first.

    `place_of` is given the rank of the reason, from 0, and the row's id.
    """
    most_first = sorted(reasons.items(), key=lambda one: (-one[1], one[0]))[:SHOWN_REASONS]
    return tuple(
        f"{reason}: {count:,}, the first is {place_of(rank, first) if place_of else first}"
        for rank, (reason, count) in enumerate(most_first)
        for first in samples.get(reason, ())[:1]
    )


def collect_samples(parts: Sequence[Part], fact: str, limit: int = 10) -> dict[str, tuple[str, ...]]:
    """Collect the first ids per reason over parts, ten at most."""
    found: dict[str, list[str]] = {}
    for part in parts:
        for reason, ids in part.facts.get(fact, {}).items():
            held = found.setdefault(reason, [])
            held.extend(ids[: limit - len(held)])
    return {reason: tuple(ids) for reason, ids in sorted(found.items())}


def format_rejected(rejected: int) -> str:
    """Word how many records a stage rejected; empty if none."""
    return f"{rejected:,} rejected" if rejected else ""


def compute_share(count: float, total: float) -> float:
    """Return a share, 0 of nothing, rounded so that it is the same number on every machine."""
    return round(count / total, 9) if total else 0.0
