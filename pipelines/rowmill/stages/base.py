"""What every stage is made of: its declaration, which all else is derived from, and the context that it runs in.

The stages, one module each: what is done to all parts of a dataset, or to all datasets of a recipe.

| stage | per | reads | writes |
|---|---|---|---|
| `raw_dataset` | dataset | source files | scans: parts with digests |
| `canonical_rows` | dataset | parts | rows, rejects, ledger per part |
| `tokenized_examples` | dataset | rows | examples, rejects, ledger per part |
| `truncation_stats` | dataset | examples' lengths | histograms, what-if |
| `packed_shards` | dataset | examples | shards, segments, examples left out |
| `training_splits` | recipe | sequences' counts | the order |
| `gpu_partitions` | recipe | the order, shards | shards per rank |
| `exports` | export | the order, shards | a trainer's files |
| `parsed_records` | dataset | files of generated text | records, refused objects |
| `generated_series` | dataset | examples, rows, a trained model | records |

Larger stages are packages, whose other modules hold parts of their work: `time_splits` of canonical rows, `pack_plans`
and `shard_files` of packed shards, `leakage` of training splits.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import polars as pl

from rowmill.checks.judge import CheckResult
from rowmill.core.storage import File, Store, digest_json, read_tables
from rowmill.executors import Executor, OtherSharesMissingError, Share
from rowmill.parts.functions import (
    InputsT,
    MappedParts,
    PartFunction,
    PartLists,
    PartPlace,
    batch_tasks,
    identify,
    make_and_keep,
    part_folder,
)
from rowmill.recipe.recipe import Dataset, Recipe
from rowmill.schema.manifest import (
    DisplayTable,
    Histogram,
    Manifest,
    Part,
    StageKey,
    get_stage_folder,
    get_stage_name,
)
from rowmill.stats import StatsInputs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# ── The stages, one module each: what is done to all parts of a dataset, or to all datasets of a recipe ──


class ProgressCallback(Protocol):
    """Callback that receives a stage's progress."""

    def __call__(
        self, where: str, *, done: int, total: int, rows: int, total_rows: int, tokens: int, seconds: float
    ) -> None:
        """Receive progress: `done` of `total` parts of `where` (`chats/canonical_rows`) are finished.

        The first call comes before any part is made; `rows` of `total_rows` input rows are in finished parts.
        """
        ...


