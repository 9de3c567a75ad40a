"""What a stage is made of: its declaration, its context, and the parts that its work is cut into.

Finished parts of a stage, which later builds find under their fingerprints.

    <stage>/parts/<fingerprint>/part.json    one part is complete; written after its files
    <stage>/kept_parts/<function>.json       the records of all parts that a function made; on object stores alone

On an object store a record per part would be a request per part; the list is one. A stage may map a function more than
once: its list then has the parts of all of its maps.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import polars as pl

from rowmill.checks.judge import CheckResult
from rowmill.core.remote_index import CONCURRENT_REQUESTS
from rowmill.core.storage import File, Store, digest_json, read_tables
from rowmill.executors import Executor, OtherSharesMissingError, Share
from rowmill.recipe.recipe import Dataset, Recipe
from rowmill.schema.manifest import (
    KEPT_PARTS_FOLDER,
    DisplayTable,
    Histogram,
    Manifest,
    Part,
    StageKey,
    get_stage_folder,
    get_stage_name,
    parse_part,
)
from rowmill.stats import StatsInputs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def part_folder(stage_folder: str, fingerprint: str) -> str:
    """Return the folder of a part's files."""
    return f"{stage_folder}/parts/{fingerprint}"


def load_kept_part(store: Store, stage_folder: str, fingerprint: str) -> Part | None:
    """Return a part that an earlier build finished, even if that build was killed later."""
    raw = store.read_sealed(f"{part_folder(stage_folder, fingerprint)}/part.json")
    part = None if raw is None else parse_part(raw)
    return part if part is not None and all(store.has(file) for file in part.files.values()) else None


def save_kept_part(store: Store, stage_folder: str, part: Part) -> None:
    """Record that a part is complete; written after its files."""
    store.write_sealed(f"{part_folder(stage_folder, part.fingerprint)}/part.json", part)


@dataclass(slots=True)
class _PartList:
    """The parts of a function: those listed when the run began, those of the run, and what the list names now."""

    earlier: Mapping[str, Part]
    current: dict[str, Part] = field(default_factory=dict[str, Part])
    written: frozenset[str] = frozenset()


class PartLists:
    """The lists of finished parts of a stage, one per function, for the length of one run of the stage."""

    def __init__(self) -> None:
        """Begin with no list; each is read when it is first asked for."""
        self._lists: dict[str, _PartList] = {}

    def find_parts(self, store: Store, folder: str, function: str, fingerprints: Sequence[str]) -> dict[str, Part]:
        """Return the finished parts among some, by fingerprint; on an object store from the list of the last build."""
        if store.is_local:
            loaded = [load_kept_part(store, folder, name) for name in fingerprints]
            return {part.fingerprint: part for part in loaded if part is not None}
        earlier = self._open(store, folder, function).earlier
        found = {
            name: earlier[name]
            for name in fingerprints
            if name in earlier and all(store.has(file) for file in earlier[name].files.values())
        }
        others = [name for name in dict.fromkeys(fingerprints) if name not in found]
        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as threads:
            loaded = list(threads.map(partial(load_kept_part, store, folder), others))
        return found | {part.fingerprint: part for part in loaded if part is not None}

    def add_parts(self, store: Store, folder: str, function: str, parts: Iterable[Part]) -> None:
        """Have the list name these parts and those of the run's other maps, so that the next build reads it alone."""
        if store.is_local:
            return
        own = self._open(store, folder, function)
        own.current |= {part.fingerprint: part for part in parts}
        if not own.current.keys() <= own.written:
            store.write_sealed_list([_list_path(folder, function)], {"parts": own.current})
            own.written = frozenset(own.current)

    def _open(self, store: Store, folder: str, function: str) -> _PartList:
        if function not in self._lists:
            raw = store.read_sealed(_list_path(folder, function)) or {}
            earlier = {str(name): parse_part(one) for name, one in raw.get("parts", {}).items()}
            self._lists[function] = _PartList(earlier, written=frozenset(earlier))
        return self._lists[function]


def _list_path(folder: str, function: str) -> str:
    return f"{folder}/{KEPT_PARTS_FOLDER}/{function}.json"


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
    """What was made for this build already, which is not counted as reused."""
    part_lists: PartLists = field(default_factory=PartLists)

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


# ── Parts ──────────────────────────────────────────────────────────────────────────────────────────


BATCH_BYTES = 4 << 20
"""Maximum size of the parts that are made together: their fixed cost is then small, and so is the memory."""


@dataclass(frozen=True, slots=True)
class PartTask:
    """A part to make or reuse: its fingerprint, its task, and the size of its input."""

    fingerprint: str
    task: Any
    rows: int
    size_bytes: int


class _PlannedPart(Protocol):
    @property
    def fingerprint(self) -> str: ...


PlannedT = TypeVar("PlannedT", bound=_PlannedPart)


def select_own_parts(context: StageContext, missing: Sequence[PlannedT]) -> Sequence[PlannedT]:
    """Return those of the missing parts that this process makes: all of them, except for a share."""
    return missing if context.share is None else [one for one in missing if context.share.has(one.fingerprint)]


def require_all_shares(own: Sequence[object], missing: Sequence[object]) -> None:
    """End the stage here if other shares have to make some of the parts that were missing."""
    if len(own) < len(missing):
        raise OtherSharesMissingError(len(own), len(missing) - len(own))


def _is_always_reusable(_: Part) -> bool:
    return True


def make_parts(
    context: StageContext,
    function: Callable[..., Part],
    planned: Sequence[PartTask],
    *,
    is_reusable: Callable[[Part], bool] = _is_always_reusable,
    shared: object = None,
    set_threads: Callable[[Any, int], Any] | None = None,
    make_many: Callable[[Sequence[Any]], list[Part]] | None = None,
) -> tuple[list[Part], int, int]:
    """Return all parts in order: kept ones are reused, the others are made by the executor.

    Later builds make a part again that is not `is_reusable`, a module-level function. `function` is given a task, and
    what is `shared` if there is such. Returns the parts, how many were reused, and how many rows were read to make the
    others. `set_threads`, for a stage with few tasks of uneven size, returns a task that may use so many threads: the
    largest tasks then begin first, and use the cores for which there is no task. `make_many`, for a stage of small
    parts with a fixed cost, makes the same parts as `function`, of several tasks at once.

    Raises
    ------
    OtherSharesMissingError
        If a share is made, and parts of others are not finished.

    """
    names = [p.fingerprint for p in planned]
    kept = context.part_lists.find_parts(context.store, context.folder, function.__name__, names)
    missing = [p for p in planned if p.fingerprint not in kept]
    share = select_own_parts(context, missing)
    if set_threads is not None:
        # More than one thread for each task if there are fewer than two tasks per worker.
        # A cluster reserves one core for a task, so there it is one.
        pool = context.pool
        threads = 1 if pool.spans_hosts or not share else min(pool.workers, -(-2 * pool.workers // len(share)))
        largest_first = sorted(share, key=lambda plan: plan.size_bytes, reverse=True)
        share = [replace(plan, task=set_threads(plan.task, threads)) for plan in largest_first]
    size = sum(p.size_bytes for p in share)
    if make_many is None:
        make = partial(_make_and_keep, function, is_reusable, context.store, context.folder)
        results = context.pool.map(make, [p.task for p in share], size_bytes=size, shared=shared)
    else:
        make_batch = partial(_make_and_keep_many, make_many, is_reusable, context.store, context.folder)
        batches = _batch_tasks(share, context.pool.workers)
        results = chain.from_iterable(context.pool.map(make_batch, batches, size_bytes=size, shared=shared))
    for part, plan in zip(_report_progress(context, results, share), share, strict=True):
        kept[plan.fingerprint] = part
    require_all_shares(share, missing)
    # Shares run at once, and each would overwrite the others' list.
    if context.share is None:
        reusable = [part for part in kept.values() if is_reusable(part)]
        context.part_lists.add_parts(context.store, context.folder, function.__name__, reusable)
    return [kept[p.fingerprint] for p in planned], len(planned) - len(missing), sum(p.rows for p in missing)


def _make_and_keep(
    function: Callable[..., Part],
    is_reusable: Callable[[Part], bool],
    store: Store,
    stage_folder: str,
    *given: object,
) -> Part:
    part = function(*given)
    if is_reusable(part):
        save_kept_part(store, stage_folder, part)
    return part


def _make_and_keep_many(
    make_many: Callable[..., list[Part]],
    is_reusable: Callable[[Part], bool],
    store: Store,
    stage_folder: str,
    *given: object,
) -> list[Part]:
    parts = make_many(*given)
    for part in filter(is_reusable, parts):
        save_kept_part(store, stage_folder, part)
    return parts


def _batch_tasks(planned: Sequence[PartTask], workers: int) -> list[list[Any]]:
    """Return the tasks in batches of at most `BATCH_BYTES`, and smaller ones if each worker would get fewer than 4."""
    limit = min(BATCH_BYTES, sum(one.size_bytes for one in planned) // (4 * workers))
    batches: list[list[Any]] = []
    size = 0
    for one in planned:
        if not batches or size + one.size_bytes > limit:
            batches.append([])
            size = 0
        batches[-1].append(one.task)
        size += one.size_bytes
    return batches


def _report_progress(context: StageContext, made: Iterator[Part], planned: Sequence[PartTask]) -> Iterator[Part]:
    """Pass parts through, and report before the first part and after each how far the stage is."""
    begin, rows, tokens, total_rows = time.monotonic(), 0, 0, sum(plan.rows for plan in planned)

    def report(done: int) -> None:
        if context.progress is not None and planned:
            where, seconds = "/".join(context.key[1:]), time.monotonic() - begin
            context.progress(
                where, done=done, total=len(planned), rows=rows, total_rows=total_rows, tokens=tokens, seconds=seconds
            )

    report(0)
    for done, part in enumerate(made, 1):
        rows += planned[done - 1].rows
        tokens += int(part.facts.get("tokens", 0))
        report(done)
        yield part


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