@dataclass(frozen=True, slots=True)
class StageContext:
    """What a stage receives: its place, its inputs, and the executor."""

    recipe: Recipe
    store: Store
    base: Path
    key: StageKey
    dataset_name: str | None
    inputs: Mapping[StageKey, Manifest]
    pool: Executor
    progress: ProgressCallback | None = None
    ranks: Sequence[str] = ()
    share: Share | None = None
    """The only parts to make; the stage ends where it needs parts of other shares."""
    part_lists: PartLists = field(default_factory=PartLists)
    mapped: set[str] = field(default_factory=set[str])
    """Fingerprints of all parts of this run's maps, which garbage collection keeps for the next build."""

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
        """Recipe and dataset, the prefix of the keys of this dataset's stages."""
        assert self.dataset_name is not None
        return (self.recipe.name, self.dataset_name)

    def input(self, stage: str) -> Manifest:
        """Return the manifest of another stage of the same dataset."""
        return self.inputs[(*self.dataset_key, stage)]

    def map(self, function: PartFunction[InputsT], inputs: Sequence[InputsT], *, shared: object = None) -> MappedParts:
        """Return a part for each of the inputs: finished ones are reused, the others are made by the executor.

        Equal inputs give one part, made once. `shared` is handed to the function after the place, and sent once per
        worker.

        Raises
        ------
        OtherSharesMissingError
            If a share is made, and parts of others are not finished.

        """
        names = [function.identify(each) for each in inputs]
        self.mapped.update(names)
        finished = self.part_lists.find_parts(self.store, self.folder, function.name, names)
        missing = {name: each for name, each in zip(names, inputs, strict=True) if name not in finished}
        chosen = self.select_share(missing)
        threads = 1
        if function.uses_threads and chosen and not self.pool.spans_hosts:
            # More than one thread for each part if there are fewer than two parts per worker.
            # A cluster reserves one core for a task, so there it is one.
            threads = min(self.pool.workers, -(-2 * self.pool.workers // len(chosen)))
        if function.uses_threads:
            chosen = sorted(chosen, key=lambda name: missing[name].input_bytes, reverse=True)
        tasks = [(missing[name], PartPlace(self.store, self.folder, name, threads)) for name in chosen]
        batches = batch_tasks(tasks, self.pool.workers) if function.makes_many else [[task] for task in tasks]
        size = sum(each.input_bytes for each, _ in tasks)
        made = self.pool.map(partial(make_and_keep, function), batches, size_bytes=size, shared=shared)
        for part in self._report_progress(chain.from_iterable(made), [each.input_rows for each, _ in tasks]):
            finished[part.fingerprint] = part
        self.require_all_shares(chosen, missing)
        # Shares run at once, and each would overwrite the others' list.
        if self.share is None:
            reusable = [part for part in finished.values() if function.is_reusable(part)]
            self.part_lists.add_parts(self.store, self.folder, function.name, reusable)
        return MappedParts(
            [finished[name] for name in names],
            sum(name not in missing for name in names),
            sum(each.input_rows for each in missing.values()),
        )

    def place(self, *identity: object) -> PartPlace:
        """Return the place of a part that the stage itself makes, without a map, from what decides its content."""
        return PartPlace(self.store, self.folder, digest_json(*map(identify, identity)))

    def drop_parts(self, parts: Sequence[Part]) -> None:
        """Remove parts of a map that no later build needs."""
        for part in parts:
            self.store.remove(part_folder(self.folder, part.fingerprint))
            self.mapped.discard(part.fingerprint)

    def select_share(self, missing: Iterable[str]) -> list[str]:
        """Return those fingerprints of missing parts that this process makes: all of them, except for a share."""
        return [name for name in missing if self.share is None or self.share.has(name)]

    @staticmethod
    def require_all_shares(chosen: Sized, missing: Sized) -> None:
        """End the stage here if other shares have to make some of the parts that were missing."""
        if len(chosen) < len(missing):
            raise OtherSharesMissingError(len(chosen), len(missing) - len(chosen))

    def _report_progress(self, made: Iterator[Part], rows: Sequence[int]) -> Iterator[Part]:
        """Pass parts through, and report before the first part and after each how far the stage is."""
        begin, rows_done, tokens = time.monotonic(), 0, 0

        def report(done: int) -> None:
            if self.progress is not None and rows:
                self.progress(
                    "/".join(self.key[1:]),
                    done=done,
                    total=len(rows),
                    rows=rows_done,
                    total_rows=sum(rows),
                    tokens=tokens,
                    seconds=time.monotonic() - begin,
                )

        report(0)
        for done, part in enumerate(made, 1):
            rows_done += rows[done - 1]
            tokens += int(part.facts.get("tokens", 0))
            report(done)
            yield part


@dataclass(slots=True)
class StageOutput:
    """A stage's output before it becomes a manifest; the fields are those of `manifest.Manifest`."""

    facts: "DataclassInstance"
    """Its facts, an instance of the stage's declared type."""
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
    """A stage ready to run: `outside` identifies its other inputs besides recipe and stages, `make` does the work.

    `outside` holds JSON values: digests of source files, of tokenizer files, of the template's text. `accepts` tells
    whether an output that is kept under the same fingerprint may be taken for one that is made now: not if it was made
    after another output than the current one, and reads that.
    """

    outside: tuple[Any, ...]
    make: Callable[[], StageOutput]
    accepts: Callable[[Manifest], bool] = _accept_any


Scope = Literal["dataset", "recipe", "export"]
"""Whether a stage runs for each dataset, for the whole recipe, or for each export."""


Publish = Callable[[StageContext, Manifest, Sequence[CheckResult], Sequence[str]], None]
"""Publishes an output for trainers if no check blocks, with its check results and the loosened bounds."""


@dataclass(frozen=True, slots=True)
class ComparedFact:
    """A fact that `rowmill diff` compares, with its display name."""

    name: str
    fact: str
    is_share: bool = False


def _summarize_rows(facts: object, rows: str) -> Sequence[str]:
    del facts
    return (rows,)


def _share_nothing(output: Manifest) -> tuple[str, ...]:
    del output
    return ()


def _applies_to_all(dataset: Dataset) -> bool:
    del dataset
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDeclaration:
    """Everything known about a stage without running it, declared once, in the stage's module.

    `catalog.STAGES` lists the declarations in order. The graph, the plan, the runner and Dagster's assets are made
    from that list, so adding a stage takes its module and one line there.
    """

    name: str
    """The last part of its key (for exports, the one before the name), and a folder name in storage."""
    description: str
    """One sentence for users that describes the output."""
    identity: Callable[[Recipe, str], dict[str, Any]]
    """Every option that the stage reads, of the dataset or the export of that name, and the versions of the code that
    reads them, as explicit JSON values. Both identities below are computed from it, so that a build never remakes what
    Dagster calls fresh."""
    prepare: Callable[[StageContext], PreparedStage]
    """Identify the stage's other inputs, such as tokenizer files, and return the function that runs it."""
    facts: "type[DataclassInstance]"
    """The frozen dataclass of its facts; every check of the stage is named after one of its fields."""
    scope: Scope = "dataset"
    inputs: tuple[str, ...] = ()
    """Names of the stages that it reads: of the same dataset, or, for a stage of the recipe, of every dataset. A stage
    without inputs reads source files."""
    gates: tuple[str, ...] = ()
    """Names of other stages of the dataset whose checks must pass first although it does not read them."""
    gates_on_every_dataset: bool = False
    """Whether the checks of all stages of all datasets must pass first."""
    applies: Callable[[Dataset], bool] = _applies_to_all
    """Whether a dataset has the stage."""
    command: str = ""
    """The command that runs it, for on-demand stages, which need a trained model."""

    divides_into_shares: bool = False
    """Whether `rowmill work` makes its parts: only where `make_parts` does nearly all of the work."""

    # Hooks of the runner.
    require_ready: Callable[[StageContext], None] | None = None
    """Raise ConfigError if a requirement outside the storage root is missing; called before a build."""
    find_outside_change: Callable[[StageContext, Manifest], str | None] | None = None
    """Describe what changed outside the recipe and the inputs since an earlier output, or return None."""
    publish: Publish | None = None
    """Publish an output for trainers; None for stages whose output the reader does not open."""

    list_shared_inputs: Callable[[Manifest], tuple[str, ...]] = _share_nothing
    """Names of the inputs whose files readers of an output open, because it names them instead of copying them."""

    # Hooks of reports and statistics.
    stats_inputs: StatsInputs = field(default_factory=StatsInputs)
    """The rows of an output with their noun, and the statistics tables that it contributes to."""
    summarize: Callable[[Any, str], Sequence[str]] = _summarize_rows
    """Summarize an output in a few phrases, from its facts (of the type above) and its number of rows (`1,342 rows`, or
    empty)."""
    compared: tuple[ComparedFact, ...] = ()
    """The facts that a comparison of two versions shows."""
    find_content_damage: Callable[[Store, Manifest], Iterator[str]] | None = None
    """Compare the files' content with the content hashes of the manifest; yield a message per difference."""

    # Hooks of the Dagster layer.
    uses_all_cores: bool = False
    """Whether it uses all workers, so that two such stages at once would compete for cores."""
    partitions: Callable[[Recipe], tuple[str, ...]] | None = None
    """Names of the independent pieces of its output; None if there is only one."""
    shows_overdue: bool = False
    """Whether `execution.overdue_hours` applies to this stage."""

    @property
    def on_demand(self) -> bool:
        """Whether a build includes it only on request."""
        return bool(self.command)

    def code_version(self, recipe: Recipe, name: str, waivers: Sequence[str]) -> str:
        """Return the digest of options, waivers and code version, which Dagster compares before reading anything."""
        return digest_json(self.name, name, self.identity(recipe, name), list(waivers))[:16]

    @staticmethod
    def fingerprint(
        code_version: str, inputs: Mapping[str, str], waivers: Sequence[str], outside: Sequence[Any]
    ) -> str:
        """Return the identity of an output before it is made: the code version, and everything outside the recipe.

        `inputs` maps the keys of its inputs to content versions; `waivers` are all that apply.
        """
        return digest_json(code_version, dict(inputs), list(waivers), list(outside))


def scan_rows(store: Store, files: Sequence[File], columns: Sequence[str]) -> pl.LazyFrame:
    """Return some columns of part files as one lazy frame; local files are read in streaming mode."""
    if store.is_local:
        for file in files:
            store.content(file)
        return pl.scan_ipc([store.path(file.path) for file in files]).select(columns)
    tables = read_tables(store, files, columns)
    return pl.concat([cast("pl.DataFrame", pl.from_arrow(table)) for table in tables]).lazy()


def collect_samples(parts: Sequence[Part], fact: str, limit: int = 10) -> dict[str, tuple[str, ...]]:
    """Collect the first ids per reason over parts, ten at most."""
    found: dict[str, list[str]] = {}
    for part in parts:
        for reason, ids in part.facts.get(fact, {}).items():
            held = found.setdefault(reason, [])
            held.extend(ids[: limit - len(held)])
    return {reason: tuple(ids) for reason, ids in sorted(found.items())}


def format_rejected(rejected: int) -> str:
    """Format the number of rejected records; empty if none."""
    return f"{rejected:,} rejected" if rejected else ""


def compute_share(count: float, total: float) -> float:
    """Return a share, 0 if the total is 0, rounded so that it is equal on every machine.

    Raises
    ------
    ValueError
        If more are counted than there are: the two numbers count different things, such as rows before and after
        duplicates were removed.

    """
    if count > total:
        raise ValueError(f"{count:,} of {total:,} is no share: both must count the same rows, those that are written")
    return round(count / total, 9) if total else 0.0
